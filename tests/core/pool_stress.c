/* Stress of csrc/pool.c and csrc/blas_threads.c without Python. One line per part; ends with 1 at the first failure.
   What tasks write is plain memory on purpose: ThreadSanitizer then proves that the pool orders it.

     cc -std=gnu11 -O2 -pthread -I fastmha/csrc tests/core/pool_stress.c fastmha/csrc/pool.c fastmha/csrc/blas_threads.c
     ./a.out            the stress
     ./a.out --time     what a run of two items on two threads costs, back to back, and an enter and leave */
#define _GNU_SOURCE
#include "blas_threads.h"
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NO_FORK /* ThreadSanitizer does not let a child of a threaded process start threads */
#endif
#endif
#ifdef __SANITIZE_THREAD__
#define NO_FORK
#endif

#define CHECK(condition)                                                                                                  \
    do {                                                                                                                  \
        if (!(condition)) {                                                                                               \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                       \
            _exit(1);                                                                                                     \
        }                                                                                                                 \
    } while (0)

enum { MOST_ITEMS = 1000, MOST_THREADS = 16, PATIENCE_SECONDS = 30 };

static double seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void sleep_microseconds(long microseconds)
{
    const struct timespec pause = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

static uint32_t draw(uint32_t *state, uint32_t below)
{
    *state = *state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)*state * below) >> 32);
}

/* ---- one run, watched ---- */

struct watch {
    int threads;
    atomic_int at_work;
    atomic_int busy[MOST_THREADS]; /* worker indexes at work: never two of the same at once */
    int scratch[MOST_THREADS];     /* plain, as a kernel's scratch per worker is */
    int times[MOST_ITEMS];         /* plain, as an output is */
};

static void watched(void *context, ptrdiff_t item, int worker)
{
    struct watch *watch = context;
    CHECK(worker >= 0 && worker < (watch->threads > 1 ? watch->threads : 1));
    CHECK(atomic_exchange_explicit(&watch->busy[worker], 1, memory_order_relaxed) == 0);
    CHECK(atomic_fetch_add_explicit(&watch->at_work, 1, memory_order_relaxed) < watch->threads);
    watch->scratch[worker]++;
    watch->times[item]++;
    atomic_fetch_sub_explicit(&watch->at_work, 1, memory_order_relaxed);
    atomic_store_explicit(&watch->busy[worker], 0, memory_order_relaxed);
}

static int run_watched_by(struct watch *watch, ptrdiff_t items, int threads, ptrdiff_t some)
{
    memset(watch, 0, sizeof *watch);
    watch->threads = threads;
    const int took_part = fmha_pool_deal(watched, watch, items, threads, some);
    CHECK(took_part >= 1 && took_part <= threads && (took_part <= items || took_part == 1));
    int sum = 0;
    for (int worker = 0; worker < MOST_THREADS; worker++) {
        CHECK(watch->scratch[worker] == 0 || worker < took_part);
        sum += watch->scratch[worker];
    }
    CHECK(sum == items);
    for (ptrdiff_t item = 0; item < items; item++)
        CHECK(watch->times[item] == 1);
    return took_part;
}

static int run_watched(struct watch *watch, ptrdiff_t items, int threads) { return run_watched_by(watch, items, threads, 1); }

static void each_item_runs_once(void)
{
    static const int item_counts[] = {0, 1, 2, 3, 7, 64, 1000}, thread_counts[] = {1, 2, 3, 7, 16, 2};
    static struct watch watch;
    for (int repeat = 0; repeat < 20; repeat++)
        for (int t = 0; t < 6; t++)
            for (int i = 0; i < 7; i++) {
                const int items = item_counts[i], threads = thread_counts[t];
                const int expected = items < threads ? items : threads;
                CHECK(run_watched(&watch, items, threads) == (expected > 1 ? expected : 1));
                for (int some = 2; some <= 9; some += 7) {
                    const int taken = (items + some - 1) / some, most = taken < threads ? taken : threads;
                    CHECK(run_watched_by(&watch, items, threads, some) == (most > 1 ? most : 1));
                }
            }
    CHECK(fmha_pool_workers() == 15);
}

/* ---- all threads of a run really are there: each item waits for all the others ---- */

struct meeting {
    int expected;
    atomic_int arrived;
};

static void meet(void *context, ptrdiff_t item, int worker)
{
    struct meeting *meeting = context;
    (void)item, (void)worker;
    atomic_fetch_add(&meeting->arrived, 1);
    const double give_up = seconds(CLOCK_MONOTONIC) + PATIENCE_SECONDS;
    while (atomic_load(&meeting->arrived) < meeting->expected) {
        CHECK(seconds(CLOCK_MONOTONIC) < give_up); /* a worker was not woken */
        sleep_microseconds(1);
    }
}

