/* The "decode" algorithm: few query rows, many keys. Memory speed is the limit, so each element of k and v is read once
 * for all rows of the group: a row of keys and a row of values in turns, two streams of which the next rows are fetched ahead.
 * Keys are split in chunks of a fixed size; each leaves a partial softmax (peak, total, weighted values), merged in their order. */

/* How many bytes ahead of what a step reads it fetches, and how many cache lines of a row at most in one pass over its rows: each
 * pass fetches its share, so that memory is never idle. */
typedef struct {
    ptrdiff_t k, v, k_lines, v_lines;
} FMHA_NAME(ahead);

static FMHA_NAME(ahead) FMHA_NAME(decode_ahead)(const fmha_problem *p, ptrdiff_t rows)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->stored), k_bytes = p->D * size, v_bytes = p->Dv * size;
    const ptrdiff_t passes = rows / DECODE_TOGETHER + rows % DECODE_TOGETHER / 2 + rows % 2;
    const ptrdiff_t bytes = rows > 2 ? DECODE_FAR_AHEAD : DECODE_AHEAD, least = passes > 1 ? DECODE_STEP : 1;
    const ptrdiff_t k_rows = bytes / (k_bytes + 1) + 1, v_rows = bytes / (v_bytes + 1) + 1;
    return (FMHA_NAME(ahead)){
        .k = (k_rows > least ? k_rows : least) * p->k.stride[2] * size,
        .v = (v_rows > least ? v_rows : least) * p->v.stride[2] * size,
        .k_lines = fmha_parts(fmha_parts(k_bytes, FMHA_CACHE_LINE), passes),
        .v_lines = fmha_parts(fmha_parts(v_bytes, FMHA_CACHE_LINE), passes),
    };
}

/* Scratch of one thread: q scaled (rows, width), scores of a block of keys and of the block after it (rows, keys), of which `ready`
 * are computed, of each row what its sums shrink by and the lift of its scores; values (keys, value width) where they must be
 * copied, and where they must be converted. */
typedef struct {
    REAL *q, *scores, *after, *shrink, *lift, *copy, *converted;
    ptrdiff_t ready;
    FMHA_NAME(ahead) ahead;
} FMHA_NAME(decode_memory);

/* Returns the size in REALs; without memory that is all. */
static ptrdiff_t FMHA_NAME(decode_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(decode_memory) *m)
{
    ptrdiff_t used = 0, rows = fmha_heads_cut(p).rows;
    m->q = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->D, LANES));
    m->scores = FMHA_NAME(take)(memory, &used, rows * DECODE_KEYS);
    m->after = FMHA_NAME(take)(memory, &used, rows * DECODE_KEYS);
    m->shrink = FMHA_NAME(take)(memory, &used, rows);
    m->lift = FMHA_NAME(take)(memory, &used, rows);
    m->copy = FMHA_NAME(take)(memory, &used, DECODE_STEP * ROUND_UP(p->Dv, LANES));
    m->converted = FMHA_NAME(take)(memory, &used, FMHA_NAME(computed_scratch)(p, DECODE_STEP));
    return used;
}

static ptrdiff_t FMHA_NAME(decode_scratch)(const fmha_problem *p)
{
    FMHA_NAME(decode_memory) unused;
    return FMHA_NAME(decode_layout)(p, NULL, &unused);
}

/* What a chunk leaves: peak and total of each row, sums of its values (rows, value width). */
typedef struct {
    REAL *peak, *total, *sums;
} FMHA_NAME(chunk);

static ptrdiff_t FMHA_NAME(chunk_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(chunk) *chunk)
{
    ptrdiff_t used = 0, rows = fmha_heads_cut(p).rows;
    chunk->peak = FMHA_NAME(take)(memory, &used, rows);
    chunk->total = FMHA_NAME(take)(memory, &used, rows);
    chunk->sums = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->Dv, LANES));
    return used;
}

static ptrdiff_t FMHA_NAME(chunk_scratch)(const fmha_problem *p)
{
    FMHA_NAME(chunk) unused;
    return FMHA_NAME(chunk_layout)(p, NULL, &unused);
}

