/* The "tiled" algorithm: attention in O(L) memory, scores kept transposed, S^T[key][query].
 *
 * Queries lie along the vector lanes: maxima, sums, rescaling and the causal comparison are vertical, no lane ever meets
 * another. The query block is packed transposed once (scale folded in); keys and values are read where they lie, keys as
 * broadcast scalars, values as rows. A block holds rows of the group's stacked heads: row r is head r / Lq, query r % Lq.
 *
 * Bits: a row's result depends on its own scores and the grid of key tiles alone. Sums over D and over keys run in their
 * order, one fused multiply-add a term; a tile in which a row attends nothing multiplies it by exp(0) = 1 and adds 0. */

/* c[r][lanes] <- init + sum_k a[r, k] * b[k][lanes] for mr rows and nv vectors. The only product of this file.
 * init: 0 zero, 1 c itself, 2 c[r] * row_scale[r]. It is added last: sums of sums err less than one long sum. */
static inline __attribute__((always_inline)) void FMHA_NAME(micro)(
    const int type, const int mr, const int nv, const int init, ptrdiff_t depth, const REAL *a, ptrdiff_t a_row, ptrdiff_t a_step,
    const char *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *row_scale)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    VEC sum[12][MICRO_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 12
        for (int v = 0; v < nv; v++) sum[r][v] = v_splat(0);
    for (ptrdiff_t k = 0; k < depth; k++) {
        VEC row[MICRO_VECTORS];
#pragma GCC unroll 12
        for (int v = 0; v < nv; v++) row[v] = FMHA_NAME(stored_load)(type, b + v * LANES * size);
#pragma GCC unroll 12
        for (int r = 0; r < mr; r++) {
            VEC scalar = v_splat(a[r * a_row]);
#pragma GCC unroll 12
            for (int v = 0; v < nv; v++) sum[r][v] = sum[r][v] + scalar * row[v];
        }
        a += a_step;
        b += ldb * size;
    }
#pragma GCC unroll 12
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 12
        for (int v = 0; v < nv; v++) {
            REAL *to = c + r * ldc + v * LANES;
            if (init == 1) sum[r][v] = v_load(to) + sum[r][v];
            if (init == 2) sum[r][v] = v_load(to) * row_scale[r] + sum[r][v];
            v_store(to, sum[r][v]);
        }
}

/* Rows of the register tile: as many sums as the registers hold, 12 rows at most. */
#define MICRO_ROWS(nv) (MICRO_SUMS / (nv) < 12 ? MICRO_SUMS / (nv) : 12)
#define MICRO(mr, nv) \
    for (; rows - r >= (mr); r += (mr)) \
        FMHA_NAME(micro)(type, mr, nv, init, depth, a0 + r * a_row, a_row, a_step, b, ldb, c0 + r * ldc + done * LANES, ldc, row_scale + r)
#define MICRO_PANEL(nv) \
    case nv: MICRO(MICRO_ROWS(nv), nv); MICRO(4, nv); MICRO(2, nv); MICRO(1, nv); break;

/* c (rows, columns) <- init + a (rows, depth) @ b (depth, columns); columns a multiple of LANES. a_row or a_step is 1; b may
 * be stored in another type. */
static inline __attribute__((always_inline)) void FMHA_NAME(product_of)(
    const int type, const int init, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const REAL *a0, ptrdiff_t a_row, ptrdiff_t a_step,
    const char *b0, ptrdiff_t ldb, REAL *c0, ptrdiff_t ldc, const REAL *row_scale)
{
    ptrdiff_t vectors = columns / LANES, panels = (vectors + MICRO_VECTORS - 1) / MICRO_VECTORS, done = 0;
    for (ptrdiff_t panel = 0; panel < panels; panel++) {
        ptrdiff_t nv = (vectors - done + panels - panel - 1) / (panels - panel);   /* even panels: 5 is 3 + 2 */
        const char *b = b0 + done * LANES * FMHA_NAME(stored_size)(type);
        ptrdiff_t r = 0;
        switch (nv) {
            MICRO_PANEL(1)
            MICRO_PANEL(2)
#if MICRO_VECTORS == 4
            MICRO_PANEL(3)
            MICRO_PANEL(4)
#endif
        }
        done += nv;
    }
}

#define PRODUCT(init, rows, columns, depth, a, a_row, a_step, b, ...) \
    FMHA_NAME(product_of)(FMHA_SAME, init, rows, columns, depth, a, a_row, a_step, (const char *)(b), __VA_ARGS__)

/* s (keys, queries) <- k (keys, width) @ q^T (width, queries): a's rows lie along the sum. */
static __attribute__((noinline)) void FMHA_NAME(product_rows)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
    PRODUCT(0, rows, columns, depth, a, lda, 1, b, ldb, c, ldc, a);
}

/* c <- c + a @ b, a's rows along the sum. */
static __attribute__((noinline)) void FMHA_NAME(product_rows_add)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
    PRODUCT(1, rows, columns, depth, a, lda, 1, b, ldb, c, ldc, a);
}

/* c <- row_scale * c + a^T @ b, a (depth, rows) transposed: a's columns lie along the sum. */
static __attribute__((noinline)) void FMHA_NAME(product_columns)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *row_scale)
{
    PRODUCT(2, rows, columns, depth, a, 1, lda, b, ldb, c, ldc, row_scale);
}

/* c <- c + a^T @ b. */
static __attribute__((noinline)) void FMHA_NAME(product_columns_add)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
    PRODUCT(1, rows, columns, depth, a, 1, lda, b, ldb, c, ldc, a);
}

/* ------------------------------------------------------------------------------------------------ a block of query rows */

#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))
#define BLOCK_VECTORS (BLOCK_ROWS / LANES)
#define GRANULE (LANES < 8 ? 8 : LANES)     /* keys by which products follow the edge of a band */

/* One block of rows of the stacked heads of a group, and the scratch it works in; queries is rows in whole vectors. */
typedef struct {
    ptrdiff_t b, hkv, rows, queries, width, value_width;    /* widths in whole vectors */
    ptrdiff_t j0, j1;                   /* keys that any row attends */
    ptrdiff_t common0, common1;         /* keys that no causality, window or length removes from any row */
    ptrdiff_t head[BLOCK_ROWS], query[BLOCK_ROWS];
    ptrdiff_t row0[BLOCK_ROWS], row1[BLOCK_ROWS];           /* keys of each row */
    ptrdiff_t any0[BLOCK_VECTORS], any1[BLOCK_VECTORS];     /* keys that some row of a vector of rows attends, */
    ptrdiff_t all0[BLOCK_VECTORS], all1[BLOCK_VECTORS];     /* and those that all of its rows do */
    ptrdiff_t low[BLOCK_VECTORS], high[BLOCK_VECTORS];      /* keys of a vector at work, relative to the tile at hand */
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
    for (ptrdiff_t v = 0; v < block->queries / LANES; v++) {
        ptrdiff_t any0 = p->Lk, any1 = 0, all0 = 0, all1 = p->Lk;
        for (ptrdiff_t r = v * LANES; r < (v + 1) * LANES && r < rows; r++) {
            if (block->row0[r] > all0) all0 = block->row0[r];
            if (block->row1[r] < all1) all1 = block->row1[r];
            if (block->row0[r] >= block->row1[r]) continue;
            if (block->row0[r] < any0) any0 = block->row0[r];
            if (block->row1[r] > any1) any1 = block->row1[r];
        }
        block->any0[v] = any0;
        block->any1[v] = any1;
        block->all0[v] = all0;
        block->all1[v] = all1;
    }
}

/* The keys of each vector that are at work in the tile [j, j + n), their ends multiples of `step` keys from j (or n).
 * Returns whether a band leaves some vector less than the whole tile. */
static int FMHA_NAME(set_spans)(FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, ptrdiff_t step)
{
    int banded = 0;
    for (ptrdiff_t v = 0; v < block->queries / LANES; v++) {
        ptrdiff_t low = block->any0[v] - j, high = block->any1[v] - j;
        low = low < 0 ? 0 : low / step * step;
        high = high < 0 ? 0 : ROUND_UP(high, step);
        if (high > n) high = n;
        if (low >= high) low = high = 0;
        block->low[v] = low;
        block->high[v] = high;
        banded |= low > 0 || high < n;
    }
    return banded;
}

/* The next run of keys from *k on, of n, at which the same vectors [*v0, *v1) are at work; 0 at the end. Spans are in whole
 * granules; between v0 and v1 there may be vectors that are not at work. */
static int FMHA_NAME(next_run)(const FMHA_NAME(rows) *block, ptrdiff_t n, ptrdiff_t *k, ptrdiff_t *count, ptrdiff_t *v0, ptrdiff_t *v1)
{
    ptrdiff_t start = *k + *count, vectors = block->queries / LANES;
    *count = 0;
    for (ptrdiff_t at = start; at < n; at += GRANULE) {
        ptrdiff_t first = vectors, last = 0;
        for (ptrdiff_t v = 0; v < vectors; v++)
            if (block->low[v] <= at && at < block->high[v]) {
                if (v < first) first = v;
                last = v + 1;
            }
        if (*count && (first != *v0 || last != *v1)) return 1;
        if (first >= last) continue;
        if (!*count) *k = at;
        *v0 = first;
        *v1 = last;
        *count += n - at < GRANULE ? n - at : GRANULE;
    }
    return *count > 0;
}

/* packed^T (width, queries) <- factor * x rows (rows, width), zeros beyond. Where sized, returns a number below HUGE_POWER if all
 * that was packed is below LARGE_POWER, and not such a number if something is so large or not finite. */
