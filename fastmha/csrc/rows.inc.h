/* Row kernels: what happens to scores between two products, one row after the other. No algorithm here knows its
 * instruction set: REAL, VEC and LANES come from vec.inc.h. Rows may have any length; no element outside is touched. */

/* sum(exp(x - peak)) of a row, exp(x - peak) written to y; a peak of -inf means that no score is a number above -inf. */
static inline REAL FMHA_NAME(exp_row)(ptrdiff_t n, const REAL *x, REAL peak, REAL *y)
{
    VEC total = v_splat(0), e[EXP_CHAINS];
    ptrdiff_t j = 0;
    for (; j + EXP_CHAINS * LANES <= n; j += EXP_CHAINS * LANES) {
#pragma GCC unroll 8
        for (int i = 0; i < EXP_CHAINS; i++) e[i] = v_load(x + j + i * LANES) - v_splat(peak);
        FMHA_NAME(exp_each)(EXP_CHAINS, e);
#pragma GCC unroll 8
        for (int i = 0; i < EXP_CHAINS; i++) {
            total = total + e[i];
            v_store(y + j + i * LANES, e[i]);
        }
    }
    for (; j < n; j += LANES) {
        e[0] = v_load_n(x + j, n - j, NEGATIVE_INFINITY) - v_splat(peak);
        FMHA_NAME(exp_each)(1, e);
        total = total + e[0];
        v_store_n(y + j, e[0], n - j);
    }
    return FMHA_NAME(sum)(total);
}

/* The largest score, and sink, NaN passed over. A row of only -inf and NaN, or of only -inf: 0, so that exp gives NaN or 0. */
static inline REAL FMHA_NAME(row_peak)(ptrdiff_t n, const REAL *x, REAL sink)
{
    VEC best = v_splat(sink);
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC s = v_load_n(x + j, n - j, NEGATIVE_INFINITY);
        best = v_max(s, best);
    }
    REAL peak = FMHA_NAME(largest)(best);
    return peak == NEGATIVE_INFINITY ? 0 : peak;
}

static inline void FMHA_NAME(fill)(ptrdiff_t n, REAL *x, REAL value)
{
    for (ptrdiff_t j = 0; j < n; j++) x[j] = value;
}

/* to <- x / divisor. An empty row (0 / 0) gives zeros; a NaN divisor makes NaN of what is not exactly 0: a removed position
 * keeps its 0 in a row that has met a NaN. Returns trace plus 0 * x, of which the lanes are 0 as long as all x are finite. */
static inline VEC FMHA_NAME(divided_row)(ptrdiff_t n, const REAL *x, REAL divisor, REAL *to, VEC trace)
{
    if (divisor >= 0 && divisor < (REAL)INFINITY) {
        VEC inverse = v_splat(divisor == 0 ? 1 : 1 / divisor), zero = v_splat(0);
        ptrdiff_t j = 0;
        for (; j + LANES <= n; j += LANES) {
            const VEC value = v_load(x + j);
            trace = trace + value * zero;
            v_store(to + j, value * inverse);
        }
        if (j == n) return trace;
        const VEC value = v_load_n(x + j, n - j, 0);
        trace = trace + value * zero;
        v_store_n(to + j, value * inverse, n - j);
    } else {
        for (ptrdiff_t j = 0; j < n; j++) {
            trace = trace + v_splat(x[j] * 0);
            to[j] = x[j] == 0 ? 0 : x[j] / divisor;
        }
    }
    return trace;
}

/* NaN <- one of them: which operand a sum or product takes the sign from may follow the instructions, and these how many rows are at work. */
static void FMHA_NAME(one_nan)(ptrdiff_t n, REAL *x)
{
    for (ptrdiff_t d = 0; d < n; d++)
        if (x[d] != x[d]) x[d] = (REAL)NAN;
}

static inline void FMHA_NAME(divide_row)(ptrdiff_t n, REAL *x, REAL divisor) { FMHA_NAME(divided_row)(n, x, divisor, x, v_splat(0)); }

static void FMHA_NAME(divide_rows)(ptrdiff_t rows, ptrdiff_t cols, void *x_, ptrdiff_t ldx, const void *divisor_)
{
    REAL *x = x_;
    const REAL *divisor = divisor_;
    for (ptrdiff_t i = 0; i < rows; i++) FMHA_NAME(divide_row)(cols, x + i * ldx, divisor[i]);
}

