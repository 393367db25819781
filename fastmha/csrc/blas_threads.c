/* Counting who holds the BLAS library at one thread. See the header. */
#include "blas_threads.h"

#include <stddef.h>

/* Python has threads wherever it runs, also where the pool has none (FMHA_NO_THREADS, Windows): the locks are always real. */
#ifdef _WIN32
#include <windows.h>
static SRWLOCK guard = SRWLOCK_INIT, product = SRWLOCK_INIT;
#define LOCK(lock) AcquireSRWLockExclusive(lock)
#define UNLOCK(lock) ReleaseSRWLockExclusive(lock)
#define WATCH_FORKS() ((void)0)
#else
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER, product = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static void watch_forks(void);
#define LOCK(lock) pthread_mutex_lock(lock)
#define UNLOCK(lock) pthread_mutex_unlock(lock)
#define WATCH_FORKS() pthread_once(&fork_once, watch_forks)
#endif

/* `guard` protects these and is held for no longer than a getter and a setter take. `product` is held from enter to leave
   where there is no setter; whoever holds both took `product` first. */
static int (*get_threads)(void);
static void (*set_threads)(int);
static void (*restore_threads)(int); /* the setter that the count was saved for; NULL while nothing is to be restored */
static int saved;
static int inside;

void fmha_blas_threads_bind(int (*get)(void), void (*set)(int))
{
    WATCH_FORKS();
    LOCK(&guard);
    get_threads = set ? get : NULL;
    set_threads = get ? set : NULL;
    UNLOCK(&guard);
}

int fmha_blas_threads_bound(void)
{
    WATCH_FORKS();
    LOCK(&guard);
    const int bound = set_threads != NULL;
    UNLOCK(&guard);
    return bound;
}

int fmha_blas_enter(void)
{
    WATCH_FORKS();
    LOCK(&guard);
    const int held = set_threads != NULL;
    if (!held) {
        UNLOCK(&guard); /* the wait for `product` may be long: others must be able to enter, leave and fork meanwhile */
        LOCK(&product);
        LOCK(&guard);
    } else if (inside == 0) {
        saved = get_threads();
        restore_threads = set_threads;
        set_threads(1);
    }
    inside++;
    UNLOCK(&guard);
    return held;
}

void fmha_blas_leave(int held)
{
    LOCK(&guard);
    const int was_inside = inside > 0; /* not so in a child whose forking thread was inside: the fork let go of everything */
    if (was_inside && --inside == 0 && restore_threads) {
        restore_threads(saved);
        restore_threads = NULL;
    }
    UNLOCK(&guard);
    if (was_inside && !held)
        UNLOCK(&product);
}

int fmha_blas_held(void)
{
    WATCH_FORKS();
    LOCK(&guard);
    const int count = inside;
    UNLOCK(&guard);
    return count;
}

#ifdef _WIN32
void fmha_blas_item_begin(void) {}
void fmha_blas_item_end(void) {}
#else
static atomic_int items, forking;   /* items under way; forks that wait for them or are under way */

void fmha_blas_item_begin(void)
{
    for (;;) {
        const int others = atomic_fetch_add(&items, 1);
        if (others < FMHA_MOST_IN_BLAS && !atomic_load(&forking)) return; /* in this order: a fork that begins now sees the item */
        atomic_fetch_sub(&items, 1);
        while (atomic_load(&forking) || atomic_load(&items) >= FMHA_MOST_IN_BLAS) sched_yield();
    }
}

void fmha_blas_item_end(void) { atomic_fetch_sub(&items, 1); }

/* Held across the fork, so that the child's copy of the count and of the BLAS library's own setting is not half written. */
static void before_fork(void)
{
    atomic_fetch_add(&forking, 1);
    while (atomic_load(&items)) sched_yield();
    LOCK(&guard);
}

static void in_parent(void)
{
    UNLOCK(&guard);
    atomic_fetch_sub(&forking, 1);
}

static void in_child(void)
{
    guard = product = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    atomic_store(&items, 0);
    atomic_store(&forking, 0);
    inside = 0;
    if (restore_threads)
        restore_threads(saved);
    restore_threads = NULL;
}

/* Without memory for three handlers there is nothing to be done but to go on without them. */
static void watch_forks(void) { (void)pthread_atfork(before_fork, in_parent, in_child); }
#endif
