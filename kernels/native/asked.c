#include "asked.h"

static const char *const spelled[NAMES] = {"dtype",         "layout", "shape",        "is_cpu", "stride",
                                           "is_contiguous", "is_neg", "is_inference", "numel",  "data_ptr"};
static PyObject *names[NAMES];

int asked_find(void)
{
    for (int name = 0; name < NAMES; name++)
        if ((names[name] = PyUnicode_InternFromString(spelled[name])) == NULL)
            return -1;
    return 0;
}

PyObject *asked(PyObject *tensor, Asked name)
{
    return name < STRIDE ? PyObject_GetAttr(tensor, names[name]) : PyObject_CallMethodNoArgs(tensor, names[name]);
}

int asked_is(PyObject *tensor, Asked name, PyObject *wanted)
{
    PyObject *found = asked(tensor, name);
    Py_XDECREF(found); /* somebody else keeps it */
    return found == NULL ? -1 : found == wanted;
}

int asked_equals(PyObject *tensor, Asked name, PyObject *wanted)
{
    PyObject *found = asked(tensor, name);
    int same = found == NULL ? -1 : PyObject_RichCompareBool(found, wanted, Py_EQ);
    Py_XDECREF(found);
    return same;
}

int64_t asked_number(PyObject *tensor, Asked name)
{
    PyObject *found = asked(tensor, name);
    int64_t number = found == NULL ? -1 : (int64_t)PyLong_AsUnsignedLongLong(found);
    Py_XDECREF(found);
    return number;
}

PyObject *table(PyObject *module, PyObject *parts)
{
    (void)module;
    PyObject *items = PySequence_Fast(parts, "parts are a list or tuple");
    if (items == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    PyObject *found[] = {NULL, NULL, NULL}, *addresses = PyBytes_FromStringAndSize(NULL, count * 8), *result = NULL;
    int64_t *places = addresses == NULL ? NULL : (int64_t *)PyBytes_AS_STRING(addresses);
    int same = addresses == NULL ? -1 : 1;
    for (Py_ssize_t i = 0; same == 1 && i < count; i++) {
        PyObject *part = PySequence_Fast_GET_ITEM(items, i);
        places[i] = 0;
        if (part == Py_None)
            continue;
        if (found[0] == NULL) {
            found[0] = asked(part, DTYPE), found[1] = asked(part, SHAPE), found[2] = asked(part, STRIDE);
            same = found[0] != NULL && found[1] != NULL && found[2] != NULL ? 1 : -1;
        } else if ((same = asked_is(part, DTYPE, found[0])) == 1 && (same = asked_equals(part, SHAPE, found[1])) == 1)
            same = asked_equals(part, STRIDE, found[2]);
        if (same == 1 && (same = asked_is(part, IS_NEG, Py_False)) == 1)
            same = (places[i] = asked_number(part, DATA_PTR)) == -1 && PyErr_Occurred() ? -1 : 1;
    }
    if (same == 1 && found[0] != NULL)
        result = PyTuple_Pack(4, found[0], found[1], found[2], addresses);
    else if (same >= 0)
        result = Py_NewRef(Py_None);
    for (int i = 0; i < 3; i++)
        Py_XDECREF(found[i]);
    Py_XDECREF(addresses);
    Py_DECREF(items);
    return result;
}
