/* How the blocks of a forward pass of "tiled" are best cut for so many threads: each way is simulated, and the one that ends
 * first taken.
 *
 * Times are in pairs of a query and a key. The longest items come first: blocks with all their keys, then blocks in runs of
 * their keys, at last some in fewer rows or in parts of their runs, by which the threads come to an end together. What is cut
 * costs more, so no more is than must be. What an item has to do is judged by a few of its rows. */
#include "fastmha.h"
#include "makespan.h"

#include <stdlib.h>
#include <string.h>

#define EVEN 0.98               /* of the threads busy: no other way is looked for */
#define LATER 1.04              /* times as late as even work: what ends later is cut */
#define LOOKED_AT 8             /* rows of a block, which may be those of several heads */
#define LEAST_ROWS (FMHA_BLOCK_ROWS / FMHA_RUN_TURNS)
#define MOST_ITEMS (1 << 15)    /* of blocks that are cut */
#define MOST_LEFT (1 << 25)     /* numbers that runs may leave */
#define QUICK_ITEMS 40          /* for each two products of a tile, of a quick look: it takes about a tenth of the pass that way */
#define MOST_PARTS 24           /* of runs of keys for each thread: more cost more and even out nothing */
#define SIZES 64                /* by which items are sorted */

typedef struct {
    fmha_item item;
    double cost;
    ptrdiff_t chain;            /* of parts of keys, each of which waits for the one before it in its chain; else -1 */
} priced_item;

typedef struct {
    priced_item *items;
    ptrdiff_t many;
} priced_items;

typedef struct {
    const fmha_problem *p;
    fmha_cut cut;               /* into whole blocks */
    ptrdiff_t blocks;
    int threads, alike, parts;  /* alike: all whole blocks cost the same; parts: keys may be cut into such, smaller than runs */
    double *busy, *ahead;       /* until when each thread is, and is with the first blocks of a way, whole */
    ptrdiff_t known;            /* how many blocks these are */
    ptrdiff_t room;             /* items that the lists have memory for: */
    priced_items fresh;         /* as they come */
    priced_items cut_blocks;    /* of the blocks behind the first ones, in runs or not, of all rows, the longest first */
    priced_items pieces;        /* of the last of these, of fewer rows or of parts of their keys as well */
    double *ready;              /* of each chain of such parts, when its last one so far ends */
    double merging;             /* what remains to be merged behind all items costs, and in how many items that is done */
    ptrdiff_t merges;
    double least, even;         /* the time of the best way so far; no way takes less */
    double left;                /* items that may still be looked at */
    int left_out;               /* whether a way of more was left out */
    fmha_blocks best;
} schedule;

static double cost_of_run(void) { return FMHA_RUN_COST * FMHA_RUN_KEYS; }

/* What a pair costs in so many rows of a block of so many. */
static double cost_of_pair(ptrdiff_t rows, ptrdiff_t of_block)
{
    return rows == of_block ? 1 : rows > LEAST_ROWS ? FMHA_HALF_COST : FMHA_QUARTER_COST;
}

/* The pairs of an item, of which some rows have the mean. */
static double pairs_of(const fmha_problem *p, const fmha_item *item)
{
    double keys = 0;
    const ptrdiff_t some = p->banded ? fmha_parts(item->rows * LOOKED_AT, FMHA_BLOCK_ROWS) : 1;
    for (ptrdiff_t n = 0; n < some; n++) {
        ptrdiff_t low, high;
        fmha_row_keys(p, item->b, (item->i0 + item->rows * (2 * n + 1) / (2 * some)) % p->Lq, &low, &high);
        if (low < item->j0) low = item->j0;
        if (high > item->j0 + item->cols) high = item->j0 + item->cols;
        if (high > low) keys += (double)(high - low);
    }
    return (double)item->rows * keys / (double)some;
}

/* The runs [*first, *end) of keys that a block may attend. */
static void runs_of(const fmha_problem *p, const fmha_item *block, ptrdiff_t *first, ptrdiff_t *end)
{
    /* of several heads: as if of all rows */
    const ptrdiff_t row = block->i0 % p->Lq, rows = row + block->rows > p->Lq ? p->Lq : block->rows;
    ptrdiff_t j0, j1;
    fmha_block_keys(p, block->b, rows == p->Lq ? 0 : row, rows, &j0, &j1);
    *first = j0 / FMHA_RUN_KEYS;
    *end = fmha_parts(j1, FMHA_RUN_KEYS);
}

