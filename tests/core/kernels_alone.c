/* The kernels against plain loops in double, without Python: for an architecture that only an emulator runs here.
 *
 * Prints a line for each comparison, "ok" or "WRONG" first, and ends with 1 where one is wrong. Attention is run with 1 and with
 * 3 threads, which must give the same bits. */
#include "fastmha.h"
#include "pool.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FEW_THREADS 3

static int wrong;

static void report(int right, const char *what, const char *which, double error, double bound)
{
    printf("%-5s %s %s: %.3g of %.3g\n", right ? "ok" : "WRONG", which, what, error, bound);
    wrong += !right;
}

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(FMHA_CACHE_LINE, (bytes / FMHA_CACHE_LINE + 2) * FMHA_CACHE_LINE);
    if (!p) exit(2);
    return memset(p, 0xff, bytes);      /* NaN where nothing is written */
}

static double draw(void)        /* in (-1, 1) */
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (double)(int64_t)state * 0x1p-63;
}

/* One kind of kernels, and the type that operands and results are stored in. */
typedef struct {
    const char *name;
    fmha_isa isa;
    int is_double, type, parts;
    const fmha_kernels *kernels;
    ptrdiff_t size;             /* of a stored number, and of the computation's: */
    ptrdiff_t real;
    double epsilon;             /* of results */
} kind;

static double of_float16(unsigned bits)
{
    int exponent = bits >> 10 & 31;
    double size = exponent ? ldexp(1024 + (bits & 1023), exponent - 25) : ldexp(bits & 1023, -24);
    if (exponent == 31) size = bits & 1023 ? NAN : INFINITY;
    return bits & 0x8000 ? -size : size;
}

static double of_bfloat16(unsigned bits)
{
    uint32_t wide = bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static double stored(const kind *t, const void *x, ptrdiff_t i)
{
    if (t->type == FMHA_HALF) return of_float16(((const uint16_t *)x)[i]);
    if (t->type == FMHA_BFLOAT) return of_bfloat16(((const uint16_t *)x)[i]);
    return t->is_double ? ((const double *)x)[i] : ((const float *)x)[i];
}

/* n numbers as the kernels store them, `exact` what they then are. */
static void *operand(const kind *t, ptrdiff_t n, double **exact)
{
    char *real = memory((size_t)(n * t->real)), *x = memory((size_t)(n * t->size));
    for (ptrdiff_t i = 0; i < n; i++) {
        if (t->is_double) ((double *)real)[i] = draw();
        else ((float *)real)[i] = (float)draw();
    }
    t->kernels->store_rows(t->type, 1, n, real, n, x, n);
    *exact = memory((size_t)n * sizeof(double));
    for (ptrdiff_t i = 0; i < n; i++) (*exact)[i] = stored(t, x, i);
    free(real);
    return x;
}

/* Largest error over the largest number. */
static void compare(const kind *t, const char *what, const void *x, const double *expected, ptrdiff_t n, double epsilon)
{
    double largest = 0, error = 0;
    for (ptrdiff_t i = 0; i < n; i++) largest = fmax(largest, fabs(expected[i]));
    for (ptrdiff_t i = 0; i < n; i++) {
        double at = fabs(stored(t, x, i) - expected[i]);
        error = at <= error ? error : at;       /* NaN stays */
    }
    report(error <= epsilon * largest, what, t->name, error, epsilon * largest);
}

static kind of_computation(const kind *t)
{
    kind real = *t;
    real.type = FMHA_SAME;
    real.size = real.real;
    return real;
}

static void compare_real(const kind *t, const char *what, const void *x, const double *expected, ptrdiff_t n, double epsilon)
{
    kind real = of_computation(t);
    compare(&real, what, x, expected, n, epsilon);
}

static void same(const kind *t, const char *what, const void *x, const void *y, ptrdiff_t bytes)
{
    int equal = memcmp(x, y, (size_t)bytes) == 0;
    report(equal, what, t->name, !equal, 0);
}

/* ------------------------------------------------------------------------------------------------------------ attention */

typedef struct {
    ptrdiff_t B, H, Hkv, Lq, Lk, D, Dv;
    int causal;
    double softcap;
    int masked, dropped;        /* a boolean mask; half of the pairs dropped */
} shape;

typedef struct {
    uint8_t *mask;
    double *q, *k, *v, *grad, *out, *lse, *weights, *grad_q, *grad_k, *grad_v;
} exact;

static double *zeros(ptrdiff_t n)
{
    double *x = memory((size_t)n * sizeof(double));
    return memset(x, 0, (size_t)n * sizeof(double));
}

/* Philox4x32-10 as dropout.inc.h says it, one word at a time: whether a pair is kept. */
static int kept(uint64_t seed, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i, ptrdiff_t j)
{
    uint32_t c[4] = {(uint32_t)(j / 4), (uint32_t)i, (uint32_t)h, (uint32_t)b}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++, key[0] += 0x9E3779B9, key[1] += 0xBB67AE85) {
        const uint64_t first = (uint64_t)c[0] * 0xD2511F53, second = (uint64_t)c[2] * 0xCD9E8D57;
        c[0] = (uint32_t)(second >> 32) ^ c[1] ^ key[0];
        c[2] = (uint32_t)(first >> 32) ^ c[3] ^ key[1];
        c[1] = (uint32_t)second;
        c[3] = (uint32_t)first;
    }
    return c[j % 4] >= 0x80000000;
}