static void FMHA_NAME(softmax)(ptrdiff_t rows, ptrdiff_t cols, const void *x_, ptrdiff_t ldx, void *y_, ptrdiff_t ldy)
{
    for (ptrdiff_t i = 0; i < rows; i++) {
        const REAL *x = (const REAL *)x_ + i * ldx;
        REAL *y = (REAL *)y_ + i * ldy;
        REAL total = FMHA_NAME(exp_row)(cols, x, FMHA_NAME(row_peak)(cols, x, NEGATIVE_INFINITY), y);
        FMHA_NAME(divide_row)(cols, y, total);
    }
}

static void FMHA_NAME(softmax_backward)(ptrdiff_t rows, ptrdiff_t cols, const void *dy_, ptrdiff_t lddy, const void *y_,
                                        ptrdiff_t ldy, void *dx_, ptrdiff_t lddx)
{
    for (ptrdiff_t i = 0; i < rows; i++) {
        const REAL *dy = (const REAL *)dy_ + i * lddy, *y = (const REAL *)y_ + i * ldy;
        REAL *dx = (REAL *)dx_ + i * lddx;
        VEC total = v_splat(0);
        for (ptrdiff_t j = 0; j < cols; j += LANES)
            total = total + v_load_n(dy + j, cols - j, 0) * v_load_n(y + j, cols - j, 0);
        VEC delta = v_splat(FMHA_NAME(sum)(total));
        for (ptrdiff_t j = 0; j < cols; j += LANES) {
            VEC g = v_load_n(dy + j, cols - j, 0) - delta;
            v_store_n(dx + j, v_load_n(y + j, cols - j, 0) * g, cols - j);
        }
    }
}

/* What joins the keys' scores in the denominators of head h. */
static inline REAL FMHA_NAME(sink)(const fmha_problem *p, ptrdiff_t h)
{
    return p->sinks ? ((const REAL *)p->sinks)[h] : NEGATIVE_INFINITY;
}

static inline REAL FMHA_NAME(exp_of)(REAL x) { return v_lane(FMHA_NAME(exp)(v_splat(x)), 0); }

#define EXACT_DISTANCE ((int64_t)1 << 22)       /* positions and keys below it, and their differences, are REALs */

/* -alibi * |place - key|, rounded once from the distance as an integer. */
static inline REAL FMHA_NAME(alibi_term)(REAL slope, int64_t place, ptrdiff_t key)
{
    int64_t apart = place - (int64_t)key;
    return -slope * (REAL)(apart < 0 ? -apart : apart);
}

/* s[n] <- s - alibi * distance, of the keys from j on of row i. */
static inline void FMHA_NAME(alibi_row)(const fmha_problem *p, const fmha_block *block, ptrdiff_t i, ptrdiff_t j, ptrdiff_t n, REAL *s)
{
    REAL slope = ((const REAL *)p->alibi)[block->h], ramp[LANES];
    int64_t place = (int64_t)i + p->offset[block->b];
    if (place > EXACT_DISTANCE || place < -EXACT_DISTANCE || j + n > EXACT_DISTANCE) {
        for (ptrdiff_t k = 0; k < n; k++) s[k] += FMHA_NAME(alibi_term)(slope, place, j + k);
        return;
    }
    for (ptrdiff_t l = 0; l < LANES; l++) ramp[l] = (REAL)(place - j - l);
    VEC ahead = v_load(ramp);
    for (ptrdiff_t k = 0; k < n; k += LANES)
        v_store_n(s + k, v_load_n(s + k, n - k, 0) - v_abs(ahead - v_splat((REAL)k)) * slope, n - k);
}

/* Where an additive mask has the pair of query i and key j. */
static inline const char *FMHA_NAME(mask_at)(const int type, const fmha_array *mask, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i, ptrdiff_t j)
{
    return FMHA_NAME(row_in)(type, mask, b, h, i) + j * mask->stride[3] * FMHA_NAME(stored_size)(type);
}

/* s[n] <- s + a row of an additive mask, `step` apart. */
INLINED void FMHA_NAME(add_row)(const int type, ptrdiff_t n, const char *m, ptrdiff_t step, REAL *s)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    if (step == 1) {
        VEC removed = v_splat(NEGATIVE_INFINITY);
        for (ptrdiff_t j = 0; j < n; j += LANES) {
            VEC add = FMHA_NAME(stored_load_n)(type, m + j * size, n - j);
            VEC sum = v_load_n(s + j, n - j, 0) + add;
            v_store_n(s + j, v_select(v_equal(add, removed), removed, sum), n - j);
        }
    } else {
        for (ptrdiff_t j = 0; j < n; j++) {
            REAL add = FMHA_NAME(stored_value)(type, m + j * step * size);
            s[j] = add == NEGATIVE_INFINITY ? add : s[j] + add;     /* NaN + -inf would be NaN */
        }
    }
}