/* One more item of the fresh ones. Returns 0 where there is no memory for it. */
static int add_item(schedule *s, const fmha_item *item, double cost, ptrdiff_t chain)
{
    if (s->fresh.many == s->room) return 0;
    s->fresh.items[s->fresh.many++] = (priced_item){*item, cost, chain};
    return 1;
}

/* The same items again as the last ones, so many, but of another head, and so many chains behind those. */
static int add_like(schedule *s, ptrdiff_t many, ptrdiff_t h, ptrdiff_t chains)
{
    for (ptrdiff_t n = 0; n < many; n++) {
        priced_item like = s->fresh.items[s->fresh.many - many];
        like.item.h = h;
        if (!add_item(s, &like.item, like.cost, like.chain < 0 ? -1 : like.chain + chains)) return 0;
    }
    return 1;
}

/* The fresh items, the longest first, as far as SIZES are told apart, and else as they came; none is fresh then. */
static void sort_items(schedule *s, priced_items *to)
{
    ptrdiff_t places[SIZES + 1] = {0};
    double most = 0;
    const priced_item *from = s->fresh.items;
    for (ptrdiff_t n = 0; n < s->fresh.many; n++) most = from[n].cost > most ? from[n].cost : most;
    const double size = most > 0 ? (SIZES - 1) / most : 0;
    for (ptrdiff_t n = 0; n < s->fresh.many; n++) places[SIZES - (int)(from[n].cost * size)]++;
    for (int n = 0; n < SIZES; n++) places[n + 1] += places[n];
    for (ptrdiff_t n = 0; n < s->fresh.many; n++) to->items[places[SIZES - 1 - (int)(from[n].cost * size)]++] = from[n];
    to->many = s->fresh.many;
    s->fresh.many = 0;
}

/* So many runs of a block are to be merged. */
static void left_behind(const fmha_item *block, ptrdiff_t runs, double *merging, ptrdiff_t *merges)
{
    *merging += cost_of_run() * (double)(runs * block->rows);
    *merges += runs ? fmha_parts(block->rows, LEAST_ROWS) : 0;
}

/* Blocks from the `first` on become items, each with all its keys or, where it attends several runs and `runs` says so, with a
 * run each, and with the first in any case, with which merging begins. Returns 0 where there is no memory for them. */
static int cut_keys(schedule *s, ptrdiff_t first, int runs)
{
    const fmha_problem *p = s->p;
    fmha_item before = {.b = -1};
    ptrdiff_t many = 0, left = 0;       /* left: runs of a block, to be merged */
    s->fresh.many = s->merges = 0;
    s->merging = 0;
    for (ptrdiff_t n = first; n < s->blocks; n++) {
        const fmha_item block = fmha_item_of(&s->cut, n);
        if (block.b == before.b && block.i0 == before.i0) {
            if (!add_like(s, many, block.h, 0)) return 0;
            left_behind(&block, left, &s->merging, &s->merges);
            continue;
        }
        ptrdiff_t low = 0, end = 1, from = s->fresh.many;
        if (runs) runs_of(p, &block, &low, &end);
        before = block;
        left = 0;
        if (end - low <= 1) {
            if (!add_item(s, &block, pairs_of(p, &block), -1)) return 0;
        } else {
            for (ptrdiff_t run = low > 0 ? low - 1 : 0; run < end; run++) {
                fmha_item item = block;
                item.j0 = run < low ? 0 : run * FMHA_RUN_KEYS;
                item.cols = p->Lk - item.j0 < FMHA_RUN_KEYS ? p->Lk - item.j0 : FMHA_RUN_KEYS;
                if (!add_item(s, &item, pairs_of(p, &item) + (double)item.rows * cost_of_run(), -1)) return 0;
                left++;
            }
        }
        left_behind(&block, left, &s->merging, &s->merges);
        many = s->fresh.many - from;
    }
    sort_items(s, &s->cut_blocks);
    return 1;
}

