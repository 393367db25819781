/* The items of the "tiled" algorithm backward.
 *
 * Key tiles outside, query blocks inside, those of a long head in sections, one after the other. A head is one item
 * (FMHA_WHOLE), or it is split, with the same bits, where whole heads would leave threads idle: its blocks are prepared
 * (FMHA_PREPARE), its tiles or parts of these are items (FMHA_TURNS) that take turns at the sums of dQ of each block, and the
 * blocks write these (FMHA_RESULTS). Where these are few for the threads, one and some of the blocks are an item (FMHA_SHARES):
 * what each of these blocks gives to dK and dV is added to the sums of the tile in turn, and kept until then. Nobody waits for
 * an item that nobody works on: these are handed out in order. Blocks with rows that want sums of their own say so with the
 * results: then they get them (FMHA_MEND), and heads that have some start again (FMHA_RESTART). */

/* What the items of a head that is split share: what is kept of its blocks, on matrix tiles their sums of grad_q; how many tiles
 * have had their turn at each block; whether rows have got own sums after all keys; of shares, which keys [from[n], to[n]) block
 * n attends, how many have had their turn at each tile, and its sums of grad_k (keys, width) and grad_v (keys, value width),
 * unless the head is a copy, which has them elsewhere. */
typedef struct {
    FMHA_NAME(packed) packed;
    REAL *grad_q, *grad_k, *grad_v;
    int *taken, *shares_taken, *mended;
    ptrdiff_t *from, *to;
} FMHA_NAME(split_head);

/* What an item works on: rows [item.i0, last_row) and keys [item.j0, last_key) of a head, of all of whose rows are `packed` and
 * `grad_q`, the sums on matrix tiles, and of all of whose keys `grad_k` and `grad_v`, if other items or sections add to them,
 * too; of a head that is split, `split`. */
typedef struct {
    FMHA_NAME(backward) w;
    fmha_item item;
    ptrdiff_t last_row, last_key, width, value_width;
    FMHA_NAME(packed) packed;
    FMHA_NAME(split_head) split;
    int matrix, states_known, left;     /* on matrix tiles; `packed` is prepared; some rows are left to vectors */
    int finite;                         /* whether keys and values of the tile at hand are, or -1: nobody has asked */
    REAL *grad_q, *grad_k, *grad_v;
    ptrdiff_t share, keys;              /* blocks, or 0: the head is not split so; keys of an item, whole tiles or parts of one */
#if FMHA_TILES
    FMHA_NAME(gradient_memory) tiles;
    FMHA_NAME(gradient_chunk) chunk;
#endif
} FMHA_NAME(gradients);

/* The memory of a head that is split, into shares or, where share is 0, not; returns the elements, without memory that is all. */
static ptrdiff_t FMHA_NAME(split_layout)(const fmha_problem *p, ptrdiff_t share, REAL *memory, FMHA_NAME(split_head) *to)
{
    const ptrdiff_t rows = FMHA_NAME(head_rows)(p), keys = share ? ROUND_UP(p->Lk, FMHA_SUM_KEYS) : 0;
    const ptrdiff_t summed = p->copies ? 0 : keys;
    const ptrdiff_t ends = share ? rows / BLOCK_ROWS * (ptrdiff_t)(sizeof(ptrdiff_t) / sizeof(REAL)) : 0;
    ptrdiff_t used = FMHA_NAME(packed_layout)(p, rows, memory, &to->packed);
    to->grad_q = FMHA_NAME(take)(memory, &used, p->parts > 0 ? rows * ROUND_UP(p->D, LANES) : 0);
    to->from = (ptrdiff_t *)FMHA_NAME(take)(memory, &used, ends);
    to->to = (ptrdiff_t *)FMHA_NAME(take)(memory, &used, ends);
    to->taken = (int *)FMHA_NAME(take)(memory, &used, rows / BLOCK_ROWS);
    to->mended = (int *)FMHA_NAME(take)(memory, &used, 1);
    to->shares_taken = (int *)FMHA_NAME(take)(memory, &used, keys / FMHA_SUM_KEYS);
    to->grad_k = FMHA_NAME(take)(memory, &used, summed * ROUND_UP(p->D, LANES));
    to->grad_v = FMHA_NAME(take)(memory, &used, summed * ROUND_UP(p->Dv, LANES));
    return ROUND_UP(used, FMHA_CACHE_LINE / (ptrdiff_t)sizeof(REAL));
}

