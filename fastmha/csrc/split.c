/* How the work of "tiled" is best cut for so many threads: each way is simulated, and the one that ends first taken.
 *
 * Backward, how heads are split. Times are in products of a whole block and a whole tile, of which a block and a tile that meet have 5:
 * scores, dP, dV, dK, and dQ last, which waits for that of the tile before. Items are handed out in order to whoever is free. What a
 * block has to do with a tile is judged by its middle row. */
#include "fastmha.h"

#include <math.h>
#include <stdlib.h>

#define PRODUCTS 5
#define MOST_MEETINGS (1 << 18)     /* of blocks and tiles of the heads that are split: with more of them all ways are near to even */
#define MOST_TOGETHER 8             /* tiles: the more threads take turns at one, the longer it holds them up */
#define CAUSAL_STAGGER 15           /* products that a tile waits for the one before it on a diagonal: three blocks */

typedef struct {
    double low, high, rows;         /* the keys of the middle row, in tiles, and the rows, in blocks */
} span_of_block;

typedef struct {
    const fmha_problem *p;
    ptrdiff_t tiles, blocks, first, last;       /* heads [first, last) are split */
    int threads;
    span_of_block *spans;           /* (batch rows, blocks), or of one batch row, which stands for all */
    ptrdiff_t step;                 /* from one batch row's to the next one's, 0 where one stands for all */
    double *busy;                   /* until when each thread is, a heap: the first is free first */
    double *turns_q, *turns_k;      /* (heads, blocks) and (heads, tiles together): when the sums are free */
} schedule;

static double meeting(const span_of_block *block, ptrdiff_t tile)
{
    const double low = block->low > (double)tile ? block->low : (double)tile;
    const double high = block->high < (double)(tile + 1) ? block->high : (double)(tile + 1);
    return high > low ? (high - low) * block->rows : 0;
}

/* What a head costs by one product. */
static double cost_of_head(const schedule *s, ptrdiff_t b)
{
    double cost = 0;
    for (ptrdiff_t n = 0; n < s->blocks; n++) {
        const span_of_block *block = s->spans + b * s->step + n;
        if (block->high > block->low) cost += (block->high - block->low) * block->rows;
    }
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

/* An item: blocks [first, last) of a head on a tile and, in a share, of its turn at the sums of that. */
static void share_item(schedule *s, ptrdiff_t head, ptrdiff_t first, ptrdiff_t last, ptrdiff_t tile, double *turn_k)
{
    const span_of_block *spans = s->spans + (s->first + head) / s->p->Hkv * s->step;
    double *turns_q = s->turns_q + head * s->blocks, now = s->busy[0];
    int many = 0;
    for (ptrdiff_t block = first; block < last; block++) {
        const double cost = meeting(spans + block, tile);
        if (cost == 0) continue;
        many++;
        now += (PRODUCTS - 1) * cost;
        now = (now > turns_q[block] ? now : turns_q[block]) + cost;
        turns_q[block] = now;
    }
    const double keys = (double)(s->p->Lk - tile * FMHA_TILE_KEYS) / FMHA_TILE_KEYS;
    if (many && turn_k) *turn_k = now = (now > *turn_k ? now : *turn_k) + (FMHA_SUMS_COST + FMHA_ADDED_COST * many) * (keys < 1 ? keys : 1);
    if (many) take(s, now);
}

/* In shares of so many blocks, on so many tiles together; 0: tiles are items. */
static double of_split_heads(schedule *s, ptrdiff_t share, ptrdiff_t together)
{
    const ptrdiff_t heads = s->last - s->first, step = share ? share : s->blocks;
    begin(s);
    for (ptrdiff_t e = 0; e < heads * s->blocks; e++) s->turns_q[e] = 0;
    for (ptrdiff_t from = 0; from < s->tiles; from += together) {
        const ptrdiff_t to = from + together < s->tiles ? from + together : s->tiles;
        for (ptrdiff_t e = 0; e < heads * together; e++) s->turns_k[e] = 0;
        for (ptrdiff_t at = 0; at < fmha_parts(s->blocks, step) + FMHA_SKEW * (to - from - 1); at++)
            for (ptrdiff_t tile = from, first = at * step; tile < to && first >= 0; tile++, first -= FMHA_SKEW * step)
                for (ptrdiff_t n = 0; n < heads && first < s->blocks; n++)
                    share_item(s, n, first, first + step < s->blocks ? first + step : s->blocks, tile, share ? s->turns_k + n * together + tile - from : NULL);
    }
    return end(s);
}

/* The same where that would take long: even work, the items that are the last ones, and what is waited for. */
static double of_many(const schedule *s, double work, ptrdiff_t share)
{
    const double even = PRODUCTS * work / s->threads, each = (double)s->threads / (double)(s->last - s->first);
    const double stagger = (each < (double)s->tiles ? each : (double)s->tiles) * (s->p->banded ? CAUSAL_STAGGER : 1);
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
            s->spans[b * s->step + n] = (span_of_block){(double)j0 / FMHA_TILE_KEYS, (double)j1 / FMHA_TILE_KEYS, (double)many / FMHA_BLOCK_ROWS};
        }
}