/* An item's keys, or those of its first run. */
static ptrdiff_t keys_of_run(const fmha_item *item) { return item->cols < FMHA_RUN_KEYS ? item->cols : FMHA_RUN_KEYS; }

/* Whether the keys of an item may be cut into parts, each of which goes on from what the one before has left: it has one run of
 * keys, the one that it begins with, and several parts of it. */
static int has_parts(const schedule *s, const fmha_item *item, ptrdiff_t keys)
{
    ptrdiff_t first = 0, end = 1;
    if (item->cols == s->p->Lk && s->p->Lk > FMHA_RUN_KEYS) runs_of(s->p, item, &first, &end);
    return first == 0 && end <= 1 && item->cols > keys;
}

/* The pieces of so many rows of an item, number n of those that are cut: of all its keys or, where `keys` is not 0, of so many
 * from `from` keys behind the first on. Returns 0 where there is no memory for them. */
static int add_pieces(schedule *s, const fmha_item *whole, ptrdiff_t n, ptrdiff_t rows, ptrdiff_t from, ptrdiff_t keys)
{
    for (ptrdiff_t row = 0; row < whole->rows; row += rows) {
        fmha_item item = *whole;
        item.i0 += row;
        item.rows = whole->rows - row < rows ? whole->rows - row : rows;
        if (keys) item.j0 += from, item.cols = keys_of_run(whole) - from < keys ? keys_of_run(whole) - from : keys;
        const double left = item.cols < s->p->Lk ? (double)item.rows * cost_of_run() : 0;
        const double cost = pairs_of(s->p, &item) * cost_of_pair(item.rows, whole->rows) + left;
        if (!add_item(s, &item, cost, keys ? (n * FMHA_BLOCK_ROWS + row) / rows : -1)) return 0;
    }
    return 1;
}

/* So many of these items, the last ones, become pieces of so many rows and, unless `keys` is 0, where they may, of parts of so
 * many keys: those that most others of their run wait for first, so that the last parts of all come last. Returns 0 where there
 * is no memory for them. */
static int cut_finely(schedule *s, ptrdiff_t fine, ptrdiff_t rows, ptrdiff_t keys)
{
    const priced_item *last = s->cut_blocks.items + s->cut_blocks.many - fine;
    const ptrdiff_t most = keys ? fmha_parts(FMHA_RUN_KEYS, keys) : 1;
    s->fresh.many = 0;
    for (ptrdiff_t left = most; left > 0; left--) {
        fmha_item before = {.b = -1};
        ptrdiff_t many = 0;
        for (ptrdiff_t n = 0; n < fine; n++) {
            const fmha_item whole = last[n].item;
            if (whole.b == before.b && whole.i0 == before.i0 && whole.j0 == before.j0) {
                if (!add_like(s, many, whole.h, FMHA_BLOCK_ROWS / rows)) return 0;
                continue;
            }
            const ptrdiff_t already = s->fresh.many;
            const ptrdiff_t parts = keys && has_parts(s, &whole, keys) ? fmha_parts(keys_of_run(&whole), keys) : 0;
            before = whole;
            if (parts == 0 && left == most && !add_pieces(s, &whole, n, rows, 0, 0)) return 0;
            if (parts >= left && !add_pieces(s, &whole, n, rows, (parts - left) * keys, keys)) return 0;
            many = s->fresh.many - already;
        }
    }
    if (keys == 0) {
        sort_items(s, &s->pieces);
        return 1;
    }
    memcpy(s->pieces.items, s->fresh.items, (size_t)s->fresh.many * sizeof *s->fresh.items);
    s->pieces.many = s->fresh.many;
    s->fresh.many = 0;
    return 1;
}

/* Hands out the first blocks, whole, to `ahead`. Where a limit is given, up to the first that would end beyond it; returns how
 * many. */
