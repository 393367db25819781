/* The "tiled" algorithm: attention in O(L) memory, scores kept transposed, S^T[key][query].
 *
 * Queries lie along the vector lanes: maxima, sums, rescaling and the causal comparison are vertical, no lane ever meets
 * another. The query block is packed transposed once (scale folded in); keys and values are read where they lie, keys as
 * broadcast scalars, values as rows. A block holds rows of the group's stacked heads: row r is head r / Lq, query r % Lq.
 *
 * Bits: a row's result depends on its own scores and the grid of key tiles alone. Sums over D and over keys run in their
 * order, one fused multiply-add per term; a tile in which a row attends nothing multiplies it by exp(0) = 1 and adds 0. Scores
 * of heads of few rows are summed in another order (by_fours), whatever the blocks that these are cut into. */

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

/* What a later item reads, to be fetched part by part: queries, keys, values, and backward grad_out and out; forward, the out
 * that it writes, which waits for its lines as well. A part is runs of so many bytes, each a step behind the one before. */
typedef struct {
    const char *at;
    ptrdiff_t runs, step, bytes;
} FMHA_NAME(part);

typedef struct {
    FMHA_NAME(part) part[5];
} FMHA_NAME(next);

struct FMHA_NAME(gathered);

/* One block of rows of the stacked heads of a group, and the scratch it works in; queries is rows in whole vectors, ld how far
 * apart rows of so many lie there. */
typedef struct {
    ptrdiff_t b, hkv, rows, queries, ld, width, value_width;    /* widths in whole vectors */
    ptrdiff_t j0, j1;                   /* keys that any row attends, */
    ptrdiff_t met0, met1;               /* and those that masks aside it would */
    int boolean, additive;              /* whether masks say more than the keys of each row below */
    /* keys that no causality, window or length, nor what mask_rows made of masks, removes from any row */
    ptrdiff_t common0, common1;
    ptrdiff_t head[BLOCK_ROWS], query[BLOCK_ROWS];
    ptrdiff_t row0[BLOCK_ROWS], row1[BLOCK_ROWS];           /* keys of each row */
    ptrdiff_t any0[BLOCK_VECTORS], any1[BLOCK_VECTORS];     /* keys that some row of a vector of rows attends, */
    ptrdiff_t all0[BLOCK_VECTORS], all1[BLOCK_VECTORS];     /* and those that all of its rows do */
    ptrdiff_t low[BLOCK_VECTORS], high[BLOCK_VECTORS];      /* keys of a vector at work, relative to the tile at hand */
    int by_fours;                       /* scores may be products of fours: of whole heads of few rows, however these are cut for threads */
    /* of few_scores, where that is to serve: then there is scratch, and operands are not packed transposed */
    FMHA_NAME(few) few;
    int written;                        /* the results of all rows: by a product that was the first and the last */
    FMHA_NAME(results) results;
    int lifted;                         /* scores are products times a lift of the rows */
    int limited;                        /* there are sums with reduced probabilities */
    REAL drowned;                       /* no score of the keys that were left out is above it */
    const struct FMHA_NAME(gathered) *gathered;     /* what of the head's keys and values is gathered, or NULL */
    const char *values;                 /* the values of the tile at hand, to be fetched beside its keys, or NULL, */
    ptrdiff_t of_value;                 /* and how far apart they are */
    FMHA_NAME(next) *next;              /* or NULL */
    FMHA_NAME(next) *ahead;             /* rows that are fetched beside scores of spans, or NULL */
    const char *then;                   /* the first keys of the item that the thread probably takes next, or NULL */
} FMHA_NAME(rows);

/* What a band and lengths leave the rows of a block, if these are of one head; else returns 0. Both ends grow with the row:
 * those of several rows are the ends of the first and of the last one that has keys, and these rows follow one another. */
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
    block->by_fours = BY_FOURS && group * p->Lq <= FOUR_ROWS;
    block->written = block->limited = 0;
    block->boolean = p->bool_mask.data != NULL;
    block->additive = p->additive_mask.data != NULL;
    block->gathered = NULL;
    block->values = NULL;
    block->of_value = p->v.stride[2];
    block->next = NULL;
    block->ahead = NULL;
    block->then = NULL;
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
/* A square of LANES rows and items, or of what there is of `rows` and `items`, each row `at` bytes on. The same of the rows that
 * come after these, `ahead` bytes on, are fetched: no CPU guesses so many streams, each as short as a row. */
