/* The "tiled" algorithm on matrix tiles, backward: as backward.inc.h, of whose items (backward_items.inc.h) it is part.
 *
 * With lse saved: P^T = exp(S^T - lse), dP^T = v @ dO^T, dS^T = P^T (dP^T - delta). P^T and dS^T are made in float32 and leave
 * as operands: as first ones of dV and dK, whose sums run over queries, and dS^T as second one of dQ^T, whose sum runs over
 * keys; of bfloat16 there in two parts, since its rounding is most of the error of grad_q (rms 0.7 of that of one part). Keys
 * and values are packed first, then q and grad_out, of heads that are split in passes of their own; that of rows also finds the
 * rows that are left to backward.inc.h: those odd as in matrix_forward.inc.h, by grad_out and lse too, and those whose |lse| is
 * so large that their own sums are taken. In tiles they count as zeros. */

/* What all items share of a chunk of keys. */
typedef struct {
    FMHA_NAME(operand) keys, values, keys_across;       /* of S^T, of dP^T, of dQ^T */
    unsigned char *odd;
    FMHA_NAME(chunk_facts) *facts;
} FMHA_NAME(gradient_chunk);

/* Of a block of rows: q and grad_out as operands of S^T and dP^T, and of dK and dV; of each row what P^T takes off its scores,
 * lse as it came, delta; which rows are odd, a bit each; where there is an additive mask and none is, the powers of q and
 * grad_out. */
typedef struct {
    FMHA_NAME(operand) q, grad_out, q_down, grad_out_down;
    REAL *shift, *lse, *delta, *powers;
    uint64_t *odd;
} FMHA_NAME(gradient_rows);

static FMHA_NAME(operand) FMHA_NAME(take_operand)(char *memory, ptrdiff_t *used, int parts, ptrdiff_t outer, ptrdiff_t terms)
{
    FMHA_NAME(operand) x = {(const uint16_t *)(memory ? memory + *used : NULL), terms / TILE_TERMS, outer * terms, parts};
    *used += parts * outer * terms * (ptrdiff_t)sizeof(uint16_t);
    return x;
}

static ptrdiff_t FMHA_NAME(gradient_chunk_layout)(const fmha_problem *p, char *memory, FMHA_NAME(gradient_chunk) *to)
{
    const ptrdiff_t keys = FMHA_NAME(matrix_keys)(p), width = ROUND_UP(p->D, TILE_TERMS), value_width = ROUND_UP(p->Dv, TILE_TERMS);
    const int parts = FMHA_NAME(parts_of)(p->parts, p->stored);
    ptrdiff_t used = 0;
    to->keys = FMHA_NAME(take_operand)(memory, &used, parts, keys, width);
    to->values = FMHA_NAME(take_operand)(memory, &used, parts, keys, value_width);
    to->keys_across = FMHA_NAME(take_operand)(memory, &used, parts, width, keys);
    to->odd = (unsigned char *)(memory + used);
    used += ROUND_UP(keys, FMHA_CACHE_LINE);
    to->facts = (FMHA_NAME(chunk_facts) *)(memory + used);
    return used + FMHA_CACHE_LINE;
}

static ptrdiff_t FMHA_NAME(gradient_rows_layout)(const fmha_problem *p, char *memory, FMHA_NAME(gradient_rows) *to)
{
    const ptrdiff_t width = ROUND_UP(p->D, TILE_TERMS), value_width = ROUND_UP(p->Dv, TILE_TERMS),
            of_reals = BLOCK_ROWS * (ptrdiff_t)sizeof(REAL);
    const int parts = FMHA_NAME(parts_of)(p->parts, p->element);
    ptrdiff_t used = 0;
    to->q = FMHA_NAME(take_operand)(memory, &used, parts, BLOCK_ROWS, width);
    to->grad_out = FMHA_NAME(take_operand)(memory, &used, parts, BLOCK_ROWS, value_width);
    to->q_down = FMHA_NAME(take_operand)(memory, &used, parts, width, BLOCK_ROWS);
    to->grad_out_down = FMHA_NAME(take_operand)(memory, &used, parts, value_width, BLOCK_ROWS);
    to->shift = (REAL *)(memory + used);
    to->lse = (REAL *)(memory + used + of_reals);
    to->delta = (REAL *)(memory + used + 2 * of_reals);
    used += 3 * of_reals;
    to->odd = (uint64_t *)(memory + used);
    to->powers = (REAL *)(memory + used + sizeof *to->odd);
    return used + FMHA_CACHE_LINE;
}

