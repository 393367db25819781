# The "decode" algorithm.
from libc.stddef cimport ptrdiff_t

from fastmha._kernels cimport (
    FMHA_NEIGHBOURS_FROM, fmha_chunks, fmha_cut, fmha_decode_cut, fmha_heads_cut, fmha_items, fmha_kernels, fmha_neighbours,
    fmha_neighbours_cut, fmha_pool_deal, fmha_pool_run, fmha_problem, fmha_run, fmha_task, fmha_waiting_chunks,
)


cdef double far_from = FMHA_NEIGHBOURS_FROM


def neighbours_from(double bytes):
    """From what reach on heads that lie side by side are decoded so; returns what it was. For tests on small arrays: the bits do
    not depend on it."""
    global far_from
    before = far_from
    far_from = bytes
    return before


cdef double bytes_of_keys(const fmha_problem *p, ptrdiff_t stored_size) noexcept nogil:
    """Of all keys and values."""
    return <double>p.B * p.Hkv * p.Lk * (p.D + p.Dv) * stored_size


def reach_now(Problem problem):
    """What `reach_of` its keys and values would be if "decode" read them now."""
    return reach(problem, False)


cdef double reach(Problem problem, bint reads) noexcept nogil:
    """`reach_of` its keys and values."""
    return reach_of(problem.c.k.data, bytes_of_keys(&problem.c, problem.stored_size), reads)


cdef ptrdiff_t neighbours(Problem problem, double reach, int threads) noexcept nogil:
    """How many heads are an item, side by side."""
    cdef const fmha_problem *p = &problem.c
    if p.Hkv == 0 or reach < far_from:
        return 1
    return fmha_neighbours(p, p.H // p.Hkv * p.Lq, problem.stored_size, fmha_chunks(p) // p.Hkv, threads)


cdef fmha_cut chunks_cut(Problem problem, ptrdiff_t heads, int threads) noexcept nogil:
    """The items of chunks, of one head each or of so many."""
    return fmha_neighbours_cut(&problem.c, heads) if heads > 1 else fmha_decode_cut(&problem.c, threads)


cdef ptrdiff_t chunks_scratch(const fmha_run *c, const fmha_kernels *kernels) noexcept nogil:
    """Elements of scratch of a thread that computes them."""
    return kernels.neighbours_scratch(&c.p, c.neighbours) if c.neighbours > 1 else kernels.decode_scratch(&c.p)


def decode_neighbours(Problem problem, int threads):
    """How many heads would be an item of "decode" on so many threads if it ran now; 1 where each has items of its own."""
    return neighbours(problem, reach(problem, False), threads)


def decode_scratch(Problem problem, int threads):
    """Bytes of scratch of the decode algorithm: of one thread in either of its passes, and of what chunks leave to be merged."""
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    cdef fmha_run c
    if problem.c.Hkv == 0:
        return 0, 0
    c.p, c.neighbours = problem.c, neighbours(problem, reach(problem, False), threads)
    return (max(chunks_scratch(&c, kernels), kernels.merge_scratch(&c.p)) * problem.itemsize,
            fmha_waiting_chunks(&c.p) * kernels.chunk_scratch(&c.p) * problem.itemsize)


def decode_forward(Problem problem, out, lse, int threads):
    """The "decode" algorithm: out (B, H, Lq, Dv) with unit last stride, lse (B, H, Lq) C-contiguous or None."""
    cdef fmha_run c
    read_results(&c, problem, lse, None)
    read_array(out, &c.out, NULL, problem.element_size, True)
    run_decode(&c, problem, threads)


cdef int run_decode(fmha_run *c, Problem problem, int threads) except -1:
    cdef Scratch scratch, chunks
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    cdef fmha_cut merging = fmha_heads_cut(&c.p)
    cdef ptrdiff_t size = problem.itemsize, heads = fmha_items(&merging), parts
    if heads == 0:
        return 0
    threads = threads_for(threads, decode_terms(&c.p, problem.is_double))
    c.reach = reach(problem, True)
    c.neighbours = neighbours(problem, c.reach, threads)
    c.cut = chunks_cut(problem, c.neighbours, threads)
    parts = fmha_items(&c.cut)
    cdef fmha_task task = kernels.decode_neighbours if c.neighbours > 1 else kernels.decode
    # one scratch for both passes, of whichever has more items: without keys there are no chunks, but heads to merge
    scratch = scratch_for(max(chunks_scratch(c, kernels), kernels.merge_scratch(&c.p)) * size, max(parts, heads), threads)
    lend(c, scratch)
    chunks = Scratch(fmha_waiting_chunks(&c.p) * kernels.chunk_scratch(&c.p) * size, 1)
    c.chunks = chunks.start
    with nogil:
        c.some = decoded_together(problem, c.neighbours, parts, c.threads)
        if fmha_pool_deal(task, c, parts, c.threads, c.some):
            c.cut = merging
            if fmha_chunks(&c.p) != heads:     # else each head has one chunk, whose item has left the result
                fmha_pool_run(kernels.decode_merge, c, heads, scratch.threads)
    return finish()
