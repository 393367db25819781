/* The "tiled" algorithm: attention in O(L) memory, scores kept transposed, S^T[key][query].
 *
 * Queries lie along the vector lanes: maxima, sums, rescaling and the causal comparison are vertical, no lane ever meets
 * another. The query block is packed transposed once (scale folded in); keys and values are read where they lie, keys as
 * broadcast scalars, values as rows. A block holds rows of the group's stacked heads: row r is head r / Lq, query r % Lq.
 *
 * Bits: a row's result depends on its own scores and the grid of key tiles alone. Sums over D and over keys run in their
 * order, one fused multiply-add a term; a tile in which a row attends nothing multiplies it by exp(0) = 1 and adds 0. */

/* c[r][lanes] <- init + sum_k a[r, k] * b[k][lanes] for mr rows and nv vectors. The only product of this file.
 * init: 0 zero, 1 c itself, 2 c[r] * row_scale[r]. */
static inline __attribute__((always_inline)) void FMHA_NAME(micro)(
    const int mr, const int nv, const int init, ptrdiff_t depth, const REAL *a, ptrdiff_t a_row, ptrdiff_t a_step,
    const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *row_scale)
{
    VEC sum[MICRO_ROWS][MICRO_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
        for (int v = 0; v < nv; v++) {
            if (init == 0) sum[r][v] = v_splat(0);
            else sum[r][v] = v_load(c + r * ldc + v * LANES);
            if (init == 2) sum[r][v] = sum[r][v] * row_scale[r];
        }
    for (ptrdiff_t k = 0; k < depth; k++) {
        VEC row[MICRO_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < nv; v++) row[v] = v_load(b + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < mr; r++) {
            VEC scalar = v_splat(a[r * a_row]);
#pragma GCC unroll 8
            for (int v = 0; v < nv; v++) sum[r][v] = sum[r][v] + scalar * row[v];
        }
        a += a_step;
        b += ldb;
    }
#pragma GCC unroll 8
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 8
        for (int v = 0; v < nv; v++) v_store(c + r * ldc + v * LANES, sum[r][v]);
}

#define MICRO_CASE(mr, nv) \
    case (mr) * 8 + (nv): FMHA_NAME(micro)(mr, nv, init, depth, a, a_row, a_step, b, ldb, c, ldc, row_scale); break;
#define MICRO_CASES(nv) MICRO_CASE(1, nv) MICRO_CASE(2, nv) MICRO_CASE(3, nv) MICRO_CASE(4, nv) MICRO_CASE(5, nv) MICRO_CASE(6, nv)

/* c (rows, columns) <- init + a (rows, depth) @ b (depth, columns); columns a multiple of LANES. a_row or a_step is 1. */
static inline __attribute__((always_inline)) void FMHA_NAME(product_)(
    const int init, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const REAL *a0, ptrdiff_t a_row, ptrdiff_t a_step,
    const REAL *b0, ptrdiff_t ldb, REAL *c0, ptrdiff_t ldc, const REAL *row_scale0)
{
    ptrdiff_t vectors = columns / LANES, panels = (vectors + MICRO_VECTORS - 1) / MICRO_VECTORS, done = 0;
    for (ptrdiff_t panel = 0; panel < panels; panel++) {
        ptrdiff_t nv = (vectors - done + panels - panel - 1) / (panels - panel);   /* even panels: 5 is 3 + 2 */
        const REAL *b = b0 + done * LANES;
        for (ptrdiff_t r = 0; r < rows; r += MICRO_ROWS) {
            ptrdiff_t mr = rows - r < MICRO_ROWS ? rows - r : MICRO_ROWS;
            const REAL *a = a0 + r * a_row, *row_scale = row_scale0 + r;
            REAL *c = c0 + r * ldc + done * LANES;
            switch (mr * 8 + nv) {
                MICRO_CASES(1)
                MICRO_CASES(2)
#if MICRO_VECTORS == 4
                MICRO_CASES(3)
                MICRO_CASES(4)
#endif
            }
        }
        done += nv;
    }
}

/* s (keys, queries) <- k (keys, width) @ q^T (width, queries): a's rows lie along the sum. */
static __attribute__((noinline)) void FMHA_NAME(product_rows)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
    FMHA_NAME(product_)(0, rows, columns, depth, a, lda, 1, b, ldb, c, ldc, a);
}

