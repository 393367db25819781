/* Scores of few query rows: lanes are those of the width, and a score is the sum over them, since with lanes of rows most would
 * be empty; of some more, a vector is four rows with four terms of each. */

/* Sums of a part of a step of values wait so far behind the results; whether others of the step have come before, and whether
 * these are its last. */
typedef struct {
    ptrdiff_t aside;
    int begun, ends;
} FMHA_NAME(open_sums);

/* What the kernels read, rows that are ldk and ldv bytes apart, and how many cache lines of the values they fetch beside the
 * scores. Where keys and values are read in turns, also what they fetch of rows so many bytes ahead, in one of two ways: all
 * lines of each; or, where several passes share it, each pass those of `fetched` rows of every four, from row `first` on. */
typedef struct {
    const char *k, *v;
    ptrdiff_t ldk, ldv, k_ahead, v_ahead, k_lines, v_lines;
    int first, fetched;
    int vectors;                /* of a row, where each is read by an instruction of its own, else 0 */
    int close;                  /* what is fetched goes into the first cache, by one pass alone whole rows one after the other: */
    ptrdiff_t whole;            /* of values that are read in several turns so many lines, or 0 */
    const char *then;           /* rows of keys, of then_lines each, that are fetched beside values, or NULL */
    ptrdiff_t then_ld, then_lines;
    const FMHA_NAME(open_sums) *open;       /* of values that are a part of a step, else NULL */
} FMHA_NAME(streams);

/* Keys whose scores are summed side by side: sums enough for their latency, few enough for the registers. */
#define DECODE_ABREAST(many) \
    (LANES >= 4 && DECODE_CHAINS >= 4 * (many) ? 4 : LANES >= 2 && DECODE_CHAINS >= 2 * (many) ? 2 : 1)

/* A score is one sum over the vectors of D in order; then the sum over the lanes by `halve`, with all bits in order. Of `many`
 * rows of queries, sum[r * LANES] <- what that leaves of `abreast` keys as one vector. Keys behind `most` are not there: it
 * stands for them. Of `fetched` rows what lies k_ahead further on is fetched, into the first cache where it is `near`. once: keys that
 * come from memory are read once for all rows, and with AVX2, which waits for its loads here, queries once for all keys. */
INLINED void FMHA_NAME(score_keys)(const int type, const int many, const int abreast, const ptrdiff_t D, const REAL *q, const char *k,
                                   const ptrdiff_t ldk, const ptrdiff_t most, const ptrdiff_t k_ahead, const int fetched, const int near,
                                   const int once, VEC *sum)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), width = ROUND_UP(D, LANES);
    const char *key[4], *ahead = k + k_ahead;
    VEC total[DECODE_TOGETHER * 4], query[DECODE_TOGETHER], row[4];         /* total[r * abreast + a] */
#pragma GCC unroll 4
    for (int a = 0; a < abreast; a++) key[a] = k + (a < most ? a : most) * ldk;
#pragma GCC unroll 16
    for (int e = 0; e < many * abreast; e++) total[e] = v_splat(0);
    /* One loop over all sums, not two: then the compiler keeps them in registers. */
#define SCORED(load) \
    _Pragma("GCC unroll 4") \
    for (int r = 0; r < many; r++) { \
        query[r] = v_load(q + r * width + d); \
        if (once && abreast > 1 && FMHA_VECTOR_BYTES == 32) v_keep(query[r]); \
    } \
    _Pragma("GCC unroll 4") \
    for (int a = 0; a < abreast; a++) { \
        const char *at = key[a] + d * size; \
        row[a] = load; \
        if (once && many > 1) v_keep(row[a]); \
    } \
    for (int a = 0; a < fetched && d * size % FMHA_CACHE_LINE == 0; a++) { \
        if (near) v_prefetch(ahead + d * size + a * ldk); \
        else v_prefetch_far(ahead + d * size + a * ldk); \
    } \
    _Pragma("GCC unroll 16") \
    for (int e = 0; e < many * abreast; e++) total[e] = v_sum(total[e], row[e % abreast], query[e / abreast]);
    ptrdiff_t d = 0;
    for (; d + LANES <= D; d += LANES) { SCORED(FMHA_NAME(stored_load)(type, at)) }
    if (d < D) { SCORED(FMHA_NAME(stored_part)(type, at, D - d)) }