static ptrdiff_t FMHA_NAME(chunks_size)(const fmha_problem *p)
{
    FMHA_NAME(gradient_chunk) unused;
    return FMHA_NAME(matrix_chunks)(p) * FMHA_NAME(gradient_chunk_layout)(p, NULL, &unused);
}

/* Bytes of the chunks of a head, and of its blocks behind them. */
static ptrdiff_t FMHA_NAME(gradient_bytes)(const fmha_problem *p)
{
    FMHA_NAME(gradient_rows) unused;
    return FMHA_NAME(chunks_size)(p) + fmha_parts(fmha_heads_cut(p).rows, BLOCK_ROWS) * FMHA_NAME(gradient_rows_layout)(p, NULL, &unused);
}

static char *FMHA_NAME(gradient_head)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv)
{
    return run->shared + (b * run->p.Hkv + hkv - run->first_shared) * FMHA_NAME(gradient_bytes)(&run->p);
}

static void FMHA_NAME(gradient_chunk_at)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t n, FMHA_NAME(gradient_chunk) *to)
{
    const fmha_problem *p = &run->p;
    FMHA_NAME(gradient_chunk) unused;
    FMHA_NAME(gradient_chunk_layout)(p, FMHA_NAME(gradient_head)(run, b, hkv) + n * FMHA_NAME(gradient_chunk_layout)(p, NULL, &unused), to);
}

static void FMHA_NAME(gradient_rows_at)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first, FMHA_NAME(gradient_rows) *to)
{
    const fmha_problem *p = &run->p;
    FMHA_NAME(gradient_rows) unused;
    const ptrdiff_t at = FMHA_NAME(chunks_size)(p) + first / BLOCK_ROWS * FMHA_NAME(gradient_rows_layout)(p, NULL, &unused);
    FMHA_NAME(gradient_rows_layout)(p, FMHA_NAME(gradient_head)(run, b, hkv) + at, to);
}

/* Item: a chunk of keys of a head is packed. */
static void FMHA_NAME(gradient_pack_keys)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    FMHA_NAME(gradient_chunk) chunk;
    (void)worker;
    FMHA_NAME(gradient_chunk_at)(run, item.b, item.h, item.j0 / MATRIX_KEYS, &chunk);
    FMHA_NAME(source) keys = {.data = FMHA_NAME(stored_row)(p, &p->k, item.b, item.h, item.j0), .stride = p->k.stride[2],
                              .rows = item.cols, .width = p->D};
    FMHA_NAME(source) values = {.data = FMHA_NAME(stored_row)(p, &p->v, item.b, item.h, item.j0), .stride = p->v.stride[2],
                                .rows = item.cols, .width = p->Dv};
    chunk.facts->some_odd = 0;
    for (int again = 0; again < 2; again++) {
        int large = FMHA_NAME(pack_operand)(FMHA_NAME(first), p->stored, &keys, &chunk.keys);
        large |= FMHA_NAME(pack_operand)(FMHA_NAME(first), p->stored, &values, &chunk.values);
        FMHA_NAME(pack_operand)(FMHA_NAME(first_transposed), p->stored, &keys, &chunk.keys_across);
        if (again || !large) break;
        chunk.facts->some_odd = FMHA_NAME(find_odd)(p->stored, &keys, &values, chunk.odd);
        keys.left_out = values.left_out = chunk.odd;
    }
    FMHA_NAME(set_powers)(p, &keys, &values, chunk.facts);
}

