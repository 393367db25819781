/* The "decode" algorithm: few query rows, many keys. Memory speed is the limit, so each element of k and v is read once for all
 * rows of the group: from memory a row of keys and a row of values in turns, two streams of which the next rows are fetched
 * ahead. Keys are split in chunks of a fixed size; each leaves a partial softmax (peak, total, weighted values), merged in their
 * order. */

/* Whether keys and values come from memory, and are read in turns; how many bytes ahead of what is read is fetched, of each
 * stream, 0 where the second cache holds them all; from memory also how many cache lines a row of each has; and how many
 * vectors, where each of these is to be read by an instruction of its own, else 0. close: all of that goes into the first cache,
 * row after row. CPUs that fetch far ahead by themselves do so best where their second cache is asked for each line once, in
 * order. */
typedef struct {
    int turns, vectors, close;
    ptrdiff_t k, v, k_lines, v_lines;
    const char *then;           /* what is fetched beside values alone: rows of keys, or NULL */
} FMHA_NAME(ahead);

/* Keys and values of types that are computed with often; of the others neither turns nor sums of many widths pay for their code. */
#define DECODE_USUAL(type) ((type) == FMHA_SAME || (FMHA_REAL == 32 && (type) != FMHA_OTHER))

/* What `many` rows are summed with at a time: as many vectors of values as the registers hold, and leave room for scores beside;
 * where there are many registers, of a single row all those that are left. Of values alone, where there is no room for scores:
 * DECODE_ALONE. */
#define DECODE_ALL(type, many) (DECODE_SUMMED >= 16 && (many) == 1 && DECODE_USUAL(type))
#define DECODE_ALONE_VECTORS(type, many, vectors) \
    ((many) > 2 && DECODE_ALONE > DECODE_SUMMED && (vectors) >= DECODE_ALONE / (many) ? DECODE_ALONE / (many) : DECODE_VECTORS(type, many, vectors))
#define DECODE_VECTORS(type, many, vectors) \
    (DECODE_ALL(type, many) && (vectors) >= 16 ? 16 : DECODE_ALL(type, many) && (vectors) <= 8 ? (vectors) \
     : (vectors) >= 8 && DECODE_SUMMED >= 8 * (many) ? 8 : (vectors) >= 4 && DECODE_SUMMED >= 4 * (many) ? 4 : (vectors) >= 2 ? 2 : 1)

/* Where a CPU fetches what follows by itself, and farther than a program that asks for every line, of more keys than `most`: see
 * DECODE_ALONG. */
static int FMHA_NAME(vectors_along)(const fmha_problem *p, ptrdiff_t rows, ptrdiff_t most)
{
    if (rows != 1 || p->B * p->Hkv * p->Lk <= most || p->D != p->Dv || p->D % LANES != 0) return 0;
    if (p->k.stride[2] != p->D || p->v.stride[2] != p->Dv || p->D * FMHA_NAME(stored_size)(p->stored) < DECODE_LONG) return 0;
    const ptrdiff_t vectors = p->D / LANES;
    return DECODE_VECTORS(p->stored, 1, vectors) == vectors ? (int)vectors : 0;
}

/* Whether heads are long enough for their first scores to be made beside the last values of the head before: of short ones memory
 * delivers what little is computed with just as fast. */
static int FMHA_NAME(begins_beside)(const fmha_problem *p, ptrdiff_t rows)
{
    const ptrdiff_t bytes = p->D * FMHA_NAME(stored_size)(p->stored);
    return p->Lk >= (rows * bytes >= DECODE_MUCH ? DECODE_BESIDE / 2 : bytes >= DECODE_WIDE ? DECODE_BESIDE * 3 / 2 : DECODE_BESIDE);
}

static FMHA_NAME(ahead) FMHA_NAME(decode_ahead)(const fmha_problem *p, ptrdiff_t rows)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->stored), k_bytes = p->D * size, v_bytes = p->Dv * size;
    const ptrdiff_t keys = p->B * p->Hkv * p->Lk, of_key = k_bytes + v_bytes + 1;
    if (keys <= DECODE_CLOSE / of_key) return (FMHA_NAME(ahead)){.turns = 0};
    const int turns = keys > DECODE_NEAR / of_key, gaps = p->Lk < DECODE_LONG_HEAD && FMHA_NAME(begins_beside)(p, rows);
    const int along = turns && !gaps ? FMHA_NAME(vectors_along)(p, rows, DECODE_MEMORY / of_key) : 0;
    /* Of long rows a single query row is as fast along, and more than four are faster otherwise. */
    const int close = p->stored == FMHA_SAME && fmha_cpu_fetches && (k_bytes < DECODE_WIDE || (rows <= DECODE_TOGETHER && !along));
    const int vectors = close ? 0 : along;
    const ptrdiff_t bytes = !turns && !close ? DECODE_NEAR_AHEAD : vectors ? DECODE_ALONG : close ? DECODE_WHOLE_AHEAD : DECODE_AHEAD;
    const ptrdiff_t least = rows > DECODE_TOGETHER ? DECODE_STEP : 1;
    const ptrdiff_t k_rows = bytes / (k_bytes + 1) + 1, v_rows = bytes / (v_bytes + 1) + 1;
    return (FMHA_NAME(ahead)){
        .turns = turns,
        .vectors = vectors,
        .close = close,
        .k = (k_rows > least ? k_rows : least) * p->k.stride[2] * size,
        .v = (v_rows > least ? v_rows : least) * p->v.stride[2] * size,
        .k_lines = turns ? fmha_parts(k_bytes, FMHA_CACHE_LINE) : 0,
        .v_lines = turns ? fmha_parts(v_bytes, FMHA_CACHE_LINE) : 0,
    };
}

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
 * first; of each row what its sums shrink by and the lift of its scores; values (keys, value width) where they must be copied, and
 * where they must be converted. */