/* softcap, alibi, additive mask, boolean mask on the keys [low, high) of one row; removed positions become -inf. */
static inline void FMHA_NAME(mask_row)(const fmha_problem *p, const fmha_block *block, ptrdiff_t i, ptrdiff_t low,
                                       ptrdiff_t high, REAL *s)
{
    ptrdiff_t n = high - low;
    if (p->softcap != 0) {
        for (ptrdiff_t j = 0; j < n; j += LANES) {
            VEC unused, capped = FMHA_NAME(soft_capped)(v_load_n(s + j, n - j, 0), p->softcap, &unused);
            v_store_n(s + j, capped, n - j);
        }
    }
    if (p->alibi) FMHA_NAME(alibi_row)(p, block, i, low, n, s);
    if (p->additive_mask.data) {
        const char *m = FMHA_NAME(mask_at)(p->mask_element, &p->additive_mask, block->b, block->h, i, low);
        ptrdiff_t step = p->additive_mask.stride[3];
        switch (p->mask_element) {
        case FMHA_HALF: FMHA_NAME(add_row)(FMHA_HALF, n, m, step, s); break;
        case FMHA_BFLOAT: FMHA_NAME(add_row)(FMHA_BFLOAT, n, m, step, s); break;
        default: FMHA_NAME(add_row)(FMHA_SAME, n, m, step, s);
        }
    }
    if (p->bool_mask.data) {
        const ptrdiff_t *stride = p->bool_mask.stride, step = stride[3];
        const unsigned char *m = (const unsigned char *)p->bool_mask.data + block->b * stride[0] + block->h * stride[1]
                                 + i * stride[2] + low * step;
        for (ptrdiff_t j = 0; j < n; j++) s[j] = m[j * step] ? NEGATIVE_INFINITY : s[j];
    }
}

/* The part of row i's key range that lies in the block, relative to its first column. */
static inline void FMHA_NAME(row_range)(const fmha_problem *p, const fmha_block *block, ptrdiff_t i, ptrdiff_t *low,
                                        ptrdiff_t *high)
{
    ptrdiff_t j0, j1;
    fmha_row_keys(p, block->b, i, &j0, &j1);
    j0 -= block->j0;
    j1 -= block->j0;
    if (j0 < 0) j0 = 0;
    if (j1 > block->cols) j1 = block->cols;
    if (j1 < j0) j0 = j1 = 0;
    *low = j0;
    *high = j1;
}

static void FMHA_NAME(attend_rows)(const fmha_problem *p, const fmha_block *block, void *scores, void *row_sum_,
                                   void *lse_)
{
    REAL *row_sum = row_sum_, *lse = lse_;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        REAL *s = (REAL *)scores + r * block->ld;
        ptrdiff_t i = block->i0 + r, low, high;
        FMHA_NAME(row_range)(p, block, i, &low, &high);
        FMHA_NAME(fill)(low, s, 0);
        FMHA_NAME(fill)(block->cols - high, s + high, 0);
        FMHA_NAME(mask_row)(p, block, i, low + block->j0, high + block->j0, s + low);
        REAL sink = FMHA_NAME(sink)(p, block->h), peak = FMHA_NAME(row_peak)(high - low, s + low, sink);
        REAL total = FMHA_NAME(exp_row)(high - low, s + low, peak, s + low);
        if (p->sinks) total += FMHA_NAME(exp_of)(sink - peak);
        row_sum[r] = total;
        if (lse) lse[r] = total == 0 ? NEGATIVE_INFINITY : peak + REAL_LOG(total);
    }
}

static int FMHA_NAME(removes_pairs)(const fmha_problem *p)
{
    return p->banded || p->key_start || p->key_length || p->bool_mask.data || p->additive_mask.data;
}

static int FMHA_NAME(removed)(const fmha_problem *p, const fmha_block *block, ptrdiff_t i, ptrdiff_t j)
{
    ptrdiff_t low, high;
    fmha_row_keys(p, block->b, i, &low, &high);
    if (j < low || j >= high) return 1;
    const ptrdiff_t *m = p->bool_mask.stride;
    if (p->bool_mask.data && ((const unsigned char *)p->bool_mask.data)[block->b * m[0] + block->h * m[1] + i * m[2] + j * m[3]])
        return 1;
    if (!p->additive_mask.data) return 0;
    const char *added = FMHA_NAME(mask_at)(p->mask_element, &p->additive_mask, block->b, block->h, i, j);
    return FMHA_NAME(stored_value)(p->mask_element, added) == NEGATIVE_INFINITY;
}

