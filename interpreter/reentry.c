/* Python functions that C code calls while the machine has called that C code: their frames are handed back to the machine.
 *
 * PEP 523. A `Native` calls C code with the hook on for this thread; a frame that the evaluator is about to run beneath it
 * goes to the Native's handler instead, with the hook off, so the machine's own Python runs at full speed. Whatever hook was
 * there before (capture's, torch's) gets the frames that are not taken, and is put back.
 *
 * Frames by their globals' __name__: an opaque module (the machine's own) runs natively with the hook off beneath it; one
 * named in `transparent` runs natively with the hook still on beneath it; any other is taken. Not taken, and counted: frames
 * of generators that were made natively, and anything while no Native is at work (see `count`). */
#define _GNU_SOURCE
#define MOEBIUS_NEEDS_FRAMES
#include "cpython_private.h"

#include <pthread.h>
#include <stddef.h>
#include <structmember.h>

#define STACK_RESERVE (512 * 1024)    /* bytes of C stack left free: what C code may need between two of our checks */

static PyObject *opaque_prefixes;     /* tuple of str */
static PyObject *transparent;      /* frozenset of str */
static PyObject *str_name;

/* ---- this thread's state, and the hook that follows from it ---- */

typedef struct {
    PyObject *handler;    /* borrowed: the Native of the machine that runs in this thread holds it */
    int taking;           /* frames go to the handler: C code runs that the machine called */
    int inside;           /* a machine runs in this thread: frames that are not its own count */
} State;

static __thread State here;
static __thread PyObject *counts;     /* dict code -> int; NULL: nobody counts */
static __thread mb_Frame *passing;    /* handed to the hook below ours, which may hand it to us again */
static __thread int installed_here;
static int threads_on;
static _PyFrameEvalFunction below;

static PyObject *hook_eval(PyThreadState *, mb_Frame *, int);

static void
follow(void)
{
    int on = here.taking || (here.inside && counts != NULL);
    if (on == installed_here) {
        return;
    }
    installed_here = on;
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    if (on) {
        if (threads_on++ == 0 && now != hook_eval) {
            below = now;
            _PyInterpreterState_SetEvalFrameFunc(interpreter, hook_eval);
        }
    }
    else if (--threads_on == 0 && now == hook_eval) {
        _PyInterpreterState_SetEvalFrameFunc(interpreter, below);
    }
}

static PyObject *
pass_on(PyThreadState *tstate, mb_Frame *frame, int throwing)
{
    if (passing == frame || below == NULL || below == hook_eval || below == _PyEval_EvalFrameDefault) {
        return _PyEval_EvalFrameDefault(tstate, frame, throwing);
    }
    mb_Frame *before = passing;
    passing = frame;
    PyObject *result = below(tstate, frame, throwing);
    passing = before;
    return result;
}

/* ---- room on the C stack ---- */

static __thread char *stack_end;    /* the lowest address to use */

static Py_ssize_t
stack_left(void)
{
    char marker;
    if (stack_end == NULL) {
        pthread_attr_t attributes;
        void *base = NULL;
        size_t size = 0, guard = 0;
        if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
            pthread_attr_getstack(&attributes, &base, &size);
            pthread_attr_getguardsize(&attributes, &guard);
            pthread_attr_destroy(&attributes);
        }
        size_t reserve = size / 4 < STACK_RESERVE ? size / 4 : STACK_RESERVE;
        stack_end = base == NULL ? (char *)1 : (char *)base + guard + reserve;
    }
    return (char *)&marker - stack_end;
}

static int
has_room(void)
{
    if (stack_left() > 0) {
        return 1;
    }
    PyErr_SetString(PyExc_RecursionError, "maximum recursion depth exceeded: the C stack is nearly used up");
    return 0;
}

/* ---- levels of recursion ----
 *
 * From 3.12 CPython bounds the nesting of C code by a count of its own. What bounds the machine is the C stack, by
 * `has_room`: called by C code, it gets as many levels as the stack has bytes for. */
#define BYTES_A_LEVEL 1024

