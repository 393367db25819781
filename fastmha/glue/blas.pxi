# The "blas" algorithm: a loop over heads and blocks of their rows, whose products BLAS makes; heads are packed where it says so.
from cpython.mem cimport PyMem_RawFree
from libc.stddef cimport ptrdiff_t
from libc.string cimport memset

from numpy import zeros

from fastmha._blas cimport gemm, need_blas
from fastmha._kernels cimport (
    FMHA_CACHE_LINE, FMHA_LARGE, FMHA_PACK_ROWS, FMHA_ROW_STATE, FMHA_SAME, fmha_array, fmha_blas_forward_cut,
    fmha_block, fmha_block_keys, fmha_cut, fmha_flush_subnormals, fmha_folded_scale, fmha_heads_cut, fmha_item,
    fmha_item_of, fmha_items, fmha_keep_subnormal_operands, fmha_kernels, fmha_matrices_cut, fmha_pool_run, fmha_problem,
    fmha_valid_keys,
)


ctypedef struct Pack:
    const fmha_kernels *kernels
    fmha_cut cut
    fmha_array x
    fmha_array y
    ptrdiff_t heads, size_x, size_y
    int element                 # of x, or where it is FMHA_SAME, of y


cdef void pack_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """A few rows of all heads of one batch row."""
    cdef Pack *c = <Pack *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t h
    cdef const char *x
    cdef char *y
    for h in range(c.heads):
        x, y = head(&c.x, item.b, h, item.i0, c.size_x), head(&c.y, item.b, h, item.i0, c.size_y)
        if c.element == FMHA_SAME:
            c.kernels.copy_rows(item.rows, item.cols, x, c.x.stride[2], y, c.y.stride[2])
        elif c.size_x < c.size_y:
            c.kernels.load_rows(c.element, item.rows, item.cols, x, c.x.stride[2], y, c.y.stride[2])
        else:
            c.kernels.store_rows(c.element, item.rows, item.cols, x, c.x.stride[2], y, c.y.stride[2])


def pack_heads(x, out, int threads):
    """out <- x, both (B, H, L, width) with unit last strides, a blocked copy; of one dtype, or one of them of half precision, and
    then converted, or rounded."""
    cdef Pack c
    cdef ptrdiff_t shape[4]
    c.size_x, c.size_y = x.dtype.itemsize, out.dtype.itemsize
    c.element = element_of(x.dtype if c.size_x < c.size_y else out.dtype)
    if (c.element == FMHA_SAME) != (c.size_x == c.size_y):
        raise TypeError(f"out must be of x's dtype, or one of the two of half precision, got {out.dtype} for {x.dtype}")
    c.kernels = kernel_tables[max(c.size_x, c.size_y) == 8]
    read_array(out, &c.y, NULL, c.size_y, True)
    read_array(x, &c.x, shape, c.size_x, False)
    c.heads = shape[1]
    c.cut = fmha_matrices_cut(shape[0], shape[2], FMHA_PACK_ROWS, shape[3], 0)
    with nogil:
        fmha_pool_run(pack_item, &c, fmha_items(&c.cut), threads)
    finish()


ctypedef struct Heads:
    # What one run of the blas algorithm shares between its items.
    fmha_problem p
    fmha_cut cut
    const fmha_kernels *kernels
    bint is_double
    ptrdiff_t itemsize
    ptrdiff_t rows, ld                  # query rows of a block, row stride of its scores
    fmha_array out, weights             # out (B, H, Lq, Dv); weights (B, H, Lq, Lk) or NULL
    fmha_array grad_out, grad_q, grad_k, grad_v
    char *lse                           # (B, H, Lq) contiguous
    char *row_states                    # (B, H, Lq, FMHA_ROW_STATE) contiguous or NULL, backward
    char *scratch
    ptrdiff_t scratch_size
    int failed                          # an allocation on a careful path


