#include "attention.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "elements.h"
#include "gemm.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define WIDE __attribute__((target("avx512f")))
#define STEP 16
#define HEIGHT 48 /* queries at a time: with a causal mask, what is masked of them is computed for nothing */

enum { Q, K, V, OUT, GRAD, GRAD_Q, GRAD_K, GRAD_V, TENSORS };

/* Each tensor is [batch, heads, length, width], its last numbers side by side; strides: of the first three axes. */
typedef struct {
    int64_t batch, heads, groups, length, width; /* groups: of heads that share k and v */
    int64_t strides[TENSORS][3];
    char *addresses[TENSORS];
    float *log_sums; /* [batch, heads, length]: of each query's exponentials */
    float scale;
    int causal, *failed;
} Attention;

static float *at(const Attention *task, int tensor, int64_t batch, int64_t head)
{
    const int64_t *strides = task->strides[tensor];
    return (float *)task->addresses[tensor] + batch * strides[0] + head * strides[1];
}

static int64_t down(const Attention *task, int tensor) { return task->strides[tensor][2]; }

static int64_t panels(int64_t columns) { return (columns + GEMM_COLUMNS - 1) / GEMM_COLUMNS * GEMM_COLUMNS; }

static __mmask16 first(int64_t count)
{
    return count >= STEP ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

/* To 1.5 units in the last place; of what is no number, none. */
static WIDE INLINED __m512 exponential(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(y, n);
}

/* ---- forward --------------------------------------------------------------------------------------------------------- */

/* A row of `keys` scores becomes exponentials, and zeros up to `width`. Returns their sum's reciprocal. */
static WIDE float exponentials(float *row, int64_t keys, int64_t width, float scale, float *log_sum)
{
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), by = _mm512_set1_ps(scale);
    for (int64_t key = 0; key < keys; key += STEP) {
        __mmask16 there = first(keys - key);
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, row + key), by);
        _mm512_mask_storeu_ps(row + key, there, x);
        most = _mm512_mask_max_ps(most, there, most, x);
    }
    float top = _mm512_reduce_max_ps(most);
    for (int64_t key = 0; key < width; key += STEP) {
        __mmask16 there = first(keys - key);
        __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(there, row + key), _mm512_set1_ps(top));
        x = _mm512_maskz_mov_ps(there, exponential(x));
        _mm512_storeu_ps(row + key, x);
        sum = _mm512_add_ps(sum, x);
    }
    float total = _mm512_reduce_add_ps(sum);
    *log_sum = top + logf(total);
    return 1.0f / total;
}

static WIDE void scale_row(float *row, float by, int64_t width)
{
    for (int64_t i = 0; i < width; i++)
        row[i] *= by;
}

/* How many keys the queries up to `query` see. */
static int64_t keys_seen(const Attention *task, int64_t query)
{
    return task->causal ? query : task->length;
}

static WIDE void forward_head(const Attention *task, int64_t batch, int64_t head, const float *keys, const float *values,
                              float *scores)
{
    int64_t length = task->length, width = task->width, wide = panels(length);
    const float *q = at(task, Q, batch, head);
    float *out = at(task, OUT, batch, head), *log_sums = task->log_sums + (batch * task->heads + head) * length;
    float scales[HEIGHT];
    for (int64_t low = 0; low < length; low += HEIGHT) {
        int64_t rows = length - low < HEIGHT ? length - low : HEIGHT, seen = keys_seen(task, low + rows);
        gemm_packed(scores, wide, q + low * down(task, Q), down(task, Q), 1, rows, keys, width * GEMM_COLUMNS, width,
                    seen, 0);
        for (int64_t row = 0; row < rows; row++)
            scales[row] = exponentials(scores + row * wide, keys_seen(task, low + row + 1), panels(seen), task->scale,
                                       log_sums + low + row);
        float *to = out + low * down(task, OUT);
        gemm_packed(to, down(task, OUT), scores, wide, 1, rows, values, length * GEMM_COLUMNS, seen, width, 0);
        for (int64_t row = 0; row < rows; row++)
            scale_row(to + row * down(task, OUT), scales[row], width);
    }
}

static float *room_for(const Attention *task, int64_t numbers)
{
    void *room = NULL;
    if (posix_memalign(&room, 64, (size_t)numbers * sizeof(float)) != 0)
        *task->failed = 1;
    return room;
}

