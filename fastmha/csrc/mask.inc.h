/* What stands between the scores of a tile and their softmax, in "tiled": softcap, ALiBi, masks, causality, windows and lengths,
 * dropout; and which tiles and keys these leave out. */

/* Whether scores are more than scaled products. */
static inline int FMHA_NAME(rescored)(const fmha_problem *p) { return p->softcap != 0 || p->alibi != NULL; }

/* Whether masks or ranges touch the tile of keys [j, j + n). */
static inline int FMHA_NAME(touched)(const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n)
{
    return block->boolean || block->additive || j < block->common0 || j + n > block->common1;
}

/* Where a mask's row for row r of the block starts, at key j. */
static inline const char *FMHA_NAME(mask_row_at)(const fmha_array *mask, const FMHA_NAME(rows) *block, ptrdiff_t r, ptrdiff_t j,
                                                 ptrdiff_t size)
{
    const ptrdiff_t *stride = mask->stride;
    return mask->data + (block->b * stride[0] + block->head[r] * stride[1] + block->query[r] * stride[2] + j * stride[3]) * size;
}

/* Whether a mask removes all of the tile: read up to the first pair that it leaves. */
static int FMHA_NAME(tile_removed)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element);
    for (int boolean = 0; boolean < 2; boolean++) {
        const fmha_array *mask = boolean ? &p->bool_mask : &p->additive_mask;
        if (!(boolean ? block->boolean : block->additive)) continue;
        ptrdiff_t rows = mask->stride[1] == 0 && mask->stride[2] == 0 ? 1 : block->rows, step = mask->stride[3], r = 0, k = n;
        for (; r < rows && k == n; r++) {
            const char *m = FMHA_NAME(mask_row_at)(mask, block, r, j, boolean ? 1 : size);
            if (boolean && step == 1) k = memchr(m, 0, (size_t)n) ? 0 : n;
            else if (boolean) for (k = 0; k < n && m[k * step]; k++) {}
            else for (k = 0; k < n && FMHA_NAME(stored_value)(p->mask_element, m + k * step * size) == NEGATIVE_INFINITY; k++) {}
        }
        if (k == n) return 1;
    }
    return 0;
}

#define DROWNED_BELOW -1000     /* an additive mask as low may leave keys nothing beside others */

/* How many of a row of the mask are so low, of at most n from m on, one behind the other or, if `back`, before it; most: of
 * those looked at. */
static ptrdiff_t FMHA_NAME(low_masks)(const fmha_problem *p, const char *m, int back, ptrdiff_t n, REAL *most)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element), step = (back ? -size : size) * p->additive_mask.stride[3];
    const ptrdiff_t lowest = step < 0 ? (1 - LANES) * size : 0, whole = step == size || step == -size ? n / LANES * LANES : 0;
    const ptrdiff_t row = p->additive_mask.stride[2] * size;
    VEC best = v_splat(*most);
    ptrdiff_t k = 0;
#define LOW_MASKS(type) \
    for (; k < whole; k += LANES) { \
        const VEC some = FMHA_NAME(stored_load)(type, m + k * step + lowest); \
        v_prefetch(m + k * step + lowest + row);     /* of the next row, as below */ \
        if (v_any(~v_greater(v_splat(DROWNED_BELOW), some))) break; \
        best = v_max(some, best); \
    }
    if (p->mask_element == FMHA_HALF) { LOW_MASKS(FMHA_HALF) }
    else if (p->mask_element == FMHA_BFLOAT) { LOW_MASKS(FMHA_BFLOAT) }
    else { LOW_MASKS(FMHA_SAME) }
#undef LOW_MASKS
    *most = FMHA_NAME(largest)(best);
    for (; k < n; k++) {
        const REAL one = FMHA_NAME(stored_value)(p->mask_element, m + k * step);
        if (!(one < DROWNED_BELOW)) return k;
        if (one > *most) *most = one;
    }
    return n;
}

/* Of n keys from key j on so many, the first and the last ones, of all of whose pairs an additive mask is so low, in whole
 * steps. Returns the most it is of them, or somewhat more. Of a mask that no vectors can read, one for each query, it takes too
 * long to ask. */
