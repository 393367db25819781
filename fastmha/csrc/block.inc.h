/* The "tiled" algorithm: attention in O(L) memory, scores kept transposed, S^T[key][query].
 *
 * Queries lie along the vector lanes: maxima, sums, rescaling and the causal comparison are vertical, no lane ever meets
 * another. The query block is packed transposed once (scale folded in); keys and values are read where they lie, keys as
 * broadcast scalars, values as rows. A block holds rows of the group's stacked heads: row r is head r / Lq, query r % Lq.
 *
 * Bits: a row's result depends on its own scores and the grid of key tiles alone. Sums over D and over keys run in their
 * order, one fused multiply-add per term; a tile in which a row attends nothing multiplies it by exp(0) = 1 and adds 0. */

/* The next n REALs of a scratch that is laid out, whose size adds up in `used`; without memory, that size alone. A pass has one
 * function that lays out its scratch: no other place knows what lies where. */
static inline REAL *FMHA_NAME(take)(REAL *memory, ptrdiff_t *used, ptrdiff_t n)
{
    REAL *at = memory ? memory + *used : NULL;
    *used += n;
    return at;
}

#define BLOCK_VECTORS (BLOCK_ROWS / LANES)
#define KEY_STEP 2          /* even and odd keys have sums of their own: what is left out before a row's keys is a multiple of it */
#define LINE (FMHA_CACHE_LINE / (ptrdiff_t)sizeof(REAL))
#define BLOCK_LD (BLOCK_ROWS + PADDED_BLOCKS * LINE)    /* the most that `ld` of a block is */
#define GRANULE (LANES < 8 ? 8 : LANES)     /* keys by which products follow the edge of a band */

/* What a later item reads, to be fetched part by part: queries, keys, values, and backward grad_out and out; forward, the out that it
 * writes, which waits for its lines as well. A part is runs of so many bytes, each a step behind the one before. */
typedef struct {
    const char *at;
    ptrdiff_t runs, step, bytes;
} FMHA_NAME(part);

typedef struct {
    FMHA_NAME(part) part[5];
} FMHA_NAME(next);

/* One block of rows of the stacked heads of a group, and the scratch it works in; queries is rows in whole vectors, ld how far apart
 * rows of so many lie there. */
typedef struct {
    ptrdiff_t b, hkv, rows, queries, ld, width, value_width;    /* widths in whole vectors */
    ptrdiff_t j0, j1;                   /* keys that any row attends, */
    ptrdiff_t met0, met1;               /* and those that masks aside it would */
    int boolean, additive;              /* whether masks say more than the keys of each row below */
    ptrdiff_t common0, common1;         /* keys that no causality, window or length, nor what mask_rows made of masks, removes from any row */
    ptrdiff_t head[BLOCK_ROWS], query[BLOCK_ROWS];
    ptrdiff_t row0[BLOCK_ROWS], row1[BLOCK_ROWS];           /* keys of each row */
    ptrdiff_t any0[BLOCK_VECTORS], any1[BLOCK_VECTORS];     /* keys that some row of a vector of rows attends, */
    ptrdiff_t all0[BLOCK_VECTORS], all1[BLOCK_VECTORS];     /* and those that all of its rows do */
    ptrdiff_t low[BLOCK_VECTORS], high[BLOCK_VECTORS];      /* keys of a vector at work, relative to the tile at hand */
    FMHA_NAME(few) few;                 /* of few_scores, where that is to serve: then there is scratch, and operands are not packed transposed */
    int written;                        /* the results of all rows: by a product that was the first and the last */
    FMHA_NAME(results) results;
    int lifted;                         /* scores are products times a lift of the rows */
    REAL drowned;                       /* no score of the keys that were left out is above it */
    const char *values;                 /* the values of the tile at hand, to be fetched beside its keys, or NULL */
    FMHA_NAME(next) *next;              /* or NULL */
} FMHA_NAME(rows);

/* What a band and lengths leave the rows of a block, if these are of one head; else returns 0. Both ends grow with the row: those of several
 * rows are the ends of the first and of the last one that has keys, and these rows follow one another. */
static int FMHA_NAME(band_rows)(const fmha_problem *p, FMHA_NAME(rows) *block)
{
    const ptrdiff_t rows = block->rows, last = rows - 1;
    ptrdiff_t first, end, some = 0, most = last, *row0 = block->row0, *row1 = block->row1;
    fmha_valid_keys(p, block->b, &first, &end);
    const int64_t low = block->query[0] + p->offset[block->b] - p->left, high = block->query[0] + p->offset[block->b] + p->right + 1;
    if (block->head[0] != block->head[last]) return 0;
    for (ptrdiff_t r = 0; r < rows; r++) {
        const int64_t from = low + r > first ? low + r : first, to = high + r < end ? high + r : end;
        row0[r] = (ptrdiff_t)(from < p->Lk ? from : p->Lk);
        row1[r] = (ptrdiff_t)(to > 0 ? to : 0);
    }
    while (some < rows && row0[some] >= row1[some]) some++;
    while (most >= some && row0[most] >= row1[most]) most--;
    for (ptrdiff_t r = rows; r < block->queries; r++) row0[r] = 0, row1[r] = p->Lk;
    for (ptrdiff_t v = 0; v < block->queries / LANES; v++) {
        const ptrdiff_t from = v * LANES, to = from + LANES < rows ? from + LANES - 1 : last;
        const ptrdiff_t attends = from > some ? from : some, until = to < most ? to : most;
        block->any0[v] = attends <= until ? row0[attends] : p->Lk;
        block->any1[v] = attends <= until ? row1[until] : 0;
        block->all0[v] = row0[to];
        block->all1[v] = row1[from];
    }
    block->common0 = row0[last];
    block->common1 = row1[0];
    block->j0 = some <= most ? row0[some] : 0;
    block->j1 = some <= most ? row1[most] : 0;
    return 1;
}

/* Whether a band leaves a block of rows from row i0 on none of the keys j .. j+n, if that can be told at once. */
static inline int FMHA_NAME(is_beside)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t i0, ptrdiff_t rows, ptrdiff_t j, ptrdiff_t n)
{
    const ptrdiff_t i = i0 % p->Lq;
    ptrdiff_t low, high;
    if (!p->banded || i + rows > p->Lq) return 0;
    fmha_block_keys(p, b, i, rows, &low, &high);
    return low >= j + n || high <= j;
}

