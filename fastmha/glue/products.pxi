# Products of matrices, by BLAS or by the kernels' own, with what comes behind them.
from libc.stddef cimport ptrdiff_t

from fastmha._blas cimport gemm, need_blas
from fastmha._kernels cimport (
    FMHA_SAME, fmha_array, fmha_cut, fmha_finish, fmha_finish_at, fmha_item, fmha_item_of, fmha_items, fmha_kernels,
    fmha_matrices_cut, fmha_pool_run,
)


ctypedef struct Product:
    const fmha_kernels *kernels
    fmha_cut cut
    bint is_double, trans_a, trans_b
    int element_b
    bint by_head                # c is heads (B, heads, L, width): a slice of columns is a head
    ptrdiff_t m, n, k, itemsize
    fmha_array a, b, c
    fmha_finish last
    char *packed                # b as gemm_pack leaves it, or NULL
    double alpha, beta
    char *scratch               # NULL: products by BLAS
    ptrdiff_t scratch_size


cdef void product_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """c[i0 : i0 + rows, j0 : j0 + cols] := alpha * op(a) @ op(b) + beta * c, then the last pass; of a batch row if c is heads."""
    cdef Product *s = <Product *>context
    cdef fmha_item item = fmha_item_of(&s.cut, index)
    cdef ptrdiff_t i0 = item.i0, j0 = item.j0, rows = item.rows, cols = item.cols, size = s.itemsize
    cdef ptrdiff_t size_b = size_of(s.element_b, size)
    cdef ptrdiff_t lda = leading(&s.a, s.m if s.trans_a else s.k), ldb = leading(&s.b, s.k if s.trans_b else s.n)
    cdef ptrdiff_t ldc = leading(&s.c, cols if s.by_head else s.n)
    cdef char *c = s.c.data + (i0 * ldc + j0) * size
    if s.by_head:
        c = s.c.data + (item.b * s.c.stride[0] + (j0 // cols if cols else 0) * s.c.stride[1] + i0 * ldc) * size
        i0 += item.b * s.m
    cdef fmha_finish last = fmha_finish_at(&s.last, i0, j0, size)
    if s.scratch != NULL:
        s.kernels.gemm(s.element_b, s.trans_a, s.trans_b, rows, cols, s.k, s.a.data + (i0 if s.trans_a else i0 * lda) * size, lda,
                       s.b.data + (j0 * ldb if s.trans_b else j0) * size_b if s.b.data != NULL else NULL, ldb, c, ldc, &last,
                       s.packed + j0 * s.k * size if s.packed != NULL else NULL, s.scratch + worker * s.scratch_size)
        return
    gemm(s.is_double, s.trans_a, s.trans_b, rows, cols, s.k, s.alpha,
         s.a.data + (i0 if s.trans_a else i0 * lda) * size, lda,
         s.b.data + (j0 * ldb if s.trans_b else j0) * size, ldb, s.beta, c, ldc)
    s.kernels.finish(rows, cols, c, ldc, &last)


cdef int prepare_product(Product *s, a, b, c, bint trans_a, bint trans_b, bias, slices) except -1:
    """All of s but alpha, beta, scratch, `packed` and what of the last pass is not the bias. Rows of a and c may be those of
    (B, L) tokens: of (B, L, width), C-contiguous. Those of half precision are to be converted before the product."""
    cdef ptrdiff_t shape[4]
    cdef ptrdiff_t slice_rows, slice_cols, size = c.dtype.itemsize
    s.itemsize = max(size, <ptrdiff_t>sizeof(float))
    s.is_double = s.itemsize == 8
    s.kernels = kernel_tables[s.is_double]
    s.trans_a, s.trans_b = trans_a, trans_b
    read_array(a, &s.a, shape, size, False)
    s.k = shape[1] * shape[2] if trans_a else shape[3]
    s.b.data, s.b.stride[2], s.element_b = NULL, 0, FMHA_SAME
    if b is not None:
        s.element_b = element_of(b.dtype)
        read_array(b, &s.b, NULL, size_of(s.element_b, s.itemsize), False)
    read_array(c, &s.c, shape, size, True)
    s.last.bias = pointer(bias, False) if bias is not None else NULL
    s.last.residual, s.last.ld, s.last.activation = NULL, 0, 0
    slice_rows, slice_cols = slices
    s.by_head = c.ndim == 4
    if s.by_head:
        s.m, s.n = shape[2], shape[1] * slice_cols
        s.cut = fmha_matrices_cut(shape[0], s.m, slice_rows, s.n, slice_cols)
    else:
        s.m, s.n = shape[1] * shape[2], shape[3]
        s.cut = fmha_matrices_cut(1, s.m, slice_rows, s.n, slice_cols)
    return 0


cdef int multiply(Product *s, bint by_blas, int threads) except -1:
    """A prepared product, by BLAS or by the kernels' own."""
    cdef ptrdiff_t items = fmha_items(&s.cut)
    cdef Scratch scratch
    threads = threads_for(threads, <double>s.cut.last * s.m * s.n * s.k)
    note_read(<double>s.n * s.k * s.itemsize)
    if by_blas:
        need_blas()
        s.scratch = NULL
        with nogil:
            run(product_item, s, items, threads)
    else:
        scratch = scratch_for(s.kernels.gemm_scratch(min(s.m, s.cut.row_step), s.cut.col_step, s.k) * s.itemsize, items, threads)
        s.scratch, s.scratch_size = scratch.start, scratch.size
        with nogil:
            fmha_pool_run(product_item, s, items, scratch.threads)
    return finish()


def matmul(a, b, c, bint trans_a, bint trans_b, double alpha, double beta, bias, slices, int threads):
    """c := alpha * op(a) @ op(b) + beta * c (+ bias) by BLAS, matrices with unit last stride and row strides that it takes.

    `slices`: (rows, columns) of c in one item of the pool. c may be heads (B, heads, L, width) with contiguous rows, for
    (B · L, heads · width) rows and columns: slices are then (rows, width).
    """
    cdef Product s
    prepare_product(&s, a, b, c, trans_a, trans_b, bias, slices)
    s.alpha, s.beta = alpha, beta
    multiply(&s, True, threads)


def pack_weights(b, packed):
    """packed <- b (K, N) with unit last stride as `matmul_tiled` takes it: K times N rounded up to whole vectors elements."""
    cdef fmha_array x
    cdef ptrdiff_t shape[4]
    cdef const fmha_kernels *kernels = kernel_tables[b.dtype.itemsize == 8]
    read_array(b, &x, shape, b.dtype.itemsize, False)
    kernels.gemm_pack(shape[2], shape[3], x.data, leading(&x, shape[3]), pointer(packed, True))


def matmul_tiled(a, b, c, bint trans_a, bint trans_b, bias, slices, int threads, packed=None, int activation=0,
                 residual=None):
    """c := activation(op(a) @ op(b) + bias) + residual by the kernels' own product; `packed`: b from `pack_weights`, slices then
    of a multiple of PANEL_COLUMNS columns, and b may be None. b may be of half precision (bfloat16 as uint16) where a and c are
    of float32. residual: as c, a matrix. Else as `matmul`."""
    cdef Product s
    cdef fmha_array added
    prepare_product(&s, a, b, c, trans_a, trans_b, bias, slices)
    s.packed = pointer(packed, False) if packed is not None else NULL
    s.last.activation = activation
    if residual is not None:
        read_array(residual, &added, NULL, s.itemsize, False)
        s.last.residual, s.last.ld = added.data, added.stride[2]
    multiply(&s, False, threads)
