/* Operands and results in another element type than the computation's (fmha_problem: element, stored, mask_element): converted
 * exactly, or rounded to nearest from float64 to float32, as they are loaded; rounded to nearest, ties to even, as they are
 * stored. */

#if FMHA_REAL == 32
typedef double FMHA_NAME(other);
#else
typedef float FMHA_NAME(other);
#endif

/* CALL(type) with `type`, an operand's of a product, as a constant; only float32 is multiplied by half precision. */
#if FMHA_REAL == 32
#define BY_STORED(CALL) \
    switch (type) { \
    case FMHA_HALF: CALL(FMHA_HALF); break; \
    case FMHA_BFLOAT: CALL(FMHA_BFLOAT); break; \
    default: CALL(FMHA_SAME); \
    }
#else
#define BY_STORED(CALL) (void)type; CALL(FMHA_SAME);
#endif

static inline ptrdiff_t FMHA_NAME(stored_size)(int type)
{
    return (ptrdiff_t)(type == FMHA_SAME ? sizeof(REAL) : type == FMHA_OTHER ? sizeof(FMHA_NAME(other)) : sizeof(uint16_t));
}

/* float16: exponent and mantissa move to float32's places, 112 is added to the exponent; 112 once more for Inf and NaN. A
 * subnormal one gets the exponent of the smallest normal one and loses that one's implicit 1 by a subtraction: no float32 on the
 * way is subnormal, which would count as 0. */
static inline REAL FMHA_NAME(stored_value)(const int type, const char *x)
{
    if (type == FMHA_SAME) {
        REAL value;
        memcpy(&value, x, sizeof value);
        return value;
    }
    if (type == FMHA_OTHER) {
        FMHA_NAME(other) value;
        memcpy(&value, x, sizeof value);
        return (REAL)value;
    }
    uint16_t bits;
    uint32_t wide;
    float value;
    memcpy(&bits, x, sizeof bits);
    wide = (uint32_t)bits << 16;
    if (type == FMHA_HALF) {
        wide = ((uint32_t)(bits & 0x7fff) << 13) + (112u << 23);
        if ((bits & 0x7c00) == 0x7c00) wide += 112u << 23;
        if ((bits & 0x7c00) == 0) {
            wide += 1u << 23;
            memcpy(&value, &wide, sizeof value);
            value -= 0x1p-14f;
            memcpy(&wide, &value, sizeof value);
        }
        wide |= (uint32_t)(bits & 0x8000) << 16;
    }
    memcpy(&value, &wide, sizeof value);
    return (REAL)value;
}

/* F16C: as stored_value and half_bits do it but for the payload of a NaN; subnormal numbers exact whatever the control register
 * says. */
#if FMHA_VECTOR_BYTES == 32 && defined(X86_OP)
#define HALVES_CONVERTED 1
/* LANES elements of half precision as they lie, and the first n < LANES of them, zeros beyond. */
static inline __m128i FMHA_NAME(halves)(const char *x)
{
    return LANES == 8 ? _mm_loadu_si128((const __m128i *)x) : _mm_loadu_si64(x);
}

static inline __m128i FMHA_NAME(first_halves)(const char *x, ptrdiff_t n)
{
    uint64_t four = 0, rest = 0;
    uint16_t one;
    uint32_t two;
    if (n & 1) {
        memcpy(&one, x + 2 * (n - 1), sizeof one);
        rest = one;
    }
    if (n & 2) {
        memcpy(&two, x + 2 * (n & 4), sizeof two);
        rest = rest << 32 | two;
    }
    if (!(n & 4)) return _mm_set_epi64x(0, (long long)rest);
    memcpy(&four, x, sizeof four);
    return _mm_set_epi64x((long long)rest, (long long)four);
}

static inline VEC FMHA_NAME(of_halves)(const int type, __m128i packed)
{
#if FMHA_REAL == 32
    if (type == FMHA_HALF) return (VEC)_mm256_cvtph_ps(packed);
    return (VEC)_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16);
#else
    if (type == FMHA_HALF) return (VEC)_mm256_cvtps_pd(_mm_cvtph_ps(packed));
    return (VEC)_mm256_cvtps_pd((__m128)_mm_slli_epi32(_mm_cvtepu16_epi32(packed), 16));
#endif
}
#else
#define HALVES_CONVERTED 0
#endif

