# Products on matrix tiles.
from libc.stddef cimport ptrdiff_t

from fastmha._kernels cimport (
    FMHA_BFLOAT, FMHA_SAME, fmha_array, fmha_cut, fmha_finish, fmha_item, fmha_item_of, fmha_items, fmha_kernels,
    fmha_matrices_cut, fmha_pool_run, fmha_tile_product,
)


ctypedef struct TileProduct:
    const fmha_kernels *kernels
    fmha_tile_product x
    fmha_cut cut, packing
    fmha_array a, b, c
    fmha_finish last
    ptrdiff_t size_c
    int element_a, element_b
    bint trans_a, by_head, large
    char *tiles
    char *scratch
    ptrdiff_t scratch_size


cdef enum:
    PACKED_ROWS = 64            # of an operand of a product on matrix tiles, in an item that packs it


cdef void pack_first_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Some rows of op(a)."""
    cdef TileProduct *s = <TileProduct *>context
    cdef fmha_item item = fmha_item_of(&s.packing, index)
    if s.kernels.pack_tiles(1, s.trans_a, s.element_a, s.x.parts_a, item.i0, item.rows, s.x.K, s.a.data,
                            leading(&s.a, s.x.M if s.trans_a else s.x.K), s.x.M, s.tiles):
        s.large = True          # whoever writes it writes the same


cdef void pack_second_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Some columns of b."""
    cdef TileProduct *s = <TileProduct *>context
    cdef fmha_item item = fmha_item_of(&s.packing, index)
    if s.kernels.pack_tiles(0, True, s.element_b, s.x.parts_b, item.i0, item.rows, s.x.K, s.b.data, leading(&s.b, s.x.N), s.x.N,
                            s.tiles):
        s.large = True


cdef void tile_product_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    cdef TileProduct *s = <TileProduct *>context
    if s.large:                 # another item has seen that
        return
    cdef fmha_item item = fmha_item_of(&s.cut, index)
    cdef ptrdiff_t i0 = item.i0, j0 = item.j0, cols = item.cols, ldc = leading(&s.c, cols if s.by_head else s.x.N)
    cdef char *c = s.c.data + (i0 * ldc + j0) * s.size_c
    cdef fmha_finish last = s.last
    if s.by_head:
        c = s.c.data + (item.b * s.c.stride[0] + (j0 // cols if cols else 0) * s.c.stride[1] + i0 * ldc) * s.size_c
        i0 += item.b * s.cut.rows
    if last.bias != NULL:
        last.bias += j0 * sizeof(float)
    if last.residual != NULL:
        last.residual += (i0 * last.ld + j0) * s.size_c
    if s.kernels.tile_gemm(&s.x, i0, item.rows, j0, cols, c, ldc, &last, s.scratch + worker * s.scratch_size):
        s.large = True


def has_tiles():
    """Whether the kernels in use multiply on matrix tiles."""
    return kernel_tables[0].tile_gemm != NULL


def tiles_bytes(ptrdiff_t outer, ptrdiff_t terms, int parts):
    """Bytes of an operand packed for matrix tiles: so many rows or columns of the result, terms of its sums, and parts."""
    return parts * kernel_tables[0].tiles_size(outer, terms) * 2


def pack_tiles(b, tiles, int parts, int threads):
    """tiles (tiles_bytes(N, K, parts) bytes on a cache line) <- b (K, N) with unit last stride, of float32 or half precision (as
    uint16: bfloat16), as second operand. Returns whether it can be used: no number is too large or not finite."""
    cdef TileProduct s
    cdef ptrdiff_t shape[4]
    s.kernels = kernel_tables[0]
    s.element_b = element_of(b.dtype)
    read_array(b, &s.b, shape, b.dtype.itemsize, False)
    s.x.K, s.x.N, s.x.M = shape[2], shape[3], 0
    s.x.parts_b, s.large = parts, False
    s.tiles = pointer(tiles, True)
    s.packing = fmha_matrices_cut(1, s.x.N, PACKED_ROWS, 1, 0)
    with nogil:
        fmha_pool_run(pack_second_item, &s, fmha_items(&s.packing), threads)
    finish()
    return not s.large


def matmul_matrix(a, b, c, bint trans_a, bint trans_b, bias, slices, int threads, int parts, packed=None, int activation=0,
                  residual=None):
    """c := activation(op(a) @ op(b) + bias) + residual on matrix tiles; a, b, c of float32 or half precision (bfloat16 as
    uint16), bias of float32, residual as c. packed: b from `pack_tiles`, and b may be None. slices of multiples of 16 rows and
    columns.
    Returns False, with c undefined, where some number is too large or not finite."""
    cdef TileProduct s
    cdef ptrdiff_t shape[4]
    cdef ptrdiff_t slice_rows, slice_cols
    cdef fmha_array added
    cdef Scratch shared, scratch
    s.kernels = kernel_tables[0]
    s.trans_a, s.large = trans_a, False
    s.element_a, s.x.type_c, s.size_c = element_of(a.dtype), element_of(c.dtype), c.dtype.itemsize
    read_array(a, &s.a, shape, a.dtype.itemsize, False)
    s.x.M, s.x.K = (shape[3], shape[2]) if trans_a else (shape[2], shape[3])
    s.x.parts_a = 1 if s.element_a == FMHA_BFLOAT else parts
    s.x.parts_b = parts
    if b is not None:
        s.element_b = element_of(b.dtype)
        read_array(b, &s.b, NULL, b.dtype.itemsize, False)
        s.x.parts_b = 1 if s.element_b == FMHA_BFLOAT else parts
    read_array(c, &s.c, shape, s.size_c, True)
    s.by_head = c.ndim == 4
    slice_rows, slice_cols = slices
    s.x.N = shape[1] * slice_cols if s.by_head else shape[3]
    s.last.bias = pointer(bias, False) if bias is not None else NULL
    s.last.residual, s.last.ld, s.last.activation = NULL, 0, activation
    if residual is not None:
        read_array(residual, &added, NULL, s.size_c, False)
        s.last.residual, s.last.ld = added.data, added.stride[2]
    s.x.most_rows = slice_rows
    note_read(<double>s.x.N * s.x.K * sizeof(float))
    shared = Scratch(s.x.parts_a * s.kernels.tiles_size(s.x.M, s.x.K) * 2, 1)
    s.tiles = shared.start
    s.x.a, s.x.b = s.tiles, pointer(packed, False) if packed is not None else NULL
    s.x.raw, s.x.raw_type, s.x.raw_transposed, s.x.raw_stride = NULL, FMHA_SAME, False, 0
    if packed is None:
        s.x.raw, s.x.raw_type, s.x.raw_transposed = s.b.data, s.element_b, trans_b
        s.x.raw_stride = leading(&s.b, s.x.K if trans_b else s.x.N)
    s.packing = fmha_matrices_cut(1, s.x.M, PACKED_ROWS, 1, 0)
    s.cut = fmha_matrices_cut(shape[0], shape[2], slice_rows, s.x.N, slice_cols)
    cdef ptrdiff_t items = fmha_items(&s.cut)
    scratch = scratch_for(s.kernels.tile_scratch(&s.x), items, threads)
    s.scratch, s.scratch_size = scratch.start, scratch.size
    with nogil:
        fmha_pool_run(pack_first_item, &s, fmha_items(&s.packing), threads)
        if not s.large:
            fmha_pool_run(tile_product_item, &s, items, scratch.threads)
    finish()
    return not s.large
