/* The gradient of an additive mask, from what a backward pass by "tiled" has left of each row. */

/* Scratch of one thread: of a backward pass over tiles of keys, and the sums of an item (keys, rows), in double precision: they
 * may run over all batch rows, heads and queries. */
static ptrdiff_t FMHA_NAME(mask_gradient_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(backward_memory) *m, double **sums)
{
    ptrdiff_t used = FMHA_NAME(backward_layout)(p, BLOCK_ROWS, 1, memory, m);
    *sums = (double *)FMHA_NAME(take)(memory, &used, TILE_KEYS * BLOCK_ROWS * (ptrdiff_t)(sizeof(double) / sizeof(REAL)));
    return used;
}

static ptrdiff_t FMHA_NAME(mask_gradient_scratch)(const fmha_problem *p)
{
    FMHA_NAME(backward_memory) unused;
    double *unused_sums;
    return FMHA_NAME(mask_gradient_layout)(p, NULL, &unused, &unused_sums);
}

/* sums (keys, rows) <- sums + grad_scores^T (keys, queries), an axis of stride 0 summed over, of the keys that are at work. */
static void FMHA_NAME(add_to_mask)(const FMHA_NAME(rows) *block, const REAL *g, double *sums, ptrdiff_t key_step, ptrdiff_t row_step)
{
    for (ptrdiff_t r = 0; r < block->rows; r += LANES) {
        ptrdiff_t rows = block->rows - r < LANES ? block->rows - r : LANES;
        for (ptrdiff_t k = block->low[r / LANES]; k < block->high[r / LANES]; k++) {
            const REAL *from = g + k * block->ld + r;
            double *to = sums + k * key_step + r * row_step;
            for (ptrdiff_t l = 0; l < rows; l++) to[l * row_step] += (double)from[l];
        }
    }
}

/* Item: some rows and keys of the mask; what they are laid over, batch row after batch row, head after head, block after block. */
static void FMHA_NAME(mask_gradient)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    const ptrdiff_t *stride = run->grad_mask.stride, group = p->H / p->Hkv;
    const ptrdiff_t key_step = stride[3] ? BLOCK_ROWS : 0, row_step = stride[2] ? 1 : 0;
    ptrdiff_t b0 = stride[0] ? item.b : 0, b1 = stride[0] ? item.b + 1 : p->B, h0 = stride[1] ? item.h : 0,
            h1 = stride[1] ? item.h + 1 : p->H;
    ptrdiff_t i0 = row_step ? item.i0 : 0, i1 = row_step ? item.i0 + item.rows : p->Lq;
    ptrdiff_t j0 = key_step ? item.j0 : 0, j1 = key_step ? item.j0 + item.cols : p->Lk;
    FMHA_NAME(backward) w = {.run = run};
    FMHA_NAME(rows) block;
    double *sums;
    FMHA_NAME(mask_gradient_layout)(p, FMHA_NAME(scratch_of)(run, worker), &w.m, &sums);
    w.m.packed.rows_q = w.m.packed.rows_grad_out = NULL;        /* no product reads them */
    FMHA_NAME(begin_item)(p);
    memset(sums, 0, TILE_KEYS * BLOCK_ROWS * sizeof(double));
    for (ptrdiff_t b = b0; b < b1; b++)
        for (ptrdiff_t h = h0; h < h1; h++)
            for (ptrdiff_t i = i0; i < i1; i += BLOCK_ROWS) {
                if (fmha_pool_stopped()) return;
                FMHA_NAME(block_rows)(p, &block, b, h / group, h % group * p->Lq + i, i1 - i < BLOCK_ROWS ? i1 - i : BLOCK_ROWS);
                ptrdiff_t low = block.j0 > j0 ? block.j0 : j0, high = block.j1 < j1 ? block.j1 : j1;
                if (low >= high) continue;
                if (fmha_heads_cut(p).rows <= FEW_QUERIES) block.few.scratch = w.m.few;     /* the scores that the states come from */
                FMHA_NAME(prepare_block)(&w, &block, &w.m.packed, 1, ALL_ROWS);
                for (ptrdiff_t j = low, n; j < high; j += n) {
                    n = high - j < TILE_KEYS ? high - j : TILE_KEYS;
                    int masked, banded = FMHA_NAME(backward_scores)(&w, &block, &w.m.packed, j, n, 0, &masked);
                    if (banded < 0) continue;
                    /* grad_mask <- grad_mask + P (dP - delta), behind the softcap */
                    FMHA_NAME(gradient_tile)(&w, &block, &w.m.packed, banded, masked, j, n, NULL);
                    FMHA_NAME(add_to_mask)(&block, w.m.grad_scores, sums + (key_step ? j - j0 : 0) * key_step, key_step, row_step);
                }
            }
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element);
    char *to = run->grad_mask.data + (item.b * stride[0] + item.h * stride[1] + item.i0 * stride[2] + item.j0 * stride[3]) * size;
    for (ptrdiff_t i = 0; i < item.rows; i++)
        for (ptrdiff_t k = 0; k < item.cols; k++)
            FMHA_NAME(store_value)(p->mask_element, sums[k * BLOCK_ROWS + i], to + (i * stride[2] + k * stride[3]) * size);
}