static REAL FMHA_NAME(low_ends)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n,
                                ptrdiff_t *ahead, ptrdiff_t *behind)
{
    const fmha_array *mask = &p->additive_mask;
    const int of_keys = fmha_of_keys(mask);
    REAL most = NEGATIVE_INFINITY;
    *ahead = *behind = of_keys || mask->stride[3] == 1 || mask->stride[3] == -1 ? n : 0;
    for (ptrdiff_t r = 0; r < (of_keys ? 1 : block->rows) && *ahead + *behind > 0; r++) {
        const char *m = FMHA_NAME(mask_row_at)(mask, block, r, j, FMHA_NAME(stored_size)(p->mask_element));
        *ahead = FMHA_NAME(low_masks)(p, m, 0, *ahead, &most);
        m = FMHA_NAME(mask_row_at)(mask, block, r, j + n - 1, FMHA_NAME(stored_size)(p->mask_element));
        if (*ahead < n) *behind = FMHA_NAME(low_masks)(p, m, 1, *behind, &most);
    }
    const ptrdiff_t from = (j + *ahead) / FMHA_SUM_KEYS * FMHA_SUM_KEYS - j, base = from > 0 ? from : 0;     /* where the sums begin */
    if (*ahead == n) *behind = 0;
    else *ahead = base + (*ahead - base) / KEY_STEP * KEY_STEP;
    return most;
}

/* The sum of the squares of rows. */
static REAL FMHA_NAME(power)(ptrdiff_t rows, ptrdiff_t cols, const REAL *x, ptrdiff_t ld)
{
    VEC sum[4] = {v_splat(0), v_splat(0), v_splat(0), v_splat(0)};      /* none waits for the one before */
    for (ptrdiff_t i = 0; i < rows; i++, x += ld) {
        ptrdiff_t d = 0;
        for (; d + 4 * LANES <= cols; d += 4 * LANES)
#pragma GCC unroll 4
            for (int e = 0; e < 4; e++) sum[e] = sum[e] + v_load(x + d + e * LANES) * v_load(x + d + e * LANES);
        for (; d < cols; d += LANES) {
            const VEC value = v_load_n(x + d, cols - d, 0);
            sum[i % 4] = sum[i % 4] + value * value;
        }
    }
    return FMHA_NAME(sum)((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* What no score of keys is above where their mask is `most` or less, by the powers of the queries and of the keys, rounded as it
 * may be; or infinity, if it is not far below 0 then or something is so large that more than scores counts, or not finite: v is
 * the power of the values, or of these and of grad_out together. A row with a score so far above it that exp gives 0 gets
 * nothing from such keys: without them all bits are the same. */
static REAL FMHA_NAME(drowned_scores)(REAL most, REAL q, REAL k, REAL v)
{
    const REAL bound = (REAL)(sqrt((double)q) * sqrt((double)k));
    if (!(bound <= -most / 4) || !(v < HUGE_POWER)) return (REAL)INFINITY;
    return most * (REAL)0.999 + bound;
}

#define MASK_KEYS 32        /* keys of a boolean mask that are looked at together: as many as a lane of float32 has bits */

/* Which of n <= MASK_KEYS bytes, `step` apart, are not 0: one bit each. before: bytes that may be read ahead of m. */
static inline uint32_t FMHA_NAME(bits_of)(const char *m, ptrdiff_t step, ptrdiff_t n, ptrdiff_t before)
{
    uint32_t bits = 0;
#if defined(X86_OP)
    ptrdiff_t back = MASK_KEYS - n;
    if (step == 1 && back > before && n >= 8) {     /* two ends that overlap */
        const ptrdiff_t part = n >= 16 ? 16 : 8;
        __m128i low = _mm_loadl_epi64((const __m128i *)m), high = _mm_loadl_epi64((const __m128i *)(m + n - 8));
        if (n >= 16) low = _mm_loadu_si128((const __m128i *)m), high = _mm_loadu_si128((const __m128i *)(m + n - 16));
        const uint32_t first = ~(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(low, _mm_setzero_si128())) & (((uint32_t)1 << part) - 1);
        const uint32_t last = ~(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(high, _mm_setzero_si128())) & (((uint32_t)1 << part) - 1);
        return first | last << (n - part);
    }
    if (step == 1 && back <= before) {
#if FMHA_VECTOR_BYTES >= 32
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(m - back));
        bits = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256()));
#else
        __m128i low = _mm_loadu_si128((const __m128i *)(m - back)), high = _mm_loadu_si128((const __m128i *)(m - back + 16));
        bits = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(low, _mm_setzero_si128()));
        bits = ~(bits | (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(high, _mm_setzero_si128())) << 16);
#endif
        return bits >> back;
    }
