#include "wide.h"

#include "elements.h"
#include "threads.h"

#define LINE 16         /* numbers: threads write whole lines of the cache */
#define SLICE (1 << 19) /* numbers of a matrix that are wide at a time, about */
#define WORK (1 << 18)  /* multiplications for which another thread is worth its start */
#define GRAIN 32768     /* numbers, likewise */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- one matrix ---------------------------------------------------------------------------------------------------- */

Matrix widened(const Matrix *matrix, float *room)
{
    Matrix wide = {(char *)room, {matrix->sizes[0], matrix->sizes[1]}, {matrix->sizes[1], 1}};
    if (matrix->strides[1] != 1)
        wide.strides[0] = 1, wide.strides[1] = matrix->sizes[0];
    return wide;
}

/* The axis along which the numbers of a wide matrix do not lie side by side. */
static int outer_axis(const Matrix *wide) { return wide->strides[1] != 1; }

void copy(const Matrix *narrow, const Matrix *wide, Dtype dtype, Copy how)
{
    int across = outer_axis(wide);
    int64_t runs = narrow->sizes[across], count = narrow->sizes[!across];
    int64_t step = narrow->strides[across], stride = narrow->strides[!across], longest = stride == 1 ? RUN : 1;
    float sum[RUN];
    for (int64_t run = 0; run < runs; run++)
        for (int64_t at = 0; at < count; at += longest) {
            int length = (int)smaller(count - at, longest);
            float *numbers = (float *)wide->address + run * wide->strides[across] + at;
            long place = run * step + at * stride;
            if (how == WIDEN)
                elements_load(numbers, narrow->address, dtype, place, 1, length);
            else if (how == NARROW)
                elements_store(narrow->address, numbers, dtype, place, 1, length);
            else {
                elements_load(sum, narrow->address, dtype, place, 1, length);
                elements_add(sum, numbers, FLOAT32, 0, length);
                elements_store(narrow->address, sum, dtype, place, 1, length);
            }
        }
}

static Matrix slice(const Matrix *matrix, int axis, int64_t low, int64_t high, Dtype dtype)
{
    Matrix part = *matrix;
    part.address += low * matrix->strides[axis] * dtype_bytes(dtype), part.sizes[axis] = high - low;
    return part;
}

/* ---- a product ----------------------------------------------------------------------------------------------------- */

/* left is widened as a whole; each lane, which is a thread's, has columns of the others, so many at a time. */
typedef struct {
    int64_t lanes, columns, step, left, lane; /* the last two: numbers of room */
} Plan;

static Plan plan(const Matrix *left, const Matrix *right, int threads)
{
    int64_t down = left->sizes[0], across = left->sizes[1], columns = right->sizes[1];
    int64_t lines = (columns + LINE - 1) / LINE, lanes = smaller(threads, smaller(lines, down * across * columns / WORK));
    lanes = larger(lanes, 1);
    int64_t share = (lines + lanes - 1) / lanes * LINE, most = SLICE / larger(larger(down, across), 1) / LINE * LINE;
    int64_t step = smaller(share, larger(most, LINE));
    return (Plan){lanes, share, step, down * across, (down + across) * step};
}

int64_t wide_room(const Matrix *left, const Matrix *right, int threads)
{
    Plan parts = plan(left, right, threads);
    return parts.left + parts.lanes * parts.lane;
}

typedef struct {
    const Matrix *out, *left, *right, *wide_left;
    Dtype dtype;
    int add;
    Plan parts;
    float *room;
    int *refused; /* set by any thread, to the same */
} Task;

static void widen_left(const void *argument, long low, long high)
{
    const Task *task = argument;
    int axis = outer_axis(task->wide_left);
    Matrix part = slice(task->left, axis, low, high, task->dtype);
    Matrix wide = slice(task->wide_left, axis, low, high, FLOAT32);
    copy(&part, &wide, task->dtype, WIDEN);
}

static void multiply_lanes(const void *argument, long low, long high)
{
    const Task *task = argument;
    for (long lane = low; lane < high; lane++) {
        float *room = task->room + task->parts.left + lane * task->parts.lane;
        float *room_out = room + task->left->sizes[1] * task->parts.step;
        int64_t end = smaller((lane + 1) * task->parts.columns, task->right->sizes[1]);
        for (int64_t at = lane * task->parts.columns; at < end; at += task->parts.step) {
            int64_t stop = smaller(at + task->parts.step, end);
            Matrix right = slice(task->right, 1, at, stop, task->dtype), out = slice(task->out, 1, at, stop, task->dtype);
            Matrix wide_right = widened(&right, room), wide_out = widened(&out, room_out);
            copy(&right, &wide_right, task->dtype, WIDEN);
            if (!product(&wide_out, task->wide_left, &wide_right, FLOAT32, 0, 1)) {
                *task->refused = 1;
                return;
            }
            copy(&out, &wide_out, task->dtype, task->add ? NARROW_SUM : NARROW);
        }
    }
}

int wide_product(const Matrix *out, const Matrix *left, const Matrix *right, Dtype dtype, int add, float *room,
                 int threads)
{
    if (out->sizes[0] != left->sizes[0] || left->sizes[1] != right->sizes[0] || out->sizes[1] != right->sizes[1])
        return 0;
    int refused = 0;
    Matrix wide_left = widened(left, room);
    Task task = {out, left, right, &wide_left, dtype, add, plan(left, right, threads), room, &refused};
    int axis = outer_axis(&wide_left);
    threads_run(widen_left, &task, left->sizes[axis], larger(GRAIN / larger(left->sizes[!axis], 1), 1), threads);
    threads_run(multiply_lanes, &task, task.parts.lanes, 1, (int)task.parts.lanes);
    return !refused;
}
