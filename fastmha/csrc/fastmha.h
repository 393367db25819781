/* What the C kernels and the Cython glue agree on: the problem, and one table of kernels per instruction set and dtype.
 * C kernels never see Python and never call BLAS. Strides and offsets are in elements, ptrdiff_t everywhere. */
#ifndef FASTMHA_H
#define FASTMHA_H

#include "items.h"
#include "memory.h"
#include "tuning.h"

#include <stddef.h>
#include <stdint.h>

#define FMHA_UNBOUNDED ((int64_t)1 << 62)       /* a window side that removes nothing; offset (below 2^61) + it cannot overflow */

/* An array (B, H, L, width) with unit last stride, or a mask (B, H, Lq, Lk); stride 0 where an axis is broadcast. */
typedef struct {
    char *data;                 /* NULL where the operand is absent */
    ptrdiff_t stride[4];        /* in elements */
} fmha_array;

/* Element types of operands and results: the computation's, float16, bfloat16, the other one of float32 and float64. The
 * computation of operands of half precision is in float32; results are rounded once, at the end. */
enum { FMHA_SAME, FMHA_HALF, FMHA_BFLOAT, FMHA_OTHER };

/* Dropout: a pair is dropped if its draw, of 32 bits, is below this; the others are multiplied by factor = 1 / (1 - p), 0 where
 * there is no dropout. Draws are numbered by batch row, head, query and key, counted from these. */
typedef struct {
    double factor;
    uint32_t below;
    uint64_t seed;
    int64_t b, h, i, j;
} fmha_dropout;

/* One attention: everything below validation works from this and nothing else. */
typedef struct {
    ptrdiff_t B, H, Hkv, Lq, Lk, D, Dv;
    double scale;
    double softcap;             /* 0: none */
    int banded;                 /* causal or window: left and right count */
    int64_t left, right;        /* i + offset - left <= j <= i + offset + right */
    const int64_t *offset;      /* (B,), NULL where neither banded nor with alibi */
    const int64_t *key_start;   /* (B,) the first valid key, NULL: 0 */
    const int64_t *key_length;  /* (B,) the end of the valid keys, no less than their start, NULL: Lk */
    int element;                /* element type of q, out and their gradients: not FMHA_OTHER */
    int stored;                 /* element type of k and v, and of their gradients; FMHA_OTHER: forward alone */
    int parts;                  /* bfloat16 parts of what is multiplied on matrix tiles, 1 or 2; 0: nothing is */
    int mask_element;           /* element type of additive_mask, and of its gradient: not FMHA_OTHER */
    fmha_array q, k, v;
    fmha_array bool_mask;       /* uint8, nonzero = removed */
    fmha_array additive_mask;   /* -inf = removed */
    const char *sinks;          /* (H,) of the computation's dtype: exp(sinks[h]) joins the denominators of head h; NULL: none */
    const char *alibi;          /* (H,) of the computation's dtype: scores get -alibi[h] * |i + offset - j| before the masks; NULL: none */
    fmha_dropout dropout;
    int part;                   /* backward: lse and out are of more keys than these */
    ptrdiff_t copies;           /* backward: Hkv counts each key/value head so many times, see fmha_in_copies; 0: as they are */
} fmha_problem;

/* Rows i0 .. i0+rows of head (b, h) against keys j0 .. j0+cols: one block of scores, row stride ld. */
typedef struct {
    ptrdiff_t b, h, i0, rows, j0, cols, ld;
} fmha_block;

#define FMHA_CACHE_LINE 64      /* bytes */

_Static_assert(FMHA_BLOCK_ROWS <= 64 && FMHA_DECODE_ROWS <= FMHA_BLOCK_ROWS, "rows of a block are bits of a uint64_t");

/* What a backward pass may leave for each row, and the number of these numbers: P = exp(score - shift) * inverse, delta = sum(P
 * dP). */
enum { FMHA_ROW_SHIFT, FMHA_ROW_INVERSE, FMHA_ROW_DELTA, FMHA_ROW_STATE };

/* The size of an operand from which on it is treated apart: half of the exponents of its type lie beyond it or its inverse. */
#define FMHA_LARGE(is_double) ((is_double) ? 0x1p480 : 0x1p60)

/* Functions of single numbers, applied elsewhere or as the last step of a product. */
enum { FMHA_NO_ACTIVATION, FMHA_GELU, FMHA_GELU_TANH, FMHA_RELU, FMHA_SILU };

/* What a product does with its sums in its last pass: activation(sums + bias) + residual. */
typedef struct {
    const char *bias;           /* (N), or NULL */
    const char *residual;       /* (M, N), row stride ld, or NULL */
    ptrdiff_t ld;
    int activation;
} fmha_finish;

/* The same for a block of the product's result that begins at row m and column n. */
static inline fmha_finish fmha_finish_at(const fmha_finish *last, ptrdiff_t m, ptrdiff_t n, size_t itemsize)
{
    fmha_finish part = *last;
    if (part.bias) part.bias += n * (ptrdiff_t)itemsize;
    if (part.residual) part.residual += (m * part.ld + n) * (ptrdiff_t)itemsize;
    return part;
}

