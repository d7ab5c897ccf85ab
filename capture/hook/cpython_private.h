/* Every name of CPython's that is not part of its stable or documented API, and nothing else of ours.
 *
 * name                                    3.11    3.12    3.13    3.14    used for
 * --------------------------------------- ------- ------- ------- ------- ------------------------------------------
 * PyDictObject.ma_version_tag             yes     deprec. deprec. -       a dict that was not written to
 * PyDictObject.ma_values                  yes     yes     yes     yes     3.13.0: instance dicts whose tag misses writes
 * PySetObject.table and its kin           yes     yes     yes     yes     a copy of a set with its hash table and gaps
 * PyTypeObject.tp_version_tag             yes     yes     yes     yes     a class (and its bases) that was not written to
 * PyUnstable_Type_AssignVersionTag        -       yes     yes     yes     a watcher tells of a class that has one only
 * _PyType_Lookup                          yes     yes     yes     yes     MRO look-up without descriptors; borrowed
 * _PyDict_MergeEx                         yes     yes     intern. intern. `f(**a, **b)`: no key twice, compared as there
 * _PyObject_GetDictPtr                    yes     yes     yes     yes     where an instance keeps its __dict__
 * struct _PyInterpreterFrame              f_func  f_funcobj      tagged   the frame that the evaluator is about to run
 *   code                                  f_code  f_code  f_executable, tagged in 3.14
 *   next instruction                      prev_instr + 1  instr_ptr
 *   owner, frame_obj, localsplus          yes     yes     yes     tagged
 *   how far its stack goes                stacktop                stackpointer
 *   f_locals                              yes     yes     yes     yes     the namespace of a module's or class body's frame
 * _PyStackRef and its inline functions    -       -       -       yes     what is tagged: whether it counts a reference
 * PyTypeObject._tp_iteritem               -       -       -       -       3.15: a type that a loop counts through
 * PyFrameObject.f_frame                   yes     yes     yes     yes     a frame object's variables
 * PyThreadState recursion counter         recursion_remaining     py_recursion_remaining (3.12 and later)
 * PyThreadState counter of C recursion    -       c_recursion_remaining   -   its limit C_RECURSION_LIMIT or Py_C_…
 * _PyInterpreterState_{Get,Set}EvalFrameFunc  PEP 523, all of them        the frame hook
 * _PyEval_EvalFrameDefault                yes     yes     yes     yes     CPython's own evaluator
 * _PyEval_RequestCodeExtraIndex           yes     PyUnstable_Eval_RequestCodeExtraIndex
 * _PyCode_GetExtra, _PyCode_SetExtra      yes     PyUnstable_Code_GetExtra, _SetExtra: what we know of a code object
 *
 * Read in the headers of 3.11.7, 3.12.1, 3.13.0 and 3.14.8 and run on them. The struct layouts come from the headers of the
 * Python that this is built for, so another patch release needs a rebuild at most.
 */
#ifndef MOEBIUS_CPYTHON_PRIVATE_H
#define MOEBIUS_CPYTHON_PRIVATE_H

#include <Python.h>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x03100000
#error "moebius supports CPython 3.11 to 3.15. Build it with one of those (see README.md)."
#endif
#ifdef Py_GIL_DISABLED
#error "moebius does not support the free-threaded build of CPython yet. Build it with the default build of 3.11-3.15."
#endif
#if defined(PYPY_VERSION) || defined(GRAALVM_PYTHON)
#error "moebius needs CPython: its frame hook is PEP 523, which other Pythons lack."
#endif

#ifdef MOEBIUS_NEEDS_FRAMES
#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE 1
#endif
#undef _PyGC_FINALIZED /* 3.12 has a macro and an internal function of that name */
#include <internal/pycore_frame.h>
#if PY_VERSION_HEX >= 0x030C0000
#include <internal/pycore_interp.h>
#endif
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe.h>
#endif
#include <opcode.h>
#undef Py_BUILD_CORE

typedef struct _PyInterpreterFrame mb_Frame;

