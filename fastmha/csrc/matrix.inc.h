/* Products on matrix tiles: tiles of 16 rows of 64 bytes, in registers of their own where the CPU has AMX; where it has no more
 * than AVX-512's products of pairs of bfloat16 numbers (VDPBF16PS), 16 vectors are a tile of sums.
 *
 * An operand is packed in tiles, each 1 KB in one piece, as bfloat16 parts: its first part is x rounded to bfloat16, the next
 * what that leaves, rounded, and so on; a product of operands of so many parts is the sum of the products of parts i and j with
 * i + j < parts. Sums are float32. As first operand a tile holds 16 rows of 32 terms of the sum; as second one 16 pairs of
 * terms, of each the two of 16 columns side by side. A sum runs over its tiles in their order, and in a tile as the unit does
 * it: AMX even terms and odd terms apart, one after the other, then both added to what was there; vectors pair after pair, and
 * all tiles of a product before they are added to what was there. Subnormal operands and results count as 0.
 *
 * FMHA_TILE_UNIT: there are registers for tiles. FMHA_BFLOAT_UNIT: AVX-512 rounds to bfloat16 and multiplies pairs of it. */

#define TILE_ROWS 16        /* rows of a tile of the first operand and of the sums; columns of the second and of the sums */
#define TILE_TERMS 32       /* terms of the sum in a tile of an operand */
#define TILE_SIZE (TILE_ROWS * TILE_TERMS)
_Static_assert(LANES == TILE_ROWS, "a vector is a row of a tile of sums");

/* ------------------------------------------------------------------------------------------------ the words for tiles */

#if FMHA_TILE_UNIT
/* The compiler knows of no memory that the intrinsics touch: t_begin and t_end stand around whatever uses them. */
typedef char FMHA_NAME(tile_registers);
#define t_begin() __asm__ volatile("" ::: "memory")
#define t_end() __asm__ volatile("" ::: "memory")
#define t_zero(t, n) _tile_zero(n)
#define t_load(t, n, from) _tile_loadd(n, from, 2 * TILE_TERMS)
#define t_load_sums(t, n, from, ld) _tile_loadd(n, from, (ld) * (ptrdiff_t)sizeof(float))
#define t_store_sums(t, n, to, ld) _tile_stored(n, to, (ld) * (ptrdiff_t)sizeof(float))
#define t_multiply_add(t, n, a, b) _tile_dpbf16ps(n, a, b)
#define t_release() _tile_release()

/* Eight tiles of 16 rows of 64 bytes. */
static inline void FMHA_NAME(t_configure)(void)
{
    struct { uint8_t palette, first_row, zero[14]; uint16_t bytes[16]; uint8_t rows[16]; } layout = {.palette = 1};
    for (int n = 0; n < 8; n++) {
        layout.bytes[n] = 64;
        layout.rows[n] = TILE_ROWS;
    }
    t_begin();
    _tile_loadconfig(&layout);
}
#elif FMHA_BFLOAT_UNIT
#define t_begin() ((void)0)
#define t_end() ((void)0)
#define t_release() ((void)0)
static inline void FMHA_NAME(t_configure)(void) {}
#else
/* The same arithmetic in plain C: a product of two bfloat16 numbers is exact in float32, so that nothing is fused or not. */
typedef union { float sums[TILE_ROWS][TILE_ROWS]; uint16_t terms[TILE_ROWS][TILE_TERMS]; } FMHA_NAME(tile_registers)[8];
#define t_begin() ((void)0)
#define t_end() ((void)0)
#define t_zero(t, n) memset(&(t)[n], 0, sizeof (t)[n])
#define t_load(t, n, from) memcpy((t)[n].terms, from, sizeof (t)[n].terms)
#define t_load_sums(t, n, from, ld) \
    do { for (int r = 0; r < TILE_ROWS; r++) memcpy((t)[n].sums[r], (from) + r * (ld), sizeof (t)[n].sums[r]); } while (0)
#define t_store_sums(t, n, to, ld) \
    do { for (int r = 0; r < TILE_ROWS; r++) memcpy((to) + r * (ld), (t)[n].sums[r], sizeof (t)[n].sums[r]); } while (0)
#define t_multiply_add(t, n, a, b) FMHA_NAME(multiply_add)((t)[n].sums, (t)[a].terms, (t)[b].terms)
#define t_release() ((void)0)
static inline void FMHA_NAME(t_configure)(void) {}

