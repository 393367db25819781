/* The "decode" algorithm: few query rows, many keys. Memory speed is the limit, so each element of k and v is read once for all
 * rows of the group: from memory a row of keys and a row of values in turns, two streams of which the next rows are fetched
 * ahead. Keys are split in chunks of a fixed size; each leaves a partial softmax (peak, total, weighted values), merged in their
 * order. */

/* The item that a thread takes next: its number among all, from 1 on; the first block of keys that it attends, none where nothing
 * can be done for it beforehand. */
typedef struct {
    ptrdiff_t number, b, hkv, first, keys;
} FMHA_NAME(decode_next);

/* What a thread has done for the item that it takes next, if that has this number: q scaled, and scores of as many keys as are
 * `ready`. */
typedef struct {
    ptrdiff_t number, ready;
    REAL *q, *scores;
} FMHA_NAME(decode_begun);

/* Scratch of one thread. At its start, 0 when a run begins: what is done of the next item. q scaled (rows, width), here and of the
 * next item; scores (rows, keys) of a block of keys, of the block after it, of which `ready` are computed, and of the next item's
 * first; of each row what its sums shrink by and the lift of its scores; sums (rows, value width) of reduced probabilities; values
 * (keys, value width) where they must be copied, and where they must be converted. */
typedef struct {
    FMHA_NAME(decode_begun) *begun;
    REAL *q, *next_q, *scores, *after, *next_scores, *shrink, *lift, *limited, *copy, *converted;
    ptrdiff_t ready;
    FMHA_NAME(ahead) ahead;
    FMHA_NAME(next) *next;
    const char *then;           /* the first keys of the item that the thread takes next, or NULL */
    FMHA_NAME(decode_next) item;
} FMHA_NAME(decode_memory);

/* Returns the size in REALs; without memory that is all. */
static ptrdiff_t FMHA_NAME(decode_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(decode_memory) *m)
{
    ptrdiff_t used = 0, rows = fmha_heads_cut(p).rows;
    m->next = NULL;
    m->then = NULL;
    m->item.keys = 0;
    m->begun = (FMHA_NAME(decode_begun) *)FMHA_NAME(take)(memory, &used, FMHA_CACHE_LINE / (ptrdiff_t)sizeof(REAL));
    m->q = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->D, LANES));
    m->next_q = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->D, LANES));
    m->scores = FMHA_NAME(take)(memory, &used, rows * DECODE_KEYS);
    m->after = FMHA_NAME(take)(memory, &used, rows * DECODE_KEYS);
    m->next_scores = FMHA_NAME(take)(memory, &used, rows * DECODE_KEYS);
    m->shrink = FMHA_NAME(take)(memory, &used, rows);
    m->lift = FMHA_NAME(take)(memory, &used, rows);
    m->limited = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->Dv, LANES));
    m->copy = FMHA_NAME(take)(memory, &used, DECODE_STEP * ROUND_UP(p->Dv, LANES));
    m->converted = FMHA_NAME(take)(memory, &used, FMHA_NAME(computed_scratch)(p, DECODE_STEP));
    return used;
}

static ptrdiff_t FMHA_NAME(decode_scratch)(const fmha_problem *p)
{
    FMHA_NAME(decode_memory) unused;
    return FMHA_NAME(decode_layout)(p, NULL, &unused);
}

/* What a chunk leaves: peak and total of each row, sums of its values (rows, value width), and 1 where these are of raised values,
 * or else 0; 1 where some would not be finite and are, for that, of reduced probabilities, and of each whether it is, a bit. */
typedef struct {
    REAL *peak, *total, *sums, *raised, *large;
    unsigned char *reduced;
} FMHA_NAME(chunk);

static ptrdiff_t FMHA_NAME(chunk_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(chunk) *chunk)
{
    ptrdiff_t used = 0, rows = fmha_heads_cut(p).rows;
    chunk->peak = FMHA_NAME(take)(memory, &used, rows);
    chunk->total = FMHA_NAME(take)(memory, &used, rows);
    chunk->sums = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->Dv, LANES));
    chunk->raised = FMHA_NAME(take)(memory, &used, 1);
    chunk->large = FMHA_NAME(take)(memory, &used, 1);
    const ptrdiff_t bits = rows * ROUND_UP(p->Dv, LANES), of_real = 8 * (ptrdiff_t)sizeof(REAL);
    chunk->reduced = (unsigned char *)FMHA_NAME(take)(memory, &used, (bits + of_real - 1) / of_real);
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

/* A chunk before its first key. */
static void FMHA_NAME(begin_chunk)(ptrdiff_t rows, ptrdiff_t value_width, const FMHA_NAME(chunk) *result)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        result->peak[r] = NEGATIVE_INFINITY;
        result->total[r] = 0;
    }
    memset(result->sums, 0, (size_t)(rows * value_width) * sizeof(REAL));
    *result->raised = *result->large = 0;
}

/* scores (rows, DECODE_KEYS) of n keys from key j on -> probabilities beside the peaks so far, with masks and dropout in them;
 * peak and total of each row are kept up to date, shrink is what its sums are multiplied by. Returns whether something may be
 * removed. */
static int FMHA_NAME(decode_softmax)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t n, REAL *scores,
                                     const FMHA_NAME(chunk) *result, REAL *shrink)
{
    const ptrdiff_t group = p->H / p->Hkv, rows = group * p->Lq;
    REAL *peak = result->peak, *total = result->total;
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
        shrink[r] = peak[r] == NEGATIVE_INFINITY ? 0 : v_lane(FMHA_NAME(exp)(v_splat(peak[r] - shift)), 0);
        total[r] = total[r] * shrink[r] + FMHA_NAME(exp_row)(n, s, shift, s);
        peak[r] = now;
        FMHA_NAME(drop_row)(p, b, block.h, block.i0, j, n, s);
    }
    return touched;
}