typedef struct {
    FMHA_NAME(decode_begun) *begun;
    REAL *q, *next_q, *scores, *after, *next_scores, *shrink, *lift, *copy, *converted;
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

/* total[r * nv + i] <- total[r * nv + i] + weights[r] * vector i of a row of values, the last of which has `last` items; what
 * lies v_ahead further on is fetched, unless that is 0, into the first cache where it is `near`. */
INLINED void FMHA_NAME(add_values)(const int type, const int many, const int nv, const int near, ptrdiff_t last, const REAL *weights,
                                   const char *v, const ptrdiff_t v_ahead, VEC *total)
{
    VEC weight[DECODE_TOGETHER], value[16];
#pragma GCC unroll 4
    for (int r = 0; r < many && many <= nv; r++) weight[r] = v_splat(weights[r * DECODE_KEYS]);
#pragma GCC unroll 16
    for (int i = 0; i < nv; i++) {
        const char *at = v + i * LANES * FMHA_NAME(stored_size)(type);
        const int part = STORED_PARTS(type) && i == nv - 1 && last < LANES;
        if (v_ahead && i * LANES * FMHA_NAME(stored_size)(type) % FMHA_CACHE_LINE == 0) {
            if (near) v_prefetch(at + v_ahead);
            else v_prefetch_far(at + v_ahead);
        }
        value[i] = part ? FMHA_NAME(stored_part)(type, at, last) : FMHA_NAME(stored_load)(type, at);
#pragma GCC unroll 4
        for (int r = 0; r < many && many <= nv; r++) total[r * nv + i] = v_sum(total[r * nv + i], weight[r], value[i]);
    }
    /* Of more rows than vectors: whichever are fewer stay in registers meanwhile. */
#pragma GCC unroll 4
    for (int r = 0; r < many && many > nv; r++) {
        weight[0] = v_splat(weights[r * DECODE_KEYS]);
#pragma GCC unroll 4
        for (int i = 0; i < nv; i++) total[r * nv + i] = v_sum(total[r * nv + i], weight[0], value[i]);
    }
}

/* out (many, nv vectors of ldo) <- shrink * out + total; shrink NULL: 1. */
INLINED void FMHA_NAME(add_totals)(const int many, const int nv, VEC *total, REAL *out, ptrdiff_t ldo, const REAL *shrink)
{
#pragma GCC unroll 4
    for (int r = 0; r < many; r++) {
        const VEC factor = v_splat(shrink ? shrink[r] : 1);
#pragma GCC unroll 16
        for (int i = 0; i < nv; i++) v_store(out + r * ldo + i * LANES, v_load(out + r * ldo + i * LANES) * factor + total[r * nv + i]);
    }
}

INLINED void FMHA_NAME(no_totals)(const int many, const int nv, VEC *total)
{
#pragma GCC unroll 4
    for (int r = 0; r < many; r++)
#pragma GCC unroll 16
        for (int i = 0; i < nv; i++) total[r * nv + i] = v_splat(0);
}

/* Items of the last of nv vectors of so many columns. */
#define DECODE_LAST(nv, columns) ((columns) < (nv) * LANES ? (columns) - ((nv) - 1) * LANES : LANES)

/* Of nv vectors of values, the last of which may be a part, out (many, ldo) <- shrink * out + weights (many, keys) @ v (keys,
 * columns): key after key, and a sum of every DECODE_STEP keys, since sums of sums err less than one long sum. What is asked at
 * each key costs about as much as its sums: each way of fetching has a loop. */
INLINED void FMHA_NAME(values_of)(const int type, const int many, const int nv, const int near, const ptrdiff_t keys,
                                  const ptrdiff_t columns, const FMHA_NAME(streams) *from, const REAL *weights, REAL *out,
                                  const ptrdiff_t ldo, const REAL *shrink)
{
    const ptrdiff_t ldv = from->ldv, v_ahead = from->v_ahead, first = from->first, fetched = from->fetched, last = DECODE_LAST(nv, columns);
    const ptrdiff_t lines = type == FMHA_SAME ? from->whole : 0;
    const int all = first == 0 && fetched == 4 && !from->then;
    const char *v = from->v, *then = from->then;
    for (ptrdiff_t j = 0; j < keys; j += DECODE_STEP, shrink = NULL) {
        const ptrdiff_t end = keys - j < DECODE_STEP ? keys : j + DECODE_STEP;
        VEC total[DECODE_TOGETHER * 8];
        FMHA_NAME(no_totals)(many, nv, total);
#define EACH_KEY(fetch, last, ahead) \
    _Pragma("GCC unroll 2") \
    for (ptrdiff_t e = j; e < end; e++, v += ldv) { \
        fetch \
        FMHA_NAME(add_values)(type, many, nv, near, last, weights + e, v, ahead, total); \
    }
        if (!then && fetched == 0 && last == LANES) {
            EACH_KEY(, LANES, 0)
        } else if (all && lines) {
            EACH_KEY(for (ptrdiff_t line = 0; line < lines; line++) v_prefetch(v + v_ahead + line * FMHA_CACHE_LINE);, last, 0)
        } else if (all) {
            EACH_KEY(, last, v_ahead)
        } else {
            for (ptrdiff_t e = j; e < end; e++, v += ldv) {
                const ptrdiff_t place = e % 4 - first;
                for (ptrdiff_t line = 0; then && line < from->then_lines; line++) v_prefetch_far(then + line * FMHA_CACHE_LINE);
                if (then) then += from->then_ld;
                const int fetch = place >= 0 && place < fetched;
                for (ptrdiff_t line = 0; fetch && line < lines; line++) v_prefetch(v + v_ahead + line * FMHA_CACHE_LINE);
                if (fetch && !lines) FMHA_NAME(add_values)(type, many, nv, near, last, weights + e, v, v_ahead, total);
                else FMHA_NAME(add_values)(type, many, nv, near, last, weights + e, v, 0, total);
            }
        }
#undef EACH_KEY
        FMHA_NAME(add_totals)(many, nv, total, out, ldo, shrink);
    }
}

/* Both of DECODE_STEP keys, with the same bits, the values of earlier keys: a row of keys and a row of values in turns, two
 * streams that memory delivers faster than all keys and then all values. */
INLINED void FMHA_NAME(turns_of)(const int type, const int many, const int nv, const ptrdiff_t D, const ptrdiff_t columns, const REAL *q,
                                 const FMHA_NAME(streams) *from, REAL *scores, const REAL *weights, REAL *out, const ptrdiff_t ldo,
                                 const REAL *shrink)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), width = ROUND_UP(D, LANES), last = DECODE_LAST(nv, columns);
    const ptrdiff_t ldk = from->ldk, ldv = from->ldv, k_lines = from->k_lines, v_lines = from->v_lines;
    const char *v = from->v, *k_ahead = from->k + from->k_ahead, *v_ahead = v + from->v_ahead;
    VEC total[DECODE_TOGETHER * 8];
    FMHA_NAME(no_totals)(many, nv, total);
    for (ptrdiff_t j = 0; j < DECODE_STEP; j += LANES) {
        VEC sum[DECODE_TOGETHER][LANES];
        for (ptrdiff_t l = 0; l < LANES; l++, v += ldv, k_ahead += ldk, v_ahead += ldv) {
            for (ptrdiff_t line = 0; line < k_lines; line++) v_prefetch_far(k_ahead + line * FMHA_CACHE_LINE);
            const char *k = from->k + (j + l) * ldk;
            VEC score[DECODE_TOGETHER];
#pragma GCC unroll 4
            for (int r = 0; r < many; r++) score[r] = v_splat(0);
#define SCORED(load) \
    { \
        const VEC row = load; \
        _Pragma("GCC unroll 4") \
        for (int r = 0; r < many; r++) score[r] = score[r] + row * v_load(q + r * width + d); \
    }
            /* Laid out whole where D is known here, whole vectors; else that is code without end, and no faster. */
            ptrdiff_t d = 0;
            if (__builtin_constant_p(D) && D % LANES == 0) {
#pragma GCC unroll 16
                for (; d < D; d += LANES) SCORED(FMHA_NAME(stored_load)(type, k + d * size))
            } else {
                for (; d + LANES <= D; d += LANES) SCORED(FMHA_NAME(stored_load)(type, k + d * size))
                if (d < D) SCORED(FMHA_NAME(stored_part)(type, k + d * size, D - d))
            }
#undef SCORED
#pragma GCC unroll 4
            for (int r = 0; r < many; r++) sum[r][l] = score[r];
            for (ptrdiff_t line = 0; line < v_lines; line++) v_prefetch_far(v_ahead + line * FMHA_CACHE_LINE);
            FMHA_NAME(add_values)(type, many, nv, 0, last, weights + j + l, v, 0, total);
        }
#pragma GCC unroll 4
        for (int r = 0; r < many; r++) {
            FMHA_NAME(halve)(sum[r], LANES, 1);
            v_store(scores + r * DECODE_KEYS + j, sum[r][0]);
        }
    }
    FMHA_NAME(add_totals)(many, nv, total, out, ldo, shrink);
}