/* A checked build, which does not optimise, would pass most of its time here, where all that is touched are whole tiles. */
#if defined(FMHA_CHECKED) && defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O2"), no_sanitize("address", "undefined")))
#endif
static void FMHA_NAME(multiply_add)(float sums[][TILE_ROWS], uint16_t a[][TILE_TERMS], uint16_t b[][TILE_TERMS])
{
    for (int r = 0; r < TILE_ROWS; r++) {
        float even[TILE_ROWS] = {0}, odd[TILE_ROWS] = {0};
        for (int k = 0; k < TILE_ROWS; k++) {
            uint32_t first = (uint32_t)a[r][2 * k] << 16, second = (uint32_t)a[r][2 * k + 1] << 16, wide[TILE_TERMS];
            float x, y, z[TILE_TERMS];
            memcpy(&x, &first, sizeof x);
            memcpy(&y, &second, sizeof y);
            for (int c = 0; c < TILE_TERMS; c++) wide[c] = (uint32_t)b[k][c] << 16;
            memcpy(z, wide, sizeof z);
            for (int c = 0; c < TILE_ROWS; c++) {
                even[c] += x * z[2 * c];
                odd[c] += y * z[2 * c + 1];
            }
        }
        for (int c = 0; c < TILE_ROWS; c++) sums[r][c] += even[c] + odd[c];
    }
}
#endif

/* ------------------------------------------------------------------------------- sixteen numbers, and bfloat16 of them */

static inline float FMHA_NAME(from_bfloat)(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Rounded to nearest even; for what is finite and does not round up to infinity. */
static inline uint16_t FMHA_NAME(to_bfloat)(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* to (32) <- bfloat16 of a, then of b; where interleaved a[0] b[0] a[1] b[1] ...; *a, *b <- what that leaves of them. */
INLINED void FMHA_NAME(store_part_of)(const int interleaved, VEC *a, VEC *b, uint16_t *to)
{
#if FMHA_BFLOAT_UNIT
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)*b, (__m512)*a), upper = _mm512_set1_epi32((int)0xffff0000);
    if (interleaved) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                               19, 3, 18, 2, 17, 1, 16, 0);
        both = _mm512_permutexvar_epi16(order, both);
        _mm512_storeu_si512(to, both);
        *a = *a - (VEC)_mm512_slli_epi32(both, 16);
        *b = *b - (VEC)_mm512_and_si512(both, upper);
    } else {
        _mm512_storeu_si512(to, both);
        *a = *a - (VEC)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
        *b = *b - (VEC)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
    }
#else
    float from[2][TILE_ROWS];
    memcpy(from[0], a, sizeof from[0]);
    memcpy(from[1], b, sizeof from[1]);
    for (int l = 0; l < TILE_ROWS; l++)
        for (int second = 0; second < 2; second++) {
            uint16_t *at = to + (interleaved ? 2 * l + second : TILE_ROWS * second + l);
            *at = FMHA_NAME(to_bfloat)(from[second][l]);
            from[second][l] -= FMHA_NAME(from_bfloat)(*at);
        }
    memcpy(a, from[0], sizeof from[0]);
    memcpy(b, from[1], sizeof from[1]);
#endif
}

/* All parts of them, each `plane` elements behind the one before. */
INLINED void FMHA_NAME(store_parts)(const int parts, const int interleaved, VEC a, VEC b, uint16_t *to, ptrdiff_t plane)
{
#pragma GCC unroll 2
    for (int p = 0; p < parts; p++) FMHA_NAME(store_part_of)(interleaved, &a, &b, to + p * plane);
}

/* ------------------------------------------------------------------------------------------ rows of thirty-two bfloat16 */

#if FMHA_BFLOAT_UNIT
typedef __m512i FMHA_NAME(row);

/* 16 rows of 16 words of 32 bits become their columns: pairs, fours, then quarters of the vectors change places. */
INLINED void FMHA_NAME(transpose_words)(__m512i row[])
{
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        row[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        row[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        row[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        row[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* The parts of n elements of a type, zeros beyond. */
INLINED void FMHA_NAME(load_row)(const int type, const int parts, const char *x, ptrdiff_t n, __m512i *row)
{
    if (type == FMHA_BFLOAT) {
        row[0] = n >= TILE_TERMS ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16(n > 0 ? (1u << n) - 1 : 0, x);
        return;
    }
    __mmask32 some = n >= TILE_TERMS ? ~0u : n > 0 ? (1u << n) - 1 : 0;
    __m512 low, high;
    if (type == FMHA_HALF) {
        __m512i both = _mm512_maskz_loadu_epi16(some, x);
        low = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
        high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
    } else {
        low = n >= TILE_TERMS ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps((__mmask16)some, x);
        high = n >= TILE_TERMS ? _mm512_loadu_ps(x + 64) : _mm512_maskz_loadu_ps((__mmask16)(some >> 16), x + 64);
    }
    row[0] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    if (parts == 1) return;
    low = _mm512_sub_ps(low, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(row[0])), 16));
    high = _mm512_sub_ps(high, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(row[0], 1)), 16));
    row[1] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

#define r_store(to, row) _mm512_storeu_si512(to, row)
#define r_sizes(largest, row) _mm512_max_epu16(largest, _mm512_and_si512(row, _mm512_set1_epi16(0x7fff)))
#define r_zero() _mm512_setzero_si512()

/* low <- a[0] b[0] a[1] b[1] ... of their first halves, high of their second ones. */
INLINED void FMHA_NAME(interleave)(__m512i a, __m512i b, __m512i *low, __m512i *high)
{
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                           35, 3, 34, 2, 33, 1, 32, 0);
    *low = _mm512_permutex2var_epi16(a, first, b);
    *high = _mm512_permutex2var_epi16(a, _mm512_add_epi16(first, _mm512_set1_epi16(16)), b);
}

static inline int FMHA_NAME(reaches)(__m512i largest, uint16_t limit)
{
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16((short)limit)) != 0;
}
#else
typedef struct { uint16_t terms[TILE_TERMS]; } FMHA_NAME(row);

