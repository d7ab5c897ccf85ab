/* What tensors.c and tensors_fast.c share. */
#ifndef MOEBIUS_TENSORS_H
#define MOEBIUS_TENSORS_H

#include "native.h"

#define ANY INT64_MIN    /* a size, stride or offset that may vary, or is not looked at */

enum { REQUIRES_GRAD, IS_LEAF, IS_CONJ, IS_NEG, IS_INFERENCE, N_FLAGS };
enum { N_OBJECTS = 3 };

#define MAX_BLOCK 20     /* words */

struct TensorMeta {
    PyObject *type;                              /* this and below, NULL: not looked at */
    signed char flags[N_FLAGS];                  /* -1: not looked at */
    signed char recorded;                        /* 1: what follows holds; -1: not worth another try */
    signed char has_block;
    /* How a tensor that passed reads in memory: another one that reads the same passes too. In the order of use. */
    uint64_t key_set;
    uint64_t block[MAX_BLOCK];                   /* its TensorImpl from its sizes to its key set */
    int32_t dtype_code, device_index;
    int failures;
    PyObject *objects[N_OBJECTS];                /* dtype, device, layout */
    Py_ssize_t ndim;                             /* -1: neither sizes nor strides are looked at */
    int64_t *shape, *stride;
    int64_t storage_offset;                      /* ANY: not looked at */
};

int mb_fast_check(TensorMeta *meta, PyObject *object);      /* 1: passes; 0: unknown, ask the attributes; no errors */
void mb_fast_record(TensorMeta *meta, PyObject *object);    /* after the attributes said that it passes */

int mb_tensor_span(PyObject *object, int64_t reach, uintptr_t *begin, uintptr_t *end);     /* 0: it cannot be read */

/* By attributes; 1, 0 or -1 with an error. */
int mb_same_sizes(PyObject *sizes, Py_ssize_t n, const int64_t *expected);    /* takes the reference of `sizes` */
int mb_same_flag(PyObject *object, int flag, int expected);

#endif
