/* The thread pool. One run at a time; its whole state is one atomic word, the gate:

     caller                                       worker
     ------                                       ------
     take `running`, or run serially
     write the job, open the gate (slots = n)     sees slots > 0: slots - 1, active + 1 in one step: it has joined
     work                                         work
     close the gate (slots = 0)                   close the gate, active - 1: it has left
     wait until active = 0                        spin, then sleep

   The caller waits for those who joined and for nobody else: a worker that the system has put aside costs nothing.

   A run can be stopped: the caller asks now and then whether it is to be, and sets a flag of the run that all look at. */
#define _GNU_SOURCE /* POSIX, and on Linux the CPUs of a thread */

#include "pool.h"
#include "subnormals.h"

#include <stdint.h>
#include <time.h>

#define ASK_NANOSECONDS 50000000

#if defined(FMHA_NO_THREADS) || defined(_WIN32) || defined(__STDC_NO_ATOMICS__)

/* Tasks of several Python threads may run at a time also here, each serially in its caller. */
#if defined(_MSC_VER)
#define THREAD_LOCAL __declspec(thread)
#else
#define THREAD_LOCAL _Thread_local
#endif

static int (*volatile question)(void);
static THREAD_LOCAL int stopped;
static THREAD_LOCAL clock_t asked;
static THREAD_LOCAL uint64_t control; /* of floating point, of the caller */

void fmha_pool_ask(int (*asks)(void)) { question = asks; }

int fmha_pool_stopped(void)
{
    int (*const asks)(void) = question;
    if (!stopped && asks && clock() - asked > CLOCKS_PER_SEC / 20) {
        const uint64_t ours = fmha_control();
        fmha_set_control(control);
        const int answer = asks() != 0; /* it may have called another run */
        fmha_set_control(ours);
        stopped = answer;
        asked = clock();
    }
    return stopped;
}

int fmha_pool_run(fmha_task task, void *context, ptrdiff_t items, int threads)
{
    (void)threads;
    const uint64_t before = fmha_flush_subnormals(), outer = control;
    stopped = 0;
    asked = clock();
    control = before;
    for (ptrdiff_t item = 0; item < items && !fmha_pool_stopped(); item++)
        task(context, item, 0);
    const int ended = !stopped;
    stopped = 0;
    control = outer;
    fmha_set_control(before);
    return ended;
}

int fmha_pool_deal(fmha_task task, void *context, ptrdiff_t items, int threads, ptrdiff_t some)
{
    (void)some;
    return fmha_pool_run(task, context, items, threads);
}

int fmha_pool_lost(void) { return 0; }

int fmha_pool_waits(unsigned looks)
{
    (void)looks; /* never true here: tasks run in their order */
    return !fmha_pool_stopped();
}

int fmha_pool_workers(void) { return 0; }

void fmha_pool_shutdown(void) {}

#else

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

enum {
    MOST_WORKERS = 1023,
    SPIN_NANOSECONDS = 50000, /* about what it costs to sleep and be woken again */
    LOOKS_PER_CLOCK = 32,     /* looks at the gate between two looks at the clock */
    LOOKS_PER_YIELD = 256,    /* looks of a task that waits before it gives its CPU away: some microseconds */
    LOOKS_PER_NAP = 8192,     /* before it sleeps between looks: a millisecond or more */
    NAP_NANOSECONDS = 50000,
    LOOKS_PER_QUESTION = 4,   /* looks at the flag between two looks at the clock */
    CACHE_LINE = 64
};

/* The gate. Slots: how many more workers may join; above 0 only while a job is open. Active: how many are in. */
#define ACTIVE 1u
#define ACTIVE_FIELD 0x00007fffu
#define CALLER_SLEEPS 0x00008000u
#define SLOT 0x00010000u
#define SLOT_FIELD 0x7fff0000u
#define STOP 0x80000000u /* shut down, for good */

