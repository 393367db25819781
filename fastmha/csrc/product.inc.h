/* The products of the tiled algorithm, of decode's values and of the projections: one register tile. */

#if MICRO_VECTORS != 2 && MICRO_VECTORS != 4
#error "product_of has cases for register tiles of 2 and of 4 vectors"
#endif

/* Results of a product: their width; where 0 times each sum is added up, which is not 0 where one is not finite; and rows that
 * are fetched for later, one beside each row, or NULL. */
typedef struct {
    ptrdiff_t width;
    REAL trace[LANES];
    const char *then;
    ptrdiff_t ld;               /* bytes */
} FMHA_NAME(results);

#define FMHA_IN_A_ROW FMHA_CACHE_LINE    /* a distance of rows: they follow each other, and have the length of a's or as many vectors as b's */

/* c[r][lanes] <- init + sum_k a[r, k] * b[k][lanes] for mr rows and nv vectors. The only product of
 * "tiled", and of the values of "decode". What init adds is added last: sums of sums err less than one long sum. */
INLINED void FMHA_NAME(micro)(const int type, const int mr, const int nv, const int init, ptrdiff_t depth, const REAL *a, ptrdiff_t a_row,
                              ptrdiff_t a_step, const char *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *scale, const char *beside,
                              ptrdiff_t ld_beside, FMHA_NAME(results) *results, ptrdiff_t width)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    const int grouped = mr >= MICRO_GROUPED && (init & FMHA_FETCH_ROWS);    /* an address for each four rows, not for one each */
    const REAL *group[MICRO_SINGLE_ROWS / 4];
    VEC sum[MICRO_SINGLE_ROWS][MICRO_VECTORS];
#pragma GCC unroll 4
    for (int g = 0; grouped && g < (mr + 3) / 4; g++) {
        group[g] = a + 4 * g * a_row;
        __asm__("" : "+r"(group[g]));       /* or compilers see that they are as far apart as the rows, and make 16 of them */
    }
#pragma GCC unroll 16
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 12
        for (int v = 0; v < nv; v++) {
            sum[r][v] = v_splat(0);
            if (init & FMHA_FETCH) v_prefetch(c + r * ldc + v * LANES);
            if ((init & FMHA_FINISH) && beside) v_prefetch(beside + r * ld_beside + v * FMHA_VECTOR_BYTES);
        }
    if (FMHA_ACTION(init) == FMHA_RESULTS_OF && beside) {
#pragma GCC unroll 12
        for (int r = 0; r < mr; r++)
#pragma GCC unroll 12
            for (int v = 0; v < nv; v++)
                if (v * FMHA_VECTOR_BYTES % FMHA_CACHE_LINE == 0) v_prefetch_far(beside + r * ld_beside + v * FMHA_VECTOR_BYTES);
    }
    for (ptrdiff_t k = 0; k < depth; k++) {
        VEC row[MICRO_VECTORS];
#pragma GCC unroll 12
        for (int v = 0; v < nv; v++) {
            row[v] = FMHA_NAME(stored_load)(type, b + v * LANES * size);
            if ((init & FMHA_FETCH) && v * FMHA_VECTOR_BYTES % FMHA_CACHE_LINE == 0)
                v_prefetch(b + (MICRO_AHEAD * ldb + v * LANES) * size);
        }
#pragma GCC unroll 16
        for (int r = 0; r < mr; r++) {
            VEC scalar = v_splat(grouped ? group[r / 4][r % 4 * a_row] : a[r * a_row]);
#pragma GCC unroll 12
            for (int v = 0; v < nv; v++) sum[r][v] = v_sum(sum[r][v], scalar, row[v]);
        }
#pragma GCC unroll 4
        for (int g = 0; grouped && g < (mr + 3) / 4; g++) group[g] += a_step;
        a += a_step;
        b += ldb * size;
        if (!(init & (FMHA_FETCH_ROWS | FMHA_FINISH)) && FMHA_ACTION(init) != FMHA_RESULTS_OF && beside) {
#pragma GCC unroll 12
            for (int v = 0; v < nv; v++)
                if (v * FMHA_VECTOR_BYTES % FMHA_CACHE_LINE == 0) v_prefetch_far(beside + v * FMHA_VECTOR_BYTES);
            beside += ld_beside == FMHA_IN_A_ROW ? nv * FMHA_VECTOR_BYTES : ld_beside;
        }
        if ((init & FMHA_FETCH_ROWS) && k % (FMHA_CACHE_LINE / (ptrdiff_t)sizeof(REAL)) == 0) {
#pragma GCC unroll 16
            for (int r = 0; r < mr; r++) v_prefetch(a + (r + mr) * a_row);
            if (beside) {
#pragma GCC unroll 16
                for (int r = 0; r < mr; r++) v_prefetch_far(beside + r * ld_beside);
                beside += ld_beside == FMHA_IN_A_ROW ? mr * FMHA_CACHE_LINE : FMHA_CACHE_LINE;
            }
        }
    }
    VEC trace[MICRO_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < mr; r++)
