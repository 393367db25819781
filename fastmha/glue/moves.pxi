# Tokens copied between the rows of a cache, all or none.
from cpython.mem cimport PyMem_RawFree
from libc.stddef cimport ptrdiff_t
from libc.string cimport memcpy

from fastmha._kernels cimport fmha_array


ctypedef struct Move:
    ptrdiff_t target, to, source, at, rows, count


ctypedef struct Tokens:
    fmha_array x                # strides in bytes
    ptrdiff_t shape[4]          # rows, heads, slots, bytes of a token


cdef Tokens *tokens_at(Tokens *both, ptrdiff_t *row, ptrdiff_t rows, ptrdiff_t slot, ptrdiff_t count) noexcept nogil:
    """Which of two arrays, whose rows are counted through, holds these; `row` becomes its own. NULL where neither does."""
    cdef Tokens *found = both
    if row[0] >= both.shape[0]:
        row[0] -= both.shape[0]
        found = both + 1
    if (row[0] < 0 or rows < 0 or row[0] > found.shape[0] - rows or slot < 0 or count < 0
            or slot > found.shape[2] - count):
        return NULL
    return found


cdef bint move_tokens(Tokens *both, Move m, bint write, bint *other_written) noexcept nogil:
    """One move within rows of two arrays, or only whether it stays within them; one to the second array is noted."""
    cdef Tokens *target = tokens_at(both, &m.target, m.rows, m.to, m.count)
    cdef Tokens *source = tokens_at(both, &m.source, m.rows, m.at, m.count)
    cdef ptrdiff_t b, h, i, size = both.shape[3]
    cdef char *y
    cdef const char *x
    if target == NULL or source == NULL:
        return False
    if not write:
        other_written[0] = other_written[0] or target != both
        return True
    for b in range(m.rows):
        for h in range(both.shape[1]):
            y = target.x.data + (m.target + b) * target.x.stride[0] + h * target.x.stride[1] + m.to * target.x.stride[2]
            x = source.x.data + (m.source + b) * source.x.stride[0] + h * source.x.stride[1] + m.at * source.x.stride[2]
            if target.x.stride[2] == size and source.x.stride[2] == size:
                memcpy(y, x, m.count * size)
            else:
                for i in range(m.count):
                    memcpy(y + i * target.x.stride[2], x + i * source.x.stride[2], size)
    return True


def move_rows(buffers, others, list moves, owner, str name, value):
    """Copy tokens between rows, then set an attribute of `owner`: all of it or nothing. What can fail comes first, and in
    between nothing goes back to the interpreter, where the handler of a signal could raise.

    `buffers` and `others` are each (k, v), arrays (rows, heads, slots, width) with unit last stride, alike in dtype, heads
    and width; others' rows are counted on from those of buffers. A move (target, to, source, at, rows, count) copies `count`
    tokens from slot `at` of row `source` to slot `to` of row `target`, another one, and so for `rows` rows from these on. One
    move after the other.
    """
    cdef Tokens arrays[4]       # k of both, v of both
    cdef Tokens *both
    cdef bint other_written = False
    cdef ptrdiff_t i, n = len(moves)
    cdef int x
    cdef Move *found = <Move *>allocate((n + 1) * sizeof(Move))
    if found == NULL:
        raise MemoryError(f"no memory for {n} moves")
    try:
        for x in range(2):
            both = arrays + 2 * x
            own, other = buffers[x], others[x]
            read_array(own, &both[0].x, both[0].shape, 1, True)
            read_array(other, &both[1].x, both[1].shape, 1, False)
            alike = own.dtype is other.dtype or own.dtype == other.dtype
            if not alike or both[0].shape[1] != both[1].shape[1] or both[0].shape[3] != both[1].shape[3]:
                raise ValueError(f"others[{x}] must be like buffers[{x}], {own.dtype} {own.shape}, but for rows and slots, got "
                                 f"{other.dtype} {other.shape}")
            both[0].shape[3] *= own.itemsize
        for i in range(n):
            found[i].target, found[i].to, found[i].source, found[i].at, found[i].rows, found[i].count = moves[i]
            for x in range(2):
                if not move_tokens(arrays + 2 * x, found[i], False, &other_written):
                    raise ValueError(f"moves[{i}] must stay within the rows and slots, got {moves[i]}")
        if other_written:
            for x in range(2):
                pointer(others[x], True)        # an error where that is read-only
        for i in range(n):
            for x in range(2):
                move_tokens(arrays + 2 * x, found[i], True, NULL)
        setattr(owner, name, value)
    finally:
        PyMem_RawFree(found)