static void FMHA_NAME(transpose_words)(FMHA_NAME(row) row[])
{
    uint32_t from[TILE_ROWS][TILE_ROWS], to[TILE_ROWS][TILE_ROWS];
    memcpy(from, row, sizeof from);
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < TILE_ROWS; j++) to[j][i] = from[i][j];
    memcpy(row, to, sizeof to);
}

static void FMHA_NAME(load_row)(const int type, const int parts, const char *x, ptrdiff_t n, FMHA_NAME(row) *row)
{
    memset(row, 0, (size_t)parts * sizeof *row);
    for (ptrdiff_t l = 0; l < TILE_TERMS && l < n; l++) {
        float left = FMHA_NAME(stored_value)(type, x + l * FMHA_NAME(stored_size)(type));
        for (int p = 0; p < parts; p++) {
            row[p].terms[l] = FMHA_NAME(to_bfloat)(left);
            left -= FMHA_NAME(from_bfloat)(row[p].terms[l]);
        }
    }
}

#define r_store(to, row) memcpy(to, &(row), sizeof (row))
#define r_sizes(largest, row) FMHA_NAME(sizes)(largest, row)
#define r_zero() ((FMHA_NAME(row)){{0}})

static FMHA_NAME(row) FMHA_NAME(sizes)(FMHA_NAME(row) largest, FMHA_NAME(row) row)
{
    for (int l = 0; l < TILE_TERMS; l++)
        if ((row.terms[l] & 0x7fff) > largest.terms[l]) largest.terms[l] = row.terms[l] & 0x7fff;
    return largest;
}

static void FMHA_NAME(interleave)(FMHA_NAME(row) a, FMHA_NAME(row) b, FMHA_NAME(row) *low, FMHA_NAME(row) *high)
{
    for (int l = 0; l < TILE_ROWS; l++)
        for (int second = 0; second < 2; second++) {
            low->terms[2 * l + second] = (second ? b : a).terms[l];
            high->terms[2 * l + second] = (second ? b : a).terms[TILE_ROWS + l];
        }
}

static int FMHA_NAME(reaches)(FMHA_NAME(row) largest, uint16_t limit)
{
    for (int l = 0; l < TILE_TERMS; l++)
        if (largest.terms[l] >= limit) return 1;
    return 0;
}
#endif

/* ------------------------------------------------------------------------------------------------------------ packing */

/* Where rows of an operand lie: `rows` of them from `data` on, or, with `row`, at these places. */
typedef struct {
    const char *data;
    ptrdiff_t stride, rows, width;      /* in elements */
    const char *const *row;
    const unsigned char *left_out;      /* rows that count as zeros, or NULL */
} FMHA_NAME(source);

/* The parts of 32 elements of row i from element d on. */
INLINED void FMHA_NAME(source_row)(const int type, const int parts, const FMHA_NAME(source) *x, ptrdiff_t i, ptrdiff_t d,
                                   FMHA_NAME(row) *row)
{
    if (i < x->rows && !(x->left_out && x->left_out[i])) {
        const char *from = x->row ? x->row[i] : x->data + i * x->stride * FMHA_NAME(stored_size)(type);
        FMHA_NAME(load_row)(type, parts, from + d * FMHA_NAME(stored_size)(type), x->width - d, row);
    } else {
        for (int p = 0; p < parts; p++) row[p] = r_zero();
    }
}

/* The four ways in which an operand x (rows, width) is packed. As first operand: its rows along (rows along the tile's rows, the
 * sum over its columns), or its columns (x^T: the sum over its rows); as second: x^T (the sum over its columns), or x (over its
 * rows). */
enum { FMHA_NAME(first), FMHA_NAME(first_transposed), FMHA_NAME(second_transposed), FMHA_NAME(second) };