#pragma GCC unroll 12
        for (int v = 0; v < nv; v++) {
            REAL *to = c + r * ldc + v * LANES;
            if (FMHA_ACTION(init) == FMHA_RESULTS_OF) {
                const VEC value = v_splat(0) + sum[r][v];
                trace[v] = r == 0 ? value * v_splat(0) : trace[v] + value * v_splat(0);
                if ((v + 1) * LANES <= width) v_store(to, value * scale[r]);
                else v_store_n(to, value * scale[r], width - v * LANES);
                continue;
            }
            if (FMHA_ACTION(init) == FMHA_FIRST) sum[r][v] = (v_splat(0) + sum[r][v]) * scale[0];
            if (FMHA_ACTION(init) == FMHA_ADD) sum[r][v] = v_load(to) + sum[r][v];
            if (FMHA_ACTION(init) == FMHA_SCALE_ADD) sum[r][v] = v_load(to) * scale[r] + sum[r][v];
            if ((init & FMHA_FINISH) && scale) sum[r][v] = sum[r][v] + v_load(scale + v * LANES);
            if ((init & FMHA_FINISH) && beside) sum[r][v] = sum[r][v] + v_load((const REAL *)(beside + r * ld_beside) + v * LANES);
            v_store(to, sum[r][v]);
        }
#pragma GCC unroll 12
    for (int v = 0; v < nv; v++)
        if (FMHA_ACTION(init) == FMHA_RESULTS_OF) v_store(results->trace, v_load(results->trace) + trace[v]);
}

/* Rows of the register tile: as many sums as the registers hold. */
#define MICRO_ROWS(nv) (MICRO_SUMS / (nv) < MICRO_MOST_ROWS ? MICRO_SUMS / (nv) : MICRO_MOST_ROWS)
/* What lies beside row r of a; or beside the panel of b, once. In a row: the first panel of b's fetches all that lies beside a,
 * each panel its part of what lies beside b, from the first line to the last one. */
#define BESIDE(init) \
    (!beside ? NULL \
     : FMHA_ACTION(init) == FMHA_RESULTS_OF || ((init) & FMHA_FINISH) ? beside + r * ld_beside + done * FMHA_VECTOR_BYTES \
     : (init) & FMHA_FETCH_ROWS ? (ld_beside != FMHA_IN_A_ROW ? beside + r * ld_beside : done ? NULL : beside + r * depth * (ptrdiff_t)sizeof(REAL)) \
     : r > 0 ? NULL : beside + done * FMHA_VECTOR_BYTES * (ld_beside == FMHA_IN_A_ROW ? depth : 1))
/* The scales from row r on, the bias from vector `done` on, or what scale is for all. */
#define SCALE_AT(init) \
    (FMHA_ACTION(init) == FMHA_SCALE_ADD || FMHA_ACTION(init) == FMHA_RESULTS_OF ? scale + r \
     : ((init) & FMHA_FINISH) && scale ? scale + done * LANES : scale)