static int
begin_machine(void)
{
    int given = 0;
#if PY_VERSION_HEX >= 0x030C0000
    int *room = mb_c_recursion_room(PyThreadState_Get());
    Py_ssize_t wanted = stack_left() / BYTES_A_LEVEL;
    wanted = wanted > MB_C_RECURSION_LIMIT ? MB_C_RECURSION_LIMIT : wanted;
    given = wanted > *room ? (int)wanted - *room : 0;
    *room += given;
#endif
    return given;
}

static void
end_machine(int given)
{
#if PY_VERSION_HEX >= 0x030C0000
    *mb_c_recursion_room(PyThreadState_Get()) -= given;
#else
    (void)given;
#endif
}

/* ---- the hook ---- */

typedef enum { TAKEN, OPAQUE, TRANSPARENT } Kind;

/* Runs with an exception set where one is being thrown into a generator. */
static Kind
kind_of(PyObject *globals)
{
    PyObject *name = PyDict_GetItem(globals, str_name);    /* keeps a set exception, unlike PyDict_GetItemWithError */
    if (name == NULL || !PyUnicode_CheckExact(name)) {
        return TAKEN;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(opaque_prefixes); i++) {
        if (PyUnicode_Tailmatch(name, PyTuple_GET_ITEM(opaque_prefixes, i), 0, PY_SSIZE_T_MAX, -1) == 1) {
            return OPAQUE;
        }
    }
    return PySet_Contains(transparent, name) == 1 ? TRANSPARENT : TAKEN;
}

static void
count(PyCodeObject *code)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *old = PyDict_GetItemWithError(counts, (PyObject *)code);
    PyObject *sum = PyErr_Occurred() ? NULL : PyLong_FromLong(old == NULL ? 1 : PyLong_AsLong(old) + 1);
    if (sum == NULL || PyDict_SetItem(counts, (PyObject *)code, sum) < 0) {
        PyErr_WriteUnraisable((PyObject *)code);
    }
    Py_XDECREF(sum);
    PyErr_Restore(type, value, trace);
}

#if PY_VERSION_HEX >= 0x030C0000
static PyCodeObject *return_none;
#endif

/* Ends a frame that never ran, with this result (NULL: an exception is set). */
static PyObject *
finish(PyThreadState *tstate, mb_Frame *frame, PyObject *result)
{
#if PY_VERSION_HEX >= 0x030C0000
    /* The evaluator has to clear and pop the frame, and CPython exports no function that does only that. */
    PyObject *error = result == NULL ? PyErr_GetRaisedException() : NULL;
    mb_frame_swap_code(frame, return_none);
    PyObject *none = _PyEval_EvalFrameDefault(tstate, frame, 0);
    if (none == NULL) {
        Py_CLEAR(result);
        Py_XDECREF(error);
        return NULL;
    }
    Py_DECREF(none);
    if (error != NULL) {
        PyErr_SetRaisedException(error);
    }
#else
    (void)tstate, (void)frame;    /* 3.11: the caller clears the frame, whatever became of it */
#endif
    return result;
}

static PyObject *
take(mb_Frame *frame, PyCodeObject *code)
{
    int n = 0;
    if (code->co_flags & CO_OPTIMIZED) {
        n = code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) +
            !!(code->co_flags & CO_VARKEYWORDS);
    }
    PyObject *locals = PyList_New(n), *result = NULL;
    if (locals == NULL) {
        return NULL;
    }
    for (int i = 0; i < n; i++) {
        PyList_SET_ITEM(locals, i, Py_NewRef(frame->localsplus[i]));
    }
    PyObject *names = frame->f_locals == NULL ? Py_None : frame->f_locals;
    PyObject *args[] = {NULL, mb_frame_function(frame), (PyObject *)code, locals, names};
    PyObject *handler = Py_NewRef(here.handler);
    State before = here;
    here.taking = 0;
    int given = begin_machine();
    follow();
    result = PyObject_Vectorcall(handler, args + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    here.taking = before.taking;
    here.handler = before.handler;
    end_machine(given);
    follow();
    Py_DECREF(handler);
    Py_DECREF(locals);
    return result;
}

