/* The "tiled" algorithm backward: one block of queries against one tile of keys. What blocks and tiles make an item:
 * backward_items.inc.h.
 *
 * With lse saved: P^T = exp(S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T - delta), delta_r = sum(dO_r * O_r). dQ is summed
 * FMHA_SUM_KEYS keys after FMHA_SUM_KEYS keys, dK and dV block after block.
 *
 * exp(S - lse) errs by the rounding of lse, which grows with |lse|, and by what another order of the terms of S has put into it,
 * which grows with |q| |k| even where S is small; and where all scores of a row are one huge constant, lse has lost the number
 * of keys. So rows add up the P that come of lse, and where the sum is not 1 to the rounding of lse they have sums of their own
 * taken over all their keys (own_sums), P = exp(S - peak) / total and delta = sum(P dP), and the work is done again. Own sums
 * are taken at once where |lse| is huge; of few rows, whose lse "decode" may have written, where |lse| is far from what ordinary
 * scores give; of LONE_ROWS, whose errors nothing evens out, wherever all keys are in a single tile; and where there is one key.
 * Each row decides by itself. */

#define P_KEYS (FMHA_SUM_KEYS / 3)      /* of a sum of P: of many equal ones each addition may round to the same side */
#define HUGE_LSE 256            /* |lse| from where on no lse is taken */
#define FAR_LSE 8               /* the same of few rows, beyond the log of the number of keys, or below 0 */
#define LONE_ROWS 16            /* of as few it is FAR_LSE, however many keys: the rounding of lse, the error of grad_k, is not evened out */

/* What is kept of a block, in the scratch of the thread or, of a head that is split, where all items see it: sums of grad_q
 * (queries, width), q^T scaled (D, queries), grad_out^T (Dv, queries), or of few rows, not transposed (rows, width); copies of
 * the rows of q (rows, width) and grad_out (rows, value width), see rows_kept, or NULL; of each row shift and inverse in
 * P = exp(score - shift) * inverse, delta, the lift of its scores, the sum of P so far, and what that has lost; its kind, of the
 * block and at its first row alone, a sum of those below; and of few rows that have own sums what the products of these were,
 * scores and then grad_weights (rows, keys). */
typedef struct {
    REAL *grad_q, *q, *grad_out, *rows_q, *rows_grad_out, *shift, *inverse, *delta, *lift, *sum, *lost, *kind, *products;
} FMHA_NAME(packed);

/* lift is not 1; inverse may not be 1; products are kept; some of q, or of grad_out, is not finite; own sums are taken of the
 * only tile, where the work on it is begun; shift or delta of some row is not finite. */
enum {
    FMHA_NAME(lifted_block) = 1, FMHA_NAME(far_block) = 2, FMHA_NAME(known_block) = 4, FMHA_NAME(nonfinite_q) = 8,
    FMHA_NAME(nonfinite_grad_out) = 16, FMHA_NAME(lone_block) = 32, FMHA_NAME(nonfinite_rows) = 64
};

/* Whether a row's P, or dS, is not finite where its score is: then a score of -inf, which has P = 0 wherever it comes from, is looked for
 * also where nothing is removed. An infinite shift is that of a row without any. */
static inline int FMHA_NAME(is_nonfinite)(REAL shift, REAL delta) { return delta - delta != 0 || (shift - shift != 0 && shift != (REAL)INFINITY); }

/* How many numbers few rows keep of each product. */
static inline ptrdiff_t FMHA_NAME(kept_product)(const fmha_problem *p)
{
    const ptrdiff_t rows = fmha_heads_cut(p).rows;
    return rows <= FEW_QUERIES ? rows * p->Lk : 0;
}

/* Whether rows of q and grad_out, which products read as they are, too, would be copied for each of several tiles: then copies are
 * kept. grad_out is taken to lie as q does. */
static int FMHA_NAME(rows_kept)(const fmha_problem *p)
{
    const int crowded = FMHA_NAME(crowded)(p->q.stride[2], p->D, TILE_KEYS);
    return p->Lk > TILE_KEYS && p->parts == 0 && (p->element != FMHA_SAME || p->D % LANES != 0 || p->Dv % LANES != 0 || crowded);
}

/* What is kept of so many rows, in whole blocks; returns the size in REALs, without memory that is all. */
static ptrdiff_t FMHA_NAME(packed_layout)(const fmha_problem *p, ptrdiff_t rows, REAL *memory, FMHA_NAME(packed) *to)
{
    ptrdiff_t used = 0;
    to->grad_q = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->D, LANES));
    to->q = FMHA_NAME(take)(memory, &used, rows / BLOCK_ROWS * BLOCK_LD * p->D);
    to->grad_out = FMHA_NAME(take)(memory, &used, rows / BLOCK_ROWS * BLOCK_LD * p->Dv);
    to->rows_q = to->rows_grad_out = NULL;
    if (FMHA_NAME(rows_kept)(p)) {
        to->rows_q = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->D, LANES));
        to->rows_grad_out = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->Dv, LANES));
    }
    to->shift = FMHA_NAME(take)(memory, &used, rows);
    to->inverse = FMHA_NAME(take)(memory, &used, rows);
    to->delta = FMHA_NAME(take)(memory, &used, rows);
    to->lift = FMHA_NAME(take)(memory, &used, rows);
    to->sum = FMHA_NAME(take)(memory, &used, rows);
    to->lost = FMHA_NAME(take)(memory, &used, rows);
    to->kind = FMHA_NAME(take)(memory, &used, rows);
    to->products = FMHA_NAME(take)(memory, &used, rows > 0 ? ROUND_UP(2 * FMHA_NAME(kept_product)(p), LANES) : 0);
    return used;
}

/* Scratch of one thread: scores^T, grad_scores^T, slopes of the softcap and what dropout has drawn (keys, queries); of a tile,
 * sums of grad_k (keys, width) and grad_v (keys, value width), of a share as many as it has blocks; of a head that is split,
 * sums of a block's grad_q that wait for their turn, of each FMHA_SUM_KEYS keys of a tile (rows, width); a copy of k; copies of
 * a block of q and grad_out; keys and values, and rows of q and grad_out, where they are converted, or the former copied; sums
 * of P of each P_KEYS keys of a tile; what few_scores needs; what is kept of all blocks of a head where it is one item, and sums
 * of grad_k and grad_v of all its keys where these go through it in sections. */
typedef struct {
    REAL *scores, *grad_scores, *slopes, *kept, *grad_k, *grad_v, *grad_q, *copy_k, *copy_q, *copy_grad_out, *keys, *values,
            *rows, *sums, *few;
    REAL *all_grad_k, *all_grad_v;
    FMHA_NAME(packed) packed;
} FMHA_NAME(backward_memory);

static inline ptrdiff_t FMHA_NAME(head_rows)(const fmha_problem *p)
{
    return ROUND_UP(fmha_heads_cut(p).rows, BLOCK_ROWS);
}

/* Rows of a section of a head that is one item. All tiles go through a section before the next: what it reads of its rows, and
 * writes, time and again is then in the second cache, where that of long heads, and of many in a group, would come from the
 * third or from memory. Under a narrow band each block meets few tiles, one soon after the other: then all rows are one section. */