#define MICRO_AT(mr, nv) \
    FMHA_NAME(micro)(type, mr, nv, init, depth, a0 + r * a_row, a_row, a_step, b, ldb, c0 + r * ldc + done * LANES, ldc, \
                     SCALE_AT(init), BESIDE(init), \
                     ld_beside, results, results ? results->width - done * LANES : 0)
/* 8 rows are two tiles of 4: in one of 2 behind one of 6, each step would wait for the sums of the one before. */
#define MICRO(mr, nv) \
    for (; rows - r >= (mr) && !((mr) == 6 && rows - r == 8); r += (mr)) MICRO_AT(mr, nv)
/* Of several vectors those numbers that gain most: each is code of its own in every product. */
#define MICRO_LAST(mr, nv) \
    if ((mr) < MICRO_ROWS(nv) && ((nv) == 1 || (mr) < 7 || ((nv) == 2 && (mr) % 2 == 0)) && left == (mr)) { \
        MICRO_AT(mr, nv); \
        r += (mr); \
    }
#define MICRO_SINGLE(mr, nv) \
    if ((init) & FMHA_FETCH_ROWS && (nv) == 1 && (mr) <= MICRO_SINGLE_ROWS && rows == (mr)) { \
        MICRO_AT(mr, nv); \
        break; \
    }
/* A tile of few rows waits for its sums as long as one of many: those that are left are one tile where the registers hold them. */
#define MICRO_PANEL(nv) \
    case nv: \
        MICRO_SINGLE(16, nv) MICRO_SINGLE(15, nv) MICRO_SINGLE(14, nv) MICRO_SINGLE(13, nv) \
        MICRO(MICRO_ROWS(nv), nv); \
        left = rows - r; \
        if (left > 4) { \
            MICRO_LAST(11, nv) MICRO_LAST(10, nv) MICRO_LAST(9, nv) MICRO_LAST(8, nv) MICRO_LAST(7, nv) MICRO_LAST(6, nv) MICRO_LAST(5, nv) \
        } \
        MICRO(4, nv); \
        MICRO(3, nv); \
        MICRO(2, nv); \
        MICRO(1, nv); \
        break;

/* c (rows, columns) <- init + a (rows, depth) @ b (depth, columns); columns a multiple of LANES. a_row or a_step is 1; b may
 * be stored in another type. */
INLINED void FMHA_NAME(product_of)(const int type, const int init, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const REAL *a0,
                                   ptrdiff_t a_row, ptrdiff_t a_step, const char *b0, ptrdiff_t ldb, REAL *c0, ptrdiff_t ldc,
                                   const REAL *scale, const char *beside, ptrdiff_t ld_beside, FMHA_NAME(results) *results)
{
    /* 8 rows are one tile of up to 3 vectors: b, which lies in the second cache or beyond, is read once, not twice. */
    const ptrdiff_t most = rows == 8 && MICRO_ROWS(3) == 8 && columns > MICRO_VECTORS * LANES ? 3 : MICRO_VECTORS;
    ptrdiff_t vectors = columns / LANES, panels = (vectors + most - 1) / most, done = 0;
    for (ptrdiff_t panel = 0; panel < panels; panel++) {
        ptrdiff_t nv = (vectors - done + panels - panel - 1) / (panels - panel);   /* even panels: 5 is 3 + 2 */
        const char *b = b0 + done * LANES * FMHA_NAME(stored_size)(type);
        ptrdiff_t r = 0, left;
        switch (nv) {
            MICRO_PANEL(1)
            MICRO_PANEL(2)
#if MICRO_VECTORS == 4
            MICRO_PANEL(3)
            MICRO_PANEL(4)
#endif
        }
        done += nv;
    }
}

#define PRODUCT(init, rows, columns, depth, a, a_row, a_step, b, ...) \
    FMHA_NAME(product_of)(FMHA_SAME, init, rows, columns, depth, a, a_row, a_step, (const char *)(b), __VA_ARGS__, NULL, 0, NULL)

/* s (keys, queries) <- k (keys, width) @ q^T (width, queries): a's rows lie along the sum. Row by row what lies beside them,
 * ld_beside bytes apart, is fetched for later, unless that is NULL. */