static const uint64_t SEED = 0x123456789abcdef;

static void attend_plainly(const shape *s, double scale, exact *x)
{
    const ptrdiff_t rows = s->B * s->H * s->Lq, group = s->H / s->Hkv;
    x->out = zeros(rows * s->Dv), x->lse = zeros(rows), x->weights = zeros(rows * s->Lk), x->grad_q = zeros(rows * s->D);
    x->grad_k = zeros(s->B * s->Hkv * s->Lk * s->D), x->grad_v = zeros(s->B * s->Hkv * s->Lk * s->Dv);
    for (ptrdiff_t r = 0; r < rows; r++) {
        const ptrdiff_t head = r / s->Lq / s->H * s->Hkv + r / s->Lq % s->H / group;
        const ptrdiff_t n = s->causal ? r % s->Lq + s->Lk - s->Lq + 1 : s->Lk;
        const double *q = x->q + r * s->D, *k = x->k + head * s->Lk * s->D;
        const double *v = x->v + head * s->Lk * s->Dv, *grad = x->grad + r * s->Dv;
        double *p = x->weights + r * s->Lk, *slope = zeros(n), *drawn = zeros(n), total = 0, delta = 0;
        for (ptrdiff_t j = 0; j < n; j++) {
            double score = 0, tanh_of;
            for (ptrdiff_t d = 0; d < s->D; d++) score += scale * q[d] * k[j * s->D + d];
            tanh_of = s->softcap ? tanh(score / s->softcap) : 0;
            slope[j] = 1 - tanh_of * tanh_of;
            p[j] = exp(s->softcap ? s->softcap * tanh_of : score);      /* small enough without the peak */
            if (s->masked && x->mask[r * s->Lk + j]) p[j] = 0;
            drawn[j] = !s->dropped ? 1 : kept(SEED, r / s->Lq / s->H, r / s->Lq % s->H, r % s->Lq, j) ? 2 : 0;
            total += p[j];
        }
        x->lse[r] = log(total);
        for (ptrdiff_t j = 0; j < n; j++)
            for (ptrdiff_t d = 0; d < s->Dv; d++) x->out[r * s->Dv + d] += p[j] / total * drawn[j] * v[j * s->Dv + d];
        for (ptrdiff_t d = 0; d < s->Dv; d++) delta += grad[d] * x->out[r * s->Dv + d];
        for (ptrdiff_t j = 0; j < n; j++) {
            double grad_p = 0, grad_s;
            p[j] /= total;
            for (ptrdiff_t d = 0; d < s->Dv; d++) {
                grad_p += grad[d] * v[j * s->Dv + d];
                x->grad_v[(head * s->Lk + j) * s->Dv + d] += p[j] * drawn[j] * grad[d];
            }
            grad_s = scale * p[j] * (grad_p * drawn[j] - delta) * slope[j];
            p[j] *= drawn[j];
            for (ptrdiff_t d = 0; d < s->D; d++) {
                x->grad_q[r * s->D + d] += grad_s * k[j * s->D + d];
                x->grad_k[(head * s->Lk + j) * s->D + d] += grad_s * q[d];
            }
        }
        free(slope), free(drawn);
    }
}

