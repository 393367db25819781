/* The vector vocabulary of one instruction set and dtype, in the compiler's generic vectors.
 *
 * Set before inclusion: FMHA_REAL (32 or 64), FMHA_VECTOR_BYTES, FMHA_NAME(x). Included once per dtype; kernels.inc.h
 * undefines what is defined here. Without generic vectors (neither gcc nor clang) VEC is one REAL and all else follows. */

#if FMHA_REAL == 32
#define REAL float
#define INT int32_t
#define REAL_LOG logf
#define REAL_ABS fabsf
#define REAL_EPSILON FLT_EPSILON
#define SIGN_BIT INT32_MIN
#define EXP_SHIFT 23
#define EXP_BIAS 127
#define EXP_MAGIC 0x1.8p23f
#define EXP_LOW -170.0f         /* exp below it is 0, and times 2^90 */
#define EXP_NORMAL -0x1.5d589ep+6f      /* exp below it is subnormal */
#define EXP_ZERO -88.0f         /* exp below it is subnormal; m is -127 there, whose factor of bits is 0 */
#define EXP_MOST 88.0f          /* up to it 2^m is a number: the largest m is 127 */
#define POWER(n) 0x1p##n##f
#define HUGE_POWER POWER(120)           /* the square of LARGE_POWER, 2^8 short of infinity */
#define SUBNORMAL_LIFT POWER(24)        /* makes any subnormal number normal */
#define LARGEST FLT_MAX
#define SMALLEST_NORMAL FLT_MIN
#define LARGEST_CAP POWER(126)          /* its inverse is normal */
#define EXP_HIGH 89.0f          /* exp above it is inf */
#define LOG2_E 0x1.715476p+0f
#define LN2_HIGH 0x1.62p-1f     /* few bits: n * LN2_HIGH is exact */
#define LN2_LOW 0x1.c85fep-10f
/* Minimax fits over |r| <= ln2 / 2 of (exp(r) - 1 - r) / r^2 (relative error of exp 3.1e-9, float64: 3.8e-18) and over
 * |x| <= sqrt(0.4) of (tanh(x) / x - 1) / x^2 (4.7e-9, float64: 1.3e-17), by the Remez exchange in 50 digits. */
static const REAL FMHA_NAME(exp_fit)[] = {0x1.fffffcp-2f, 0x1.55549p-3f, 0x1.5558fcp-5f, 0x1.123b9ap-7f, 0x1.6a215ap-10f};
static const REAL FMHA_NAME(tanh_fit)[] = {-0x1.55553p-2f, 0x1.11068ep-3f, -0x1.b8265cp-5f, 0x1.518b16p-6f,
                                           -0x1.72fc48p-8f};
#else
#define REAL double
#define INT int64_t
#define REAL_LOG log
#define REAL_ABS fabs
#define REAL_EPSILON DBL_EPSILON
#define SIGN_BIT INT64_MIN
#define EXP_SHIFT 52
#define EXP_BIAS 1023
#define EXP_MAGIC 0x1.8p52
#define EXP_LOW -1400.0
#define EXP_NORMAL -0x1.6232bdd7abcd2p+9
#define EXP_ZERO -709.0
#define EXP_MOST 709.0
#define POWER(n) 0x1p##n
#define HUGE_POWER POWER(960)
#define SUBNORMAL_LIFT POWER(53)
#define LARGEST DBL_MAX
#define SMALLEST_NORMAL DBL_MIN
#define LARGEST_CAP POWER(1022)
#define EXP_HIGH 710.0
#define LOG2_E 0x1.71547652b82fep+0
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33
static const REAL FMHA_NAME(exp_fit)[] = {
    0x1.000000000000ap-1,  0x1.55555555554f7p-3,  0x1.55555555506b7p-5,  0x1.1111111128463p-7,  0x1.6c16c18494b7ap-10,
    0x1.a01a012846c46p-13, 0x1.a01998daa9439p-16, 0x1.71df2812ff8b6p-19, 0x1.28ae9a663e8e8p-22, 0x1.ad7e1167b0f77p-26};
static const REAL FMHA_NAME(tanh_fit)[] = {
    -0x1.55555555554edp-2, 0x1.1111111109993p-3,  -0x1.ba1ba1b425e03p-5,  0x1.664f4752a5b59p-6,
    -0x1.226e120f7f002p-7, 0x1.d6cea3b51bcdap-9,  -0x1.7d63583781ed7p-10, 0x1.334384d768048p-11,
    -0x1.de3ef0f02c4d1p-13, 0x1.4119c71500d55p-14, -0x1.08d82cdf6c8b1p-16};
