# Functions of rows: softmax, activations, norms.
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport uint64_t
from libc.string cimport memset

from fastmha._kernels cimport (
    FMHA_SUMMED_ROWS, fmha_array, fmha_cut, fmha_flush_subnormals, fmha_item, fmha_item_of, fmha_items, fmha_kernels,
    fmha_matrices_cut, fmha_norm, fmha_pool_run, fmha_set_control,
)


cdef enum:
    SOFTMAX_NUMBERS = 16384     # of an item, or one row


ctypedef struct Rows:
    const fmha_kernels *kernels
    fmha_cut cut
    ptrdiff_t itemsize
    const char *x
    const char *other
    char *y


cdef void softmax_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    cdef Rows *c = <Rows *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t rows = item.rows, cols = item.cols, at = item.i0 * cols * c.itemsize
    if c.other == NULL:
        c.kernels.softmax(rows, cols, c.x + at, cols, c.y + at, cols)
    else:
        c.kernels.softmax_backward(rows, cols, c.x + at, cols, c.other + at, cols, c.y + at, cols)


def softmax_rows(x, softmax_output, y, int threads):
    """y <- softmax of the rows of x; with softmax_output, y <- its gradient for grad_output x.

    All (rows, cols), C-contiguous.
    """
    cdef Rows c
    cdef ptrdiff_t shape[4]
    cdef fmha_array a
    c.itemsize = x.dtype.itemsize
    c.kernels = kernel_tables[c.itemsize == 8]
    read_array(x, &a, shape, c.itemsize, False)
    c.x = a.data
    c.other = pointer(softmax_output, False) if softmax_output is not None else NULL
    c.y = pointer(y, True)
    c.cut = fmha_matrices_cut(1, shape[2], max(1, SOFTMAX_NUMBERS // max(1, shape[3])), shape[3], 0)
    with nogil:
        fmha_pool_run(softmax_item, &c, fmha_items(&c.cut), threads)
    finish()


cdef enum:
    ROW_NUMBERS = 16384         # of an item, or one row; fewer are work for one thread


ctypedef struct RowRun:
    # Rows (.., .., .., width) counted through over the leading axes; absent operands have data NULL.
    const fmha_kernels *kernels
    fmha_cut cut
    ptrdiff_t itemsize, lengths[3]
    fmha_array x, other, y, grad_output      # other: the residual of a norm
    int kind
    fmha_norm norm
    char *partials                  # backward of a norm: of each SUMMED_ROWS rows, grad_weight (and grad_bias)
    ptrdiff_t partial               # numbers of one
    char *sums


cdef ptrdiff_t read_rows(RowRun *c, x, other, y, grad_output) except -1:
    """The operands, alike in shape, of at most 4 axes, and aligned with unit last strides. Returns the number of rows."""
    cdef ptrdiff_t shape[4]
    c.itemsize = x.dtype.itemsize
    c.kernels = kernel_tables[c.itemsize == 8]
    read_array(x, &c.x, shape, c.itemsize, False)
    read_array(y, &c.y, NULL, c.itemsize, True)
    c.other.data = c.grad_output.data = NULL
    if other is not None:
        read_array(other, &c.other, NULL, c.itemsize, False)
    if grad_output is not None:
        read_array(grad_output, &c.grad_output, NULL, c.itemsize, False)
    c.lengths[0], c.lengths[1], c.lengths[2] = shape[0], shape[1], shape[2]
    c.norm.width = shape[3]
    return shape[0] * shape[1] * shape[2]


cdef ptrdiff_t rows_together(const RowRun *c, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t *at) noexcept nogil:
    """Where row `row` lies, and how many of the next `rows` lie at one stride from it."""
    cdef ptrdiff_t head
    at[0] = at[1] = 0
    at[2] = row
    if row >= c.lengths[2]:
        head = row // c.lengths[2]
        at[2] = row - head * c.lengths[2]
        at[0] = head // c.lengths[1]
        at[1] = head - at[0] * c.lengths[1]
    return min(rows, c.lengths[2] - at[2])


cdef inline char *row_of(const RowRun *c, const fmha_array *x, const ptrdiff_t *at) noexcept nogil:
    return head(x, at[0], at[1], at[2], c.itemsize) if x.data != NULL else NULL


cdef int row_threads(const RowRun *c, ptrdiff_t rows, int threads) noexcept nogil:
    return threads if rows * c.norm.width >= ROW_NUMBERS else 1


cdef void activation_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    cdef RowRun *c = <RowRun *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t row = item.i0, left = item.rows, together, _, shift = item.j0 * c.itemsize
    cdef ptrdiff_t at[3]
    while left > 0:
        together = rows_together(c, row, left, at)
        row += together
        left -= together
        for _ in range(together):
            if c.grad_output.data == NULL:
                c.kernels.activate_row(c.kind, item.cols, row_of(c, &c.x, at) + shift, row_of(c, &c.y, at) + shift)
            else:
                c.kernels.activate_row_backward(c.kind, item.cols, row_of(c, &c.grad_output, at) + shift,
                                                row_of(c, &c.x, at) + shift, row_of(c, &c.y, at) + shift)
            at[2] += 1


def activation_rows(int kind, grad_output, x, y, int threads):
    """y <- the activation of x; with grad_output, y <- grad_output times its derivative at x. As `read_rows` takes them."""
    cdef RowRun c
    cdef ptrdiff_t rows = read_rows(&c, x, None, y, grad_output), width = c.norm.width
    c.kind = kind
    c.cut = fmha_matrices_cut(1, rows, max(1, ROW_NUMBERS // max(1, width)), width, ROW_NUMBERS)
    with nogil:
        fmha_pool_run(activation_item, &c, fmha_items(&c.cut), row_threads(&c, rows, threads))
    finish()


cdef void norm_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    cdef RowRun *c = <RowRun *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t row = item.i0, left = item.rows, together
    cdef ptrdiff_t at[3]
    while left > 0:
        together = rows_together(c, row, left, at)
        c.kernels.norm_rows(&c.norm, together, row_of(c, &c.x, at), c.x.stride[2], row_of(c, &c.other, at), c.other.stride[2],
                            row_of(c, &c.y, at), c.y.stride[2])
        row += together
        left -= together


def norm_rows(x, residual, weight, bias, y, double eps, bint centered, int threads):
    """y <- the norm of the rows of x + residual; weight and bias (width,) contiguous, bias and residual may be None."""
    cdef RowRun c
    cdef ptrdiff_t rows = read_rows(&c, x, residual, y, None)
    c.norm.eps, c.norm.centered = eps, centered
    c.norm.weight = pointer(weight, False)
    c.norm.bias = pointer(bias, False) if bias is not None else NULL
    c.cut = fmha_matrices_cut(1, rows, max(1, ROW_NUMBERS // max(1, c.norm.width)), c.norm.width, 0)
    with nogil:
        fmha_pool_run(norm_item, &c, fmha_items(&c.cut), row_threads(&c, rows, threads))
    finish()


cdef void norm_backward_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Some partial sums, each of SUMMED_ROWS rows from a multiple of that on, the rows one after the other."""
    cdef RowRun *c = <RowRun *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t row = item.i0, end = item.i0 + item.rows, together
    cdef ptrdiff_t at[3]
    cdef char *sums = NULL
    while row < end:
        if row % FMHA_SUMMED_ROWS == 0:
            sums = c.partials + row // FMHA_SUMMED_ROWS * c.partial * c.itemsize
            memset(sums, 0, c.partial * c.itemsize)
        together = min(FMHA_SUMMED_ROWS - row % FMHA_SUMMED_ROWS, end - row)
        together = rows_together(c, row, together, at)
        c.kernels.norm_rows_backward(&c.norm, together, row_of(c, &c.grad_output, at), c.grad_output.stride[2],
                                     row_of(c, &c.x, at), c.x.stride[2], row_of(c, &c.other, at), c.other.stride[2],
                                     row_of(c, &c.y, at), c.y.stride[2], sums,
                                     sums + c.norm.width * c.itemsize if c.partial > c.norm.width else NULL)
        row += together


cdef void norm_sums_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Columns of the partial sums, added up in their order."""
    cdef RowRun *c = <RowRun *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t shift = item.j0 * c.itemsize
    c.kernels.add_up_rows(item.rows, item.cols, c.partials + shift, c.partial, c.sums + shift)


def norm_rows_backward(grad_output, x, residual, weight, grad_x, partials, sums, double eps, bint centered, int threads):
    """grad_x <- the gradient of x (and of residual); sums (1 or 2, width) <- grad_weight (and grad_bias).

    partials (at least one for each SUMMED_ROWS rows, 1 or 2, width): scratch. Both contiguous.
    """
    cdef RowRun c
    cdef ptrdiff_t rows = read_rows(&c, x, residual, grad_x, grad_output)
    c.norm.eps, c.norm.centered = eps, centered
    c.norm.weight = pointer(weight, False)
    c.norm.bias = NULL
    c.partials, c.partial, c.sums = pointer(partials, True), sums.size, pointer(sums, True)
    threads = row_threads(&c, rows, threads)
    c.cut = fmha_matrices_cut(1, rows, FMHA_SUMMED_ROWS * max(1, ROW_NUMBERS // (FMHA_SUMMED_ROWS * max(1, c.norm.width))),
                              c.norm.width, 0)
    with nogil:
        fmha_pool_run(norm_backward_item, &c, fmha_items(&c.cut), threads)
    finish()
    c.cut = fmha_matrices_cut(1, (rows + FMHA_SUMMED_ROWS - 1) // FMHA_SUMMED_ROWS, 0, c.partial, ROW_NUMBERS // FMHA_SUMMED_ROWS)
    with nogil:
        fmha_pool_run(norm_sums_item, &c, fmha_items(&c.cut), threads)
    finish()


def exponential(x, y):
    """y <- exp(x) by the kernels' own function, for its test. (n,) contiguous."""
    cdef const char *source = pointer(x, False)
    cdef uint64_t before = fmha_flush_subnormals()
    kernel_tables[x.dtype.itemsize == 8].exponential(x.size, source, pointer(y, True))
    fmha_set_control(before)


def hyperbolic_tangent(x, y):
    """y <- tanh(x) by the kernels' own function, for its test. (n,) contiguous."""
    cdef const char *source = pointer(x, False)
    cdef uint64_t before = fmha_flush_subnormals()
    kernel_tables[x.dtype.itemsize == 8].hyperbolic_tangent(x.size, source, pointer(y, True))
    fmha_set_control(before)
