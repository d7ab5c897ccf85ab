#define _GNU_SOURCE
#include "threads.h"

#include <dlfcn.h>
#include <stddef.h>

static void (*pool_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*pool_thread)(void);
static int (*pool_size)(void);

int threads_find(void)
{
    pool_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))dlsym(RTLD_DEFAULT, "GOMP_parallel");
    pool_thread = (int (*)(void))dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    pool_size = (int (*)(void))dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    if (pool_parallel == NULL || pool_thread == NULL || pool_size == NULL)
        pool_parallel = NULL;
    return pool_parallel != NULL;
}

typedef struct {
    range_work work;
    const void *task;
    long count, grain;
} Job;

/* What each thread of the pool runs. The pool may have given fewer threads than were asked for. */
static void run_share(void *argument)
{
    const Job *job = argument;
    long size = pool_size(), thread = pool_thread();
    long grains = (job->count + job->grain - 1) / job->grain;
    long low = grains * thread / size * job->grain, high = grains * (thread + 1) / size * job->grain;
    if (high > job->count)
        high = job->count;
    if (low < high)
        job->work(job->task, low, high);
}

void threads_run(range_work work, const void *task, long count, long grain, int threads)
{
    long grains = (count + grain - 1) / grain;
    if (threads > grains)
        threads = (int)grains;
    if (pool_parallel == NULL || threads < 2) {
        work(task, 0, count);
        return;
    }
    Job job = {work, task, count, grain};
    pool_parallel(run_share, &job, (unsigned)threads, 0);
}