static ptrdiff_t hand_out(schedule *s, ptrdiff_t blocks, double limit)
{
    const fmha_item first = fmha_item_of(&s->cut, 0);
    double cost = pairs_of(s->p, &first);
    ptrdiff_t n = 0, threads = s->threads;
    fmha_begin(s->ahead, s->threads);
    if (s->alike) {
        const ptrdiff_t each = limit / cost < (double)blocks ? (ptrdiff_t)(limit / cost) : blocks;
        n = blocks < each * threads ? blocks : each * threads;
        for (ptrdiff_t t = 0; t < threads; t++) s->ahead[t] = (double)(n / threads + (threads - t <= n % threads)) * cost;
    }
    for (fmha_item before = first; n < blocks && !s->alike; n++) {
        const fmha_item block = fmha_item_of(&s->cut, n);
        if (block.b != before.b || block.i0 != before.i0) cost = pairs_of(s->p, &block);
        before = block;
        if (s->ahead[0] + cost > limit) break;
        if (cost > 0) fmha_take(s->ahead, s->threads, s->ahead[0] + cost);
    }
    s->known = n;
    return n;
}

/* Hands out items to `busy`, which wait for those before them in their chain. Returns whether all end before the limit. */
static int hand_out_items(schedule *s, const priced_item *items, ptrdiff_t many, double limit)
{
    for (ptrdiff_t n = 0; n < many; n++) {
        double *ready = items[n].chain < 0 ? NULL : s->ready + items[n].chain;
        const double from = ready && *ready > s->busy[0] ? *ready : s->busy[0], until = from + items[n].cost;
        if (until >= limit) return 0;
        fmha_take(s->busy, s->threads, until);
        if (ready) *ready = until;
    }
    return 1;
}

static double work_of(const priced_item *items, ptrdiff_t many)
{
    double work = 0;
    for (ptrdiff_t n = 0; n < many; n++) work += items[n].cost;
    return work;
}

/* Whether the items at hand, the last of which become pieces of fewer rows and keys, behind so many whole blocks, end before the
 * best way so far; these are the best then. */
static void try_way(schedule *s, ptrdiff_t whole, int runs, ptrdiff_t rows, ptrdiff_t fine, ptrdiff_t keys)
{
    if (EVEN * s->least <= s->even) return;
    const ptrdiff_t others = s->cut_blocks.many - fine, chains = fine * (FMHA_BLOCK_ROWS / rows);
    const ptrdiff_t parts = chains * (keys ? fmha_parts(s->p->Lk < FMHA_RUN_KEYS ? s->p->Lk : FMHA_RUN_KEYS, keys) : 1);
    const double items = (double)(others + parts);
    if (keys && parts > MOST_PARTS * (ptrdiff_t)s->threads) return;
    ptrdiff_t merges = s->merges;
    double merging = s->merging;
    for (ptrdiff_t n = others; keys && n < s->cut_blocks.many; n++) {      /* of items that had all their keys */
        const fmha_item *item = &s->cut_blocks.items[n].item;
        if (item->cols == s->p->Lk && has_parts(s, item, keys)) left_behind(item, 1, &merging, &merges);
    }
    merging *= merges ? (double)fmha_parts(merges, s->threads) / (double)merges : 0;
    const double limit = s->least - merging;
    if (items > s->left) {
        s->left_out = 1;
        return;
    }
    s->left -= items;
    s->pieces.many = 0;
    if (fine && !cut_finely(s, fine, rows, keys)) return;
    double work = work_of(s->cut_blocks.items, others) + work_of(s->pieces.items, s->pieces.many);
    for (int n = 0; n < s->threads; n++) work += s->ahead[n];
    if (work >= limit * s->threads) return;
    memcpy(s->busy, s->ahead, (size_t)(s->threads + 1) * sizeof *s->busy);
    for (ptrdiff_t n = 0; keys && n < chains; n++) s->ready[n] = 0;
    if (!hand_out_items(s, s->cut_blocks.items, others, limit) || !hand_out_items(s, s->pieces.items, s->pieces.many, limit)) return;
    s->least = fmha_end(s->busy, s->threads) + merging;
    s->best.whole = whole;
    s->best.runs = runs;
    s->best.rows = rows;
    s->best.fine = fine;
    s->best.keys = keys;
}

/* How many of the items at hand, the last ones, come behind the first that would end later than all do where the work is even,
 * or so many times as late. */
