/* The sizes that depend on the machine and are compiled: tiles, blocks, how far ahead is fetched. What Python decides by is in
 * tuning.py. To change GEMM_DEPTH or a number of keys changes the order of sums, and so bits. */
#ifndef FMHA_TUNING_H
#define FMHA_TUNING_H

/* Of all instruction sets alike: work is cut into items before it is known who computes them. */
#define FMHA_BLOCK_ROWS 64      /* query rows of a block of the tiled algorithm, at most */
#define FMHA_TILE_KEYS 192      /* keys of its tiles: S^T stays in the caches beside what it meets */
#define FMHA_SUM_KEYS (FMHA_TILE_KEYS / 4)     /* of a sum of grad_q, and the fewest of an item of a head that is split */
#define FMHA_RUN_KEYS (4 * FMHA_TILE_KEYS)     /* keys that a softmax of a tiled forward pass runs over, before it is merged */
#define FMHA_COPY_ROWS 512      /* stacked rows, at least, for which a backward pass has a copy of a key/value head of its own */
#define FMHA_COPY_SHARE 4       /* rows of queries, at least, for each key of all copies: their sums are a fourth of grad_q at most */
#define FMHA_DECODE_ROWS 64     /* query rows per key/value head that the decode algorithm takes, at most */
#define FMHA_CHUNK_KEYS 512     /* keys of which the decode algorithm has a softmax: by the length alone, whatever the threads */
#define FMHA_CHUNK_ITEMS 8      /* of each thread, at least, where several of these are an item, or several items taken at a time */
#define FMHA_MOST_CHUNKS 8      /* in an item, and items at a time */
#define FMHA_KNOWN_FROM (1 << 18)    /* bytes of keys and values from which on it counts how much was read since these were; fewer are near, */
#define FMHA_UNKNOWN_FROM (1 << 20)  /* and up to so many also where nobody has read them before */
#define FMHA_REACH_ROWS 12      /* stacked rows up to which "tiled" goes by reach, too: of more, computing takes longer than reading */
#define FMHA_NEIGHBOURS_FROM (5 << 22)      /* from what reach on it goes through heads side by side: */
#define FMHA_NEIGHBOURS_BYTES 4096  /* through as many as have so many bytes in a row, */
#define FMHA_MOST_NEIGHBOURS 16     /* so many at most, */
#define FMHA_NEIGHBOURS_ITEMS 4     /* where there are so many items for each thread, or fewer that come out even */
#define FMHA_PACK_ROWS 64       /* rows in an item of a copy of heads: both sides of it stay within a few pages */
#define FMHA_PANEL_COLUMNS 64   /* a multiple of the columns of a packed panel, for every instruction set and dtype */

/* Of each its own: a column. The file of an instruction set says which by FMHA_OF(sse2, neon, avx2, avx512, emulated), before
 * kernels.inc.h; AMX has the vectors of AVX-512. */
/*                                   sse2    neon    avx2  avx512   emul. */

/* -------- The register tile -------- */

/* Vectors of sums that the register tile holds. */
#define MICRO_SUMS         FMHA_OF(    12,     24,     12,     24,      2)

/* Vectors of a row of the register tile, at most. */
#define MICRO_VECTORS      FMHA_OF(     2,      4,      2,      4,      2)

/* Rows of the register tile, at most. */
#define MICRO_MOST_ROWS    FMHA_OF(    12,     12,     12,     12,     12)

/* The same where a product has no more rows and a single vector of columns: what is left over would wait for its own few sums. */
#define MICRO_SINGLE_ROWS  FMHA_OF(    12,     12,     12,     16,     12)

/* Rows of a tile of scores from which on four share an address, where a compiler has no registers for one each and reads them from
 * the stack: 12 rows of one vector are 1.1 times as fast with AVX2, where each of their loads serves one multiplication. */
#define MICRO_GROUPED      FMHA_OF(    13,     13,      9,     13,     13)

/* Rows of a packed panel that FMHA_FETCH fetches ahead: from memory some KB pay. */
#define MICRO_AHEAD        FMHA_OF(     6,      6,     64,     24,      6)

