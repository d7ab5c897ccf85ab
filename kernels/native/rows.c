/* moebius.kernels.native.rows: what the CPU form does to rows between the library's products.

   Arguments are addresses and sizes, checked by the caller (panel_work.py); an index, which would write elsewhere if it were
   wrong, is checked here. Every function lets go of the GIL, and but for layer_forward and layer_backward (layer.h) gives
   the same bits whatever the number of threads: each element is computed by one thread, in an order that does not
   depend on the others. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention.h"
#include "asked.h"
#include "chain.h"
#include "elements.h"
#include "gated.h"
#include "layer.h"
#include "order.h"
#include "products.h"
#include "threads.h"

/* Below this many elements a thread's start costs more than it saves (torch's own grain, at::internal::GRAIN_SIZE). */
#define GRAIN 32768

static long rows_per_range(long width) { return width > GRAIN ? 1 : GRAIN / (width ? width : 1); }

/* ---- sums by token ------------------------------------------------------------------------------------------------ */

typedef struct {
    float *total;         /* [tokens, width] */
    const char *rows;     /* [count, width] */
    const int32_t *index; /* [count] */
    long count, tokens, width;
    Dtype dtype;
} Sums;

/* A range of columns of every row: two rows may be of one token. */
static void add_range(const void *argument, long low, long high)
{
    const Sums *task = argument;
    for (long row = 0; row < task->count; row++)
        elements_add(task->total + task->index[row] * task->width + low, task->rows, task->dtype,
                     row * task->width + low, (int)(high - low));
}

/* Whether every index is that of a token; else an IndexError. */
static int check_index(const Sums *task)
{
    int32_t low = 0, high = -1;
    for (long row = 0; row < task->count; row++) {
        int32_t value = task->index[row];
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    if (low >= 0 && high < task->tokens)
        return 1;
    PyErr_Format(PyExc_IndexError, "a row of the expert order is of token %d; there are %ld tokens",
                 low < 0 ? low : high, task->tokens);
    return 0;
}

static PyObject *add(PyObject *module, PyObject *arguments)
{
    Sums task = {0};
    Py_ssize_t total, rows, index;
    int threads, dtype;
    if (!PyArg_ParseTuple(arguments, "nnnlllii", &total, &rows, &index, &task.count, &task.tokens, &task.width, &dtype,
                          &threads))
        return NULL;
    task.total = (float *)total, task.rows = (const char *)rows, task.index = (const int32_t *)index;
    task.dtype = (Dtype)dtype;
    if (!check_index(&task))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    threads_run(add_range, &task, task.width, 64, task.count * task.width < GRAIN ? 1 : threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- between the products ---------------------------------------------------------------------------------------- */

static PyObject *run_gated(PyObject *arguments, range_work work)
{
    Py_ssize_t h, grad_a, scale, a, grad_h, dot;
    Gated task = {0};
    int dtype, gate, activation, threads;
    if (!PyArg_ParseTuple(arguments, "nnnnnnlliiii", &h, &grad_a, &scale, &a, &grad_h, &dot, &task.count, &task.width,
                          &dtype, &activation, &gate, &threads))
        return NULL;
    task.h = (const char *)h, task.grad_a = (const char *)grad_a, task.scale = (const float *)scale;
    task.a = (char *)a, task.grad_h = (char *)grad_h, task.dot = (float *)dot;
    task.dtype = task.h_dtype = (Dtype)dtype, task.gate = (Gate)gate, task.activation = (Activation)activation;
    Py_BEGIN_ALLOW_THREADS
    /* an activation costs about as much as eight copies */
    threads_run(work, &task, task.count, rows_per_range(task.width * 8), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *run_forward(PyObject *module, PyObject *arguments) { return run_gated(arguments, gated_forward); }

static PyObject *run_backward(PyObject *module, PyObject *arguments)
{
    return run_gated(arguments, gated_backward);
}

/* ---- the module -------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"add", add, METH_VARARGS,
     "add(total, rows, index, count, tokens, width, dtype, threads): total[index[row]] += rows[row], row after row."},
    {"gated", run_forward, METH_VARARGS,
     "gated(h, 0, scale, a, 0, 0, count, width, dtype, activation, gate, threads): a = f(gate) * up * scale."},
    {"gated_backward", run_backward, METH_VARARGS,
     "gated_backward(h, grad_a, scale, a, grad_h, dot, count, width, dtype, activation, gate, threads)."},
    {"table", table, METH_O, "table(parts): see rows.pyi."},
    {"chain", chain, METH_VARARGS, "chain(steps, tensors, inputs, numbers, kinds, threads): see rows.pyi."},
    {"sort_rows", sort_rows, METH_VARARGS, "sort_rows(ids, bytes, slots, experts, order, offsets): see rows.pyi."},
    {"products", products, METH_VARARGS,
     "products(out, left, right, segments, count, dtype, add, wide, threads): see rows.pyi."},
    {"time_product", time_product, METH_VARARGS, "time_product(size, dtype, threads): see rows.pyi."},
    {"products_made", products_made, METH_NOARGS, "products_made(): see rows.pyi."},
    {"gemm_products", gemm_products, METH_NOARGS, "gemm_products(): see rows.pyi."},
    {"use_gemm", use_gemm, METH_O, "use_gemm(use): see rows.pyi."},
    {"attention_forward", attention_forward, METH_VARARGS,
     "attention_forward(sizes, strides, addresses, log_sums, scale, causal, threads): see rows.pyi."},
    {"attention_backward", attention_backward, METH_VARARGS,
     "attention_backward(sizes, strides, addresses, log_sums, scale, causal, threads): see rows.pyi."},
    {"layer_forward", layer_forward, METH_O, "layer_forward(address): see layer.h."},
    {"layer_backward", layer_backward, METH_O, "layer_backward(address): see layer.h."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "moebius.kernels.native.rows", "Row work of the CPU form: see panel_work.py.", -1, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_rows(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self == NULL || asked_find() < 0 || PyModule_AddIntConstant(self, "POOL", threads_find()) < 0 ||
        PyModule_AddIntConstant(self, "PRODUCTS", products_find()) < 0 ||
        PyModule_AddIntConstant(self, "ROOTS", chain_find()) < 0 ||
        PyModule_AddIntConstant(self, "GEMM", gemm_find()) < 0)
        return NULL;
    return self;
}