/* out (rows, Dv) <- shrink * out + weights @ v, of keys e .. n behind key j whose values must be converted, copied or raised, a
 * step at a time. careful: without what is not finite, which allowed pairs add; shrink NULL: 1. Returns 1 where that is given up. */
static int FMHA_NAME(decode_values_apart)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t e, ptrdiff_t n,
                                          int careful, int purpose, const FMHA_NAME(decode_memory) *m, REAL *weights, REAL *out,
                                          const REAL *shrink)
{
    const ptrdiff_t group = p->H / p->Hkv, rows = group * p->Lq, value_width = ROUND_UP(p->Dv, LANES);
    for (; e < n; e += DECODE_STEP) {
        const ptrdiff_t part = n - e < DECODE_STEP ? n - e : DECODE_STEP;
        ptrdiff_t ld = value_width, ldv;
        const REAL *v = FMHA_NAME(computed_rows)(p, &p->v, b, hkv, j + e, part, p->Dv, m->converted, &ldv), *values = m->copy;
        if (purpose & FMHA_NAME(tiny)) {
            if (!FMHA_NAME(lift_tiny)(part, p->Dv, v, ldv, m->copy, ld)) return 1;
        } else if (purpose & FMHA_NAME(raised)) FMHA_NAME(lift_rows)(part, p->Dv, v, ldv, m->copy, ld);
        else values = FMHA_NAME(whole_rows)(v, ldv, part, p->Dv, !careful, 0, m->copy, &ld);
        FMHA_NAME(decode_values)(FMHA_SAME, p, &m->ahead, rows, part, weights + e, (const char *)values, ld, out, e ? NULL : shrink);
        for (ptrdiff_t r = 0; careful && r < rows; r++) {
            fmha_block block = {.b = b, .h = hkv * group + r / p->Lq, .i0 = r % p->Lq, .rows = 1, .j0 = j + e, .cols = part,
                                .ld = DECODE_KEYS};
            FMHA_NAME(add_nonfinite)(p, &block, 0, 1, weights + r * DECODE_KEYS + e, v, ldv, p->Dv, out + r * value_width, value_width);
        }
    }
    return 0;
}

/* The same of keys whose values may be read where they lie, too, as `whole` says, after which the thread reads `then` or the next rows. */
static int FMHA_NAME(values_of_keys)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t e, ptrdiff_t n, int whole,
                                     int careful, int purpose, const char *then, FMHA_NAME(decode_memory) *m, REAL *weights, REAL *out,
                                     const REAL *shrink)
{
    if (e >= n) return 0;
    if (!whole || purpose & FMHA_NAME(raised) || careful)
        return FMHA_NAME(decode_values_apart)(p, b, hkv, j, e, n, careful, purpose, m, weights, out, shrink);
    m->ahead.then = then;
    FMHA_NAME(decode_values)(p->stored, p, &m->ahead, p->H / p->Hkv * p->Lq, n - e, weights + e, FMHA_NAME(stored_row)(p, &p->v, b, hkv, j + e),
                             p->v.stride[2], out, e ? NULL : shrink);
    m->ahead.then = NULL;
    return 0;
}

/* Row r of a group's queries. */
static inline const char *FMHA_NAME(decode_query)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t r)
{
    return FMHA_NAME(row_in)(p->element, &p->q, b, hkv * (p->H / p->Hkv) + r / p->Lq, r % p->Lq);
}

/* q (rows, width) <- the group's queries, scaled. Returns what their scores must be multiplied by, in `lift`, or NULL: 1. */
static const REAL *FMHA_NAME(decode_queries)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t rows, REAL *q, REAL *lift)
{
    const ptrdiff_t width = ROUND_UP(p->D, LANES);
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest);
    VEC squares = v_splat(0);
    for (ptrdiff_t r = 0; r < rows; r++)
        squares = FMHA_NAME(pack_row)(p->element, p->D, factor, FMHA_NAME(decode_query)(p, b, hkv, r), q + r * width, squares);
    int lifted = !(FMHA_NAME(sum)(squares) < HUGE_POWER) || rest != 1;
    for (ptrdiff_t r = 0; lifted && r < rows; r++) {
        const char *at = FMHA_NAME(decode_query)(p, b, hkv, r);
        lift[r] = FMHA_NAME(row_lift)(p->element, p->D, at, factor);
        const REAL *from = FMHA_NAME(real_row)(p->element, at, p->D, q + r * width);
        for (ptrdiff_t d = 0; d < p->D; d++) q[r * width + d] = (REAL)((double)factor / lift[r]) * from[d];
        lift[r] *= rest;
    }
    return lifted ? lift : NULL;
}

/* Whether the next item has been begun, if only now: its queries are ready. */
static int FMHA_NAME(begin_next)(const fmha_problem *p, ptrdiff_t rows, FMHA_NAME(decode_memory) *m)
{
    if (m->item.keys <= 0) return 0;
    if (m->begun->number == m->item.number) return 1;
    if (FMHA_NAME(decode_queries)(p, m->item.b, m->item.hkv, rows, m->next_q, m->lift)) return 0;
    *m->begun = (FMHA_NAME(decode_begun)){m->item.number, 0, m->next_q, m->next_scores};
    return 1;
}

/* From key e on, as far as there are whole steps, out <- shrink * out + weights @ v of keys e .. n of a block whose first value is v,
 * in turns with the scores of `left` keys from k on. Values of the first `ready` keys are fetched. Returns the first key left. */
