/* The "tiled" algorithm on matrix tiles, forward: as forward.inc.h, with the products of matrix.inc.h and exponentials of base
 * 2.
 *
 * Keys and values are packed chunk after chunk of a head's keys, for all blocks of rows, by the item that a head is or, where
 * blocks of rows are items, in a pass of its own: keys as first operand of S^T (keys, queries) <- k @ q^T, values as that of
 * out^T (Dv, queries) <- v^T @ P^T. Scores lie as in block.inc.h, which masks them; the softmax leaves P^T as second operand.
 *
 * What tiles cannot do is done by forward.inc.h, row by row: rows whose queries, or one of whose keys or values, are not finite
 * or beyond LARGE_PART, rows whose scores or sums are, and rows so small that subnormal numbers count. What is such counts as
 * zeros in the tiles: nothing of it reaches another row. A row's bits depend on its own numbers, as everywhere. */

#define TWO_GROUPS(queries, g) ((queries) / TILE_ROWS - (g) > 1 ? 2 : 1)     /* of queries, from group g on */
#define FAR_SCORE POWER(18)     /* in powers of 2: where the steps of such numbers are small still */

/* The keys of a chunk of a head whose keys are shorter than one. */
static inline ptrdiff_t FMHA_NAME(matrix_keys)(const fmha_problem *p)
{
    return p->Lk < MATRIX_KEYS ? ROUND_UP(p->Lk, TILE_TERMS) : MATRIX_KEYS;
}

static inline int FMHA_NAME(parts_of)(int parts, int type) { return type == FMHA_BFLOAT ? 1 : parts; }

/* What is known of a chunk beside its operands: whether some key is odd; where there is an additive mask, the powers of its keys
 * and values, or infinity where some are odd. */
typedef struct {
    int some_odd;
    REAL keys, values;
} FMHA_NAME(chunk_facts);

/* What all blocks of rows share of a chunk: keys and values as operands; of each key whether it is odd: it or its value is not
 * finite or too large. */
typedef struct {
    FMHA_NAME(operand) keys, values;
    unsigned char *odd;
    FMHA_NAME(chunk_facts) *facts;
} FMHA_NAME(matrix_chunk);

/* Returns the size of a chunk in bytes; without memory that is all. */
static ptrdiff_t FMHA_NAME(shared_layout)(const fmha_problem *p, char *memory, FMHA_NAME(matrix_chunk) *to)
{
    const ptrdiff_t keys = FMHA_NAME(matrix_keys)(p), size = (ptrdiff_t)sizeof(uint16_t);
    const ptrdiff_t key_plane = keys * ROUND_UP(p->D, TILE_TERMS), value_plane = keys * ROUND_UP(p->Dv, TILE_ROWS);
    const int parts = FMHA_NAME(parts_of)(p->parts, p->stored);
    char *at = memory;
    to->keys = (FMHA_NAME(operand)){(const uint16_t *)at, (p->D + TILE_TERMS - 1) / TILE_TERMS, key_plane, parts};
    at += parts * key_plane * size;
    to->values = (FMHA_NAME(operand)){(const uint16_t *)at, keys / TILE_TERMS, value_plane, parts};
    at += parts * value_plane * size;
    to->odd = (unsigned char *)at;
    at += ROUND_UP(keys, FMHA_CACHE_LINE);
    to->facts = (FMHA_NAME(chunk_facts) *)at;
    return at + FMHA_CACHE_LINE - memory;
}

static ptrdiff_t FMHA_NAME(matrix_chunks)(const fmha_problem *p)
{
    return p->Lk == 0 ? 0 : (p->Lk + FMHA_NAME(matrix_keys)(p) - 1) / FMHA_NAME(matrix_keys)(p);
}

/* Bytes of the chunks of a head. */
static ptrdiff_t FMHA_NAME(matrix_bytes)(const fmha_problem *p)
{
    FMHA_NAME(matrix_chunk) unused;
    return FMHA_NAME(matrix_chunks)(p) * FMHA_NAME(shared_layout)(p, NULL, &unused);
}

/* Chunk n of head (b, hkv). */
static void FMHA_NAME(chunk_at)(const fmha_run *run, ptrdiff_t b, ptrdiff_t hkv, ptrdiff_t n, FMHA_NAME(matrix_chunk) *to)
{
    const fmha_problem *p = &run->p;
    FMHA_NAME(matrix_chunk) unused;
    ptrdiff_t at = (b * p->Hkv + hkv - run->first_shared) * FMHA_NAME(matrix_chunks)(p) + n;
    FMHA_NAME(shared_layout)(p, run->shared + at * FMHA_NAME(shared_layout)(p, NULL, &unused), to);
}

static fmha_cut FMHA_NAME(matrix_cut)(const fmha_problem *p, ptrdiff_t first)
{
    fmha_cut cut = fmha_heads_cut(p);
    cut.first = first;
    cut.col_step = MATRIX_KEYS;
    return cut;
}

