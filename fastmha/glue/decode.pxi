# The "decode" algorithm.
from libc.stddef cimport ptrdiff_t

from fastmha._kernels cimport (
    fmha_chunks, fmha_cut, fmha_decode_cut, fmha_heads_cut, fmha_items, fmha_kernels, fmha_pool_deal, fmha_pool_run, fmha_run,
    fmha_waiting_chunks,
)


def decode_scratch(Problem problem):
    """Bytes of scratch of the decode algorithm: of one thread in either of its passes, and of what chunks leave to be merged."""
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    if problem.c.Hkv == 0:
        return 0, 0
    return (max(kernels.decode_scratch(&problem.c), kernels.merge_scratch(&problem.c)) * problem.itemsize,
            fmha_waiting_chunks(&problem.c) * kernels.chunk_scratch(&problem.c) * problem.itemsize)


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
    c.cut = fmha_decode_cut(&c.p, threads)
    parts = fmha_items(&c.cut)
    # one scratch for both passes, of whichever has more items: without keys there are no chunks, but heads to merge
    scratch = scratch_for(max(kernels.decode_scratch(&c.p), kernels.merge_scratch(&c.p)) * size, max(parts, heads), threads)
    lend(c, scratch)
    chunks = Scratch(fmha_waiting_chunks(&c.p) * kernels.chunk_scratch(&c.p) * size, 1)
    c.chunks = chunks.start
    with nogil:
        c.some = decoded_together(problem, parts, c.threads)
        if fmha_pool_deal(kernels.decode, c, parts, c.threads, c.some):
            c.cut = merging
            if fmha_chunks(&c.p) != heads:     # else each head has one chunk, whose item has left the result
                fmha_pool_run(kernels.decode_merge, c, heads, scratch.threads)
    return finish()