/* The result of the chunk `index` of those of all heads. */
static inline FMHA_NAME(chunk) FMHA_NAME(chunk_of)(const fmha_run *run, ptrdiff_t index)
{
    FMHA_NAME(chunk) chunk;
    FMHA_NAME(chunk_layout)(&run->p, (REAL *)run->chunks + index * FMHA_NAME(chunk_scratch)(&run->p), &chunk);
    return chunk;
}

/* out (rows, columns) <- out + a (rows, depth) @ v (depth, columns), the first time (shrink given) shrink * out + …. Each is a
 * product of its own: where one compiled body serves both, a compiler may select shrink * out or out before the sum, and not fuse
 * them in the body for some numbers of rows, whose bits are then others. */
#define DECODE_SUMS(type) \
    if (shrink) FMHA_NAME(product_of)(type, FMHA_SCALE_ADD, rows, columns, depth, a, DECODE_KEYS, 1, v, ldv, out, ldc, shrink); \
    else FMHA_NAME(product_of)(type, FMHA_ADD, rows, columns, depth, a, DECODE_KEYS, 1, v, ldv, out, ldc, a)
static void FMHA_NAME(decode_sums)(int type, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const REAL *a, const char *v,
                                   ptrdiff_t ldv, REAL *out, ptrdiff_t ldc, const REAL *shrink)
{
    switch (type) {
    case FMHA_HALF: DECODE_SUMS(FMHA_HALF); break;
    case FMHA_BFLOAT: DECODE_SUMS(FMHA_BFLOAT); break;
    case FMHA_OTHER: DECODE_SUMS(FMHA_OTHER); break;
    default: DECODE_SUMS(FMHA_SAME);
    }
}

/* What a step reads, rows that are ldk and ldv bytes apart, and how many cache lines it fetches from rows ahead of each. */
typedef struct {
    const char *k, *v, *k_ahead, *v_ahead;
    ptrdiff_t ldk, ldv, k_lines, v_lines;
} FMHA_NAME(streams);

/* scores (many, keys) <- q (many, width, padded) @ k (keys, D).T, and of as many earlier keys, of nv vectors of values,
 * out (many, value width) <- shrink * out + weights (many, keys) @ v: a row of keys and a row of values in turns, two streams
 * that memory delivers faster than all keys and then all values. A row is loaded once for `many` rows of queries. */
static inline __attribute__((always_inline)) void FMHA_NAME(decode_step_of)(
    const int type, const int many, const int nv, const ptrdiff_t keys, const ptrdiff_t D, const ptrdiff_t Dv,
    const REAL *q, const FMHA_NAME(streams) *from, REAL *scores, const REAL *weights, REAL *out, const REAL *shrink)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), width = ROUND_UP(D, LANES);
    const ptrdiff_t ldk = from->ldk, ldv = from->ldv, k_lines = from->k_lines, v_lines = from->v_lines;
    const char *v = from->v, *k_ahead = from->k_ahead, *v_ahead = from->v_ahead;
    VEC total[DECODE_TOGETHER][8];
#pragma GCC unroll 4
    for (int r = 0; r < many; r++)