/* What a frame keeps its code, function and variables in: a plain pointer up to 3.13, a tagged one from 3.14. */
#if PY_VERSION_HEX >= 0x030E0000
typedef _PyStackRef mb_Slot;

static inline PyObject *
mb_slot_object(mb_Slot slot)
{
    return PyStackRef_IsNull(slot) ? NULL : PyStackRef_AsPyObjectBorrow(slot);
}

static inline void
mb_set_slot(mb_Slot *slot, PyObject *object)
{
    mb_Slot old = *slot;
    *slot = object == NULL ? PyStackRef_NULL : PyStackRef_FromPyObjectNew(object);
    PyStackRef_XCLOSE(old);
}
#else
typedef PyObject *mb_Slot;

static inline PyObject *
mb_slot_object(mb_Slot slot)
{
    return slot;
}

static inline void
mb_set_slot(mb_Slot *slot, PyObject *object)
{
    Py_XSETREF(*slot, Py_XNewRef(object));
}
#endif

static inline PyCodeObject *
mb_frame_code(mb_Frame *frame)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *executable = mb_slot_object(frame->f_executable);
    return executable != NULL && PyCode_Check(executable) ? (PyCodeObject *)executable : NULL;
#else
    return frame->f_code;
#endif
}

static inline PyObject *
mb_frame_function(mb_Frame *frame)
{
#if PY_VERSION_HEX >= 0x030C0000
    return mb_slot_object(frame->f_funcobj);
#else
    return (PyObject *)frame->f_func;
#endif
}

/* Borrowed; NULL where there is none. */
static inline PyObject *
mb_frame_argument(mb_Frame *frame, int i)
{
    return mb_slot_object(frame->localsplus[i]);
}

/* All of them, one after the other; NULL where they are tagged. */
static inline PyObject *const *
mb_frame_arguments(mb_Frame *frame)
{
#if PY_VERSION_HEX >= 0x030E0000
    (void)frame;
    return NULL;
#else
    return frame->localsplus;
#endif
}

/* Owned by a call (not by a generator), arguments in place, no instruction run yet. */
static inline int
mb_frame_is_fresh(mb_Frame *frame, PyCodeObject *code)
{
#if PY_VERSION_HEX >= 0x030E0000
    Py_ssize_t height = frame->stackpointer - frame->localsplus;
#else
    Py_ssize_t height = frame->stacktop;
#endif
    if (frame->owner != FRAME_OWNED_BY_THREAD || frame->frame_obj != NULL || height != code->co_nlocalsplus) {
        return 0;
    }
#if PY_VERSION_HEX >= 0x030D0000
    return frame->instr_ptr == _PyCode_CODE(code);
#else
    return frame->prev_instr == _PyCode_CODE(code) - 1;
#endif
}

#if PY_VERSION_HEX >= 0x030C0000
/* Makes a fresh frame run `code` instead; its locals stay where they are and are cleared by the evaluator. */
static inline void
mb_frame_swap_code(mb_Frame *frame, PyCodeObject *code)
{
    /* the frame's function holds the old one still */
#if PY_VERSION_HEX >= 0x030D0000
    mb_set_slot(&frame->f_executable, (PyObject *)code);
    frame->instr_ptr = _PyCode_CODE(code);
#else
    Py_SETREF(frame->f_code, (PyCodeObject *)Py_NewRef(code));
    frame->prev_instr = _PyCode_CODE(code) - 1;
#endif
}
#endif

/* A generator's frame into which an exception is thrown before its first instruction ran. Up to 3.11 closing it evaluates. */
static inline int
mb_frame_never_started(mb_Frame *frame)
{
#if PY_VERSION_HEX >= 0x030C0000
    (void)frame;
    return 0;
#else
    return frame->owner == FRAME_OWNED_BY_GENERATOR && _Py_OPCODE(*frame->prev_instr) == RETURN_GENERATOR;
#endif
}