static fmha_array array(void *data, ptrdiff_t heads, ptrdiff_t length, ptrdiff_t width)
{
    return (fmha_array){.data = data, .stride = {heads * length * width, length * width, width, 1}};
}

static void give_scratch(fmha_run *run, ptrdiff_t bytes, int threads)
{
    run->scratch_size = (bytes / FMHA_CACHE_LINE + 1) * FMHA_CACHE_LINE;
    run->scratch = memory((size_t)(run->scratch_size * threads));
    for (int n = 0; n < threads; n++) *(ptrdiff_t *)(run->scratch + n * run->scratch_size) = 0;        /* nothing is begun or gathered */
    run->threads = threads;
    run->some = 1;
}

enum { OUT, LSE, WEIGHTS, GRAD_Q, GRAD_K, GRAD_V, RESULTS };
enum { TILED, TILED_WEIGHTS, DECODE, DECODE_NEIGHBOURS, BACKWARD, BACKWARD_TURNS, BACKWARD_SHARES };
#define SHARE 2         /* blocks */
#define NEIGHBOURS 2    /* heads */

static void forward(const kind *t, fmha_run *run, int way, int threads)
{
    const fmha_kernels *kernels = t->kernels;
    const fmha_cut rows = fmha_forward_cut(&run->p);
    if (way == DECODE || way == DECODE_NEIGHBOURS) {
        ptrdiff_t merging = kernels->merge_scratch(&run->p);
        ptrdiff_t size = way == DECODE ? kernels->decode_scratch(&run->p) : kernels->neighbours_scratch(&run->p, NEIGHBOURS);
        run->cut = way == DECODE ? fmha_decode_cut(&run->p, threads) : fmha_neighbours_cut(&run->p, NEIGHBOURS);
        run->chunks = memory((size_t)(fmha_waiting_chunks(&run->p) * kernels->chunk_scratch(&run->p) * t->real));
        give_scratch(run, (size > merging ? size : merging) * t->real, threads);
        fmha_pool_run(way == DECODE ? kernels->decode : kernels->decode_neighbours, run, fmha_items(&run->cut), threads);
        run->cut = fmha_heads_cut(&run->p);
        fmha_pool_run(kernels->decode_merge, run, fmha_items(&run->cut), threads);
        free(run->chunks);
    } else if (t->parts && threads == 1) {      /* heads are items; else chunks, then blocks of rows */
        give_scratch(run, kernels->matrix_scratch(&run->p, 1, way == TILED_WEIGHTS) * t->real, threads);
        run->cut = kernels->matrix_cut(&run->p, 0);
        fmha_pool_run(kernels->matrix_head, run, run->p.B * run->p.Hkv, threads);
    } else if (t->parts) {
        run->shared = memory((size_t)(run->p.B * run->p.Hkv * kernels->matrix_bytes(&run->p)));
        give_scratch(run, kernels->matrix_scratch(&run->p, 0, way == TILED_WEIGHTS) * t->real, threads);
        run->cut = kernels->matrix_cut(&run->p, 0);
        fmha_pool_run(kernels->matrix_pack, run, fmha_items(&run->cut), threads);
        run->cut = rows;
        fmha_pool_run(kernels->matrix_forward, run, fmha_items(&rows), threads);
        free(run->shared);
    } else {
        run->cut = rows;
        give_scratch(run, kernels->tiled_scratch(&run->p, threads, way == TILED_WEIGHTS) * t->real, threads);
        fmha_pool_run(way == TILED ? kernels->tiled_forward : kernels->tiled_weights, run, fmha_items(&rows), threads);
    }
    free(run->scratch);
}

