/* Running a guard program: reaching slots, running checks. Nothing here changes what it looks at. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

/* The instance's __dict__, made if the instance keeps its values elsewhere so far; no user code runs. New reference. */
static PyObject *
instance_dict(PyObject *object)
{
    if (PyType_Check(object)) {
#if PY_VERSION_HEX >= 0x030C0000
        return PyType_GetDict((PyTypeObject *)object);
#else
        return Py_XNewRef(((PyTypeObject *)object)->tp_dict);
#endif
    }
    return PyObject_GenericGetDict(object, NULL);
}

/* What the function gives for `first`, unless that is NULL, and the objects of the slots. New reference. */
static PyObject *
call_with(PyObject *function, PyObject *first, const int *slots, int n_slots, PyObject *const *values)
{
    PyObject *small[8] = {first};
    size_t given = first != NULL, n = given + (size_t)n_slots;
    PyObject **args = n <= 8 ? small : PyMem_New(PyObject *, n);
    if (args == NULL) {
        mb_no_memory();
        return NULL;
    }
    args[0] = first;
    for (int i = 0; i < n_slots; i++) {
        args[given + (size_t)i] = values[slots[i]];
    }
    PyObject *result = PyObject_Vectorcall(function, args, n, NULL);
    if (args != small) {
        PyMem_Free(args);
    }
    return result;
}

/* Puts the slot's object into values[slot] (a new reference, except for args and constants). */
int
mb_reach(GuardProgram *p, int index, PyObject *const *args, PyObject **values)
{
    Slot *slot = &p->slots[index];
    PyObject *from = slot->parent >= 0 ? values[slot->parent] : NULL;
    PyObject *value = NULL;
    switch (slot->kind) {
    case SLOT_ARG:
        values[index] = args[slot->index];
        return 1;
    case SLOT_CONST:
        values[index] = slot->object;
        return 1;
    case SLOT_WEAK:
        value = mb_still_there(slot->object);
        break;
    case SLOT_DICT_ITEM:
        if (PyDict_Check(from)) {
            value = Py_XNewRef(PyDict_GetItemWithError(from, slot->object));
        }
        break;
    case SLOT_INSTANCE_DICT:
        value = instance_dict(from);
        break;
    case SLOT_LIST_ITEM:
    case SLOT_TUPLE_ITEM:
        if (slot->kind == SLOT_LIST_ITEM ? PyList_Check(from) : PyTuple_Check(from)) {
            Py_ssize_t i = slot->index < 0 ? slot->index + Py_SIZE(from) : slot->index;
            if (i >= 0 && i < Py_SIZE(from)) {
                value = slot->kind == SLOT_LIST_ITEM ? PyList_GET_ITEM(from, i) : PyTuple_GET_ITEM(from, i);
                Py_INCREF(value);
            }
        }
        break;
    case SLOT_ATTR:
        value = PyObject_GetAttr(from, slot->object);
        break;
    case SLOT_CELL:
        if (PyCell_Check(from)) {
            value = Py_XNewRef(PyCell_GET(from));
        }
        break;
    case SLOT_TYPE:
        value = Py_NewRef(Py_TYPE(from));
        break;
    case SLOT_PYTHON:
        value = call_with(slot->object, from, slot->more, slot->n_more, values);
        break;
    }
    values[index] = value;
    if (value != NULL) {
        return 1;
    }
    return PyErr_Occurred() ? mb_guard_error() : 0;
}

void
mb_release(GuardProgram *p, int first, int count, PyObject **values)
{
    for (int i = first + count - 1; i >= first; i--) {
        int slot = p->order[i];
        PyObject *value = values[slot];
        values[slot] = NULL;
        if (p->slots[slot].kind != SLOT_ARG && p->slots[slot].kind != SLOT_CONST) {
            Py_XDECREF(value);
        }
    }
}