static PyObject *
hook_eval(PyThreadState *tstate, mb_Frame *frame, int throwing)
{
    PyCodeObject *code = installed_here && passing != frame ? mb_frame_code(frame) : NULL;
    if (code == NULL) {
        return pass_on(tstate, frame, throwing);
    }
    Kind kind = kind_of(frame->f_globals);
    if (kind == OPAQUE && here.taking) {
        int given = begin_machine();
        here.taking = 0;
        follow();
        PyObject *result = pass_on(tstate, frame, throwing);
        here.taking = 1;
        end_machine(given);
        follow();
        return result;
    }
    if (kind == OPAQUE) {    /* counting: the machine's own calls take C stack, which `has_room` bounds, and no levels */
        int given = begin_machine();
        PyObject *result = pass_on(tstate, frame, throwing);
        end_machine(given);
        return result;
    }
    if (kind == TRANSPARENT) {
        return pass_on(tstate, frame, throwing);
    }
    PyObject *function = mb_frame_function(frame);
    if (here.taking && !throwing && function != NULL && PyFunction_Check(function) && mb_frame_is_fresh(frame, code)) {
        if (!has_room()) {
            return finish(tstate, frame, NULL);
        }
        return finish(tstate, frame, take(frame, code));
    }
    if (counts != NULL && here.inside && !(throwing && mb_frame_never_started(frame))) {
        count(code);
    }
    return pass_on(tstate, frame, throwing);
}

/* ---- Native ---- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *handler;
    PyObject *failed;
    PyObject *propagating, *clean;
} Native;

static PyObject *
raise_failed(Native *native, PyObject *result)
{
    PyObject *failed = native->failed;
    native->failed = NULL;
    Py_XDECREF(result);
    PyErr_SetObject((PyObject *)Py_TYPE(failed), failed);
    Py_DECREF(failed);
    return NULL;
}

static PyObject *
native_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Native *native = (Native *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (n < 1) {
        PyErr_SetString(PyExc_TypeError, "a Native takes the callable first");
        return NULL;
    }
    if (!has_room()) {
        return NULL;
    }
    State before = here;
    here.handler = native->handler;
    here.taking = native->handler != NULL;
    follow();
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)(n - 1), kwnames);
    here.handler = before.handler;
    here.taking = before.taking;
    follow();
    if (result != NULL && native->propagating != NULL) {    /* C code has swallowed it */
        PyObject *propagating = native->propagating, *clean = native->clean;
        native->propagating = native->clean = NULL;
        Py_DECREF(propagating);
        Py_XDECREF(clean);
    }
    return native->failed == NULL ? result : raise_failed(native, result);
}

static PyObject *
native_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *handler;
    static char *names[] = {"handler", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Native", names, &handler)) {
        return NULL;
    }
    Native *native = (Native *)type->tp_alloc(type, 0);
    if (native != NULL) {
        native->vectorcall = native_call;
        native->handler = Py_NewRef(handler);
    }
    return (PyObject *)native;
}

static int
native_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Native *)self)->handler);
    Py_VISIT(((Native *)self)->failed);
    Py_VISIT(((Native *)self)->propagating);
    Py_VISIT(((Native *)self)->clean);
    return 0;
}

static int
native_clear(PyObject *self)
{
    Py_CLEAR(((Native *)self)->handler);
    Py_CLEAR(((Native *)self)->failed);
    Py_CLEAR(((Native *)self)->propagating);
    Py_CLEAR(((Native *)self)->clean);
    return 0;
}