static __attribute__((noinline)) void FMHA_NAME(product_rows)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const char *beside, ptrdiff_t ld_beside)
{
    FMHA_NAME(product_of)(FMHA_SAME, FMHA_SET | FMHA_FETCH_ROWS, rows, columns, depth, a, lda, 1, (const char *)b, ldb, c, ldc, a, beside,
                          ld_beside, NULL);
}

/* c <- c + a @ b, a's rows along the sum. */
static __attribute__((noinline)) void FMHA_NAME(product_rows_add)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
    PRODUCT(FMHA_ADD, rows, columns, depth, a, lda, 1, b, ldb, c, ldc, a);
}

/* c <- factor * (0 + a @ b): the bits of the above where c is 0, and of a product with factor behind it. */
static __attribute__((noinline)) void FMHA_NAME(product_rows_first)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, REAL factor)
{
    PRODUCT(FMHA_FIRST, rows, columns, depth, a, lda, 1, b, ldb, c, ldc, &factor);
}

/* c <- scale[row] * c + a^T @ b, a (depth, rows) transposed: a's columns lie along the sum. Row by row what lies beside b,
 * ld_beside bytes apart, is fetched for later, unless that is NULL. */
static __attribute__((noinline)) void FMHA_NAME(product_columns)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const REAL *a,
    ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *scale, const char *beside, ptrdiff_t ld_beside)
{
    FMHA_NAME(product_of)(FMHA_SAME, FMHA_SCALE_ADD, rows, columns, depth, a, 1, lda, (const char *)b, ldb, c, ldc, scale,
                          beside, ld_beside,
                          NULL);
}

/* c <- 0 + a^T @ b: the bits of the above where c is 0. */
static __attribute__((noinline)) void FMHA_NAME(product_columns_first)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth, const REAL *a,
    ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const char *beside, ptrdiff_t ld_beside)
{
    const REAL one = 1;
    FMHA_NAME(product_of)(FMHA_SAME, FMHA_FIRST, rows, columns, depth, a, 1, lda, (const char *)b, ldb, c, ldc, &one, beside, ld_beside,
                          NULL);
}

/* The two above, of few rows, whose b comes from so far away that it is not all there in time, though it has been asked for: each
 * panel asks once more. */
static __attribute__((noinline)) void FMHA_NAME(product_columns_far)(int first, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *scale, const char *beside,
    ptrdiff_t ld_beside)
{
    const REAL one = 1;
    if (first) FMHA_NAME(product_of)(FMHA_SAME, FMHA_FIRST | FMHA_FETCH, rows, columns, depth, a, 1, lda, (const char *)b, ldb, c, ldc, &one,
                                     beside, ld_beside, NULL);
    else FMHA_NAME(product_of)(FMHA_SAME, FMHA_SCALE_ADD | FMHA_FETCH, rows, columns, depth, a, 1, lda, (const char *)b, ldb, c, ldc, scale,
                               beside, ld_beside, NULL);
}

/* c (rows, width) <- scale[row] * (0 + a^T @ b), of any width, b's rows in whole vectors: the bits of the above, multiplied. */
static __attribute__((noinline)) void FMHA_NAME(product_columns_results)(ptrdiff_t rows, ptrdiff_t depth, const REAL *a, ptrdiff_t lda,
    const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, const REAL *scale, FMHA_NAME(results) *results)
{
    FMHA_NAME(product_of)(FMHA_SAME, FMHA_RESULTS_OF, rows, ROUND_UP(results->width, LANES), depth, a, 1, lda, (const char *)b, ldb, c, ldc,
                          scale, results->then, results->ld, results);
}

/* c <- c + a^T @ b. */
static __attribute__((noinline)) void FMHA_NAME(product_columns_add)(ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t depth,
    const REAL *a, ptrdiff_t lda, const REAL *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
    PRODUCT(FMHA_ADD, rows, columns, depth, a, 1, lda, b, ldb, c, ldc, a);
}
