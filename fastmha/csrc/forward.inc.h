/* The "tiled" algorithm forward: one block of query rows against its keys, tile after tile, by an online softmax; of keys beyond
 * FMHA_RUN_KEYS every run of so many has a softmax of its own, and they are merged in their order: in one item, or each run in
 * an item and their merging in another, or a run in parts, an item each, that go on one after the other, where that keeps more
 * threads busy. The bits are the same. */

/* Of the rows of a block against some keys: peak and total of each, sums of out (queries, value width), and the same with reduced
 * probabilities, or NULL. */
typedef struct {
    REAL *peak, *total, *out, *limited;
} FMHA_NAME(softmaxes);

/* Scratch of one thread: q^T scaled (D, queries), scores^T (keys, queries); the softmaxes of a block, and those of a run of keys
 * behind the first; of each query what its sums shrink by, and the lift of its scores; keys or values (keys, width) where they
 * must be copied; keys or values where they must be converted; results (queries, value width) before they are rounded, where
 * they are; sums of a block, and of a run behind, with reduced probabilities. */
typedef struct {
    REAL *packed, *scores, *out, *peak, *total, *shrink, *lift, *copy, *converted, *result, *limited, *limited_run;
    FMHA_NAME(softmaxes) run;
} FMHA_NAME(forward_memory);

/* Returns the size in REALs; without memory that is all. */
static ptrdiff_t FMHA_NAME(softmaxes_layout)(const fmha_problem *p, ptrdiff_t rows, REAL *memory, FMHA_NAME(softmaxes) *x)
{
    ptrdiff_t used = 0;
    x->peak = FMHA_NAME(take)(memory, &used, rows);
    x->total = FMHA_NAME(take)(memory, &used, rows);
    x->out = FMHA_NAME(take)(memory, &used, ROUND_UP(p->Dv, LANES) * rows);
    x->limited = NULL;
    return used;
}

static ptrdiff_t FMHA_NAME(run_scratch)(const fmha_problem *p)
{
    FMHA_NAME(softmaxes) unused;
    return FMHA_NAME(softmaxes_layout)(p, fmha_run_rows(p), NULL, &unused);
}

/* For so many keys at a time, TILE_KEYS or more. Returns the size in REALs; without memory that is all. */
static ptrdiff_t FMHA_NAME(forward_layout)(const fmha_problem *p, ptrdiff_t keys, REAL *memory, FMHA_NAME(forward_memory) *m)
{
    ptrdiff_t used = 0, value_width = ROUND_UP(p->Dv, LANES);
    m->packed = FMHA_NAME(take)(memory, &used, p->D * BLOCK_LD);
    m->scores = FMHA_NAME(take)(memory, &used, keys * BLOCK_LD);
    m->out = FMHA_NAME(take)(memory, &used, value_width * BLOCK_ROWS);
    m->peak = FMHA_NAME(take)(memory, &used, BLOCK_ROWS);
    m->total = FMHA_NAME(take)(memory, &used, BLOCK_ROWS);
    m->shrink = FMHA_NAME(take)(memory, &used, BLOCK_ROWS);
    m->lift = FMHA_NAME(take)(memory, &used, BLOCK_ROWS);
    const ptrdiff_t values = keys * FMHA_NAME(copied_width)(p), crowded = CROWDED_KEYS ? TILE_KEYS * ROUND_UP(p->D, LANES) : 0;
    m->copy = FMHA_NAME(take)(memory, &used, values > crowded ? values : crowded);      /* of a tile's keys, then of the values */
    m->converted = FMHA_NAME(take)(memory, &used, FMHA_NAME(computed_scratch)(p, keys));
    m->result = FMHA_NAME(take)(memory, &used, p->element == FMHA_SAME ? 0 : value_width * BLOCK_ROWS);
    used += FMHA_NAME(softmaxes_layout)(p, BLOCK_ROWS, memory ? memory + used : NULL, &m->run);
    m->limited = FMHA_NAME(take)(memory, &used, value_width * BLOCK_ROWS);
    m->limited_run = FMHA_NAME(take)(memory, &used, value_width * BLOCK_ROWS);
    return used;
}

