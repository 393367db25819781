/* How the work of "tiled" is best cut for so many threads: each way is simulated, and the one that ends first taken.
 *
 * Backward, how heads are split. Times are in products of a whole block and a whole tile, of which a block and a tile that meet have 5:
 * scores, dP, dV, dK, and dQ last, which waits for that of the keys before. Items are handed out in order to whoever is free. What a
 * block has to do with some keys is judged by its middle row. */
#include "fastmha.h"

#include <math.h>
#include <stdlib.h>

#define PRODUCTS 5
#define MOST_MEETINGS (1 << 18)     /* of blocks and tiles of the heads that are split: with more of them all ways are near to even */
#define MOST_TRIED 192              /* for each thread, of blocks and parts of tiles, and where more heads are split than must be */
#define EVEN 0.98                   /* of the threads busy: no other way is looked for */
#define MOST_TOGETHER 32            /* parts of the keys */
#define CAUSAL_STAGGER 15           /* products that a tile waits for the one before it on a diagonal: three blocks */

typedef struct {
    double low, high, rows;         /* the keys of the middle row, and the rows, in blocks */
} span_of_block;

typedef struct {
    const fmha_problem *p;
    ptrdiff_t blocks, first, last;  /* of a head; heads [first, last) are split */
    ptrdiff_t keys, parts;          /* of an item of these, and how many such parts a head has */
    int threads;
    span_of_block *spans;           /* (batch rows, blocks), or of one batch row, which stands for all */
    ptrdiff_t step;                 /* from one batch row's to the next one's, 0 where one stands for all */
    double *busy;                   /* until when each thread is, a heap: the first is free first */
    double *turns_q, *turns_k;      /* (heads, blocks) and (heads, parts together): when the sums are free */
    double limit;                   /* a way that takes longer is of no interest */
} schedule;

/* What a product costs of a block and some of the keys. */
static double meeting(const span_of_block *block, ptrdiff_t from, ptrdiff_t keys)
{
    const double low = block->low > (double)from ? block->low : (double)from;
    const double high = block->high < (double)(from + keys) ? block->high : (double)(from + keys);
    return high > low ? (high - low) * block->rows / FMHA_TILE_KEYS : 0;
}

/* What a head costs by one product. */
static double cost_of_head(const schedule *s, ptrdiff_t b)
{
    double cost = 0;
    for (ptrdiff_t n = 0; n < s->blocks; n++) cost += meeting(s->spans + b * s->step + n, 0, s->p->Lk);
    return cost;
}

static double cost_of_heads(const schedule *s, ptrdiff_t first, ptrdiff_t last)
{
    if (s->step == 0) return cost_of_head(s, 0) * (double)(last - first);
    double cost = 0;
    for (ptrdiff_t n = first; n < last; n++) cost += cost_of_head(s, n / s->p->Hkv);
    return cost;
}

/* Whoever is free first is busy until then. */
static void take(schedule *s, double until)
{
    ptrdiff_t at = 0;
    for (ptrdiff_t below; (below = 2 * at + 1) < s->threads; at = below) {
        if (below + 1 < s->threads && s->busy[below + 1] < s->busy[below]) below++;
        if (s->busy[below] >= until) break;
        s->busy[at] = s->busy[below];
    }
    s->busy[at] = until;
}

static void begin(schedule *s)
{
    for (int n = 0; n < s->threads; n++) s->busy[n] = 0;
}

static double end(const schedule *s)
{
    double last = 0;
    for (int n = 0; n < s->threads; n++) last = s->busy[n] > last ? s->busy[n] : last;
    return last;
}

static double of_whole_heads(schedule *s, ptrdiff_t heads)
{
    if (s->step == 0) return PRODUCTS * cost_of_head(s, 0) * (double)((heads + s->threads - 1) / s->threads);
    begin(s);
    for (ptrdiff_t n = 0; n < heads; n++) take(s, s->busy[0] + PRODUCTS * cost_of_head(s, n / s->p->Hkv));
    return end(s);
}

/* What a pair costs in tiles, or parts of these, of so many keys. */
static double cost_of_parts(ptrdiff_t keys)
{
    return keys == FMHA_TILE_KEYS ? 1 : keys == FMHA_TILE_KEYS / 2 ? FMHA_HALF_TILE_COST : FMHA_FOURTH_TILE_COST;
}

/* An item: blocks [first, last) of a head on a part of its keys and, in a share, of its turn at the sums of these. Returns when it ends,
 * 0 if it has nothing to do. */