static void FMHA_NAME(set_powers)(const fmha_problem *p, const FMHA_NAME(source) *keys, const FMHA_NAME(source) *values,
                                  FMHA_NAME(chunk_facts) *to)
{
    if (!p->additive_mask.data) return;
    to->keys = to->some_odd ? (REAL)INFINITY : FMHA_NAME(source_power)(p->stored, keys);
    to->values = to->some_odd ? (REAL)INFINITY : FMHA_NAME(source_power)(p->stored, values);
}

/* The power of queries as drowned_scores asks for it: times scale, and as much more as parts may differ from what they are parts
 * of. */
static inline REAL FMHA_NAME(scaled_power)(const fmha_problem *p, REAL power) { return power * (REAL)(1.05 * p->scale * p->scale); }

/* Item: a chunk of keys of a head is packed. */
static void FMHA_NAME(matrix_pack)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    FMHA_NAME(matrix_chunk) chunk;
    (void)worker;
    FMHA_NAME(chunk_at)(run, item.b, item.h, item.j0 / MATRIX_KEYS, &chunk);
    FMHA_NAME(source) keys = {.data = FMHA_NAME(stored_row)(p, &p->k, item.b, item.h, item.j0), .stride = p->k.stride[2],
                              .rows = item.cols, .width = p->D};
    FMHA_NAME(source) values = {.data = FMHA_NAME(stored_row)(p, &p->v, item.b, item.h, item.j0), .stride = p->v.stride[2],
                                .rows = item.cols, .width = p->Dv};
    chunk.facts->some_odd = 0;
    for (int again = 0; again < 2; again++) {
        int large = FMHA_NAME(pack_operand)(FMHA_NAME(first), p->stored, &keys, &chunk.keys);
        large |= FMHA_NAME(pack_operand)(FMHA_NAME(first_transposed), p->stored, &values, &chunk.values);
        if (again || !large) break;
        chunk.facts->some_odd = FMHA_NAME(find_odd)(p->stored, &keys, &values, chunk.odd);
        keys.left_out = values.left_out = chunk.odd;
    }
    FMHA_NAME(set_powers)(p, &keys, &values, chunk.facts);
}

/* Scratch of one thread: q as second operand; scores^T (keys, queries); P^T as second operand; sums of out^T (Dv, queries); of
 * each query peak, total and what its sums shrink by. */
typedef struct {
    FMHA_NAME(operand) q, weights;
    REAL *scores, *out, *peak, *total, *shrink;
} FMHA_NAME(matrix_memory);

/* The next n bfloat16 numbers, as REALs are taken. */
static inline uint16_t *FMHA_NAME(take_tiles)(REAL *memory, ptrdiff_t *used, ptrdiff_t n)
{
    return (uint16_t *)FMHA_NAME(take)(memory, used, n / 2);
}

static ptrdiff_t FMHA_NAME(matrix_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(matrix_memory) *m)
{
    const ptrdiff_t keys = FMHA_NAME(matrix_keys)(p), width = ROUND_UP(p->D, TILE_TERMS), q_plane = width * BLOCK_ROWS;
    const ptrdiff_t values = ROUND_UP(p->Dv, TILE_ROWS);
    const int q_parts = FMHA_NAME(parts_of)(p->parts, p->element);
    ptrdiff_t used = 0;
    m->q = (FMHA_NAME(operand)){FMHA_NAME(take_tiles)(memory, &used, q_parts * q_plane), width / TILE_TERMS, q_plane, q_parts};
    m->weights = (FMHA_NAME(operand)){FMHA_NAME(take_tiles)(memory, &used, p->parts * keys * BLOCK_ROWS), keys / TILE_TERMS,
                                      keys * BLOCK_ROWS, p->parts};
    /* At the end the scores' place holds 16 rows of results, which are more where values are wide and keys few. */
    m->scores = FMHA_NAME(take)(memory, &used, keys * BLOCK_ROWS > TILE_ROWS * values ? keys * BLOCK_ROWS : TILE_ROWS * values);
    m->out = FMHA_NAME(take)(memory, &used, values * BLOCK_ROWS);
    m->peak = FMHA_NAME(take)(memory, &used, BLOCK_ROWS);
    m->total = FMHA_NAME(take)(memory, &used, BLOCK_ROWS);
    m->shrink = FMHA_NAME(take)(memory, &used, BLOCK_ROWS);
    return used;
}

/* Behind it, that of forward.inc.h for the rows that are left to it; with `heads`, before it, a head's operands. */
static ptrdiff_t FMHA_NAME(matrix_scratch)(const fmha_problem *p, int heads, int weights)
{
    FMHA_NAME(matrix_memory) unused;
    return (heads ? FMHA_NAME(matrix_bytes)(p) / (ptrdiff_t)sizeof(REAL) : 0) + FMHA_NAME(matrix_layout)(p, NULL, &unused)
           + (weights ? FMHA_NAME(weights_scratch)(p) : FMHA_NAME(forward_scratch)(p));
}

