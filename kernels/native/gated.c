#include "gated.h"

#include <stddef.h>

static int smaller(long a, int b) { return a < b ? (int)a : b; }

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

void gated_forward(const void *argument, long low, long high)
{
    const Gated *task = argument;
    Dtype dtype = task->dtype;
    float gate_run[RUN], up_run[RUN], a_run[RUN];
    for (long row = low; row < high; row++)
        for (long column = 0; column < task->width; column += RUN) {
            int stride, count = smaller(task->width - column, RUN);
            long gate_at, up_at, at = row * task->width + column;
            place(task, row, column, &gate_at, &up_at, &stride);
            const float *gate = fetch(gate_run, task->h, task->h_dtype, gate_at, stride, count), *up = NULL;
            if (task->gate != UNGATED)
                up = fetch(up_run, task->h, task->h_dtype, up_at, stride, count);
            float *a = room(a_run, task->a, dtype, at, 1);
            elements_gated(a, gate, up, task->scale == NULL ? 1.0f : task->scale[row], task->activation, count);
            put(a, a_run, task->a, dtype, at, 1, count);
        }
}

void gated_backward(const void *argument, long low, long high)
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
            const float *gate = fetch(gate_run, task->h, task->h_dtype, gate_at, stride, count), *up = NULL;
            const float *grad_a = fetch(grad_run, task->grad_a, dtype, at, 1, count);
            Grads out = {room(a_run, task->a, dtype, at, 1), room(grad_gate_run, task->grad_h, dtype, gate_at, stride),
                         NULL, dot_run};
            if (task->gate != UNGATED) {
                up = fetch(up_run, task->h, task->h_dtype, up_at, stride, count);
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
