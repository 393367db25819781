/* Numbers below the smallest normal one count as 0 while items run, as operands and as results: many CPUs compute with them a
 * hundred times as slowly, and peaked scores make probabilities of that size by the thousand. A register of the thread says so;
 * what it said before is put back. The rounding mode is set to nearest, whatever the caller's is: bits do not depend on it. */
#ifndef FMHA_SUBNORMALS_H
#define FMHA_SUBNORMALS_H

#include <stdint.h>

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#define FMHA_FLUSHES 1
#define FMHA_CONTROL_DEFAULT 0x1f80u    /* exceptions masked, round to nearest */
#define FMHA_FLUSH_RESULTS 0x8000u
#define FMHA_FLUSH_OPERANDS 0x0040u
static inline uint64_t fmha_control(void) { return _mm_getcsr(); }
static inline void fmha_set_control(uint64_t control) { _mm_setcsr((unsigned)control); }
#elif defined(__aarch64__) && defined(__GNUC__)
#define FMHA_FLUSHES 1
#define FMHA_CONTROL_DEFAULT 0u
#define FMHA_FLUSH_RESULTS ((uint64_t)1 << 24)      /* one bit for both */
#define FMHA_FLUSH_OPERANDS ((uint64_t)1 << 24)
static inline uint64_t fmha_control(void)
{
    uint64_t control;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(control));
    return control;
}
static inline void fmha_set_control(uint64_t control) { __asm__ __volatile__("msr fpcr, %0" : : "r"(control)); }
#else
#define FMHA_FLUSHES 0
#define FMHA_CONTROL_DEFAULT 0u
#define FMHA_FLUSH_RESULTS 0u
#define FMHA_FLUSH_OPERANDS 0u
static inline uint64_t fmha_control(void) { return 0; }
static inline void fmha_set_control(uint64_t control) { (void)control; }
#endif

/* How items run. Returns what to put back. */
static inline uint64_t fmha_flush_subnormals(void)
{
    const uint64_t before = fmha_control();
    fmha_set_control(FMHA_CONTROL_DEFAULT | FMHA_FLUSH_RESULTS | FMHA_FLUSH_OPERANDS);
    return before;
}

/* Inside an item, where such operands count (times numbers as large as they are small) or such results do. */
static inline void fmha_keep_subnormals(void) { fmha_set_control(FMHA_CONTROL_DEFAULT); }
static inline void fmha_keep_subnormal_operands(void)
{
    fmha_set_control(FMHA_CONTROL_DEFAULT | (FMHA_FLUSH_RESULTS & ~FMHA_FLUSH_OPERANDS));
}

#endif