/* c <- c + a @ b, a's rows along the sum. */
static __attribute__((noinline)) void FMHA_NAME(product_rows_add)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
    FMHA_NAME(product_)(1, rows, columns, depth, a, lda, 1, b, ldb, c, ldc, a);
}

/* c <- row_scale * c + a^T @ b, a (depth, rows) transposed: a's columns lie along the sum. */
static __attribute__((noinline)) void FMHA_NAME(product_columns)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *row_scale)
{
    FMHA_NAME(product_)(2, rows, columns, depth, a, 1, lda, b, ldb, c, ldc, row_scale);
}

/* ------------------------------------------------------------------------------------------------ a block of query rows */

#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))

/* One block of rows of the stacked heads of a group, and the scratch it works in; queries is rows in whole vectors. */
typedef struct {
    ptrdiff_t b, hkv, rows, queries, width, value_width;    /* widths in whole vectors */
    ptrdiff_t j0, j1;                   /* keys that any row attends */
    ptrdiff_t common0, common1;         /* keys that no causality, window or length removes from any row */
    ptrdiff_t head[BLOCK_ROWS], query[BLOCK_ROWS];
    INT low[BLOCK_ROWS], high[BLOCK_ROWS];                  /* keys of each row, relative to the tile at hand */
    ptrdiff_t row0[BLOCK_ROWS], row1[BLOCK_ROWS];           /* keys of each row */
} FMHA_NAME(rows);

static void FMHA_NAME(block_rows)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first,
                                  ptrdiff_t rows)
{
    ptrdiff_t group = p->H / p->Hkv, h = hkv * group + first / p->Lq, i = first % p->Lq;
    block->b = b;
    block->hkv = hkv;
    block->rows = rows;
    block->queries = ROUND_UP(rows, LANES);
    block->width = ROUND_UP(p->D, LANES);
    block->value_width = ROUND_UP(p->Dv, LANES);
    block->j0 = p->Lk;
    block->j1 = 0;
    block->common0 = 0;
    block->common1 = p->Lk;
    for (ptrdiff_t r = 0; r < block->queries; r++) {
        ptrdiff_t low = 0, high = p->Lk;
        if (r < rows) {
            block->head[r] = h;
            block->query[r] = i;
            fmha_row_keys(p, b, i, &low, &high);
            if (low < high) {
                if (low < block->j0) block->j0 = low;
                if (high > block->j1) block->j1 = high;
            }
            if (low > block->common0) block->common0 = low;
            if (high < block->common1) block->common1 = high;
            if (++i == p->Lq) { i = 0; h++; }
        }
        block->row0[r] = low;
        block->row1[r] = high;
    }
    if (block->j0 > block->j1) block->j0 = block->j1 = 0;
}

/* packed^T (width, queries) <- factor * x rows (rows, width), zeros beyond. */
static void FMHA_NAME(pack_transposed)(const FMHA_NAME(rows) *block, const fmha_array *x, ptrdiff_t width, REAL factor,
                                       REAL *packed)
{
    ptrdiff_t queries = block->queries;
    for (ptrdiff_t r = 0; r < queries; r++) {
        if (r >= block->rows) {
            for (ptrdiff_t d = 0; d < width; d++) packed[d * queries + r] = 0;
            continue;
        }
        const REAL *row = (const REAL *)x->data + block->b * x->stride[0] + block->head[r] * x->stride[1]
                          + block->query[r] * x->stride[2];
        for (ptrdiff_t d = 0; d < width; d++) packed[d * queries + r] = factor * row[d];
    }
}