static ptrdiff_t FMHA_NAME(backward_kept)(const fmha_problem *p, ptrdiff_t share)
{
    FMHA_NAME(split_head) unused;
    return FMHA_NAME(split_layout)(p, share, NULL, &unused);
}

/* The block whose first row is i0, what is kept of it, and which of its rows are left to vectors, a bit each. */
static uint64_t FMHA_NAME(gradient_block)(const FMHA_NAME(gradients) *x, ptrdiff_t i0, FMHA_NAME(rows) *block, FMHA_NAME(packed) *own)
{
    const fmha_problem *p = &x->w.run->p;
    *own = FMHA_NAME(packed_from)(p, &x->packed, i0);
    FMHA_NAME(block_rows)(p, block, x->item.b, x->item.h, i0, x->last_row - i0 < BLOCK_ROWS ? x->last_row - i0 : BLOCK_ROWS);
    if (x->w.fewest) block->few.scratch = x->w.m.few;
#if FMHA_TILES
    if (x->matrix) {
        FMHA_NAME(gradient_rows) rows;
        FMHA_NAME(gradient_rows_at)(x->w.run, x->item.b, x->item.h, i0, &rows);
        return *rows.odd;
    }
#endif
    return ALL_ROWS;
}

/* What is kept of a block is ready, but for its sums of grad_q. */
static void FMHA_NAME(begin_block)(FMHA_NAME(gradients) *x, FMHA_NAME(rows) *block, const FMHA_NAME(packed) *own, uint64_t wanted)
{
    if (wanted) FMHA_NAME(prepare_block)(&x->w, block, own, 0, wanted);
    else *own->kind = 0;
}

/* Whether keys, or values, j .. j+n of those that rows may attend are finite. */
static int FMHA_NAME(keys_finite)(const fmha_problem *p, const fmha_array *x, ptrdiff_t width, ptrdiff_t b, ptrdiff_t hkv,
                                  ptrdiff_t j, ptrdiff_t n)
{
    ptrdiff_t low, high;
    fmha_valid_keys(p, b, &low, &high);
    if (low < j) low = j;
    if (high > j + n) high = j + n;
    return low >= high || FMHA_NAME(finite_rows)(p->stored, high - low, width, FMHA_NAME(stored_row)(p, x, b, hkv, low), x->stride[2]);
}

/* Rows of a block that get no weight, being empty or idle: where they fill a vector of rows and keys and values j .. j+n are
 * finite, they attend none. shift: infinite of such rows, and of those of `others`, a bit each. */
static void FMHA_NAME(leave_out_rows)(FMHA_NAME(gradients) *x, FMHA_NAME(rows) *block, const REAL *shift, uint64_t others,
                                      ptrdiff_t j, ptrdiff_t n)
{
    const fmha_problem *p = &x->w.run->p;
    int some = 0;
    for (ptrdiff_t v = 0; v < block->rows && !block->few.scratch; v += LANES) {
        const ptrdiff_t end = v + LANES < block->rows ? v + LANES : block->rows;
        ptrdiff_t r = v;
        while (r < end && shift[r] == (REAL)INFINITY && !(others >> r & 1)) r++;
        if (r < end) continue;
        if (x->finite < 0)
            x->finite = FMHA_NAME(keys_finite)(p, &p->k, p->D, x->item.b, x->item.h, j, n)
                        && FMHA_NAME(keys_finite)(p, &p->v, p->Dv, x->item.b, x->item.h, j, n);
        if (!x->finite) return;
        for (r = v; r < end; r++) block->row0[r] = block->row1[r] = 0;
        some = 1;
    }
    if (some) FMHA_NAME(rows_together)(p, block);
}

/* FMHA_RESTART: nothing has been added to the sums of a block, or in turn to those of the head's keys. */
static void FMHA_NAME(restart_item)(FMHA_NAME(gradients) *x)
{
    const ptrdiff_t i0 = x->item.i0;
    FMHA_NAME(packed) own = FMHA_NAME(packed_from)(&x->w.run->p, &x->packed, i0);
    if (i0 == 0 && x->share) memset(x->split.shares_taken, 0, (size_t)fmha_parts(x->w.run->p.Lk, FMHA_SUM_KEYS) * sizeof(int));
    x->split.taken[i0 / BLOCK_ROWS] = 0;
    memset(own.grad_q, 0, (size_t)(BLOCK_ROWS * x->width) * sizeof(REAL));
    if (x->matrix) memset(x->grad_q + i0 * x->width, 0, (size_t)(BLOCK_ROWS * x->width) * sizeof(REAL));
}