static ptrdiff_t FMHA_NAME(section_rows)(const fmha_problem *p)
{
    const ptrdiff_t rows = FMHA_NAME(head_rows)(p), copied = FMHA_NAME(rows_kept)(p);
    const ptrdiff_t of_row = ((3 + copied) * p->D + (2 + copied) * p->Dv) * (ptrdiff_t)sizeof(REAL);
    const int narrow = p->banded && p->left <= NARROW_KEYS && p->right <= NARROW_KEYS;
    if (p->parts > 0 || rows * of_row <= SECTIONS_FROM || narrow) return rows;
    return of_row * BLOCK_ROWS < SECTION_BYTES ? SECTION_BYTES / of_row / BLOCK_ROWS * BLOCK_ROWS : BLOCK_ROWS;
}

/* kept_rows: of which something is kept; sums: of a tile, so many. Returns the size in REALs; without memory that is all. */
static ptrdiff_t FMHA_NAME(backward_layout)(const fmha_problem *p, ptrdiff_t kept_rows, ptrdiff_t sums, REAL *memory,
                                            FMHA_NAME(backward_memory) *m)
{
    ptrdiff_t used = 0, width = ROUND_UP(p->D, LANES), value_width = ROUND_UP(p->Dv, LANES);
    m->scores = FMHA_NAME(take)(memory, &used, TILE_KEYS * BLOCK_LD);
    m->grad_scores = FMHA_NAME(take)(memory, &used, TILE_KEYS * BLOCK_LD);
    m->slopes = FMHA_NAME(take)(memory, &used, TILE_KEYS * BLOCK_LD);
    m->kept = FMHA_NAME(take)(memory, &used, p->dropout.factor != 0 ? TILE_KEYS * BLOCK_LD : 0);
    m->grad_k = FMHA_NAME(take)(memory, &used, sums * TILE_KEYS * width);
    m->grad_v = FMHA_NAME(take)(memory, &used, sums * TILE_KEYS * value_width);
    m->grad_q = FMHA_NAME(take)(memory, &used, kept_rows > 0 ? 0 : TILE_KEYS / FMHA_SUM_KEYS * BLOCK_ROWS * width);
    m->copy_k = FMHA_NAME(take)(memory, &used, TILE_KEYS * width);
    m->copy_q = FMHA_NAME(take)(memory, &used, BLOCK_ROWS * width);
    m->copy_grad_out = FMHA_NAME(take)(memory, &used, BLOCK_ROWS * value_width);
    m->keys = FMHA_NAME(take)(memory, &used, p->stored == FMHA_SAME && !CROWDED_KEYS ? 0 : TILE_KEYS * width);
    m->values = FMHA_NAME(take)(memory, &used, p->stored == FMHA_SAME && !CROWDED_KEYS ? 0 : TILE_KEYS * value_width);
    m->rows = FMHA_NAME(take)(memory, &used, p->element == FMHA_SAME ? 0 : BLOCK_ROWS * (width > value_width ? width : value_width));
    m->sums = FMHA_NAME(take)(memory, &used, TILE_KEYS / P_KEYS * BLOCK_ROWS);
    m->few = FMHA_NAME(take)(memory, &used, FEW_SCRATCH);
    const ptrdiff_t all_keys = FMHA_NAME(section_rows)(p) < kept_rows && !p->copies ? p->Lk : 0;
    m->all_grad_k = FMHA_NAME(take)(memory, &used, all_keys * width);
    m->all_grad_v = FMHA_NAME(take)(memory, &used, all_keys * value_width);
    return used + FMHA_NAME(packed_layout)(p, kept_rows, memory ? memory + used : NULL, &m->packed);
}

/* What is kept of the block whose first row is row `at` of those kept. */
static inline FMHA_NAME(packed) FMHA_NAME(packed_from)(const fmha_problem *p, const FMHA_NAME(packed) *all, ptrdiff_t at)
{
    return (FMHA_NAME(packed)){
        .grad_q = all->grad_q + at * ROUND_UP(p->D, LANES), .q = all->q + at / BLOCK_ROWS * BLOCK_LD * p->D,
                .grad_out = all->grad_out + at / BLOCK_ROWS * BLOCK_LD * p->Dv,
        .rows_q = all->rows_q ? all->rows_q + at * ROUND_UP(p->D, LANES) : NULL,
        .rows_grad_out = all->rows_grad_out ? all->rows_grad_out + at * ROUND_UP(p->Dv, LANES) : NULL,
        .shift = all->shift + at, .inverse = all->inverse + at, .delta = all->delta + at, .lift = all->lift + at,
        .sum = all->sum + at, .lost = all->lost + at, .kind = all->kind + at, .products = all->products,
    };
}

/* The layout of an item of a mode. */
static ptrdiff_t FMHA_NAME(item_layout)(const fmha_problem *p, int mode, ptrdiff_t share, REAL *memory, FMHA_NAME(backward_memory) *m)
{
    return FMHA_NAME(backward_layout)(p, mode == FMHA_WHOLE ? FMHA_NAME(head_rows)(p) : 0, mode == FMHA_SHARES ? share : 1, memory, m);
}

static ptrdiff_t FMHA_NAME(backward_scratch)(const fmha_problem *p, int mode, ptrdiff_t share)
{
    FMHA_NAME(backward_memory) unused;
    return FMHA_NAME(item_layout)(p, mode, share, NULL, &unused);
}

/* Keys and values, and how far apart their rows are. */
typedef struct {
    const REAL *k, *v;
    ptrdiff_t ldk, ldv;
} FMHA_NAME(tile);

typedef struct {
    const fmha_run *run;
    FMHA_NAME(backward_memory) m;
    REAL far_above;             /* lse beyond it is far, and below -FAR_LSE: of few rows */
    int few, fewest;            /* the rows are so few that "decode" may have made their lse; and that few_scores serves */
    /* BLOCK_ROWS sums of P of each P_KEYS keys, which wait for the block's turn, or NULL: one item is at work on it */
    REAL *sums;
    int waiting;                /* how many */
    int k_finite;               /* of the tile at hand, if pairs are removed */
    int far;                    /* values are fetched beside the keys */
    FMHA_NAME(next) *next;      /* or NULL */
    FMHA_NAME(next) ahead;      /* rows of the next block */
    ptrdiff_t b, hkv, j0, j1;   /* the keys of which `tile` is, none at first */
    FMHA_NAME(tile) tile;
} FMHA_NAME(backward);

/* Row r of a block of q, out or grad_out. */
static inline const char *FMHA_NAME(row_of)(const fmha_problem *p, const fmha_array *x, const FMHA_NAME(rows) *block, ptrdiff_t r)
{
    return FMHA_NAME(row_in)(p->element, x, block->b, block->head[r], block->query[r]);
}

/* n keys and values of the block's head from key j on: where they lie, or converted or copied, which serves until others are
 * asked for. */