#define LARGE_PART POWER(55)    /* sums of so many products of such numbers are far from overflow */
#define LARGE_BITS ((127 + 55) << 7)        /* its bits as bfloat16 */

/* tile (16), and next (16) behind its columns, <- rows i to i+32 of x from element d on, two side by side: store: into memory,
 * at `to` and `halves` - 1 tiles `step` apart. whole: all of these are there, and PAIRS_TOGETHER pairs from `pair` on are taken. */
INLINED void FMHA_NAME(interleaved_rows)(const int type, const int parts, const int whole, const int store, int pair,
                                         const FMHA_NAME(source) *x,
                                         ptrdiff_t i, ptrdiff_t d, int halves, FMHA_NAME(row) tile[][2][TILE_ROWS], uint16_t *to,
                                         ptrdiff_t step, ptrdiff_t plane, FMHA_NAME(row) *largest)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type), stride = x->stride * size;
    const char *from = whole ? x->data + i * stride + d * size : NULL;
#pragma GCC unroll 16
    for (int n = 0; n < (whole ? PAIRS_TOGETHER : TILE_ROWS); n++) {
        const int r = pair + n;
        FMHA_NAME(row) first[2], second[2], low, high;
        if (whole) {
            FMHA_NAME(load_row)(type, parts, from + 2 * r * stride, TILE_TERMS, first);
            FMHA_NAME(load_row)(type, parts, from + (2 * r + 1) * stride, TILE_TERMS, second);
        } else {
            FMHA_NAME(source_row)(type, parts, x, i + 2 * r, d, first);
            FMHA_NAME(source_row)(type, parts, x, i + 2 * r + 1, d, second);
        }
        *largest = r_sizes(*largest, first[0]);
        *largest = r_sizes(*largest, second[0]);
#pragma GCC unroll 2
        for (int p = 0; p < parts; p++) {
            FMHA_NAME(interleave)(first[p], second[p], &low, &high);
            if (!store) {
                tile[p][0][r] = low;
                tile[p][1][r] = high;
                continue;
            }
            r_store(to + p * plane + r * TILE_TERMS, low);
            if (halves > 1) r_store(to + p * plane + step * TILE_SIZE + r * TILE_TERMS, high);
        }
    }
}

/* to <- x as `way` says: tile (i, k) of outer and sum at (i * step + k) * TILE_SIZE, its parts `plane` elements apart; rows of
 * zeros up to a multiple of 32. Returns whether some number is not finite or as large as LARGE_PART. */
INLINED int FMHA_NAME(pack_as)(const int type, const int parts, const int way, const FMHA_NAME(source) *x, ptrdiff_t step, uint16_t *to,
                               ptrdiff_t plane)
{
    const int over_rows = way == FMHA_NAME(first_transposed) || way == FMHA_NAME(second), store = way == FMHA_NAME(second);
    FMHA_NAME(row) largest = r_zero(), tile[2][2][TILE_ROWS];
    for (ptrdiff_t i = 0; i < ROUND_UP(x->rows, TILE_TERMS); i += over_rows ? TILE_TERMS : TILE_ROWS) {
        ptrdiff_t done = 0;
        if (store && !x->row && !x->left_out && x->rows - i >= TILE_TERMS) {
            done = x->width / TILE_TERMS * TILE_TERMS;
            for (int pair = 0; pair < TILE_ROWS; pair += PAIRS_TOGETHER)
                for (ptrdiff_t d = 0; d < done; d += TILE_TERMS)
                    FMHA_NAME(interleaved_rows)(type, parts, 1, 1, pair, x, i, d, 2, NULL,
                                                to + (d / TILE_ROWS * step + i / TILE_TERMS) * TILE_SIZE, step, plane, &largest);
        }
        for (ptrdiff_t d = done; d < x->width; d += TILE_TERMS) {
            uint16_t *at = to + (over_rows ? d / TILE_ROWS * step + i / TILE_TERMS : i / TILE_ROWS * step + d / TILE_TERMS) * TILE_SIZE;
            const int halves = over_rows && x->width - d > TILE_ROWS ? 2 : 1;
            if (over_rows) {
                FMHA_NAME(interleaved_rows)(type, parts, 0, store, 0, x, i, d, halves, tile, at, step, plane, &largest);
                if (store) continue;
            }
#pragma GCC unroll 16
            for (int r = 0; r < TILE_ROWS && !over_rows; r++) {
                FMHA_NAME(row) row[2];
                FMHA_NAME(source_row)(type, parts, x, i + r, d, row);
                largest = r_sizes(largest, row[0]);
                for (int p = 0; p < parts; p++) {
                    if (way == FMHA_NAME(first)) r_store(at + p * plane + r * TILE_TERMS, row[p]);
                    else tile[p][0][r] = row[p];
                }
            }
            if (way == FMHA_NAME(first)) continue;
#pragma GCC unroll 2
            for (int p = 0; p < parts; p++)
                for (int half = 0; half < halves; half++) {
                    FMHA_NAME(transpose_words)(tile[p][half]);
#pragma GCC unroll 16
                    for (int r = 0; r < TILE_ROWS; r++)
                        r_store(at + p * plane + half * step * TILE_SIZE + r * TILE_TERMS, tile[p][half][r]);
                }
        }
    }
    return FMHA_NAME(reaches)(largest, LARGE_BITS);
}

