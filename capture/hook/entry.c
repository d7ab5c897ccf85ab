/* Entry: what a user calls. Runs the guards of each captured variant and the first variant whose guards hold. */
#define MOEBIUS_NEEDS_FRAMES
#include "native.h"

#include <stddef.h>
#include <time.h>

#define KEPT_TIMES 16

/* One captured variant. Shared by the entry and by calls that are looking at an older list. */
typedef struct {
    int refs;
    GuardProgram *program;
    PyObject *target;
    unsigned long long hits;
} Variant;

/* Most recently hit first. Never changed while a call looks at it: changes make a new list. */
typedef struct {
    int refs;
    Py_ssize_t n;
    Variant *items[];
} VariantList;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function, *cold, *dict, *weakrefs;
    PyObject *around;     /* what stands around a call that runs as Python, or NULL */
    VariantList *list;    /* NULL: none */
    unsigned long long hits, misses;
    int goes_on;          /* `function` gives what is still to be run of a frame */
    int has_breaks;       /* the last call had a graph break: the next one is timed */
    unsigned long long timed;
    double times[KEPT_TIMES]; /* seconds of the newest such calls, without captures and reports */
} Entry;

/* ---- lists ---- */

static void
drop_variant(Variant *variant)
{
    if (--variant->refs == 0) {
        GuardProgram *program = variant->program;
        PyObject *target = variant->target;
        PyMem_Free(variant);
        Py_XDECREF(program);
        Py_XDECREF(target);
    }
}

static void
drop_list(VariantList *list)
{
    if (list != NULL && --list->refs == 0) {
        for (Py_ssize_t i = 0; i < list->n; i++) {
            drop_variant(list->items[i]);
        }
        PyMem_Free(list);
    }
}

static VariantList *
new_list(Py_ssize_t room)
{
    VariantList *list = PyMem_Malloc(offsetof(VariantList, items) + (size_t)room * sizeof(Variant *));
    if (list == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    list->refs = 1;
    list->n = 0;
    return list;
}

static void
append(VariantList *list, Variant *variant)
{
    variant->refs++;
    list->items[list->n++] = variant;
}

static void
replace_list(Entry *entry, VariantList *list)
{
    VariantList *old = entry->list;
    entry->list = list;
    drop_list(old);
}

/* Moves a variant that was hit to the front, if the entry still has it. Failure to is no error: order is only speed. */
static void
move_to_front(Entry *entry, Variant *hit)
{
    VariantList *old = entry->list;
    Py_ssize_t at = 0;
    while (old != NULL && at < old->n && old->items[at] != hit) {
        at++;
    }
    if (old == NULL || at == old->n || at == 0) {
        return;
    }
    VariantList *list = new_list(old->n);
    if (list == NULL) {
        PyErr_Clear();
        return;
    }
    append(list, hit);
    for (Py_ssize_t i = 0; i < old->n; i++) {
        if (i != at) {
            append(list, old->items[i]);
        }
    }
    replace_list(entry, list);
}

/* ---- the call ---- */

static PyObject *
as_tuple(PyObject *const *args, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t i = 0; tuple != NULL && i < n; i++) {
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    }
    return tuple;
}

/* Arguments as Python has them, new references. 0 or -1. */
static int
as_tuple_and_dict(PyObject *const *args, size_t nargsf, PyObject *kwnames, PyObject **positional, PyObject **keywords)
{
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    *positional = as_tuple(args, n);
    *keywords = PyDict_New();
    for (Py_ssize_t i = 0; *keywords != NULL && kwnames != NULL && i < PyTuple_GET_SIZE(kwnames); i++) {
        if (PyDict_SetItem(*keywords, PyTuple_GET_ITEM(kwnames, i), args[n + i]) < 0) {
            Py_CLEAR(*keywords);
        }
    }
    if (*positional != NULL && *keywords != NULL) {
        return 0;
    }
    Py_XDECREF(*positional);
    Py_XDECREF(*keywords);
    return -1;
}

static unsigned long long cold_calls; /* of all entries */