static void backward(const kind *t, fmha_run *run, int way, int threads)
{
    const fmha_kernels *kernels = t->kernels;
    run->row_states = memory((size_t)(run->p.B * run->p.H * run->p.Lq * FMHA_ROW_STATE * t->real));
    const int packed_first = t->parts && way != BACKWARD;
    if (packed_first) {
        run->shared = memory((size_t)(run->p.B * run->p.Hkv * kernels->gradient_bytes(&run->p)));
        run->cut = kernels->matrix_cut(&run->p, 0);
        fmha_pool_run(kernels->gradient_pack_keys, run, fmha_items(&run->cut), threads);
        run->cut = fmha_forward_cut(&run->p);
        fmha_pool_run(kernels->gradient_pack_rows, run, fmha_items(&run->cut), threads);
    }
    const fmha_split split = {
        .mode = way == BACKWARD ? FMHA_WHOLE : way == BACKWARD_TURNS ? FMHA_TURNS : FMHA_SHARES,
        .whole = way == BACKWARD ? run->p.B * run->p.Hkv : 0, .keys = FMHA_TILE_KEYS,
        .share = way == BACKWARD_SHARES ? SHARE : 0, .together = 1,
    };
    const int modes[] = {FMHA_WHOLE, FMHA_PREPARE, split.mode, FMHA_RESULTS};
    run->share = split.share;
    const ptrdiff_t kept = (t->parts ? kernels->gradient_kept : kernels->backward_kept)(&run->p, run->share);
    run->kept = memory((size_t)(run->p.B * run->p.Hkv * kept * t->real));
    for (int m = way == BACKWARD ? 0 : 1; m < (way == BACKWARD ? 1 : 4); m++) {
        run->mode = modes[m];
        run->cut = fmha_backward_cut(&run->p, run->mode, &split);
        const fmha_task task = t->parts ? kernels->matrix_backward : kernels->tiled_backward;
        give_scratch(run, (t->parts ? kernels->gradient_scratch : kernels->backward_scratch)(&run->p, run->mode, run->share) * t->real, threads);
        fmha_pool_run(task, run, fmha_items(&run->cut), threads);
        free(run->scratch);
    }
    if (packed_first) free(run->shared);
    free(run->kept);
    free(run->row_states);
}

static void test_attention(const kind *t, const shape *s)
{
    static const char *const names[] = {"out", "lse", "weights", "grad_q", "grad_k", "grad_v"};
    static const char *const ways[] = {
        "tiled", "tiled with weights", "decode", "decode, side by side", "backward", "backward, turns", "backward, shares",
    };
    const ptrdiff_t rows = s->B * s->H * s->Lq, keys = s->B * s->Hkv * s->Lk;
    const ptrdiff_t many[RESULTS] = {rows * s->Dv, rows, rows * s->Lk, rows * s->D, keys * s->D, keys * s->Dv};
    exact x;
    int64_t offsets[2] = {s->Lk - s->Lq, s->Lk - s->Lq};
    fmha_problem p = {
        .B = s->B, .H = s->H, .Hkv = s->Hkv, .Lq = s->Lq, .Lk = s->Lk, .D = s->D, .Dv = s->Dv, .scale = 1 / sqrt((double)s->D),
        .softcap = s->softcap, .banded = s->causal, .left = FMHA_UNBOUNDED, .offset = s->causal ? offsets : NULL,
        .element = t->type, .stored = t->type, .parts = t->parts,
        .q = array(operand(t, rows * s->D, &x.q), s->H, s->Lq, s->D), .k = array(operand(t, keys * s->D, &x.k), s->Hkv, s->Lk, s->D),
        .v = array(operand(t, keys * s->Dv, &x.v), s->Hkv, s->Lk, s->Dv),
    };
    fmha_array grad = array(operand(t, rows * s->Dv, &x.grad), s->H, s->Lq, s->Dv);
    char what[200], *result[2][RESULTS];
    x.mask = memory((size_t)(rows * s->Lk));
    for (ptrdiff_t i = 0; i < rows * s->Lk; i++) x.mask[i] = i % s->Lk && draw() > 0.3;     /* each row keeps its first key */
    if (s->masked) p.bool_mask = array(x.mask, s->H, s->Lq, s->Lk);
    if (s->dropped) p.dropout = (fmha_dropout){.factor = 2, .below = 0x80000000, .seed = SEED};
    attend_plainly(s, p.scale, &x);
    const double *expected[RESULTS] = {x.out, x.lse, x.weights, x.grad_q, x.grad_k, x.grad_v};
    for (int way = TILED; way <= BACKWARD_SHARES; way++) {
        if (way == BACKWARD_SHARES && t->parts) continue;
        if ((way == DECODE || way == DECODE_NEIGHBOURS) && (t->parts || s->H / s->Hkv * s->Lq > FMHA_DECODE_ROWS)) continue;
        for (int few = 0; few < 2; few++) {
            int threads = few ? FEW_THREADS : 1;
            fmha_run run = {.p = p, .grad_out = grad};
            for (int r = 0; r < RESULTS; r++) result[few][r] = memory((size_t)(many[r] * sizeof(double)));
            run.out = array(result[few][OUT], s->H, s->Lq, s->Dv);
            run.lse = result[few][LSE];
            run.weights = way == TILED_WEIGHTS ? result[few][WEIGHTS] : NULL;
            run.grad_q = array(result[few][GRAD_Q], s->H, s->Lq, s->D);
            run.grad_k = array(result[few][GRAD_K], s->Hkv, s->Lk, s->D);
            run.grad_v = array(result[few][GRAD_V], s->Hkv, s->Lk, s->Dv);
            forward(t, &run, way < BACKWARD ? way : TILED, threads);
            if (way >= BACKWARD) backward(t, &run, way, threads);
        }
        const int first = way < BACKWARD ? OUT : GRAD_Q, end = way >= BACKWARD ? RESULTS : way == TILED_WEIGHTS ? GRAD_Q : WEIGHTS;
        for (int r = first; r < end; r++) {
            int of_real = r == LSE || r == WEIGHTS;
            snprintf(what, sizeof what, "%s, %s, Lq %d Lk %d D %d Dv %d", ways[way], names[r], (int)s->Lq, (int)s->Lk, (int)s->D,
                     (int)s->Dv);
            (of_real ? compare_real : compare)(t, what, result[0][r], expected[r], many[r], t->epsilon);
            same(t, "whatever the threads", result[0][r], result[1][r], many[r] * (of_real ? t->real : t->size));
        }
        for (int r = 0; r < RESULTS; r++) free(result[0][r]), free(result[1][r]);
    }
    free(p.q.data), free(p.k.data), free(p.v.data), free(grad.data);
    free(x.mask), free(x.q), free(x.k), free(x.v), free(x.grad);
    for (int r = 0; r < RESULTS; r++) free((void *)expected[r]);
}