static ptrdiff_t FMHA_NAME(forward_scratch)(const fmha_problem *p)
{
    FMHA_NAME(forward_memory) unused;
    return FMHA_NAME(forward_layout)(p, TILE_KEYS, NULL, &unused);
}

static inline REAL *FMHA_NAME(scratch_of)(const fmha_run *run, int worker)
{
    return (REAL *)(run->scratch + worker * run->scratch_size);
}

/* Online softmax of `vectors` columns of queries: s <- exp(s - peak), peak and total kept up to date; scale gets what all
 * that was summed before must be multiplied by. Several keys at a time, or each step would wait for the one before. */
INLINED void FMHA_NAME(softmax_columns)(const int vectors, ptrdiff_t n, ptrdiff_t ld, REAL *s, REAL *peak, REAL *total, REAL *scale)
{
    const int keys = EXP_CHAINS / vectors, some = keys * vectors;
    VEC shift[MICRO_VECTORS], best[EXP_CHAINS], sum[MICRO_VECTORS][KEY_STEP];   /* even and odd keys apart: shorter sums err less */
    ptrdiff_t k = 0;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) best[v] = v_load(peak + v * LANES);
    if (n >= keys) {
#pragma GCC unroll 8
        for (int i = vectors; i < some; i++) best[i] = best[i % vectors];
        for (; k + keys <= n; k += keys)
#pragma GCC unroll 8
            for (int i = 0; i < some; i++) {
                VEC score = v_load(s + (k + i / vectors) * ld + i % vectors * LANES);
                best[i] = v_max(score, best[i]);
            }
#define HALVED(half) \
        _Pragma("GCC unroll 4") \
        for (int i = 0; some >= 2 * (half) && vectors <= (half) && i < (half); i++) best[i] = v_max(best[i + (half)], best[i]);
        HALVED(4)
        HALVED(2)
        HALVED(1)
#undef HALVED
    }
    for (; k < n; k++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            VEC score = v_load(s + k * ld + v * LANES);
            best[v] = v_max(score, best[v]);
        }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        VEC before = v_load(peak + v * LANES);
        v_store(peak + v * LANES, best[v]);
        shift[v] = v_select(v_equal(best[v], v_splat(NEGATIVE_INFINITY)), v_splat(0), best[v]);
        best[v] = before - shift[v];
    }
    FMHA_NAME(exp_each)(vectors, best);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        v_store(scale + v * LANES, best[v]);
        v_store(total + v * LANES, v_load(total + v * LANES) * best[v]);
        sum[v][0] = sum[v][1] = v_splat(0);
    }
    for (k = 0; k + keys <= n; k += keys) {
        VEC e[EXP_CHAINS];
        REAL *at = s + k * ld;
#pragma GCC unroll 8
        for (int i = 0; i < some; i++) e[i] = v_load(at + i / vectors * ld + i % vectors * LANES) - shift[i % vectors];
        FMHA_NAME(exp_each)(some, e);
#pragma GCC unroll 8
        for (int i = 0; i < some; i++) {
            v_store(at + i / vectors * ld + i % vectors * LANES, e[i]);
            sum[i % vectors][i / vectors % KEY_STEP] = sum[i % vectors][i / vectors % KEY_STEP] + e[i];
        }
    }
    for (; k < n; k += KEY_STEP)
#pragma GCC unroll 2
        for (int odd = 0; odd < KEY_STEP; odd++) {
            VEC e[MICRO_VECTORS];
            if (k + odd == n) break;
            REAL *at = s + (k + odd) * ld;
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) e[v] = v_load(at + v * LANES) - shift[v];
            FMHA_NAME(exp_each)(vectors, e);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                v_store(at + v * LANES, e[v]);
                sum[v][odd] = sum[v][odd] + e[v];
            }
        }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
        v_store(total + v * LANES, v_load(total + v * LANES) + (sum[v][0] + sum[v][1]));
}

#if HAVE_SHUFFLES
/* The same of rows that fill half of a vector at most: two keys share one, and lanes behind the rows are anything afterwards. Every
 * sum has the same terms in the same order: the same bits. */