static void run_meeting(int threads)
{
    struct meeting meeting = {.expected = threads};
    CHECK(fmha_pool_run(meet, &meeting, threads, threads) == threads);
}

static void sleeping_workers_are_woken(void)
{
    static struct watch watch;
    uint32_t state = 1;
    for (int repeat = 0; repeat < 1500; repeat++) {
        if (draw(&state, 2))
            run_meeting(2 + (int)draw(&state, 6));
        else
            run_watched(&watch, draw(&state, 20), 1 + (int)draw(&state, MOST_THREADS));
        if (draw(&state, 3))
            sleep_microseconds(draw(&state, 150)); /* about the time that a worker spins */
    }
}

/* ---- items that wait for those handed out before them: plain sums, in the order of the items ---- */

enum { PLACES = 7 };

struct turns {
    int taken[PLACES]; /* atomic: how many items have had their turn */
    ptrdiff_t last[PLACES];
};

static void take_turns(void *context, ptrdiff_t item, int worker)
{
    struct turns *turns = context;
    (void)worker;
    for (int place = 0; place < PLACES; place++) {
        for (unsigned looks = 1; __atomic_load_n(&turns->taken[place], __ATOMIC_ACQUIRE) != item; looks++)
            if (!fmha_pool_waits(looks))
                return;
        CHECK(turns->last[place] == item - 1);
        turns->last[place] = item;
        if (item % 50 == 49)
            sleep_microseconds(300); /* the others wait for longer than they spin */
        __atomic_store_n(&turns->taken[place], (int)item + 1, __ATOMIC_RELEASE);
    }
}

static int stop_at_once(void) { return 1; }

static void never_had(void *context, ptrdiff_t item, int worker)
{
    (void)context, (void)item, (void)worker;
    for (unsigned looks = 1; fmha_pool_waits(looks); looks++) {
    }
}

static void items_may_wait_for_those_before_them(void)
{
    for (int threads = 1; threads <= MOST_THREADS; threads += 3) {
        struct turns turns = {.taken = {0}};
        for (int place = 0; place < PLACES; place++)
            turns.last[place] = -1;
        CHECK(fmha_pool_run(take_turns, &turns, 200, threads) > 0);
        for (int place = 0; place < PLACES; place++)
            CHECK(turns.last[place] == 199);
    }
    fmha_pool_ask(stop_at_once);
    CHECK(fmha_pool_run(never_had, NULL, 20, 4) == 0); /* who waits for what never comes sees that the run is to stop */
    fmha_pool_ask(NULL);
}

/* ---- the caller sleeps, too, while a worker's item takes long ---- */

struct slow {
    atomic_int started;
};

static void sleep_in_workers(void *context, ptrdiff_t item, int worker)
{
    struct slow *slow = context;
    (void)item;
    atomic_fetch_add(&slow->started, 1);
    while (atomic_load(&slow->started) < 2)
        sleep_microseconds(10);
    if (worker)
        sleep_microseconds(200000);
}

static void waiting_for_a_long_item_burns_no_time(void)
{
    for (int repeat = 0; repeat < 3; repeat++) {
        struct slow slow = {0};
        const double wall = seconds(CLOCK_MONOTONIC), used = seconds(CLOCK_THREAD_CPUTIME_ID);
        CHECK(fmha_pool_run(sleep_in_workers, &slow, 2, 2) == 2);
        CHECK(seconds(CLOCK_MONOTONIC) - wall >= 0.2);
        CHECK(seconds(CLOCK_THREAD_CPUTIME_ID) - used < 0.1);
    }
}

static void idle_workers_burn_no_time(void)
{
    run_meeting(8);
    sleep_microseconds(100000);
    const double used = seconds(CLOCK_PROCESS_CPUTIME_ID);
    sleep_microseconds(300000);
    CHECK(seconds(CLOCK_PROCESS_CPUTIME_ID) - used < 0.1);
}

/* ---- several callers, and calls from inside a task ---- */

static void *call_often(void *seed)
{
    struct watch *watch = malloc(sizeof *watch);
    uint32_t state = (uint32_t)(uintptr_t)seed;
    CHECK(watch != NULL);
    for (int repeat = 0; repeat < 1500; repeat++)
        run_watched(watch, draw(&state, 64), 1 + (int)draw(&state, MOST_THREADS));
    free(watch);
    return NULL;
}

static void many_threads_may_call_at_once(void)
{
    pthread_t callers[5];
    for (int i = 0; i < 5; i++)
        CHECK(pthread_create(&callers[i], NULL, call_often, (void *)(uintptr_t)(i + 1)) == 0);
    for (int i = 0; i < 5; i++)
        pthread_join(callers[i], NULL);
}