static FMHA_NAME(tile) FMHA_NAME(tile_of)(FMHA_NAME(backward) *w, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n)
{
    const fmha_problem *p = &w->run->p;
    FMHA_NAME(tile) tile;
    if (block->b == w->b && block->hkv == w->hkv && j >= w->j0 && j + n <= w->j1) {
        tile = w->tile;
        tile.k += (j - w->j0) * tile.ldk;
        tile.v += (j - w->j0) * tile.ldv;
        return tile;
    }
    w->b = block->b;
    w->hkv = block->hkv;
    w->j0 = j;
    w->j1 = j + n;
    tile.k = FMHA_NAME(computed_rows)(p, &p->k, block->b, block->hkv, j, n, p->D, w->m.keys, &tile.ldk);
    tile.v = FMHA_NAME(computed_rows)(p, &p->v, block->b, block->hkv, j, n, p->Dv, w->m.values, &tile.ldv);
    const ptrdiff_t rows = fmha_heads_cut(p).rows;
    tile.k = FMHA_NAME(apart_rows)(tile.k, tile.ldk, n, p->D, rows, w->m.keys, &tile.ldk);
    tile.v = FMHA_NAME(apart_rows)(tile.v, tile.ldv, n, p->Dv, rows, w->m.values, &tile.ldv);
    w->tile = tile;
    return tile;
}

static inline ptrdiff_t FMHA_NAME(row_at)(const fmha_run *run, const FMHA_NAME(rows) *block, ptrdiff_t r)
{
    return (block->b * run->p.H + block->head[r]) * run->p.Lq + block->query[r];
}

/* Scores of n keys from j on, softcap and masks in them, and grad_weights, into w's scratch; of few rows the products are kept,
 * where they are to be, or taken from where they are. Returns whether a band leaves some vector less than the whole tile, or -1
 * if masks remove all of it. */
static int FMHA_NAME(backward_scores)(FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed, ptrdiff_t j,
                                      ptrdiff_t n, int keep, int *masked)
{
    const fmha_problem *p = &w->run->p;
    REAL *slope = p->softcap != 0 ? w->m.slopes : NULL;
    int touched = FMHA_NAME(touched)(block, j, n);
    *masked = touched || FMHA_NAME(rescored)(p) || ((int)*packed->kind & FMHA_NAME(nonfinite_rows));
    if (touched && FMHA_NAME(tile_removed)(p, block, j, n)) return -1;
    FMHA_NAME(tile) tile = FMHA_NAME(tile_of)(w, block, j, n);
    int banded = FMHA_NAME(set_spans)(block, j, n, GRANULE);
    block->values = w->far && tile.ldv == p->v.stride[2] ? (const char *)tile.v : NULL;
    block->few.ld = p->Lk;
    block->few.known = ((int)*packed->kind & FMHA_NAME(known_block)) != 0;
    block->few.kept = block->few.known || (keep && block->few.scratch) ? packed->products + j : NULL;
    /* scores^T (keys, queries) <- k (keys, D) @ (scale * q)^T (D, queries) */
    FMHA_NAME(tile_scores)(p, block, banded, n, tile.k, tile.ldk, packed->q,
                           (int)*packed->kind & FMHA_NAME(lifted_block) ? packed->lift : NULL,
                           w->m.scores);
    if (block->few.kept) block->few.kept += FMHA_NAME(kept_product)(p);
    /* grad_weights^T (keys, queries) <- v (keys, Dv) @ grad_out^T (Dv, queries) */
    FMHA_NAME(product_scores)(block, banded, n, p->Dv, tile.v, tile.ldv, packed->grad_out, w->m.grad_scores, NULL, 0);
    if (p->dropout.factor != 0) FMHA_NAME(drop_tile)(p, block, j, w->m.grad_scores, w->m.kept);
    if (*masked) FMHA_NAME(mask_tile)(p, block, j, w->m.scores, slope);
    return banded;
}

/* Of the rows of a block, over the keys met so far: peak, total = sum(exp(S - peak)), delta = sum(exp(S - peak) dP), and what
 * the latter two have lost. Of long rows one sum would round as often as there are keys: sums of FMHA_SUM_KEYS are added, and
 * what that rounds off as well. */
typedef struct {
    REAL peak[BLOCK_ROWS], total[BLOCK_ROWS], delta[BLOCK_ROWS], total_lost[BLOCK_ROWS], delta_lost[BLOCK_ROWS];
} FMHA_NAME(own);

static void FMHA_NAME(begin_own)(const fmha_problem *p, const FMHA_NAME(rows) *block, FMHA_NAME(own) *own)
{
    FMHA_NAME(begin_rows)(p, block, own->peak, own->total);
    for (ptrdiff_t r = 0; r < block->queries; r++) own->delta[r] = own->total_lost[r] = own->delta_lost[r] = 0;
}

/* The keys that backward_scores has left join, from key j on. Each FMHA_SUM_KEYS keys from key 0 on are a sum, whichever of them
 * are removed, or left out because they are. */
static void FMHA_NAME(own_tile)(const FMHA_NAME(backward) *w, const FMHA_NAME(rows) *block, ptrdiff_t j, FMHA_NAME(own) *own)
{
    const ptrdiff_t ld = block->ld;
    for (ptrdiff_t v = 0; v < block->queries / LANES; v++) {
        const REAL *s = w->m.scores + v * LANES, *g = w->m.grad_scores + v * LANES;
        VEC before = v_load(own->peak + v * LANES), best = before, zero = v_splat(0), gone = v_splat(NEGATIVE_INFINITY);
        for (ptrdiff_t k = block->low[v]; k < block->high[v]; k++) {
            VEC score = v_load(s + k * ld);
            best = v_max(score, best);
        }
        VEC shift = v_select(v_equal(best, gone), zero, best), shrink = FMHA_NAME(exp)(before - shift);
        REAL *const totals[] = {own->total + v * LANES, own->delta + v * LANES};
        REAL *const lost[] = {own->total_lost + v * LANES, own->delta_lost + v * LANES};
        for (int m = 0; m < 2; m++) {
            v_store(totals[m], v_load(totals[m]) * shrink);
            v_store(lost[m], v_load(lost[m]) * shrink);
        }
        for (ptrdiff_t k = block->low[v], end; k < block->high[v]; k = end) {
            VEC sums[2] = {zero, zero}, part[EXP_CHAINS];
            end = (j + k) / FMHA_SUM_KEYS * FMHA_SUM_KEYS + FMHA_SUM_KEYS - j;
            if (end > block->high[v]) end = block->high[v];
            ptrdiff_t e = k;
#define OWN(keys) \
    for (; e + (keys) <= end; e += (keys)) { \
        _Pragma("GCC unroll 8") \
        for (int i = 0; i < (keys); i++) part[i] = v_load(s + (e + i) * ld) - shift; \
        FMHA_NAME(exp_each)((keys), part); \
        _Pragma("GCC unroll 8") \
        for (int i = 0; i < (keys); i++) { \
            sums[0] = sums[0] + part[i]; \
            sums[1] = v_select(v_equal(v_load(s + (e + i) * ld), gone), sums[1], sums[1] + part[i] * v_load(g + (e + i) * ld)); \
        } \
    }
            OWN(EXP_CHAINS)
            OWN(1)
#undef OWN
            for (int m = 0; m < 2; m++) {
                const VEC before = v_load(totals[m]), after = before + sums[m], added = after - before;
                v_store(totals[m], after);
                v_store(lost[m], v_load(lost[m]) + ((before - (after - added)) + (sums[m] - added)));
            }
        }
        v_store(own->peak + v * LANES, best);
    }
}