static void
native_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    native_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef native_members[] = {
    {"failed", T_OBJECT, offsetof(Native, failed), 0,
     "what the handler raised that C code must not swallow: raised when the call ends, whatever it gave"},
    {"propagating", T_OBJECT, offsetof(Native, propagating), 0,
     "the exception that left the machine's last frame; None again when a call ends without an exception"},
    {"clean", T_OBJECT, offsetof(Native, clean), 0, "its traceback, the machine's own entries taken out"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject NativeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "moebius.interpreter.reentry.Native",
    .tp_doc = "Native(handler): native(callable, *args, **kwargs) calls it; Python frames that begin beneath it go to\n"
              "handler(function, code, arguments, namespace) -> result.",
    .tp_basicsize = sizeof(Native),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Native, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = native_new,
    .tp_traverse = native_traverse,
    .tp_clear = native_clear,
    .tp_dealloc = native_dealloc,
    .tp_members = native_members,
};

/* ---- functions ---- */

/* Calls with this thread's state changed: what the three functions below share. */
static PyObject *
call_in(State state, PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    if (n < 1) {
        PyErr_SetString(PyExc_TypeError, "the callable comes first");
        return NULL;
    }
    State before = here;
    here = state;
    follow();
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)(n - 1), kwnames);
    here = before;
    follow();
    return result;
}

static PyObject *
call_inside(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    (void)module;
    if (n < 1 || !Py_IS_TYPE(args[0], &NativeType)) {
        PyErr_SetString(PyExc_TypeError, "call_inside(Native, callable, /, *args, **kwargs)");
        return NULL;
    }
    Native *native = (Native *)args[0];
    PyObject *result = call_in((State){native->handler, 0, 1}, args + 1, n - 1, kwnames);
    return native->failed == NULL ? result : raise_failed(native, result);
}

static PyObject *
call_outside(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    (void)module;
    return call_in((State){NULL, 0, 0}, args, n, kwnames);
}

static PyObject *
set_counts(PyObject *module, PyObject *given)
{
    (void)module;
    if (given != Py_None && !PyDict_CheckExact(given)) {
        PyErr_SetString(PyExc_TypeError, "set_counts(dict or None)");
        return NULL;
    }
    PyObject *before = counts == NULL ? Py_NewRef(Py_None) : counts;
    counts = given == Py_None ? NULL : Py_NewRef(given);
    follow();
    return before;
}

static PyObject *
set_modules(PyObject *module, PyObject *args)
{
    PyObject *prefixes, *names;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!:set_modules", &PyTuple_Type, &prefixes, &PyFrozenSet_Type, &names)) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(prefixes); i++) {
        if (!PyUnicode_Check(PyTuple_GET_ITEM(prefixes, i))) {
            PyErr_SetString(PyExc_TypeError, "prefixes are strings");
            return NULL;
        }
    }
    Py_XSETREF(opaque_prefixes, Py_NewRef(prefixes));
    Py_XSETREF(transparent, Py_NewRef(names));
    Py_RETURN_NONE;
}

static PyObject *
is_on(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyBool_FromLong(installed_here);
}

/* ---- finalizers: the machine's own code may drop the last reference, where no frame is taken ---- */

static destructor python_finalizer;    /* CPython's slot function for a Python __del__ */

static void
finalize_taking(destructor finalizer, PyObject *self)
{
    State before = here;
    here.taking = here.handler != NULL;
    follow();
    finalizer(self);
    here.taking = before.taking;
    follow();
}

static void
watched_finalizer(PyObject *self)
{
    finalize_taking(python_finalizer, self);
}

static PyObject *
watch_finalizer(PyObject *module, PyObject *type)
{
    (void)module;
    if (PyType_Check(type) && ((PyTypeObject *)type)->tp_finalize == python_finalizer) {
        ((PyTypeObject *)type)->tp_finalize = watched_finalizer;
    }
    Py_RETURN_NONE;
}

/* CPython's own finalizers that call Python: warnings about what was never awaited, the event loop's hooks. */
#define NATIVE_FINALIZERS 8
static struct {
    PyTypeObject *type;
    destructor finalizer;
} native_finalizers[NATIVE_FINALIZERS];

static void
finalize_native(PyObject *self)
{
    for (int i = 0; i < NATIVE_FINALIZERS; i++) {
        if (native_finalizers[i].type == Py_TYPE(self)) {
            finalize_taking(native_finalizers[i].finalizer, self);
            return;
        }
    }
}