#pragma GCC unroll 8
        for (int i = 0; i < nv; i++) total[r][i] = v_splat(0);
    for (ptrdiff_t j = 0; j < keys; j += LANES) {
        VEC sum[DECODE_TOGETHER][LANES];
        for (ptrdiff_t l = 0; l < LANES; l++, v += ldv, k_ahead += ldk, v_ahead += ldv) {
            for (ptrdiff_t line = 0; line < k_lines; line++) v_prefetch_far(k_ahead + line * FMHA_CACHE_LINE);
            const char *k = from->k + (j + l < keys ? j + l : 0) * ldk;
            VEC even[DECODE_TOGETHER], odd[DECODE_TOGETHER];
#pragma GCC unroll 4
            for (int r = 0; r < many; r++) even[r] = odd[r] = v_splat(0);
            ptrdiff_t d = 0;
#pragma GCC unroll 4
            for (; d + 2 * LANES <= D; d += 2 * LANES) {
                VEC first = FMHA_NAME(stored_load)(type, k + d * size), second = FMHA_NAME(stored_load)(type, k + (d + LANES) * size);
#pragma GCC unroll 4
                for (int r = 0; r < many; r++) {
                    even[r] = even[r] + first * v_load(q + r * width + d);
                    odd[r] = odd[r] + second * v_load(q + r * width + d + LANES);
                }
            }
            for (; d < D; d += LANES) {
                VEC first = D - d >= LANES ? FMHA_NAME(stored_load)(type, k + d * size) : FMHA_NAME(stored_part)(type, k + d * size, D - d);
#pragma GCC unroll 4
                for (int r = 0; r < many; r++) even[r] = even[r] + first * v_load(q + r * width + d);
            }
#pragma GCC unroll 4
            for (int r = 0; r < many; r++) sum[r][l] = even[r] + odd[r];
            for (ptrdiff_t line = 0; line < v_lines; line++) v_prefetch_far(v_ahead + line * FMHA_CACHE_LINE);
            if (nv == 0) continue;
            VEC weight[DECODE_TOGETHER];
#pragma GCC unroll 4
            for (int r = 0; r < many; r++) weight[r] = v_splat(weights[r * DECODE_KEYS + j + l]);
#pragma GCC unroll 8
            for (int i = 0; i < nv; i++) {
                VEC value = FMHA_NAME(stored_load)(type, v + i * LANES * size);
#pragma GCC unroll 4
                for (int r = 0; r < many; r++) total[r][i] = total[r][i] + weight[r] * value;
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < many; r++) v_store(scores + r * DECODE_KEYS + j, FMHA_NAME(sums)(sum[r]));
    }
#pragma GCC unroll 4
    for (int r = 0; r < many; r++) {
        const VEC factor = v_splat(shrink ? shrink[r] : 1);
#pragma GCC unroll 8
        for (int i = 0; i < nv; i++) v_store(out + r * Dv + i * LANES, v_load(out + r * Dv + i * LANES) * factor + total[r][i]);
    }
}

/* The same of any value width, a multiple of LANES: the vectors of values that the registers do not hold after the others. */
static inline __attribute__((always_inline)) void FMHA_NAME(decode_step_rows)(
    const int type, const int many, const ptrdiff_t D, const ptrdiff_t Dv, const REAL *q, const FMHA_NAME(streams) *from,
    REAL *scores, const REAL *weights, REAL *out, const REAL *shrink)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), vectors = Dv / LANES;
    ptrdiff_t nv;
#define STEP(n) FMHA_NAME(decode_step_of)(type, many, nv = n, DECODE_STEP, D, Dv, q, from, scores, weights, out, shrink)
    if (vectors >= 8 && DECODE_SUMMED >= 8 * many) STEP(8);
    else if (vectors >= 4 && DECODE_SUMMED >= 4 * many) STEP(4);
    else if (vectors >= 2) STEP(2);
    else STEP(1);
#undef STEP
    if (nv < vectors)
        FMHA_NAME(decode_sums)(type, many, (vectors - nv) * LANES, DECODE_STEP, weights, from->v + nv * LANES * size, from->ldv / size,
                               out + nv * LANES, Dv, shrink);
}

/* The same of any number of rows, DECODE_TOGETHER at a time, then two, then one; not `summed`: scores alone, of so many keys, whose
 * values are fetched. `fetched`: the values are there already. */