static __attribute__((noinline)) void FMHA_NAME(softmax_halves)(ptrdiff_t n, ptrdiff_t ld, REAL *s, REAL *peak, REAL *total, REAL *scale)
{
    const VEC none = v_splat(NEGATIVE_INFINITY), before = FMHA_NAME(lower_halves)(v_load(peak), v_load(peak));
    const ptrdiff_t some = 2 * EXP_CHAINS;
    VEC best[EXP_CHAINS], e[EXP_CHAINS], sum = v_splat(0);
    ptrdiff_t k = 0;
#define TWO_KEYS(at) FMHA_NAME(lower_halves)(v_load(at), v_load((at) + ld))
#pragma GCC unroll 8
    for (int i = 0; i < EXP_CHAINS; i++) best[i] = before;
    for (; k + some <= n; k += some)
#pragma GCC unroll 8
        for (int i = 0; i < EXP_CHAINS; i++) best[i] = v_max(TWO_KEYS(s + (k + 2 * i) * ld), best[i]);
    for (; k < n; k += 2) best[0] = v_max(k + 1 < n ? TWO_KEYS(s + k * ld) : FMHA_NAME(lower_halves)(v_load(s + k * ld), none), best[0]);
#pragma GCC unroll 8
    for (int i = 1; i < EXP_CHAINS; i++) best[0] = v_max(best[i], best[0]);
    const VEC most = v_max(FMHA_NAME(turned)(best[0], LANES / 2), best[0]), shift = v_select(v_equal(most, none), v_splat(0), most);
    VEC shrink = before - shift;
    FMHA_NAME(exp_each)(1, &shrink);
    v_store(peak, most);
    v_store(scale, shrink);
    v_store(total, v_load(total) * shrink);      /* rounded, as above */
    for (k = 0; k + some <= n; k += some) {
        REAL *at = s + k * ld;
#pragma GCC unroll 8
        for (int i = 0; i < EXP_CHAINS; i++) e[i] = TWO_KEYS(at + 2 * i * ld) - shift;
        FMHA_NAME(exp_each)(EXP_CHAINS, e);
#pragma GCC unroll 8
        for (int i = 0; i < EXP_CHAINS; i++) {
            v_store(at + 2 * i * ld, e[i]);
            v_store(at + (2 * i + 1) * ld, FMHA_NAME(turned)(e[i], LANES / 2));
            sum = sum + e[i];
        }
    }
    for (; k < n; k += 2) {
        REAL *at = s + k * ld;
        e[0] = (k + 1 < n ? TWO_KEYS(at) : FMHA_NAME(lower_halves)(v_load(at), none)) - shift;
        FMHA_NAME(exp_each)(1, e);
        v_store(at, e[0]);
        if (k + 1 < n) v_store(at + ld, FMHA_NAME(turned)(e[0], LANES / 2));
        sum = sum + e[0];
    }
#undef TWO_KEYS
    v_store(total, v_load(total) + (sum + FMHA_NAME(turned)(sum, LANES / 2)));
}
#endif

/* Of all vectors of rows; of each the keys of its span alone where banded. */
static __attribute__((noinline)) void FMHA_NAME(softmax_block)(const FMHA_NAME(rows) *block, int banded, ptrdiff_t n, REAL *s, REAL *peak,
                                                               REAL *total, REAL *scale)
{
    ptrdiff_t queries = block->queries, ld = block->ld;
#if HAVE_SHUFFLES
    if (block->rows <= LANES / 2) {
        const ptrdiff_t low = banded ? block->low[0] : 0, high = banded ? block->high[0] : n;
        if (low < high) FMHA_NAME(softmax_halves)(high - low, ld, s + low * ld, peak, total, scale);
        return;
    }
#endif
    for (ptrdiff_t q = 0; banded && q < queries; q += LANES) {
        ptrdiff_t low = block->low[q / LANES], high = block->high[q / LANES];
        if (low < high)
            FMHA_NAME(softmax_columns)(1, high - low, ld, s + low * ld + q, peak + q, total + q, scale + q);
    }
    if (banded) return;
    for (ptrdiff_t q = 0; q < queries; q += MICRO_VECTORS * LANES) {
        ptrdiff_t vectors = (queries - q) / LANES;
        if (vectors >= MICRO_VECTORS)
            FMHA_NAME(softmax_columns)(MICRO_VECTORS, n, ld, s + q, peak + q, total + q, scale + q);
        else
            for (ptrdiff_t v = 0; v < vectors; v++)
                FMHA_NAME(softmax_columns)(1, n, ld, s + q + v * LANES, peak + q + v * LANES, total + q + v * LANES,
                                           scale + q + v * LANES);
    }
}

