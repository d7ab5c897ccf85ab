/* What we know of a code object: attached, declined, to be skipped. Kept on the code object itself (co_extra). */
#include "frames.h"

static Py_ssize_t extra_index = -1;
static CodeNote *notes;
PyObject *mb_frame_callback;

static void
free_claims(Claim *claims)
{
    while (claims != NULL) {
        Claim *claim = claims;
        claims = claim->next;
        Py_XDECREF(claim->callable);
        Py_XDECREF(claim->function);
        Py_XDECREF(claim->kept);
        PyMem_Free(claim);
    }
}

void
mb_clear_note(CodeNote *note, Verdict verdict)
{
    Claim *claims = note->claims;
    note->claims = NULL;
    note->verdict = verdict;
    free_claims(claims);
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
    mb_clear_note(note, UNKNOWN);
    PyMem_Free(note);
}

CodeNote *
mb_note_of(PyObject *code, int make)
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
is_gone(const Claim *claim)
{
    PyObject *callable = claim->owner == ANYONE ? NULL : mb_still_there(claim->callable);
    Py_XDECREF(callable);
    return claim->owner != ANYONE && callable == NULL;
}

void
mb_drop_claim(CodeNote *note, Owner owner)
{
    Claim *dropped = NULL;
    for (Claim **place = &note->claims; *place != NULL;) {
        Claim *claim = *place;
        if (claim->owner == owner || is_gone(claim)) {
            *place = claim->next;
            claim->next = dropped;
            dropped = claim;
        }
        else {
            place = &claim->next;
        }
    }
    free_claims(dropped);    /* last: it may run code that changes the list */
}

int
mb_attach_to(CodeNote *note, Owner owner, PyObject *function, PyObject *callable, int pass_function)
{
    Claim *claim = PyMem_Calloc(1, sizeof(Claim));
    if (claim == NULL) {
        return mb_no_memory();
    }
    claim->owner = owner;
    claim->pass_function = pass_function;
    claim->callable = owner == ANYONE ? Py_NewRef(callable) : PyWeakref_NewRef(callable, NULL);
    claim->function = function == NULL || pass_function ? NULL : PyWeakref_NewRef(function, NULL);
    if (owner != ANYONE && claim->function != NULL) {
        PyObject *kept = PyObject_GetAttrString(callable, "function");
        if (kept == NULL) {
            PyErr_Clear();
        }
        else if (PyFunction_Check(kept)) {
            claim->kept = PyWeakref_NewRef(kept, NULL);
        }
        Py_XDECREF(kept);
    }
    if (PyErr_Occurred()) {
        free_claims(claim);
        return -1;
    }
    if (owner == ANYONE) {
        mb_clear_note(note, ATTACHED);
    }
    else {
        mb_drop_claim(note, owner);
    }
    note->verdict = ATTACHED;
    claim->next = note->claims;
    note->claims = claim;
    return 0;
}

Claim *
mb_claim_of(CodeNote *note, Owner owner)
{
    Claim *claim = note->claims;
    while (claim != NULL && claim->owner != ANYONE && claim->owner != owner) {
        claim = claim->next;
    }
    return claim;
}

/* Two functions made from one code object may close over different cells and see different globals, and what was captured for
 * one is not the other. -1: the one that is known is gone. */
static int
is_alike(PyObject *weak, PyObject *function)
{
    PyObject *known = weak == NULL ? NULL : mb_still_there(weak);
    if (known == NULL) {
        return -1;
    }
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

int
mb_is_for(const Claim *claim, PyObject *function, PyObject **callable)
{
    /* A function that is made anew at each call (a comprehension's, a lambda) is the one before, if it sees the same. */
    int same = claim->function == NULL || is_alike(claim->kept, function) > 0 ? 1 : is_alike(claim->function, function);
    if (same <= 0) {
        return same;
    }
    *callable = claim->owner == ANYONE ? Py_NewRef(claim->callable) : mb_still_there(claim->callable);
    return *callable == NULL ? -1 : 1;
}

/* ---- calls from Python ---- */

static PyObject *
set_frame_callback(PyObject *Py_UNUSED(module), PyObject *callback)
{
    if (callback != Py_None && !PyCallable_Check(callback)) {
        PyErr_SetString(PyExc_TypeError, "the frame callback must be callable or None");
        return NULL;
    }
    PyObject *before = mb_frame_callback == NULL ? Py_NewRef(Py_None) : mb_frame_callback;
    mb_frame_callback = callback == Py_None ? NULL : Py_NewRef(callback);
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
attach(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
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
    CodeNote *note = mb_note_of(code, 1);
    if (note == NULL) {
        return NULL;
    }
    if (mb_attach_to(note, ANYONE, function, callable, pass_function) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
set_verdict(PyObject *object, Verdict verdict)
{
    PyObject *function, *code = code_of(object, &function);
    CodeNote *note = code == NULL ? NULL : mb_note_of(code, 1);
    if (note == NULL) {
        return NULL;
    }
    mb_clear_note(note, verdict);
    Py_RETURN_NONE;
}

static PyObject *
detach(PyObject *Py_UNUSED(module), PyObject *object)
{
    return set_verdict(object, UNKNOWN);
}

static PyObject *
mark_skip(PyObject *Py_UNUSED(module), PyObject *object)
{
    return set_verdict(object, SKIPPED);
}

static PyObject *
decline(PyObject *Py_UNUSED(module), PyObject *object)
{
    return set_verdict(object, DECLINED);
}

static PyObject *
leave_alone(PyObject *Py_UNUSED(module), PyObject *object)
{
    return set_verdict(object, LEFT_ALONE);
}

static PyObject *
attached(PyObject *Py_UNUSED(module), PyObject *object)
{
    PyObject *function, *code = code_of(object, &function);
    if (code == NULL) {
        return NULL;
    }
    CodeNote *note = mb_note_of(code, 0);
    if (note == NULL || note->claims == NULL) {
        if (PyErr_Occurred()) {
            return NULL;
        }
        Py_RETURN_NONE;
    }
    const Claim *claim = note->claims;
    PyObject *callable = claim->owner == ANYONE ? Py_NewRef(claim->callable) : mb_still_there(claim->callable);
    return callable == NULL ? Py_NewRef(Py_None) : callable;
}

static PyObject *
forget_frames(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    /* Dropping a callable may run code that frees notes, so the walk starts again after each. */
    for (CodeNote *note = notes; note != NULL;) {
        if (note->verdict == ATTACHED) {
            mb_clear_note(note, UNKNOWN);
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

static PyMethodDef methods[] = {
    {"set_frame_callback", set_frame_callback, METH_O, NULL},
    {"attach", (PyCFunction)(void (*)(void))attach, METH_VARARGS | METH_KEYWORDS, NULL},
    {"detach", detach, METH_O, NULL},
    {"mark_skip", mark_skip, METH_O, NULL},
    {"decline", decline, METH_O, NULL},
    {"leave_alone", leave_alone, METH_O, NULL},
    {"attached", attached, METH_O, NULL},
    {"forget_frames", forget_frames, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
mb_notes_init(PyObject *module)
{
    if (extra_index < 0) {
        extra_index = mb_request_code_extra(free_note);
        if (extra_index < 0) {
            PyErr_SetString(PyExc_ImportError, "CPython has no room left for notes on code objects (too many users of "
                                               "co_extra in this process)");
            return -1;
        }
    }
    return PyModule_AddFunctions(module, methods);
}