static inline __attribute__((always_inline)) REAL FMHA_NAME(transposed)(const int sized, const FMHA_NAME(rows) *block, const fmha_array *x,
                                                                        ptrdiff_t width, REAL factor, REAL *packed)
{
    ptrdiff_t queries = block->queries;
    VEC squares[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};     /* none waits for the one before */
    for (ptrdiff_t q = 0; q < queries; q += LANES) {
        const REAL *row[LANES];
        ptrdiff_t rows = block->rows - q < LANES ? block->rows - q : LANES, d = 0;
        for (ptrdiff_t l = 0; l < LANES; l++) {
            ptrdiff_t r = q + (l < rows ? l : 0);
            row[l] = (const REAL *)x->data + block->b * x->stride[0] + block->head[r] * x->stride[1]
                     + block->query[r] * x->stride[2];
        }
#if HAVE_TRANSPOSE
        for (; d + LANES <= width; d += LANES) {
            VEC part[LANES];
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; l < LANES; l++) part[l] = l < rows ? v_load(row[l] + d) * factor : v_splat(0);
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; sized && l < LANES; l++) squares[l % 4] = squares[l % 4] + part[l] * part[l];
            FMHA_NAME(transpose)(part);
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; l < LANES; l++) v_store(packed + (d + l) * queries + q, part[l]);
        }
#endif
        for (ptrdiff_t left = d; left < width; left++)
            for (ptrdiff_t l = 0; l < LANES; l++) packed[left * queries + q + l] = l < rows ? factor * row[l][left] : 0;
        for (ptrdiff_t left = d; sized && left < width; left++) {
            VEC part = v_load(packed + left * queries + q);
            squares[left % 4] = squares[left % 4] + part * part;
        }
    }
    return sized ? FMHA_NAME(sum)((squares[0] + squares[1]) + (squares[2] + squares[3])) : 0;
}

static void FMHA_NAME(pack_transposed)(const FMHA_NAME(rows) *block, const fmha_array *x, ptrdiff_t width, REAL *packed)
{
    FMHA_NAME(transposed)(0, block, x, width, 1, packed);
}

static inline REAL FMHA_NAME(folded_scale)(const fmha_problem *p, REAL *rest)
{
    double left, factor = fmha_folded_scale(p, FMHA_REAL == 64, &left);
    *rest = (REAL)left;
    return (REAL)factor;
}

/* The power of 2 that is taken out of a row of queries which, times factor, would be so large that it, or products with it, might
 * overflow where the scores do not; else 1. */
static REAL FMHA_NAME(row_lift)(ptrdiff_t D, const REAL *q, REAL factor)
{
    double size = 0;
    for (ptrdiff_t d = 0; d < D; d++)
        if (q[d] - q[d] == 0) size = fmax(size, fabs((double)q[d]));
    int of_q, exponent;
    frexp(size, &of_q);
    frexp((double)factor, &exponent);
    exponent += of_q - ilogb((double)LARGE_POWER);
    if (size == 0 || exponent <= 0) return 1;
    return (REAL)ldexp(1, exponent < ilogb((double)HUGE_POWER) ? exponent : ilogb((double)HUGE_POWER));
}

/* packed^T (D, queries) <- scale * q / lift, where the lift of row r, a power of 2, is what its scores must be multiplied by. Every
 * row has its own, so that none depends on its company. Returns whether there are lifts other than 1. */
static int FMHA_NAME(pack_queries)(const fmha_problem *p, const FMHA_NAME(rows) *block, REAL *packed, REAL *lift)
{
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest);
    int some = !(FMHA_NAME(transposed)(1, block, &p->q, p->D, factor, packed) < HUGE_POWER);
    if (!some && rest == 1) return 0;
    for (ptrdiff_t r = 0; r < block->queries; r++) {
        lift[r] = rest;
        if (!some || r >= block->rows) continue;
        const REAL *q = (const REAL *)p->q.data + block->b * p->q.stride[0] + block->head[r] * p->q.stride[1]
                        + block->query[r] * p->q.stride[2];
        REAL own = FMHA_NAME(row_lift)(p->D, q, factor);
        if (own == 1) continue;
        lift[r] *= own;
        for (ptrdiff_t d = 0; d < p->D; d++) packed[d * block->queries + r] = (REAL)((double)factor / own) * q[d];
    }
    return 1;
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

/* Where a mask's row for row r of the block starts, at key j. */
static inline const char *FMHA_NAME(mask_row_at)(const fmha_array *mask, const FMHA_NAME(rows) *block, ptrdiff_t r, ptrdiff_t j,
                                                 ptrdiff_t size)
{
    const ptrdiff_t *stride = mask->stride;
    return mask->data + (block->b * stride[0] + block->head[r] * stride[1] + block->query[r] * stride[2] + j * stride[3]) * size;
}

/* Whether a mask removes all of the tile: read up to the first pair that it leaves. */
static int FMHA_NAME(tile_removed)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n)
{
    for (int boolean = 0; boolean < 2; boolean++) {
        const fmha_array *mask = boolean ? &p->bool_mask : &p->additive_mask;
        if (!mask->data) continue;
        ptrdiff_t rows = mask->stride[1] == 0 && mask->stride[2] == 0 ? 1 : block->rows, step = mask->stride[3], r = 0, k = n;
        for (; r < rows && k == n; r++) {
            const char *m = FMHA_NAME(mask_row_at)(mask, block, r, j, boolean ? 1 : (ptrdiff_t)sizeof(REAL));
            if (boolean && step == 1) k = memchr(m, 0, (size_t)n) ? 0 : n;
            else if (boolean) for (k = 0; k < n && m[k * step]; k++) {}
            else for (k = 0; k < n && ((const REAL *)m)[k * step] == NEGATIVE_INFINITY; k++) {}
        }
        if (k == n) return 1;
    }
    return 0;
}

/* Which of n <= 32 bytes, `step` apart, are not 0: one bit each. before: bytes that may be read ahead of m. */
static inline uint32_t FMHA_NAME(bits_of)(const char *m, ptrdiff_t step, ptrdiff_t n, ptrdiff_t before)
{
    uint32_t bits = 0;
#if defined(X86_OP)
    ptrdiff_t back = 32 - n;
    if (step == 1 && back <= before) {
#if FMHA_VECTOR_BYTES >= 32
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(m - back));
        bits = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256()));
#else
        __m128i low = _mm_loadu_si128((const __m128i *)(m - back)), high = _mm_loadu_si128((const __m128i *)(m - back + 16));
        bits = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(low, _mm_setzero_si128()));
        bits = ~(bits | (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(high, _mm_setzero_si128())) << 16);
#endif
        return bits >> back;
    }
#endif
    (void)before;
    for (ptrdiff_t k = 0; k < n; k++) bits |= (uint32_t)(m[k * step] != 0) << k;
    return bits;
}

/* A boolean mask on keys [low, high) of one vector of rows of the tile's scores^T: 32 keys of a row are the bits of its lane. */
static void FMHA_NAME(mask_boolean)(const fmha_array *mask, const FMHA_NAME(rows) *block, ptrdiff_t v, ptrdiff_t j, ptrdiff_t low,
                                    ptrdiff_t high, REAL *s)
{
    ptrdiff_t step = mask->stride[3], rows = block->rows - v * LANES < LANES ? block->rows - v * LANES : LANES;
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (ptrdiff_t k = low; k < high; k += 32) {
        ptrdiff_t n = high - k < 32 ? high - k : 32;
        INT lanes[LANES] = {0}, any = 0;
        for (ptrdiff_t l = 0; l < rows; l++)
            any |= lanes[l] = (INT)FMHA_NAME(bits_of)(FMHA_NAME(mask_row_at)(mask, block, v * LANES + l, j + k, 1), step, n, k - low);
        if (!any) continue;
        IVEC bits = i_load(lanes);
        REAL *to = s + k * block->queries + v * LANES;
        for (ptrdiff_t e = 0; e < n; e++, to += block->queries)
            v_store(to, v_select(v_truth((bits & i_splat((INT)((uint32_t)1 << e))) != 0), gone, v_load(to)));
    }
}

/* An additive mask there: squares of LANES rows and keys are transposed in registers, what is left over goes one by one. */
static void FMHA_NAME(mask_additive)(const fmha_array *mask, const FMHA_NAME(rows) *block, ptrdiff_t v, ptrdiff_t j, ptrdiff_t low,
                                     ptrdiff_t high, REAL *s)
{
    ptrdiff_t queries = block->queries, step = mask->stride[3], q = v * LANES, k = low;
    ptrdiff_t rows = block->rows - q < LANES ? block->rows - q : LANES;
    const REAL *row[LANES];
    for (ptrdiff_t l = 0; l < rows; l++) row[l] = (const REAL *)FMHA_NAME(mask_row_at)(mask, block, q + l, j, sizeof(REAL));
#if HAVE_TRANSPOSE
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (; rows == LANES && step == 1 && k + LANES <= high; k += LANES) {
        VEC part[LANES];
#pragma GCC unroll 16
        for (ptrdiff_t l = 0; l < LANES; l++) part[l] = v_load(row[l] + k);
        FMHA_NAME(transpose)(part);
#pragma GCC unroll 16
        for (ptrdiff_t l = 0; l < LANES; l++) {
            REAL *to = s + (k + l) * queries + q;
            v_store(to, v_select(v_equal(part[l], gone), gone, v_load(to) + part[l]));
        }
    }
#endif
    for (ptrdiff_t l = 0; l < rows; l++)
        for (ptrdiff_t e = k; e < high; e++) {
            REAL *to = s + e * queries + q + l, add = row[l][e * step];
            *to = add == NEGATIVE_INFINITY ? add : *to + add;
        }
}

/* scores^T (keys, queries), of each vector of rows the keys of its span: softcap, additive mask, then -inf where a pair is
 * removed. slope, if given, gets the derivative of the softcap. */