static PyObject *
watch_native_finalizer(PyObject *module, PyObject *type)
{
    (void)module;
    destructor finalizer = PyType_Check(type) ? ((PyTypeObject *)type)->tp_finalize : NULL;
    for (int i = 0; i < NATIVE_FINALIZERS && finalizer != NULL && finalizer != finalize_native; i++) {
        if (native_finalizers[i].type == NULL) {
            native_finalizers[i].type = (PyTypeObject *)Py_NewRef(type);
            native_finalizers[i].finalizer = finalizer;
            ((PyTypeObject *)type)->tp_finalize = finalize_native;
            break;
        }
    }
    Py_RETURN_NONE;
}

static int
find_python_finalizer(void)
{
    PyObject *namespace = PyDict_New();
    PyObject *probe = namespace == NULL || PyDict_SetItemString(namespace, "__del__", Py_None) < 0
                          ? NULL
                          : PyObject_CallFunction((PyObject *)&PyType_Type, "s()O", "Probe", namespace);
    Py_XDECREF(namespace);
    if (probe == NULL) {
        return -1;
    }
    python_finalizer = ((PyTypeObject *)probe)->tp_finalize;
    Py_DECREF(probe);
    if (python_finalizer == NULL) {
        PyErr_SetString(PyExc_ImportError, "moebius does not know how this Python finalizes: classes have no tp_finalize");
        return -1;
    }
    return 0;
}

/* ---- looking attributes up on types, where the machine must run no Python of the program's ---- */

static PyObject *missing;         /* what `lookup` gives for nothing */
static PyObject *native_kinds;    /* frozenset: types of attributes that run C code when a special method is wanted */

static PyObject *
set_lookup(PyObject *module, PyObject *args)
{
    PyObject *mark, *kinds;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!:set_lookup", &mark, &PyFrozenSet_Type, &kinds)) {
        return NULL;
    }
    Py_XSETREF(missing, Py_NewRef(mark));
    Py_XSETREF(native_kinds, Py_NewRef(kinds));
    Py_RETURN_NONE;
}

static int
lookup_arguments(PyObject *const *args, Py_ssize_t n)
{
    if (n != 2 || !PyType_Check(args[0]) || !PyUnicode_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a type and an attribute's name");
        return -1;
    }
    return 0;
}

static PyObject *
lookup(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (lookup_arguments(args, n) < 0) {
        return NULL;
    }
    PyObject *found = _PyType_Lookup((PyTypeObject *)args[0], args[1]);
    return Py_NewRef(found == NULL ? missing : found);
}

static PyObject *
special(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (lookup_arguments(args, n) < 0) {
        return NULL;
    }
    if (!PyType_HasFeature((PyTypeObject *)args[0], Py_TPFLAGS_HEAPTYPE)) {
        Py_RETURN_NONE;
    }
    PyObject *found = _PyType_Lookup((PyTypeObject *)args[0], args[1]);
    if (found == NULL || PySet_Contains(native_kinds, (PyObject *)Py_TYPE(found)) == 1) {
        Py_RETURN_NONE;
    }
    return Py_NewRef(found);
}

static PyObject *
flags_of(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "a type");
        return NULL;
    }
    return PyLong_FromUnsignedLong(PyType_GetFlags((PyTypeObject *)type));
}

static PyObject *
mro_of(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "a type");
        return NULL;
    }
    PyObject *mro = ((PyTypeObject *)type)->tp_mro;
    return mro == NULL ? PyTuple_New(0) : Py_NewRef(mro);
}

static PyObject *
type_name(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "a type");
        return NULL;
    }
    return PyUnicode_FromString(((PyTypeObject *)type)->tp_name);
}

/* Like isinstance() and issubclass(), but for a type's own fields alone: nobody's __class__ or __eq__ is asked. */
static PyObject *
is_a(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !(PyType_Check(args[1]) || PyTuple_Check(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "is_a(object, type or tuple of types)");
        return NULL;
    }
    if (PyType_Check(args[1])) {
        return PyBool_FromLong(PyObject_TypeCheck(args[0], (PyTypeObject *)args[1]));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); i++) {
        PyObject *kind = PyTuple_GET_ITEM(args[1], i);
        if (PyType_Check(kind) && PyObject_TypeCheck(args[0], (PyTypeObject *)kind)) {
            Py_RETURN_TRUE;
        }
    }
    Py_RETURN_FALSE;
}