/* A variable of a frame that has a frame object becomes `value`, or is unset. */
static inline void
mb_set_frame_variable(PyFrameObject *frame, int i, PyObject *value)
{
    mb_set_slot(&frame->f_frame->localsplus[i], value);
}

/* The namespace of a frame that has a frame object and whose code is a module's or a class body's. */
static inline void
mb_set_frame_names(PyFrameObject *frame, PyObject *names)
{
    Py_XSETREF(frame->f_frame->f_locals, Py_NewRef(names));
}

/* Nothing is being handled from here on, whoever calls; until mb_handle_again. `item` is the caller's. */
static inline _PyErr_StackItem *
mb_handle_nothing(PyThreadState *tstate, _PyErr_StackItem *item)
{
    _PyErr_StackItem *before = tstate->exc_info;
    item->exc_value = NULL;
    item->previous_item = NULL;
    tstate->exc_info = item;
    return before;
}

static inline void
mb_handle_again(PyThreadState *tstate, _PyErr_StackItem *before)
{
    PyObject *left = tstate->exc_info->exc_value;
    tstate->exc_info = before;
    Py_XDECREF(left);
}

/* What take_ownership (Python/frame.c) leaves a frame object whose call is over: its caller's; and, up to 3.12, the dict
   that locals() gave, or NULL. */
static inline void
mb_link_frame(PyFrameObject *frame, PyFrameObject *back, PyObject *locals)
{
    Py_XSETREF(frame->f_back, (PyFrameObject *)Py_XNewRef((PyObject *)back));
    if (locals != NULL) {
        Py_XSETREF(frame->f_frame->f_locals, Py_NewRef(locals));
    }
}

/* The event of sys.monitoring that a line is, and the last of those that are inside of a call (jumps, branches). */
#define MB_EVENT_LINE 5
#define MB_EVENT_BRANCH 9
#define MB_PROFILER (1 << 2)
#define MB_MONITORING_TOOLS 0x3F

/* Whether a tool of sys.monitoring (from 3.12) follows all code: its lines, or, if it is no profiler, anything of it.
   sys.settrace and sys.setprofile are tools too, with numbers of their own: not asked here. */
static inline int
mb_is_monitored(PyThreadState *tstate)
{
#if PY_VERSION_HEX >= 0x030C0000
    const uint8_t *tools = tstate->interp->monitors.tools;
    int any = 0, inside = 0;
    for (int event = 0; event < _PY_MONITORING_UNGROUPED_EVENTS; event++) {
        any |= tools[event];
        inside |= event >= MB_EVENT_LINE && event <= MB_EVENT_BRANCH ? tools[event] : 0;
    }
    return ((any & ~MB_PROFILER) | inside) & MB_MONITORING_TOOLS;
#else
    (void)tstate;
    return 0;
#endif
}

/* Calls of Python functions that may still be nested. */
static inline int
mb_recursion_room(PyThreadState *tstate)
{
#if PY_VERSION_HEX >= 0x030C0000
    return tstate->py_recursion_remaining;
#else
    return tstate->recursion_remaining;
#endif
}
#endif

#if PY_VERSION_HEX >= 0x030E0000
/* bounded by the address on the C stack */
#elif PY_VERSION_HEX >= 0x030D0000
#define MB_C_RECURSION_LIMIT Py_C_RECURSION_LIMIT
#elif PY_VERSION_HEX >= 0x030C0000
#define MB_C_RECURSION_LIMIT C_RECURSION_LIMIT
#endif
#ifdef MB_C_RECURSION_LIMIT
/* Levels of C recursion that may still be nested. */
static inline int *
mb_c_recursion_room(PyThreadState *tstate)
{
    return &tstate->c_recursion_remaining;
}
#endif

/* Whether a loop counts through the object, with a tagged number on the stack, and makes no iterator. */
static inline int
mb_is_counted(PyObject *object)
{
#if PY_VERSION_HEX >= 0x030F0000
    return Py_TYPE(object)->_tp_iteritem != NULL;
#else
    (void)object;
    return 0;
#endif
}

