/* How the heads of a backward pass of "tiled" are best split for so many threads: each way is simulated, and the one that ends
 * first taken.
 *
 * Times are in products of a whole block and a whole tile, of which a block and a tile that meet have 5: scores, dP, dV, dK, and
 * dQ last, which waits for that of the keys before, or is made aside meanwhile and only its addition waits. Items are handed out
 * in order to whoever is free. What a block has to do with some keys is judged by its middle row. */
#include "fastmha.h"
#include "makespan.h"

#include <math.h>
#include <stdlib.h>

#define PRODUCTS 5
#define MOST_MEETINGS (1 << 18)     /* of blocks and tiles of the heads that are split: with more of them all ways are near to even */
#define MOST_TRIED 192              /* meetings for each thread, of parts of tiles, or where more heads are split than must be */
#define EVEN 0.98                   /* of the threads busy: no other way is looked for */
#define QUICK_MEETINGS 200          /* for each product of a thread, of a quick look: it takes about a tenth of the pass that way */
#define TOGETHERS 6                 /* parts of the keys together: 1, 2, 4 .. 32 */
#define SHARES 4                    /* blocks of a share: 1, 2, 4, FMHA_MOST_SHARE */
#define CAUSAL_STAGGER 15           /* products that a tile waits for the one before it on a diagonal: three blocks */

typedef struct {
    double low, high, rows;         /* the keys of the middle row, and the rows, in blocks */
} span_of_block;

typedef struct {
    const fmha_problem *p;
    ptrdiff_t blocks, first, last;  /* of a head; heads [first, last) are split */
    ptrdiff_t row;                  /* of the batch, that of the first of these */
    ptrdiff_t keys, parts;          /* of an item of these, and how many such parts a head has */
    int threads;
    span_of_block *spans;           /* (batch rows, blocks), or of one batch row, which stands for all */
    ptrdiff_t step;                 /* from one batch row's to the next one's, 0 where one stands for all */
    double *of_head;                /* what a head costs by one product: (batch rows), or one */
    double *costs;                  /* (batch rows of the heads that are split, or one; parts; blocks): of one of the products of both */
    double *busy;                   /* until when each thread is */
    double *turns_q, *turns_k;      /* (heads, blocks) and (heads, parts together): when the sums are free */
    double even, ahead, work;       /* no way takes less; what comes before the items of split heads, and what these cost by one product */
    double least, limit;            /* the time of the best way so far, and what items may take: longer ones are of no interest */
    double left;                    /* meetings that may still be simulated; below 0: some were left out */
    fmha_split best;
} schedule;

/* What a product costs of a block and some of the keys. */
static double meeting(const span_of_block *block, ptrdiff_t from, ptrdiff_t keys)
{
    const double low = block->low > (double)from ? block->low : (double)from;
    const double high = block->high < (double)(from + keys) ? block->high : (double)(from + keys);
    return high > low ? (high - low) * block->rows / FMHA_TILE_KEYS : 0;
}

/* What heads cost by one product. */
static double cost_of_heads(const schedule *s, ptrdiff_t first, ptrdiff_t last)
{
    double cost = 0;
    for (ptrdiff_t n = first, Hkv = s->p->Hkv, many; n < last; n += many) {
        many = s->step && Hkv - n % Hkv < last - n ? Hkv - n % Hkv : last - n;
        cost += (double)many * s->of_head[s->step ? n / Hkv : 0];
    }
    return cost;
}

static double of_whole_heads(schedule *s, ptrdiff_t heads)
{
    if (s->step == 0) return PRODUCTS * s->of_head[0] * (double)fmha_parts(heads, s->threads);
    fmha_begin(s->busy, s->threads);
    for (ptrdiff_t n = 0; n < heads; n++) fmha_take(s->busy, s->threads, s->busy[0] + PRODUCTS * s->of_head[n / s->p->Hkv]);
    return fmha_end(s->busy, s->threads);
}

/* What a pair costs in tiles, or parts of these, of so many keys. */
static double cost_of_parts(ptrdiff_t keys)
{
    return keys == FMHA_TILE_KEYS ? 1 : keys == FMHA_TILE_KEYS / 2 ? FMHA_HALF_TILE_COST : FMHA_FOURTH_TILE_COST;
}

/* Which of the batch rows that `costs` has is a split head's. */
static ptrdiff_t row_of_costs(const schedule *s, ptrdiff_t head)
{
    return s->step ? (s->first + head) / s->p->Hkv - s->row : 0;
}

static void set_costs(schedule *s)
{
    const double of_pair = cost_of_parts(s->keys);
    double *cost = s->costs;
    for (ptrdiff_t row = 0; row <= row_of_costs(s, s->last - s->first - 1); row++)
        for (ptrdiff_t part = 0; part < s->parts; part++)
            for (ptrdiff_t block = 0; block < s->blocks; block++)
                *cost++ = meeting(s->spans + (s->row + row) * s->step + block, part * s->keys, s->keys) * of_pair;
}