static void FMHA_NAME(mask_tile)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t j, REAL *s, REAL *slope)
{
    ptrdiff_t queries = block->queries;
    const ptrdiff_t *add_stride = p->additive_mask.stride, *remove_stride = p->bool_mask.stride;
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (ptrdiff_t v = 0; v < queries / LANES; v++) {
        ptrdiff_t low = block->low[v], high = block->high[v];
        REAL *column = s + v * LANES;
        if (p->softcap != 0) {
            for (ptrdiff_t k = low; k < high; k++) {
                VEC t, capped = FMHA_NAME(soft_capped)(v_load(column + k * queries), p->softcap, &t);
                v_store(column + k * queries, capped);
                if (slope) v_store(slope + k * queries + v * LANES, v_splat(1) - t * t);
            }
        }
        if (p->additive_mask.data && (add_stride[1] || add_stride[2])) {
            FMHA_NAME(mask_additive)(&p->additive_mask, block, v, j, low, high, s);
        } else if (p->additive_mask.data) {
            const REAL *m = (const REAL *)FMHA_NAME(mask_row_at)(&p->additive_mask, block, 0, j, sizeof(REAL));
            for (ptrdiff_t k = low; k < high; k++) {
                VEC add = v_splat(m[k * add_stride[3]]);
                v_store(column + k * queries, v_select(v_equal(add, gone), gone, v_load(column + k * queries) + add));
            }
        }
        if (p->bool_mask.data && (remove_stride[1] || remove_stride[2])) {
            FMHA_NAME(mask_boolean)(&p->bool_mask, block, v, j, low, high, s);
        } else if (p->bool_mask.data) {
            const char *m = FMHA_NAME(mask_row_at)(&p->bool_mask, block, 0, j, 1);
            for (ptrdiff_t k = low; k < high; k++)
                if (m[k * remove_stride[3]]) v_store(column + k * queries, gone);
        }
        ptrdiff_t inner = block->all0[v] - j, outer = block->all1[v] - j;     /* rows differ before inner and from outer on */
        if (inner <= low && outer >= high) continue;
        INT from[LANES], to[LANES];
        for (ptrdiff_t l = 0; l < LANES; l++) {
            ptrdiff_t row0 = block->row0[v * LANES + l] - j, row1 = block->row1[v * LANES + l] - j;
            from[l] = (INT)(row0 < low ? low : row0 > high ? high : row0);
            to[l] = (INT)(row1 < low ? low : row1 > high ? high : row1);
        }
        IVEC first = i_load(from), last = i_load(to);
        for (ptrdiff_t k = low; k < high; k++) {
            if (k >= inner && k < outer) {
                k = outer - 1;
                continue;
            }
            v_store(column + k * queries, v_select(i_within(first, i_splat(k), last), v_load(column + k * queries), gone));
        }
    }
}

/* scores^T (keys, queries) <- x (keys, depth) @ packed^T (depth, queries); banded: the spans alone. */
static void FMHA_NAME(product_scores)(const FMHA_NAME(rows) *block, int banded, ptrdiff_t n, ptrdiff_t depth, const REAL *x, ptrdiff_t ldx,
                                      const REAL *packed, REAL *s)
{
    ptrdiff_t queries = block->queries, k = 0, count = 0, v0 = 0, v1 = 0;
    if (!banded) FMHA_NAME(product_rows)(n, queries, depth, x, ldx, packed, queries, s, queries);
    while (banded && FMHA_NAME(next_run)(block, n, &k, &count, &v0, &v1))
        FMHA_NAME(product_rows)(count, (v1 - v0) * LANES, depth, x + k * ldx, ldx, packed + v0 * LANES, queries,
                                s + k * queries + v0 * LANES, queries);
}

/* The pool lets subnormal operands count as 0; but a float32 that is converted to float64 as it is loaded counts. */
static inline void FMHA_NAME(begin_item)(const fmha_problem *p)
{
    if (FMHA_REAL == 64 && p->stored != FMHA_SAME) fmha_keep_subnormal_operands();
}

static inline void FMHA_NAME(set_control)(const fmha_problem *p)
{
    fmha_flush_subnormals();
    FMHA_NAME(begin_item)(p);
}

/* scores^T (keys, queries) <- lift * (k (keys, D) @ packed^T (D, queries)); lift NULL: 1. With a row as large as LARGE_POWER, keys
 * below the smallest normal number count. */
static inline void FMHA_NAME(tile_scores)(const fmha_problem *p, const FMHA_NAME(rows) *block, int banded, ptrdiff_t n, const REAL *keys, ptrdiff_t ld,
                                          const REAL *packed, const REAL *lift, REAL *s)
{
    if (lift) fmha_keep_subnormal_operands();
    FMHA_NAME(product_scores)(block, banded, n, p->D, keys, ld, packed, s);
    if (!lift) return;
    FMHA_NAME(set_control)(p);
    for (ptrdiff_t v = 0; v < block->queries / LANES; v++) {
        VEC factor = v_load(lift + v * LANES);
        for (ptrdiff_t k = block->low[v]; k < block->high[v]; k++) {
            REAL *at = s + k * block->queries + v * LANES;
            v_store(at, v_load(at) * factor);
        }
    }
}

/* Whether row r of the block may not attend key j; factor: what the pair has in the product, 0 if it is removed, but not only then
 * (and anything where a band leaves it out of the tile's work). */
static inline int FMHA_NAME(pair_removed)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t r, ptrdiff_t j, REAL factor)
{
    if (j < block->row0[r] || j >= block->row1[r]) return 1;
    if (factor != 0 || (!p->bool_mask.data && !p->additive_mask.data)) return 0;
    fmha_block pair = {.b = block->b, .h = block->head[r]};
    return FMHA_NAME(removed)(p, &pair, block->query[r], j);
}

/* The contributions of non-finite rows of x to a product over a tile, allowed pairs only, one pair after the other.
 * c[r, :] += a[j, r] * x[j, :]. */
static void FMHA_NAME(tile_nonfinite)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, const REAL *a,
                                      const REAL *x, ptrdiff_t ldx, ptrdiff_t width, REAL *c, ptrdiff_t ldc)
{
    unsigned char done[BLOCK_ROWS] = {0};       /* rows of c that are NaN throughout: nothing changes them */
    unsigned char met[BLOCK_ROWS] = {0};        /* kinds that rows of c have met of rows like `like` */
    const REAL *like = NULL;
    for (ptrdiff_t k = 0; k < n; k++) {
        const REAL *row = x + k * ldx;
        if (FMHA_NAME(all_finite)(1, width, row, ldx)) continue;
        int ask = FMHA_NAME(has_nan)(width, row);
        if (!like || !FMHA_NAME(same_nonfinite)(width, row, like)) {
            like = row;
            memset(met, 0, sizeof met);
        }
        for (ptrdiff_t r = 0; r < block->rows; r++) {
            REAL factor = a[k * block->queries + r];
            int kind = FMHA_NAME(kind_of)(factor);
            if (done[r] || met[r] & (kind | FMHA_NAME(undefined)) || FMHA_NAME(pair_removed)(p, block, r, j + k, factor)) continue;
            done[r] = (unsigned char)FMHA_NAME(add_nonfinite_row)(width, factor, row, c + r * ldc, ask);
            met[r] |= (unsigned char)kind;
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------- forward */

/* Scratch of one thread, in REALs: packed^T (D, queries), scores^T (keys, queries), out (queries, value width), values
 * (keys, value width) where they must be copied, four vectors of queries, keys or values where they must be converted. */
static ptrdiff_t FMHA_NAME(forward_scratch)(const fmha_problem *p)
{
    ptrdiff_t value_width = ROUND_UP(p->Dv, LANES);
    return (p->D + TILE_KEYS + value_width + 4) * BLOCK_ROWS + TILE_KEYS * value_width + FMHA_NAME(computed_scratch)(p, TILE_KEYS);
}

/* Online softmax of `vectors` columns of queries: s <- exp(s - peak), peak and total kept up to date; scale gets what all
 * that was summed before must be multiplied by. */
static inline __attribute__((always_inline)) void FMHA_NAME(softmax_columns)(const int vectors, ptrdiff_t n, ptrdiff_t ld, REAL *s,
                                                                             REAL *peak, REAL *total, REAL *scale)
{
    VEC shift[MICRO_VECTORS], sum[MICRO_VECTORS][2];       /* even and odd keys apart: shorter sums err less */
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) shift[v] = v_load(peak + v * LANES);
    for (ptrdiff_t k = 0; k < n; k++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            VEC score = v_load(s + k * ld + v * LANES);
            shift[v] = v_max(score, shift[v]);
        }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        VEC before = v_load(peak + v * LANES);
        v_store(peak + v * LANES, shift[v]);
        shift[v] = v_select(v_equal(shift[v], v_splat(NEGATIVE_INFINITY)), v_splat(0), shift[v]);
        VEC shrink = FMHA_NAME(exp)(before - shift[v]);
        v_store(scale + v * LANES, shrink);
        v_store(total + v * LANES, v_load(total + v * LANES) * shrink);
        sum[v][0] = sum[v][1] = v_splat(0);
    }
    for (ptrdiff_t k = 0; k < n; k += 2)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                if (k + odd == n) break;
                REAL *at = s + (k + odd) * ld + v * LANES;
                VEC e = FMHA_NAME(exp)(v_load(at) - shift[v]);
                v_store(at, e);
                sum[v][odd] = sum[v][odd] + e;
            }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
        v_store(total + v * LANES, v_load(total + v * LANES) + (sum[v][0] + sum[v][1]));
}

/* Of all vectors of rows; of each the keys of its span alone where banded. */
static __attribute__((noinline)) void FMHA_NAME(softmax_block)(const FMHA_NAME(rows) *block, int banded, ptrdiff_t n, REAL *s, REAL *peak,
                                                               REAL *total, REAL *scale)
{
    ptrdiff_t queries = block->queries;
    for (ptrdiff_t q = 0; banded && q < queries; q += LANES) {
        ptrdiff_t low = block->low[q / LANES], high = block->high[q / LANES];
        if (low < high)
            FMHA_NAME(softmax_columns)(1, high - low, queries, s + low * queries + q, peak + q, total + q, scale + q);
    }
    if (banded) return;
    for (ptrdiff_t q = 0; q < queries; q += MICRO_VECTORS * LANES) {
        ptrdiff_t vectors = (queries - q) / LANES;
        if (vectors >= MICRO_VECTORS)
            FMHA_NAME(softmax_columns)(MICRO_VECTORS, n, queries, s + q, peak + q, total + q, scale + q);
        else
            for (ptrdiff_t v = 0; v < vectors; v++)
                FMHA_NAME(softmax_columns)(1, n, queries, s + q + v * LANES, peak + q + v * LANES, total + q + v * LANES,
                                           scale + q + v * LANES);
    }
}