static void forward_range(const void *argument, long low, long high)
{
    const Attention *task = argument;
    int64_t length = task->length, width = task->width, wide = panels(length);
    int64_t keys_size = wide * width, values_size = panels(width) * length;
    float *room = room_for(task, keys_size + values_size + HEIGHT * wide);
    for (long group = low; room != NULL && group < high; group++) {
        int64_t batch = group / task->groups, shared = group % task->groups, heads = task->heads / task->groups;
        float *keys = room, *values = keys + keys_size, *scores = values + values_size;
        gemm_pack(keys, at(task, K, batch, shared), 1, down(task, K), width, length);
        gemm_pack(values, at(task, V, batch, shared), down(task, V), 1, length, width);
        for (int64_t head = shared * heads; head < (shared + 1) * heads; head++)
            forward_head(task, batch, head, keys, values, scores);
    }
    free(room);
}

/* ---- backward -------------------------------------------------------------------------------------------------------- */

/* Scores become probabilities p, the gradient of p becomes that of the products with the keys. */
static WIDE void slopes(float *row, float *grad, int64_t keys, int64_t width, float scale, float log_sum, float dot)
{
    for (int64_t key = 0; key < width; key += STEP) {
        __mmask16 there = first(keys - key);
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, row + key), _mm512_set1_ps(scale));
        __m512 p = _mm512_maskz_mov_ps(there, exponential(_mm512_sub_ps(x, _mm512_set1_ps(log_sum))));
        __m512 slope = _mm512_sub_ps(_mm512_maskz_loadu_ps(there, grad + key), _mm512_set1_ps(dot));
        _mm512_storeu_ps(row + key, p);
        slope = _mm512_mul_ps(_mm512_mul_ps(p, slope), _mm512_set1_ps(scale));
        _mm512_storeu_ps(grad + key, _mm512_maskz_mov_ps(there, slope));
    }
}

