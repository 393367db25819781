# A run of items on the pool: its scratch, how many threads it is worth, BLAS held at one thread, signals.
from cpython.exc cimport PyErr_Occurred
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport uintptr_t

from fastmha._kernels cimport (
    FMHA_BLOCK_ROWS, FMHA_CACHE_LINE, FMHA_IS_CHECKED, FMHA_KEPT_BYTES, FMHA_MOST_IN_BLAS, check_signals,
    fmha_ask_large_pages, fmha_blas_enter, fmha_blas_item_begin, fmha_blas_item_end, fmha_blas_leave, fmha_cpu_fetches,
    fmha_dealt, fmha_pool_ask, fmha_pool_deal, fmha_pool_lost, fmha_pool_run, fmha_pool_stopped, fmha_problem, fmha_run,
    fmha_task,
)


cdef ptrdiff_t allocations_left = -1     # before one fails, for tests of a checked build; -1: none does


def fail_allocation(ptrdiff_t after):
    """Let the core's own allocation behind so many more fail, once. Only a checked build does; returns whether this is one."""
    global allocations_left
    allocations_left = after if FMHA_IS_CHECKED else -1
    return bool(FMHA_IS_CHECKED)


cdef char *allocate(ptrdiff_t bytes) noexcept nogil:
    """Memory for PyMem_RawFree, or NULL: the only place where the core allocates."""
    global allocations_left
    if FMHA_IS_CHECKED and allocations_left >= 0:
        allocations_left -= 1
        if allocations_left < 0:
            return NULL
    cdef char *memory = <char *>PyMem_RawMalloc(bytes)
    fmha_ask_large_pages(memory, bytes)
    return memory


cdef enum:
    KEPT = 3                        # blocks: as many as a run has at a time

cdef char *kept_memory[KEPT]        # the last runs' scratch: a small call would spend much of its time on fresh pages
cdef ptrdiff_t kept_bytes[KEPT]     # FMHA_KEPT_BYTES together


cdef class Scratch:
    """Memory for the threads of one run: `size` bytes for each, on cache lines of its own. The GIL guards what is kept."""
    cdef char *memory
    cdef char *start
    cdef ptrdiff_t size, bytes
    cdef int threads

    def __cinit__(self, ptrdiff_t size, int threads):
        cdef int n, best = -1
        if size > (<ptrdiff_t>1 << 62) // (threads + 1):
            raise MemoryError(f"no memory for {threads} times {size} bytes of scratch")
        self.threads = threads
        self.size = (size + FMHA_CACHE_LINE - 1) // FMHA_CACHE_LINE * FMHA_CACHE_LINE + FMHA_CACHE_LINE
        cdef ptrdiff_t wanted = self.size * threads + FMHA_CACHE_LINE
        for n in range(KEPT):
            if kept_bytes[n] >= wanted and (best < 0 or kept_bytes[n] < kept_bytes[best]):
                best = n
        if best >= 0:
            self.memory, self.bytes = kept_memory[best], kept_bytes[best]
            kept_memory[best], kept_bytes[best] = NULL, 0
        else:
            self.memory = allocate(wanted)
            if self.memory == NULL:
                raise MemoryError(f"no memory for {self.size * threads} bytes of scratch")
            self.bytes = wanted     # not before: what is freed must be there
        self.start = <char *>((<uintptr_t>self.memory + FMHA_CACHE_LINE - 1) & ~<uintptr_t>(FMHA_CACHE_LINE - 1))

    def __dealloc__(self):
        cdef ptrdiff_t held = 0
        cdef int n, least = 0
        for n in range(KEPT):
            held += kept_bytes[n]
            if kept_bytes[n] < kept_bytes[least]:
                least = n
        if kept_bytes[least] < self.bytes <= FMHA_KEPT_BYTES - held + kept_bytes[least]:
            kept_memory[least], self.memory = self.memory, kept_memory[least]
            kept_bytes[least] = self.bytes
        PyMem_RawFree(self.memory)


cdef void lend(fmha_run *c, Scratch scratch) noexcept:
    """The run works in that memory, on its threads. At the start of each one's "decode" says what it has begun, "tiled" whose
    keys it has gathered: nothing yet."""
    cdef int n
    c.scratch, c.scratch_size, c.threads, c.some = scratch.start, scratch.size, scratch.threads, 1
    for n in range(scratch.threads):
        (<ptrdiff_t *>(scratch.start + n * scratch.size))[0] = 0
    c.items_before, c.all_bytes, c.behind = 0, 0, NULL