/* The keys of vectors of rows, and of the block, by those of each row. */
static void FMHA_NAME(rows_together)(const fmha_problem *p, FMHA_NAME(rows) *block)
{
    block->j0 = block->common1 = p->Lk;
    block->j1 = block->common0 = 0;
    for (ptrdiff_t v = 0; v < block->queries / LANES; v++) {
        ptrdiff_t any0 = p->Lk, any1 = 0, all0 = 0, all1 = p->Lk;
        for (ptrdiff_t r = v * LANES; r < (v + 1) * LANES && r < block->rows; r++) {
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
        if (any0 < block->j0) block->j0 = any0;
        if (any1 > block->j1) block->j1 = any1;
        if (all0 > block->common0) block->common0 = all0;
        if (all1 < block->common1) block->common1 = all1;
    }
    if (block->j0 > block->j1) block->j0 = block->j1 = 0;
}

static void FMHA_NAME(block_rows)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first,
                                  ptrdiff_t rows)
{
    ptrdiff_t group = p->H / p->Hkv, h = hkv * group + first / p->Lq, i = first % p->Lq, low, high;
    block->b = b;
    block->hkv = hkv;
    block->rows = rows;
    block->few = (FMHA_NAME(few)){.scratch = NULL};
    block->written = 0;
    block->boolean = p->bool_mask.data != NULL;
    block->additive = p->additive_mask.data != NULL;
    block->values = NULL;
    block->next = NULL;
    block->queries = ROUND_UP(rows, LANES);
    block->ld = block->queries + (PADDED_BLOCKS && block->queries % (2 * LINE) == 0 ? LINE : 0);
    block->width = ROUND_UP(p->D, LANES);
    block->value_width = ROUND_UP(p->Dv, LANES);
    for (ptrdiff_t r = 0; r < rows; r++) {
        block->head[r] = h;
        block->query[r] = i;
        if (++i == p->Lq) { i = 0; h++; }
    }
    if (!p->banded) {       /* all rows alike */
        fmha_row_keys(p, b, 0, &low, &high);
        for (ptrdiff_t r = 0; r < block->queries; r++) {
            block->row0[r] = r < rows ? low : 0;
            block->row1[r] = r < rows ? high : p->Lk;
        }
        for (ptrdiff_t v = 0; v < block->queries / LANES; v++) {
            block->any0[v] = low < high ? low : p->Lk;
            block->any1[v] = low < high ? high : 0;
            block->all0[v] = low;
            block->all1[v] = high;
        }
        block->common0 = low;
        block->common1 = high;
        block->j0 = low < high ? low : 0;
        block->j1 = low < high ? high : 0;
    } else if (!FMHA_NAME(band_rows)(p, block)) {
        for (ptrdiff_t r = 0; r < block->queries; r++) {
            low = 0, high = p->Lk;
            if (r < rows) fmha_row_keys(p, b, block->query[r], &low, &high);
            block->row0[r] = low;
            block->row1[r] = high;
        }
        FMHA_NAME(rows_together)(p, block);
    }
    block->met0 = block->j0;
    block->met1 = block->j1;
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

#if HAVE_TRANSPOSE
/* A square of LANES rows and items, or of what there is of `rows` and `items`, each row `at` bytes on. The same of the rows that come after
 * these, `ahead` bytes on, are fetched: no CPU guesses so many streams, each as short as a row. */
INLINED void FMHA_NAME(pack_square)(const int sized, const int type, const int whole, ptrdiff_t rows, ptrdiff_t items,
                                    const char *const *row, ptrdiff_t at, ptrdiff_t ahead, REAL factor, VEC *squares, REAL *to,
                                    ptrdiff_t ld)
{
    VEC part[LANES];
#pragma GCC unroll 16
    for (ptrdiff_t l = 0; l < LANES; l++) {
        if (whole) v_prefetch(row[l] + at + ahead);
        if (whole) part[l] = FMHA_NAME(stored_load)(type, row[l] + at) * factor;
        else part[l] = l < rows ? FMHA_NAME(stored_load_n)(type, row[l] + at, items) * factor : v_splat(0);
    }
#pragma GCC unroll 16
    for (ptrdiff_t l = 0; sized && l < LANES; l++) squares[l % 4] = squares[l % 4] + part[l] * part[l];
    FMHA_NAME(transpose)(part);
#pragma GCC unroll 16
    for (ptrdiff_t l = 0; l < LANES; l++)
        if (whole || l < items) v_store(to + l * ld, part[l]);
}
#endif

/* packed^T (width, queries) <- factor * x rows (rows, width), zeros beyond. Where sized, returns a number below HUGE_POWER if all
 * that was packed is below LARGE_POWER, and not such a number if something is so large or not finite. */
INLINED REAL FMHA_NAME(transposed)(const int sized, const int type, const FMHA_NAME(rows) *block, const fmha_array *x, ptrdiff_t width,
                                   REAL factor, REAL *packed)
{
    const ptrdiff_t queries = block->queries, ld = block->ld, size = FMHA_NAME(stored_size)(type);
    VEC squares[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};     /* none waits for the one before */
    for (ptrdiff_t q = 0; q < queries; q += LANES) {
        const char *row[LANES];
        ptrdiff_t rows = block->rows - q < LANES ? block->rows - q : LANES, d = 0;
        for (ptrdiff_t l = 0; l < LANES; l++) {
            ptrdiff_t r = q + (l < rows ? l : 0);
            row[l] = FMHA_NAME(row_in)(type, x, block->b, block->head[r], block->query[r]);
        }
#if HAVE_TRANSPOSE
#define PACK_SQUARE(whole) \
    FMHA_NAME(pack_square)(sized, type, whole, rows, width - d, row, d * size, LANES * x->stride[2] * size, factor, squares, \
                           packed + d * ld + q, ld)
        for (; rows == LANES && d + LANES <= width; d += LANES) PACK_SQUARE(1);
        for (; d < width; d += LANES) PACK_SQUARE(0);
#undef PACK_SQUARE
#else
        for (ptrdiff_t left = d; left < width; left++)
            for (ptrdiff_t l = 0; l < LANES; l++)
                packed[left * ld + q + l] = l < rows ? factor * FMHA_NAME(stored_value)(type, row[l] + left * size) : 0;
        for (ptrdiff_t left = d; sized && left < width; left++) {
            VEC part = v_load(packed + left * ld + q);
            squares[left % 4] = squares[left % 4] + part * part;
        }
#endif
    }
    return sized ? FMHA_NAME(sum)((squares[0] + squares[1]) + (squares[2] + squares[3])) : 0;
}

/* The same for the element type of q, which no float64 has but its own. */
#define TRANSPOSED(sized, x, width, factor) \
    (FMHA_REAL == 64 || p->element == FMHA_SAME ? FMHA_NAME(transposed)(sized, FMHA_SAME, block, x, width, factor, packed) \
     : p->element == FMHA_HALF ? FMHA_NAME(transposed)(sized, FMHA_HALF, block, x, width, factor, packed) \
     : FMHA_NAME(transposed)(sized, FMHA_BFLOAT, block, x, width, factor, packed))

/* Or, where few_scores serves, not transposed. */
static REAL FMHA_NAME(few_rows_of)(const fmha_problem *p, const FMHA_NAME(rows) *block, const fmha_array *x, ptrdiff_t width, REAL factor, REAL *packed)
{
    VEC squares = v_splat(0);
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        const char *row = FMHA_NAME(row_in)(p->element, x, block->b, block->head[r], block->query[r]);
        squares = FMHA_NAME(pack_row)(p->element, width, factor, row, packed + r * ROUND_UP(width, LANES), squares);
    }
    return FMHA_NAME(sum)(squares);
}