static ptrdiff_t FMHA_NAME(turns_from)(ptrdiff_t e, const fmha_problem *p, const FMHA_NAME(ahead) *ahead, ptrdiff_t rows, ptrdiff_t n,
                                       ptrdiff_t ready, ptrdiff_t left, const REAL *q, const char *k, REAL *scores,
                                       const REAL *weights, const char *v, REAL *out, const REAL *shrink)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->stored), from = e, end = e + (left < n - e ? left : n - e) / DECODE_STEP * DECODE_STEP;
    for (ptrdiff_t to; e < end; e = to) {
        to = e < ready && ready < end ? ready : end;
        FMHA_NAME(decode_turns)(p, ahead, rows, e >= ready, to - e, q, k + (e - from) * p->k.stride[2] * size, scores + e - from, weights + e,
                                v + e * p->v.stride[2] * size, out, e ? NULL : shrink);
    }
    return e;
}

/* As `reduce`, of the probabilities (rows, DECODE_KEYS) of n keys. */
static void FMHA_NAME(reduce_rows)(const fmha_problem *p, ptrdiff_t rows, ptrdiff_t n, REAL *weights)
{
    for (ptrdiff_t r = 0; r < rows; r++) FMHA_NAME(multiply)(n, weights + r * DECODE_KEYS, (double)FMHA_NAME(reduction)(p));
}

/* One chunk [first, last) of keys for all rows of a group; lift NULL: 1. Returns whether some keys may be removed, or -1 where it is
 * given up. purpose: 0, or some of those of a pass; of a large one, m->limited gets the reduced sums. m->ready: of how many keys
 * m->scores holds the scores already; on return, of those after the chunk, up to `end`, the item's. */
static int FMHA_NAME(decode_chunk)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first, ptrdiff_t last, ptrdiff_t end,
                                   const REAL *lift, FMHA_NAME(decode_memory) *m, const FMHA_NAME(chunk) *result, int purpose)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t rows = p->H / p->Hkv * p->Lq, value_width = ROUND_UP(p->Dv, LANES);
    REAL *q = m->q, *shrink = m->shrink, *out = result->sums;
    const int careful = purpose & FMHA_NAME(careful), raised = purpose & FMHA_NAME(raised);
    int partly = 0;
    FMHA_NAME(begin_chunk)(rows, value_width, result);
    *result->raised = raised ? 1 : 0;
    if (purpose & FMHA_NAME(large)) memset(m->limited, 0, (size_t)(rows * value_width) * sizeof(REAL));
    if (raised) memset(m->copy, 0, (size_t)(DECODE_STEP * value_width) * sizeof(REAL));
    const int whole = p->Dv == value_width || STORED_PARTS(p->stored);     /* values can be read where they lie */
    const int in_turns = m->ahead.turns && !lift && !purpose && whole && p->D > 0 && p->Dv > 0 && DECODE_USUAL(p->stored);
    for (ptrdiff_t j = first; j < last; j += DECODE_KEYS) {
        REAL *scores = m->scores, *after = m->after;
        ptrdiff_t n = last - j < DECODE_KEYS ? last - j : DECODE_KEYS, ready = m->ready;
        if (lift) fmha_keep_subnormal_operands();
        FMHA_NAME(fetch_part)(m->next, 0);
        const int rest = ready > 0 && n - ready < DECODE_STEP;      /* whose values come behind others that are not fetched either */
        if (ready < n)
            FMHA_NAME(decode_scores)(p, &m->ahead, rows, n - ready, q, FMHA_NAME(stored_row)(p, &p->k, b, hkv, j + ready),
                                     rest ? NULL : FMHA_NAME(stored_row)(p, &p->v, b, hkv, j + ready), scores + ready);
        if (rest) ready = n;
        FMHA_NAME(fetch_part)(m->next, 1);
        if (lift) FMHA_NAME(set_control)(p);
        for (ptrdiff_t e = 0; lift && e < rows * DECODE_KEYS; e++) scores[e] *= lift[e / DECODE_KEYS];
        const int touched = FMHA_NAME(decode_softmax)(p, b, hkv, j, n, scores, result, shrink);
        partly |= touched;
        if (purpose & FMHA_NAME(reduced)) FMHA_NAME(reduce_rows)(p, rows, n, scores);
        FMHA_NAME(fetch_part)(m->next, 2);
        FMHA_NAME(fetch_part)(m->next, 3);
        /* In turns with the next block, and behind the last one with the next item's first, as far as all have whole steps. */
        const char *v = FMHA_NAME(stored_row)(p, &p->v, b, hkv, j);
        ptrdiff_t e = 0;
        if (in_turns) e = FMHA_NAME(turns_from)(0, p, &m->ahead, rows, n, ready, end - j - n, q, FMHA_NAME(stored_row)(p, &p->k, b, hkv, j + n),
                              after, scores, v, out, shrink);
        m->ready = e;
        const int begins = in_turns && n - e >= DECODE_STEP && end - j - n < n && FMHA_NAME(begin_next)(p, rows, m);
        if (begins) {
            const ptrdiff_t before = e, begun = m->begun->ready, left = end - j - n - e;
            if (left > 0) {             /* keys are read in their order */
                FMHA_NAME(decode_scores)(p, &m->ahead, rows, left, q, FMHA_NAME(stored_row)(p, &p->k, b, hkv, j + n + e), NULL, after + e);
                m->ready += left;
            }
            e = FMHA_NAME(turns_from)(e, p, &m->ahead, rows, n, ready, m->item.keys - begun, m->next_q,
                                      FMHA_NAME(stored_row)(p, &p->k, m->item.b, m->item.hkv, m->item.first + begun),
                                      m->next_scores + begun, scores, v, out, shrink);
            m->begun->ready += e - before;
        }
        /* The values alone: bits are the same wherever an item ends and however the values are stored. Memory would deliver the last
         * ones without others. */
        const char *then = j + n < end ? NULL : !begins ? m->then
                           : FMHA_NAME(stored_row)(p, &p->k, m->item.b, m->item.hkv, m->item.first + m->begun->ready);
        if (FMHA_NAME(values_of_keys)(p, b, hkv, j, e, n, whole, careful && touched, purpose, then, m, scores, out, shrink)) return -1;
        if (purpose & FMHA_NAME(large)) {
            FMHA_NAME(reduce_rows)(p, rows, n, scores);
            FMHA_NAME(values_of_keys)(p, b, hkv, j, e, n, whole, 0, purpose, then, m, scores, m->limited, shrink);
        }
        m->scores = after;
        m->after = scores;
    }
    return partly;
}

