/* The items of the "tiled" algorithm forward: blocks of query rows whose softmaxes forward.inc.h makes become rows of out and
 * lse, those whose sums are not finite, or tiny, by a second pass; and, where they are asked for, weights. */

static inline void FMHA_NAME(write_lse)(const fmha_run *run, const FMHA_NAME(rows) *block, ptrdiff_t r, REAL peak, REAL total)
{
    if (!run->lse) return;
    REAL *lse = (REAL *)run->lse + (block->b * run->p.H + block->head[r]) * run->p.Lq + block->query[r];
    const REAL value = (peak == NEGATIVE_INFINITY ? 0 : peak) + REAL_LOG(total);
    *lse = total == 0 ? NEGATIVE_INFINITY : value == value ? value : (REAL)NAN;
}

/* Row r of a block's results: of out, or what round_rows makes it of. */
static inline REAL *FMHA_NAME(out_row)(const fmha_run *run, const FMHA_NAME(rows) *block, ptrdiff_t r, const FMHA_NAME(forward_memory) *m)
{
    if (run->p.element != FMHA_SAME) return m->result + r * block->value_width;
    return (REAL *)FMHA_NAME(row_in)(FMHA_SAME, &run->out, block->b, block->head[r], block->query[r]);
}

#define ALL_ROWS (~(uint64_t)0)

/* The results of rows of the stacked heads of a group, from row `first` on, rounded: of those wanted, a bit each. */
static void FMHA_NAME(round_rows)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first, ptrdiff_t rows, const REAL *result,
                                  uint64_t wanted)
{
    const fmha_problem *p = &run->p;
    if (p->element == FMHA_SAME) return;
    ptrdiff_t group = p->H / p->Hkv, value_width = ROUND_UP(p->Dv, LANES);
    for (ptrdiff_t r = 0; r < rows; r++) {
        ptrdiff_t row = first + r;
        if (!(wanted >> r & 1)) continue;
        FMHA_NAME(store_rows)(p->element, 1, p->Dv, result + r * value_width, 0,
                              FMHA_NAME(row_in)(p->element, &run->out, b, hkv * group + row / p->Lq, row % p->Lq), 0);
    }
}

/* The block's rows of out and lse from its sums, which forward_block has left unless it has written out: those wanted, a bit
 * each. Returns which are tiny, and in finite whether all sums are. */
static uint64_t FMHA_NAME(write_block)(const fmha_run *run, const FMHA_NAME(rows) *block, const FMHA_NAME(forward_memory) *m,
                                       uint64_t wanted, int *finite)
{
    const fmha_problem *p = &run->p;
    const REAL *out = m->out, *peak = m->peak, *total = m->total;
    const ptrdiff_t bytes = p->Dv * (ptrdiff_t)sizeof(REAL), ahead = FMHA_NAME(written_far)(p) ? WRITTEN_AHEAD : BLOCK_ROWS;
    uint64_t some = 0, tiny = 0;
    VEC trace = block->written ? v_load(block->results.trace) : v_splat(0);
    if (block->written) {       /* all rows, of a single head */
        const REAL *first = FMHA_NAME(out_row)(run, block, 0, m);
        for (ptrdiff_t r = 0; r < block->rows; r++, first += run->out.stride[2])
            if (REAL_ABS(*first) <= 2 * TINY) some |= (uint64_t)1 << r;
        for (ptrdiff_t r = 0; run->lse && r < block->rows; r++) FMHA_NAME(write_lse)(run, block, r, peak[r], total[r]);
    }
    for (ptrdiff_t r = 0; !block->written && r < block->rows; r++) {
        if (!(wanted >> r & 1)) continue;
        if (r + ahead < block->rows) {
            const char *later = (const char *)FMHA_NAME(out_row)(run, block, r + ahead, m);
            for (ptrdiff_t byte = 0; byte < bytes; byte += FMHA_CACHE_LINE) v_prefetch_written(later + byte);
        }
        const REAL *sums = out + r * block->value_width;
        trace = FMHA_NAME(divided_row)(p->Dv, sums, total[r], FMHA_NAME(out_row)(run, block, r, m), trace);
        /* an infinite sink leaves sums of 0 */
        if (total[r] != total[r]) FMHA_NAME(fill)(p->Dv, FMHA_NAME(out_row)(run, block, r, m), total[r]);
        FMHA_NAME(write_lse)(run, block, r, peak[r], total[r]);
        const REAL bound = 2 * TINY * total[r];     /* hardly a row is: looked at by what is at hand */
        if (total[r] != 0 && p->Dv > 0 && REAL_ABS(sums[0]) <= bound) some |= (uint64_t)1 << r;
    }
    /* by itself: to read behind a store of a part of a vector is to wait for it */
    for (ptrdiff_t r = 0; r < block->rows && some >> r; r++)
        if (some >> r & 1 && FMHA_NAME(tiny_row)(p->Dv, FMHA_NAME(out_row)(run, block, r, m))) tiny |= (uint64_t)1 << r;
    *finite = FMHA_NAME(sum)(trace) == 0;
    for (ptrdiff_t r = 0; r < block->rows && !*finite; r++)
        if (wanted >> r & 1) FMHA_NAME(one_nan)(p->Dv, FMHA_NAME(out_row)(run, block, r, m));
    return tiny;
}

/* Of the values of keys [from, to), taken so many at a time: whether some finite one is so large that sums may overflow; or, where it
 * is not `large` that counts, whether one is not 0. */