/* FMHA_PREPARE: a block is ready. */
static void FMHA_NAME(prepare_item)(FMHA_NAME(gradients) *x)
{
    FMHA_NAME(rows) block;
    FMHA_NAME(packed) own;
    const ptrdiff_t i0 = x->item.i0;
    const uint64_t wanted = FMHA_NAME(gradient_block)(x, i0, &block, &own);
    if (i0 == 0) *x->split.mended = 0;
    if (x->share) x->split.from[i0 / BLOCK_ROWS] = block.j0, x->split.to[i0 / BLOCK_ROWS] = block.j1;
    FMHA_NAME(restart_item)(x);
    FMHA_NAME(begin_block)(x, &block, &own, wanted);
}

/* FMHA_MEND: rows of a block get own sums, if they want some. */
static void FMHA_NAME(mend_item)(FMHA_NAME(gradients) *x)
{
    FMHA_NAME(rows) block;
    FMHA_NAME(packed) own;
    const uint64_t wanted = FMHA_NAME(gradient_block)(x, x->item.i0, &block, &own);
    if (!wanted || !FMHA_NAME(mended)(&x->w, &block, &own, wanted)) return;
    __atomic_store_n(x->split.mended, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&x->w.run->apart[1], 1, __ATOMIC_RELAXED);
}

/* What the blocks of an item add to grad_k and grad_v of n keys (keys, width): the sums; and of a share how many of its blocks
 * have sums of their own in the scratch, which wait for its turn. ours: it has its turn; begun: something has been added, by
 * this item or those before it. */
typedef struct {
    REAL *total_k, *total_v;
    char *to_k, *to_v;          /* where they are wanted, */
    int direct_k, direct_v;     /* and whether they are made there */
    ptrdiff_t n;
    int kept, ours, begun;
    FMHA_NAME(turn) turn;
} FMHA_NAME(key_sums);

/* The turn is ours: what was kept is added. */
static void FMHA_NAME(claim_sums)(const FMHA_NAME(gradients) *x, FMHA_NAME(key_sums) *sums)
{
    if (sums->kept > 0) {
        FMHA_NAME(add_sums)(sums->n, x->width, sums->kept, TILE_KEYS * x->width, x->w.m.grad_k, sums->begun, sums->total_k);
        FMHA_NAME(add_sums)(sums->n, x->value_width, sums->kept, TILE_KEYS * x->value_width, x->w.m.grad_v, sums->begun, sums->total_v);
        sums->begun = 1;
    }
    sums->kept = 0;
    sums->ours = 1;
}

/* Where a block adds what it has for grad_k and grad_v: to the sums, or in a share whose turn is not yet to some that are kept.
 * Returns whether there is nothing yet. */
static int FMHA_NAME(sums_of_block)(const FMHA_NAME(gradients) *x, FMHA_NAME(key_sums) *sums, REAL **of_keys, REAL **of_values)
{
    if (!sums->ours && FMHA_NAME(has_come)(&sums->turn)) FMHA_NAME(claim_sums)(x, sums);
    if (sums->ours) {
        const int nothing = !sums->begun;
        sums->begun = 1;
        *of_keys = sums->total_k;
        *of_values = sums->total_v;
        return nothing;
    }
    *of_keys = x->w.m.grad_k + sums->kept * TILE_KEYS * x->width;
    *of_values = x->w.m.grad_v + sums->kept * TILE_KEYS * x->value_width;
    sums->kept++;
    return 1;
}

/* The item's turn, a share's, at the sums of keys j .. j+n: those before it that attend some of these have theirs first. last:
 * none has its turn later, so that it writes the sums. Returns whether it has one: it attends some, or is the last one where no
 * share does. */
static int FMHA_NAME(turn_of_share)(const FMHA_NAME(gradients) *x, ptrdiff_t j, ptrdiff_t n, FMHA_NAME(turn) *turn, int *last)
{
    const ptrdiff_t blocks = FMHA_NAME(head_rows)(&x->w.run->p) / BLOCK_ROWS, own = x->item.i0 / BLOCK_ROWS;
    int meets = 0, later = 0;
    *turn = (FMHA_NAME(turn)){x->split.shares_taken + j / x->keys, 0};
    for (ptrdiff_t share = 0; share < blocks && !later; share += x->share)
        for (ptrdiff_t block = share; block < share + x->share && block < blocks; block++) {
            const ptrdiff_t low = x->split.from[block] > j ? x->split.from[block] : j;
            if (low >= x->split.to[block] || low >= j + n) continue;
            if (share < own) turn->number++;
            else if (share == own) meets = 1;
            else later = 1;
            break;
        }
    *last = !later && (meets || (turn->number == 0 && x->last_row == x->w.run->cut.rows));
    return meets || *last;
}