/* Of the rows chosen: P by their own peak and total, delta by their own P; unless lse was taken over more keys than these.
 * Returns whether there are any. */
static int FMHA_NAME(take_own)(const FMHA_NAME(backward) *w, const FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed,
                               FMHA_NAME(own) *own,
                               const char *chosen)
{
    const fmha_run *run = w->run;
    const VEC zero = v_splat(0);
    REAL lse[BLOCK_ROWS], expected[BLOCK_ROWS], longest = -1;
    int any = 0;
    for (ptrdiff_t r = 0; r < block->queries; r++)
        lse[r] = r < block->rows ? ((const REAL *)run->lse)[FMHA_NAME(row_at)(run, block, r)] : NEGATIVE_INFINITY;
    for (ptrdiff_t r = 0; r < block->queries; r += LANES) {
        VEC peak = v_load(own->peak + r), total = v_load(own->total + r), delta = v_load(own->delta + r);
        const VEC of_total = v_load(own->total_lost + r), of_delta = v_load(own->delta_lost + r);
        peak = v_select(v_equal(peak, v_splat(NEGATIVE_INFINITY)), zero, peak);
        /* where a sum is infinite, what it lost is none */
        total = v_select(v_equal(of_total - of_total, zero), total + of_total, total);
        delta = v_select(v_equal(of_delta - of_delta, zero), delta + of_delta, delta);
        const VEC inverse = v_splat(1) / total;
        v_store(own->peak + r, peak);
        v_store(own->total + r, total);
        v_store(own->total_lost + r, inverse);
        v_store(own->delta + r, delta / total);
        v_store(expected + r, FMHA_NAME(exp)(v_load(lse + r) - peak));
    }
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (!chosen[r]) continue;
        /* A logarithm takes longer than all else here: where the total is what lse says it is, to a few roundings, nobody asks for it. */
        if (!(own->total[r] >= expected[r] * (1 - LSE_ROUNDINGS / 2 * REAL_EPSILON))
            && FMHA_NAME(of_more_keys)(&run->p, block->b, block->head[r], block->query[r], lse[r],
                                       own->peak[r] + REAL_LOG(own->total[r]), &longest)) continue;
        packed->shift[r] = own->peak[r];
        packed->inverse[r] = own->total_lost[r];
        packed->delta[r] = own->delta[r];
        if (FMHA_NAME(is_nonfinite)(own->peak[r], own->delta[r])) *packed->kind = (REAL)((int)*packed->kind | FMHA_NAME(nonfinite_rows));
        any = 1;
    }
    if (any) *packed->kind = (REAL)((int)*packed->kind | FMHA_NAME(far_block));
    return any;
}

/* Own sums of the rows chosen, over all their keys. */
static int FMHA_NAME(own_sums)(FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed, const char *chosen)
{
    FMHA_NAME(own) own;
    FMHA_NAME(begin_own)(&w->run->p, block, &own);
    for (ptrdiff_t j = block->j0 / TILE_KEYS * TILE_KEYS; j < block->j1 && !fmha_pool_stopped(); j += TILE_KEYS) {
        const ptrdiff_t low = j < block->j0 ? block->j0 : j, high = block->j1 < j + TILE_KEYS ? block->j1 : j + TILE_KEYS;
        int masked;
        if (FMHA_NAME(backward_scores)(w, block, packed, low, high - low, 1, &masked) >= 0) FMHA_NAME(own_tile)(w, block, low, &own);
    }
    if (block->few.scratch) *packed->kind = (REAL)((int)*packed->kind | FMHA_NAME(known_block));
    return FMHA_NAME(take_own)(w, block, packed, &own, chosen);
}

/* Whether a block of LONE_ROWS has all its keys in a tile, or is of any rows and there is one key: then P is 1 and dS is 0, which
 * dP - delta with the delta of dO and O is but for its rounding. */
static inline int FMHA_NAME(is_lone)(const FMHA_NAME(backward) *w, const FMHA_NAME(rows) *block)
{
    return (w->run->cut.rows <= LONE_ROWS || w->run->p.Lk == 1) && block->j0 < block->j1 && block->j0 / TILE_KEYS == (block->j1 - 1) / TILE_KEYS;
}

/* Whether own sums may take the place of a row's lse. */
static inline int FMHA_NAME(is_owned)(const FMHA_NAME(backward) *w, REAL lse) { return lse - lse == 0
        && !FMHA_NAME(of_a_part)(&w->run->p, lse); }

/* Whether they do at once; lone: whether the row's block is. */
static inline int FMHA_NAME(is_far)(const FMHA_NAME(backward) *w, int lone, REAL lse)
{
    return (lone || lse > w->far_above || lse < (w->few ? -FAR_LSE : -HUGE_LSE)) && FMHA_NAME(is_owned)(w, lse);
}

/* Whether rows of an element type are finite throughout. */
static int FMHA_NAME(finite_rows)(int type, ptrdiff_t rows, ptrdiff_t cols, const char *x, ptrdiff_t stride)
{
    return type == FMHA_SAME ? FMHA_NAME(all_finite)(rows, cols, x, stride) : FMHA_NAME(finite_halves)(type, rows, cols, x, stride);
}

/* Whether the block's rows of x (q or grad_out) are finite throughout. */
static int FMHA_NAME(finite_block)(const fmha_problem *p, const fmha_array *x, const FMHA_NAME(rows) *block, ptrdiff_t width)
{
    int finite = 1;
    for (ptrdiff_t r = 0; r < block->rows; r++)
        finite &= FMHA_NAME(finite_rows)(p->element, 1, width, FMHA_NAME(row_of)(p, x, block, r), 0);
    return finite;
}

/* Whether a row of grad_out with the product delta with out, and an lse, is 0 throughout: then nothing that is finite gets a
 * gradient by it. */
static inline int FMHA_NAME(is_idle)(const fmha_problem *p, const char *grad_out, REAL delta, REAL lse)
{
    ptrdiff_t d = 0;
    if (delta != 0 || lse - lse != 0) return 0;
    while (d < p->Dv && FMHA_NAME(stored_value)(p->element, grad_out + d * FMHA_NAME(stored_size)(p->element)) == 0) d++;
    return d == p->Dv;
}

/* The block's rows of x (q or grad_out), which meet n keys, as rows of whole vectors: where they lie if they are one head's, or
 * copied; finite ones where `kept` has a copy already, unless that is NULL. */
static const REAL *FMHA_NAME(block_matrix)(const fmha_problem *p, const fmha_array *x, const FMHA_NAME(rows) *block, ptrdiff_t n,
                                           ptrdiff_t width, int finite, const REAL *kept, REAL *copy, ptrdiff_t *ld)
{
    const ptrdiff_t whole = ROUND_UP(width, LANES);
    const int single = p->element == FMHA_SAME && block->head[0] == block->head[block->rows - 1];
    const int crowded = FMHA_NAME(crowded)(x->stride[2], width, n);
    if (finite && kept && (!single || whole != width || crowded)) {
        *ld = whole;
        return kept;
    }
    if (single)
        return FMHA_NAME(whole_rows)((const REAL *)FMHA_NAME(row_of)(p, x, block, 0), x->stride[2], block->rows, width, finite, crowded, copy, ld);
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        const REAL *row = FMHA_NAME(real_row)(p->element, FMHA_NAME(row_of)(p, x, block, r), width, copy + r * whole);
        if (finite && p->element != FMHA_SAME) continue;        /* converted, with the zeros beyond */
        for (ptrdiff_t d = 0; d < width; d++) copy[r * whole + d] = finite || row[d] - row[d] == 0 ? row[d] : 0;
        for (ptrdiff_t d = width; d < whole; d++) copy[r * whole + d] = 0;
    }
    *ld = whole;
    return copy;
}

