# Attention over sequences that lie end to end: every pass over all of them is one run.
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int64_t
from libc.string cimport memset

from numpy import zeros

from fastmha._kernels cimport (
    FMHA_MEND, FMHA_PREPARE, FMHA_RESTART, FMHA_RESULTS, FMHA_ROW_STATE, FMHA_TILE_KEYS, FMHA_TURNS, FMHA_WHOLE,
    fmha_backward_cut, fmha_chunks, fmha_copies_cut, fmha_cut, fmha_dealt, fmha_decode_cut, fmha_decode_dealt,
    fmha_forward_cut, fmha_heads_cut, fmha_in_copies, fmha_items, fmha_kernels, fmha_neighbours, fmha_neighbours_cut,
    fmha_pool_deal, fmha_pool_run, fmha_problem, fmha_run, fmha_split, fmha_task, fmha_waiting_chunks,
)


ctypedef fmha_cut (*packed_cut)(const fmha_run *, const fmha_kernels *, int64_t) noexcept nogil
ctypedef ptrdiff_t (*packed_scratch)(const fmha_run *, const fmha_kernels *) noexcept nogil

ctypedef struct Packed:
    # One pass over sequences that lie end to end. Each is a run of its own with one batch row; `whole` is a run over all tokens.
    fmha_run whole
    const fmha_kernels *kernels
    fmha_task task
    packed_cut cut                      # of a run, with so many heads taken whole
    packed_scratch scratch              # elements of one thread
    ptrdiff_t sequences, itemsize, element_size, stored_size
    bint backward
    const int64_t *table                # for each sequence PACKED_COLUMNS numbers
    int64_t *first                      # (sequences + 1) the first item of each
    int64_t *chunk                      # (sequences) where what chunks leave begins, or what is kept of split heads; or NULL
    int64_t *shared                     # (sequences) where operands for matrix tiles begin, of split heads; or NULL
    int64_t *copies                     # (sequences) where what copies of heads give begins; or NULL
    double bytes                        # of all items of the pass


cdef enum:
    PACKED_COLUMNS = 6                  # first query, queries, first key, keys, number of the sequence, heads taken whole
    FAR_BYTES = 1 << 22                 # of a pass, up to which no kernel fetches the items of a thread that follow, which
    FAR_ITEMS = 8                       # may be so many on


cdef void sequence_run(const Packed *c, ptrdiff_t s, fmha_run *to) noexcept nogil:
    """The run of sequence s."""
    cdef const int64_t *row = c.table + s * PACKED_COLUMNS
    cdef ptrdiff_t size = c.itemsize, of_q = c.element_size, of_k = c.stored_size, q0 = row[0], k0 = row[2]
    to[0] = c.whole
    to.p.Lq, to.p.Lk = row[1], row[3]
    if c.backward:
        to.p = fmha_in_copies(&to.p)
    cdef ptrdiff_t heads = row[5] * max(1, to.p.copies)
    to.p.q.data += q0 * to.p.q.stride[2] * of_q
    to.p.k.data += k0 * to.p.k.stride[2] * of_k
    to.p.v.data += k0 * to.p.v.stride[2] * of_k
    if to.p.offset != NULL:
        to.p.offset += row[4]
    to.p.dropout.b += row[4]
    to.out.data += q0 * to.out.stride[2] * of_q
    if to.lse != NULL:                  # a sequence's (H, Lq) behind those of the sequences before
        to.lse += to.p.H * q0 * size
    if to.row_states != NULL:
        to.row_states += to.p.H * q0 * FMHA_ROW_STATE * size
    if to.grad_out.data != NULL:
        to.grad_out.data += q0 * to.grad_out.stride[2] * of_q
        to.grad_q.data += q0 * to.grad_q.stride[2] * of_q
        to.grad_k.data += k0 * to.grad_k.stride[2] * of_k
        to.grad_v.data += k0 * to.grad_v.stride[2] * of_k
    if c.chunk != NULL:
        if to.chunks != NULL:
            to.chunks += c.chunk[s]
        if to.kept != NULL:
            to.kept += c.chunk[s]
    if c.shared != NULL and to.shared != NULL:
        to.shared += c.shared[s]
        to.first_shared = heads
    to.copies = to.copies + c.copies[s] if to.p.copies and c.copies != NULL else NULL
    to.cut = c.cut(to, c.kernels, heads)


cdef void packed_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Item `index` of all sequences' is one of the sequence that it lies in."""
    cdef Packed *c = <Packed *>context
    cdef fmha_run own, behind
    cdef ptrdiff_t low = 0, high = c.sequences, middle
    while high - low > 1:
        middle = (low + high) // 2
        if c.first[middle] <= index:
            low = middle
        else:
            high = middle
    sequence_run(c, low, &own)
    own.items_before = c.first[low]
    if c.bytes >= FAR_BYTES and low + 1 < c.sequences and c.first[low + 1] - index <= own.some * own.threads + FAR_ITEMS:
        sequence_run(c, low + 1, &behind)
        own.behind = &behind
    c.task(&own, index - c.first[low], worker)