/* Item: a block of rows is packed, after all keys. */
static void FMHA_NAME(gradient_pack_rows)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    FMHA_NAME(rows) block;
    FMHA_NAME(gradient_rows) to;
    (void)worker;
    const fmha_item item = FMHA_NAME(item_rows)(run, index, &block);
    FMHA_NAME(gradient_rows_at)(run, item.b, item.h, item.i0, &to);
    const int natural = FMHA_NAME(natural_scores)(p);
    const char *q[BLOCK_ROWS], *g[BLOCK_ROWS];
    unsigned char left_out[BLOCK_ROWS] = {0};
    uint64_t odd = 0;
    for (ptrdiff_t n = 0; n < FMHA_NAME(matrix_chunks)(p); n++) {
        FMHA_NAME(gradient_chunk) chunk;
        FMHA_NAME(gradient_chunk_at)(run, item.b, item.h, n, &chunk);
        ptrdiff_t j = n * MATRIX_KEYS;
        if (chunk.facts->some_odd) odd |= FMHA_NAME(odd_rows)(p, &block, j, p->Lk - j < MATRIX_KEYS ? p->Lk - j : MATRIX_KEYS, chunk.odd);
    }
    for (ptrdiff_t r = 0; r < BLOCK_ROWS; r++) {
        to.shift[r] = (REAL)INFINITY;       /* 2^(score - inf) = 0: empty rows, odd ones and lanes beyond the rows */
        to.delta[r] = to.lse[r] = 0;
        if (r >= block.rows) continue;
        const char *o = FMHA_NAME(row_of)(p, &run->out, &block, r);
        q[r] = FMHA_NAME(row_of)(p, &p->q, &block, r);
        g[r] = FMHA_NAME(row_of)(p, &run->grad_out, &block, r);
        REAL lse = to.lse[r] = ((const REAL *)run->lse)[FMHA_NAME(row_at)(run, &block, r)];
        REAL delta = to.delta[r] = p->element == FMHA_HALF ? FMHA_NAME(row_product)(FMHA_HALF, p->Dv, g[r], o)
                                   : p->element == FMHA_BFLOAT ? FMHA_NAME(row_product)(FMHA_BFLOAT, p->Dv, g[r], o)
                                   : FMHA_NAME(row_product)(FMHA_SAME, p->Dv, g[r], o);
        if (FMHA_NAME(is_idle)(p, g[r], delta, lse)) continue;
        if (lse == NEGATIVE_INFINITY) to.lse[r] = (REAL)INFINITY;
        if ((lse != NEGATIVE_INFINITY && !(lse < HUGE_LSE && lse > -HUGE_LSE)) || !(delta < HUGE_POWER
                && delta > -HUGE_POWER)) odd |= (uint64_t)1 << r;
        else if (lse != NEGATIVE_INFINITY) to.shift[r] = natural ? lse : lse * (REAL)LOG2_E;
    }
    const FMHA_NAME(source) of_q = {.row = q, .rows = block.rows, .width = p->D, .left_out = left_out};
    const FMHA_NAME(source) of_g = {.row = g, .rows = block.rows, .width = p->Dv, .left_out = left_out};
    for (int again = 0; again < 2; again++) {
        int large = FMHA_NAME(pack_operand)(FMHA_NAME(second_transposed), p->element, &of_q, &to.q);
        large |= FMHA_NAME(pack_operand)(FMHA_NAME(second_transposed), p->element, &of_g, &to.grad_out);
        FMHA_NAME(pack_operand)(FMHA_NAME(second), p->element, &of_q, &to.q_down);
        FMHA_NAME(pack_operand)(FMHA_NAME(second), p->element, &of_g, &to.grad_out_down);
        for (ptrdiff_t r = 0; r < block.rows && large; r++)
            if (FMHA_NAME(odd_row)(p->element, q[r], p->D) || FMHA_NAME(odd_row)(p->element, g[r], p->Dv)) odd |= (uint64_t)1 << r;
        if (!odd || again) break;
        for (ptrdiff_t r = 0; r < block.rows; r++) {
            left_out[r] = (unsigned char)(odd >> r & 1);
            if (left_out[r]) to.shift[r] = (REAL)INFINITY, to.delta[r] = 0;
        }
    }
    *to.odd = odd;
    if (odd || !p->additive_mask.data) return;
    to.powers[0] = FMHA_NAME(source_power)(p->element, &of_q);
    to.powers[1] = FMHA_NAME(source_power)(p->element, &of_g);
}

