/* Products of matrices for the projections, on the register tile of product.inc.h: c (M, N) <- op(a) (M, K) @ op(b) (K, N),
 * row-major; b may be of half precision, which is converted as it is packed or, for few rows, as it is read. b is packed in
 * panels, of as many columns as the register tile has lanes, for all blocks of rows; a is copied where enough panels follow,
 * because its rows may lie a page apart, or so that they share a part of each cache (the order of the blocks: Goto and van de
 * Geijn 2008). Every element is summed in blocks of K in their order: its bits depend on K alone, not on the slice it is
 * computed in. */

#define GEMM_WIDE (ROUND_UP(GEMM_COLUMNS, PANEL))
#define GEMM_SERVED (GEMM_SERVES * PANEL)
#define PANEL (MICRO_VECTORS * LANES)
_Static_assert(FMHA_PANEL_COLUMNS % PANEL == 0, "slices of a packed product start with a panel");

/* Scratch of a product (M, N) over K: panels of b (depth, columns), a block of a with rows a cache line longer than depth, sums
 * (rows, columns) of a panel with a ragged edge; where a has few rows, a part of their sums alone. No less than that of any
 * product inside it. */
typedef struct {
    ptrdiff_t depth;
    REAL *panels, *block_of_a, *edge, *part;
} FMHA_NAME(gemm_memory);

static ptrdiff_t FMHA_NAME(gemm_layout)(ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, REAL *memory, FMHA_NAME(gemm_memory) *m)
{
    const ptrdiff_t rows = M < GEMM_ROWS ? M : GEMM_ROWS, columns = N < GEMM_WIDE ? ROUND_UP(N, PANEL) : GEMM_WIDE;
    ptrdiff_t used = 0, few = 0;
    m->depth = K < GEMM_DEPTH ? ROUND_UP(K, LANES) : GEMM_DEPTH;
    m->panels = FMHA_NAME(take)(memory, &used, m->depth * columns);
    m->block_of_a = FMHA_NAME(take)(memory, &used, (m->depth + LINE) * rows);
    m->edge = FMHA_NAME(take)(memory, &used, rows * PANEL);
    m->part = FMHA_NAME(take)(memory, &few, M >= FEW_OWN || K > GEMM_DEPTH ? FEW_ROWS * (FEW_COLUMNS + LINE) + LINE : 0);
    return used > few ? used : few;
}

static ptrdiff_t FMHA_NAME(gemm_scratch)(ptrdiff_t M, ptrdiff_t N, ptrdiff_t K)
{
    FMHA_NAME(gemm_memory) unused;
    return FMHA_NAME(gemm_layout)(M, N, K, NULL, &unused);
}

/* to (depth, ld) <- b[:, :columns], zeros beyond, up to whole vectors; b (depth, columns), or (columns, depth) if transposed. */
INLINED void FMHA_NAME(pack_panel_of)(const int type, int transposed, ptrdiff_t depth, ptrdiff_t columns, const char *b, ptrdiff_t ldb,
                                      REAL *to, ptrdiff_t ld)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    if (!transposed) {
        for (ptrdiff_t k = 0; k < depth; k++)
            for (ptrdiff_t n = 0; n < columns; n += LANES) {
                if (k + GEMM_AHEAD < depth) v_prefetch_far(b + ((k + GEMM_AHEAD) * ldb + n) * size);
                v_store(to + k * ld + n, FMHA_NAME(stored_load_n)(type, b + (k * ldb + n) * size, columns - n));
            }
        return;
    }
    for (ptrdiff_t n = 0; n < columns; n += LANES) {
        ptrdiff_t rows = columns - n < LANES ? columns - n : LANES, k = 0;
#if HAVE_TRANSPOSE
        for (; k + LANES <= depth; k += LANES) {
            VEC part[LANES];
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; l < LANES; l++)
                part[l] = l < rows ? FMHA_NAME(stored_load)(type, b + ((n + l) * ldb + k) * size) : v_splat(0);
            FMHA_NAME(transpose)(part);
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; l < LANES; l++) v_store(to + (k + l) * ld + n, part[l]);
        }
