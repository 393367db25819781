/* Dropout by a counter: what is drawn for a pair follows from the seed and its batch row, head, query and key alone, so that any
 * algorithm, tiling and number of threads draws the same, forward and backward, and nothing is stored.
 *
 * Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): counter (j / 4, i, h, b), key the seed;
 * word j % 4 of four is that of key j. Words lie in the low halves of 64 bits, where a product has room; the high halves do not
 * count. */

#if defined(__GNUC__) || defined(__clang__)
#define WIDES (FMHA_VECTOR_BYTES / 8)
typedef uint64_t FMHA_NAME(wide) __attribute__((vector_size(FMHA_VECTOR_BYTES)));
#define WIDE FMHA_NAME(wide)
#define w_splat(value) ((uint64_t)(value) - (WIDE){0})
#define w_lane(value, lane) ((value)[lane])
#else
#define WIDES 1
typedef uint64_t FMHA_NAME(wide);
#define WIDE FMHA_NAME(wide)
#define w_splat(value) ((uint64_t)(value))
#define w_lane(value, lane) (value)
#endif
#define WORD ((uint64_t)UINT32_MAX)
#define PARTS (LANES / WIDES)       /* wide vectors for one of REALs: lane l is lane l / PARTS of part l % PARTS */
#if defined(X86_OP) && FMHA_VECTOR_BYTES == 64
#define w_product(a, b) ((WIDE)_mm512_mul_epu32((__m512i)(a), (__m512i)(b)))
#elif defined(X86_OP) && FMHA_VECTOR_BYTES == 32
#define w_product(a, b) ((WIDE)_mm256_mul_epu32((__m256i)(a), (__m256i)(b)))
#elif defined(X86_OP)
#define w_product(a, b) ((WIDE)_mm_mul_epu32((__m128i)(a), (__m128i)(b)))
#elif defined(ARM_OP)
#define w_product(a, b) ((WIDE)vmull_u32(vmovn_u64((uint64x2_t)(a)), vmovn_u64((uint64x2_t)(b))))
#else
#define w_product(a, b) (((a) & WORD) * ((b) & WORD))
#endif

/* Counters become their four words. */
INLINED void FMHA_NAME(philox)(uint64_t seed, WIDE c[4])
{
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++, key[0] += 0x9E3779B9, key[1] += 0xBB67AE85) {
        WIDE first = w_product(c[0], w_splat(0xD2511F53)), second = w_product(c[2], w_splat(0xCD9E8D57));
        c[0] = (second >> 32) ^ c[1] ^ w_splat(key[0]);
        c[2] = (first >> 32) ^ c[3] ^ w_splat(key[1]);
        c[1] = second;
        c[3] = first;
    }
}

/* What a probability is multiplied by whose words are these, of each part: 0 where they are below the bound, else 1 / (1 - p). */
INLINED VEC FMHA_NAME(drop_factor)(const fmha_dropout *draws, const WIDE *words)
{
#if FMHA_REAL == 32
    WIDE both = words[0] & w_splat(WORD);
    if (PARTS == 2) both = both | words[PARTS - 1] << 32;
    IVEC word = (IVEC)both ^ i_splat(SIGN_BIT), below = i_splat((INT)(draws->below ^ (uint32_t)SIGN_BIT));
#else
    IVEC word = (IVEC)(words[0] & w_splat(WORD)), below = i_splat(draws->below);
#endif
    return v_from_bits(~i_greater(below, word) & v_bits(v_splat((REAL)draws->factor)));
}

/* s[n] <- s times what is drawn for keys [j, j + n) of a row. */
static void FMHA_NAME(drop_row)(const fmha_problem *p, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i, ptrdiff_t j, ptrdiff_t n, REAL *s)
{
    const fmha_dropout *draws = &p->dropout;
    if (draws->factor == 0) return;
    j += draws->j;
    for (ptrdiff_t quad = j / 4; 4 * quad < j + n; quad += WIDES) {
        uint64_t quads[WIDES];
        for (ptrdiff_t l = 0; l < WIDES; l++) quads[l] = (uint64_t)(quad + l);
        WIDE c[4] = {w_splat(0), w_splat(draws->i + i), w_splat(draws->h + h), w_splat(draws->b + b)};
        memcpy(&c[0], quads, sizeof quads);
        FMHA_NAME(philox)(draws->seed, c);
        for (ptrdiff_t l = 0; l < WIDES; l++)
            for (ptrdiff_t w = 0; w < 4; w++) {
                ptrdiff_t at = 4 * (quad + l) + w - j;
                if (at >= 0 && at < n) s[at] *= (uint32_t)w_lane(c[w], l) < draws->below ? 0 : (REAL)draws->factor;
            }
    }
}