static double share_item(schedule *s, ptrdiff_t head, ptrdiff_t first, ptrdiff_t last, ptrdiff_t part, double *turn_k)
{
    const span_of_block *spans = s->spans + (s->first + head) / s->p->Hkv * s->step;
    const ptrdiff_t from = part * s->keys, keys = s->p->Lk - from < s->keys ? s->p->Lk - from : s->keys;
    const double of_tile = (double)keys / FMHA_TILE_KEYS;
    double *turns_q = s->turns_q + head * s->blocks, now = s->busy[0];
    int many = 0, kept = 0, ours = 0;
    for (ptrdiff_t block = first; block < last; block++) {
        const double cost = meeting(spans + block, from, keys) * cost_of_parts(s->keys);
        if (cost == 0) continue;
        many++;
        if (turn_k && !ours && now >= *turn_k) now += FMHA_ADDED_COST * kept * of_tile, ours = 1;
        kept += !ours;
        now += (PRODUCTS - 1) * cost;
        now = (now > turns_q[block] ? now : turns_q[block]) + cost;
        turns_q[block] = now;
    }
    if (many && turn_k) {
        if (!ours) now = (now > *turn_k ? now : *turn_k) + FMHA_ADDED_COST * kept * of_tile;
        *turn_k = now += FMHA_SUMS_COST * of_tile;
    }
    if (!many) return 0;
    take(s, now);
    return now;
}

/* In shares of so many blocks, on so many parts together; 0: all blocks of a part are an item. INFINITY where that is beyond the limit. */
static double of_split_heads(schedule *s, ptrdiff_t share, ptrdiff_t together)
{
    const ptrdiff_t heads = s->last - s->first, step = share ? share : s->blocks;
    begin(s);
    for (ptrdiff_t e = 0; e < heads * s->blocks; e++) s->turns_q[e] = 0;
    for (ptrdiff_t from = 0; from < s->parts; from += together) {
        const ptrdiff_t to = from + together < s->parts ? from + together : s->parts;
        for (ptrdiff_t e = 0; e < heads * together; e++) s->turns_k[e] = 0;
        for (ptrdiff_t at = 0; at < fmha_parts(s->blocks, step) + FMHA_SKEW * (to - from - 1); at++)
            for (ptrdiff_t part = from, first = at * step; part < to && first >= 0; part++, first -= FMHA_SKEW * step)
                for (ptrdiff_t n = 0; n < heads && first < s->blocks; n++) {
                    const ptrdiff_t last = first + step < s->blocks ? first + step : s->blocks;
                    if (share_item(s, n, first, last, part, share ? s->turns_k + n * together + part - from : NULL) >= s->limit) return INFINITY;
                }
    }
    return end(s);
}

/* The same where that would take long: even work, the items that are the last ones, and what is waited for. */
static double of_many(const schedule *s, double work, ptrdiff_t share)
{
    const double even = PRODUCTS * work / s->threads, each = (double)s->threads / (double)(s->last - s->first);
    const double stagger = (each < (double)s->parts ? each : (double)s->parts) * (s->p->banded ? CAUSAL_STAGGER : 1);
    if (share) return even * (1 + (FMHA_ADDED_COST + FMHA_SUMS_COST / (double)share) / PRODUCTS) + (double)(PRODUCTS * share);
    return even + (double)(PRODUCTS * s->blocks) / 2 + stagger;
}

static void set_spans(schedule *s)
{
    const fmha_problem *p = s->p;
    const ptrdiff_t rows = fmha_heads_cut(p).rows;
    for (ptrdiff_t b = 0; b < (s->step ? p->B : 1); b++)
        for (ptrdiff_t n = 0; n < s->blocks; n++) {
            const ptrdiff_t i0 = n * FMHA_BLOCK_ROWS, many = rows - i0 < FMHA_BLOCK_ROWS ? rows - i0 : FMHA_BLOCK_ROWS;
            ptrdiff_t j0, j1;
            fmha_row_keys(p, b, (i0 + many / 2) % p->Lq, &j0, &j1);
            s->spans[b * s->step + n] = (span_of_block){(double)j0, (double)j1, (double)many / FMHA_BLOCK_ROWS};
        }
}

/* Looks for a better way than the best so far, whose time is *least, with the last heads split into items of so many keys. Where at least as
 * many shares are under way as there are threads, a share finds that its turn has come, and keeps nothing; where they are fewer, threads
 * wait less for the sums of a block. */
