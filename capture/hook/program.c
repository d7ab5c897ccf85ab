/* GuardProgram: from tuples to a flat program, and its face towards Python. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

static const char *const slot_names[] = {
    "arg", "const", "weak", "dict_item", "instance_dict", "list_item", "tuple_item", "attr", "cell", "type", "python",
};
static const char *const check_names[] = {
    "is", "is_weak", "type", "equal", "length", "keys", "absent", "contents", "tensor",
    "none_of", "distinct", "same", "answers", "python", "dict", "class", "instance", "static_tensor", "function",
};

/* The names of all kinds of checks. */
PyObject *
mb_check_names(void)
{
    Py_ssize_t n = (Py_ssize_t)Py_ARRAY_LENGTH(check_names);
    PyObject *names = PyTuple_New(n);
    for (Py_ssize_t i = 0; names != NULL && i < n; i++) {
        PyObject *name = PyUnicode_FromString(check_names[i]);
        if (name == NULL) {
            Py_CLEAR(names);
            break;
        }
        PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}

/* ---- building ---- */

static int
complain(const char *what, Py_ssize_t index, PyObject *spec, const char *why)
{
    PyErr_Format(PyExc_ValueError, "%s %zd, %R: %s", what, index, spec, why);
    return -1;
}

static int
kind_of(PyObject *spec, const char *what, Py_ssize_t index, const char *const *names, int count)
{
    if (!PyTuple_Check(spec) || PyTuple_GET_SIZE(spec) == 0 || !PyUnicode_Check(PyTuple_GET_ITEM(spec, 0))) {
        return complain(what, index, spec, "must be a tuple that starts with the name of its kind");
    }
    for (int i = 0; i < count; i++) {
        if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(spec, 0), names[i]) == 0) {
            return i;
        }
    }
    return complain(what, index, spec, "unknown kind");
}

