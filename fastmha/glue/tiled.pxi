# The "tiled" algorithm: how its passes are cut, and run.
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int64_t
from libc.string cimport memset

from fastmha._kernels cimport (
    FMHA_BLOCK_ROWS, FMHA_CHUNK_KEYS, FMHA_DECODE_ROWS, FMHA_MEND, FMHA_PREPARE, FMHA_REACH_ROWS, FMHA_RESTART, FMHA_RESULTS,
    FMHA_RUN_TURNS, FMHA_SHARES, FMHA_TILE_KEYS, FMHA_TURNS, FMHA_WHOLE, fmha_backward_cut, fmha_backward_split, fmha_blocks,
    fmha_blocks_cut, fmha_blocks_vary, fmha_by_heads, fmha_copies_cut, fmha_cut, fmha_forward_blocks, fmha_free_blocks,
    fmha_heads_cut, fmha_in_copies, fmha_items, fmha_kernels, fmha_list_blocks, fmha_mask_cut, fmha_pool_run, fmha_problem,
    fmha_run, fmha_runs_left, fmha_split, fmha_task,
)


def threads_of(Problem problem, bint decode, bint backward, int threads):
    """Of so many threads those that a pass over a problem is worth, forward by "decode" or another algorithm, or backward."""
    if decode:
        return threads_for(threads, decode_terms(&problem.c, problem.is_double))
    return threads_for(threads, (BACKWARD_TERMS if backward else 1) * attention_terms(&problem.c, problem.is_double))


def tiled_forward(Problem problem, out, lse, weights, int threads, blocks=None):
    """The "tiled" algorithm: out (B, H, Lq, Dv) with unit last stride, lse (B, H, Lq) and weights (B, H, Lq, Lk)
    C-contiguous or None.

    blocks: how many blocks, the first ones, have 64 rows and all keys; whether the others are in runs of their keys; of how
    many rows, 16, 32 or 64, pieces of such items are, and how many of them, the last ones, become such; of how many keys, a
    multiple of 192, or 0: of all, of the item or, where the item has one run, of the run; whatever the threads. None: as is best
    for these. The bits are the same. Not on matrix tiles.
    """
    cdef fmha_run c
    cdef Blocks named = None
    read_results(&c, problem, lse, weights)
    read_array(out, &c.out, NULL, problem.element_size, True)
    if blocks is not None and c.p.parts == 0:
        named = Blocks()
        named.c.whole, named.c.runs, named.c.rows, named.c.fine, named.c.keys = blocks
        named.c.keys = 0 if weights is not None else named.c.keys
        named.c.runs = named.c.runs and weights is None         # whose softmax runs over all keys
        named.c.heads_inside = True
        named.list_items(&c.p)
    run_tiled(&c, problem, threads, named)


cdef class Blocks:
    """How a forward pass of "tiled" is cut."""
    cdef fmha_blocks c

    def __dealloc__(self):
        fmha_free_blocks(&self.c)

    cdef int list_items(self, const fmha_problem *p) except -1:
        """Makes the lists of items that `c` has where blocks are cut."""
        cdef int made
        with nogil:
            made = fmha_list_blocks(p, &self.c)
        if not made:
            raise MemoryError("no memory for the list of a forward pass's items")
        return 0


cdef int read_results(fmha_run *c, Problem problem, lse, weights) except -1:
    """All of a forward run but out and what its passes set."""
    c.p, c.reach = problem.c, 0
    c.lse = pointer(lse, True) if lse is not None else NULL
    c.weights = pointer(weights, True) if weights is not None else NULL
    return 0


cdef int run_tiled(fmha_run *c, Problem problem, int threads, Blocks named) except -1:
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    cdef fmha_blocks blocks
    if fmha_heads_cut(&c.p).rows <= FMHA_REACH_ROWS:
        c.reach = reach(problem, True)
    else:
        note_read(bytes_of_keys(&c.p, problem.stored_size))
    threads = threads_for(threads, attention_terms(&c.p, problem.is_double))
    if named is None:
        named = blocks_for(&c.p, threads, c.weights == NULL, True, &blocks)
    else:
        blocks = named.c
    c.cut = fmha_blocks_cut(&c.p, &blocks, False)
    cdef ptrdiff_t items = fmha_items(&c.cut)
    if items == 0:
        return 0
    if c.p.parts > 0 and kernels.matrix_forward != NULL:
        return matrix_forward(c, kernels, items, problem.itemsize, threads)
    cdef fmha_task task = kernels.tiled_forward if c.weights == NULL else kernels.tiled_weights
    cdef ptrdiff_t size = kernels.tiled_scratch(&c.p, threads, c.weights != NULL)
    cdef Scratch scratch = scratch_for(size * problem.itemsize, items, threads)
    lend(c, scratch)
    if blocks.merged:
        return run_and_merge(c, problem, &blocks, scratch.threads)
    with nogil:
        run_heads(task, c, items, problem)
    return finish()


