/* moebius.kernels.native.rows: what the CPU form does to rows between the library's products.

   Arguments are addresses and sizes, checked by the caller (panel_work.py); an index, which would write elsewhere if it were
   wrong, is checked here. Every function lets go of the GIL, and gives the same bits whatever the number of
   threads: each element is computed by one thread, in an order that does not depend on the others. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "elements.h"
#include "products.h"
#include "threads.h"

/* Below this many elements a thread's start costs more than it saves (torch's own grain, at::internal::GRAIN_SIZE). */
#define GRAIN 32768

static long rows_per_range(long width) { return width > GRAIN ? 1 : GRAIN / (width ? width : 1); }

static int smaller(long a, int b) { return a < b ? (int)a : b; }

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

typedef enum { CONCAT, INTERLEAVED, UNGATED } Gate;

typedef struct {
    const char *h;      /* [count, M] */
    const char *grad_a; /* [count, N], backward alone: dA before the routing weight */
    const float *scale; /* [count], or NULL where each weight is one */
    char *a;            /* [count, N], out: A times its weight */
    char *grad_h;       /* [count, M], out, backward alone */
    float *dot;         /* [count], out: <dA, A>; NULL where nobody asks */
    long count, width;  /* rows; N */
    Dtype dtype;
    Gate gate;
    Activation activation;
} Gated;

/* Where elements column.. of gate and up stand in a row of H, and their distance. */
static void place(const Gated *task, long row, long column, long *gate_at, long *up_at, int *stride)
{
    long n = task->width;
    *stride = task->gate == INTERLEAVED ? 2 : 1;
    *gate_at = row * (task->gate == UNGATED ? n : 2 * n) + column * *stride;
    *up_at = *gate_at + (task->gate == INTERLEAVED ? 1 : n);
}

/* A run of numbers as float32 side by side: where they stand if they are that, else in the buffer. */
static const float *fetch(float *buffer, const char *from, Dtype dtype, long at, int stride, int count)
{
    if (dtype == FLOAT32 && stride == 1)
        return (const float *)from + at;
    elements_load(buffer, from, dtype, at, stride, count);
    return buffer;
}

/* Where to put such a run, and what brings it to its place if that is the buffer. */
static float *room(float *buffer, char *to, Dtype dtype, long at, int stride)
{
    return dtype == FLOAT32 && stride == 1 ? (float *)to + at : buffer;
}

static void put(const float *from, float *buffer, char *to, Dtype dtype, long at, int stride, int count)
{
    if (from == buffer)
        elements_store(to, buffer, dtype, at, stride, count);
}

static void forward_range(const void *argument, long low, long high)
{
    const Gated *task = argument;
    Dtype dtype = task->dtype;
    float gate_run[RUN], up_run[RUN], a_run[RUN];
    for (long row = low; row < high; row++)
        for (long column = 0; column < task->width; column += RUN) {
            int stride, count = smaller(task->width - column, RUN);
            long gate_at, up_at, at = row * task->width + column;
            place(task, row, column, &gate_at, &up_at, &stride);
            const float *gate = fetch(gate_run, task->h, dtype, gate_at, stride, count), *up = NULL;
            if (task->gate != UNGATED)
                up = fetch(up_run, task->h, dtype, up_at, stride, count);
            float *a = room(a_run, task->a, dtype, at, 1);
            elements_gated(a, gate, up, task->scale == NULL ? 1.0f : task->scale[row], task->activation, count);
            put(a, a_run, task->a, dtype, at, 1, count);
        }
}

static void backward_range(const void *argument, long low, long high)
{
    const Gated *task = argument;
    Dtype dtype = task->dtype;
    float gate_run[RUN], up_run[RUN], grad_run[RUN], a_run[RUN], grad_gate_run[RUN], grad_up_run[RUN], dot_run[RUN];
    for (long row = low; row < high; row++) {
        float dot = 0.0f, scale = task->scale == NULL ? 1.0f : task->scale[row];
        for (long column = 0; column < task->width; column += RUN) {
            int stride, count = smaller(task->width - column, RUN);
            long gate_at, up_at, at = row * task->width + column;
            place(task, row, column, &gate_at, &up_at, &stride);
            const float *gate = fetch(gate_run, task->h, dtype, gate_at, stride, count), *up = NULL;
            const float *grad_a = fetch(grad_run, task->grad_a, dtype, at, 1, count);
            Grads out = {room(a_run, task->a, dtype, at, 1), room(grad_gate_run, task->grad_h, dtype, gate_at, stride),
                         NULL, dot_run};
            if (task->gate != UNGATED) {
                up = fetch(up_run, task->h, dtype, up_at, stride, count);
                out.up = room(grad_up_run, task->grad_h, dtype, up_at, stride);
            }
            elements_gated_backward(out, gate, up, grad_a, scale, task->activation, count);
            dot += elements_sum(dot_run, count);
            put(out.a, a_run, task->a, dtype, at, 1, count);
            put(out.gate, grad_gate_run, task->grad_h, dtype, gate_at, stride, count);
            if (task->gate != UNGATED)
                put(out.up, grad_up_run, task->grad_h, dtype, up_at, stride, count);
        }
        if (task->dot != NULL)
            task->dot[row] = dot;
    }
}

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
    task.dtype = (Dtype)dtype, task.gate = (Gate)gate, task.activation = (Activation)activation;
    Py_BEGIN_ALLOW_THREADS
    /* an activation costs about as much as eight copies */
    threads_run(work, &task, task.count, rows_per_range(task.width * 8), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *gated(PyObject *module, PyObject *arguments) { return run_gated(arguments, forward_range); }

static PyObject *gated_backward(PyObject *module, PyObject *arguments)
{
    return run_gated(arguments, backward_range);
}

/* ---- the module -------------------------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"add", add, METH_VARARGS,
     "add(total, rows, index, count, tokens, width, dtype, threads): total[index[row]] += rows[row], row after row."},
    {"gated", gated, METH_VARARGS,
     "gated(h, 0, scale, a, 0, 0, count, width, dtype, activation, gate, threads): a = f(gate) * up * scale."},
    {"gated_backward", gated_backward, METH_VARARGS,
     "gated_backward(h, grad_a, scale, a, grad_h, dot, count, width, dtype, activation, gate, threads)."},
    {"products", products, METH_VARARGS, "products(out, left, right, segments, count, dtype, add): see rows.pyi."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "moebius.kernels.native.rows", "Row work of the CPU form: see panel_work.py.", -1, functions,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_rows(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self == NULL || PyModule_AddIntConstant(self, "POOL", threads_find()) < 0 ||
        PyModule_AddIntConstant(self, "PRODUCTS", products_find()) < 0)
        return NULL;
    return self;
}