#elif defined(ARM_OP)
    ptrdiff_t back = MASK_KEYS - n;
    if (step == 1 && back <= before) {
        const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        uint8x16_t low = vld1q_u8((const uint8_t *)m - back), high = vld1q_u8((const uint8_t *)m - back + 16);
        uint8x16_t sums = vpaddq_u8(vandq_u8(vtstq_u8(low, low), bit), vandq_u8(vtstq_u8(high, high), bit));
        sums = vpaddq_u8(sums, sums);       /* eight bytes become one, by the third */
        sums = vpaddq_u8(sums, sums);
        return vgetq_lane_u32(vreinterpretq_u32_u8(sums), 0) >> back;
    }
#endif
    (void)before;
    for (ptrdiff_t k = 0; k < n; k++) bits |= (uint32_t)(m[k * step] != 0) << k;
    return bits;
}

/* The run of keys from the first to the last one that a row of a mask leaves, and whether the mask says nothing else of it. */
typedef struct {
    ptrdiff_t from, to;
    int whole;
} FMHA_NAME(key_run);

static FMHA_NAME(key_run) FMHA_NAME(boolean_run)(const char *m, ptrdiff_t low, ptrdiff_t high)
{
    FMHA_NAME(key_run) run = {low, low, 1};
    ptrdiff_t left = 0;
    for (ptrdiff_t k = low; k < high; k += MASK_KEYS) {
        const ptrdiff_t n = high - k < MASK_KEYS ? high - k : MASK_KEYS;
        const uint32_t some = ~FMHA_NAME(bits_of)(m + k, 1, n, k) & (uint32_t)(((uint64_t)1 << n) - 1);
        if (!some) continue;
        if (left == 0) run.from = k + __builtin_ctz(some);
        run.to = k + MASK_KEYS - __builtin_clz(some);
        left += __builtin_popcount(some);
    }
    run.whole = left == run.to - run.from;
    return run;
}

/* Of the row `ahead` bytes on the same place is fetched: rows are gone through from both ends, so that no CPU guesses what comes next. */
#define ALL_ARE(what, at) \
    (v_prefetch(m + (at) * size + ahead), !v_any(~v_equal(FMHA_NAME(stored_load)(type, m + (at) * size), v_splat(what))))
#define ONE_IS(what, at) (FMHA_NAME(stored_value)(type, m + (at) * size) == (what))
INLINED int FMHA_NAME(all_are)(const int type, const char *m, ptrdiff_t from, ptrdiff_t to, REAL what, ptrdiff_t ahead)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    while (from + LANES <= to && ALL_ARE(what, from)) from += LANES;
    while (from < to && ONE_IS(what, from)) from++;
    return from == to;
}

INLINED FMHA_NAME(key_run) FMHA_NAME(additive_run)(const int type, const char *m, ptrdiff_t from, ptrdiff_t to, ptrdiff_t ahead)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    while (from + LANES <= to && ALL_ARE(NEGATIVE_INFINITY, from)) from += LANES;
    while (from < to && ONE_IS(NEGATIVE_INFINITY, from)) from++;
    while (to - LANES >= from && ALL_ARE(NEGATIVE_INFINITY, to - LANES)) to -= LANES;
    while (to > from && ONE_IS(NEGATIVE_INFINITY, to - 1)) to--;
    return (FMHA_NAME(key_run)){from, to, FMHA_NAME(all_are)(type, m, from, to, 0, ahead)};
}
#undef ALL_ARE
#undef ONE_IS

#define OF_MASK(name, ...) \
    (p->mask_element == FMHA_HALF ? FMHA_NAME(name)(FMHA_HALF, __VA_ARGS__) \
     : p->mask_element == FMHA_BFLOAT ? FMHA_NAME(name)(FMHA_BFLOAT, __VA_ARGS__) : FMHA_NAME(name)(FMHA_SAME, __VA_ARGS__))

/* Masks that leave each row of a block a run of keys, as those of causality and padding do: of [first, last), which is all that
 * the block is asked for afterwards, these runs become the keys of the rows, and a mask that says no more is not read again. At
 * a row where that would gain nothing it is given up. */