/* What a pass over a block's keys is for, beside the ordinary one. */
enum {
    FMHA_NAME(careful) = 1,     /* the firewall: zeros for what is not finite in partly removed tiles, and the allowed pairs added */
    FMHA_NAME(reduced) = 2,     /* probabilities so small that no sum of finite values overflows */
    FMHA_NAME(raised) = 4,      /* values times SUBNORMAL_LIFT */
    FMHA_NAME(straight) = 8,    /* an ordinary one whose results may be written at once */
    FMHA_NAME(hopeful) = 16,    /* an ordinary one without the keys that an additive mask probably drowns: see is_drowned */
    FMHA_NAME(continued) = 32,  /* an ordinary one that goes on: there are sums of out */
    FMHA_NAME(tiny) = 64,       /* a raised one whose values are tiny; "decode" gives it up where one is not */
    FMHA_NAME(large) = 128      /* an ordinary one and a reduced one at once, of the same probabilities */
};

/* The factor that makes sums over all keys finite. */
static inline REAL FMHA_NAME(reduction)(const fmha_problem *p)
{
    REAL factor = (REAL)0.5;
    double most = p->dropout.factor > 1 ? p->dropout.factor * (double)p->Lk : (double)p->Lk;
    for (double n = 1; n < most; n *= 2) factor /= 2;
    return factor;
}

/* The online softmax of a block before its first key: of nothing, or of the sinks. */
static void FMHA_NAME(begin_rows)(const fmha_problem *p, const FMHA_NAME(rows) *block, REAL *peak, REAL *total)
{
    for (ptrdiff_t q = 0; q < block->queries; q++) {
        peak[q] = q < block->rows ? FMHA_NAME(sink)(p, block->head[q]) : NEGATIVE_INFINITY;
        total[q] = peak[q] == NEGATIVE_INFINITY ? 0 : 1;
    }
}

/* Whether a block attends keys of the run from key j on, masks aside: no matter how much of these is known. */
static inline int FMHA_NAME(meets_run)(const FMHA_NAME(rows) *block, ptrdiff_t j)
{
    return j < block->met1 && j + FMHA_RUN_KEYS > block->met0;
}

/* to (rows, value width) <- itself times shrink + from times grow. */
static void FMHA_NAME(merge_sums)(const FMHA_NAME(rows) *block, const REAL *shrink, const REAL *grow, const REAL *from, REAL *to)
{
    for (ptrdiff_t r = 0; r < block->rows; r++, to += block->value_width, from += block->value_width)
        for (ptrdiff_t d = 0; d < block->value_width; d += LANES) v_store(to + d, v_load(to + d) * shrink[r] + v_load(from + d) * grow[r]);
}

/* Each row of a block's softmaxes <- itself and that of a run of keys behind as one. */
static __attribute__((noinline)) void FMHA_NAME(merge_run)(const FMHA_NAME(rows) *block, const FMHA_NAME(softmaxes) *run,
                                                           const FMHA_NAME(softmaxes) *sums)
{
    REAL shrink[BLOCK_ROWS], grow[BLOCK_ROWS];
    const VEC none = v_splat(NEGATIVE_INFINITY);
    for (ptrdiff_t q = 0; q < block->queries; q += LANES) {
        VEC before = v_load(sums->peak + q), behind = v_load(run->peak + q), peak = v_max(behind, before);
        VEC shift = v_select(v_equal(peak, none), v_splat(0), peak);
        VEC a = FMHA_NAME(exp)(before - shift), b = FMHA_NAME(exp)(behind - shift);
        v_store(sums->peak + q, peak);
        v_store(sums->total + q, v_load(sums->total + q) * a + v_load(run->total + q) * b);
        v_store(shrink + q, a);
        v_store(grow + q, b);
    }
    FMHA_NAME(merge_sums)(block, shrink, grow, run->out, sums->out);
    if (sums->limited) FMHA_NAME(merge_sums)(block, shrink, grow, run->limited, sums->limited);
}