/* LANES elements from x on. */
INLINED VEC FMHA_NAME(stored_load)(const int type, const char *x)
{
#if defined(__GNUC__) || defined(__clang__)
    if (type == FMHA_SAME) return v_load((const REAL *)x);
    if (type == FMHA_OTHER) {
        typedef FMHA_NAME(other) others __attribute__((vector_size(LANES * sizeof(FMHA_NAME(other))), aligned(4), may_alias));
        return __builtin_convertvector(*(const others *)x, VEC);
    }
#if FMHA_VECTOR_BYTES == 64 && FMHA_REAL == 32 && defined(X86_OP)
    __m256i packed = _mm256_loadu_si256((const __m256i *)x);
    if (type == FMHA_HALF) return (VEC)_mm512_cvtph_ps(packed);
    return (VEC)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
#elif HALVES_CONVERTED
    return FMHA_NAME(of_halves)(type, FMHA_NAME(halves)(x));
#else
    typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
#if FMHA_REAL == 32 && defined(ARM_OP)
    if (type == FMHA_HALF) return (VEC)vcvt_f32_f16((float16x4_t)*(const halves *)x);
#endif
    typedef int32_t words __attribute__((vector_size(LANES * 4)));
    typedef float floats __attribute__((vector_size(LANES * 4)));
    words bits = __builtin_convertvector(*(const halves *)x, words), wide = bits << 16;
    if (type == FMHA_HALF) {
        words subnormal = (words)((bits & 0x7c00) == 0);
        wide = ((bits & 0x7fff) << 13) + (112 << 23) + ((words)((bits & 0x7c00) == 0x7c00) & (112 << 23));
        floats small = (floats)(wide + (1 << 23)) - 0x1p-14f;
        wide = (subnormal & (words)small) | (~subnormal & wide) | (bits & 0x8000) << 16;
    }
    return __builtin_convertvector((floats)wide, VEC);
#endif
#else
    return FMHA_NAME(stored_value)(type, x);
#endif
}

/* Whether a part of a vector of a type is loaded as fast as all of it. */
#if FMHA_VECTOR_BYTES == 64 && FMHA_REAL == 32 && defined(X86_OP) && !defined(FMHA_CHECKED)
#define STORED_HALVES_IN_PARTS 1
#else
#define STORED_HALVES_IN_PARTS 0
#endif
#define STORED_PARTS(type) ((type) == FMHA_SAME || (STORED_HALVES_IN_PARTS && (type) != FMHA_OTHER))

/* The first n elements from x on, zeros beyond; n < LANES. */
static inline VEC FMHA_NAME(stored_part)(const int type, const char *x, ptrdiff_t n)
{
    REAL lanes[LANES];
    if (type == FMHA_SAME) return FMHA_NAME(load_part)((const REAL *)x, n, 0);
#if STORED_HALVES_IN_PARTS
    __m256i packed = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), x);
    if (type == FMHA_HALF) return (VEC)_mm512_cvtph_ps(packed);
    if (type == FMHA_BFLOAT) return (VEC)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
#endif
#if HALVES_CONVERTED
    if (type != FMHA_OTHER) return FMHA_NAME(of_halves)(type, FMHA_NAME(first_halves)(x, n));
#endif
    for (ptrdiff_t l = 0; l < LANES; l++) lanes[l] = l < n ? FMHA_NAME(stored_value)(type, x + l * FMHA_NAME(stored_size)(type)) : 0;
    return v_load(lanes);
}

INLINED VEC FMHA_NAME(stored_load_n)(const int type, const char *x, ptrdiff_t n)
{
    return n >= LANES ? FMHA_NAME(stored_load)(type, x) : FMHA_NAME(stored_part)(type, x, n);
}

/* The bits of a half type nearest to those of a float32; beyond its largest number Inf, NaN stays NaN. A result of float16 below
 * its normal ones is made by an addition that leaves as many bits as it has. */
static inline uint16_t FMHA_NAME(half_bits)(const int type, uint32_t bits)
{
    uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    float small;
    if (type == FMHA_BFLOAT)
        return (uint16_t)(sign | (size > 0x7f800000 ? size >> 16 | 0x40 : (size + 0x7fff + (size >> 16 & 1)) >> 16));
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 143u << 23) return (uint16_t)(sign | 0x7c00);
    if (size >= 113u << 23) return (uint16_t)(sign | (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13);
    memcpy(&small, &size, sizeof small);
    small += 0.5f;
    memcpy(&size, &small, sizeof size);
    return (uint16_t)(sign | (size - (126u << 23)));
}

/* One number. To a half type by way of a float32 that is odd where it is not exact: it lies on no tie, so that there is one
 * rounding and not two. */