static int FMHA_NAME(some_value)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t from, ptrdiff_t to, int large, ptrdiff_t step,
                                 REAL *converted)
{
    for (ptrdiff_t j = from, n; j < to; j += n) {
        ptrdiff_t ld;
        n = to - j < step ? to - j : step;
        const REAL *values = FMHA_NAME(computed_rows)(p, &p->v, b, hkv, j, n, p->Dv, converted, &ld);
        if (large ? FMHA_NAME(exceeds)(n, p->Dv, values, ld, 1, LARGE_POWER) : FMHA_NAME(nonzero)(n, p->Dv, values, ld)) return 1;
    }
    return 0;
}

/* What is not finite in a row of results, from its sums of probabilities that were reduced. */
static void FMHA_NAME(limited_row)(const fmha_problem *p, const REAL *sums, REAL total, REAL *to)
{
    const REAL factor = FMHA_NAME(reduction)(p);
    const VEC zero = v_splat(0);
    for (ptrdiff_t d = 0; d < p->Dv; d += LANES) {
        const VEC x = v_load_n(to + d, p->Dv - d, 0), limited = v_load(sums + d) / v_splat(total) * v_splat(1 / factor);
        v_store_n(to + d, v_select(v_equal(x - x, zero), x, limited), p->Dv - d);
    }
}

/* Sums of large finite values may overflow before the division: what is not finite in out again, with probabilities so small that
 * no sum can, unless the block has such sums. What is finite already, and lse, stay as they are. */
static void FMHA_NAME(large_rows)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(forward_memory) *m, uint64_t wanted,
                                  int careful)
{
    const fmha_problem *p = &run->p;
    const REAL *sums = block->limited ? m->limited : m->out;
    if (!block->limited) {
        if (!FMHA_NAME(some_value)(p, block->b, block->hkv, block->j0, block->j1, 1, TILE_KEYS, m->converted)) return;
        FMHA_NAME(forward_block)(run, block, m, FMHA_NAME(reduced) | (careful ? FMHA_NAME(careful) : 0));
    }
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (wanted >> r & 1) FMHA_NAME(limited_row)(p, sums + r * block->value_width, m->total[r], FMHA_NAME(out_row)(run, block, r, m));
}

/* The tiny rows again, from values so much larger that nothing of them is lost. */
static void FMHA_NAME(tiny_rows)(const fmha_run *run, FMHA_NAME(rows) *block, uint64_t tiny,
                                 const FMHA_NAME(forward_memory) *m)
{
    const fmha_problem *p = &run->p;
    if (!FMHA_NAME(some_value)(p, block->b, block->hkv, block->j0, block->j1, 0, TILE_KEYS, m->converted)) return;
    FMHA_NAME(forward_block)(run, block, m, FMHA_NAME(careful) | FMHA_NAME(raised));
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (tiny >> r & 1)
            FMHA_NAME(lower_row)(p->Dv, m->out + r * block->value_width, m->total + r, FMHA_NAME(out_row)(run, block, r, m));
}

/* Whether key j's value may be so small that rows that attend only such are tiny: its first number is, and not 0. */
static inline int FMHA_NAME(tiny_value)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j)
{
    const REAL most = TINY / 2;
    INT bits, bound;
    if (p->stored != FMHA_SAME || p->dropout.factor != 0 || p->Dv == 0) return 0;       /* dropout makes them larger */
    memcpy(&bits, FMHA_NAME(stored_row)(p, &p->v, b, hkv, j), sizeof bits);     /* as a number, a subnormal one counts as 0 */
    memcpy(&bound, &most, sizeof bound);
    bits &= ~SIGN_BIT;
    return 0 < bits && bits < bound;
}

/* Whether sums with the value of key j may overflow: some of its first numbers are so large. Others may, too: they are found out behind. */
static inline int FMHA_NAME(large_value)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t j)
{
    if (p->stored != FMHA_SAME || p->Dv == 0) return 0;
    const VEC size = v_abs(v_load_n((const REAL *)FMHA_NAME(stored_row)(p, &p->v, b, hkv, j), p->Dv, 0));
    return v_any(v_greater(size, v_splat(LARGEST / (1 << 24))) & ~v_greater(size, v_splat(LARGEST)));
}

/* Whether all values that the block's rows are products of are so small that these are tiny, and some are not 0. Hardly more than one is
 * looked at where they are not. */
static int FMHA_NAME(tiny_values)(const fmha_problem *p, const FMHA_NAME(rows) *block)
{
    const ptrdiff_t from = block->j0 / KEY_STEP * KEY_STEP;     /* as they are multiplied */
    IVEC some = i_splat(0), others = i_splat(0);
    if (!FMHA_NAME(tiny_value)(p, block->b, block->hkv, from)) return 0;
    for (ptrdiff_t j = from; j < block->j1 && !v_any(others); j++) {
        const REAL *v = (const REAL *)FMHA_NAME(stored_row)(p, &p->v, block->b, block->hkv, j);
        for (ptrdiff_t d = 0; d < p->Dv; d += LANES) {
            const IVEC size = v_bits(v_load_n(v + d, p->Dv - d, 0)) & ~i_splat(SIGN_BIT);
            some = some | size;
            others = others | ~i_greater(v_bits(v_splat(TINY / 2)), size);
        }
    }
    return v_any(i_greater(some, i_splat(0))) && !v_any(others);
}