static PyObject *
call_cold(Entry *entry, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    PyObject *positional, *keywords;
    if (as_tuple_and_dict(args, nargsf, kwnames, &positional, &keywords) < 0) {
        return NULL;
    }
    cold_calls++;
    PyObject *cold = Py_NewRef(entry->cold);
    PyObject *call[] = {NULL, (PyObject *)entry, positional, keywords};
    PyObject *result = PyObject_Vectorcall(cold, call + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(cold);
    Py_DECREF(positional);
    Py_DECREF(keywords);
    return result;
}

static PyObject *
call_guarded(Entry *entry, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    VariantList *list = entry->list;
    if (list != NULL) {
        list->refs++;
        for (Py_ssize_t i = 0; i < list->n; i++) {
            Variant *variant = list->items[i];
            int holds = mb_program_check(variant->program, args, nargsf, kwnames);
            if (holds == 0) {
                continue;
            }
            if (holds < 0) {
                drop_list(list);
                return NULL;
            }
            entry->hits++;
            variant->hits++;
            if (i > 0) {
                move_to_front(entry, variant);
            }
            PyObject *target = Py_NewRef(variant->target);
            drop_list(list);
            PyObject *result = PyObject_Vectorcall(target, args, nargsf, kwnames);
            Py_DECREF(target);
            return result;
        }
        drop_list(list);
    }
    entry->misses++;
    return call_cold(entry, args, nargsf, kwnames);
}

/* Whether a trace function is set in this thread, or a tool of sys.monitoring follows all code (a debugger with breakpoints,
   coverage.py): the call runs as Python, so that it sees every line. Not ours, which counts what runs natively for a report. */
static PyObject *own_tracer;

int
mb_traced(void)
{
    PyThreadState *thread = PyThreadState_GET();
    return (thread->c_tracefunc != NULL && thread->c_traceobj != own_tracer) || mb_is_monitored(thread);
}

PyObject *
mb_set_own_tracer(PyObject *Py_UNUSED(module), PyObject *tracer)
{
    Py_XSETREF(own_tracer, tracer == Py_None ? NULL : Py_NewRef(tracer));
    Py_RETURN_NONE;
}

PyObject *
mb_is_traced(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(mb_traced());
}

/* Once in a process: a line of the log, which the trace function does not see being written. */
static void
say_traced(Entry *entry)
{
    static int said;
    if (said) {
        return;
    }
    said = 1;
    PyThreadState *thread = PyThreadState_GET();
    PyThreadState_EnterTracing(thread);
    PyObject *module = PyImport_ImportModule("moebius.cache.calls");
    PyObject *done = module == NULL ? NULL : PyObject_CallMethod(module, "say_traced", "O", entry->cold);
    PyThreadState_LeaveTracing(thread);
    if (done == NULL) {
        PyErr_WriteUnraisable((PyObject *)entry);
    }
    Py_XDECREF(done);
    Py_XDECREF(module);
}

/* A function of ours, which no trace function sees. Takes over the reference to `args`, which may be NULL. */
static PyObject *
call_untraced(PyObject *callable, PyObject *args)
{
    if (args == NULL) {
        return NULL;
    }
    PyThreadState *thread = PyThreadState_GET();
    PyThreadState_EnterTracing(thread);
    PyObject *result = PyObject_CallObject(callable, args);
    PyThreadState_LeaveTracing(thread);
    Py_DECREF(args);
    return result;
}

/* As Python. What stands around it is called before and gives what is called afterwards, with the exception or None: no
   frame of ours is below the function's, for a debugger. */
static PyObject *
call_as_python(Entry *entry, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (entry->around == NULL) {
        return PyObject_Vectorcall(entry->function, args, nargsf, kwnames);
    }
    PyObject *positional, *keywords;
    if (as_tuple_and_dict(args, nargsf, kwnames, &positional, &keywords) < 0) {
        return NULL;
    }
    PyObject *after = call_untraced(entry->around, Py_BuildValue("(NN)", positional, keywords));
    if (after == NULL) {
        return NULL;
    }
    PyObject *result = PyObject_Vectorcall(entry->function, args, nargsf, kwnames);
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    if (kind != NULL) {
        PyErr_NormalizeException(&kind, &value, &trace);
        if (trace != NULL) {
            PyException_SetTraceback(value, trace);
        }
    }
    PyObject *done = call_untraced(after, Py_BuildValue("(O)", value == NULL ? Py_None : value));
    Py_DECREF(after);
    if (done == NULL) {
        Py_CLEAR(result);
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return NULL;
    }
    Py_DECREF(done);
    PyErr_Restore(kind, value, trace);
    return result;
}

static PyObject *
call_entry_once(Entry *entry, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (mb_disabled) {
        return call_as_python(entry, args, nargsf, kwnames);
    }
    if (mb_traced()) {
        say_traced(entry);
        if (!entry->goes_on) {
            return call_as_python(entry, args, nargsf, kwnames);
        }
        PyThreadState *thread = PyThreadState_GET();
        PyThreadState_EnterTracing(thread);
        PyObject *rest = PyObject_Vectorcall(entry->function, args, nargsf, kwnames);
        PyThreadState_LeaveTracing(thread);
        return rest;
    }
    if (mb_hooked_threads == 0) {
        return call_guarded(entry, args, nargsf, kwnames);
    }
    /* Called from a frame that runs under the hook: what runs now is ours, and is not to be captured again. */
    HookScope scope = mb_hook_enter(0);
    PyObject *result = call_guarded(entry, args, nargsf, kwnames);
    mb_hook_leave(scope);
    return result;
}

/* ---- the rest of a frame ---- */

/* What a frame returns that goes on elsewhere: the call is made by whoever called the frame, so that a loop with a graph
   break in each iteration does not go one call deeper with each, and so that nobody holds the frame's values but who goes
   on with them. args: a tuple; for the rest of a frame that runs natively a list, which it is given and takes them out of. */
typedef struct {
    PyObject_HEAD
    PyObject *callable, *args, *keywords;
} Continuation;

static int
continuation_traverse(Continuation *continuation, visitproc visit, void *arg)
{
    Py_VISIT(continuation->callable);
    Py_VISIT(continuation->args);
    Py_VISIT(continuation->keywords);
    return 0;
}

static void
continuation_dealloc(Continuation *continuation)
{
    PyObject_GC_UnTrack(continuation);
    Py_CLEAR(continuation->callable);
    Py_CLEAR(continuation->args);
    Py_CLEAR(continuation->keywords);
    PyObject_GC_Del(continuation);
}

PyTypeObject mb_Continuation_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "moebius.hook.native.Continuation",
    .tp_basicsize = sizeof(Continuation),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "The rest of a call, which is still to be run.",
    .tp_dealloc = (destructor)continuation_dealloc,
    .tp_traverse = (traverseproc)continuation_traverse,
};

