/* The "decode" algorithm: few query rows, many keys. Memory speed is the limit, so each element of k and v is read once
 * for all rows of the group, a whole row at a time, the values fetched ahead while the keys are at work. Keys are split in
 * chunks of a fixed size; each leaves a partial softmax (peak, total, weighted values), merged in the order of the chunks. */

/* Scratch of one thread: q scaled (rows, width), scores (rows, keys), of each row what its sums shrink by and the lift of its
 * scores; values (keys, value width) where they must be copied, and where they must be converted. */
typedef struct {
    REAL *q, *scores, *shrink, *lift, *copy, *converted;
} FMHA_NAME(decode_memory);

/* Returns the size in REALs; without memory that is all. */
static ptrdiff_t FMHA_NAME(decode_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(decode_memory) *m)
{
    ptrdiff_t used = 0, rows = fmha_heads_cut(p).rows;
    m->q = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->D, LANES));
    m->scores = FMHA_NAME(take)(memory, &used, rows * DECODE_KEYS);
    m->shrink = FMHA_NAME(take)(memory, &used, rows);
    m->lift = FMHA_NAME(take)(memory, &used, rows);
    m->copy = FMHA_NAME(take)(memory, &used, DECODE_VALUES * ROUND_UP(p->Dv, LANES));
    m->converted = FMHA_NAME(take)(memory, &used, FMHA_NAME(computed_scratch)(p, DECODE_VALUES));
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

/* The result of the item `index` of the pass over chunks. */
static inline FMHA_NAME(chunk) FMHA_NAME(chunk_of)(const fmha_run *run, ptrdiff_t index)
{
    FMHA_NAME(chunk) chunk;
    FMHA_NAME(chunk_layout)(&run->p, (REAL *)run->chunks + index * FMHA_NAME(chunk_scratch)(&run->p), &chunk);
    return chunk;
}

/* What is fetched ahead while scores are computed: the values of the same keys, and the keys of the next group of LANES. */
typedef struct {
    const char *v;
    ptrdiff_t ldv, Dv, keys_left, passes;
} FMHA_NAME(ahead);

/* scores (many, LANES keys) <- q (many, width, padded) @ k (keys, D).T; a key's vectors are loaded once for `many` rows. */
static inline __attribute__((always_inline)) void FMHA_NAME(decode_group)(
    const int type, const int many, ptrdiff_t keys, ptrdiff_t D, const REAL *q, ptrdiff_t width, const char *k, ptrdiff_t ldk,
    const FMHA_NAME(ahead) *ahead, ptrdiff_t pass, REAL *scores)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), line = FMHA_CACHE_LINE / size;
    /* Each pass over the group fetches its share, so that memory is never idle. */
    ptrdiff_t key_share = ROUND_UP((D + ahead->passes - 1) / ahead->passes, line), key_from = pass * key_share;
    ptrdiff_t value_share = ROUND_UP((ahead->Dv + ahead->passes - 1) / ahead->passes, line), value_from = pass * value_share;
    ptrdiff_t key_to = key_from + key_share < D ? key_from + key_share : D;
    ptrdiff_t value_to = value_from + value_share < ahead->Dv ? value_from + value_share : ahead->Dv;
    VEC sum[DECODE_TOGETHER][LANES];
    for (ptrdiff_t l = 0; l < LANES; l++) {
        const char *key = k + (l < keys ? l : 0) * ldk * size;
        if (l < keys)
            for (ptrdiff_t d = value_from; d < value_to; d += line) v_prefetch_far(ahead->v + (l * ahead->ldv + d) * size);
        if (many > 1 && l + LANES < ahead->keys_left)
            for (ptrdiff_t d = key_from; d < key_to; d += line) v_prefetch(key + (LANES * ldk + d) * size);
        VEC even[DECODE_TOGETHER], odd[DECODE_TOGETHER];
#pragma GCC unroll 4
        for (int r = 0; r < many; r++) even[r] = odd[r] = v_splat(0);
        ptrdiff_t d = 0;
#pragma GCC unroll 4
        for (; d + 2 * LANES <= D; d += 2 * LANES) {
            VEC first = FMHA_NAME(stored_load)(type, key + d * size), second = FMHA_NAME(stored_load)(type, key + (d + LANES) * size);
#pragma GCC unroll 4
            for (int r = 0; r < many; r++) {
                even[r] = even[r] + first * v_load(q + r * width + d);
                odd[r] = odd[r] + second * v_load(q + r * width + d + LANES);
            }
        }
        for (; d < D; d += LANES) {
            VEC first = D - d >= LANES ? FMHA_NAME(stored_load)(type, key + d * size) : FMHA_NAME(stored_part)(type, key + d * size, D - d);
#pragma GCC unroll 4
            for (int r = 0; r < many; r++) even[r] = even[r] + first * v_load(q + r * width + d);
        }
#pragma GCC unroll 4
        for (int r = 0; r < many; r++) sum[r][l] = even[r] + odd[r];
    }