static WIDE float dot(const float *a, const float *b, int64_t width)
{
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += STEP) {
        __mmask16 there = first(width - i);
        sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(there, a + i), _mm512_maskz_loadu_ps(there, b + i), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

/* Of one group of heads: k and v as right operands in three ways, room for scores, slopes, q and the gradient. */
typedef struct {
    float *keys, *key_rows, *values, *scores, *slopes, *queries, *grads;
} Room;

static WIDE void backward_head(const Attention *task, int64_t batch, int64_t head, int64_t shared, const Room *room,
                               int is_first)
{
    int64_t length = task->length, width = task->width, wide = panels(length);
    const float *q = at(task, Q, batch, head), *grad = at(task, GRAD, batch, head), *out = at(task, OUT, batch, head);
    const float *log_sums = task->log_sums + (batch * task->heads + head) * length;
    float *grad_q = at(task, GRAD_Q, batch, head), *grad_k = at(task, GRAD_K, batch, shared);
    float *grad_v = at(task, GRAD_V, batch, shared);
    for (int64_t low = 0; low < length; low += HEIGHT) {
        int64_t rows = length - low < HEIGHT ? length - low : HEIGHT, seen = keys_seen(task, low + rows);
        const float *mine = q + low * down(task, Q), *grads = grad + low * down(task, GRAD);
        gemm_packed(room->scores, wide, mine, down(task, Q), 1, rows, room->keys, width * GEMM_COLUMNS, width, seen, 0);
        gemm_packed(room->slopes, wide, grads, down(task, GRAD), 1, rows, room->values, width * GEMM_COLUMNS, width,
                    seen, 0);
        for (int64_t row = 0; row < rows; row++) {
            float value = dot(grads + row * down(task, GRAD), out + (low + row) * down(task, OUT), width);
            slopes(room->scores + row * wide, room->slopes + row * wide, keys_seen(task, low + row + 1), panels(seen),
                   task->scale, log_sums[low + row], value);
        }
        gemm_packed(grad_q + low * down(task, GRAD_Q), down(task, GRAD_Q), room->slopes, wide, 1, rows, room->key_rows,
                    length * GEMM_COLUMNS, seen, width, 0);
        gemm_pack(room->queries, mine, down(task, Q), 1, rows, width);
        gemm_pack(room->grads, grads, down(task, GRAD), 1, rows, width);
        /* keys that no query before these has seen are written, the others added to */
        int64_t known = !is_first ? seen : task->causal ? low : low > 0 ? seen : 0;
        for (int64_t key = 0; key < seen; key = key < known ? known : seen) {
            int64_t until = key < known ? known : seen;
            gemm_packed(grad_v + key * down(task, GRAD_V), down(task, GRAD_V), room->scores + key, 1, wide, until - key,
                        room->grads, rows * GEMM_COLUMNS, rows, width, key < known);
            gemm_packed(grad_k + key * down(task, GRAD_K), down(task, GRAD_K), room->slopes + key, 1, wide, until - key,
                        room->queries, rows * GEMM_COLUMNS, rows, width, key < known);
        }
    }
}

static void backward_range(const void *argument, long low, long high)
{
    const Attention *task = argument;
    int64_t length = task->length, width = task->width, wide = panels(length);
    int64_t across = wide * width, along = panels(width) * length, block = HEIGHT * wide, rows = HEIGHT * panels(width);
    float *next = room_for(task, 2 * across + along + 2 * block + 2 * rows), *start = next;
    Room room;
    float **parts[] = {&room.keys, &room.values, &room.key_rows, &room.scores, &room.slopes, &room.queries, &room.grads};
    int64_t sizes[] = {across, across, along, block, block, rows, rows};
    for (int i = 0; start != NULL && i < 7; i++)
        *parts[i] = next, next += sizes[i];
    for (long group = low; start != NULL && group < high; group++) {
        int64_t batch = group / task->groups, shared = group % task->groups, heads = task->heads / task->groups;
        const float *k = at(task, K, batch, shared), *v = at(task, V, batch, shared);
        gemm_pack(room.keys, k, 1, down(task, K), width, length);
        gemm_pack(room.key_rows, k, down(task, K), 1, length, width);
        gemm_pack(room.values, v, 1, down(task, V), width, length);
        for (int64_t head = shared * heads; head < (shared + 1) * heads; head++)
            backward_head(task, batch, head, shared, &room, head == shared * heads);
    }
    free(start);
}

/* ---- the calls ------------------------------------------------------------------------------------------------------- */

static PyObject *run(PyObject *arguments, range_work work, int tensors)
{
    Attention task = {0};
    Py_buffer sizes, strides, addresses;
    Py_ssize_t log_sums;
    double scale;
    int threads, failed = 0;
    if (!PyArg_ParseTuple(arguments, "y*y*y*ndii", &sizes, &strides, &addresses, &log_sums, &scale, &task.causal,
                          &threads))
        return NULL;
    int fits = sizes.len == 5 * 8 && strides.len == tensors * 3 * 8 && addresses.len == tensors * 8;
    if (fits) {
        memcpy(&task.batch, sizes.buf, (size_t)sizes.len);
        memcpy(task.strides, strides.buf, (size_t)strides.len);
        memcpy(task.addresses, addresses.buf, (size_t)addresses.len);
    }
    PyBuffer_Release(&sizes), PyBuffer_Release(&strides), PyBuffer_Release(&addresses);
    if (!fits || !gemm_find())
        return PyErr_Format(PyExc_ValueError, "attention of %d tensors on this processor", tensors);
    task.log_sums = (float *)log_sums, task.scale = (float)scale, task.failed = &failed;
    Py_BEGIN_ALLOW_THREADS
    threads_run(work, &task, task.batch * task.groups, 1, threads);
    Py_END_ALLOW_THREADS
    if (failed)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyObject *attention_forward(PyObject *module, PyObject *arguments)
{
    (void)module;
    return run(arguments, forward_range, OUT + 1);
}

PyObject *attention_backward(PyObject *module, PyObject *arguments)
{
    (void)module;
    return run(arguments, backward_range, TENSORS);
}

#else

static PyObject *none(void)
{
    return PyErr_Format(PyExc_ValueError, "no attention on this processor");
}

PyObject *attention_forward(PyObject *module, PyObject *arguments)
{
    (void)module, (void)arguments;
    return none();
}

PyObject *attention_backward(PyObject *module, PyObject *arguments)
{
    (void)module, (void)arguments;
    return none();
}

#endif