static void FMHA_NAME(pack_rows)(const fmha_problem *p, const FMHA_NAME(rows) *block, const fmha_array *x, ptrdiff_t width, REAL *packed)
{
    if (block->few.scratch) FMHA_NAME(few_rows_of)(p, block, x, width, 1, packed);
    else TRANSPOSED(0, x, width, 1);
}

static inline REAL FMHA_NAME(folded_scale)(const fmha_problem *p, REAL *rest)
{
    double left, factor = fmha_folded_scale(p, FMHA_REAL == 64, &left);
    *rest = (REAL)left;
    return (REAL)factor;
}

/* The power of 2 that is taken out of a row of queries which, times factor, would be so large that it, or products with it, might
 * overflow where the scores do not; else 1. */
static REAL FMHA_NAME(row_lift)(int type, ptrdiff_t D, const char *q, REAL factor)
{
    double size = 0;
    for (ptrdiff_t d = 0; d < D; d++) {
        REAL value = FMHA_NAME(stored_value)(type, q + d * FMHA_NAME(stored_size)(type));
        if (value - value == 0) size = fmax(size, fabs((double)value));
    }
    int of_q, exponent;
    frexp(size, &of_q);
    frexp((double)factor, &exponent);
    exponent += of_q - ilogb((double)LARGE_POWER);
    if (size == 0 || exponent <= 0) return 1;
    return (REAL)ldexp(1, exponent < ilogb((double)HUGE_POWER) ? exponent : ilogb((double)HUGE_POWER));
}

/* packed^T (D, queries), or of few rows packed (rows, D in whole vectors), <- scale * q / lift, where the lift of row r, a power of 2, is what
 * its scores must be multiplied by. Every row has its own, so that none depends on its company. Returns 0 only where all lifts are 1
 * and q is finite. */
static int FMHA_NAME(pack_queries)(const fmha_problem *p, const FMHA_NAME(rows) *block, REAL *packed, REAL *lift)
{
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest);
    const int few = block->few.scratch != NULL;
    const ptrdiff_t of_row = few ? ROUND_UP(p->D, LANES) : 1, of_item = few ? 1 : block->ld;
    const REAL squares = few ? FMHA_NAME(few_rows_of)(p, block, &p->q, p->D, factor, packed) : TRANSPOSED(1, &p->q, p->D, factor);
    int some = !(squares < HUGE_POWER);
    if (!some && rest == 1) return 0;
    for (ptrdiff_t r = 0; r < block->queries; r++) {
        lift[r] = rest;
        if (!some || r >= block->rows) continue;
        const char *q = FMHA_NAME(row_in)(p->element, &p->q, block->b, block->head[r], block->query[r]);
        REAL own = FMHA_NAME(row_lift)(p->element, p->D, q, factor);
        if (own == 1) continue;
        lift[r] *= own;
        for (ptrdiff_t d = 0; d < p->D; d++)
            packed[d * of_item + r * of_row] = (REAL)((double)factor / own)
                                               * FMHA_NAME(stored_value)(p->element, q + d * FMHA_NAME(stored_size)(p->element));
    }
    return 1;
}

/* Whether rows so far apart, as those of a head among many are, share few sets of the caches, and are better copied where a product reads them
 * time and again: for every few of so many other rows. */
static inline int FMHA_NAME(crowded)(ptrdiff_t stride, ptrdiff_t width, ptrdiff_t others)
{
    return stride % (CROWDED_BYTES / (ptrdiff_t)sizeof(REAL)) == 0 && others >= CROWDED_ROWS && width < stride;
}

/* Rows [j, j + n) of a key/value head as rows of whole vectors: where they lie, or padded with zeros in `copy`. */
static const REAL *FMHA_NAME(whole_rows)(const REAL *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, int finite, int crowded, REAL *copy,
                                         ptrdiff_t *ld)
{
    ptrdiff_t whole = ROUND_UP(width, LANES);
    if (finite && whole == width && !crowded) {
        *ld = stride;
        return x;
    }
    for (ptrdiff_t i = 0; i < n; i++)
        for (ptrdiff_t d = 0; d < width; d += LANES) {
            VEC value = v_load_n(x + i * stride + d, width - d, 0);
            v_store(copy + i * whole + d, finite ? value : v_select(v_equal(value - value, v_splat(0)), value, v_splat(0)));
        }
    *ld = whole;
    return copy;
}

/* The same of rows that a product broadcasts, which may be of any width, for so many columns: copied where that is better. */
static inline const REAL *FMHA_NAME(apart_rows)(const REAL *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, ptrdiff_t others, REAL *copy,
                                                ptrdiff_t *ld)
{
    *ld = stride;
    return CROWDED_KEYS && FMHA_NAME(crowded)(stride, width, others) ? FMHA_NAME(whole_rows)(x, stride, n, width, 1, 1, copy, ld) : x;
}