cdef int run_and_merge(fmha_run *c, Problem problem, const fmha_blocks *blocks, int threads) except -1:
    """`run_tiled` where some blocks are cut into runs of keys: a second pass merges these."""
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    cdef ptrdiff_t left = fmha_runs_left(&c.p, blocks), turns = bytes_of_turns(left, blocks)
    cdef Scratch runs = Scratch(left * kernels.run_scratch(&c.p) * problem.itemsize, 1), done = Scratch(turns, 1)
    c.chunks = runs.start
    c.whole, c.part_keys, c.turns = blocks.whole, blocks.keys, <int *>done.start if turns else NULL
    if turns:
        memset(c.turns, 0, turns)
    with nogil:
        if fmha_pool_run(kernels.tiled_forward, c, fmha_items(&c.cut), threads):
            c.cut = fmha_blocks_cut(&c.p, blocks, True)
            fmha_pool_run(kernels.tiled_merge, c, fmha_items(&c.cut), threads)
    return finish()


cdef ptrdiff_t bytes_of_turns(ptrdiff_t left, const fmha_blocks *blocks) noexcept nogil:
    return left * FMHA_RUN_TURNS * <ptrdiff_t>sizeof(int) if blocks.keys else 0


cdef Blocks blocks_for(const fmha_problem *p, int threads, bint runs, bint running, fmha_blocks *blocks):
    """`fmha_forward_blocks`; where it takes a simulation, as an object that is remembered and holds the lists, else None.
    running: see `cuts`."""
    cdef object key, found
    cdef int quick = False
    cdef Blocks made
    if not fmha_blocks_vary(p, threads):
        blocks[0] = fmha_forward_blocks(p, threads, runs, &quick)
        return None
    key = sizes_of(p, threads, 1 + runs)
    found = cuts.get(key)
    if found is None or found[1]:
        quick = running and found is None
        made = Blocks()
        with nogil:
            made.c = fmha_forward_blocks(p, threads, runs, &quick)
        made.list_items(p)
        remember(key, (made, quick))
    else:
        made = found[0]
    blocks[0] = made.c
    return made


cdef int matrix_forward(fmha_run *c, const fmha_kernels *kernels, ptrdiff_t items, ptrdiff_t size, int threads) except -1:
    cdef fmha_cut rows = c.cut
    cdef ptrdiff_t heads = c.p.B * c.p.Hkv
    cdef bint by_heads = fmha_by_heads(&c.p, threads)
    cdef ptrdiff_t own = kernels.matrix_scratch(&c.p, by_heads, c.weights != NULL) * size
    cdef Scratch scratch = scratch_for(own, heads if by_heads else items, threads)
    cdef Scratch shared = Scratch(0 if by_heads else heads * kernels.matrix_bytes(&c.p), 1)
    lend(c, scratch)
    c.shared, c.first_shared = shared.start, 0
    c.cut = kernels.matrix_cut(&c.p, 0)
    with nogil:
        if by_heads:
            fmha_pool_run(kernels.matrix_head, c, heads, scratch.threads)
        elif fmha_pool_run(kernels.matrix_pack, c, fmha_items(&c.cut), threads):
            c.cut = rows
            fmha_pool_run(kernels.matrix_forward, c, items, scratch.threads)
    return finish()


def tiled_backward(Problem problem, out, lse, grad_out, grad_q, grad_k, grad_v, states, split, int threads):
    """Gradients of the "tiled" algorithm; all arrays with unit last stride. states (B, H, Lq, ROW_STATE), or None: of each row
    shift, inverse and delta, where P = exp(score - shift) * inverse and delta = sum(P dP); without keys nothing is written.

    split: "whole", or of what the items of split heads are (see backward_items.inc.h), whatever the threads: keys, 48, 96 or 192,
    and blocks of a share, at most 8, or 0: all; None: as is best for these. The bits are the same. On matrix tiles keys are 192
    and blocks all; without queries blocks are all.
    """
    cdef fmha_run c
    c.p = problem.c
    c.lse = pointer(lse, False)
    c.row_states = pointer(states, True) if states is not None else NULL
    read_array(out, &c.out, NULL, problem.element_size, False)
    read_array(grad_out, &c.grad_out, NULL, problem.element_size, False)
    read_array(grad_q, &c.grad_q, NULL, problem.element_size, True)
    read_array(grad_k, &c.grad_k, NULL, problem.stored_size, True)
    read_array(grad_v, &c.grad_v, NULL, problem.stored_size, True)
    run_tiled_backward(&c, problem, split, threads)