#define PACK_WAY(name, way) \
    static __attribute__((noinline)) int FMHA_NAME(name)(int type, int parts, const FMHA_NAME(source) *x, ptrdiff_t step, uint16_t *to, \
                                                         ptrdiff_t plane) \
    { \
        if (type == FMHA_BFLOAT) return FMHA_NAME(pack_as)(FMHA_BFLOAT, 1, way, x, step, to, plane); \
        if (type == FMHA_HALF && parts == 1) return FMHA_NAME(pack_as)(FMHA_HALF, 1, way, x, step, to, plane); \
        if (type == FMHA_HALF) return FMHA_NAME(pack_as)(FMHA_HALF, 2, way, x, step, to, plane); \
        if (parts == 1) return FMHA_NAME(pack_as)(FMHA_SAME, 1, way, x, step, to, plane); \
        return FMHA_NAME(pack_as)(FMHA_SAME, 2, way, x, step, to, plane); \
    }
PACK_WAY(pack_first, FMHA_NAME(first))
PACK_WAY(pack_first_transposed, FMHA_NAME(first_transposed))
PACK_WAY(pack_second_transposed, FMHA_NAME(second_transposed))
PACK_WAY(pack_second, FMHA_NAME(second))

/* An operand in tiles: tile (i, k) of outer and sum at (i * step + k) * TILE_SIZE, parts `plane` elements apart, `parts` of
 * them. */
typedef struct {
    const uint16_t *tiles;
    ptrdiff_t step, plane;
    int parts;
} FMHA_NAME(operand);

/* The operand from tile (i, k) of outer and sum on. */
static inline FMHA_NAME(operand) FMHA_NAME(operand_at)(const FMHA_NAME(operand) *x, ptrdiff_t i, ptrdiff_t k)
{
    FMHA_NAME(operand) part = *x;
    part.tiles += (i * x->step + k) * TILE_SIZE;
    return part;
}

/* x of an element type into the operand's memory. Returns whether some number is not finite or as large as LARGE_PART. */
static int FMHA_NAME(pack_operand)(int way, int type, const FMHA_NAME(source) *x, const FMHA_NAME(operand) *to)
{
    uint16_t *tiles = (uint16_t *)to->tiles;
    switch (way) {
    case FMHA_NAME(first): return FMHA_NAME(pack_first)(type, to->parts, x, to->step, tiles, to->plane);
    case FMHA_NAME(first_transposed): return FMHA_NAME(pack_first_transposed)(type, to->parts, x, to->step, tiles, to->plane);
    case FMHA_NAME(second_transposed): return FMHA_NAME(pack_second_transposed)(type, to->parts, x, to->step, tiles, to->plane);
    default: return FMHA_NAME(pack_second)(type, to->parts, x, to->step, tiles, to->plane);
    }
}

/* Whether some of n numbers is not finite or as large as LARGE_PART. */
static int FMHA_NAME(odd_row)(int type, const char *x, ptrdiff_t n)
{
    for (ptrdiff_t d = 0; d < n; d++) {
        REAL value = FMHA_NAME(stored_value)(type, x + d * FMHA_NAME(stored_size)(type));
        if (!(value < LARGE_PART && value > -LARGE_PART)) return 1;
    }
    return 0;
}

/* The sum of the squares of rows of an element type. */
static REAL FMHA_NAME(source_power)(int type, const FMHA_NAME(source) *x)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    VEC sum = v_splat(0);
    for (ptrdiff_t i = 0; i < x->rows; i++) {
        const char *at = x->row ? x->row[i] : x->data + i * x->stride * size;
#define SQUARES(type) \
    for (ptrdiff_t d = 0; d < x->width; d += LANES) { \
        const VEC value = FMHA_NAME(stored_load_n)(type, at + d * size, x->width - d); \
        sum = sum + value * value; \
    }
        BY_STORED(SQUARES)
#undef SQUARES
    }
    return FMHA_NAME(sum)(sum);
}