/* Where the scores are what is masked, and natural logarithms of the weights up to a shift; else they are products of q and k,
 * and the scale goes into the exponent's factor. */
static inline int FMHA_NAME(natural_scores)(const fmha_problem *p)
{
    return FMHA_NAME(rescored)(p) || p->additive_mask.data || !(p->scale >= 0x1p-20 && p->scale <= 0x1p20);
}

/* The online softmax of some groups of queries over keys [low, high) of a tile, even numbers: P^T into `to` as second operand,
 * peak and total kept up to date, shrink: what all that was summed before must be multiplied by. Scores times factor are powers
 * of 2, the peak their largest, so that the weight that outweighs the others is 1 and loses nothing as it is rounded; of two
 * parts a whole number, so that shrinking is exact; natural: the peak is the largest score itself, however large. kept: P^T
 * stays in s and is not packed. `pairs` of keys at a time. Returns whether some row shrinks. */
INLINED int FMHA_NAME(matrix_softmax_of)(const int parts, const int groups, const int pairs, const int natural, const int kept,
                                         ptrdiff_t low, ptrdiff_t high, ptrdiff_t queries, REAL factor, REAL *s, uint16_t *to,
                                         const FMHA_NAME(operand) *weights, REAL *peak, REAL *total, REAL *shrink)
{
    const int of = groups, whole = !natural && parts > 1;
    VEC best[8], before[8], shift[8], sum[8], least[8], power[8], gone = v_splat(NEGATIVE_INFINITY), factors = v_splat(factor);
    IVEC moved = v_truth(gone != gone);
    {
        const int n = of;
        EACH(i) best[i] = gone;
        for (ptrdiff_t k = low; k < high; k++)
            EACH(i) {
                VEC score = v_load(s + k * queries + i * LANES);
                best[i] = v_max(score, best[i]);
            }
        EACH(i) {
            before[i] = v_load(peak + i * LANES);
            if (!natural) best[i] = best[i] * factors;
            if (whole) {
#ifdef v_round_up
                best[i] = v_round_up(best[i]);
#else
                VEC near = (best[i] + v_splat(EXP_MAGIC)) - v_splat(EXP_MAGIC);
                best[i] = v_select(v_greater(v_splat(POWER(22)), v_abs(best[i])), v_select(v_greater(best[i], near),
                        near + v_splat(1), near), best[i]);
#endif
            }
            best[i] = v_max(before[i], best[i]);
            moved |= ~v_equal(before[i], best[i]);
            v_store(peak + i * LANES, best[i]);
            shift[i] = v_select(v_equal(best[i], gone), v_splat(0), best[i]);
            if (whole) least[i] = (shift[i] + v_splat(POWER_LOW)) / factors;
            power[i] = natural ? (before[i] - shift[i]) * factors : before[i] - shift[i];
        }
        FMHA_NAME(powers)(2, n, power);
        EACH(i) {
            /* the fit is not 1 at 0, and out would not shrink with the total; nor would keys that add nothing leave a row its bits */
            power[i] = v_select(v_equal(best[i], before[i]), v_splat(1), power[i]);
            v_store(shrink + i * LANES, power[i]);
            v_store(total + i * LANES, v_load(total + i * LANES) * power[i]);
            sum[i] = v_splat(0);        /* of this tile alone: sums of sums err less than one long sum */
        }
    }
    ptrdiff_t k = low;
#pragma GCC unroll 2
    for (int few = 0; few < (pairs > 1 ? 2 : 1); few++)
        for (; k + 2 * (few ? 1 : pairs) <= high; k += 2 * (few ? 1 : pairs)) {
            const int n = of * (few ? 1 : pairs);
            VEC even[8], odd[8];
            EACH(i) {
                const REAL *at = s + (k + 2 * (i / of)) * queries + i % of * LANES;
                even[i] = v_load(at);
                odd[i] = v_load(at + queries);
                if (whole) continue;
                even[i] = natural ? (even[i] - shift[i % of]) * factors : even[i] * factors - shift[i % of];
                odd[i] = natural ? (odd[i] - shift[i % of]) * factors : odd[i] * factors - shift[i % of];
            }
            if (!whole) {
                FMHA_NAME(powers)(parts, n, even);
                FMHA_NAME(powers)(parts, n, odd);
            } else {
                FMHA_NAME(shifted_powers)(parts, n, even, factors, shift, least, of);
                FMHA_NAME(shifted_powers)(parts, n, odd, factors, shift, least, of);
            }
            EACH(i) {
                sum[i % of] = sum[i % of] + (even[i] + odd[i]);
                REAL *at = s + (k + 2 * (i / of)) * queries + i % of * LANES;
                if (kept) v_store(at, even[i]);
                if (kept) v_store(at + queries, odd[i]);
            }
#pragma GCC unroll 4
            for (int g = 0; !kept && g < n; g++) {
                ptrdiff_t own = k + 2 * (g / groups);
                FMHA_NAME(store_parts)(parts, 1, even[g], odd[g],
                        to + (g % groups * weights->step + own / TILE_TERMS) * TILE_SIZE + own % TILE_TERMS / 2 * TILE_TERMS,
                                       weights->plane);
            }
        }
    const int n = of;
    EACH(i) v_store(total + i * LANES, v_load(total + i * LANES) + sum[i]);
    return v_any(moved);
}

