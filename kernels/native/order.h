/* Slots in the order of their experts. */
#ifndef MOEBIUS_ORDER_H
#define MOEBIUS_ORDER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* sort_rows(ids, bytes, slots, experts, order, offsets); see rows.pyi. */
PyObject *sort_rows(PyObject *module, PyObject *arguments);

#endif