#endif
        for (; k < depth; k++)
            for (ptrdiff_t l = 0; l < LANES; l++)
                to[k * ld + n + l] = l < rows ? FMHA_NAME(stored_value)(type, b + ((n + l) * ldb + k) * size) : 0;
    }
}

static void FMHA_NAME(pack_panel)(int type, int transposed, ptrdiff_t depth, ptrdiff_t columns, const char *b, ptrdiff_t ldb, REAL *to,
                                  ptrdiff_t ld)
{
#define PACK_PANEL(type) FMHA_NAME(pack_panel_of)(type, transposed, depth, columns, b, ldb, to, ld)
    BY_STORED(PACK_PANEL)
#undef PACK_PANEL
}

/* panels <- b (K, whole panels), of each `rows` rows: row by row, from end to end. */
INLINED void FMHA_NAME(pack_whole_panels_of)(const int type, ptrdiff_t K, ptrdiff_t N, const char *b, ptrdiff_t ldb,
                                             REAL *panels, ptrdiff_t rows)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    for (ptrdiff_t k = 0; k < K; k++) {
        const char *from = b + k * ldb * size;
        REAL *to = panels + k * PANEL;
        for (ptrdiff_t n = 0; n < N; n += PANEL, from += PANEL * size, to += PANEL * rows)
#pragma GCC unroll 4
            for (int v = 0; v < MICRO_VECTORS; v++) v_store(to + v * LANES, FMHA_NAME(stored_load)(type, from + v * LANES * size));
    }
}

/* panels <- op(b) (K, N), one behind the other, each of `rows` rows. */
static void FMHA_NAME(pack_panels)(int type, int transposed, ptrdiff_t K, ptrdiff_t N, const char *b, ptrdiff_t ldb, REAL *panels,
                                   ptrdiff_t rows)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    ptrdiff_t n = 0;
    if (!transposed) {
        n = N / PANEL * PANEL;
#define PACK_PANELS(type) FMHA_NAME(pack_whole_panels_of)(type, K, n, b, ldb, panels, rows)
        BY_STORED(PACK_PANELS)
#undef PACK_PANELS
    }
    for (; n < N; n += PANEL) {
        const ptrdiff_t columns = N - n < PANEL ? N - n : PANEL;
        FMHA_NAME(pack_panel)(type, transposed, K, columns, b + (transposed ? n * ldb : n) * size, ldb, panels + n * rows,
                              ROUND_UP(columns, LANES));
    }
}

#define FEW_TOGETHER 8      /* rows of a for which b is read once */

/* The same for a vector of columns, or for the first so many of them; term: of a (rows, depth). */
INLINED void FMHA_NAME(few_vector)(const int type, const int rows, const int depth, const int fetch, const int part, int add,
                                   ptrdiff_t ahead, ptrdiff_t columns, const VEC *term, const char *b, ptrdiff_t ldb, REAL *c,
                                   ptrdiff_t ldc)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    VEC sum[FEW_TOGETHER];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) sum[r] = !add ? v_splat(0) : part ? v_load_n(c + r * ldc, columns, 0) : v_load(c + r * ldc);
#pragma GCC unroll 8
    for (int k = 0; k < depth; k++) {
        const char *at = b + k * ldb * size;
        const VEC row = part ? FMHA_NAME(stored_load_n)(type, at, columns) : FMHA_NAME(stored_load)(type, at);
        if (fetch) v_prefetch_far(at + ahead);
        if (fetch && rows == 4) v_prefetch(at + FEW_SOON);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[r] = sum[r] + row * term[r * depth + k];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        if (part) v_store_n(c + r * ldc, sum[r], columns);
        else v_store(c + r * ldc, sum[r]);
    }
}

/* c (rows, columns) <- (add ? c : 0) + a (rows, depth) @ b (depth, columns): vectors of columns outside, so that each row of b
 * is read from end to end; from its first whole vector on where rows lie alike, since a load across two cache lines is two.
 * Where `fetch`, what lies so many bytes ahead of each is fetched. */