static void nest(void *context, ptrdiff_t item, int worker)
{
    struct watch *inner = malloc(sizeof *inner);
    (void)worker;
    CHECK(inner != NULL);
    CHECK(run_watched(inner, 9, 4) == 1);
    ((int *)context)[item]++;
    free(inner);
}

static void a_nested_run_is_serial(void)
{
    for (int repeat = 0; repeat < 200; repeat++) {
        int times[12] = {0};
        CHECK(fmha_pool_run(nest, times, 12, 4) == 4);
        for (int item = 0; item < 12; item++)
            CHECK(times[item] == 1);
    }
}

/* ---- the BLAS thread count ---- */

static atomic_int blas_count = 7; /* the fake library's setting */
static int get_count(void) { return atomic_load(&blas_count); }
static void set_count(int count) { atomic_store(&blas_count, count); }

static void *enter_often(void *seed)
{
    uint32_t state = (uint32_t)(uintptr_t)seed;
    for (int repeat = 0; repeat < 5000; repeat++) {
        const int held = fmha_blas_enter();
        CHECK(held == 1 && get_count() == 1 && fmha_blas_held() >= 1);
        if (draw(&state, 50) == 0)
            sleep_microseconds(draw(&state, 100));
        CHECK(get_count() == 1);
        fmha_blas_leave(held);
    }
    return NULL;
}

static int products; /* plain: only the lock keeps it right */

static void *enter_alone(void *unused)
{
    static atomic_int alone;
    for (int repeat = 0; repeat < 2000; repeat++) {
        const int held = fmha_blas_enter();
        CHECK(held == 0 && atomic_exchange_explicit(&alone, 1, memory_order_relaxed) == 0 && fmha_blas_held() == 1);
        products++;
        atomic_store_explicit(&alone, 0, memory_order_relaxed);
        fmha_blas_leave(held);
    }
    return unused;
}

static void in_four_threads(void *(*function)(void *))
{
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, function, (void *)(uintptr_t)(i + 1)) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK(fmha_blas_held() == 0);
}

static void blas_is_held_at_one_while_anyone_is_inside(void)
{
    fmha_blas_threads_bind(get_count, set_count);
    CHECK(fmha_blas_threads_bound());
    for (int count = 1; count <= 7; count += 6) {
        set_count(count);
        in_four_threads(enter_often);
        CHECK(get_count() == count);
    }
}

static void without_a_setter_one_thread_is_inside_at_a_time(void)
{
    fmha_blas_threads_bind(NULL, set_count);
    CHECK(!fmha_blas_threads_bound());
    fmha_blas_threads_bind(NULL, NULL);
    in_four_threads(enter_alone);
    CHECK(products == 4 * 2000 && get_count() == 7);
}

/* ---- fork ---- */

#ifndef NO_FORK
static atomic_int enough;

static void *run_until_enough(void *seed)
{
    struct watch *watch = malloc(sizeof *watch);
    uint32_t state = (uint32_t)(uintptr_t)seed;
    CHECK(watch != NULL);
    while (!atomic_load(&enough)) {
        run_watched(watch, draw(&state, 200), 2 + (int)draw(&state, 6));
        if (draw(&state, 2))
            sleep_microseconds(draw(&state, 120));
    }
    free(watch);
    return NULL;
}

static void *stay_inside(void *inside)
{
    const int held = fmha_blas_enter();
    atomic_store((atomic_int *)inside, 1);
    while (!atomic_load(&enough))
        sleep_microseconds(50);
    fmha_blas_leave(held);
    return NULL;
}

static void use_everything_in_child(int bound)
{
    static struct watch watch;
    alarm(PATIENCE_SECONDS); /* a lock that the child inherited would hang it */
    CHECK(fmha_pool_workers() == 0 && fmha_blas_held() == 0 && get_count() == 7);
    run_meeting(4);
    CHECK(fmha_pool_workers() == 3);
    CHECK(run_watched(&watch, 64, 3) == 3);
    const int held = fmha_blas_enter();
    CHECK(held == bound && get_count() == (bound ? 1 : 7) && fmha_blas_held() == 1);
    fmha_blas_leave(held);
    CHECK(get_count() == 7);
    fmha_pool_shutdown();
    CHECK(fmha_pool_workers() == 0);
    _exit(0);
}