/* Where of a chunk from key j on the block begins that has the first of the keys from `low` on. */
static inline ptrdiff_t FMHA_NAME(chunk_begin)(ptrdiff_t j, ptrdiff_t low)
{
    return j < low ? j + (low - j) / DECODE_KEYS * DECODE_KEYS : j;
}

/* Where it ends, of keys before `end`. */
static inline ptrdiff_t FMHA_NAME(chunk_end)(ptrdiff_t j, ptrdiff_t end) { return end - j < FMHA_CHUNK_KEYS ? end : j + FMHA_CHUNK_KEYS; }

/* Of the chunk from key j on, those from `low` on and before `end`. */
static int FMHA_NAME(decode_chunk_at)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t low, ptrdiff_t end,
                                      const REAL *lift, FMHA_NAME(decode_memory) *m, const FMHA_NAME(chunk) *result, int purpose)
{
    return FMHA_NAME(decode_chunk)(run, b, hkv, FMHA_NAME(chunk_begin)(j, low), FMHA_NAME(chunk_end)(j, end), end, lift, m, result, purpose);
}

/* Whether heads have more than one chunk. Of the only one, where no keys are removed, the results tell whether its sums are finite. */
static inline int FMHA_NAME(several_chunks)(const fmha_problem *p) { return p->Lk > FMHA_CHUNK_KEYS; }

/* A chunk of which some keys were removed if it is `partly`, has its sums. Where not all of them are finite, it is done again, its keys
 * and values being at hand: with care, unless all values are finite or no keys are removed, and where sums may have overflown, with
 * reduced probabilities, unless such sums were `made` beside. What is finite without these stays as it is, whatever other rows have. */
static void FMHA_NAME(finish_chunk)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t low, ptrdiff_t end,
                                    const REAL *lift, FMHA_NAME(decode_memory) *m, const FMHA_NAME(chunk) *result, int partly, int made)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t rows = p->H / p->Hkv * p->Lq, numbers = rows * ROUND_UP(p->Dv, LANES);
    const ptrdiff_t from = FMHA_NAME(chunk_begin)(j, low), to = FMHA_NAME(chunk_end)(j, end);
    if (FMHA_NAME(all_finite)(1, numbers, result->sums, numbers)) return;
    const int careful = partly && !FMHA_NAME(values_finite)(p, b, hkv, from, to) ? FMHA_NAME(careful) : 0;
    m->ready = 0;
    if (careful) FMHA_NAME(decode_chunk)(run, b, hkv, from, to, end, lift, m, result, careful);
    if (!made || careful) {
        if (!FMHA_NAME(some_value)(p, b, hkv, from, to, 1, DECODE_STEP, m->converted)) return;
        FMHA_NAME(chunk) reduced = *result;
        reduced.sums = m->limited;
        FMHA_NAME(decode_chunk)(run, b, hkv, from, to, end, lift, m, &reduced, FMHA_NAME(reduced) | careful);
    }
    *result->large = 1;
    memset(result->reduced, 0, (size_t)(numbers + 7) / 8);
    for (ptrdiff_t e = 0; e < numbers; e++)
        if (result->sums[e] - result->sums[e] != 0) {
            result->sums[e] = m->limited[e];
            result->reduced[e / 8] |= (unsigned char)(1 << e % 8);
        }
}

/* Whether sums of the values of a chunk may overflow: then reduced ones are made beside. */
static inline int FMHA_NAME(large_chunk)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t low, ptrdiff_t end)
{
    const ptrdiff_t from = FMHA_NAME(chunk_begin)(j, low);
    return from < FMHA_NAME(chunk_end)(j, end) && FMHA_NAME(large_value)(p, b, hkv, from);
}

/* Whether all values of a chunk may be tiny: then it is raised at once. */
static inline int FMHA_NAME(tiny_chunk)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t low, ptrdiff_t end)
{
    const ptrdiff_t from = FMHA_NAME(chunk_begin)(j, low);
    return !p->sinks && from < FMHA_NAME(chunk_end)(j, end) && FMHA_NAME(tiny_value)(p, b, hkv, from);
}

/* A chunk as its values want it. */
static void FMHA_NAME(chunk_of_item)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t low, ptrdiff_t end,
                                     const REAL *lift, FMHA_NAME(decode_memory) *m, const FMHA_NAME(chunk) *result)
{
    if (FMHA_NAME(tiny_chunk)(&run->p, b, hkv, j, low, end)) {
        if (FMHA_NAME(decode_chunk_at)(run, b, hkv, j, low, end, lift, m, result, FMHA_NAME(raised) | FMHA_NAME(tiny)) >= 0) return;
        m->ready = 0;
    }
    const int purpose = FMHA_NAME(large_chunk)(&run->p, b, hkv, j, low, end) ? FMHA_NAME(large) : 0;
    const int partly = FMHA_NAME(decode_chunk_at)(run, b, hkv, j, low, end, lift, m, result, purpose);
    if (partly || purpose || FMHA_NAME(several_chunks)(&run->p))
        FMHA_NAME(finish_chunk)(run, b, hkv, j, low, end, lift, m, result, partly, purpose);
}

/* Whether sum number e of a chunk is of reduced probabilities. */
static inline int FMHA_NAME(is_reduced)(const FMHA_NAME(chunk) *chunk, ptrdiff_t e)
{
    return *chunk->large != 0 && chunk->reduced[e / 8] >> e % 8 & 1;
}

