/* Attention over sequences that fit the second-level cache, in float32, where products are ours (gemm.h). */
#ifndef MOEBIUS_ATTENTION_H
#define MOEBIUS_ATTENTION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* attention_forward(sizes, strides, addresses, scale, causal, threads) and attention_backward(…); see rows.pyi. */
PyObject *attention_forward(PyObject *module, PyObject *arguments);
PyObject *attention_backward(PyObject *module, PyObject *arguments);

#endif