/* The softmaxes of a block before the first key of a run, from key `first` on: of nothing, or before all keys of the sinks. Sums
 * of out are none yet, not even zeros. */
static void FMHA_NAME(begin_run)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t first, const FMHA_NAME(softmaxes) *to)
{
    if (first == 0) FMHA_NAME(begin_rows)(p, block, to->peak, to->total);
    for (ptrdiff_t q = 0; first > 0 && q < block->queries; q++) {
        to->peak[q] = NEGATIVE_INFINITY;
        to->total[q] = 0;
    }
}

static inline ptrdiff_t FMHA_NAME(bytes_written)(const fmha_problem *p) { return p->B * p->H * p->Lq * p->Dv * (ptrdiff_t)sizeof(REAL); }

static inline int FMHA_NAME(written_far)(const fmha_problem *p) { return FMHA_NAME(bytes_written)(p) >= WRITTEN_FAR; }

/* Whether results of n keys are written row by row behind their sums. */
static inline int FMHA_NAME(written_rowwise)(const fmha_problem *p, ptrdiff_t n)
{
    return n <= ROWWISE_KEYS && p->Dv >= ROWWISE_WIDTH && p->Dv % LANES != 0 && FMHA_NAME(written_far)(p)
           && FMHA_NAME(bytes_written)(p) <= ROWWISE_BYTES;
}

/* Whether the tile at hand, n keys from key j on, is all that the block attends and its sums are its results, which may be
 * written at once: of a single head, whose rows of out are evenly apart; with ordinary totals; and no band leaves a vector of
 * rows nothing. Then inverse (rows) is what the sums are multiplied by. */
static int FMHA_NAME(all_at_once)(const fmha_problem *p, const FMHA_NAME(rows) *block, int banded, ptrdiff_t j, ptrdiff_t n,
                                  const REAL *total,
                                  REAL *inverse)
{
    if (j > block->j0 || j + n < block->j1 || p->element != FMHA_SAME || p->Dv == 0 || block->head[0] != block->head[block->rows - 1]) return 0;
    if (FMHA_NAME(written_rowwise)(p, n)) return 0;
    int ordinary = 1;
    for (ptrdiff_t v = 0; banded && v < block->queries / LANES; v++) ordinary &= block->low[v] < block->high[v];
    for (ptrdiff_t q = 0; q < block->rows; q += LANES) {
        const VEC of = v_load_n(total + q, block->rows - q, 1);
        ordinary &= !v_any(~(v_greater(of, v_splat(0)) & v_greater(v_splat((REAL)INFINITY), of)));
        v_store(inverse + q, v_splat(1) / of);
    }
    return ordinary;
}

/* Where the heads have several blocks and lie far away, the queries of the block that the thread probably takes next are fetched
 * beside. */
static FMHA_NAME(results) FMHA_NAME(results_of)(const fmha_run *run, const FMHA_NAME(rows) *block, int banded)
{
    const fmha_problem *p = &run->p;
    FMHA_NAME(results) results = {.width = p->Dv, .ld = p->q.stride[2] * (ptrdiff_t)sizeof(REAL)};
    if (!banded && p->Lq > BLOCK_ROWS && p->B * p->H * p->Lq * p->D * (ptrdiff_t)sizeof(REAL) >= WRITTEN_FAR)
        results.then = FMHA_NAME(row_in)(FMHA_SAME, &p->q, block->b, block->head[0],
                                         block->query[0]) + run->threads * BLOCK_ROWS * results.ld;
    return results;
}

/* Of n keys from key j on, those are left out, the first and the last ones, that an additive mask drowns beside keys that it
 * leaves alone. */
