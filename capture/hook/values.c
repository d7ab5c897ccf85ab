/* Exact comparison of values: what a trace baked in must be what it would meet now.
 *
 * `==` is too weak for that: 1 == True == 1.0 and 0.0 == -0.0, while NaN is not equal to itself. */
#include "native.h"

#include <string.h>

/* Equal parts, read from attributes that no subclass can override (slice and range cannot be subclassed). */
static int
same_parts(PyObject *a, PyObject *b)
{
    static const char *const parts[] = {"start", "stop", "step"};
    for (int i = 0; i < 3; i++) {
        PyObject *x = PyObject_GetAttrString(a, parts[i]);
        if (x == NULL) {
            return -1;
        }
        PyObject *y = PyObject_GetAttrString(b, parts[i]);
        if (y == NULL) {
            Py_DECREF(x);
            return -1;
        }
        int same = mb_same_value(x, y);
        Py_DECREF(x);
        Py_DECREF(y);
        if (same <= 0) {
            return same;
        }
    }
    return 1;
}

/* The same frozenset, element types included. Its iteration order is not compared: "contents" does that. */
static int
same_frozenset(PyObject *a, PyObject *b)
{
    int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal <= 0) {
        return equal;
    }
    PyObject *list = PySequence_List(b);
    PyObject *iterator = list ? PyObject_GetIter(a) : NULL;
    if (iterator == NULL) {
        Py_XDECREF(list);
        return -1;
    }
    int result = 1;
    PyObject *item;
    while (result == 1 && (item = PyIter_Next(iterator)) != NULL) {
        if (!PyUnicode_CheckExact(item)) {
            result = 0;
            for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list) && result == 0; i++) {
                result = mb_same_value(item, PyList_GET_ITEM(list, i));
            }
        }
        Py_DECREF(item);
    }
    Py_DECREF(iterator);
    Py_DECREF(list);
    return PyErr_Occurred() ? -1 : result;
}

static int
same_items(PyObject *a, PyObject *b, int (*same)(PyObject *, PyObject *))
{
    Py_ssize_t n = PyTuple_GET_SIZE(a);
    if (n != PyTuple_GET_SIZE(b)) {
        return 0;
    }
    if (Py_EnterRecursiveCall(" in a guard")) {
        return -1;
    }
    int result = 1;
    for (Py_ssize_t i = 0; i < n && result == 1; i++) {
        result = same(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i));
    }
    Py_LeaveRecursiveCall();
    return result;
}

int
mb_same_value(PyObject *a, PyObject *b)
{
    if (a == b) {
        return 1;
    }
    PyTypeObject *type = Py_TYPE(a);
    if (type != Py_TYPE(b)) {
        return 0;
    }
    if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type) {
        return PyObject_RichCompareBool(a, b, Py_EQ);
    }
    if (type == &PyFloat_Type) {
        double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
        return memcmp(&x, &y, sizeof(x)) == 0;
    }
    if (type == &PyComplex_Type) {
        Py_complex x = ((PyComplexObject *)a)->cval, y = ((PyComplexObject *)b)->cval;
        return memcmp(&x.real, &y.real, sizeof(double)) == 0 && memcmp(&x.imag, &y.imag, sizeof(double)) == 0;
    }
    if (type == &PyTuple_Type) {
        return same_items(a, b, mb_same_value);
    }
    if (type == &PyFrozenSet_Type) {
        return same_frozenset(a, b);
    }
    if (type == &PySlice_Type || type == &PyRange_Type) {
        return same_parts(a, b);
    }
    return 0;
}

/* An object's own == may ignore what a program can see (Decimal("1.0") == Decimal("1.00"), NumPy's float32(-0.0) == float32(0.0)),
 * so the two must also print alike. Objects that are the same object never come here. */
static int
same_by_comparison(PyObject *a, PyObject *b)
{
    int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal <= 0) {
        return equal;
    }
    PyObject *x = PyObject_Repr(a);
    PyObject *y = x ? PyObject_Repr(b) : NULL;
    int same = y ? PyUnicode_Compare(x, y) == 0 : -1;
    Py_XDECREF(x);
    Py_XDECREF(y);
    return PyErr_Occurred() ? -1 : same;
}

int
mb_equal_value(PyObject *a, PyObject *b)
{
    if (a == b) {
        return 1;
    }
    PyTypeObject *type = Py_TYPE(a);
    if (type != Py_TYPE(b)) {
        return 0;
    }
    if (PyTuple_Check(a) && type->tp_richcompare == PyTuple_Type.tp_richcompare) {
        return same_items(a, b, mb_equal_value);
    }
    int same = mb_same_value(a, b);
    if (same != 0) {
        return same;
    }
    if (type == &PyUnicode_Type || type == &PyLong_Type || type == &PyBytes_Type || type == &PyFloat_Type ||
        type == &PyComplex_Type || type == &PyBool_Type || type == &PySlice_Type || type == &PyRange_Type ||
        type == &PyFrozenSet_Type) {
        return 0;
    }
    return same_by_comparison(a, b);
}

PyObject *
mb_order_iter(PyObject *dict)
{
    /* An OrderedDict keeps its order beside the table (move_to_end changes nothing else); the base class's own iterator
     * is asked, so that no user code runs. */
    if (PyODict_Check(dict)) {
        return PyODict_Type.tp_iter(dict);
    }
    return PyDict_Type.tp_iter(dict);
}