/* Takes over the reference to `args`. */
static PyObject *
new_continuation(PyObject *callable, PyObject *args, PyObject *keywords)
{
    Continuation *continuation = args == NULL ? NULL : PyObject_GC_New(Continuation, &mb_Continuation_Type);
    if (continuation == NULL) {
        Py_XDECREF(args);
        return NULL;
    }
    continuation->callable = Py_NewRef(callable);
    continuation->args = args;
    continuation->keywords = Py_XNewRef(keywords);
    PyObject_GC_Track(continuation);
    return (PyObject *)continuation;
}

static PyObject *
entry_later(PyObject *entry, PyObject *const *args, Py_ssize_t n)
{
    return new_continuation(entry, as_tuple(args, n), NULL);
}

PyObject *
mb_leave_to(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n < 1) {
        PyErr_SetString(PyExc_TypeError, "leave_to(callable, *values) needs a callable");
        return NULL;
    }
    PyObject *values = PyList_New(n - 1);
    for (Py_ssize_t i = 1; values != NULL && i < n; i++) {
        PyList_SET_ITEM(values, i - 1, Py_NewRef(args[i]));
    }
    return new_continuation(args[0], values, NULL);
}

PyObject *
mb_leave_to_call(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *callable, *positional, *keywords;
    if (!PyArg_ParseTuple(args, "OO!O!:leave_to_call", &callable, &PyTuple_Type, &positional, &PyDict_Type, &keywords)) {
        return NULL;
    }
    return new_continuation(callable, Py_NewRef(positional), keywords);
}

static PyObject *
call_with(PyObject *callable, PyObject *args, PyObject *keywords)
{
    return PyList_CheckExact(args) ? PyObject_CallOneArg(callable, args) : PyObject_Call(callable, args, keywords);
}