INLINED void FMHA_NAME(few_rows)(const int type, const int rows, const int depth, const int fetch, int add, ptrdiff_t ahead,
                                 ptrdiff_t columns, const REAL *a, ptrdiff_t a_row, ptrdiff_t a_step, const char *b, ptrdiff_t ldb, REAL *c,
                                 ptrdiff_t ldc)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), whole = LANES * size;
    VEC term[FEW_TOGETHER * FEW_DEPTH];         /* for all vectors: of scalars where they lie an address each would be loaded, too */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int k = 0; k < depth; k++) term[r * depth + k] = v_splat(a[r * a_row + k * a_step]);
    ptrdiff_t n = 0, part = ldb * size % whole == 0 ? -(ptrdiff_t)((uintptr_t)b / (size_t)size) & (LANES - 1) : 0;
#define FEW_VECTOR(part, many) \
    FMHA_NAME(few_vector)(type, rows, depth, fetch, part, add, ahead, many, term, b + n * size, ldb, c + n, ldc)
    if (part && part < columns) {
        FEW_VECTOR(1, part);
        n = part;
    }
    for (; n + LANES <= columns; n += LANES) FEW_VECTOR(0, LANES);
    if (n < columns) FEW_VECTOR(1, columns - n);
#undef FEW_VECTOR
}

/* c (M, N) <- a (M, K) @ b (K, N) for K of at most GEMM_DEPTH, term by term in the order of K. */
INLINED void FMHA_NAME(few_block_of)(const int type, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, const REAL *a, ptrdiff_t a_row,
                                     ptrdiff_t a_step, const char *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    /* Along the rows, where so many are long; else into the next ones, which lie as far ahead. */
    const int along = M == 1 ? type == FMHA_SAME : FEW_DEPTH * N * size > FEW_NEAR;
    const int alone = type == FMHA_SAME && M == 1 && FEW_ALONE;
    for (ptrdiff_t k = 0, depth; k < K; k += depth) {
        depth = K - k >= FEW_DEPTH ? FEW_DEPTH : 1;
        const ptrdiff_t ahead = along ? FEW_AHEAD : k + 2 * depth <= K ? depth * ldb * size : 0;
        for (ptrdiff_t m = 0, rows; m < M; m += rows) {
            const REAL *from = a + m * a_row + k * a_step;
            const char *with = b + k * ldb * size;
            REAL *to = c + m * ldc;
            rows = M - m >= FEW_TOGETHER && depth > 1 ? FEW_TOGETHER : M - m >= 4 && depth == 1 ? 4 : M - m;
#define FEW(many, deep, fetch) FMHA_NAME(few_rows)(type, many, deep, fetch, k > 0, ahead, N, from, a_row, a_step, with, ldb, to, ldc)
            switch (depth > 1 ? rows : -rows) {
            case FEW_TOGETHER: FEW(FEW_TOGETHER, FEW_DEPTH, 1); break;
            case 7: FEW(7, FEW_DEPTH, 1); break;
            case 6: FEW(6, FEW_DEPTH, 1); break;
            case 5: FEW(5, FEW_DEPTH, 1); break;
            case 4: FEW(4, FEW_DEPTH, 1); break;
            case 3: FEW(3, FEW_DEPTH, 1); break;
            case 2: FEW(2, FEW_DEPTH, 1); break;
            case 1:
                if (alone) FEW(1, FEW_DEPTH, 0);
                else FEW(1, FEW_DEPTH, 1);
                break;
            case -4: FEW(4, 1, 0); break;
            case -3: FEW(3, 1, 0); break;
            case -2: FEW(2, 1, 0); break;
            default: FEW(1, 1, 0);
            }
#undef FEW
        }
    }
}