/* The sums of keys j .. j+n as the item finds them: where they are wanted, if one block has all that is added, else in the
 * scratch, or where all items or sections of the head see them. last: the item writes them. Returns whether it has work there. */
static int FMHA_NAME(begin_sums)(const FMHA_NAME(gradients) *x, ptrdiff_t j, ptrdiff_t n, FMHA_NAME(key_sums) *sums, int *last)
{
    const fmha_run *run = x->w.run;
    const fmha_problem *p = &run->p;
    REAL rest;
    const int one = !x->matrix && !x->share && run->cut.rows <= BLOCK_ROWS && p->stored == FMHA_SAME;
    *sums = (FMHA_NAME(key_sums)){
        .to_k = FMHA_NAME(stored_row)(p, &run->grad_k, x->item.b, x->item.h, j),
        .to_v = FMHA_NAME(stored_row)(p, &run->grad_v, x->item.b, x->item.h, j),
        .direct_v = one && p->Dv == x->value_width && run->grad_v.stride[2] == p->Dv, .n = n, .ours = 1,
    };
    FMHA_NAME(folded_scale)(p, &rest);
    sums->direct_k = one && p->D == x->width && run->grad_k.stride[2] == p->D && rest == 1;
    sums->total_k = sums->direct_k ? (REAL *)sums->to_k : x->w.m.grad_k;
    sums->total_v = sums->direct_v ? (REAL *)sums->to_v : x->w.m.grad_v;
    *last = x->last_row == run->cut.rows;
    if (x->grad_k) {
        sums->total_k = x->grad_k + j * x->width;
        sums->total_v = x->grad_v + j * x->value_width;
        sums->begun = x->item.i0 > 0;
    }
    if (!x->share) return 1;
    if (!FMHA_NAME(turn_of_share)(x, j, n, &sums->turn, last)) return 0;
    sums->begun = sums->turn.number > 0;
    sums->ours = 0;
    return 1;
}

/* Whether gradients that the only block of a head made where they are wanted may have NaN in them: of ordinary rows they have
 * none, and to read them would be to wait until they are written. */
static int FMHA_NAME(may_have_nan)(const FMHA_NAME(gradients) *x)
{
    if (x->states_known || (int)*x->packed.kind & (FMHA_NAME(nonfinite_rows) | FMHA_NAME(nonfinite_q) | FMHA_NAME(nonfinite_grad_out))) return 1;
    VEC trace = v_splat(0);
    for (ptrdiff_t r = 0; r < x->last_row; r += LANES) trace = trace + v_load(x->packed.sum + r) * v_splat(0);
    return FMHA_NAME(sum)(trace) != 0;
}

/* The item has added all that it has; multiplied: grad_k, where it is wanted, by the scale, too. */
static void FMHA_NAME(end_sums)(const FMHA_NAME(gradients) *x, FMHA_NAME(key_sums) *sums, int multiplied, int last)
{
    const fmha_run *run = x->w.run;
    const fmha_problem *p = &run->p;
    const ptrdiff_t n = sums->n;
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest);      /* whose product may be too small for a REAL */
    if (!sums->ours) {
        if (!FMHA_NAME(wait_for)(&sums->turn)) return;
        FMHA_NAME(claim_sums)(x, sums);
    }
    if (!sums->begun) {
        memset(sums->total_k, 0, (size_t)(n * x->width) * sizeof(REAL));
        memset(sums->total_v, 0, (size_t)(n * x->value_width) * sizeof(REAL));
    }
    FMHA_NAME(end_turn)(&sums->turn);
    if (!last || run->copies) return;
    const int zeros = x->matrix || run->cut.rows > BLOCK_ROWS;      /* several blocks */
    if (!(sums->direct_k && multiplied))
        FMHA_NAME(write_rows)(p->stored, zeros, n, p->D, factor, rest, sums->total_k, x->width, sums->to_k, run->grad_k.stride[2]);
    if (!sums->direct_v)
        FMHA_NAME(write_rows)(p->stored, zeros, n, p->Dv, 1, 1, sums->total_v, x->value_width, sums->to_v, run->grad_v.stride[2]);
    if (!(sums->direct_k || sums->direct_v) || !FMHA_NAME(may_have_nan)(x)) return;
    if (sums->direct_k) FMHA_NAME(one_nan)(n * x->width, sums->total_k);
    if (sums->direct_v) FMHA_NAME(one_nan)(n * x->value_width, sums->total_v);
}