/* P^T of one group of queries, keys [low, high) of s, into its operand. */
static void FMHA_NAME(pack_weights)(int parts, ptrdiff_t low, ptrdiff_t high, ptrdiff_t queries, const REAL *s, uint16_t *to,
                                    ptrdiff_t plane)
{
    for (ptrdiff_t k = low; k < high; k += 2) {
        VEC a = v_load(s + k * queries), b = v_load(s + (k + 1) * queries);
        uint16_t *at = to + k / TILE_TERMS * TILE_SIZE + k % TILE_TERMS / 2 * TILE_TERMS;
        if (parts == 1) FMHA_NAME(store_parts)(1, 1, a, b, at, plane);
        else if (parts == 2) FMHA_NAME(store_parts)(2, 1, a, b, at, plane);
        else FMHA_NAME(store_parts)(3, 1, a, b, at, plane);
    }
}

/* Zeros for the pairs of keys [low, high) of a group of queries. */
static void FMHA_NAME(clear_weights)(const FMHA_NAME(operand) *weights, ptrdiff_t group, ptrdiff_t low, ptrdiff_t high)
{
    for (int part = 0; part < weights->parts; part++)
        for (ptrdiff_t k = low; k < high; k += 2)
            memset((uint16_t *)weights->tiles + part * weights->plane + (group * weights->step + k / TILE_TERMS) * TILE_SIZE
                   + k % TILE_TERMS / 2 * TILE_TERMS, 0, TILE_TERMS * sizeof(uint16_t));
}

/* Of all groups of queries the keys of their spans, of `whole` ones; returns whether some row shrinks. */
static __attribute__((noinline)) int FMHA_NAME(matrix_softmax)(const FMHA_NAME(rows) *block, int banded, int natural, int kept,
                                                               ptrdiff_t whole, REAL factor, const FMHA_NAME(matrix_memory) *m)
{
    const FMHA_NAME(operand) *weights = &m->weights;
    const ptrdiff_t queries = block->queries, groups = queries / TILE_ROWS;
    int moved = 0;
#define SOFTMAX(parts, groups, pairs, natural, kept) \
    FMHA_NAME(matrix_softmax_of)(parts, groups, pairs, natural, kept, low, high, queries, factor, m->scores + g * TILE_ROWS, \
        (uint16_t *)weights->tiles + g * weights->step * TILE_SIZE, weights, m->peak + g * TILE_ROWS, m->total + g * TILE_ROWS, m->shrink + g * TILE_ROWS)
    ptrdiff_t low = 0, high = whole, g = 0;
    if (groups == 4 && !banded && !natural && !kept) return weights->parts == 1 ? SOFTMAX(1, 4, 1, 0, 0) : SOFTMAX(2, 4, 1, 0, 0);
    for (; g < groups; g++) {
        low = block->low[g];
        high = ROUND_UP(block->high[g], 2);
        FMHA_NAME(clear_weights)(weights, g, 0, low);
        FMHA_NAME(clear_weights)(weights, g, high, whole);
        if (natural && kept) moved |= SOFTMAX(2, 1, 1, 1, 1);
        else if (natural && weights->parts == 1) moved |= SOFTMAX(1, 1, 4, 1, 0);
        else if (natural) moved |= SOFTMAX(2, 1, 4, 1, 0);
        else if (kept && weights->parts == 1) moved |= SOFTMAX(1, 1, 1, 0, 1);
        else if (kept) moved |= SOFTMAX(2, 1, 1, 0, 1);
        else if (weights->parts == 1) moved |= SOFTMAX(1, 1, 4, 0, 0);
        else moved |= SOFTMAX(2, 1, 4, 0, 0);
    }
#undef SOFTMAX
    return moved;
}

/* q of the block as second operand; rows that are odd count as zeros. Returns which are: a bit each. */
static uint64_t FMHA_NAME(matrix_queries)(const fmha_problem *p, const FMHA_NAME(rows) *block, const FMHA_NAME(operand) *q)
{
    const char *row[BLOCK_ROWS];
    unsigned char left_out[BLOCK_ROWS];
    uint64_t odd = 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) row[r] = FMHA_NAME(row_in)(p->element, &p->q, block->b, block->head[r], block->query[r]);
    FMHA_NAME(source) x = {.row = row, .rows = block->rows, .width = p->D};
    if (!FMHA_NAME(pack_operand)(FMHA_NAME(second_transposed), p->element, &x, q)) return 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        left_out[r] = (unsigned char)FMHA_NAME(odd_row)(p->element, row[r], p->D);
        if (left_out[r]) odd |= (uint64_t)1 << r;
    }
    x.left_out = left_out;
    FMHA_NAME(pack_operand)(FMHA_NAME(second_transposed), p->element, &x, q);
    return odd;
}

