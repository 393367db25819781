/* What "decode" goes through its keys and values with: a pass over some of them is scores alone, values alone, or a row of keys and a
 * row of values in turns, for so many query rows at a time, of an element type; and how far ahead of that is fetched. */

/* Whether keys and values come from memory, and are read in turns; how many bytes ahead of what is read is fetched, of each
 * stream, 0 where the second cache holds them all; from memory also how many cache lines a row of each has; and how many
 * vectors, where each of these is to be read by an instruction of its own, else 0. close: all of that goes into the first cache,
 * row after row. CPUs that fetch far ahead by themselves do so best where their second cache is asked for each line once, in
 * order. */
typedef struct {
    int turns, vectors, close;
    ptrdiff_t k, v, k_lines, v_lines;
    const char *then;           /* what is fetched beside values alone: rows of keys, or NULL */
    const FMHA_NAME(open_sums) *open;       /* of a part of a step of values */
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

/* Where a CPU fetches what follows by itself, and farther than a program that asks for every line: see DECODE_ALONG. Half of a line for
 * each vector is slower than to ask for it. */
static int FMHA_NAME(vectors_along)(const fmha_problem *p, ptrdiff_t rows)
{
    if (rows != 1 || p->stored != FMHA_SAME || p->D != p->Dv || p->D % LANES != 0) return 0;
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

/* The reach by which a call is told where its keys come from. Turns take longer, where there is not much in all, on heads that do not
 * lie by themselves, and of a single row, with which little is done, but for short heads, which are begun beside others. */
static double FMHA_NAME(decode_reach)(const fmha_run *run, ptrdiff_t rows)
{
    const fmha_problem *p = &run->p;
    const double own = (double)(p->B * p->Hkv * p->Lk * (p->D + p->Dv)) * (double)sizeof(REAL);
    const int single = rows == 1 && p->stored == FMHA_SAME && p->Lk > DECODE_LONG_HEAD;
    const int apart = p->k.stride[2] != p->D || p->v.stride[2] != p->Dv;
    return own <= DECODE_NEAR && (single || apart) && run->reach > DECODE_NEAR ? DECODE_NEAR : run->reach;
}

static FMHA_NAME(ahead) FMHA_NAME(decode_ahead)(const fmha_run *run, ptrdiff_t rows)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->stored), k_bytes = p->D * size, v_bytes = p->Dv * size;
    const double reach = FMHA_NAME(decode_reach)(run, rows);
    if (reach <= DECODE_CLOSE) return (FMHA_NAME(ahead)){.turns = 0};
    const int turns = reach > DECODE_NEAR, gaps = p->Lk < DECODE_LONG_HEAD && FMHA_NAME(begins_beside)(p, rows);
    const int along = reach > DECODE_MEMORY && !gaps ? FMHA_NAME(vectors_along)(p, rows) : 0;
    /* Of long rows a single query row is as fast along, and more than four are faster otherwise. */
    const int close = p->stored == FMHA_SAME && fmha_cpu_fetches && (k_bytes < DECODE_WIDE || (rows <= DECODE_TOGETHER && !along));
    const int vectors = close ? 0 : along;
    const ptrdiff_t bytes = !turns && !close ? DECODE_NEAR_AHEAD : vectors ? DECODE_ALONG : fmha_cpu_fetches ? DECODE_WHOLE_AHEAD : DECODE_AHEAD;
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

/* total[r * nv + i] <- total[r * nv + i] + weights[r] * vector i of a row of values, the last of which has `last` items; what
 * lies v_ahead further on is fetched, unless that is 0, into the first cache where it is `near`. once: as in score_keys. */
INLINED void FMHA_NAME(add_values)(const int type, const int many, const int nv, const int near, const int once, ptrdiff_t last,
                                   const REAL *weights, const char *v, const ptrdiff_t v_ahead, VEC *total)
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
        if (once && many > 1) v_keep(value[i]);
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

INLINED void FMHA_NAME(take_totals)(const int many, const int nv, VEC *total, const REAL *from, ptrdiff_t ld)
{
#pragma GCC unroll 4
    for (int r = 0; r < many; r++)
#pragma GCC unroll 16
        for (int i = 0; i < nv; i++) total[r * nv + i] = v_load(from + r * ld + i * LANES);
}

INLINED void FMHA_NAME(leave_totals)(const int many, const int nv, const VEC *total, REAL *to, ptrdiff_t ld)
{
#pragma GCC unroll 4
    for (int r = 0; r < many; r++)
#pragma GCC unroll 16
        for (int i = 0; i < nv; i++) v_store(to + r * ld + i * LANES, total[r * nv + i]);
}

/* Items of the last of nv vectors of so many columns. */
#define DECODE_LAST(nv, columns) ((columns) < (nv) * LANES ? (columns) - ((nv) - 1) * LANES : LANES)

/* Of nv vectors of values, the last of which may be a part, out (many, ldo) <- shrink * out + weights (many, keys) @ v (keys,
 * columns): key after key, and a sum of every DECODE_STEP keys, since sums of sums err less than one long sum; open: one that has been
 * begun before, or ends later, see streams. What is asked at each key costs about as much as its sums: each way of fetching has a loop. */
INLINED void FMHA_NAME(values_of)(const int type, const int many, const int nv, const int near, const int open, const ptrdiff_t keys,
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
        if (open && from->open->begun) FMHA_NAME(take_totals)(many, nv, total, out + from->open->aside, ldo);
        else FMHA_NAME(no_totals)(many, nv, total);
#define EACH_KEY(fetch, last, ahead) \
    _Pragma("GCC unroll 2") \
    for (ptrdiff_t e = j; e < end; e++, v += ldv) { \
        fetch \
        FMHA_NAME(add_values)(type, many, nv, near, 0, last, weights + e, v, ahead, total); \
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
                if (fetch && !lines) FMHA_NAME(add_values)(type, many, nv, near, 0, last, weights + e, v, v_ahead, total);
                else FMHA_NAME(add_values)(type, many, nv, near, 0, last, weights + e, v, 0, total);
            }
        }
#undef EACH_KEY
        if (open && !from->open->ends) FMHA_NAME(leave_totals)(many, nv, total, out + from->open->aside, ldo);
        else FMHA_NAME(add_totals)(many, nv, total, out, ldo, shrink);
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
            FMHA_NAME(add_values)(type, many, nv, 0, 0, last, weights + j + l, v, 0, total);
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
            FMHA_NAME(score_keys)(FMHA_SAME, many, abreast, D, q, k, ldk, abreast - 1, 0, 0, 0, 1, sum + l / abreast);
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
            FMHA_NAME(add_values)(FMHA_SAME, many, n, 0, 1, DECODE_LAST(n, columns - done * LANES), weights + j + l + a, \
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

enum { FMHA_NAME(scores_alone), FMHA_NAME(values_alone), FMHA_NAME(in_turns), FMHA_NAME(values_open) };

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
        FMHA_NAME(values_of)(type, many, n, what != FMHA_NAME(in_turns) || from.close, what == FMHA_NAME(values_open), keys, \
                             Dv - done * LANES, &from, weights, out + done * LANES, ldo, shrink); \
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
PASSES(in_turns, FMHA_SAME) PASSES(values_open, FMHA_SAME)
#if FMHA_REAL == 32
PASSES(in_turns, FMHA_HALF) PASSES(in_turns, FMHA_BFLOAT)
PASSES(values_open, FMHA_HALF) PASSES(values_open, FMHA_BFLOAT)
#endif
static const FMHA_NAME(pass) FMHA_NAME(passes)[4][4][DECODE_TOGETHER] = {        /* what, type (of the last two DECODE_USUAL ones), rows */
    {NAMES(scores_alone, FMHA_SAME), NAMES(scores_alone, FMHA_HALF), NAMES(scores_alone, FMHA_BFLOAT), NAMES(scores_alone, FMHA_OTHER)},
    {NAMES(values_alone, FMHA_SAME), NAMES(values_alone, FMHA_HALF), NAMES(values_alone, FMHA_BFLOAT), NAMES(values_alone, FMHA_OTHER)},
#if FMHA_REAL == 32
    {NAMES(in_turns, FMHA_SAME), NAMES(in_turns, FMHA_HALF), NAMES(in_turns, FMHA_BFLOAT)},
    {NAMES(values_open, FMHA_SAME), NAMES(values_open, FMHA_HALF), NAMES(values_open, FMHA_BFLOAT)},
#else
    {NAMES(in_turns, FMHA_SAME)},
    {NAMES(values_open, FMHA_SAME)},
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
    from.open = ahead->open;
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
    FMHA_NAME(decode_passes)(type, ahead->open ? FMHA_NAME(values_open) : FMHA_NAME(values_alone), p, ahead, rows, 1, keys, weights, v, weights, weights, v, ldv, out, shrink);
}

/* The same of whole steps, and in turns with it scores (rows, keys) <- q (rows, width) @ k (keys, D).T of keys that come later. */
static void FMHA_NAME(decode_turns)(const fmha_problem *p, const FMHA_NAME(ahead) *ahead, ptrdiff_t rows, int fetched, ptrdiff_t keys,
                                    const REAL *q, const char *k, REAL *scores, const REAL *weights, const char *v, REAL *out,
                                    const REAL *shrink)
{
    FMHA_NAME(decode_passes)(p->stored, FMHA_NAME(in_turns), p, ahead, rows, fetched, keys, q, k, scores, weights, v, p->v.stride[2], out,
                             shrink);
}