/* -------- Products of matrices -------- */

/* Terms of a sum in a block: a packed panel of so many rows stays in the first two caches. */
#define GEMM_DEPTH         FMHA_OF(   384,    384,    384,    384,    384)

/* Rows of a block of a: its part of a stays in the second cache. */
#define GEMM_ROWS          FMHA_OF(   256,    256,    256,    256,    256)

/* Columns of b that are packed at a time: the third cache has room for them. */
#define GEMM_COLUMNS       FMHA_OF(  1024,   1024,   1024,   1024,   1024)

/* Panels of columns from which on a copy of a block of a pays. */
#define GEMM_SERVES        FMHA_OF(     8,      8,      8,      8,      8)

/* Rows of b that are fetched before they are packed: no CPU guesses such strides. */
#define GEMM_AHEAD         FMHA_OF(     8,      8,      8,      8,      8)

/* Rows that the last pass (bias, activation, residual) fetches ahead, for the same reason. */
#define FINISH_AHEAD       FMHA_OF(     4,      4,      4,      4,      4)

/* Rows of a up to which a product is of few rows where b is not packed. */
#define FEW_ROWS           FMHA_OF(    16,     16,      9, FEW_512,     16)
#define FEW_512            (sizeof(REAL) == 4 ? 32 : 24)

/* Rows of a up to which a product is of few rows where b is packed as well. */
#define FEW_PACKED         FMHA_OF(     8,      8,      1,      0,      8)

/* Rows of a up to which a product is of few rows where b is packed, but lies there in half precision, too: half the bytes. */
#define FEW_HALF           FMHA_OF(     5,      5,      5,      5,      5)

/* Rows of a from which on sums are held in memory of their own, not where the product is wanted. */
#define FEW_OWN            FMHA_OF(     4,      4,      4,      4,      4)

/* Rows of b that are read side by side, as streams. */
#define FEW_DEPTH          FMHA_OF(     8,      8,      4,      8,      8)

/* Columns of which all rows are summed before the next ones. */
#define FEW_COLUMNS        FMHA_OF(  1024,   1024,   1024,   1024,   1024)

/* Columns times rows of a that are summed before the next columns, where that is more columns: longer streams. */
#define FEW_SUMS           FMHA_OF(  4096,   4096,   4096,   4096,   4096)

/* Bytes that are fetched ahead along each row of b: of one row of a always, of several where the next FEW_DEPTH rows of b are
 * beyond FEW_NEAR. */
#define FEW_AHEAD          FMHA_OF(  2048,   2048,    512,   2048,   2048)

/* Bytes of FEW_DEPTH rows of b up to which, of several rows of a, the next FEW_DEPTH rows are fetched as a whole. */
#define FEW_NEAR           FMHA_OF((1 << 15), (1 << 15), (1 << 15), (1 << 15), (1 << 15))

/* Bytes along each row of b that are fetched into the first cache as well where a has 4 rows: of fewer that gains nothing, and
 * more wait for it themselves. */
#define FEW_SOON           FMHA_OF(   192,    192,    192,    192,    192)

/* Whether nothing is fetched ahead for one row of a, since the CPU follows so many streams by itself. */
#define FEW_ALONE          FMHA_OF(     0,      0,      1, fmha_cpu_fetches, 0)

/* Bytes of b up to which a single row of a takes some columns from end to end before the next: the caches deliver any order. */
#define ONE_NEAR           FMHA_OF((1 << 20), (1 << 20), (1 << 20), (1 << 20), (1 << 20))

/* Vectors of columns that a single row of a takes from end to end where b is within ONE_NEAR. */
#define ONE_VECTORS        FMHA_OF(     8,      8,      8,      8,      8)

/* -------- The "decode" algorithm -------- */

/* Keys of a block: its scores are summed in turns with the values of the block before. */
#define DECODE_KEYS        FMHA_OF(   128,    128,    128,    128,    128)

/* Keys whose values are one sum, a multiple of the lanes of every vector: sums of sums err less than one long sum. */
#define DECODE_STEP        FMHA_OF(    16,     16,     16,     16,     16)