/* sum(x * y) of n elements of a type. */
INLINED REAL FMHA_NAME(row_product)(const int type, ptrdiff_t n, const char *x, const char *y)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    VEC sum = v_splat(0);
    for (ptrdiff_t d = 0; d < n; d += LANES)
        sum = sum + FMHA_NAME(stored_load_n)(type, x + d * size, n - d) * FMHA_NAME(stored_load_n)(type, y + d * size, n - d);
    return FMHA_NAME(sum)(sum);
}

static REAL FMHA_NAME(typed_product)(int type, ptrdiff_t n, const char *x, const char *y)
{
    return type == FMHA_HALF ? FMHA_NAME(row_product)(FMHA_HALF, n, x, y)
           : type == FMHA_BFLOAT ? FMHA_NAME(row_product)(FMHA_BFLOAT, n, x, y)
           : FMHA_NAME(row_product)(FMHA_SAME, n, x, y);
}

/* The largest square of a key of query head h, of those that query i may attend, or of all where i is -1; NaN if that of one is. */
static REAL FMHA_NAME(longest_key)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i)
{
    const fmha_block head = {.b = b, .h = h};
    REAL longest = 0;
    for (ptrdiff_t j = 0; j < p->Lk; j++) {
        if (i >= 0 && FMHA_NAME(removed)(p, &head, i, j)) continue;
        const char *k = FMHA_NAME(stored_row)(p, &p->k, b, h / (p->H / p->Hkv), j);
        const REAL squares = FMHA_NAME(typed_product)(p->stored, p->D, k, k);
        if (longest == longest && !(squares <= longest)) longest = squares;
    }
    return longest;
}

/* By how many roundings of its own size an lse and the log of the sum of P may be apart; and by how many of |scale| |q| |k|,
 * since scores may be small sums of large terms, which another pass adds up in another order. */
#define LSE_ROUNDINGS 16
#define SCORE_ROUNDINGS 4

/* Whether a row's lse was taken over more keys than those whose scores give `own`: then it says what they cannot, and exceeds
 * own by more than rounding. longest: longest_key of all keys, once asked for, of rows of a key/value head; -1 before. */
static int FMHA_NAME(of_more_keys)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i, REAL lse, REAL own, REAL *longest)
{
    const REAL beyond = lse - own - LSE_ROUNDINGS * REAL_EPSILON * (1 + (lse < 0 ? -lse : lse));
    if (!(beyond > 0)) return 0;
    const char *q = FMHA_NAME(row_in)(p->element, &p->q, b, h, i);
    const double of_query = SCORE_ROUNDINGS * REAL_EPSILON * fabs(p->scale) * sqrt((double)FMHA_NAME(typed_product)(p->element, p->D, q, q));
    if (*longest == -1) *longest = FMHA_NAME(longest_key)(p, b, h, -1);
    if (beyond > of_query * sqrt((double)*longest)) return 1;
    return !FMHA_NAME(removes_pairs)(p) ? 0 : beyond > of_query * sqrt((double)FMHA_NAME(longest_key)(p, b, h, i));
}

/* Whether lse counts whatever these scores add up to: they are a part of its keys', and what they lack may be less than its
 * rounding shows, but as much as their gradients. Not where that rounding would make weights differ by more than 1 / 256. */
static inline int FMHA_NAME(of_a_part)(const fmha_problem *p, REAL lse)
{
    return p->part && REAL_EPSILON * (lse < 0 ? -lse : lse) < (REAL)1 / 256;
}

/* One row: s scores -> probabilities, g gradient of the probabilities -> gradient of the scaled products.
 * With p_j = exp(s_j - peak) * factor, t_j = tanh(product_j / softcap): g_j <- p_j (g_j - delta) (1 - t_j^2); delta, which is
 * returned, is sum_k p_k g_k, or *outer_delta. */
static inline REAL FMHA_NAME(backward_row)(ptrdiff_t n, REAL *s, REAL *g, REAL *slope, REAL peak, REAL factor,
                                           const REAL *outer_delta)
{
    VEC removed = v_splat(NEGATIVE_INFINITY), zero = v_splat(0), total = zero;
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC score = v_load_n(s + j, n - j, NEGATIVE_INFINITY);
        IVEC gone = v_equal(score, removed);
        VEC y = v_select(gone, zero, FMHA_NAME(exp)(score - v_splat(peak)) * factor);
        VEC dy = v_select(gone, zero, v_load_n(g + j, n - j, 0));      /* what was removed may be NaN */
        total = total + y * dy;
        v_store_n(s + j, y, n - j);
        v_store_n(g + j, dy, n - j);
        if (slope) v_store_n(slope + j, v_select(gone, zero, v_load_n(slope + j, n - j, 0)), n - j);
    }
    REAL delta = outer_delta ? *outer_delta : FMHA_NAME(sum)(total);
    if (delta - delta != 0) {       /* a NaN or Inf that is attended: it must not reach the removed positions' zeros */
        for (ptrdiff_t j = 0; j < n; j++) {
            REAL d = (g[j] - delta) * (slope ? slope[j] : 1);
            g[j] = s[j] == 0 && g[j] == 0 ? 0 : s[j] * d;
        }
        return delta;
    }
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC d = v_load_n(s + j, n - j, 0) * (v_load_n(g + j, n - j, 0) - v_splat(delta));
        if (slope) d = d * v_load_n(slope + j, n - j, 0);
        v_store_n(g + j, d, n - j);
    }
    return delta;
}