/* Of heads that lie far away, what the block from row i0 on is packed of is to be fetched beside the scores of others, if it has
 * rows. */
static void FMHA_NAME(fetch_block)(FMHA_NAME(gradients) *x, ptrdiff_t i0)
{
    const fmha_run *run = x->w.run;
    const fmha_problem *p = &run->p;
    const ptrdiff_t rows = x->last_row - i0 < BLOCK_ROWS ? x->last_row - i0 : BLOCK_ROWS;
    if (rows <= 0 || !x->w.far || p->D != p->Dv || p->element != FMHA_SAME) return;
    FMHA_NAME(set_ahead)(p, &x->w.ahead, 0, &p->q, x->item.b, x->item.h, i0, rows);
    FMHA_NAME(set_ahead)(p, &x->w.ahead, 1, &run->grad_out, x->item.b, x->item.h, i0, rows);
    FMHA_NAME(set_ahead)(p, &x->w.ahead, 2, &run->out, x->item.b, x->item.h, i0, rows);
}

/* Keys j .. j+n, a tile or a part of one, and the item's blocks; fresh: those that attend no key before, and at key 0 those that
 * attend none, have not been prepared: what is packed of a block is then near where it is read, however long the head is. */
static void FMHA_NAME(gradient_tile_item)(FMHA_NAME(gradients) *x, ptrdiff_t j, ptrdiff_t n, int fresh)
{
    const fmha_run *run = x->w.run;
    const fmha_problem *p = &run->p;
    const ptrdiff_t summed = x->matrix ? TILE_KEYS : n;
    FMHA_NAME(key_sums) sums;
    int multiplied = 0, last;
    REAL rest;
    const REAL factor = FMHA_NAME(folded_scale)(p, &rest);
    if (!FMHA_NAME(begin_sums)(x, j, n, &sums, &last)) return;
#if FMHA_TILES
    if (x->matrix) FMHA_NAME(gradient_chunk_at)(run, x->item.b, x->item.h, j / TILE_KEYS, &x->chunk);
#endif
    x->finite = -1;
    x->w.k_finite = !x->left || !FMHA_NAME(removes_pairs)(p) || FMHA_NAME(keys_finite)(p, &p->k, p->D, x->item.b, x->item.h, j, n);
    for (ptrdiff_t i0 = x->item.i0; i0 < x->last_row && !fmha_pool_stopped(); i0 += BLOCK_ROWS) {
        FMHA_NAME(rows) block;
        FMHA_NAME(packed) own;
        if (!(fresh && j == 0) && FMHA_NAME(is_beside)(p, x->item.b, i0, x->last_row - i0 < BLOCK_ROWS ? x->last_row - i0 : BLOCK_ROWS, j, n))
            continue;
        const uint64_t wanted = FMHA_NAME(gradient_block)(x, i0, &block, &own);
        if (fresh && block.j0 >= j && block.j0 < j + n) {
            memset(own.grad_q, 0, (size_t)(block.rows * x->width) * sizeof(REAL));
            FMHA_NAME(begin_block)(x, &block, &own, wanted);
            FMHA_NAME(fetch_block)(x, i0 + BLOCK_ROWS);
        }
        block.ahead = &x->w.ahead;
        ptrdiff_t low = block.j0 > j ? block.j0 : j, high = block.j1 < j + n ? block.j1 : j + n;
        if (low >= high) continue;
        const FMHA_NAME(turn) turn = {x->split.taken ? x->split.taken + i0 / BLOCK_ROWS : NULL, (int)(j / x->keys - block.j0 / x->keys)};
        const REAL *shift = own.shift;
#if FMHA_TILES
        FMHA_NAME(gradient_rows) rows;
        if (x->matrix) {
            FMHA_NAME(gradient_rows_at)(run, x->item.b, x->item.h, i0, &rows);
            shift = rows.shift;
        }
#endif
        FMHA_NAME(leave_out_rows)(x, &block, shift, x->matrix ? wanted : 0, j, n);
        FMHA_NAME(mask_rows)(p, &block, low, high);
        if (block.j0 > low) low = block.j0;
        if (block.j1 < high) high = block.j1;
#if FMHA_TILES
        if (x->matrix && low < high) FMHA_NAME(leave_out_on_tiles)(p, &block, &x->chunk, &rows, &low, &high);
#endif
        if (!x->matrix && low < high) FMHA_NAME(leave_out_gradients)(&x->w, &block, &own, &low, &high);
        if (low < high) {
            REAL *of_keys, *of_values;
            const int begins = FMHA_NAME(sums_of_block)(x, &sums, &of_keys, &of_values), writes = begins && !x->matrix && high - low == n;
            if (begins && !writes) {
                memset(of_keys, 0, (size_t)(summed * x->width) * sizeof(REAL));
                memset(of_values, 0, (size_t)(summed * x->value_width) * sizeof(REAL));
            }
#if FMHA_TILES
            if (x->matrix && ~wanted & ALL_ROWS >> (BLOCK_ROWS - block.rows))       /* not all are left to vectors */
                FMHA_NAME(matrix_gradients)(run, &block, &x->chunk, &rows, &x->w.m, &x->tiles, j, low, high, of_keys,
                                            of_values, x->grad_q + i0 * x->width,
                                            &turn);
#endif
            of_keys += (low - j) * x->width;
            of_values += (low - j) * x->value_width;
            if (wanted)
                multiplied = FMHA_NAME(tile_gradients)(&x->w, &block, &own, low, high - low, writes,
                                                       sums.direct_k ? factor : 1, of_keys, of_values,
                                                       own.grad_q, &turn);
        }
        if (FMHA_NAME(wait_for)(&turn)) FMHA_NAME(end_turn_of_block)(&x->w, &block, &own, &turn);
    }
    FMHA_NAME(end_sums)(x, &sums, multiplied, last);
}

