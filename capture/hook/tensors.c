/* What a tensor looks like: type, dtype, device, sizes, strides and the like, against what a trace relied on. */
#include "tensors.h"

#include <string.h>

static const char *const flag_names[N_FLAGS] = {"requires_grad", "is_leaf", "is_conj", "is_neg", "is_inference"};

static const char *const object_names[N_OBJECTS] = {"dtype", "device", "layout"};

static PyObject *name_shape, *name_stride, *name_storage_offset, *name_flags[N_FLAGS], *name_objects[N_OBJECTS];

/* ---- what is expected ---- */

static int
read_sizes(PyObject *tuple, const char *what, Py_ssize_t *ndim, int64_t **out)
{
    if (!PyTuple_Check(tuple)) {
        PyErr_Format(PyExc_TypeError, "tensor meta: %s must be a tuple or None", what);
        return -1;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    if (*ndim >= 0 && *ndim != n) {
        PyErr_SetString(PyExc_ValueError, "tensor meta: shape and stride differ in length");
        return -1;
    }
    *ndim = n;
    *out = PyMem_New(int64_t, (size_t)n + 1);
    if (*out == NULL) {
        return mb_no_memory();
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        (*out)[i] = item == Py_None ? ANY : PyLong_AsLongLong(item);
        if ((*out)[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static int
read_field(TensorMeta *meta, PyObject *key, PyObject *value)
{
    const char *name = PyUnicode_AsUTF8(key);
    if (name == NULL) {
        return -1;
    }
    if (value == Py_None) {
        return 0;
    }
    if (strcmp(name, "type") == 0) {
        if (!PyType_Check(value)) {
            PyErr_SetString(PyExc_TypeError, "tensor meta: type must be a class");
            return -1;
        }
        meta->type = Py_NewRef(value);
        return 0;
    }
    for (int i = 0; i < N_OBJECTS; i++) {
        if (strcmp(name, object_names[i]) == 0) {
            meta->objects[i] = Py_NewRef(value);
            return 0;
        }
    }
    if (strcmp(name, "shape") == 0) {
        return read_sizes(value, name, &meta->ndim, &meta->shape);
    }
    if (strcmp(name, "stride") == 0) {
        return read_sizes(value, name, &meta->ndim, &meta->stride);
    }
    if (strcmp(name, "storage_offset") == 0) {
        meta->storage_offset = PyLong_AsLongLong(value);
        return meta->storage_offset == -1 && PyErr_Occurred() ? -1 : 0;
    }
    for (int i = 0; i < N_FLAGS; i++) {
        if (strcmp(name, flag_names[i]) == 0) {
            int flag = PyObject_IsTrue(value);
            meta->flags[i] = (signed char)flag;
            return flag < 0 ? -1 : 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "tensor meta: unknown field %R", key);
    return -1;
}

TensorMeta *
mb_tensor_meta_new(PyObject *dict)
{
    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "tensor meta must be a dict");
        return NULL;
    }
    TensorMeta *meta = PyMem_Calloc(1, sizeof(TensorMeta));
    if (meta == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    meta->ndim = -1;
    meta->storage_offset = ANY;
    memset(meta->flags, -1, sizeof(meta->flags));
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
        if (read_field(meta, key, value) < 0) {
            mb_tensor_meta_free(meta);
            return NULL;
        }
    }
    return meta;
}

void
mb_tensor_meta_free(TensorMeta *meta)
{
    if (meta == NULL) {
        return;
    }
    Py_XDECREF(meta->type);
    for (int i = 0; i < N_OBJECTS; i++) {
        Py_XDECREF(meta->objects[i]);
    }
    PyMem_Free(meta->shape);
    PyMem_Free(meta->stride);
    PyMem_Free(meta);
}

int
mb_tensor_meta_traverse(TensorMeta *meta, visitproc visit, void *arg)
{
    Py_VISIT(meta->type);
    for (int i = 0; i < N_OBJECTS; i++) {
        Py_VISIT(meta->objects[i]);
    }
    return 0;
}

/* ---- reading by attributes: always right, 40-80 ns a field ---- */

/* Takes the reference of `sizes`. Symbolic sizes do not match: they are not int. */
int
mb_same_sizes(PyObject *sizes, Py_ssize_t n, const int64_t *expected)
{
    if (sizes == NULL) {
        return -1;
    }
    int same = PyTuple_Check(sizes) && PyTuple_GET_SIZE(sizes) == n;
    for (Py_ssize_t i = 0; i < n && same == 1; i++) {
        if (expected[i] == ANY) {
            continue;
        }
        PyObject *item = PyTuple_GET_ITEM(sizes, i);
        if (!PyLong_CheckExact(item)) {
            same = 0;
            break;
        }
        long long value = PyLong_AsLongLong(item);
        same = value == -1 && PyErr_Occurred() ? -1 : value == expected[i];
    }
    Py_DECREF(sizes);
    return same;
}

static int
same_attribute(PyObject *object, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) {
        return -1;
    }
    int same = value == expected;
    if (!same && Py_TYPE(value) == Py_TYPE(expected)) {
        same = PyObject_RichCompareBool(value, expected, Py_EQ);
    }
    Py_DECREF(value);
    return same;
}

int
mb_same_flag(PyObject *object, int flag, int expected)
{
    PyObject *value = flag < IS_CONJ ? PyObject_GetAttr(object, name_flags[flag])
                                     : PyObject_CallMethodNoArgs(object, name_flags[flag]);
    if (value == NULL) {
        return -1;
    }
    int same = value == (expected ? Py_True : Py_False);
    Py_DECREF(value);
    return same;
}

static int
check_by_attributes(TensorMeta *meta, PyObject *object)
{
    int same = 1;
    for (int i = 0; i < N_OBJECTS && same == 1; i++) {
        if (meta->objects[i] != NULL) {
            same = same_attribute(object, name_objects[i], meta->objects[i]);
        }
    }
    if (same == 1 && meta->shape != NULL) {
        same = mb_same_sizes(PyObject_GetAttr(object, name_shape), meta->ndim, meta->shape);
    }
    if (same == 1 && meta->stride != NULL) {
        same = mb_same_sizes(PyObject_CallMethodNoArgs(object, name_stride), meta->ndim, meta->stride);
    }
    if (same == 1 && meta->storage_offset != ANY) {
        PyObject *value = PyObject_CallMethodNoArgs(object, name_storage_offset);
        long long offset = value == NULL ? -1 : PyLong_AsLongLong(value);
        Py_XDECREF(value);
        same = offset == -1 && PyErr_Occurred() ? -1 : offset == meta->storage_offset;
    }
    for (int i = 0; i < N_FLAGS && same == 1; i++) {
        if (meta->flags[i] >= 0) {
            same = mb_same_flag(object, i, meta->flags[i]);
        }
    }
    return same;
}

int
mb_tensor_check(TensorMeta *meta, PyObject *object)
{
    if (meta->type != NULL && (PyObject *)Py_TYPE(object) != meta->type) {
        return 0;
    }
    if (meta->recorded == 1 && mb_fast_check(meta, object)) {
        return meta->flags[IS_LEAF] < 0 ? 1 : mb_same_flag(object, IS_LEAF, meta->flags[IS_LEAF]);
    }
    int same = check_by_attributes(meta, object);
    if (same == 1 && meta->recorded >= 0) {
        mb_fast_record(meta, object);
    }
    return same;
}

int
mb_tensors_init(PyObject *Py_UNUSED(module))
{
    name_shape = PyUnicode_InternFromString("shape");
    name_stride = PyUnicode_InternFromString("stride");
    name_storage_offset = PyUnicode_InternFromString("storage_offset");
    for (int i = 0; i < N_FLAGS; i++) {
        name_flags[i] = PyUnicode_InternFromString(flag_names[i]);
    }
    for (int i = 0; i < N_OBJECTS; i++) {
        name_objects[i] = PyUnicode_InternFromString(object_names[i]);
    }
    return PyErr_Occurred() ? -1 : 0;
}