/* Rows [j, j + n) of a key/value head as rows of whole vectors: where they lie, or padded with zeros in `copy`. */
static const REAL *FMHA_NAME(whole_rows)(const REAL *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, int finite, REAL *copy,
                                         ptrdiff_t *ld)
{
    ptrdiff_t whole = ROUND_UP(width, LANES);
    if (finite && whole == width) {
        *ld = stride;
        return x;
    }
    for (ptrdiff_t i = 0; i < n; i++) {
        for (ptrdiff_t d = 0; d < width; d++) copy[i * whole + d] = finite || x[i * stride + d] - x[i * stride + d] == 0 ? x[i * stride + d] : 0;
        for (ptrdiff_t d = width; d < whole; d++) copy[i * whole + d] = 0;
    }
    *ld = whole;
    return copy;
}

/* Whether masks or ranges touch the tile of keys [j, j + n). */
static inline int FMHA_NAME(touched)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n)
{
    return p->bool_mask.data || p->additive_mask.data || j < block->common0 || j + n > block->common1;
}

/* scores^T (keys, queries): softcap, additive mask, then -inf where a pair is removed. slope, if given, gets the
 * derivative of the softcap. */
static void FMHA_NAME(mask_tile)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, REAL *s, REAL *slope)
{
    ptrdiff_t queries = block->queries;
    if (p->softcap != 0) {
        VEC cap = v_splat(p->softcap), inverse = v_splat(1 / p->softcap), one = v_splat(1);
        for (ptrdiff_t e = 0; e < n * queries; e += LANES) {
            VEC t = FMHA_NAME(tanh)(v_load(s + e) * inverse);
            v_store(s + e, cap * t);
            if (slope) v_store(slope + e, one - t * t);
        }
    }
    if (p->additive_mask.data) {
        const ptrdiff_t *stride = p->additive_mask.stride;
        const REAL *m = (const REAL *)p->additive_mask.data + block->b * stride[0] + j * stride[3];
        if (stride[1] == 0 && stride[2] == 0) {
            VEC gone = v_splat(NEGATIVE_INFINITY);
            for (ptrdiff_t k = 0; k < n; k++) {
                VEC add = v_splat(m[k * stride[3]]);
                for (ptrdiff_t q = 0; q < queries; q += LANES)
                    v_store(s + k * queries + q, v_select(v_equal(add, gone), gone, v_load(s + k * queries + q) + add));
            }
        } else {
            for (ptrdiff_t r = 0; r < block->rows; r++) {
                const REAL *row = m + block->head[r] * stride[1] + block->query[r] * stride[2];
                for (ptrdiff_t k = 0; k < n; k++) {
                    REAL add = row[k * stride[3]], *to = s + k * queries + r;
                    *to = add == NEGATIVE_INFINITY ? add : *to + add;
                }
            }
        }
    }
    if (p->bool_mask.data) {
        const ptrdiff_t *stride = p->bool_mask.stride;
        const unsigned char *m = (const unsigned char *)p->bool_mask.data + block->b * stride[0] + j * stride[3];
        if (stride[1] == 0 && stride[2] == 0) {
            for (ptrdiff_t k = 0; k < n; k++)
                if (m[k * stride[3]])
                    for (ptrdiff_t q = 0; q < queries; q += LANES) v_store(s + k * queries + q, v_splat(NEGATIVE_INFINITY));
        } else {
            for (ptrdiff_t r = 0; r < block->rows; r++) {
                const unsigned char *row = m + block->head[r] * stride[1] + block->query[r] * stride[2];
                for (ptrdiff_t k = 0; k < n; k++) {
                    REAL *to = s + k * queries + r;
                    *to = row[k * stride[3]] ? NEGATIVE_INFINITY : *to;
                }
            }
        }
    }
    if (j < block->common0 || j + n > block->common1) {
        for (ptrdiff_t r = 0; r < queries; r++) {
            ptrdiff_t low = block->row0[r] - j, high = block->row1[r] - j;
            block->low[r] = (INT)(low < 0 ? 0 : low > n ? n : low);
            block->high[r] = (INT)(high < 0 ? 0 : high > n ? n : high);
        }
        VEC gone = v_splat(NEGATIVE_INFINITY);
        for (ptrdiff_t q = 0; q < queries; q += LANES) {
            IVEC low = i_load(block->low + q), high = i_load(block->high + q);
            for (ptrdiff_t k = 0; k < n; k++) {
                IVEC at = i_splat(k), keep = i_within(low, at, high);
                v_store(s + k * queries + q, v_select(keep, v_load(s + k * queries + q), gone));
            }
        }
    }
}

