/* The frame hook (PEP 523): runs chosen Python functions through a callable of ours, for calls that nobody could wrap.
 *
 * It is installed only while a thread is inside call_hooked, and every Python call of the process is slower meanwhile. What
 * was installed before (torch.compile's hook, a debugger's) gets each frame that we do not take, and is put back after. */
#define MOEBIUS_NEEDS_FRAMES
#include "frames.h"
#include "end_frame.h"

/* ---- switching the hook on and off ---- */

int mb_hooked_threads;
static __thread int hook_is_on;

/* Evaluators that were installed when we came, oldest first; `depth` of them. More than one when somebody else's hook went
 * on top of ours and we went on top of that. When the last hooked thread leaves, the chain goes back to `base`: what it was
 * when the first came. (Whoever leaves last may have pushed nothing: what each thread pushed is not counted by thread.) */
#define MAX_DEPTH 64
static _PyFrameEvalFunction chain[MAX_DEPTH];
static int depth, base;

/* Threads that come and go in turns can leave somebody else's hook installed that has nothing to do: its last thread left
 * while ours was on top, and we put it back. `mixed`: that may have happened. `settler` is torch's own switch. */
static int mixed;
static PyObject *settler;

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
is_in_chain(_PyFrameEvalFunction one)
{
    for (int i = base; i < depth; i++) {
        if (chain[i] == one) {
            return 1;
        }
    }
    return 0;
}

/* Ours on top. Under other threads' (`shared`) the chain holds each evaluator once: it ends with all of them. */
static void
push(int shared)
{
    _PyFrameEvalFunction now = installed();
    if (now == hook_eval || depth == MAX_DEPTH) {
        return;
    }
    if (!shared || !is_in_chain(now)) {
        mixed |= depth > 0;
        chain[depth++] = now;
    }
    install(hook_eval);
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
    else {    /* somebody went on top and has not left yet. They may put us back when they do: hook_eval removes itself then */
        mixed = 1;
    }
    depth = target;
}

/* Lets torch take its hook away if no thread uses it: switched on and off again in this thread, it counts its threads.
 * Not where it is on in this thread: it is used then, and torch 2.13 counts a change from a compiler to False as one more. */
