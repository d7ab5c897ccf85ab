/* What tensors.c and tensors_fast.c share. */
#ifndef MOEBIUS_TENSORS_H
#define MOEBIUS_TENSORS_H

#include "native.h"

#define ANY INT64_MIN    /* a size, stride or offset that may vary, or is not looked at */

enum { REQUIRES_GRAD, IS_LEAF, IS_CONJ, IS_NEG, IS_INFERENCE, N_FLAGS };

struct TensorMeta {
    PyObject *type, *dtype, *device, *layout;    /* NULL: not looked at */
    Py_ssize_t ndim;                             /* -1: neither sizes nor strides are looked at */
    int64_t *shape, *stride;                     /* NULL: not looked at */
    int64_t storage_offset;                      /* ANY: not looked at */
    signed char flags[N_FLAGS];                  /* -1: not looked at */
    /* How a tensor that passed reads in memory: another one that reads the same passes too. */
    int recorded;                                /* 1: the fields below hold; -1: not worth another try */
    int failures;
    uint64_t key_set;
    int32_t dtype_code, device_index;
};

int mb_fast_check(TensorMeta *meta, PyObject *object);      /* 1: passes; 0: unknown, ask the attributes; no errors */
void mb_fast_record(TensorMeta *meta, PyObject *object);    /* after the attributes said that it passes */

/* By attributes; 1, 0 or -1 with an error. */
int mb_same_sizes(PyObject *sizes, Py_ssize_t n, const int64_t *expected);    /* takes the reference of `sizes` */
int mb_same_flag(PyObject *object, int flag, int expected);

#endif