static void try_ways(schedule *s, ptrdiff_t split, ptrdiff_t keys, double *least, fmha_split *best)
{
    static const ptrdiff_t shares[] = {FMHA_MOST_SHARE, 4, 2, 1};
    s->first = s->last - split;
    s->keys = keys;
    s->parts = fmha_parts(s->p->Lk, keys);
    const double before = s->first ? of_whole_heads(s, s->first) : 0, work = cost_of_heads(s, s->first, s->last);
    const double even = PRODUCTS * work * cost_of_parts(keys) / s->threads, ahead = before + FMHA_SPLIT_COST;
    const int many = split * s->blocks * s->parts > MOST_MEETINGS;
    for (ptrdiff_t together = 1; together <= MOST_TOGETHER && (together == 1 || together < 2 * s->parts); together *= 2)
        for (int n = together == 1 ? -1 : 0; n < (int)(sizeof shares / sizeof *shares); n++) {
            const ptrdiff_t share = n < 0 ? 0 : shares[n];
            if (share && (share >= s->blocks || s->p->parts > 0)) continue;         /* matrix tiles sum in another order */
            s->limit = *least - ahead;
            if (even * (share ? 1 + FMHA_SUMS_COST / (double)(PRODUCTS * share) : 1) >= s->limit) continue;
            const double time = ahead + (many ? of_many(s, work, share) : of_split_heads(s, share, together));
            if (time >= *least) continue;
            *least = time;
            *best = (fmha_split){share ? FMHA_SHARES : FMHA_TURNS, s->first, keys, share, together, 1};
        }
}

fmha_split fmha_backward_split(const fmha_problem *p, int threads)
{
    const ptrdiff_t heads = p->B * p->Hkv, left = heads % threads, blocks = fmha_parts(fmha_heads_cut(p).rows, FMHA_BLOCK_ROWS);
    const ptrdiff_t most = left + threads < heads ? left + threads : heads, finest = p->parts > 0 ? FMHA_TILE_KEYS : FMHA_SUM_KEYS;
    fmha_split best = {FMHA_WHOLE, heads, FMHA_TILE_KEYS, 0, 0, 1};
    schedule s = {.p = p, .blocks = blocks, .last = heads, .threads = threads};
    s.step = p->banded || p->key_start || p->key_length ? blocks : 0;
    if (threads == 1 || heads == 0 || blocks == 0 || p->Lk == 0) return best;
    s.spans = malloc((size_t)((s.step ? p->B : 1) * blocks) * sizeof *s.spans);
    s.busy = malloc((size_t)(threads + most * (blocks + MOST_TOGETHER)) * sizeof *s.busy);
    if (s.spans && s.busy) {
        s.turns_q = s.busy + threads;
        s.turns_k = s.turns_q + most * blocks;
        set_spans(&s);
        const double even = PRODUCTS * cost_of_heads(&s, 0, heads) / threads;
        double least = of_whole_heads(&s, heads);
        for (ptrdiff_t split = left ? left : most; split <= most; split += threads)
            for (ptrdiff_t keys = FMHA_TILE_KEYS; keys >= finest && EVEN * least > even; keys /= 2) {
                const int must = split == left && keys == FMHA_TILE_KEYS;
                const int few = split * blocks * fmha_parts(p->Lk, keys) <= MOST_TRIED * (ptrdiff_t)threads;
                if (must || (few && keys < 2 * p->Lk)) try_ways(&s, split, keys, &least, &best);
            }
        if (least > 0) best.balance = even / (least - (best.mode == FMHA_WHOLE ? 0 : FMHA_SPLIT_COST));
    }
    free(s.spans);
    free(s.busy);
    return best;
}

/* ------------------------------------------------------------------------------------------------------------ forward */

#define LOOKED_AT 8             /* rows of a block, which may be those of several heads */
#define MOST_ITEMS (1 << 16)    /* that are simulated */
#define MOST_LEFT (1 << 25)     /* numbers that runs may leave */

/* What a pair costs in blocks of so many rows. */
static double cost_of_pair(ptrdiff_t rows)
{
    return rows == FMHA_BLOCK_ROWS ? 1 : rows == FMHA_BLOCK_ROWS / 2 ? FMHA_HALF_COST : FMHA_QUARTER_COST;
}