/* Whether scores are more than scaled products. */
static inline int FMHA_NAME(rescored)(const fmha_problem *p) { return p->softcap != 0 || p->alibi != NULL; }

/* Whether masks or ranges touch the tile of keys [j, j + n). */
static inline int FMHA_NAME(touched)(const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n)
{
    return block->boolean || block->additive || j < block->common0 || j + n > block->common1;
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
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element);
    for (int boolean = 0; boolean < 2; boolean++) {
        const fmha_array *mask = boolean ? &p->bool_mask : &p->additive_mask;
        if (!(boolean ? block->boolean : block->additive)) continue;
        ptrdiff_t rows = mask->stride[1] == 0 && mask->stride[2] == 0 ? 1 : block->rows, step = mask->stride[3], r = 0, k = n;
        for (; r < rows && k == n; r++) {
            const char *m = FMHA_NAME(mask_row_at)(mask, block, r, j, boolean ? 1 : size);
            if (boolean && step == 1) k = memchr(m, 0, (size_t)n) ? 0 : n;
            else if (boolean) for (k = 0; k < n && m[k * step]; k++) {}
            else for (k = 0; k < n && FMHA_NAME(stored_value)(p->mask_element, m + k * step * size) == NEGATIVE_INFINITY; k++) {}
        }
        if (k == n) return 1;
    }
    return 0;
}

#define DROWNED_BELOW -1000     /* an additive mask as low may leave keys nothing beside others */

/* How many of a row of the mask are so low, of at most n from m on, one behind the other or, if `back`, before it; most: of those looked at. */
static ptrdiff_t FMHA_NAME(low_masks)(const fmha_problem *p, const char *m, int back, ptrdiff_t n, REAL *most)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element), step = (back ? -size : size) * p->additive_mask.stride[3];
    const ptrdiff_t lowest = step < 0 ? (1 - LANES) * size : 0, whole = step == size || step == -size ? n / LANES * LANES : 0;
    VEC best = v_splat(*most);
    ptrdiff_t k = 0;
#define LOW_MASKS(type) \
    for (; k < whole; k += LANES) { \
        const VEC some = FMHA_NAME(stored_load)(type, m + k * step + lowest); \
        if (v_any(~v_greater(v_splat(DROWNED_BELOW), some))) break; \
        best = v_max(some, best); \
    }
    if (p->mask_element == FMHA_HALF) { LOW_MASKS(FMHA_HALF) }
    else if (p->mask_element == FMHA_BFLOAT) { LOW_MASKS(FMHA_BFLOAT) }
    else { LOW_MASKS(FMHA_SAME) }
#undef LOW_MASKS
    *most = FMHA_NAME(largest)(best);
    for (; k < n; k++) {
        const REAL one = FMHA_NAME(stored_value)(p->mask_element, m + k * step);
        if (!(one < DROWNED_BELOW)) return k;
        if (one > *most) *most = one;
    }
    return n;
}

/* Of n keys from key j on so many, the first and the last ones, of all of whose pairs an additive mask is so low, in whole steps. Returns the
 * most it is of them, or somewhat more. Of a mask that no vectors can read, one for each query, it takes too long to ask. */
static REAL FMHA_NAME(low_ends)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, ptrdiff_t *ahead, ptrdiff_t *behind)
{
    const fmha_array *mask = &p->additive_mask;
    const int of_keys = fmha_of_keys(mask);
    REAL most = NEGATIVE_INFINITY;
    *ahead = *behind = of_keys || mask->stride[3] == 1 || mask->stride[3] == -1 ? n : 0;
    for (ptrdiff_t r = 0; r < (of_keys ? 1 : block->rows) && *ahead + *behind > 0; r++) {
        const char *m = FMHA_NAME(mask_row_at)(mask, block, r, j, FMHA_NAME(stored_size)(p->mask_element));
        *ahead = FMHA_NAME(low_masks)(p, m, 0, *ahead, &most);
        m = FMHA_NAME(mask_row_at)(mask, block, r, j + n - 1, FMHA_NAME(stored_size)(p->mask_element));
        if (*ahead < n) *behind = FMHA_NAME(low_masks)(p, m, 1, *behind, &most);
    }
    const ptrdiff_t from = (j + *ahead) / FMHA_SUM_KEYS * FMHA_SUM_KEYS - j, base = from > 0 ? from : 0;     /* where the sums begin */
    if (*ahead == n) *behind = 0;
    else *ahead = base + (*ahead - base) / KEY_STEP * KEY_STEP;
    return most;
}