cdef fmha_cut packed_forward_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    return fmha_forward_cut(&run.p)


cdef fmha_cut packed_decode_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    # as for more threads than chunks, each an item: one sequence's cut does not know how many the others have
    return fmha_decode_cut(&run.p, fmha_chunks(&run.p) + 1)


cdef fmha_cut packed_neighbours_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    return fmha_neighbours_cut(&run.p, run.neighbours)


cdef fmha_cut packed_heads_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    return fmha_heads_cut(&run.p)


cdef fmha_cut packed_mode_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    # whole heads, or of the others what a backward pass of this mode goes through: all blocks, or all tiles
    cdef fmha_split split
    split.mode, split.whole, split.keys, split.share, split.together = FMHA_TURNS, whole, FMHA_TILE_KEYS, 0, 0
    return fmha_backward_cut(&run.p, run.mode, &split)


cdef fmha_cut packed_copies_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    return fmha_copies_cut(&run.p)


cdef fmha_cut packed_chunks_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    return kernels.matrix_cut(&run.p, whole)


cdef ptrdiff_t forward_scratch_of(const fmha_run *run, const fmha_kernels *kernels) noexcept nogil:
    return kernels.tiled_scratch(&run.p, run.threads, False)


cdef ptrdiff_t decode_scratch_of(const fmha_run *run, const fmha_kernels *kernels) noexcept nogil:
    return chunks_scratch(run, kernels)


cdef ptrdiff_t merge_scratch_of(const fmha_run *run, const fmha_kernels *kernels) noexcept nogil:
    return kernels.merge_scratch(&run.p)


cdef ptrdiff_t matrix_scratch_of(const fmha_run *run, const fmha_kernels *kernels) noexcept nogil:
    return kernels.matrix_scratch(&run.p, run.mode == FMHA_WHOLE, False)


cdef ptrdiff_t backward_scratch_of(const fmha_run *run, const fmha_kernels *kernels) noexcept nogil:
    return kernels.backward_scratch(&run.p, run.mode, 0)


cdef ptrdiff_t gradient_scratch_of(const fmha_run *run, const fmha_kernels *kernels) noexcept nogil:
    return kernels.gradient_scratch(&run.p, run.mode, 0)


cdef ptrdiff_t packed_items(Packed *c, ptrdiff_t *most) noexcept nogil:
    """Numbers the items of a pass; most: the scratch of one thread for whichever sequence needs most, where that is larger."""
    cdef ptrdiff_t s, items = 0, own_items
    cdef fmha_run own
    c.bytes = 0
    for s in range(c.sequences):
        sequence_run(c, s, &own)
        c.first[s] = items
        own_items = fmha_items(&own.cut)
        if own_items == 0:          # one that is split would ask the pass over whole heads for scratch by its length
            continue
        items += own_items
        c.bytes += own_items * max(1, own.neighbours) * bytes_of_head(&own.p, c.element_size, c.stored_size)
        if c.scratch != NULL:
            most[0] = max(most[0], c.scratch(&own, c.kernels) * c.itemsize)
    c.first[c.sequences] = items
    return items


cdef int run_packed(Packed *c, ptrdiff_t items) noexcept nogil:
    """`fmha_pool_run` of a pass whose items are numbered: of short sequences a thread takes several at a time."""
    cdef bint waiting = c.whole.mode == FMHA_TURNS          # one for what another does
    c.whole.some = 1 if waiting or items == 0 else fmha_dealt(items, c.bytes / items, c.whole.threads)
    if c.task == c.kernels.decode:
        c.whole.some = max(c.whole.some, fmha_decode_dealt(items, c.whole.threads))
    c.whole.all_bytes = c.bytes
    return fmha_pool_deal(packed_item, c, items, c.whole.threads, c.whole.some)


cdef int packed_pass(Packed *c, fmha_task task, packed_cut cut, packed_scratch scratch, int threads) except -1:
    cdef ptrdiff_t most = 0, items
    cdef Scratch memory
    c.task, c.cut, c.scratch, c.whole.threads = task, cut, scratch, threads
    items = packed_items(c, &most)
    if items == 0:
        return 0
    memory = scratch_for(most, items, threads)
    lend(&c.whole, memory)
    with nogil:
        run_packed(c, items)
    return finish()


