/* Products of matrices for the projections on matrix tiles: the first operand is packed first, then slices of the result are
 * summed in float32, finished, and rounded to their element type. The second operand was packed before, as weights are that are
 * kept so, or is packed piece by piece as it is multiplied: of few rows the product costs less than to write all of it to memory
 * and to read it back. */

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
    const FMHA_NAME(operand) operand = {(const uint16_t *)to + from / TILE_ROWS * step * TILE_SIZE, step,
                                        FMHA_NAME(tiles_size)(outer, terms), parts};
    const int way = is_first ? outer_along ? FMHA_NAME(first_transposed) : FMHA_NAME(first)
                             : outer_along ? FMHA_NAME(second) : FMHA_NAME(second_transposed);
    return FMHA_NAME(pack_operand)(way, type, &source, &operand);
}

/* How much is multiplied at a time: columns whose sums are held, and tiles of terms. Of an operand that is packed meanwhile as
 * many columns as let their sums and what is packed stay in the second cache: its rows are read from memory in long pieces. */
typedef struct { ptrdiff_t columns, tiles; } FMHA_NAME(gemm_step);

static FMHA_NAME(gemm_step) FMHA_NAME(step_of)(const fmha_tile_product *x)
{
    const ptrdiff_t most = RAW_SUMS / ROUND_UP(x->most_rows, TILE_ROWS) / TILE_TERMS * TILE_TERMS;
    const ptrdiff_t limit = x->raw_transposed ? RAW_COLUMNS_LYING : RAW_COLUMNS;
    const ptrdiff_t columns = x->b || most < TILE_TERMS ? TILE_TERMS : most < limit ? most : limit;
    const ptrdiff_t tiles = RAW_PACKED / (columns * TILE_TERMS);
    return (FMHA_NAME(gemm_step)){columns, x->b || tiles > GEMM_TILES ? GEMM_TILES : tiles};
}

/* Elements of a part of a raw operand that is packed at a time. */
static ptrdiff_t FMHA_NAME(raw_size)(FMHA_NAME(gemm_step) at_a_time)
{
    return at_a_time.columns * at_a_time.tiles * TILE_TERMS;
}

/* Bytes of scratch for a slice of a product: two times its sums at a time, and what is packed of a raw operand. */
static ptrdiff_t FMHA_NAME(tile_scratch)(const fmha_tile_product *x)
{
    const FMHA_NAME(gemm_step) at_a_time = FMHA_NAME(step_of)(x);
    return 2 * ROUND_UP(x->most_rows, TILE_ROWS) * at_a_time.columns * (ptrdiff_t)sizeof(REAL)
           + (x->b ? 0 : x->parts_b * FMHA_NAME(raw_size)(at_a_time)) * (ptrdiff_t)sizeof(uint16_t);
}

/* Of a raw operand columns n .. n+many and terms k .. k+terms of the sum, as they lie. */
static FMHA_NAME(source) FMHA_NAME(raw_part)(const fmha_tile_product *x, ptrdiff_t n, ptrdiff_t many, ptrdiff_t k, ptrdiff_t terms)
{
    const ptrdiff_t at = x->raw_transposed ? n * x->raw_stride + k : k * x->raw_stride + n;
    return (FMHA_NAME(source)){
        .data = (const char *)x->raw + at * FMHA_NAME(stored_size)(x->raw_type), .stride = x->raw_stride,
        .rows = x->raw_transposed ? many : terms, .width = x->raw_transposed ? terms : many,
    };
}

/* c (rows, columns) of an element type <- activation(a @ b + bias) + residual: rows from i0 and columns from j0 on, multiples of
 * 16, of operands of M rows, N columns and K terms. bias is of float32, residual of c's type. Some columns are finished before
 * the next begin: 32, whose sums stay in the first cache, or more where b is raw: of it the terms of a few tiles are packed at a
 * time, in scratch. Returns whether some number of these is not finite or as large as LARGE_PART. */
static int FMHA_NAME(tile_gemm)(const fmha_tile_product *x, ptrdiff_t i0, ptrdiff_t rows, ptrdiff_t j0, ptrdiff_t columns,
                                void *c, ptrdiff_t ldc,
                                const fmha_finish *last, void *scratch)
{
    const ptrdiff_t step = (x->K + TILE_TERMS - 1) / TILE_TERMS, row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const FMHA_NAME(gemm_step) at_a_time = FMHA_NAME(step_of)(x);
    const ptrdiff_t size = FMHA_NAME(stored_size)(x->type_c), ld = at_a_time.columns;
    REAL *sums = scratch, *added = sums + row_tiles * TILE_ROWS * ld;
    const FMHA_NAME(operand) raw = {(const uint16_t *)(added + row_tiles * TILE_ROWS * ld), at_a_time.tiles, FMHA_NAME(raw_size)(at_a_time),
                                     x->parts_b};
    int large = 0;
    FMHA_NAME(t_configure)();
    for (ptrdiff_t n = 0; n < columns && !large; n += ld) {
        const ptrdiff_t many = columns - n < ld ? columns - n : ld;
        for (ptrdiff_t k = 0; k < step; k += at_a_time.tiles) {
            const ptrdiff_t left = x->K - k * TILE_TERMS, terms = left < at_a_time.tiles * TILE_TERMS ? left : at_a_time.tiles * TILE_TERMS;
            const FMHA_NAME(operand) a = {(const uint16_t *)x->a + (i0 / TILE_ROWS * step + k) * TILE_SIZE, step,
                                          FMHA_NAME(tiles_size)(x->M, x->K), x->parts_a};
            FMHA_NAME(operand) b = raw;
            if (x->b) {
                b = (FMHA_NAME(operand)){(const uint16_t *)x->b + ((j0 + n) / TILE_ROWS * step + k) * TILE_SIZE, step,
                                         FMHA_NAME(tiles_size)(x->N, x->K), x->parts_b};
            } else {
                const FMHA_NAME(source) part = FMHA_NAME(raw_part)(x, j0 + n, many, k * TILE_TERMS, terms);
                large |= FMHA_NAME(pack_operand)(x->raw_transposed ? FMHA_NAME(second_transposed) : FMHA_NAME(second),
                                                 x->raw_type, &part, &b);
            }
            for (ptrdiff_t m = 0; m < many; m += TILE_TERMS) {
                const FMHA_NAME(operand) own = FMHA_NAME(operand_at)(&b, m / TILE_ROWS, 0);
                const ptrdiff_t wide = many - m < TILE_TERMS ? ROUND_UP(many - m, TILE_ROWS) : TILE_TERMS;
                FMHA_NAME(tile_product)(k > 0 ? FMHA_NAME(go_on) : FMHA_NAME(begin), rows, wide, terms, &a, &own, sums + m, ld);
            }
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
    return large;
}