/* A product c (M, N) <- a (M, K) @ b (K, N) on matrix tiles: operands as pack_tiles leaves them, c of an element type. b may be
 * NULL: then it is `raw`, (K, N) or transposed (N, K), of an element type and with rows so many elements apart. Slices have
 * most_rows at most. */
typedef struct {
    const void *a, *b, *raw;
    ptrdiff_t M, N, K, raw_stride, most_rows;
    int parts_a, parts_b, type_c, raw_type, raw_transposed;
} fmha_tile_product;

/* Scratch up to here is kept from one run to the next; not in a checked build, which watches its ends. */
#ifdef FMHA_CHECKED
#define FMHA_IS_CHECKED 1
#define FMHA_KEPT_BYTES 0
#else
#define FMHA_IS_CHECKED 0
#define FMHA_KEPT_BYTES (8 << 20)
#endif

/* z <- x + residual; (z - mean(z)) * weight / sqrt(var(z) + eps) + bias where centered, else z * weight / sqrt(mean(z^2) + eps). */
typedef struct {
    ptrdiff_t width;
    double eps;
    int centered;
    const void *weight, *bias;          /* (width,); no bias: NULL */
} fmha_norm;

#define FMHA_SUMMED_ROWS 32     /* whose shares of grad_weight are one partial sum, whatever the threads */

/* What an item of a tiled backward pass is: a whole key/value head; of one that is split, a block of its group's rows to
 * prepare, a tile of its keys, or a part of one, with turns at grad_q, a share of the blocks on that with turns at its sums,
 * too, a block to write; a block some of whose rows may want sums of their own, and one to begin again. */
enum { FMHA_WHOLE, FMHA_PREPARE, FMHA_TURNS, FMHA_SHARES, FMHA_RESULTS, FMHA_MEND, FMHA_RESTART };

/* Forward, measured, beside a pair of a query and a key in a whole block against a whole run. */
#define FMHA_HALF_COST 1.04     /* a pair in a block of half of the rows */
#define FMHA_QUARTER_COST 1.055     /* in one of a quarter of them */
#define FMHA_RUN_COST 0.0135    /* what a run of keys leaves, and its merging, for each pair of its rows with FMHA_RUN_KEYS */

/* Backward, measured, in units of a block against a tile. */
#define FMHA_SPLIT_COST 1       /* the passes before and behind those of split heads, together */
#define FMHA_HALF_TILE_COST 1.01    /* a pair in half of a tile, over one in a whole tile */
#define FMHA_FOURTH_TILE_COST 1.02  /* in a fourth of one */
#define FMHA_MOST_SHARE 8       /* blocks of a share, at most */
#define FMHA_SUMS_COST 0.1      /* the way of a tile's sums from one share to the next */
#define FMHA_ADDED_COST 0.15    /* what a block of a share adds to these sums later */
#define FMHA_LATER_COST 0.2     /* what a block adds to its sums of grad_q later */

/* What the items of one pass of "tiled" or "decode" share. */
typedef struct fmha_run {
    fmha_problem p;
    fmha_cut cut;
    fmha_array out;             /* (B, H, Lq, Dv) */
    char *lse;                  /* (B, H, Lq) contiguous, NULL where a forward pass need not return it */
    char *weights;              /* (B, H, Lq, Lk) contiguous, tiled_weights only */
    fmha_array grad_out, grad_q, grad_k, grad_v;    /* backward only */
    fmha_array grad_mask;       /* of an additive mask, in its shape: a pass of its own behind the others of backward */
    int mode;                   /* which pass: of backward, and of packed sequences forward */
    ptrdiff_t share;            /* blocks of a share, where heads are split into these; else 0 */
    /* two flags, of heads that are split: whether some rows want sums of their own, whether some have got them */
    int *apart;
    int again;                  /* whether this is the work done again for these, of their heads alone */
    char *copies;               /* of copies of heads, if there are: what each gives to grad_k and grad_v, copy_sums elements */
    char *row_states;           /* FMHA_ROW_STATE numbers for each row of (B, H, Lq); NULL where nothing needs them */
    char *scratch;
    ptrdiff_t scratch_size;     /* bytes of one thread */
    ptrdiff_t threads, some;    /* at most, each of which takes the next items that are left, so many at a time */
    char *kept;                 /* what the items of heads that backward splits share, backward_kept elements of each, on a cache line */
    char *chunks;               /* what decode leaves of each of its items, in their order, and tiled of each run of a block */
    ptrdiff_t whole;            /* of tiled: the first block that may be cut into runs */
    ptrdiff_t part_keys;        /* of tiled where runs are cut into parts: of so many keys, */
    int *turns;                 /* and how many of them are done, FMHA_RUN_TURNS numbers for the rows of a block; else NULL */
    ptrdiff_t neighbours;       /* of decode: heads of an item, or 1: not by decode_neighbours */
    double reach;               /* of few rows, else 0: bytes of keys and values that are read from one time on to the next time that its
                                 * own are, these included: a cache that does not hold as many has none of them */
    char *shared;               /* operands packed for matrix tiles, on a cache line: of heads from first_shared on */
    ptrdiff_t first_shared;
    /* Of one of the sequences of a packed pass, else 0 and NULL: how many items come before its own, what all read in bytes, and the run of
     * the sequence behind it, or NULL. */
    ptrdiff_t items_before;
    double all_bytes;
    const struct fmha_run *behind;
} fmha_run;

