# The items of a run, for the plan.
from libc.stddef cimport ptrdiff_t

from fastmha._kernels cimport (
    fmha_blocks, fmha_blocks_cut, fmha_cut, fmha_heads_cut, fmha_item, fmha_item_of, fmha_items,
)


cdef bytearray items_of(const fmha_cut *cut):
    """The items of a pass, one fmha_item after the other."""
    cdef ptrdiff_t index, count = fmha_items(cut)
    table = bytearray(count * sizeof(fmha_item))
    cdef fmha_item *to = <fmha_item *>pointer(table, True)
    for index in range(count):
        to[index] = fmha_item_of(cut, index)
    return table


def items(Problem problem, str name, bint backward, ptrdiff_t rows, int threads):
    """The items of each pass of a run of the named algorithm, of "tiled" forward, in the order in which the pool hands them out.

    A pass is the memory of structs of six `intp`: batch row, head, first query row, query rows, first key, keys. Heads are
    query heads where "blas" runs forward, else key/value heads with the stacked rows of their query heads. `rows`: of a block of
    "blas" forward. "decode" has two passes, over one to eight chunks, or a chunk of `decode_neighbours` heads from that on, and
    over heads, and so has "tiled" where runs of keys keep so many `threads` busier: over blocks, some of them in runs, and over
    rows of these, which merge them.
    """
    cdef fmha_cut first, second
    cdef fmha_blocks blocks
    cdef Blocks _held           # as long as its lists are read
    cdef Heads c
    if name == "blas":
        prepare(&c, problem, rows, backward)
        return [items_of(&c.cut)]
    if name == "decode":
        first = chunks_cut(problem, neighbours(problem, reach(problem, False), threads), threads)
        second = fmha_heads_cut(&problem.c)
        return [items_of(&first), items_of(&second)]
    _held = blocks_for(&problem.c, threads, True, False, &blocks)
    first, second = fmha_blocks_cut(&problem.c, &blocks, False), fmha_blocks_cut(&problem.c, &blocks, True)
    return [items_of(&first), items_of(&second)] if blocks.merged else [items_of(&first)]
