/* Keys and values of a head, gathered: where products cannot take them as they lie, being of another element type or no whole
 * vectors wide, or read them slowly, their rows being so far apart that they crowd the caches. What a thread gathers for a block
 * of rows is there for the blocks of the same head that it takes next. */

/* In a thread's scratch; gathered are the tiles that are done, of keys [0] and values [1], all of which have room in `rows`
 * (keys, width in whole vectors), or NULL: they are taken as they lie. */
typedef struct FMHA_NAME(gathered) {
    const char **head;          /* where the keys and the values of the head at hand begin, NULL before the first one */
    char *done[2];
    REAL *rows[2];
} FMHA_NAME(gathered);

/* Whether keys, or values, of heads of several blocks are. */
static int FMHA_NAME(is_gathered)(const fmha_problem *p, int values)
{
    const ptrdiff_t width = values ? p->Dv : p->D, stride = values ? p->v.stride[2] : p->k.stride[2];
    if (width == 0) return 0;
    if (p->stored != FMHA_SAME) return 1;
    if (values) return width % LANES != 0 || FMHA_NAME(better_copied)(p, p->v.data, stride, BLOCK_ROWS);
    return CROWDED_KEYS && FMHA_NAME(crowded)(stride, width, BLOCK_ROWS);
}

/* How far apart they are then. */
static inline ptrdiff_t FMHA_NAME(gathered_width)(const fmha_problem *p, int values)
{
    return values ? FMHA_NAME(copied_width)(p) : ROUND_UP(p->D, LANES);
}

/* For so many threads: where each probably takes no second block of a head, nothing is gathered. Returns the size in REALs;
 * without memory that is all. */
static ptrdiff_t FMHA_NAME(gathered_layout)(const fmha_problem *p, ptrdiff_t threads, REAL *memory, FMHA_NAME(gathered) *to)
{
    ptrdiff_t used = 0;
    *to = (FMHA_NAME(gathered)){NULL};
    if (fmha_parts(fmha_heads_cut(p).rows, BLOCK_ROWS) < GATHERED_BLOCKS * threads) return 0;       /* every short head, without a look */
    const ptrdiff_t of_keys = FMHA_NAME(is_gathered)(p, 0) * p->Lk * FMHA_NAME(gathered_width)(p, 0), tiles = fmha_parts(p->Lk, TILE_KEYS);
    const ptrdiff_t of_values = FMHA_NAME(is_gathered)(p, 1) * p->Lk * FMHA_NAME(gathered_width)(p, 1);
    if (of_keys + of_values == 0 || of_keys + of_values > GATHERED_BYTES / (ptrdiff_t)sizeof(REAL)) return 0;
    to->head = (const char **)FMHA_NAME(take)(memory, &used, LINE);
    for (int values = 0; values < 2; values++) to->done[values] = (char *)FMHA_NAME(take)(memory, &used, ROUND_UP(tiles, LINE));
    if (of_keys) to->rows[0] = FMHA_NAME(take)(memory, &used, ROUND_UP(of_keys, LINE));
    if (of_values) to->rows[1] = FMHA_NAME(take)(memory, &used, ROUND_UP(of_values, LINE));
    return used;
}

/* Whether those of a block are. */
static inline int FMHA_NAME(has_gathered)(const FMHA_NAME(rows) *block, int values)
{
    return block->gathered && block->gathered->rows[values];
}

/* n of these from key j on. */
static const REAL *FMHA_NAME(gathered_rows)(const fmha_problem *p, const FMHA_NAME(rows) *block, int values, ptrdiff_t j, ptrdiff_t n, ptrdiff_t *ld)
{
    const FMHA_NAME(gathered) *to = block->gathered;
    const fmha_array *x = values ? &p->v : &p->k;
    const ptrdiff_t width = values ? p->Dv : p->D, whole = FMHA_NAME(gathered_width)(p, values);
    const char *k = FMHA_NAME(stored_row)(p, &p->k, block->b, block->hkv, 0), *v = FMHA_NAME(stored_row)(p, &p->v, block->b, block->hkv, 0);
    if (to->head[0] != k || to->head[1] != v) {
        for (int each = 0; each < 2; each++) memset(to->done[each], 0, (size_t)fmha_parts(p->Lk, TILE_KEYS));
        to->head[0] = k;
        to->head[1] = v;
    }
    for (ptrdiff_t tile = j / TILE_KEYS; tile * TILE_KEYS < j + n; tile++) {
        const ptrdiff_t first = tile * TILE_KEYS, many = p->Lk - first < TILE_KEYS ? p->Lk - first : TILE_KEYS;
        REAL *at = to->rows[values] + first * whole;
        if (to->done[values][tile]) continue;
        const REAL *from = FMHA_NAME(computed_rows)(p, x, block->b, block->hkv, first, many, width, at, ld);
        if (from != at) FMHA_NAME(lay_rows)(from, *ld, many, width, 1, CROWDED_AHEAD, at, whole);
        to->done[values][tile] = 1;
    }
    *ld = whole;
    return to->rows[values] + j * whole;
}

/* n keys, or values, of a block's head from key j on: gathered, where they lie, or converted. */
static inline const REAL *FMHA_NAME(keys_of_block)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, REAL *converted,
                                                   ptrdiff_t *ld)
{
    if (FMHA_NAME(has_gathered)(block, 0)) return FMHA_NAME(gathered_rows)(p, block, 0, j, n, ld);
    return FMHA_NAME(computed_rows)(p, &p->k, block->b, block->hkv, j, n, p->D, converted, ld);
}

static inline const REAL *FMHA_NAME(values_of_block)(const fmha_problem *p, const FMHA_NAME(rows) *block, ptrdiff_t j, ptrdiff_t n, REAL *converted,
                                                     ptrdiff_t *ld)
{
    if (FMHA_NAME(has_gathered)(block, 1)) return FMHA_NAME(gathered_rows)(p, block, 1, j, n, ld);
    return FMHA_NAME(computed_rows)(p, &p->v, block->b, block->hkv, j, n, p->Dv, converted, ld);
}

/* What is fetched beside the keys of a tile: its values from key j on, where they will be read. */
static inline const char *FMHA_NAME(values_ahead)(const fmha_problem *p, FMHA_NAME(rows) *block, ptrdiff_t j)
{
    const int there = FMHA_NAME(has_gathered)(block, 1) && block->gathered->head[1] == FMHA_NAME(stored_row)(p, &p->v, block->b, block->hkv, 0)
                      && block->gathered->done[1][j / TILE_KEYS];
    block->of_value = there ? FMHA_NAME(gathered_width)(p, 1) : p->v.stride[2];
    return there ? (const char *)(block->gathered->rows[1] + j * block->of_value) : FMHA_NAME(stored_row)(p, &p->v, block->b, block->hkv, j);
}
