/* Products of matrices for the projections on matrix tiles: both operands are packed first, each once, then slices of the result are
 * summed in float32, finished, and rounded to their element type. */

/* Elements of an operand in tiles with so many rows or columns along the result, and terms of the sum: of one part. */
static ptrdiff_t FMHA_NAME(tiles_size)(ptrdiff_t outer, ptrdiff_t terms)
{
    return ROUND_UP(outer, TILE_TERMS) * ROUND_UP(terms, TILE_TERMS);
}

/* Outer rows or columns [from, from + many), from a multiple of 32, of op(a) (outer, terms) or op(b) (terms, outer); x is (outer,
 * terms) or (terms, outer) as it lies. Returns whether some number is not finite or as large as LARGE_PART. */
static int FMHA_NAME(pack_tiles)(int is_first, int outer_along, int type, int parts, ptrdiff_t from, ptrdiff_t many, ptrdiff_t terms,
                                 const void *x, ptrdiff_t stride, ptrdiff_t outer, void *to)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), step = (terms + TILE_TERMS - 1) / TILE_TERMS;
    const FMHA_NAME(source) source = {
        .data = (const char *)x + (outer_along ? from : from * stride) * size, .stride = stride, .rows = outer_along ? terms : many,
        .width = outer_along ? many : terms,
    };
    const FMHA_NAME(operand) operand = {(const uint16_t *)to + from / TILE_ROWS * step * TILE_SIZE, step, FMHA_NAME(tiles_size)(outer, terms), parts};
    const int way = is_first ? outer_along ? FMHA_NAME(first_transposed) : FMHA_NAME(first)
                             : outer_along ? FMHA_NAME(second) : FMHA_NAME(second_transposed);
    return FMHA_NAME(pack_operand)(way, type, &source, &operand);
}

/* c (rows, columns) of an element type <- activation(a @ b + bias) + residual: rows from i0 and columns from j0 on, multiples of 16, of
 * operands of M rows, N columns and K terms. bias is of float32, residual of c's type. 32 columns are finished before the next begin:
 * their sums, in scratch of 64 float32 for each row in whole tiles, stay in the first cache. */
static void FMHA_NAME(tile_gemm)(const fmha_tile_product *x, ptrdiff_t i0, ptrdiff_t rows, ptrdiff_t j0, ptrdiff_t columns, void *c, ptrdiff_t ldc,
                                 const fmha_finish *last, void *scratch)
{
    const ptrdiff_t step = (x->K + TILE_TERMS - 1) / TILE_TERMS, row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, ld = 2 * TILE_ROWS;
    const ptrdiff_t size = FMHA_NAME(stored_size)(x->type_c);
    REAL *sums = scratch, *added = sums + row_tiles * TILE_ROWS * ld;
    FMHA_NAME(t_configure)();
    for (ptrdiff_t n = 0; n < columns; n += ld) {
        const ptrdiff_t many = columns - n < ld ? columns - n : ld;
        for (ptrdiff_t k = 0; k < step; k += GEMM_TILES) {
            const FMHA_NAME(operand) a = {(const uint16_t *)x->a + (i0 / TILE_ROWS * step + k) * TILE_SIZE, step, FMHA_NAME(tiles_size)(x->M, x->K), x->parts_a};
            const FMHA_NAME(operand) b = {(const uint16_t *)x->b + ((j0 + n) / TILE_ROWS * step + k) * TILE_SIZE, step,
                                          FMHA_NAME(tiles_size)(x->N, x->K), x->parts_b};
            FMHA_NAME(tile_product)(k > 0, rows, ROUND_UP(many, TILE_ROWS), step - k < GEMM_TILES ? x->K - k * TILE_TERMS : GEMM_TILES * TILE_TERMS,
                                    &a, &b, sums, ld);
        }
        if (step == 0) memset(sums, 0, (size_t)(row_tiles * TILE_ROWS * ld) * sizeof(REAL));
        fmha_finish own = *last;
        if (own.bias) own.bias += n * (ptrdiff_t)sizeof(REAL);
        if (own.residual) own.residual += n * size;
        if (own.residual && x->type_c != FMHA_SAME) {
            FMHA_NAME(load_rows)(x->type_c, rows, many, own.residual, own.ld, added, ld);
            own.residual = (const char *)added;
            own.ld = ld;
        }
        FMHA_NAME(finish)(rows, many, sums, ld, &own);
        FMHA_NAME(store_sums)(x->type_c, rows, many, sums, ld, (char *)c + n * size, ldc);
    }
    t_release();
}