static __attribute__((noinline)) void FMHA_NAME(mask_rows)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t first, ptrdiff_t last)
{
    int some = 0;
    for (int boolean = 1; boolean >= 0; boolean--) {
        const fmha_array *mask = boolean ? &p->bool_mask : &p->additive_mask;
        const char *before = NULL;
        FMHA_NAME(key_run) run = {0, 0, 1};
        ptrdiff_t r = 0, low = 0, high = 0;
        int whole = 1;
        if (!mask->data || mask->stride[3] != 1) continue;
        for (; r < block->rows; r++) {
            const char *m = FMHA_NAME(mask_row_at)(mask, block, r, 0, boolean ? 1 : FMHA_NAME(stored_size)(p->mask_element));
            const ptrdiff_t from = block->row0[r] > first ? block->row0[r] : first, to = block->row1[r] < last ? block->row1[r] : last;
            if (from >= to) continue;
            if (m != before || from != low || to != high)
                run = boolean ? FMHA_NAME(boolean_run)(m, from, to) : OF_MASK(additive_run, m, from, to, mask->stride[2] * FMHA_NAME(stored_size)(p->mask_element));
            before = m;
            low = from;
            high = to;
            if (!run.whole && run.from == from && run.to == to) break;
            whole &= run.whole;
            some = 1;
            block->row0[r] = run.from;
            block->row1[r] = run.to;
        }
        if (r < block->rows || !whole) continue;
        if (boolean) block->boolean = 0;
        else block->additive = 0;
    }
    if (some) FMHA_NAME(rows_together)(p, block);
}

/* The same of an additive mask that is not -inf at the ends but so low that these keys probably get nothing: then what each row
 * attends are [from, to) of its keys, and most is the most that the mask is elsewhere, or somewhat more. Returns 0 where the
 * mask says more, and -1 where it is so low throughout a row, unless that does not matter. */
static int FMHA_NAME(low_runs)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t first, ptrdiff_t last, int throughout,
                               ptrdiff_t *from, ptrdiff_t *to, REAL *most)
{
    const fmha_array *mask = &p->additive_mask;
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element);
    const char *before = NULL;
    *most = NEGATIVE_INFINITY;
    if (block->boolean || !block->additive || mask->stride[3] != 1) return 0;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        const char *m = FMHA_NAME(mask_row_at)(mask, block, r, 0, size);
        if (m == before && block->row0[r] == block->row0[r - 1] && block->row1[r] == block->row1[r - 1]) {     /* as of padding */
            from[r] = from[r - 1];
            to[r] = to[r - 1];
            continue;
        }
        before = m;
        from[r] = block->row0[r] > first ? block->row0[r] : first;
        to[r] = block->row1[r] < last ? block->row1[r] : last;
        if (from[r] >= to[r]) continue;
        from[r] += FMHA_NAME(low_masks)(p, m + from[r] * size, 0, to[r] - from[r], most);
        if (from[r] == to[r] && !throughout) return -1;
        to[r] -= FMHA_NAME(low_masks)(p, m + (to[r] - 1) * size, 1, to[r] - from[r], most);
        if (!OF_MASK(all_are, m, from[r], to[r], 0, mask->stride[2] * size)) return 0;
    }
    return 1;
}

/* These become the keys of the rows. */
static void FMHA_NAME(take_runs)(const fmha_problem *p, FMHA_NAME(rows) *block, const ptrdiff_t *from, const ptrdiff_t *to)
{
    memcpy(block->row0, from, (size_t)block->rows * sizeof(ptrdiff_t));
    memcpy(block->row1, to, (size_t)block->rows * sizeof(ptrdiff_t));
    block->additive = 0;
    FMHA_NAME(rows_together)(p, block);
}

/* A boolean mask on keys [low, high) of one vector of rows of the tile's scores^T: MASK_KEYS of a row are the bits of its lane. */
static void FMHA_NAME(mask_boolean)(const fmha_array *mask, const FMHA_NAME(rows) *block, ptrdiff_t v, ptrdiff_t j, ptrdiff_t low,
                                    ptrdiff_t high, REAL *s)
{
    ptrdiff_t step = mask->stride[3], rows = block->rows - v * LANES < LANES ? block->rows - v * LANES : LANES;
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (ptrdiff_t k = low; k < high; k += MASK_KEYS) {
        ptrdiff_t n = high - k < MASK_KEYS ? high - k : MASK_KEYS;
        INT lanes[LANES] = {0}, any = 0;
        for (ptrdiff_t l = 0; l < rows; l++)
            any |= lanes[l] = (INT)FMHA_NAME(bits_of)(FMHA_NAME(mask_row_at)(mask, block, v * LANES + l, j + k, 1), step, n, k - low);
        if (!any) continue;
        IVEC bits = i_load(lanes);
        REAL *to = s + k * block->ld + v * LANES;
        for (ptrdiff_t e = 0; e < n; e++, to += block->ld)
            v_store(to, v_select(v_truth((bits & i_splat((INT)((uint32_t)1 << e))) != 0), gone, v_load(to)));
    }
}

