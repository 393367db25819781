# A module's forward, backward, or step: projections and attention in one call.
from libc.stddef cimport ptrdiff_t
from libc.string cimport memcpy

from fastmha._kernels cimport FMHA_SAME, fmha_array, fmha_problem, fmha_run


cdef int project(x, weight, out, int threads) except -1:
    """out <- x @ W (+ bias), both (B, L, width), C-contiguous; of half precision they are few rows, converted by one thread."""
    cdef Product s
    cdef Scratch rows
    W, packed, bias, slices, by_blas = weight
    prepare_product(&s, x, W, out, False, False, bias, slices)
    s.alpha, s.beta = 1, 0
    s.packed = pointer(packed, False) if packed is not None else NULL
    cdef int element = element_of(x.dtype)
    if element == FMHA_SAME:
        return multiply(&s, by_blas, threads)
    cdef char *given = s.a.data
    cdef char *result = s.c.data
    rows = Scratch(s.m * (s.k + s.n) * s.itemsize, 1)
    s.a.data, s.c.data = rows.start, rows.start + s.m * s.k * s.itemsize
    s.kernels.load_rows(element, s.m, s.k, given, s.k, s.a.data, s.k)
    multiply(&s, by_blas, threads)
    s.kernels.store_rows(element, s.m, s.n, s.c.data, s.n, result, s.n)
    return 0


cdef int read_concat(concat, fmha_array *to, const fmha_problem *p, bint writable) except -1:
    """(B, L, H·Dv), C-contiguous, as heads."""
    to.data = pointer(concat, writable)
    to.stride[0], to.stride[1], to.stride[2], to.stride[3] = p.Lq * p.H * p.Dv, p.Dv, p.H * p.Dv, 1
    return 0


def projected_forward(Problem problem, bint decode, x, first, projected, concat, lse, weights, second, out, int threads):
    """A module's forward without the interpreter between its passes: projected <- x @ W (+ bias), concat <- the attention of the
    heads that lie side by side in it, by "tiled" or "decode", out <- concat @ W (+ bias).

    x, projected, concat and out (B, L, width) C-contiguous, problem that of `projected`, lse and weights as `tiled_forward` has
    them. first, second: (W, W from `pack_weights` or None, bias or None, slices, whether by BLAS), as `matmul` and
    `matmul_tiled` take them.
    """
    cdef fmha_run c
    project(x, first, projected, threads)
    read_results(&c, problem, lse, weights)
    read_concat(concat, &c.out, &c.p, True)
    if decode:
        run_decode(&c, problem, threads)
    else:
        run_tiled(&c, problem, threads, None)
    project(concat, second, out, threads)


cdef void store_heads(const fmha_array *x, const fmha_array *slots, const fmha_problem *p, ptrdiff_t width,
                      ptrdiff_t size) noexcept nogil:
    """The last of the p.Lk slots of each head <- x (B, Hkv, Lq, width)."""
    cdef ptrdiff_t b, h, i
    for b in range(p.B):
        for h in range(p.Hkv):
            for i in range(p.Lq):
                memcpy(head(slots, b, h, p.Lk - p.Lq + i, size), head(x, b, h, i, size), width * size)


def projected_step(Problem problem, bint decode, x, first, projected, concat, weights, second, out, int threads):
    """`projected_forward` over a cache: the last Lq of the problem's keys and values <- those projected, before the attention."""
    cdef fmha_run c
    cdef fmha_array q, k, v
    cdef ptrdiff_t size = problem.element_size
    project(x, first, projected, threads)
    read_results(&c, problem, None, weights)
    side_by_side(&c.p, pointer(projected, False), size, &q, &k, &v)
    with nogil:
        store_heads(&k, &c.p.k, &c.p, c.p.D, size)
        store_heads(&v, &c.p.v, &c.p, c.p.Dv, size)
    read_concat(concat, &c.out, &c.p, True)
    if decode:
        run_decode(&c, problem, threads)
    else:
        run_tiled(&c, problem, threads, None)
    project(concat, second, out, threads)


cdef int multiply_rows(a, b, out, bint trans_a, bint trans_b, cut, int threads) except -1:
    """out <- op(a) @ op(b), each a matrix or (B, L, width) and C-contiguous; cut: the slices, and whether by BLAS."""
    cdef Product s
    slices, by_blas = cut
    prepare_product(&s, a, b, out, trans_a, trans_b, None, slices)
    s.alpha, s.beta, s.packed = 1, 0, NULL
    return multiply(&s, by_blas, threads)


def projected_backward(Problem problem, x, W_in, concat, lse, W_out, grad_out, grad_concat, grad_projected, grad_x, grad_W_in,
                       grad_W_out, cuts, int threads):
    """What goes back through `projected_forward`, but for biases: grad_concat <- grad_out @ W_out.T, grad_projected <- its
    gradient by "tiled", grad_W_out <- concat.T @ grad_out, grad_W_in <- x.T @ grad_projected, grad_x <- grad_projected @ W_in.T.

    cuts: of these products, in this order, the slices and whether by BLAS. What has tokens is (B, L, width) and
    C-contiguous.
    """
    cdef fmha_run c
    multiply_rows(grad_out, W_out, grad_concat, False, True, cuts[0], threads)
    c.p = problem.c
    c.lse, c.row_states = pointer(lse, False), NULL
    read_concat(concat, &c.out, &c.p, False)
    read_concat(grad_concat, &c.grad_out, &c.p, False)
    side_by_side(&c.p, pointer(grad_projected, True), problem.itemsize, &c.grad_q, &c.grad_k, &c.grad_v)
    run_tiled_backward(&c, problem, None, threads)
    multiply_rows(concat, grad_out, grad_W_out, True, False, cuts[1], threads)
    multiply_rows(x, grad_projected, grad_W_in, True, False, cuts[2], threads)
    multiply_rows(grad_projected, W_in, grad_x, False, True, cuts[3], threads)
