/* "decode" of heads that lie side by side in rows, as those of (B, L, H, D) do. Memory delivers such rows from end to end at up to
 * twice the rate of one head's part of each, so an item has several heads of the same keys: a step of the keys of every head, and so
 * on through a block of them, and then its values alike; what the next step reads is fetched in the order in which it lies. The
 * arithmetic is that of decode.inc.h, and the bits are the same. */

/* What an item has of each of its heads: what one has in decode.inc.h, the result of a chunk, and sums of a part of a step. */
typedef struct {
    FMHA_NAME(decode_memory) m;
    FMHA_NAME(chunk) result;
    REAL *aside;                /* (rows, value width) */
    int partly;                 /* what decode_chunk returns */
} FMHA_NAME(neighbour);

/* Returns the size in REALs, of whole cache lines; without memory that is all. */
static ptrdiff_t FMHA_NAME(neighbour_layout)(const fmha_problem *p, REAL *memory, FMHA_NAME(neighbour) *x)
{
    ptrdiff_t used = FMHA_NAME(decode_layout)(p, memory, &x->m);
    if (fmha_parts(p->Lk, FMHA_CHUNK_KEYS) == 1) used += FMHA_NAME(chunk_layout)(p, memory ? memory + used : NULL, &x->result);
    x->aside = FMHA_NAME(take)(memory, &used, fmha_heads_cut(p).rows * ROUND_UP(p->Dv, LANES));
    return ROUND_UP(used, LINE);
}

static ptrdiff_t FMHA_NAME(neighbours_scratch)(const fmha_problem *p, ptrdiff_t heads)
{
    FMHA_NAME(neighbour) unused;
    return heads * FMHA_NAME(neighbour_layout)(p, NULL, &unused) + FMHA_NAME(merge_scratch)(p);
}

/* How many keys are a step, of at most DECODE_STEP and no fewer than `least`: what is fetched for a step while the one before is
 * computed with stays in the first cache. */
static ptrdiff_t FMHA_NAME(neighbours_step)(ptrdiff_t bytes, ptrdiff_t least, ptrdiff_t window)
{
    ptrdiff_t step = DECODE_STEP;
    while (step > least && step * bytes > window) step /= 2;
    return step;
}

/* The place-th of so many parts of n rows of all `heads` heads of x from head h, row j on is fetched, from end to end. */
static void FMHA_NAME(fetch_rows)(const fmha_problem *p, const fmha_array *x, ptrdiff_t width, ptrdiff_t b, ptrdiff_t h, ptrdiff_t heads,
                                  ptrdiff_t j, ptrdiff_t n, ptrdiff_t place)
{
    const ptrdiff_t size = FMHA_NAME(stored_size)(p->stored), row = x->stride[2] * size;
    const ptrdiff_t lines = fmha_parts(((heads - 1) * x->stride[1] + width) * size, FMHA_CACHE_LINE), end = n * lines * (place + 1) / heads;
    ptrdiff_t line = n * lines * place / heads, in_row = line % lines;
    const char *at = FMHA_NAME(stored_row)(p, x, b, h, j + line / lines);
    for (ptrdiff_t some; line < end; line += some, in_row = 0, at += row) {
        some = lines - in_row < end - line ? lines - in_row : end - line;
        for (ptrdiff_t l = in_row; l < in_row + some; l++) v_prefetch(at + l * FMHA_CACHE_LINE);
    }
}