static inline __attribute__((always_inline)) void FMHA_NAME(decode_step_type)(
    const int type, const ptrdiff_t D, const ptrdiff_t Dv, const int summed, const fmha_problem *p, const FMHA_NAME(ahead) *ahead,
    ptrdiff_t rows, int fetched, ptrdiff_t keys, const REAL *q, const char *k, REAL *scores, const REAL *weights, const char *v,
    REAL *out, const REAL *shrink)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), width = ROUND_UP(D, LANES);
    const ptrdiff_t k_lines = summed ? fmha_parts(D * size, FMHA_CACHE_LINE) : 0;
    const ptrdiff_t v_lines = fetched ? 0 : fmha_parts(Dv * size, FMHA_CACHE_LINE);
    FMHA_NAME(streams) from = {
        .k = k, .k_ahead = k + ahead->k, .ldk = p->k.stride[2] * size,
        .v = v, .v_ahead = summed ? v + ahead->v : v, .ldv = p->v.stride[2] * size,
    };
    for (ptrdiff_t r = 0, many, k_line = 0, v_line = 0; r < rows; r += many) {
        from.k_lines = k_lines - k_line < ahead->k_lines ? k_lines - k_line : ahead->k_lines;
        from.v_lines = v_lines - v_line < ahead->v_lines ? v_lines - v_line : ahead->v_lines;
        many = rows - r >= DECODE_TOGETHER ? DECODE_TOGETHER : rows - r >= 2 ? 2 : 1;
#define ROWS(n) \
    if (summed) \
        FMHA_NAME(decode_step_rows)(type, n, D, Dv, q + r * width, &from, scores + r * DECODE_KEYS, weights + r * DECODE_KEYS, \
                                    out + r * Dv, shrink ? shrink + r : NULL); \
    else FMHA_NAME(decode_step_of)(type, n, 0, keys, D, Dv, q + r * width, &from, scores + r * DECODE_KEYS, NULL, NULL, NULL); \
    break
        switch (many) {
        case 1: ROWS(1);
        case 2: ROWS(2);
        default: ROWS(DECODE_TOGETHER);
        }
#undef ROWS
        k_line += from.k_lines;
        v_line += from.v_lines;
        from.k_ahead += from.k_lines * FMHA_CACHE_LINE;
        from.v_ahead += from.v_lines * FMHA_CACHE_LINE;
    }
}

/* Heads of width 64 have loops of their own, unrolled; 128 gains nothing from them. */
#define DECODE_WIDTHS(type, ...) \
    if (p->D == 64 && p->Dv == 64) FMHA_NAME(decode_step_type)(type, 64, 64, __VA_ARGS__); \
    else FMHA_NAME(decode_step_type)(type, p->D, p->Dv, __VA_ARGS__)

/* scores (rows, keys) <- q (rows, width, padded) @ k (keys, D).T, at most DECODE_STEP keys. */
static void FMHA_NAME(decode_scores)(const fmha_problem *p, const FMHA_NAME(ahead) *ahead, ptrdiff_t rows, ptrdiff_t keys, const REAL *q,
                                     const char *k, const char *v, REAL *scores)
{
#define SCORES 0, p, ahead, rows, 0, keys, q, k, scores, NULL, v, NULL, NULL
    switch (p->stored) {
    case FMHA_HALF: DECODE_WIDTHS(FMHA_HALF, SCORES); break;
    case FMHA_BFLOAT: DECODE_WIDTHS(FMHA_BFLOAT, SCORES); break;
    case FMHA_OTHER: FMHA_NAME(decode_step_type)(FMHA_OTHER, p->D, p->Dv, SCORES); break;
    default: DECODE_WIDTHS(FMHA_SAME, SCORES);
    }
#undef SCORES
}

/* out (rows, Dv) <- shrink * out + weights (rows, DECODE_STEP) @ v (DECODE_STEP, Dv), and in turns with it scores
 * (rows, DECODE_STEP) <- q (rows, width) @ k (DECODE_STEP, D).T of keys that come later. */
static void FMHA_NAME(decode_step)(const fmha_problem *p, const FMHA_NAME(ahead) *ahead, ptrdiff_t rows, int fetched, const REAL *q,
                                   const char *k, REAL *scores, const REAL *weights, const char *v, REAL *out, const REAL *shrink)
{
#define STEP 1, p, ahead, rows, fetched, DECODE_STEP, q, k, scores, weights, v, out, shrink
    switch (p->stored) {
    case FMHA_HALF: DECODE_WIDTHS(FMHA_HALF, STEP); break;
    case FMHA_BFLOAT: DECODE_WIDTHS(FMHA_BFLOAT, STEP); break;
    default: DECODE_WIDTHS(FMHA_SAME, STEP);
    }
#undef STEP
}

/* One chunk [first, last) of keys for all rows of a group; lift NULL: 1. Returns what forward_block does; careful: the firewall's
 * path. m->ready: of how many keys m->scores holds the scores already; on return, of those after the chunk, up to `end`. */