/* What a pass over a block's keys is for, beside the ordinary one. */
enum {
    FMHA_NAME(careful) = 1,     /* the firewall: zeros for what is not finite in partly removed tiles, and the allowed pairs added */
    FMHA_NAME(reduced) = 2,     /* probabilities so small that no sum of finite values overflows */
    FMHA_NAME(raised) = 4       /* values times SUBNORMAL_LIFT */
};
/* What it found. */
enum { FMHA_NAME(finite) = 1, FMHA_NAME(partly) = 2 };      /* the sums are finite; some tile was touched by masks or ranges */

/* The factor that makes sums over all keys finite. */
static inline REAL FMHA_NAME(reduction)(const fmha_problem *p)
{
    REAL factor = (REAL)0.5;
    for (ptrdiff_t n = 1; n < p->Lk; n *= 2) factor /= 2;
    return factor;
}

/* One block against all its keys. */
static int FMHA_NAME(forward_block)(const fmha_tiled *t, FMHA_NAME(rows) *block, REAL *scratch, int purpose)
{
    const fmha_problem *p = &t->p;
    ptrdiff_t queries = block->queries, value_width = block->value_width, ld, ldv;
    REAL *packed = scratch, *s = packed + p->D * BLOCK_ROWS, *out = s + TILE_KEYS * BLOCK_ROWS;
    REAL *peak = out + value_width * BLOCK_ROWS, *total = peak + BLOCK_ROWS, *scale = total + BLOCK_ROWS, *lift = scale + BLOCK_ROWS;
    REAL *copy = lift + BLOCK_ROWS, *converted = copy + TILE_KEYS * value_width;
    if (!FMHA_NAME(pack_queries)(p, block, packed, lift)) lift = NULL;
    for (ptrdiff_t q = 0; q < queries; q++) {
        peak[q] = NEGATIVE_INFINITY;
        total[q] = 0;
    }
    memset(out, 0, (size_t)(queries * value_width) * sizeof(REAL));
    int partly = 0;
    /* The grid of tiles starts at key 0 whatever the block, so that a row meets the same tiles in any company. */
    for (ptrdiff_t start = block->j0 / TILE_KEYS * TILE_KEYS; start < block->j1 && !fmha_pool_stopped(); start += TILE_KEYS) {
        /* Keys before j0 are left out; an even number of them, or the sums of even and odd keys would change places. */
        ptrdiff_t j = start < block->j0 ? block->j0 / 2 * 2 : start;
        ptrdiff_t n = (block->j1 < start + TILE_KEYS ? block->j1 : start + TILE_KEYS) - j;
        int touched = FMHA_NAME(touched)(p, block, j, n), banded = 0, careful = touched && (purpose & FMHA_NAME(careful));
        if (touched && FMHA_NAME(tile_removed)(p, block, j, n)) continue;
        partly |= touched;
        const REAL *keys = FMHA_NAME(computed_rows)(p, &p->k, block->b, block->hkv, j, n, p->D, converted, &ld);
        /* scores^T (keys, queries) <- k (keys, D) @ (scale * q)^T (D, queries) */
        FMHA_NAME(tile_scores)(p, block, FMHA_NAME(set_spans)(block, j, n, GRANULE), n, keys, ld, packed, lift, s);
        /* Where a band ends in the tile, each vector of rows works on its own keys: from an even one on, as above. */
        if (touched || p->softcap != 0) {
            banded = FMHA_NAME(set_spans)(block, j, n, 2);
            FMHA_NAME(mask_tile)(p, block, j, s, NULL);
        }
        FMHA_NAME(softmax_block)(block, banded, n, s, peak, total, scale);
        if (purpose & FMHA_NAME(reduced)) {
            REAL factor = FMHA_NAME(reduction)(p);
            for (ptrdiff_t e = 0; e < n * queries; e += LANES) v_store(s + e, v_load(s + e) * factor);
        }
        /* out (queries, Dv) <- scale * out + probabilities^T (keys, queries)^T @ v (keys, Dv) */
        const REAL *values = FMHA_NAME(computed_rows)(p, &p->v, block->b, block->hkv, j, n, p->Dv, converted, &ld), *rows = copy;
        ldv = value_width;
        if (purpose & FMHA_NAME(raised)) {
            memset(copy, 0, (size_t)(n * value_width) * sizeof(REAL));
            FMHA_NAME(lift_rows)(n, p->Dv, values, ld, copy, value_width);
        } else {
            rows = FMHA_NAME(whole_rows)(values, ld, n, p->Dv, !careful, copy, &ldv);
        }
        if (!banded) FMHA_NAME(product_columns)(block->rows, value_width, n, s, queries, rows, ldv, out, value_width, scale);
        for (ptrdiff_t q = 0; banded && q < block->rows; q += LANES) {
            ptrdiff_t low = block->low[q / LANES], many = block->high[q / LANES] - low;
            ptrdiff_t own = block->rows - q < LANES ? block->rows - q : LANES;
            if (many) FMHA_NAME(product_columns)(own, value_width, many, s + low * queries + q, queries, rows + low * ldv, ldv,
                                                 out + q * value_width, value_width, scale + q);
        }
        if (careful) FMHA_NAME(tile_nonfinite)(p, block, j, n, s, values, ld, p->Dv, out, value_width);
    }
    int finite = FMHA_NAME(all_finite)(block->rows, p->Dv, out, value_width);
    return (finite ? FMHA_NAME(finite) : 0) | (partly ? FMHA_NAME(partly) : 0);
}

static inline void FMHA_NAME(write_lse)(const fmha_tiled *t, const FMHA_NAME(rows) *block, ptrdiff_t r, REAL peak, REAL total)
{
    if (!t->lse) return;
    REAL *lse = (REAL *)t->lse + (block->b * t->p.H + block->head[r]) * t->p.Lq + block->query[r];
    *lse = total == 0 ? NEGATIVE_INFINITY : (peak == NEGATIVE_INFINITY ? 0 : peak) + REAL_LOG(total);
}

static inline REAL *FMHA_NAME(out_row)(const fmha_tiled *t, const FMHA_NAME(rows) *block, ptrdiff_t r)
{
    return (REAL *)t->out.data + block->b * t->out.stride[0] + block->head[r] * t->out.stride[1] + block->query[r] * t->out.stride[2];
}

/* The block's rows of out and lse from its sums, in scratch where forward_block has left them. Returns which rows are tiny: a bit
 * each. */
static uint64_t FMHA_NAME(write_block)(const fmha_tiled *t, const FMHA_NAME(rows) *block, const REAL *scratch)
{
    const fmha_problem *p = &t->p;
    const REAL *out = scratch + (p->D + TILE_KEYS) * BLOCK_ROWS, *peak = out + block->value_width * BLOCK_ROWS;
    const REAL *total = peak + BLOCK_ROWS;
    uint64_t tiny = 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        REAL *to = FMHA_NAME(out_row)(t, block, r);
        FMHA_NAME(divided_row)(p->Dv, out + r * block->value_width, total[r], to);
        FMHA_NAME(write_lse)(t, block, r, peak[r], total[r]);
        if (FMHA_NAME(tiny_row)(p->Dv, to) && total[r] != 0) tiny |= (uint64_t)1 << r;
    }
    return tiny;
}

/* Of the values of the keys that the block attends: whether some finite one is so large that sums may overflow; or, where it is
 * not `large` that counts, whether one is not 0. */
static int FMHA_NAME(some_value)(const fmha_problem *p, const FMHA_NAME(rows) *block, int large, REAL *scratch)
{
    REAL *converted = scratch + (p->D + TILE_KEYS + block->value_width + 4) * BLOCK_ROWS + TILE_KEYS * block->value_width;
    for (ptrdiff_t j = block->j0, n; j < block->j1; j += n) {
        ptrdiff_t ld;
        n = block->j1 - j < TILE_KEYS ? block->j1 - j : TILE_KEYS;
        const REAL *values = FMHA_NAME(computed_rows)(p, &p->v, block->b, block->hkv, j, n, p->Dv, converted, &ld);
        if (large ? FMHA_NAME(exceeds)(n, p->Dv, values, ld, 1, LARGE_POWER) : FMHA_NAME(nonzero)(n, p->Dv, values, ld)) return 1;
    }
    return 0;
}

/* Sums of large finite values may overflow before the division: what is not finite in out again, with probabilities so small that
 * no sum can. What is finite already, and lse, stay as they are. */
static void FMHA_NAME(large_rows)(const fmha_tiled *t, FMHA_NAME(rows) *block, REAL *scratch)
{
    const fmha_problem *p = &t->p;
    if (!FMHA_NAME(some_value)(p, block, 1, scratch)) return;
    const REAL *out = scratch + (p->D + TILE_KEYS) * BLOCK_ROWS, *total = out + (block->value_width + 1) * BLOCK_ROWS;
    REAL factor = FMHA_NAME(reduction)(p);
    FMHA_NAME(forward_block)(t, block, scratch, FMHA_NAME(careful) | FMHA_NAME(reduced));
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        REAL *to = FMHA_NAME(out_row)(t, block, r);
        for (ptrdiff_t d = 0; d < p->Dv; d++)
            if (to[d] - to[d] != 0) to[d] = out[r * block->value_width + d] / total[r] / factor;
    }
}