def backward_split(Problem problem, int threads, bint quick=False):
    """How a backward pass of "tiled" splits heads for so many threads: how many key/value heads, or copies of these, are whole;
    keys of an item of the others; blocks of it, 0: all; the share of the threads that is busy. quick: for sizes that it meets
    for the first time."""
    cdef fmha_problem p = fmha_in_copies(&problem.c)
    cdef fmha_split split
    cdef int short = quick
    if quick:
        split = fmha_backward_split(&p, threads, &short)
    else:
        split_for(&p, threads, False, &split)
    return split.whole, split.keys, split.share, split.balance


def head_copies(Problem problem):
    """How many copies of each key/value head a backward pass of "tiled" has, each for some of its query heads."""
    return max(1, fmha_in_copies(&problem.c).copies)


# Cuts found before, by the sizes, and whether a quick look found them: for many threads to look at all ways can take as long
# as the pass. So a pass looks quickly where it meets sizes for the first time, which may be the last, and thoroughly the second.
cdef dict cuts = {}
cdef enum:
    MOST_CUTS = 256


def remembered_cuts():
    """(cut, whether a quick look that left ways out has found it) of each pass that is remembered. For tests."""
    return list(cuts.values())


cdef int remember(object key, object cut) except -1:
    if len(cuts) >= MOST_CUTS and key not in cuts:
        cuts.clear()
    cuts[key] = cut
    return 0


cdef object sizes_of(const fmha_problem *p, int threads, int of):
    """What the best cut depends on. of: 0 backward, 1 and 2 forward without and with runs of keys."""
    return (of, threads, p.B, p.H, p.Hkv, p.Lq, p.Lk, p.parts > 0, p.left, p.right,
            row_numbers(p.offset if p.banded else NULL, p.B), row_numbers(p.key_start, p.B), row_numbers(p.key_length, p.B))


cdef int split_for(const fmha_problem *p, int threads, bint running, fmha_split *split) except -1:
    """`fmha_backward_split`, remembered. running: see `cuts`."""
    cdef object key, found
    cdef int quick = False
    if threads == 1:                # nothing is split: tiny calls
        split[0] = fmha_backward_split(p, threads, &quick)
        return 0
    key = sizes_of(p, threads, 0)
    found = cuts.get(key)
    if found is None or found[1]:
        quick = running and found is None
        with nogil:
            split[0] = fmha_backward_split(p, threads, &quick)
        remember(key, (split[0], quick))
    else:
        split[0] = found[0]
    return 0


cdef bytes row_numbers(const int64_t *x, ptrdiff_t many):
    """What can be compared of one number for each batch row."""
    return (<const char *>x)[:many * sizeof(int64_t)] if x != NULL else b""


cdef int run_tiled_backward(fmha_run *c, Problem problem, wanted, int threads) except -1:
    cdef Scratch scratch, kept, shared, copies
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    cdef ptrdiff_t size = problem.itemsize, items, own
    cdef int mode
    cdef fmha_split split
    cdef bint on_tiles = c.p.parts > 0 and kernels.matrix_backward != NULL
    c.p = fmha_in_copies(&c.p)
    c.reach, c.copies = 0, NULL
    if c.p.copies:
        copies = Scratch(c.p.B * c.p.Hkv * (kernels.gradient_sums if on_tiles else kernels.copy_sums)(&c.p) * size, 1)
        c.copies = copies.start
    threads = threads_for(threads, BACKWARD_TERMS * attention_terms(&c.p, problem.is_double))
    split_for(&c.p, threads, True, &split)
    if wanted is not None:
        split.whole = c.p.B * c.p.Hkv if wanted == "whole" else 0
        split.keys, split.share = (FMHA_TILE_KEYS, 0) if wanted == "whole" or c.p.parts > 0 else wanted
        if c.p.Lq == 0:
            split.share = 0
        split.together = split.share        # any number of tiles serves
        split.mode = FMHA_WHOLE if wanted == "whole" else FMHA_SHARES if split.share else FMHA_TURNS
    c.share = split.share
    cdef fmha_task task = kernels.matrix_backward if on_tiles else kernels.tiled_backward
    cdef ptrdiff_t split_heads = c.p.B * c.p.Hkv - split.whole
    if split_heads > 0:
        own = (kernels.gradient_kept if on_tiles else kernels.backward_kept)(&c.p, c.share) * size
        kept = Scratch(split_heads * own, 1)
        c.kept = kept.start
    if split_heads > 0 and on_tiles:
        shared = Scratch(split_heads * kernels.gradient_bytes(&c.p), 1)
        c.shared, c.first_shared = shared.start, split.whole
        c.cut = kernels.matrix_cut(&c.p, split.whole)
        with nogil:
            if fmha_pool_run(kernels.gradient_pack_keys, c, fmha_items(&c.cut), threads):
                c.cut = fmha_backward_cut(&c.p, FMHA_PREPARE, &split)
                fmha_pool_run(kernels.gradient_pack_rows, c, fmha_items(&c.cut), threads)
        finish()
    cdef int apart[2]
    memset(apart, 0, sizeof(apart))
    c.apart, c.again = apart, False
    passes = FMHA_WHOLE, FMHA_PREPARE, split.mode, FMHA_RESULTS, FMHA_MEND, FMHA_RESTART, split.mode, FMHA_RESULTS
    for mode in passes[:1] if split.mode == FMHA_WHOLE else passes:
        if (mode == FMHA_MEND and not apart[0]) or (mode == FMHA_RESTART and not apart[1]):
            break
        c.mode, c.again = mode, mode == FMHA_RESTART or c.again
        c.cut = fmha_backward_cut(&c.p, mode, &split)
        items = fmha_items(&c.cut)
        if items == 0:
            continue
        own = (kernels.gradient_scratch if on_tiles else kernels.backward_scratch)(&c.p, mode, c.share) * size
        scratch = scratch_for(own, items, threads)
        lend(c, scratch)
        with nogil:
            if mode == FMHA_WHOLE:
                run_heads(task, c, items, problem)
            else:
                fmha_pool_run(task, c, items, scratch.threads)
        finish()
    if c.p.copies:
        c.cut = fmha_copies_cut(&c.p)
        with nogil:
            fmha_pool_run(kernels.gradient_add if on_tiles else kernels.add_copies, c, fmha_items(&c.cut), threads)
        finish()
    return 0