/* Scratch of one thread, behind that of backward.inc.h: P^T and dS^T as first operands, dS^T as second one; sums of dQ^T (width,
 * queries) of all blocks of a head where it is one item. */
typedef struct {
    FMHA_NAME(operand) weights, grad_scores, grad_scores_down;
    REAL *grad_q;
} FMHA_NAME(gradient_memory);

/* Parts of dS^T in dQ^T. */
static int FMHA_NAME(down_parts)(const fmha_problem *p)
{
    return p->parts == 1 && p->element == FMHA_BFLOAT ? 2 : p->parts;
}

static ptrdiff_t FMHA_NAME(gradient_layout)(const fmha_problem *p, int mode, REAL *memory, FMHA_NAME(gradient_memory) *m)
{
    ptrdiff_t used = 0, bytes = 0, rows = mode == FMHA_WHOLE ? FMHA_NAME(head_rows)(p) : 0;
    m->weights = FMHA_NAME(take_operand)((char *)memory, &bytes, p->parts, MATRIX_KEYS, BLOCK_ROWS);
    m->grad_scores = FMHA_NAME(take_operand)((char *)memory, &bytes, p->parts, MATRIX_KEYS, BLOCK_ROWS);
    m->grad_scores_down = FMHA_NAME(take_operand)((char *)memory, &bytes, FMHA_NAME(down_parts)(p), BLOCK_ROWS, MATRIX_KEYS);
    used = bytes / (ptrdiff_t)sizeof(REAL);
    m->grad_q = FMHA_NAME(take)(memory, &used, rows * ROUND_UP(p->D, LANES));
    return used;
}

/* Of a whole head, its operands come first. */
static ptrdiff_t FMHA_NAME(gradient_scratch)(const fmha_problem *p, int mode, ptrdiff_t share)
{
    FMHA_NAME(gradient_memory) unused;
    const ptrdiff_t operands = mode == FMHA_WHOLE ? FMHA_NAME(gradient_bytes)(p) / (ptrdiff_t)sizeof(REAL) : 0;
    return operands + FMHA_NAME(backward_scratch)(p, mode, share) + LANES + FMHA_NAME(gradient_layout)(p, mode, NULL, &unused);
}

/* Scores and grad_weights (keys, queries), of two vectors of queries or one and keys [low, high), -> P^T and dS^T as operands;
 * keys in pairs. slope: of the softcap, kept: what dropout has drawn, or NULL. */
INLINED void FMHA_NAME(gradient_operands_of)(const int parts, const int down_parts, const int vectors, const int natural, const int plain,
                                             ptrdiff_t low, ptrdiff_t high, ptrdiff_t queries, REAL factor, const REAL *s, const REAL *g,
                                             const REAL *slope, const REAL *kept, const REAL *shifts, const REAL *deltas, ptrdiff_t v,
                                             const FMHA_NAME(gradient_memory) *m)
{
    const int n = 2 * vectors;
    VEC shift[2], delta[2], zero = v_splat(0), factors = v_splat(factor);
#pragma GCC unroll 2
    for (int i = 0; i < vectors; i++) {
        shift[i] = v_load(shifts + (v + i) * LANES);
        delta[i] = v_load(deltas + (v + i) * LANES);
    }
    uint16_t *first_p = (uint16_t *)m->weights.tiles, *first_d = (uint16_t *)m->grad_scores.tiles,
            *second_d = (uint16_t *)m->grad_scores_down.tiles;
    for (ptrdiff_t k = low; k < high; k += 2) {
        VEC p[4], d[4];             /* of key k, then of the next one */
        EACH(i) {
            const ptrdiff_t at = (k + i / vectors) * queries + (v + i % vectors) * LANES;
            VEC score = v_load(s + at);
            p[i] = natural ? (score - shift[i % vectors]) * factors : score * factors - shift[i % vectors];
        }
        FMHA_NAME(powers)(parts, n, p);
        EACH(i) {
            const ptrdiff_t at = (k + i / vectors) * queries + (v + i % vectors) * LANES;
            d[i] = p[i] * (v_load(g + at) - delta[i % vectors]);
            if (!plain && slope) d[i] = d[i] * v_load(slope + at);
            if (!plain && kept) p[i] = p[i] * v_load(kept + at);
        }
        const ptrdiff_t row = (k / TILE_ROWS * m->weights.step + v / 2) * TILE_SIZE + k % TILE_ROWS * TILE_TERMS;
        const ptrdiff_t down = (v * m->grad_scores_down.step + k / TILE_TERMS) * TILE_SIZE + k % TILE_TERMS / 2 * TILE_TERMS;
#pragma GCC unroll 2
        for (int e = 0; e < 2; e++) {
            FMHA_NAME(store_parts)(parts, 0, p[e * vectors], vectors > 1 ? p[e * vectors + 1] : zero,
                                   first_p + row + e * TILE_TERMS, m->weights.plane);
            FMHA_NAME(store_parts)(parts, 0, d[e * vectors], vectors > 1 ? d[e * vectors + 1] : zero, first_d + row + e * TILE_TERMS,
                                   m->grad_scores.plane);
        }
#pragma GCC unroll 2
        for (int i = 0; i < vectors; i++)
            FMHA_NAME(store_parts)(down_parts, 1, d[i], d[vectors + i], second_d + down + i * m->grad_scores_down.step * TILE_SIZE,
                                   m->grad_scores_down.plane);
    }
}