/* Of each row whether it is so in x or in y; returns whether some is. */
static int FMHA_NAME(find_odd)(int type, const FMHA_NAME(source) *x, const FMHA_NAME(source) *y, unsigned char *odd)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(type);
    int some = 0;
    for (ptrdiff_t i = 0; i < x->rows; i++)
        some |= odd[i] = (unsigned char)(FMHA_NAME(odd_row)(type, x->data + i * x->stride * size, x->width)
                                         || FMHA_NAME(odd_row)(type, y->data + i * y->stride * size, y->width));
    return some;
}

/* ------------------------------------------------------------------------------------------------------------ products */

/* Where the sums of a product go, its `add`: they are those of `sums`; they are added to them; or the sums there go on, as if
 * the terms before were of this product. Registers of tiles always go on. */
#if FMHA_BFLOAT_UNIT && !FMHA_TILE_UNIT
enum { FMHA_NAME(begin), FMHA_NAME(add_to), FMHA_NAME(go_on) };
#else
enum { FMHA_NAME(begin), FMHA_NAME(add_to), FMHA_NAME(go_on) = FMHA_NAME(add_to) };
#endif

#if FMHA_BFLOAT_UNIT && !FMHA_TILE_UNIT
#define TERM_GRAIN 2        /* terms, or keys, at whose multiples a product may end; it writes the rows that are asked for */

/* sums (rows, vectors of 16), of which `kept` rows, <- (add ? sums : 0) + a @ b, in the order that `add` says, over so many
 * pairs of terms, of some rows of a tile of a and of one or two tiles of b. */
INLINED void FMHA_NAME(pair_products)(const int a_parts, const int b_parts, const int rows, const int vectors, const int add,
                                      ptrdiff_t kept, ptrdiff_t pairs, const uint16_t *a, ptrdiff_t a_plane, const uint16_t *b,
                                      ptrdiff_t b_plane, ptrdiff_t b_step, float *sums, ptrdiff_t ld)
{
    const int most = a_parts > b_parts ? a_parts : b_parts;
    VEC sum[TILE_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sum[r][v] = add == FMHA_NAME(go_on) && r < kept ? v_load(sums + r * ld + v * LANES) : v_splat(0);
    for (; pairs > 0; pairs -= TILE_TERMS / 2, a += TILE_SIZE, b += TILE_SIZE)
#pragma GCC unroll 2
        for (int of_a = 0; of_a < a_parts; of_a++)
#pragma GCC unroll 2
            for (int of_b = 0; of_b < (b_parts < most - of_a ? b_parts : most - of_a); of_b++)
#pragma GCC unroll 1
                for (ptrdiff_t pair = 0; pair < (pairs < TILE_TERMS / 2 ? pairs : TILE_TERMS / 2); pair++) {
                    __m512i second[2];
#pragma GCC unroll 2
                    for (int v = 0; v < vectors; v++) second[v] = _mm512_loadu_si512(b + of_b * b_plane + v * b_step + pair * TILE_TERMS);
#pragma GCC unroll 16
                    for (int r = 0; r < rows; r++) {
                        int both;
                        memcpy(&both, a + of_a * a_plane + r * TILE_TERMS + 2 * pair, sizeof both);
                        const __m512i first = _mm512_set1_epi32(both);
#pragma GCC unroll 2
                        for (int v = 0; v < vectors; v++)
                            sum[r][v] = (VEC)_mm512_dpbf16_ps((__m512)sum[r][v], (__m512bh)first, (__m512bh)second[v]);
                    }
                }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors && r < kept; v++) {
            float *to = sums + r * ld + v * LANES;
            v_store(to, add == FMHA_NAME(add_to) ? v_load(to) + sum[r][v] : sum[r][v]);
        }
}

/* As below: as many sums as the registers hold, a tile of a by one of b or half a tile of a by two of b. */
INLINED void FMHA_NAME(tile_product_of)(const int a_parts, const int b_parts, const int add, ptrdiff_t rows, ptrdiff_t columns,
                                        ptrdiff_t terms, const FMHA_NAME(operand) *a, const FMHA_NAME(operand) *b, float *sums,
                                        ptrdiff_t ld)
{
    for (ptrdiff_t j = 0; j < columns; j += 2 * TILE_ROWS) {
        const uint16_t *from_b = b->tiles + j / TILE_ROWS * b->step * TILE_SIZE;
#define ROWS(many, vectors) \
    for (ptrdiff_t i = 0; i < rows; i += (many)) \
        FMHA_NAME(pair_products)(a_parts, b_parts, many, vectors, add, rows - i, (terms + 1) / 2, \
                                 a->tiles + i / TILE_ROWS * a->step * TILE_SIZE + i % TILE_ROWS * TILE_TERMS, a->plane, \
                                 from_b, b->plane, b->step * TILE_SIZE, sums + i * ld + j, ld)
        if (columns - j > TILE_ROWS) ROWS(TILE_ROWS / 2, 2);
        else ROWS(TILE_ROWS, 1);
#undef ROWS
    }
}
#else
#define TERM_GRAIN TILE_TERMS       /* a product takes and writes whole tiles */

