/* Layer normalisation (Ba, Kiros and Hinton 2016) and that by the root of the mean square (Zhang and Sennrich 2019), of rows of
 * z = x + residual. A row is read three times, and lies in the first cache meanwhile; its sums have one order, by the width. */

/* z of a row is lift * (x + residual). A lift other than 1, a power of 2, keeps squares from over- and underflowing.
 * mean + rest is the mean of z: where that is large, its own rounding would be an error of all differences from it. */
typedef struct {
    REAL lift, mean, rest, inverse;         /* inverse: of the root of variance and eps, lifted as the row */
} FMHA_NAME(norm_state);

/* value in the first n lanes, 0 in the others: an end of a row adds nothing to sums of differences. */
INLINED VEC FMHA_NAME(splat_part)(REAL value, ptrdiff_t n)
{
    VEC all = v_splat(value);
    if (n >= LANES) return all;
    REAL lanes[LANES];
    v_store(lanes, all);
    return FMHA_NAME(load_part)(lanes, n, 0);
}

/* lift * (x + r) - shift of n elements, at most a vector; r may be NULL. */
INLINED VEC FMHA_NAME(shifted)(ptrdiff_t n, const REAL *x, const REAL *r, REAL lift, REAL shift)
{
    VEC z = v_load_n(x, n, 0) * lift;
    if (r) z = v_load_n(r, n, 0) * lift + z;
    return z - FMHA_NAME(splat_part)(shift, n);
}