#undef SCORED
#pragma GCC unroll 4
    for (int r = 0; r < many; r++) {
        const VEC *of = total + r * abreast;
        sum[r * LANES] = abreast == 1 ? of[0] : abreast == 2 ? FMHA_NAME(halved)(of[0], of[1], 1)
                         : FMHA_NAME(halved)(FMHA_NAME(halved)(of[0], of[1], 1), FMHA_NAME(halved)(of[2], of[3], 1), 2);
    }
}

/* scores (many, keys) <- q (many, width, padded) @ k (keys, D).T, in whole vectors; values are fetched. */
INLINED void FMHA_NAME(scores_of)(const int type, const int many, const int abreast, const int near, const ptrdiff_t keys,
                                  const ptrdiff_t D, const REAL *q, const FMHA_NAME(streams) *from, REAL *scores)
{
    const ptrdiff_t ldk = from->ldk, ldv = from->ldv, v_lines = from->v_lines, k_ahead = from->k_ahead + from->first * ldk;
    const char *k = from->k, *v = from->v;
    for (ptrdiff_t j = 0; j < keys; j += LANES) {
        VEC sum[DECODE_TOGETHER * LANES];
        for (ptrdiff_t l = 0; l < LANES; l += abreast, k += abreast * ldk) {
            for (ptrdiff_t a = 0; v_lines && a < abreast; a++, v += ldv)
                for (ptrdiff_t line = 0; line < v_lines; line++) v_prefetch_far(v + line * FMHA_CACHE_LINE);
            int fetched = (j + l) % 4 == 0 ? from->fetched : 0;
            if (type == FMHA_SAME && from->close && fetched == 4) {
                for (ptrdiff_t a = 0; a < 4 && a < keys - j - l; a++)
                    for (ptrdiff_t byte = 0; byte < D * (ptrdiff_t)sizeof(REAL); byte += FMHA_CACHE_LINE) v_prefetch(k + k_ahead + a * ldk + byte);
                fetched = 0;
            }
            if (j + l < keys) FMHA_NAME(score_keys)(type, many, abreast, D, q, k, ldk, keys - j - l - 1, k_ahead, fetched,
                                                    near, 0, sum + l / abreast);
            else for (int r = 0; r < many; r++) sum[r * LANES + l / abreast] = v_splat(0);
        }
#pragma GCC unroll 4
        for (int r = 0; r < many; r++) {
            FMHA_NAME(halve)(sum + r * LANES, LANES / abreast, abreast);
            v_store(scores + r * DECODE_KEYS + j, sum[r * LANES]);
        }
    }
}

/* Rows of queries that are so few that their products have lanes of the width, too, where the others have lanes of rows. */
#define FEW_QUERIES (LANES / 4 < DECODE_TOGETHER ? LANES / 4 : DECODE_TOGETHER)

/* Elements of scratch for few_scores: the scores of a block of keys. */
#define FEW_SCRATCH (DECODE_TOGETHER * DECODE_KEYS)

/* to (width, in whole vectors) <- factor * row, zeros beyond; returns squares + its squares. */
static inline VEC FMHA_NAME(pack_row)(int type, ptrdiff_t width, REAL factor, const char *row, REAL *to, VEC squares)
{
    const REAL *from = FMHA_NAME(real_row)(type, row, width, to);
    ptrdiff_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        const VEC value = v_load(from + d) * factor;
        squares = squares + value * value;
        v_store(to + d, value);
    }
    if (d == width) return squares;
    const VEC value = v_load_n(from + d, width - d, 0) * factor;
    v_store(to + d, value);
    return squares + value * value;
}

/* What few_scores works in, and where not NULL also keeps what it has, or, where that is known, takes it from. */
typedef struct {
    REAL *scratch;          /* (rows, DECODE_KEYS) */
    REAL *kept;             /* (rows, n), rows ld apart */
    ptrdiff_t ld;
    int known;
} FMHA_NAME(few);

/* scores^T (n, queries), its rows lds apart, <- x (n, depth) @ q (rows, depth in whole vectors).T of at most FEW_QUERIES rows of
 * queries, zeros beyond. */
