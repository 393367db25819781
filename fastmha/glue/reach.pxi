# How far away the keys and values of a call are: what has been read since they were, by this module's calls.
from libc.math cimport INFINITY

from fastmha._kernels cimport FMHA_KNOWN_FROM, FMHA_UNKNOWN_FROM


cdef enum:
    READINGS = 256                  # places of keys that are remembered, those that were read last

ctypedef struct Reading:
    const void *keys
    double end                      # bytes that all calls had read when this one had

cdef Reading readings[READINGS]
cdef double read_by_all = 0
cdef double read_meanwhile = -1


def read_before(double bytes):
    """As if the keys and values of each call had last been read so many bytes before it; -1: as the calls were. Returns what it
    was. For tests of what comes from memory on small arrays: the bits do not depend on it."""
    global read_meanwhile
    before = read_meanwhile
    read_meanwhile = bytes
    return before


cdef void note_read(double bytes) noexcept nogil:
    """So many bytes have been read, by which others may have left the caches."""
    global read_by_all
    read_by_all += bytes


cdef double reach_of(const void *keys, double bytes, bint reads) noexcept nogil:
    """How many bytes are read from one time on to the next that these keys and values are, these included, so many: the bytes
    alone where the same call is made time and again, more where a model has other ones for each layer. Where nobody has read
    them before they are far away, but for so few that whoever has just written them leaves them in a cache. reads: this call
    does."""
    global read_by_all
    cdef Reading *last = &readings[0]           # of these keys, or the one that is longest ago
    cdef bint few = bytes < FMHA_KNOWN_FROM
    cdef int n
    for n in range(0 if few else READINGS):
        if readings[n].keys == keys:
            last = &readings[n]
            break
        if readings[n].end < last.end:
            last = &readings[n]
    cdef bint known = not few and last.keys == keys
    cdef double reach = read_by_all - last.end + bytes if known else INFINITY
    if reads:
        read_by_all += bytes
        if not few:
            last.keys, last.end = keys, read_by_all
    if read_meanwhile >= 0:
        return read_meanwhile + bytes
    return reach if known or bytes >= FMHA_UNKNOWN_FROM else bytes
