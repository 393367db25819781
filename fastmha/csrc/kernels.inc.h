/* All algorithms for one instruction set, once per dtype, and their tables. Set before inclusion: FMHA_ISA (a word),
 * FMHA_VECTOR_BYTES, and FMHA_OF, its column of tuning.h. Standard headers
 * come in before the fenced target region. */

#define FMHA_PASTE_(isa, name, bits) fmha_##isa##_##name##_##bits
#define FMHA_PASTE(isa, name, bits) FMHA_PASTE_(isa, name, bits)
#define FMHA_STRING_(isa) #isa
#define FMHA_STRING(isa) FMHA_STRING_(isa)
#define FMHA_NAME(name) FMHA_PASTE(FMHA_ISA, name, FMHA_REAL)

/* Kernels are made by inlining general ones with constant arguments. A checked build calls the general ones: without
 * optimisation a compiler takes a hundred times as long with each copied to wherever it is used. */
#ifdef FMHA_CHECKED
#define INLINED static inline
#else
#define INLINED static inline __attribute__((always_inline))
#endif

/* What a product does with what is there: writes over it, adds to it, adds to scale[r] times row r of it, takes it for 0 and is
 * multiplied by scale[0], or likewise row r by scale[r], as results of any width whose sums are traced; with FMHA_FETCH it is
 * asked for before the sums begin, where it lies far away, and so is b some rows ahead; with FMHA_FETCH_ROWS the next rows of a
 * are, which lie along the sum: so many short streams at a time that no CPU guesses them. What lies `beside` is fetched for
 * later: beside the rows of a where those are fetched, beside those of results, else beside those of b. With FMHA_FINISH `scale`
 * is a bias and `beside` a residual, either NULL, which are added last. */
enum { FMHA_SET, FMHA_ADD, FMHA_SCALE_ADD, FMHA_FIRST, FMHA_RESULTS_OF, FMHA_FETCH = 8, FMHA_FETCH_ROWS = 16, FMHA_FINISH = 32 };
#define FMHA_ACTION(init) ((init) & ~(FMHA_FETCH | FMHA_FETCH_ROWS | FMHA_FINISH))

#define BLOCK_ROWS FMHA_BLOCK_ROWS
#define TILE_KEYS FMHA_TILE_KEYS
#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))

#define FMHA_REAL 32
#include "dtype.inc.h"
#undef FMHA_REAL
#ifndef FMHA_TILES          /* those of float64 are another table's */
#define FMHA_REAL 64
#include "dtype.inc.h"
#undef FMHA_REAL
#endif