/* Which item the thread that has item `index` takes `on` items later, about: all take the next that are left. */
static inline ptrdiff_t fmha_later(const fmha_run *run, ptrdiff_t index, ptrdiff_t on)
{
    const ptrdiff_t some = run->some, at = (index + run->items_before) % some, place = at + on;
    return index - at + place / some * some * run->threads + place % some;
}

/* Whether the thread that has item `index` surely takes the one behind it next. */
static inline int fmha_takes_next(const fmha_run *run, ptrdiff_t index)
{
    return run->threads == 1 || (index + run->items_before) % run->some + 1 < run->some;
}

typedef struct {
    const char *name;
    int vector_bytes;

    /* y <- softmax(x) row by row; a row of only -inf gives zeros. */
    void (*softmax)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy);
    /* dx <- y * (dy - sum(dy * y)) row by row. */
    void (*softmax_backward)(ptrdiff_t rows, ptrdiff_t cols, const void *dy, ptrdiff_t lddy, const void *y,
                             ptrdiff_t ldy, void *dx, ptrdiff_t lddx);

    /* scores (scaled products) -> exp(masked, capped scores - row maximum), 0 where removed; row_sum (rows) gets the
     * sums and lse (rows, may be NULL) the log of the sum of exponentials, -inf for an empty row. */
    void (*attend_rows)(const fmha_problem *p, const fmha_block *block, void *scores, void *row_sum, void *lse);
    /* scores -> probabilities as dropout leaves them, grad_weights -> the gradient of the scaled products, both 0 where removed; lse
     * (rows) of the block's rows; slopes: scratch for one row, with softcap; states: FMHA_ROW_STATE numbers for each row, or NULL. */
    void (*attend_rows_backward)(const fmha_problem *p, const fmha_block *block, void *scores, void *grad_weights, void *slopes,
                                 const void *lse, const fmha_array *out, const fmha_array *grad_out, void *states);
    /* scores (rows, cols) <- themselves times what dropout draws. */
    void (*drop_rows)(const fmha_problem *p, const fmha_block *block, void *scores);
    /* x[i, :] <- x[i, :] / divisor[i], an empty row (divisor 0) to zeros. NaN reaches only what is not 0. */
    void (*divide_rows)(ptrdiff_t rows, ptrdiff_t cols, void *x, ptrdiff_t ldx, const void *divisor);

    int (*all_finite)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx);
    void (*copy_rows)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy);
    /* y <- x, where the one or the other is of another element type; to a smaller one rounded to nearest, ties to even. */
    void (*load_rows)(int type, ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy);
    void (*store_rows)(int type, ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy);
    void (*copy_finite)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy);
    void (*multiply)(ptrdiff_t n, void *x, double factor);
    /* The contributions of the non-finite rows of x to a product over a partly removed block, allowed pairs only:
     * by_key 0: c[i, :] += alpha * a[i, j] * x[j, :] (x has a row for every key); by_key 1: c[j, :] += alpha * a[i, j] * x[i, :]. */
    void (*add_nonfinite)(const fmha_problem *p, const fmha_block *block, int by_key, double alpha, const void *a,
                          const void *x, ptrdiff_t ldx, ptrdiff_t width, void *c, ptrdiff_t ldc);

    /* Whether |factor * x| reaches bound somewhere (finite elements alone count). */
    int (*exceeds)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, double factor, double bound);
    /* Values so small that subnormal operands and terms count: rows of such results are computed again, unless all values are 0,
     * from values that lift_rows has multiplied by a power of 2, and lower_row divides. */
    int (*tiny_row)(ptrdiff_t n, const void *x);
    int (*nonzero)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx);
    void (*lift_rows)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy);
    void (*lower_row)(ptrdiff_t n, const void *x, const void *divisor, void *to);

    /* The tiled algorithm: items of the pool, context an fmha_run; scratch in elements of a thread, one of so many, which begins with a
     * pointer NULL. Items of fewer than all keys are runs, each of which leaves run_scratch elements, of fmha_run_rows rows, that a
     * second pass merges. */
    void (*tiled_forward)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*tiled_scratch)(const fmha_problem *p, ptrdiff_t threads, int weights);
    ptrdiff_t (*run_scratch)(const fmha_problem *p);
    void (*tiled_merge)(void *context, ptrdiff_t item, int worker);
    void (*tiled_weights)(void *context, ptrdiff_t item, int worker);
    /* The decode algorithm: chunks of keys, each of which leaves a result of chunk_scratch elements, then their merging. The scratch of
     * each thread begins with a ptrdiff_t of 0. */
    void (*decode)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*decode_scratch)(const fmha_problem *p);
    /* The same of several heads at a time, see fmha_neighbours_cut. */
    void (*decode_neighbours)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*neighbours_scratch)(const fmha_problem *p, ptrdiff_t heads);
    ptrdiff_t (*chunk_scratch)(const fmha_problem *p);
    void (*decode_merge)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*merge_scratch)(const fmha_problem *p);
    void (*tiled_backward)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*backward_scratch)(const fmha_problem *p, int mode, ptrdiff_t share);
    ptrdiff_t (*backward_kept)(const fmha_problem *p, ptrdiff_t share);    /* elements of a head that is split */
    /* Elements of what a copy of a key/value head gives to grad_k and grad_v, and a pass that adds up those of each head. */
    ptrdiff_t (*copy_sums)(const fmha_problem *p);
    void (*add_copies)(void *context, ptrdiff_t item, int worker);
    /* The gradient of the additive mask, from the row states that either backward has left. */
    void (*mask_gradient)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*mask_gradient_scratch)(const fmha_problem *p);

    /* The same on matrix tiles, with float32 sums; NULL without them. Items are heads; or a pass packs keys and values, items as
     * matrix_cut has them, into matrix_bytes bytes a head, and then come blocks of rows as for tiled_forward. */
    void (*matrix_head)(void *context, ptrdiff_t item, int worker);
    void (*matrix_pack)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*matrix_bytes)(const fmha_problem *p);
    fmha_cut (*matrix_cut)(const fmha_problem *p, ptrdiff_t first);
    void (*matrix_forward)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*matrix_scratch)(const fmha_problem *p, int heads, int weights);
    /* Backward: of heads that are split keys and values, then blocks of rows are packed, into gradient_bytes bytes a head; a whole
     * head packs its own. */
    void (*gradient_pack_keys)(void *context, ptrdiff_t item, int worker);
    void (*gradient_pack_rows)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*gradient_bytes)(const fmha_problem *p);
    void (*matrix_backward)(void *context, ptrdiff_t item, int worker);
    ptrdiff_t (*gradient_scratch)(const fmha_problem *p, int mode, ptrdiff_t share);
    ptrdiff_t (*gradient_kept)(const fmha_problem *p, ptrdiff_t share);       /* as backward_kept */
    ptrdiff_t (*gradient_sums)(const fmha_problem *p);              /* as copy_sums */
    void (*gradient_add)(void *context, ptrdiff_t item, int worker);        /* as add_copies */

    /* Products of matrices on tiles: elements of a packed operand's part, packing some of its rows or columns, a slice of the result,
     * which returns whether some number of a raw operand is too large or not finite (then it is undefined), and its bytes of scratch. */
    ptrdiff_t (*tiles_size)(ptrdiff_t outer, ptrdiff_t terms);
    int (*pack_tiles)(int is_first, int outer_along, int type, int parts, ptrdiff_t from, ptrdiff_t many, ptrdiff_t terms, const void *x,
                      ptrdiff_t stride, ptrdiff_t outer, void *to);
    int (*tile_gemm)(const fmha_tile_product *x, ptrdiff_t i0, ptrdiff_t rows, ptrdiff_t j0, ptrdiff_t columns, void *c, ptrdiff_t ldc,
                      const fmha_finish *last, void *scratch);
    ptrdiff_t (*tile_scratch)(const fmha_tile_product *x);

    /* c (M, N) := activation(op(a) @ op(b) + bias) + residual as `last` has it, row-major; scratch of gemm_scratch(M, N, K) elements.
     * packed: b (K, N) as gemm_pack has left it in K times N rounded up to whole vectors elements, or NULL; then a slice of columns
     * starts at a multiple of FMHA_PANEL_COLUMNS. type: of b, FMHA_SAME or, where it is not packed, half precision. */
    void (*gemm)(int type, int trans_a, int trans_b, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, const void *a, ptrdiff_t lda, const void *b,
                 ptrdiff_t ldb, void *c, ptrdiff_t ldc, const fmha_finish *last, const void *packed, void *scratch);
    void (*gemm_pack)(ptrdiff_t K, ptrdiff_t N, const void *b, ptrdiff_t ldb, void *packed);
    ptrdiff_t (*gemm_scratch)(ptrdiff_t M, ptrdiff_t N, ptrdiff_t K);
    /* c (rows, cols) := activation(c + bias) + residual. */
    void (*finish)(ptrdiff_t rows, ptrdiff_t cols, void *c, ptrdiff_t ldc, const fmha_finish *last);

    /* y <- activation(x), of a kind above; y may be x. dx <- dy * activation'(x); dx may be dy. */
    void (*activate_row)(int kind, ptrdiff_t n, const void *x, void *y);
    void (*activate_row_backward)(int kind, ptrdiff_t n, const void *dy, const void *x, void *dx);
    /* y <- norm of x + residual (may be NULL), row by row; y may be x. */
    void (*norm_rows)(const fmha_norm *norm, ptrdiff_t rows, const void *x, ptrdiff_t ldx, const void *residual, ptrdiff_t ldr,
                      void *y, ptrdiff_t ldy);
    /* dx <- the gradient of x (and of residual); the rows' shares of grad_weight (and of grad_bias, may be NULL) are added to
     * these, a row after the other. */
    void (*norm_rows_backward)(const fmha_norm *norm, ptrdiff_t rows, const void *dy, ptrdiff_t lddy, const void *x, ptrdiff_t ldx,
                               const void *residual, ptrdiff_t ldr, void *dx, ptrdiff_t lddx, void *grad_weight,
                               void *grad_bias);
    /* y (cols) <- the sum of the rows of x, a row after the other. */
    void (*add_up_rows)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y);

    /* y[i] <- exp(x[i]), the kernels' own, for tests: by exp_each, or by exp where one of some is beyond what that takes. */
    void (*exponential)(ptrdiff_t n, const void *x, void *y);
    void (*hyperbolic_tangent)(ptrdiff_t n, const void *x, void *y);
} fmha_kernels;