/* ----------------------------------------------------------------------------------------------------------- the others */

static void test_products(const kind *t, ptrdiff_t M, ptrdiff_t N, ptrdiff_t K)
{
    char what[100];
    for (int turned = 0; turned < 4; turned++) {
        const int trans_a = turned & 1, trans_b = turned >> 1;
        const kind real = of_computation(t);
        double *a, *b, *bias, *expected = zeros(M * N);
        void *x = operand(t->parts ? t : &real, M * K, &a), *y = operand(t, K * N, &b), *c = memory((size_t)(M * N * 8));
        void *scratch, *tiles[2];
        fmha_finish last = {.bias = operand(&real, N, &bias)};
        const ptrdiff_t lda = trans_a ? M : K, ldb = trans_b ? K : N;
        for (ptrdiff_t i = 0; i < M; i++)
            for (ptrdiff_t j = 0; j < N; j++) {
                expected[i * N + j] = bias[j];
                for (ptrdiff_t k = 0; k < K; k++)
                    expected[i * N + j] += a[trans_a ? k * M + i : i * K + k] * b[trans_b ? j * K + k : k * N + j];
            }
        snprintf(what, sizeof what, "product %d x %d x %d%s%s", (int)M, (int)N, (int)K, trans_a ? ", a transposed" : "",
                 trans_b ? ", b transposed" : "");
        if (t->parts) {
            fmha_tile_product product = {
                .M = M, .N = N, .K = K, .most_rows = M, .parts_a = t->parts, .parts_b = t->parts, .type_c = t->type,
            };
            product.a = tiles[0] = memory((size_t)(t->parts * t->kernels->tiles_size(M, K) * 2));
            product.b = tiles[1] = memory((size_t)(t->parts * t->kernels->tiles_size(N, K) * 2));
            scratch = memory((size_t)t->kernels->tile_scratch(&product));
            int large = t->kernels->pack_tiles(1, trans_a, t->type, t->parts, 0, M, K, x, lda, M, tiles[0]);
            large |= t->kernels->pack_tiles(0, !trans_b, t->type, t->parts, 0, N, K, y, ldb, N, tiles[1]);
            report(!large, "tiles take the operands", t->name, large, 0);
            t->kernels->tile_gemm(&product, 0, M, 0, N, c, N, &last, scratch);
            free(tiles[0]), free(tiles[1]);
            compare(t, what, c, expected, M * N, t->epsilon);
        } else {
            scratch = memory((size_t)(t->kernels->gemm_scratch(M, N, K) * t->real));
            t->kernels->gemm(t->type, trans_a, trans_b, M, N, K, x, lda, y, ldb, c, N, &last, NULL, scratch);
            compare_real(t, what, c, expected, M * N, 64 * (t->is_double ? DBL_EPSILON : FLT_EPSILON));
        }
        free(x), free(y), free(c), free(scratch), free((void *)last.bias), free(a), free(b), free(bias), free(expected);
    }
}