static void FMHA_NAME(few_scores)(ptrdiff_t rows, ptrdiff_t queries, ptrdiff_t lds, ptrdiff_t n, ptrdiff_t depth,
                                  const REAL *x, ptrdiff_t ldx,
                                  const REAL *q, const FMHA_NAME(few) *few, REAL *s)
{
    FMHA_NAME(streams) from = {.k = (const char *)x, .ldk = ldx * (ptrdiff_t)sizeof(REAL)};
    REAL *scores = few->scratch;
    for (ptrdiff_t j = 0, keys; j < n; j += keys, from.k += keys * from.ldk) {
        keys = n - j < DECODE_KEYS ? n - j : DECODE_KEYS;
#define SCORES(many) FMHA_NAME(scores_of)(FMHA_SAME, many, DECODE_ABREAST(many), 0, keys, depth, q, &from, scores)
        switch (few->known ? 0 : rows) {
        case 0: break;
        case 1: SCORES(1); break;
        case 2: SCORES(2); break;
        case 3: SCORES(3); break;
        default: SCORES(DECODE_TOGETHER);
        }
#undef SCORES
        for (ptrdiff_t r = 0; few->kept && !few->known && r < rows; r++)
            memcpy(few->kept + r * few->ld + j, scores + r * DECODE_KEYS, (size_t)keys * sizeof(REAL));
        const REAL *of = few->known ? few->kept + j : scores;
        const ptrdiff_t ld = few->known ? few->ld : DECODE_KEYS;
        for (ptrdiff_t k = 0; k < keys; k++) {
            REAL *to = s + (j + k) * lds;
            for (ptrdiff_t v = 0; v < queries; v += LANES) v_store(to + v, v_splat(0));
            for (ptrdiff_t r = 0; r < rows; r++) to[r] = of[r * ld + k];
        }
    }
}

/* Rows that leave lanes of a vector of rows empty: there a product would multiply for those, too, and a broadcast of each element
 * of a key, for one multiplication, is what it would wait for. Instead a vector is four rows with four neighbouring elements of
 * each: a broadcast of four elements of a key serves all vectors, and no lane is empty but those that fill the last four rows.
 * A score is four sums, of the elements 0, 4, 8 .., of 1, 5, 9 .. and so on, and then (the first + the second) + (the third +
 * the fourth). */
#if HAVE_FOURS && FOUR_ROWS
#define BY_FOURS 1
#define FOUR_VECTORS (FOUR_ROWS / 4)
#define MOST_KEYS (MICRO_SUMS / 2)                          /* as many sums as the registers hold */
#define FOUR_KEYS(vectors) ((vectors) < 3 ? MOST_KEYS : MICRO_SUMS / 3)
_Static_assert(FOUR_ROWS <= LANES && FOUR_VECTORS <= 3, "rows of three vectors");
_Static_assert(MOST_KEYS % 4 == 0 && MICRO_SUMS / 3 % 4 == 0, "keys in fours");

/* scores^T (many keys, rows), rows lds apart, lanes behind the rows anything, <- x (many, depth) @ fours, of `keys` keys, a
 * multiple of 4; fewer are there in the last four. fours (depth / 4, vectors, 4 rows, 4 elements). At each step some lines of the
 * keys that come next are fetched, row by row: so many streams at a time no CPU guesses. And beside rows of x those that lie
 * ld_beside bytes apart, unless that is NULL. */
