/* Work on ranges of rows in the threads that torch already has.

   torch's operators run on the pool of an OpenMP runtime that comes with torch. A second pool would fight with it for the
   cores: while one computes, the other spins. So nothing is linked here; GOMP_parallel, the entry that GCC's libgomp and
   LLVM's libomp both have, is looked up among the symbols that importing torch made global. Where there is none, the
   caller's thread does all of the work. */
#ifndef MOEBIUS_THREADS_H
#define MOEBIUS_THREADS_H

/* work(task, low, high): the rows (or columns) low..high of a task. */
typedef void (*range_work)(const void *task, long low, long high);

/* Finds the pool. Returns 1 where there is one. */
int threads_find(void);

/* work(task, ...) over 0..count in at most `threads` ranges, each a multiple of `grain` wide but the last. */
void threads_run(range_work work, const void *task, long count, long grain, int threads);

#endif