def mask_gradient(Problem problem, grad_out, states, grad_mask, int threads):
    """grad_mask, in the shape of an additive mask with 4 axes, <- its gradient, from the states that a backward pass has left."""
    cdef fmha_run c
    cdef Scratch scratch
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    c.p = problem.c
    read_array(grad_out, &c.grad_out, NULL, problem.element_size, False)
    read_array(grad_mask, &c.grad_mask, NULL, size_of(c.p.mask_element, problem.itemsize), True)
    c.row_states = pointer(states, False)
    c.cut = fmha_mask_cut(&c.p, &c.grad_mask)
    cdef ptrdiff_t items = fmha_items(&c.cut)
    scratch = scratch_for(kernels.mask_gradient_scratch(&c.p) * problem.itemsize, items, threads)
    lend(&c, scratch)
    with nogil:
        fmha_pool_run(kernels.mask_gradient, &c, items, scratch.threads)
    finish()


def tile_sizes():
    """(query rows of a block at most, keys of a tile) of the tiled algorithm, keys of a chunk and most query rows per key/value
    head of the decode algorithm."""
    return FMHA_BLOCK_ROWS, FMHA_TILE_KEYS, FMHA_CHUNK_KEYS, FMHA_DECODE_ROWS


def tiled_scratch(Problem problem, bint backward, int threads):
    """Bytes of scratch of the tiled algorithm: of one of so many threads, and of what all share."""
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    cdef ptrdiff_t split_heads, heads = problem.c.B * problem.c.Hkv, of_whole, of_split, kept, sums
    cdef fmha_problem p
    cdef bint by_heads, on_tiles = problem.c.parts > 0 and kernels.matrix_forward != NULL
    cdef fmha_split split
    if problem.c.Hkv == 0:
        return 0, 0
    if backward:
        p = fmha_in_copies(&problem.c)
        heads = p.B * p.Hkv
        split_for(&p, threads, False, &split)
        split_heads = heads - split.whole
        scratch = kernels.gradient_scratch if on_tiles else kernels.backward_scratch
        of_whole = scratch(&p, FMHA_WHOLE, 0) if split.whole else 0
        of_split = scratch(&p, split.mode, split.share) if split_heads else 0
        kept = (kernels.gradient_kept if on_tiles else kernels.backward_kept)(&p, split.share) * problem.itemsize
        sums = (kernels.gradient_sums if on_tiles else kernels.copy_sums)(&p) * problem.itemsize
        if on_tiles:
            kept += kernels.gradient_bytes(&p)
        return max(of_whole, of_split) * problem.itemsize, split_heads * kept + heads * sums
    if on_tiles:
        by_heads = fmha_by_heads(&problem.c, threads)
        return (kernels.matrix_scratch(&problem.c, by_heads, False) * problem.itemsize,
                0 if by_heads else heads * kernels.matrix_bytes(&problem.c))
    cdef fmha_blocks blocks
    blocks_for(&problem.c, threads, True, False, &blocks)
    cdef ptrdiff_t left = fmha_runs_left(&problem.c, &blocks), shared = left * kernels.run_scratch(&problem.c) * problem.itemsize
    return kernels.tiled_scratch(&problem.c, threads, False) * problem.itemsize, shared + bytes_of_turns(left, &blocks)
