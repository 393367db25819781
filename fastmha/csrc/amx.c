/* AMX (tiles, bfloat16) beside AVX-512, for float32 and half precision, inside a fenced target region: nothing outside it may
 * use these instructions. */
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
#pragma GCC diagnostic ignored "-Wunused-function"      /* of what is included, the kernels on tiles need a part */
#define FMHA_ISA amx
#define FMHA_TILES 1
#define FMHA_TILE_UNIT 1
#define FMHA_BFLOAT_UNIT 1
#define FMHA_VECTOR_BYTES 64
#define FMHA_OF(sse2, neon, avx2, avx512, emulated) avx512
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma")
#endif
#include "kernels.inc.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
