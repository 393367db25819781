/* How a pass is cut into the items that the pool hands out, and what item n is. A pass takes heads, or matrices, and cuts the
 * rows and the columns of each, query rows and keys, or those of a matrix, by a step or as a list says. How finely, may follow
 * the number of threads: no bit does. */
#ifndef FMHA_ITEMS_H
#define FMHA_ITEMS_H

#include <stddef.h>

/* Rows i0 .. i0+rows and columns j0 .. j0+cols of head h of batch row b. */
typedef struct {
    ptrdiff_t b, h, i0, rows, j0, cols;
} fmha_item;

typedef struct {
    ptrdiff_t heads;                /* of a batch row, or groups of these, */
    ptrdiff_t head_step;            /* of so many, fewer in the last; 0: one */
    ptrdiff_t first, last;          /* of the heads of all batch rows, those that the pass takes: [first, last) */
    ptrdiff_t rows, row_step;       /* of a head, and of an item, fewer in the last; a step of 0: not cut */
    ptrdiff_t cols, col_step;
    int from_end;                   /* the last rows of a head first, which have the most keys with causality */
    int heads_inside;               /* heads change first, else last */
    /* so many parts of the columns of a head go through its rows together, askew; 0: columns change first */
    ptrdiff_t together;
    const fmha_item *list;          /* the items, so many, whatever the steps say; NULL: as these say */
    ptrdiff_t listed;
} fmha_cut;

/* Into how many parts a length is cut. Most are one: a division of 64 bits costs some CPUs as much as a short row does. */
static inline ptrdiff_t fmha_parts(ptrdiff_t length, ptrdiff_t step)
{
    if (step == 0) return 1;
    return length <= step ? length > 0 : (length + step - 1) / step;
}

static inline ptrdiff_t fmha_items(const fmha_cut *cut)
{
    if (cut->list) return cut->listed;
    return (cut->last - cut->first) * fmha_parts(cut->rows, cut->row_step) * fmha_parts(cut->cols, cut->col_step);
}

/* Columns that go together go askew: each is so many rows behind the one before, whose items its own have not to wait for then. */
#define FMHA_SKEW 2

/* How many items of `rows` rows and of columns that go together come before a step: in step t are row t of the first column, row
 * t - FMHA_SKEW of the second, and so on. */
static inline ptrdiff_t fmha_items_before(ptrdiff_t step, ptrdiff_t rows, ptrdiff_t cols)
{
    ptrdiff_t items = 0;
    for (ptrdiff_t col = 0, done = step; col < cols && done > 0; col++, done -= FMHA_SKEW) items += done < rows ? done : rows;
    return items;
}

/* Row and column of the item `place` of those. */
static inline void fmha_askew(ptrdiff_t place, ptrdiff_t rows, ptrdiff_t cols, ptrdiff_t *row, ptrdiff_t *col)
{
    ptrdiff_t low = 0, high = rows + FMHA_SKEW * (cols - 1);        /* the step lies in [low, high) */
    while (high - low > 1) {
        const ptrdiff_t middle = (low + high) / 2;
        if (fmha_items_before(middle, rows, cols) <= place) low = middle;
        else high = middle;
    }
    *col = low < rows ? 0 : (low - rows) / FMHA_SKEW + 1;           /* the first that has not ended */
    *col += place - fmha_items_before(low, rows, cols);
    *row = low - *col * FMHA_SKEW;
}

/* Columns change first, then rows, then heads; or as heads_inside and together say. */
static inline fmha_item fmha_item_of(const fmha_cut *cut, ptrdiff_t n)
{
    if (cut->list) return cut->list[n];
    const ptrdiff_t row_parts = fmha_parts(cut->rows, cut->row_step), col_parts = fmha_parts(cut->cols, cut->col_step);
    ptrdiff_t head = n, row = 0, col = 0;
    if (cut->heads_inside) {
        const ptrdiff_t heads = cut->last - cut->first;
        head = n / heads + n % heads * row_parts * col_parts;
    }
    if (cut->together && row_parts > 1 && col_parts > 1) {
        const ptrdiff_t place = head % (row_parts * col_parts), first = place / (row_parts * cut->together) * cut->together;
        fmha_askew(place - first * row_parts, row_parts, col_parts - first < cut->together ? col_parts - first : cut->together, &row, &col);
        col += first;
        head /= row_parts * col_parts;
    } else {
        if (col_parts > 1) col = head % col_parts, head /= col_parts;
        if (row_parts > 1) row = head % row_parts, head /= row_parts;
    }
    head += cut->first;
    fmha_item item = {
        .b = head / cut->heads, .h = head % cut->heads * (cut->head_step ? cut->head_step : 1),
        .i0 = (cut->from_end ? row_parts - 1 - row : row) * cut->row_step, .j0 = col * cut->col_step,
    };
    item.rows = cut->rows - item.i0;
    item.cols = cut->cols - item.j0;
    if (cut->row_step && item.rows > cut->row_step) item.rows = cut->row_step;
    if (cut->col_step && item.cols > cut->col_step) item.cols = cut->col_step;
    return item;
}

/* Which by the steps is the item of all columns that has the first row of this one. */
static inline ptrdiff_t fmha_place_of(const fmha_cut *cut, const fmha_item *item)
{
    const ptrdiff_t parts = fmha_parts(cut->rows, cut->row_step), part = item->i0 / cut->row_step,
            row = cut->from_end ? parts - 1 - part : part;
    const ptrdiff_t head = item->b * cut->heads + item->h - cut->first;
    return cut->heads_inside ? row * (cut->last - cut->first) + head : head * parts + row;
}

/* Matrices, one per batch row, in slices of rows and columns. */
static inline fmha_cut fmha_matrices_cut(ptrdiff_t count, ptrdiff_t rows, ptrdiff_t row_step, ptrdiff_t cols, ptrdiff_t col_step)
{
    return (fmha_cut){.heads = 1, .last = count, .rows = rows, .row_step = row_step, .cols = cols, .col_step = col_step};
}

#endif