fmha_split fmha_backward_split(const fmha_problem *p, int threads)
{
    static const struct { ptrdiff_t share, together; } ways[] = {
        {0, 1}, {8, 1}, {4, 1}, {2, 1}, {1, 1}, {8, 4}, {4, 4}, {2, 4}, {1, 4}, {4, MOST_TOGETHER}, {2, MOST_TOGETHER}, {1, MOST_TOGETHER},
    };
    const ptrdiff_t heads = p->B * p->Hkv, left = heads % threads, blocks = fmha_parts(fmha_heads_cut(p).rows, FMHA_BLOCK_ROWS);
    fmha_split best = {FMHA_WHOLE, heads, 0, 0, 1};
    schedule s = {.p = p, .tiles = fmha_parts(p->Lk, FMHA_TILE_KEYS), .blocks = blocks, .first = heads - left, .last = heads, .threads = threads};
    s.step = p->banded || p->key_start || p->key_length ? blocks : 0;
    if (threads == 1 || heads == 0 || blocks == 0 || s.tiles == 0) return best;
    const size_t reals = (size_t)(threads + left * blocks + left * MOST_TOGETHER);
    s.spans = malloc((size_t)((s.step ? p->B : 1) * blocks) * sizeof *s.spans);
    s.busy = malloc(reals * sizeof *s.busy);
    if (s.spans && s.busy) {
        s.turns_q = s.busy + threads;
        s.turns_k = s.turns_q + left * blocks;
        set_spans(&s);
        double work = 0, work_left = 0, least = of_whole_heads(&s, heads);
        if (s.step == 0) work = PRODUCTS * cost_of_head(&s, 0) * (double)heads, work_left = cost_of_head(&s, 0) * (double)left;
        for (ptrdiff_t n = 0; s.step && n < heads; n++) {
            const double cost = cost_of_head(&s, n / p->Hkv);
            work += PRODUCTS * cost;
            if (n >= heads - left) work_left += cost;
        }
        const int many = left * blocks * s.tiles > MOST_MEETINGS;
        const double before = left ? of_whole_heads(&s, heads - left) : 0;
        for (size_t n = 0; left && n < sizeof ways / sizeof *ways; n++) {
            const ptrdiff_t share = ways[n].share, together = ways[n].together;
            if (share && (share >= blocks || p->parts > 0)) continue;           /* matrix tiles sum in another order */
            if (together > 1 && left * together > threads) continue;
            const double time = before + FMHA_SPLIT_COST + (many ? of_many(&s, work_left, share) : of_split_heads(&s, share, together));
            if (time >= least) continue;
            least = time;
            best = (fmha_split){share ? FMHA_SHARES : FMHA_TURNS, heads - left, share, together, 1};
        }
        if (least > 0) best.balance = work / threads / (least - (best.mode == FMHA_WHOLE ? 0 : FMHA_SPLIT_COST));
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
    const ptrdiff_t items = fmha_items(&cut), runs = blocks->runs ? fmha_parts(p->Lk, FMHA_RUN_KEYS) : 0;
    const ptrdiff_t large = blocks->fine ? items - blocks->fine * cut.pieces : 0;      /* items, before the others */
    const ptrdiff_t merged = runs ? (items / runs + threads - 1) / threads : 0;         /* blocks that the busiest thread merges */
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
    const ptrdiff_t whole = fmha_items(&cut), over = whole % threads;
    const ptrdiff_t parts = fmha_parts(p->Lk, FMHA_RUN_KEYS), left = whole * FMHA_BLOCK_ROWS * (p->Dv + 2);
    const int few = parts > 1 && whole < FMHA_MANY_BLOCKS * threads && left <= MOST_LEFT / parts;
    fmha_blocks best = {.rows = FMHA_BLOCK_ROWS, .heads_inside = p->banded && threads > FMHA_FEW_THREADS && whole < FMHA_EVEN_BLOCKS * (ptrdiff_t)threads};
    if (whole == 0 || !fmha_blocks_vary(p, threads)) return best;
    double *busy = malloc((size_t)threads * sizeof *busy), least = INFINITY;
    for (int way = 0; busy && way < (runs && few ? 2 : 1); way++)
        for (ptrdiff_t rows = FMHA_BLOCK_ROWS; rows >= FMHA_BLOCK_ROWS / 4; rows /= 2) {
            const ptrdiff_t fine[] = {0, over, over + threads};
            for (int n = 0; n < (way || rows == FMHA_BLOCK_ROWS ? 1 : 3); n++) {
                if (fine[n] >= whole || (n && fine[n] == 0)) continue;
                const fmha_blocks blocks = {rows, fine[n], way, best.heads_inside};
                const double time = of_blocks(p, &blocks, threads, busy);
                if (time < least) least = time, best = blocks;
            }
        }
    free(busy);
    return best;
}