static void FMHA_NAME(leave_out)(const fmha_problem *p, FMHA_NAME(rows) *block, const REAL *packed, ptrdiff_t *j,
                                 ptrdiff_t *n, REAL *converted)
{
    ptrdiff_t ahead, behind, ld;
    const REAL most = FMHA_NAME(low_ends)(p, block, *j, *n, &ahead, &behind);
    REAL k = 0, v = 0;
    if (ahead + behind == 0) return;
    for (int end = 0; end < 2; end++) {
        const ptrdiff_t many = end ? behind : ahead, from = end ? *j + *n - behind : *j;
        const REAL *rows = FMHA_NAME(computed_rows)(p, &p->k, block->b, block->hkv, from, many, p->D, converted, &ld);
        k += FMHA_NAME(power)(many, p->D, rows, ld);
        rows = FMHA_NAME(computed_rows)(p, &p->v, block->b, block->hkv, from, many, p->Dv, converted, &ld);
        v += FMHA_NAME(power)(many, p->Dv, rows, ld);
    }
    const REAL scores = FMHA_NAME(drowned_scores)(most, FMHA_NAME(power)(p->D, block->queries, packed, block->ld), k, v);
    if (scores == (REAL)INFINITY) return;
    if (scores > block->drowned) block->drowned = scores;
    *j += ahead;
    *n -= ahead + behind;
}

/* Whether all rows have a score above `drowned` that drowns those of the keys that were left out, if any were: those that
 * before, in `whole`, had keys. */
static int FMHA_NAME(is_drowned)(const FMHA_NAME(rows) *whole, REAL drowned, const REAL *peak)
{
    int all = 1;
    if (drowned == NEGATIVE_INFINITY) return 1;
    for (ptrdiff_t r = 0; r < whole->rows; r++) all &= peak[r] + (REAL)EXP_ZERO > drowned || whole->row0[r] >= whole->row1[r];
    return all;
}

/* out (queries, Dv) <- shrink * out + probabilities^T (keys, queries)^T @ values (n keys, Dv), banded: of the span of each
 * vector of rows; none: of no sums so far; or where the block is written, times inverse, into the results. next_keys: those of
 * the next tile, of_key bytes apart, which are fetched beside values, or NULL. */
static void FMHA_NAME(tile_values)(const fmha_run *run, FMHA_NAME(rows) *block, int banded, ptrdiff_t n, const REAL *s, const REAL *values,
                                   ptrdiff_t ldv, int none, REAL *out, const REAL *shrink, const REAL *inverse,
                                           const char *next_keys, ptrdiff_t of_key)
{
    const ptrdiff_t lds = block->ld, value_width = block->value_width;
    for (ptrdiff_t q = 0; q < block->rows; q += banded ? LANES : block->rows) {
        const ptrdiff_t low = banded ? block->low[q / LANES] : 0, many = banded ? block->high[q / LANES] - low : n;
        const ptrdiff_t own = banded && block->rows - q > LANES ? LANES : block->rows - q;
        const REAL *a = s + low * lds + q, *b = values + low * ldv;
        const char *beside = many == n ? next_keys : NULL;
        REAL *c = out + q * value_width;
        if (block->written) {
            REAL *result = (REAL *)FMHA_NAME(row_in)(FMHA_SAME, &run->out, block->b, block->head[q], block->query[q]);
            FMHA_NAME(product_columns_results)(own, many, a, lds, b, ldv, result, run->out.stride[2], inverse + q, &block->results);
            continue;
        }
        /* 8 rows are one register tile, 7 are two: what an empty lane gives lies behind them, where nobody looks. */
        const ptrdiff_t taken = own == 7 && LANES >= 8 ? 8 : own;
        if ((BY_FOURS || AGAIN_ROWS) && many && (block->by_fours || (run->reach >= DECODE_MEMORY && block->rows <= AGAIN_ROWS)))
            FMHA_NAME(product_columns_far)(none, taken, value_width, many, a, lds, b, ldv, c, value_width, shrink + q, beside, of_key);
        else if (many && none) FMHA_NAME(product_columns_first)(taken, value_width, many, a, lds, b, ldv, c, value_width, beside, of_key);
        else if (many) FMHA_NAME(product_columns)(taken, value_width, many, a, lds, b, ldv, c, value_width, shrink + q, beside, of_key);
        else if (none) memset(c, 0, (size_t)(own * value_width) * sizeof(REAL));
    }
}

/* The keys that follow those of the tile from key `start` on: of the next tile, or of the item behind, whose first ones have been
 * fetched beside the tile before where they lie behind this head's last. Or NULL. */
