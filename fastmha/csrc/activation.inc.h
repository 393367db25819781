/* Functions of single numbers, and their slopes. All but relu are x * P(x) with P(-x) = 1 - P(x), a distribution function:
 *
 *     gelu       P = Phi, the normal distribution (Hendrycks and Gimpel 2016)
 *     gelu_tanh  P = (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3), their approximation of it
 *     silu       P = 1 / (1 + exp(-x)), the logistic distribution
 *
 * With a = |x| and the tail Q = P(-a), x P(x) = max(x, 0) - a Q, and the slope is d for x < 0, 1 - d for x > 0, d = Q - a P'(a).
 * Q is exp(-...) times what loses nothing, so that all digits are right in the left tail as well; and 2^n of that exp is applied
 * last, so that nothing underflows before the result does. */

/* Phi(-a) = exp(-a^2 / 2) N(a) / D(a): minimax fits over 0 <= a <= 13.3 (float64: 37.8; beyond, the tail is subnormal) by the
 * Remez exchange for rational functions in 50 digits; D begins with 1. Relative error 5.0e-9, float64: 8.6e-19. No coefficient
 * is negative: the sums lose nothing. */
#if FMHA_REAL == 32
static const REAL FMHA_NAME(tail_above)[] = {0.5f, 0x1.be273cp-2f, 0x1.7354e8p-3f, 0x1.47923p-5f, 0x1.077dd2p-8f};
static const REAL FMHA_NAME(tail_below)[] = {1, 0x1.ab55cep+0f, 0x1.31cbc6p+0f, 0x1.db8bbap-2f, 0x1.9a9464p-4f, 0x1.4a3ba2p-7f};
static const INT FMHA_NAME(lower_half) = (1 << 12) - 1;            /* of the digits: what is left has an exact square */
#else
static const REAL FMHA_NAME(tail_above)[] = {
    0.5,                   0x1.a7798e9d5a7d4p-1,  0x1.5b4d2c40b7d52p-1,  0x1.6ce824c2395b9p-2,  0x1.0d6ffdc2b2847p-3,
    0x1.22d7790844361p-5,  0x1.d02daf6a70310p-8,  0x1.0eb8ef61f9d71p-10, 0x1.bb72c56a1029cp-14, 0x1.cfc8a9b49bb2bp-18,
    0x1.dc27054bab712p-23};
static const REAL FMHA_NAME(tail_below)[] = {
    1,                     0x1.39dddc1dfe17fp+1,  0x1.68147fc2078e3p+1,  0x1.ff470f66971fep+0,  0x1.f45868f803787p-1,
    0x1.63552fb1e5221p-2,  0x1.76fa2b648b083p-4,  0x1.27345c2a6d9dep-6,  0x1.55921f2d24f61p-9,  0x1.16790a04bed41p-12,
    0x1.22a227e6da9bbp-16, 0x1.2a626058465fbp-21};
static const INT FMHA_NAME(lower_half) = ((INT)1 << 27) - 1;
#endif

/* Phi(-a) exp(a^2 / 2) */
static inline __attribute__((always_inline)) VEC FMHA_NAME(tail_ratio)(VEC a)
{
    const ptrdiff_t n = sizeof FMHA_NAME(tail_above) / sizeof(REAL), m = sizeof FMHA_NAME(tail_below) / sizeof(REAL);
    VEC above = v_splat(FMHA_NAME(tail_above)[n - 1]), below = v_splat(FMHA_NAME(tail_below)[m - 1]);
    for (ptrdiff_t d = n - 2; d >= 0; d--) above = above * a + v_splat(FMHA_NAME(tail_above)[d]);
    for (ptrdiff_t d = m - 2; d >= 0; d--) below = below * a + v_splat(FMHA_NAME(tail_below)[d]);
    return above / below;
}

/* exp(-a^2 / 2) in parts. The rounding of a^2 would be one of the result, a^2 / 2 times as large: what it loses, exact by halves
 * of the digits (Dekker 1971), is multiplied in, as exp(-e / 2) = 1 - e / 2. */
static inline __attribute__((always_inline)) VEC FMHA_NAME(bell_parts)(VEC a, VEC *power)
{
    VEC high = v_from_bits(v_bits(a) & ~i_splat(FMHA_NAME(lower_half))), low = a - high, square = a * a;
    VEC lost = (high * high - square) + (high + high) * low;
    lost = lost + low * low;
    VEC y = FMHA_NAME(exp_parts)(square * (REAL)-0.5, power);
    return y - y * (lost * (REAL)0.5);
}

#define TANH_RATE ((REAL)0x1.9884533d43651p+0)      /* 2 sqrt(2 / pi) */
#define TANH_CUBIC ((REAL)0.044715)
#define BELL_PEAK ((REAL)0x1.9884533d43651p-2)      /* 1 / sqrt(2 pi) */

/* -log of Q / (1 - Q), for all but gelu, and its derivative. */
static inline __attribute__((always_inline)) VEC FMHA_NAME(log_odds)(const int kind, VEC a, VEC *rate)
{
    if (kind == FMHA_SILU) {
        *rate = v_splat(1);
        return a;
    }
    VEC square = a * a, scale = v_splat(TANH_RATE);
    *rate = (square * (3 * TANH_CUBIC) + v_splat(1)) * scale;
    return (square * TANH_CUBIC + v_splat(1)) * (a * scale);
}