static inline void FMHA_NAME(store_value)(const int type, double value, char *to)
{
    if (type == FMHA_SAME) {
        REAL same = (REAL)value;
        memcpy(to, &same, sizeof same);
    } else if (type == FMHA_OTHER) {
        FMHA_NAME(other) other = (FMHA_NAME(other))value;
        memcpy(to, &other, sizeof other);
    } else {
        float nearest = (float)value;
        uint32_t bits;
        memcpy(&bits, &nearest, sizeof bits);
        if ((double)nearest != value && value == value && !(bits & 1)) bits += fabs((double)nearest) < fabs(value) ? 1 : -1u;
        uint16_t half = FMHA_NAME(half_bits)(type, bits);
        memcpy(to, &half, sizeof half);
    }
}

/* LANES elements from `to` on. */
INLINED void FMHA_NAME(stored_store)(const int type, VEC value, char *to)
{
    if (type == FMHA_SAME) {
        v_store((REAL *)to, value);
        return;
    }
#if (defined(__GNUC__) || defined(__clang__)) && FMHA_REAL == 32
    if (type != FMHA_OTHER) {
#if FMHA_VECTOR_BYTES == 64 && defined(X86_OP)
        if (type == FMHA_HALF) {
            _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
            return;
        }
#elif HALVES_CONVERTED
        if (type == FMHA_HALF) {
            _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
            return;
        }
#endif
        typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));     /* as half_bits */
#ifdef ARM_OP
        if (type == FMHA_HALF) {
            *(halves *)to = (halves)vcvt_f16_f32((float32x4_t)value);
            return;
        }
#endif
        IVEC bits = v_bits(value), size = bits & ~i_splat(SIGN_BIT), sign = bits >> 16 & 0x8000, half;
        IVEC nan = i_greater(size, i_splat(0x7f800000));
        if (type == FMHA_BFLOAT) {
            half = (nan & (size >> 16 | 0x40)) | (~nan & (((size & ~nan) + 0x7fff + (size >> 16 & 1)) >> 16));
        } else {
            IVEC large = i_greater(size, i_splat((143 << 23) - 1)), small = i_greater(i_splat(113 << 23), size);
            IVEC of_small = v_bits(v_from_bits(size) + v_splat(0.5)) - (126 << 23);
            half = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
            half = (small & of_small) | (~small & half);
            half = (large & (0x7c00 | (nan & 0x200))) | (~large & half);
        }
        *(halves *)to = __builtin_convertvector(half | sign, halves);
        return;
    }
#endif
    REAL lanes[LANES];
    v_store(lanes, value);
    for (ptrdiff_t l = 0; l < LANES; l++) FMHA_NAME(store_value)(type, (double)lanes[l], to + l * FMHA_NAME(stored_size)(type));
}

INLINED void FMHA_NAME(convert_rows)(const int type, const char *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, REAL *to)
{
    ptrdiff_t whole = ROUND_UP(width, LANES), size = FMHA_NAME(stored_size)(type);
    for (ptrdiff_t i = 0; i < n; i++)
        for (ptrdiff_t d = 0; d < width; d += LANES)
            v_store(to + i * whole + d, FMHA_NAME(stored_load_n)(type, x + (i * stride + d) * size, width - d));
}

/* Where row i of head (b, h) lies. */
static inline char *FMHA_NAME(row_in)(const int type, const fmha_array *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i)
{
    return x->data + (b * x->stride[0] + h * x->stride[1] + i * x->stride[2]) * FMHA_NAME(stored_size)(type);
}

/* Where row j of a key/value head, or of a copy of it, lies. */
static inline char *FMHA_NAME(stored_row)(const fmha_problem *p, const fmha_array *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t j)
{
    return FMHA_NAME(row_in)(p->stored, x, b, p->copies ? h / p->copies : h, j);
}

/* n rows of an element type in the computation's: where they lie, or converted to rows of whole vectors. */
static const REAL *FMHA_NAME(real_rows)(int type, const char *x, ptrdiff_t stride, ptrdiff_t n, ptrdiff_t width, REAL *to, ptrdiff_t *ld)
{
    *ld = ROUND_UP(width, LANES);
    switch (type) {
    case FMHA_HALF: FMHA_NAME(convert_rows)(FMHA_HALF, x, stride, n, width, to); break;
    case FMHA_BFLOAT: FMHA_NAME(convert_rows)(FMHA_BFLOAT, x, stride, n, width, to); break;
    case FMHA_OTHER: FMHA_NAME(convert_rows)(FMHA_OTHER, x, stride, n, width, to); break;
    default: *ld = stride; return (const REAL *)x;
    }
    return to;
}