/* The tiny rows again, from values so much larger that nothing of them is lost. */
static void FMHA_NAME(tiny_rows)(const fmha_tiled *t, FMHA_NAME(rows) *block, uint64_t tiny, REAL *scratch)
{
    const fmha_problem *p = &t->p;
    const REAL *out = scratch + (p->D + TILE_KEYS) * BLOCK_ROWS, *total = out + (block->value_width + 1) * BLOCK_ROWS;
    if (!FMHA_NAME(some_value)(p, block, 0, scratch)) return;
    FMHA_NAME(forward_block)(t, block, scratch, FMHA_NAME(careful) | FMHA_NAME(raised));
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (tiny >> r & 1) FMHA_NAME(lower_row)(p->Dv, out + r * block->value_width, total + r, FMHA_NAME(out_row)(t, block, r));
}

/* The block of rows that a forward item is. */
static void FMHA_NAME(item_rows)(const fmha_tiled *t, ptrdiff_t item, FMHA_NAME(rows) *block)
{
    const fmha_problem *p = &t->p;
    ptrdiff_t group_rows = p->H / p->Hkv * p->Lq, blocks = (group_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    ptrdiff_t first = (blocks - 1 - item % blocks) * BLOCK_ROWS;       /* the longest causal rows start first */
    ptrdiff_t rows = group_rows - first < BLOCK_ROWS ? group_rows - first : BLOCK_ROWS;
    FMHA_NAME(block_rows)(p, block, item / blocks / p->Hkv, item / blocks % p->Hkv, first, rows);
}

/* Item: one block of rows of one group. The firewall costs finite input nothing: only where a NaN or Inf shows in the
 * result is the block done again, with zeros for what is not finite in partly removed tiles and the allowed pairs added;
 * rows that attend none of it get the same bits as ever. */
static void FMHA_NAME(tiled_forward)(void *context, ptrdiff_t item, int worker)
{
    const fmha_tiled *t = context;
    REAL *scratch = (REAL *)(t->scratch + worker * t->scratch_size);
    FMHA_NAME(rows) block;
    FMHA_NAME(begin_item)(&t->p);
    FMHA_NAME(item_rows)(t, item, &block);
    int found = FMHA_NAME(forward_block)(t, &block, scratch, 0);
    if (!(found & FMHA_NAME(finite)) && found & FMHA_NAME(partly)) found = FMHA_NAME(forward_block)(t, &block, scratch, FMHA_NAME(careful));
    uint64_t tiny = FMHA_NAME(write_block)(t, &block, scratch);
    if (!(found & FMHA_NAME(finite))) FMHA_NAME(large_rows)(t, &block, scratch);
    if (tiny) FMHA_NAME(tiny_rows)(t, &block, tiny, scratch);
}

/* ------------------------------------------------------------------------------------------- forward with the weights */

/* Scratch of one thread, in REALs, for tiled_weights: all scores of a block are kept, O(L) a thread. */
static ptrdiff_t FMHA_NAME(weights_scratch)(const fmha_problem *p)
{
    ptrdiff_t value_width = ROUND_UP(p->Dv, LANES);
    ptrdiff_t own = (p->D + p->Lk + value_width + 4) * BLOCK_ROWS + p->Lk * value_width + FMHA_NAME(computed_scratch)(p, p->Lk);
    ptrdiff_t forward = FMHA_NAME(forward_scratch)(p);      /* of tiny_rows */
    return own > forward ? own : forward;
}

/* weights[r, j0 : j0 + n] <- column r of probabilities^T (n, queries), zeros at the other keys. */
static void FMHA_NAME(write_weights)(const fmha_tiled *t, const FMHA_NAME(rows) *block, ptrdiff_t n, const REAL *s)
{
    const fmha_problem *p = &t->p;
    for (ptrdiff_t q = 0; q < block->rows; q += LANES) {
        REAL *row[LANES];
        ptrdiff_t rows = block->rows - q < LANES ? block->rows - q : LANES, k = 0;
        for (ptrdiff_t l = 0; l < rows; l++) {
            REAL *to = (REAL *)t->weights + ((block->b * p->H + block->head[q + l]) * p->Lq + block->query[q + l]) * p->Lk;
            FMHA_NAME(fill)(block->j0, to, 0);
            FMHA_NAME(fill)(p->Lk - block->j1, to + block->j1, 0);
            row[l] = to + block->j0;
        }
#if HAVE_TRANSPOSE
        for (; rows == LANES && k + LANES <= n; k += LANES) {
            VEC part[LANES];
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; l < LANES; l++) part[l] = v_load(s + (k + l) * block->queries + q);
            FMHA_NAME(transpose)(part);
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; l < LANES; l++) v_store(row[l] + k, part[l]);
        }
#endif
        for (; k < n; k++)
            for (ptrdiff_t l = 0; l < rows; l++) row[l][k] = s[k * block->queries + q + l];
    }
}

/* As tiled_forward, with the weights (B, H, Lq, Lk) written out: the softmax runs over all keys of a block at once. */
static void FMHA_NAME(tiled_weights)(void *context, ptrdiff_t item, int worker)
{
    const fmha_tiled *t = context;
    const fmha_problem *p = &t->p;
    FMHA_NAME(rows) block;
    FMHA_NAME(begin_item)(p);
    FMHA_NAME(item_rows)(t, item, &block);
    ptrdiff_t queries = block.queries, value_width = block.value_width, ldk, ldv, ld;
    ptrdiff_t j0 = block.j0, n = block.j1 - block.j0;
    REAL *packed = (REAL *)(t->scratch + worker * t->scratch_size), *s = packed + p->D * BLOCK_ROWS, *out = s + p->Lk * BLOCK_ROWS;
    REAL *peak = out + value_width * BLOCK_ROWS, *total = peak + BLOCK_ROWS, *scale = total + BLOCK_ROWS, *lift = scale + BLOCK_ROWS;
    REAL *copy = lift + BLOCK_ROWS, *converted = copy + p->Lk * value_width;
    const REAL *keys = FMHA_NAME(computed_rows)(p, &p->k, block.b, block.hkv, j0, n, p->D, converted, &ldk);
    if (!FMHA_NAME(pack_queries)(p, &block, packed, lift)) lift = NULL;
    for (ptrdiff_t q = 0; q < queries; q++) {
        peak[q] = NEGATIVE_INFINITY;
        total[q] = 0;
    }
    int touched = FMHA_NAME(touched)(p, &block, j0, n);
    for (ptrdiff_t j = 0; j < n && !fmha_pool_stopped(); j += TILE_KEYS) {
        ptrdiff_t part = n - j < TILE_KEYS ? n - j : TILE_KEYS;
        for (ptrdiff_t v = 0; v < queries / LANES; v++) {
            block.low[v] = 0;
            block.high[v] = part;
        }
        /* scores^T (keys, queries) <- k (keys, D) @ (scale * q)^T (D, queries) */
        FMHA_NAME(tile_scores)(p, &block, 0, part, keys + j * ldk, ldk, packed, lift, s + j * queries);
        if (touched || p->softcap != 0) FMHA_NAME(mask_tile)(p, &block, j0 + j, s + j * queries, NULL);
    }
    FMHA_NAME(softmax_block)(&block, 0, n, s, peak, total, scale);
    for (ptrdiff_t q = 0; q < queries; q += LANES) {
        VEC inverse = v_splat(1) / v_load(total + q), zero = v_splat(0);
        for (ptrdiff_t k = 0; k < n; k++) {     /* what is 0 stays 0, also in empty rows and in rows with a NaN */
            VEC e = v_load(s + k * queries + q);
            v_store(s + k * queries + q, v_select(v_equal(e, zero), zero, e * inverse));
        }
    }
    FMHA_NAME(write_weights)(t, &block, n, s);
    const REAL *values = FMHA_NAME(computed_rows)(p, &p->v, block.b, block.hkv, j0, n, p->Dv, converted, &ldv);
    for (int careful = 0; careful < 2; careful++) {
        memset(out, 0, (size_t)(queries * value_width) * sizeof(REAL));
        /* out (queries, Dv) <- weights^T (keys, queries)^T @ v (keys, Dv) */
        const REAL *rows = FMHA_NAME(whole_rows)(values, ldv, n, p->Dv, !(careful && touched), copy, &ld);
        FMHA_NAME(product_columns_add)(block.rows, value_width, n, s, queries, rows, ld, out, value_width);
        if (careful && touched) FMHA_NAME(tile_nonfinite)(p, &block, j0, n, s, values, ldv, p->Dv, out, value_width);
        if (FMHA_NAME(all_finite)(block.rows, p->Dv, out, value_width)) break;
    }
    uint64_t tiny = 0;
    for (ptrdiff_t r = 0; r < block.rows; r++) {
        memcpy(FMHA_NAME(out_row)(t, &block, r), out + r * value_width, (size_t)p->Dv * sizeof(REAL));
        FMHA_NAME(write_lse)(t, &block, r, peak[r], total[r]);
        if (FMHA_NAME(tiny_row)(p->Dv, out + r * value_width) && total[r] != 0) tiny |= (uint64_t)1 << r;
    }
    if (tiny) FMHA_NAME(tiny_rows)(t, &block, tiny, (REAL *)(t->scratch + worker * t->scratch_size));
}

/* ------------------------------------------------------------------------------------------------------------ backward
 *
 * With lse saved: P^T = exp(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T - delta), delta_r = sum(dO_r * O_r).
 * Key tiles outside, query blocks inside; dQ is summed key tile after key tile, dK and dV block after block, so that one
 * pass over a head (mode FMHA_WHOLE) and two passes, over blocks for dQ and over key tiles for dK and dV, give the same
 * bits: the second way recomputes scores, for when there are fewer heads than threads.
 *
 * exp(S - lse) errs by the rounding of lse, and by what another algorithm's rounding of S has put into it: both grow with |lse|,
 * and where all scores of a row are one huge constant, lse has lost the number of keys. So a row whose |lse| is far from what
 * ordinary scores give has its own sums taken over all its keys first (own_sums): P = exp(S - peak) / total, and delta = sum(P dP).
 * Rows between, such as those of peaked scores, take lse, add up the P that come of it, and only where the sum is not 1 to the
 * rounding of lse are own sums taken and the work is done again. Each row decides by itself. */

