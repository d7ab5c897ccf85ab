/* torch's own products, an expert after another, without Python between them. */
#ifndef MOEBIUS_PRODUCTS_H
#define MOEBIUS_PRODUCTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Finds torch's C interface. Returns 1 where there is one. */
int products_find(void);

/* products(out, left, right, segments, count, dtype, add); see rows.pyi. */
PyObject *products(PyObject *module, PyObject *arguments);

#endif