static PyObject *
is_subtype(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !PyType_Check(args[0]) || !PyType_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "is_subtype(type, type)");
        return NULL;
    }
    return PyBool_FromLong(PyType_IsSubtype((PyTypeObject *)args[0], (PyTypeObject *)args[1]));
}

/* Whether a method of a C type is sq_concat's, sq_repeat's or their in-place kin's: those come after all number slots. */
static PyObject *
is_sequence_slot(PyObject *module, PyObject *method)
{
    (void)module;
    if (!Py_IS_TYPE(method, &PyWrapperDescr_Type)) {
        Py_RETURN_FALSE;
    }
    int offset = ((PyWrapperDescrObject *)method)->d_base->offset;
    return PyBool_FromLong(offset == (int)offsetof(PyHeapTypeObject, as_sequence.sq_concat) ||
                           offset == (int)offsetof(PyHeapTypeObject, as_sequence.sq_repeat) ||
                           offset == (int)offsetof(PyHeapTypeObject, as_sequence.sq_inplace_concat) ||
                           offset == (int)offsetof(PyHeapTypeObject, as_sequence.sq_inplace_repeat));
}

static PyObject *
is_heap(PyObject *module, PyObject *type)
{
    (void)module;
    return PyBool_FromLong(PyType_Check(type) && PyType_HasFeature((PyTypeObject *)type, Py_TPFLAGS_HEAPTYPE));
}

static PyObject *
is_class(PyObject *module, PyObject *object)
{
    (void)module;
    return PyBool_FromLong(PyType_Check(object));
}

static PyObject *
write_unraisable(PyObject *module, PyObject *args)
{
    PyObject *error, *object;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O:write_unraisable", (PyTypeObject *)PyExc_BaseException, &error, &object)) {
        return NULL;
    }
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    PyErr_WriteUnraisable(object);
    Py_RETURN_NONE;
}

static PyObject *
fill_frame(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 3 || !PyFrame_Check(args[0]) || !PyList_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "fill_frame(frame, list, unset)");
        return NULL;
    }
    PyCodeObject *code = PyFrame_GetCode((PyFrameObject *)args[0]);
    int fits = code->co_nlocalsplus == PyList_GET_SIZE(args[1]);
    Py_DECREF(code);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the frame has another number of variables");
        return NULL;
    }
    PyObject **variables = mb_frame_variables((PyFrameObject *)args[0]);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); i++) {
        PyObject *value = PyList_GET_ITEM(args[1], i);
        Py_XSETREF(variables[i], value == args[2] ? NULL : Py_NewRef(value));
    }
    Py_RETURN_NONE;
}

