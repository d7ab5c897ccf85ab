#include "order.h"

#include <stdint.h>

/* An expert's number, or `experts` for a slot that is none's. */
static int64_t expert_of(const char *ids, int bytes, int64_t slot, int64_t experts)
{
    int64_t id = bytes == 8 ? ((const int64_t *)ids)[slot] : ((const int32_t *)ids)[slot];
    return id >= 0 && id < experts ? id : experts;
}

/* A counting sort: stable, and two passes over the slots. next[e]: where the next row of expert e goes. */
PyObject *sort_rows(PyObject *module, PyObject *arguments)
{
    Py_ssize_t ids, order, offsets;
    long long slots, experts;
    int bytes;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "niLLnn", &ids, &bytes, &slots, &experts, &order, &offsets))
        return NULL;
    int32_t *row = (int32_t *)order, *start = (int32_t *)offsets, *next = PyMem_RawCalloc(experts + 2, sizeof *next);
    if (next == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (int64_t slot = 0; slot < slots; slot++)
        next[expert_of((const char *)ids, bytes, slot, experts) + 1]++;
    for (int64_t expert = 0; expert <= experts; expert++) {
        next[expert + 1] += next[expert];
        start[expert] = next[expert];
    }
    for (int64_t slot = 0; slot < slots; slot++)
        row[next[expert_of((const char *)ids, bytes, slot, experts)]++] = (int32_t)slot;
    Py_END_ALLOW_THREADS
    PyMem_RawFree(next);
    Py_RETURN_NONE;
}