/* The packed operands and the state of each row that is wanted, a bit each; known: from a pass over blocks before. */
static void FMHA_NAME(prepare_block)(FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *to, int known,
                                     uint64_t wanted)
{
    const fmha_run *run = w->run;
    const fmha_problem *p = &run->p;
    char own[BLOCK_ROWS] = {0};
    if (block->j0 >= block->j1 && !p->sinks) {      /* nothing is read of the block but its states */
        FMHA_NAME(fill)(block->queries, to->shift, (REAL)INFINITY);
        FMHA_NAME(fill)(block->queries, to->inverse, 1);
        FMHA_NAME(fill)(block->queries, to->delta, 0);
        FMHA_NAME(fill)(block->queries, to->sum, 0);
        FMHA_NAME(fill)(block->queries, to->lost, 0);
        *to->kind = 0;
        return;
    }
    int kind = FMHA_NAME(pack_queries)(p, block, to->q, to->lift) ? FMHA_NAME(lifted_block) : 0, any = 0, suspect = 0, nonfinite = 0;
    if (kind && !FMHA_NAME(finite_block)(p, &p->q, block, p->D)) kind |= FMHA_NAME(nonfinite_q);
    const int ordinary = !kind, lone = FMHA_NAME(is_lone)(w, block);
    FMHA_NAME(pack_rows)(p, block, &run->grad_out, p->Dv, to->grad_out);
    if (to->rows_q) {
        ptrdiff_t unused;
        FMHA_NAME(block_matrix)(p, &p->q, block, TILE_KEYS, p->D, 1, NULL, to->rows_q, &unused);
        FMHA_NAME(block_matrix)(p, &run->grad_out, block, TILE_KEYS, p->Dv, 1, NULL, to->rows_grad_out, &unused);
    }
    for (ptrdiff_t r = 0; r < block->queries; r++) {
        to->shift[r] = (REAL)INFINITY;        /* exp(score - inf) = 0: empty rows, those not wanted and lanes beyond the rows */
        to->inverse[r] = 1;
        to->delta[r] = to->sum[r] = to->lost[r] = 0;
        if (r >= block->rows || !(wanted >> r & 1)) {
            suspect |= r < block->rows;
            continue;
        }
        REAL sink = FMHA_NAME(sink)(p, block->head[r]);
        if (known) {
            const REAL *state = (const REAL *)run->row_states + FMHA_NAME(row_at)(run, block, r) * FMHA_ROW_STATE;
            to->shift[r] = state[FMHA_ROW_SHIFT];
            to->inverse[r] = state[FMHA_ROW_INVERSE];
            to->delta[r] = state[FMHA_ROW_DELTA];
            if (to->inverse[r] != 1) kind |= FMHA_NAME(far_block);
            if (FMHA_NAME(is_nonfinite)(to->shift[r], to->delta[r])) kind |= FMHA_NAME(nonfinite_rows);
            continue;
        }
        REAL lse = ((const REAL *)run->lse)[FMHA_NAME(row_at)(run, block, r)];
        const char *g = FMHA_NAME(row_of)(p, &run->grad_out, block, r), *o = FMHA_NAME(row_of)(p, &run->out, block, r);
        to->delta[r] = FMHA_NAME(typed_product)(p->element, p->Dv, g, o);
        suspect |= to->delta[r] - to->delta[r] != 0;        /* a term that is not finite shows in it, also times 0 */
        if (ordinary && FMHA_NAME(is_idle)(p, g, to->delta[r], lse)) continue;     /* as an empty one */
        if (lse != NEGATIVE_INFINITY) to->shift[r] = lse;
        nonfinite |= lse != NEGATIVE_INFINITY && lse - lse != 0;
        if (p->sinks) to->sum[r] = FMHA_NAME(exp_of)(sink - to->shift[r]);
        any |= own[r] = (char)FMHA_NAME(is_far)(w, lone, lse);
    }
    if (suspect || nonfinite) kind |= FMHA_NAME(nonfinite_rows);
    if (suspect && !FMHA_NAME(finite_block)(p, &run->grad_out, block, p->Dv)) kind |= FMHA_NAME(nonfinite_grad_out);
    if (any && lone && w->run->mode == FMHA_WHOLE) kind |= FMHA_NAME(lone_block);
    *to->kind = (REAL)kind;
    if (any && !(kind & FMHA_NAME(lone_block))) FMHA_NAME(own_sums)(w, block, to, own);
}

/* Own sums of a lone block, whose keys backward_scores has left, from key j on. */
static void FMHA_NAME(own_of_lone)(const FMHA_NAME(backward) *w, const FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed, ptrdiff_t j)
{
    FMHA_NAME(own) own;
    char chosen[BLOCK_ROWS];
    for (ptrdiff_t r = 0; r < block->rows; r++)     /* others than idle ones */
        chosen[r] = packed->shift[r] != (REAL)INFINITY && FMHA_NAME(is_far)(w, 1,
                ((const REAL *)w->run->lse)[FMHA_NAME(row_at)(w->run, block, r)]);
    FMHA_NAME(begin_own)(&w->run->p, block, &own);
    FMHA_NAME(own_tile)(w, block, j, &own);
    FMHA_NAME(take_own)(w, block, packed, &own, chosen);
}

/* Of a block that has met all its keys, the rows whose P by lse do not add up to 1 within rounding, though lse is of no more
 * keys than these. Returns whether there are any. */
static int FMHA_NAME(rows_apart)(const FMHA_NAME(backward) *w, const FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed,
                                 uint64_t wanted, char *apart)
{
    const fmha_run *run = w->run;
    const fmha_problem *p = &run->p;
    REAL longest = -1;
    int any = 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        const REAL beyond = packed->sum[r] - 1 + packed->lost[r], least = 4 * REAL_EPSILON;
        apart[r] = 0;
        if ((beyond < least && beyond > -least) || !(wanted >> r & 1)) continue;
        const REAL lse = ((const REAL *)run->lse)[FMHA_NAME(row_at)(run, block, r)];
        if (packed->shift[r] != lse || !FMHA_NAME(is_owned)(w, lse)) continue;       /* own sums already, or nothing is asked of it */
        int exponent;
        frexp((double)lse, &exponent);
        const REAL slack = least + REAL_EPSILON * (REAL)ldexp(0.375, exponent);      /* half a unit in the last place of lse */
        if (beyond < slack && beyond > -slack) continue;
        if (FMHA_NAME(of_more_keys)(p, block->b, block->head[r], block->query[r], lse, lse + REAL_LOG(1 + beyond), &longest)) continue;
        any |= apart[r] = 1;
    }
    return any;
}