/* Of the chunks of a block, that with key j. */
static inline FMHA_NAME(chunk) FMHA_NAME(chunk_among)(const fmha_problem *p, const FMHA_NAME(chunk) *all, ptrdiff_t j)
{
    const ptrdiff_t at = j / FMHA_CHUNK_KEYS * FMHA_NAME(chunk_scratch)(p);
    return (FMHA_NAME(chunk)){all->peak + at, all->total + at, all->sums + at, all->raised + at, all->large + at,
                              all->reduced + at * (ptrdiff_t)sizeof(REAL)};
}

/* The memory in which chunks of a block are made again, by itself. Returns what decode_queries does. */
static const REAL *FMHA_NAME(begin_again)(const fmha_run *run, const FMHA_NAME(rows) *block, REAL *scratch, FMHA_NAME(decode_memory) *m)
{
    FMHA_NAME(decode_layout)(&run->p, scratch, m);
    m->ahead = FMHA_NAME(decode_ahead)(run, block->rows);
    return FMHA_NAME(decode_queries)(&run->p, block->b, block->hkv, block->rows, m->q, m->lift);
}

/* The chunks of a block become one, in their order: memory gets the softmaxes of all, and of the sinks; with the sums of values, or all
 * of them `reduced`. */
static void FMHA_NAME(merge_chunks)(const fmha_problem *p, const FMHA_NAME(rows) *block, const FMHA_NAME(chunk) *all, int reduced,
                                    const FMHA_NAME(forward_memory) *memory)
{
    const ptrdiff_t value_width = ROUND_UP(p->Dv, LANES);
    const REAL factor = reduced ? FMHA_NAME(reduction)(p) : 1;
    REAL *out = memory->out, *peak = memory->peak, *total = memory->total;
    for (ptrdiff_t j = 0; j < p->Lk; j += FMHA_CHUNK_KEYS) {
        const FMHA_NAME(chunk) of = FMHA_NAME(chunk_among)(p, all, j);
        for (ptrdiff_t r = 0; r < block->rows; r++) {
            if (j > 0 && of.total[r] == 0) continue;        /* no key of the chunk is attended */
            const REAL most = j == 0 || of.peak[r] > peak[r] ? of.peak[r] : peak[r];
            const REAL mine = j == 0 ? 0 : FMHA_NAME(exp_of)(peak[r] - most), other = j == 0 ? 1 : FMHA_NAME(exp_of)(of.peak[r] - most);
            for (ptrdiff_t d = r * value_width; d < (r + 1) * value_width; d++) {
                const REAL sum = of.sums[d] * (FMHA_NAME(is_reduced)(&of, d) ? 1 : factor);
                out[d] = j == 0 ? sum : out[d] * mine + sum * other;
            }
            total[r] = j == 0 ? of.total[r] : total[r] * mine + of.total[r] * other;
            peak[r] = most;
        }
    }
    for (ptrdiff_t r = 0; p->sinks && r < block->rows; r++) {
        const REAL sink = FMHA_NAME(sink)(p, block->head[r]), most = sink > peak[r] ? sink : peak[r],
                mine = FMHA_NAME(exp_of)(peak[r] - most);
        for (ptrdiff_t d = r * value_width; d < (r + 1) * value_width; d += LANES) v_store(out + d, v_load(out + d) * mine);
        total[r] = total[r] * mine + FMHA_NAME(exp_of)(sink - most);
    }
}

/* As tiny_rows; made: the chunks have sums of raised values. scratch: what decode_layout asks for. */
static void FMHA_NAME(tiny_chunks)(const fmha_run *run, const FMHA_NAME(rows) *block, const FMHA_NAME(chunk) *all, uint64_t tiny, int made,
                                   const FMHA_NAME(forward_memory) *memory, REAL *scratch)
{
    const fmha_problem *p = &run->p;
    if (!made) {
        if (!FMHA_NAME(some_value)(p, block->b, block->hkv, block->j0, block->j1, 0, TILE_KEYS, memory->converted)) return;
        FMHA_NAME(decode_memory) m;
        const REAL *lift = FMHA_NAME(begin_again)(run, block, scratch, &m);
        for (ptrdiff_t j = 0; j < p->Lk; j += FMHA_CHUNK_KEYS) {
            const FMHA_NAME(chunk) of = FMHA_NAME(chunk_among)(p, all, j);
            m.ready = 0;
            FMHA_NAME(decode_chunk_at)(run, block->b, block->hkv, j, block->j0, block->j1, lift, &m, &of, FMHA_NAME(raised));
        }
    }
    FMHA_NAME(merge_chunks)(p, block, all, 0, memory);
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (tiny >> r & 1 && memory->total[r] != 0)
            FMHA_NAME(lower_row)(p->Dv, memory->out + r * ROUND_UP(p->Dv, LANES), memory->total + r, FMHA_NAME(out_row)(run, block, r, memory));
}