/* sums (16 rows, 16 columns tiles: rows by columns of them, two at most each) <- (add ? sums : 0) + a @ b over `depth` tiles. */
INLINED void FMHA_NAME(tile_block)(const int a_parts, const int b_parts, const int rows, const int columns, const int add, ptrdiff_t depth,
                                   const uint16_t *a, const FMHA_NAME(operand) *first, const uint16_t *b, const FMHA_NAME(operand) *second,
                                   float *sums, ptrdiff_t ld)
{
    FMHA_NAME(tile_registers) t;
    (void)t;
    const int most = a_parts > b_parts ? a_parts : b_parts;
    ptrdiff_t a_step = first->step * TILE_SIZE, b_step = second->step * TILE_SIZE;
    if (add) {
        t_load_sums(t, 0, sums, ld);
        if (columns > 1) t_load_sums(t, 1, sums + TILE_ROWS, ld);
        if (rows > 1) t_load_sums(t, 2, sums + TILE_ROWS * ld, ld);
        if (rows > 1 && columns > 1) t_load_sums(t, 3, sums + TILE_ROWS * ld + TILE_ROWS, ld);
    } else {
        t_zero(t, 0);
        if (columns > 1) t_zero(t, 1);
        if (rows > 1) t_zero(t, 2);
        if (rows > 1 && columns > 1) t_zero(t, 3);
    }
    for (ptrdiff_t k = 0; k < depth; k++, a += TILE_SIZE, b += TILE_SIZE)
#pragma GCC unroll 2
        for (int of_a = 0; of_a < a_parts; of_a++) {
            t_load(t, 4, a + of_a * first->plane);      /* each load between products that do not wait for it */
            if (rows > 1 && b_parts > 1) t_load(t, 5, a + of_a * first->plane + a_step);
#pragma GCC unroll 2
            for (int of_b = 0; of_b < (b_parts < most - of_a ? b_parts : most - of_a); of_b++) {
                t_load(t, 6, b + of_b * second->plane);
                t_multiply_add(t, 0, 4, 6);
                if (columns > 1) t_load(t, 7, b + of_b * second->plane + b_step);
                if (columns > 1) t_multiply_add(t, 1, 4, 7);
                if (rows > 1 && b_parts == 1) t_load(t, 5, a + of_a * first->plane + a_step);
                if (rows > 1) t_multiply_add(t, 2, 5, 6);
                if (rows > 1 && columns > 1) t_multiply_add(t, 3, 5, 7);
            }
        }
    t_store_sums(t, 0, sums, ld);
    if (columns > 1) t_store_sums(t, 1, sums + TILE_ROWS, ld);
    if (rows > 1) t_store_sums(t, 2, sums + TILE_ROWS * ld, ld);
    if (rows > 1 && columns > 1) t_store_sums(t, 3, sums + TILE_ROWS * ld + TILE_ROWS, ld);
}

/* As below. */
INLINED void FMHA_NAME(tile_product_of)(const int a_parts, const int b_parts, const int add, ptrdiff_t rows, ptrdiff_t columns,
                                        ptrdiff_t terms, const FMHA_NAME(operand) *a, const FMHA_NAME(operand) *b, float *sums,
                                        ptrdiff_t ld)
{
    const ptrdiff_t depth = (terms + TILE_TERMS - 1) / TILE_TERMS;
    t_begin();
    for (ptrdiff_t i = 0; i < rows; i += 2 * TILE_ROWS)
        for (ptrdiff_t j = 0; j < columns; j += 2 * TILE_ROWS) {
            const uint16_t *from_a = a->tiles + i / TILE_ROWS * a->step * TILE_SIZE,
                    *from_b = b->tiles + j / TILE_ROWS * b->step * TILE_SIZE;
            float *to = sums + i * ld + j;
#define BLOCK(many, wide) FMHA_NAME(tile_block)(a_parts, b_parts, many, wide, add, depth, from_a, a, from_b, b, to, ld)
            if (rows - i > TILE_ROWS && columns - j > TILE_ROWS) BLOCK(2, 2);
            else if (rows - i > TILE_ROWS) BLOCK(2, 1);
            else if (columns - j > TILE_ROWS) BLOCK(1, 2);
            else BLOCK(1, 1);
#undef BLOCK
        }
    t_end();
}
#endif

/* sums (rows, columns) <- (add ? sums : 0) + a (rows, terms) @ b (terms, columns), columns a multiple of 16. On tiles of a unit
 * rows and terms are whole tiles of what the operands hold, and so are the sums that are written. */