#if defined(__aarch64__) || defined(__FMA__)
#define FMHA_BASELINE_FUSES 1       /* fused multiply-add without asking for it */
#else
#define FMHA_BASELINE_FUSES 0
#endif

typedef enum { FMHA_BASELINE, FMHA_AVX2, FMHA_AVX512, FMHA_AVX512BF16, FMHA_AMX, FMHA_AMX_EMULATED, FMHA_ISA_COUNT } fmha_isa;

/* The table for an instruction set, or NULL where it is not compiled in. Whether this CPU runs it: fmha_isa_runs. */
const fmha_kernels *fmha_kernels_of(fmha_isa isa, int is_double);
int fmha_isa_runs(fmha_isa isa);

/* Whether rows that lie side by side, and are each read from end to end, come faster from memory where the CPU alone fetches
 * them, not asked by the program. So it is on AMD's Zen 5 (family 26) and Zen 3; on Zen 4 it is not, and CPUs that nobody
 * measured are asked. No bits depend on it. Known from the first fmha_kernels_of on. */
extern int fmha_cpu_fetches;
const char *fmha_isa_name(fmha_isa isa);

/* What of the scale is folded into the queries, or into a product by BLAS: all of it, or where it is so tiny that it might count
 * as 0, so much that the rest, by which the scores are multiplied then, is 2^-100 (float64: 2^-900). */