/* A kind is a constant wherever this is called. */
static inline __attribute__((always_inline)) VEC FMHA_NAME(activate)(const int kind, VEC x)
{
    if (kind == FMHA_NO_ACTIVATION) return x;
    VEC positive = v_max(v_splat(0), x);        /* NaN stays */
    if (kind == FMHA_RELU) return positive;
    VEC a = v_min(v_splat(-EXP_LOW), v_abs(x)), power, tail;
    if (kind == FMHA_GELU) {
        tail = FMHA_NAME(bell_parts)(a, &power) * (a * FMHA_NAME(tail_ratio)(a));
    } else {
        VEC rate, y = FMHA_NAME(exp_parts)(-FMHA_NAME(log_odds)(kind, a, &rate), &power);
        tail = y * (a / (FMHA_NAME(scaled)(y, power) + v_splat(1)));
    }
    return positive - FMHA_NAME(scaled)(tail, power);
}

static inline __attribute__((always_inline)) VEC FMHA_NAME(activation_slope)(const int kind, VEC x)
{
    VEC zero = v_splat(0), one = v_splat(1);
    if (kind == FMHA_NO_ACTIVATION) return one;
    if (kind == FMHA_RELU) return v_select(v_greater(x, zero), one, v_select(v_equal(x, x), zero, x));
    VEC a = v_min(v_splat(-EXP_LOW), v_abs(x)), power, d;
    if (kind == FMHA_GELU) {
        d = FMHA_NAME(bell_parts)(a, &power) * (FMHA_NAME(tail_ratio)(a) - a * BELL_PEAK);
    } else {
        VEC rate, y = FMHA_NAME(exp_parts)(-FMHA_NAME(log_odds)(kind, a, &rate), &power);
        VEC other = one / (FMHA_NAME(scaled)(y, power) + one);         /* 1 - Q */
        d = y * (other * (one - a * rate * other));
    }
    d = FMHA_NAME(scaled)(d, power);
    return v_select(v_greater(zero, x), d, one - d);
}

#undef TANH_RATE
#undef TANH_CUBIC
#undef BELL_PEAK

/* Two vectors a turn: their divisions and long chains of additions side by side. */
static inline __attribute__((always_inline)) void FMHA_NAME(activate_row_of)(const int kind, ptrdiff_t n, const REAL *x,
                                                                             REAL *y)
{
    ptrdiff_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        VEC a = FMHA_NAME(activate)(kind, v_load(x + j)), b = FMHA_NAME(activate)(kind, v_load(x + j + LANES));
        v_store(y + j, a);
        v_store(y + j + LANES, b);
    }
    for (; j < n; j += LANES) v_store_n(y + j, FMHA_NAME(activate)(kind, v_load_n(x + j, n - j, 0)), n - j);
}

static inline __attribute__((always_inline)) void FMHA_NAME(activate_row_backward_of)(const int kind, ptrdiff_t n, const REAL *dy,
                                                                                      const REAL *x, REAL *dx)
{
    ptrdiff_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) {
        VEC a = FMHA_NAME(activation_slope)(kind, v_load(x + j));
        VEC b = FMHA_NAME(activation_slope)(kind, v_load(x + j + LANES));
        v_store(dx + j, v_load(dy + j) * a);
        v_store(dx + j + LANES, v_load(dy + j + LANES) * b);
    }
    for (; j < n; j += LANES) {
        VEC slope = FMHA_NAME(activation_slope)(kind, v_load_n(x + j, n - j, 0));
        v_store_n(dx + j, v_load_n(dy + j, n - j, 0) * slope, n - j);
    }
}

static void FMHA_NAME(activate_row)(int kind, ptrdiff_t n, const void *x, void *y)
{
    switch (kind) {
    case FMHA_GELU: FMHA_NAME(activate_row_of)(FMHA_GELU, n, x, y); break;
    case FMHA_GELU_TANH: FMHA_NAME(activate_row_of)(FMHA_GELU_TANH, n, x, y); break;
    case FMHA_RELU: FMHA_NAME(activate_row_of)(FMHA_RELU, n, x, y); break;
    case FMHA_SILU: FMHA_NAME(activate_row_of)(FMHA_SILU, n, x, y); break;
    default: FMHA_NAME(activate_row_of)(FMHA_NO_ACTIVATION, n, x, y);
    }
}

static void FMHA_NAME(activate_row_backward)(int kind, ptrdiff_t n, const void *dy, const void *x, void *dx)
{
    switch (kind) {
    case FMHA_GELU: FMHA_NAME(activate_row_backward_of)(FMHA_GELU, n, dy, x, dx); break;
    case FMHA_GELU_TANH: FMHA_NAME(activate_row_backward_of)(FMHA_GELU_TANH, n, dy, x, dx); break;
    case FMHA_RELU: FMHA_NAME(activate_row_backward_of)(FMHA_RELU, n, dy, x, dx); break;
    case FMHA_SILU: FMHA_NAME(activate_row_backward_of)(FMHA_SILU, n, dy, x, dx); break;
    default: FMHA_NAME(activate_row_backward_of)(FMHA_NO_ACTIVATION, n, dy, x, dx);
    }
}
