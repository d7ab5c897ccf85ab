#include "layer.h"

#include <string.h>

#include "biases.h"
#include "elements.h"
#include "gated.h"
#include "products.h"
#include "threads.h"
#include "wide.h"

#define AT(address, type) ((type *)(intptr_t)(address))

static Dtype stored(const Layer *task) { return (Dtype)task->dtype; }

static Dtype work(const Layer *task) { return (Dtype)task->work; }

static int widens(const Layer *task) { return task->work != task->dtype; }

/* A part, and the scratch of its group. token, scale, dot: of each of its rows; NULL where nobody asks. */
typedef struct {
    const Layer *layer;
    const Segment *rows;
    int64_t group;
    char *scratch;
    int32_t *token;
    float *scale, *dot;
} Part;

static int64_t count_of(const Part *part) { return part->rows->high - part->rows->low; }

/* ---- rows ---------------------------------------------------------------------------------------------------------- */

static const int32_t *slots_of(const Part *part) { return AT(part->layer->order, int32_t) + part->rows->low; }

/* Tokens and routing weights of a part's rows. */
static void list_rows(const Part *part)
{
    const Layer *task = part->layer;
    const int32_t *slot = slots_of(part);
    for (int64_t row = 0; row < count_of(part); row++) {
        part->token[row] = slot[row] / (int32_t)task->top_k;
        if (part->scale)
            part->scale[row] = AT(task->scale, float)[slot[row]];
    }
}

/* <dA, A> to where the slots have it. */
static void put_dots(const Part *part)
{
    const int32_t *slot = slots_of(part);
    for (int64_t row = 0; part->dot && row < count_of(part); row++)
        AT(part->layer->dot, float)[slot[row]] = part->dot[row];
}

/* to[row] = source[token of row] */
static void gather(const Part *part, char *to, int64_t source, int64_t stride)
{
    const Layer *task = part->layer;
    long bytes = dtype_bytes(stored(task)), width = task->width;
    const int32_t *token = part->token;
    for (int64_t row = 0; row < count_of(part); row++)
        if (widens(task))
            elements_load((float *)to + row * width, AT(source, char), stored(task), token[row] * stride, 1, (int)width);
        else
            memcpy(to + row * width * bytes, AT(source, char) + token[row] * stride * bytes, width * bytes);
}

static float *total_of(const Layer *task, int64_t group)
{
    return AT(AT(task->totals, int64_t)[group], float);
}

/* The group's total[token of row] += rows[row], rows in order. */
static void add_rows(const Part *part, const char *rows)
{
    const Layer *task = part->layer;
    float *total = total_of(task, part->group);
    for (int64_t row = 0; row < count_of(part); row++)
        elements_add(total + part->token[row] * task->width, rows, work(task), row * task->width, (int)task->width);
}

/* The part's rows of H where it is kept, else NULL. */
static char *kept(const Part *part)
{
    const Layer *task = part->layer;
    return task->h ? AT(task->h, char) + part->rows->low * task->width_h * dtype_bytes(stored(task)) : NULL;
}

static Gated gated_of(const Part *part, const char *h, char *a)
{
    const Layer *task = part->layer;
    Gated gated = {0};
    gated.h = h, gated.a = a, gated.scale = part->scale;
    gated.count = count_of(part), gated.width = task->narrow;
    gated.dtype = work(task), gated.h_dtype = stored(task);
    gated.gate = (Gate)task->gate, gated.activation = (Activation)task->activation;
    return gated;
}

/* ---- matrices ------------------------------------------------------------------------------------------------------ */

/* Columns low.. of the part's rows, which are `width` wide in all. */
static Matrix columns(const Part *part, const char *rows, int64_t width, int64_t low, int64_t count)
{
    char *address = (char *)rows + low * dtype_bytes(work(part->layer));
    return (Matrix){address, {count_of(part), count}, {width, 1}};
}

static Matrix transposed(Matrix matrix)
{
    return (Matrix){matrix.address, {matrix.sizes[1], matrix.sizes[0]}, {matrix.strides[1], matrix.strides[0]}};
}

/* An expert's matrix as it lies there; its address is NULL where there is none. */
static Matrix of_expert(const Part *part, const Block *block)
{
    char *address = AT(AT(block->table, int64_t)[part->rows->expert], char);
    if (address != NULL)
        address += block->offset * dtype_bytes(stored(part->layer));
    return (Matrix){address, {block->rows, block->columns}, {block->down, block->right}};
}