/* As finish_rows, of a block that tiny_rows would do again: at once as that does. */
static void FMHA_NAME(raised_rows)(const fmha_run *run, const fmha_item *item, FMHA_NAME(rows) *block, const FMHA_NAME(forward_memory) *m,
                                   uint64_t wanted)
{
    const fmha_problem *p = &run->p;
    FMHA_NAME(forward_block)(run, block, m, FMHA_NAME(raised) | FMHA_NAME(tiny));
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (!(wanted >> r & 1)) continue;
        REAL *to = FMHA_NAME(out_row)(run, block, r, m);
        FMHA_NAME(fill)(p->Dv, to, 0);
        if (m->total[r] != 0) FMHA_NAME(lower_row)(p->Dv, m->out + r * block->value_width, m->total + r, to);
        FMHA_NAME(write_lse)(run, block, r, m->peak[r], m->total[r]);
    }
    FMHA_NAME(round_rows)(run, item->b, item->h, item->i0, item->rows, m->result, wanted);
}

/* The block of rows that forward item n is. */
static fmha_item FMHA_NAME(item_rows)(const fmha_run *run, ptrdiff_t n, FMHA_NAME(rows) *block)
{
    const fmha_item item = fmha_item_of(&run->cut, n);
    if (item.rows > 0) FMHA_NAME(block_rows)(&run->p, block, item.b, item.h, item.i0, item.rows);
    return item;
}

/* Whether the values of keys [from, to) are known to be finite: then what is not in sums of them is no matter of the firewall. */
static inline int FMHA_NAME(values_finite)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t from, ptrdiff_t to)
{
    if (from >= to || p->stored != FMHA_SAME) return from >= to;        /* those that are converted are not asked */
    return FMHA_NAME(all_finite)(to - from, p->Dv, FMHA_NAME(stored_row)(p, &p->v, b, hkv, from), p->v.stride[2]);
}

/* The rows of a block that are wanted, a bit each, of out and lse, from a first pass over its keys; partly: some of its tiles
 * were touched. The firewall costs finite input nothing: only where a NaN or Inf shows in the result is the block done again,
 * with zeros for what is not finite in partly removed tiles and the allowed pairs added; rows that attend none of it get the
 * same bits as ever. */
static void FMHA_NAME(finish_rows)(const fmha_run *run, const fmha_item *item, FMHA_NAME(rows) *block, const FMHA_NAME(forward_memory) *m,
                                   uint64_t wanted, int partly)
{
    const fmha_problem *p = &run->p;
    int finite;
    uint64_t tiny = FMHA_NAME(write_block)(run, block, m, wanted, &finite);
    const int careful = !finite && partly && !FMHA_NAME(values_finite)(p, block->b, block->hkv, block->j0 / KEY_STEP * KEY_STEP, block->j1);
    if (careful) {
        FMHA_NAME(forward_block)(run, block, m, FMHA_NAME(careful));
        tiny = FMHA_NAME(write_block)(run, block, m, wanted, &finite);
    }
    if (!finite) FMHA_NAME(large_rows)(run, block, m, wanted, careful);
    if (tiny) FMHA_NAME(tiny_rows)(run, block, tiny, m);
    FMHA_NAME(round_rows)(run, item->b, item->h, item->i0, item->rows, m->result, wanted);
}

/* The same of a block that attends no key. */
static void FMHA_NAME(empty_rows)(const fmha_run *run, const fmha_item *item, const FMHA_NAME(rows) *block,
                                  const FMHA_NAME(forward_memory) *m,
                                  uint64_t wanted)
{
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (!(wanted >> r & 1)) continue;
        FMHA_NAME(fill)(run->p.Dv, FMHA_NAME(out_row)(run, block, r, m), 0);
        FMHA_NAME(write_lse)(run, block, r, NEGATIVE_INFINITY, 0);
    }
    FMHA_NAME(round_rows)(run, item->b, item->h, item->i0, item->rows, m->result, wanted);
}

/* The same of a block without keys that an additive mask probably drowns: those at the ends of each row, if the mask is 0 at the
 * others, or else those at the ends of tiles. Returns -1, and the block is as before, where they get something. */
static int FMHA_NAME(hopeful_block)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(forward_memory) *m, int purpose)
{
    const fmha_problem *p = &run->p;
    const FMHA_NAME(rows) before = *block;
    ptrdiff_t from[BLOCK_ROWS], to[BLOCK_ROWS];
    REAL most;
    const int runs = FMHA_NAME(low_runs)(p, block, 0, p->Lk, p->sinks != NULL, from, to, &most);
    if (runs < 0) return -1;        /* beside nothing else, such keys get something */
    if (runs) FMHA_NAME(take_runs)(p, block, from, to);
    const int partly = FMHA_NAME(forward_block)(run, block, m, purpose | (runs ? 0 : FMHA_NAME(hopeful)));
    REAL k = 0, v = 0;
    for (ptrdiff_t j = before.j0, n; runs && j < before.j1; j += n) {
        ptrdiff_t ld;
        if (j == block->common0 && j < block->common1) j = block->common1;      /* no row leaves these out */
        const ptrdiff_t end = j < block->common0 && block->common0 < before.j1 ? block->common0 : before.j1;
        n = end - j < TILE_KEYS ? end - j : TILE_KEYS;
        const REAL *rows = FMHA_NAME(computed_rows)(p, &p->k, block->b, block->hkv, j, n, p->D, m->converted, &ld);
        k += FMHA_NAME(power)(n, p->D, rows, ld);
        rows = FMHA_NAME(computed_rows)(p, &p->v, block->b, block->hkv, j, n, p->Dv, m->converted, &ld);
        v += FMHA_NAME(power)(n, p->Dv, rows, ld);
    }
    if (runs && block->lifted) block->drowned = (REAL)INFINITY;
    else if (runs) block->drowned = FMHA_NAME(drowned_scores)(most, FMHA_NAME(power)(p->D, block->queries, m->packed, block->ld), k, v);
    if (FMHA_NAME(is_drowned)(&before, block->drowned, m->peak)) return partly;
    *block = before;
    return -1;
}