/* As large_rows. Sums of chunks that would not be finite are reduced when these are finished. */
static void FMHA_NAME(large_chunks)(const fmha_run *run, const FMHA_NAME(rows) *block, const FMHA_NAME(chunk) *all,
                                    const FMHA_NAME(forward_memory) *memory, REAL *scratch)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t value_width = ROUND_UP(p->Dv, LANES);
    int some = 0;
    if (!FMHA_NAME(several_chunks)(p) && *all->large == 0) {
        FMHA_NAME(decode_memory) m;
        const REAL *lift = FMHA_NAME(begin_again)(run, block, scratch, &m);
        FMHA_NAME(finish_chunk)(run, block->b, block->hkv, 0, block->j0, block->j1, lift, &m, all, 0, 0);
    }
    for (ptrdiff_t j = 0; j < p->Lk; j += FMHA_CHUNK_KEYS) {
        const FMHA_NAME(chunk) of = FMHA_NAME(chunk_among)(p, all, j);
        some |= *of.large != 0;
        for (ptrdiff_t r = 0; *of.large != 0 && r < block->rows; r++) {
            REAL *out = FMHA_NAME(out_row)(run, block, r, memory);
            for (ptrdiff_t d = 0; of.total[r] != 0 && d < p->Dv; d++)
                if (FMHA_NAME(is_reduced)(&of, r * value_width + d)) out[d] = (REAL)INFINITY;
        }
    }
    if (!some && !FMHA_NAME(some_value)(p, block->b, block->hkv, block->j0, block->j1, 1, TILE_KEYS, memory->converted)) return;
    FMHA_NAME(merge_chunks)(p, block, all, 1, memory);
    for (ptrdiff_t r = 0; r < block->rows; r++)
        FMHA_NAME(limited_row)(p, memory->out + r * value_width, memory->total[r], FMHA_NAME(out_row)(run, block, r, memory));
}

/* Of a block of which some chunk has sums of raised values: whether all have that some row attends. Else all get ordinary ones. */
static int FMHA_NAME(chunks_raised)(const fmha_run *run, const FMHA_NAME(rows) *block, const FMHA_NAME(chunk) *all, REAL *scratch)
{
    const fmha_problem *p = &run->p;
    int others = 0;
    for (ptrdiff_t j = 0; j < p->Lk && !others; j += FMHA_CHUNK_KEYS) {
        const FMHA_NAME(chunk) of = FMHA_NAME(chunk_among)(p, all, j);
        for (ptrdiff_t r = 0; *of.raised == 0 && r < block->rows; r++) others |= of.total[r] != 0;
    }
    if (!others) return 1;
    FMHA_NAME(decode_memory) m;
    const REAL *lift = FMHA_NAME(begin_again)(run, block, scratch, &m);
    for (ptrdiff_t j = 0; j < p->Lk; j += FMHA_CHUNK_KEYS) {
        const FMHA_NAME(chunk) of = FMHA_NAME(chunk_among)(p, all, j);
        m.ready = 0;
        if (*of.raised == 0) continue;
        const int partly = FMHA_NAME(decode_chunk_at)(run, block->b, block->hkv, j, block->j0, block->j1, lift, &m, &of, 0);
        FMHA_NAME(finish_chunk)(run, block->b, block->hkv, j, block->j0, block->j1, lift, &m, &of, partly, 0);
    }
    return 0;
}

/* Elements of scratch of a thread that merges. */
static ptrdiff_t FMHA_NAME(merge_scratch)(const fmha_problem *p)
{
    return FMHA_NAME(forward_scratch)(p) + FMHA_NAME(decode_scratch)(p);
}

/* And of one that computes chunks. The only one of a head comes first, and is merged where it was computed. */
static ptrdiff_t FMHA_NAME(decode_item_scratch)(const fmha_problem *p)
{
    const ptrdiff_t own = FMHA_NAME(decode_scratch)(p);
    return fmha_parts(p->Lk, FMHA_CHUNK_KEYS) > 1 ? own : own + FMHA_NAME(chunk_scratch)(p) + FMHA_NAME(merge_scratch)(p);
}

/* Partial softmaxes of the chunks of a key/value head, from the first one on, become one, in their order. */
static void FMHA_NAME(merge_head)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, REAL *scratch, const FMHA_NAME(chunk) *of)
{
    const fmha_problem *p = &run->p;
    const FMHA_NAME(chunk) first = *of;         /* the others follow, each `size` REALs on */
    const ptrdiff_t group = p->H / p->Hkv, rows = group * p->Lq, value_width = ROUND_UP(p->Dv, LANES);
    const ptrdiff_t chunks = fmha_parts(p->Lk, FMHA_CHUNK_KEYS), size = FMHA_NAME(chunk_scratch)(p);
    int finite = 1, raised = 0;
    uint64_t tiny = 0;
    FMHA_NAME(forward_memory) memory;
    scratch += FMHA_NAME(forward_layout)(p, TILE_KEYS, scratch, &memory);
    FMHA_NAME(begin_item)(p);
    for (ptrdiff_t c = 0; c < chunks; c++) raised |= first.raised[c * size] != 0;
    FMHA_NAME(rows) block;
    if (raised) {
        FMHA_NAME(block_rows)(p, &block, b, hkv, 0, rows);
        raised = FMHA_NAME(chunks_raised)(run, &block, &first, scratch);
    }
    for (ptrdiff_t r = 0; r < rows; r++) {
        ptrdiff_t h = hkv * group + r / p->Lq, i = r % p->Lq;
        REAL *out = p->element == FMHA_SAME ? (REAL *)FMHA_NAME(row_in)(FMHA_SAME, &run->out, b, h, i) : memory.result + r * value_width;
        REAL sink = FMHA_NAME(sink)(p, h), peak = sink, total = 0;
        if (chunks == 1 && !p->sinks && first.total[r] >= 1) {        /* as below, with a weight of 1 */
            peak = first.peak[r];
            total = first.total[r];
            finite &= FMHA_NAME(sum)(FMHA_NAME(divided_row)(p->Dv, first.sums + r * value_width, total, out, v_splat(0))) == 0;
            if (FMHA_NAME(tiny_row)(p->Dv, out)) tiny |= (uint64_t)1 << r;
            if (run->lse) ((REAL *)run->lse)[(b * p->H + h) * p->Lq + i] = peak + REAL_LOG(total);
            continue;
        }
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
        if (run->lse) ((REAL *)run->lse)[(b * p->H + h) * p->Lq + i]
                = total == 0 ? NEGATIVE_INFINITY : total == total ? shift + REAL_LOG(total) : (REAL)NAN;
    }
    for (ptrdiff_t c = 0; c < chunks; c++) finite &= first.large[c * size] == 0;
    for (ptrdiff_t r = 0; raised && r < rows; r++) {
        REAL *out = FMHA_NAME(out_row)(run, &block, r, &memory);
        tiny |= (uint64_t)(*out == *out) << r;
    }
    if (!finite || tiny) {
        FMHA_NAME(block_rows)(p, &block, b, hkv, 0, rows);
        if (!finite) FMHA_NAME(large_chunks)(run, &block, &first, &memory, scratch);
        if (tiny) FMHA_NAME(tiny_chunks)(run, &block, &first, tiny, raised, &memory, scratch);
        /* Of several NaN in a sum, which one it becomes is the compiler's choice, another one in turns than alone: all are made alike. */
        for (ptrdiff_t r = 0; !finite && r < rows; r++) {
            REAL *out = FMHA_NAME(out_row)(run, &block, r, &memory);
            for (ptrdiff_t d = 0; d < p->Dv; d++)
                if (out[d] != out[d]) out[d] = (REAL)NAN;
        }
    }
    FMHA_NAME(round_rows)(run, b, hkv, 0, rows, memory.result, ALL_ROWS);
}