/* The same for one row and `vectors` vectors of columns, the last of which may be a part: their sums stay in registers. */
INLINED void FMHA_NAME(one_row_of)(const int type, const int vectors, ptrdiff_t columns, ptrdiff_t K, const REAL *a, ptrdiff_t a_step,
                                   const char *b, ptrdiff_t ldb, REAL *c)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    VEC sum[ONE_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) sum[v] = v_splat(0);
    for (ptrdiff_t k = 0; k < K; k++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sum[v] = sum[v] + FMHA_NAME(stored_load_n)(type, b + (k * ldb + v * LANES) * size, columns - v * LANES) * a[k * a_step];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) v_store_n(c + v * LANES, sum[v], columns - v * LANES);
}

static void FMHA_NAME(one_row)(int type, ptrdiff_t N, ptrdiff_t K, const REAL *a, ptrdiff_t a_step, const char *b, ptrdiff_t ldb, REAL *c)
{
    const ptrdiff_t abreast = ONE_VECTORS * LANES;
    ptrdiff_t n = 0;
#define ONE_ROW(type) \
    for (; n + abreast <= N; n += abreast) \
        FMHA_NAME(one_row_of)(type, ONE_VECTORS, abreast, K, a, a_step, b + n * FMHA_NAME(stored_size)(type), ldb, c + n); \
    for (; n < N; n += LANES) \
        FMHA_NAME(one_row_of)(type, 1, N - n, K, a, a_step, b + n * FMHA_NAME(stored_size)(type), ldb, c + n);
    BY_STORED(ONE_ROW)
#undef ONE_ROW
}

static void FMHA_NAME(few_block)(int type, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, const REAL *a, ptrdiff_t a_row, ptrdiff_t a_step,
                                 const char *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc)
{
#define FEW_BLOCK(type) FMHA_NAME(few_block_of)(type, M, N, K, a, a_row, a_step, b, ldb, c, ldc)
    BY_STORED(FEW_BLOCK)
#undef FEW_BLOCK
}

/* The same for any K, with the sums of sums, and so the bits, of the packing product. Sums that are loaded and stored again and
 * again have rows of their own in `part`, which begin in a cache line where those of b do: rows of c may share a part of the
 * first cache, and their ends may be fetched by a CPU that is at the columns before them. */
static void FMHA_NAME(product_few)(int type, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, const REAL *a, ptrdiff_t a_row, ptrdiff_t a_step,
                                   const char *b, ptrdiff_t ldb, REAL *c, ptrdiff_t ldc, REAL *part)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), most = M * FEW_COLUMNS < FEW_SUMS ? FEW_SUMS / M : FEW_COLUMNS, ld = most + LINE;
    const int near = M == 1 && K * N * size <= ONE_NEAR;
    for (ptrdiff_t n = 0; n < N; n += most)
        for (ptrdiff_t k = 0; k < K; k += GEMM_DEPTH) {
            ptrdiff_t columns = N - n < most ? N - n : most, depth = K - k < GEMM_DEPTH ? K - k : GEMM_DEPTH;
            const int own = M >= FEW_OWN || k;
            const char *with = b + (k * ldb + n) * size;
            REAL *sums = part + ((uintptr_t)with / (size_t)size & (LINE - 1)), *to = own ? sums : c + n;
            if (near) FMHA_NAME(one_row)(type, columns, depth, a + k * a_step, a_step, with, ldb, to);
            else FMHA_NAME(few_block)(type, M, columns, depth, a + k * a_step, a_row, a_step, with, ldb, to, own ? ld : ldc);
            for (ptrdiff_t m = 0; own && m < M; m++)
                for (ptrdiff_t e = 0; e < columns; e += LANES) {
                    REAL *sum = c + m * ldc + n + e;
                    VEC more = v_load_n(sums + m * ld + e, columns - e, 0);
                    v_store_n(sum, k ? v_load_n(sum, columns - e, 0) + more : more, columns - e);
                }
        }
}

/* packed (K · N rounded up to whole vectors) <- b (K, N) as gemm wants its panels: one after the other, each K rows. */
static void FMHA_NAME(gemm_pack)(ptrdiff_t K, ptrdiff_t N, const void *b, ptrdiff_t ldb, void *packed)
{
    FMHA_NAME(pack_panels)(FMHA_SAME, 0, K, N, b, ldb, packed, K);
}