static inline double fmha_folded_scale(const fmha_problem *p, int is_double, double *rest)
{
    double lift = is_double ? 0x1p900 : 0x1p100;
    int tiny = p->scale != 0 && p->scale * lift < 1 && p->scale * lift > -1;
    *rest = tiny ? 1 / lift : 1;
    return tiny ? p->scale * lift : p->scale;
}

/* The keys [*j0, *j1) of batch row b that are valid. */
static inline void fmha_valid_keys(const fmha_problem *p, ptrdiff_t b, ptrdiff_t *j0, ptrdiff_t *j1)
{
    *j0 = p->key_start ? (ptrdiff_t)p->key_start[b] : 0;
    *j1 = p->key_length ? (ptrdiff_t)p->key_length[b] : p->Lk;
}

/* The keys [*j0, *j1) that query i of batch row b may attend as far as window, causality and padding say; none if *j1 <= *j0. */
static inline void fmha_row_keys(const fmha_problem *p, ptrdiff_t b, ptrdiff_t i, ptrdiff_t *j0, ptrdiff_t *j1)
{
    ptrdiff_t first, end;
    fmha_valid_keys(p, b, &first, &end);
    int64_t low = first, high = end;
    if (p->banded) {
        int64_t diagonal = (int64_t)i + p->offset[b];
        if (diagonal - p->left > low) low = diagonal - p->left;
        if (diagonal + p->right + 1 < high) high = diagonal + p->right + 1;
    }
    if (low > p->Lk) low = p->Lk;
    if (high < 0) high = 0;
    *j0 = (ptrdiff_t)low;
    *j1 = (ptrdiff_t)high;
}

/* All keys that any of the rows i0 .. i0+rows may attend: both ends of a row's range grow with the row. */
static inline void fmha_block_keys(const fmha_problem *p, ptrdiff_t b, ptrdiff_t i0, ptrdiff_t rows, ptrdiff_t *j0,
                                   ptrdiff_t *j1)
{
    ptrdiff_t unused;
    fmha_row_keys(p, b, i0, j0, &unused);
    fmha_row_keys(p, b, i0 + rows - 1, &unused, j1);
    if (*j1 < *j0) *j1 = *j0;
}

