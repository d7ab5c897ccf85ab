/* Which of some tensors have memory in common, without asking their attributes. */
#include "tensors.h"

#include <string.h>

typedef struct {
    uintptr_t begin, end;
} Span;

/* Sorts places by where their spans begin. `order` is as the last call left it: most tensors stay where they are. */
static void
sort_places(int32_t *order, const Span *spans, Py_ssize_t n)
{
    for (Py_ssize_t i = 1; i < n; i++) {
        int32_t place = order[i];
        Py_ssize_t j = i;
        for (; j > 0 && spans[order[j - 1]].begin > spans[place].begin; j--) {
            order[j] = order[j - 1];
        }
        order[j] = place;
    }
}

/* firsts[i]: the lowest place of those that overlap, directly or by others, with place i. */
static void
group(int32_t *firsts, const int32_t *order, const Span *spans, Py_ssize_t n)
{
    for (Py_ssize_t start = 0, next; start < n; start = next) {
        uintptr_t end = spans[order[start]].end;
        int32_t first = order[start];
        for (next = start + 1; next < n && spans[order[next]].begin < end; next++) {
            end = spans[order[next]].end > end ? spans[order[next]].end : end;
            first = order[next] < first ? order[next] : first;
        }
        for (Py_ssize_t i = start; i < next; i++) {
            firsts[order[i]] = first;
        }
    }
}

static PyObject *
memory_overlaps(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensors, *reaches, *order;
    if (!PyArg_ParseTuple(args, "O!SO!:memory_overlaps", &PyTuple_Type, &tensors, &reaches, &PyByteArray_Type, &order)) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(tensors);
    if (PyBytes_GET_SIZE(reaches) != n * (Py_ssize_t)sizeof(int64_t) ||
        PyByteArray_GET_SIZE(order) != n * (Py_ssize_t)sizeof(int32_t)) {
        PyErr_SetString(PyExc_ValueError, "memory_overlaps: a reach and a place for each tensor");
        return NULL;
    }
    Span *spans = PyMem_New(Span, (size_t)n + 1);
    int32_t *places = PyMem_New(int32_t, 2 * (size_t)n + 1);
    if (spans == NULL || places == NULL) {
        PyMem_Free(spans);
        PyMem_Free(places);
        return PyErr_NoMemory();
    }
    memcpy(places, PyByteArray_AS_STRING(order), (size_t)n * sizeof(int32_t));
    int known = 1;
    for (Py_ssize_t i = 0; i < n && known; i++) {
        int64_t reach;
        memcpy(&reach, PyBytes_AS_STRING(reaches) + i * (Py_ssize_t)sizeof(reach), sizeof(reach));
        known = places[i] >= 0 && places[i] < n &&
                mb_tensor_span(PyTuple_GET_ITEM(tensors, i), reach, &spans[i].begin, &spans[i].end);
    }
    PyObject *found = NULL;
    if (known) {
        int32_t *firsts = places + n;
        sort_places(places, spans, n);
        group(firsts, places, spans, n);
        memcpy(PyByteArray_AS_STRING(order), places, (size_t)n * sizeof(int32_t));
        found = PyBytes_FromStringAndSize((const char *)firsts, n * (Py_ssize_t)sizeof(int32_t));
    }
    PyMem_Free(spans);
    PyMem_Free(places);
    return known ? found : Py_NewRef(Py_None);
}

PyMethodDef mb_overlap_methods[] = {
    {"memory_overlaps", memory_overlaps, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