/* What runs is ours still, and not to be captured again by the hook of a frame around it. */
static PyObject *
call_unhooked_with(PyObject *callable, PyObject *args, PyObject *keywords)
{
    if (mb_hooked_threads == 0) {
        return call_with(callable, args, keywords);
    }
    HookScope scope = mb_hook_enter(0);
    PyObject *result = call_with(callable, args, keywords);
    mb_hook_leave(scope);
    return result;
}

/* Takes a result and runs what is still to be run, to its end. */
static PyObject *
finished(PyObject *result)
{
    while (result != NULL && Py_IS_TYPE(result, &mb_Continuation_Type)) {
        Continuation *continuation = (Continuation *)result;
        PyObject *callable = continuation->callable, *args = continuation->args, *keywords = continuation->keywords;
        continuation->callable = continuation->args = continuation->keywords = NULL;
        Py_DECREF(continuation);
        if (Py_IS_TYPE(callable, &mb_Entry_Type) && keywords == NULL) {
            PyObject *const *items = &PyTuple_GET_ITEM(args, 0);
            result = call_entry_once((Entry *)callable, items, (size_t)PyTuple_GET_SIZE(args), NULL);
        }
        else {
            result = call_unhooked_with(callable, args, keywords);
        }
        Py_XDECREF(keywords);
        Py_DECREF(args);
        Py_DECREF(callable);
    }
    return result;
}

PyObject *
mb_finish(PyObject *Py_UNUSED(module), PyObject *result)
{
    return finished(Py_NewRef(result));
}

/* ---- what runs natively: no frame of ours stands around it, for a debugger that is entered in it to stop in ---- */

PyObject *
mb_call_timed(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    if (n < 3) {
        PyErr_SetString(PyExc_TypeError, "call_timed(clock, ended, callable, *args, **kwargs) needs the first three");
        return NULL;
    }
    PyObject *began = PyObject_CallNoArgs(args[0]);
    if (began == NULL) {
        return NULL;
    }
    PyObject *result = PyObject_Vectorcall(args[2], args + 3, (size_t)(n - 3) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwnames);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = call_untraced(args[1], Py_BuildValue("(NO)", began, result == NULL ? Py_True : Py_False));
    if (done == NULL) {
        PyErr_WriteUnraisable(args[1]);
    }
    Py_XDECREF(done);
    PyErr_Restore(type, value, trace);
    return result;
}

PyObject *
mb_call_with_cells(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *code, *globals, *values, *result = NULL;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "O!O!nO!:call_with_cells", &PyCode_Type, &code, &PyDict_Type, &globals, &n, &PyList_Type,
                          &values)) {
        return NULL;
    }
    PyObject *function = PyFunction_New(code, globals), *first = PyList_GetSlice(values, 0, n);
    PyObject *cells = first == NULL ? NULL : PyList_AsTuple(first);
    Py_XDECREF(first);
    if (function != NULL && cells != NULL && PyList_SetSlice(values, 0, n, NULL) == 0 &&
        PyFunction_SetClosure(function, cells) == 0) {
        Py_CLEAR(cells);
        result = PyObject_CallOneArg(function, values);
    }
    Py_XDECREF(cells);
    Py_XDECREF(function);
    return result;
}

/* ---- tracebacks ---- */

static int
begins_with(PyObject *text, const char *begin)
{
    const char *name = text != NULL && PyUnicode_Check(text) ? PyUnicode_AsUTF8(text) : NULL;
    if (name == NULL) {
        PyErr_Clear();
    }
    return name != NULL && strncmp(name, begin, strlen(begin)) == 0;
}

/* Whether a frame is of ours: its file is named so (bytecode/hidden_frames.py), it is a graph's code, or what runs such
   code for an operator (a checkpoint's). Where an error of our own is raised, it stays. */
static int
is_ours(PyTracebackObject *entry)
{
    PyCodeObject *code = PyFrame_GetCode(entry->tb_frame);
    const char *name = PyUnicode_AsUTF8(code->co_filename);
    static const char ends[] = " (importlib._bootstrap)";
    size_t length = name == NULL ? 0 : strlen(name), end = sizeof ends - 1;
    int ours = begins_with(code->co_filename, "<moebius residual of ") || begins_with(code->co_filename, "<eval_with_key>") ||
               (length > end && strcmp(name + length - end, ends) == 0);
    if (!ours && entry->tb_next != NULL) {
        PyObject *globals = PyFrame_GetGlobals(entry->tb_frame);
        ours = globals != NULL && PyDict_Check(globals) &&
               begins_with(PyDict_GetItemString(globals, "__name__"), "moebius.lowering.");
        Py_XDECREF(globals);
    }
    if (name == NULL) {
        PyErr_Clear();
    }
    Py_DECREF(code);
    return ours;
}