/* Vectors of values that a step sums in registers, of all its rows, with room beside for the sums of scores. */
#define DECODE_SUMMED      FMHA_OF(     8,     16,      8,     16,      8)

/* Vectors of values that a step sums in registers where no scores are summed beside. */
#define DECODE_ALONE       FMHA_OF(    12,     16,     12,     16,      8)

/* Sums of scores side by side, of all rows of a step, at most. */
#define DECODE_CHAINS      FMHA_OF(     8,     16,      8,     16,      8)

/* Reach of keys and values, see fmha_run, up to which nothing is fetched ahead: the second cache has them. */
#define DECODE_CLOSE       FMHA_OF((1 << 20), (1 << 20), (1 << 20), (1 << 20), (1 << 20))

/* Reach up to which all scores of a block come before its values: the third cache has them, and delivers one stream faster than
 * two. */
#define DECODE_NEAR        FMHA_OF((5 << 22), (5 << 22), (5 << 22), (5 << 22), (5 << 22))

/* Bytes that are fetched ahead into the first cache there, at least. */
#define DECODE_NEAR_AHEAD  FMHA_OF( 4096,   4096,   4096,   4096,   4096)

/* Bytes that each of the two streams is fetched ahead from memory, at least. */
#define DECODE_AHEAD       FMHA_OF(  6144,   6144,   6144,   6144,   6144)

/* The same on CPUs that fetch far ahead by themselves. Zen 3 delivers less the farther ahead it is asked, but too late where it is
 * not asked at all. */
#define DECODE_WHOLE_AHEAD FMHA_OF(  6144,   6144,   1536,   6144,   6144)

/* Bytes that are fetched ahead for one query row whose keys and values follow each other in rows of DECODE_LONG bytes or more,
 * DECODE_MEMORY in all, where CPUs fetch far ahead by themselves, given an instruction for each vector of a row. */
#define DECODE_ALONG       FMHA_OF(  1024,   1024,   1024,   1024,   1024)

/* Bytes of a row from which on DECODE_ALONG holds. */
#define DECODE_LONG        FMHA_OF(   192,    192,    192,    192,    192)

/* Keys of a head from which on DECODE_ALONG holds where heads are begun beside others, see DECODE_BESIDE. */
#define DECODE_LONG_HEAD   FMHA_OF(   256,    256,    256,    256,    256)

/* Reach from which on DECODE_ALONG holds: from the third cache the other way is faster. */
#define DECODE_MEMORY      FMHA_OF((1 << 25), (1 << 25), (1 << 25), (1 << 25), (1 << 25))

/* Keys of a head from which on, where it comes from memory, its first scores are made in turns with the last values of the head
 * before: of half as many where much is done with each, of half as many more where a single row has DECODE_WIDE bytes. */
#define DECODE_BESIDE      FMHA_OF(   128,    128,    128,    128,    128)

/* Bytes of a row of keys times query rows from which on that is much. */
#define DECODE_MUCH        FMHA_OF(  1024,   1024,   1024,   1024,   1024)

/* Bytes of a row of keys up to which two from memory are scored side by side: of longer ones that is slower. */
#define DECODE_SHORT       FMHA_OF(   256,    256,    256,    256,    256)

/* Bytes of a row of keys up to which four are scored side by side where CPUs fetch by themselves; of longer ones two, of which
 * fewer rows are fetched at a time. */
#define DECODE_FOURS       FMHA_OF(   512,    512,    512,    512,    512)

/* Bytes of a row of keys from which on only two to four query rows, and one that cannot be read along, are scored so. */
#define DECODE_WIDE        FMHA_OF(   512,    512,    512,    512,    512)

/* Vectors of a row of values, at most, for these: their sums stay in the first cache meanwhile. */
#define DECODE_KEPT        FMHA_OF(    16,     16,     16,     16,     16)

/* Query rows for which a key is loaded once. */
#define DECODE_TOGETHER    FMHA_OF(     4,      4,      4,      4,      4)