/* The keys that each 32 queries of a block attend, by tiles of terms but for the last ones. */
typedef struct {
    ptrdiff_t low[BLOCK_ROWS / TILE_TERMS], high[BLOCK_ROWS / TILE_TERMS];
} FMHA_NAME(spans);

static __attribute__((noinline)) void FMHA_NAME(gradient_operands)(const fmha_problem *p, const FMHA_NAME(spans) *keys,
        ptrdiff_t queries, REAL factor, int natural,
    const REAL *s, const REAL *g, const REAL *slope, const REAL *kept, const FMHA_NAME(gradient_rows) *rows,
            const FMHA_NAME(gradient_memory) *m)
{
    for (ptrdiff_t v = 0; v * LANES < queries; v += 2) {
        const int two = (v + 1) * LANES < queries, plain = !natural && !slope && !kept;
#define OPERANDS(parts, down, vectors, natural, plain) \
    FMHA_NAME(gradient_operands_of)(parts, down, vectors, natural, plain, keys->low[v / 2], keys->high[v / 2], queries, factor, s, g, slope, kept, rows->shift, rows->delta, v, m)
#define OF_PARTS(parts, down) \
    if (two && plain) OPERANDS(parts, down, 2, 0, 1); \
    else if (two && natural) OPERANDS(parts, down, 2, 1, 0); \
    else if (two) OPERANDS(parts, down, 2, 0, 0); \
    else if (natural) OPERANDS(parts, down, 1, 1, 0); \
    else OPERANDS(parts, down, 1, 0, 0)
        if (p->parts == 2) { OF_PARTS(2, 2); }
        else if (m->grad_scores_down.parts == 2) { OF_PARTS(1, 2); }
        else { OF_PARTS(1, 1); }
#undef OF_PARTS
#undef OPERANDS
    }
}

/* sums (keys, width) <- sums + x (keys, rows) @ y (rows, width) of the keys that some of the rows attend, `whole` of them, and
 * of these rows. */
static void FMHA_NAME(add_by_keys)(const FMHA_NAME(spans) *keys, ptrdiff_t rows, ptrdiff_t whole, ptrdiff_t width,
                                   const FMHA_NAME(operand) *x,
                                   const FMHA_NAME(operand) *y, REAL *sums)
{
    const ptrdiff_t depth = (rows + TILE_TERMS - 1) / TILE_TERMS;
    for (ptrdiff_t k = 0, end, first = 0, last = 0; k < whole; k = end) {
        for (end = k; end < whole; end += TILE_TERMS) {
            ptrdiff_t from = depth, to = 0;
            for (ptrdiff_t t = 0; t < depth; t++)
                if (keys->low[t] <= end && end < keys->high[t]) {
                    if (t < from) from = t;
                    to = t + 1;
                }
            if (end > k && (from != first || to != last)) break;
            first = from;
            last = to;
        }
        if (first >= last) continue;
        const ptrdiff_t many = (end < whole ? end : whole) - k, terms = (last < depth ? last * TILE_TERMS : rows) - first * TILE_TERMS;
        const FMHA_NAME(operand) a = FMHA_NAME(operand_at)(x, k / TILE_ROWS, first), b = FMHA_NAME(operand_at)(y, 0, first);
        FMHA_NAME(tile_product)(1, many, width, terms, &a, &b, sums + k * width, width);
    }
}