/* The sum of the squares of all keys that the block attends. */
static REAL FMHA_NAME(power_of_keys)(const fmha_problem *p, const FMHA_NAME(rows) *block, REAL *converted)
{
    REAL power = 0;
    for (ptrdiff_t j = block->j0, n; j < block->j1; j += n) {
        ptrdiff_t ld;
        n = block->j1 - j < TILE_KEYS ? block->j1 - j : TILE_KEYS;
        const REAL *keys = FMHA_NAME(computed_rows)(p, &p->k, block->b, block->hkv, j, n, p->D, converted, &ld);
        power += FMHA_NAME(power)(n, p->D, keys, ld);
    }
    return power;
}

/* Of a block to which an additive mask says something, rows that attend all valid keys, at which the mask is the same and so
 * large that no score shows beside it, attend them evenly: rows of padding do under finfo.min. The results of those wanted, a
 * bit each, are those of one such row, and they attend no keys any more. Which rows they are goes by each row's own numbers;
 * keys: the sum of the squares of keys, no less than of those that a row attends, or -1. Returns them, a bit each. */
static __attribute__((noinline)) uint64_t FMHA_NAME(even_rows)(const fmha_run *run, const fmha_item *item, FMHA_NAME(rows) *block,
                                                               const FMHA_NAME(forward_memory) *m, REAL keys, uint64_t wanted)
{
    const fmha_problem *p = &run->p;
    const fmha_array *mask = &p->additive_mask;
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element);
    ptrdiff_t low, high;
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest);
    uint64_t even = 0;
    int done = 0, is_constant = 0;
    const char *before = NULL;
    fmha_valid_keys(p, block->b, &low, &high);
    if (low >= high || mask->stride[3] != 1 || p->bool_mask.data) return 0;
    if (p->sinks || p->dropout.factor != 0 || FMHA_NAME(rescored)(p) || rest != 1) return 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (!(wanted >> r & 1) || block->row0[r] != low || block->row1[r] != high) continue;
        const char *at = FMHA_NAME(mask_row_at)(mask, block, r, 0, size);
        const REAL constant = FMHA_NAME(stored_value)(p->mask_element, at + low * size);
        if (at != before)
            is_constant = constant < DROWNED_BELOW && constant - constant == 0
                          && OF_MASK(all_are, at, low, high, constant, mask->stride[2] * size);
        before = at;
        if (!is_constant) continue;
        if (keys < 0) keys = FMHA_NAME(power_of_keys)(p, block, m->converted);
        const char *q = FMHA_NAME(row_in)(p->element, &p->q, block->b, block->head[r], block->query[r]);
        const REAL size_q = (REAL)sqrt((double)FMHA_NAME(power)(1, p->D, FMHA_NAME(real_row)(p->element, q, p->D, m->packed), 0)) * factor;
        const REAL bound = (size_q < 0 ? -size_q : size_q) * (REAL)sqrt((double)keys);
        if (!(bound < -constant * (REAL_EPSILON / 8))) continue;
        REAL *out = FMHA_NAME(out_row)(run, block, r, m);
        if (!done++) {
            fmha_run without = *run;
            FMHA_NAME(rows) one = *block;
            without.p.D = 0;        /* the scores do not count: they may be 0 */
            one.rows = 1;
            one.queries = one.ld = LANES;
            one.next = NULL;
            one.gathered = NULL;        /* which has keys of their width */
            one.head[0] = block->head[r];
            one.query[0] = block->query[r];
            one.row0[0] = low;
            one.row1[0] = high;
            for (ptrdiff_t l = 1; l < LANES; l++) one.row0[l] = 0, one.row1[l] = p->Lk;
            FMHA_NAME(rows_together)(p, &one);
            FMHA_NAME(forward_block)(&without, &one, m, 0);
        }
        const VEC trace = FMHA_NAME(divided_row)(p->Dv, m->out, m->total[0], out, v_splat(0));
        if (FMHA_NAME(sum)(trace) != 0 || FMHA_NAME(tiny_row)(p->Dv, out)) continue;        /* left to those who know what to do */
        FMHA_NAME(write_lse)(run, block, r, constant, m->total[0]);
        even |= (uint64_t)1 << r;
    }
    if (!even) return 0;
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (even >> r & 1) block->row0[r] = block->row1[r] = 0;
    FMHA_NAME(rows_together)(p, block);
    FMHA_NAME(round_rows)(run, item->b, item->h, item->i0, item->rows, m->result, even);
    return even;
}

static void FMHA_NAME(forward_rows)(const fmha_run *run, const fmha_item *item, FMHA_NAME(rows) *block, REAL *scratch, uint64_t wanted)
{
    const fmha_problem *p = &run->p;
    FMHA_NAME(forward_memory) memory;
    FMHA_NAME(forward_layout)(p, TILE_KEYS, scratch, &memory);
    FMHA_NAME(begin_item)(p);
    FMHA_NAME(mask_rows)(p, block, 0, p->Lk);
    if (block->additive) wanted &= ~FMHA_NAME(even_rows)(run, item, block, &memory, -1, wanted);
    if (!(wanted & ALL_ROWS >> (BLOCK_ROWS - block->rows))) return;
    const int hopeful = block->additive && !FMHA_NAME(rescored)(p);
    if (block->j0 >= block->j1 && !p->sinks) {
        FMHA_NAME(empty_rows)(run, item, block, &memory, wanted);
    } else if (block->j0 < block->j1 && FMHA_NAME(tiny_values)(p, block)) {
        FMHA_NAME(raised_rows)(run, item, block, &memory, wanted);
    } else {
        const int large = FMHA_NAME(large_value)(p, block->b, block->hkv, block->j0)
                          || FMHA_NAME(large_value)(p, block->b, block->hkv, (block->j0 + block->j1) / 2);
        const int purpose = large ? FMHA_NAME(large) : wanted == ALL_ROWS ? FMHA_NAME(straight) : 0;
        int partly = hopeful ? FMHA_NAME(hopeful_block)(run, block, &memory, purpose) : -1;
        if (partly < 0) partly = FMHA_NAME(forward_block)(run, block, &memory, purpose);
        FMHA_NAME(finish_rows)(run, item, block, &memory, wanted, partly);
    }
}