/* Keys up to which the only row of a head is done at once, without chunks. */
#define DECODE_FEW         FMHA_OF(    64,     64,     64,     64,     64)

/* Bytes of a head's keys and values up to which its only row is done at once where these come from memory. */
#define DECODE_FEW_BYTES   FMHA_OF(  4096,   4096,   4096,   4096,   4096)

/* Bytes of keys, and of values, of heads side by side that are fetched while as many are computed with. */
#define NEIGHBOUR_KEYS        FMHA_OF(24576,  24576,  24576,  24576,  24576)
#define NEIGHBOUR_VALUES      FMHA_OF(32768,  32768,  32768,  32768,  32768)

/* Bytes of all keys and values from which on "tiled" fetches values beside the keys. */
#define VALUES_FAR         FMHA_OF((1 << 21), (1 << 21), (1 << 21), (1 << 21), (1 << 21))

/* Vectors whose exponentials are taken in step: as many as registers hold. */
#define EXP_CHAINS         FMHA_OF(     4,      8,      4,      8,      4)

/* Stacked rows of a head up to which scores of float32 are products of fours, three vectors of rows at most, and the widest sums that are. */
#define FOUR_ROWS          FMHA_OF(     0,      0,      0,     12,      0)
#define FOUR_DEPTH         FMHA_OF(   512,    512,    512,    512,    512)

/* Rows of a block up to which the keys of the next tile are fetched beside the values of this one: with AVX2 on Zen 3 those of
 * more rows wait for their own lines, and the product takes 1.1 times as long. */
#define KEYS_BESIDE        FMHA_OF(    64,     64,     32,     64,     64)

/* Rows of a head up to which each panel of values asks for them once more where they come from memory, see DECODE_MEMORY; where scores
 * are products of fours it always does. */
#define AGAIN_ROWS         FMHA_OF(     0,      0, AGAIN_2,     0,      0)
#define AGAIN_2            (sizeof(REAL) == 4 ? 8 : 0)

/* Rows of a block up to which it waits for memory: keys and values whose rows follow each other are fetched line after line,
 * which memory delivers 1.3 times as fast. */
#define BESIDE_ROWS        FMHA_OF(    32,     32,     32,     32,     32)

/* Whether rows of scores^T and of transposed operands lie an odd number of cache lines apart: an even one, times the rows of a
 * sum, is more than the few sets hold that they share. On matrix tiles, real or emulated, which read them as they are, they do
 * not. */
#define PADDED_BLOCKS      FMHA_OF(     1,      1,      1,      0,      0)

/* A distance of rows that is a multiple of so many bytes crowds them into few sets of the caches. */
#define CROWDED_BYTES      FMHA_OF(  4096,   4096,   1024, CROWDED_512,  4096)
#define CROWDED_512        (sizeof(REAL) == 4 ? 1 << 30 : 4096)

/* Rows of a product from which on rows so crowded, which it reads again and again, are copied first; with longer vectors it
 * reads them less often. */
#define CROWDED_ROWS       FMHA_OF(    24,     24,     24,     24,     24)

/* How many such rows ahead of where it is a copy fetches. */
#define CROWDED_AHEAD      FMHA_OF(    16,     16,     16,     16,     16)

/* Whether keys, whose rows a product broadcasts, and backward values, are copied as well: they share a part of the second
 * cache, too. */
#define CROWDED_KEYS       FMHA_OF(     0,      0,      1,      0,      0)

/* Rows of a product from which on values that do not begin at cache lines are copied to where they do; 0: never. */
#define LINED_VALUES       FMHA_OF(     0,      0,     24,      0,      0)

/* Blocks of a head for each thread from which on a thread gathers keys and values for several of them. */
#define GATHERED_BLOCKS    FMHA_OF(     2,      2,      2,      2,      2)

/* Bytes of these, at most. */
#define GATHERED_BYTES     FMHA_OF((1 << 22), (1 << 22), (1 << 22), (1 << 22), (1 << 22))

