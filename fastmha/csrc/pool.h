/* A small persistent thread pool. It starts nothing until the first run that can use a second thread. */
#ifndef FMHA_POOL_H
#define FMHA_POOL_H

#include <stddef.h>

/* Runs one item. `worker` is 0 in the caller and 1 .. threads-1 in the pool's threads, distinct among those at work on one run. */
typedef void (*fmha_task)(void *context, ptrdiff_t item, int worker);

/* Runs task(context, i, worker) for every i in [0, items), each once, on at most `threads` threads, the caller being one of
   them. Returns when all have ended; what the tasks wrote is then visible to the caller. Items are handed out in increasing
   order by an atomic counter. Serial in the caller where threads <= 1, items <= 1, the pool is busy with another run (another
   Python thread, or a nested call from inside a task), after shutdown, or where no thread can be started.
   Returns how many threads took part at most (1 = serial), 0 if the run was stopped.
   A process may fork at any time, from any thread that is not inside a task: the child begins with no workers. Where the
   question below forks, a run with workers is stopped in the child, which has lost what they were doing (fmha_pool_lost).
   Tasks run with subnormal numbers flushed to 0 (subnormals.h). A run that is to stop (below) hands out no more items. */
int fmha_pool_run(fmha_task task, void *context, ptrdiff_t items, int threads);

/* The same of tiny items, none of which waits for another: a thread takes `some` that follow each other at a time. */
int fmha_pool_deal(fmha_task task, void *context, ptrdiff_t items, int threads, ptrdiff_t some);

/* The question that the thread that called puts about every 50 ms of a run, inside it and outside any task's locks, with the
   control word of floating point that the caller had: an answer other than 0 stops the run. It may call runs of its own.
   Process-wide; NULL: never asked. */
void fmha_pool_ask(int (*question)(void));

/* Inside a task, between blocks of milliseconds at most: whether the run is to stop. The task then returns at once, and what
   it should have written is undefined. */
int fmha_pool_stopped(void);

/* Inside a task that looks, for the so many-th time, for what a task handed out before this one is to do: lets others run. 0 where
   the run is to stop. */
int fmha_pool_waits(unsigned looks);

/* Whether a run of this thread was stopped because a fork took its workers, in this process, the child; once. */
int fmha_pool_lost(void);

/* Threads alive now, without the caller: 0 before the first parallel run. */
int fmha_pool_workers(void);

/* Joins all workers, after the run that is under way, whose question must not need what the caller holds; later runs are
   serial, in a forked child too. Idempotent, safe from any thread that is not in a task. */
void fmha_pool_shutdown(void);

#endif