/* As leave_out_gradients: of keys low .. high, each row is left those that an additive mask does not drown, if it is 0 there. */
static void FMHA_NAME(leave_out_on_tiles)(const fmha_problem *p, FMHA_NAME(rows) *block, const FMHA_NAME(gradient_chunk) *chunk,
                                          const FMHA_NAME(gradient_rows) *rows, ptrdiff_t *low, ptrdiff_t *high)
{
    ptrdiff_t from[BLOCK_ROWS], to[BLOCK_ROWS];
    REAL least = (REAL)INFINITY, most;
    if (!block->additive || FMHA_NAME(rescored)(p) || *rows->odd || FMHA_NAME(low_runs)(p, block, *low, *high, 1, from, to,
            &most) <= 0) return;
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (rows->shift[r] < least) least = rows->shift[r];
    least += (REAL)EXP_ZERO;
    const REAL q = FMHA_NAME(scaled_power)(p, rows->powers[0]), v = (1 + rows->powers[1]) * (1 + chunk->facts->values);
    if (!(least > most) || !(least > FMHA_NAME(drowned_scores)(most, q, chunk->facts->keys, v))) return;
    FMHA_NAME(take_runs)(p, block, from, to);
    if (block->j0 > *low) *low = block->j0;
    if (block->j1 < *high) *high = block->j1;
}

/* One block against keys [low, high) of a tile that begins at key j: adds to the tile's grad_v (keys, Dv) and grad_k (keys, D)
 * and to grad_q^T (D, queries), at its turn. */
