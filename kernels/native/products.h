/* Products, an expert after another, without Python between them: torch's own, or, where they are faster, ours. */
#ifndef MOEBIUS_PRODUCTS_H
#define MOEBIUS_PRODUCTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "elements.h"
#include "gemm.h"

/* Rows low..high, all of one expert; first: no earlier ones are of it. As Python lays it out (panels.py). */
typedef struct {
    int64_t expert, low, high, first;
} Segment;

/* Finds torch's C interface. Returns 1 where there is one. */
int products_find(void);

/* out = left @ right, or out += left @ right; 0 where torch refuses. Needs no GIL. threads: that may share it; for one
   alone it may be gemm(). */
int product(const Matrix *out, const Matrix *left, const Matrix *right, Dtype dtype, int add, int threads);

/* products(out, left, right, segments, count, dtype, add, wide, threads), time_product(size, dtype, threads),
   products_made(), gemm_products() and use_gemm(use); see rows.pyi. */
PyObject *products(PyObject *module, PyObject *arguments);
PyObject *time_product(PyObject *module, PyObject *arguments);
PyObject *products_made(PyObject *module, PyObject *nothing);
PyObject *gemm_products(PyObject *module, PyObject *nothing);
PyObject *use_gemm(PyObject *module, PyObject *use);

#endif