#endif
#define NEGATIVE_INFINITY ((REAL)-INFINITY)
#define TINY (1 / POWER(80))            /* below it, results may miss terms that are subnormal */
#define LARGE_POWER ((REAL)FMHA_LARGE(FMHA_REAL == 64))
#define TANH_NEAR ((REAL)0.625)         /* |x| below which tanh(x) is a fit */

#if defined(__GNUC__) || defined(__clang__)
#define LANES (FMHA_VECTOR_BYTES / (ptrdiff_t)sizeof(REAL))
typedef REAL FMHA_NAME(vec) __attribute__((vector_size(FMHA_VECTOR_BYTES)));
typedef INT FMHA_NAME(ivec) __attribute__((vector_size(FMHA_VECTOR_BYTES)));
/* The same bits at any address that suits one REAL. */
typedef REAL FMHA_NAME(vec_at) __attribute__((vector_size(FMHA_VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
#define VEC FMHA_NAME(vec)
#define IVEC FMHA_NAME(ivec)
#define v_load(pointer) ((VEC)(*(const FMHA_NAME(vec_at) *)(pointer)))
#define v_lane(value, lane) ((value)[lane])
#define v_store(pointer, value) (*(FMHA_NAME(vec_at) *)(pointer) = (value))
#define v_splat(value) ((REAL)(value) - (VEC){0})       /* x - 0 is x, x + 0 is not (-0.0): no instruction */
#define i_splat(value) ((INT)(value) - (IVEC){0})
#define v_bits(value) ((IVEC)(value))
#define v_from_bits(value) ((VEC)(value))
#define i_load(pointer) ((IVEC)(*(const FMHA_NAME(vec_at) *)(pointer)))
#define i_within(low, at, high) ((IVEC)((low) <= (at)) & (IVEC)((at) < (high)))
#else
#define LANES ((ptrdiff_t)1)
typedef REAL FMHA_NAME(vec);
typedef INT FMHA_NAME(ivec);
#define VEC FMHA_NAME(vec)
#define IVEC FMHA_NAME(ivec)
#define v_load(pointer) (*(const REAL *)(pointer))
#define v_store(pointer, value) (*(REAL *)(pointer) = (value))
#define v_splat(value) ((REAL)(value))
#define i_splat(value) ((INT)(value))
static inline INT FMHA_NAME(bits)(REAL x) { INT i; memcpy(&i, &x, sizeof i); return i; }
static inline REAL FMHA_NAME(from_bits)(INT i) { REAL x; memcpy(&x, &i, sizeof x); return x; }
#define v_bits(value) FMHA_NAME(bits)(value)
#define v_from_bits(value) FMHA_NAME(from_bits)(value)
#define v_lane(value, lane) (value)
#define i_load(pointer) (*(const INT *)(pointer))
#define i_within(low, at, high) (-(INT)((low) <= (at) && (at) < (high)))
#endif

/* All ones where true. In C, gcc has no vector ?: and a scalar comparison gives 1, hence the two forms. */
#if defined(__GNUC__) || defined(__clang__)
#define v_truth(comparison) ((IVEC)(comparison))
#else
#define v_truth(comparison) (-(INT)(comparison))
#endif
#define v_select(truth, yes, no) v_from_bits(((truth) & v_bits(yes)) | (~(truth) & v_bits(no)))
#define v_greater(a, b) v_truth((a) > (b))
#define v_equal(a, b) v_truth((a) == (b))
#define i_greater(a, b) v_truth((a) > (b))

/* max and min give b where either is NaN, as the x86 instructions do. v_round and v_scale (x * 2^n, n whole) exist in
 * AVX-512 alone: elsewhere the exponential works on the bits; v_fma and v_fms where there are fused instructions. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !FMHA_PLAIN
#if FMHA_REAL == 32
#define X86_OP(name) X86_PASTE(X86_PREFIX, name, ps)
#else
#define X86_OP(name) X86_PASTE(X86_PREFIX, name, pd)
#endif
#define X86_PASTE(prefix, name, suffix) X86_PASTE_(prefix, name, suffix)
#define X86_PASTE_(prefix, name, suffix) prefix##name##_##suffix
#if FMHA_VECTOR_BYTES == 64
#define X86_PREFIX _mm512_
#define v_round(x) ((VEC)X86_OP(roundscale)((x), 8))
#define v_round_up(x) ((VEC)X86_OP(roundscale)((x), 10))
#define v_scale(x, n) ((VEC)X86_OP(scalef)((x), (n)))
#elif FMHA_VECTOR_BYTES == 32
#define X86_PREFIX _mm256_
#else
#define X86_PREFIX _mm_
#endif
#if FMHA_VECTOR_BYTES >= 32
#define v_fma(a, b, c) ((VEC)X86_OP(fmadd)((a), (b), (c)))      /* a * b + c, rounded once by any compiler's options */
#define v_fms(a, b, c) ((VEC)X86_OP(fmsub)((a), (b), (c)))      /* a * b - c */
#endif
#define v_max(a, b) ((VEC)X86_OP(max)((a), (b)))
#define v_min(a, b) ((VEC)X86_OP(min)((a), (b)))
#else
/* NEON's own max and min give NaN where either is, or the other one: neither is b. */
#define v_max(a, b) v_select(v_greater(a, b), a, b)
#define v_min(a, b) v_select(v_greater(b, a), a, b)
#if defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__)) && FMHA_VECTOR_BYTES == 16 && !FMHA_PLAIN
#if FMHA_REAL == 32
#define ARM_OP(name) name##q_f32
#else
#define ARM_OP(name) name##q_f64
#endif
#define v_fma(a, b, c) ((VEC)ARM_OP(vfma)((c), (a), (b)))
#define v_fms(a, b, c) (-(VEC)ARM_OP(vfms)((c), (a), (b)))
#endif
#endif

/* sum + a * b, rounded once where there are fused instructions: gcc fuses wherever it sees both, clang only within a block of
 * code, and moves products out of it. */
#if defined(__clang__) && defined(v_fma)
#define v_sum(sum, a, b) v_fma(a, b, sum)
#else
#define v_sum(sum, a, b) ((sum) + (a) * (b))
#endif

/* Whether any lane of a truth is set. */
#if defined(X86_OP) && FMHA_VECTOR_BYTES == 64 && FMHA_REAL == 32
#define v_any(truth) (_mm512_movepi32_mask((__m512i)(truth)) != 0)
#elif defined(X86_OP) && FMHA_VECTOR_BYTES == 64
#define v_any(truth) (_mm512_movepi64_mask((__m512i)(truth)) != 0)
#elif defined(X86_OP) && FMHA_VECTOR_BYTES == 32
#define v_any(truth) (_mm256_movemask_epi8((__m256i)(truth)) != 0)
#elif defined(X86_OP)
#define v_any(truth) (_mm_movemask_epi8((__m128i)(truth)) != 0)
#elif defined(ARM_OP)
#define v_any(truth) (vmaxvq_u32((uint32x4_t)(truth)) != 0)
#elif defined(__GNUC__) || defined(__clang__)
static inline int FMHA_NAME(any)(IVEC truth)
{
    INT any = 0;
    for (ptrdiff_t l = 0; l < LANES; l++) any |= truth[l];
    return any != 0;
}
#define v_any(truth) FMHA_NAME(any)(truth)
#else
#define v_any(truth) ((truth) != 0)
#endif
/* In a register from here on. Where a vector serves several rows, compilers read it from memory for each of them; where it has yet to
 * come from there, it is waited for each time. */
#if defined(X86_OP) && FMHA_VECTOR_BYTES == 64
#define v_keep(value) __asm__("" : "+v"(value))
#elif defined(X86_OP)
#define v_keep(value) __asm__("" : "+x"(value))
#else
#define v_keep(value) ((void)0)
#endif

#define v_abs(x) v_from_bits(v_bits(x) & ~i_splat(SIGN_BIT))

/* The sanitizers of a checked build do not look into masked loads and stores: there, element by element. */
#if defined(X86_OP) && FMHA_VECTOR_BYTES == 64 && !defined(FMHA_CHECKED)
static inline VEC FMHA_NAME(load_part)(const REAL *x, ptrdiff_t n, REAL fill)
{
    return (VEC)X86_OP(mask_loadu)(v_splat(fill), (1u << n) - 1, x);
}

static inline void FMHA_NAME(store_part)(REAL *y, VEC value, ptrdiff_t n)
{
    X86_OP(mask_storeu)(y, (1u << n) - 1, value);
}
#elif defined(X86_OP) && FMHA_VECTOR_BYTES == 32 && !defined(FMHA_CHECKED)
static inline IVEC FMHA_NAME(first)(ptrdiff_t n)      /* all ones in the first n lanes */
{
    static const INT ones[2 * LANES] = {[0 ... LANES - 1] = -1};
    return i_load(ones + LANES - n);
}

static inline VEC FMHA_NAME(load_part)(const REAL *x, ptrdiff_t n, REAL fill)
{
    IVEC mask = FMHA_NAME(first)(n);
    return v_select(mask, (VEC)X86_OP(maskload)(x, (__m256i)mask), v_splat(fill));
}

static inline void FMHA_NAME(store_part)(REAL *y, VEC value, ptrdiff_t n)
{
    X86_OP(maskstore)(y, (__m256i)FMHA_NAME(first)(n), value);
}
#else
static inline VEC FMHA_NAME(load_part)(const REAL *x, ptrdiff_t n, REAL fill)
{
    REAL lanes[LANES];
    for (ptrdiff_t l = 0; l < LANES; l++) lanes[l] = l < n ? x[l] : fill;
    return v_load(lanes);
}

static inline void FMHA_NAME(store_part)(REAL *y, VEC value, ptrdiff_t n)
{
    REAL lanes[LANES];
    v_store(lanes, value);
    for (ptrdiff_t l = 0; l < n; l++) y[l] = lanes[l];
}
#endif

/* n >= LANES: a whole vector, else the first n lanes. */
#define v_load_n(pointer, n, fill) ((n) >= LANES ? v_load(pointer) : FMHA_NAME(load_part)(pointer, n, fill))
#define v_store_n(pointer, value, n) \
    do { if ((n) >= LANES) v_store(pointer, value); else FMHA_NAME(store_part)(pointer, value, n); } while (0)

#if (defined(__GNUC__) || defined(__clang__)) && !FMHA_PLAIN
#define HAVE_SHUFFLES 1
#else
#define HAVE_SHUFFLES 0
#endif

/* Lane l of a shuffle of a and b gets lane OF(l, size, many) of these, which lie one behind the other, `many` lanes each:
 * numbers, or vectors of such. BIT: what is more in lanes that have the bit `size`. */
#if HAVE_SHUFFLES && defined(__clang__)
/* Every lane is a constant here, and so is the size: which of them it is, is known when loops are unrolled. */
#define BIT(l, size, more) ((l) & (size) ? (more) : 0)
#define SHUFFLED_LANE(l, OF, size) ((int)(OF(l, size, LANES) & (2 * LANES - 1)))
#define TWO_LANES(l, OF, size) SHUFFLED_LANE(l, OF, size), SHUFFLED_LANE(l + 1, OF, size)
#define FOUR_LANES(l, OF, size) TWO_LANES(l, OF, size), TWO_LANES(l + 2, OF, size)
#define EIGHT_LANES(l, OF, size) FOUR_LANES(l, OF, size), FOUR_LANES(l + 4, OF, size)
#if FMHA_VECTOR_BYTES * 8 / FMHA_REAL == 16
#define ALL_LANES(OF, size) EIGHT_LANES(0, OF, size), EIGHT_LANES(8, OF, size)
#elif FMHA_VECTOR_BYTES * 8 / FMHA_REAL == 8
#define ALL_LANES(OF, size) EIGHT_LANES(0, OF, size)
#elif FMHA_VECTOR_BYTES * 8 / FMHA_REAL == 4
#define ALL_LANES(OF, size) FOUR_LANES(0, OF, size)
#else
#define ALL_LANES(OF, size) TWO_LANES(0, OF, size)
#endif
#define SHUFFLED(a, b, OF, size) \
    ((size) == 1 ? __builtin_shufflevector(a, b, ALL_LANES(OF, 1)) : (size) == 2 ? __builtin_shufflevector(a, b, ALL_LANES(OF, 2)) : \
     (size) == 4 ? __builtin_shufflevector(a, b, ALL_LANES(OF, 4)) : __builtin_shufflevector(a, b, ALL_LANES(OF, 8)))
#elif HAVE_SHUFFLES
/* 0, 1, 2, ...: what is made of it by whole vectors is a constant of the compiler's, what is put together lane by lane is not. */
#if FMHA_VECTOR_BYTES * 8 / FMHA_REAL == 16
#define LANE_NUMBERS ((IVEC){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif FMHA_VECTOR_BYTES * 8 / FMHA_REAL == 8
#define LANE_NUMBERS ((IVEC){0, 1, 2, 3, 4, 5, 6, 7})
#elif FMHA_VECTOR_BYTES * 8 / FMHA_REAL == 4
#define LANE_NUMBERS ((IVEC){0, 1, 2, 3})
#else
#define LANE_NUMBERS ((IVEC){0, 1})
#endif
#define BIT(l, size, more) ((((l) & (size)) != 0) & (more))
#define SHUFFLED(a, b, OF, size) __builtin_shuffle(a, b, OF(LANE_NUMBERS, i_splat(size), i_splat(LANES)))
#endif

#if HAVE_SHUFFLES
/* Lane l gets lane l + half, around the end. */
INLINED VEC FMHA_NAME(turned)(VEC value, const ptrdiff_t half)
{
#define AROUND(l, size, many) (((l) + (size)) & ((many) - 1))
    return SHUFFLED(value, value, AROUND, half);
#undef AROUND
}

/* The lower half of a, and behind it that of b. */
INLINED VEC FMHA_NAME(lower_halves)(VEC a, VEC b)
{
#define LOWER(l, size, many) (((l) & ((size) - 1)) + BIT(l, size, many))
    return SHUFFLED(a, b, LOWER, LANES / 2);
#undef LOWER
}

static inline REAL FMHA_NAME(sum)(VEC value)
{
#pragma GCC unroll 8
    for (ptrdiff_t half = LANES / 2; half; half /= 2) value = value + FMHA_NAME(turned)(value, half);
    return value[0];
}

static inline REAL FMHA_NAME(largest)(VEC value)
{
#pragma GCC unroll 8
    for (ptrdiff_t half = LANES / 2; half; half /= 2) {
        VEC other = FMHA_NAME(turned)(value, half);
        value = v_max(other, value);
    }
    return value[0];
}
#else
static inline REAL FMHA_NAME(sum)(VEC value)
{
    REAL lanes[LANES];
    v_store(lanes, value);
    for (ptrdiff_t half = LANES / 2; half; half /= 2)       /* pairwise: a fixed order */
        for (ptrdiff_t l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

static inline REAL FMHA_NAME(largest)(VEC value)
{
    REAL lanes[LANES];
    v_store(lanes, value);
    REAL best = lanes[0];
    for (ptrdiff_t l = 1; l < LANES; l++) best = lanes[l] > best ? lanes[l] : best;
    return best;
}
#endif

/* Long chains of additions want other work beside them: what follows takes n vectors, each step for all of them. */
#define EACH(i) _Pragma("GCC unroll 8") for (int i = 0; i < n; i++)

/* sum <- fit[0] + fit[1] x + fit[2] x^2 + ... */
INLINED void FMHA_NAME(horner)(const int n, const ptrdiff_t terms, const REAL *fit, const VEC *x, VEC *sum)
{
    EACH(i) sum[i] = v_splat(fit[terms - 1]);
#pragma GCC unroll 16
    for (ptrdiff_t d = terms - 2; d >= 0; d--) EACH(i) sum[i] = sum[i] * x[i] + v_splat(fit[d]);
}

/* exp(x) = 2^m exp(r), m = round(x / ln 2), |r| <= ln2 / 2: rest <- exp(r) - 1, shifted <- m + EXP_MAGIC; NaN at NaN.
 * EXP_LOW <= x <= EXP_HIGH */
INLINED void FMHA_NAME(exp_rest)(const int n, const VEC *x, VEC *rest, VEC *shifted)
{
    VEC r[8], fit[8];
    EACH(i) shifted[i] = x[i] * (REAL)LOG2_E + v_splat(EXP_MAGIC);
    EACH(i) {
        VEC whole = shifted[i] - v_splat(EXP_MAGIC);
        r[i] = x[i] - whole * (REAL)LN2_HIGH;
        r[i] = r[i] - whole * (REAL)LN2_LOW;
    }
    FMHA_NAME(horner)(n, sizeof FMHA_NAME(exp_fit) / sizeof(REAL), FMHA_NAME(exp_fit), r, fit);
    EACH(i) fit[i] = fit[i] * r[i];
    EACH(i) rest[i] = fit[i] * r[i] + r[i];
}

/* y <- exp(r), power <- what `scaled` takes for m. */
INLINED void FMHA_NAME(exp_within)(const int n, const VEC *x, VEC *y, VEC *power)
{
    VEC rest[8], shifted[8];
    FMHA_NAME(exp_rest)(n, x, rest, shifted);
    EACH(i) {
        y[i] = rest[i] + v_splat(1);
#ifdef v_scale
        power[i] = shifted[i] - v_splat(EXP_MAGIC);
#else
        power[i] = shifted[i];
#endif
    }
}

/* The same of one vector, and of any x. */
INLINED VEC FMHA_NAME(exp_parts)(VEC x, VEC *power)
{
    VEC y;
    x = v_min(v_splat(EXP_HIGH), v_max(v_splat(EXP_LOW), x));      /* NaN stays */
    FMHA_NAME(exp_within)(1, &x, &y, power);
    return y;
}

/* y * 2^n, as two factors, both normal, so that only the last product underflows: y = exp(r) times what leaves it normal. */
INLINED VEC FMHA_NAME(scaled)(VEC y, VEC power)
{
#ifdef v_scale
    return v_scale(y, power);
#else
    IVEC n = v_bits(power) - v_bits(v_splat(EXP_MAGIC)), half = n >> 1;
    y = y * v_from_bits((half + i_splat(EXP_BIAS)) << EXP_SHIFT);
    return y * v_from_bits((n - half + i_splat(EXP_BIAS)) << EXP_SHIFT);
#endif
}

/* exp(x): exact at 0, 0 at -inf and where the result would be subnormal, NaN at NaN. */
static inline VEC FMHA_NAME(exp)(VEC x)
{
#if !FMHA_FLUSHES
    x = v_select(v_greater(v_splat(EXP_NORMAL), x), v_splat(NEGATIVE_INFINITY), x);
#endif
    VEC power, y = FMHA_NAME(exp_parts)(x, &power);
    return FMHA_NAME(scaled)(y, power);
}

/* The same of n vectors x <= EXP_MOST, with the same bits and fewer instructions: the power is one factor, 0 where the result
 * would be subnormal, and exp(r) 2^m = (exp(r) - 1) 2^m + 2^m. */
INLINED void FMHA_NAME(exp_each)(const int n, VEC *x)
{
    VEC rest[8], shifted[8];
    EACH(i) {
#if !FMHA_FLUSHES
        x[i] = v_select(v_greater(v_splat(EXP_NORMAL), x[i]), v_splat(NEGATIVE_INFINITY), x[i]);
#endif
        x[i] = v_max(v_splat(EXP_ZERO), x[i]);          /* NaN stays */
    }
    FMHA_NAME(exp_rest)(n, x, rest, shifted);
    EACH(i) {
        VEC factor = v_from_bits((v_bits(shifted[i]) + (i_splat(EXP_BIAS) - v_bits(v_splat(EXP_MAGIC)))) << EXP_SHIFT);
#ifdef v_fma
        x[i] = v_fma(rest[i], factor, factor);          /* the product alone may be subnormal */
#else
        x[i] = (rest[i] + v_splat(1)) * factor;
#endif
    }
}

/* tanh(x): the fit for |x| < TANH_NEAR, where 1 - 2 / (exp(2x) + 1) would cancel; that formula elsewhere, sign by symmetry;
 * near: all are. capped <- cap * tanh for x = s / cap; near 0 made from s itself, which is right also where x has lost it to
 * underflow. */
INLINED VEC FMHA_NAME(tanh_and)(const int near, VEC x, VEC s, VEC cap, VEC *capped)
{
    IVEC sign = v_bits(x) & i_splat(SIGN_BIT);
    VEC size = v_from_bits(v_bits(x) ^ sign);
    VEC squared = x * x;
    const ptrdiff_t degree = sizeof FMHA_NAME(tanh_fit) / sizeof(REAL);
    VEC fit = v_splat(FMHA_NAME(tanh_fit)[degree - 1]);
    for (ptrdiff_t d = degree - 2; d >= 0; d--) fit = fit * squared + v_splat(FMHA_NAME(tanh_fit)[d]);
    fit = fit * squared;
    if (near) {
        *capped = fit * s + s;
        return fit * x + x;
    }
    VEC far = v_splat(1) - v_splat(2) / (FMHA_NAME(exp)(size + size) + v_splat(1));
    far = v_from_bits(v_bits(far) | sign);
    IVEC is_near = v_greater(v_splat(TANH_NEAR), size);
    *capped = v_select(is_near, fit * s + s, cap * far);
    return v_select(is_near, fit * x + x, far);
}

static inline VEC FMHA_NAME(tanh)(VEC x)
{
    VEC unused;
    return FMHA_NAME(tanh_and)(0, x, x, v_splat(1), &unused);
}

/* A softcap beyond LARGEST_CAP changes no score that is not as large; the inverse of a tiny one is limited, which leaves 0 at 0
 * and what is capped at all, capped. */
static inline REAL FMHA_NAME(cap_of)(double softcap, REAL *inverse)
{
    const double exact = softcap > LARGEST_CAP ? 1 / (double)LARGEST_CAP : 1 / softcap;
    *inverse = exact > LARGEST ? LARGEST : (REAL)exact;
    return softcap > LARGEST_CAP ? LARGEST_CAP : (REAL)softcap;
}

/* softcap * tanh(s / softcap) for any positive softcap. */
INLINED VEC FMHA_NAME(soft_capped)(VEC s, double softcap, VEC *tanh_of)
{
    REAL inverse, cap = FMHA_NAME(cap_of)(softcap, &inverse);
    VEC capped;
    *tanh_of = FMHA_NAME(tanh_and)(0, s * inverse, s, v_splat(cap), &capped);
    return capped;
}

/* The same of n vectors, each ld behind the one before, in place; slope, if given, gets the derivatives. Most scores are small,
 * which spares an exponential and a division. That is asked of CAPPED_KEYS vectors together, since CPUs guess the answer and
 * each wrong guess costs. */
INLINED void FMHA_NAME(cap_columns)(ptrdiff_t n, ptrdiff_t ld, REAL *s, double softcap, REAL *slope)
{
    REAL inverse, cap = FMHA_NAME(cap_of)(softcap, &inverse);
    for (ptrdiff_t k = 0, end; k < n; k = end) {
        end = k + CAPPED_KEYS < n ? k + CAPPED_KEYS : n;
        VEC most = v_splat(0);
        for (ptrdiff_t at = k; at < end; at++) most = v_max(v_abs(v_load(s + at * ld) * inverse), most);
#define CAPPED(near) \
        for (ptrdiff_t at = k; at < end; at++) { \
            VEC score = v_load(s + at * ld), capped, t = FMHA_NAME(tanh_and)(near, score * inverse, score, v_splat(cap), &capped); \
            v_store(s + at * ld, capped); \
            if (slope) v_store(slope + at * ld, v_splat(1) - t * t); \
        }
        if (v_any(~v_greater(v_splat(TANH_NEAR), most))) { CAPPED(0) }
        else { CAPPED(1) }
#undef CAPPED
    }
}

#if HAVE_SHUFFLES
/* Of `rows` rows squares of as many lanes become their columns: log2(rows) rounds, each exchanging blocks of `size` lanes between rows. */
INLINED void FMHA_NAME(transpose_squares)(const ptrdiff_t rows, VEC row[])
{
    /* lane l: of a, or where l & size of b, l - size; l + size of a, or l of b */
#define KEEP(l, size, many) ((l) + BIT(l, size, (many) - (size)))
#define TAKE(l, size, many) (KEEP(l, size, many) + (size))
#pragma GCC unroll 8
    for (ptrdiff_t size = 1; size < rows; size *= 2)
#pragma GCC unroll 16
        for (ptrdiff_t i = 0; i < rows; i++)
            if (!(i & size)) {
                VEC a = row[i], b = row[i + size];
                row[i] = SHUFFLED(a, b, KEEP, size);
                row[i + size] = SHUFFLED(a, b, TAKE, size);
            }
#undef KEEP
#undef TAKE
}

INLINED void FMHA_NAME(transpose)(VEC row[])
{
    FMHA_NAME(transpose_squares)(LANES, row);
}
#define HAVE_TRANSPOSE 1

/* Lanes of a that differ in the bit `size` are added, and those of b, of which the result has the lanes that have the bit. */
INLINED VEC FMHA_NAME(halved)(VEC a, VEC b, const ptrdiff_t size)
{
#define KEEP(l, size, many) ((l) + BIT(l, size, many))
#define TAKE(l, size, many) ((l) + (size) + BIT(l, size, (many) - (size) - (size)))
    return SHUFFLED(a, b, KEEP, size) + SHUFFLED(a, b, TAKE, size);
#undef KEEP
#undef TAKE
}
#else
#define HAVE_TRANSPOSE 0

static inline VEC FMHA_NAME(halved)(VEC a, VEC b, const ptrdiff_t size)
{
    REAL pair[2][LANES], sums[LANES];
    v_store(pair[0], a);
    v_store(pair[1], b);
    for (ptrdiff_t l = 0; l < LANES; l++) sums[l] = pair[(l & size) != 0][l] + pair[(l & size) != 0][l ^ size];
    return v_load(sums);
}
#endif

/* Blocks of four neighbouring lanes: a term of each of four columns. */
#if HAVE_SHUFFLES && FMHA_REAL == 32 && FMHA_VECTOR_BYTES == 64 && defined(X86_OP)
#define HAVE_FOURS 1
/* Which of four things `size`, 1, 2, 4 or 8, stands for: shuffles take no other numbers. */
#define NUMBER_OF(size) (((size) >> 1) - ((size) >> 3))

/* A block again and again; of the first n numbers alone, zeros behind them. */
INLINED VEC FMHA_NAME(splat_four)(const REAL *at)
{
    return (VEC)_mm512_broadcast_f32x4(_mm_loadu_ps(at));
}

INLINED VEC FMHA_NAME(splat_some)(const REAL *at, ptrdiff_t n)
{
    const REAL four[4] = {at[0], n > 1 ? at[1] : 0, n > 2 ? at[2] : 0, n > 3 ? at[3] : 0};
    return FMHA_NAME(splat_four)(four);
}

/* Of four vectors of rows, a column each, whose squares are transposed: four rows, from row 4 * NUMBER_OF(size) on, a block each. */
INLINED VEC FMHA_NAME(rows_of_blocks)(const VEC column[4], const ptrdiff_t size)
{
#define BLOCK_OF(l, size, many) (((l) & 3) + (NUMBER_OF(size) << 2) + BIT(l, 4, many))
    return FMHA_NAME(lower_halves)(SHUFFLED(column[0], column[1], BLOCK_OF, size), SHUFFLED(column[2], column[3], BLOCK_OF, size));
#undef BLOCK_OF
}

/* Of blocks whose lanes are keys, and each of which is a row's, what belongs to one of the keys: of the rows of one vector, two or
 * three. Lanes behind them are anything. */
INLINED VEC FMHA_NAME(key_of_blocks)(const int vectors, const VEC block[3], const ptrdiff_t size)
{
#define OF_TWO(l, size, many) ((((l) & 3) << 2) + NUMBER_OF(size) + BIT(l, 4, many))
#define OF_THIRD(l, size, many) ((l) + BIT(l, 8, (many) + (((l) & 3) << 2) + NUMBER_OF(size) - (l)))
    const VEC two = SHUFFLED(block[0], block[vectors > 1], OF_TWO, size);
    return vectors < 3 ? two : SHUFFLED(two, block[2], OF_THIRD, size);
#undef OF_TWO
#undef OF_THIRD
}
#undef NUMBER_OF
#else
#define HAVE_FOURS 0
#endif

/* Sums over lanes of many vectors: of vectors 2i and 2i + 1 one is made, and so on, with twice the bit, until all n are row[0].
 * From bit 1 on, LANES vectors leave the sum of vector i in lane i. */
INLINED void FMHA_NAME(halve)(VEC row[], const ptrdiff_t n, const ptrdiff_t bit)
{
#pragma GCC unroll 8
    for (ptrdiff_t half = n / 2, size = bit; half; half /= 2, size *= 2)
#pragma GCC unroll 16
        for (ptrdiff_t i = 0; i < half; i++) row[i] = FMHA_NAME(halved)(row[2 * i], row[2 * i + 1], size);
}

#if defined(__GNUC__) || defined(__clang__)
#define v_prefetch(pointer) __builtin_prefetch(pointer)
#define v_prefetch_written(pointer) __builtin_prefetch(pointer, 1)
#define v_prefetch_far(pointer) __builtin_prefetch(pointer, 0, 2)      /* no farther than the second cache: what waits for the first is few */
#else
#define v_prefetch(pointer) ((void)0)
#define v_prefetch_written(pointer) ((void)(pointer))
#define v_prefetch_far(pointer) ((void)0)
#endif