/* An item: blocks [first, last) of a head on a part of its keys and, in a share, of its turn at the sums of these. Returns when
 * it ends; who attends none of these takes no time. */
static double share_item(schedule *s, ptrdiff_t head, ptrdiff_t first, ptrdiff_t last, ptrdiff_t part, double *turn_k)
{
    const double *costs = s->costs + (row_of_costs(s, head) * s->parts + part) * s->blocks;
    const double left = (double)(s->p->Lk - part * s->keys), of_tile = (left < (double)s->keys ? left : (double)s->keys) / FMHA_TILE_KEYS;
    double *turns_q = s->turns_q + head * s->blocks, now = s->busy[0];
    int kept = 0, ours = !turn_k;
    for (ptrdiff_t block = first; block < last; block++) {
        const double cost = costs[block];
        if (cost == 0) continue;
        if (!ours && now >= *turn_k) now += FMHA_ADDED_COST * kept * of_tile, ours = 1;
        kept += !ours;
        now += (PRODUCTS - 1) * cost;
        if (now < turns_q[block] && s->p->parts == 0)       /* made aside; on matrix tiles it is not */
            now = (now + cost > turns_q[block] ? now + cost : turns_q[block]) + FMHA_LATER_COST * of_tile;
        else
            now = (now > turns_q[block] ? now : turns_q[block]) + cost;
        turns_q[block] = now;
    }
    if (now == s->busy[0]) return now;
    if (!ours) now = (now > *turn_k ? now : *turn_k) + FMHA_ADDED_COST * kept * of_tile;
    if (turn_k) *turn_k = now += FMHA_SUMS_COST * of_tile;
    fmha_take(s->busy, s->threads, now);
    return now;
}

/* In shares of so many blocks, on so many parts together; 0: all blocks of a part are an item. INFINITY where that is beyond the
 * limit. */
static double of_split_heads(schedule *s, ptrdiff_t share, ptrdiff_t together)
{
    const ptrdiff_t heads = s->last - s->first, step = share ? share : s->blocks;
    fmha_begin(s->busy, s->threads);
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
    return fmha_end(s->busy, s->threads);
}

/* The same where that would take long: even work, the items that are the last ones, and what is waited for. */
static double of_many(const schedule *s, double work, ptrdiff_t share)
{
    const double even = PRODUCTS * work / s->threads, each = (double)s->threads / (double)(s->last - s->first);
    const double stagger = (each < (double)s->parts ? each : (double)s->parts) * (s->p->banded ? CAUSAL_STAGGER : 1);
    if (share) return even * (1 + (FMHA_ADDED_COST + FMHA_SUMS_COST / (double)share) / PRODUCTS) + (double)(PRODUCTS * share);
    return even + (double)(PRODUCTS * s->blocks) / 2 + stagger;
}

/* Whether no batch row attends other keys than the first does. */
static int rows_alike(const fmha_problem *p)
{
    for (ptrdiff_t b = 1; b < p->B; b++)
        if ((p->banded && p->offset[b] != p->offset[0]) || (p->key_start && p->key_start[b] != p->key_start[0]) ||
            (p->key_length && p->key_length[b] != p->key_length[0])) return 0;
    return 1;
}

static void set_spans(schedule *s)
{
    const fmha_problem *p = s->p;
    const ptrdiff_t rows = fmha_heads_cut(p).rows;
    for (ptrdiff_t b = 0; b < (s->step ? p->B : 1); b++) {
        s->of_head[b] = 0;
        for (ptrdiff_t n = 0; n < s->blocks; n++) {
            const ptrdiff_t i0 = n * FMHA_BLOCK_ROWS, many = rows - i0 < FMHA_BLOCK_ROWS ? rows - i0 : FMHA_BLOCK_ROWS;
            span_of_block *span = s->spans + b * s->step + n;
            ptrdiff_t j0, j1;
            fmha_row_keys(p, b, (i0 + many / 2) % p->Lq, &j0, &j1);
            *span = (span_of_block){(double)j0, (double)j1, (double)many / FMHA_BLOCK_ROWS};
            s->of_head[b] += meeting(span, 0, p->Lk);
        }
    }
}

/* Whether heads in shares of so many blocks, 0: of all, on so many parts together, end before the best way so far; this is the
 * best then. */
static int try_way(schedule *s, ptrdiff_t share, ptrdiff_t together)
{
    const double even = PRODUCTS * s->work * cost_of_parts(s->keys) / s->threads;
    s->limit = s->least - s->ahead;
    if (even * (share ? 1 + FMHA_SUMS_COST / (double)(PRODUCTS * share) : 1) >= s->limit) return 0;
    const int simulated = s->costs && (s->left -= (double)((s->last - s->first) * s->parts * s->blocks)) >= 0;
    const double time = s->ahead + (simulated ? of_split_heads(s, share, together) : of_many(s, s->work, share));
    if (time >= s->least) return 0;
    s->least = time;
    s->best = (fmha_split){share ? FMHA_SHARES : FMHA_TURNS, s->first, s->keys, share, together, 1};
    return 1;
}

