/* AVX2, FMA and F16C, inside a fenced target region: nothing outside it may use these instructions. */
#include "fastmha.h"
#include "pool.h"
#include "subnormals.h"
#include <float.h>
#include <math.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FMHA_ISA avx2
#define FMHA_VECTOR_BYTES 32
#define FMHA_OF(sse2, neon, avx2, avx512, emulated) avx2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include "kernels.inc.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