/* The sum of the squares of rows. */
static REAL FMHA_NAME(power)(ptrdiff_t rows, ptrdiff_t cols, const REAL *x, ptrdiff_t ld)
{
    VEC sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};      /* none waits for the one before */
    for (ptrdiff_t i = 0; i < rows; i++, x += ld) {
        ptrdiff_t d = 0;
        for (; d + 4 * LANES <= cols; d += 4 * LANES)
#pragma GCC unroll 4
            for (int e = 0; e < 4; e++) sum[e] = sum[e] + v_load(x + d + e * LANES) * v_load(x + d + e * LANES);
        for (; d < cols; d += LANES) {
            const VEC value = v_load_n(x + d, cols - d, 0);
            sum[i % 4] = sum[i % 4] + value * value;
        }
    }
    return FMHA_NAME(sum)((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* What no score of keys is above where their mask is `most` or less, by the powers of the queries and of the keys, rounded as it may be; or
 * infinity, if it is not far below 0 then or something is so large that more than scores counts, or not finite: v is the power of the values,
 * or of these and of grad_out together. A row with a score so far above it that exp gives 0 gets nothing from such keys: without them all
 * bits are the same. */
static REAL FMHA_NAME(drowned_scores)(REAL most, REAL q, REAL k, REAL v)
{
    const REAL bound = (REAL)(sqrt((double)q) * sqrt((double)k));
    if (!(bound <= -most / 4) || !(v < HUGE_POWER)) return (REAL)INFINITY;
    return most * (REAL)0.999 + bound;
}

#define MASK_KEYS 32        /* keys of a boolean mask that are looked at together: as many as a lane of float32 has bits */

/* Which of n <= MASK_KEYS bytes, `step` apart, are not 0: one bit each. before: bytes that may be read ahead of m. */
static inline uint32_t FMHA_NAME(bits_of)(const char *m, ptrdiff_t step, ptrdiff_t n, ptrdiff_t before)
{
    uint32_t bits = 0;
#if defined(X86_OP)
    ptrdiff_t back = MASK_KEYS - n;
    if (step == 1 && back > before && n >= 8) {     /* two ends that overlap */
        const ptrdiff_t part = n >= 16 ? 16 : 8;
        __m128i low = _mm_loadl_epi64((const __m128i *)m), high = _mm_loadl_epi64((const __m128i *)(m + n - 8));
        if (n >= 16) low = _mm_loadu_si128((const __m128i *)m), high = _mm_loadu_si128((const __m128i *)(m + n - 16));
        const uint32_t first = ~(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(low, _mm_setzero_si128())) & (((uint32_t)1 << part) - 1);
        const uint32_t last = ~(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(high, _mm_setzero_si128())) & (((uint32_t)1 << part) - 1);
        return first | last << (n - part);
    }
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
#elif defined(ARM_OP)
    ptrdiff_t back = MASK_KEYS - n;
    if (step == 1 && back <= before) {
        const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        uint8x16_t low = vld1q_u8((const uint8_t *)m - back), high = vld1q_u8((const uint8_t *)m - back + 16);
        uint8x16_t sums = vpaddq_u8(vandq_u8(vtstq_u8(low, low), bit), vandq_u8(vtstq_u8(high, high), bit));
        sums = vpaddq_u8(sums, sums);       /* eight bytes become one, by the third */
        sums = vpaddq_u8(sums, sums);
        return vgetq_lane_u32(vreinterpretq_u32_u8(sums), 0) >> back;
    }
#endif
    (void)before;
    for (ptrdiff_t k = 0; k < n; k++) bits |= (uint32_t)(m[k * step] != 0) << k;
    return bits;
}

/* The run of keys from the first to the last one that a row of a mask leaves, and whether the mask says nothing else of it. */
typedef struct {
    ptrdiff_t from, to;
    int whole;
} FMHA_NAME(key_run);

static FMHA_NAME(key_run) FMHA_NAME(boolean_run)(const char *m, ptrdiff_t low, ptrdiff_t high)
{
    FMHA_NAME(key_run) run = {low, low, 1};
    ptrdiff_t left = 0;
    for (ptrdiff_t k = low; k < high; k += MASK_KEYS) {
        const ptrdiff_t n = high - k < MASK_KEYS ? high - k : MASK_KEYS;
        const uint32_t some = ~FMHA_NAME(bits_of)(m + k, 1, n, k) & (uint32_t)(((uint64_t)1 << n) - 1);
        if (!some) continue;
        if (left == 0) run.from = k + __builtin_ctz(some);
        run.to = k + MASK_KEYS - __builtin_clz(some);
        left += __builtin_popcount(some);
    }
    run.whole = left == run.to - run.from;
    return run;
}

#define ALL_ARE(what, at) !v_any(~v_equal(FMHA_NAME(stored_load)(type, m + (at) * size), v_splat(what)))
#define ONE_IS(what, at) (FMHA_NAME(stored_value)(type, m + (at) * size) == (what))
INLINED int FMHA_NAME(all_are)(const int type, const char *m, ptrdiff_t from, ptrdiff_t to, REAL what)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    while (from + LANES <= to && ALL_ARE(what, from)) from += LANES;
    while (from < to && ONE_IS(what, from)) from++;
    return from == to;
}

INLINED FMHA_NAME(key_run) FMHA_NAME(additive_run)(const int type, const char *m, ptrdiff_t from, ptrdiff_t to)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    while (from + LANES <= to && ALL_ARE(NEGATIVE_INFINITY, from)) from += LANES;
    while (from < to && ONE_IS(NEGATIVE_INFINITY, from)) from++;
    while (to - LANES >= from && ALL_ARE(NEGATIVE_INFINITY, to - LANES)) to -= LANES;
    while (to > from && ONE_IS(NEGATIVE_INFINITY, to - 1)) to--;
    return (FMHA_NAME(key_run)){from, to, FMHA_NAME(all_are)(type, m, from, to, 0)};
}
#undef ALL_ARE
#undef ONE_IS

#define OF_MASK(name, ...) \
    (p->mask_element == FMHA_HALF ? FMHA_NAME(name)(FMHA_HALF, __VA_ARGS__) \
     : p->mask_element == FMHA_BFLOAT ? FMHA_NAME(name)(FMHA_BFLOAT, __VA_ARGS__) : FMHA_NAME(name)(FMHA_SAME, __VA_ARGS__))

/* Masks that leave each row of a block a run of keys, as those of causality and padding do: of [first, last), which is all that the block is
 * asked for afterwards, these runs become the keys of the rows, and a mask that says no more is not read again. At a row where that would
 * gain nothing it is given up. */
static __attribute__((noinline)) void FMHA_NAME(mask_rows)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t first, ptrdiff_t last)
{
    int some = 0;
    for (int boolean = 1; boolean >= 0; boolean--) {
        const fmha_array *mask = boolean ? &p->bool_mask : &p->additive_mask;
        const char *before = NULL;
        FMHA_NAME(key_run) run = {0, 0, 1};
        ptrdiff_t r = 0, low = 0, high = 0;
        int whole = 1;
        if (!mask->data || mask->stride[3] != 1) continue;
        for (; r < block->rows; r++) {
            const char *m = FMHA_NAME(mask_row_at)(mask, block, r, 0, boolean ? 1 : FMHA_NAME(stored_size)(p->mask_element));
            const ptrdiff_t from = block->row0[r] > first ? block->row0[r] : first, to = block->row1[r] < last ? block->row1[r] : last;
            if (from >= to) continue;
            if (m != before || from != low || to != high)
                run = boolean ? FMHA_NAME(boolean_run)(m, from, to) : OF_MASK(additive_run, m, from, to);
            before = m;
            low = from;
            high = to;
            if (!run.whole && run.from == from && run.to == to) break;
            whole &= run.whole;
            some = 1;
            block->row0[r] = run.from;
            block->row1[r] = run.to;
        }
        if (r < block->rows || !whole) continue;
        if (boolean) block->boolean = 0;
        else block->additive = 0;
    }
    if (some) FMHA_NAME(rows_together)(p, block);
}