static void FMHA_NAME(drop_rows)(const fmha_problem *p, const fmha_block *block, void *scores)
{
    for (ptrdiff_t r = 0; r < block->rows; r++)
        FMHA_NAME(drop_row)(p, block->b, block->h, block->i0 + r, block->j0, block->cols, (REAL *)scores + r * block->ld);
}

static void FMHA_NAME(attend_rows_backward)(const fmha_problem *p, const fmha_block *block, void *scores, void *grad_weights,
                                            void *slopes, const void *lse_, const fmha_array *out, const fmha_array *grad_out,
                                            void *states)
{
    const REAL *lse = lse_;
    REAL longest = -1;
    for (ptrdiff_t r = 0; r < block->rows; r++) {
        REAL *s = (REAL *)scores + r * block->ld, *g = (REAL *)grad_weights + r * block->ld;
        ptrdiff_t i = block->i0 + r, low, high;
        FMHA_NAME(row_range)(p, block, i, &low, &high);
        if (lse[r] == NEGATIVE_INFINITY) high = low;        /* an empty row gives no gradient */
        FMHA_NAME(fill)(low, s, 0);
        FMHA_NAME(fill)(low, g, 0);
        FMHA_NAME(fill)(block->cols - high, s + high, 0);
        FMHA_NAME(fill)(block->cols - high, g + high, 0);
        s += low;
        g += low;
        ptrdiff_t n = high - low;
        FMHA_NAME(drop_row)(p, block->b, block->h, i, low + block->j0, n, g);
        REAL *slope = p->softcap != 0 ? slopes : NULL;      /* d(capped) / d(product) */
        if (slope) {
            for (ptrdiff_t j = 0; j < n; j += LANES) {
                VEC t;
                FMHA_NAME(soft_capped)(v_load_n(s + j, n - j, 0), p->softcap, &t);
                v_store_n(slope + j, v_splat(1) - t * t, n - j);
            }
        }
        FMHA_NAME(mask_row)(p, block, i, low + block->j0, high + block->j0, s);
        /* The row's own sum is exact to rounding where exp(s - lse) errs by the rounding of lse, |lse| times as much. */
        REAL sink = FMHA_NAME(sink)(p, block->h), peak = FMHA_NAME(row_peak)(n, s, sink), total = 0, delta;
        VEC sum = v_splat(0);
        for (ptrdiff_t j = 0; j < n; j += LANES) sum = sum + FMHA_NAME(exp)(v_load_n(s + j, n - j, NEGATIVE_INFINITY) - v_splat(peak));
        total = FMHA_NAME(sum)(sum);
        if (p->sinks) total += FMHA_NAME(exp_of)(sink - peak);
        int more = FMHA_NAME(of_a_part)(p, lse[r]) || FMHA_NAME(of_more_keys)(p, block->b, block->h, i, lse[r],
                peak + REAL_LOG(total), &longest);
        if (!more) {
            delta = FMHA_NAME(backward_row)(n, s, g, slope, peak, 1 / total, NULL);
        } else {
            const REAL *o = (const REAL *)out->data + block->b * out->stride[0] + block->h * out->stride[1] + i * out->stride[2];
            const REAL *d = (const REAL *)grad_out->data + block->b * grad_out->stride[0] + block->h * grad_out->stride[1]
                            + i * grad_out->stride[2];
            VEC product = v_splat(0);
            for (ptrdiff_t e = 0; e < p->Dv; e += LANES)
                product = product + v_load_n(o + e, p->Dv - e, 0) * v_load_n(d + e, p->Dv - e, 0);
            delta = FMHA_NAME(sum)(product);
            FMHA_NAME(backward_row)(n, s, g, slope, lse[r], 1, &delta);
        }
        FMHA_NAME(drop_row)(p, block->b, block->h, i, low + block->j0, n, s);
        if (!states) continue;
        REAL *state = (REAL *)states + r * FMHA_ROW_STATE;
        state[FMHA_ROW_SHIFT] = more ? lse[r] : total == 0 ? (REAL)INFINITY : peak;
        state[FMHA_ROW_INVERSE] = more || total == 0 ? 1 : 1 / total;
        state[FMHA_ROW_DELTA] = delta;
    }
}