#if PY_VERSION_HEX >= 0x030F0000
PyAPI_FUNC(int) _PyDict_MergeUniq(PyObject *, PyObject *, PyObject **);
#elif PY_VERSION_HEX >= 0x030D0000
PyAPI_FUNC(int) _PyDict_MergeEx(PyObject *, PyObject *, int);
#endif

/* Puts all of `from` into `into`. KeyError of the key where both have one, -1. */
static inline int
mb_merge_unique(PyObject *into, PyObject *from)
{
#if PY_VERSION_HEX >= 0x030F0000
    PyObject *twice = NULL;
    int result = _PyDict_MergeUniq(into, from, &twice);
    if (twice != NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetObject(PyExc_KeyError, twice);
        }
        Py_DECREF(twice);
        result = -1;
    }
    return result;
#else
    return _PyDict_MergeEx(into, from, 2);
#endif
}

#include <stdint.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
/* Globally unique; changes with each write to the dict. From 3.14 it never does: selftest.c sees that, and watchers tell. */
static inline uint64_t
mb_dict_tag(PyObject *dict)
{
#if PY_VERSION_HEX >= 0x030E0000
    (void)dict;
    return 0;
#else
    return ((PyDictObject *)dict)->ma_version_tag;
#endif
}
#pragma GCC diagnostic pop

/* Whether the values live outside the dict's own table (split table; on 3.13 possibly inside the instance). */
static inline int
mb_dict_shares_values(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_values != NULL;
}

/* A set with the same hash table: its items stand, and new ones will stand, in the same order. set.copy() makes a table
 * without gaps, of another size. (Objects/setobject.c: a gap has hash -1, which no item has, and counts no reference.) */
static inline PyObject *
mb_copy_set(PyObject *from)
{
    PySetObject *old = (PySetObject *)from, *made = (PySetObject *)PySet_New(NULL);
    if (made == NULL) {
        return NULL;
    }
    size_t n = (size_t)old->mask + 1;
    if (old->table != old->smalltable) {
        setentry *table = PyMem_New(setentry, n);
        if (table == NULL) {
            Py_DECREF(made);
            return PyErr_NoMemory();
        }
        made->table = table;
    }
    for (size_t i = 0; i < n; i++) {
        made->table[i] = old->table[i];
        if (old->table[i].key != NULL && old->table[i].hash != -1) {
            Py_INCREF(old->table[i].key);
        }
    }
    made->fill = old->fill;
    made->used = old->used;
    made->mask = old->mask;
    made->finger = old->finger;
    return (PyObject *)made;
}

/* Changes when the class or one of its bases is written to; 0 when CPython has not given it one. */
static inline uint32_t
mb_type_tag(PyTypeObject *type)
{
    return type->tp_version_tag;
}

#if PY_VERSION_HEX >= 0x030C0000
/* 1 if the class has a version tag now; 0 when it had its share of them. */
static inline int
mb_assign_type_tag(PyTypeObject *type)
{
    return PyUnstable_Type_AssignVersionTag(type) == 1;
}
#endif

/* The class attribute that an instance's attribute access would meet first; borrowed; NULL without an error if none. */
static inline PyObject *
mb_type_lookup(PyTypeObject *type, PyObject *name)
{
    return _PyType_Lookup(type, name);
}

/* Where the instance keeps its __dict__ (made if need be); NULL if it has none. Not for classes. */
static inline PyObject **
mb_dict_pointer(PyObject *object)
{
    return _PyObject_GetDictPtr(object);
}

#if PY_VERSION_HEX >= 0x030C0000
#define mb_request_code_extra PyUnstable_Eval_RequestCodeExtraIndex
#define mb_code_get_extra PyUnstable_Code_GetExtra
#define mb_code_set_extra PyUnstable_Code_SetExtra
#else
#define mb_request_code_extra _PyEval_RequestCodeExtraIndex
#define mb_code_get_extra _PyCode_GetExtra
#define mb_code_set_extra _PyCode_SetExtra
#endif

#endif
