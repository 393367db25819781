/* The instruction set every CPU of the architecture has: SSE2 on x86-64, NEON on aarch64, else what the compiler makes
 * of 16-byte vectors. */
#include "fastmha.h"
#include "pool.h"
#include "subnormals.h"
#include <float.h>
#include <math.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FMHA_ISA baseline
#define FMHA_VECTOR_BYTES 16
#ifdef __aarch64__      /* 32 vector registers, twice those of SSE2 */
#define FMHA_OF(sse2, neon, avx2, avx512, emulated) neon
#ifndef __clang__       /* loads moved to the front, as gcc does on ARM and not on x86, push sums out of the registers */
#pragma GCC optimize("no-schedule-insns")
#endif
#else
#define FMHA_OF(sse2, neon, avx2, avx512, emulated) sse2
#endif
#include "kernels.inc.h"