/* n vectors of c, the last of which may be a part. */
INLINED void FMHA_NAME(finish_vectors)(const int activation, const int n, ptrdiff_t columns, REAL *c, ptrdiff_t ldc, const REAL *bias,
                                       const REAL *residual, ptrdiff_t ld)
{
    VEC x[ABREAST];
    EACH(i) {
        v_prefetch_far(c + FINISH_AHEAD * ldc + i * LANES);
        if (residual) v_prefetch_far(residual + FINISH_AHEAD * ld + i * LANES);
        x[i] = v_load_n(c + i * LANES, columns - i * LANES, 0);
        if (bias) x[i] = x[i] + v_load_n(bias + i * LANES, columns - i * LANES, 0);
    }
    FMHA_NAME(activate)(activation, n, x);
    EACH(i) {
        if (residual) x[i] = x[i] + v_load_n(residual + i * LANES, columns - i * LANES, 0);
        v_store_n(c + i * LANES, x[i], columns - i * LANES);
    }
}

INLINED void FMHA_NAME(finish_by)(const int activation, ptrdiff_t rows, ptrdiff_t columns, REAL *c, ptrdiff_t ldc, const fmha_finish *last)
{
    const REAL *bias = (const REAL *)last->bias, *residual = (const REAL *)last->residual;
    const ptrdiff_t abreast = ABREAST * LANES;
    for (ptrdiff_t m = 0; m < rows; m++, c += ldc, residual += residual ? last->ld : 0) {
        ptrdiff_t n = 0;
#define FINISH(vectors, many) \
    FMHA_NAME(finish_vectors)(activation, vectors, many, c + n, ldc, bias ? bias + n : NULL, residual ? residual + n : NULL, \
                              last->ld)
        for (; n + abreast <= columns; n += abreast) FINISH(ABREAST, abreast);
        for (; n < columns; n += LANES) FINISH(1, columns - n);
#undef FINISH
    }
}

/* c (rows, columns) <- activation(c + bias) + residual */
static void FMHA_NAME(finish)(ptrdiff_t rows, ptrdiff_t columns, void *c, ptrdiff_t ldc, const fmha_finish *last)
{
    switch (last->activation) {
    case FMHA_GELU: FMHA_NAME(finish_by)(FMHA_GELU, rows, columns, c, ldc, last); break;
    case FMHA_GELU_TANH: FMHA_NAME(finish_by)(FMHA_GELU_TANH, rows, columns, c, ldc, last); break;
    case FMHA_RELU: FMHA_NAME(finish_by)(FMHA_RELU, rows, columns, c, ldc, last); break;
    case FMHA_SILU: FMHA_NAME(finish_by)(FMHA_SILU, rows, columns, c, ldc, last); break;
    default: if (last->bias || last->residual) FMHA_NAME(finish_by)(FMHA_NO_ACTIVATION, rows, columns, c, ldc, last);
    }
}

/* c := activation(op(a) @ op(b) + bias) + residual; a is (M, K), or (K, M) if trans_a; b is (K, N), or (N, K) if trans_b;
 * packed: b as gemm_pack has left it, or NULL; type: of b. */