static void
settle(void)
{
    mixed = 0;
    _PyFrameEvalFunction now = installed();
    if (settler == NULL || now == hook_eval || now == _PyEval_EvalFrameDefault) {
        return;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *before = PyObject_CallOneArg(settler, Py_None);
    PyObject *on = before == Py_None ? PyObject_CallOneArg(settler, Py_False) : Py_XNewRef(before);
    PyObject *done = on == NULL ? NULL : PyObject_CallOneArg(settler, before);
    if (done == NULL) {
        PyErr_WriteUnraisable(settler);
    }
    now = installed();
    mixed |= now != hook_eval && now != _PyEval_EvalFrameDefault;    /* a thread still uses it: the next to leave looks again */
    Py_XDECREF(before);
    Py_XDECREF(on);
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
}

/* One more thread is hooked; the chain goes back to no more than `lowest`. */
static void
one_more(int lowest, int must_push)
{
    int shared = mb_hooked_threads++ > 0;
    mixed |= shared;
    if (!shared || lowest < base) {
        base = lowest < depth ? lowest : depth;
    }
    if (must_push || depth <= base) {
        push(shared);
    }
}

HookScope
mb_hook_enter(int on)
{
    HookScope scope = {hook_is_on, base, 0};
    if (on == hook_is_on) {
        return scope;
    }
    hook_is_on = on;
    if (on) {
        one_more(mb_hooked_threads > 0 ? base : depth, 1);
    }
    else if (--mb_hooked_threads == 0 && depth > base && installed() == hook_eval) {
        pop_to(depth - 1);
        scope.popped = 1;
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
        one_more(scope.base, scope.popped);
    }
    else if (--mb_hooked_threads == 0) {
        pop_to(base);
        if (depth == 0 && mixed) {
            settle();
        }
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

/* ---- frames that we take ---- */

static __thread Owner owner;
static __thread PyObject *whose;    /* borrowed from who calls */

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

/* Takes a reference to the callable. */
static PyObject *
take(PyThreadState *tstate, mb_Frame *frame, PyObject *callable, int pass_function, int n)
{
    PyObject *result, *const *plain = mb_frame_arguments(frame);
    HookScope scope = mb_hook_enter(0);
    if (!pass_function && plain != NULL) {
        result = PyObject_Vectorcall(callable, plain, (size_t)n, NULL);
    }
    else {
        PyObject *small[8] = {NULL};
        PyObject **args = n < 8 ? small : PyMem_New(PyObject *, (size_t)n + 1);
        if (args == NULL) {
            result = PyErr_NoMemory();
        }
        else {
            int first = pass_function ? 0 : 1;
            args[0] = mb_frame_function(frame);
            for (int i = 0; i < n; i++) {
                args[i + 1] = mb_frame_argument(frame, i);
            }
            result = PyObject_Vectorcall(callable, args + first, (size_t)(n + 1 - first), NULL);
            if (args != small) {
                PyMem_Free(args);
            }
        }
    }
    mb_hook_leave(scope);
    Py_DECREF(callable);
    return mb_end_frame(tstate, frame, result);
}

/* Asks the callback about the frame's function. -1: an exception that must not be swallowed. */
static int
ask(CodeNote *note, PyObject *function)
{
    PyObject *callback = Py_NewRef(mb_frame_callback);
    HookScope scope = mb_hook_enter(0);
    mb_drop_claim(note, owner);
    PyObject *answer = PyObject_CallOneArg(callback, function);
    int failed = answer == NULL && !PyErr_ExceptionMatches(PyExc_Exception);
    if (answer == NULL && !failed) {
        PyErr_WriteUnraisable(callback);
    }
    else if (answer != NULL && answer != Py_None && !mb_is_marked(note) && mb_claim_of(note, owner) == NULL) {
        int attached = -1;
        if (PyCallable_Check(answer)) {
            attached = mb_attach_to(note, owner, function, answer, 0);
        }
        else {
            PyErr_Format(PyExc_TypeError, "the frame callback must return a callable or None, not %R", answer);
        }
        if (attached < 0) {
            PyErr_WriteUnraisable(callback);
        }
    }
    if (!mb_is_marked(note) && mb_claim_of(note, owner) == NULL) {    /* else it attached something itself */
        mb_clear_note(note, failed ? UNKNOWN : DECLINED);
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
    if (throwing || code == NULL || passing.frame == frame || mb_disabled || mb_traced()) {
        return pass_on(tstate, frame, throwing);
    }
    CodeNote *note = mb_note_of((PyObject *)code, 0);
    if (note != NULL && note->verdict == LEFT_ALONE) {
        HookScope scope = mb_hook_enter(0);
        PyObject *result = pass_on(tstate, frame, throwing);
        mb_hook_leave(scope);
        return result;
    }
    if (note != NULL ? note->verdict == SKIPPED || note->verdict == DECLINED : mb_frame_callback == NULL) {
        return pass_on(tstate, frame, throwing);
    }
    if (!may_take(tstate, frame, code)) {
        return pass_on(tstate, frame, throwing);
    }
    int n = count_arguments(code);
    for (int i = 0; i < n; i++) {
        if (mb_frame_argument(frame, i) == NULL) {
            return pass_on(tstate, frame, throwing);
        }
    }
    PyObject *function = mb_frame_function(frame), *callable = NULL;
    Claim *claim = note == NULL ? NULL : mb_claim_of(note, owner);
    int ours = claim == NULL ? -1 : mb_is_for(claim, function, &callable);
    if (ours < 0 && mb_frame_callback != NULL) {
        note = mb_note_of((PyObject *)code, 1);
        if (note == NULL || ask(note, function) < 0) {
            return mb_end_frame(tstate, frame, NULL);
        }
        claim = mb_claim_of(note, owner);
        ours = claim == NULL ? 0 : mb_is_for(claim, function, &callable);
    }
    return ours > 0 ? take(tstate, frame, callable, claim->pass_function, n) : pass_on(tstate, frame, throwing);
}

/* ---- calls from Python ---- */

static PyObject *
call_with_hook(int on, PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    if (n < 1) {
        PyErr_Format(PyExc_TypeError, "call_%shooked(callable, *args, **kwargs) needs a callable", on ? "" : "un");
        return NULL;
    }
    HookScope scope = mb_hook_enter(on);
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, (size_t)(n - 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    mb_hook_leave(scope);
    return result;
}

static PyObject *
call_hooked(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    return call_with_hook(1, args, n, kwnames);
}

static PyObject *
call_hooked_for(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    if (n < 3) {
        PyErr_SetString(PyExc_TypeError, "call_hooked_for(owner, whose, callable, *args, **kwargs) needs the first three");
        return NULL;
    }
    Owner before = owner, now = PyLong_AsUnsignedLongLong(args[0]);
    PyObject *whose_before = whose;
    if (PyErr_Occurred()) {
        return NULL;
    }
    owner = now;
    whose = args[1];
    PyObject *result = call_hooked(module, args + 2, n - 2, kwnames);
    owner = before;
    whose = whose_before;
    return result;
}

static PyObject *
hooked_for(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(whose == NULL ? Py_None : whose);
}

static PyObject *
call_unhooked(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    return call_with_hook(0, args, n, kwnames);
}

static PyObject *
is_hooked(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(hook_is_on);
}

static PyObject *
evaluator(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    _PyFrameEvalFunction now = installed();
    return PyUnicode_FromString(now == hook_eval ? "moebius" : now == _PyEval_EvalFrameDefault ? "default" : "other");
}

static PyObject *
set_settler(PyObject *Py_UNUSED(module), PyObject *given)
{
    if (!PyCallable_Check(given)) {
        PyErr_Format(PyExc_TypeError, "set_settler(callable), not %R", given);
        return NULL;
    }
    Py_XSETREF(settler, Py_NewRef(given));
    Py_RETURN_NONE;
}

static PyObject *
settle_now(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    if (depth == 0) {
        settle();
    }
    Py_RETURN_NONE;
}

PyMethodDef mb_frame_methods[] = {
    {"set_settler", set_settler, METH_O, NULL},
    {"settle", settle_now, METH_NOARGS, NULL},
    {"call_hooked", (PyCFunction)(void (*)(void))call_hooked, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"call_hooked_for", (PyCFunction)(void (*)(void))call_hooked_for, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"hooked_for", hooked_for, METH_NOARGS, NULL},
    {"call_unhooked", (PyCFunction)(void (*)(void))call_unhooked, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"is_hooked", is_hooked, METH_NOARGS, NULL},
    {"evaluator", evaluator, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
mb_frames_init(PyObject *module)
{
    return mb_notes_init(module) < 0 || !mb_can_end_frames() ? -1 : 0;
}