/* The same of shares of 2 to the power of `share` blocks, and likewise of parts together, where there are such and they were not
 * tried. */
static int try_shares(schedule *s, int tried[TOGETHERS][SHARES], int together, int share)
{
    if (together < 0 || together >= TOGETHERS || share < 0 || share >= SHARES || tried[together][share]) return 0;
    if ((1 << share) >= s->blocks || (1 << together) >= 2 * s->parts || EVEN * s->least <= s->even) return 0;
    tried[together][share] = 1;
    return try_way(s, (ptrdiff_t)1 << share, (ptrdiff_t)1 << together);
}

/* Looks for a better way with the last heads split into items of so many keys. Where at least as many shares are under way as
 * there are threads, a share finds that its turn has come, and keeps nothing; where they are fewer, threads wait less for the
 * sums of a block. So the first way has twice as many, and from each that is better its neighbours are tried. */
static void try_ways(schedule *s, ptrdiff_t split, ptrdiff_t keys)
{
    static const int steps[][2] = {{0, -1}, {1, 0}, {-1, 0}, {0, 1}};
    int tried[TOGETHERS][SHARES] = {{0}}, together = 0, share = s->blocks > 2;
    s->first = s->last - split;
    s->row = s->first / s->p->Hkv;
    s->keys = keys;
    s->parts = fmha_parts(s->p->Lk, keys);
    s->work = cost_of_heads(s, s->first, s->last);
    s->ahead = (s->first ? of_whole_heads(s, s->first) : 0) + FMHA_SPLIT_COST;
    const int many = split * s->blocks * s->parts > MOST_MEETINGS;
    s->costs = many ? NULL : malloc((size_t)((row_of_costs(s, split - 1) + 1) * s->parts * s->blocks) * sizeof *s->costs);
    if (s->costs) set_costs(s);
    try_way(s, 0, 1);
    while (together < TOGETHERS - 1 && (1 << together) < s->parts && (split << together) < 2 * s->threads) together++;
    if (s->p->parts == 0) try_shares(s, tried, together, share);        /* matrix tiles sum in another order */
    for (int n = 0; s->p->parts == 0 && n < 4; n++)
        if (try_shares(s, tried, together + steps[n][0], share + steps[n][1]))
            together += steps[n][0], share += steps[n][1], n = -1;
    free(s->costs);
}

fmha_split fmha_backward_split(const fmha_problem *p, int threads, int *quick)
{
    const int in_short = *quick;
    const ptrdiff_t heads = p->B * p->Hkv, left = heads % threads, blocks = fmha_parts(fmha_heads_cut(p).rows, FMHA_BLOCK_ROWS);
    const ptrdiff_t most = left + threads < heads ? left + threads : heads, finest = p->parts > 0 ? FMHA_TILE_KEYS : FMHA_SUM_KEYS;
    schedule s = {.p = p, .blocks = blocks, .last = heads, .threads = threads, .best = {FMHA_WHOLE, heads, FMHA_TILE_KEYS, 0, 0, 1}};
    s.step = rows_alike(p) ? 0 : blocks;
    *quick = 0;
    if (threads == 1 || heads == 0 || blocks == 0 || p->Lk == 0) return s.best;
    s.spans = malloc((size_t)((s.step ? p->B : 1) * blocks) * sizeof *s.spans);
    s.busy = malloc((size_t)(threads + 1 + p->B + most * (blocks + (1 << (TOGETHERS - 1)))) * sizeof *s.busy);
    if (s.spans && s.busy) {
        s.of_head = s.busy + threads + 1;
        s.turns_q = s.of_head + p->B;
        s.turns_k = s.turns_q + most * blocks;
        set_spans(&s);
        s.even = PRODUCTS * cost_of_heads(&s, 0, heads) / threads;
        s.least = of_whole_heads(&s, heads);
        s.left = in_short ? QUICK_MEETINGS * s.even : INFINITY;
        for (ptrdiff_t split = left ? left : most; split <= most; split += threads)
            for (ptrdiff_t keys = FMHA_TILE_KEYS; keys >= finest && EVEN * s.least > s.even; keys /= 2) {
                const int must = split == left && keys == FMHA_TILE_KEYS;
                const int few = split * blocks * fmha_parts(p->Lk, keys) <= MOST_TRIED * (ptrdiff_t)threads;
                if (must || (few && keys < 2 * p->Lk)) try_ways(&s, split, keys);
            }
        *quick = s.left < 0;
        if (s.least > 0) s.best.balance = s.even / (s.least - (s.best.mode == FMHA_WHOLE ? 0 : FMHA_SPLIT_COST));
    } else {
        *quick = 1;             /* there was no memory to look at any */
    }
    free(s.spans);
    free(s.busy);
    return s.best;
}