/* The same, two or four keys side by side and then their values, so that a row of queries is read once for all of them. One row
 * of keys and one of values at a time are fetched, into the first cache, at as many places of that work: memory delivers most
 * where it is asked evenly, and for whole rows. */
INLINED void FMHA_NAME(abreast_of)(const int many, const int abreast, const ptrdiff_t D, const ptrdiff_t columns, const REAL *q,
                                   const FMHA_NAME(streams) *from, REAL *scores, const REAL *weights, REAL *out, const ptrdiff_t ldo,
                                   const REAL *shrink)
{
    const ptrdiff_t vectors = (columns + LANES - 1) / LANES;
    const ptrdiff_t ldk = from->ldk, ldv = from->ldv, k_lines = from->k_lines, v_lines = from->v_lines;
    const char *k = from->k, *v = from->v, *k_ahead = k + from->k_ahead, *v_ahead = v + from->v_ahead;
    VEC total[DECODE_TOGETHER * DECODE_KEPT];
    for (ptrdiff_t e = 0; e < many * vectors; e++) total[e] = v_splat(0);
#define FETCH_ROWS \
    for (ptrdiff_t line = 0; line < k_lines; line++) v_prefetch(k_ahead + line * FMHA_CACHE_LINE); \
    for (ptrdiff_t line = 0; line < v_lines; line++) v_prefetch(v_ahead + line * FMHA_CACHE_LINE); \
    k_ahead += ldk; \
    v_ahead += ldv;
    for (ptrdiff_t j = 0; j < DECODE_STEP; j += LANES) {
        VEC sum[DECODE_TOGETHER * LANES];
        for (ptrdiff_t l = 0; l < LANES; l += abreast, k += abreast * ldk, v += abreast * ldv) {
            FETCH_ROWS
            FMHA_NAME(score_keys)(FMHA_SAME, many, abreast, D, q, k, ldk, abreast - 1, 0, 0, 0, sum + l / abreast);
            FETCH_ROWS
            ptrdiff_t done = 0;
#define VALUES(n) \
    for (; done + (n) <= vectors; done += (n)) { \
        VEC part[DECODE_TOGETHER * 8]; \
        _Pragma("GCC unroll 16") \
        for (int e = 0; e < many * (n); e++) part[e] = total[e / (n) * vectors + done + e % (n)]; \
        _Pragma("GCC unroll 4") \
        for (int a = 0; a < abreast; a++) { \
            if (done == 0 && a % 2 == 1 && abreast == 4) { FETCH_ROWS } \
            FMHA_NAME(add_values)(FMHA_SAME, many, n, 0, DECODE_LAST(n, columns - done * LANES), weights + j + l + a, \
                                  v + a * ldv + done * FMHA_VECTOR_BYTES, 0, part); \
        } \
        _Pragma("GCC unroll 16") \
        for (int e = 0; e < many * (n); e++) total[e / (n) * vectors + done + e % (n)] = part[e]; \
    }
            if (DECODE_SUMMED >= 8 * many) { VALUES(8) }
            if (DECODE_SUMMED >= 4 * many) { VALUES(4) }
            VALUES(2)
            VALUES(1)
#undef VALUES
        }
#pragma GCC unroll 4
        for (int r = 0; r < many; r++) {
            FMHA_NAME(halve)(sum + r * LANES, LANES / abreast, abreast);
            v_store(scores + r * DECODE_KEYS + j, sum[r * LANES]);
        }
    }
#undef FETCH_ROWS
    for (int r = 0; r < many; r++)
        for (ptrdiff_t i = 0; i < vectors; i++)
            FMHA_NAME(add_totals)(1, 1, total + r * vectors + i, out + r * ldo + i * LANES, ldo, shrink ? shrink + r : NULL);
}