/* Such rows get own sums. Returns whether there are any: the work must be done again. */
static int FMHA_NAME(mended)(FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed, uint64_t wanted)
{
    char apart[BLOCK_ROWS];
    return FMHA_NAME(rows_apart)(w, block, packed, wanted, apart) && FMHA_NAME(own_sums)(w, block, packed, apart);
}

/* c[k, :] += a[k, r] * x_r for the non-finite rows x_r of the block, allowed pairs only; converted: scratch for the rows. */
static void FMHA_NAME(rows_nonfinite)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, const REAL *a,
                                      const fmha_array *x, ptrdiff_t width, REAL *converted, REAL *c, ptrdiff_t ldc)
{
    unsigned char done[TILE_KEYS] = {0}, met[TILE_KEYS] = {0};      /* as in tile_nonfinite */
    const REAL *like = NULL;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        const REAL *row = FMHA_NAME(real_row)(p->element, FMHA_NAME(row_of)(p, x, block, r), width, converted + r * ROUND_UP(width, LANES));
        if (FMHA_NAME(all_finite)(1, width, row, width)) continue;
        int ask = FMHA_NAME(has_nan)(width, row);
        if (!like || !FMHA_NAME(same_nonfinite)(width, row, like)) {
            like = row;
            memset(met, 0, sizeof met);
        }
        for (ptrdiff_t k = 0; k < n; k++) {
            REAL factor = a[k * block->ld + r];
            int kind = FMHA_NAME(kind_of)(factor);
            if (done[k] || met[k] & (kind | FMHA_NAME(undefined)) || FMHA_NAME(pair_removed)(p, block, r, j + k, factor)) continue;
            done[k] = (unsigned char)FMHA_NAME(add_nonfinite_row)(width, factor, row, c + k * ldc, ask);
            met[k] |= (unsigned char)kind;
        }
    }
}

/* scores -> P^T, grad_scores -> dS^T. masked: what is removed (-inf) gives exactly 0, whatever shift, dP and delta are. far: with
 * the factor inverse, 1 but for own sums. sums: of P. */
INLINED void FMHA_NAME(gradient_columns)(const int vectors, const int masked, const int far, ptrdiff_t n, ptrdiff_t ld, REAL *s, REAL *g,
                                         const REAL *slope, const FMHA_NAME(packed) *rows, ptrdiff_t first, REAL *sums)
{
    VEC shift[MICRO_VECTORS], delta[MICRO_VECTORS], inverse[MICRO_VECTORS], sum[MICRO_VECTORS];
    const VEC gone = v_splat(NEGATIVE_INFINITY), zero = v_splat(0);
    ptrdiff_t k = 0;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        shift[v] = v_load(rows->shift + first + v * LANES);
        delta[v] = v_load(rows->delta + first + v * LANES);
        if (far) inverse[v] = v_load(rows->inverse + first + v * LANES);
        sum[v] = zero;
    }
    /* Where rows are a single vector, several keys of them in step. */
#define GRADIENTS(keys) \
    for (; k + (keys) <= n; k += (keys)) { \
        VEC p[MICRO_VECTORS]; \
        _Pragma("GCC unroll 4") \
        for (int i = 0; i < (keys) * vectors; i++)          /* at most, whoever gave lse */ \
            p[i] = v_min(v_splat(EXP_MOST), v_load(s + (k + i / vectors) * ld + i % vectors * LANES) - shift[i % vectors]); \
        FMHA_NAME(exp_each)((keys) * vectors, p); \
        _Pragma("GCC unroll 4") \
        for (int i = 0; i < (keys) * vectors; i++) { \
            const int v = i % vectors; \
            const ptrdiff_t at = (k + i / vectors) * ld + v * LANES; \
            if (far) p[i] = p[i] * inverse[v]; \
            VEC d = p[i] * (v_load(g + at) - delta[v]); \
            if (masked) { \
                IVEC removed = v_equal(v_load(s + at), gone); \
                p[i] = v_select(removed, zero, p[i]); \
                if (slope) d = d * v_load(slope + at); \
                d = v_select(removed, zero, d); \
            } \
            sum[v] = sum[v] + p[i]; \
            v_store(s + at, p[i]); \
            v_store(g + at, d); \
        } \
    }
    GRADIENTS(MICRO_VECTORS / vectors)
    GRADIENTS(1)
#undef GRADIENTS
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) v_store(sums + v * LANES, sum[v]);
}

/* sums (keys, width) <- sums + a (keys, queries) @ x (queries, width), of sums that are 0 where this is the first, which not
 * banded is multiplied by factor; banded: the spans alone, zeros where a vector of rows is not at work among others that are. */
static void FMHA_NAME(product_keys)(const FMHA_NAME(rows) *block, int banded, ptrdiff_t n, REAL *a, const REAL *x, ptrdiff_t ldx,
                                    ptrdiff_t width, int first, REAL factor, REAL *sums)
{
    ptrdiff_t ld = block->ld, k = 0, count = 0, v0 = 0, v1 = 0;
    if (!banded && first) FMHA_NAME(product_rows_first)(n, width, block->rows, a, ld, x, ldx, sums, width, factor);
    else if (!banded) FMHA_NAME(product_rows_add)(n, width, block->rows, a, ld, x, ldx, sums, width);
    else if (first) memset(sums, 0, (size_t)(n * width) * sizeof(REAL));
    while (banded && FMHA_NAME(next_run)(block, n, &k, &count, &v0, &v1)) {
        for (ptrdiff_t v = v0; v < v1; v++)
            for (ptrdiff_t e = k; e < k + count; e++)
                if (e < block->low[v] || e >= block->high[v]) v_store(a + e * ld + v * LANES, v_splat(0));
        ptrdiff_t depth = (v1 * LANES < block->rows ? v1 * LANES : block->rows) - v0 * LANES;
        FMHA_NAME(product_rows_add)(count, width, depth, a + k * ld + v0 * LANES, ld, x + v0 * LANES * ldx, ldx,
                                    sums + k * width, width);
    }
}

/* sums (rows, width) <- sums + a (keys, queries)^T @ x (keys, width) of n keys from key j on, banded: of the spans alone. Each
 * FMHA_SUM_KEYS keys from key 0 on are a sum of their own, wherever a tile or an item begins. apart: each is wanted by itself,
 * so many elements behind the one before, whatever is there; or 0. Returns how many there are. */
static int FMHA_NAME(product_queries)(const FMHA_NAME(rows) *block, int banded, ptrdiff_t j, ptrdiff_t n, const REAL *a, const REAL *x,
                                      ptrdiff_t ldx, ptrdiff_t width, ptrdiff_t apart, REAL *sums)
{
    const ptrdiff_t ld = block->ld;
    int many = 0;
    for (ptrdiff_t from = 0, to; from < n; from = to, sums += apart, many++) {
        to = (j + from) / FMHA_SUM_KEYS * FMHA_SUM_KEYS + FMHA_SUM_KEYS - j;
        if (to > n) to = n;
        int whole = 1;
        for (ptrdiff_t v = 0; banded && v < block->queries / LANES; v++) whole &= block->low[v] <= from && block->high[v] >= to;
        const REAL *own_a = a + from * ld, *own_x = x + from * ldx;
        if (whole && apart) FMHA_NAME(product_columns_first)(block->rows, width, to - from, own_a, ld, own_x, ldx, sums, width, NULL, 0);
        else if (whole) FMHA_NAME(product_columns_add)(block->rows, width, to - from, own_a, ld, own_x, ldx, sums, width);
        else if (apart) memset(sums, 0, (size_t)(block->rows * width) * sizeof(REAL));
        for (ptrdiff_t q = 0; !whole && q < block->rows; q += LANES) {
            const ptrdiff_t own = block->rows - q < LANES ? block->rows - q : LANES;
            const ptrdiff_t low = block->low[q / LANES] > from ? block->low[q / LANES] : from;
            const ptrdiff_t high = block->high[q / LANES] < to ? block->high[q / LANES] : to;
            if (high > low)
                FMHA_NAME(product_columns_add)(own, width, high - low, a + low * ld + q, ld, x + low * ldx, ldx, sums + q * width, width);
        }
    }
    return many;
}