/* An exception leaves a captured call: its traceback has the user's frames, as in plain Python. */
static void
leave_out_our_frames(void)
{
    PyObject *kind, *value, *found;
    PyErr_Fetch(&kind, &value, &found);
    PyTracebackObject **at = (PyTracebackObject **)&found;
    while (*at != NULL) {
        if (is_ours(*at)) {
            PyTracebackObject *ours = *at;
            *at = (PyTracebackObject *)Py_XNewRef(ours->tb_next);
            Py_DECREF(ours);
        }
        else {
            at = &(*at)->tb_next;
        }
    }
    PyErr_Restore(kind, value, found);
}

static double
seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static PyObject *
entry_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Entry *entry = (Entry *)self;
    int timed = entry->has_breaks && own_tracer == NULL;
    unsigned long long cold = cold_calls;
    double began = timed ? seconds_now() : 0.0;
    PyObject *result = call_entry_once(entry, args, nargsf, kwnames);
    entry->has_breaks = result != NULL && Py_IS_TYPE(result, &mb_Continuation_Type);
    timed = timed && entry->has_breaks;
    result = finished(result);
    if (timed && result != NULL && cold == cold_calls) {
        entry->times[entry->timed++ % KEPT_TIMES] = seconds_now() - began;
    }
    if (result == NULL && !mb_disabled) {
        leave_out_our_frames();
    }
    return result;
}

/* ---- the type ---- */

/* As functools.update_wrapper does: name, module, doc, annotations and attributes are those of the function. */
static int
copy_face(Entry *entry)
{
    static const char *const names[] = {
        "__module__", "__name__", "__qualname__", "__doc__",
#if PY_VERSION_HEX >= 0x030E0000
        "__annotate__",
#else
        "__annotations__",
#endif
#if PY_VERSION_HEX >= 0x030C0000
        "__type_params__",
#endif
    };
    for (size_t i = 0; i < Py_ARRAY_LENGTH(names); i++) {
        PyObject *value = PyObject_GetAttrString(entry->function, names[i]);
        if (value == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
                return -1;
            }
            PyErr_Clear();
            continue;
        }
        int failed = PyDict_SetItemString(entry->dict, names[i], value);
        Py_DECREF(value);
        if (failed) {
            return -1;
        }
    }
    if (PyFunction_Check(entry->function) && ((PyFunctionObject *)entry->function)->func_dict != NULL &&
        PyDict_Update(entry->dict, ((PyFunctionObject *)entry->function)->func_dict) < 0) {
        return -1;
    }
    return PyDict_SetItemString(entry->dict, "__wrapped__", entry->function);
}

static PyObject *
entry_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", "cold", "goes_on", "around", NULL};
    PyObject *function, *cold, *around = Py_None;
    int goes_on = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|pO:Entry", names, &function, &cold, &goes_on, &around)) {
        return NULL;
    }
    if (!PyCallable_Check(function) || !PyCallable_Check(cold)) {
        PyErr_SetString(PyExc_TypeError, "Entry(function, cold): both must be callable");
        return NULL;
    }
    Entry *entry = (Entry *)type->tp_alloc(type, 0);
    if (entry == NULL) {
        return NULL;
    }
    entry->vectorcall = entry_vectorcall;
    entry->function = Py_NewRef(function);
    entry->cold = Py_NewRef(cold);
    entry->around = around == Py_None ? NULL : Py_NewRef(around);
    entry->goes_on = goes_on;
    entry->dict = PyDict_New();
    if (entry->dict == NULL || copy_face(entry) < 0) {
        Py_DECREF(entry);
        return NULL;
    }
    return (PyObject *)entry;
}

