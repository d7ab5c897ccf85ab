/* The frame hook (PEP 523): runs chosen Python functions through a callable of ours, for calls that nobody could wrap.
 *
 * It is installed only while a thread is inside call_hooked, and every Python call of the process is slower meanwhile. What
 * was installed before (torch.compile's hook, a debugger's) gets each frame that we do not take, and is put back after. */
#define MOEBIUS_NEEDS_FRAMES
#include "native.h"

#include <limits.h>

/* ---- switching the hook on and off ---- */

int mb_hooked_threads;
static __thread int hook_is_on;

/* Evaluators that were installed when we came, oldest first; `depth` of them. More than one when somebody else's hook went
 * on top of ours and we went on top of that. */
#define MAX_DEPTH 64
static _PyFrameEvalFunction chain[MAX_DEPTH];
static int depth;
static int owed = INT_MAX;    /* the last thread to leave also goes back to this depth, for a thread that left before */

static PyObject *hook_eval(PyThreadState *, mb_Frame *, int);

static _PyFrameEvalFunction
installed(void)
{
    return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
}

static void
install(_PyFrameEvalFunction evaluator)
{
    _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), evaluator);
}

static int
push(void)
{
    _PyFrameEvalFunction now = installed();
    if (now == hook_eval || depth == MAX_DEPTH) {
        return 0;
    }
    chain[depth++] = now;
    install(hook_eval);
    return 1;
}

static void
pop_to(int target)
{
    if (target >= depth) {
        return;
    }
    if (installed() == hook_eval) {
        install(chain[target]);
    }
    /* Else somebody went on top and has not left yet. They may put us back when they do: hook_eval then removes itself. */
    depth = target;
}

HookScope
mb_hook_enter(int on)
{
    HookScope scope = {hook_is_on, depth, 0};
    if (on == hook_is_on) {
        return scope;
    }
    hook_is_on = on;
    if (on) {
        mb_hooked_threads++;
        scope.did = push();
    }
    else if (--mb_hooked_threads == 0 && depth > 0 && installed() == hook_eval) {
        pop_to(depth - 1);
        scope.did = 1;
    }
    return scope;
}

void
mb_hook_leave(HookScope scope)
{
    if (hook_is_on == scope.was_on) {
        return;
    }
    hook_is_on = scope.was_on;
    if (scope.was_on) {
        mb_hooked_threads++;
        if (scope.did) {
            push();
        }
        return;
    }
    mb_hooked_threads--;
    if (scope.did && scope.depth < owed) {
        owed = scope.depth;
    }
    if (mb_hooked_threads == 0 && owed != INT_MAX) {
        pop_to(owed);
        owed = INT_MAX;
    }
}

/* ---- frames that we do not take ---- */

/* The frame that was handed to the evaluator before ours, and how far down the chain that was. That evaluator may hand it to
 * us again (torch's remembers us as what was there before it), so the second time goes one further down. */
static __thread struct {
    mb_Frame *frame;
    int level;
} passing;

static PyObject *
pass_on(PyThreadState *tstate, mb_Frame *frame, int throwing)
{
    int level = passing.frame == frame ? passing.level + 1 : 0;
    _PyFrameEvalFunction next = level < depth ? chain[depth - 1 - level] : NULL;
    if (next == NULL || next == hook_eval || next == _PyEval_EvalFrameDefault) {
        return _PyEval_EvalFrameDefault(tstate, frame, throwing);
    }
    mb_Frame *frame_before = passing.frame;
    int level_before = passing.level;
    passing.frame = frame;
    passing.level = level;
    PyObject *result = next(tstate, frame, throwing);
    passing.frame = frame_before;
    passing.level = level_before;
    return result;
}

/* ---- what we know of a code object ---- */

typedef enum { UNKNOWN, DECLINED, SKIPPED, ATTACHED } Verdict;

typedef struct CodeNote {
    Verdict verdict;
    int pass_function;              /* callable(function, *arguments) */
    PyObject *callable;             /* ATTACHED */
    PyObject *function;             /* ATTACHED: weak reference to the function that it is for; NULL: any function */
    struct CodeNote *next, *previous;
} CodeNote;

static Py_ssize_t extra_index = -1;
static CodeNote *notes;
static PyObject *frame_callback;

static void
clear_note(CodeNote *note, Verdict verdict)
{
    PyObject *callable = note->callable, *function = note->function;
    note->callable = note->function = NULL;
    note->verdict = verdict;
    note->pass_function = 0;
    Py_XDECREF(callable);
    Py_XDECREF(function);
}

/* Called by CPython when a code object dies. */
static void
free_note(void *extra)
{
    CodeNote *note = extra;
    if (note == NULL) {
        return;
    }
    if (note->next != NULL) {
        note->next->previous = note->previous;
    }
    if (note->previous != NULL) {
        note->previous->next = note->next;
    }
    else {
        notes = note->next;
    }
    clear_note(note, UNKNOWN);
    PyMem_Free(note);
}