static ptrdiff_t beyond(schedule *s, double times)
{
    double work = work_of(s->cut_blocks.items, s->cut_blocks.many);
    ptrdiff_t n = 0;
    for (int t = 0; t < s->threads; t++) work += s->ahead[t];
    memcpy(s->busy, s->ahead, (size_t)(s->threads + 1) * sizeof *s->busy);
    for (; n < s->cut_blocks.many; n++) {
        const double until = s->busy[0] + s->cut_blocks.items[n].cost;
        if (until > times * work / s->threads) break;
        fmha_take(s->busy, s->threads, until);
    }
    return s->cut_blocks.many - n;
}

/* All ways with so many whole blocks. */
static void try_ways(schedule *s, ptrdiff_t whole, int runs)
{
    const ptrdiff_t rest = s->blocks - whole, threads = s->threads;
    if (rest == 0) return;
    for (int in_runs = 0; in_runs <= runs; in_runs++) {
        if (EVEN * s->least <= s->even) return;
        if (in_runs && rest * FMHA_BLOCK_ROWS * (s->p->Dv + 2) > MOST_LEFT / fmha_parts(s->p->Lk, FMHA_RUN_KEYS)) return;
        if ((double)rest * (in_runs ? (double)fmha_parts(s->p->Lk, FMHA_RUN_KEYS) : 1) > s->left) {
            s->left_out = 1;
            return;
        }
        if (s->known != whole) hand_out(s, whole, INFINITY);
        if (!cut_keys(s, whole, in_runs)) return;
        const ptrdiff_t many = s->cut_blocks.many, over = many % threads;
        const ptrdiff_t fine[] = {many, beyond(s, 1), beyond(s, LATER), over, over + threads / 2, over + threads, threads / 4, threads / 2,
                                  threads, 2 * threads, many / 4, many / 2, many - many / 4};
        const int in_parts = s->parts && (in_runs || (s->p->Lk <= FMHA_RUN_KEYS && rest * FMHA_BLOCK_ROWS * (s->p->Dv + 2) <= MOST_LEFT));
        if (in_runs) try_way(s, whole, 1, FMHA_BLOCK_ROWS, 0, 0);
        for (int kind = 0; kind < (in_parts ? 4 : 2); kind++) {
            static const ptrdiff_t rows[] = {FMHA_BLOCK_ROWS / 2, LEAST_ROWS, FMHA_BLOCK_ROWS, LEAST_ROWS},
                                   keys[] = {0, 0, FMHA_TILE_KEYS, FMHA_TILE_KEYS};
            for (int n = 0; n < (in_runs || keys[kind] ? (int)(sizeof fine / sizeof *fine) : 1); n++)
                if (fine[n] > 0 && fine[n] <= many && (n == 0 || fine[n] < many))
                    try_way(s, whole, in_runs, rows[kind], fine[n], keys[kind]);
        }
    }
}

static int begin_schedule(schedule *s, const fmha_problem *p, int threads, int heads_inside, ptrdiff_t room)
{
    *s = (schedule){.p = p, .cut = fmha_forward_cut(p), .threads = threads, .known = -1, .room = room, .least = INFINITY, .left = INFINITY};
    s->cut.heads_inside = heads_inside;
    s->blocks = fmha_items(&s->cut);
    s->alike = !p->banded && !p->key_start && !p->key_length && fmha_blocks_alike(&s->cut);
    s->busy = malloc((size_t)(2 * (threads + 1)) * sizeof *s->busy);
    s->fresh.items = malloc((size_t)(3 * room) * sizeof *s->fresh.items);
    s->ready = malloc((size_t)(FMHA_BLOCK_ROWS / LEAST_ROWS * room) * sizeof *s->ready);
    if (!s->busy || !s->fresh.items || !s->ready) return 0;
    s->ahead = s->busy + threads + 1;
    s->cut_blocks.items = s->fresh.items + room;
    s->pieces.items = s->fresh.items + 2 * room;
    return 1;
}

static void end_schedule(schedule *s)
{
    free(s->busy);
    free(s->fresh.items);
    free(s->ready);
}