ctypedef struct Buffers:
    # The scratch of one thread.
    char *scores                        # (rows, ld)
    char *row_sum                       # (rows,), forward
    char *grad_scores                   # (rows, ld), backward
    char *slopes                        # (ld,) of the softcap, for a row at a time, backward


cdef ptrdiff_t blas_layout(const Heads *c, bint backward, char *memory, Buffers *to) noexcept nogil:
    """Bytes of scratch of one thread; without memory that is all."""
    cdef ptrdiff_t used = 0, block = c.rows * c.ld * c.itemsize
    to.scores = take(memory, &used, block)
    to.row_sum = take(memory, &used, 0 if backward else c.rows * c.itemsize)
    to.grad_scores = take(memory, &used, block if backward else 0)
    to.slopes = take(memory, &used, c.ld * c.itemsize if backward else 0)
    return used


cdef inline char *head(const fmha_array *x, ptrdiff_t b, ptrdiff_t h, ptrdiff_t i, ptrdiff_t itemsize) noexcept nogil:
    return x.data + (b * x.stride[0] + h * x.stride[1] + i * x.stride[2]) * itemsize


cdef inline ptrdiff_t leading(const fmha_array *x, ptrdiff_t width) noexcept nogil:
    """The row stride as BLAS wants it: at least the width, also where a single row leaves it open (0 here)."""
    return x.stride[2] if x.stride[2] > width else (width if width > 0 else 1)


cdef bint untouched(const fmha_problem *p, const fmha_block *block) noexcept nogil:
    """Whether every row of the block may attend all of its keys: then there is no firewall to keep."""
    cdef ptrdiff_t low, high, last_low, last_high
    if p.bool_mask.data != NULL or p.additive_mask.data != NULL:
        return False
    fmha_block_keys(p, block.b, block.i0, 1, &low, &high)
    fmha_block_keys(p, block.b, block.i0 + block.rows - 1, 1, &last_low, &last_high)
    return low == last_low and high == last_high


cdef void scores_of(Heads *c, const fmha_block *block, ptrdiff_t hkv, char *scores) noexcept nogil:
    """scores (rows, cols) <- scale * q (rows, D) @ k (cols, D).T, of a block of queries and all its keys."""
    cdef fmha_problem *p = &c.p
    cdef double rest, scale = fmha_folded_scale(p, c.is_double, &rest)
    cdef char *q = head(&p.q, block.b, block.h, block.i0, c.itemsize)
    cdef bint large = c.kernels.exceeds(block.rows, p.D, q, leading(&p.q, p.D), p.scale, FMHA_LARGE(c.is_double))
    cdef ptrdiff_t i
    if large:       # then keys below the smallest normal number count
        fmha_keep_subnormal_operands()
    gemm(c.is_double, False, True, block.rows, block.cols, p.D, scale, q, leading(&p.q, p.D),
         head(&p.k, block.b, hkv, block.j0, c.itemsize), leading(&p.k, p.D), 0, scores, block.ld)
    if large:
        fmha_flush_subnormals()
    if rest != 1:
        for i in range(block.rows):
            c.kernels.multiply(block.cols, scores + i * block.ld * c.itemsize, rest)


cdef void product(Heads *c, const fmha_block *block, bint by_key, double alpha, const char *a, const char *x,
                  ptrdiff_t ldx, ptrdiff_t width, double beta, char *y, ptrdiff_t ldy, bint finite) noexcept nogil:
    """y := alpha * a . x + beta * y, or a^T . x if by_key, where a (rows, cols) is 0 at the removed pairs of the block.

    The firewall: where x is not finite, 0 * NaN must not reach y. Then the product is taken with zeros in place of
    what is not finite, which leaves the bits of every row that does not attend it, and the pairs that do are added.
    """
    cdef ptrdiff_t inner = block.rows if by_key else block.cols, outer = block.cols if by_key else block.rows
    # gemv, behind single rows and columns, rounds differently for another row stride: the copy keeps it there
    cdef ptrdiff_t ld = ldx if outer == 1 or width == 1 else width
    cdef char *clean
    if finite or untouched(&c.p, block):
        gemm(c.is_double, by_key, False, outer, width, inner, alpha, a, block.ld, x, ldx, beta, y, ldy)
        return
    clean = allocate(inner * ld * c.itemsize + 1)
    if clean == NULL:
        c.failed = 1
        return
    c.kernels.copy_finite(inner, width, x, ldx, clean, ld)
    gemm(c.is_double, by_key, False, outer, width, inner, alpha, a, block.ld, clean, ld, beta, y, ldy)
    c.kernels.add_nonfinite(&c.p, block, by_key, alpha, a, x, ldx, width, y, ldy)
    PyMem_RawFree(clean)