/* Key/value heads with the stacked rows of their query heads, whole: items of merging and of the "blas" algorithm's backward
 * pass, whose sums of grad_k and grad_v need no other item. */
static inline fmha_cut fmha_heads_cut(const fmha_problem *p)
{
    return (fmha_cut){.heads = p->Hkv, .last = p->B * p->Hkv, .rows = p->Hkv ? p->H / p->Hkv * p->Lq : 0, .cols = p->Lk};
}

/* A backward pass has a key/value head of many stacked rows on few keys several times over, each for some of its query heads: what
 * these give to grad_k and grad_v waits for none of the others, and is added up at the end, in order. How many copies goes by the
 * lengths, so that no bit follows the threads. */
static inline fmha_problem fmha_in_copies(const fmha_problem *p)
{
    fmha_problem copied = *p;
    const ptrdiff_t group = p->Hkv ? p->H / p->Hkv : 0, rows = group * p->Lq;
    for (ptrdiff_t n = 2; n <= group && n * FMHA_COPY_ROWS <= rows && FMHA_COPY_SHARE * n * p->Lk <= rows; n++)
        if (group % n == 0) copied.copies = n;
    if (copied.copies) copied.Hkv *= copied.copies;
    return copied;
}

/* The heads whose copies are to be added up, by tiles of keys. */
static inline fmha_cut fmha_copies_cut(const fmha_problem *p)
{
    const ptrdiff_t heads = p->copies ? p->Hkv / p->copies : 0;
    return (fmha_cut){.heads = heads, .last = p->B * heads, .rows = 1, .cols = p->Lk, .col_step = FMHA_TILE_KEYS};
}

static inline fmha_cut fmha_forward_cut(const fmha_problem *p)
{
    fmha_cut cut = fmha_heads_cut(p);
    cut.row_step = FMHA_BLOCK_ROWS;
    cut.from_end = p->banded;
    return cut;
}

/* Whether so many items, all of one cost, keep nine of ten threads busy. */
static inline int fmha_busy(ptrdiff_t items, int threads)
{
    return 10 * items >= 9 * ((items + threads - 1) / threads) * threads;
}

/* How many items in a row a thread takes at a time, where each is a head of so many bytes: of short ones several, so that what
 * the CPU fetches behind one by itself is wanted by the same thread, and that threads seldom meet where items are handed out. */
#define FMHA_DEALT_BYTES (1 << 17)
#define FMHA_DEALT_TURNS 32     /* for each thread, at least: one more or less then counts for little */
static inline ptrdiff_t fmha_dealt(ptrdiff_t items, double bytes, int threads)
{
    const ptrdiff_t even = items / (FMHA_DEALT_TURNS * (ptrdiff_t)threads),
            near = bytes < FMHA_DEALT_BYTES ? (ptrdiff_t)(FMHA_DEALT_BYTES / (bytes + 1)) : 1;
    const ptrdiff_t some = even < near ? even : near;
    return threads > 1 && some > 1 ? some : 1;
}

/* Whether forward items on matrix tiles are heads: what a head packs is then near when it is wanted. Of a long head that counts
 * for little, and threads that are slower than others need items enough. */
#define FMHA_SHORT_BLOCKS 8
#define FMHA_MANY_HEADS 4       /* for each thread */
static inline int fmha_by_heads(const fmha_problem *p, int threads)
{
    const ptrdiff_t heads = p->B * p->Hkv;
    const int many = threads == 1 || heads >= FMHA_MANY_HEADS * threads || fmha_heads_cut(p).rows <= FMHA_SHORT_BLOCKS * FMHA_BLOCK_ROWS;
    return many && fmha_busy(heads, threads);
}

/* Whether there is a mask of which all heads and queries have the same row. */
static inline int fmha_of_keys(const fmha_array *mask) { return mask->data && mask->stride[1] == 0 && mask->stride[2] == 0; }

/* The keys [starts[b], ends[b]) of each batch row beside which such masks, with the ranges that the problem has, remove all.
 * removed: -inf as the additive mask has it, of so many bytes. Returns whether a boolean mask removes none of them. */
int fmha_mask_ranges(const fmha_problem *p, ptrdiff_t size, const void *removed, int64_t *starts, int64_t *ends);

/* How a forward pass is cut, with the same bits. Where all blocks are whole, there are no lists. */
typedef struct {
    ptrdiff_t whole;            /* blocks of FMHA_BLOCK_ROWS rows that are items with all their keys: the first ones */
    int runs;                   /* whether the others are cut into runs of their keys, the longest first */
    ptrdiff_t fine, rows, keys; /* how many of the items behind the whole ones, the last, are cut into pieces of so many rows, and
                                 * of so many keys; 0: all of the item's */
    int heads_inside;           /* whether the longest blocks of all heads come first, which evens out the end, or head after head,
                                 * whose keys then stay in a cache */
    ptrdiff_t listed, merged;   /* how many items the lists have: */
    fmha_item *items, *merges;  /* of the pass, and of the one behind it that merges runs */
} fmha_blocks;