static struct {
    _Alignas(CACHE_LINE) atomic_uint gate; /* alone in its line: idle workers look at it all the time */
    _Alignas(CACHE_LINE) atomic_ptrdiff_t next;
    ptrdiff_t items, some; /* the job: written with the gate closed and nobody active, read by those who joined */
    fmha_task task;
    void *context;
    atomic_int *stop; /* of the job */
    int cpu;          /* on which the caller was when it began, -1: not known */
    _Alignas(CACHE_LINE) pthread_mutex_t running; /* held by the thread whose run this is, or by shutdown */
    pthread_mutex_t lock;                         /* for sleeping; never held while a task runs */
    pthread_cond_t wake, done;
    atomic_int sleeping; /* workers asleep that nobody has called; changed under lock */
    int calls;           /* workers called that have not yet got up; under lock */
    atomic_int workers;  /* changed by the holder of `running` */
    pthread_t threads[MOST_WORKERS];
} pool = {
    .running = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* ------------------------------------------------------------------------------------------------------------- stopping */

static _Atomic(int (*)(void)) question;
static _Thread_local atomic_int *stop_flag; /* of the run that this thread works on, NULL outside runs */
static _Thread_local int64_t ask_at;        /* when its caller asks next; 0 in workers */
static _Thread_local unsigned questions;    /* not put: the clock costs as much as a tiny item */
static _Thread_local uint64_t control;      /* of floating point, of the caller: what the question asks runs with it */
static _Thread_local atomic_int *led;       /* the flag of the run with workers that this thread began, NULL if none is under way */
static _Thread_local int lost;              /* whether a run has lost its workers to a fork */

void fmha_pool_ask(int (*asks)(void)) { atomic_store(&question, asks); }

/* The caller puts the question. Relaxed throughout: the flag carries no data, and whoever sees it late stops late. */
static void ask(void)
{
    int (*const asks)(void) = atomic_load_explicit(&question, memory_order_relaxed);
    const uint64_t ours = fmha_control();
    fmha_set_control(control);
    if (asks && asks())
        atomic_store_explicit(stop_flag, 1, memory_order_relaxed);
    fmha_set_control(ours);
    ask_at = nanoseconds() + ASK_NANOSECONDS;
}

int fmha_pool_stopped(void)
{
    if (!stop_flag)
        return 0;
    if (ask_at && ++questions % LOOKS_PER_QUESTION == 0 && nanoseconds() > ask_at)
        ask();
    return atomic_load_explicit(stop_flag, memory_order_relaxed);
}

int fmha_pool_waits(unsigned looks)
{
    if (looks % LOOKS_PER_CLOCK == 0 && fmha_pool_stopped())
        return 0;
    if (looks < LOOKS_PER_YIELD) {
        pause_briefly();
    } else if (looks < LOOKS_PER_NAP) {
        sched_yield(); /* the other one may be without a CPU */
    } else {           /* for long, or of a priority that does not get this one */
        const struct timespec nap = {0, NAP_NANOSECONDS};
        nanosleep(&nap, NULL);
    }
    return 1;
}

static int run_serially(fmha_task task, void *context, ptrdiff_t items)
{
    const uint64_t before = fmha_flush_subnormals();
    atomic_int *const outer_flag = stop_flag; /* of a run whose task calls this one */
    const int64_t outer_ask = ask_at;
    const uint64_t outer_control = control;
    atomic_int stop = 0;
    stop_flag = &stop;
    ask_at = nanoseconds() + ASK_NANOSECONDS;
    control = before;
    for (ptrdiff_t item = 0; item < items && !fmha_pool_stopped(); item++)
        task(context, item, 0);
    stop_flag = outer_flag;
    ask_at = outer_ask;
    control = outer_control;
    fmha_set_control(before);
    return !atomic_load_explicit(&stop, memory_order_relaxed);
}

/* ----------------------------------------------------------------------------------------------------------------- items */

/* Takes items until there are none, then closes the gate, so that nobody joins for nothing. */
static void work(int worker)
{
    const fmha_task task = pool.task;
    void *const context = pool.context;
    const ptrdiff_t items = pool.items, some = pool.some;
    ptrdiff_t item;
    const uint64_t before = fmha_flush_subnormals();
    stop_flag = pool.stop;
    /* Relaxed: the counter only deals out numbers; the gate carries the data. */
    while ((item = atomic_fetch_add_explicit(&pool.next, some, memory_order_relaxed)) < items && !fmha_pool_stopped())
        for (const ptrdiff_t end = items - item < some ? items : item + some; item < end; item++)
            task(context, item, worker);
    if (worker)
        stop_flag = NULL;
    fmha_set_control(before);
    /* Relaxed: slots only fall during a run, so a 0 seen here is final, and closing publishes nothing. */
    if (atomic_load_explicit(&pool.gate, memory_order_relaxed) & SLOT_FIELD)
        atomic_fetch_and_explicit(&pool.gate, ~SLOT_FIELD, memory_order_relaxed);
}

/* The worker's index if it got into the open job, else 0. */
static int join_job(unsigned gate)
{
    while (gate & SLOT_FIELD)
        /* Acquire: the job was written before the caller opened the gate. Whether this is still the job that was seen
           does not matter: what succeeds joins the one that is open now. */
        if (atomic_compare_exchange_weak_explicit(&pool.gate, &gate, gate - SLOT + ACTIVE, memory_order_acquire,
                                                  memory_order_relaxed))
            return (int)((gate & SLOT_FIELD) / SLOT);
    return 0;
}

static void leave_job(void)
{
    /* Release: the caller, when it reads active = 0, sees what this worker's tasks wrote. */
    const unsigned gate = atomic_fetch_sub_explicit(&pool.gate, ACTIVE, memory_order_release);
    if ((gate & CALLER_SLEEPS) && (gate & ACTIVE_FIELD) == ACTIVE) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
}

/* A worker goes to sleep until call_workers counts it in. */
static void sleep_till_called(void)
{
    pthread_mutex_lock(&pool.lock);
    /* Sequentially consistent, here and in fmha_pool_run: one writes `sleeping` and reads the gate, the other writes the
       gate and reads `sleeping`, and at least one of them must see the other. */
    atomic_fetch_add(&pool.sleeping, 1);
    if (atomic_load(&pool.gate) & (SLOT_FIELD | STOP)) {
        atomic_fetch_sub(&pool.sleeping, 1);
    } else {
        while (pool.calls == 0)
            pthread_cond_wait(&pool.wake, &pool.lock);
        pool.calls--;
    }
    pthread_mutex_unlock(&pool.lock);
}

/* Wakes `count` workers, or all that sleep if they are fewer. */
static void call_workers(int count)
{
    pthread_mutex_lock(&pool.lock);
    const int sleeping = atomic_load(&pool.sleeping);
    const int all = count >= sleeping;
    if (all)
        count = sleeping;
    atomic_fetch_sub(&pool.sleeping, count);
    pool.calls += count;
    pthread_mutex_unlock(&pool.lock);
    if (all)
        pthread_cond_broadcast(&pool.wake);
    else
        while (count-- > 0)
            pthread_cond_signal(&pool.wake);
}

static int this_cpu(void)
{
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

/* Where other threads keep all CPUs busy, as those of BLAS do that look for work long after a product, the system may wake a worker
   on the CPU of its caller and leave it there: the two take turns, while threads that only look would give way. */
static void leave_cpu_of_caller(void)
{
#ifdef __linux__
    const int cpu = this_cpu();
    cpu_set_t before, others;
    if (cpu < 0 || cpu != pool.cpu || sched_getaffinity(0, sizeof before, &before) != 0 || CPU_COUNT(&before) < 2)
        return;
    others = before;
    CPU_CLR(cpu, &others);
    if (sched_setaffinity(0, sizeof others, &others) == 0)
        sched_setaffinity(0, sizeof before, &before);
#endif
}

static void *serve(void *unused)
{
    int64_t spin_until = nanoseconds() + SPIN_NANOSECONDS;
    for (;;) {
        unsigned gate = 0;
        for (int look = 0; look < LOOKS_PER_CLOCK; look++) {
            /* Relaxed: join_job acquires. */
            gate = atomic_load_explicit(&pool.gate, memory_order_relaxed);
            if (gate & (SLOT_FIELD | STOP))
                break;
            pause_briefly();
        }
        if (gate & STOP)
            return unused;
        const int worker = join_job(gate);
        if (worker) {
            leave_cpu_of_caller();
            work(worker);
            leave_job();
        } else if (nanoseconds() < spin_until) { /* jobs of others do not keep a worker that is left over awake */
            continue;
        } else {
            sleep_till_called();
        }
        spin_until = nanoseconds() + SPIN_NANOSECONDS;
    }
}

/* The caller waits for those who joined; not spinning for long, since an item may take seconds. */
static void await_workers(void)
{
    const int64_t spin_until = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int look = 0; look < LOOKS_PER_CLOCK; look++) {
            /* Acquire: pairs with leave_job, of every worker, for each step on the gate since continues its release. */
            if (!(atomic_load_explicit(&pool.gate, memory_order_acquire) & ACTIVE_FIELD))
                return;
            pause_briefly();
        }
    } while (nanoseconds() < spin_until);

    pthread_mutex_lock(&pool.lock);
    /* Relaxed: who leaves last after this step finds the flag in the same word, and signals under the lock. */
    atomic_fetch_or_explicit(&pool.gate, CALLER_SLEEPS, memory_order_relaxed);
    while (atomic_load_explicit(&pool.gate, memory_order_acquire) & ACTIVE_FIELD) {
        struct timespec until; /* of the clock that condition variables go by; a step of it delays one question */
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += ASK_NANOSECONDS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&pool.done, &pool.lock, &until) == ETIMEDOUT) {
            pthread_mutex_unlock(&pool.lock); /* the answer may take its time, and a worker that leaves takes the lock */
            ask();
            pthread_mutex_lock(&pool.lock);
        }
    }
    pthread_mutex_unlock(&pool.lock);
}