/* The items that an iterator gives are those of `expected`, in that order. Takes the iterator's reference. */
static int
same_sequence(PyObject *iterator, PyObject *expected)
{
    if (iterator == NULL) {
        return -1;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(expected), i = 0;
    int result = 1;
    PyObject *item;
    while (result == 1 && (item = PyIter_Next(iterator)) != NULL) {
        result = i < n ? mb_same_value(item, PyTuple_GET_ITEM(expected, i)) : 0;
        i++;
        Py_DECREF(item);
    }
    Py_DECREF(iterator);
    if (PyErr_Occurred()) {
        return -1;
    }
    return result == 1 ? i == n : result;
}

int
mb_same_keys(PyObject *dict, PyObject *expected)
{
    if (PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(expected)) {
        return 0;
    }
    if (!PyDict_CheckExact(dict)) {
        return same_sequence(mb_order_iter(dict), expected);
    }
    Py_ssize_t position = 0, i = 0;
    PyObject *key;
    while (i < PyTuple_GET_SIZE(expected) && PyDict_Next(dict, &position, &key, NULL)) {
        Py_INCREF(key);
        int same = mb_same_value(key, PyTuple_GET_ITEM(expected, i));
        Py_DECREF(key);
        if (same <= 0) {
            return same;
        }
        i++;
    }
    return i == PyTuple_GET_SIZE(expected);
}

static int
same_contents(PyObject *object, PyObject *expected)
{
    if (PyAnySet_Check(object)) {
        if (PySet_GET_SIZE(object) != PyTuple_GET_SIZE(expected)) {
            return 0;
        }
        return same_sequence(PySet_Type.tp_iter(object), expected);
    }
    int is_list = PyList_Check(object);
    if (!is_list && !PyTuple_Check(object)) {
        return 0;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(expected);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (Py_SIZE(object) != n) {    /* asked again each time: a comparison may have changed a list */
            return 0;
        }
        PyObject *item = is_list ? PyList_GET_ITEM(object, i) : PyTuple_GET_ITEM(object, i);
        Py_INCREF(item);
        int same = mb_same_value(item, PyTuple_GET_ITEM(expected, i));
        Py_DECREF(item);
        if (same <= 0) {
            return same;
        }
    }
    return Py_SIZE(object) == n;
}

int
mb_by_address(const void *a, const void *b)
{
    uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
    return (x > y) - (x < y);
}

static int
check_distinct(Check *check, PyObject **values)
{
    int n = check->n_slots;
    if (n <= 8) {
        for (int i = 1; i < n; i++) {
            for (int j = 0; j < i; j++) {
                if (values[check->slots[i]] == values[check->slots[j]]) {
                    return 0;
                }
            }
        }
        return 1;
    }
    uintptr_t *sorted = PyMem_New(uintptr_t, (size_t)n);
    if (sorted == NULL) {
        return mb_no_memory();
    }
    for (int i = 0; i < n; i++) {
        sorted[i] = (uintptr_t)values[check->slots[i]];
    }
    qsort(sorted, (size_t)n, sizeof(*sorted), mb_by_address);
    int distinct = 1;
    for (int i = 1; i < n && distinct; i++) {
        distinct = sorted[i] != sorted[i - 1];
    }
    PyMem_Free(sorted);
    return distinct;
}

/* Each callable still gives the same constant (or object). */
static int
check_answers(Check *check)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(check->expected); i++) {
        PyObject *pair = PyTuple_GET_ITEM(check->expected, i);
        PyObject *answer = PyObject_CallNoArgs(PyTuple_GET_ITEM(pair, 0));
        if (answer == NULL) {
            return -1;
        }
        int same = mb_same_value(answer, PyTuple_GET_ITEM(pair, 1));
        Py_DECREF(answer);
        if (same <= 0) {
            return same;
        }
    }
    return 1;
}

static int
check_python(Check *check, PyObject **values)
{
    PyObject *result = call_with(check->object, NULL, check->slots, check->n_slots, values);
    if (result == NULL) {
        return -1;
    }
    int truth = result == Py_True ? 1 : result == Py_False ? 0 : PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
}

