/* Items handed out in order to whoever of some threads is free first: until when each thread is busy, as a heap, whose first is
 * free first, and behind them one that never is. */
#ifndef FMHA_MAKESPAN_H
#define FMHA_MAKESPAN_H

#include <math.h>
#include <stddef.h>

static inline void fmha_begin(double *busy, int threads)
{
    for (int n = 0; n < threads; n++) busy[n] = 0;
    busy[threads] = INFINITY;
}

/* Whoever is free first is busy until then. Which of the two below is less is no branch: it could not be foreseen. */
static inline void fmha_take(double *busy, int threads, double until)
{
    ptrdiff_t at = 0;
    for (ptrdiff_t below; (below = 2 * at + 1) < threads; at = below) {
        below += busy[below + 1] < busy[below];
        if (busy[below] >= until) break;
        busy[at] = busy[below];
    }
    busy[at] = until;
}

/* When the last one ends. */
static inline double fmha_end(const double *busy, int threads)
{
    double last = 0;
    for (int n = 0; n < threads; n++) last = busy[n] > last ? busy[n] : last;
    return last;
}

#endif