/* Borrowed; NULL without an error if there is none and `make` is 0. */
static CodeNote *
note_of(PyObject *code, int make)
{
    void *extra = NULL;
    if (mb_code_get_extra(code, extra_index, &extra) < 0) {
        return NULL;
    }
    if (extra != NULL || !make) {
        return extra;
    }
    CodeNote *note = PyMem_Calloc(1, sizeof(CodeNote));
    if (note == NULL || mb_code_set_extra(code, extra_index, note) < 0) {
        PyMem_Free(note);
        if (!PyErr_Occurred()) {
            PyErr_NoMemory();
        }
        return NULL;
    }
    note->next = notes;
    if (notes != NULL) {
        notes->previous = note;
    }
    notes = note;
    return note;
}

static int
attach_to(CodeNote *note, PyObject *function, PyObject *callable, int pass_function)
{
    PyObject *weak = NULL;
    if (function != NULL && !pass_function && (weak = PyWeakref_NewRef(function, NULL)) == NULL) {
        return -1;
    }
    Py_INCREF(callable);
    clear_note(note, ATTACHED);
    note->callable = callable;
    note->function = weak;
    note->pass_function = pass_function;
    return 0;
}

/* Whether what is attached is for this function: two functions made from one code object may close over different cells and
 * see different globals, and what was captured for one is not the other. -1: it was for a function that is gone. */
static int
is_for(CodeNote *note, PyObject *function)
{
    if (note->function == NULL) {
        return 1;
    }
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *known;
    if (PyWeakref_GetRef(note->function, &known) <= 0) {
        return -1;
    }
#else
    PyObject *known = PyWeakref_GET_OBJECT(note->function);
    if (known == Py_None) {
        return -1;
    }
    Py_INCREF(known);
#endif
    int same = known == function;
    if (!same && PyFunction_GET_GLOBALS(known) == PyFunction_GET_GLOBALS(function)) {
        PyObject *ours = PyFunction_GET_CLOSURE(known), *theirs = PyFunction_GET_CLOSURE(function);
        Py_ssize_t n = ours == NULL ? 0 : PyTuple_GET_SIZE(ours);
        same = n == (theirs == NULL ? 0 : PyTuple_GET_SIZE(theirs));
        for (Py_ssize_t i = 0; i < n && same; i++) {
            same = PyTuple_GET_ITEM(ours, i) == PyTuple_GET_ITEM(theirs, i);
        }
    }
    Py_DECREF(known);
    return same;
}

/* ---- frames that we take ---- */

static int
count_arguments(PyCodeObject *code)
{
    return code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) +
           !!(code->co_flags & CO_VARKEYWORDS);
}

static int
may_take(PyThreadState *tstate, mb_Frame *frame, PyCodeObject *code)
{
    const int needed = CO_OPTIMIZED | CO_NEWLOCALS;    /* functions: not modules, class bodies or exec */
    const int refused = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR;
    if ((code->co_flags & needed) != needed || (code->co_flags & refused)) {
        return 0;
    }
    PyObject *function = mb_frame_function(frame);
    return function != NULL && PyFunction_Check(function) && mb_frame_is_fresh(frame, code) &&
           mb_recursion_room(tstate) > 1;
}

#if PY_VERSION_HEX >= 0x030C0000
static PyCodeObject *return_none;

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
take(PyThreadState *tstate, mb_Frame *frame, CodeNote *note, int n)
{
    PyObject *callable = Py_NewRef(note->callable), *result;
    HookScope scope = mb_hook_enter(0);
    if (!note->pass_function) {
        result = PyObject_Vectorcall(callable, frame->localsplus, (size_t)n, NULL);
    }
    else {
        PyObject *small[8] = {NULL};
        PyObject **args = n < 8 ? small : PyMem_New(PyObject *, (size_t)n + 1);
        if (args == NULL) {
            result = PyErr_NoMemory();
        }
        else {
            args[0] = mb_frame_function(frame);
            for (int i = 0; i < n; i++) {
                args[i + 1] = frame->localsplus[i];
            }
            result = PyObject_Vectorcall(callable, args, (size_t)n + 1, NULL);
            if (args != small) {
                PyMem_Free(args);
            }
        }
    }
    mb_hook_leave(scope);
    Py_DECREF(callable);
    return finish(tstate, frame, result);
}