/* -square + x * x, whose last digits only a fused multiply-add has. */
static void test_product_is_fused(const kind *t)
{
    const double x = t->is_double ? 1 + 0x1p-30 : 1 + 0x1p-20, expected = t->is_double ? 0x1p-60 : 0x1p-40;
    const double square = t->is_double ? 1 + 0x1p-29 : 1 + 0x1p-19;         /* rounded */
    double a_64[2] = {1, x}, b_64[2] = {-square, x}, c_64;
    float a_32[2] = {1, (float)x}, b_32[2] = {-(float)square, (float)x}, c_32;
    void *a = t->is_double ? (void *)a_64 : a_32, *b = t->is_double ? (void *)b_64 : b_32;
    void *c = t->is_double ? (void *)&c_64 : &c_32;
    void *scratch = memory((size_t)(t->kernels->gemm_scratch(1, 1, 2) * t->real));
    fmha_finish last = {0};
    t->kernels->gemm(FMHA_SAME, 0, 0, 1, 1, 2, a, 2, b, 1, c, 1, &last, NULL, scratch);
    free(scratch);
    int fused = (t->is_double ? c_64 : c_32) != 0;
    report(fused == FMHA_BASELINE_FUSES, "products are fused as FMHA_BASELINE_FUSES says", t->name, fused, FMHA_BASELINE_FUSES);
    if (fused) compare_real(t, "fused product", c, &expected, 1, 0x1p-10);
}

static void test_softmax(const kind *t, ptrdiff_t n)
{
    double *x, *dy, *y = zeros(n), *dx = zeros(n), total = 0, sum = 0;
    void *at = operand(t, n, &x), *grad = operand(t, n, &dy), *to = memory((size_t)(n * 8)), *to_grad = memory((size_t)(n * 8));
    for (ptrdiff_t i = 0; i < n; i++) total += exp(x[i]);
    for (ptrdiff_t i = 0; i < n; i++) y[i] = exp(x[i]) / total, sum += y[i] * dy[i];
    for (ptrdiff_t i = 0; i < n; i++) dx[i] = y[i] * (dy[i] - sum);
    t->kernels->softmax(1, n, at, n, to, n);
    t->kernels->softmax_backward(1, n, grad, n, to, n, to_grad, n);
    compare(t, "softmax", to, y, n, t->epsilon);
    compare(t, "softmax_backward", to_grad, dx, n, 4 * t->epsilon);
    for (ptrdiff_t i = 0; i < n; i++) y[i] = exp(x[i]), dx[i] = tanh(x[i]);
    t->kernels->exponential(n, at, to);
    t->kernels->hyperbolic_tangent(n, at, to_grad);
    compare(t, "exp", to, y, n, t->epsilon);
    compare(t, "tanh", to_grad, dx, n, t->epsilon);
    t->kernels->activate_row(FMHA_GELU, n, at, to);
    for (ptrdiff_t i = 0; i < n; i++) y[i] = 0.5 * x[i] * erfc(-x[i] * sqrt(0.5));
    compare(t, "gelu", to, y, n, t->epsilon);
    free(x), free(dy), free(y), free(dx), free(at), free(grad), free(to), free(to_grad);
}