/* Whether heads have one row on few keys of which nothing is removed, and it is the result of a softmax alone; longer ones come
 * from memory faster the other way. */
static inline int FMHA_NAME(few_keys)(const fmha_problem *p, ptrdiff_t rows, int turns)
{
    if (rows != 1 || p->Lk == 0 || p->Lk > DECODE_FEW || !FMHA_NAME(plain_rows)(p) || p->banded || p->key_start || p->key_length) return 0;
    return !turns || p->Lk * (p->D + p->Dv) * (ptrdiff_t)sizeof(REAL) <= DECODE_FEW_BYTES;
}

/* to (nv vectors, of which the last may be a part) <- inverse * (weights (1, keys) @ v (keys, columns)), with the sums of
 * values_of. Returns trace plus 0 * these; first: the first of them, if it is NULL not. */
INLINED VEC FMHA_NAME(few_values)(const int nv, ptrdiff_t n, ptrdiff_t columns, const REAL *weights, const char *v,
                                  ptrdiff_t ldv, VEC inverse,
                                  REAL *to, REAL *first, VEC trace)
{
    VEC total[4];
    for (ptrdiff_t j = 0; j < n; j += DECODE_STEP) {
        const ptrdiff_t end = n - j < DECODE_STEP ? n : j + DECODE_STEP;
        VEC sum[4];
#pragma GCC unroll 4
        for (int e = 0; e < nv; e++) sum[e] = v_splat(0);
        for (ptrdiff_t k = j; k < end; k++, v += ldv) {
            const VEC weight = v_splat(weights[k]);
#pragma GCC unroll 4
            for (int e = 0; e < nv; e++)
                sum[e] = sum[e] + weight * (nv > 1 ? v_load((const REAL *)v + e * LANES) : v_load_n((const REAL *)v, columns, 0));
        }
#pragma GCC unroll 4
        for (int e = 0; e < nv; e++) total[e] = j ? total[e] + sum[e] : sum[e];
    }
    if (first) *first = v_lane(total[0], 0);
#pragma GCC unroll 4
    for (int e = 0; e < nv; e++) {
        trace = trace + total[e] * v_splat(0);
        if (nv > 1) v_store(to + e * LANES, total[e] * inverse);
        else v_store_n(to, total[e] * inverse, columns);
    }
    return trace;
}

/* The row of such a head at once, with the same bits: what goes through chunks and merging, and through functions for any number
 * of rows and keys, takes longer than its arithmetic. Returns 0 where something is unusual: huge or not finite, or so small that
 * terms are missing. Then it is to be done the other way. A function of its own, whose registers and stack others do not carry. */
static __attribute__((noinline)) int FMHA_NAME(few_keys_row)(const fmha_run *run, const fmha_item *item, FMHA_NAME(decode_memory) *m)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t n = p->Lk, Dv = p->Dv, b = item->b, h = item->h, size = sizeof(REAL);
    const FMHA_NAME(streams) from = {
        .k = FMHA_NAME(stored_row)(p, &p->k, b, h, 0), .ldk = p->k.stride[2] * size,
        .v = FMHA_NAME(stored_row)(p, &p->v, b, h, 0), .ldv = p->v.stride[2] * size,
    };
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest), first = 1, *q = m->q, *s = m->scores;
    FMHA_NAME(fetch_part)(m->next, 0);
    const VEC squares = FMHA_NAME(pack_row)(FMHA_SAME, p->D, factor, FMHA_NAME(decode_query)(p, b, h, 0), q, v_splat(0));
    /* scores (1, keys) <- q (1, D) @ k (keys, D).T */
    if (n <= 2 && LANES > 1) FMHA_NAME(scores_of)(FMHA_SAME, 1, 2, 0, n, p->D, q, &from, s);
    else FMHA_NAME(scores_of)(FMHA_SAME, 1, DECODE_ABREAST(1), 0, n, p->D, q, &from, s);
    FMHA_NAME(fetch_part)(m->next, 1);
    VEC best = v_splat(NEGATIVE_INFINITY), trace = v_splat(0);
    for (ptrdiff_t e = 0; e < n; e += LANES) best = v_max(v_load_n(s + e, n - e, NEGATIVE_INFINITY), best);
    const REAL peak = FMHA_NAME(largest)(best), total = FMHA_NAME(exp_row)(n, s, peak, s);
    FMHA_NAME(fetch_part)(m->next, 2);
    FMHA_NAME(fetch_part)(m->next, 3);
    if (!(FMHA_NAME(sum)(squares) < HUGE_POWER) || rest != 1 || !(total >= 1) || peak - peak != 0) return 0;
    /* out (1, Dv) <- weights (1, keys) @ v (keys, Dv) / total */
    REAL *out = (REAL *)FMHA_NAME(row_in)(FMHA_SAME, &run->out, b, h, 0);
    const VEC inverse = v_splat(1 / total);
    ptrdiff_t d = 0;
    for (; d + 4 * LANES <= Dv; d += 4 * LANES)
        trace = FMHA_NAME(few_values)(4, n, 4 * LANES, s, from.v + d * size, from.ldv, inverse, out + d, d ? NULL : &first, trace);
    for (; d < Dv; d += LANES)
        trace = FMHA_NAME(few_values)(1, n, Dv - d, s, from.v + d * size, from.ldv, inverse, out + d, d ? NULL : &first, trace);
    if (FMHA_NAME(sum)(trace) != 0) return 0;
    if (REAL_ABS(first) <= 2 * TINY * total && FMHA_NAME(tiny_row)(Dv, out)) return 0;
    if (run->lse) ((REAL *)run->lse)[b * p->H + h] = peak + REAL_LOG(total);
    return 1;
}