/* Whether rows are results of a softmax of products alone, in REAL, of all keys that causality, windows, lengths and ranges
 * leave. */
static inline int FMHA_NAME(plain_rows)(const fmha_problem *p)
{
    return p->stored == FMHA_SAME && p->element == FMHA_SAME && p->parts == 0 && !p->bool_mask.data && !p->additive_mask.data &&
           !FMHA_NAME(rescored)(p) && !p->sinks && p->dropout.factor == 0;
}

/* Whether one_key may serve. */
static inline int FMHA_NAME(may_be_copied)(const fmha_run *run) { return run->p.Lk == 1 && !run->lse && FMHA_NAME(plain_rows)(&run->p); }

/* Stacked rows first .. first+rows of a group of such where there is one key, without lse: its weight is 1 as long as the score
 * is finite, and that the sizes of q and k say without the score. Returns 0, and has written nothing, where a row does not
 * attend the key, where something is huge or not finite, and where the value is so small that it may count as 0. The same bits. */
static __attribute__((noinline)) int FMHA_NAME(one_key)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t first, ptrdiff_t rows)
{
    const fmha_problem *p = &run->p;
    /* the axis on which rows follow each other */
    const ptrdiff_t Dv = p->Dv, head = hkv * (p->H / p->Hkv), along = p->Lq == 1 ? 1 : 2;
    const REAL *k = (const REAL *)FMHA_NAME(stored_row)(p, &p->k, b, hkv, 0), *v = (const REAL *)FMHA_NAME(stored_row)(p, &p->v, b, hkv, 0);
    for (ptrdiff_t r = 0; (p->banded || p->key_start || p->key_length) && r < rows; r++) {
        ptrdiff_t low, high;
        fmha_row_keys(p, b, (first + r) % p->Lq, &low, &high);
        if (low >= high) return 0;
    }
    REAL rest, factor = FMHA_NAME(folded_scale)(p, &rest), power = 0;
    VEC trace = v_splat(0);
    for (ptrdiff_t d = 0; d < Dv; d += LANES) trace = trace + v_load_n(v + d, Dv - d, 0) * v_splat(0);
    if (rest != 1 || FMHA_NAME(sum)(trace) != 0 || FMHA_NAME(tiny_row)(Dv, v) || !(FMHA_NAME(power)(1, p->D, k, 0) < HUGE_POWER)) return 0;
    for (ptrdiff_t r = 0, many; r < rows; r += many) {
        const ptrdiff_t h = head + (first + r) / p->Lq, i = (first + r) % p->Lq, left = along == 1 ? rows : p->Lq - i;
        many = left < rows - r ? left : rows - r;
        power += FMHA_NAME(power)(many, p->D, (const REAL *)FMHA_NAME(row_in)(FMHA_SAME, &p->q, b, h, i), p->q.stride[along]);
    }
    if (!(power * factor * factor < HUGE_POWER)) return 0;
    for (ptrdiff_t r = 0; r < rows; r++) {
        REAL *out = (REAL *)FMHA_NAME(row_in)(FMHA_SAME, &run->out, b, head + (first + r) / p->Lq, (first + r) % p->Lq);
        for (ptrdiff_t d = 0; d < Dv; d += LANES) v_store_n(out + d, v_splat(0) + v_load_n(v + d, Dv - d, 0), Dv - d);
    }
    return 1;
}

/* Which of the runs that blocks leave is that with key j of an item's block. */
static inline ptrdiff_t FMHA_NAME(place_of_run)(const fmha_run *run, const fmha_item *item, ptrdiff_t j)
{
    const ptrdiff_t block = fmha_place_of(&run->cut, item) - run->whole;
    return block * fmha_parts(run->p.Lk, FMHA_RUN_KEYS) + j / FMHA_RUN_KEYS;
}

/* What the run of keys with key j has left of an item's rows. */
static inline FMHA_NAME(softmaxes) FMHA_NAME(run_at)(const fmha_run *run, const fmha_item *item, ptrdiff_t j)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t row = item->i0 % BLOCK_ROWS, place = FMHA_NAME(place_of_run)(run, item, j);
    FMHA_NAME(softmaxes) of;
    FMHA_NAME(softmaxes_layout)(p, fmha_run_rows(p), (REAL *)run->chunks + place * FMHA_NAME(run_scratch)(p), &of);
    return (FMHA_NAME(softmaxes)){of.peak + row, of.total + row, of.out + row * ROUND_UP(p->Dv, LANES), NULL};
}