/* The rows of the block that may attend one of the chunk's odd keys: a bit each. */
static uint64_t FMHA_NAME(odd_rows)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, const unsigned char *odd)
{
    uint64_t rows = 0;
    for (ptrdiff_t k = 0; k < n; k++)
        for (ptrdiff_t r = 0; odd[k] && r < block->rows; r++)
            if (!(rows >> r & 1) && !FMHA_NAME(pair_removed)(p, block, r, j + k, 0)) rows |= (uint64_t)1 << r;
    return rows;
}

/* Of a block, the keys [j, j + n) of the chunk that begins at `start`: `whole` with what products add to them, scored and
 * masked; banded: not all groups of queries attend all. */
typedef struct {
    FMHA_NAME(matrix_chunk) chunk;
    ptrdiff_t start, j, n, whole;
    int banded;
} FMHA_NAME(matrix_part);

/* Keys [*low, *high) of `whole`, by tiles of terms but for the last ones, that the queries of groups g and g + 1 attend. */
static inline void FMHA_NAME(span_of_two)(const FMHA_NAME(rows) *block, ptrdiff_t g, ptrdiff_t whole, ptrdiff_t *low, ptrdiff_t *high)
{
    ptrdiff_t from = block->low[g], to = block->high[g];
    if (g + 1 < block->queries / TILE_ROWS && block->low[g + 1] < block->high[g + 1]) {
        if (from >= to || block->low[g + 1] < from) from = block->low[g + 1];
        if (block->high[g + 1] > to) to = block->high[g + 1];
    }
    *low = from / TILE_TERMS * TILE_TERMS;
    *high = to <= from ? *low : ROUND_UP(to, TILE_TERMS) < whole ? ROUND_UP(to, TILE_TERMS) : whole;
}

/* part->start says which; returns whether one of the keys is attended, and then there are scores. */
static int FMHA_NAME(matrix_scores)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(matrix_memory) *m,
                                    FMHA_NAME(matrix_part) *part)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t start = part->start, queries = block->queries;
    /* Keys before j0 are left out, by whole tiles. */
    const ptrdiff_t j = start < block->j0 ? block->j0 / TILE_TERMS * TILE_TERMS : start;
    const ptrdiff_t n = (block->j1 < start + MATRIX_KEYS ? block->j1 : start + MATRIX_KEYS) - j, whole = ROUND_UP(n, TERM_GRAIN);
    REAL *s = m->scores;
    part->j = j;
    part->n = n;
    part->whole = whole;
    int touched = FMHA_NAME(touched)(block, j, n);
    if (touched && FMHA_NAME(tile_removed)(p, block, j, n)) return 0;
    FMHA_NAME(chunk_at)(run, block->b, block->hkv, start / MATRIX_KEYS, &part->chunk);
    const FMHA_NAME(operand) keys = FMHA_NAME(operand_at)(&part->chunk.keys, (j - start) / TILE_ROWS, 0);
    part->banded = FMHA_NAME(set_spans)(block, j, n, KEY_STEP) || n < whole;
    /* scores^T (keys, queries) <- k (keys, D) @ q^T (D, queries) */
    if (!part->banded) FMHA_NAME(tile_product)(0, whole, queries, p->D, &keys, &m->q, s, queries);
    for (ptrdiff_t g = 0, low, high; part->banded && g < queries / TILE_ROWS; g += 2) {
        FMHA_NAME(span_of_two)(block, g, whole, &low, &high);
        const FMHA_NAME(operand) a = FMHA_NAME(operand_at)(&keys, low / TILE_ROWS, 0), b = FMHA_NAME(operand_at)(&m->q, g, 0);
        FMHA_NAME(tile_product)(0, high - low, TWO_GROUPS(queries, g) * TILE_ROWS, p->D, &a, &b,
                                s + low * queries + g * TILE_ROWS, queries);
    }
    if (FMHA_NAME(natural_scores)(p))
        for (ptrdiff_t e = 0; e < n * queries; e += LANES) v_store(s + e, v_load(s + e) * (REAL)p->scale);
    for (ptrdiff_t e = n * queries; e < ROUND_UP(n, 2) * queries; e += LANES) v_store(s + e, v_splat(NEGATIVE_INFINITY));
    if (touched || FMHA_NAME(rescored)(p)) FMHA_NAME(mask_tile)(p, block, j, s, NULL);
    return 1;
}