static inline const char *FMHA_NAME(keys_after)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t start)
{
    const char *next = FMHA_NAME(stored_row)(p, &p->k, block->b, block->hkv, start + TILE_KEYS);
    if (start + TILE_KEYS < block->j1 || !block->then) return start + TILE_KEYS < block->j1 ? next : NULL;
    return start > 0 && block->then == (const char *)FMHA_NAME(stored_row)(p, &p->k, block->b, block->hkv, p->Lk) ? next : block->then;
}

/* Probabilities^T (n keys, queries) so small that no sum of finite values overflows. */
static void FMHA_NAME(reduce)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t n, REAL *s)
{
    const REAL factor = FMHA_NAME(reduction)(p);
    for (ptrdiff_t k = 0; k < n; k++)
        for (ptrdiff_t q = k * block->ld; q < k * block->ld + block->queries; q += LANES) v_store(s + q, v_load(s + q) * factor);
}

/* One block, whose queries are packed, against its keys of [first, last): makes the softmaxes of these, which are begun and have
 * no sums of out, unless it goes on. Returns whether some tile was touched. */
static int FMHA_NAME(forward_keys)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(forward_memory) *m, const REAL *lift,
                                   const FMHA_NAME(softmaxes) *to, ptrdiff_t first, ptrdiff_t last, int purpose)
{
    const fmha_problem *p = &run->p;
    ptrdiff_t value_width = block->value_width, ld, ldv;
    REAL *packed = m->packed, *s = m->scores, *out = to->out, *peak = to->peak, *total = to->total, *shrink = m->shrink;
    REAL *copy = m->copy, *converted = m->converted;
    int partly = 0, none = !(purpose & FMHA_NAME(continued));      /* none: no sums of out yet */
    const int far = FMHA_NAME(values_far)(run);
    const ptrdiff_t of_key = FMHA_NAME(beside_by)(p, block, p->k.stride[2]);
    const int keys_far = far && block->rows <= KEYS_BESIDE && !FMHA_NAME(has_gathered)(block, 0);
    if (first < block->j0) first = block->j0;
    if (last > block->j1) last = block->j1;
    /* The grid of tiles starts at key 0 whatever the block, so that a row meets the same tiles in any company. */
    for (ptrdiff_t start = first / TILE_KEYS * TILE_KEYS; start < last && !fmha_pool_stopped(); start += TILE_KEYS) {
        /* Keys before j0 are left out, by steps, or the sums of even and odd keys would change places. */
        ptrdiff_t j = start < block->j0 ? block->j0 / KEY_STEP * KEY_STEP : start;
        ptrdiff_t n = (last < start + TILE_KEYS ? last : start + TILE_KEYS) - j;
        int touched = FMHA_NAME(touched)(block, j, n), banded = 0, careful = touched && (purpose & FMHA_NAME(careful));
        if (touched && FMHA_NAME(tile_removed)(p, block, j, n)) continue;
        partly |= touched;
        if (purpose & FMHA_NAME(hopeful)) FMHA_NAME(leave_out)(p, block, packed, &j, &n, converted);
        if (n == 0) continue;
        const REAL *keys = FMHA_NAME(keys_of_block)(p, block, j, n, converted, &ld);
        if (!FMHA_NAME(has_gathered)(block, 0)) keys = FMHA_NAME(apart_rows)(keys, ld, n, p->D, block->queries, copy, &ld);
        block->values = far ? FMHA_NAME(values_ahead)(p, block, j) : NULL;
        /* scores^T (keys, queries) <- k (keys, D) @ (scale * q)^T (D, queries) */
        FMHA_NAME(fetch_part)(block->next, 0);
        FMHA_NAME(tile_scores)(p, block, FMHA_NAME(set_spans)(block, j, n, GRANULE), n, keys, ld, packed, lift, s);
        FMHA_NAME(fetch_part)(block->next, 1);
        /* Where a band ends in the tile, each vector of rows works on its own keys: by steps, as above. */
        if (touched || FMHA_NAME(rescored)(p)) {
            banded = FMHA_NAME(set_spans)(block, j, n, KEY_STEP);
            FMHA_NAME(mask_tile)(p, block, j, s, NULL);
        }
        FMHA_NAME(softmax_block)(block, banded, n, s, peak, total, shrink);
        FMHA_NAME(fetch_part)(block->next, 2);
        FMHA_NAME(fetch_part)(block->next, 3);
        if (purpose & FMHA_NAME(reduced)) FMHA_NAME(reduce)(p, block, n, s);
        if (p->dropout.factor != 0) FMHA_NAME(drop_tile)(p, block, j, s, NULL);
        const REAL *values = FMHA_NAME(values_of_block)(p, block, j, n, converted, &ld), *rows = copy;
        ldv = value_width;
        if (purpose & FMHA_NAME(tiny)) {
            FMHA_NAME(lift_tiny)(n, p->Dv, values, ld, copy, value_width);
        } else if (purpose & FMHA_NAME(raised)) {
            memset(copy, 0, (size_t)(n * value_width) * sizeof(REAL));
            FMHA_NAME(lift_rows)(n, p->Dv, values, ld, copy, value_width);
        } else if (FMHA_NAME(has_gathered)(block, 1) && !careful) {
            rows = values;
            ldv = ld;
        } else {
            rows = FMHA_NAME(value_rows)(p, values, ld, n, block->rows, !careful, copy, &ldv);
        }
        REAL inverse[BLOCK_ROWS];
        if (purpose & FMHA_NAME(straight) && none && FMHA_NAME(all_at_once)(p, block, banded, j, n, total, inverse)) {
            block->written = 1;
            block->results = FMHA_NAME(results_of)(run, block, banded);
        }
        const char *next_keys = keys_far ? FMHA_NAME(keys_after)(p, block, start) : NULL;
        FMHA_NAME(tile_values)(run, block, banded, n, s, rows, ldv, none, out, shrink, inverse, next_keys, of_key);
        if (careful) FMHA_NAME(tile_nonfinite)(p, block, j, n, s, values, ld, p->Dv, out, value_width);
        if (to->limited) {
            FMHA_NAME(reduce)(p, block, n, s);
            FMHA_NAME(tile_values)(run, block, banded, n, s, rows, ldv, none, to->limited, shrink, inverse, NULL, 0);
        }
        none = 0;
    }
    if (none) memset(out, 0, (size_t)(block->rows * value_width) * sizeof(REAL));
    if (none && to->limited) memset(to->limited, 0, (size_t)(block->rows * value_width) * sizeof(REAL));
    return partly;
}