/* Asks the callback about the frame's function. -1: an exception that must not be swallowed. */
static int
ask(CodeNote *note, PyObject *function)
{
    PyObject *callback = Py_NewRef(frame_callback);
    HookScope scope = mb_hook_enter(0);
    clear_note(note, DECLINED);    /* also what it stays as if the callback fails */
    PyObject *answer = PyObject_CallOneArg(callback, function);
    int failed = 0;
    if (answer == NULL) {
        failed = !PyErr_ExceptionMatches(PyExc_Exception);
        if (!failed) {
            PyErr_WriteUnraisable(callback);
        }
        else {
            clear_note(note, UNKNOWN);
        }
    }
    else if (answer != Py_None && note->verdict == DECLINED) {    /* else it attached something itself, and that stands */
        int attached = -1;
        if (PyCallable_Check(answer)) {
            attached = attach_to(note, function, answer, 0);
        }
        else {
            PyErr_Format(PyExc_TypeError, "the frame callback must return a callable or None, not %R", answer);
        }
        if (attached < 0) {
            PyErr_WriteUnraisable(callback);
        }
    }
    Py_XDECREF(answer);
    Py_DECREF(callback);
    mb_hook_leave(scope);
    return failed ? -1 : 0;
}

static PyObject *
hook_eval(PyThreadState *tstate, mb_Frame *frame, int throwing)
{
    if (!hook_is_on) {
        if (mb_hooked_threads == 0 && depth == 0 && installed() == hook_eval) {
            install(_PyEval_EvalFrameDefault);    /* put back by somebody who came after us and left after us */
        }
        return pass_on(tstate, frame, throwing);
    }
    PyCodeObject *code = mb_frame_code(frame);
    if (throwing || code == NULL || passing.frame == frame || mb_disabled) {
        return pass_on(tstate, frame, throwing);
    }
    CodeNote *note = note_of((PyObject *)code, 0);
    if (note != NULL ? note->verdict == SKIPPED || note->verdict == DECLINED : frame_callback == NULL) {
        return pass_on(tstate, frame, throwing);
    }
    if (!may_take(tstate, frame, code)) {
        return pass_on(tstate, frame, throwing);
    }
    int n = count_arguments(code);
    for (int i = 0; i < n; i++) {
        if (frame->localsplus[i] == NULL) {
            return pass_on(tstate, frame, throwing);
        }
    }
    PyObject *function = mb_frame_function(frame);
    int ours = note != NULL && note->verdict == ATTACHED ? is_for(note, function) : -1;
    if (ours < 0 && frame_callback != NULL) {
        note = note_of((PyObject *)code, 1);
        if (note == NULL || ask(note, function) < 0) {
            return finish(tstate, frame, NULL);
        }
        ours = note->verdict == ATTACHED ? is_for(note, function) : 0;
    }
    return ours > 0 ? take(tstate, frame, note, n) : pass_on(tstate, frame, throwing);
}

/* ---- calls from Python ---- */

static PyObject *
call_hooked(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    (void)module;
    if (n < 1) {
        PyErr_SetString(PyExc_TypeError, "call_hooked(callable, *args, **kwargs) needs a callable");
        return NULL;
    }
    HookScope scope = mb_hook_enter(1);
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)(n - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    mb_hook_leave(scope);
    return result;
}

static PyObject *
call_unhooked(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    (void)module;
    if (n < 1) {
        PyErr_SetString(PyExc_TypeError, "call_unhooked(callable, *args, **kwargs) needs a callable");
        return NULL;
    }
    HookScope scope = mb_hook_enter(0);
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)(n - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    mb_hook_leave(scope);
    return result;
}

static PyObject *
set_frame_callback(PyObject *module, PyObject *callback)
{
    (void)module;
    if (callback != Py_None && !PyCallable_Check(callback)) {
        PyErr_SetString(PyExc_TypeError, "the frame callback must be callable or None");
        return NULL;
    }
    PyObject *before = frame_callback == NULL ? Py_NewRef(Py_None) : frame_callback;
    frame_callback = callback == Py_None ? NULL : Py_NewRef(callback);
    return before;
}

/* The code of a code object, function or method; *function is set if there is one. Borrowed. */
static PyObject *
code_of(PyObject *object, PyObject **function)
{
    *function = NULL;
    if (PyMethod_Check(object)) {
        object = PyMethod_GET_FUNCTION(object);
    }
    if (PyFunction_Check(object)) {
        *function = object;
        return PyFunction_GET_CODE(object);
    }
    if (PyCode_Check(object)) {
        return object;
    }
    PyErr_Format(PyExc_TypeError, "needs a code object or a Python function, not %.200s", Py_TYPE(object)->tp_name);
    return NULL;
}