/* In pairs of a query and a key, of which some rows have the mean; factor: what a pair costs. */
static double cost_of_block(const fmha_problem *p, const fmha_item *item, double factor, int runs)
{
    double keys = 0;
    for (ptrdiff_t n = 0, rows = p->banded ? LOOKED_AT : 1; n < rows; n++) {
        ptrdiff_t low, high;
        fmha_row_keys(p, item->b, (item->i0 + item->rows * (2 * n + 1) / (2 * rows)) % p->Lq, &low, &high);
        if (low < item->j0) low = item->j0;
        if (high > item->j0 + item->cols) high = item->j0 + item->cols;
        if (high > low) keys += (double)(high - low) / (double)rows;
    }
    return keys == 0 ? 0 : (double)item->rows * (keys * factor + (runs ? FMHA_RUN_COST * FMHA_RUN_KEYS : 0));
}

/* When the last thread ends; INFINITY where that would take long to say. busy: for each thread, a heap. */
static double of_blocks(const fmha_problem *p, const fmha_blocks *blocks, int threads, double *busy)
{
    const fmha_cut cut = fmha_blocks_cut(p, blocks, blocks->runs);
    const fmha_cut merges = fmha_blocks_cut(p, blocks, 0);
    const ptrdiff_t items = fmha_items(&cut), runs = blocks->runs ? fmha_parts(p->Lk, FMHA_RUN_KEYS) : 0;
    const ptrdiff_t large = blocks->fine ? items - blocks->fine * cut.pieces : 0;      /* items, before the others */
    const ptrdiff_t merged = runs ? (fmha_items(&merges) + threads - 1) / threads : 0;  /* blocks that the busiest thread merges */
    const double merging = FMHA_RUN_COST * FMHA_RUN_KEYS * (double)(merged * runs * blocks->rows), factor = cost_of_pair(blocks->rows);
    ptrdiff_t n = 0;
    schedule s = {.threads = threads, .busy = busy};
    begin(&s);
    if (!p->banded && !p->key_start && !p->key_length && !runs && fmha_blocks_alike(&cut)) {
        const fmha_item first = fmha_item_of(&cut, 0);
        if (!blocks->fine) return (double)((items + threads - 1) / threads) * cost_of_block(p, &first, factor, 0);
        for (int t = 0; t < threads; t++)
            busy[t] = (double)(large / threads + (threads - t <= large % threads)) * cost_of_block(p, &first, 1, 0);
        n = large;
    }
    if (items - n > MOST_ITEMS) return INFINITY;
    for (; n < items; n++) {
        const fmha_item item = fmha_item_of(&cut, n);
        const double cost = cost_of_block(p, &item, n < large ? 1 : factor, blocks->runs);
        if (cost > 0) take(&s, busy[0] + cost);
    }
    return end(&s) + merging;
}

fmha_blocks fmha_forward_blocks(const fmha_problem *p, int threads, int runs)
{
    const fmha_cut cut = fmha_forward_cut(p);
    const ptrdiff_t whole = fmha_items(&cut);
    const ptrdiff_t parts = fmha_parts(p->Lk, FMHA_RUN_KEYS), left = whole * FMHA_BLOCK_ROWS * (p->Dv + 2);
    const int few = parts > 1 && whole < FMHA_MANY_BLOCKS * threads && left <= MOST_LEFT / parts;
    fmha_blocks best = {.rows = FMHA_BLOCK_ROWS, .heads_inside = p->banded && threads > FMHA_FEW_THREADS && whole < FMHA_EVEN_BLOCKS * (ptrdiff_t)threads};
    if (whole == 0 || !fmha_blocks_vary(p, threads)) return best;
    double *busy = malloc((size_t)threads * sizeof *busy), least = INFINITY;
    for (int way = 0; busy && way < (runs && few ? 2 : 1); way++)
        for (ptrdiff_t rows = FMHA_BLOCK_ROWS; rows >= FMHA_BLOCK_ROWS / 4; rows /= 2) {
            const ptrdiff_t items = way ? whole * parts : whole, over = items % threads, fine[] = {0, over, over + threads};
            for (int n = 0; n < (rows == FMHA_BLOCK_ROWS ? 1 : 3); n++) {
                if (fine[n] >= items || (n && fine[n] == 0)) continue;
                const fmha_blocks blocks = {rows, fine[n], way, best.heads_inside};
                const double time = of_blocks(p, &blocks, threads, busy);
                if (time < least) least = time, best = blocks;
            }
        }
    free(busy);
    return best;
}
