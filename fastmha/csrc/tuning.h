/* The sizes that depend on the machine and are compiled: tiles, blocks, how far ahead is fetched. What Python decides by is in
 * tuning.py. To change GEMM_DEPTH or a number of keys changes the order of sums, and so bits. */
#ifndef FMHA_TUNING_H
#define FMHA_TUNING_H

/* Of all instruction sets alike: work is cut into items before it is known who computes them. */
#define FMHA_BLOCK_ROWS 64      /* query rows of a block of the tiled algorithm, at most */
#define FMHA_TILE_KEYS 192      /* keys of its tiles: S^T stays in the caches beside what it meets */
#define FMHA_SUM_KEYS (FMHA_TILE_KEYS / 4)     /* of a sum of grad_q, and the fewest of an item of a head that is split */
#define FMHA_RUN_KEYS (4 * FMHA_TILE_KEYS)     /* keys that a softmax of a tiled forward pass runs over, before it is merged */
#define FMHA_DECODE_ROWS 64     /* query rows per key/value head that the decode algorithm takes, at most */
#define FMHA_CHUNK_KEYS 512     /* keys of which the decode algorithm has a softmax: by the length alone, whatever the threads */
#define FMHA_CHUNK_ITEMS 8      /* of each thread, from which on several of these are an item */
#define FMHA_MOST_CHUNKS 8      /* in an item */
#define FMHA_PACK_ROWS 64       /* rows in an item of a copy of heads: both sides of it stay within a few pages */
#define FMHA_PANEL_COLUMNS 64   /* a multiple of the columns of a packed panel, for every instruction set and dtype */

/* Of each its own: a column. The file of an instruction set says which by FMHA_OF(sse2, neon, avx2, avx512, emulated), before
 * kernels.inc.h; AMX has the vectors of AVX-512. */
/*                                 sse2    neon    avx2  avx512   emul. */

/* The register tile. */
#define MICRO_SUMS       FMHA_OF(    12,     24,     12,     24,      2)  /* vectors of sums that it holds */
#define MICRO_VECTORS    FMHA_OF(     2,      4,      2,      4,      2)  /* of a row */
#define MICRO_MOST_ROWS  FMHA_OF(    12,     12,     12,     12,     12)
#define MICRO_AHEAD      FMHA_OF(     6,      6,     64,     24,      6)  /* rows of a packed panel that FMHA_FETCH fetches ahead: from memory some KB pay */

/* Products of matrices. */
#define GEMM_DEPTH       FMHA_OF(   384,    384,    384,    384,    384)  /* K of a block: a packed panel stays in the first two caches */
#define GEMM_ROWS        FMHA_OF(   256,    256,    256,    256,    256)  /* rows of a block: its part of a stays in the second cache */
#define GEMM_COLUMNS     FMHA_OF(  1024,   1024,   1024,   1024,   1024)  /* that are packed at a time: the third cache has room */
#define GEMM_SERVES      FMHA_OF(     8,      8,      8,      8,      8)  /* panels from which on a copy of a block of a pays */
#define GEMM_AHEAD       FMHA_OF(     8,      8,      8,      8,      8)  /* rows of b that are fetched before they are packed: no CPU guesses such strides */
#define FINISH_AHEAD     FMHA_OF(     4,      4,      4,      4,      4)  /* rows that the last pass fetches ahead, for the same reason */
#define FEW_ROWS         FMHA_OF(    16,     16,      9, FEW_512,     16)  /* of a: b is then read once, where it lies, as so many streams of rows */
#define FEW_512          (sizeof(REAL) == 4 ? 32 : 24)
#define FEW_PACKED       FMHA_OF(     8,      8,      1,      0,      8)  /* the same where b is packed, too, */
#define FEW_HALF         FMHA_OF(     5,      5,      5,      5,      5)  /* and has half the bytes where it lies */
#define FEW_OWN          FMHA_OF(     4,      4,      4,      4,      4)  /* from which on sums are not where the product is wanted, but in memory of their own */
#define FEW_DEPTH        FMHA_OF(     8,      8,      4,      8,      8)  /* such streams at a time */
#define FEW_COLUMNS      FMHA_OF(  1024,   1024,   1024,   1024,   1024)
#define FEW_SUMS         FMHA_OF(  4096,   4096,   4096,   4096,   4096)  /* of so many columns of all rows together, if that is more: longer streams */
#define FEW_AHEAD        FMHA_OF(  2048,   2048,    512,   2048,   2048)  /* bytes that are fetched ahead along each row of b: of one row of a, and of several where FEW_DEPTH rows of b */
#define FEW_NEAR         FMHA_OF((1 << 15), (1 << 15), (1 << 15), (1 << 15), (1 << 15))  /* have more bytes than this; else the next rows of b are fetched */
#define FEW_SOON         FMHA_OF(   192,    192,    192,    192,    192)  /* bytes along each row of b that are fetched into the first cache, too, where a has 4 rows: of fewer that gains nothing, and more wait for it themselves */
#define FEW_ALONE        FMHA_OF(     0,      0,      1, fmha_cpu_fetches, 0)  /* whether nothing is fetched ahead for one row of a, since the CPU follows so many streams by itself */
#define ONE_NEAR         FMHA_OF((1 << 20), (1 << 20), (1 << 20), (1 << 20), (1 << 20))  /* bytes of b up to which a single row stays with some columns: the caches deliver any order */
#define ONE_VECTORS      FMHA_OF(     8,      8,      8,      8,      8)