/* Functions of their own: among all others the compiler would keep what the inner loops need in memory. */
#define SIDE_BY_SIDE(many, abreast) \
    static __attribute__((noinline)) void FMHA_NAME(abreast_##many##_##abreast)(ptrdiff_t D, ptrdiff_t columns, const REAL *q, \
        const FMHA_NAME(streams) *from, REAL *scores, const REAL *weights, REAL *out, ptrdiff_t ldo, const REAL *shrink) \
    { \
        FMHA_NAME(abreast_of)(many, abreast, D, columns, q, from, scores, weights, out, ldo, shrink); \
    }
SIDE_BY_SIDE(1, 2) SIDE_BY_SIDE(2, 2) SIDE_BY_SIDE(3, 2) SIDE_BY_SIDE(4, 2)
SIDE_BY_SIDE(1, 4) SIDE_BY_SIDE(2, 4) SIDE_BY_SIDE(3, 4) SIDE_BY_SIDE(4, 4)
#undef SIDE_BY_SIDE

enum { FMHA_NAME(scores_alone), FMHA_NAME(values_alone), FMHA_NAME(in_turns) };

/* One pass over `keys` rows of keys and values, DECODE_STEP if in turns, for `many` rows of queries: vectors of values that the
 * registers do not hold are summed after the others. Loops of known length serve whole vectors where arithmetic is the limit,
 * from three rows on (of several passes the scores of 4 rows and 4 vectors alone), and where vectors_along says so: else they
 * are slower from memory. Of several passes, each takes a step of scores and then one of values: memory is waited for less than
 * the arithmetic. Where rows go into the first cache, abreast_of has the turns of a single pass. */
