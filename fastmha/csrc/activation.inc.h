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

/* ratio <- Phi(-a) exp(a^2 / 2) */
INLINED void FMHA_NAME(tail_ratio)(const int n, const VEC *a, VEC *ratio)
{
    VEC below[8];
    FMHA_NAME(horner)(n, sizeof FMHA_NAME(tail_above) / sizeof(REAL), FMHA_NAME(tail_above), a, ratio);
    FMHA_NAME(horner)(n, sizeof FMHA_NAME(tail_below) / sizeof(REAL), FMHA_NAME(tail_below), a, below);
    EACH(i) ratio[i] = ratio[i] / below[i];
}

/* exp(-a^2 / 2) in parts. The rounding of a^2 would be one of the result, a^2 / 2 times as large: what it loses, exact (without
 * fused instructions by halves of the digits, Dekker 1971), is multiplied in, as exp(-e / 2) = 1 - e / 2. */
INLINED void FMHA_NAME(bell_parts)(const int n, const VEC *a, VEC *y, VEC *power)
{
    VEC square[8], lost[8];
    EACH(i) {
        square[i] = a[i] * a[i];
#ifdef v_fms
        lost[i] = v_fms(a[i], a[i], square[i]);
#else
        VEC high = v_from_bits(v_bits(a[i]) & ~i_splat(FMHA_NAME(lower_half))), low = a[i] - high;
        lost[i] = (high * high - square[i]) + (high + high) * low;
        lost[i] = lost[i] + low * low;
#endif
        square[i] = square[i] * (REAL)-0.5;
    }
    FMHA_NAME(exp_within)(n, square, y, power);
    EACH(i) y[i] = y[i] - y[i] * (lost[i] * (REAL)0.5);
}

#define TANH_RATE ((REAL)0x1.9884533d43651p+0)      /* 2 sqrt(2 / pi) */
#define TANH_CUBIC ((REAL)0.044715)
#define BELL_PEAK ((REAL)0x1.9884533d43651p-2)      /* 1 / sqrt(2 pi) */
#define BELL_END ((REAL)(FMHA_REAL == 32 ? 18 : 52))        /* half its square is within exp's range, and Phi(-BELL_END) is 0 */

/* exp(-log_odds) in parts, log_odds = -log of Q / (1 - Q), for all but gelu; rate <- the derivative of log_odds. */
INLINED void FMHA_NAME(odds_parts)(const int kind, const int n, const VEC *a, VEC *rate, VEC *y, VEC *power)
{
    VEC minus[8];
    EACH(i) {
        if (kind == FMHA_SILU) {
            rate[i] = v_splat(1);
            minus[i] = -a[i];
        } else {
            VEC square = a[i] * a[i], scale = v_splat(TANH_RATE);
            rate[i] = (square * (3 * TANH_CUBIC) + v_splat(1)) * scale;
            minus[i] = -((square * TANH_CUBIC + v_splat(1)) * (a[i] * scale));
        }
        minus[i] = v_max(v_splat(EXP_LOW), minus[i]);
    }
    FMHA_NAME(exp_within)(n, minus, y, power);
}

/* n vectors of x := their activations. A kind is a constant wherever this is called. */
INLINED void FMHA_NAME(activate)(const int kind, const int n, VEC *x)
{
    VEC a[8], tail[8], y[8], power[8];
    if (kind == FMHA_NO_ACTIVATION) return;
    EACH(i) {
        a[i] = v_min(v_splat(kind == FMHA_GELU ? BELL_END : -EXP_LOW), v_abs(x[i]));
        x[i] = v_max(v_splat(0), x[i]);        /* NaN stays */
    }
    if (kind == FMHA_RELU) return;
    if (kind == FMHA_GELU) {
        FMHA_NAME(tail_ratio)(n, a, tail);
        FMHA_NAME(bell_parts)(n, a, y, power);
        EACH(i) tail[i] = y[i] * (a[i] * tail[i]);
    } else {
        VEC rate[8];
        FMHA_NAME(odds_parts)(kind, n, a, rate, y, power);
        EACH(i) tail[i] = y[i] * (a[i] / (FMHA_NAME(scaled)(y[i], power[i]) + v_splat(1)));
    }
    EACH(i) x[i] = x[i] - FMHA_NAME(scaled)(tail[i], power[i]);
}

