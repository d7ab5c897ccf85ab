/* What tensors are asked from C, by the names that Python has for it. */
#ifndef MOEBIUS_ASKED_H
#define MOEBIUS_ASKED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

typedef enum { DTYPE, LAYOUT, SHAPE, IS_CPU, STRIDE, IS_CONTIGUOUS, IS_NEG, IS_INFERENCE, NUMEL, DATA_PTR, NAMES } Asked;

/* Makes the names. Returns -1 for an error. */
int asked_find(void);

/* What the attribute is, or the method gives. */
PyObject *asked(PyObject *tensor, Asked name);

/* 1 where that is this object; 0 where not, -1 for an error. */
int asked_is(PyObject *tensor, Asked name, PyObject *wanted);

/* 1 where it equals this object; 0 where not, -1 for an error. */
int asked_equals(PyObject *tensor, Asked name, PyObject *wanted);

/* As a number, not below 0. -1 for an error. */
int64_t asked_number(PyObject *tensor, Asked name);

/* table(parts): see rows.pyi. */
PyObject *table(PyObject *module, PyObject *parts);

#endif