/* The sum of a row less a shift, and that of its squares. Four sums of each: none waits for the one before. */
INLINED REAL FMHA_NAME(norm_sums)(ptrdiff_t n, const REAL *x, const REAL *r, REAL lift, REAL shift, REAL *squares)
{
    VEC zero = v_splat(0), sum[4] = {zero, zero, zero, zero}, square[4] = {zero, zero, zero, zero};
    ptrdiff_t j = 0;
    for (; j + 4 * LANES <= n; j += 4 * LANES)
        for (int s = 0; s < 4; s++) {
            ptrdiff_t at = j + s * LANES;
            VEC z = FMHA_NAME(shifted)(LANES, x + at, r ? r + at : NULL, lift, shift);
            sum[s] = sum[s] + z;
            square[s] = square[s] + z * z;
        }
    for (; j < n; j += LANES) {
        VEC z = FMHA_NAME(shifted)(n - j, x + j, r ? r + j : NULL, lift, shift);
        sum[0] = sum[0] + z;
        square[0] = square[0] + z * z;
    }
    if (squares) *squares = FMHA_NAME(sum)((square[0] + square[1]) + (square[2] + square[3]));
    return FMHA_NAME(sum)((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* The statistics of a row at the lift that is set. Returns the sum of the squares they come from. */
INLINED REAL FMHA_NAME(norm_statistics)(const int centered, ptrdiff_t n, double eps, const REAL *x, const REAL *r,
                                        FMHA_NAME(norm_state) *to)
{
    REAL squares;
    to->mean = centered ? FMHA_NAME(norm_sums)(n, x, r, to->lift, 0, NULL) / (REAL)n : 0;
    REAL sum = FMHA_NAME(norm_sums)(n, x, r, to->lift, to->mean, &squares);
    to->rest = centered ? sum / (REAL)n : 0;
    double variance = (double)squares / (double)n - (double)to->rest * to->rest;
    if (variance < 0) variance = 0;
    double inverse = 1 / (to->lift == 1 ? sqrt(variance + eps) : hypot(sqrt(variance), sqrt(eps) * to->lift));
    to->inverse = eps > 0 && inverse > LARGEST ? LARGEST : (REAL)inverse;       /* then all of the row is its mean */
    return squares;
}

INLINED FMHA_NAME(norm_state) FMHA_NAME(norm_of_row)(const int centered, ptrdiff_t n, double eps, const REAL *x, const REAL *r)
{
    const double least = (double)SMALLEST_NORMAL / REAL_EPSILON;        /* beside it, squares that underflow do not count */
    FMHA_NAME(norm_state) state = {.lift = 1};
    REAL squares = FMHA_NAME(norm_statistics)(centered, n, eps, x, r, &state);
    if (squares <= LARGEST && (eps >= least || squares >= least * (double)n)) return state;
    /* Rare: again, at a lift by the largest number. */
    VEC most = v_splat(0);
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        most = v_max(v_abs(v_load_n(x + j, n - j, 0)), most);
        if (r) most = v_max(v_abs(v_load_n(r + j, n - j, 0)), most);
    }
    REAL peak = FMHA_NAME(largest)(most);
    if (!(peak > 0 && peak <= LARGEST)) return state;
    int exponent;
    frexp((double)peak, &exponent);
    if (exponent > EXP_BIAS - 4) exponent = EXP_BIAS - 4;
    if (exponent < 4 - EXP_BIAS) exponent = 4 - EXP_BIAS;
    state.lift = (REAL)ldexp(1, -exponent);
    FMHA_NAME(norm_statistics)(centered, n, eps, x, r, &state);
    return state;
}

/* (z - mean) / sigma of n elements, at most a vector; 0 behind them. */
INLINED VEC FMHA_NAME(normalised)(const int centered, ptrdiff_t n, const REAL *x, const REAL *r, const FMHA_NAME(norm_state) *state)
{
    VEC z = FMHA_NAME(shifted)(n, x, r, state->lift, state->mean);
    if (centered) z = z - FMHA_NAME(splat_part)(state->rest, n);
    return z * state->inverse;
}

INLINED void FMHA_NAME(norm_row)(const int centered, const fmha_norm *norm, const REAL *x, const REAL *r, REAL *y)
{
    const ptrdiff_t n = norm->width;
    const REAL *weight = norm->weight, *bias = norm->bias;
    const FMHA_NAME(norm_state) state = FMHA_NAME(norm_of_row)(centered, n, norm->eps, x, r);
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC z = FMHA_NAME(normalised)(centered, n - j, x + j, r ? r + j : NULL, &state) * v_load_n(weight + j, n - j, 0);
        if (bias) z = z + v_load_n(bias + j, n - j, 0);
        v_store_n(y + j, z, n - j);
    }
}

static void FMHA_NAME(norm_rows)(const fmha_norm *norm, ptrdiff_t rows, const void *x_, ptrdiff_t ldx, const void *residual,
                                 ptrdiff_t ldr, void *y_, ptrdiff_t ldy)
{
    for (ptrdiff_t i = 0; i < rows; i++) {
        const REAL *x = (const REAL *)x_ + i * ldx, *r = residual ? (const REAL *)residual + i * ldr : NULL;
        REAL *y = (REAL *)y_ + i * ldy;
        if (norm->centered && r) FMHA_NAME(norm_row)(1, norm, x, r, y);
        else if (norm->centered) FMHA_NAME(norm_row)(1, norm, x, NULL, y);
        else if (r) FMHA_NAME(norm_row)(0, norm, x, r, y);
        else FMHA_NAME(norm_row)(0, norm, x, NULL, y);
    }
}

/* With h = (z - mean) / sigma and g = dy * weight: dx <- (g - mean(g) - h mean(g h)) / sigma, without mean(g) where not centered;
 * grad_weight += dy * h, grad_bias += dy. */
INLINED void FMHA_NAME(norm_row_backward)(const int centered, const fmha_norm *norm, const REAL *dy, const REAL *x, const REAL *r, REAL *dx,
                                          REAL *grad_weight, REAL *grad_bias)
{
    const ptrdiff_t n = norm->width;
    const REAL *weight = norm->weight;
    const FMHA_NAME(norm_state) state = FMHA_NAME(norm_of_row)(centered, n, norm->eps, x, r);
    VEC zero = v_splat(0), sum[2] = {zero, zero}, along[2] = {zero, zero};
    for (ptrdiff_t j = 0; j < n; j += 2 * LANES)
        for (int s = 0; s < 2; s++) {
            ptrdiff_t at = j + s * LANES, left = n - at;
            if (left <= 0) break;
            VEC h = FMHA_NAME(normalised)(centered, left, x + at, r ? r + at : NULL, &state);
            VEC d = v_load_n(dy + at, left, 0), g = d * v_load_n(weight + at, left, 0);
            sum[s] = sum[s] + g;
            along[s] = along[s] + g * h;
            v_store_n(grad_weight + at, v_load_n(grad_weight + at, left, 0) + d * h, left);
            if (grad_bias) v_store_n(grad_bias + at, v_load_n(grad_bias + at, left, 0) + d, left);
        }
    VEC mean = v_splat(FMHA_NAME(sum)(sum[0] + sum[1]) / (REAL)n), share = v_splat(FMHA_NAME(sum)(along[0] + along[1]) / (REAL)n);
    const REAL factor = state.inverse * state.lift;
    for (ptrdiff_t j = 0; j < n; j += LANES) {
        VEC h = FMHA_NAME(normalised)(centered, n - j, x + j, r ? r + j : NULL, &state);
        VEC g = v_load_n(dy + j, n - j, 0) * v_load_n(weight + j, n - j, 0);
        if (centered) g = g - mean;
        v_store_n(dx + j, (g - h * share) * factor, n - j);
    }
}

static void FMHA_NAME(norm_rows_backward)(const fmha_norm *norm, ptrdiff_t rows, const void *dy_, ptrdiff_t lddy, const void *x_,
                                          ptrdiff_t ldx, const void *residual, ptrdiff_t ldr, void *dx_, ptrdiff_t lddx,
                                          void *grad_weight, void *grad_bias)
{
    for (ptrdiff_t i = 0; i < rows; i++) {
        const REAL *x = (const REAL *)x_ + i * ldx, *r = residual ? (const REAL *)residual + i * ldr : NULL;
        const REAL *dy = (const REAL *)dy_ + i * lddy;
        REAL *dx = (REAL *)dx_ + i * lddx;
        if (norm->centered && r) FMHA_NAME(norm_row_backward)(1, norm, dy, x, r, dx, grad_weight, grad_bias);
        else if (norm->centered) FMHA_NAME(norm_row_backward)(1, norm, dy, x, NULL, dx, grad_weight, grad_bias);
        else if (r) FMHA_NAME(norm_row_backward)(0, norm, dy, x, r, dx, grad_weight, NULL);
        else FMHA_NAME(norm_row_backward)(0, norm, dy, x, NULL, dx, grad_weight, NULL);
    }
}

static void FMHA_NAME(add_up_rows)(ptrdiff_t rows, ptrdiff_t cols, const void *x_, ptrdiff_t ldx, void *y_)
{
    const REAL *x = x_;
    REAL *y = y_;
    for (ptrdiff_t j = 0; j < cols; j += LANES) {
        VEC sum = v_splat(0);
        for (ptrdiff_t i = 0; i < rows; i++) sum = sum + v_load_n(x + i * ldx + j, cols - j, 0);
        v_store_n(y + j, sum, cols - j);
    }
}