/* An additive mask there: squares of LANES rows and keys are transposed in registers, what is left over goes one by one. */
INLINED void FMHA_NAME(mask_additive)(const int type, const fmha_array *mask, const FMHA_NAME(rows) *block, ptrdiff_t v, ptrdiff_t j,
                                      ptrdiff_t low, ptrdiff_t high, REAL *s)
{
    ptrdiff_t ld = block->ld, step = mask->stride[3], size = FMHA_NAME(stored_size)(type), q = v * LANES, k = low;
    ptrdiff_t rows = block->rows - q < LANES ? block->rows - q : LANES;
    const char *row[LANES];
    for (ptrdiff_t l = 0; l < rows; l++) row[l] = FMHA_NAME(mask_row_at)(mask, block, q + l, j, size);
#if HAVE_TRANSPOSE
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (; rows == LANES && step == 1 && k + LANES <= high; k += LANES) {
        VEC part[LANES];
#pragma GCC unroll 16
        for (ptrdiff_t l = 0; l < LANES; l++) part[l] = FMHA_NAME(stored_load)(type, row[l] + k * size);
        FMHA_NAME(transpose)(part);
#pragma GCC unroll 16
        for (ptrdiff_t l = 0; l < LANES; l++) {
            REAL *to = s + (k + l) * ld + q;
            v_store(to, v_select(v_equal(part[l], gone), gone, v_load(to) + part[l]));
        }
    }
#endif
    for (ptrdiff_t l = 0; l < rows; l++)
        for (ptrdiff_t e = k; e < high; e++) {
            REAL *to = s + e * ld + q + l, add = FMHA_NAME(stored_value)(type, row[l] + e * step * size);
            *to = add == NEGATIVE_INFINITY ? add : *to + add;
        }
}

/* scores^T <- scores^T - alibi * distance there. */
static void FMHA_NAME(alibi_columns)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t v, ptrdiff_t j, ptrdiff_t low,
                                     ptrdiff_t high, REAL *s)
{
    ptrdiff_t ld = block->ld, q = v * LANES, rows = block->rows - q < LANES ? block->rows - q : LANES;
    REAL ahead[LANES], slope[LANES];
    int64_t place[LANES];
    int exact = j + high < EXACT_DISTANCE;
    for (ptrdiff_t l = 0; l < LANES; l++) {
        place[l] = l < rows ? (int64_t)block->query[q + l] + p->offset[block->b] : 0;
        slope[l] = l < rows ? ((const REAL *)p->alibi)[block->head[q + l]] : 0;
        ahead[l] = (REAL)(place[l] - j);
        exact &= place[l] < EXACT_DISTANCE && place[l] > -EXACT_DISTANCE;
    }
    VEC from = v_load(ahead), slopes = v_load(slope);
    for (ptrdiff_t k = low; exact && k < high; k++) {
        REAL *to = s + k * ld + q;
        v_store(to, v_load(to) - v_abs(from - v_splat((REAL)k)) * slopes);
    }
    for (ptrdiff_t k = low; !exact && k < high; k++)
        for (ptrdiff_t l = 0; l < rows; l++) s[k * ld + q + l] += FMHA_NAME(alibi_term)(slope[l], place[l], j + k);
}

/* scores^T (keys, queries), of each vector of rows the keys of its span: softcap, alibi, additive mask, then -inf where a pair is
 * removed. slope, if given, gets the derivative of the softcap. */