#define FAR_LSE 8               /* beyond the log of the number of keys, or below 0: the sum of P is looked at */
#define HUGE_LSE 256            /* |lse| from where on no lse is taken; from FAR_LSE on where "decode" may have written it */

/* Packed operands of one block: q^T scaled (D, queries), grad_out^T (Dv, queries); of each row P = exp(score - shift) * inverse,
 * delta, the lift of its scores, and the sum of P so far. kind: of the block, a sum of BLOCK_... below. */
typedef struct {
    REAL *q, *grad_out, *shift, *inverse, *delta, *lift, *sum, *kind;
} FMHA_NAME(packed);

enum { FMHA_NAME(lifted_block) = 1, FMHA_NAME(far_block) = 2 };      /* lift is not 1; inverse may not be 1, and sum counts */

/* Scratch of one thread, in REALs; rows: of the packed operands and of grad_q that are kept at a time. */
static ptrdiff_t FMHA_NAME(backward_scratch)(const fmha_problem *p, int mode)
{
    ptrdiff_t width = ROUND_UP(p->D, LANES), value_width = ROUND_UP(p->Dv, LANES);
    ptrdiff_t rows = mode == FMHA_WHOLE ? ROUND_UP(p->H / p->Hkv * p->Lq, BLOCK_ROWS) + BLOCK_ROWS : BLOCK_ROWS;
    return rows * (p->D + p->Dv + width + 6)                    /* packed operands (with one kind a row), grad_q */
           + TILE_KEYS * BLOCK_ROWS * 3                         /* scores, grad_scores, slopes */
           + TILE_KEYS * (2 * width + value_width)              /* grad_k, copy of k; grad_v */
           + BLOCK_ROWS * (width + value_width);                /* copies of q and grad_out */
}

typedef struct {
    const fmha_tiled *t;
    REAL *scores, *grad_scores, *slopes, *grad_k, *grad_v, *copy_k, *copy_q, *copy_grad_out;
    REAL far_above;             /* lse beyond it is far */
    int few;                    /* the rows are so few that "decode" may have made their lse */
    int q_finite, k_finite, grad_out_finite;
} FMHA_NAME(backward);

static inline const REAL *FMHA_NAME(row_of)(const fmha_array *x, const FMHA_NAME(rows) *block, ptrdiff_t r)
{
    return (const REAL *)x->data + block->b * x->stride[0] + block->head[r] * x->stride[1] + block->query[r] * x->stride[2];
}

static inline ptrdiff_t FMHA_NAME(row_at)(const fmha_tiled *t, const FMHA_NAME(rows) *block, ptrdiff_t r)
{
    return (block->b * t->p.H + block->head[r]) * t->p.Lq + block->query[r];
}

/* Scores of n keys from j on, softcap and masks in them, and grad_weights, into w's scratch; returns whether a band leaves some
 * vector less than the whole tile, or -1 if masks remove all of it. */
static int FMHA_NAME(backward_scores)(const FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed, ptrdiff_t j,
                                      ptrdiff_t n, int *masked)
{
    const fmha_problem *p = &w->t->p;
    ptrdiff_t ldk = p->k.stride[2], ldv = p->v.stride[2];
    const REAL *k = (const REAL *)p->k.data + block->b * p->k.stride[0] + block->hkv * p->k.stride[1] + j * ldk;
    const REAL *v = (const REAL *)p->v.data + block->b * p->v.stride[0] + block->hkv * p->v.stride[1] + j * ldv;
    REAL *slope = p->softcap != 0 ? w->slopes : NULL;
    int touched = FMHA_NAME(touched)(p, block, j, n);
    *masked = touched || slope;
    if (touched && FMHA_NAME(tile_removed)(p, block, j, n)) return -1;
    int banded = FMHA_NAME(set_spans)(block, j, n, GRANULE);
    /* scores^T (keys, queries) <- k (keys, D) @ (scale * q)^T (D, queries) */
    FMHA_NAME(tile_scores)(p, block, banded, n, k, ldk, packed->q, (int)*packed->kind & FMHA_NAME(lifted_block) ? packed->lift : NULL,
                           w->scores);
    /* grad_weights^T (keys, queries) <- v (keys, Dv) @ grad_out^T (Dv, queries) */
    FMHA_NAME(product_scores)(block, banded, n, p->Dv, v, ldv, packed->grad_out, w->grad_scores);
    if (*masked) FMHA_NAME(mask_tile)(p, block, j, w->scores, slope);
    return banded;
}

/* Of the rows chosen: P by their own peak and total, delta by their own P; unless lse was taken over more keys than these. */
static void FMHA_NAME(own_sums)(const FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed, const char *chosen)
{
    const fmha_tiled *t = w->t;
    ptrdiff_t queries = block->queries;
    REAL peak[BLOCK_ROWS], total[BLOCK_ROWS], delta[BLOCK_ROWS];
    for (ptrdiff_t q = 0; q < queries; q++) {
        peak[q] = NEGATIVE_INFINITY;
        total[q] = delta[q] = 0;
    }
    for (ptrdiff_t j = block->j0 / TILE_KEYS * TILE_KEYS, n; j < block->j1; j += n) {
        ptrdiff_t low = j < block->j0 ? block->j0 : j;
        n = TILE_KEYS;
        int masked, many = (int)((block->j1 < j + n ? block->j1 : j + n) - low);
        if (FMHA_NAME(backward_scores)(w, block, packed, low, many, &masked) < 0) continue;
        for (ptrdiff_t v = 0; v < queries / LANES; v++) {
            const REAL *s = w->scores + v * LANES, *g = w->grad_scores + v * LANES;
            VEC before = v_load(peak + v * LANES), best = before, zero = v_splat(0), gone = v_splat(NEGATIVE_INFINITY);
            for (ptrdiff_t k = block->low[v]; k < block->high[v]; k++) {
                VEC score = v_load(s + k * queries);
                best = v_max(score, best);
            }
            VEC shift = v_select(v_equal(best, gone), zero, best), shrink = FMHA_NAME(exp)(before - shift);
            VEC sum = v_load(total + v * LANES) * shrink, weighted = v_load(delta + v * LANES) * shrink;
            for (ptrdiff_t k = block->low[v]; k < block->high[v]; k++) {
                VEC score = v_load(s + k * queries), e = FMHA_NAME(exp)(score - shift);
                sum = sum + e;
                weighted = v_select(v_equal(score, gone), weighted, weighted + e * v_load(g + k * queries));
            }
            v_store(peak + v * LANES, best);
            v_store(total + v * LANES, sum);
            v_store(delta + v * LANES, weighted);
        }
    }
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        REAL lse = ((const REAL *)t->lse)[FMHA_NAME(row_at)(t, block, r)], shift = peak[r] == NEGATIVE_INFINITY ? 0 : peak[r];
        if (!chosen[r] || FMHA_NAME(of_more_keys)(lse, shift + REAL_LOG(total[r]))) continue;
        packed->shift[r] = shift;
        packed->inverse[r] = 1 / total[r];
        packed->delta[r] = delta[r] / total[r];
    }
}

static inline int FMHA_NAME(is_far)(const FMHA_NAME(backward) *w, REAL lse)
{
    return (lse > w->far_above || lse < -FAR_LSE) && lse - lse == 0;
}

/* The packed operands and the state of each row; known: from a pass over blocks before. */
static void FMHA_NAME(prepare_block)(const FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *to, int known)
{
    const fmha_tiled *t = w->t;
    const fmha_problem *p = &t->p;
    char own[BLOCK_ROWS] = {0};
    int kind = FMHA_NAME(pack_queries)(p, block, to->q, to->lift) ? FMHA_NAME(lifted_block) : 0, any = 0;
    FMHA_NAME(pack_transposed)(block, &t->grad_out, p->Dv, to->grad_out);
    for (ptrdiff_t r = 0; r < block->queries; r++) {
        to->shift[r] = (REAL)INFINITY;        /* exp(score - inf) = 0: empty rows and lanes beyond the rows */
        to->inverse[r] = 1;
        to->delta[r] = to->sum[r] = 0;
        if (r >= block->rows) continue;
        if (known) {
            const REAL *state = (const REAL *)t->row_states + FMHA_NAME(row_at)(t, block, r) * FMHA_ROW_STATE;      /* shift, inverse, delta */
            to->shift[r] = state[0];
            to->inverse[r] = state[1];
            to->delta[r] = state[2];
            if (state[1] != 1) kind |= FMHA_NAME(far_block);
            continue;
        }
        REAL lse = ((const REAL *)t->lse)[FMHA_NAME(row_at)(t, block, r)];
        if (lse != NEGATIVE_INFINITY) to->shift[r] = lse;
        if (FMHA_NAME(is_far)(w, lse)) {
            kind |= FMHA_NAME(far_block);
            any |= own[r] = (char)(w->few || lse > HUGE_LSE || lse < -HUGE_LSE);
        }
        const REAL *g = FMHA_NAME(row_of)(&t->grad_out, block, r), *o = FMHA_NAME(row_of)(&t->out, block, r);
        VEC sum = v_splat(0);
        for (ptrdiff_t d = 0; d < p->Dv; d += LANES) sum = sum + v_load_n(g + d, p->Dv - d, 0) * v_load_n(o + d, p->Dv - d, 0);
        to->delta[r] = FMHA_NAME(sum)(sum);
    }
    *to->kind = (REAL)kind;
    if (any) FMHA_NAME(own_sums)(w, block, to, own);
}

/* After a far block has met all its keys: far rows whose P do not add up to 1 within the rounding of lse get own sums. Returns
 * whether there were some: the work must be done again. */
