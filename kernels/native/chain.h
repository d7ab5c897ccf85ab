/* Element-wise operators on float32 tensors of one size, one after another on each block of elements: what lies between
   two operators stays in the cache. */
#ifndef MOEBIUS_CHAIN_H
#define MOEBIUS_CHAIN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Looks up what of torch's it calls. Returns 1 where that is there. */
int chain_find(void);

/* chain(steps, tensors, inputs, numbers, kinds, threads): see rows.pyi. */
PyObject *chain(PyObject *module, PyObject *arguments);

#endif