INLINED void FMHA_NAME(decode_pass)(const int type, const int what, const int many, const ptrdiff_t keys, const ptrdiff_t D,
                                    const ptrdiff_t Dv, const REAL *q, const FMHA_NAME(streams) *first, REAL *scores, const REAL *weights,
                                    REAL *out, const REAL *shrink, int several)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), vectors = (Dv + LANES - 1) / LANES, ldo = vectors * LANES;
    FMHA_NAME(streams) from = *first;
    /* From memory, one row after the other; short ones by twos, and so where there are no more than two. */
    if (what == FMHA_NAME(scores_alone) && !several && (from.v_lines || (LANES > 1 && keys <= 2))) {
        if (LANES > 1 && (D * size <= DECODE_SHORT || !from.v_lines)) FMHA_NAME(scores_of)(type, many, 2, 0, keys, D, q, &from, scores);
        else FMHA_NAME(scores_of)(type, many, 1, 0, keys, D, q, &from, scores);
        return;
    }
    if (what == FMHA_NAME(scores_alone) || (what == FMHA_NAME(in_turns) && several)) {
        const int near = what == FMHA_NAME(scores_alone) || from.close;
        if (many == 4 && D == 4 * LANES) FMHA_NAME(scores_of)(type, many, DECODE_ABREAST(many), near, keys, 4 * LANES, q, &from, scores);
        else FMHA_NAME(scores_of)(type, many, DECODE_ABREAST(many), near, keys, D, q, &from, scores);
    }
    if (what == FMHA_NAME(scores_alone)) return;
    if (type == FMHA_SAME && what == FMHA_NAME(in_turns) && !several && from.close && LANES > 1 && vectors <= DECODE_KEPT) {
        const int fours = DECODE_ABREAST(many) == 4 && D * size <= DECODE_FOURS;
#define SIDE_BY_SIDE(many) (fours ? FMHA_NAME(abreast_##many##_4) : FMHA_NAME(abreast_##many##_2))
        (many == 1 ? SIDE_BY_SIDE(1) : many == 2 ? SIDE_BY_SIDE(2) : many == 3 ? SIDE_BY_SIDE(3) : SIDE_BY_SIDE(4))(
            D, Dv, q, &from, scores, weights, out, ldo, shrink);
#undef SIDE_BY_SIDE
        return;
    }
    for (ptrdiff_t done = 0, nv; done < vectors; done += nv, from.v += nv * LANES * size, from.then = NULL) {
        nv = what == FMHA_NAME(in_turns) && done == 0 && !several ? DECODE_VECTORS(type, many,
                vectors) : DECODE_ALONE_VECTORS(type, many, vectors - done);
        if (done > 0 && from.whole) from.fetched = 0;       /* they are, by the first of these */
        if (done == 0 && nv < vectors && type == FMHA_SAME && from.close) from.whole = fmha_parts(Dv * size, FMHA_CACHE_LINE);
#define PASS(n) \
    if (what == FMHA_NAME(in_turns) && done == 0 && !several) { \
        if (many == 1 ? from.vectors == (n) : many > 2 && (n) > 1 && D == (n) * LANES && Dv == D) \
            FMHA_NAME(turns_of)(type, many, n, (n) * LANES, (n) * LANES, q, &from, scores, weights, out, (n) * LANES, shrink); \
        else FMHA_NAME(turns_of)(type, many, n, D, Dv, q, &from, scores, weights, out, ldo, shrink); \
    } else { \
        FMHA_NAME(values_of)(type, many, n, what == FMHA_NAME(values_alone) || from.close, keys, Dv - done * LANES, &from, weights, out + done * LANES, \
                             ldo, shrink); \
    }
        if (DECODE_ALL(type, many) && nv == 16) { PASS(16); }
        else if (DECODE_SUMMED >= 8 * many && nv == 8) { PASS(8); }
        else if (DECODE_ALL(type, many) && nv == 7) { PASS(7); }
        else if (DECODE_ALL(type, many) && nv == 6) { PASS(6); }
        else if (DECODE_ALL(type, many) && nv == 5) { PASS(5); }
        else if (DECODE_ALONE >= 4 * many && nv == 4) { PASS(4); }
        else if ((DECODE_ALL(type, many) || (many == 4 && DECODE_ALONE == 12)) && nv == 3) { PASS(3); }
        else if (nv == 2) { PASS(2); }
        else { PASS(1); }
#undef PASS
    }
}

/* Each kind of pass is a function of its own: in one of all the compiler would keep in memory what the inner loops need, and
 * take minutes. */
#define PASS_TAKES ptrdiff_t keys, ptrdiff_t D, ptrdiff_t Dv, const REAL *q, const FMHA_NAME(streams) *from, REAL *scores, \
    const REAL *weights, REAL *out, const REAL *shrink, int several