static int FMHA_NAME(decode_chunk)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first, ptrdiff_t last, ptrdiff_t end,
                                   const REAL *lift, FMHA_NAME(decode_memory) *m, const FMHA_NAME(chunk) *result, int careful)
{
    const fmha_problem *p = &run->p;
    ptrdiff_t group = p->H / p->Hkv, rows = group * p->Lq, value_width = ROUND_UP(p->Dv, LANES), ld;
    REAL *q = m->q, *shrink = m->shrink, *peak = result->peak, *total = result->total, *out = result->sums;
    int partly = 0;
    for (ptrdiff_t r = 0; r < rows; r++) {
        peak[r] = NEGATIVE_INFINITY;
        total[r] = 0;
    }
    memset(out, 0, (size_t)(rows * value_width) * sizeof(REAL));
    const int in_turns = !lift && !careful && p->Dv == value_width && p->D > 0 && p->Dv > 0 && p->stored != FMHA_OTHER;
    for (ptrdiff_t j = first; j < last; j += DECODE_KEYS) {
        REAL *scores = m->scores, *after = m->after;
        ptrdiff_t n = last - j < DECODE_KEYS ? last - j : DECODE_KEYS, ready = m->ready;
        if (lift) fmha_keep_subnormal_operands();
        for (ptrdiff_t e = ready; e < n; e += DECODE_STEP) {
            const ptrdiff_t keys = n - e < DECODE_STEP ? n - e : DECODE_STEP;
            FMHA_NAME(decode_scores)(p, &m->ahead, rows, keys, q, FMHA_NAME(stored_row)(p, &p->k, b, hkv, j + e),
                                     FMHA_NAME(stored_row)(p, &p->v, b, hkv, j + e), scores + e);
        }
        if (lift) FMHA_NAME(set_control)(p);
        for (ptrdiff_t e = 0; lift && e < rows * DECODE_KEYS; e++) scores[e] *= lift[e / DECODE_KEYS];
        int touched = p->bool_mask.data || p->additive_mask.data;
        for (ptrdiff_t r = 0; r < rows; r++) {
            REAL *s = scores + r * DECODE_KEYS;
            fmha_block block = {.b = b, .h = hkv * group + r / p->Lq, .i0 = r % p->Lq, .rows = 1, .j0 = j, .cols = n};
            ptrdiff_t low, high;
            FMHA_NAME(row_range)(p, &block, block.i0, &low, &high);
            touched |= low > 0 || high < n;
            FMHA_NAME(mask_row)(p, &block, block.i0, j + low, j + high, s + low);
            FMHA_NAME(fill)(low, s, NEGATIVE_INFINITY);
            FMHA_NAME(fill)(n - high, s + high, NEGATIVE_INFINITY);
            VEC best = v_splat(peak[r]);
            for (ptrdiff_t e = 0; e < n; e += LANES) {
                VEC score = v_load_n(s + e, n - e, NEGATIVE_INFINITY);
                best = v_max(score, best);
            }
            REAL now = FMHA_NAME(largest)(best), shift = now == NEGATIVE_INFINITY ? 0 : now;
            shrink[r] = v_lane(FMHA_NAME(exp)(v_splat(peak[r] - shift)), 0);
            total[r] = total[r] * shrink[r] + FMHA_NAME(exp_row)(n, s, shift, s);
            peak[r] = now;
            FMHA_NAME(drop_row)(p, b, block.h, block.i0, j, n, s);
        }
        partly |= touched;
        ptrdiff_t e = 0;
        for (; in_turns && e + DECODE_STEP <= n && j + DECODE_KEYS + e + DECODE_STEP <= end; e += DECODE_STEP)
            FMHA_NAME(decode_step)(p, &m->ahead, rows, e >= ready, q, FMHA_NAME(stored_row)(p, &p->k, b, hkv, j + DECODE_KEYS + e),
                                   after + e, scores + e, FMHA_NAME(stored_row)(p, &p->v, b, hkv, j + e), out, e ? NULL : shrink);
        m->ready = e;
        /* The values alone, of as many keys at a time: bits are the same wherever an item ends and however the values are stored. */
        for (; e < n; e += DECODE_STEP) {
            const ptrdiff_t part = n - e < DECODE_STEP ? n - e : DECODE_STEP;
            if (value_width == p->Dv && !(careful && touched)) {
                FMHA_NAME(decode_sums)(p->stored, rows, value_width, part, scores + e, FMHA_NAME(stored_row)(p, &p->v, b, hkv, j + e),
                                       p->v.stride[2], out, value_width, e ? NULL : shrink);
                continue;
            }
            ptrdiff_t ldv;
            const REAL *v = FMHA_NAME(computed_rows)(p, &p->v, b, hkv, j + e, part, p->Dv, m->converted, &ldv);
            const REAL *values = FMHA_NAME(whole_rows)(v, ldv, part, p->Dv, !(careful && touched), m->copy, &ld);
            FMHA_NAME(decode_sums)(FMHA_SAME, rows, value_width, part, scores + e, (const char *)values, ld, out, value_width,
                                   e ? NULL : shrink);
            for (ptrdiff_t r = 0; careful && touched && r < rows; r++) {
                fmha_block block = {.b = b, .h = hkv * group + r / p->Lq, .i0 = r % p->Lq, .rows = 1, .j0 = j + e, .cols = part,
                                    .ld = DECODE_KEYS};
                FMHA_NAME(add_nonfinite)(p, &block, 0, 1, scores + r * DECODE_KEYS + e, v, ldv, p->Dv, out + r * value_width, value_width);
            }
        }
        m->scores = after;
        m->after = scores;
    }
    int finite = FMHA_NAME(all_finite)(rows, value_width, out, value_width);
    return (finite ? FMHA_NAME(finite) : 0) | (partly ? FMHA_NAME(partly) : 0);
}