/* n vectors of slope <- the derivatives at x. */
INLINED void FMHA_NAME(activation_slope)(const int kind, const int n, const VEC *x, VEC *slope)
{
    VEC zero = v_splat(0), one = v_splat(1), a[8], y[8], power[8];
    EACH(i) slope[i] = one;
    if (kind == FMHA_NO_ACTIVATION) return;
    if (kind == FMHA_RELU) {
        EACH(i) slope[i] = v_select(v_greater(x[i], zero), one, v_select(v_equal(x[i], x[i]), zero, x[i]));
        return;
    }
    EACH(i) a[i] = v_min(v_splat(kind == FMHA_GELU ? BELL_END : -EXP_LOW), v_abs(x[i]));
    if (kind == FMHA_GELU) {
        FMHA_NAME(tail_ratio)(n, a, slope);
        FMHA_NAME(bell_parts)(n, a, y, power);
        EACH(i) slope[i] = y[i] * (slope[i] - a[i] * BELL_PEAK);
    } else {
        VEC rate[8];
        FMHA_NAME(odds_parts)(kind, n, a, rate, y, power);
        EACH(i) {
            VEC other = one / (FMHA_NAME(scaled)(y[i], power[i]) + one);         /* 1 - Q */
            slope[i] = y[i] * (other * (one - a[i] * rate[i] * other));
        }
    }
    EACH(i) {
        VEC d = FMHA_NAME(scaled)(slope[i], power[i]);
        slope[i] = v_select(v_greater(zero, x[i]), d, one - d);
    }
}

#undef TANH_RATE
#undef TANH_CUBIC
#undef BELL_PEAK
#undef BELL_END

#define ABREAST (MICRO_SUMS >= 24 ? 4 : 2)      /* vectors side by side: as many as the registers hold */

INLINED void FMHA_NAME(activate_row_of)(const int kind, ptrdiff_t n, const REAL *x, REAL *y)
{
    VEC part[ABREAST];
    ptrdiff_t j = 0;
    for (; j + ABREAST * LANES <= n; j += ABREAST * LANES) {
        for (int i = 0; i < ABREAST; i++) part[i] = v_load(x + j + i * LANES);
        FMHA_NAME(activate)(kind, ABREAST, part);
        for (int i = 0; i < ABREAST; i++) v_store(y + j + i * LANES, part[i]);
    }
    for (; j < n; j += LANES) {
        part[0] = v_load_n(x + j, n - j, 0);
        FMHA_NAME(activate)(kind, 1, part);
        v_store_n(y + j, part[0], n - j);
    }
}

INLINED void FMHA_NAME(activate_row_backward_of)(const int kind, ptrdiff_t n, const REAL *dy, const REAL *x, REAL *dx)
{
    VEC part[ABREAST], slope[ABREAST];
    ptrdiff_t j = 0;
    for (; j + ABREAST * LANES <= n; j += ABREAST * LANES) {
        for (int i = 0; i < ABREAST; i++) part[i] = v_load(x + j + i * LANES);
        FMHA_NAME(activation_slope)(kind, ABREAST, part, slope);
        for (int i = 0; i < ABREAST; i++) v_store(dx + j + i * LANES, v_load(dy + j + i * LANES) * slope[i]);
    }
    for (; j < n; j += LANES) {
        part[0] = v_load_n(x + j, n - j, 0);
        FMHA_NAME(activation_slope)(kind, 1, part, slope);
        v_store_n(dx + j, v_load_n(dy + j, n - j, 0) * slope[0], n - j);
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