/* The slot number in field `field`; only slots before `limit` may be named. */
static int
slot_number(PyObject *spec, Py_ssize_t field, int limit, const char *what, Py_ssize_t index)
{
    Py_ssize_t n = PyNumber_AsSsize_t(PyTuple_GET_ITEM(spec, field), PyExc_IndexError);
    if (n == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (n < 0 || n >= limit) {
        return complain(what, index, spec, "names a slot that does not exist (before it)");
    }
    return (int)n;
}

/* The slot numbers in the fields from `from` on: memory of the caller's, NULL with an error. */
static int *
slot_numbers(PyObject *spec, Py_ssize_t from, int limit, const char *what, Py_ssize_t index)
{
    Py_ssize_t n = PyTuple_GET_SIZE(spec) - from;
    int *numbers = PyMem_New(int, (size_t)n + 1);
    if (numbers == NULL) {
        mb_no_memory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        numbers[i] = slot_number(spec, from + i, limit, what, index);
        if (numbers[i] < 0) {
            PyMem_Free(numbers);
            return NULL;
        }
    }
    return numbers;
}

static int
build_slot(GuardProgram *p, int index, PyObject *spec)
{
    static const int sizes[] = {2, 2, 2, 3, 2, 3, 3, 3, 2, 2, 3};    /* python: at least */
    Slot *slot = &p->slots[index];
    int kind = kind_of(spec, "slot", index, slot_names, (int)Py_ARRAY_LENGTH(slot_names));
    if (kind < 0) {
        return -1;
    }
    Py_ssize_t n_more = PyTuple_GET_SIZE(spec) - sizes[kind];
    if (kind == SLOT_PYTHON ? n_more < 0 : n_more != 0) {
        return complain("slot", index, spec, "wrong number of fields");
    }
    slot->kind = (SlotKind)kind;
    slot->parent = -1;
    PyObject *last = PyTuple_GET_ITEM(spec, sizes[kind] - 1);
    if (kind == SLOT_CONST) {
        slot->object = Py_NewRef(last);
        return 0;
    }
    if (kind == SLOT_WEAK) {
        slot->object = PyWeakref_Check(last) ? Py_NewRef(last) : PyWeakref_NewRef(last, NULL);
        return slot->object == NULL ? -1 : 0;
    }
    if (kind == SLOT_ARG || kind == SLOT_LIST_ITEM || kind == SLOT_TUPLE_ITEM) {
        slot->index = PyNumber_AsSsize_t(last, PyExc_IndexError);
        if (slot->index == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    if (kind == SLOT_ARG) {
        if (slot->index < 0 || slot->index >= p->n_positional + PyTuple_GET_SIZE(p->kwnames)) {
            return complain("slot", index, spec, "there is no such argument");
        }
        return 0;
    }
    slot->parent = slot_number(spec, 1, index, "slot", index);
    if (slot->parent < 0) {
        return -1;
    }
    if (kind == SLOT_ATTR && !PyUnicode_Check(last)) {
        return complain("slot", index, spec, "the attribute's name must be a str");
    }
    if (kind == SLOT_PYTHON && !PyCallable_Check(last)) {
        return complain("slot", index, spec, "needs a callable");
    }
    if (kind == SLOT_DICT_ITEM && PyObject_Hash(last) == -1) {
        return -1;
    }
    if (n_more) {
        slot->more = slot_numbers(spec, sizes[kind], index, "slot", index);
        if (slot->more == NULL) {
            return -1;
        }
        slot->n_more = (int)n_more;
    }
    if (kind == SLOT_ATTR || kind == SLOT_PYTHON || kind == SLOT_DICT_ITEM) {
        slot->object = Py_NewRef(last);
        if (kind == SLOT_ATTR) {
            PyUnicode_InternInPlace(&slot->object);
        }
    }
    return 0;
}

static int
copy_slots(GuardProgram *p, Check *check, int index, PyObject *spec, Py_ssize_t from)
{
    check->slots = slot_numbers(spec, from, p->n_slots, "check", index);
    check->n_slots = check->slots == NULL ? 0 : (int)(PyTuple_GET_SIZE(spec) - from);
    return check->slots == NULL ? -1 : 0;
}

/* What can change later is no constant: what is not hashable is refused. (Slices are constants, yet not hashable on 3.11.) */
static int
require_constant(PyObject *value)
{
    if (PySlice_Check(value)) {
        return 0;
    }
    if (PyTuple_CheckExact(value)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++) {
            if (require_constant(PyTuple_GET_ITEM(value, i)) < 0) {
                return -1;
            }
        }
        return 0;
    }
    return PyObject_Hash(value) == -1 ? -1 : 0;
}

static int
build_watched(Check *check, int index, PyObject *spec, int kind)
{
    PyObject *object = PyTuple_GET_ITEM(spec, 1), *expected = PyTuple_GET_ITEM(spec, 2);
    PyObject *order = PyTuple_GET_ITEM(spec, 3);
    if (kind == CHECK_DICT ? !PyDict_Check(object) : !PyType_Check(object)) {
        return complain("check", index, spec, kind == CHECK_DICT ? "needs a dict" : "needs a class");
    }
    if (!PyDict_CheckExact(expected)) {
        return complain("check", index, spec, "what is expected must be a dict");
    }
    if (!(PyTuple_Check(order) || (kind == CHECK_DICT && order == Py_None))) {
        return complain("check", index, spec, kind == CHECK_DICT ? "all keys: a tuple or None" : "the MRO: a tuple");
    }
    check->object = Py_NewRef(object);
    check->order = order == Py_None ? NULL : Py_NewRef(order);
    check->expected = PyDict_Copy(expected);
    return check->expected == NULL ? -1 : 0;
}

static int
build_instance(Check *check, int index, PyObject *spec)
{
    PyObject *object = PyTuple_GET_ITEM(spec, 1), *type = PyTuple_GET_ITEM(spec, 2), *dict = PyTuple_GET_ITEM(spec, 3);
    if (PyType_Check(object) || !PyType_Check(type)) {
        return complain("check", index, spec, "needs an instance that is no class, and a class");
    }
    if (dict != Py_None && !PyDict_Check(dict)) {
        return complain("check", index, spec, "its __dict__: a dict or None");
    }
    check->object = Py_NewRef(object);
    check->order = Py_NewRef(type);
    check->expected = dict == Py_None ? NULL : Py_NewRef(dict);
    return 0;
}

static int
build_function(Check *check, int index, PyObject *spec)
{
    check->object = Py_NewRef(PyTuple_GET_ITEM(spec, 1));
    if (!PyFunction_Check(check->object) || !PyCode_Check(PyTuple_GET_ITEM(spec, 2))) {
        return complain("check", index, spec, "needs a Python function and its code");
    }
    check->expected = PyTuple_GetSlice(spec, 2, 5);
    return check->expected == NULL ? -1 : 0;
}

static int
build_answers(Check *check, int index, PyObject *spec)
{
    PyObject *pairs = PyTuple_GET_ITEM(spec, 1);
    if (!PyTuple_Check(pairs)) {
        return complain("check", index, spec, "needs a tuple of (callable, result)");
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 || !PyCallable_Check(PyTuple_GET_ITEM(pair, 0))) {
            return complain("check", index, spec, "needs a tuple of (callable, result)");
        }
    }
    check->expected = Py_NewRef(pairs);
    return 0;
}

static int
build_none_of(Check *check, int index, PyObject *spec, PyObject *objects)
{
    if (!PyTuple_Check(objects)) {
        return complain("check", index, spec, "the objects that it must not be: a tuple");
    }
    check->length = PyTuple_GET_SIZE(objects);
    check->addresses = PyMem_New(uintptr_t, (size_t)check->length + 1);
    if (check->addresses == NULL) {
        return mb_no_memory();
    }
    for (Py_ssize_t i = 0; i < check->length; i++) {
        check->addresses[i] = (uintptr_t)PyTuple_GET_ITEM(objects, i);
    }
    qsort(check->addresses, (size_t)check->length, sizeof(uintptr_t), mb_by_address);
    check->expected = Py_NewRef(objects);    /* an address belongs to an object while that is alive */
    return 0;
}

static int
build_check(GuardProgram *p, int index, PyObject *spec)
{
    static const int sizes[] = {3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0, 3, 2, 0, 4, 4, 4, 3, 5};
    Check *check = &p->checks[index];
    int kind = kind_of(spec, "check", index, check_names, (int)Py_ARRAY_LENGTH(check_names));
    if (kind < 0) {
        return -1;
    }
    if (sizes[kind] ? PyTuple_GET_SIZE(spec) != sizes[kind] : PyTuple_GET_SIZE(spec) < (kind == CHECK_PYTHON ? 2 : 1)) {
        return complain("check", index, spec, "wrong number of fields");
    }
    check->kind = (CheckKind)kind;
    check->slot = -1;
    PyObject *last = PyTuple_GET_ITEM(spec, PyTuple_GET_SIZE(spec) - 1);
    switch (check->kind) {
    case CHECK_DICT:
    case CHECK_CLASS:
        return build_watched(check, index, spec, kind);
    case CHECK_INSTANCE:
        return build_instance(check, index, spec);
    case CHECK_FUNCTION:
        return build_function(check, index, spec);
    case CHECK_ANSWERS:
        return build_answers(check, index, spec);
    case CHECK_PYTHON:
        check->object = Py_NewRef(PyTuple_GET_ITEM(spec, 1));
        if (!PyCallable_Check(check->object)) {
            return complain("check", index, spec, "needs a callable");
        }
        return copy_slots(p, check, index, spec, 2);
    case CHECK_DISTINCT:
    case CHECK_SAME:
        return copy_slots(p, check, index, spec, 1);
    case CHECK_STATIC_TENSOR:
        check->object = Py_NewRef(PyTuple_GET_ITEM(spec, 1));
        check->meta = mb_tensor_meta_new(last);
        return check->meta == NULL ? -1 : 0;
    default:
        break;
    }
    check->slot = slot_number(spec, 1, p->n_slots, "check", index);
    if (check->slot < 0) {
        return -1;
    }
    switch (check->kind) {
    case CHECK_IS_WEAK:
        check->object = PyWeakref_Check(last) ? Py_NewRef(last) : PyWeakref_NewRef(last, NULL);
        return check->object == NULL ? -1 : 0;
    case CHECK_TYPE:
        if (!PyType_Check(last)) {
            return complain("check", index, spec, "needs a class");
        }
        break;
    case CHECK_EQUAL:
    case CHECK_ABSENT:
        if (require_constant(last) < 0) {
            return -1;
        }
        break;
    case CHECK_LENGTH:
        check->length = PyNumber_AsSsize_t(last, PyExc_OverflowError);
        return check->length == -1 && PyErr_Occurred() ? -1 : 0;
    case CHECK_KEYS:
    case CHECK_CONTENTS:
        if (!PyTuple_Check(last)) {
            return complain("check", index, spec, "what is expected must be a tuple");
        }
        check->expected = Py_NewRef(last);
        return 0;
    case CHECK_TENSOR:
        check->meta = mb_tensor_meta_new(last);
        return check->meta == NULL ? -1 : 0;
    case CHECK_NONE_OF:
        return build_none_of(check, index, spec, last);
    default:
        break;
    }
    check->object = Py_NewRef(last);
    return 0;
}

/* Appends `slot` and what it starts from to the order, unless they are there. */
static void
schedule(GuardProgram *p, int slot, char *done)
{
    if (slot < 0 || done[slot]) {
        return;
    }
    /* Parents come first. A chain is as deep as the source expression, so recursion would do, but a loop cannot
     * overflow. What else a function is given is as deep as keys that are computed of items at computed keys. */
    for (int s = slot; s >= 0 && !done[s]; s = p->slots[s].parent) {
        for (int i = 0; i < p->slots[s].n_more; i++) {
            schedule(p, p->slots[s].more[i], done);
        }
    }
    int start = p->n_order;
    for (int s = slot; s >= 0 && !done[s]; s = p->slots[s].parent) {
        done[s] = 1;
        p->order[p->n_order++] = s;
    }
    for (int i = start, j = p->n_order - 1; i < j; i++, j--) {
        int swap = p->order[i];
        p->order[i] = p->order[j];
        p->order[j] = swap;
    }
}

/* Sets the checks on objects known from the start out by kind. 0 or -1. */
static int
build_watches(GuardProgram *p)
{
    static const size_t sizes[N_WATCHED] = {
        sizeof(TagWatch), sizeof(TagWatch), sizeof(InstanceWatch), sizeof(TensorWatch), sizeof(FunctionWatch),
    };
    for (int i = 0; i < p->n_checks; i++) {
        if (mb_watched(p->checks[i].kind)) {
            p->checks[i].watch = p->watches[p->checks[i].kind - CHECK_DICT].count++;
        }
    }
    for (int k = 0; k < N_WATCHED; k++) {
        size_t n = (size_t)p->watches[k].count + 1;
        p->watches[k].checks = PyMem_Calloc(n, sizeof(int));
        p->watches[k].tags = PyMem_Calloc(n, sizes[k]);
        if (p->watches[k].checks == NULL || p->watches[k].tags == NULL) {
            return mb_no_memory();
        }
    }
    for (int i = 0; i < p->n_checks; i++) {
        Check *check = &p->checks[i];
        if (!mb_watched(check->kind)) {
            continue;
        }
        Watches *watches = &p->watches[check->kind - CHECK_DICT];
        watches->checks[check->watch] = i;
        if (check->kind == CHECK_INSTANCE) {
            watches->instances[check->watch] = (InstanceWatch){check->object, check->order, NULL, check->expected};
        }
        else if (check->kind == CHECK_STATIC_TENSOR) {
            watches->tensors[check->watch] = (TensorWatch){check->object, check->meta};
        }
        else if (check->kind == CHECK_FUNCTION) {
            PyObject *parts[3];
            for (int j = 0; j < 3; j++) {
                PyObject *part = PyTuple_GET_ITEM(check->expected, j);
                parts[j] = part == Py_None ? NULL : part;
            }
            watches->functions[check->watch] =
                (FunctionWatch){(PyFunctionObject *)check->object, parts[0], parts[1], parts[2]};
        }
        else {
            watches->tags[check->watch] = (TagWatch){check->object, NO_TAG};
        }
    }
    return mb_subscribe(p);
}

static int
build(GuardProgram *p, PyObject *slots, PyObject *checks)
{
    if (PyList_GET_SIZE(slots) > INT_MAX / 2 || PyList_GET_SIZE(checks) > INT_MAX / 2) {
        PyErr_SetString(PyExc_OverflowError, "too many guards");
        return -1;
    }
    size_t n_slots = (size_t)PyList_GET_SIZE(slots), n_checks = (size_t)PyList_GET_SIZE(checks);
    p->slots = PyMem_Calloc(n_slots + 1, sizeof(Slot));
    p->checks = PyMem_Calloc(n_checks + 1, sizeof(Check));
    p->order = PyMem_Calloc(n_slots + 1, sizeof(int));
    p->dynamic = PyMem_Calloc(n_checks + 1, sizeof(int));
    p->scratch = PyMem_Calloc(n_slots + 1, sizeof(PyObject *));
    if (!p->slots || !p->checks || !p->order || !p->dynamic || !p->scratch) {
        return mb_no_memory();
    }
    for (size_t i = 0; i < n_slots; i++) {
        p->n_slots = (int)i + 1;
        if (build_slot(p, (int)i, PyList_GET_ITEM(slots, (Py_ssize_t)i)) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < n_checks; i++) {
        p->n_checks = (int)i + 1;
        if (build_check(p, (int)i, PyList_GET_ITEM(checks, (Py_ssize_t)i)) < 0) {
            return -1;
        }
    }
    char *done = PyMem_Calloc(n_slots + 1, 1);
    if (done == NULL) {
        return mb_no_memory();
    }
    for (int i = 0; i < p->n_checks; i++) {
        Check *check = &p->checks[i];
        check->first_load = p->n_order;
        schedule(p, check->slot, done);
        for (int j = 0; j < check->n_slots; j++) {
            schedule(p, check->slots[j], done);
        }
        check->loads = p->n_order - check->first_load;
        if (!mb_watched(check->kind)) {
            p->dynamic[p->n_dynamic++] = i;
        }
    }
    p->first_tail = p->n_order;
    for (int i = 0; i < p->n_slots; i++) {
        schedule(p, i, done);
    }
    PyMem_Free(done);
    return build_watches(p);
}

/* ---- the type ---- */

static int
program_traverse(GuardProgram *p, visitproc visit, void *arg)
{
    Py_VISIT(p->kwnames);
    for (int i = 0; i < p->n_slots; i++) {
        Py_VISIT(p->slots[i].object);
    }
    for (int i = 0; i < p->n_checks; i++) {
        Check *check = &p->checks[i];
        Py_VISIT(check->object);
        Py_VISIT(check->expected);
        Py_VISIT(check->order);
        if (check->meta != NULL) {
            int result = mb_tensor_meta_traverse(check->meta, visit, arg);
            if (result) {
                return result;
            }
        }
    }
    return 0;
}

static int
program_clear(GuardProgram *p)
{
    p->cleared = 1;
    mb_unsubscribe(p);
    int n_slots = p->n_slots, n_checks = p->n_checks;
    p->n_slots = p->n_checks = p->n_dynamic = p->n_order = 0;
    for (int k = 0; k < N_WATCHED; k++) {
        p->watches[k].count = 0;
    }
    for (int i = 0; i < n_slots; i++) {
        Py_CLEAR(p->slots[i].object);
        PyMem_Free(p->slots[i].more);
        p->slots[i].more = NULL;
    }
    for (int i = 0; i < n_checks; i++) {
        Check *check = &p->checks[i];
        Py_CLEAR(check->object);
        Py_CLEAR(check->expected);
        Py_CLEAR(check->order);
        PyMem_Free(check->slots);
        PyMem_Free(check->addresses);
        mb_tensor_meta_free(check->meta);
        check->slots = NULL;
        check->addresses = NULL;
        check->meta = NULL;
    }
    return 0;
}

static void
program_dealloc(GuardProgram *p)
{
    PyObject_GC_UnTrack(p);
    program_clear(p);
    Py_CLEAR(p->kwnames);
    PyMem_Free(p->slots);
    PyMem_Free(p->checks);
    PyMem_Free(p->order);
    for (int k = 0; k < N_WATCHED; k++) {
        PyMem_Free(p->watches[k].checks);
        PyMem_Free(p->watches[k].tags);
    }
    PyMem_Free(p->dynamic);
    PyMem_Free(p->scratch);
    Py_TYPE(p)->tp_free((PyObject *)p);
}

static PyObject *
program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"n_positional", "kwnames", "slots", "checks", NULL};
    Py_ssize_t n_positional;
    PyObject *kwnames, *slots, *checks;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO!OO:GuardProgram", names, &n_positional, &PyTuple_Type, &kwnames,
                                     &slots, &checks)) {
        return NULL;
    }
    if (n_positional < 0) {
        PyErr_SetString(PyExc_ValueError, "n_positional must not be negative");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        if (!PyUnicode_Check(PyTuple_GET_ITEM(kwnames, i))) {
            PyErr_SetString(PyExc_TypeError, "kwnames must be a tuple of str");
            return NULL;
        }
    }
    GuardProgram *p = (GuardProgram *)type->tp_alloc(type, 0);
    if (p == NULL) {
        return NULL;
    }
    p->n_positional = n_positional;
    p->kwnames = Py_NewRef(kwnames);
    PyObject *slot_list = PySequence_List(slots);
    PyObject *check_list = slot_list ? PySequence_List(checks) : NULL;
    int built = check_list ? build(p, slot_list, check_list) : -1;
    Py_XDECREF(slot_list);
    Py_XDECREF(check_list);
    if (built < 0) {
        Py_DECREF(p);
        return NULL;
    }
    return (PyObject *)p;
}

/* ---- the face towards Python; its methods are in inspect.c ---- */

static PyObject *
program_n_checks(GuardProgram *p, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(p->n_checks);
}

static PyObject *
program_n_compared(GuardProgram *p, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(mb_compared(p));
}

static PyGetSetDef program_getset[] = {
    {"n_checks", (getter)program_n_checks, NULL, NULL, NULL},
    {"n_compared", (getter)program_n_compared, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject mb_GuardProgram_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "moebius.hook.native.GuardProgram",
    .tp_basicsize = sizeof(GuardProgram),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "GuardProgram(n_positional, kwnames, slots, checks)\n--\n\n",
    .tp_new = program_new,
    .tp_dealloc = (destructor)program_dealloc,
    .tp_traverse = (traverseproc)program_traverse,
    .tp_clear = (inquiry)program_clear,
    .tp_methods = mb_program_methods,
    .tp_getset = program_getset,
};