static void FMHA_NAME(mask_tile)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t j, REAL *s, REAL *slope)
{
    ptrdiff_t queries = block->queries, ld = block->ld;
    const ptrdiff_t *add_stride = p->additive_mask.stride, *remove_stride = p->bool_mask.stride;
    VEC gone = v_splat(NEGATIVE_INFINITY);
    for (ptrdiff_t v = 0; v < queries / LANES; v++) {
        ptrdiff_t low = block->low[v], high = block->high[v];
        REAL *column = s + v * LANES;
        REAL *slopes = slope ? slope + low * ld + v * LANES : NULL;
        if (p->softcap != 0) FMHA_NAME(cap_columns)(high - low, ld, column + low * ld, p->softcap, slopes);
        if (p->alibi) FMHA_NAME(alibi_columns)(p, block, v, j, low, high, s);
        if (block->additive && (add_stride[1] || add_stride[2])) {
            switch (p->mask_element) {
            case FMHA_HALF: FMHA_NAME(mask_additive)(FMHA_HALF, &p->additive_mask, block, v, j, low, high, s); break;
            case FMHA_BFLOAT: FMHA_NAME(mask_additive)(FMHA_BFLOAT, &p->additive_mask, block, v, j, low, high, s); break;
            default: FMHA_NAME(mask_additive)(FMHA_SAME, &p->additive_mask, block, v, j, low, high, s);
            }
        } else if (block->additive) {
            const ptrdiff_t size = FMHA_NAME(stored_size)(p->mask_element);
            const char *from = FMHA_NAME(mask_row_at)(&p->additive_mask, block, 0, j, size);
            REAL row[TILE_KEYS];
            const REAL *m = p->mask_element == FMHA_SAME ? (const REAL *)from : row;
            ptrdiff_t step = p->mask_element == FMHA_SAME ? add_stride[3] : 1;
            for (ptrdiff_t k = low; m == row && k < high; k++)
                row[k] = FMHA_NAME(stored_value)(p->mask_element, from + k * add_stride[3] * size);
            for (ptrdiff_t k = low; k < high; k++) {
                VEC add = v_splat(m[k * step]);
                v_store(column + k * ld, v_select(v_equal(add, gone), gone, v_load(column + k * ld) + add));
            }
        }
        if (block->boolean && (remove_stride[1] || remove_stride[2])) {
            FMHA_NAME(mask_boolean)(&p->bool_mask, block, v, j, low, high, s);
        } else if (block->boolean) {
            const char *m = FMHA_NAME(mask_row_at)(&p->bool_mask, block, 0, j, 1);
            for (ptrdiff_t k = low; k < high; k++)
                if (m[k * remove_stride[3]]) v_store(column + k * ld, gone);
        }
        ptrdiff_t inner = block->all0[v] - j, outer = block->all1[v] - j;     /* rows differ before inner and from outer on */
        if (inner <= low && outer >= high) continue;
        INT from[LANES], to[LANES];
        for (ptrdiff_t l = 0; l < LANES; l++) {
            ptrdiff_t row0 = block->row0[v * LANES + l] - j, row1 = block->row1[v * LANES + l] - j;
            from[l] = (INT)(row0 < low ? low : row0 > high ? high : row0);
            to[l] = (INT)(row1 < low ? low : row1 > high ? high : row1);
        }
        IVEC first = i_load(from), last = i_load(to);
        for (ptrdiff_t k = low; k < high; k++) {
            if (k >= inner && k < outer) {
                k = outer - 1;
                continue;
            }
            v_store(column + k * ld, v_select(i_within(first, i_splat(k), last), v_load(column + k * ld), gone));
        }
    }
}

/* x^T (keys, queries), of each vector of rows the keys of its span, <- x^T times what dropout draws, which kept^T gets if given. */
static void FMHA_NAME(drop_tile)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, REAL *x, REAL *kept)
{
    const fmha_dropout *draws = &p->dropout;
    ptrdiff_t ld = block->ld;
    j += draws->j;
    for (ptrdiff_t q = 0; q < block->queries; q += LANES) {
        ptrdiff_t low = block->low[q / LANES], high = block->high[q / LANES];
        uint64_t query[PARTS][WIDES], head[PARTS][WIDES];
        for (ptrdiff_t l = 0; l < LANES; l++) {
            ptrdiff_t r = q + l < block->rows ? q + l : q;
            query[l % PARTS][l / PARTS] = (uint64_t)(draws->i + block->query[r]);
            head[l % PARTS][l / PARTS] = (uint64_t)(draws->h + block->head[r]);
        }
        for (ptrdiff_t quad = (j + low) / 4; 4 * quad < j + high; quad++) {
            WIDE c[PARTS][4], word[4][PARTS];
            for (ptrdiff_t part = 0; part < PARTS; part++) {
                c[part][0] = w_splat(quad);
                memcpy(&c[part][1], query[part], sizeof query[part]);
                memcpy(&c[part][2], head[part], sizeof head[part]);
                c[part][3] = w_splat(draws->b + block->b);
                FMHA_NAME(philox)(draws->seed, c[part]);
                for (int w = 0; w < 4; w++) word[w][part] = c[part][w];
            }
            for (int w = 0; w < 4; w++) {
                ptrdiff_t k = 4 * quad + w - j;
                if (k < low || k >= high) continue;
                VEC factor = FMHA_NAME(drop_factor)(draws, word[w]);
                v_store(x + k * ld + q, v_load(x + k * ld + q) * factor);
                if (kept) v_store(kept + k * ld + q, factor);
            }
        }
    }
}