/* Row r of a group's queries. */
static inline const char *FMHA_NAME(decode_query)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t r)
{
    return FMHA_NAME(row_in)(p->element, &p->q, b, hkv * (p->H / p->Hkv) + r / p->Lq, r % p->Lq);
}

/* Item: chunks of keys of a key/value head. */
static void FMHA_NAME(decode)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    FMHA_NAME(decode_memory) m;
    FMHA_NAME(decode_layout)(p, FMHA_NAME(scratch_of)(run, worker), &m);
    m.ready = 0;
    m.ahead = FMHA_NAME(decode_ahead)(p, item.rows);
    REAL *q = m.q, *lift = m.lift;
    ptrdiff_t b = item.b, hkv = item.h, rows = item.rows, width = ROUND_UP(p->D, LANES);
    ptrdiff_t end = item.j0 + item.cols, low, high;
    fmha_block_keys(p, b, 0, p->Lq, &low, &high);
    if (end > high) end = high;
    FMHA_NAME(begin_item)(p);
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest);
    VEC squares = v_splat(0);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const REAL *from = FMHA_NAME(real_row)(p->element, FMHA_NAME(decode_query)(p, b, hkv, r), p->D, q + r * width);
        for (ptrdiff_t d = 0; d < width; d += LANES) {
            VEC value = v_load_n(from + d, p->D - d, 0) * factor;
            squares = squares + value * value;
            v_store(q + r * width + d, value);
        }
    }
    int lifted = !(FMHA_NAME(sum)(squares) < HUGE_POWER) || rest != 1;
    for (ptrdiff_t r = 0; lifted && r < rows; r++) {
        const char *at = FMHA_NAME(decode_query)(p, b, hkv, r);
        lift[r] = FMHA_NAME(row_lift)(p->element, p->D, at, factor);
        const REAL *from = FMHA_NAME(real_row)(p->element, at, p->D, q + r * width);
        for (ptrdiff_t d = 0; d < p->D; d++) q[r * width + d] = (REAL)((double)factor / lift[r]) * from[d];
        lift[r] *= rest;
    }
    if (!lifted) lift = NULL;
    const ptrdiff_t chunks = fmha_parts(p->Lk, FMHA_CHUNK_KEYS);
    for (ptrdiff_t j = item.j0; j < item.j0 + item.cols; j += FMHA_CHUNK_KEYS) {
        const FMHA_NAME(chunk) result = FMHA_NAME(chunk_of)(run, (b * p->Hkv + hkv) * chunks + j / FMHA_CHUNK_KEYS);
        const ptrdiff_t first = j < low ? j + (low - j) / DECODE_KEYS * DECODE_KEYS : j;
        const ptrdiff_t last = end - j < FMHA_CHUNK_KEYS ? end : j + FMHA_CHUNK_KEYS;
        if (FMHA_NAME(decode_chunk)(run, b, hkv, first, last, end, lift, &m, &result, 0) != FMHA_NAME(partly)) continue;
        m.ready = 0;
        FMHA_NAME(decode_chunk)(run, b, hkv, first, last, end, lift, &m, &result, 1);
    }
}