/* Of so many rows, sums of P join those before. */
static void FMHA_NAME(add_probabilities)(ptrdiff_t rows, const REAL *sums, const FMHA_NAME(packed) *packed)
{
    for (ptrdiff_t r = 0; r < rows; r += LANES) {
        const VEC before = v_load(packed->sum + r), sum = v_load(sums + r), after = before + sum, added = after - before;
        v_store(packed->sum + r, after);
        v_store(packed->lost + r, v_load(packed->lost + r) + ((before - (after - added)) + (sum - added)));
    }
}

/* The tile that backward_scores has left, of n keys from key j on: scores -> P^T, grad_scores -> dS^T. slope: of the softcap, or
 * NULL. */
static void FMHA_NAME(gradient_tile)(FMHA_NAME(backward) *w, const FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed,
                                     int banded, int masked, ptrdiff_t j, ptrdiff_t n, const REAL *slope)
{
    ptrdiff_t queries = block->queries, ld = block->ld;
    REAL *s = w->m.scores, *g = w->m.grad_scores, here[BLOCK_ROWS], *sums = w->sums ? w->sums : here;
    int far = ((int)*packed->kind & FMHA_NAME(far_block)) != 0;
    w->waiting = 0;
    for (ptrdiff_t from = 0, to; from < n; from = to) {
        to = (j + from) / P_KEYS * P_KEYS + P_KEYS - j;
        if (to > n) to = n;
        for (ptrdiff_t q = 0, vectors; q < queries; q += vectors * LANES) {
            vectors = !banded && (queries - q) / LANES >= MICRO_VECTORS ? MICRO_VECTORS : 1;
            ptrdiff_t low = banded && block->low[q / LANES] > from ? block->low[q / LANES] : from;
            ptrdiff_t high = banded && block->high[q / LANES] < to ? block->high[q / LANES] : to, at = low * ld + q;
            const REAL *slope_at = slope ? slope + at : NULL;
            if (high < low) high = low;
#define GRADIENT(many, masks, distant) \
    FMHA_NAME(gradient_columns)(many, masks, distant, high - low, ld, s + at, g + at, masks ? slope_at : NULL, packed, q, sums + q)
            if (vectors == MICRO_VECTORS && !masked && !far) GRADIENT(MICRO_VECTORS, 0, 0);
            else if (vectors == MICRO_VECTORS && !far) GRADIENT(MICRO_VECTORS, 1, 0);
            else if (vectors == MICRO_VECTORS) GRADIENT(MICRO_VECTORS, 1, 1);
            else if (!far) GRADIENT(1, 1, 0);
            else GRADIENT(1, 1, 1);
#undef GRADIENT
        }
        if (w->sums) sums += BLOCK_ROWS, w->waiting++;
        else FMHA_NAME(add_probabilities)(queries, sums, packed);
    }
}

/* The turn at a block is over: before that, the sums of P that have waited for it are added. */
static void FMHA_NAME(end_turn_of_block)(FMHA_NAME(backward) *w, const FMHA_NAME(rows) *block,
                                         const FMHA_NAME(packed) *packed, const FMHA_NAME(turn) *turn)
{
    for (int m = 0; m < w->waiting; m++) FMHA_NAME(add_probabilities)(block->queries, w->sums + m * BLOCK_ROWS, packed);
    w->waiting = 0;
    FMHA_NAME(end_turn)(turn);
}

/* total (rows, width) <- total, or 0 where it has not begun, + each of so many sums, `apart` elements from one to the next. */
static void FMHA_NAME(add_sums)(ptrdiff_t rows, ptrdiff_t width, int many, ptrdiff_t apart, const REAL *sums, int begun, REAL *total)
{
    for (ptrdiff_t e = 0; e < rows * width; e += LANES) {
        VEC all = begun ? v_load(total + e) : v_splat(0);
        for (int m = 0; m < many; m++) all = all + v_load(sums + m * apart + e);
        v_store(total + e, all);
    }
}

/* Of keys low .. high of a tile, those are left out that an additive mask drowns beside keys that it leaves the rows, by their
 * lse: P is 0 at all of them. Of each row those at its ends, if the mask is 0 at the others, else the first and the last ones
 * that are so for all rows. */
static void FMHA_NAME(leave_out_gradients)(FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed, ptrdiff_t *low,
                                           ptrdiff_t *high)
{
    const fmha_problem *p = &w->run->p;
    if (!block->additive || FMHA_NAME(rescored)(p) || block->few.scratch || *packed->kind != 0) return;
    const ptrdiff_t n = *high - *low;
    ptrdiff_t ahead, behind, from[BLOCK_ROWS], to[BLOCK_ROWS];
    REAL least = (REAL)INFINITY, most;
    const int runs = FMHA_NAME(low_runs)(p, block, *low, *high, 1, from, to, &most);
    if (runs) ahead = n, behind = 0;
    else most = FMHA_NAME(low_ends)(p, block, *low, n, &ahead, &behind);
    if (ahead + behind == 0) return;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (packed->delta[r] - packed->delta[r] != 0 || packed->shift[r] != packed->shift[r]) return;
        if (packed->shift[r] < least) least = packed->shift[r];
    }
    least += (REAL)EXP_ZERO;
    if (!(least > most)) return;
    const FMHA_NAME(tile) tile = FMHA_NAME(tile_of)(w, block, *low, n);
    const REAL q = FMHA_NAME(power)(p->D, block->queries, packed->q, block->ld);
    const REAL g = FMHA_NAME(power)(p->Dv, block->queries, packed->grad_out, block->ld);
    const REAL *k = tile.k + (n - behind) * tile.ldk, *v = tile.v + (n - behind) * tile.ldv;
    const REAL of_keys = FMHA_NAME(power)(ahead, p->D, tile.k, tile.ldk) + FMHA_NAME(power)(behind, p->D, k, tile.ldk);
    const REAL of_values = FMHA_NAME(power)(ahead, p->Dv, tile.v, tile.ldv) + FMHA_NAME(power)(behind, p->Dv, v, tile.ldv);
    if (!(least > FMHA_NAME(drowned_scores)(most, q, of_keys, (1 + g) * (1 + of_values)))) return;
    if (runs) {
        FMHA_NAME(take_runs)(p, block, from, to);
        ahead = block->j0 > *low ? block->j0 - *low : 0;
        behind = block->j1 < *high ? *high - block->j1 : 0;
        if (block->j0 >= block->j1) ahead = n, behind = 0;
    }
    *low += ahead;
    *high -= behind;
}