static float *matrix_room(const Part *part) { return (float *)(part->scratch + part->layer->matrix); }

/* An expert's matrix as it is multiplied. */
static Matrix to_multiply(const Part *part, const Block *block)
{
    Matrix matrix = of_expert(part, block);
    if (!widens(part->layer))
        return matrix;
    Matrix wide = widened(&matrix, matrix_room(part));
    copy(&matrix, &wide, stored(part->layer), WIDEN);
    return wide;
}

/* ---- products ------------------------------------------------------------------------------------------------------ */

/* out[row] = weight[expert] @ rows[row] */
static int linear(const Part *part, int64_t blocks, int64_t count, const char *rows, int64_t width, char *out,
                  int64_t out_width)
{
    Matrix left = columns(part, rows, width, 0, width);
    for (const Block *block = AT(blocks, Block); count-- > 0; block++) {
        Matrix to = columns(part, out, out_width, block->low, block->rows);
        Matrix right = transposed(to_multiply(part, block));
        if (!product(&to, &left, &right, work(part->layer), 0, 1))
            return 0;
    }
    return 1;
}

/* out[row] = rows[row] @ weight[expert] */
static int multiply(const Part *part, int64_t blocks, int64_t count, const char *rows, int64_t width, char *out,
                    int64_t out_width)
{
    Matrix to = columns(part, out, out_width, 0, out_width);
    for (const Block *block = AT(blocks, Block), *first = block; count-- > 0; block++) {
        Matrix left = columns(part, rows, width, block->low, block->rows), right = to_multiply(part, block);
        if (!product(&to, &left, &right, work(part->layer), block != first, 1))
            return 0;
    }
    return 1;
}

/* total[expert] (+)= left[rows].T @ right[rows], where there is a total */
static int outer(const Part *part, int64_t blocks, int64_t count, const char *left, int64_t left_width,
                 const char *right, int64_t right_width)
{
    Matrix other = columns(part, right, right_width, 0, right_width);
    for (const Block *block = AT(blocks, Block); count-- > 0; block++) {
        Matrix to = of_expert(part, block), mine = transposed(columns(part, left, left_width, block->low, block->rows));
        if (to.address == NULL)
            continue;
        if (!widens(part->layer)) {
            if (!product(&to, &mine, &other, work(part->layer), !part->rows->first, 1))
                return 0;
            continue;
        }
        Matrix wide = widened(&to, matrix_room(part));
        if (!product(&wide, &mine, &other, FLOAT32, 0, 1))
            return 0;
        copy(&to, &wide, stored(part->layer), part->rows->first ? NARROW : NARROW_SUM);
    }
    return 1;
}

/* ---- biases -------------------------------------------------------------------------------------------------------- */

typedef enum { ADD, SUM, DOT } Use;

/* Of each block of biases, or of rooms for their gradients, what biases.h says, with the part's rows. */
static void use_biases(const Part *part, Use use, int64_t blocks, int64_t count, const char *rows, int64_t width,
                       float *scale)
{
    for (const Block *block = AT(blocks, Block); count-- > 0; block++) {
        Matrix vector = of_expert(part, block);
        Biased task = {(char *)rows, vector.address, work(part->layer), stored(part->layer), count_of(part), width,
                       block->low, vector.sizes[0], vector.strides[0], scale};
        if (vector.address == NULL)
            continue;
        if (use == ADD)
            biases_add(&task);
        else if (use == SUM)
            biases_sum(&task, !part->rows->first);
        else
            biases_dot(&task, part->dot);
    }
}

/* ---- a part -------------------------------------------------------------------------------------------------------- */

/* The next `width` numbers a row of the scratch. */
static char *take(const Part *part, char **free, int64_t width)
{
    char *taken = *free;
    *free += part->layer->room * width * dtype_bytes(work(part->layer));
    return taken;
}

/* H in its own dtype, through `wide` where products are not in it. */
static int project_up(const Part *part, char *x, char *h, char *wide)
{
    const Layer *task = part->layer;
    gather(part, x, task->x, task->x_stride);
    char *out = widens(task) ? wide : h;
    if (!linear(part, task->ups, task->up_count, x, task->width, out, task->width_h))
        return 0;
    use_biases(part, ADD, task->up_biases, task->up_bias_count, out, task->width_h, NULL);
    if (widens(task))
        elements_store(h, (float *)wide, stored(task), 0, 1, (int)(count_of(part) * task->width_h));
    return 1;
}