/* The turn of an item that has a part of a run of keys at what the run leaves of its rows; without a counter where it has all. */
static inline FMHA_NAME(turn) FMHA_NAME(turn_of_part)(const fmha_run *run, const fmha_item *item)
{
    const ptrdiff_t part = item->j0 % FMHA_RUN_KEYS, end = item->j0 - part + FMHA_RUN_KEYS;
    if (!run->turns || (part == 0 && item->j0 + item->cols == (end < run->p.Lk ? end : run->p.Lk))) return (FMHA_NAME(turn)){NULL, 0};
    const ptrdiff_t place = FMHA_NAME(place_of_run)(run, item, item->j0);
    return (FMHA_NAME(turn)){run->turns + place * FMHA_RUN_TURNS + item->i0 % BLOCK_ROWS / (BLOCK_ROWS / FMHA_RUN_TURNS),
                             (int)(part / run->part_keys)};
}

/* What the thread gathers, at the start of its scratch, for a block, or NULL: not for what is at hand; nor is it where the next
 * block is another head's. Returns the scratch behind that. */
static REAL *FMHA_NAME(begin_gathered)(const fmha_run *run, int worker, FMHA_NAME(rows) *block, FMHA_NAME(gathered) *gathered)
{
    REAL *scratch = FMHA_NAME(scratch_of)(run, worker);
    scratch += FMHA_NAME(gathered_layout)(&run->p, run->threads, scratch, gathered);
    if (block && gathered->head && !run->cut.heads_inside) block->gathered = gathered;
    return scratch;
}

/* Rows of a block against one run of keys, or a part of it, which goes on from what the part before has left. */
static __attribute__((noinline)) void FMHA_NAME(run_of_keys)(const fmha_run *run, const fmha_item *item, int worker)
{
    FMHA_NAME(rows) block;
    FMHA_NAME(forward_memory) m;
    FMHA_NAME(block_rows)(&run->p, &block, item->b, item->h, item->i0, item->rows);
    const FMHA_NAME(softmaxes) to = FMHA_NAME(run_at)(run, item, item->j0);
    const ptrdiff_t part = item->j0 % FMHA_RUN_KEYS;
    const int meets = FMHA_NAME(meets_run)(&block, item->j0 - part);
    if (part == 0) {
        if (meets || item->j0 == 0) FMHA_NAME(begin_run)(&run->p, &block, item->j0, &to);       /* others are left out of the merging */
        if (!meets && item->j0 == 0) memset(to.out, 0, (size_t)(block.rows * block.value_width) * sizeof(REAL));
    }
    if (!meets) return;
    const FMHA_NAME(turn) turn = FMHA_NAME(turn_of_part)(run, item);
    FMHA_NAME(mask_rows)(&run->p, &block, item->j0, item->j0 + item->cols);
    FMHA_NAME(gathered) unused;
    FMHA_NAME(forward_layout)(&run->p, TILE_KEYS, FMHA_NAME(begin_gathered)(run, worker, NULL, &unused), &m);
    FMHA_NAME(begin_item)(&run->p);
    const REAL *lift = FMHA_NAME(pack_queries)(&run->p, &block, m.packed, m.lift) ? m.lift : NULL;
    if (!FMHA_NAME(wait_for)(&turn)) return;
    FMHA_NAME(forward_keys)(run, &block, &m, lift, &to, item->j0, item->j0 + item->cols, part ? FMHA_NAME(continued) : 0);
    FMHA_NAME(end_turn)(&turn);
}

/* Of a band that is narrow in heads that lie far away a thread at work on item `index` fetches what the next item reads beside:
 * its queries, and keys and values that this one does not read. Returns `ahead`, or NULL where nothing is. */
static FMHA_NAME(next) *FMHA_NAME(next_of_band)(const fmha_run *run, ptrdiff_t index, const FMHA_NAME(rows) *block, FMHA_NAME(next) *ahead)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t keys = block->j1 - block->j0, later = fmha_later(run, index, 1), size = (ptrdiff_t)sizeof(REAL);
    const double bytes = (double)(p->B * p->Hkv * (p->H / p->Hkv * p->Lq + p->Lk) * (p->D + p->Dv) * size);
    if (!p->banded || p->stored != FMHA_SAME || p->element != FMHA_SAME || p->D != p->Dv || bytes < NEXT_FAR || keys == 0) return NULL;
    if (keys > NARROW_KEYS || later >= fmha_items(&run->cut)) return NULL;
    const fmha_item item = fmha_item_of(&run->cut, later);
    const ptrdiff_t row = item.i0 % p->Lq, rows = item.rows < p->Lq - row ? item.rows : p->Lq - row;
    ptrdiff_t low, high;
    fmha_block_keys(p, item.b, row, rows, &low, &high);
    if (item.b == block->b && item.h == block->hkv) {       /* this block's keys are there */
        if (low < block->j0 && high > block->j0) high = block->j0;
        else if (low < block->j1 && high > block->j1) low = block->j1;
    }
    if (high - low > NARROW_KEYS || item.cols < p->Lk) return NULL;
    ahead->part[0] = (FMHA_NAME(part)){FMHA_NAME(row_in)(FMHA_SAME, &p->k, item.b, item.h, low), high - low, p->k.stride[2] * size, 0};
    ahead->part[1] = (FMHA_NAME(part)){FMHA_NAME(row_in)(FMHA_SAME, &p->v, item.b, item.h, low), high - low, p->v.stride[2] * size, 0};
    FMHA_NAME(set_ahead)(p, ahead, 2, &p->q, item.b, item.h, item.i0, item.rows);
    return ahead;
}