static int
evaluate(Check *check, PyObject **values)
{
    PyObject *object = check->slot >= 0 ? values[check->slot] : NULL;
    switch (check->kind) {
    case CHECK_IS:
        return object == check->object;
    case CHECK_IS_WEAK: {
        PyObject *referent = mb_still_there(check->object);
        Py_XDECREF(referent);    /* alive still if it is `object`, which the slot holds */
        return referent == NULL && PyErr_Occurred() ? -1 : referent == object;
    }
    case CHECK_TYPE:
        return (PyObject *)Py_TYPE(object) == check->object;
    case CHECK_EQUAL:
        return mb_equal_value(object, check->object);
    case CHECK_LENGTH: {
        /* Of a class derived from a tuple, list or dict, without its own __len__: that is the user's code. */
        Py_ssize_t n = PyTuple_Check(object) || PyList_Check(object) ? Py_SIZE(object)
                       : PyDict_Check(object)                        ? PyDict_Size(object)
                                                                     : PyObject_Size(object);
        return n < 0 ? -1 : n == check->length;
    }
    case CHECK_KEYS:
        return PyDict_Check(object) ? mb_same_keys(object, check->expected) : 0;
    case CHECK_ABSENT: {
        int found = PyDict_Check(object) ? PyDict_Contains(object, check->object) : 1;
        return found < 0 ? -1 : !found;
    }
    case CHECK_CONTENTS:
        return same_contents(object, check->expected);
    case CHECK_TENSOR:
        return mb_tensor_check(check->meta, object);
    case CHECK_DISTINCT:
        return check_distinct(check, values);
    case CHECK_SAME:
        return values[check->slots[0]] == values[check->slots[1]];
    case CHECK_NONE_OF: {
        uintptr_t address = (uintptr_t)object;
        return check->length == 0 || bsearch(&address, check->addresses, (size_t)check->length, sizeof(address),
                                             mb_by_address) == NULL;
    }
    case CHECK_ANSWERS:
        return check_answers(check);
    case CHECK_PYTHON:
        return check_python(check, values);
    case CHECK_DICT:
    case CHECK_CLASS:
    case CHECK_INSTANCE:
    case CHECK_STATIC_TENSOR:
    case CHECK_FUNCTION:
        break;    /* mb_run_watch */
    }
    Py_UNREACHABLE();
}

int
mb_run_check(Check *check, PyObject **values)
{
    int holds = evaluate(check, values);
    return holds < 0 ? mb_guard_error() : holds;
}

static int
sweep(GuardProgram *p)
{
    /* Metadata of tensors is what costs most: last. */
    static const CheckKind kinds[N_WATCHED] = {
        CHECK_DICT, CHECK_CLASS, CHECK_INSTANCE, CHECK_FUNCTION, CHECK_STATIC_TENSOR,
    };
    int holds = 1;
    for (int k = 0; k < N_WATCHED && holds == 1; k++) {
        holds = mb_sweep(p, kinds[k]);
    }
    return holds;
}

int
mb_program_arity(GuardProgram *p, PyObject *const *Py_UNUSED(args), size_t nargsf, PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) != p->n_positional) {
        return 0;
    }
    Py_ssize_t n = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (n != PyTuple_GET_SIZE(p->kwnames)) {
        return 0;
    }
    if (kwnames == p->kwnames) {
        return 1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *a = PyTuple_GET_ITEM(kwnames, i), *b = PyTuple_GET_ITEM(p->kwnames, i);
        if (a != b && PyUnicode_Compare(a, b) != 0) {
            return PyErr_Occurred() ? mb_guard_error() : 0;
        }
    }
    return 1;
}

/* The checks on what is reached from the arguments: 1, 0 or -1. */
int
mb_run_dynamic(GuardProgram *p, PyObject *const *args)
{
    int own = !p->busy, holds = 1;
    PyObject **values = own ? p->scratch : PyMem_New(PyObject *, (size_t)p->n_slots + 1);
    if (values == NULL) {
        return mb_no_memory();
    }
    p->busy += own;
    int reached = 0;
    for (int i = 0; i < p->n_dynamic && holds == 1; i++) {
        Check *check = &p->checks[p->dynamic[i]];
        for (int end = check->first_load + check->loads; reached < end && holds == 1; reached++) {
            holds = mb_reach(p, p->order[reached], args, values);
        }
        if (holds == 1) {
            holds = mb_run_check(check, values);
        }
    }
    for (; reached < p->n_order && holds == 1; reached++) {
        holds = mb_reach(p, p->order[reached], args, values);
    }
    /* The one that failed left NULL behind. */
    mb_release(p, 0, reached, values);
    if (own) {
        p->busy = 0;
    }
    else {
        PyMem_Free(values);
    }
    return holds;
}

int
mb_program_check(GuardProgram *p, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    int holds = p->cleared ? 0 : mb_program_arity(p, args, nargsf, kwnames);
    if (holds == 1) {
        holds = sweep(p);
    }
    return holds <= 0 || p->n_order + p->n_dynamic == 0 ? holds : mb_run_dynamic(p, args);
}