/* One block against all its keys, into m's sums, peaks and totals. Returns the rows that tiles cannot do: a bit each. */
static uint64_t FMHA_NAME(matrix_block)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(matrix_memory) *m)
{
    const fmha_problem *p = &run->p;
    const int natural = FMHA_NAME(natural_scores)(p), kept = p->dropout.factor != 0;
    const REAL factor = (REAL)(natural ? LOG2_E : p->scale * LOG2_E);
    const ptrdiff_t queries = block->queries, groups = queries / TILE_ROWS, value_width = ROUND_UP(p->Dv, TILE_ROWS);
    REAL *s = m->scores, *out = m->out;
    FMHA_NAME(matrix_part) part;
    uint64_t odd = FMHA_NAME(matrix_queries)(p, block, &m->q);
    for (ptrdiff_t q = 0; q < queries; q++) {
        REAL sink = q < block->rows ? FMHA_NAME(sink)(p, block->head[q]) : NEGATIVE_INFINITY;
        m->peak[q] = natural ? sink : ceilf(sink * LOG2_E);
        m->total[q] = sink == NEGATIVE_INFINITY ? 0 : natural ? 1 : exp2f(sink * LOG2_E - m->peak[q]);
    }
    int begun = 0;
    for (part.start = block->j0 / MATRIX_KEYS * MATRIX_KEYS; part.start < block->j1 && !fmha_pool_stopped(); part.start += MATRIX_KEYS) {
        if (!FMHA_NAME(matrix_scores)(run, block, m, &part)) continue;
        const FMHA_NAME(matrix_chunk) *chunk = &part.chunk;
        if (chunk->facts->some_odd) odd |= FMHA_NAME(odd_rows)(p, block, part.j, part.n, chunk->odd + (part.j - part.start));
        const FMHA_NAME(operand) values = FMHA_NAME(operand_at)(&chunk->values, 0, (part.j - part.start) / TILE_TERMS);
        int moved = FMHA_NAME(matrix_softmax)(block, part.banded, natural, kept, part.whole, factor, m);
        if (kept) {
            FMHA_NAME(drop_tile)(p, block, part.j, s, NULL);
            for (ptrdiff_t g = 0; g < groups; g++)
                FMHA_NAME(pack_weights)(m->weights.parts, block->low[g], ROUND_UP(block->high[g], 2), queries, s + g * TILE_ROWS,
                                        (uint16_t *)m->weights.tiles + g * m->weights.step * TILE_SIZE, m->weights.plane);
        }
        /* out^T (Dv, queries) <- shrink * out^T + v^T (Dv, keys) @ P^T (keys, queries) */
        for (ptrdiff_t d = 0; begun && moved && d < value_width; d++)
            for (ptrdiff_t q = 0; q < queries; q += LANES)
                v_store(out + d * queries + q, v_load(out + d * queries + q) * v_load(m->shrink + q));
        if (!part.banded) FMHA_NAME(tile_product)(begun, value_width, queries, part.whole, &values, &m->weights, out, queries);
        for (ptrdiff_t g = 0, low, high; part.banded && g < groups; g += 2) {
            FMHA_NAME(span_of_two)(block, g, part.whole, &low, &high);
            const FMHA_NAME(operand) a = FMHA_NAME(operand_at)(&values, 0, low / TILE_TERMS),
                    b = FMHA_NAME(operand_at)(&m->weights, g, low / TILE_TERMS);
            FMHA_NAME(tile_product)(begun, value_width, TWO_GROUPS(queries, g) * TILE_ROWS, high - low, &a, &b,
                                    out + g * TILE_ROWS, queries);
        }
        begun = 1;
    }
    if (!begun) memset(out, 0, (size_t)(value_width * queries) * sizeof(REAL));
    for (ptrdiff_t r = 0; r < block->rows; r++)
        if (!(m->total[r] < FAR_SCORE) || (m->peak[r] != NEGATIVE_INFINITY && !natural && !(m->peak[r] < FAR_SCORE
                && m->peak[r] > -FAR_SCORE)))
            odd |= (uint64_t)1 << r;
    return odd;
}

/* The powers of the chunks that have keys low .. high of the block's head, to those before. */
static void FMHA_NAME(add_powers)(const fmha_run *run, const FMHA_NAME(rows) *block, ptrdiff_t low, ptrdiff_t high,
                                  REAL *keys, REAL *values)
{
    for (ptrdiff_t n = low / MATRIX_KEYS; n * MATRIX_KEYS < high; n++) {
        FMHA_NAME(matrix_chunk) chunk;
        FMHA_NAME(chunk_at)(run, block->b, block->hkv, n, &chunk);
        *keys += chunk.facts->keys;
        *values += chunk.facts->values;
    }
}

/* The same, of a block to which an additive mask says something, without the keys at the ends of each row that this, 0 at the
 * others, probably drowns: see hopeful_block. Returns whether they get nothing; else the block is as before. */
