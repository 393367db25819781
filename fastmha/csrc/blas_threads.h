/* The BLAS library's thread count, held to one while the pool runs products side by side. */
#ifndef FMHA_BLAS_THREADS_H
#define FMHA_BLAS_THREADS_H

/* Where the BLAS library's setter and getter of its process-wide thread count lie; NULL where none was found (one without
   the other is no use: what cannot be read cannot be restored). To be called while nobody is inside. */
void fmha_blas_threads_bind(int (*get)(void), void (*set)(int));
int fmha_blas_threads_bound(void);

/* Held to one thread between enter and leave, counted over all threads of the process: the first to enter saves the count
   and sets 1, the last to leave restores it. Where no setter is bound, enter takes one process-wide lock instead (recursive
   use by the same thread is not supported) and leave releases it. Enter returns 1 if BLAS is held at one thread (a pool may
   run products side by side), 0 if the lock is held (products must run one after the other in this thread); leave is handed
   that answer. A child forked while a thread was inside begins with nobody inside and the saved count restored. */
int fmha_blas_enter(void);
void fmha_blas_leave(int held);

/* How many threads call BLAS at a time: SciPy's OpenBLAS has buffers for some 130, for this process's own calls, too, and
 * crashes beyond. */
#define FMHA_MOST_IN_BLAS 64

/* Around every item that calls BLAS, between enter and leave: a fork waits until none is under way (milliseconds, not a whole
 * run), because a child must not inherit a lock of the BLAS library's own; and where as many are under way as may be, an item
 * waits for one to end. */
void fmha_blas_item_begin(void);
void fmha_blas_item_end(void);

/* How many are inside now, for tests. */
int fmha_blas_held(void);

#endif
