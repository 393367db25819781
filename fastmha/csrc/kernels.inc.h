/* All algorithms for one instruction set, once per dtype, and their tables. Set before inclusion: FMHA_ISA (a word)
 * FMHA_VECTOR_BYTES, MICRO_ROWS and MICRO_VECTORS (the register tile). Standard headers come in before the fenced target region, through fastmha.h and below. */

#define FMHA_PASTE_(isa, name, bits) fmha_##isa##_##name##_##bits
#define FMHA_PASTE(isa, name, bits) FMHA_PASTE_(isa, name, bits)
#define FMHA_STRING_(isa) #isa
#define FMHA_STRING(isa) FMHA_STRING_(isa)
#define FMHA_NAME(name) FMHA_PASTE(FMHA_ISA, name, FMHA_REAL)

#define BLOCK_ROWS 64        /* query rows of a block, at most */
#define TILE_KEYS 192        /* keys of a tile: S^T stays in the caches beside what it meets */

#define FMHA_REAL 32
#include "dtype.inc.h"
#undef FMHA_REAL
#define FMHA_REAL 64
#include "dtype.inc.h"
#undef FMHA_REAL