/* x * 0 is 0 for finite x and NaN for the others. */
static int FMHA_NAME(all_finite)(ptrdiff_t rows, ptrdiff_t cols, const void *x_, ptrdiff_t ldx)
{
    VEC zero = v_splat(0), trace[4] = {zero, zero, zero, zero};        /* four sums: none waits for the one before */
    for (ptrdiff_t i = 0; i < rows; i++) {
        const REAL *x = (const REAL *)x_ + i * ldx;
        ptrdiff_t j = 0;
        for (; j + 4 * LANES <= cols; j += 4 * LANES)
            for (int a = 0; a < 4; a++) trace[a] = trace[a] + v_load(x + j + a * LANES) * zero;
        for (; j < cols; j += LANES) trace[0] = trace[0] + v_load_n(x + j, cols - j, 0) * zero;
    }
    return FMHA_NAME(sum)((trace[0] + trace[1]) + (trace[2] + trace[3])) == 0;
}

static void FMHA_NAME(copy_rows)(ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy)
{
    for (ptrdiff_t i = 0; i < rows; i++)
        memcpy((REAL *)y + i * ldy, (const REAL *)x + i * ldx, (size_t)cols * sizeof(REAL));
}

static void FMHA_NAME(copy_finite)(ptrdiff_t rows, ptrdiff_t cols, const void *x_, ptrdiff_t ldx, void *y_, ptrdiff_t ldy)
{
    for (ptrdiff_t i = 0; i < rows; i++) {
        const REAL *x = (const REAL *)x_ + i * ldx;
        REAL *y = (REAL *)y_ + i * ldy;
        for (ptrdiff_t j = 0; j < cols; j++) y[j] = x[j] - x[j] == 0 ? x[j] : 0;
    }
}

static void FMHA_NAME(multiply)(ptrdiff_t n, void *x, double factor)
{
    for (ptrdiff_t j = 0; j < n; j++) ((REAL *)x)[j] *= (REAL)factor;
}

static inline int FMHA_NAME(all_nan)(ptrdiff_t n, const REAL *x)
{
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC value = v_load_n(x + j, n - j, (REAL)NAN);
        if (v_any(v_equal(value, value))) return 0;
    }
    return 1;
}

static inline int FMHA_NAME(has_nan)(ptrdiff_t n, const REAL *x)
{
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC value = v_load_n(x + j, n - j, 0);
        if (v_any(~v_equal(value, value))) return 1;
    }
    return 0;
}

/* c (width) <- c + factor * x where x is not finite. Returns whether c is NaN throughout, which no more additions change, if that
 * is asked for. */
static inline int FMHA_NAME(add_nonfinite_row)(ptrdiff_t width, REAL factor, const REAL *x, REAL *c, int ask)
{
    for (ptrdiff_t d = 0; d < width; d += LANES) {
        VEC value = v_load_n(x + d, width - d, 0), sum = v_load_n(c + d, width - d, 0);
        v_store_n(c + d, v_select(v_equal(value - value, v_splat(0)), sum, sum + value * factor), width - d);
    }
    return ask && FMHA_NAME(all_nan)(width, c);
}

/* Whether x and y have the same that is not finite in the same places. */
static inline int FMHA_NAME(same_nonfinite)(ptrdiff_t n, const REAL *x, const REAL *y)
{
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC a = v_load_n(x + j, n - j, 0), b = v_load_n(y + j, n - j, 0), zero = v_splat(0);
        a = v_select(v_equal(a - a, zero), zero, a);
        b = v_select(v_equal(b - b, zero), zero, b);
        if (v_any(~v_equal(a, b) & (v_equal(a, a) | v_equal(b, b)))) return 0;
    }
    return 1;
}

/* What adding a row that is not finite, times factor, does to a sum: after one of a kind, another of the same row, or of one with
 * the same in the same places, changes nothing; after `undefined` (0 * Inf), none does. */
enum { FMHA_NAME(upwards) = 1, FMHA_NAME(downwards) = 2, FMHA_NAME(undefined) = 4 };
static inline int FMHA_NAME(kind_of)(REAL factor)
{
    return factor > 0 ? FMHA_NAME(upwards) : factor < 0 ? FMHA_NAME(downwards) : FMHA_NAME(undefined);
}