/* The "decode" algorithm: the scores of one block of keys are summed in turns with the values of the block before. */
#define DECODE_KEYS      FMHA_OF(   128,    128,    128,    128,    128)  /* of a block */
#define DECODE_STEP      FMHA_OF(    16,     16,     16,     16,     16)  /* of them at a time, a multiple of the lanes of every vector: sums of sums err less than one long sum */
#define DECODE_SUMMED    FMHA_OF(     8,     16,      8,     16,      8)  /* vectors of values that a step sums in registers, of all its rows: their keys' sums fit beside */
#define DECODE_ALONE     FMHA_OF(    12,     16,     12,     16,      8)  /* the same where no scores are summed beside */
#define DECODE_CHAINS    FMHA_OF(     8,     16,      8,     16,      8)  /* sums of scores side by side, of all its rows, at most */
#define DECODE_CLOSE     FMHA_OF((1 << 20), (1 << 20), (1 << 20), (1 << 20), (1 << 20))  /* bytes of all keys and values up to which nothing is fetched ahead: the second cache has them */
#define DECODE_NEAR      FMHA_OF((5 << 22), (5 << 22), (5 << 22), (5 << 22), (5 << 22))  /* and up to which all scores of a block come before its values: the third has them, and delivers one stream faster than two, */
#define DECODE_NEAR_AHEAD FMHA_OF( 4096,   4096,   4096,   4096,   4096)  /* fetched so many bytes ahead, at least, into the first */
#define DECODE_AHEAD     FMHA_OF(  6144,   6144,   6144,   6144,   6144)  /* bytes that each of the two streams is fetched ahead, at least */
#define DECODE_WHOLE_AHEAD FMHA_OF(6144,   6144,   3072,   6144,   6144)  /* the same where whole rows go into the first cache, of which both streams then hold so many: Zen 3 has 32 KB */
#define DECODE_ALONG     FMHA_OF(  1024,   1024,   1024,   1024,   1024)  /* so many instead where CPUs fetch far ahead by themselves, given an instruction for each vector of a row: one query row, rows that follow each other, */
#define DECODE_LONG      FMHA_OF(   192,    192,    192,    192,    192)  /* of so many bytes or more each, */
#define DECODE_MEMORY    FMHA_OF((1 << 25), (1 << 25), (1 << 25), (1 << 25), (1 << 25))  /* and more than so many in all: from the third cache the other way is faster */
#define DECODE_SHORT     FMHA_OF(   256,    256,    256,    256,    256)  /* bytes of a row of keys up to which two from memory are scored side by side: of longer ones that is slower */
#define DECODE_FOURS     FMHA_OF(   512,    512,    512,    512,    512)  /* where CPUs fetch by themselves: bytes of a row of keys up to which four are taken side by side; of longer ones two, since fewer of their rows are to be fetched at a time */
#define DECODE_WIDE      FMHA_OF(   512,    512,    512,    512,    512)  /* bytes of a row of keys from which on only two to four query rows, and a single one that cannot be read along, have these ways */
#define DECODE_KEPT      FMHA_OF(    16,     16,     16,     16,     16)  /* there, vectors of a row of values at most: their sums stay in the first cache meanwhile */
#define DECODE_TOGETHER  FMHA_OF(     4,      4,      4,      4,      4)  /* query rows for which a key is loaded once */

#define DECODE_FEW       FMHA_OF(    64,     64,     64,     64,     64)  /* keys up to which the only row of a head is done at once, */
#define DECODE_FEW_BYTES FMHA_OF(  4096,   4096,   4096,   4096,   4096)  /* from memory where its keys and values have up to so many bytes */

#define VALUES_FAR       FMHA_OF((1 << 21), (1 << 21), (1 << 21), (1 << 21), (1 << 21))  /* bytes of all keys and values from which on "tiled" fetches values beside the keys */