/* decode_chunk without lift and purpose, of all these heads from head h on. */
static void FMHA_NAME(neighbours_chunk)(const fmha_run *run, ptrdiff_t b, ptrdiff_t h, ptrdiff_t heads, ptrdiff_t first, ptrdiff_t last,
                                    FMHA_NAME(neighbour) *x)
{
    const fmha_problem *p = &run->p;
    const ptrdiff_t rows = p->H / p->Hkv * p->Lq, value_width = ROUND_UP(p->Dv, LANES), size = FMHA_NAME(stored_size)(p->stored);
    const ptrdiff_t of_keys = FMHA_NAME(neighbours_step)(heads * p->D * size, DECODE_STEP / 4, NEIGHBOUR_KEYS);
    const ptrdiff_t of_values = FMHA_NAME(neighbours_step)(heads * p->Dv * size, DECODE_USUAL(p->stored) ? DECODE_STEP / 2 : DECODE_STEP,
                                                           NEIGHBOUR_VALUES);
    FMHA_NAME(open_sums) open;
    const FMHA_NAME(ahead) none = {.turns = 0}, parts = {.open = of_values < DECODE_STEP ? &open : NULL};
    for (ptrdiff_t e = 0; e < heads; e++) {
        FMHA_NAME(begin_chunk)(rows, value_width, &x[e].result);
        x[e].partly = 0;
    }
    for (ptrdiff_t j = first, n, part; j < last; j += n) {
        n = last - j < DECODE_KEYS ? last - j : DECODE_KEYS;
        /* scores (rows, n) <- q (rows, D) @ k (n, D).T */
        for (ptrdiff_t k = 0; k < n; k += part) {
            part = n - k > DECODE_STEP ? of_keys : n - k;       /* scores are written in whole vectors: behind the last are those of the next row */
            for (ptrdiff_t e = 0; e < heads; e++) {
                if (k + part < n) FMHA_NAME(fetch_rows)(p, &p->k, p->D, b, h, heads, j + k + part, of_keys, e);
                else FMHA_NAME(fetch_rows)(p, &p->v, p->Dv, b, h, heads, j, of_values, e);
                FMHA_NAME(decode_scores)(p, &none, rows, part, x[e].m.q, FMHA_NAME(stored_row)(p, &p->k, b, h + e, j + k), NULL,
                                         x[e].m.scores + k);
            }
        }
        for (ptrdiff_t e = 0; e < heads; e++)
            x[e].partly |= FMHA_NAME(decode_softmax)(p, b, h + e, j, n, x[e].m.scores, &x[e].result, x[e].m.shrink);
        /* sums (rows, Dv) <- shrink * sums + weights (rows, n) @ v (n, Dv), every DECODE_STEP keys a sum */
        for (ptrdiff_t k = 0; k < n; k += part) {
            part = n - k < of_values ? n - k : of_values;
            for (ptrdiff_t e = 0; e < heads; e++) {
                REAL *sums = x[e].result.sums;
                open = (FMHA_NAME(open_sums)){x[e].aside - sums, k % DECODE_STEP > 0, k + part == n || (k + part) % DECODE_STEP == 0};
                if (k + part < n) FMHA_NAME(fetch_rows)(p, &p->v, p->Dv, b, h, heads, j + k + part, of_values, e);
                else FMHA_NAME(fetch_rows)(p, &p->k, p->D, b, h, heads, j + n, of_keys, e);
                FMHA_NAME(decode_values)(p->stored, p, &parts, rows, part, x[e].m.scores + k, FMHA_NAME(stored_row)(p, &p->v, b, h + e, j + k),
                                         p->v.stride[2], sums, k < DECODE_STEP ? x[e].m.shrink : NULL);
            }
        }
    }
}

/* Item: as that of `decode`, of several heads. */
static void FMHA_NAME(decode_neighbours)(void *context, ptrdiff_t index, int worker)
{
    const fmha_run *run = context;
    const fmha_problem *p = &run->p;
    const fmha_item item = fmha_item_of(&run->cut, index);
    const ptrdiff_t chunks = fmha_parts(p->Lk, FMHA_CHUNK_KEYS), b = item.b, h = item.h;
    const ptrdiff_t heads = p->Hkv - h < run->cut.head_step ? p->Hkv - h : run->cut.head_step;
    FMHA_NAME(neighbour) x[FMHA_MOST_NEIGHBOURS];
    const REAL *lift[FMHA_MOST_NEIGHBOURS];
    REAL *scratch = FMHA_NAME(scratch_of)(run, worker);
    ptrdiff_t low, high, end = item.j0 + item.cols;
    int ordinary = p->Dv == ROUND_UP(p->Dv, LANES) || STORED_PARTS(p->stored);      /* values can be read where they lie, */
    FMHA_NAME(begin_item)(p);
    fmha_block_keys(p, b, 0, p->Lq, &low, &high);
    if (end > high) end = high;
    for (ptrdiff_t e = 0; e < heads; e++) {
        scratch += FMHA_NAME(neighbour_layout)(p, scratch, &x[e]);
        x[e].m.ahead = (FMHA_NAME(ahead)){.turns = 0};
        x[e].m.ready = 0;
        lift[e] = FMHA_NAME(decode_queries)(p, b, h + e, item.rows, x[e].m.q, x[e].m.lift);
        ordinary &= lift[e] == NULL;        /* and no queries are huge */
    }
    for (ptrdiff_t j = item.j0; j < item.j0 + item.cols; j += FMHA_CHUNK_KEYS) {
        for (ptrdiff_t e = 0; chunks > 1 && e < heads; e++)
            x[e].result = FMHA_NAME(chunk_of)(run, (b * p->Hkv + h + e) * chunks + j / FMHA_CHUNK_KEYS);
        int together = ordinary;
        for (ptrdiff_t e = 0; e < heads && together; e++)
            together = !FMHA_NAME(tiny_chunk)(p, b, h + e, j, low, end) && !FMHA_NAME(large_chunk)(p, b, h + e, j, low, end);
        if (together) FMHA_NAME(neighbours_chunk)(run, b, h, heads, FMHA_NAME(chunk_begin)(j, low), FMHA_NAME(chunk_end)(j, end), x);
        for (ptrdiff_t e = 0; e < heads; e++) {
            if (!together) FMHA_NAME(chunk_of_item)(run, b, h + e, j, low, end, lift[e], &x[e].m, &x[e].result);
            else if (chunks > 1 || x[e].partly)
                FMHA_NAME(finish_chunk)(run, b, h + e, j, low, end, lift[e], &x[e].m, &x[e].result, x[e].partly, 0);
        }
    }
    for (ptrdiff_t e = 0; chunks == 1 && e < heads; e++) FMHA_NAME(merge_head)(run, b, h + e, scratch, &x[e].result);
}