/* Item: one block of rows of one group, or some of them, with all keys or one run of them. */
static void FMHA_NAME(tiled_forward)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_item item = fmha_item_of(&run->cut, index);
    if (item.rows == 0) return;
    if (item.cols < run->p.Lk) {
        FMHA_NAME(run_of_keys)(run, &item, worker);
        return;
    }
    if (FMHA_NAME(may_be_copied)(run)) {
        FMHA_NAME(begin_item)(&run->p);
        if (FMHA_NAME(one_key)(run, item.b, item.h, item.i0, item.rows)) return;
    }
    FMHA_NAME(rows) block;
    FMHA_NAME(block_rows)(&run->p, &block, item.b, item.h, item.i0, item.rows);
    FMHA_NAME(gathered) gathered;
    REAL *scratch = FMHA_NAME(begin_gathered)(run, worker, &block, &gathered);
    FMHA_NAME(next) next, ahead;
    block.next = FMHA_NAME(next_of)(run, index, NEXT_NEAR, NEXT_FAR, 0, &next);
    if (!block.next) block.ahead = FMHA_NAME(next_of_band)(run, index, &block, &ahead);
    const ptrdiff_t later = fmha_later(run, index, 1);
    if ((!block.next || block.next->part[1].runs == 0) && run->cut.rows <= BESIDE_ROWS && later < fmha_items(&run->cut)) {
        const fmha_item then = fmha_item_of(&run->cut, later);
        block.then = FMHA_NAME(stored_row)(&run->p, &run->p.k, then.b, then.h, 0);
    }
    FMHA_NAME(forward_rows)(run, &item, &block, scratch, ALL_ROWS);
}

/* Item: rows of a block whose runs of keys become one softmax. */
static void FMHA_NAME(tiled_merge)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    FMHA_NAME(rows) block;
    FMHA_NAME(forward_memory) m;
    const fmha_item item = FMHA_NAME(item_rows)(run, index, &block);
    if (item.rows == 0) return;
    FMHA_NAME(forward_layout)(p, TILE_KEYS, FMHA_NAME(scratch_of)(run, worker), &m);
    FMHA_NAME(begin_item)(p);
    const FMHA_NAME(softmaxes) sums = {m.peak, m.total, m.out, NULL}, first = FMHA_NAME(run_at)(run, &item, 0);
    memcpy(sums.peak, first.peak, (size_t)block.queries * sizeof(REAL));
    memcpy(sums.total, first.total, (size_t)block.queries * sizeof(REAL));
    memcpy(sums.out, first.out, (size_t)(block.rows * block.value_width) * sizeof(REAL));
    for (ptrdiff_t j = FMHA_RUN_KEYS; j < p->Lk; j += FMHA_RUN_KEYS) {
        const FMHA_NAME(softmaxes) of = FMHA_NAME(run_at)(run, &item, j);
        if (FMHA_NAME(meets_run)(&block, j)) FMHA_NAME(merge_run)(&block, &of, &sums);
    }
    FMHA_NAME(finish_rows)(run, &item, &block, &m, ALL_ROWS, FMHA_NAME(touched)(&block, 0, p->Lk));
}

/* ------------------------------------------------------------------------------------------- forward with the weights */

/* The scratch of tiled_forward, which tiny_rows needs, for all keys at a time: O(L) per thread. */
static ptrdiff_t FMHA_NAME(weights_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(forward_memory) *m)
{
    return FMHA_NAME(forward_layout)(p, p->Lk > TILE_KEYS ? p->Lk : TILE_KEYS, memory, m);
}

static ptrdiff_t FMHA_NAME(weights_scratch)(const fmha_problem *p)
{
    FMHA_NAME(forward_memory) unused;
    return FMHA_NAME(weights_layout)(p, NULL, &unused);
}

/* weights[r, j0 : j0 + n] <- column r of probabilities^T (n, queries), zeros at the other keys: of the rows wanted, a bit each. */
static void FMHA_NAME(write_weights)(const fmha_run *run, const FMHA_NAME(rows) *block, ptrdiff_t n, const REAL *s, uint64_t wanted)
{
    const fmha_problem *p = &run->p;
    for (ptrdiff_t q = 0; q < block->rows; q += LANES) {
        REAL *row[LANES];
        ptrdiff_t rows = block->rows - q < LANES ? block->rows - q : LANES, k = 0, some = 0;
        for (ptrdiff_t l = 0; l < rows; l++) {
            if (!(wanted >> (q + l) & 1)) {
                row[l] = NULL;
                continue;
            }
            some++;
            REAL *to = (REAL *)run->weights + ((block->b * p->H + block->head[q + l]) * p->Lq + block->query[q + l]) * p->Lk;
            FMHA_NAME(fill)(block->j0, to, 0);
            FMHA_NAME(fill)(p->Lk - block->j1, to + block->j1, 0);
            row[l] = to + block->j0;
        }
#if HAVE_TRANSPOSE
        for (; some == LANES && k + LANES <= n; k += LANES) {
            VEC part[LANES];
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; l < LANES; l++) part[l] = v_load(s + (k + l) * block->ld + q);
            FMHA_NAME(transpose)(part);
#pragma GCC unroll 16
            for (ptrdiff_t l = 0; l < LANES; l++) v_store(row[l] + k, part[l]);
        }
#endif
        for (; k < n; k++)
            for (ptrdiff_t l = 0; l < rows; l++)
                if (row[l]) row[l][k] = s[k * block->ld + q + l];
    }
}