/* FMHA_WHOLE: all tiles and blocks; again, if rows have got sums of their own. */
static void FMHA_NAME(whole_item)(FMHA_NAME(gradients) *x)
{
    const fmha_problem *p = &x->w.run->p;
    const ptrdiff_t rows = x->item.rows, step = FMHA_NAME(section_rows)(p);
    FMHA_NAME(rows) block;
    FMHA_NAME(packed) own;
    if (step < rows && !x->grad_k) {
        x->grad_k = x->w.m.all_grad_k;
        x->grad_v = x->w.m.all_grad_v;
    }
    for (int again = 0, done = 0; !done; again = 1) {
        if (again || x->last_key == 0) memset(x->packed.grad_q, 0, (size_t)(rows * x->width) * sizeof(REAL));
        if (x->matrix) memset(x->grad_q, 0, (size_t)(ROUND_UP(rows, BLOCK_ROWS) * x->width) * sizeof(REAL));
        do {            /* without rows grad_k and grad_v are still written */
            x->last_row = rows - x->item.i0 < step ? rows : x->item.i0 + step;
            for (ptrdiff_t j = 0; j < x->last_key; j += TILE_KEYS)
                FMHA_NAME(gradient_tile_item)(x, j, x->last_key - j < TILE_KEYS ? x->last_key - j : TILE_KEYS, !again);
            x->item.i0 = x->last_row;
        } while (x->last_row < rows);
        x->item.i0 = 0;
        done = 1;
        for (ptrdiff_t i0 = 0; i0 < x->last_row && x->last_key > 0 && !again && x->left && !fmha_pool_stopped(); i0 += BLOCK_ROWS) {
            const uint64_t wanted = FMHA_NAME(gradient_block)(x, i0, &block, &own);
            if (wanted && FMHA_NAME(mended)(&x->w, &block, &own, wanted)) done = 0;
        }
    }
}