#pragma GCC unroll 4
    for (int r = 0; r < many; r++) v_store(scores + r * DECODE_KEYS, FMHA_NAME(sums)(sum[r]));
}

/* scores (rows, n) <- q (rows, width, padded) @ k (n, D).T, LANES keys at a time and DECODE_TOGETHER rows, then two,
 * then one. */
static inline __attribute__((always_inline)) void FMHA_NAME(decode_width)(const int type,
    ptrdiff_t rows, ptrdiff_t n, const ptrdiff_t D, const REAL *q, const char *k, ptrdiff_t ldk, const char *v, ptrdiff_t ldv, ptrdiff_t Dv,
    ptrdiff_t keys_left, REAL *scores)
{
    ptrdiff_t width = ROUND_UP(D, LANES), size = FMHA_NAME(stored_size)(type);
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        ptrdiff_t passes = rows / DECODE_TOGETHER + rows % DECODE_TOGETHER / 2 + rows % 2;
        FMHA_NAME(ahead) ahead = {v + j * ldv * size, ldv, Dv, keys_left - j, passes};
        ptrdiff_t keys = n - j < LANES ? n - j : LANES, r = 0, pass = 0;
        for (; r + DECODE_TOGETHER <= rows; r += DECODE_TOGETHER)
            FMHA_NAME(decode_group)(type, DECODE_TOGETHER, keys, D, q + r * width, width, k + j * ldk * size, ldk, &ahead, pass++,
                                    scores + r * DECODE_KEYS + j);
        for (; r + 2 <= rows; r += 2)
            FMHA_NAME(decode_group)(type, 2, keys, D, q + r * width, width, k + j * ldk * size, ldk, &ahead, pass++, scores + r * DECODE_KEYS + j);
        for (; r < rows; r++)
            FMHA_NAME(decode_group)(type, 1, keys, D, q + r * width, width, k + j * ldk * size, ldk, &ahead, pass++, scores + r * DECODE_KEYS + j);
    }
}

/* Heads of width 64 have a loop of their own, unrolled; 128 gains nothing from one. */
#define DECODE_WIDTH(type, D) \
    FMHA_NAME(decode_width)(type, rows, n, D, q, k, p->k.stride[2], v, p->v.stride[2], p->Dv, keys_left, scores)
#define DECODE_WIDTHS(type) \
    if (p->D == 64) DECODE_WIDTH(type, 64); \
    else DECODE_WIDTH(type, p->D)
static void FMHA_NAME(decode_scores)(const fmha_problem *p, ptrdiff_t rows, ptrdiff_t n, const REAL *q, const char *k, const char *v,
                                     ptrdiff_t keys_left, REAL *scores)
{
    switch (p->stored) {
    case FMHA_HALF: DECODE_WIDTHS(FMHA_HALF); break;
    case FMHA_BFLOAT: DECODE_WIDTHS(FMHA_BFLOAT); break;
    case FMHA_OTHER: DECODE_WIDTH(FMHA_OTHER, p->D); break;
    default: DECODE_WIDTHS(FMHA_SAME);
    }
}

/* out (rows, columns) <- out + a (rows, depth) @ v (depth, columns), the first time (shrink given) shrink * out + …; next: keys that are
 * fetched meanwhile, or memory would be idle. Each is a
 * product of its own: where one compiled body serves both, a compiler may select shrink * out or out before the sum, and not fuse
 * them in the body for some numbers of rows, whose bits are then others. */
#define DECODE_SUMS(type) \
    if (shrink) FMHA_NAME(product_of)(type, FMHA_SCALE_ADD, rows, columns, depth, a, DECODE_KEYS, 1, v, ldv, out, columns, shrink, next); \
    else FMHA_NAME(product_of)(type, FMHA_ADD, rows, columns, depth, a, DECODE_KEYS, 1, v, ldv, out, columns, a, next)
static void FMHA_NAME(decode_sums)(int type, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const REAL *a, const char *v, ptrdiff_t ldv,
                                   REAL *out, const REAL *shrink, const FMHA_NAME(next_rows) *next)
{
    switch (type) {
    case FMHA_HALF: DECODE_SUMS(FMHA_HALF); break;
    case FMHA_BFLOAT: DECODE_SUMS(FMHA_BFLOAT); break;
    case FMHA_OTHER: DECODE_SUMS(FMHA_OTHER); break;
    default: DECODE_SUMS(FMHA_SAME);
    }
}