static int
entry_traverse(Entry *entry, visitproc visit, void *arg)
{
    Py_VISIT(entry->function);
    Py_VISIT(entry->cold);
    Py_VISIT(entry->around);
    Py_VISIT(entry->dict);
    if (entry->list != NULL) {
        for (Py_ssize_t i = 0; i < entry->list->n; i++) {
            Py_VISIT(entry->list->items[i]->program);
            Py_VISIT(entry->list->items[i]->target);
        }
    }
    return 0;
}

static int
entry_clear(Entry *entry)
{
    replace_list(entry, NULL);
    Py_CLEAR(entry->dict);
    /* `function`, `cold` and `around` stay until dealloc: a finalizer may still call this entry. */
    return 0;
}

static void
entry_dealloc(Entry *entry)
{
    PyObject_GC_UnTrack(entry);
    if (entry->weakrefs != NULL) {
        PyObject_ClearWeakRefs((PyObject *)entry);
    }
    entry_clear(entry);
    Py_CLEAR(entry->function);
    Py_CLEAR(entry->cold);
    Py_CLEAR(entry->around);
    Py_TYPE(entry)->tp_free((PyObject *)entry);
}

static PyObject *
entry_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    if (object == NULL || object == Py_None) {
        return Py_NewRef(self);
    }
    return PyMethod_New(self, object);
}

static PyObject *
entry_repr(PyObject *self)
{
    return PyUnicode_FromFormat("<captured %R>", ((Entry *)self)->function);
}

static PyObject *
entry_add(Entry *entry, PyObject *args)
{
    PyObject *program, *target;
    if (!PyArg_ParseTuple(args, "O!O:add", &mb_GuardProgram_Type, &program, &target)) {
        return NULL;
    }
    if (!PyCallable_Check(target)) {
        PyErr_SetString(PyExc_TypeError, "add(program, target): the target must be callable");
        return NULL;
    }
    VariantList *old = entry->list;
    VariantList *list = new_list(old == NULL ? 1 : old->n + 1);
    Variant *variant = PyMem_Malloc(sizeof(Variant));
    if (list == NULL || variant == NULL) {
        PyMem_Free(list);
        PyMem_Free(variant);
        return PyErr_NoMemory();
    }
    *variant = (Variant){0, (GuardProgram *)Py_NewRef(program), Py_NewRef(target), 0};
    append(list, variant);
    for (Py_ssize_t i = 0; old != NULL && i < old->n; i++) {
        append(list, old->items[i]);
    }
    replace_list(entry, list);
    Py_RETURN_NONE;
}

static PyObject *
entry_remove(Entry *entry, PyObject *program)
{
    VariantList *old = entry->list;
    VariantList *list = new_list(old == NULL ? 0 : old->n);
    if (list == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; old != NULL && i < old->n; i++) {
        if ((PyObject *)old->items[i]->program != program) {
            append(list, old->items[i]);
        }
    }
    long removed = (long)((old == NULL ? 0 : old->n) - list->n);
    if (list->n == 0) {
        drop_list(list);
        list = NULL;
    }
    replace_list(entry, list);
    return PyBool_FromLong(removed);
}

static PyObject *
entry_clear_method(Entry *entry, PyObject *Py_UNUSED(unused))
{
    replace_list(entry, NULL);
    Py_RETURN_NONE;
}

/* copy.copy, copy.deepcopy and pickle treat it as they treat functions: as itself, and by name. */
static PyObject *
entry_copy(PyObject *entry, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(entry);
}

static PyObject *
entry_reduce(PyObject *entry, PyObject *Py_UNUSED(unused))
{
    return PyObject_GetAttrString(entry, "__qualname__");
}

