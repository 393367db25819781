/* Keys and values stored in another element type than the computation's (fmha_problem.stored): converted exactly, or rounded
 * to nearest from float64 to float32, as they are loaded. */

#if FMHA_REAL == 32
typedef double FMHA_NAME(other);
#else
typedef float FMHA_NAME(other);
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

/* LANES elements from x on. */
static inline __attribute__((always_inline)) VEC FMHA_NAME(stored_load)(const int type, const char *x)
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
#else
    typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
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

/* The first n < LANES elements from x on, zeros beyond. */
static inline VEC FMHA_NAME(stored_part)(const int type, const char *x, ptrdiff_t n)
{
    REAL lanes[LANES];
    if (type == FMHA_SAME) return FMHA_NAME(load_part)((const REAL *)x, n, 0);
    for (ptrdiff_t l = 0; l < LANES; l++) lanes[l] = l < n ? FMHA_NAME(stored_value)(type, x + l * FMHA_NAME(stored_size)(type)) : 0;
    return v_load(lanes);
}

static inline __attribute__((always_inline)) void FMHA_NAME(convert_rows)(const int type, const char *x, ptrdiff_t stride, ptrdiff_t n,
                                                                          ptrdiff_t width, REAL *to)
{
    ptrdiff_t whole = ROUND_UP(width, LANES), size = FMHA_NAME(stored_size)(type);
    for (ptrdiff_t i = 0; i < n; i++)
        for (ptrdiff_t d = 0; d < width; d += LANES) {
            const char *from = x + (i * stride + d) * size;
            VEC value = width - d >= LANES ? FMHA_NAME(stored_load)(type, from) : FMHA_NAME(stored_part)(type, from, width - d);
            v_store(to + i * whole + d, value);
        }
}

/* Where row j of a key/value head (b, h) lies. */
static inline const char *FMHA_NAME(stored_row)(const fmha_problem *p, const fmha_array *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t j)
{
    return x->data + (b * x->stride[0] + h * x->stride[1] + j * x->stride[2]) * FMHA_NAME(stored_size)(p->stored);
}

/* Rows [j, j + n) of a key/value head (b, h) in the computation's type: where they lie, or converted to rows of whole vectors. */
static const REAL *FMHA_NAME(computed_rows)(const fmha_problem *p, const fmha_array *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t j, ptrdiff_t n,
                                            ptrdiff_t width, REAL *to, ptrdiff_t *ld)
{
    const char *from = FMHA_NAME(stored_row)(p, x, b, h, j);
    *ld = ROUND_UP(width, LANES);
    switch (p->stored) {
    case FMHA_HALF: FMHA_NAME(convert_rows)(FMHA_HALF, from, x->stride[2], n, width, to); break;
    case FMHA_BFLOAT: FMHA_NAME(convert_rows)(FMHA_BFLOAT, from, x->stride[2], n, width, to); break;
    case FMHA_OTHER: FMHA_NAME(convert_rows)(FMHA_OTHER, from, x->stride[2], n, width, to); break;
    default: *ld = x->stride[2]; return (const REAL *)from;
    }
    return to;
}

/* Scratch that computed_rows needs for n rows, in REALs. */
static ptrdiff_t FMHA_NAME(computed_scratch)(const fmha_problem *p, ptrdiff_t n)
{
    ptrdiff_t width = p->D > p->Dv ? p->D : p->Dv;
    return p->stored == FMHA_SAME ? 0 : n * ROUND_UP(width, LANES);
}