static int forward_part(const Part *part)
{
    const Layer *task = part->layer;
    char *free = part->scratch, *x = take(part, &free, task->width), *a = take(part, &free, task->narrow);
    char *wide = widens(task) ? take(part, &free, task->width_h) : NULL, *h = kept(part);
    if (h == NULL)
        h = take(part, &free, task->width_h);
    if (!project_up(part, x, h, wide))
        return 0;
    Gated gated = gated_of(part, h, a);
    gated_forward(&gated, 0, gated.count);
    char *y = x;
    if (!linear(part, task->downs, task->down_count, a, task->narrow, y, task->width))
        return 0;
    use_biases(part, ADD, task->down_biases, task->down_bias_count, y, task->width, part->scale);
    add_rows(part, y);
    return 1;
}

static int backward_part(const Part *part)
{
    const Layer *task = part->layer;
    char *free = part->scratch, *rows = take(part, &free, task->width), *grad_a = take(part, &free, task->narrow);
    char *a = take(part, &free, task->narrow), *grad_h = take(part, &free, task->width_h), *h = kept(part);
    if (h == NULL) {
        h = take(part, &free, task->width_h);
        if (!project_up(part, rows, h, grad_h))
            return 0;
    }
    gather(part, rows, task->grad, task->grad_stride);
    if (!multiply(part, task->downs, task->down_count, rows, task->width, grad_a, task->narrow))
        return 0;
    Gated gated = gated_of(part, h, a);
    gated.grad_a = grad_a, gated.grad_h = grad_h, gated.dot = part->dot;
    gated_backward(&gated, 0, gated.count);
    if (part->dot)
        use_biases(part, DOT, task->down_biases, task->down_bias_count, rows, task->width, NULL);
    put_dots(part);
    use_biases(part, SUM, task->grad_down_biases, task->grad_down_bias_count, rows, task->width, part->scale);
    use_biases(part, SUM, task->grad_up_biases, task->grad_up_bias_count, grad_h, task->width_h, NULL);
    if (!outer(part, task->grad_downs, task->grad_down_count, rows, task->width, a, task->narrow))
        return 0;
    if (task->totals) {
        if (!multiply(part, task->ups, task->up_count, grad_h, task->width_h, rows, task->width))
            return 0;
        add_rows(part, rows);
    }
    if (task->grad_up_count == 0)
        return 1;
    gather(part, rows, task->x, task->x_stride);
    return outer(part, task->grad_ups, task->grad_up_count, grad_h, task->width_h, rows, task->width);
}

/* ---- a layer ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const Layer *layer;
    int (*run)(const Part *);
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
        for (int64_t i = bounds[group]; i < bounds[group + 1]; i++) {
            char *scratch = AT(task->scratch, char) + group * task->scratch_step, *lists = scratch + task->lists;
            Part part = {task, AT(task->segments, Segment) + i, group, scratch, (int32_t *)lists,
                         task->scale ? (float *)lists + task->room : NULL,
                         task->dot ? (float *)lists + 2 * task->room : NULL};
            list_rows(&part);
            if (!call->run(&part)) {
                *call->refused = 1;
                return;
            }
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

/* Whether every row is of a slot that is there; else an IndexError. */
static int check_slots(const Layer *task)
{
    const int32_t *slot = AT(task->order, int32_t);
    int64_t slots = task->tokens * task->top_k;
    for (int64_t row = 0; row < task->rows; row++)
        if (slot[row] < 0 || slot[row] >= slots) {
            PyErr_Format(PyExc_IndexError, "a row of the expert order is slot %d; there are %lld slots", slot[row],
                         (long long)slots);
            return 0;
        }
    return 1;
}

static PyObject *run(PyObject *address, int (*run_part)(const Part *))
{
    const Layer *task = PyLong_AsVoidPtr(address);
    if (task == NULL || !check_slots(task))
        return NULL;
    int refused = 0;
    Call call = {task, run_part, &refused};
    Py_BEGIN_ALLOW_THREADS
    threads_run(run_groups, &call, task->groups, 1, (int)task->groups);
    if (!refused && task->totals && AT(task->out, float) != total_of(task, task->distinct - 1))
        threads_run(sum_totals, task, task->tokens * task->width, 32768, (int)task->groups);
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
