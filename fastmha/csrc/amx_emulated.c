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
#endif

#define FMHA_ISA amx_emulated
#define FMHA_TILES 1
#define FMHA_TILE_UNIT 0
#define FMHA_VECTOR_BYTES 16
#define MICRO_SUMS 12
#define MICRO_VECTORS 2
#include "kernels.inc.h"
