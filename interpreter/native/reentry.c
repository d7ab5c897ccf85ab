/* Python functions that C code calls while the machine has called that C code: their frames are handed back to the machine.
 *
 * PEP 523. A `Native` calls C code with the hook on for this thread; a frame that the evaluator is about to run beneath it
 * goes to the Native's handler instead, with the hook off, so the machine's own Python runs at full speed. Whatever hook was
 * there before (capture's, torch's) gets the frames that are not taken, and is put back.
 *
 * Frames by their globals' __name__: an opaque module (the machine's own) runs natively with the hook off beneath it; one
 * named in `transparent` runs natively with the hook still on beneath it; any other is taken. Not taken, and counted: frames
 * of generators that were made natively, and anything while no Native is at work (see `count`). */
#define MOEBIUS_NEEDS_FRAMES
#include "cpython_private.h"
#include "end_frame.h"
#include "objects.h"
#include "room.h"

#include <stddef.h>
#include <structmember.h>

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
        PyList_SET_ITEM(locals, i, Py_NewRef(mb_frame_argument(frame, i)));
    }
    PyObject *names = frame->f_locals == NULL ? Py_None : frame->f_locals;
    PyObject *args[] = {NULL, mb_frame_function(frame), (PyObject *)code, locals, names};
    PyObject *handler = Py_NewRef(here.handler);
    State before = here;
    here.taking = 0;
    int given = mb_begin_machine();
    follow();
    _PyErr_StackItem item, *handled = mb_handle_nothing(PyThreadState_Get(), &item);    /* the machine's own `except` */
    result = PyObject_Vectorcall(handler, args + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    mb_handle_again(PyThreadState_Get(), handled);
    here.taking = before.taking;
    here.handler = before.handler;
    mb_end_machine(given);
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
        PyInterpreterState *interpreter = PyInterpreterState_Get();
        if (threads_on == 0 && _PyInterpreterState_GetEvalFrameFunc(interpreter) == hook_eval) {
            /* Put back by somebody who came after us and left after us. */
            _PyInterpreterState_SetEvalFrameFunc(interpreter, below == NULL ? _PyEval_EvalFrameDefault : below);
        }
        return pass_on(tstate, frame, throwing);
    }
    Kind kind = kind_of(frame->f_globals);
    if (kind == OPAQUE && here.taking) {
        int given = mb_begin_machine();
        here.taking = 0;
        follow();
        PyObject *result = pass_on(tstate, frame, throwing);
        here.taking = 1;
        mb_end_machine(given);
        follow();
        return result;
    }
    if (kind == OPAQUE) {    /* counting: the machine's own calls take C stack, which room.c bounds, and no levels */
        int given = mb_begin_machine();
        PyObject *result = pass_on(tstate, frame, throwing);
        mb_end_machine(given);
        return result;
    }
    if (kind == TRANSPARENT) {
        return pass_on(tstate, frame, throwing);
    }
    PyObject *function = mb_frame_function(frame);
    if (here.taking && !throwing && function != NULL && PyFunction_Check(function) && mb_frame_is_fresh(frame, code)) {
        if (!mb_has_room()) {
            return mb_end_frame(tstate, frame, NULL);
        }
        return mb_end_frame(tstate, frame, take(frame, code));
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
    if (!mb_has_room()) {
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
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "moebius.interpreter.native.reentry.Native",
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
call_afresh(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n < 1) {
        PyErr_SetString(PyExc_TypeError, "the callable comes first");
        return NULL;
    }
    _PyErr_StackItem item, *handled = mb_handle_nothing(PyThreadState_Get(), &item);
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)(n - 1), NULL);
    mb_handle_again(PyThreadState_Get(), handled);
    return result;
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

static PyMethodDef methods[] = {
    {"call_inside", (PyCFunction)(void (*)(void))call_inside, METH_FASTCALL | METH_KEYWORDS,
     "call_inside(native, callable, /, *args, **kwargs): call the machine; user frames that then run natively count."},
    {"call_outside", (PyCFunction)(void (*)(void))call_outside, METH_FASTCALL | METH_KEYWORDS,
     "call_outside(callable, /, *args, **kwargs): call for the machine's own needs; nothing is taken or counted."},
    {"call_afresh", (PyCFunction)(void (*)(void))call_afresh, METH_FASTCALL,
     "call_afresh(callable, /, *args): with no exception being handled natively, whoever calls."},
    {"watch_finalizer", watch_finalizer, METH_O,
     "watch_finalizer(class): its Python __del__, if it has one, is interpreted wherever the last reference goes."},
    {"watch_native_finalizer", watch_native_finalizer, METH_O,
     "watch_native_finalizer(class of C): Python that its finalizer calls is interpreted wherever the last reference goes."},
    {"set_counts", set_counts, METH_O,
     "set_counts(dict | None) -> what was set: where this thread counts frames that run natively, code -> number."},
    {"set_modules", set_modules, METH_VARARGS,
     "set_modules(prefixes, names): __name__ prefixes of opaque modules, names of transparent ones."},
    {"is_on", is_on, METH_NOARGS, "is_on() -> bool: whether the hook is on for this thread."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "reentry", "Frames that C code begins beneath the machine, handed back to it (PEP 523).", -1,
    methods, NULL, NULL, NULL, NULL,
};

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
    if (!mb_can_end_frames()) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (PyModule_AddObjectRef(module, "Native", (PyObject *)&NativeType) < 0 ||
                           PyModule_AddFunctions(module, mb_object_functions) < 0)) {
        Py_CLEAR(module);
    }
    return module;
}