/* The same of an additive mask that is not -inf at the ends but so low that these keys probably get nothing: then what each row attends are
 * [from, to) of its keys, and most is the most that the mask is elsewhere, or somewhat more. Returns 0 where the mask says more, and -1
 * where it is so low throughout a row, unless that does not matter. */
static int FMHA_NAME(low_runs)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t first, ptrdiff_t last, int throughout,
                               ptrdiff_t *from, ptrdiff_t *to, REAL *most)
{
    const fmha_array *mask = &p->additive_mask;
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element);
    *most = NEGATIVE_INFINITY;
    if (block->boolean || !block->additive || mask->stride[3] != 1) return 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        const char *m = FMHA_NAME(mask_row_at)(mask, block, r, 0, size);
        from[r] = block->row0[r] > first ? block->row0[r] : first;
        to[r] = block->row1[r] < last ? block->row1[r] : last;
        if (from[r] >= to[r]) continue;
        from[r] += FMHA_NAME(low_masks)(p, m + from[r] * size, 0, to[r] - from[r], most);
        if (from[r] == to[r] && !throughout) return -1;
        to[r] -= FMHA_NAME(low_masks)(p, m + (to[r] - 1) * size, 1, to[r] - from[r], most);
        if (!OF_MASK(all_are, m, from[r], to[r], 0)) return 0;
    }
    return 1;
}

/* These become the keys of the rows. */
static void FMHA_NAME(take_runs)(const fmha_problem *p, FMHA_NAME(rows) *block, const ptrdiff_t *from, const ptrdiff_t *to)
{
    memcpy(block->row0, from, (size_t)block->rows * sizeof(ptrdiff_t));
    memcpy(block->row1, to, (size_t)block->rows * sizeof(ptrdiff_t));
    block->additive = 0;
    FMHA_NAME(rows_together)(p, block);
}

/* A boolean mask on keys [low, high) of one vector of rows of the tile's scores^T: MASK_KEYS of a row are the bits of its lane. */
static void FMHA_NAME(mask_boolean)(const fmha_array *mask, const FMHA_NAME(rows) *block, ptrdiff_t v, ptrdiff_t j, ptrdiff_t low,
                                    ptrdiff_t high, REAL *s)
{
    ptrdiff_t step = mask->stride[3], rows = block->rows - v * LANES < LANES ? block->rows - v * LANES : LANES;
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (ptrdiff_t k = low; k < high; k += MASK_KEYS) {
        ptrdiff_t n = high - k < MASK_KEYS ? high - k : MASK_KEYS;
        INT lanes[LANES] = {0}, any = 0;
        for (ptrdiff_t l = 0; l < rows; l++)
            any |= lanes[l] = (INT)FMHA_NAME(bits_of)(FMHA_NAME(mask_row_at)(mask, block, v * LANES + l, j + k, 1), step, n, k - low);
        if (!any) continue;
        IVEC bits = i_load(lanes);
        REAL *to = s + k * block->ld + v * LANES;
        for (ptrdiff_t e = 0; e < n; e++, to += block->ld)
            v_store(to, v_select(v_truth((bits & i_splat((INT)((uint32_t)1 << e))) != 0), gone, v_load(to)));
    }
}

/* An additive mask there: squares of LANES rows and keys are transposed in registers, what is left over goes one by one. */
INLINED void FMHA_NAME(mask_additive)(const int type, const fmha_array *mask, const FMHA_NAME(rows) *block, ptrdiff_t v, ptrdiff_t j,
                                      ptrdiff_t low, ptrdiff_t high, REAL *s)
{
    ptrdiff_t ld = block->ld, step = mask->stride[3], size = FMHA_NAME(stored_size)(type), q = v * LANES, k = low;
    ptrdiff_t rows = block->rows - q < LANES ? block->rows - q : LANES;
    const char *row[LANES];
    for (ptrdiff_t l = 0; l < rows; l++) row[l] = FMHA_NAME(mask_row_at)(mask, block, q + l, j, size);
#if HAVE_TRANSPOSE
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (; rows == LANES && step == 1 && k + LANES <= high; k += LANES) {
        VEC part[LANES];
#pragma GCC unroll 16
        for (ptrdiff_t l = 0; l < LANES; l++) part[l] = FMHA_NAME(stored_load)(type, row[l] + k * size);
        FMHA_NAME(transpose)(part);
#pragma GCC unroll 16
        for (ptrdiff_t l = 0; l < LANES; l++) {
            REAL *to = s + (k + l) * ld + q;
            v_store(to, v_select(v_equal(part[l], gone), gone, v_load(to) + part[l]));
        }
    }
#endif
    for (ptrdiff_t l = 0; l < rows; l++)
        for (ptrdiff_t e = k; e < high; e++) {
            REAL *to = s + e * ld + q + l, add = FMHA_NAME(stored_value)(type, row[l] + e * step * size);
            *to = add == NEGATIVE_INFINITY ? add : *to + add;
        }
}

/* scores^T <- scores^T - alibi * distance there. */
static void FMHA_NAME(alibi_columns)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t v, ptrdiff_t j, ptrdiff_t low,
                                     ptrdiff_t high, REAL *s)
{
    ptrdiff_t ld = block->ld, q = v * LANES, rows = block->rows - q < LANES ? block->rows - q : LANES;
    REAL ahead[LANES], slope[LANES];
    int64_t place[LANES];
    int exact = j + high < EXACT_DISTANCE;
    for (ptrdiff_t l = 0; l < LANES; l++) {
        place[l] = l < rows ? (int64_t)block->query[q + l] + p->offset[block->b] : 0;
        slope[l] = l < rows ? ((const REAL *)p->alibi)[block->head[q + l]] : 0;
        ahead[l] = (REAL)(place[l] - j);
        exact &= place[l] < EXACT_DISTANCE && place[l] > -EXACT_DISTANCE;
    }
    VEC from = v_load(ahead), slopes = v_load(slope);
    for (ptrdiff_t k = low; exact && k < high; k++) {
        REAL *to = s + k * ld + q;
        v_store(to, v_load(to) - v_abs(from - v_splat((REAL)k)) * slopes);
    }
    for (ptrdiff_t k = low; !exact && k < high; k++)
        for (ptrdiff_t l = 0; l < rows; l++) s[k * ld + q + l] += FMHA_NAME(alibi_term)(slope[l], place[l], j + k);
}