/* One block of queries against n keys of a tile, from key j: adds to grad_v (n, Dv), grad_k (n, D), grad_q (rows, D), the latter
 * two without the factor scale; grad_q at its turn. first: grad_k and grad_v count as 0, whatever is there. Returns whether
 * grad_k has been multiplied by `factor`, which only a first block may do. */
static int FMHA_NAME(tile_gradients)(FMHA_NAME(backward) *w, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *packed,
                                     ptrdiff_t j, ptrdiff_t n, int first, REAL factor, REAL *grad_k, REAL *grad_v,
                                     REAL *grad_q, const FMHA_NAME(turn) *turn)
{
    const fmha_run *run = w->run;
    const fmha_problem *p = &run->p;
    ptrdiff_t lds = block->ld, width = block->width, value_width = block->value_width, ld;
    REAL *s = w->m.scores, *g = w->m.grad_scores;
    int masked, touched = FMHA_NAME(touched)(block, j, n), banded = FMHA_NAME(backward_scores)(w, block, packed, j, n, 0, &masked);
    if (banded < 0 && first) {
        memset(grad_k, 0, (size_t)(n * width) * sizeof(REAL));
        memset(grad_v, 0, (size_t)(n * value_width) * sizeof(REAL));
    }
    if (banded < 0) return 0;
    if ((int)*packed->kind & FMHA_NAME(lone_block)) FMHA_NAME(own_of_lone)(w, block, packed, j);
    FMHA_NAME(fetch_part)(w->next, 0);
    FMHA_NAME(fetch_part)(w->next, 4);
    FMHA_NAME(gradient_tile)(w, block, packed, banded, masked, j, n, p->softcap != 0 ? w->m.slopes : NULL);
    FMHA_NAME(fetch_part)(w->next, 3);
    for (ptrdiff_t q = 0; p->dropout.factor != 0 && q < block->queries; q += LANES)
        for (ptrdiff_t k = block->low[q / LANES]; k < block->high[q / LANES]; k++)
            v_store(s + k * lds + q, v_load(s + k * lds + q) * v_load(w->m.kept + k * lds + q));
    /* grad_v (keys, Dv) <- grad_v + weights^T (keys, queries) @ grad_out (queries, Dv) */
    int finite = !((int)*packed->kind & FMHA_NAME(nonfinite_grad_out)) || !touched;
    const REAL *rows = FMHA_NAME(block_matrix)(p, &run->grad_out, block, n, p->Dv, finite, packed->rows_grad_out, w->m.copy_grad_out, &ld);
    FMHA_NAME(product_keys)(block, banded, n, s, rows, ld, value_width, first, 1, grad_v);
    if (!finite) FMHA_NAME(rows_nonfinite)(p, block, j, n, s, &run->grad_out, p->Dv, w->m.rows, grad_v, value_width);
    FMHA_NAME(fetch_part)(w->next, 1);
    /* grad_k (keys, D) <- grad_k + grad_scores^T (keys, queries) @ q (queries, D) */
    finite = !((int)*packed->kind & FMHA_NAME(nonfinite_q)) || !touched;
    const int multiplied = first && !banded && finite;
    rows = FMHA_NAME(block_matrix)(p, &p->q, block, n, p->D, finite, packed->rows_q, w->m.copy_q, &ld);
    FMHA_NAME(product_keys)(block, banded, n, g, rows, ld, width, first, multiplied ? factor : 1, grad_k);
    if (!finite) FMHA_NAME(rows_nonfinite)(p, block, j, n, g, &p->q, p->D, w->m.rows, grad_k, width);
    FMHA_NAME(fetch_part)(w->next, 2);
    /* grad_q (queries, D) <- grad_q + grad_scores^T (keys, queries)^T @ k (keys, D), made aside where its turn has not come */
    finite = w->k_finite || !touched;
    FMHA_NAME(tile) tile = FMHA_NAME(tile_of)(w, block, j, n);
    rows = FMHA_NAME(whole_rows)(tile.k, tile.ldk, n, p->D, finite, FMHA_NAME(crowded)(tile.ldk, p->D, block->rows), w->m.copy_k, &ld);
    if (!turn->taken || FMHA_NAME(has_come)(turn)) {
        FMHA_NAME(product_queries)(block, banded, j, n, g, rows, ld, width, 0, grad_q);
    } else {
        const int sums = FMHA_NAME(product_queries)(block, banded, j, n, g, rows, ld, width, BLOCK_ROWS * width, w->m.grad_q);
        if (!FMHA_NAME(wait_for)(turn)) return multiplied;
        FMHA_NAME(add_sums)(block->rows, width, sums, BLOCK_ROWS * width, w->m.grad_q, 1, grad_q);
    }
    if (!finite) FMHA_NAME(tile_nonfinite)(p, block, j, n, g, tile.k, tile.ldk, p->D, grad_q, width);
    return multiplied;
}

/* to <- factor * from, with one NaN, and where `zeros`, one 0: which operand a sum of NaN takes its sign from may follow the
 * threads; and so may whether a sum that has underflowed to -0 meets a 0, where sums are added to each other in turn. */
INLINED void FMHA_NAME(multiply_rows)(const int zeros, ptrdiff_t rows, ptrdiff_t width, REAL factor, const REAL *from, ptrdiff_t ld,
                                      REAL *to, ptrdiff_t stride)
{
    for (ptrdiff_t i = 0; i < rows; i++)
        for (ptrdiff_t d = 0; d < width; d++) {
            const REAL x = factor * from[i * ld + d];
            to[i * stride + d] = zeros && x == 0 ? 0 : x == x ? x : (REAL)NAN;
        }
}

/* grad rows of an element type <- factor * rest * sums, which may be written over. */
static void FMHA_NAME(write_rows)(int type, int zeros, ptrdiff_t rows, ptrdiff_t width, REAL factor, REAL rest, REAL *from, ptrdiff_t ld,
                                  char *to_, ptrdiff_t stride)
{
    REAL *to = type == FMHA_SAME ? (REAL *)to_ : from;
    ptrdiff_t ldt = type == FMHA_SAME ? stride : ld;
    if (zeros) FMHA_NAME(multiply_rows)(1, rows, width, factor, from, ld, to, ldt);
    else FMHA_NAME(multiply_rows)(0, rows, width, factor, from, ld, to, ldt);
    if (rest != 1 && zeros) FMHA_NAME(multiply_rows)(1, rows, width, rest, to, ldt, to, ldt);
    else if (rest != 1) FMHA_NAME(multiply_rows)(0, rows, width, rest, to, ldt, to, ldt);
    if (type != FMHA_SAME) FMHA_NAME(store_rows)(type, rows, width, from, ld, to_, stride);
}

/* Whether masks, causality, window and lengths leave query i of head h nothing. Slow: key after key. */
static int FMHA_NAME(row_is_empty)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i)
{
    fmha_block head = {.b = b, .h = h};
    for (ptrdiff_t j = 0; j < p->Lk; j++)
        if (!FMHA_NAME(removed)(p, &head, i, j)) return 0;
    return 1;
}