/* One chunk of keys for all rows of a group; lift NULL: 1. Returns what forward_block does; careful: the firewall's path. */
static int FMHA_NAME(decode_chunk)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first, ptrdiff_t last, const REAL *lift,
                                   const FMHA_NAME(decode_memory) *m, const FMHA_NAME(chunk) *result, int careful)
{
    const fmha_problem *p = &run->p;
    ptrdiff_t group = p->H / p->Hkv, rows = group * p->Lq, value_width = ROUND_UP(p->Dv, LANES), ld;
    REAL *q = m->q, *scores = m->scores, *shrink = m->shrink, *peak = result->peak, *total = result->total, *out = result->sums;
    int partly = 0;
    for (ptrdiff_t r = 0; r < rows; r++) {
        peak[r] = NEGATIVE_INFINITY;
        total[r] = 0;
    }
    memset(out, 0, (size_t)(rows * value_width) * sizeof(REAL));
    for (ptrdiff_t j = first; j < last; j += DECODE_KEYS) {
        ptrdiff_t n = last - j < DECODE_KEYS ? last - j : DECODE_KEYS;
        if (lift) fmha_keep_subnormal_operands();
        FMHA_NAME(decode_scores)(p, rows, n, q, FMHA_NAME(stored_row)(p, &p->k, b, hkv, j), FMHA_NAME(stored_row)(p, &p->v, b, hkv, j),
                                 last - j, scores);
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
        for (ptrdiff_t e = 0; e < n; e += DECODE_VALUES) {
            ptrdiff_t part = n - e < DECODE_VALUES ? n - e : DECODE_VALUES, soon = j + DECODE_KEYS + e;
            const ptrdiff_t size = FMHA_NAME(stored_size)(p->stored);
            const FMHA_NAME(next_rows) keys = {FMHA_NAME(stored_row)(p, &p->k, b, hkv, soon < last ? soon : j), p->k.stride[2] * size, p->D * size};
            const FMHA_NAME(next_rows) *next = soon + part <= last ? &keys : NULL;
            /* out (rows, Dv) <- shrink * out + probabilities (rows, keys) @ v (keys, Dv) */
            if (value_width == p->Dv && !(careful && touched)) {
                FMHA_NAME(decode_sums)(p->stored, rows, value_width, part, scores + e, FMHA_NAME(stored_row)(p, &p->v, b, hkv, j + e),
                                       p->v.stride[2], out, e ? NULL : shrink, next);
                continue;
            }
            ptrdiff_t ldv;
            const REAL *v = FMHA_NAME(computed_rows)(p, &p->v, b, hkv, j + e, part, p->Dv, m->converted, &ldv);
            const REAL *values = FMHA_NAME(whole_rows)(v, ldv, part, p->Dv, !(careful && touched), m->copy, &ld);
            FMHA_NAME(decode_sums)(FMHA_SAME, rows, value_width, part, scores + e, (const char *)values, ld, out, e ? NULL : shrink, next);
            for (ptrdiff_t r = 0; careful && touched && r < rows; r++) {
                fmha_block block = {.b = b, .h = hkv * group + r / p->Lq, .i0 = r % p->Lq, .rows = 1, .j0 = j + e, .cols = part,
                                    .ld = DECODE_KEYS};
                FMHA_NAME(add_nonfinite)(p, &block, 0, 1, scores + r * DECODE_KEYS + e, v, ldv, p->Dv, out + r * value_width, value_width);
            }
        }
    }
    int finite = FMHA_NAME(all_finite)(rows, value_width, out, value_width);
    return (finite ? FMHA_NAME(finite) : 0) | (partly ? FMHA_NAME(partly) : 0);
}

/* Row r of a group's queries. */
static inline const char *FMHA_NAME(decode_query)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t r)
{
    return FMHA_NAME(row_in)(p->element, &p->q, b, hkv * (p->H / p->Hkv) + r / p->Lq, r % p->Lq);
}

/* Item: one chunk of keys of a key/value head. */
static void FMHA_NAME(decode)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    const FMHA_NAME(chunk) result = FMHA_NAME(chunk_of)(run, index);
    FMHA_NAME(decode_memory) m;
    FMHA_NAME(decode_layout)(p, FMHA_NAME(scratch_of)(run, worker), &m);
    REAL *q = m.q, *lift = m.lift;
    ptrdiff_t b = item.b, hkv = item.h, rows = item.rows, width = ROUND_UP(p->D, LANES);
    ptrdiff_t first = item.j0, last = first + item.cols, low, high;
    fmha_block_keys(p, b, 0, p->Lq, &low, &high);
    if (last > high) last = high;
    if (first < low) first += (low - first) / DECODE_KEYS * DECODE_KEYS;
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
    if (FMHA_NAME(decode_chunk)(run, b, hkv, first, last, lift, &m, &result, 0) == FMHA_NAME(partly))
        FMHA_NAME(decode_chunk)(run, b, hkv, first, last, lift, &m, &result, 1);
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