INLINED void FMHA_NAME(score_fours)(const int vectors, const int keys, ptrdiff_t many, ptrdiff_t depth, const REAL *x, ptrdiff_t ldx,
                                    const REAL *fours, REAL *s, ptrdiff_t lds, const char *beside, ptrdiff_t ld_beside)
{
    const ptrdiff_t apart[4] = {0, many > 1 ? ldx : 0, many > 2 ? 2 * ldx : 0, many > 3 ? 3 * ldx : 0};
    const ptrdiff_t step = ld_beside == FMHA_IN_A_ROW ? FMHA_CACHE_LINE : ld_beside, lines = ROUND_UP(depth, LANES) / LANES;
    const REAL *group[MOST_KEYS / 4], *soon = x + many * ldx;       /* an address for each four keys: there are no registers for one each */
    ptrdiff_t line = 0;
    VEC sum[MOST_KEYS][FOUR_VECTORS];
#pragma GCC unroll 4
    for (int g = 0; g < keys / 4; g++) {
        group[g] = x + 4 * g * ldx;
        __asm__("" : "+r"(group[g]));
    }
#pragma GCC unroll 12
    for (int k = 0; k < keys; k++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[k][v] = v_splat(0);
    for (ptrdiff_t d = 0; d < depth; d += LANES) {
        const ptrdiff_t items = depth - d < LANES ? depth - d : LANES;
        const char *later = beside;
        for (ptrdiff_t i = 0; i < items; i += 4, fours += vectors * LANES) {
            VEC query[FOUR_VECTORS];
            for (int k = 0; k < keys; k += 4) {
                if (later) v_prefetch_far(later);
                if (later) later += step;
                v_prefetch(soon + line * LANES);
                line = line + 1 == lines ? 0 : line + 1;
                if (line == 0) soon += ldx;
            }
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) query[v] = v_load(fours + v * LANES);
#define SCORED(of_key) \
            _Pragma("GCC unroll 12") \
            for (int k = 0; k < keys; k++) { \
                const REAL *at = group[k / 4] + apart[k % 4]; \
                const VEC key = of_key; \
                _Pragma("GCC unroll 4") \
                for (int v = 0; v < vectors; v++) sum[k][v] = v_sum(sum[k][v], key, query[v]); \
            }
            if (items - i >= 4) { SCORED(FMHA_NAME(splat_four)(at)) }
            else { SCORED(FMHA_NAME(splat_some)(at, items - i)) }
#undef SCORED
#pragma GCC unroll 4
            for (int g = 0; g < keys / 4; g++) group[g] += 4;
        }
        if (beside) beside += ld_beside == FMHA_IN_A_ROW ? many * FMHA_CACHE_LINE : FMHA_CACHE_LINE;
    }
#pragma GCC unroll 4
    for (int k = 0; k < keys; k += 4) {
        VEC block[3];           /* lanes: keys */
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            block[v] = FMHA_NAME(halved)(FMHA_NAME(halved)(sum[k][v], sum[k + 1][v], 1), FMHA_NAME(halved)(sum[k + 2][v], sum[k + 3][v], 1), 2);
        REAL *to = s + k * lds;
        v_store(to, FMHA_NAME(key_of_blocks)(vectors, block, 1));
        if (many > k + 1) v_store(to + lds, FMHA_NAME(key_of_blocks)(vectors, block, 2));
        if (many > k + 2) v_store(to + 2 * lds, FMHA_NAME(key_of_blocks)(vectors, block, 4));
        if (many > k + 3) v_store(to + 3 * lds, FMHA_NAME(key_of_blocks)(vectors, block, 8));
    }
}

/* The same of n keys and packed^T (depth, LANES rows, ldq apart). */
INLINED void FMHA_NAME(product_fours_of)(const int vectors, ptrdiff_t n, ptrdiff_t depth, const REAL *x, ptrdiff_t ldx, const REAL *packed,
                                         ptrdiff_t ldq, REAL *s, ptrdiff_t lds, const char *beside, ptrdiff_t ld_beside)
{
    const ptrdiff_t of_row = ld_beside == FMHA_IN_A_ROW ? depth * (ptrdiff_t)sizeof(REAL) : ld_beside;
    REAL fours[FOUR_DEPTH * FOUR_ROWS];
    for (ptrdiff_t d = 0; d < depth; d += 4) {
        VEC column[4];
#pragma GCC unroll 4
        for (ptrdiff_t i = 0; i < 4; i++) column[i] = d + i < depth ? v_load(packed + (d + i) * ldq) : v_splat(0);
        FMHA_NAME(transpose_squares)(4, column);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) v_store(fours + d * 4 * vectors + v * LANES, FMHA_NAME(rows_of_blocks)(column, 1 << v));
    }
#define SCORE_FOURS(keys, many) \
    FMHA_NAME(score_fours)(vectors, keys, many, depth, x + k * ldx, ldx, fours, s + k * lds, lds, beside ? beside + k * of_row : NULL, ld_beside)
    ptrdiff_t k = 0;
    for (; k + FOUR_KEYS(vectors) <= n; k += FOUR_KEYS(vectors)) SCORE_FOURS(FOUR_KEYS(vectors), FOUR_KEYS(vectors));
    for (; k < n; k += 4) SCORE_FOURS(4, n - k < 4 ? n - k : 4);
#undef SCORE_FOURS
}

static __attribute__((noinline)) void FMHA_NAME(product_fours)(ptrdiff_t rows, ptrdiff_t n, ptrdiff_t depth, const REAL *x, ptrdiff_t ldx,
    const REAL *packed, ptrdiff_t ldq, REAL *s, ptrdiff_t lds, const char *beside, ptrdiff_t ld_beside)
{
#define PRODUCT_FOURS(vectors) FMHA_NAME(product_fours_of)(vectors, n, depth, x, ldx, packed, ldq, s, lds, beside, ld_beside)
    switch ((rows + 3) / 4) {
    case 1: PRODUCT_FOURS(1); break;
    case 2: PRODUCT_FOURS(2); break;
    default: PRODUCT_FOURS(3);
    }
#undef PRODUCT_FOURS
}
#else
#define BY_FOURS 0
#endif