/* The best for so many threads, without the lists. runs: whether blocks may be cut into runs. quick: whether to look for as long
 * as about a tenth of the pass takes; becomes whether that has left ways out. */
fmha_blocks fmha_forward_blocks(const fmha_problem *p, int threads, int runs, int *quick);

/* Makes the lists, to be freed. Returns 0 where there is no memory for them. */
int fmha_list_blocks(const fmha_problem *p, fmha_blocks *blocks);
void fmha_free_blocks(fmha_blocks *blocks);

/* merging: of the pass over the blocks that were cut into runs. */
static inline fmha_cut fmha_blocks_cut(const fmha_problem *p, const fmha_blocks *blocks, int merging)
{
    fmha_cut cut = fmha_forward_cut(p);
    cut.heads_inside = blocks->heads_inside;
    cut.list = merging ? blocks->merges : blocks->items;
    cut.listed = merging ? blocks->merged : blocks->listed;
    return cut;
}

/* Of how many rows what a run of keys leaves lies together: of a whole block, however it is cut, or of all rows where these are
 * fewer. */
static inline ptrdiff_t fmha_run_rows(const fmha_problem *p)
{
    const ptrdiff_t rows = fmha_heads_cut(p).rows, least = FMHA_BLOCK_ROWS / 4;
    return rows < FMHA_BLOCK_ROWS ? (rows + least - 1) / least * least : FMHA_BLOCK_ROWS;
}

/* How many of these a pass leaves, if some blocks are cut into runs. */
static inline ptrdiff_t fmha_runs_left(const fmha_problem *p, const fmha_blocks *blocks)
{
    const fmha_cut cut = fmha_forward_cut(p);
    return blocks->merged ? (fmha_items(&cut) - blocks->whole) * fmha_parts(p->Lk, FMHA_RUN_KEYS) : 0;
}

#define FMHA_RUN_TURNS 4        /* of a run, by the fewest rows of a piece */

#define FMHA_FEW_THREADS 4      /* up to which heads come one after the other */
#define FMHA_EVEN_BLOCKS 32     /* for each thread: one more or less then counts for little */
#define FMHA_MANY_BLOCKS 8      /* for each thread */

/* Whether all blocks have as many rows. */
static inline int fmha_blocks_alike(const fmha_cut *cut)
{
    return cut->rows <= FMHA_BLOCK_ROWS || cut->rows % FMHA_BLOCK_ROWS == 0;
}

/* How many blocks there would be of the rows alone that attend some key, where causality, windows and ranges say which. */
static inline double fmha_blocks_at_work(const fmha_problem *p)
{
    double rows = 0;
    for (ptrdiff_t b = 0; b < p->B; b++) {
        ptrdiff_t first, end;
        fmha_valid_keys(p, b, &first, &end);
        double from = 0, to = (double)p->Lq;
        if (p->banded) {
            const double low = (double)first - (double)p->offset[b] - (double)p->right, high = (double)end - (double)p->offset[b] + (double)p->left;
            if (low > from) from = low;
            if (high < to) to = high;
        }
        if (first < end && from < to) rows += to - from;
    }
    return rows * (double)p->H / FMHA_BLOCK_ROWS;
}

/* Whether that takes a simulation: not on matrix tiles, whose blocks are whole, but where threads have few blocks each, and
 * these do not come out even. Else blocks are whole. */
static inline int fmha_blocks_vary(const fmha_problem *p, int threads)
{
    const fmha_cut cut = fmha_forward_cut(p);
    const ptrdiff_t blocks = fmha_items(&cut);
    if (p->parts > 0 || threads == 1) return 0;
    if (p->banded || p->key_start || p->key_length) return fmha_blocks_at_work(p) < 2 * FMHA_MANY_BLOCKS * (double)threads;
    if (blocks >= FMHA_EVEN_BLOCKS * (ptrdiff_t)threads) return 0;
    if (!fmha_blocks_alike(&cut)) return 1;
    return 100 * blocks < 97 * ((blocks + threads - 1) / threads) * threads;
}

/* How the heads of a backward pass are split: the first `whole` are items of FMHA_WHOLE, the others in FMHA_TURNS or
 * FMHA_SHARES, of so many keys, a tile or a half or a fourth of one; a share, else 0, of so many blocks, on so many of those
 * `together`. Mode FMHA_WHOLE: none is split. balance: the share of the threads that is busy. */
typedef struct {
    int mode;
    ptrdiff_t whole, keys, share, together;
    double balance;
} fmha_split;

/* The best for so many threads; quick: as above. */
fmha_split fmha_backward_split(const fmha_problem *p, int threads, int *quick);