typedef void (*FMHA_NAME(pass))(PASS_TAKES);
#define PASS(what, type, many) \
    static __attribute__((noinline)) void FMHA_NAME(what##_##type##_##many)(PASS_TAKES) \
    { \
        FMHA_NAME(decode_pass)(type, FMHA_NAME(what), many, keys, D, Dv, q, from, scores, weights, out, shrink, several); \
    }
#define PASSES(what, type) PASS(what, type, 1) PASS(what, type, 2) PASS(what, type, 3) PASS(what, type, 4)
#define NAMES(what, type) \
    {FMHA_NAME(what##_##type##_1), FMHA_NAME(what##_##type##_2), FMHA_NAME(what##_##type##_3), FMHA_NAME(what##_##type##_4)}
PASSES(scores_alone, FMHA_SAME) PASSES(scores_alone, FMHA_HALF) PASSES(scores_alone, FMHA_BFLOAT) PASSES(scores_alone, FMHA_OTHER)
PASSES(values_alone, FMHA_SAME) PASSES(values_alone, FMHA_HALF) PASSES(values_alone, FMHA_BFLOAT) PASSES(values_alone, FMHA_OTHER)
PASSES(in_turns, FMHA_SAME)
#if FMHA_REAL == 32
PASSES(in_turns, FMHA_HALF) PASSES(in_turns, FMHA_BFLOAT)
#endif
static const FMHA_NAME(pass) FMHA_NAME(passes)[3][4][DECODE_TOGETHER] = {        /* what, type (in turns DECODE_USUAL ones), rows */
    {NAMES(scores_alone, FMHA_SAME), NAMES(scores_alone, FMHA_HALF), NAMES(scores_alone, FMHA_BFLOAT), NAMES(scores_alone, FMHA_OTHER)},
    {NAMES(values_alone, FMHA_SAME), NAMES(values_alone, FMHA_HALF), NAMES(values_alone, FMHA_BFLOAT), NAMES(values_alone, FMHA_OTHER)},
#if FMHA_REAL == 32
    {NAMES(in_turns, FMHA_SAME), NAMES(in_turns, FMHA_HALF), NAMES(in_turns, FMHA_BFLOAT)},
#else
    {NAMES(in_turns, FMHA_SAME)},
#endif
};
#undef NAMES
#undef PASSES
#undef PASS
#undef PASS_TAKES

/* The same of any number of rows, DECODE_TOGETHER at a time, then those that are left: of several, and in turns, a step of keys
 * after the other, so that the first cache still has it for the next rows. `fetched`: the values are there already. Of operands
 * that a pass does not touch the places are counted all the same: they are others that are as large. */
static void FMHA_NAME(decode_passes)(int type, int what, const fmha_problem *p, const FMHA_NAME(ahead) *ahead, ptrdiff_t rows, int fetched,
                                     ptrdiff_t keys, const REAL *q, const char *k, REAL *scores, const REAL *weights, const char *v,
                                     ptrdiff_t ldv, REAL *out, const REAL *shrink)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), D = p->D, Dv = p->Dv, width = ROUND_UP(D, LANES), ldo = ROUND_UP(Dv, LANES);
    const int several = rows > DECODE_TOGETHER, turns = what == FMHA_NAME(in_turns);
    /* From the third cache; and the values of a head's last keys from memory, which nothing has fetched before. */
    const int near = !turns && (!ahead->turns || (ahead->close && what == FMHA_NAME(values_alone))) && ahead->k && ldv == p->v.stride[2];
    const int share = near ? 4 : !turns || !several ? 0 : rows <= 3 * DECODE_TOGETHER ? 2 : 1;     /* of every four rows, by each pass */
    const ptrdiff_t step = several || turns ? DECODE_STEP : keys;
    FMHA_NAME(streams) from = {.k = k, .ldk = p->k.stride[2] * size, .v = v, .ldv = ldv * size};
    if (turns || near) {
        from.k_ahead = ahead->k, from.v_ahead = ahead->v, from.k_lines = ahead->k_lines;
        from.vectors = ahead->vectors, from.close = ahead->close;
    }
    const char *then = what == FMHA_NAME(values_alone) ? ahead->then : NULL;
    from.then_ld = p->k.stride[2] * size;
    from.then_lines = ahead->k_lines;
    for (ptrdiff_t j = 0; j < keys; j += step, from.k += step * from.ldk, from.v += step * from.ldv, shrink = NULL) {
        const ptrdiff_t n = keys - j < step ? keys - j : step;
        from.v_lines = fetched || (several && turns) ? 0 : ahead->v_lines;
        from.first = 0;
        from.then = then;
        for (ptrdiff_t r = 0, many; r < rows; r += many) {
            many = rows - r < DECODE_TOGETHER ? rows - r : DECODE_TOGETHER;
            from.fetched = from.first < 4 ? share : 0;
            FMHA_NAME(passes)[what][type][many - 1](n, D, Dv, q + r * width, &from, scores + r * DECODE_KEYS + j,
                                                    weights + r * DECODE_KEYS + j,
                                                    out + r * ldo, shrink ? shrink + r : NULL, several);
            from.first += share;
            from.v_lines = 0;
            from.then = NULL;
        }
        if (then) then += step * from.then_ld;
    }
}

/* scores (rows, keys) <- q (rows, width, padded) @ k (keys, D).T, whose values from v on are fetched, unless that is NULL. */
static void FMHA_NAME(decode_scores)(const fmha_problem *p, const FMHA_NAME(ahead) *ahead, ptrdiff_t rows, ptrdiff_t keys, const REAL *q,
                                     const char *k, const char *v, REAL *scores)
{
    FMHA_NAME(decode_passes)(p->stored, FMHA_NAME(scores_alone), p, ahead, rows, !v, keys, q, k, scores, scores, v,
                             p->v.stride[2], scores, NULL);
}

/* out (rows, Dv) <- shrink * out + weights (rows, keys) @ v (keys, Dv), v of `type` and rows ldv apart. */
static void FMHA_NAME(decode_values)(int type, const fmha_problem *p, const FMHA_NAME(ahead) *ahead, ptrdiff_t rows, ptrdiff_t keys,
                                     REAL *weights, const char *v, ptrdiff_t ldv, REAL *out, const REAL *shrink)
{
    FMHA_NAME(decode_passes)(type, FMHA_NAME(values_alone), p, ahead, rows, 1, keys, weights, v, weights, weights, v, ldv, out, shrink);
}

/* The same of whole steps, and in turns with it scores (rows, keys) <- q (rows, width) @ k (keys, D).T of keys that come later. */
static void FMHA_NAME(decode_turns)(const fmha_problem *p, const FMHA_NAME(ahead) *ahead, ptrdiff_t rows, int fetched, ptrdiff_t keys,
                                    const REAL *q, const char *k, REAL *scores, const REAL *weights, const char *v, REAL *out,
                                    const REAL *shrink)
{
    FMHA_NAME(decode_passes)(p->stored, FMHA_NAME(in_turns), p, ahead, rows, fetched, keys, q, k, scores, weights, v, p->v.stride[2], out,
                             shrink);
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
 * step at a time. careful: without what is not finite, which allowed pairs add; shrink NULL: 1. */
static void FMHA_NAME(decode_values_apart)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t e,
                                           ptrdiff_t n, int careful,
                                           int raised, const FMHA_NAME(decode_memory) *m, REAL *weights, REAL *out, const REAL *shrink)
{
    const ptrdiff_t group = p->H / p->Hkv, rows = group * p->Lq, value_width = ROUND_UP(p->Dv, LANES);
    for (; e < n; e += DECODE_STEP) {
        const ptrdiff_t part = n - e < DECODE_STEP ? n - e : DECODE_STEP;
        ptrdiff_t ld = value_width, ldv;
        const REAL *v = FMHA_NAME(computed_rows)(p, &p->v, b, hkv, j + e, part, p->Dv, m->converted, &ldv), *values = m->copy;
        if (raised) FMHA_NAME(lift_rows)(part, p->Dv, v, ldv, m->copy, ld);
        else values = FMHA_NAME(whole_rows)(v, ldv, part, p->Dv, !careful, 0, m->copy, &ld);
        FMHA_NAME(decode_values)(FMHA_SAME, p, &m->ahead, rows, part, weights + e, (const char *)values, ld, out, e ? NULL : shrink);
        for (ptrdiff_t r = 0; careful && r < rows; r++) {
            fmha_block block = {.b = b, .h = hkv * group + r / p->Lq, .i0 = r % p->Lq, .rows = 1, .j0 = j + e, .cols = part,
                                .ld = DECODE_KEYS};
            FMHA_NAME(add_nonfinite)(p, &block, 0, 1, weights + r * DECODE_KEYS + e, v, ldv, p->Dv, out + r * value_width, value_width);
        }
    }
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

/* One chunk [first, last) of keys for all rows of a group; lift NULL: 1. Returns whether some keys were removed and not all sums
 * are finite: then it is to be done again with care. purpose: 0, careful or raised. m->ready: of how many keys m->scores holds
 * the scores already; on return, of those after the chunk, up to `end`, the item's. */
static int FMHA_NAME(decode_chunk)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first, ptrdiff_t last, ptrdiff_t end,
                                   const REAL *lift, FMHA_NAME(decode_memory) *m, const FMHA_NAME(chunk) *result, int purpose)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t rows = p->H / p->Hkv * p->Lq, value_width = ROUND_UP(p->Dv, LANES);
    REAL *q = m->q, *shrink = m->shrink, *out = result->sums;
    const int careful = purpose == FMHA_NAME(careful), raised = purpose == FMHA_NAME(raised);
    int partly = 0;
    for (ptrdiff_t r = 0; r < rows; r++) {
        result->peak[r] = NEGATIVE_INFINITY;
        result->total[r] = 0;
    }
    memset(out, 0, (size_t)(rows * value_width) * sizeof(REAL));
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
        /* The values alone: bits are the same wherever an item ends and however the values are stored. */
        if (e < n && whole && !raised && !(careful && touched)) {
            m->ahead.then = j + n < end ? NULL : !begins ? m->then      /* memory would deliver these values alone */
                            : FMHA_NAME(stored_row)(p, &p->k, m->item.b, m->item.hkv, m->item.first + m->begun->ready);
            FMHA_NAME(decode_values)(p->stored, p, &m->ahead, rows, n - e, scores + e, FMHA_NAME(stored_row)(p, &p->v, b, hkv, j + e),
                                     p->v.stride[2], out, e ? NULL : shrink);
            m->ahead.then = NULL;
            e = n;
        }
        if (e < n) FMHA_NAME(decode_values_apart)(p, b, hkv, j, e, n, careful && touched, raised, m, scores, out, shrink);
        m->scores = after;
        m->after = scores;
    }
    return partly && !FMHA_NAME(all_finite)(rows, value_width, out, value_width);
}