static int FMHA_NAME(hopeful_matrix_block)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(matrix_memory) *m, uint64_t *odd)
{
    const fmha_problem *p = &run->p;
    const FMHA_NAME(rows) before = *block;
    ptrdiff_t from[BLOCK_ROWS], to[BLOCK_ROWS];
    const char *row[BLOCK_ROWS];
    REAL most, k = 0, v = 0;
    if (FMHA_NAME(rescored)(p) || FMHA_NAME(low_runs)(p, block, 0, p->Lk, p->sinks != NULL, from, to, &most) <= 0) return 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) row[r] = FMHA_NAME(row_in)(p->element, &p->q, block->b, block->head[r], block->query[r]);
    const FMHA_NAME(source) q = {.row = row, .rows = block->rows, .width = p->D};
    FMHA_NAME(add_powers)(run, block, block->j0, block->j1, &k, &v);
    block->drowned = FMHA_NAME(drowned_scores)(most, FMHA_NAME(scaled_power)(p, FMHA_NAME(source_power)(p->element, &q)), k, v);
    if (block->drowned == (REAL)INFINITY) return 0;
    FMHA_NAME(take_runs)(p, block, from, to);
    *odd = FMHA_NAME(matrix_block)(run, block, m);
    if (!*odd && FMHA_NAME(is_drowned)(&before, block->drowned, m->peak)) return 1;
    *block = before;
    return 0;
}

/* weights[r, j : j + n] <- inverse * column r of s (n, queries). */
static void FMHA_NAME(write_weight_tile)(const fmha_run *run, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, const REAL *s,
                                         const REAL *inverse)
{
    const fmha_problem *p = &run->p;
    for (ptrdiff_t q = 0; q < block->rows; q += TILE_ROWS)
        for (ptrdiff_t k = 0; k < n; k += TILE_ROWS) {
            VEC row[TILE_ROWS], zero = v_splat(0), factor = v_load(inverse + q);
#pragma GCC unroll 16
            for (int l = 0; l < TILE_ROWS; l++) {
                VEC e = k + l < n ? v_load(s + (k + l) * block->queries + q) : zero;
                row[l] = v_select(v_equal(e, zero), zero, e * factor);      /* 0 also in rows with a NaN */
            }
            FMHA_NAME(transpose_words)((void *)row);
            for (ptrdiff_t l = 0; l < TILE_ROWS && q + l < block->rows; l++) {
                ptrdiff_t of_row = (block->b * p->H + block->head[q + l]) * p->Lq + block->query[q + l];
                v_store_n((REAL *)run->weights + of_row * p->Lk + j + k, row[l], n - k);
            }
        }
}

/* The block's rows of the weights, from its queries, and from the peaks and totals that matrix_block has left: scores once more. */
static void FMHA_NAME(matrix_write_weights)(const fmha_run *run, FMHA_NAME(rows) *block, const FMHA_NAME(matrix_memory) *m)
{
    const fmha_problem *p = &run->p;
    const int natural = FMHA_NAME(natural_scores)(p);
    const REAL factor = (REAL)(natural ? LOG2_E : p->scale * LOG2_E);
    const ptrdiff_t queries = block->queries;
    REAL total[BLOCK_ROWS], inverse[BLOCK_ROWS] = {0}, *s = m->scores;
    FMHA_NAME(matrix_part) part;
    memcpy(total, m->total, (size_t)queries * sizeof(REAL));
    for (ptrdiff_t q = 0; q < queries; q++) inverse[q] = total[q] == 0 ? 0 : 1 / total[q];
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        REAL *to = (REAL *)run->weights + ((block->b * p->H + block->head[r]) * p->Lq + block->query[r]) * p->Lk;
        FMHA_NAME(fill)(block->j0, to, 0);
        FMHA_NAME(fill)(p->Lk - block->j1, to + block->j1, 0);
    }
    for (part.start = block->j0 / MATRIX_KEYS * MATRIX_KEYS; part.start < block->j1 && !fmha_pool_stopped(); part.start += MATRIX_KEYS) {
        if (FMHA_NAME(matrix_scores)(run, block, m, &part)) {
            FMHA_NAME(matrix_softmax)(block, 1, natural, 1, part.whole, factor, m);
            for (ptrdiff_t g = 0; g < queries / TILE_ROWS; g++)
                for (ptrdiff_t k = 0; k < part.n; k++)
                    if (k < block->low[g] || k >= block->high[g]) v_store(s + k * queries + g * TILE_ROWS, v_splat(0));
            if (p->dropout.factor != 0) FMHA_NAME(drop_tile)(p, block, part.j, s, NULL);
        } else memset(s, 0, (size_t)(part.n * queries) * sizeof(REAL));
        const ptrdiff_t skip = part.j < block->j0 ? block->j0 - part.j : 0;
        FMHA_NAME(write_weight_tile)(run, block, part.j + skip, part.n - skip, s + skip * queries, inverse);
    }
    memcpy(m->total, total, (size_t)queries * sizeof(REAL));
}