/* Rows [j, j + n) of a key/value head (b, h). */
static const REAL *FMHA_NAME(computed_rows)(const fmha_problem *p, const fmha_array *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t j, ptrdiff_t n,
                                            ptrdiff_t width, REAL *to, ptrdiff_t *ld)
{
    return FMHA_NAME(real_rows)(p->stored, FMHA_NAME(stored_row)(p, x, b, h, j), x->stride[2], n, width, to, ld);
}

/* Scratch that computed_rows needs for n rows, in REALs. */
static ptrdiff_t FMHA_NAME(computed_scratch)(const fmha_problem *p, ptrdiff_t n)
{
    ptrdiff_t width = p->D > p->Dv ? p->D : p->Dv;
    return p->stored == FMHA_SAME ? 0 : n * ROUND_UP(width, LANES);
}

/* One row. */
static inline const REAL *FMHA_NAME(real_row)(int type, const char *x, ptrdiff_t width, REAL *to)
{
    ptrdiff_t unused;
    return FMHA_NAME(real_rows)(type, x, 0, 1, width, to, &unused);
}

INLINED void FMHA_NAME(move_rows)(const int load, const int type, ptrdiff_t rows, ptrdiff_t cols, const char *x, ptrdiff_t ldx, char *y,
                                  ptrdiff_t ldy)
{
    ptrdiff_t size = FMHA_NAME(stored_size)(type), size_x = load ? size : (ptrdiff_t)sizeof(REAL),
            size_y = load ? (ptrdiff_t)sizeof(REAL) : size;
    for (ptrdiff_t i = 0; i < rows; i++)
        for (ptrdiff_t d = 0; d < cols; d += LANES) {
            const char *from = x + (i * ldx + d) * size_x;
            char *to = y + (i * ldy + d) * size_y, part[LANES * sizeof(double)];
            VEC value = load ? FMHA_NAME(stored_load_n)(type, from, cols - d) : v_load_n((const REAL *)from, cols - d, 0);
            if (load) {
                v_store_n((REAL *)to, value, cols - d);
            } else if (cols - d >= LANES) {
                FMHA_NAME(stored_store)(type, value, to);
            } else {
                FMHA_NAME(stored_store)(type, value, part);
                memcpy(to, part, (size_t)((cols - d) * size));
            }
        }
}

static void FMHA_NAME(load_rows)(int type, ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy)
{
    switch (type) {
    case FMHA_HALF: FMHA_NAME(move_rows)(1, FMHA_HALF, rows, cols, x, ldx, y, ldy); break;
    case FMHA_BFLOAT: FMHA_NAME(move_rows)(1, FMHA_BFLOAT, rows, cols, x, ldx, y, ldy); break;
    case FMHA_OTHER: FMHA_NAME(move_rows)(1, FMHA_OTHER, rows, cols, x, ldx, y, ldy); break;
    default: FMHA_NAME(move_rows)(1, FMHA_SAME, rows, cols, x, ldx, y, ldy);
    }
}

static void FMHA_NAME(store_rows)(int type, ptrdiff_t rows, ptrdiff_t cols, const void *x, ptrdiff_t ldx, void *y, ptrdiff_t ldy)
{
    switch (type) {
    case FMHA_HALF: FMHA_NAME(move_rows)(0, FMHA_HALF, rows, cols, x, ldx, y, ldy); break;
    case FMHA_BFLOAT: FMHA_NAME(move_rows)(0, FMHA_BFLOAT, rows, cols, x, ldx, y, ldy); break;
    case FMHA_OTHER: FMHA_NAME(move_rows)(0, FMHA_OTHER, rows, cols, x, ldx, y, ldy); break;
    default: FMHA_NAME(move_rows)(0, FMHA_SAME, rows, cols, x, ldx, y, ldy);
    }
}

/* Whether rows of an element type are finite throughout: of a half type, whether no exponent has all its bits. */
static int FMHA_NAME(finite_halves)(int type, ptrdiff_t rows, ptrdiff_t cols, const char *x, ptrdiff_t stride)
{
    const uint16_t exponent = type == FMHA_HALF ? 0x7c00 : 0x7f80, *halves = (const uint16_t *)x;
    for (ptrdiff_t i = 0; i < rows; i++) {
        unsigned found = 0;
        for (ptrdiff_t d = 0; d < cols; d++) found |= (halves[i * stride + d] & exponent) == exponent;
        if (found) return 0;
    }
    return 1;
}