static void FMHA_NAME(gemm)(int type, int trans_a, int trans_b, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K, const void *a_, ptrdiff_t lda,
                            const void *b_, ptrdiff_t ldb, void *c_, ptrdiff_t ldc, const fmha_finish *last, const void *packed,
                            void *scratch)
{
    const REAL *a0 = a_;
    const char *b0 = b_;
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    FMHA_NAME(gemm_memory) memory;
    FMHA_NAME(gemm_layout)(M, N, K, scratch, &memory);
    REAL *c0 = c_, *block_of_a = memory.block_of_a, *edge = memory.edge;
    const ptrdiff_t wide = packed ? N : GEMM_WIDE;
    if (K == 0) {
        for (ptrdiff_t m = 0; m < M; m++) FMHA_NAME(fill)(N, c0 + m * ldc, 0);
        FMHA_NAME(finish)(M, N, c0, ldc, last);
        return;
    }
    if (M <= (!packed ? FEW_ROWS : type == FMHA_SAME ? FEW_PACKED : FEW_HALF) && !trans_b && b0) {
        FMHA_NAME(product_few)(type, M, N, K, a0, trans_a ? 1 : lda, trans_a ? lda : 1, b0, ldb, c0, ldc, memory.part);
        FMHA_NAME(finish)(M, N, c0, ldc, last);
        return;
    }
    for (ptrdiff_t first = 0; first < N; first += wide)
        for (ptrdiff_t k0 = 0; k0 < K; k0 += GEMM_DEPTH) {
            ptrdiff_t depth = K - k0 < GEMM_DEPTH ? K - k0 : GEMM_DEPTH, end = N - first < wide ? N : first + wide;
            if (!packed)
                FMHA_NAME(pack_panels)(type, trans_b, depth, end - first, b0 + (trans_b ? first * ldb + k0 : k0 * ldb + first) * size, ldb,
                                       memory.panels, memory.depth);
            for (ptrdiff_t m0 = 0; m0 < M; m0 += GEMM_ROWS) {
                ptrdiff_t rows = M - m0 < GEMM_ROWS ? M - m0 : GEMM_ROWS, a_row = lda;
                const REAL *a = a0 + (trans_a ? k0 * lda + m0 : m0 * lda + k0);
                if (trans_a || end - first >= GEMM_SERVED) {
                    a_row = ROUND_UP(depth, LANES) + LINE;
                    FMHA_NAME(pack_panel)(FMHA_SAME, trans_a, rows, depth, (const char *)a, lda, block_of_a, a_row);
                    a = block_of_a;
                }
                for (ptrdiff_t n0 = first; n0 < end; n0 += PANEL) {
                    ptrdiff_t columns = N - n0 < PANEL ? N - n0 : PANEL, whole = ROUND_UP(columns, LANES), ld = whole;
                    const REAL *rows_of_b = memory.panels + (n0 - first) * memory.depth;
                    if (packed) rows_of_b = (const REAL *)packed + n0 * K + k0 * whole;
                    /* c (rows, columns) <- c + op(a) (rows, depth) @ op(b) (depth, columns) */
                    REAL *c = c0 + m0 * ldc + n0, *to = whole == columns ? c : edge;
                    ptrdiff_t ld_to = whole == columns ? ldc : ld;
                    const int last_one = k0 + depth == K, by_product = last_one && last->activation == FMHA_NO_ACTIVATION && to == c;
                    const fmha_finish part = fmha_finish_at(last, m0, n0, sizeof(REAL));
                    const REAL *bias = by_product ? (const REAL *)part.bias : NULL;
                    const char *residual = by_product ? part.residual : NULL;
#define GEMM_PRODUCT(init) \
    FMHA_NAME(product_of)(FMHA_SAME, (init) | FMHA_FETCH | FMHA_FINISH, rows, whole, depth, a, a_row, 1, (const char *)rows_of_b, ld, \
                          to, ld_to, bias, residual, part.ld * (ptrdiff_t)sizeof(REAL), NULL)
                    if (k0 == 0 || to == edge) GEMM_PRODUCT(FMHA_SET);
                    else GEMM_PRODUCT(FMHA_ADD);
#undef GEMM_PRODUCT
                    if (to == edge)
                        for (ptrdiff_t m = 0; m < rows; m++)
                            for (ptrdiff_t n = 0; n < columns; n++) {
                                REAL sum = edge[m * ld + n];
                                c[m * ldc + n] = k0 == 0 ? sum : c[m * ldc + n] + sum;
                            }
                    if (last_one && !by_product) FMHA_NAME(finish)(rows, columns, c, ldc, &part);      /* while it is in the caches */
                }
            }
        }
}