static int FMHA_NAME(mended)(const FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed)
{
    const fmha_tiled *t = w->t;
    char own[BLOCK_ROWS] = {0};
    int any = 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        REAL lse = ((const REAL *)t->lse)[FMHA_NAME(row_at)(t, block, r)], apart = packed->sum[r] - 1;
        int exponent;
        frexp((double)lse, &exponent);
        if (w->few || !FMHA_NAME(is_far)(w, lse) || lse > HUGE_LSE || lse < -HUGE_LSE) continue;       /* own sums already */
        if (REAL_LOG(packed->sum[r]) < -16 * REAL_EPSILON * (1 + (lse < 0 ? -lse : lse))) continue;     /* lse is of more keys */
        /* Half a unit in the last place of lse, and of sum. */
        REAL slack = REAL_EPSILON * (4 + (REAL)ldexp(0.375, exponent));
        any |= own[r] = (char)(apart > slack || apart < -slack);
        packed->sum[r] = 0;
    }
    if (any) FMHA_NAME(own_sums)(w, block, packed, own);
    return any;
}

/* The block's rows of x (q or grad_out) as rows of whole vectors: where they lie if they are one head's, or copied. */
static const REAL *FMHA_NAME(block_matrix)(const fmha_array *x, const FMHA_NAME(rows) *block, ptrdiff_t width, int finite, REAL *copy,
                                           ptrdiff_t *ld)
{
    ptrdiff_t whole = ROUND_UP(width, LANES);
    if (finite && whole == width && block->head[0] == block->head[block->rows - 1]) {
        *ld = x->stride[2];
        return FMHA_NAME(row_of)(x, block, 0);
    }
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        const REAL *row = FMHA_NAME(row_of)(x, block, r);
        for (ptrdiff_t d = 0; d < width; d++) copy[r * whole + d] = finite || row[d] - row[d] == 0 ? row[d] : 0;
        for (ptrdiff_t d = width; d < whole; d++) copy[r * whole + d] = 0;
    }
    *ld = whole;
    return copy;
}

/* c[k, :] += a[k, r] * x_r for the non-finite rows x_r of the block, allowed pairs only. */
static void FMHA_NAME(rows_nonfinite)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, const REAL *a,
                                      const fmha_array *x, ptrdiff_t width, REAL *c, ptrdiff_t ldc)
{
    unsigned char done[TILE_KEYS] = {0}, met[TILE_KEYS] = {0};      /* as in tile_nonfinite */
    const REAL *like = NULL;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        const REAL *row = FMHA_NAME(row_of)(x, block, r);
        if (FMHA_NAME(all_finite)(1, width, row, width)) continue;
        int ask = FMHA_NAME(has_nan)(width, row);
        if (!like || !FMHA_NAME(same_nonfinite)(width, row, like)) {
            like = row;
            memset(met, 0, sizeof met);
        }
        for (ptrdiff_t k = 0; k < n; k++) {
            REAL factor = a[k * block->queries + r];
            int kind = FMHA_NAME(kind_of)(factor);
            if (done[k] || met[k] & (kind | FMHA_NAME(undefined)) || FMHA_NAME(pair_removed)(p, block, r, j + k, factor)) continue;
            done[k] = (unsigned char)FMHA_NAME(add_nonfinite_row)(width, factor, row, c + k * ldc, ask);
            met[k] |= (unsigned char)kind;
        }
    }
}

/* scores -> P^T, grad_scores -> dS^T. masked: what is removed (-inf) gives exactly 0, whatever shift, dP and delta are. far: with
 * the factor inverse, 1 but for own sums, and the sum of P. */
static inline __attribute__((always_inline)) void FMHA_NAME(gradient_columns)(
    const int vectors, const int masked, const int far, ptrdiff_t n, ptrdiff_t ld, REAL *s, REAL *g, const REAL *slope,
    const FMHA_NAME(packed) *rows, ptrdiff_t first)
{
    VEC shift[MICRO_VECTORS], delta[MICRO_VECTORS], inverse[MICRO_VECTORS], sum[MICRO_VECTORS];
    VEC gone = v_splat(NEGATIVE_INFINITY), zero = v_splat(0);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        shift[v] = v_load(rows->shift + first + v * LANES);
        delta[v] = v_load(rows->delta + first + v * LANES);
        if (far) inverse[v] = v_load(rows->inverse + first + v * LANES);
        if (far) sum[v] = zero;
    }
    for (ptrdiff_t k = 0; k < n; k++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            ptrdiff_t at = k * ld + v * LANES;
            VEC score = v_load(s + at), y = FMHA_NAME(exp)(score - shift[v]);
            if (far) y = y * inverse[v];
            VEC d = y * (v_load(g + at) - delta[v]);
            if (masked) {
                IVEC removed = v_equal(score, gone);
                y = v_select(removed, zero, y);
                if (slope) d = d * v_load(slope + at);
                d = v_select(removed, zero, d);
            }
            if (far) sum[v] = sum[v] + y;
            v_store(s + at, y);
            v_store(g + at, d);
        }
#pragma GCC unroll 4
    for (int v = 0; far && v < vectors; v++)
        v_store(rows->sum + first + v * LANES, v_load(rows->sum + first + v * LANES) + sum[v]);
}

/* sums (keys, width) <- sums + a (keys, queries) @ x (queries, width); banded: the spans alone, zeros where a vector of rows
 * is not at work among others that are. */
static void FMHA_NAME(product_keys)(const FMHA_NAME(rows) *block, int banded, ptrdiff_t n, REAL *a, const REAL *x, ptrdiff_t ldx,
                                    ptrdiff_t width, REAL *sums)
{
    ptrdiff_t queries = block->queries, k = 0, count = 0, v0 = 0, v1 = 0;
    if (!banded) FMHA_NAME(product_rows_add)(n, width, block->rows, a, queries, x, ldx, sums, width);
    while (banded && FMHA_NAME(next_run)(block, n, &k, &count, &v0, &v1)) {
        for (ptrdiff_t v = v0; v < v1; v++)
            for (ptrdiff_t e = k; e < k + count; e++)
                if (e < block->low[v] || e >= block->high[v]) v_store(a + e * queries + v * LANES, v_splat(0));
        ptrdiff_t depth = (v1 * LANES < block->rows ? v1 * LANES : block->rows) - v0 * LANES;
        FMHA_NAME(product_rows_add)(count, width, depth, a + k * queries + v0 * LANES, queries, x + v0 * LANES * ldx, ldx,
                                    sums + k * width, width);
    }
}

/* One block of queries against n keys of a tile, from key j: adds to grad_v (n, Dv), grad_k (n, D), grad_q (rows, D), the
 * latter two without the factor scale; NULL where not wanted. */
static void FMHA_NAME(pair)(const FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed, ptrdiff_t j,
                            ptrdiff_t n, REAL *grad_k, REAL *grad_v, REAL *grad_q)
{
    const fmha_tiled *t = w->t;
    const fmha_problem *p = &t->p;
    ptrdiff_t queries = block->queries, width = block->width, value_width = block->value_width, ld, ldk = p->k.stride[2];
    const REAL *k = (const REAL *)p->k.data + block->b * p->k.stride[0] + block->hkv * p->k.stride[1] + j * ldk;
    REAL *s = w->scores, *g = w->grad_scores, *slope = p->softcap != 0 ? w->slopes : NULL;
    int masked, touched = FMHA_NAME(touched)(p, block, j, n), banded = FMHA_NAME(backward_scores)(w, block, packed, j, n, &masked);
    int far = ((int)*packed->kind & FMHA_NAME(far_block)) != 0;
    if (banded < 0) return;
    for (ptrdiff_t q = 0, vectors; q < queries; q += vectors * LANES) {
        vectors = !banded && (queries - q) / LANES >= MICRO_VECTORS ? MICRO_VECTORS : 1;
        ptrdiff_t low = banded ? block->low[q / LANES] : 0, keys = banded ? block->high[q / LANES] - low : n, at = low * queries + q;
        REAL *slope_at = slope ? slope + at : NULL;
#define GRADIENT(many, masks, distant) \
    FMHA_NAME(gradient_columns)(many, masks, distant, keys, queries, s + at, g + at, masks ? slope_at : NULL, packed, q)
        if (vectors == MICRO_VECTORS && !masked && !far) GRADIENT(MICRO_VECTORS, 0, 0);
        else if (vectors == MICRO_VECTORS && !far) GRADIENT(MICRO_VECTORS, 1, 0);
        else if (vectors == MICRO_VECTORS) GRADIENT(MICRO_VECTORS, 1, 1);
        else if (!far) GRADIENT(1, 1, 0);
        else GRADIENT(1, 1, 1);
#undef GRADIENT
    }
    if (grad_v) {       /* grad_v (keys, Dv) <- grad_v + weights^T (keys, queries) @ grad_out (queries, Dv) */
        int finite = w->grad_out_finite || !touched;
        const REAL *rows = FMHA_NAME(block_matrix)(&t->grad_out, block, p->Dv, finite, w->copy_grad_out, &ld);
        FMHA_NAME(product_keys)(block, banded, n, s, rows, ld, value_width, grad_v);
        if (!finite) FMHA_NAME(rows_nonfinite)(p, block, j, n, s, &t->grad_out, p->Dv, grad_v, value_width);
    }
    if (grad_k) {       /* grad_k (keys, D) <- grad_k + grad_scores^T (keys, queries) @ q (queries, D) */
        int finite = w->q_finite || !touched;
        const REAL *rows = FMHA_NAME(block_matrix)(&p->q, block, p->D, finite, w->copy_q, &ld);
        FMHA_NAME(product_keys)(block, banded, n, g, rows, ld, width, grad_k);
        if (!finite) FMHA_NAME(rows_nonfinite)(p, block, j, n, g, &p->q, p->D, grad_k, width);
    }
    if (grad_q) {       /* grad_q (queries, D) <- grad_q + grad_scores^T (keys, queries)^T @ k (keys, D) */
        int finite = w->k_finite || !touched;
        const REAL *rows = FMHA_NAME(whole_rows)(k, ldk, n, p->D, finite, w->copy_k, &ld);
        if (!banded) FMHA_NAME(product_columns_add)(block->rows, width, n, g, queries, rows, ld, grad_q, width);
        for (ptrdiff_t q = 0; banded && q < block->rows; q += LANES) {
            ptrdiff_t low = block->low[q / LANES], many = block->high[q / LANES] - low;
            ptrdiff_t own = block->rows - q < LANES ? block->rows - q : LANES;
            if (many) FMHA_NAME(product_columns_add)(own, width, many, g + low * queries + q, queries, rows + low * ld, ld,
                                                     grad_q + q * width, width);
        }
        if (!finite) FMHA_NAME(tile_nonfinite)(p, block, j, n, g, k, ldk, p->D, grad_q, width);
    }
}