#define EXP_CHAINS       FMHA_OF(     4,      8,      4,      8,      4)  /* vectors whose exponentials are taken in step: as many as registers hold */
#define PAIRED_ROWS      FMHA_OF(     0,      0,      0,      8,      0)  /* rows of a block up to which two keys share a vector in products with float32 keys: half of one at most. Where fewer fit "decode" takes them */
#define KEYS_BESIDE      FMHA_OF(    64,     64,     32,     64,     64)  /* rows of a block up to which the keys of the next tile are fetched there beside values: with AVX2 on Zen 3 those of more rows wait for their own lines, and the product takes 1.1 times as long */
#define BESIDE_ROWS      FMHA_OF(    32,     32,     32,     32,     32)  /* rows of a block up to which memory is what it waits for: keys and values whose rows follow each other are fetched line after line, since memory delivers these 1.3 times as fast */
#define PADDED_BLOCKS    FMHA_OF(     1,      1,      1,      0,      0)  /* whether rows of scores^T and of transposed operands lie an odd number of cache lines apart: an even one, times the rows of a sum, is more than the few sets hold that they share. Of AMX and of its emulation, whose tiles read them as they are, they do not */
#define CROWDED_BYTES    FMHA_OF(  4096,   4096,   1024, CROWDED_512,  4096)  /* of which the distance of rows that share few sets of the caches is a multiple: they are */
#define CROWDED_512      (sizeof(REAL) == 4 ? 1 << 30 : 4096)     /* read as often as a product has tiles, more often with shorter vectors, */
#define CROWDED_ROWS     FMHA_OF(    24,     24,     24,     24,     24)  /* and are copied where that has so many rows or more */
#define CROWDED_KEYS     FMHA_OF(     0,      0,      1,      0,      0)  /* whether keys, whose rows a product broadcasts, and backward values, are copied then, too: they share a part of the second cache as well */
#define CAPPED_KEYS      FMHA_OF(     8,      8,      8,      8,      8)  /* whose scores a softcap asks together whether all are small */
#define WRITTEN_FAR      FMHA_OF((1 << 21), (1 << 21), (1 << 21), (1 << 21), (1 << 21))  /* bytes of out, or of q, from which on "tiled" fetches rows before it writes them, or the next block's queries; */
#define WRITTEN_AHEAD    FMHA_OF(     8,      8,      8,      8,      8)  /* rows ahead: the stores behind one that waits for its line wait, too */

/* Long heads, each an item of a backward pass. */
#define SECTIONS_FROM    FMHA_OF((1 << 22), (1 << 22), (1 << 22), (1 << 22), (1 << 22))  /* bytes of their rows, with what is kept of these, from which on they have sections, */
#define SECTION_BYTES    FMHA_OF((5 << 18), (5 << 18), (5 << 18), (5 << 18), (5 << 18))  /* of so many bytes each: the second cache, and a little more */

/* Short heads, each an item. */
#define NEXT_FAR         FMHA_OF((1 << 23), (1 << 23), (1 << 23), (1 << 23), (1 << 23))  /* bytes that a pass reads, from which on a thread fetches the next head that it will take, */
#define NEXT_NEAR        FMHA_OF( 32768,  32768,  32768,  32768,  32768)  /* where its keys and values have so many at most: longer heads hide the way to memory themselves, */
#define NEXT_BYTES       FMHA_OF(  8192,   8192,   8192,   8192,   8192)  /* of heads that read fewer bytes it is a later one, so many bytes on: the next is wanted too soon; */
#define DECODE_NEXT      FMHA_OF( 20480,  20480,  20480,  20480,  20480)  /* by "decode" sooner; it gains from twice as many bytes on */

/* Matrix tiles, where there are any. */
#define MATRIX_KEYS      FMHA_OF(   192,    192,    192,    192,    192)  /* of a chunk, and of a tile of scores */
#define GEMM_TILES       FMHA_OF(     8,      8,      8,      8,      8)  /* of a sum taken at a time: those of 32 rows and of 32 columns stay in the first cache together */
#define PAIRS_TOGETHER   FMHA_OF(     8,      8,      8,      8,      8)  /* of rows that are packed along their columns side by side: of more, a page each, none is fetched ahead */
#define RAW_COLUMNS      FMHA_OF(  2048,   2048,   2048,   2048,   2048)  /* whose sums are held at once at most, where the other operand is packed as it is multiplied, */
#define RAW_COLUMNS_LYING FMHA_OF(   512,    512,    512,    512,    512) /* or so many, where columns are its rows, */
#define RAW_SUMS         FMHA_OF( 32768,  32768,  32768,  32768,  32768)  /* sums, and */
#define RAW_PACKED       FMHA_OF(131072, 131072, 131072, 131072, 131072)  /* elements that are packed at a time: the second cache holds all three */

#endif