/* Only the forking thread lives on in the child: forget the workers, and whatever the other threads were doing. A run that this thread
   has under way, which has asked a question that forks, has lost what its workers were doing: it stops. */
static void reset_in_child(void)
{
    pool.running = pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    if (led) {
        pthread_mutex_lock(&pool.running);
        atomic_store_explicit(led, 1, memory_order_relaxed);
        lost = 1;
    }
    pool.wake = pool.done = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    atomic_fetch_and(&pool.gate, STOP);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.workers, 0);
    pool.calls = 0;
}

static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_is_safe;

static void watch_forks(void) { fork_is_safe = pthread_atfork(NULL, NULL, reset_in_child) == 0; }

/* Starts workers until there are `wanted`, fewer if the system refuses. Returns how many may be used. */
static int start_workers(int wanted)
{
    int workers = atomic_load_explicit(&pool.workers, memory_order_relaxed);
    if (workers >= wanted)
        return wanted;
    sigset_t all, before; /* signals belong to the process's own threads: workers inherit a full mask */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (workers < wanted && pthread_create(&pool.threads[workers], NULL, serve, NULL) == 0)
        atomic_store_explicit(&pool.workers, ++workers, memory_order_relaxed);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return workers;
}

int fmha_pool_run(fmha_task task, void *context, ptrdiff_t items, int threads)
{
    return fmha_pool_deal(task, context, items, threads, 1);
}