static __attribute__((noinline)) void FMHA_NAME(tile_product)(int add, ptrdiff_t rows, ptrdiff_t columns, ptrdiff_t terms,
    const FMHA_NAME(operand) *a, const FMHA_NAME(operand) *b, float *sums, ptrdiff_t ld)
{
#define OF_PARTS(of_a, of_b) \
    case 4 * of_a + of_b: \
        if (add == FMHA_NAME(go_on)) FMHA_NAME(tile_product_of)(of_a, of_b, FMHA_NAME(go_on), rows, columns, terms, a, b, sums, ld); \
        else if (add) FMHA_NAME(tile_product_of)(of_a, of_b, 1, rows, columns, terms, a, b, sums, ld); \
        else FMHA_NAME(tile_product_of)(of_a, of_b, 0, rows, columns, terms, a, b, sums, ld); \
        break
    switch (4 * a->parts + b->parts) {
        OF_PARTS(1, 1);
        OF_PARTS(1, 2);
        OF_PARTS(2, 1);
        OF_PARTS(2, 2);
    }
#undef OF_PARTS
}

/* Rows of sums into c of an element type. */
static void FMHA_NAME(store_sums)(int type, ptrdiff_t rows, ptrdiff_t columns, const float *sums, ptrdiff_t ld, char *c, ptrdiff_t ldc)
{
#if FMHA_BFLOAT_UNIT
    if (type == FMHA_BFLOAT && columns % TILE_TERMS == 0) {
        for (ptrdiff_t i = 0; i < rows; i++)
            for (ptrdiff_t d = 0; d < columns; d += TILE_TERMS)
                _mm512_storeu_si512(c + 2 * (i * ldc + d), (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + i * ld + d + 16),
                                                                                        _mm512_loadu_ps(sums + i * ld + d)));
        return;
    }
#endif
    FMHA_NAME(store_rows)(type, rows, columns, sums, ld, c, ldc);
}

/* ------------------------------------------------------------------------------------------------------------- 2 to the x */

/* Minimax fits of 2^x over |x| <= 1/2, relative errors 7.5e-5 and 7.5e-8: little beside what the parts leave out. */
static const float FMHA_NAME(power_fit_1)[] = {0x1.fff692p-1f, 0x1.62f31ap-1f, 0x1.f0de1ap-3f, 0x1.c3f760p-5f};
static const float FMHA_NAME(power_fit_2)[] = {0x1.000002p+0f, 0x1.62e428p-1f, 0x1.ebf918p-3f, 0x1.c6b6e4p-5f, 0x1.3d0c52p-7f,
                                               0x1.5c08e6p-10f};
#define POWER_LOW -126.25f      /* the power of it is subnormal, so that it and all below count as 0 */

INLINED void FMHA_NAME(power_fit)(const int parts, const int n, const VEC *x, VEC *y)
{
    if (parts == 1) FMHA_NAME(horner)(n, 4, FMHA_NAME(power_fit_1), x, y);
    else FMHA_NAME(horner)(n, 6, FMHA_NAME(power_fit_2), x, y);
}

/* x <- 2^x of n vectors, x <= 127; NaN at NaN. */
INLINED void FMHA_NAME(powers)(const int parts, const int n, VEC *x)
{
    VEC whole[8], y[8];
    EACH(i) {
        x[i] = v_max(v_splat(2 * POWER_LOW), x[i]);
#ifdef v_round
        whole[i] = v_round(x[i]);
        x[i] = x[i] - whole[i];
#else
        whole[i] = x[i] + v_splat(EXP_MAGIC);
        x[i] = x[i] - (whole[i] - v_splat(EXP_MAGIC));
#endif
    }
    FMHA_NAME(power_fit)(parts, n, x, y);
    EACH(i) x[i] = FMHA_NAME(scaled)(y[i], whole[i]);
}

/* x <- 2^(x * factor - shift) of n numbers that are no NaN, shift whole numbers; those below `least` = (shift + POWER_LOW) /
 * factor count as that: subnormal. The power's whole part is added to the exponent's bits. */
INLINED void FMHA_NAME(shifted_powers)(const int parts, const int n, VEC *x, VEC factor, const VEC *shift, const VEC *least, const int of)
{
    VEC whole[8], y[8];
    EACH(i) {
        const int own = i % of;
        x[i] = v_max(x[i], least[own]);
        VEC magic = v_splat(EXP_MAGIC) - shift[own], sum = x[i] * factor + magic;
        whole[i] = sum;
        x[i] = x[i] * factor - (sum - magic);
    }
    FMHA_NAME(power_fit)(parts, n, x, y);
    EACH(i) x[i] = v_from_bits(v_bits(y[i]) + (v_bits(whole[i]) << EXP_SHIFT));
}