/* The contributions of non-finite rows of x to a product over a tile, allowed pairs only, one pair after the other.
 * by_key 0: c[r, :] += a[j, r] * x[j, :]; by_key 1: c[j, :] += factor * a[j, r] * x_r, x_r row r of the block in x. */
static void FMHA_NAME(tile_nonfinite)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, const REAL *a,
                                      const REAL *x, ptrdiff_t ldx, ptrdiff_t width, REAL *c, ptrdiff_t ldc)
{
    for (ptrdiff_t k = 0; k < n; k++) {
        const REAL *row = x + k * ldx;
        if (FMHA_NAME(all_finite)(1, width, row, ldx)) continue;
        for (ptrdiff_t r = 0; r < block->rows; r++) {
            fmha_block pair = {.b = block->b, .h = block->head[r]};
            if (FMHA_NAME(removed)(p, &pair, block->query[r], j + k)) continue;
            for (ptrdiff_t d = 0; d < width; d++)
                if (row[d] - row[d] != 0) c[r * ldc + d] += a[k * block->queries + r] * row[d];
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------- forward */

/* Scratch of one thread, in REALs: packed^T (D, queries), scores^T (keys, queries), out (queries, value width), values
 * (keys, value width) where they must be copied, three vectors of queries. */
static ptrdiff_t FMHA_NAME(forward_scratch)(const fmha_problem *p)
{
    ptrdiff_t value_width = ROUND_UP(p->Dv, LANES);
    return (p->D + TILE_KEYS + value_width + 3) * BLOCK_ROWS + TILE_KEYS * value_width;
}

/* One block against all its keys. Returns whether the result is finite; careful: the firewall's path, see below. */
static int FMHA_NAME(forward_block)(const fmha_tiled *t, FMHA_NAME(rows) *block, REAL *scratch, int careful)
{
    const fmha_problem *p = &t->p;
    ptrdiff_t queries = block->queries, value_width = block->value_width, ldk = p->k.stride[2], ldv;
    REAL *packed = scratch, *s = packed + p->D * BLOCK_ROWS, *out = s + TILE_KEYS * BLOCK_ROWS;
    REAL *peak = out + value_width * BLOCK_ROWS, *total = peak + BLOCK_ROWS, *scale = total + BLOCK_ROWS;
    REAL *copy = scale + BLOCK_ROWS;
    const REAL *keys = (const REAL *)p->k.data + block->b * p->k.stride[0] + block->hkv * p->k.stride[1];
    const REAL *values = (const REAL *)p->v.data + block->b * p->v.stride[0] + block->hkv * p->v.stride[1];
    FMHA_NAME(pack_transposed)(block, &p->q, p->D, (REAL)p->scale, packed);
    for (ptrdiff_t q = 0; q < queries; q++) {
        peak[q] = NEGATIVE_INFINITY;
        total[q] = 0;
    }
    memset(out, 0, (size_t)(queries * value_width) * sizeof(REAL));
    /* The grid of tiles starts at key 0 whatever the block, so that a row meets the same tiles in any company. */
    for (ptrdiff_t start = block->j0 / TILE_KEYS * TILE_KEYS; start < block->j1; start += TILE_KEYS) {
        ptrdiff_t j = start, n = block->j1 - j < TILE_KEYS ? block->j1 - j : TILE_KEYS;
        /* scores^T (keys, queries) <- k (keys, D) @ (scale * q)^T (D, queries) */
        FMHA_NAME(product_rows)(n, queries, p->D, keys + j * ldk, ldk, packed, queries, s, queries);
        int touched = FMHA_NAME(touched)(p, block, j, n);
        if (touched || p->softcap != 0) FMHA_NAME(mask_tile)(p, block, j, n, s, NULL);
        for (ptrdiff_t q = 0; q < queries; q += LANES) {
            VEC before = v_load(peak + q), best = before, gone = v_splat(NEGATIVE_INFINITY);
            for (ptrdiff_t k = 0; k < n; k++) {
                VEC score = v_load(s + k * queries + q);
                best = v_max(score, best);
            }
            v_store(peak + q, best);
            VEC shift = v_select(v_equal(best, gone), v_splat(0), best);
            VEC shrink = FMHA_NAME(exp)(before - shift), sum = v_load(total + q) * shrink;
            for (ptrdiff_t k = 0; k < n; k++) {
                VEC e = FMHA_NAME(exp)(v_load(s + k * queries + q) - shift);
                v_store(s + k * queries + q, e);
                sum = sum + e;
            }
            v_store(scale + q, shrink);
            v_store(total + q, sum);
        }
        /* out (queries, Dv) <- scale * out + probabilities^T (keys, queries)^T @ v (keys, Dv) */
        const REAL *rows = FMHA_NAME(whole_rows)(values + j * p->v.stride[2], p->v.stride[2], n, p->Dv, !(careful && touched), copy, &ldv);
        FMHA_NAME(product_columns)(block->rows, value_width, n, s, queries, rows, ldv, out, value_width, scale);
        if (careful && touched)
            FMHA_NAME(tile_nonfinite)(p, block, j, n, s, values + j * p->v.stride[2], p->v.stride[2], p->Dv, out, value_width);
    }
    return FMHA_NAME(all_finite)(block->rows, p->Dv, out, value_width);
}

/* Item: one block of rows of one group. The firewall costs finite input nothing: only where a NaN or Inf shows in the
 * result is the block done again, with zeros for what is not finite in partly removed tiles and the allowed pairs added;
 * rows that attend none of it get the same bits as ever. */
static void FMHA_NAME(tiled_forward)(void *context, ptrdiff_t item, int worker)
{
    const fmha_tiled *t = context;
    const fmha_problem *p = &t->p;
    REAL *scratch = (REAL *)(t->scratch + worker * t->scratch_size);
    FMHA_NAME(rows) block;
    ptrdiff_t group_rows = p->H / p->Hkv * p->Lq, blocks = (group_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    ptrdiff_t first = (blocks - 1 - item % blocks) * BLOCK_ROWS;       /* the longest causal rows start first */
    ptrdiff_t rows = group_rows - first < BLOCK_ROWS ? group_rows - first : BLOCK_ROWS;
    FMHA_NAME(block_rows)(p, &block, item / blocks / p->Hkv, item / blocks % p->Hkv, first, rows);
    if (!FMHA_NAME(forward_block)(t, &block, scratch, 0)) FMHA_NAME(forward_block)(t, &block, scratch, 1);
    const REAL *out = scratch + (p->D + TILE_KEYS) * BLOCK_ROWS, *peak = out + block.value_width * BLOCK_ROWS;
    const REAL *total = peak + BLOCK_ROWS;
    for (ptrdiff_t r = 0; r < rows; r++) {
        REAL *to = (REAL *)t->out.data + block.b * t->out.stride[0] + block.head[r] * t->out.stride[1]
                   + block.query[r] * t->out.stride[2];
        memcpy(to, out + r * block.value_width, (size_t)p->Dv * sizeof(REAL));
        FMHA_NAME(divide_row)(p->Dv, to, total[r]);
        if (t->lse)
            ((REAL *)t->lse)[(block.b * p->H + block.head[r]) * p->Lq + block.query[r]]
                = total[r] == 0 ? NEGATIVE_INFINITY : (peak[r] == NEGATIVE_INFINITY ? 0 : peak[r]) + REAL_LOG(total[r]);
    }
}