static inline fmha_cut fmha_backward_cut(const fmha_problem *p, int mode, const fmha_split *split)
{
    const int of_blocks = mode == FMHA_PREPARE || mode == FMHA_RESULTS || mode == FMHA_MEND || mode == FMHA_RESTART;
    fmha_cut cut = of_blocks ? fmha_forward_cut(p) : fmha_heads_cut(p);
    const ptrdiff_t whole = split->whole < cut.last ? split->whole : cut.last;
    if (mode == FMHA_WHOLE) cut.last = whole;
    else cut.first = whole;
    if (mode == FMHA_TURNS || mode == FMHA_SHARES) cut.col_step = split->keys;
    if (mode == FMHA_SHARES) cut.row_step = split->share * FMHA_BLOCK_ROWS, cut.together = split->together;
    cut.heads_inside = 1;       /* with causality the first tiles of all heads are the longest */
    return cut;
}

/* Of an additive mask's gradient, in the shape of the mask: the strides of an axis that is broadcast are 0. */
static inline fmha_cut fmha_mask_cut(const fmha_problem *p, const fmha_array *grad_mask)
{
    const ptrdiff_t *stride = grad_mask->stride;
    ptrdiff_t heads = stride[1] ? p->H : 1;
    return (fmha_cut){
        .heads = heads, .last = (stride[0] ? p->B : 1) * heads, .rows = stride[2] ? p->Lq : 1, .row_step = FMHA_BLOCK_ROWS,
        .cols = stride[3] ? p->Lk : 1, .col_step = FMHA_TILE_KEYS,
    };
}

/* Partial softmaxes that the decode algorithm merges. */
static inline ptrdiff_t fmha_chunks(const fmha_problem *p)
{
    return p->B * p->Hkv * fmha_parts(p->Lk, FMHA_CHUNK_KEYS);
}

/* Those that wait for others: the only one of a head becomes its result at once. */
static inline ptrdiff_t fmha_waiting_chunks(const fmha_problem *p)
{
    return fmha_parts(p->Lk, FMHA_CHUNK_KEYS) > 1 ? fmha_chunks(p) : 0;
}

/* How many of so many chunks are an item, and of these items a thread takes at a time, where every thread has many: what comes from
 * memory is then asked for without a gap, since what follows is begun beside what is at hand. */
static inline ptrdiff_t fmha_decode_dealt(ptrdiff_t many, ptrdiff_t threads)
{
    const ptrdiff_t each = many / (FMHA_CHUNK_ITEMS * threads);
    return each > FMHA_MOST_CHUNKS ? FMHA_MOST_CHUNKS : each > 1 ? each : 1;
}

static inline fmha_cut fmha_decode_cut(const fmha_problem *p, ptrdiff_t threads)
{
    fmha_cut cut = fmha_heads_cut(p);
    cut.col_step = fmha_decode_dealt(fmha_chunks(p), threads) * FMHA_CHUNK_KEYS;
    return cut;
}

/* How many heads of keys and values that lie far away, `size` bytes each number, "decode" goes through side by side, or 1: of those
 * that lie in rows of all heads, as many in each item, which are some KB of a row, or half as many where the threads share these
 * evenly: fewer gain nothing. rows: of queries for each; chunks: of each head. No bit follows it. */
static inline ptrdiff_t fmha_neighbours(const fmha_problem *p, ptrdiff_t rows, ptrdiff_t size, ptrdiff_t chunks, ptrdiff_t threads)
{
    const ptrdiff_t *k = p->k.stride, *v = p->v.stride;
    if (k[1] <= 0 || v[1] <= 0 || p->Hkv * k[1] > k[2] || p->Hkv * v[1] > v[2]) return 1;
    if (2 * p->Hkv < rows) return 1;        /* much is computed with what few heads have in a row: that does not wait for memory */
    for (ptrdiff_t bytes = FMHA_NEIGHBOURS_BYTES; bytes >= FMHA_NEIGHBOURS_BYTES / 2; bytes /= 2) {
        const ptrdiff_t fill = bytes / (p->D * size + 1) + 1, groups = fmha_parts(p->Hkv, fill < FMHA_MOST_NEIGHBOURS ? fill : FMHA_MOST_NEIGHBOURS);
        const ptrdiff_t items = chunks * groups;
        if (items >= FMHA_NEIGHBOURS_ITEMS * threads || fmha_busy(items, (int)threads)) return fmha_parts(p->Hkv, groups);
    }
    return 1;
}

/* The items of so many heads: a chunk of these. */
static inline fmha_cut fmha_neighbours_cut(const fmha_problem *p, ptrdiff_t heads)
{
    fmha_cut cut = fmha_heads_cut(p);
    cut.heads = fmha_parts(p->Hkv, heads);
    cut.last = p->B * cut.heads;
    cut.head_step = heads;
    cut.col_step = FMHA_CHUNK_KEYS;
    return cut;
}

/* Of the "blas" algorithm: blocks of so many rows of each query head. */
static inline fmha_cut fmha_blas_forward_cut(const fmha_problem *p, ptrdiff_t rows)
{
    return (fmha_cut){.heads = p->H, .last = p->B * p->H, .rows = p->Lq, .row_step = rows, .cols = p->Lk, .from_end = 1};
}

#endif
