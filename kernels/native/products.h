/* torch's own products, an expert after another, without Python between them. */
#ifndef MOEBIUS_PRODUCTS_H
#define MOEBIUS_PRODUCTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "elements.h"

/* Rows low..high, all of one expert; first: no earlier ones are of it. As Python lays it out (panels.py). */
typedef struct {
    int64_t expert, low, high, first;
} Segment;

typedef struct {
    char *address;
    int64_t sizes[2], strides[2];
} Matrix;

/* Finds torch's C interface. Returns 1 where there is one. */
int products_find(void);

/* out = left @ right, or out += left @ right; 0 where torch refuses. Needs no GIL. */
int product(const Matrix *out, const Matrix *left, const Matrix *right, Dtype dtype, int add);

/* products(out, left, right, segments, count, dtype, add, wide, threads), time_product(size, dtype, threads) and
   products_made(); see rows.pyi. */
PyObject *products(PyObject *module, PyObject *arguments);
PyObject *time_product(PyObject *module, PyObject *arguments);
PyObject *products_made(PyObject *module, PyObject *nothing);

#endif