static PyObject *
untrack(PyObject *module, PyObject *object)
{
    (void)module;
    if (PyObject_GC_IsTracked(object)) {
        PyObject_GC_UnTrack(object);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"call_inside", (PyCFunction)(void (*)(void))call_inside, METH_FASTCALL | METH_KEYWORDS,
     "call_inside(native, callable, /, *args, **kwargs): call the machine; user frames that then run natively count."},
    {"call_outside", (PyCFunction)(void (*)(void))call_outside, METH_FASTCALL | METH_KEYWORDS,
     "call_outside(callable, /, *args, **kwargs): call for the machine's own needs; nothing is taken or counted."},
    {"watch_finalizer", watch_finalizer, METH_O,
     "watch_finalizer(class): its Python __del__, if it has one, is interpreted wherever the last reference goes."},
    {"watch_native_finalizer", watch_native_finalizer, METH_O,
     "watch_native_finalizer(class of C): Python that its finalizer calls is interpreted wherever the last reference goes."},
    {"set_counts", set_counts, METH_O,
     "set_counts(dict | None) -> what was set: where this thread counts frames that run natively, code -> number."},
    {"set_modules", set_modules, METH_VARARGS,
     "set_modules(prefixes, names): __name__ prefixes of opaque modules, names of transparent ones."},
    {"set_lookup", set_lookup, METH_VARARGS,
     "set_lookup(missing, kinds): what lookup() gives for nothing, the types of attributes that special() leaves out."},
    {"lookup", (PyCFunction)(void (*)(void))lookup, METH_FASTCALL,
     "lookup(type, name): the raw attribute along the MRO, or the mark of set_lookup. Runs no __getattribute__."},
    {"special", (PyCFunction)(void (*)(void))special, METH_FASTCALL,
     "special(type, name): the raw attribute along the MRO where calling it would run Python code, else None."},
    {"flags_of", flags_of, METH_O, "flags_of(type) -> int: its tp_flags."},
    {"mro_of", mro_of, METH_O, "mro_of(type) -> tuple: its tp_mro, empty while it is being made."},
    {"type_name", type_name, METH_O, "type_name(type) -> str: its tp_name."},
    {"is_a", (PyCFunction)(void (*)(void))is_a, METH_FASTCALL,
     "is_a(object, type or tuple) -> bool: by the object's real type; nothing is asked for its __class__."},
    {"is_subtype", (PyCFunction)(void (*)(void))is_subtype, METH_FASTCALL, "is_subtype(type, type): PyType_IsSubtype."},
    {"is_sequence_slot", is_sequence_slot, METH_O,
     "is_sequence_slot(method) -> bool: a + or * of a C type's that runs after both operands' number slots."},
    {"is_heap", is_heap, METH_O, "is_heap(type) -> bool: it can hold Python code."},
    {"is_class", is_class, METH_O, "is_class(object) -> bool: PyType_Check."},
    {"fill_frame", (PyCFunction)(void (*)(void))fill_frame, METH_FASTCALL,
     "fill_frame(frame, list, unset): the frame's local variables become the list's values; those that are unset, unbound."},
    {"untrack", untrack, METH_O, "untrack(object): gc.get_objects() does not list it."},
    {"write_unraisable", write_unraisable, METH_VARARGS,
     "write_unraisable(exception, object): PyErr_WriteUnraisable."},
    {"is_on", is_on, METH_NOARGS, "is_on() -> bool: whether the hook is on for this thread."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "reentry", "Frames that C code begins beneath the machine, handed back to it (PEP 523).", -1,
    methods, NULL, NULL, NULL, NULL,
};

#if PY_VERSION_HEX >= 0x030C0000
/* `return None` in one instruction that uses no stack, without RESUME: frames that run it are invisible to tracing. */
static PyCodeObject *
make_return_none(void)
{
    static const char source[] = "import opcode\n"
                                 "code = (lambda: None).__code__.replace(co_code=bytes([opcode.opmap['RETURN_CONST'], 0]), "
                                 "co_consts=(None,), co_name='return_none', co_qualname='return_none')\n";
    PyObject *namespace = PyDict_New(), *code = NULL;
    if (namespace != NULL && PyDict_SetItemString(namespace, "__builtins__", PyEval_GetBuiltins()) == 0) {
        PyObject *done = PyRun_String(source, Py_file_input, namespace, namespace);
        code = done == NULL ? NULL : Py_XNewRef(PyDict_GetItemString(namespace, "code"));
        Py_XDECREF(done);
    }
    Py_XDECREF(namespace);
    return (PyCodeObject *)code;
}
#endif

__attribute__((visibility("default"))) PyMODINIT_FUNC
PyInit_reentry(void)
{
    if (PyType_Ready(&NativeType) < 0 || find_python_finalizer() < 0) {
        return NULL;
    }
    str_name = PyUnicode_InternFromString("__name__");
    opaque_prefixes = PyTuple_New(0);
    transparent = PyFrozenSet_New(NULL);
    if (str_name == NULL || opaque_prefixes == NULL || transparent == NULL) {
        return NULL;
    }
#if PY_VERSION_HEX >= 0x030C0000
    if ((return_none = make_return_none()) == NULL) {
        return NULL;
    }
#endif
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddObjectRef(module, "Native", (PyObject *)&NativeType) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