/* The block's rows of out and lse, but those that are odd. Returns these, and those found to be tiny: a bit each. */
static uint64_t FMHA_NAME(write_matrix_block)(const fmha_run *run, const FMHA_NAME(rows) *block,
                                              const FMHA_NAME(matrix_memory) *m, uint64_t odd)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t queries = block->queries, width = ROUND_UP(p->Dv, TILE_ROWS);
    REAL *rows = m->scores;         /* (16, width), the scores are done with */
    for (ptrdiff_t q = 0; q < block->rows; q += TILE_ROWS) {
        VEC total = v_load(m->total + q), inverse = v_select(v_equal(total, v_splat(0)), v_splat(0), v_splat(1) / total);
        for (ptrdiff_t d = 0; d < width; d += TILE_ROWS) {
            VEC row[TILE_ROWS];
#pragma GCC unroll 16
            for (int l = 0; l < TILE_ROWS; l++) row[l] = v_load(m->out + (d + l) * queries + q) * inverse;
            FMHA_NAME(transpose_words)((void *)row);
#pragma GCC unroll 16
            for (int l = 0; l < TILE_ROWS; l++) v_store(rows + l * width + d, row[l]);
        }
        for (ptrdiff_t l = 0; l < TILE_ROWS && q + l < block->rows; l++) {
            ptrdiff_t r = q + l;
            if (odd >> r & 1) continue;
            if (m->total[r] != 0 && FMHA_NAME(tiny_row)(p->Dv, rows + l * width)) {
                odd |= (uint64_t)1 << r;
                continue;
            }
            FMHA_NAME(store_sums)(p->element, 1, p->Dv, rows + l * width, 0,
                                  FMHA_NAME(row_in)(p->element, &run->out, block->b, block->head[r], block->query[r]), 0);
            FMHA_NAME(write_lse)(run, block, r, FMHA_NAME(natural_scores)(p) ? m->peak[r] : m->peak[r] * (REAL)0x1.62e42fefa39efp-1, m->total[r]);
        }
    }
    return odd;
}

/* Item: one block of rows of one group. */
static void FMHA_NAME(matrix_forward)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    FMHA_NAME(matrix_memory) m;
    FMHA_NAME(rows) block;
    REAL *scratch = FMHA_NAME(scratch_of)(run, worker);
    ptrdiff_t used = FMHA_NAME(matrix_layout)(&run->p, scratch, &m);
    const fmha_item item = FMHA_NAME(item_rows)(run, index, &block);
    uint64_t odd, even = 0;
    FMHA_NAME(mask_rows)(&run->p, &block, 0, run->p.Lk);
    if (block.additive && !run->weights) {
        REAL keys = 0, values = 0;
        FMHA_NAME(forward_memory) memory;
        FMHA_NAME(forward_layout)(&run->p, TILE_KEYS, scratch + used, &memory);
        FMHA_NAME(begin_item)(&run->p);
        FMHA_NAME(add_powers)(run, &block, 0, run->p.Lk, &keys, &values);
        even = FMHA_NAME(even_rows)(run, &item, &block, &memory, keys, ALL_ROWS);
    }
    FMHA_NAME(t_configure)();
    if (!block.additive || !FMHA_NAME(hopeful_matrix_block)(run, &block, &m, &odd)) odd = FMHA_NAME(matrix_block)(run, &block, &m);
    if (run->weights) FMHA_NAME(matrix_write_weights)(run, &block, &m);
    t_release();
    odd = FMHA_NAME(write_matrix_block)(run, &block, &m, odd | even) & ~even;
    if (odd && run->weights) FMHA_NAME(weights_rows)(run, &item, &block, scratch + used, odd);
    else if (odd) FMHA_NAME(forward_rows)(run, &item, &block, scratch + used, odd);
}

/* A run's own of head n: its operands in the scratch of a thread. */
static fmha_run FMHA_NAME(run_of_head)(const fmha_run *run, ptrdiff_t n, char *operands)
{
    fmha_run own = *run;
    own.shared = operands;
    own.first_shared = n;
    return own;
}

/* The items of one head of a cut, in their order. */
static void FMHA_NAME(each_of_head)(fmha_run *run, fmha_cut cut, fmha_task task, int worker)
{
    run->cut = cut;
    run->cut.first = run->first_shared;
    run->cut.last = run->first_shared + 1;
    for (ptrdiff_t n = 0; n < fmha_items(&run->cut) && !fmha_pool_stopped(); n++) task(run, n, worker);
}

/* Item: a head. */
static void FMHA_NAME(matrix_head)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    char *scratch = (char *)FMHA_NAME(scratch_of)(run, worker);
    fmha_run own = FMHA_NAME(run_of_head)(run, run->cut.first + index, scratch);
    own.scratch += FMHA_NAME(matrix_bytes)(&run->p);
    FMHA_NAME(each_of_head)(&own, FMHA_NAME(matrix_cut)(&run->p, 0), FMHA_NAME(matrix_pack), worker);
    FMHA_NAME(each_of_head)(&own, fmha_forward_cut(&run->p), FMHA_NAME(matrix_forward), worker);
}
