#include "layer.h"

#include <string.h>

#include "elements.h"
#include "gated.h"
#include "products.h"
#include "threads.h"

#define AT(address, type) ((type *)(intptr_t)(address))

/* ---- rows ---------------------------------------------------------------------------------------------------------- */

static const int32_t *tokens_of(const Layer *task, const Segment *part) { return AT(task->token, int32_t) + part->low; }

/* to[row] = source[token of row] */
static void gather(const Layer *task, char *to, int64_t source, int64_t stride, const Segment *part)
{
    long bytes = dtype_bytes((Dtype)task->dtype);
    const int32_t *token = tokens_of(task, part);
    for (int64_t row = 0; row < part->high - part->low; row++)
        memcpy(to + row * task->width * bytes, AT(source, char) + token[row] * stride * bytes, task->width * bytes);
}

static float *total_of(const Layer *task, int64_t group)
{
    return AT(AT(task->totals, int64_t)[group], float);
}

/* A group's total[token of row] += rows[row], rows in order. */
static void add_rows(const Layer *task, int64_t group, const char *rows, const Segment *part)
{
    float *total = total_of(task, group);
    const int32_t *token = tokens_of(task, part);
    for (int64_t row = 0; row < part->high - part->low; row++)
        elements_add(total + token[row] * task->width, rows, (Dtype)task->dtype, row * task->width, (int)task->width);
}

/* The kept rows of H of a part; NULL where they are not kept. */
static char *kept(const Layer *task, const Segment *part)
{
    return task->h ? AT(task->h, char) + part->low * task->width_h * dtype_bytes((Dtype)task->dtype) : NULL;
}

static Gated gated_of(const Layer *task, const Segment *part, const char *h, char *a)
{
    Gated work = {0};
    work.h = h, work.a = a, work.scale = task->scale ? AT(task->scale, float) + part->low : NULL;
    work.count = part->high - part->low, work.width = task->narrow;
    work.dtype = (Dtype)task->dtype, work.gate = (Gate)task->gate, work.activation = (Activation)task->activation;
    return work;
}

/* ---- products ------------------------------------------------------------------------------------------------------ */

/* Columns low.. of a part's rows, which are `width` wide in all. */
static Matrix columns(const Layer *task, const char *rows, const Segment *part, int64_t width, int64_t low, int64_t count)
{
    char *address = (char *)rows + low * dtype_bytes((Dtype)task->dtype);
    return (Matrix){address, {part->high - part->low, count}, {width, 1}};
}

static Matrix of_expert(const Block *block, const Segment *part)
{
    return (Matrix){AT(AT(block->table, int64_t)[part->expert], char), {block->rows, block->columns},
                    {block->down, block->right}};
}

static Matrix transposed(Matrix matrix)
{
    return (Matrix){matrix.address, {matrix.sizes[1], matrix.sizes[0]}, {matrix.strides[1], matrix.strides[0]}};
}

/* out[row] = weight[expert] @ rows[row] */
static int linear(const Layer *task, int64_t blocks, int64_t count, const char *rows, int64_t width, char *out,
                  int64_t out_width, const Segment *part)
{
    Matrix left = columns(task, rows, part, width, 0, width);
    for (const Block *block = AT(blocks, Block); count-- > 0; block++) {
        Matrix to = columns(task, out, part, out_width, block->low, block->rows);
        Matrix right = transposed(of_expert(block, part));
        if (!product(&to, &left, &right, (Dtype)task->dtype, 0))
            return 0;
    }
    return 1;
}

/* out[row] = rows[row] @ weight[expert] */
static int multiply(const Layer *task, int64_t blocks, int64_t count, const char *rows, int64_t width, char *out,
                    int64_t out_width, const Segment *part)
{
    Matrix to = columns(task, out, part, out_width, 0, out_width);
    for (const Block *block = AT(blocks, Block), *first = block; count-- > 0; block++) {
        Matrix left = columns(task, rows, part, width, block->low, block->rows), right = of_expert(block, part);
        if (!product(&to, &left, &right, (Dtype)task->dtype, block != first))
            return 0;
    }
    return 1;
}

/* total[expert] (+)= left[rows].T @ right[rows], where there is a total */
static int outer(const Layer *task, int64_t blocks, int64_t count, const char *left, int64_t left_width,
                 const char *right, int64_t right_width, const Segment *part)
{
    Matrix other = columns(task, right, part, right_width, 0, right_width);
    for (const Block *block = AT(blocks, Block); count-- > 0; block++) {
        Matrix to = of_expert(block, part);
        Matrix mine = transposed(columns(task, left, part, left_width, block->low, block->rows));
        if (to.address != NULL && !product(&to, &mine, &other, (Dtype)task->dtype, !part->first))
            return 0;
    }
    return 1;
}

/* ---- a part -------------------------------------------------------------------------------------------------------- */

static int project_up(const Layer *task, char *x, char *h, const Segment *part)
{
    gather(task, x, task->x, task->x_stride, part);
    return linear(task, task->ups, task->up_count, x, task->width, h, task->width_h, part);
}