int fmha_pool_deal(fmha_task task, void *context, ptrdiff_t items, int threads, ptrdiff_t some)
{
    if (threads > (items + some - 1) / some)
        threads = (int)((items + some - 1) / some);
    if (threads > MOST_WORKERS + 1)
        threads = MOST_WORKERS + 1;
    if (threads <= 1)
        return run_serially(task, context, items);

    pthread_once(&fork_once, watch_forks); /* before any lock is taken that a child could inherit */
    if (!fork_is_safe || pthread_mutex_trylock(&pool.running) != 0)
        return run_serially(task, context, items);

    const int stopped = (atomic_load_explicit(&pool.gate, memory_order_relaxed) & STOP) != 0; /* written under `running` */
    const int slots = stopped ? 0 : start_workers(threads - 1);
    if (slots == 0) {
        pthread_mutex_unlock(&pool.running);
        return run_serially(task, context, items);
    }

    pool.task = task;
    pool.context = context;
    pool.items = items;
    pool.some = some;
    pool.cpu = this_cpu();
    atomic_int stop = 0;
    atomic_int *const outer_flag = stop_flag; /* of a serial run that has asked a question that calls this one */
    const int64_t outer_ask = ask_at;
    const uint64_t outer_control = control;
    pool.stop = led = &stop;
    ask_at = nanoseconds() + ASK_NANOSECONDS;
    control = fmha_control();
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    atomic_store(&pool.gate, (unsigned)slots * SLOT); /* releases the job; see sleep_till_called for the stronger order */
    const int awake = atomic_load_explicit(&pool.workers, memory_order_relaxed) - atomic_load(&pool.sleeping);
    if (slots > awake)
        call_workers(slots - awake);

    work(0);
    await_workers();
    stop_flag = outer_flag;
    ask_at = outer_ask;
    control = outer_control;
    led = NULL;
    pthread_mutex_unlock(&pool.running);
    return atomic_load_explicit(&stop, memory_order_relaxed) ? 0 : slots + 1;
}

int fmha_pool_lost(void)
{
    const int was = lost;
    lost = 0;
    return was;
}

int fmha_pool_workers(void) { return atomic_load_explicit(&pool.workers, memory_order_relaxed); }

void fmha_pool_shutdown(void)
{
    pthread_once(&fork_once, watch_forks);
    pthread_mutex_lock(&pool.running);
    atomic_fetch_or(&pool.gate, STOP);
    call_workers(MOST_WORKERS);
    for (int workers = fmha_pool_workers(); workers > 0; workers--) {
        pthread_join(pool.threads[workers - 1], NULL);
        atomic_store_explicit(&pool.workers, workers - 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&pool.running);
}

#endif