/* One block against all its keys, whose results may be written by that. Returns whether some tile was touched. */
static int FMHA_NAME(forward_block)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(forward_memory) *m, int purpose)
{
    const fmha_problem *p = &run->p;
    const int large = purpose & FMHA_NAME(large);
    const FMHA_NAME(softmaxes) sums = {m->peak, m->total, m->out, large ? m->limited : NULL},
            behind = {m->run.peak, m->run.total, m->run.out, large ? m->limited_run : NULL};
    const REAL *lift = FMHA_NAME(pack_queries)(p, block, m->packed, m->lift) ? m->lift : NULL;
    block->written = 0;
    block->lifted = lift != NULL;
    block->limited = large != 0;
    block->drowned = NEGATIVE_INFINITY;
    if (lift) purpose &= ~FMHA_NAME(hopeful);       /* products do not say how large scores are */
    FMHA_NAME(begin_run)(p, block, 0, &sums);
    int partly = FMHA_NAME(forward_keys)(run, block, m, lift, &sums, 0, FMHA_RUN_KEYS, purpose);
    if (p->sinks) purpose &= ~FMHA_NAME(straight);      /* totals of later runs lack them */
    for (ptrdiff_t j = FMHA_RUN_KEYS; j < block->met1; j += FMHA_RUN_KEYS) {
        if (!FMHA_NAME(meets_run)(block, j)) continue;
        FMHA_NAME(begin_run)(p, block, j, &behind);
        partly |= FMHA_NAME(forward_keys)(run, block, m, lift, &behind, j, j + FMHA_RUN_KEYS, purpose);
        FMHA_NAME(merge_run)(block, &behind, &sums);
    }
    return partly;
}