/* Rare: only rows of x that hold a NaN or Inf, only pairs that may attend, only those elements. */
static void FMHA_NAME(add_nonfinite)(const fmha_problem *p, const fmha_block *block, int by_key, double alpha,
                                     const void *a_, const void *x_, ptrdiff_t ldx, ptrdiff_t width, void *c_,
                                     ptrdiff_t ldc)
{
    const REAL *a = a_;
    ptrdiff_t outer = by_key ? block->rows : block->cols, inner = by_key ? block->cols : block->rows;
    for (ptrdiff_t s = 0; s < outer; s++) {
        const REAL *x = (const REAL *)x_ + s * ldx;
        if (FMHA_NAME(all_finite)(1, width, x, ldx)) continue;
        for (ptrdiff_t t = 0; t < inner; t++) {
            ptrdiff_t r = by_key ? s : t, n = by_key ? t : s;
            REAL *c = (REAL *)c_ + t * ldc, factor = a[r * block->ld + n];
            if (c[0] != c[0] && FMHA_NAME(all_nan)(width, c)) continue;
            /* a removed pair has 0, but not only those have */
            if (factor == 0 && FMHA_NAME(removed)(p, block, block->i0 + r, block->j0 + n)) continue;
            FMHA_NAME(add_nonfinite_row)(width, (REAL)alpha * factor, x, c, 0);
        }
    }
}

/* Whether some finite element of x times factor is of that size or beyond. */
static int FMHA_NAME(exceeds)(ptrdiff_t rows, ptrdiff_t cols, const void *x_, ptrdiff_t ldx, double factor, double bound)
{
    VEC most = v_splat(LARGEST), least = v_splat(bound);
    REAL size = (REAL)(factor < 0 ? -factor : factor);
    for (ptrdiff_t i = 0; i < rows; i++)
        for (ptrdiff_t j = 0; j < cols; j += LANES) {
            VEC x = v_abs(v_load_n((const REAL *)x_ + i * ldx + j, cols - j, 0));
            if (v_any(~v_greater(least, x * size) & ~v_greater(x, most) & v_equal(x, x))) return 1;
        }
    return 0;
}

/* Whether all of the row is so small that operands or terms which count as 0 for being subnormal may be missing in it. */
static inline int FMHA_NAME(tiny_row)(ptrdiff_t n, const void *x)
{
    REAL first = n > 0 ? *(const REAL *)x : 1;
    if (!(REAL_ABS(first) < TINY)) return 0;     /* nearly always, and no CPU guesses its sign */
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC size = v_abs(v_load_n((const REAL *)x + j, n - j, 0));
        if (v_any(~v_greater(v_splat(TINY), size))) return 0;
    }
    return 1;
}

/* SUBNORMAL_LIFT times a subnormal number by its bits without the sign (to compute with it is slow, where it does not count as 0),
 * or 0 for another one. Under the exponent of 1, they are its multiple of 2^-EXP_SHIFT, and 1. */
static inline VEC FMHA_NAME(lifted_size)(IVEC size)
{
    const IVEC subnormal = i_greater(i_splat((INT)1 << EXP_SHIFT), size);
    return (v_from_bits((size & subnormal) | v_bits(v_splat(1))) - v_splat(1)) * (SMALLEST_NORMAL * SUBNORMAL_LIFT);
}

/* x times SUBNORMAL_LIFT. What becomes too large is limited: it would have made the row that it is summed in anything but tiny. */
static inline VEC FMHA_NAME(lifted)(VEC x)
{
    /* of a subnormal x the product is 0, with its sign, or else right */
    const VEC large = v_max(v_min(x * SUBNORMAL_LIFT, v_splat(LARGEST)), v_splat(-LARGEST));
    return v_from_bits(v_bits(FMHA_NAME(lifted_size)(v_bits(x) & ~i_splat(SIGN_BIT))) | v_bits(large));
}

/* Whether there is a number other than 0, subnormal ones counted. */
static int FMHA_NAME(nonzero)(ptrdiff_t rows, ptrdiff_t cols, const void *x_, ptrdiff_t ldx)
{
    int some = 0;
    for (ptrdiff_t i = 0; i < rows && !some; i++) {
        IVEC all = i_splat(0);
        for (ptrdiff_t j = 0; j < cols; j += LANES) all |= v_bits(v_abs(v_load_n((const REAL *)x_ + i * ldx + j, cols - j, 0)));
        some = v_any(i_greater(all, i_splat(0)));
    }
    return some;
}