cdef void forward_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """One block of query rows of one head: S <- scale Q K^T, P <- softmax(S), O <- P V."""
    cdef Heads *c = <Heads *>context
    cdef fmha_problem *p = &c.p
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef fmha_block block
    cdef Buffers buffers
    cdef ptrdiff_t size = c.itemsize, j0, j1, i, hkv
    cdef char *scores
    cdef char *row_sum
    cdef char *lse = NULL
    cdef char *out
    cdef char *again
    cdef double factor
    cdef bint finite
    blas_layout(c, False, c.scratch + worker * c.scratch_size, &buffers)
    scores, row_sum = buffers.scores, buffers.row_sum
    block.b, block.h, block.i0, block.rows, block.ld = item.b, item.h, item.i0, item.rows, c.ld
    hkv = block.h // (p.H // p.Hkv)
    fmha_block_keys(p, block.b, block.i0, block.rows, &j0, &j1)
    block.j0, block.cols = j0, j1 - j0
    if c.lse != NULL:
        lse = c.lse + ((block.b * p.H + block.h) * p.Lq + block.i0) * size
    out = head(&c.out, block.b, block.h, block.i0, size)
    if c.weights.data != NULL:
        scores = head(&c.weights, block.b, block.h, block.i0, size)
        block.ld = p.Lk if p.Lk > 0 else 1
        for i in range(block.rows):
            memset(scores + i * p.Lk * size, 0, j0 * size)
            memset(scores + (i * p.Lk + j1) * size, 0, (p.Lk - j1) * size)
        scores += j0 * size
    scores_of(c, &block, hkv, scores)
    c.kernels.attend_rows(p, &block, scores, row_sum, lse)
    if c.weights.data != NULL:
        c.kernels.divide_rows(block.rows, block.cols, scores, block.ld, row_sum)
    c.kernels.drop_rows(p, &block, scores)
    # out (rows, Dv) <- probabilities (rows, cols) @ v (cols, Dv)
    product(c, &block, False, 1, scores, head(&p.v, block.b, hkv, j0, size), leading(&p.v, p.Dv), p.Dv, 0, out,
            leading(&c.out, p.Dv), True)
    if not c.kernels.all_finite(block.rows, p.Dv, out, leading(&c.out, p.Dv)):
        finite = c.kernels.all_finite(block.cols, p.Dv, head(&p.v, block.b, hkv, j0, size), leading(&p.v, p.Dv))
        if not finite and not untouched(p, &block):
            product(c, &block, False, 1, scores, head(&p.v, block.b, hkv, j0, size), leading(&p.v, p.Dv), p.Dv, 0, out,
                    leading(&c.out, p.Dv), False)
        # Sums of large finite values may overflow before the division: such rows again, with probabilities so small
        # that no sum can; a power of 2 leaves the bits of what was finite.
        factor = 0.5
        while factor * p.Lk * max(1, p.dropout.factor) > 0.5:
            factor /= 2
        if (c.weights.data == NULL and not c.kernels.all_finite(block.rows, p.Dv, out, leading(&c.out, p.Dv))
                and c.kernels.exceeds(block.cols, p.Dv, head(&p.v, block.b, hkv, j0, size), leading(&p.v, p.Dv), 1,
                                      FMHA_LARGE(c.is_double))):
            again = allocate(block.rows * p.Dv * size)
            if again == NULL:
                c.failed = 1
                return
            for i in range(block.rows):
                c.kernels.multiply(block.cols, scores + i * block.ld * size, factor)
            product(c, &block, False, 1, scores, head(&p.v, block.b, hkv, j0, size), leading(&p.v, p.Dv), p.Dv, 0,
                    again, p.Dv, finite)
            for i in range(block.rows):
                if not c.kernels.all_finite(1, p.Dv, out + i * leading(&c.out, p.Dv) * size, p.Dv):
                    c.kernels.copy_rows(1, p.Dv, again + i * p.Dv * size, p.Dv,
                                        out + i * leading(&c.out, p.Dv) * size, p.Dv)
                    c.kernels.multiply(1, row_sum + i * size, factor)
            PyMem_RawFree(again)
    if c.weights.data == NULL:
        c.kernels.divide_rows(block.rows, p.Dv, out, leading(&c.out, p.Dv), row_sum)
    tiny_rows(c, &block, hkv, scores, row_sum, out)