/* Every number of half precision there and back, and what lies between two of them to the nearest, of two as near to the even one. */
static void test_half(const kind *t)
{
    enum { ALL = 65536 };
    uint16_t *all = memory(ALL * 2), *back = memory(ALL * 2);
    float *wide = memory(ALL * 4);
    int misread = 0, unlike = 0, misrounded = 0;
    for (unsigned i = 0; i < ALL; i++) all[i] = (uint16_t)i;
    t->kernels->load_rows(t->type, 1, ALL, all, ALL, wide, ALL);
    t->kernels->store_rows(t->type, 1, ALL, wide, ALL, back, ALL);
    for (unsigned i = 0; i < ALL; i++) {
        double value = stored(t, all, i);
        if (value != value) misread += wide[i] == wide[i], unlike += stored(t, back, i) == stored(t, back, i);
        else misread += wide[i] != value || !signbit(wide[i]) != !signbit(value), unlike += back[i] != all[i];
    }
    const unsigned largest = t->type == FMHA_HALF ? 0x7bff : 0x7f7f, smallest = t->type == FMHA_HALF ? 0 : 0x80;
    for (int third = 0; third < 3; third++) {       /* at the middle, just below it, just above */
        for (unsigned i = smallest; i < largest; i++) {
            float middle = (float)((stored(t, all, i) + stored(t, all, i + 1)) / 2);
            wide[i] = third == 0 ? middle : nextafterf(middle, third == 1 ? 0 : INFINITY);
        }
        t->kernels->store_rows(t->type, 1, largest - smallest, wide + smallest, 0, back + smallest, 0);
        for (unsigned i = smallest; i < largest; i++) misrounded += back[i] != (third == 0 ? i + (i & 1) : third == 1 ? i : i + 1);
    }
    report(!misread, "all numbers are read", t->name, misread, 0);
    report(!unlike, "all numbers come back", t->name, unlike, 0);
    report(!misrounded, "numbers between are rounded to the nearest, ties to even", t->name, misrounded, 0);
    free(all), free(back), free(wide);
}

static void halve(void *context, ptrdiff_t item, int worker)
{
    (void)worker;
    ((volatile float *)context)[item] *= 0.5f;
}

static void test_subnormals_are_flushed_inside_items_alone(void)
{
    volatile float x[] = {FLT_MIN, FLT_MIN, FLT_MIN, FLT_MIN}, outside = FLT_MIN;
    fmha_pool_run(halve, (void *)x, 4, FEW_THREADS);
    outside *= 0.5f;
    int right = x[0] == 0 && x[1] == 0 && x[2] == 0 && x[3] == 0 && outside > 0;
    report(right, "subnormal numbers count as 0 inside items and nowhere else", "pool", x[0], 0);
}

int main(void)
{
    static kind kinds[] = {
        {"float32", FMHA_BASELINE, 0, FMHA_SAME, 0, NULL, 4, 4, 32 * FLT_EPSILON},
        {"float64", FMHA_BASELINE, 1, FMHA_SAME, 0, NULL, 8, 8, 32 * DBL_EPSILON},
        {"float16", FMHA_BASELINE, 0, FMHA_HALF, 0, NULL, 2, 4, 0x1p-10},
        {"bfloat16", FMHA_BASELINE, 0, FMHA_BFLOAT, 0, NULL, 2, 4, 0x1p-7},
        {"bfloat16 on tiles", FMHA_AMX_EMULATED, 0, FMHA_BFLOAT, 1, NULL, 2, 4, 0x1p-6},
        {"float32 on tiles, two parts", FMHA_AMX_EMULATED, 0, FMHA_SAME, 2, NULL, 4, 4, 0x1p-13},
    };
    static const shape shapes[] = {     /* lanes, blocks of rows, tiles and chunks of keys, each with something left over */
        {1, 1, 1, 1, 2, 1, 1, 0, 0, 0, 0}, {2, 4, 2, 3, 5, 3, 7, 0, 0, 0, 0}, {1, 2, 1, 7, 530, 33, 17, 1, 0, 0, 0},
        {2, 2, 1, 70, 209, 19, 5, 1, 0.5, 0, 0}, {1, 2, 1, 9, 230, 8, 8, 0, 0, 1, 1}, {1, 1, 1, 66, 199, 5, 3, 1, 0, 1, 0},
    };
    for (unsigned i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        kind *t = &kinds[i];
        t->kernels = fmha_kernels_of(t->isa, t->is_double);
        report(fmha_isa_runs(t->isa) && t->kernels, t->kernels ? t->kernels->name : "kernels", t->name, 0, 0);
        for (unsigned s = 0; s < sizeof shapes / sizeof *shapes; s++) test_attention(t, &shapes[s]);
        test_products(t, 1, 1, 1);
        test_products(t, 37, 75, 41);
        if (t->type != FMHA_SAME) {
            if (!t->parts) test_half(t);
        } else if (!t->parts) {
            test_product_is_fused(t);
            test_softmax(t, 1);
            test_softmax(t, 77);
        }
    }
    test_subnormals_are_flushed_inside_items_alone();
    fmha_pool_shutdown();
    printf("%d wrong\n", wrong);
    return wrong != 0;
}