/* scores^T (keys, queries), of each vector of rows the keys of its span: softcap, alibi, additive mask, then -inf where a pair is
 * removed. slope, if given, gets the derivative of the softcap. */
static void FMHA_NAME(mask_tile)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t j, REAL *s, REAL *slope)
{
    ptrdiff_t queries = block->queries, ld = block->ld;
    const ptrdiff_t *add_stride = p->additive_mask.stride, *remove_stride = p->bool_mask.stride;
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (ptrdiff_t v = 0; v < queries / LANES; v++) {
        ptrdiff_t low = block->low[v], high = block->high[v];
        REAL *column = s + v * LANES;
        REAL *slopes = slope ? slope + low * ld + v * LANES : NULL;
        if (p->softcap != 0) FMHA_NAME(cap_columns)(high - low, ld, column + low * ld, p->softcap, slopes);
        if (p->alibi) FMHA_NAME(alibi_columns)(p, block, v, j, low, high, s);
        if (block->additive && (add_stride[1] || add_stride[2])) {
            switch (p->mask_element) {
            case FMHA_HALF: FMHA_NAME(mask_additive)(FMHA_HALF, &p->additive_mask, block, v, j, low, high, s); break;
            case FMHA_BFLOAT: FMHA_NAME(mask_additive)(FMHA_BFLOAT, &p->additive_mask, block, v, j, low, high, s); break;
            default: FMHA_NAME(mask_additive)(FMHA_SAME, &p->additive_mask, block, v, j, low, high, s);
            }
        } else if (block->additive) {
            const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element);
            const char *from = FMHA_NAME(mask_row_at)(&p->additive_mask, block, 0, j, size);
            REAL row[TILE_KEYS];
            const REAL *m = p->mask_element == FMHA_SAME ? (const REAL *)from : row;
            ptrdiff_t step = p->mask_element == FMHA_SAME ? add_stride[3] : 1;
            for (ptrdiff_t k = low; m == row && k < high; k++)
                row[k] = FMHA_NAME(stored_value)(p->mask_element, from + k * add_stride[3] * size);
            for (ptrdiff_t k = low; k < high; k++) {
                VEC add = v_splat(m[k * step]);
                v_store(column + k * ld, v_select(v_equal(add, gone), gone, v_load(column + k * ld) + add));
            }
        }
        if (block->boolean && (remove_stride[1] || remove_stride[2])) {
            FMHA_NAME(mask_boolean)(&p->bool_mask, block, v, j, low, high, s);
        } else if (block->boolean) {
            const char *m = FMHA_NAME(mask_row_at)(&p->bool_mask, block, 0, j, 1);
            for (ptrdiff_t k = low; k < high; k++)
                if (m[k * remove_stride[3]]) v_store(column + k * ld, gone);
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
            v_store(column + k * ld, v_select(i_within(first, i_splat(k), last), v_load(column + k * ld), gone));
        }
    }
}

/* x^T (keys, queries), of each vector of rows the keys of its span, <- x^T times what dropout draws, which kept^T gets if given. */
static void FMHA_NAME(drop_tile)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, REAL *x, REAL *kept)
{
    const fmha_dropout *draws = &p->dropout;
    ptrdiff_t ld = block->ld;
    j += draws->j;
    for (ptrdiff_t q = 0; q < block->queries; q += LANES) {
        ptrdiff_t low = block->low[q / LANES], high = block->high[q / LANES];
        uint64_t query[PARTS][WIDES], head[PARTS][WIDES];
        for (ptrdiff_t l = 0; l < LANES; l++) {
            ptrdiff_t r = q + l < block->rows ? q + l : q;
            query[l % PARTS][l / PARTS] = (uint64_t)(draws->i + block->query[r]);
            head[l % PARTS][l / PARTS] = (uint64_t)(draws->h + block->head[r]);
        }
        for (ptrdiff_t quad = (j + low) / 4; 4 * quad < j + high; quad++) {
            WIDE c[PARTS][4], word[4][PARTS];
            for (ptrdiff_t part = 0; part < PARTS; part++) {
                c[part][0] = w_splat(quad);
                memcpy(&c[part][1], query[part], sizeof query[part]);
                memcpy(&c[part][2], head[part], sizeof head[part]);
                c[part][3] = w_splat(draws->b + block->b);
                FMHA_NAME(philox)(draws->seed, c[part]);
                for (int w = 0; w < 4; w++) word[w][part] = c[part][w];
            }
            for (int w = 0; w < 4; w++) {
                ptrdiff_t k = 4 * quad + w - j;
                if (k < low || k >= high) continue;
                VEC factor = FMHA_NAME(drop_factor)(draws, word[w]);
                v_store(x + k * ld + q, v_load(x + k * ld + q) * factor);
                if (kept) v_store(kept + k * ld + q, factor);
            }
        }
    }
}

/* Whether a block's values come from so far away that they are fetched beside its keys: as rows of whole panels, which is how the
 * product reads them, no CPU guesses them. */
static inline int FMHA_NAME(values_far)(const fmha_problem *p)
{
    return p->stored == FMHA_SAME && p->B * p->Hkv * p->Lk * (p->D + p->Dv) * (ptrdiff_t)sizeof(REAL) >= VALUES_FAR;
}

/* The distance of the rows of keys or values as a product is to fetch them beside itself: a block of few rows takes no longer than memory needs,
 * and memory is fastest at lines that follow each other. */
static inline ptrdiff_t FMHA_NAME(beside_by)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t ld)
{
    return block->rows <= BESIDE_ROWS && p->D == p->Dv && ld == p->D ? FMHA_IN_A_ROW : ld * (ptrdiff_t)sizeof(REAL);
}

/* scores^T (keys, queries) <- x (keys, depth) @ packed^T (depth, queries); banded: the spans alone. Beside rows of x those are fetched,
 * ld_beside bytes apart, unless that is NULL. */