cdef ptrdiff_t split_bytes(Packed *c, const fmha_problem *p, ptrdiff_t of_head, ptrdiff_t s) noexcept nogil:
    """So many bytes for each head of sequence s, or copy of one, that is not taken whole."""
    return (p.Hkv - c.table[s * PACKED_COLUMNS + 5] * max(1, p.copies)) * of_head


cdef int threads_for_packed(const Packed *c, bint decode, double factor, int threads) noexcept:
    """Of so many threads those that all sequences together are worth; factor: their passes, in forward ones."""
    cdef bint is_double = c.itemsize == 8
    cdef double terms = 0
    cdef fmha_run own
    cdef ptrdiff_t s
    if threads == 1:
        return 1
    for s in range(c.sequences):
        sequence_run(c, s, &own)
        terms += decode_terms(&own.p, is_double) if decode else attention_terms(&own.p, is_double)
    return threads_for(threads, factor * terms)


cdef ptrdiff_t packed_neighbours(Packed *c, int threads) noexcept nogil:
    """How many heads are an item of "decode", side by side; and the reach of all."""
    cdef ptrdiff_t s, chunks = 0, rows = 0
    cdef double bytes = 0
    cdef fmha_run own
    if c.whole.p.Hkv == 0:
        return 1
    for s in range(c.sequences):
        sequence_run(c, s, &own)
        chunks += fmha_chunks(&own.p) // own.p.Hkv
        rows = max(rows, own.p.H // own.p.Hkv * own.p.Lq)
        bytes += bytes_of_keys(&own.p, c.stored_size)
    c.whole.reach = reach_of(c.whole.p.k.data, bytes, True)
    return 1 if c.whole.reach < far_from else fmha_neighbours(&c.whole.p, rows, c.stored_size, chunks, threads)


def packed_forward(Problem problem, table, out, lse, bint decode, int threads):
    """Attention of sequences that lie end to end in q, k, v (1, heads, tokens, width), by "tiled" or "decode".

    table (sequences, 6) int64: first query, queries, first key, keys, number of the sequence in the offsets (sequences,) and in
    the draws of dropout, and how many of its key/value heads are items of their own, which on matrix tiles and backward spare
    memory. lse: (heads, queries) of each sequence behind the one before, or None.
    """
    cdef Packed c
    cdef ptrdiff_t most = 0, items, merging, s, bytes = 0
    cdef int64_t *shares
    cdef fmha_run own
    cdef Scratch numbers, scratch, chunks
    prepare_packed(&c, problem, table, out, lse)
    threads = threads_for_packed(&c, decode, 1, threads)
    numbers = Scratch((2 * c.sequences + 2) * sizeof(int64_t), 1)
    c.first = <int64_t *>numbers.start
    if not decode and c.whole.p.parts > 0 and c.kernels.matrix_forward != NULL:
        c.whole.mode = FMHA_WHOLE
        packed_pass(&c, c.kernels.matrix_head, packed_mode_cut, matrix_scratch_of, threads)
        shares = c.first + c.sequences + 1
        for s in range(c.sequences):
            sequence_run(&c, s, &own)
            shares[s] = bytes
            bytes += split_bytes(&c, &own.p, c.kernels.matrix_bytes(&own.p), s)
        chunks = Scratch(bytes, 1)
        c.shared, c.whole.shared, c.whole.mode = shares, chunks.start, FMHA_PREPARE
        packed_pass(&c, c.kernels.matrix_pack, packed_chunks_cut, NULL, threads)
        packed_pass(&c, c.kernels.matrix_forward, packed_mode_cut, matrix_scratch_of, threads)
        return
    if not decode:
        packed_pass(&c, c.kernels.tiled_forward, packed_forward_cut, forward_scratch_of, threads)
        return
    c.cut, c.scratch = packed_heads_cut, merge_scratch_of
    merging = packed_items(&c, &most)
    c.task, c.cut, c.scratch = c.kernels.decode, packed_decode_cut, decode_scratch_of
    c.whole.neighbours = packed_neighbours(&c, threads)
    if c.whole.neighbours > 1:
        c.task, c.cut = c.kernels.decode_neighbours, packed_neighbours_cut
    items = packed_items(&c, &most)
    c.chunk = c.first + c.sequences + 1
    for s in range(c.sequences):
        c.chunk[s] = 0
    for s in range(c.sequences):
        sequence_run(&c, s, &own)
        c.chunk[s] = bytes
        bytes += fmha_waiting_chunks(&own.p) * c.kernels.chunk_scratch(&own.p) * c.itemsize
    scratch = scratch_for(most, max(items, merging), threads)
    lend(&c.whole, scratch)
    chunks = Scratch(bytes, 1)
    c.whole.chunks = chunks.start
    with nogil:
        if run_packed(&c, items):
            c.task, c.cut = c.kernels.decode_merge, packed_heads_cut
            packed_items(&c, &most)
            fmha_pool_run(packed_item, &c, merging, scratch.threads)
    finish()


def packed_backward(Problem problem, table, out, lse, grad_out, grad_q, grad_k, grad_v, states, int threads):
    """Gradients of sequences that lie end to end, by "tiled"; of the key/value heads that are no items of their own the tiles
    take turns. states: ROW_STATE numbers for each of lse, zeros before, or None."""
    cdef Packed c
    cdef ptrdiff_t s, of_head, bytes_kept = 0, bytes_shared = 0, bytes_copies = 0
    cdef Scratch numbers, kept, shared, copies
    cdef fmha_run own
    prepare_packed(&c, problem, table, out, lse)
    read_array(grad_out, &c.whole.grad_out, NULL, problem.element_size, False)
    read_array(grad_q, &c.whole.grad_q, NULL, problem.element_size, True)
    read_array(grad_k, &c.whole.grad_k, NULL, problem.stored_size, True)
    read_array(grad_v, &c.whole.grad_v, NULL, problem.stored_size, True)
    c.whole.row_states = pointer(states, True) if states is not None else NULL
    threads = threads_for_packed(&c, False, BACKWARD_TERMS, threads)
    cdef bint on_tiles = c.whole.p.parts > 0 and c.kernels.matrix_backward != NULL
    cdef fmha_task task = c.kernels.matrix_backward if on_tiles else c.kernels.tiled_backward
    cdef packed_scratch of_thread = gradient_scratch_of if on_tiles else backward_scratch_of
    numbers = Scratch((4 * c.sequences + 1) * sizeof(int64_t), 1)
    c.first, c.backward = <int64_t *>numbers.start, True
    cdef int64_t *keeps = c.first + c.sequences + 1
    cdef int64_t *shares = keeps + c.sequences
    cdef int64_t *given = shares + c.sequences
    for s in range(c.sequences):
        sequence_run(&c, s, &own)
        of_head = (c.kernels.gradient_kept if on_tiles else c.kernels.backward_kept)(&own.p, 0) * c.itemsize
        keeps[s], shares[s], given[s] = bytes_kept, bytes_shared, bytes_copies
        bytes_kept += split_bytes(&c, &own.p, of_head, s)
        bytes_copies += own.p.Hkv * (c.kernels.gradient_sums if on_tiles else c.kernels.copy_sums)(&own.p) * c.itemsize
        if on_tiles:
            bytes_shared += split_bytes(&c, &own.p, c.kernels.gradient_bytes(&own.p), s)
    copies = Scratch(bytes_copies, 1)
    c.copies, c.whole.copies, c.whole.mode = given, copies.start, FMHA_WHOLE
    packed_pass(&c, task, packed_mode_cut, of_thread, threads)
    kept, shared = Scratch(bytes_kept, 1), Scratch(bytes_shared, 1)
    c.chunk, c.whole.kept = keeps, kept.start
    if on_tiles:
        c.shared, c.whole.shared, c.whole.mode = shares, shared.start, FMHA_PREPARE
        packed_pass(&c, c.kernels.gradient_pack_keys, packed_chunks_cut, NULL, threads)
        packed_pass(&c, c.kernels.gradient_pack_rows, packed_mode_cut, NULL, threads)
    cdef int apart[2]
    memset(apart, 0, sizeof(apart))
    c.whole.apart = apart
    for mode in (FMHA_PREPARE, FMHA_TURNS, FMHA_RESULTS, FMHA_MEND, FMHA_RESTART, FMHA_TURNS, FMHA_RESULTS):
        if (mode == FMHA_MEND and not apart[0]) or (mode == FMHA_RESTART and not apart[1]):
            break
        c.whole.mode, c.whole.again = mode, mode == FMHA_RESTART or c.whole.again
        packed_pass(&c, task, packed_mode_cut, of_thread, threads)
    if bytes_copies:
        packed_pass(&c, c.kernels.gradient_add if on_tiles else c.kernels.add_copies, packed_copies_cut, NULL, threads)


cdef int prepare_packed(Packed *c, Problem problem, table, out, lse) except -1:
    """What both directions share."""
    memset(c, 0, sizeof(Packed))
    c.whole.p, c.itemsize, c.kernels = problem.c, problem.itemsize, kernel_tables[problem.is_double]
    c.element_size, c.stored_size = problem.element_size, problem.stored_size
    c.table, c.sequences = <const int64_t *>pointer(table, False), len(table)
    c.cut = packed_heads_cut
    read_array(out, &c.whole.out, NULL, problem.element_size, True)
    c.whole.lse = pointer(lse, True) if lse is not None else NULL
    return 0