/* grad rows <- factor * sums. */
static void FMHA_NAME(write_rows)(ptrdiff_t rows, ptrdiff_t width, REAL factor, const REAL *from, ptrdiff_t ld, REAL *to,
                                  ptrdiff_t stride)
{
    for (ptrdiff_t i = 0; i < rows; i++)
        for (ptrdiff_t d = 0; d < width; d++) to[i * stride + d] = factor * from[i * ld + d];
}

/* The same with the scale, which may be too small for a REAL. */
static void FMHA_NAME(write_scaled)(const fmha_problem *p, ptrdiff_t rows, const REAL *from, ptrdiff_t ld, REAL *to, ptrdiff_t stride)
{
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest);
    FMHA_NAME(write_rows)(rows, p->D, factor, from, ld, to, stride);
    if (rest != 1) FMHA_NAME(write_rows)(rows, p->D, rest, to, stride, to, stride);
}

/* Item: a key/value head (FMHA_WHOLE), one block of its group's rows (FMHA_QUERIES) or one tile of its keys (FMHA_KEYS). */
static void FMHA_NAME(tiled_backward)(void *context, ptrdiff_t item, int worker)
{
    const fmha_tiled *t = context;
    const fmha_problem *p = &t->p;
    const int mode = t->mode;
    ptrdiff_t group = p->H / p->Hkv, all_rows = group * p->Lq, width = ROUND_UP(p->D, LANES), value_width = ROUND_UP(p->Dv, LANES);
    ptrdiff_t step = BLOCK_ROWS, blocks = (all_rows + step - 1) / step, tiles = (p->Lk + TILE_KEYS - 1) / TILE_KEYS;
    ptrdiff_t first_block = 0, last_block = blocks, first_tile = 0, last_tile = tiles, pair = item;
    if (mode == FMHA_KEYS) {
        pair = item / tiles;
        first_tile = item % tiles;
        last_tile = first_tile + 1;
    } else if (mode == FMHA_QUERIES) {
        pair = item / blocks;
        first_block = blocks - 1 - item % blocks;
        last_block = first_block + 1;
    }
    pair += t->first_head;
    ptrdiff_t b = pair / p->Hkv, hkv = pair % p->Hkv, kept = mode == FMHA_WHOLE ? blocks : 1;
    REAL *next = (REAL *)(t->scratch + worker * t->scratch_size);
    FMHA_NAME(backward) w = {.t = t, .far_above = REAL_LOG((REAL)p->Lk) + FAR_LSE, .few = all_rows <= FMHA_DECODE_ROWS};
    FMHA_NAME(packed) packed;
#define TAKE(pointer, n) pointer = next; next += (n)
    TAKE(w.scores, TILE_KEYS * BLOCK_ROWS);
    TAKE(w.grad_scores, TILE_KEYS * BLOCK_ROWS);
    TAKE(w.slopes, TILE_KEYS * BLOCK_ROWS);
    TAKE(w.grad_k, TILE_KEYS * width);
    TAKE(w.grad_v, TILE_KEYS * value_width);
    TAKE(w.copy_k, TILE_KEYS * width);
    TAKE(w.copy_q, BLOCK_ROWS * width);
    TAKE(w.copy_grad_out, BLOCK_ROWS * value_width);
    REAL *grad_q;
    TAKE(grad_q, kept * step * width);
    TAKE(packed.q, kept * step * p->D);
    TAKE(packed.grad_out, kept * step * p->Dv);
    TAKE(packed.shift, kept * step);
    TAKE(packed.inverse, kept * step);
    TAKE(packed.delta, kept * step);
    TAKE(packed.lift, kept * step);
    TAKE(packed.sum, kept * step);
    TAKE(packed.kind, kept * step);
#undef TAKE
    const REAL *keys = (const REAL *)p->k.data + b * p->k.stride[0] + hkv * p->k.stride[1];
    ptrdiff_t valid = p->key_length ? p->key_length[b] : p->Lk;
    int guarded = p->banded || p->key_length || p->bool_mask.data || p->additive_mask.data;     /* else no pair is removed */
    w.q_finite = w.grad_out_finite = 1;
    w.k_finite = !guarded || FMHA_NAME(all_finite)(valid, p->D, keys, p->k.stride[2]);
    for (ptrdiff_t h = hkv * group; guarded && h < (hkv + 1) * group; h++) {
        const REAL *q = (const REAL *)p->q.data + b * p->q.stride[0] + h * p->q.stride[1];
        const REAL *g = (const REAL *)t->grad_out.data + b * t->grad_out.stride[0] + h * t->grad_out.stride[1];
        w.q_finite &= FMHA_NAME(all_finite)(p->Lq, p->D, q, p->q.stride[2]);
        w.grad_out_finite &= FMHA_NAME(all_finite)(p->Lq, p->Dv, g, t->grad_out.stride[2]);
    }
    FMHA_NAME(rows) block;
#define BLOCK(x) \
    ptrdiff_t at = mode == FMHA_WHOLE ? (x) * step : 0; \
    FMHA_NAME(packed) own = {packed.q + at * p->D, packed.grad_out + at * p->Dv, packed.shift + at, packed.inverse + at, \
                             packed.delta + at, packed.lift + at, packed.sum + at, packed.kind + at}; \
    FMHA_NAME(block_rows)(p, &block, b, hkv, (x) * step, all_rows - (x) * step < step ? all_rows - (x) * step : step)
    for (int again = 0, done = 0; !done; again = 1) {
        if (mode != FMHA_KEYS) memset(grad_q, 0, (size_t)((mode == FMHA_WHOLE ? all_rows : step) * width) * sizeof(REAL));
        for (ptrdiff_t tile = first_tile; tile < last_tile; tile++) {
            ptrdiff_t j = tile * TILE_KEYS, n = p->Lk - j < TILE_KEYS ? p->Lk - j : TILE_KEYS;
            if (mode != FMHA_QUERIES) {
                memset(w.grad_k, 0, (size_t)(n * width) * sizeof(REAL));
                memset(w.grad_v, 0, (size_t)(n * value_width) * sizeof(REAL));
            }
            for (ptrdiff_t x = first_block; x < last_block; x++) {
                if (fmha_pool_stopped()) return;
                BLOCK(x);
                if (mode == FMHA_KEYS || (tile == first_tile && !again)) FMHA_NAME(prepare_block)(&w, &block, &own, mode == FMHA_KEYS);
                ptrdiff_t low = block.j0 > j ? block.j0 : j, high = block.j1 < j + n ? block.j1 : j + n;
                if (low >= high) continue;
                FMHA_NAME(pair)(&w, &block, &own, low, high - low, mode == FMHA_QUERIES ? NULL : w.grad_k + (low - j) * width,
                                mode == FMHA_QUERIES ? NULL : w.grad_v + (low - j) * value_width,
                                mode == FMHA_KEYS ? NULL : grad_q + at * width);
            }
            if (mode != FMHA_QUERIES) {
                REAL *to_k = (REAL *)t->grad_k.data + b * t->grad_k.stride[0] + hkv * t->grad_k.stride[1] + j * t->grad_k.stride[2];
                REAL *to_v = (REAL *)t->grad_v.data + b * t->grad_v.stride[0] + hkv * t->grad_v.stride[1] + j * t->grad_v.stride[2];
                FMHA_NAME(write_scaled)(p, n, w.grad_k, width, to_k, t->grad_k.stride[2]);
                FMHA_NAME(write_rows)(n, p->Dv, 1, w.grad_v, value_width, to_v, t->grad_v.stride[2]);
            }
        }
        done = 1;
        for (ptrdiff_t x = first_block; x < last_block && mode != FMHA_KEYS && first_tile < last_tile && !again; x++) {
            if (!((int)packed.kind[mode == FMHA_WHOLE ? x * step : 0] & FMHA_NAME(far_block))) continue;
            BLOCK(x);
            if (FMHA_NAME(mended)(&w, &block, &own)) done = 0;
        }
    }
    if (mode == FMHA_KEYS) return;
#undef BLOCK
    ptrdiff_t first_row = first_block * step, last_row = last_block * step < all_rows ? last_block * step : all_rows;
    for (ptrdiff_t row = first_row; row < last_row; row++) {
        ptrdiff_t h = hkv * group + row / p->Lq, i = row % p->Lq, at = row - first_row;
        REAL *to = (REAL *)t->grad_q.data + b * t->grad_q.stride[0] + h * t->grad_q.stride[1] + i * t->grad_q.stride[2];
        FMHA_NAME(write_scaled)(p, 1, grad_q + at * width, width, to, 0);
        if (mode == FMHA_WHOLE || first_tile == last_tile) continue;
        REAL *state = (REAL *)t->row_states + ((b * p->H + h) * p->Lq + i) * FMHA_ROW_STATE;     /* shift, inverse, delta */
        state[0] = packed.shift[at];
        state[1] = packed.inverse[at];
        state[2] = packed.delta[at];
    }
}