static void fork_often(int bound)
{
    pthread_t runners[2], insider;
    uint32_t state = 5;
    atomic_int inside = 0;
    atomic_store(&enough, 0);
    fmha_blas_threads_bind(bound ? get_count : NULL, bound ? set_count : NULL);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&runners[i], NULL, run_until_enough, (void *)(uintptr_t)(i + 1)) == 0);
    CHECK(pthread_create(&insider, NULL, stay_inside, &inside) == 0);
    while (!atomic_load(&inside))
        sleep_microseconds(50);
    for (int repeat = 0; repeat < 40; repeat++) {
        int status = -1;
        sleep_microseconds(draw(&state, 300));
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            use_everything_in_child(bound);
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(fmha_blas_held() == 1 && get_count() == (bound ? 1 : 7)); /* nothing has changed for the parent */
    atomic_store(&enough, 1);
    for (int i = 0; i < 2; i++)
        pthread_join(runners[i], NULL);
    pthread_join(insider, NULL);
    CHECK(fmha_blas_held() == 0 && get_count() == 7);
    run_meeting(4);
}

static void a_child_begins_afresh(void)
{
    fork_often(1);
    fork_often(0);
}
#endif

/* ---- the end ---- */

static void *shut_down(void *unused)
{
    fmha_pool_shutdown();
    return unused;
}

static void after_shutdown_runs_are_serial(void)
{
    static struct watch watch;
    pthread_t caller, closers[2];
    run_meeting(4);
    CHECK(pthread_create(&caller, NULL, call_often, (void *)(uintptr_t)9) == 0);
    sleep_microseconds(2000);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&closers[i], NULL, shut_down, NULL) == 0);
    for (int i = 0; i < 2; i++)
        pthread_join(closers[i], NULL);
    pthread_join(caller, NULL);
    CHECK(fmha_pool_workers() == 0);
    CHECK(run_watched(&watch, 64, 4) == 1);
    fmha_pool_shutdown();
    CHECK(fmha_pool_workers() == 0);
}

static void nothing(void *context, ptrdiff_t item, int worker) { (void)context, (void)item, (void)worker; }

static void meet_spinning(void *arrived, ptrdiff_t item, int worker)
{
    (void)item, (void)worker;
    atomic_fetch_add((atomic_int *)arrived, 1);
    while (atomic_load((atomic_int *)arrived) < 2)
        ;
}

static void run_nothing(void) { fmha_pool_run(nothing, NULL, 2, 2); }

static void run_together(void)
{
    atomic_int arrived = 0;
    fmha_pool_run(meet_spinning, &arrived, 2, 2);
}

static void enter_and_leave(void) { fmha_blas_leave(fmha_blas_enter()); }

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_time(const char *name, void (*function)(void))
{
    static double times[2000];
    for (int repeat = 0; repeat < 2000; repeat++) {
        const double start = seconds(CLOCK_MONOTONIC);
        for (int i = 0; i < 50; i++)
            function();
        times[repeat] = (seconds(CLOCK_MONOTONIC) - start) * (1e9 / 50);
    }
    qsort(times, 2000, sizeof *times, by_size);
    printf("%-44s best %6.0f ns, median %6.0f ns\n", name, times[0], times[1000]);
}

static void print_times(void)
{
    fmha_blas_threads_bind(get_count, set_count);
    print_time("a run of 2 empty items on 2 threads", run_nothing);
    print_time("a run of 2 items that wait for each other", run_together);
    print_time("blas enter and leave", enter_and_leave);
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {
        {"each item runs once, on distinct workers", each_item_runs_once},
        {"sleeping workers are woken", sleeping_workers_are_woken},
        {"items may wait for those before them", items_may_wait_for_those_before_them},
        {"waiting for a long item burns no time", waiting_for_a_long_item_burns_no_time},
        {"idle workers burn no time", idle_workers_burn_no_time},
        {"many threads may call at once", many_threads_may_call_at_once},
        {"a nested run is serial", a_nested_run_is_serial},
        {"BLAS is held at one thread while anyone is inside", blas_is_held_at_one_while_anyone_is_inside},
        {"without a setter one thread is inside at a time", without_a_setter_one_thread_is_inside_at_a_time},
#ifndef NO_FORK
        {"a child of fork begins afresh", a_child_begins_afresh},
#endif
        {"after shutdown runs are serial", after_shutdown_runs_are_serial},
    };
    CHECK(fmha_pool_workers() == 0); /* nothing starts by itself */
    if (count > 1 && strcmp(arguments[1], "--time") == 0) {
        print_times();
        fmha_pool_shutdown();
        return 0;
    }
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) {
        const double start = seconds(CLOCK_MONOTONIC);
        parts[part].run();
        printf("ok  %-52s %6.2f s\n", parts[part].name, seconds(CLOCK_MONOTONIC) - start);
        fflush(stdout);
    }
    return 0;
}