cdef double bytes_of_head(const fmha_problem *p, ptrdiff_t element_size, ptrdiff_t stored_size) noexcept nogil:
    """What an item reads and writes that is a whole key/value head, or a block of the rows of one."""
    cdef ptrdiff_t rows = min(<ptrdiff_t>FMHA_BLOCK_ROWS, p.Lq * (p.H // p.Hkv)) if p.Hkv > 0 else 0
    return <double>(p.D + p.Dv) * (rows * element_size + p.Lk * stored_size)


cdef ptrdiff_t together(Problem problem, ptrdiff_t items, int threads) noexcept nogil:
    """How many of so many items that are whole heads a thread takes at a time: of long heads one."""
    cdef const fmha_problem *p = &problem.c
    if p.Hkv > 0 and p.Lq * (p.H // p.Hkv) > FMHA_BLOCK_ROWS:
        return 1
    return fmha_dealt(items, bytes_of_head(p, problem.element_size, problem.stored_size), threads)


cdef ptrdiff_t decoded_together(Problem problem, ptrdiff_t heads, ptrdiff_t items, int threads) noexcept nogil:
    """The same of "decode", whose items are whole heads or parts of these, or chunks of so many heads."""
    cdef const fmha_problem *p = &problem.c
    if heads > 1:
        return 1
    return max(together(problem, items, threads) if items == p.B * p.Hkv else 1, fmha_decode_dealt(items, threads))


def taken_together(Problem problem, ptrdiff_t items, int threads, bint decode=False):
    """The same."""
    if decode:
        return decoded_together(problem, neighbours(problem, reach(problem, False), threads), items, threads)
    return together(problem, items, threads)


cdef int run_heads(fmha_task task, fmha_run *c, ptrdiff_t items, Problem problem) noexcept nogil:
    """`fmha_pool_run` of items that are whole heads where these are short."""
    c.some = together(problem, items, c.threads)
    return fmha_pool_deal(task, c, items, c.threads, c.some)


cdef Scratch scratch_for(ptrdiff_t size, ptrdiff_t items, int threads):
    """Scratch for the threads that can have one of so many items; they are to run on its `threads`."""
    return Scratch(size, max(1, min(threads, items)))


cdef double least_shared = 1 << 19       # multiply-adds of a pass: fewer take less time than to call another thread


def share_from(double terms):
    """From how many multiply-adds on a pass of products or of attention is shared between threads; returns what it was. For tests
    of threads on small arrays: the bits do not depend on it."""
    global least_shared
    before = least_shared
    least_shared = terms
    return before


def fetched_by_cpu(alone):
    """Whether a single row leaves it to the CPU alone to fetch the matrix that it is multiplied with, as was measured for
    it; returns what it was. For tests: the bits do not depend on it."""
    cdef int *fetches = &fmha_cpu_fetches
    before = bool(fetches[0])
    fetches[0] = bool(alone)
    return before


cdef int threads_for(int threads, double terms) noexcept:
    """Of so many threads those that a pass of so many multiply-adds is worth."""
    return threads if terms >= least_shared else 1


cdef enum:
    EXPONENTIAL_TERMS = 16      # what a score costs beside its products, in multiply-adds
    READ_TERMS = 2              # what "decode" pays to read a number of a key or value
    ROW_TERMS = 8               # what a number of a row of queries or results costs: it is packed, or divided and written
cdef double BACKWARD_TERMS = 2.5        # of a backward pass, for each of a forward pass


cdef double attention_terms(const fmha_problem *p, bint is_double) noexcept:
    """Multiply-adds of float32 in the time of a forward pass without masks and ranges, where arithmetic is the limit."""
    cdef double of_row = <double>p.Lk * (p.D + p.Dv + EXPONENTIAL_TERMS) + ROW_TERMS * (p.D + p.Dv)
    return p.B * p.H * p.Lq * of_row * (2 if is_double else 1)


cdef double decode_terms(const fmha_problem *p, bint is_double) noexcept:
    """The same of "decode", where to read a number takes as long as to multiply it for some rows."""
    return attention_terms(p, is_double) + <double>p.B * p.Hkv * p.Lk * (p.D + p.Dv) * READ_TERMS * (2 if is_double else 1)


cdef char *take(char *memory, ptrdiff_t *used, ptrdiff_t bytes) noexcept nogil:
    """The next bytes of a scratch that is laid out, whose size adds up in `used`; without memory, that size alone."""
    cdef char *at = memory + used[0] if memory != NULL else NULL
    used[0] += bytes
    return at


ctypedef struct Guarded:
    fmha_task task
    void *context


cdef void guarded_item(void *context, ptrdiff_t item, int worker) noexcept nogil:
    """An item that calls BLAS: no fork happens meanwhile."""
    cdef Guarded *c = <Guarded *>context
    fmha_blas_item_begin()
    c.task(c.context, item, worker)
    fmha_blas_item_end()


cdef int run(fmha_task task, void *context, ptrdiff_t items, int threads) noexcept nogil:
    """The items side by side with BLAS held at one thread; where it cannot be, one after the other under a lock."""
    cdef int held = fmha_blas_enter(), used
    cdef Guarded guarded
    guarded.task, guarded.context = task, context
    used = fmha_pool_run(guarded_item, &guarded, items, min(threads, FMHA_MOST_IN_BLAS) if held else 1)
    fmha_blas_leave(held)
    return used


cdef bint stopped_between_blocks() noexcept nogil:
    """Inside a guarded item: a fork need not wait for more than a block, and the run may be stopped."""
    fmha_blas_item_end()
    cdef bint stopped = fmha_pool_stopped()
    fmha_blas_item_begin()
    return stopped


cdef int signals_raise() noexcept nogil:
    """Whether a signal handler of Python's has raised, such as Ctrl-C's: then the run is to stop, and `finish` raises."""
    with gil:
        return PyErr_Occurred() != NULL or check_signals() != 0


cdef int finish() except -1:
    """After a run: what a signal handler has raised meanwhile, or that it forked this process. The results are undefined then."""
    cdef bint lost = fmha_pool_lost()
    if PyErr_Occurred() != NULL:
        return -1
    if lost:
        raise RuntimeError("a signal handler forked the process in the middle of this call, whose threads the child does not "
                           "have: in the child it has no result")
    return 0


fmha_pool_ask(signals_raise)