/* y (rows, cols) <- SUBNORMAL_LIFT * x, 0 for what is not finite. */
static void FMHA_NAME(lift_rows)(ptrdiff_t rows, ptrdiff_t cols, const void *x_, ptrdiff_t ldx, void *y_, ptrdiff_t ldy)
{
    for (ptrdiff_t i = 0; i < rows; i++)
        for (ptrdiff_t j = 0; j < cols; j += LANES) {
            VEC x = v_load_n((const REAL *)x_ + i * ldx + j, cols - j, 0);
            x = v_select(v_equal(x - x, v_splat(0)), FMHA_NAME(lifted)(x), v_splat(0));
            v_store_n((REAL *)y_ + i * ldy + j, x, cols - j);
        }
}

/* The same of numbers that are tiny, into rows of whole vectors, whose ends are 0. Returns whether they are: below TINY / 2. */
static int FMHA_NAME(lift_tiny)(ptrdiff_t rows, ptrdiff_t cols, const REAL *x, ptrdiff_t ldx, REAL *y, ptrdiff_t ldy)
{
    IVEC others = i_splat(0);
    for (ptrdiff_t i = 0; i < rows; i++)
        for (ptrdiff_t j = 0; j < cols; j += LANES) {
            const VEC number = v_load_n(x + i * ldx + j, cols - j, 0);
            const IVEC size = v_bits(number) & ~i_splat(SIGN_BIT);
            others = others | ~i_greater(v_bits(v_splat(TINY / 2)), size);
            v_store(y + i * ldy + j, v_from_bits(v_bits(FMHA_NAME(lifted_size)(size)) | v_bits(number * SUBNORMAL_LIFT)));
        }
    return !v_any(others);
}

/* to <- x / divisor / SUBNORMAL_LIFT, rounded once where that is subnormal. Where that is not tiny, `to` stays as it is: then
 * large values cancel, which do no longer since they were limited. */
static void FMHA_NAME(lower_row)(ptrdiff_t n, const void *x_, const void *divisor, void *to)
{
    const REAL *x = x_, total = *(const REAL *)divisor, most = 2 * TINY * SUBNORMAL_LIFT;
    for (ptrdiff_t d = 0; d < n && total == total; d++)
        if (!(x[d] / total < most && x[d] / total > -most)) return;
    fmha_keep_subnormals();
    for (ptrdiff_t d = 0; d < n; d++) ((REAL *)to)[d] = x[d] / total * (1 / SUBNORMAL_LIFT);
    fmha_flush_subnormals();
}

static void FMHA_NAME(exponential)(ptrdiff_t n, const void *x_, void *y_)
{
    const REAL *x = x_;
    REAL *y = y_;
    for (ptrdiff_t j = 0, step; j < n; j += step) {
        VEC e[EXP_CHAINS];
        const int chains = n - j >= EXP_CHAINS * LANES ? EXP_CHAINS : 1;
        IVEC large = i_splat(0);
        for (int i = 0; i < chains; i++) {
            e[i] = v_load_n(x + j + i * LANES, n - j, 0);
            large |= v_greater(e[i], v_splat(EXP_MOST));
        }
        if (v_any(large))
            for (int i = 0; i < chains; i++) e[i] = FMHA_NAME(exp)(e[i]);
        else if (chains == EXP_CHAINS)
            FMHA_NAME(exp_each)(EXP_CHAINS, e);
        else
            FMHA_NAME(exp_each)(1, e);
        step = chains * LANES;
        for (int i = 0; i < chains; i++) v_store_n(y + j + i * LANES, e[i], n - j);
    }
}

static void FMHA_NAME(hyperbolic_tangent)(ptrdiff_t n, const void *x_, void *y_)
{
    const REAL *x = x_;
    REAL *y = y_;
    for (ptrdiff_t j = 0; j < n; j += LANES) v_store_n(y + j, FMHA_NAME(tanh)(v_load_n(x + j, n - j, 0)), n - j);
}

/* The turns of items at sums that several add to, one after the other: how many have had theirs, and the number of this one. */
typedef struct {
    int *taken, number;
} FMHA_NAME(turn);

static int FMHA_NAME(has_come)(const FMHA_NAME(turn) *turn)
{
    return __atomic_load_n(turn->taken, __ATOMIC_ACQUIRE) == turn->number;
}

/* Waits for the turn; 0 if the run is to stop. A turn without a counter is at once. */
static int FMHA_NAME(wait_for)(const FMHA_NAME(turn) *turn)
{
    for (unsigned looks = 1; turn->taken && !FMHA_NAME(has_come)(turn); looks++)
        if (!fmha_pool_waits(looks)) return 0;
    return 1;
}

static void FMHA_NAME(end_turn)(const FMHA_NAME(turn) *turn)
{
    if (turn->taken) __atomic_store_n(turn->taken, turn->number + 1, __ATOMIC_RELEASE);
}