/* Item: one key/value head. Partial softmaxes of the chunks become one, in their order. */
static void FMHA_NAME(decode_merge)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    ptrdiff_t b = item.b, hkv = item.h, rows = item.rows, group = p->H / p->Hkv, value_width = ROUND_UP(p->Dv, LANES);
    const ptrdiff_t chunks = fmha_parts(p->Lk, FMHA_CHUNK_KEYS), size = FMHA_NAME(chunk_scratch)(p);
    const FMHA_NAME(chunk) first = FMHA_NAME(chunk_of)(run, index * chunks);       /* the others follow, each `size` REALs on */
    int finite = 1;
    uint64_t tiny = 0;
    FMHA_NAME(forward_memory) memory;
    FMHA_NAME(forward_layout)(p, TILE_KEYS, FMHA_NAME(scratch_of)(run, worker), &memory);
    FMHA_NAME(begin_item)(p);
    for (ptrdiff_t r = 0; r < rows; r++) {
        ptrdiff_t h = hkv * group + r / p->Lq, i = r % p->Lq;
        REAL *out = p->element == FMHA_SAME ? (REAL *)FMHA_NAME(row_in)(FMHA_SAME, &run->out, b, h, i) : memory.result + r * value_width;
        REAL sink = FMHA_NAME(sink)(p, h), peak = sink, total = 0;
        for (ptrdiff_t c = 0; c < chunks; c++) {
            REAL other = first.peak[c * size + r];
            peak = other > peak ? other : peak;
        }
        REAL shift = peak == NEGATIVE_INFINITY ? 0 : peak;
        if (p->sinks) total = FMHA_NAME(exp_of)(sink - shift);
        FMHA_NAME(fill)(p->Dv, out, 0);
        for (ptrdiff_t c = 0; c < chunks; c++) {
            const REAL *sums = first.sums + c * size + r * value_width, own = first.total[c * size + r];
            REAL weight = v_lane(FMHA_NAME(exp)(v_splat(first.peak[c * size + r] - shift)), 0);
            if (own == 0) continue;     /* no key of the chunk is attended */
            total += weight * own;
            for (ptrdiff_t d = 0; d < p->Dv; d += LANES)
                v_store_n(out + d, v_load_n(out + d, p->Dv - d, 0) + v_load(sums + d) * weight, p->Dv - d);
        }
        FMHA_NAME(divide_row)(p->Dv, out, total);
        finite &= FMHA_NAME(all_finite)(1, p->Dv, out, p->Dv);
        if (FMHA_NAME(tiny_row)(p->Dv, out) && total != 0) tiny |= (uint64_t)1 << r;
        if (run->lse) ((REAL *)run->lse)[(b * p->H + h) * p->Lq + i] = total == 0 ? NEGATIVE_INFINITY : shift + REAL_LOG(total);
    }
    if (!finite || tiny) {
        FMHA_NAME(rows) block;
        FMHA_NAME(block_rows)(p, &block, b, hkv, 0, rows);
        if (!finite) FMHA_NAME(large_rows)(run, &block, &memory, ALL_ROWS);
        if (tiny) FMHA_NAME(tiny_rows)(run, &block, tiny, &memory);
    }
    FMHA_NAME(round_rows)(run, b, hkv, 0, rows, memory.result, ALL_ROWS);
}