fmha_blocks fmha_forward_blocks(const fmha_problem *p, int threads, int runs, int *quick)
{
    const int in_short = *quick;
    const fmha_cut cut = fmha_forward_cut(p);
    const ptrdiff_t whole = fmha_items(&cut);
    const int heads_inside = p->banded && threads > FMHA_FEW_THREADS && whole < FMHA_EVEN_BLOCKS * (ptrdiff_t)threads;
    const fmha_blocks uncut = {.whole = whole, .rows = FMHA_BLOCK_ROWS, .heads_inside = heads_inside};
    schedule s;
    *quick = 0;
    if (whole == 0 || !fmha_blocks_vary(p, threads)) return uncut;
    if (begin_schedule(&s, p, threads, heads_inside, MOST_ITEMS)) {
        hand_out(&s, whole, INFINITY);
        s.best = uncut;
        s.least = fmha_end(s.ahead, threads);
        for (int n = 0; n < threads; n++) s.even += s.ahead[n] / threads;
        if (in_short) s.left = QUICK_ITEMS * s.even / (FMHA_BLOCK_ROWS * FMHA_TILE_KEYS);
        if (s.even > 0) {
            const ptrdiff_t most = hand_out(&s, whole, s.even * (2 - EVEN)), fewer[] = {0, threads / 4, threads / 2, threads, 2 * threads};
            s.parts = runs && p->Lk > FMHA_TILE_KEYS;
            runs = runs && p->Lk > FMHA_RUN_KEYS;
            for (int n = 0; n < 5 && fewer[n] < most; n++) try_ways(&s, most - fewer[n], runs);
            try_ways(&s, 0, runs);
        }
        *quick = s.left_out;
    } else {
        *quick = 1;             /* there was no memory to look at any */
        s.best = uncut;
    }
    end_schedule(&s);
    return s.best;
}

int fmha_list_blocks(const fmha_problem *p, fmha_blocks *blocks)
{
    const fmha_cut cut = fmha_forward_cut(p);
    const ptrdiff_t rest = fmha_items(&cut) - blocks->whole, runs = blocks->runs ? fmha_parts(p->Lk, FMHA_RUN_KEYS) : 1;
    const ptrdiff_t pieces = FMHA_BLOCK_ROWS / LEAST_ROWS, parts = blocks->keys ? fmha_parts(FMHA_RUN_KEYS, blocks->keys) : 1;
    schedule s;
    blocks->items = blocks->merges = NULL;
    blocks->listed = blocks->merged = 0;
    if (rest <= 0) return 1;
    int made = begin_schedule(&s, p, 1, blocks->heads_inside, rest * runs * pieces * parts) && cut_keys(&s, blocks->whole, blocks->runs);
    const ptrdiff_t many = s.cut_blocks.many, fine = blocks->fine < many ? blocks->fine : many;
    made = made && cut_finely(&s, fine, blocks->rows, blocks->keys);
    blocks->items = malloc((size_t)(blocks->whole + many - fine + s.pieces.many + rest * pieces) * sizeof *blocks->items);
    if (!blocks->items) made = 0;
    if (made) {
        fmha_item *to = blocks->items;
        for (ptrdiff_t n = 0; n < blocks->whole; n++) *to++ = fmha_item_of(&s.cut, n);
        for (ptrdiff_t n = 0; n < many - fine; n++) *to++ = s.cut_blocks.items[n].item;
        for (ptrdiff_t n = 0; n < s.pieces.many; n++) *to++ = s.pieces.items[n].item;
        blocks->listed = to - blocks->items;
        blocks->merges = to;
        for (const fmha_item *item = blocks->items; item < blocks->merges; item++) {      /* every item of the first run, by fewer rows */
            fmha_item rows = *item;
            rows.cols = p->Lk;
            for (ptrdiff_t row = 0; item->cols < p->Lk && item->j0 == 0 && row < item->rows; row += LEAST_ROWS) {
                rows.i0 = item->i0 + row;
                rows.rows = item->rows - row < LEAST_ROWS ? item->rows - row : LEAST_ROWS;
                *to++ = rows;
            }
        }
        blocks->merged = to - blocks->merges;
    } else {
        fmha_free_blocks(blocks);
    }
    end_schedule(&s);
    return made;
}

void fmha_free_blocks(fmha_blocks *blocks)
{
    free(blocks->items);
    blocks->items = blocks->merges = NULL;
}