static int forward_part(const Layer *task, int64_t group, char *scratch, const Segment *part)
{
    long bytes = dtype_bytes((Dtype)task->dtype);
    char *x = scratch, *a = x + task->room * task->width * bytes, *h = kept(task, part);
    if (h == NULL)
        h = a + task->room * task->narrow * bytes;
    if (!project_up(task, x, h, part))
        return 0;
    Gated work = gated_of(task, part, h, a);
    gated_forward(&work, 0, work.count);
    char *y = x;
    if (!linear(task, task->downs, task->down_count, a, task->narrow, y, task->width, part))
        return 0;
    add_rows(task, group, y, part);
    return 1;
}

static int backward_part(const Layer *task, int64_t group, char *scratch, const Segment *part)
{
    long bytes = dtype_bytes((Dtype)task->dtype);
    char *wide = scratch, *grad_a = wide + task->room * task->width * bytes, *h = kept(task, part);
    char *a = grad_a + task->room * task->narrow * bytes, *grad_h = a + task->room * task->narrow * bytes;
    if (h == NULL) {
        h = grad_h + task->room * task->width_h * bytes;
        if (!project_up(task, wide, h, part))
            return 0;
    }
    gather(task, wide, task->grad, task->grad_stride, part);
    if (!multiply(task, task->downs, task->down_count, wide, task->width, grad_a, task->narrow, part))
        return 0;
    Gated work = gated_of(task, part, h, a);
    work.grad_a = grad_a, work.grad_h = grad_h, work.dot = task->dot ? AT(task->dot, float) + part->low : NULL;
    gated_backward(&work, 0, work.count);
    if (!outer(task, task->grad_downs, task->grad_down_count, wide, task->width, a, task->narrow, part))
        return 0;
    if (task->totals) {
        if (!multiply(task, task->ups, task->up_count, grad_h, task->width_h, wide, task->width, part))
            return 0;
        add_rows(task, group, wide, part);
    }
    if (task->grad_up_count == 0)
        return 1;
    gather(task, wide, task->x, task->x_stride, part);
    return outer(task, task->grad_ups, task->grad_up_count, grad_h, task->width_h, wide, task->width, part);
}

/* ---- a layer ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Layer *layer;
    int (*part)(const Layer *, int64_t, char *, const Segment *);
    int *refused; /* set by any thread, to the same */
} Call;

static void run_groups(const void *argument, long low, long high)
{
    const Call *call = argument;
    const Layer *task = call->layer;
    const int64_t *bounds = AT(task->bounds, int64_t);
    for (long group = low; group < high; group++) {
        if (task->totals && task->distinct > 1)
            memset(total_of(task, group), 0, task->tokens * task->width * sizeof(float));
        for (int64_t i = bounds[group]; i < bounds[group + 1]; i++)
            if (!call->part(task, group, AT(task->scratch, char) + group * task->scratch_step,
                            AT(task->segments, Segment) + i)) {
                *call->refused = 1;
                return;
            }
    }
}

/* out = the sum of the totals, group after group, in the layer's dtype. */
static void sum_totals(const void *argument, long low, long high)
{
    const Layer *task = argument;
    float sum[RUN];
    for (long at = low; at < high; at += RUN) {
        int count = high - at < RUN ? (int)(high - at) : RUN;
        memcpy(sum, total_of(task, 0) + at, count * sizeof *sum);
        for (int64_t group = 1; group < task->distinct; group++)
            elements_add(sum, total_of(task, group), FLOAT32, at, count);
        elements_store(AT(task->out, char), sum, (Dtype)task->dtype, at, 1, count);
    }
}

/* Whether every row is of a token; else an IndexError. */
static int check_tokens(const Layer *task)
{
    const int32_t *token = AT(task->token, int32_t);
    for (int64_t row = 0; row < task->rows; row++)
        if (token[row] < 0 || token[row] >= task->tokens) {
            PyErr_Format(PyExc_IndexError, "a row of the expert order is of token %d; there are %lld tokens", token[row],
                         (long long)task->tokens);
            return 0;
        }
    return 1;
}

static PyObject *run(PyObject *address, int (*part)(const Layer *, int64_t, char *, const Segment *))
{
    const Layer *task = PyLong_AsVoidPtr(address);
    if (task == NULL || !check_tokens(task))
        return NULL;
    int refused = 0;
    Call call = {task, part, &refused};
    Py_BEGIN_ALLOW_THREADS
    threads_run(run_groups, &call, task->groups, 1, (int)task->threads);
    if (!refused && task->totals && AT(task->out, float) != total_of(task, task->distinct - 1))
        threads_run(sum_totals, task, task->tokens * task->width, 32768, (int)task->threads);
    Py_END_ALLOW_THREADS
    if (refused)
        return PyErr_Format(PyExc_RuntimeError, "torch refused the product of an expert's rows: %lld rows of %lld numbers, "
                            "experts %lld wide", (long long)task->rows, (long long)task->width, (long long)task->narrow);
    Py_RETURN_NONE;
}

PyObject *layer_forward(PyObject *module, PyObject *address)
{
    (void)module;
    return run(address, forward_part);
}

PyObject *layer_backward(PyObject *module, PyObject *address)
{
    (void)module;
    return run(address, backward_part);
}