/* Keys whose scores a softcap asks together whether all are small. */
#define CAPPED_KEYS        FMHA_OF(     8,      8,      8,      8,      8)

/* Bytes of out, or of q, from which on "tiled" fetches rows before it writes them, or the next block's queries. */
#define WRITTEN_FAR        FMHA_OF((1 << 21), (1 << 21), (1 << 21), (1 << 21), (1 << 21))

/* How many rows ahead: the stores behind one that waits for its line wait, too. */
#define WRITTEN_AHEAD      FMHA_OF(     8,      8,      8,      8,      8)

/* Keys up to which, and the width from which on, rows that are so far away and no whole vectors are written behind their sums, one
 * after the other, and not by the product, a part of each row at a time. */
#define ROWWISE_KEYS       FMHA_OF(     0,      0, ROWWISE_2,   0,      0)
#define ROWWISE_2          (sizeof(REAL) == 4 ? 16 : 0)
#define ROWWISE_WIDTH      FMHA_OF(    96,     96,     96,     96,     96)

/* Bytes of out up to which: larger memory comes fresh from the system, and pages that are not there cannot be fetched ahead. */
#define ROWWISE_BYTES      FMHA_OF((1 << 25), (1 << 25), (1 << 25), (1 << 25), (1 << 25))

/* -------- Long heads, each an item of a backward pass -------- */

/* Bytes of a head's rows, with what is kept of these, from which on a backward pass takes them in sections. */
#define SECTIONS_FROM      FMHA_OF((1 << 22), (1 << 22), (1 << 22), (1 << 22), (1 << 22))

/* Bytes of a section: the second cache, and a little more. */
#define SECTION_BYTES      FMHA_OF((5 << 18), (5 << 18), (5 << 18), (5 << 18), (5 << 18))

/* -------- Short heads, each an item -------- */

/* Bytes that a pass reads from which on a thread fetches the next head that it will take. */
#define NEXT_FAR           FMHA_OF((1 << 23), (1 << 23), (1 << 23), (1 << 23), (1 << 23))

/* Bytes of the keys and values of a head up to which it does: longer heads hide the way to memory themselves. */
#define NEXT_NEAR          FMHA_OF( 32768,  32768,  32768,  32768,  32768)

/* Bytes ahead of where it is: of short heads it fetches not the next one, which is wanted too soon, but one so far on. */
#define NEXT_BYTES         FMHA_OF(  8192,   8192,   8192,   8192,   8192)

/* The same by "decode", which gains from twice as many bytes on. */
#define DECODE_NEXT        FMHA_OF( 20480,  20480,  20480,  20480,  20480)

/* Keys of a block up to which what the next block reads is fetched beside its scores, and on either side of a band up to which a
 * backward pass takes no sections. */
#define NARROW_KEYS        FMHA_OF(  1024,   1024,   1024,   1024,   1024)

/* -------- Matrix tiles, where there are any -------- */

/* Keys of a chunk, and of a tile of scores. */
#define MATRIX_KEYS        FMHA_OF(   192,    192,    192,    192,    192)

/* Tiles of a sum that are taken at a time: those of 32 rows and of 32 columns stay in the first cache together. */
#define GEMM_TILES         FMHA_OF(     8,      8,      8,      8,      8)

/* Rows that are packed along their columns side by side: of more, a page each, none is fetched ahead. */
#define PAIRS_TOGETHER     FMHA_OF(     8,      8,      8,      8,      8)

/* Columns whose sums are held at once, at most, where the other operand is packed as it is multiplied. */
#define RAW_COLUMNS        FMHA_OF(  2048,   2048,   2048,   2048,   2048)

/* The same where columns are the rows of that operand. */
#define RAW_COLUMNS_LYING  FMHA_OF(   512,    512,    512,    512,    512)

/* Sums that are held at once, at most. */
#define RAW_SUMS           FMHA_OF( 32768,  32768,  32768,  32768,  32768)

/* Elements of that operand that are packed at a time: the second cache holds these, the sums, and the rows of a. */
#define RAW_PACKED         FMHA_OF(131072, 131072, 131072, 131072, 131072)

#endif