/* The first block of keys of an item that can be begun beforehand. */
static FMHA_NAME(decode_next) FMHA_NAME(first_block)(const fmha_run *run, const fmha_item *item, ptrdiff_t index)
{
    ptrdiff_t low, high, end = item->j0 + item->cols;
    fmha_block_keys(&run->p, item->b, 0, run->p.Lq, &low, &high);
    if (end > high) end = high;
    if (end > item->j0 + FMHA_CHUNK_KEYS) end = item->j0 + FMHA_CHUNK_KEYS;
    const ptrdiff_t first = FMHA_NAME(chunk_begin)(item->j0, low), keys = end - first;
    return (FMHA_NAME(decode_next)){run->items_before + index + 1, item->b, item->h, first, keys < DECODE_KEYS ? keys : DECODE_KEYS};
}

/* The item's queries are in m->q, and m->ready of the first scores, if the thread has begun it before. Returns what decode_queries
 * does. */
static const REAL *FMHA_NAME(begin_decode)(const fmha_run *run, const fmha_item *item, ptrdiff_t index, FMHA_NAME(decode_memory) *m)
{
    REAL *const q = m->q, *const scores = m->scores;
    m->ready = 0;
    if (m->begun->number != run->items_before + index + 1) return FMHA_NAME(decode_queries)(&run->p, item->b, item->h, item->rows, q, m->lift);
    m->ready = m->begun->ready;
    if (q != m->begun->q) m->q = m->next_q, m->next_q = q;
    m->scores = m->begun->scores;
    if (m->scores == m->after) m->after = scores;
    else if (m->scores == m->next_scores) m->next_scores = scores;
    return NULL;
}

/* Item: chunks of keys of a key/value head; of the only one, what it leaves becomes the result. */
static void FMHA_NAME(decode)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    const ptrdiff_t chunks = fmha_parts(p->Lk, FMHA_CHUNK_KEYS);
    FMHA_NAME(begin_item)(p);
    if (FMHA_NAME(may_be_copied)(run) && FMHA_NAME(one_key)(run, item.b, item.h, 0, item.rows)) return;
    FMHA_NAME(decode_memory) m;
    FMHA_NAME(chunk) result;
    REAL *scratch = FMHA_NAME(scratch_of)(run, worker);
    scratch += FMHA_NAME(decode_layout)(p, scratch, &m);
    if (chunks == 1) scratch += FMHA_NAME(chunk_layout)(p, scratch, &result);
    m.ahead = FMHA_NAME(decode_ahead)(run, item.rows);
    ptrdiff_t b = item.b, hkv = item.h, rows = item.rows;
    ptrdiff_t end = item.j0 + item.cols, low, high;
    fmha_block_keys(p, b, 0, p->Lq, &low, &high);
    if (end > high) end = high;
    FMHA_NAME(next) next;
    if (chunks == 1) m.next = FMHA_NAME(next_of)(run, index, DECODE_NEXT, 2 * NEXT_FAR, 0, &next);
    if (FMHA_NAME(few_keys)(p, rows, m.ahead.turns) && !FMHA_NAME(tiny_value)(p, b, hkv, 0) && FMHA_NAME(few_keys_row)(run, &item, &m))
        return;
    const ptrdiff_t later = fmha_later(run, index, 1);
    if (m.ahead.turns && later < fmha_items(&run->cut)) {
        const fmha_item then = fmha_item_of(&run->cut, later);
        m.then = FMHA_NAME(stored_row)(p, &p->k, then.b, then.h, then.j0);
        if (fmha_takes_next(run, index) && FMHA_NAME(begins_beside)(p, rows)) m.item = FMHA_NAME(first_block)(run, &then, later);
    }
    const REAL *lift = FMHA_NAME(begin_decode)(run, &item, index, &m);
    for (ptrdiff_t j = item.j0; j < item.j0 + item.cols; j += FMHA_CHUNK_KEYS) {
        if (chunks > 1) result = FMHA_NAME(chunk_of)(run, (b * p->Hkv + hkv) * chunks + j / FMHA_CHUNK_KEYS);
        FMHA_NAME(chunk_of_item)(run, b, hkv, j, low, end, lift, &m, &result);
    }
    if (chunks == 1) FMHA_NAME(merge_head)(run, b, hkv, scratch, &result);
}

/* Item: one key/value head whose chunks were items of their own. */
static void FMHA_NAME(decode_merge)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const ptrdiff_t chunks = fmha_parts(run->p.Lk, FMHA_CHUNK_KEYS);
    const fmha_item item = fmha_item_of(&run->cut, index);
    if (chunks == 1) return;
    const FMHA_NAME(chunk) first = FMHA_NAME(chunk_of)(run, index * chunks);
    FMHA_NAME(merge_head)(run, item.b, item.h, FMHA_NAME(scratch_of)(run, worker), &first);
}