INLINED void FMHA_NAME(pack_square)(const int sized, const int type, const int whole, ptrdiff_t rows, ptrdiff_t items,
                                    const char *const *row, ptrdiff_t at, ptrdiff_t ahead, REAL factor, VEC *squares, REAL *to,
                                    ptrdiff_t ld)
{
    static const REAL none[LANES];      /* of any type */
    const char *from[LANES];
    VEC part[LANES];
    /* Rows that are not there are read like the others: a branch for each would keep all squares out of the registers. */
    for (ptrdiff_t l = 0; !whole && l < LANES; l++) from[l] = l < rows ? row[l] + at : (const char *)none;
#pragma GCC unroll 16
    for (ptrdiff_t l = 0; l < LANES; l++) {
        if (whole) v_prefetch(row[l] + at + ahead);
        if (whole) part[l] = FMHA_NAME(stored_load)(type, row[l] + at) * factor;
        else part[l] = FMHA_NAME(stored_load_n)(type, from[l], items) * factor;
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
        row[0] = FMHA_NAME(row_in)(type, x, block->b, block->head[q], block->query[q]);
        if (block->head[q] == block->head[q + rows - 1]) {      /* evenly apart */
            for (ptrdiff_t l = 1; l < LANES; l++) row[l] = row[0] + (l < rows ? l : 0) * x->stride[2] * size;
        } else {
            for (ptrdiff_t l = 1; l < LANES; l++) {
                ptrdiff_t r = q + (l < rows ? l : 0);
                row[l] = FMHA_NAME(row_in)(type, x, block->b, block->head[r], block->query[r]);
            }
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
static REAL FMHA_NAME(few_rows_of)(const fmha_problem *p, const FMHA_NAME(rows) *block, const fmha_array *x, ptrdiff_t width,
                                   REAL factor, REAL *packed)
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

/* packed^T (D, queries), or of few rows packed (rows, D in whole vectors), <- scale * q / lift, where the lift of row r, a power
 * of 2, is what its scores must be multiplied by. Every row has its own, so that none depends on its company. Returns 0 only
 * where all lifts are 1 and q is finite. */
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

/* Whether rows so far apart, as those of a head among many are, share few sets of the caches, and are better copied where a
 * product reads them time and again: for every few of so many other rows. */
static inline int FMHA_NAME(crowded)(ptrdiff_t stride, ptrdiff_t width, ptrdiff_t others)
{
    return stride % (CROWDED_BYTES / (ptrdiff_t)sizeof(REAL)) == 0 && others >= CROWDED_ROWS && width < stride;
}

/* Whether rows do not all begin at cache lines, so that a panel of two vectors is two lines where it could be one. */
static inline int FMHA_NAME(askew)(const void *x, ptrdiff_t stride)
{
    return ((uintptr_t)x | (uintptr_t)(stride * (ptrdiff_t)sizeof(REAL))) % FMHA_CACHE_LINE != 0;
}

/* Whether a product with so many rows is better off with a copy of its values, which are not one that was converted. */
static inline int FMHA_NAME(better_copied)(const fmha_problem *p, const void *values, ptrdiff_t stride, ptrdiff_t rows)
{
    if (p->stored != FMHA_SAME) return 0;
    return FMHA_NAME(crowded)(stride, p->Dv, rows) || (LINED_VALUES && rows >= LINED_VALUES && FMHA_NAME(askew)(values, stride));
}

/* How far apart the rows of a copy of values are: in whole vectors, or in cache lines where a product reads them so. */
static inline ptrdiff_t FMHA_NAME(copied_width)(const fmha_problem *p)
{
    return ROUND_UP(p->Dv, LINED_VALUES && p->stored == FMHA_SAME ? LINE : LANES);
}

/* Of n rows, padded with zeros to whole vectors; what is not finite may become 0. `ahead`: fetched by so many rows, or 0. */
static void FMHA_NAME(lay_rows)(const REAL *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, int finite, ptrdiff_t ahead, REAL *copy, ptrdiff_t ld)
{
    for (ptrdiff_t i = 0; i < n; i++)
        for (ptrdiff_t d = 0; d < width; d += LANES) {
            if (ahead && d % LINE == 0) v_prefetch(x + (i + ahead) * stride + d);
            VEC value = v_load_n(x + i * stride + d, width - d, 0);
            v_store(copy + i * ld + d, finite ? value : v_select(v_equal(value - value, v_splat(0)), value, v_splat(0)));
        }
}

/* Rows [j, j + n) of a key/value head as rows of whole vectors: where they lie, or padded with zeros in `copy`. */
static const REAL *FMHA_NAME(whole_rows)(const REAL *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, int finite, int crowded, REAL *copy,
                                         ptrdiff_t *ld)
{
    const ptrdiff_t whole = ROUND_UP(width, LANES);
    if (finite && whole == width && !crowded) {
        *ld = stride;
        return x;
    }
    FMHA_NAME(lay_rows)(x, stride, n, width, finite, crowded ? CROWDED_AHEAD : 0, copy, whole);
    *ld = whole;
    return copy;
}

/* n values as rows of whole vectors for a product with so many rows: where they lie, or a copy. */
static inline const REAL *FMHA_NAME(value_rows)(const fmha_problem *p, const REAL *values, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t rows,
                                                int finite, REAL *copy, ptrdiff_t *ld)
{
    if (!finite || !FMHA_NAME(better_copied)(p, values, stride, rows))
        return FMHA_NAME(whole_rows)(values, stride, n, p->Dv, finite, 0, copy, ld);
    *ld = FMHA_NAME(copied_width)(p);
    FMHA_NAME(lay_rows)(values, stride, n, p->Dv, 1, CROWDED_AHEAD, copy, *ld);
    return copy;
}

/* The same of rows that a product broadcasts, which may be of any width, for so many columns: copied where that is better. */
static inline const REAL *FMHA_NAME(apart_rows)(const REAL *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, ptrdiff_t others, REAL *copy,
                                                ptrdiff_t *ld)
{
    *ld = stride;
    return CROWDED_KEYS && FMHA_NAME(crowded)(stride, width, others) ? FMHA_NAME(whole_rows)(x, stride, n, width, 1, 1, copy, ld) : x;
}

/* Whether a block's values come from so far away that they are fetched beside its keys: as rows of whole panels, which is how the
 * product reads them, no CPU guesses them. */
static inline int FMHA_NAME(values_far)(const fmha_run *run)
{
    const fmha_problem *p = &run->p;
    const double bytes = (double)(p->B * p->Hkv * p->Lk * (p->D + p->Dv) * (ptrdiff_t)sizeof(REAL));
    return p->stored == FMHA_SAME && (bytes >= VALUES_FAR || run->reach >= VALUES_FAR);
}

/* The distance of the rows of keys or values as a product is to fetch them beside itself: a block of few rows takes no longer
 * than memory needs, and memory is fastest at lines that follow each other. */
static inline ptrdiff_t FMHA_NAME(beside_by)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t ld)
{
    return block->rows <= BESIDE_ROWS && p->D == p->Dv && ld == p->D ? FMHA_IN_A_ROW : ld * (ptrdiff_t)sizeof(REAL);
}

/* `ahead` gets so many rows of x, of heads of the group from row i0 on, that are fetched as its part `part`: those of the first head. */
static inline void FMHA_NAME(set_ahead)(const fmha_problem *p, FMHA_NAME(next) *ahead, int part, const fmha_array *x, ptrdiff_t b,
                                        ptrdiff_t hkv, ptrdiff_t i0, ptrdiff_t rows)
{
    const ptrdiff_t h = hkv * (p->H / p->Hkv) + i0 / p->Lq, i = i0 % p->Lq;
    ahead->part[part] = (FMHA_NAME(part)){
        FMHA_NAME(row_in)(FMHA_SAME, x, b, h, i), rows < p->Lq - i ? rows : p->Lq - i, x->stride[2] * (ptrdiff_t)sizeof(REAL), 0};
}

/* So many rows at most of what is to be fetched, which are evenly apart, or NULL; they are done with then. */
static inline const char *FMHA_NAME(rows_ahead)(FMHA_NAME(next) *ahead, ptrdiff_t *rows, ptrdiff_t *step)
{
    for (FMHA_NAME(part) *of = ahead->part; of < ahead->part + 3; of++) {
        if (of->runs == 0) continue;
        const char *at = of->at;
        if (of->runs < *rows) *rows = of->runs;
        *step = of->step;
        of->at += *rows * of->step;
        of->runs -= *rows;
        return at;
    }
    return NULL;
}

/* scores^T (keys, queries) <- x (keys, depth) @ packed^T (depth, queries); banded: the spans alone. Beside rows of x those are
 * fetched, ld_beside bytes apart, unless that is NULL. */
static void FMHA_NAME(product_scores)(const FMHA_NAME(rows) *block, int banded, ptrdiff_t n, ptrdiff_t depth, const REAL *x, ptrdiff_t ldx,
                                      const REAL *packed, REAL *s, const char *beside, ptrdiff_t ld_beside)
{
    ptrdiff_t queries = block->queries, ld = block->ld, k = 0, count = 0, v0 = 0, v1 = 0;
    if (block->few.scratch) {
        FMHA_NAME(few_scores)(block->rows, queries, ld, n, depth, x, ldx, packed, &block->few, s);
        return;
    }
#if BY_FOURS
    if (block->by_fours && depth <= FOUR_DEPTH) {
        const ptrdiff_t low = banded ? block->low[0] : 0, high = banded ? block->high[0] : n;
        FMHA_NAME(product_fours)(block->rows, high - low, depth, x + low * ldx, ldx, packed, ld, s + low * ld, ld,
                                 banded ? NULL : beside, ld_beside);
        return;
    }
#endif
    if (!banded) FMHA_NAME(product_rows)(n, queries, depth, x, ldx, packed, ld, s, ld, beside, ld_beside);
    while (banded && FMHA_NAME(next_run)(block, n, &k, &count, &v0, &v1)) {
        const char *of = beside ? beside + k * ld_beside : NULL;
        for (ptrdiff_t done = 0, some = count; done < count; done += some, some = count - done) {
            ptrdiff_t step = ld_beside;
            const char *ahead = block->ahead ? FMHA_NAME(rows_ahead)(block->ahead, &some, &step) : NULL;
            FMHA_NAME(product_rows)(some, (v1 - v0) * LANES, depth, x + (k + done) * ldx, ldx, packed + v0 * LANES, ld,
                                    s + (k + done) * ld + v0 * LANES, ld, ahead ? ahead : of ? of + done * ld_beside : NULL, step);
        }
    }
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

/* scores^T (keys, queries) <- lift * (k (keys, D) @ packed^T (D, queries)); lift NULL: 1. With a row as large as LARGE_POWER,
 * keys below the smallest normal number count. */
static inline void FMHA_NAME(tile_scores)(const fmha_problem *p, const FMHA_NAME(rows) *block, int banded, ptrdiff_t n,
                                          const REAL *keys, ptrdiff_t ld,
                                          const REAL *packed, const REAL *lift, REAL *s)
{
    if (lift) fmha_keep_subnormal_operands();
    FMHA_NAME(product_scores)(block, banded, n, p->D, keys, ld, packed, s, block->values, FMHA_NAME(beside_by)(p, block, block->of_value));
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

/* Whether row r of the block may not attend key j; factor: what the pair has in the product, 0 if it is removed, but not only
 * then (and anything where a band leaves it out of the tile's work). */
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

/* Where what the pass reads lies far away, `far` bytes or more, a thread at work on item `index` fetches an item that it will take,
 * the next or a later one, see NEXT_BYTES: of short heads, of at most `near` bytes of keys and values, all of it, of longer ones
 * with few rows, forward, what these read and write. Returns `next`, or NULL where nothing is. */
static FMHA_NAME(next) *FMHA_NAME(next_of)(const fmha_run *run, ptrdiff_t index, ptrdiff_t near, ptrdiff_t far, int backward,
                                           FMHA_NAME(next) *next)
{
    const fmha_problem *p = &run->p;
    if (run->cut.rows > BLOCK_ROWS) return NULL;
    const ptrdiff_t of_row = FMHA_NAME(stored_size)(p->element), of_key = FMHA_NAME(stored_size)(p->stored);
    const ptrdiff_t rows = (p->D + (backward ? 2 * p->Dv : 0)) * run->cut.rows * of_row, keys = (p->D + p->Dv) * p->Lk * of_key;
    double bytes = run->all_bytes > 0 ? run->all_bytes : (double)(p->B * p->Hkv * (rows + keys));
    if (bytes < run->reach) bytes = run->reach;
    const int alone = keys > near;      /* the rows without keys and values */
    if ((alone && (backward || run->cut.rows > BESIDE_ROWS)) || bytes < (double)far) return NULL;
    ptrdiff_t then = fmha_later(run, index, 1 + NEXT_BYTES / (rows + keys + 1));
    if (then >= fmha_items(&run->cut)) {
        if (!run->behind) return NULL;
        then -= fmha_items(&run->cut);
        run = run->behind;
        p = &run->p;
        if (then >= fmha_items(&run->cut) || run->cut.rows > BLOCK_ROWS || (!alone && (p->D + p->Dv) * p->Lk * of_key > near)) return NULL;
    }
    const fmha_item item = fmha_item_of(&run->cut, then);
    const ptrdiff_t b = item.b, group = p->H / p->Hkv, h = item.h * group;
    next->part[0] = FMHA_NAME(part_of)(p->element, &p->q, b, h, group, p->Lq, p->D);
    next->part[1] = FMHA_NAME(part_of)(p->stored, &p->k, b, item.h, 1, p->Lk, p->D);
    next->part[2] = FMHA_NAME(part_of)(p->stored, &p->v, b, item.h, 1, p->Lk, p->Dv);
    if (alone) next->part[1].runs = next->part[2].runs = 0;
    next->part[3] = FMHA_NAME(part_of)(p->element, backward ? &run->grad_out : &run->out, b, h, group, p->Lq, p->Dv);
    next->part[4] = backward ? FMHA_NAME(part_of)(p->element, &run->out, b, h, group, p->Lq, p->Dv) : (FMHA_NAME(part)){.runs = 0};
    return next;
}