/* Where of a chunk from key j on the block begins that has the first of the keys from `low` on. */
static inline ptrdiff_t FMHA_NAME(chunk_begin)(ptrdiff_t j, ptrdiff_t low)
{
    return j < low ? j + (low - j) / DECODE_KEYS * DECODE_KEYS : j;
}

/* Of the chunk from key j on, those from `low` on and before `end`. */
static int FMHA_NAME(decode_chunk_at)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j, ptrdiff_t low, ptrdiff_t end,
                                      const REAL *lift, FMHA_NAME(decode_memory) *m, const FMHA_NAME(chunk) *result, int purpose)
{
    const ptrdiff_t first = FMHA_NAME(chunk_begin)(j, low);
    const ptrdiff_t last = end - j < FMHA_CHUNK_KEYS ? end : j + FMHA_CHUNK_KEYS;
    return FMHA_NAME(decode_chunk)(run, b, hkv, first, last, end, lift, m, result, purpose);
}

/* As tiny_rows, chunk after chunk; what these have left is written over. scratch: what decode_layout asks for. */
static void FMHA_NAME(tiny_chunks)(const fmha_run *run, const FMHA_NAME(rows) *block, const FMHA_NAME(chunk) *all, uint64_t tiny,
                                   const FMHA_NAME(forward_memory) *memory, REAL *scratch)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t value_width = ROUND_UP(p->Dv, LANES), size = FMHA_NAME(chunk_scratch)(p);
    if (!FMHA_NAME(some_value)(p, block, 0, memory->converted)) return;
    FMHA_NAME(decode_memory) m;
    FMHA_NAME(decode_layout)(p, scratch, &m);
    m.ahead = FMHA_NAME(decode_ahead)(p, block->rows);
    memset(m.copy, 0, (size_t)(DECODE_STEP * value_width) * sizeof(REAL));
    const REAL *lift = FMHA_NAME(decode_queries)(p, block->b, block->hkv, block->rows, m.q, m.lift);
    REAL *out = memory->out, *peak = memory->peak, *total = memory->total;
    for (ptrdiff_t j = 0; j < p->Lk; j += FMHA_CHUNK_KEYS) {
        const ptrdiff_t c = j / FMHA_CHUNK_KEYS * size;
        const FMHA_NAME(chunk) of = {all->peak + c, all->total + c, all->sums + c}, first = {peak, total, out};
        m.ready = 0;
        FMHA_NAME(decode_chunk_at)(run, block->b, block->hkv, j, block->j0, block->j1, lift, &m, j ? &of : &first, FMHA_NAME(raised));
        for (ptrdiff_t r = 0; j && r < block->rows; r++) {
            if (of.total[r] == 0) continue;     /* no key of the chunk is attended */
            const REAL most = of.peak[r] > peak[r] ? of.peak[r] : peak[r];
            const REAL mine = FMHA_NAME(exp_of)(peak[r] - most), other = FMHA_NAME(exp_of)(of.peak[r] - most);
            for (ptrdiff_t d = r * value_width; d < (r + 1) * value_width; d += LANES)
                v_store(out + d, v_load(out + d) * mine + v_load(of.sums + d) * other);
            total[r] = total[r] * mine + of.total[r] * other;
            peak[r] = most;
        }
    }
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (!(tiny >> r & 1)) continue;
        const REAL sink = FMHA_NAME(sink)(p, block->head[r]), most = sink > peak[r] ? sink : peak[r],
                mine = FMHA_NAME(exp_of)(peak[r] - most);
        for (ptrdiff_t d = r * value_width; p->sinks && d < (r + 1) * value_width; d += LANES) v_store(out + d, v_load(out + d) * mine);
        if (p->sinks) total[r] = total[r] * mine + FMHA_NAME(exp_of)(sink - most);
        FMHA_NAME(lower_row)(p->Dv, out + r * value_width, total + r, FMHA_NAME(out_row)(run, block, r, memory));
    }
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