static PyMethodDef entry_methods[] = {
    {"__copy__", entry_copy, METH_NOARGS, NULL},
    {"__deepcopy__", entry_copy, METH_O, NULL},
    {"__reduce__", entry_reduce, METH_NOARGS, NULL},
    {"add", (PyCFunction)entry_add, METH_VARARGS, NULL},
    {"remove", (PyCFunction)entry_remove, METH_O, NULL},
    {"clear", (PyCFunction)entry_clear_method, METH_NOARGS, NULL},
    {"later", (PyCFunction)(void (*)(void))entry_later, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *
entry_targets(Entry *entry, void *Py_UNUSED(closure))
{
    VariantList *list = entry->list;
    Py_ssize_t n = list == NULL ? 0 : list->n;
    if (list != NULL) {
        list->refs++;
    }
    PyObject *result = PyList_New(n);
    for (Py_ssize_t i = 0; result != NULL && i < n; i++) {
        Variant *variant = list->items[i];
        PyObject *row = Py_BuildValue("(OOK)", variant->program, variant->target, variant->hits);
        if (row == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyList_SET_ITEM(result, i, row);
    }
    drop_list(list);
    return result;
}

static PyObject *
entry_count(Entry *entry, void *closure)
{
    return PyLong_FromUnsignedLongLong(closure == NULL ? entry->hits : entry->misses);
}

static PyObject *
entry_times(Entry *entry, void *Py_UNUSED(closure))
{
    Py_ssize_t n = entry->timed < KEPT_TIMES ? (Py_ssize_t)entry->timed : KEPT_TIMES;
    PyObject *times = PyTuple_New(n);
    for (Py_ssize_t i = 0; times != NULL && i < n; i++) {
        PyObject *seconds = PyFloat_FromDouble(entry->times[i]);
        if (seconds == NULL) {
            Py_CLEAR(times);
            break;
        }
        PyTuple_SET_ITEM(times, i, seconds);
    }
    return times;
}

static PyObject *
entry_object(Entry *entry, void *closure)
{
    return Py_NewRef(closure == NULL ? entry->function : entry->cold);
}

#if PY_VERSION_HEX >= 0x030E0000
/* Annotations are evaluated when somebody asks (PEP 649), and then by the function: they may name what comes later. */
static PyObject *
entry_annotations(Entry *entry, void *Py_UNUSED(closure))
{
    PyObject *own = PyDict_GetItemString(entry->dict, "__annotations__");
    return own != NULL ? Py_NewRef(own) : PyObject_GetAttrString(entry->function, "__annotations__");
}

static int
entry_set_annotations(Entry *entry, PyObject *value, void *Py_UNUSED(closure))
{
    return value == NULL ? PyDict_DelItemString(entry->dict, "__annotations__")
                         : PyDict_SetItemString(entry->dict, "__annotations__", value);
}
#endif

/* What a function has and others read or replace (its code, defaults, ...) is the function's own. */
static PyObject *
entry_of_function(Entry *entry, void *name)
{
    return PyObject_GetAttrString(entry->function, name);
}

static int
entry_set_of_function(Entry *entry, PyObject *value, void *name)
{
    return PyObject_SetAttrString(entry->function, name, value);
}

#define OF_FUNCTION(name) {name, (getter)entry_of_function, (setter)entry_set_of_function, NULL, name}

static PyGetSetDef entry_getset[] = {
    OF_FUNCTION("__code__"),
    OF_FUNCTION("__defaults__"),
    OF_FUNCTION("__kwdefaults__"),
    OF_FUNCTION("__globals__"),
    OF_FUNCTION("__closure__"),
    {"targets", (getter)entry_targets, NULL, NULL, NULL},
    {"hits", (getter)entry_count, NULL, NULL, NULL},
    {"misses", (getter)entry_count, NULL, NULL, "misses"},
    {"times", (getter)entry_times, NULL, NULL, NULL},
    {"function", (getter)entry_object, NULL, NULL, NULL},
    {"cold", (getter)entry_object, NULL, NULL, "cold"},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
#if PY_VERSION_HEX >= 0x030E0000
    {"__annotations__", (getter)entry_annotations, (setter)entry_set_annotations, NULL, NULL},
#endif
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject mb_Entry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "moebius.hook.native.Entry",
    .tp_basicsize = sizeof(Entry),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_doc = "Entry(function, cold, goes_on=False, around=None)\n--\n\n",
    .tp_new = entry_new,
    .tp_dealloc = (destructor)entry_dealloc,
    .tp_traverse = (traverseproc)entry_traverse,
    .tp_clear = (inquiry)entry_clear,
    .tp_vectorcall_offset = offsetof(Entry, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = entry_get,
    .tp_repr = entry_repr,
    .tp_dictoffset = offsetof(Entry, dict),
    .tp_weaklistoffset = offsetof(Entry, weakrefs),
    .tp_methods = entry_methods,
    .tp_getset = entry_getset,
};
