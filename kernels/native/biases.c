#include "biases.h"

#include <string.h>

#define ROWS_AT_ONCE 32 /* that are added up before they are added to the sum: sums of many rows round less */

static int run_of(const Biased *task, long at) { return (int)(task->width - at < RUN ? task->width - at : RUN); }

static void load_vector(const Biased *task, float *to, long at)
{
    for (int i = 0; i < run_of(task, at); i++)
        elements_load(to + i, task->vector, task->vector_dtype, (at + i) * task->step, 1, 1);
}

static void load_row(const Biased *task, float *to, long row, long at)
{
    elements_load(to, task->rows, task->dtype, row * task->stride + task->low + at, 1, run_of(task, at));
}

/* to[i] += scale * from[i] */
static INLINED void add(float *to, const float *from, float scale, int count)
{
    for (int i = 0; i < count; i++)
        to[i] += scale * from[i];
}

static float scale_of(const Biased *task, long row) { return task->scale == NULL ? 1 : task->scale[row]; }

void biases_add(const Biased *task)
{
    float vector[RUN], row[RUN];
    for (long at = 0; at < task->width; at += RUN) {
        load_vector(task, vector, at);
        for (long r = 0; r < task->count; r++) {
            load_row(task, row, r, at);
            add(row, vector, scale_of(task, r), run_of(task, at));
            elements_store(task->rows, row, task->dtype, r * task->stride + task->low + at, 1, run_of(task, at));
        }
    }
}

void biases_sum(const Biased *task, int more)
{
    float total[RUN], part[RUN], row[RUN];
    for (long at = 0; at < task->width; at += RUN) {
        memset(total, 0, sizeof total);
        if (more)
            load_vector(task, total, at);
        for (long from = 0; from < task->count; from += ROWS_AT_ONCE) {
            memset(part, 0, sizeof part);
            for (long r = from; r < task->count && r < from + ROWS_AT_ONCE; r++) {
                load_row(task, row, r, at);
                add(part, row, scale_of(task, r), run_of(task, at));
            }
            add(total, part, 1, run_of(task, at));
        }
        for (int i = 0; i < run_of(task, at); i++)
            elements_store(task->vector, total + i, task->vector_dtype, (at + i) * task->step, 1, 1);
    }
}

void biases_dot(const Biased *task, float *dots)
{
    float vector[RUN], row[RUN];
    for (long at = 0; at < task->width; at += RUN) {
        load_vector(task, vector, at);
        for (long r = 0; r < task->count; r++) {
            load_row(task, row, r, at);
            for (int i = 0; i < run_of(task, at); i++)
                row[i] *= vector[i];
            dots[r] += elements_sum(row, run_of(task, at));
        }
    }
}