/* The item's rows of grad_q, and what a pass behind this one needs of them. */
static void FMHA_NAME(write_blocks)(FMHA_NAME(gradients) *x)
{
    const fmha_run *run = x->w.run;
    const fmha_problem *p = &run->p;
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest);
    for (ptrdiff_t i0 = x->item.i0; i0 < x->last_row; i0 += BLOCK_ROWS) {
        FMHA_NAME(rows) block;
        FMHA_NAME(packed) own;
        const uint64_t wanted = FMHA_NAME(gradient_block)(x, i0, &block, &own);
        char apart[BLOCK_ROWS];
        /* What tiles have of their rows; what is kept of these says that they are no rows of vectors, also where the work begins again. */
        const REAL *lse = own.shift, *delta = own.delta;
        uint64_t odd = ALL_ROWS;
        if (x->states_known && !run->again && wanted && p->Lk > 0 && FMHA_NAME(rows_apart)(&x->w, &block, &own, wanted, apart))
            __atomic_store_n(&run->apart[0], 1, __ATOMIC_RELAXED);
#if FMHA_TILES
        if (x->matrix) {
            FMHA_NAME(gradient_rows) rows;
            FMHA_NAME(gradient_rows_at)(run, x->item.b, x->item.h, i0, &rows);
            FMHA_NAME(add_transposed)(block.rows, block.queries, x->width, x->grad_q + i0 * x->width, own.grad_q);
            lse = rows.lse;
            delta = rows.delta;
            odd = *rows.odd;
        }
#endif
        for (ptrdiff_t r = 0; r < block.rows; r++) {
            const ptrdiff_t h = block.head[r], i = block.query[r];
            FMHA_NAME(write_rows)(p->element, 1, 1, p->D, factor, rest, own.grad_q + r * x->width, x->width,
                                  FMHA_NAME(row_in)(p->element, &run->grad_q, x->item.b, h, i), 0);
            if (!run->row_states || p->Lk == 0) continue;
            REAL *state = (REAL *)run->row_states + ((x->item.b * p->H + h) * p->Lq + i) * FMHA_ROW_STATE;
            const int by_vectors = (int)(odd >> r & 1);
            state[FMHA_ROW_SHIFT] = by_vectors ? own.shift[r] : lse[r];
            state[FMHA_ROW_INVERSE] = by_vectors ? own.inverse[r] : 1;
            state[FMHA_ROW_DELTA] = by_vectors ? own.delta[r] : delta[r];
            /* only a sink sees the delta of an empty row, which is 0 whatever grad_out holds */
            if (p->sinks && state[FMHA_ROW_DELTA] - state[FMHA_ROW_DELTA] != 0 && FMHA_NAME(row_is_empty)(p, x->item.b, h,
                    i)) state[FMHA_ROW_DELTA] = 0;
        }
    }
}

/* What a copy of a key/value head gives to grad_k and grad_v: sums (keys, width) and (keys, value width), of whole tiles of keys. */
static ptrdiff_t FMHA_NAME(copy_sums)(const fmha_problem *p)
{
    const ptrdiff_t width = ROUND_UP(p->D, LANES) + ROUND_UP(p->Dv, LANES);
    return p->copies ? ROUND_UP(ROUND_UP(p->Lk, TILE_KEYS) * width, FMHA_CACHE_LINE / (ptrdiff_t)sizeof(REAL)) : 0;
}

static inline void FMHA_NAME(copy_at)(const fmha_run *run, ptrdiff_t copy, REAL **grad_k, REAL **grad_v)
{
    *grad_k = (REAL *)run->copies + copy * FMHA_NAME(copy_sums)(&run->p);
    *grad_v = *grad_k + ROUND_UP(run->p.Lk, TILE_KEYS) * ROUND_UP(run->p.D, LANES);
}

/* Item: some keys of a head, whose gradients are the sums of what its copies gave, the first's plus the second's and so on. */
static void FMHA_NAME(add_copies)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    const ptrdiff_t width = ROUND_UP(p->D, LANES), value_width = ROUND_UP(p->Dv, LANES), n = item.cols, copies = p->copies;
    const ptrdiff_t first = item.h * copies, apart = FMHA_NAME(copy_sums)(p);
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest), *grad_k, *grad_v;
    (void)worker;
    FMHA_NAME(begin_item)(p);
    FMHA_NAME(copy_at)(run, item.b * p->Hkv + first, &grad_k, &grad_v);
    grad_k += item.j0 * width;
    grad_v += item.j0 * value_width;
    FMHA_NAME(add_sums)(n, width, (int)copies - 1, apart, grad_k + apart, 1, grad_k);
    FMHA_NAME(add_sums)(n, value_width, (int)copies - 1, apart, grad_v + apart, 1, grad_v);
    FMHA_NAME(write_rows)(p->stored, 1, n, p->D, factor, rest, grad_k, width,
                          FMHA_NAME(stored_row)(p, &run->grad_k, item.b, first, item.j0), run->grad_k.stride[2]);
    FMHA_NAME(write_rows)(p->stored, 1, n, p->Dv, 1, 1, grad_v, value_width,
                          FMHA_NAME(stored_row)(p, &run->grad_v, item.b, first, item.j0), run->grad_v.stride[2]);
}

