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

/* Whether this processor multiplies bfloat16 faster as float32, which holds the same numbers. Measured: on an Intel Xeon
   without AMX (AVX-512 BF16, torch 2.13's library), 256x512 @ 512x512 in 0.56 of the time; on an AMD EPYC with AVX-512
   BF16 in 3.5 times the time. Not measured, and left to the library: AMX. By the processor alone, so that two runs give
   the same bits. */
int products_widen(void);

/* out = left @ right, or out += left @ right; 0 where torch refuses. Needs no GIL. */
int product(const Matrix *out, const Matrix *left, const Matrix *right, Dtype dtype, int add);

/* products(out, left, right, segments, count, dtype, add); see rows.pyi. */
PyObject *products(PyObject *module, PyObject *arguments);

#endif
