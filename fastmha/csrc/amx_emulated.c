/* The algorithms on matrix tiles with the tiles' arithmetic in plain C, and vectors as wide that any compiler makes of what
 * there is: for tests anywhere, never chosen by itself. */
#include "fastmha.h"
#include "pool.h"
#include "subnormals.h"
#include <float.h>
#include <math.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined(__GNUC__) || defined(__clang__)
#pragma GCC diagnostic ignored "-Wunused-function"      /* of what is included, the kernels on tiles need a part */
#define FMHA_ISA amx_emulated
#define FMHA_TILES 1
#define FMHA_TILE_UNIT 0
#define FMHA_BFLOAT_UNIT 0
#define FMHA_PLAIN 1
#define FMHA_VECTOR_BYTES 64
#define FMHA_OF(sse2, neon, avx2, avx512, emulated) emulated
#include "kernels.inc.h"
#endif