static void FMHA_NAME(product_scores)(const FMHA_NAME(rows) *block, int banded, ptrdiff_t n, ptrdiff_t depth, const REAL *x, ptrdiff_t ldx,
                                      const REAL *packed, REAL *s, const char *beside, ptrdiff_t ld_beside)
{
    ptrdiff_t queries = block->queries, ld = block->ld, k = 0, count = 0, v0 = 0, v1 = 0;
    if (block->few.scratch) {
        FMHA_NAME(few_scores)(block->rows, queries, ld, n, depth, x, ldx, packed, &block->few, s);
        return;
    }
#if SCORES_OF_PAIRS
    if (!banded && block->rows <= PAIRED_ROWS) {
        FMHA_NAME(product_pairs)(n, depth, x, ldx, packed, ld, s, ld, beside, ld_beside);
        return;
    }
#endif
    if (!banded) FMHA_NAME(product_rows)(n, queries, depth, x, ldx, packed, ld, s, ld, beside, ld_beside);
    while (banded && FMHA_NAME(next_run)(block, n, &k, &count, &v0, &v1))
        FMHA_NAME(product_rows)(count, (v1 - v0) * LANES, depth, x + k * ldx, ldx, packed + v0 * LANES, ld,
                                s + k * ld + v0 * LANES, ld, beside ? beside + k * ld_beside : NULL, ld_beside);
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
    FMHA_NAME(product_scores)(block, banded, n, p->D, keys, ld, packed, s, block->values, FMHA_NAME(beside_by)(p, block, p->v.stride[2]));
    if (!lift) return;
    FMHA_NAME(set_control)(p);
    for (ptrdiff_t v = 0; v < block->queries / LANES; v++) {
        VEC factor = v_load(lift + v * LANES);
        for (ptrdiff_t k = block->low[v]; k < block->high[v]; k++) {
            REAL *at = s + k * block->ld + v * LANES;
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
    fmha_block head = {.b = block->b, .h = block->head[r]};
    return FMHA_NAME(removed)(p, &head, block->query[r], j);
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
            REAL factor = a[k * block->ld + r];
            int kind = FMHA_NAME(kind_of)(factor);
            if (done[r] || met[r] & (kind | FMHA_NAME(undefined)) || FMHA_NAME(pair_removed)(p, block, r, j + k, factor)) continue;
            done[r] = (unsigned char)FMHA_NAME(add_nonfinite_row)(width, factor, row, c + r * ldc, ask);
            met[r] |= (unsigned char)kind;
        }
    }
}

/* Inlined: to GCC a function that only fetches has no effect, and it leaves out the calls. */
INLINED void FMHA_NAME(fetch_part)(FMHA_NAME(next) *next, int part)
{
    if (!next) return;
    FMHA_NAME(part) *of = &next->part[part];
    for (; of->runs > 0; of->runs--, of->at += of->step)
        for (ptrdiff_t byte = 0; byte < of->bytes; byte += FMHA_CACHE_LINE) v_prefetch_far(of->at + byte);
}

/* `rows` rows of each of `heads` neighbouring heads from head h on, in as few runs as they lie in. */
static inline FMHA_NAME(part) FMHA_NAME(part_of)(const int type, const fmha_array *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t heads,
                                                 ptrdiff_t rows, ptrdiff_t width)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), head = x->stride[1] * size, row = x->stride[2] * size, bytes = width * size;
    const char *at = FMHA_NAME(row_in)(type, x, b, h, 0);
    if (row != bytes && rows > 1) return (FMHA_NAME(part)){at, rows, row, head == bytes ? heads * bytes : bytes};
    if (head != rows * bytes) return (FMHA_NAME(part)){at, heads, head, rows * bytes};
    return (FMHA_NAME(part)){at, 1, 0, heads * rows * bytes};
}

/* Where heads are short, of at most `near` bytes of keys and values, and what the pass reads lies far away, `far` bytes or more, a thread
 * at work on item `index` fetches an item that it will take, the next or a later one, see NEXT_BYTES. Returns `next`, or NULL where nothing
 * is. */
static FMHA_NAME(next) *FMHA_NAME(next_of)(const fmha_run *run, ptrdiff_t index, ptrdiff_t near, ptrdiff_t far, int backward,
                                           FMHA_NAME(next) *next)
{
    const fmha_problem *p = &run->p;
    if (run->cut.rows > BLOCK_ROWS) return NULL;
    const ptrdiff_t of_row = FMHA_NAME(stored_size)(p->element), of_key = FMHA_NAME(stored_size)(p->stored);
    const ptrdiff_t rows = (p->D + (backward ? 2 * p->Dv : 0)) * run->cut.rows * of_row, keys = (p->D + p->Dv) * p->Lk * of_key;
    const double bytes = run->all_bytes > 0 ? run->all_bytes : (double)(p->B * p->Hkv * (rows + keys));
    if (keys > near || bytes < (double)far) return NULL;
    ptrdiff_t then = fmha_later(run, index, 1 + NEXT_BYTES / (rows + keys + 1));
    if (then >= fmha_items(&run->cut)) {
        if (!run->behind) return NULL;
        then -= fmha_items(&run->cut);
        run = run->behind;
        p = &run->p;
        if (then >= fmha_items(&run->cut) || run->cut.rows > BLOCK_ROWS || (p->D + p->Dv) * p->Lk * of_key > near) return NULL;
    }
    const fmha_item item = fmha_item_of(&run->cut, then);
    const ptrdiff_t b = item.b, group = p->H / p->Hkv, h = item.h * group;
    next->part[0] = FMHA_NAME(part_of)(p->element, &p->q, b, h, group, p->Lq, p->D);
    next->part[1] = FMHA_NAME(part_of)(p->stored, &p->k, b, item.h, 1, p->Lk, p->D);
    next->part[2] = FMHA_NAME(part_of)(p->stored, &p->v, b, item.h, 1, p->Lk, p->Dv);
    next->part[3] = FMHA_NAME(part_of)(p->element, backward ? &run->grad_out : &run->out, b, h, group, p->Lq, p->Dv);
    next->part[4] = backward ? FMHA_NAME(part_of)(p->element, &run->out, b, h, group, p->Lq, p->Dv) : (FMHA_NAME(part)){.runs = 0};
    return next;
}