static void FMHA_NAME(matrix_gradients)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(gradient_chunk) *chunk,
    const FMHA_NAME(gradient_rows) *rows, const FMHA_NAME(backward_memory) *w, const FMHA_NAME(gradient_memory) *m,
            ptrdiff_t j, ptrdiff_t low,
    ptrdiff_t high, REAL *grad_k, REAL *grad_v, REAL *grad_q, const FMHA_NAME(turn) *turn)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t skip = (low - j) / TILE_TERMS * TILE_TERMS, n = high - j - skip, whole = ROUND_UP(n, TERM_GRAIN),
            queries = block->queries;
    const ptrdiff_t columns = queries / LANES, width = ROUND_UP(p->D, LANES), value_width = ROUND_UP(p->Dv, LANES),
            depth = (queries + TILE_TERMS - 1) / TILE_TERMS;
    const int natural = FMHA_NAME(natural_scores)(p);
    REAL *s = w->scores, *g = w->grad_scores, *slope = p->softcap != 0 ? w->slopes : NULL, *kept = p->dropout.factor != 0 ? w->kept : NULL;
    int touched = FMHA_NAME(touched)(block, j + skip, n);
    if (touched && FMHA_NAME(tile_removed)(p, block, j + skip, n)) return;
    const int banded = FMHA_NAME(set_spans)(block, j + skip, n, KEY_STEP) || n < whole;
    FMHA_NAME(spans) attended;
    for (ptrdiff_t t = 0; t < depth; t++) {
        attended.low[t] = 0;
        attended.high[t] = whole;
        if (banded) FMHA_NAME(span_of_two)(block, 2 * t, whole, &attended.low[t], &attended.high[t]);
    }
    /* Without a band all queries at once. */
    const ptrdiff_t times = banded ? depth : 1;
    for (ptrdiff_t t = 0; t < times; t++) {
        const ptrdiff_t from = skip + attended.low[t], many = attended.high[t] - attended.low[t];
        const ptrdiff_t wide = banded ? TWO_GROUPS(queries, 2 * t) * TILE_ROWS : queries;
        const ptrdiff_t at = attended.low[t] * queries + t * TILE_TERMS;
        const FMHA_NAME(operand) keys = FMHA_NAME(operand_at)(&chunk->keys, from / TILE_ROWS, 0),
                q = FMHA_NAME(operand_at)(&rows->q, 2 * t, 0);
        const FMHA_NAME(operand) values = FMHA_NAME(operand_at)(&chunk->values, from / TILE_ROWS, 0),
                grad_out = FMHA_NAME(operand_at)(&rows->grad_out, 2 * t, 0);
        /* scores^T (keys, queries) <- k (keys, D) @ q^T (D, queries) */
        FMHA_NAME(tile_product)(0, many, wide, p->D, &keys, &q, s + at, queries);
        /* grad_weights^T (keys, queries) <- v (keys, Dv) @ grad_out^T (Dv, queries) */
        FMHA_NAME(tile_product)(0, many, wide, p->Dv, &values, &grad_out, g + at, queries);
    }
    for (ptrdiff_t e = 0; natural && e < n * queries; e += LANES) v_store(s + e, v_load(s + e) * (REAL)p->scale);
    if (kept) FMHA_NAME(drop_tile)(p, block, j + skip, g, kept);
    if (touched || FMHA_NAME(rescored)(p)) FMHA_NAME(mask_tile)(p, block, j + skip, s, slope);
    for (ptrdiff_t v = 0; banded && v < columns; v++)
        for (ptrdiff_t k = attended.low[v / 2]; k < attended.high[v / 2]; k++)
            if (k < block->low[v] || k >= block->high[v]) {
                v_store(s + k * queries + v * LANES, v_splat(NEGATIVE_INFINITY));
                if (slope) v_store(slope + k * queries + v * LANES, v_splat(0));
                if (kept) v_store(kept + k * queries + v * LANES, v_splat(0));
            }
    FMHA_NAME(gradient_operands)(p, &attended, queries, (REAL)(natural ? LOG2_E : p->scale * LOG2_E), natural, s, g, slope, kept, rows, m);
    /* grad_v (keys, Dv) <- grad_v + P^T (keys, queries) @ grad_out (queries, Dv) */
    FMHA_NAME(add_by_keys)(&attended, block->rows, whole, value_width, &m->weights, &rows->grad_out_down, grad_v + skip * value_width);
    /* grad_k (keys, D) <- grad_k + dS^T (keys, queries) @ q (queries, D) */
    FMHA_NAME(add_by_keys)(&attended, block->rows, whole, width, &m->grad_scores, &rows->q_down, grad_k + skip * width);
    /* grad_q^T (D, queries) <- grad_q^T + k^T (D, keys) @ dS^T (keys, queries) */
    if (!FMHA_NAME(wait_for)(turn)) return;
    for (ptrdiff_t t = 0; t < times; t++) {
        const ptrdiff_t low = attended.low[t] / TILE_TERMS, terms = attended.high[t] - attended.low[t];
        const ptrdiff_t wide = banded ? TWO_GROUPS(queries, 2 * t) * TILE_ROWS : queries;
        const FMHA_NAME(operand) across = FMHA_NAME(operand_at)(&chunk->keys_across, 0, skip / TILE_TERMS + low),
                down = FMHA_NAME(operand_at)(&m->grad_scores_down, 2 * t, low);
        FMHA_NAME(tile_product)(1, width, wide, terms, &across, &down, grad_q + t * TILE_TERMS, queries);
    }
}

/* rows (rows, width) <- rows + sums^T (width, queries). */
static void FMHA_NAME(add_transposed)(ptrdiff_t many, ptrdiff_t queries, ptrdiff_t width, const REAL *sums, REAL *rows)
{
    for (ptrdiff_t q = 0; q < queries; q += LANES)
        for (ptrdiff_t d = 0; d < width; d += LANES) {
            VEC row[TILE_ROWS];
#pragma GCC unroll 16
            for (int l = 0; l < TILE_ROWS; l++) row[l] = v_load(sums + (d + l) * queries + q);
            FMHA_NAME(transpose_words)((void *)row);
#pragma GCC unroll 16
            for (int l = 0; l < TILE_ROWS; l++) {
                if (q + l >= many) break;
                REAL *to = rows + (q + l) * width + d;
                v_store(to, v_load(to) + row[l]);
            }
        }
}