static PyObject *
attach(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    static char *names[] = {"code", "callable", "pass_function", NULL};
    PyObject *object, *callable, *function;
    int pass_function = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$p:attach", names, &object, &callable, &pass_function)) {
        return NULL;
    }
    PyObject *code = code_of(object, &function);
    if (code == NULL) {
        return NULL;
    }
    if (!PyCallable_Check(callable)) {
        PyErr_SetString(PyExc_TypeError, "attach(code, callable): must be callable");
        return NULL;
    }
    if (function == NULL && !pass_function && PyCode_GetNumFree((PyCodeObject *)code) > 0) {
        PyErr_SetString(PyExc_ValueError, "this code has free variables, so that functions made from it differ: attach to "
                                          "the function, or with pass_function=True");
        return NULL;
    }
    CodeNote *note = note_of(code, 1);
    if (note == NULL) {
        return NULL;
    }
    if (attach_to(note, function, callable, pass_function) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
set_verdict(PyObject *object, Verdict verdict)
{
    PyObject *function, *code = code_of(object, &function);
    CodeNote *note = code == NULL ? NULL : note_of(code, 1);
    if (note == NULL) {
        return NULL;
    }
    clear_note(note, verdict);
    Py_RETURN_NONE;
}

static PyObject *
detach(PyObject *module, PyObject *object)
{
    (void)module;
    return set_verdict(object, UNKNOWN);
}

static PyObject *
mark_skip(PyObject *module, PyObject *object)
{
    (void)module;
    return set_verdict(object, SKIPPED);
}

static PyObject *
attached(PyObject *module, PyObject *object)
{
    (void)module;
    PyObject *function, *code = code_of(object, &function);
    if (code == NULL) {
        return NULL;
    }
    CodeNote *note = note_of(code, 0);
    if (note == NULL || note->callable == NULL) {
        if (PyErr_Occurred()) {
            return NULL;
        }
        Py_RETURN_NONE;
    }
    return Py_NewRef(note->callable);
}

static PyObject *
forget_frames(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    /* Dropping a callable may run code that frees notes, so the walk starts again after each. */
    for (CodeNote *note = notes; note != NULL;) {
        if (note->verdict == ATTACHED) {
            clear_note(note, UNKNOWN);
            note = notes;
            continue;
        }
        if (note->verdict == DECLINED) {
            note->verdict = UNKNOWN;
        }
        note = note->next;
    }
    Py_RETURN_NONE;
}

static PyObject *
is_hooked(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyBool_FromLong(hook_is_on);
}

static PyObject *
evaluator(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    _PyFrameEvalFunction now = installed();
    return PyUnicode_FromString(now == hook_eval ? "moebius" : now == _PyEval_EvalFrameDefault ? "default" : "other");
}

PyMethodDef mb_frame_methods[] = {
    {"call_hooked", (PyCFunction)(void (*)(void))call_hooked, METH_FASTCALL | METH_KEYWORDS,
     "call_hooked(callable, /, *args, **kwargs): call it with the frame hook on for this thread."},
    {"call_unhooked", (PyCFunction)(void (*)(void))call_unhooked, METH_FASTCALL | METH_KEYWORDS,
     "call_unhooked(callable, /, *args, **kwargs): call it with the frame hook off for this thread."},
    {"set_frame_callback", set_frame_callback, METH_O,
     "set_frame_callback(fn | None) -> the one before: fn(function) is asked once for each code object that is met under "
     "the hook (and again when what it returned was for a function that is gone), and returns the callable to run instead, "
     "or None: never ask again."},
    {"attach", (PyCFunction)(void (*)(void))attach, METH_VARARGS | METH_KEYWORDS,
     "attach(code, callable, *, pass_function=False): under the hook, run callable(*arguments) for calls of this code. Given "
     "a function instead, only for functions with its globals and its cells. With pass_function, callable(function, "
     "*arguments) for every function made from the code."},
    {"detach", detach, METH_O, "detach(code): forget what is attached or decided; the callback is asked again."},
    {"mark_skip", mark_skip, METH_O, "mark_skip(code): never take calls of this code."},
    {"attached", attached, METH_O, "attached(code) -> callable | None"},
    {"forget_frames", forget_frames, METH_NOARGS,
     "forget_frames(): detach everything and ask again about what was declined; mark_skip stays."},
    {"is_hooked", is_hooked, METH_NOARGS, "is_hooked() -> bool: whether the hook is on for this thread."},
    {"evaluator", evaluator, METH_NOARGS,
     "evaluator() -> 'moebius' | 'default' | 'other': whose frame evaluator is installed right now."},
    {NULL, NULL, 0, NULL},
};

int
mb_frames_init(PyObject *module)
{
    (void)module;
    if (extra_index < 0) {
        extra_index = mb_request_code_extra(free_note);
        if (extra_index < 0) {
            PyErr_SetString(PyExc_ImportError, "CPython has no room left for notes on code objects (too many users of "
                                               "co_extra in this process)");
            return -1;
        }
    }
#if PY_VERSION_HEX >= 0x030C0000
    if (return_none == NULL && (return_none = make_return_none()) == NULL) {
        return -1;
    }
#endif
    return 0;
}