/* An item of run->mode; matrix: on matrix tiles, but for the rows that these leave. */
INLINED void FMHA_NAME(backward_item)(const int matrix, const fmha_run *run, ptrdiff_t index, int worker)
{
    const fmha_problem *p = &run->p;
    const int mode = run->mode;
    const fmha_item item = fmha_item_of(&run->cut, index);
    FMHA_NAME(gradients) x = {
        .w = {.run = run, .far = FMHA_NAME(values_far)(run), .few = run->cut.rows <= FMHA_DECODE_ROWS,
              .far_above = run->cut.rows > FMHA_DECODE_ROWS ? HUGE_LSE : FAR_LSE + (run->cut.rows <= LONE_ROWS ? 0 : REAL_LOG((REAL)p->Lk)),
              .fewest = run->cut.rows <= FEW_QUERIES},
        .item = item, .last_row = item.i0 + item.rows, .last_key = item.j0 + item.cols, .width = ROUND_UP(p->D, LANES),
        .value_width = ROUND_UP(p->Dv, LANES), .matrix = matrix, .states_known = mode != FMHA_WHOLE, .left = 1,
        .share = mode == FMHA_WHOLE ? 0 : run->share, .keys = mode == FMHA_WHOLE ? TILE_KEYS : run->cut.col_step,
    };
    REAL *scratch = FMHA_NAME(scratch_of)(run, worker);
    FMHA_NAME(next) next;
    if (mode == FMHA_WHOLE) x.w.next = FMHA_NAME(next_of)(run, index, NEXT_NEAR, NEXT_FAR, 1, &next);
#if FMHA_TILES
    fmha_run own;
    if (matrix && mode == FMHA_WHOLE) {
        own = FMHA_NAME(run_of_head)(run, item.b * p->Hkv + item.h, (char *)scratch);
        FMHA_NAME(each_of_head)(&own, FMHA_NAME(matrix_cut)(p, 0), FMHA_NAME(gradient_pack_keys), worker);
        FMHA_NAME(each_of_head)(&own, fmha_forward_cut(p), FMHA_NAME(gradient_pack_rows), worker);
        scratch += FMHA_NAME(gradient_bytes)(p) / (ptrdiff_t)sizeof(REAL);
        x.w.run = &own;
    }
#endif
    ptrdiff_t used = FMHA_NAME(item_layout)(p, mode, run->share, scratch, &x.w.m);
    FMHA_NAME(begin_item)(p);
    x.packed = x.w.m.packed;
#if FMHA_TILES
    if (matrix) {
        FMHA_NAME(gradient_layout)(p, mode, scratch + ROUND_UP(used, LANES), &x.tiles);
        x.grad_q = x.tiles.grad_q;
    }
#else
    (void)used;
#endif
    if (mode != FMHA_WHOLE) {
        const ptrdiff_t head = item.b * p->Hkv + item.h - run->cut.first;
        FMHA_NAME(split_layout)(p, run->share, (REAL *)run->kept + head * FMHA_NAME(backward_kept)(p, run->share), &x.split);
        x.packed = x.split.packed;
        x.grad_q = x.split.grad_q;
        if (x.share) x.grad_k = x.split.grad_k, x.grad_v = x.split.grad_v;
        if (mode == FMHA_TURNS || mode == FMHA_SHARES) x.w.sums = x.w.m.sums;
        if (run->again && !*x.split.mended) return;
    }
    if (run->copies) FMHA_NAME(copy_at)(run, item.b * p->Hkv + item.h, &x.grad_k, &x.grad_v);
    if (mode == FMHA_RESULTS) {
        FMHA_NAME(write_blocks)(&x);
        return;
    }
#if FMHA_TILES
    if (matrix) {
        FMHA_NAME(rows) block;
        FMHA_NAME(packed) own;
        x.left = 0;
        for (ptrdiff_t i0 = item.i0; i0 < x.last_row; i0 += BLOCK_ROWS) x.left |= FMHA_NAME(gradient_block)(&x, i0, &block, &own) != 0;
        FMHA_NAME(t_configure)();
    }
#endif
    if (mode == FMHA_WHOLE) {
        FMHA_NAME(whole_item)(&x);
    } else if (mode == FMHA_PREPARE) {
        FMHA_NAME(prepare_item)(&x);
    } else if (mode == FMHA_MEND) {
        FMHA_NAME(mend_item)(&x);
    } else if (mode == FMHA_RESTART) {
        FMHA_NAME(restart_item)(&x);
    } else {
        FMHA_NAME(gradient_tile_item)(&x, item.j0, item.cols, 0);
    }
#if FMHA_TILES
    if (matrix) t_release();
#endif
    if (mode == FMHA_WHOLE) FMHA_NAME(write_blocks)(&x);
}

static void FMHA_NAME(tiled_backward)(void *context, ptrdiff_t index, int worker)
{
    FMHA_NAME(backward_item)(0, context, index, worker);
}

#if FMHA_TILES
static void FMHA_NAME(matrix_backward)(void *context, ptrdiff_t index, int worker)
{
    FMHA_NAME(backward_item)(1, context, index, worker);
}
#endif