/* As forward_rows, with the weights (B, H, Lq, Lk) written out: the softmax runs over all keys of a block at once. */
static void FMHA_NAME(weights_rows)(const fmha_run *run, const fmha_item *item, FMHA_NAME(rows) *block, REAL *scratch, uint64_t wanted)
{
    const fmha_problem *p = &run->p;
    FMHA_NAME(begin_item)(p);
    FMHA_NAME(mask_rows)(p, block, 0, p->Lk);
    ptrdiff_t queries = block->queries, lds = block->ld, value_width = block->value_width, ldk, ldv, ld;
    ptrdiff_t j0 = block->j0, n = block->j1 - block->j0;
    FMHA_NAME(forward_memory) m;
    FMHA_NAME(weights_layout)(p, scratch, &m);
    REAL *s = m.scores, *out = m.out, *peak = m.peak, *total = m.total, *lift = m.lift;
    const REAL *keys = FMHA_NAME(keys_of_block)(p, block, j0, n, m.converted, &ldk);
    if (!FMHA_NAME(pack_queries)(p, block, m.packed, lift)) lift = NULL;
    FMHA_NAME(begin_rows)(p, block, peak, total);
    int touched = FMHA_NAME(touched)(block, j0, n);
    for (ptrdiff_t j = 0; j < n && !fmha_pool_stopped(); j += TILE_KEYS) {
        ptrdiff_t part = n - j < TILE_KEYS ? n - j : TILE_KEYS;
        for (ptrdiff_t v = 0; v < queries / LANES; v++) {
            block->low[v] = 0;
            block->high[v] = part;
        }
        if (FMHA_NAME(values_far)(run)) block->values = FMHA_NAME(values_ahead)(p, block, j0 + j);
        /* scores^T (keys, queries) <- k (keys, D) @ (scale * q)^T (D, queries) */
        const REAL *apart = keys + j * ldk;
        ld = ldk;
        if (!FMHA_NAME(has_gathered)(block, 0)) apart = FMHA_NAME(apart_rows)(apart, ldk, part, p->D, queries, m.copy, &ld);
        FMHA_NAME(tile_scores)(p, block, 0, part, apart, ld, m.packed, lift, s + j * lds);
        if (touched || FMHA_NAME(rescored)(p)) FMHA_NAME(mask_tile)(p, block, j0 + j, s + j * lds, NULL);
    }
    FMHA_NAME(softmax_block)(block, 0, n, s, peak, total, m.shrink);
    for (ptrdiff_t q = 0; q < queries; q += LANES) {
        VEC inverse = v_splat(1) / v_load(total + q), zero = v_splat(0), nan = v_splat((REAL)NAN);
        for (ptrdiff_t k = 0; k < n; k++) {     /* what is 0 stays 0, also in empty rows and in rows with a NaN, which is one */
            VEC e = v_load(s + k * lds + q), weight = e * inverse;
            v_store(s + k * lds + q, v_select(v_equal(e, zero), zero, v_select(v_equal(weight, weight), weight, nan)));
        }
        block->low[q / LANES] = 0;
        block->high[q / LANES] = n;
    }
    if (p->dropout.factor != 0) FMHA_NAME(drop_tile)(p, block, j0, s, NULL);
    FMHA_NAME(write_weights)(run, block, n, s, wanted);
    const REAL *values = FMHA_NAME(values_of_block)(p, block, j0, n, m.converted, &ldv);
    for (int careful = 0; careful < 2; careful++) {
        memset(out, 0, (size_t)(queries * value_width) * sizeof(REAL));
        /* out (queries, Dv) <- weights^T (keys, queries)^T @ v (keys, Dv) */
        const REAL *rows = values;
        ld = ldv;
        if ((careful && touched) || !FMHA_NAME(has_gathered)(block, 1))
            rows = FMHA_NAME(value_rows)(p, values, ldv, n, block->rows, !(careful && touched), m.copy, &ld);
        FMHA_NAME(product_columns_add)(block->rows, value_width, n, s, lds, rows, ld, out, value_width);
        if (careful && touched) FMHA_NAME(tile_nonfinite)(p, block, j0, n, s, values, ldv, p->Dv, out, value_width);
        if (FMHA_NAME(all_finite)(block->rows, p->Dv, out, value_width)) break;
    }
    uint64_t tiny = 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        if (!(wanted >> r & 1)) continue;
        FMHA_NAME(one_nan)(p->Dv, out + r * value_width);
        memcpy(FMHA_NAME(out_row)(run, block, r, &m), out + r * value_width, (size_t)p->Dv * sizeof(REAL));
        FMHA_NAME(write_lse)(run, block, r, peak[r], total[r]);
        if (FMHA_NAME(tiny_row)(p->Dv, out + r * value_width) && total[r] != 0) tiny |= (uint64_t)1 << r;
    }
    if (tiny) FMHA_NAME(tiny_rows)(run, block, tiny, &m);
    FMHA_NAME(round_rows)(run, item->b, item->h, item->i0, item->rows, m.result, wanted);
}

static void FMHA_NAME(tiled_weights)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    FMHA_NAME(rows) block;
    const fmha_item item = FMHA_NAME(item_rows)(run, index, &block);
    if (item.rows == 0) return;
    FMHA_NAME(gathered) gathered;
    REAL *scratch = FMHA_NAME(begin_gathered)(run, worker, &block, &gathered);
    FMHA_NAME(weights_rows)(run, &item, &block, scratch, ALL_ROWS);
}

/* Scratch of a thread, one of so many, with what it gathers. */
static ptrdiff_t FMHA_NAME(tiled_scratch)(const fmha_problem *p, ptrdiff_t threads, int weights)
{
    FMHA_NAME(gathered) unused;
    return FMHA_NAME(gathered_layout)(p, threads, NULL, &unused) + (weights ? FMHA_NAME(weights_scratch)(p) : FMHA_NAME(forward_scratch)(p));
}