/* Partial softmaxes of the chunks of key/value head `index`, from the first one on, become one, in their order. */
static void FMHA_NAME(merge_head)(const fmha_run *run, ptrdiff_t index, REAL *scratch, const FMHA_NAME(chunk) *of)
{
    const fmha_problem *p = &run->p;
    const FMHA_NAME(chunk) first = *of;         /* the others follow, each `size` REALs on */
    const fmha_item item = fmha_item_of(&run->cut, index);
    ptrdiff_t b = item.b, hkv = item.h, rows = item.rows, group = p->H / p->Hkv, value_width = ROUND_UP(p->Dv, LANES);
    const ptrdiff_t chunks = fmha_parts(p->Lk, FMHA_CHUNK_KEYS), size = FMHA_NAME(chunk_scratch)(p);
    int finite = 1;
    uint64_t tiny = 0;
    FMHA_NAME(forward_memory) memory;
    scratch += FMHA_NAME(forward_layout)(p, TILE_KEYS, scratch, &memory);
    FMHA_NAME(begin_item)(p);
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
    if (!finite || tiny) {
        FMHA_NAME(rows) block;
        FMHA_NAME(block_rows)(p, &block, b, hkv, 0, rows);
        if (!finite) FMHA_NAME(large_rows)(run, &block, &memory, ALL_ROWS);
        if (tiny) FMHA_NAME(tiny_chunks)(run, &block, &first, tiny, &memory, scratch);
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
    if (first <= 2 * TINY * total && first >= -2 * TINY * total && FMHA_NAME(tiny_row)(Dv, out)) return 0;
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
    m.ahead = FMHA_NAME(decode_ahead)(p, item.rows);
    ptrdiff_t b = item.b, hkv = item.h, rows = item.rows;
    ptrdiff_t end = item.j0 + item.cols, low, high;
    fmha_block_keys(p, b, 0, p->Lq, &low, &high);
    if (end > high) end = high;
    FMHA_NAME(next) next;
    if (chunks == 1) m.next = FMHA_NAME(next_of)(run, index, DECODE_NEXT, 2 * NEXT_FAR, 0, &next);
    if (FMHA_NAME(few_keys)(p, rows, m.ahead.turns) && FMHA_NAME(few_keys_row)(run, &item, &m)) return;
    const ptrdiff_t later = fmha_later(run, index, 1);
    if (m.ahead.turns && later < fmha_items(&run->cut)) {
        const fmha_item then = fmha_item_of(&run->cut, later);
        m.then = FMHA_NAME(stored_row)(p, &p->k, then.b, then.h, then.j0);
        if (fmha_takes_next(run, index) && FMHA_NAME(begins_beside)(p, rows)) m.item = FMHA_NAME(first_block)(run, &then, later);
    }
    const REAL *lift = FMHA_NAME(begin_decode)(run, &item, index, &m);
    for (ptrdiff_t j = item.j0; j < item.j0 + item.cols; j += FMHA_CHUNK_KEYS) {
        if (chunks > 1) result = FMHA_NAME(chunk_of)(run, (b * p->Hkv + hkv) * chunks + j / FMHA_CHUNK_KEYS);
        if (!FMHA_NAME(decode_chunk_at)(run, b, hkv, j, low, end, lift, &m, &result, 0)) continue;
        m.ready = 0;
        FMHA_NAME(decode_chunk_at)(run, b, hkv, j, low, end, lift, &m, &result, FMHA_NAME(careful));
    }
    if (chunks == 1) FMHA_NAME(merge_head)(run, index, scratch, &result);
}

/* Item: one key/value head whose chunks were items of their own. */
static void FMHA_NAME(decode_merge)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const ptrdiff_t chunks = fmha_parts(run->p.Lk, FMHA_CHUNK_KEYS);
    if (chunks == 1) return;
    const FMHA_NAME(chunk) first = FMHA_NAME(chunk_of)(run, index * chunks);
    FMHA_NAME(merge_head)(run, index, FMHA_NAME(scratch_of)(run, worker), &first);
}