cdef enum:
    LIFTED_NUMBERS = 1 << 13    # of values at a time, which stay in the first caches


cdef void tiny_rows(Heads *c, const fmha_block *block, ptrdiff_t hkv, const char *scores, const char *row_sum,
                    char *out) noexcept nogil:
    """Rows of out so small that subnormal values and terms count, again from values that are multiplied by a power of 2."""
    cdef ptrdiff_t size = c.itemsize, width = c.p.Dv, ldo = leading(&c.out, width), ldv = leading(&c.p.v, width), i
    cdef const char *v = head(&c.p.v, block.b, hkv, block.j0, size)
    cdef float one = 1
    cdef double one_double = 1
    cdef const void *divisor = <const void *>&one_double if c.is_double else <const void *>&one     # weights are divided already
    cdef char *lifted = NULL
    cdef char *again = NULL
    cdef ptrdiff_t step = max(1, LIFTED_NUMBERS // max(1, width)), j = 0, keys
    for i in range(block.rows):
        if not c.kernels.tiny_row(width, out + i * ldo * size) or not c.kernels.nonzero(1, 1, row_sum + i * size, 1):
            continue
        if lifted == NULL:
            if not c.kernels.nonzero(block.cols, width, v, ldv):
                return
            lifted = allocate((step + block.rows) * width * size)
            if lifted == NULL:
                c.failed = 1
                return
            again = lifted + step * width * size
            while j < block.cols:
                keys = min(step, block.cols - j)
                c.kernels.lift_rows(keys, width, v + j * ldv * size, ldv, lifted, width)
                # again (rows, width) <- probabilities (rows, keys) @ lifted (keys, width), summed
                gemm(c.is_double, False, False, block.rows, width, keys, 1, scores + j * size, block.ld, lifted, width, j > 0,
                     again, width)
                j += keys
        if c.weights.data == NULL:
            divisor = row_sum + i * size
        c.kernels.lower_row(width, again + i * width * size, divisor, out + i * ldo * size)
    PyMem_RawFree(lifted)


cdef void backward_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """One key/value head and its query heads, in their order."""
    cdef Heads *c = <Heads *>context
    cdef fmha_problem *p = &c.p
    cdef fmha_block block
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef Buffers buffers
    cdef ptrdiff_t size = c.itemsize, j0, j1, i, group = p.H // p.Hkv, hkv = item.h, member
    cdef ptrdiff_t ldq = leading(&p.q, p.D), ldk = leading(&p.k, p.D), ldv = leading(&p.v, p.Dv)
    cdef ptrdiff_t ldo = leading(&c.grad_out, p.Dv)
    cdef ptrdiff_t lddq = leading(&c.grad_q, p.D), lddk = leading(&c.grad_k, p.D), lddv = leading(&c.grad_v, p.Dv)
    cdef char *scores
    cdef char *grad_scores
    cdef char *q
    cdef char *grad_out
    cdef char *states = NULL
    cdef bint keys_finite, q_finite, grad_finite
    cdef double rest, scale = fmha_folded_scale(p, c.is_double, &rest)
    blas_layout(c, True, c.scratch + worker * c.scratch_size, &buffers)
    scores, grad_scores = buffers.scores, buffers.grad_scores
    block.b = item.b
    for i in range(p.Lk):
        memset(head(&c.grad_k, block.b, hkv, i, size), 0, p.D * size)
        memset(head(&c.grad_v, block.b, hkv, i, size), 0, p.Dv * size)
    fmha_valid_keys(p, block.b, &j0, &j1)
    keys_finite = c.kernels.all_finite(j1 - j0, p.D, head(&p.k, block.b, hkv, j0, size), ldk)
    for member in range(group):
        block.h = hkv * group + member
        block.i0 = 0
        while block.i0 < p.Lq:
            if stopped_between_blocks():
                return
            block.rows, block.ld = min(c.rows, p.Lq - block.i0), c.ld
            fmha_block_keys(p, block.b, block.i0, block.rows, &j0, &j1)
            block.j0, block.cols = j0, j1 - j0
            q = head(&p.q, block.b, block.h, block.i0, size)
            grad_out = head(&c.grad_out, block.b, block.h, block.i0, size)
            q_finite = c.kernels.all_finite(block.rows, p.D, q, ldq)
            grad_finite = c.kernels.all_finite(block.rows, p.Dv, grad_out, ldo)
            scores_of(c, &block, hkv, scores)
            # grad_weights (rows, cols) <- grad_out (rows, Dv) @ v (cols, Dv).T
            gemm(c.is_double, False, True, block.rows, block.cols, p.Dv, 1, grad_out, ldo,
                 head(&p.v, block.b, hkv, j0, size), ldv, 0, grad_scores, c.ld)
            # weights <- softmax, grad_scores <- weights * (grad_weights - sum(weights * grad_weights))
            if c.row_states != NULL:
                states = c.row_states + ((block.b * p.H + block.h) * p.Lq + block.i0) * FMHA_ROW_STATE * size
            c.kernels.attend_rows_backward(p, &block, scores, grad_scores, buffers.slopes,
                                           c.lse + ((block.b * p.H + block.h) * p.Lq + block.i0) * size,
                                           &c.out, &c.grad_out, states)
            # grad_q (rows, D) <- scale * grad_scores (rows, cols) @ k (cols, D)
            product(c, &block, False, scale, grad_scores, head(&p.k, block.b, hkv, j0, size), ldk, p.D, 0,
                    head(&c.grad_q, block.b, block.h, block.i0, size), lddq, keys_finite)
            # grad_k (cols, D) <- grad_k + scale * grad_scores (rows, cols).T @ q (rows, D)
            product(c, &block, True, scale, grad_scores, q, ldq, p.D, 1,
                    head(&c.grad_k, block.b, hkv, j0, size), lddk, q_finite)
            # grad_v (cols, Dv) <- grad_v + weights (rows, cols).T @ grad_out (rows, Dv)
            product(c, &block, True, 1, scores, grad_out, ldo, p.Dv, 1,
                    head(&c.grad_v, block.b, hkv, j0, size), lddv, grad_finite)
            if rest != 1:
                for i in range(block.rows):
                    c.kernels.multiply(p.D, head(&c.grad_q, block.b, block.h, block.i0 + i, size), rest)
            block.i0 += block.rows
    if rest != 1:
        for i in range(p.Lk):
            c.kernels.multiply(p.D, head(&c.grad_k, block.b, hkv, i, size), rest)


cdef enum:
    PAGE_BYTES = 4096


cdef ptrdiff_t score_stride(ptrdiff_t Lk, ptrdiff_t itemsize) noexcept:
    """Row stride of a block of scores: whole cache lines, never a multiple of a page (rows would share cache sets)."""
    cdef ptrdiff_t lanes = FMHA_CACHE_LINE // itemsize, ld = (Lk + lanes - 1) // lanes * lanes
    return ld + lanes if ld * itemsize % PAGE_BYTES == 0 else ld


cdef int prepare(Heads *c, Problem problem, ptrdiff_t rows, bint backward) except -1:
    """All of c but the arrays and scratch; `rows`: of a block at most."""
    memset(c, 0, sizeof(Heads))
    c.p = problem.c
    c.kernels = kernel_tables[problem.is_double]
    c.is_double, c.itemsize = problem.is_double, problem.itemsize
    c.rows = max(1, min(rows, c.p.Lq))
    c.ld = score_stride(c.p.Lk, c.itemsize)
    c.cut = fmha_heads_cut(&c.p) if backward else fmha_blas_forward_cut(&c.p, c.rows)
    return 0


def blas_scratch(Problem problem, ptrdiff_t rows, bint backward):
    """Bytes of scratch of one thread of the blas algorithm."""
    cdef Heads c
    cdef Buffers unused
    prepare(&c, problem, rows, backward)
    return blas_layout(&c, backward, NULL, &unused)


def blas_forward(Problem problem, out, lse, weights, ptrdiff_t rows, int threads):
    """The "blas" algorithm: out (B, H, Lq, Dv) of any strides BLAS takes, lse (B, H, Lq) and weights (B, H, Lq, Lk)
    C-contiguous or None. `rows`: query rows per block."""
    cdef Heads c
    cdef Scratch scratch
    cdef Buffers unused
    need_blas()
    prepare(&c, problem, rows, False)
    read_array(out, &c.out, NULL, c.itemsize, True)
    if lse is not None:
        c.lse = pointer(lse, True)
    if weights is not None:
        read_array(weights, &c.weights, NULL, c.itemsize, True)
        c.weights.stride[2] = c.p.Lk
    cdef ptrdiff_t items = fmha_items(&c.cut)
    threads = threads_for(threads, attention_terms(&c.p, problem.is_double))
    scratch = scratch_for(blas_layout(&c, False, NULL, &unused), items, threads)
    c.scratch, c.scratch_size = scratch.start, scratch.size
    with nogil:
        run(forward_item, &c, items, scratch.threads)
    finish()
    if c.failed:
        raise MemoryError("no memory to treat values that are not finite")


def blas_backward(Problem problem, out, lse, grad_out, grad_q, grad_k, grad_v, states, ptrdiff_t rows, int threads):
    """Gradients of the "blas" algorithm, written into grad_q, grad_k, grad_v (strides as BLAS takes them); states as
    `tiled_backward` leaves them."""
    cdef Heads c
    cdef Scratch scratch
    cdef Buffers unused
    need_blas()
    prepare(&c, problem, rows, True)
    read_array(out, &c.out, NULL, c.itemsize, False)
    read_array(grad_out, &c.grad_out, NULL, c.itemsize, False)
    read_array(grad_q, &c.grad_q, NULL, c.itemsize, True)
    read_array(grad_k, &c.grad_k, NULL, c.itemsize, True)
    read_array(grad_v, &c.grad_v, NULL, c.itemsize, True)
    c.lse = pointer(lse, False)
    if states is not None:
        c.row_states = pointer(states, True)
    cdef ptrdiff_t items = fmha_items(&c.cut)
    threads = threads_for(threads, BACKWARD_TERMS * attention_terms(&c.p, problem.is_double))
    scratch = scratch_for(blas_layout(&c, True, NULL, &unused), items, threads)
    c.scratch, c.scratch_size = scratch.start, scratch.size
    with nogil:
        run(backward_item, &c, items, scratch.threads)
    finish()
    if c.failed:
        raise MemoryError("no memory to treat values that are not finite")
