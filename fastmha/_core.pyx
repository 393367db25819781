# cython: language_level=3, freethreading_compatible=False
"""Glue between Python and the kernels: arrays become pointers and strides, scratch is allocated, the GIL is released,
and the "blas" algorithm loops over heads. No checks of user input here: `fastmha.validate` has made them.
"""
from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_Occurred
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.math cimport INFINITY, sqrt
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int64_t, uint16_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from numpy import dtype as numpy_dtype, ndarray, zeros

from fastmha._blas cimport gemm, load_blas
from fastmha._kernels cimport (
    FMHA_BASELINE_FUSES, FMHA_BFLOAT, FMHA_BLOCK_ROWS, FMHA_CACHE_LINE, FMHA_CHUNK_KEYS, FMHA_DECODE_ROWS, FMHA_GELU,
    FMHA_GELU_TANH, FMHA_HALF, FMHA_HALF_COST, FMHA_ISA_COUNT, FMHA_IS_CHECKED, FMHA_KEPT_BYTES, FMHA_LARGE, FMHA_MEND,
    FMHA_MOST_IN_BLAS, FMHA_NO_ACTIVATION, FMHA_OTHER, FMHA_PACK_ROWS, FMHA_PANEL_COLUMNS, FMHA_PREPARE, FMHA_QUARTER_COST,
    FMHA_RELU, FMHA_RESTART, FMHA_RESULTS, FMHA_ROW_STATE, FMHA_RUN_COST, FMHA_RUN_KEYS, FMHA_SAME, FMHA_SHARES, FMHA_SILU,
    FMHA_SUMMED_ROWS, FMHA_TENSORS_MAJOR, FMHA_TENSOR_BFLOAT, FMHA_TENSOR_FLOAT, FMHA_TENSOR_ON_CPU, FMHA_TILE_KEYS,
    FMHA_TURNS, FMHA_UNBOUNDED, FMHA_WHOLE, check_signals, fmha_array, fmha_ask_large_pages, fmha_backward_cut,
    fmha_backward_split, fmha_blas_enter, fmha_blas_forward_cut, fmha_blas_held, fmha_blas_item_begin, fmha_blas_item_end,
    fmha_blas_leave, fmha_blas_threads_bind, fmha_blas_threads_bound, fmha_block, fmha_block_keys, fmha_blocks,
    fmha_blocks_cut, fmha_blocks_vary, fmha_by_heads, fmha_chunks, fmha_cpu_fetches, fmha_cut, fmha_dealt, fmha_decode_cut,
    fmha_finish, fmha_finish_at, fmha_flush_subnormals, fmha_folded_scale, fmha_forward_blocks, fmha_forward_cut,
    fmha_free_blocks, fmha_heads_cut, fmha_isa_name, fmha_isa_runs, fmha_item, fmha_item_of, fmha_items,
    fmha_keep_subnormal_operands, fmha_kernels, fmha_kernels_of, fmha_list_blocks, fmha_mask_cut, fmha_mask_ranges,
    fmha_matrices_cut, fmha_norm, fmha_of_keys, fmha_pool_ask, fmha_pool_deal, fmha_pool_lost, fmha_pool_run,
    fmha_pool_shutdown, fmha_pool_stopped, fmha_pool_workers, fmha_problem, fmha_run, fmha_runs_left, fmha_set_control,
    fmha_split, fmha_task, fmha_tensor, fmha_tensors, fmha_tile_product, fmha_valid_keys, fmha_waiting_chunks,
)


load_blas()
cdef const fmha_kernels *kernel_tables[2]       # float32, float64
cdef tuple selected = None                      # their name and width: asked by every call
BASELINE_FUSES = bool(FMHA_BASELINE_FUSES)     # whether the baseline's kernels have fused multiply-add
PANEL_COLUMNS = FMHA_PANEL_COLUMNS              # slices of a packed product start at multiples of it
ACTIVATIONS = {None: FMHA_NO_ACTIVATION, "gelu": FMHA_GELU, "gelu_tanh": FMHA_GELU_TANH, "relu": FMHA_RELU, "silu": FMHA_SILU}
SUMMED_ROWS = FMHA_SUMMED_ROWS                  # of a partial sum of grad_weight
MOST_IN_BLAS = FMHA_MOST_IN_BLAS                # threads
ROW_STATE = FMHA_ROW_STATE                      # numbers that a backward pass leaves for each row
# Of a forward pass of "tiled": what a pair costs in blocks of so many rows, and each run of a block, in pairs of a row.
BLOCK_COSTS = {FMHA_BLOCK_ROWS: 1.0, FMHA_BLOCK_ROWS // 2: FMHA_HALF_COST, FMHA_BLOCK_ROWS // 4: FMHA_QUARTER_COST}
RUN_COST = FMHA_RUN_COST * FMHA_RUN_KEYS
cdef object SINGLE = numpy_dtype("f"), DOUBLE = numpy_dtype("d"), HALF = numpy_dtype("e"), BITS = numpy_dtype("H")


def runnable_isas():
    """Names of the instruction sets that are compiled in and that this CPU runs."""
    return [fmha_isa_name(i).decode() for i in range(FMHA_ISA_COUNT) if fmha_isa_runs(i)]


def select_isa(str name):
    """Use the kernels of one instruction set from now on; it must be runnable here."""
    global selected
    for i in range(FMHA_ISA_COUNT):
        if fmha_isa_name(i).decode() == name and fmha_isa_runs(i):
            kernel_tables[0] = fmha_kernels_of(i, 0)
            kernel_tables[1] = fmha_kernels_of(i, 1)
            selected = kernel_tables[0].name.decode(), kernel_tables[0].vector_bytes
            return
    raise ValueError(f"instruction set {name!r} does not run here")


def selected_isa():
    """The name that the kernels in use carry themselves, and their vector width in bytes."""
    return selected


def fused_multiply_add():
    """Whether the kernels in use have it: all but the baseline's on x86-64 do."""
    return bool(FMHA_BASELINE_FUSES) or kernel_tables[0].gemm != fmha_kernels_of(0, 0).gemm


def bind_blas_threads(uintptr_t getter, uintptr_t setter):
    """Addresses of `int get(void)` and `void set(int)` of SciPy's BLAS thread count, 0 and 0 where there are none."""
    fmha_blas_threads_bind(<int (*)() noexcept nogil>getter, <void (*)(int) noexcept nogil>setter)


def blas_threads_bound():
    return bool(fmha_blas_threads_bound())


def blas_held():
    """How many calls hold SciPy's BLAS at one thread at this moment."""
    return fmha_blas_held()


def pool_workers():
    """Threads that the pool has alive, the callers not counted."""
    return fmha_pool_workers()


def pool_shutdown():
    with nogil:             # the run that it waits for may ask for the GIL
        fmha_pool_shutdown()


# ------------------------------------------------------------------------------------------------ arrays, scratch, runs

def in_place(x) -> bool:
    """Whether kernels can work on the array x where it lies: empty, or aligned and with unit last stride."""
    cdef Py_buffer view
    cdef int axis
    cdef ptrdiff_t low = 0, size = 1, last
    PyObject_GetBuffer(x, &view, PyBUF_STRIDES)
    for axis in range(view.ndim):
        size *= view.shape[axis]
        if view.shape[axis] > 1:
            low |= view.strides[axis]
    last = view.ndim - 1        # below 0 without axes, and then there are no strides
    unit = last < 0 or view.shape[last] <= 1 or view.strides[last] == view.itemsize
    aligned = (<size_t>view.buf | <size_t>low) % <size_t>view.itemsize == 0
    PyBuffer_Release(&view)
    return size == 0 or unit and aligned


cdef enum:
    LONG = 1 << 30                  # from here on `validate` says whether a length or width is too long
    MOST_PLACES = 256               # batch rows, for which offsets of 0 are kept


cdef int read_array(object array, fmha_array *to, ptrdiff_t *shape, ptrdiff_t itemsize, bint writable) except -1:
    """Pointer and element strides of an array of at most 4 axes (aligned at the last), stride 0 where a length is 1.

    The caller keeps the array alive.
    """
    cdef Py_buffer view
    cdef int axis, shift
    PyObject_GetBuffer(array, &view, PyBUF_STRIDES | (PyBUF_WRITABLE if writable else 0))
    shift = 4 - view.ndim
    to.data = <char *>view.buf
    for axis in range(4):
        to.stride[axis] = 0
        if shape != NULL:
            shape[axis] = 1
    for axis in range(view.ndim):
        if view.shape[axis] != 1:
            to.stride[axis + shift] = view.strides[axis] // itemsize
        if shape != NULL:
            shape[axis + shift] = view.shape[axis]
    PyBuffer_Release(&view)
    return 0


cdef bint read_heads(object array, fmha_array *to, ptrdiff_t *shape, ptrdiff_t itemsize, bint by_length) except -1:
    """The same of heads (B, heads, L, width), or (B, L, heads, width) where `by_length`; returns whether they are that, none of
    these is 0 or too long, and kernels can work on them where they lie."""
    cdef Py_buffer view
    cdef int axis, at
    cdef ptrdiff_t low = 0, least, most
    PyObject_GetBuffer(array, &view, PyBUF_STRIDES)
    if view.ndim == 4:
        to.data = <char *>view.buf
        least = most = view.shape[0]
        for axis in range(4):
            at = 3 - axis if by_length and 0 < axis < 3 else axis
            shape[axis] = view.shape[at]
            least, most = min(least, shape[axis]), max(most, shape[axis])
            to.stride[axis] = 0
            if shape[axis] != 1:
                to.stride[axis] = view.strides[at] // itemsize
                low |= view.strides[at]
    fits = (view.ndim == 4 and 0 < least and most < LONG and to.stride[3] == (shape[3] != 1)
            and (<size_t>view.buf | <size_t>low) % <size_t>itemsize == 0)
    PyBuffer_Release(&view)
    return fits


cdef const fmha_tensors *tensor_table = NULL
cdef object tensor_type = None, tensor_array = None, tensor_bfloat = None


def bind_tensors(kind, table, array, bfloat):
    """Let heads be tensors of a library: their type, its table of DLPack's C functions, what makes an array of one, of bfloat16
    as uint16, and the dtype of bfloat16 or None. Of what is not the table known here none are."""
    global tensor_table, tensor_type, tensor_array, tensor_bfloat
    cdef const fmha_tensors *found
    if not PyCapsule_IsValid(table, "dlpack_exchange_api"):
        return
    found = <const fmha_tensors *>PyCapsule_GetPointer(table, "dlpack_exchange_api")
    if found.major == FMHA_TENSORS_MAJOR and found.look != NULL:
        tensor_table, tensor_type, tensor_array, tensor_bfloat = found, kind, array, bfloat


cdef object read_tensor(x, fmha_array *to, ptrdiff_t *shape):
    """As `read_heads` of heads (B, heads, L, width) that are a tensor. Returns their dtype, or None where they are not what that
    asks for."""
    cdef fmha_tensor of
    cdef int axis
    cdef ptrdiff_t least = LONG, most = 0
    try:
        tensor_table.look(<void *>x, &of)
    except Exception:       # it is in no memory: sparse, nested, a shape alone
        return None
    if of.axes != 4 or of.device != FMHA_TENSOR_ON_CPU or of.lanes != 1 or of.data == NULL or x.is_neg():
        return None         # the last: a sign that is in no memory
    element = None
    if of.kind == FMHA_TENSOR_BFLOAT and of.bits == 16:
        element = tensor_bfloat
    elif of.kind == FMHA_TENSOR_FLOAT:
        element = SINGLE if of.bits == 32 else DOUBLE if of.bits == 64 else HALF if of.bits == 16 else None
    if element is None:
        return None
    for axis in range(4):
        shape[axis] = of.shape[axis]
        least, most = min(least, shape[axis]), max(most, shape[axis])
        to.stride[axis] = of.stride[axis] if shape[axis] != 1 else 0
    to.data = of.data + of.offset
    aligned = <size_t>to.data % (of.bits // 8) == 0
    return element if aligned and 0 < least and most < LONG and to.stride[3] == (shape[3] != 1) else None


cdef char *pointer(object array, bint writable) except? NULL:
    """Address of an array's first element."""
    cdef fmha_array to
    read_array(array, &to, NULL, 1, writable)
    return to.data


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
    """The run works in that memory, on its threads."""
    c.scratch, c.scratch_size, c.threads, c.some = scratch.start, scratch.size, scratch.threads, 1
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


def taken_together(Problem problem, ptrdiff_t items, int threads):
    """The same."""
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


cdef double SMALLEST_NORMAL = 2.2250738585072014e-308
cdef tuple NO_RULES = (None,) * 7           # what a problem without any keeps
cdef dict first_places = {}                 # offsets of 0 by the number of batch rows


cdef object places_at_0(ptrdiff_t B):
    """(B,) offsets of 0, not to be written to."""
    places = first_places.get(B)
    if places is None:
        places = zeros(B, "q")
        places.flags.writeable = False
        if B <= MOST_PLACES:
            first_places[B] = places
    return places


cdef int element_of(dtype) except -1:
    """The element type of arrays of a dtype, FMHA_SAME for a float of the computation's kind."""
    cdef str name = dtype.char
    if name == "f" or name == "d":
        return FMHA_SAME
    if name == "e":
        return FMHA_HALF
    if name == "H":
        return FMHA_BFLOAT
    raise TypeError(f"operands must be float32, float64, float16 or bfloat16 (as uint16), got {dtype}")


cdef str letter(int element, str own):
    """That of the dtype of an element type, in a computation in that of `own`."""
    if element == FMHA_HALF:
        return "e"
    if element == FMHA_BFLOAT:
        return "H"
    return own if element == FMHA_SAME else "f" if own == "d" else "d"


cdef inline ptrdiff_t size_of(int element, ptrdiff_t itemsize) noexcept nogil:
    """Bytes of an element of that type, which is not FMHA_OTHER, in a computation with items of so many."""
    return itemsize if element == FMHA_SAME else 2


cdef void side_by_side(const fmha_problem *p, char *data, ptrdiff_t size, fmha_array *q, fmha_array *k,
                       fmha_array *v) noexcept:
    """Strides of heads that lie side by side in the rows (B, L, H·D + Hkv·D + Hkv·Dv) of a contiguous array; as `read_array`
    has it, 0 where a length is 1."""
    cdef ptrdiff_t of_q = p.H * p.D, of_k = p.Hkv * p.D, row = of_q + of_k + p.Hkv * p.Dv
    q.data, k.data, v.data = data, data + of_q * size, data + (of_q + of_k) * size
    q.stride[0] = k.stride[0] = v.stride[0] = p.Lq * row if p.B != 1 else 0
    q.stride[2] = k.stride[2] = v.stride[2] = row if p.Lq != 1 else 0
    q.stride[1] = p.D if p.H != 1 else 0
    k.stride[1] = p.D if p.Hkv != 1 else 0
    v.stride[1] = p.Dv if p.Hkv != 1 else 0
    q.stride[3] = k.stride[3] = 1 if p.D != 1 else 0
    v.stride[3] = 1 if p.Dv != 1 else 0


cdef tuple views(rows, slots, const fmha_problem *p):
    """Such heads as arrays (B, heads, L, width)."""
    cdef ptrdiff_t k0 = p.H * p.D, v0 = k0 + p.Hkv * p.D
    q, k, v = [x.reshape(p.B, p.Lq, heads, width).transpose(0, 2, 1, 3) for x, heads, width in (
        (rows[:, :, :k0], p.H, p.D), (rows[:, :, k0:v0], p.Hkv, p.D), (rows[:, :, v0:], p.Hkv, p.Dv))]
    return (q, k, v) if slots is None else (q, slots[0][:, :, :p.Lk], slots[1][:, :, :p.Lk])


cdef class Problem:
    """One attention after validation: shapes, element strides and rules, computed in `dtype`, float32 or float64.

    q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), masks of 4 axes (1 = broadcast) or None, offset,
    key_starts and key_lengths (B,) int64 or None, no start beyond its length; sinks and alibi (H,) of `dtype`, contiguous, or
    None; draws of dropout (probability, seed, and the number of the first batch row, head, query and key) or None; all aligned,
    last axis of q, k, v with unit stride. q, with it out and their gradients, may be float16 or bfloat16 (as uint16), computed in
    float32; so may k and v, with their gradients, and the additive mask, with its own. "blas" takes the mask alone so. For
    forward passes k and v may also be the other float.
    `element` and `stored`: the dtypes that a caller gives q and k; validation sets them, where they are not those here.
    `precision`: of float32 products, None where the caller names none; `parts`: see there.
    """
    cdef fmha_problem c
    cdef object keep
    cdef readonly bint is_double
    cdef readonly ptrdiff_t itemsize, element_size, stored_size         # of the computation, of q, of k
    cdef readonly object dtype, bool_mask, additive_mask
    cdef object heads           # (q, k, v), by length: with the second and third axis swapped; None: made once asked for, of
    cdef object rows, slots     # what `side_by_side` takes
    cdef bint by_length, tensors                                        # or q, k, v are tensors, of which arrays are made then
    cdef public str layout
    cdef public object bytes_copied, element, stored, precision

    def __init__(self, q, k, v, bool_mask, additive_mask, offset, key_starts, key_lengths, left, right, double scale,
                 double softcap, sinks=None, alibi=None, draws=None):
        self.heads, self.element, self.stored = (q, k, v), q.dtype, k.dtype
        self.read_queries(q)
        self.read_keys(k, v)
        self.read_rules((bool_mask, additive_mask, offset, key_starts, key_lengths, left, right, scale, softcap, sinks, alibi,
                         draws))

    @staticmethod
    def side_by_side(rows, ptrdiff_t H, ptrdiff_t Hkv, ptrdiff_t D, ptrdiff_t Dv, rules, cached=None):
        """The same of heads as a projection writes them: rows (B, L, H·D + Hkv·D + Hkv·Dv), C-contiguous, of any dtype of q.
        rules: what `Problem` takes behind q, k and v. cached: (k, v, Lk) of rows' dtype, of whose slots the first Lk are the
        keys and values in place of those in the rows."""
        cdef Problem p = Problem.__new__(Problem)
        cdef fmha_array all_of
        cdef ptrdiff_t shape[4]
        element = rows.dtype
        p.rows, p.element, p.stored, p.layout = rows, element, element, "BHLD"
        p.c.element = p.c.stored = element_of(element)
        p.dtype = element if p.c.element == FMHA_SAME else SINGLE
        p.itemsize = p.dtype.itemsize
        p.is_double = p.itemsize == 8
        p.element_size = p.stored_size = size_of(p.c.element, p.itemsize)
        read_array(rows, &all_of, shape, p.element_size, False)
        p.c.B, p.c.H, p.c.Hkv, p.c.Lq, p.c.Lk, p.c.D, p.c.Dv = shape[1], H, Hkv, shape[2], shape[2], D, Dv
        side_by_side(&p.c, all_of.data, p.element_size, &p.c.q, &p.c.k, &p.c.v)
        if cached is not None:
            p.slots = cached
            p.c.Lk = cached[2]
            p.read_keys(cached[0], cached[1], p.c.Lk)
        p.read_rules(rules)
        return p

    @staticmethod
    def of_heads(q, k, v, bint by_length, named=None):
        """The same without rules of arrays as a caller gives them, q (B, Lq, H, D) and so on where `by_length`. None where they
        are not arrays of float32, float64 or float16, all of one, whose lengths go together, none of them 0, and which kernels
        can read where they lie: `fastmha.validate` then says what is wrong, or copies. named: bfloat16, of arrays of uint16."""
        cdef ptrdiff_t of_q[4]
        cdef ptrdiff_t of_k[4]
        cdef ptrdiff_t of_v[4]
        if type(q) is not ndarray or type(k) is not ndarray or type(v) is not ndarray:
            return None
        element = q.dtype
        if named is not None and element is not BITS:
            return None
        if named is None and element is not SINGLE and element is not DOUBLE and element is not HALF:
            return None
        if k.dtype is not element or v.dtype is not element:
            return None
        cdef Problem p = Problem.__new__(Problem)
        cdef ptrdiff_t size = 8 if element is DOUBLE else 4 if element is SINGLE else 2
        if not (read_heads(q, &p.c.q, of_q, size, by_length) and read_heads(k, &p.c.k, of_k, size, by_length)
                and read_heads(v, &p.c.v, of_v, size, by_length)):
            return None
        if not p.read_plain(of_q, of_k, of_v, element if named is None else named):
            return None
        p.heads, p.by_length, p.layout = (q, k, v), by_length, "BLHD" if by_length else "BHLD"
        return p

    @staticmethod
    def of_tensors(q, k, v, bint grouped):
        """The same of tensors of `bind_tensors`, by head; None also where heads are in groups and this is not `grouped`. Arrays
        they become once one is asked for."""
        cdef ptrdiff_t of_q[4]
        cdef ptrdiff_t of_k[4]
        cdef ptrdiff_t of_v[4]
        if type(q) is not tensor_type or type(k) is not tensor_type or type(v) is not tensor_type:
            return None
        cdef Problem p = Problem.__new__(Problem)
        element = read_tensor(q, &p.c.q, of_q)
        if element is None or read_tensor(k, &p.c.k, of_k) is not element or read_tensor(v, &p.c.v, of_v) is not element:
            return None
        if not (p.read_plain(of_q, of_k, of_v, element) and (grouped or p.c.H == p.c.Hkv)):
            return None
        p.heads, p.tensors, p.layout = (q, k, v), True, "BHLD"
        return p

    cdef bint read_plain(self, const ptrdiff_t *of_q, const ptrdiff_t *of_k, const ptrdiff_t *of_v, element):
        """Whether heads of these shapes go together; then all but where they lie is known, without rules."""
        if of_k[0] != of_q[0] or of_v[0] != of_q[0] or of_v[1] != of_k[1] or of_v[2] != of_k[2] or of_k[3] != of_q[3]:
            return False
        if of_k[1] != of_q[1] and of_q[1] % of_k[1] != 0:
            return False
        self.c.B, self.c.H, self.c.Lq, self.c.D = of_q[0], of_q[1], of_q[2], of_q[3]
        self.c.Hkv, self.c.Lk, self.c.Dv = of_k[1], of_k[2], of_v[3]
        same = element is SINGLE or element is DOUBLE
        self.c.element = self.c.stored = FMHA_SAME if same else FMHA_HALF if element is HALF else FMHA_BFLOAT
        self.c.left = self.c.right = FMHA_UNBOUNDED
        self.c.scale = 1 / sqrt(<double>self.c.D)
        self.is_double, self.dtype = element is DOUBLE, element if same else SINGLE
        self.itemsize = 8 if self.is_double else 4
        self.element_size = self.stored_size = size_of(self.c.element, self.itemsize)
        self.element = self.stored = element
        self.keep, self.bytes_copied = NO_RULES, 0
        return True

    def under(self, tuple rules):
        """Itself, under rules that are what `__init__` takes behind q, k and v."""
        self.read_rules(rules)
        return self

    def causal(self):
        """Itself, which has no rules, made causal from offset 0 on."""
        offset = places_at_0(self.c.B)
        self.c.offset = <const int64_t *>pointer(offset, False)
        self.c.banded, self.c.right = True, 0
        self.keep = (offset, *NO_RULES[1:])
        return self

    cdef int read_rules(self, tuple rules) except -1:
        """What `__init__` takes behind q, k and v."""
        cdef double scale, softcap
        cdef object ranges = None
        bool_mask, additive_mask, offset, key_starts, key_lengths, left, right, scale, softcap, sinks, alibi, draws = rules
        self.bool_mask, self.additive_mask = bool_mask, additive_mask
        self.c.bool_mask.data = self.c.additive_mask.data = NULL
        if bool_mask is not None:
            read_array(bool_mask, &self.c.bool_mask, NULL, 1, False)
        if additive_mask is not None:
            self.c.mask_element = element_of(additive_mask.dtype)
            read_array(additive_mask, &self.c.additive_mask, NULL, size_of(self.c.mask_element, self.itemsize), False)
        self.c.banded = left is not None or right is not None
        self.c.offset = <const int64_t *>pointer(offset, False) if offset is not None else NULL
        self.c.key_start = <const int64_t *>pointer(key_starts, False) if key_starts is not None else NULL
        self.c.key_length = <const int64_t *>pointer(key_lengths, False) if key_lengths is not None else NULL
        if fmha_of_keys(&self.c.bool_mask) or fmha_of_keys(&self.c.additive_mask):
            ranges = self.read_padding()
        self.c.left = FMHA_UNBOUNDED if left is None else left
        self.c.right = FMHA_UNBOUNDED if right is None else right
        self.c.scale = scale
        self.c.softcap = max(softcap, SMALLEST_NORMAL) if softcap else 0.0      # a smaller one would count as none
        self.c.sinks = pointer(sinks, False) if sinks is not None else NULL
        self.c.alibi = pointer(alibi, False) if alibi is not None else NULL
        self.c.dropout.factor = 0
        self.c.parts = 0
        self.c.part = False
        if draws is not None:
            probability, self.c.dropout.seed = draws[:2]
            self.c.dropout.b, self.c.dropout.h, self.c.dropout.i, self.c.dropout.j = draws[2:]
            self.c.dropout.factor = 1 / (1 - <double>probability)
            self.c.dropout.below = min(<uint64_t>(<double>probability * 4294967296 + 0.5), <uint64_t>4294967295)
        self.keep = (offset, key_starts, key_lengths, sinks, alibi, draws, ranges)
        return 0

    cdef object read_padding(self):
        """Of masks of keys alone the ranges that they leave, and a boolean one is gone where that is all it does. Returns their
        memory."""
        cdef bytearray ranges = bytearray(2 * self.c.B * sizeof(int64_t))
        cdef int64_t *starts = <int64_t *><char *>ranges
        cdef double of_double = -INFINITY
        cdef float single = -INFINITY
        cdef uint16_t of_half = 0xFF80 if self.c.mask_element == FMHA_BFLOAT else 0xFC00
        cdef bint same = self.c.mask_element == FMHA_SAME
        cdef const void *removed = <const void *>&of_half if not same else &of_double if self.is_double else &single
        cdef ptrdiff_t size = size_of(self.c.mask_element, self.itemsize)
        cdef bint whole = fmha_mask_ranges(&self.c, size, removed, starts, starts + self.c.B)
        if whole and fmha_of_keys(&self.c.bool_mask):
            self.c.bool_mask.data = NULL
        self.c.key_start, self.c.key_length = starts, starts + self.c.B
        return ranges

    cdef int read_queries(self, q) except -1:
        """q into the C problem, and what follows from its dtype."""
        cdef ptrdiff_t shape[4]
        element = q.dtype
        self.c.element = element_of(element)
        self.dtype = element if self.c.element == FMHA_SAME else SINGLE
        self.itemsize = self.dtype.itemsize
        self.is_double = self.itemsize == 8
        self.element_size = size_of(self.c.element, self.itemsize)
        read_array(q, &self.c.q, shape, self.element_size, False)
        self.c.B, self.c.H, self.c.Lq, self.c.D = shape[0], shape[1], shape[2], shape[3]
        return 0

    cdef int read_keys(self, k, v, ptrdiff_t length=-1) except -1:
        """k and v, or the first `length` of each head, into the C problem."""
        cdef ptrdiff_t shape[4]
        stored = k.dtype
        self.c.stored = FMHA_SAME
        if stored is not self.dtype and stored != self.dtype:
            self.c.stored = element_of(stored)
            if self.c.stored == FMHA_SAME:
                self.c.stored = FMHA_OTHER
        self.stored_size = stored.itemsize
        read_array(k, &self.c.k, shape, self.stored_size, False)
        self.c.Hkv, self.c.Lk = shape[1], shape[2] if length < 0 else length
        read_array(v, &self.c.v, shape, self.stored_size, False)
        self.c.Dv = shape[3]
        return 0

    def with_heads(self, q, k, v):
        """The same problem on other arrays of the same shapes."""
        cdef Problem other = Problem.__new__(Problem)
        other.c = self.c
        other.heads, other.keep, other.dtype = (q, k, v), self.keep, self.dtype
        other.bool_mask, other.additive_mask = self.bool_mask, self.additive_mask
        other.itemsize, other.is_double, other.element_size = self.itemsize, self.is_double, self.element_size
        other.layout, other.bytes_copied = self.layout, self.bytes_copied
        other.element, other.stored, other.precision = self.element, self.stored, self.precision
        if q is not self.q:
            other.read_queries(q)
        other.read_keys(k, v)
        return other

    cdef tuple operands(self):
        """(q, k, v)"""
        if self.heads is None:
            self.heads = views(self.rows, self.slots, &self.c)
        if self.by_length:
            self.heads, self.by_length = tuple([x.transpose(0, 2, 1, 3) for x in self.heads]), False
        if self.tensors:
            self.heads, self.tensors = tuple([tensor_array(x) for x in self.heads]), False
        return self.heads

    @property
    def q(self):
        return self.operands()[0]

    @property
    def k(self):
        return self.operands()[1]

    @property
    def v(self):
        return self.operands()[2]

    def of_part(self):
        """Itself, to be told that a backward pass gets lse and out of more keys than these."""
        self.c.part = True
        return self

    @property
    def shape(self):
        """(B, H, Hkv, Lq, Lk, D, Dv)"""
        return self.c.B, self.c.H, self.c.Hkv, self.c.Lq, self.c.Lk, self.c.D, self.c.Dv

    @property
    def types(self):
        """The letters of the dtypes of q and of k, that of bfloat16 as uint16's."""
        cdef str own = "d" if self.is_double else "f"
        return letter(self.c.element, own) + letter(self.c.stored, own)

    @property
    def parts(self):
        """bfloat16 parts of what is multiplied on matrix tiles; 0: nothing is."""
        return self.c.parts

    @parts.setter
    def parts(self, int parts):
        self.c.parts = parts

    @property
    def offset(self):
        return self.keep[0]

    @property
    def key_starts(self):
        return self.keep[1]

    @property
    def key_lengths(self):
        return self.keep[2]

    @property
    def scale(self):
        return self.c.scale

    @property
    def softcap(self):
        return self.c.softcap

    @property
    def sinks(self):
        return self.keep[3]

    @property
    def alibi(self):
        return self.keep[4]

    @property
    def draws(self):
        return self.keep[5]

    @property
    def window(self):
        """(left, right), None = unbounded; (None, None) where nothing is causal or windowed."""
        left = None if not self.c.banded or self.c.left == FMHA_UNBOUNDED else self.c.left
        right = None if not self.c.banded or self.c.right == FMHA_UNBOUNDED else self.c.right
        return left, right


# --------------------------------------------------------------------------------------------------- algorithm "blas"

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
        if not untouched(p, &block):
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
                    again, p.Dv, False)
            for i in range(block.rows):
                if not c.kernels.all_finite(1, p.Dv, out + i * leading(&c.out, p.Dv) * size, p.Dv):
                    c.kernels.copy_rows(1, p.Dv, again + i * p.Dv * size, p.Dv,
                                        out + i * leading(&c.out, p.Dv) * size, p.Dv)
                    c.kernels.multiply(1, row_sum + i * size, factor)
            PyMem_RawFree(again)
    if c.weights.data == NULL:
        c.kernels.divide_rows(block.rows, p.Dv, out, leading(&c.out, p.Dv), row_sum)
    tiny_rows(c, &block, hkv, scores, row_sum, out)


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
    for i in range(block.rows):
        if not c.kernels.tiny_row(width, out + i * ldo * size) or not c.kernels.nonzero(1, 1, row_sum + i * size, 1):
            continue
        if lifted == NULL:
            if not c.kernels.nonzero(block.cols, width, v, ldv):
                return
            lifted = allocate((block.cols + block.rows) * width * size)
            if lifted == NULL:
                c.failed = 1
                return
            again = lifted + block.cols * width * size
            c.kernels.lift_rows(block.cols, width, v, ldv, lifted, width)
            gemm(c.is_double, False, False, block.rows, width, block.cols, 1, scores, block.ld, lifted, width, 0, again, width)
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


# -------------------------------------------------------------------------------------------------- algorithm "tiled"

def threads_of(Problem problem, bint decode, bint backward, int threads):
    """Of so many threads those that a pass over a problem is worth, forward by "decode" or another algorithm, or backward."""
    if decode:
        return threads_for(threads, decode_terms(&problem.c, problem.is_double))
    return threads_for(threads, (BACKWARD_TERMS if backward else 1) * attention_terms(&problem.c, problem.is_double))


def tiled_forward(Problem problem, out, lse, weights, int threads, blocks=None):
    """The "tiled" algorithm: out (B, H, Lq, Dv) with unit last stride, lse (B, H, Lq) and weights (B, H, Lq, Lk)
    C-contiguous or None.

    blocks: how many blocks, the first ones, have 64 rows and all keys; whether the others are in runs of their keys; of how
    many rows, 16, 32 or 64, pieces of such items are, and how many of them, the last ones, become such; whatever the threads.
    None: as is best for these. The bits are the same. Not on matrix tiles.
    """
    cdef fmha_run c
    cdef Blocks named = None
    read_results(&c, problem, lse, weights)
    read_array(out, &c.out, NULL, problem.element_size, True)
    if blocks is not None and c.p.parts == 0:
        named = Blocks()
        named.c.whole, named.c.runs, named.c.rows, named.c.fine = blocks
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
    c.p = problem.c
    c.lse = pointer(lse, True) if lse is not None else NULL
    c.weights = pointer(weights, True) if weights is not None else NULL
    return 0


cdef int run_tiled(fmha_run *c, Problem problem, int threads, Blocks named) except -1:
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    cdef fmha_blocks blocks
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
    cdef ptrdiff_t size = kernels.forward_scratch(&c.p) if c.weights == NULL else kernels.weights_scratch(&c.p)
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
    cdef Scratch runs = Scratch(fmha_runs_left(&c.p, blocks) * kernels.run_scratch(&c.p) * problem.itemsize, 1)
    c.chunks = runs.start
    c.whole = blocks.whole
    with nogil:
        if fmha_pool_run(kernels.tiled_forward, c, fmha_items(&c.cut), threads):
            c.cut = fmha_blocks_cut(&c.p, blocks, True)
            fmha_pool_run(kernels.tiled_merge, c, fmha_items(&c.cut), threads)
    return finish()


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
    """How a backward pass of "tiled" splits heads for so many threads: how many key/value heads are whole; keys of an item of the
    others; blocks of it, 0: all; the share of the threads that is busy. quick: for sizes that it meets for the first time."""
    cdef fmha_split split
    cdef int short = quick
    if quick:
        split = fmha_backward_split(&problem.c, threads, &short)
    else:
        split_for(&problem.c, threads, False, &split)
    return split.whole, split.keys, split.share, split.balance


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
    cdef Scratch scratch, kept, shared
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    cdef ptrdiff_t size = problem.itemsize, items, own
    cdef int mode
    cdef fmha_split split
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
    cdef bint on_tiles = c.p.parts > 0 and kernels.matrix_backward != NULL
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
    cdef ptrdiff_t split_heads, heads = problem.c.B * problem.c.Hkv, of_whole, of_split, kept
    cdef bint by_heads, on_tiles = problem.c.parts > 0 and kernels.matrix_forward != NULL
    cdef fmha_split split
    if problem.c.Hkv == 0:
        return 0, 0
    if backward:
        split_for(&problem.c, threads, False, &split)
        split_heads = heads - split.whole
        scratch = kernels.gradient_scratch if on_tiles else kernels.backward_scratch
        of_whole = scratch(&problem.c, FMHA_WHOLE, 0) if split.whole else 0
        of_split = scratch(&problem.c, split.mode, split.share) if split_heads else 0
        kept = (kernels.gradient_kept if on_tiles else kernels.backward_kept)(&problem.c, split.share) * problem.itemsize
        if on_tiles:
            kept += kernels.gradient_bytes(&problem.c)
        return max(of_whole, of_split) * problem.itemsize, split_heads * kept
    if on_tiles:
        by_heads = fmha_by_heads(&problem.c, threads)
        return (kernels.matrix_scratch(&problem.c, by_heads, False) * problem.itemsize,
                0 if by_heads else heads * kernels.matrix_bytes(&problem.c))
    cdef fmha_blocks blocks
    blocks_for(&problem.c, threads, True, False, &blocks)
    cdef ptrdiff_t shared = fmha_runs_left(&problem.c, &blocks) * kernels.run_scratch(&problem.c)
    return kernels.forward_scratch(&problem.c) * problem.itemsize, shared * problem.itemsize


def decode_scratch(Problem problem):
    """Bytes of scratch of the decode algorithm: of one thread in either of its passes, and of what chunks leave to be merged."""
    cdef const fmha_kernels *kernels = kernel_tables[problem.is_double]
    if problem.c.Hkv == 0:
        return 0, 0
    return (max(kernels.decode_scratch(&problem.c), kernels.merge_scratch(&problem.c)) * problem.itemsize,
            fmha_waiting_chunks(&problem.c) * kernels.chunk_scratch(&problem.c) * problem.itemsize)


# -------------------------------------------------------------------------------------------------- algorithm "decode"

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
        if (run_heads(kernels.decode, c, parts, problem) if parts == heads
                else fmha_pool_run(kernels.decode, c, parts, scratch.threads)):
            c.cut = merging
            if fmha_chunks(&c.p) != heads:     # else each head has one chunk, whose item has left the result
                fmha_pool_run(kernels.decode_merge, c, heads, scratch.threads)
    return finish()


# ------------------------------------------------------------------------------------------------------ packed sequences

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
    const int64_t *table                # for each sequence PACKED_COLUMNS numbers
    int64_t *first                      # (sequences + 1) the first item of each
    int64_t *chunk                      # (sequences) where what chunks leave begins, or what is kept of split heads; or NULL
    int64_t *shared                     # (sequences) where operands for matrix tiles begin, of split heads; or NULL
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
        to.first_shared = row[5]
    to.cut = c.cut(to, c.kernels, row[5])


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


cdef fmha_cut packed_heads_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    return fmha_heads_cut(&run.p)


cdef fmha_cut packed_mode_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    # whole heads, or of the others what a backward pass of this mode goes through: all blocks, or all tiles
    cdef fmha_split split
    split.mode, split.whole, split.keys, split.share, split.together = FMHA_TURNS, whole, FMHA_TILE_KEYS, 0, 0
    return fmha_backward_cut(&run.p, run.mode, &split)


cdef fmha_cut packed_chunks_cut(const fmha_run *run, const fmha_kernels *kernels, int64_t whole) noexcept nogil:
    return kernels.matrix_cut(&run.p, whole)


cdef ptrdiff_t forward_scratch_of(const fmha_run *run, const fmha_kernels *kernels) noexcept nogil:
    return kernels.forward_scratch(&run.p)


cdef ptrdiff_t decode_scratch_of(const fmha_run *run, const fmha_kernels *kernels) noexcept nogil:
    return kernels.decode_scratch(&run.p)


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
        c.bytes += own_items * bytes_of_head(&own.p, c.element_size, c.stored_size)
        if c.scratch != NULL:
            most[0] = max(most[0], c.scratch(&own, c.kernels) * c.itemsize)
    c.first[c.sequences] = items
    return items


cdef int run_packed(Packed *c, ptrdiff_t items) noexcept nogil:
    """`fmha_pool_run` of a pass whose items are numbered: of short sequences a thread takes several at a time."""
    cdef bint waiting = c.whole.mode == FMHA_TURNS          # one for what another does
    c.whole.some = 1 if waiting or items == 0 else fmha_dealt(items, c.bytes / items, c.whole.threads)
    c.whole.all_bytes = c.bytes
    return fmha_pool_deal(packed_item, c, items, c.whole.threads, c.whole.some)


cdef int packed_pass(Packed *c, fmha_task task, packed_cut cut, packed_scratch scratch, int threads) except -1:
    cdef ptrdiff_t most = 0, items
    cdef Scratch memory
    c.task, c.cut, c.scratch = task, cut, scratch
    items = packed_items(c, &most)
    if items == 0:
        return 0
    memory = scratch_for(most, items, threads)
    lend(&c.whole, memory)
    with nogil:
        run_packed(c, items)
    return finish()


cdef ptrdiff_t split_bytes(Packed *c, ptrdiff_t of_head, ptrdiff_t s) noexcept nogil:
    """So many bytes for each head of sequence s that is not taken whole."""
    return (c.whole.p.Hkv - c.table[s * PACKED_COLUMNS + 5]) * of_head


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
            bytes += split_bytes(&c, c.kernels.matrix_bytes(&own.p), s)
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
    cdef ptrdiff_t s, of_head, bytes_kept = 0, bytes_shared = 0
    cdef Scratch numbers, kept, shared
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
    numbers = Scratch((3 * c.sequences + 1) * sizeof(int64_t), 1)
    c.first = <int64_t *>numbers.start
    c.whole.mode = FMHA_WHOLE
    packed_pass(&c, task, packed_mode_cut, of_thread, threads)
    cdef int64_t *keeps = c.first + c.sequences + 1
    cdef int64_t *shares = keeps + c.sequences
    for s in range(c.sequences):
        sequence_run(&c, s, &own)
        of_head = (c.kernels.gradient_kept if on_tiles else c.kernels.backward_kept)(&own.p, 0) * c.itemsize
        keeps[s], shares[s] = bytes_kept, bytes_shared
        bytes_kept += split_bytes(&c, of_head, s)
        if on_tiles:
            bytes_shared += split_bytes(&c, c.kernels.gradient_bytes(&own.p), s)
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


# ------------------------------------------------------------------------------------------------------- items of a run

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
    "blas" forward. "decode" has two passes, over one to eight chunks and over heads, and so has "tiled" where runs of keys keep
    so many `threads` busier: over blocks, some of them in runs, and over rows of these, which merge them.
    """
    cdef fmha_cut first, second
    cdef fmha_blocks blocks
    cdef Blocks _held           # as long as its lists are read
    cdef Heads c
    if name == "blas":
        prepare(&c, problem, rows, backward)
        return [items_of(&c.cut)]
    if name == "decode":
        first, second = fmha_decode_cut(&problem.c, threads), fmha_heads_cut(&problem.c)
        return [items_of(&first), items_of(&second)]
    _held = blocks_for(&problem.c, threads, True, False, &blocks)
    first, second = fmha_blocks_cut(&problem.c, &blocks, False), fmha_blocks_cut(&problem.c, &blocks, True)
    return [items_of(&first), items_of(&second)] if blocks.merged else [items_of(&first)]


# ---------------------------------------------------------------------------------------- projections and row functions

ctypedef struct Product:
    const fmha_kernels *kernels
    fmha_cut cut
    bint is_double, trans_a, trans_b
    int element_b
    bint by_head                # c is heads (B, heads, L, width): a slice of columns is a head
    ptrdiff_t m, n, k, itemsize
    fmha_array a, b, c
    fmha_finish last
    char *packed                # b as gemm_pack leaves it, or NULL
    double alpha, beta
    char *scratch               # NULL: products by BLAS
    ptrdiff_t scratch_size


cdef void product_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """c[i0 : i0 + rows, j0 : j0 + cols] := alpha * op(a) @ op(b) + beta * c, then the last pass; of a batch row if c is heads."""
    cdef Product *s = <Product *>context
    cdef fmha_item item = fmha_item_of(&s.cut, index)
    cdef ptrdiff_t i0 = item.i0, j0 = item.j0, rows = item.rows, cols = item.cols, size = s.itemsize
    cdef ptrdiff_t size_b = size_of(s.element_b, size)
    cdef ptrdiff_t lda = leading(&s.a, s.m if s.trans_a else s.k), ldb = leading(&s.b, s.k if s.trans_b else s.n)
    cdef ptrdiff_t ldc = leading(&s.c, cols if s.by_head else s.n)
    cdef char *c = s.c.data + (i0 * ldc + j0) * size
    if s.by_head:
        c = s.c.data + (item.b * s.c.stride[0] + (j0 // cols if cols else 0) * s.c.stride[1] + i0 * ldc) * size
        i0 += item.b * s.m
    cdef fmha_finish last = fmha_finish_at(&s.last, i0, j0, size)
    if s.scratch != NULL:
        s.kernels.gemm(s.element_b, s.trans_a, s.trans_b, rows, cols, s.k, s.a.data + (i0 if s.trans_a else i0 * lda) * size, lda,
                       s.b.data + (j0 * ldb if s.trans_b else j0) * size_b if s.b.data != NULL else NULL, ldb, c, ldc, &last,
                       s.packed + j0 * s.k * size if s.packed != NULL else NULL, s.scratch + worker * s.scratch_size)
        return
    gemm(s.is_double, s.trans_a, s.trans_b, rows, cols, s.k, s.alpha,
         s.a.data + (i0 if s.trans_a else i0 * lda) * size, lda,
         s.b.data + (j0 * ldb if s.trans_b else j0) * size, ldb, s.beta, c, ldc)
    s.kernels.finish(rows, cols, c, ldc, &last)


cdef int prepare_product(Product *s, a, b, c, bint trans_a, bint trans_b, bias, slices) except -1:
    """All of s but alpha, beta, scratch, `packed` and what of the last pass is not the bias. Rows of a and c may be those of
    (B, L) tokens: of (B, L, width), C-contiguous. Those of half precision are to be converted before the product."""
    cdef ptrdiff_t shape[4]
    cdef ptrdiff_t slice_rows, slice_cols, size = c.dtype.itemsize
    s.itemsize = max(size, <ptrdiff_t>sizeof(float))
    s.is_double = s.itemsize == 8
    s.kernels = kernel_tables[s.is_double]
    s.trans_a, s.trans_b = trans_a, trans_b
    read_array(a, &s.a, shape, size, False)
    s.k = shape[1] * shape[2] if trans_a else shape[3]
    s.b.data, s.b.stride[2], s.element_b = NULL, 0, FMHA_SAME
    if b is not None:
        s.element_b = element_of(b.dtype)
        read_array(b, &s.b, NULL, size_of(s.element_b, s.itemsize), False)
    read_array(c, &s.c, shape, size, True)
    s.last.bias = pointer(bias, False) if bias is not None else NULL
    s.last.residual, s.last.ld, s.last.activation = NULL, 0, 0
    slice_rows, slice_cols = slices
    s.by_head = c.ndim == 4
    if s.by_head:
        s.m, s.n = shape[2], shape[1] * slice_cols
        s.cut = fmha_matrices_cut(shape[0], s.m, slice_rows, s.n, slice_cols)
    else:
        s.m, s.n = shape[1] * shape[2], shape[3]
        s.cut = fmha_matrices_cut(1, s.m, slice_rows, s.n, slice_cols)
    return 0


cdef int multiply(Product *s, bint by_blas, int threads) except -1:
    """A prepared product, by BLAS or by the kernels' own."""
    cdef ptrdiff_t items = fmha_items(&s.cut)
    cdef Scratch scratch
    threads = threads_for(threads, <double>s.cut.last * s.m * s.n * s.k)
    if by_blas:
        s.scratch = NULL
        with nogil:
            run(product_item, s, items, threads)
    else:
        scratch = scratch_for(s.kernels.gemm_scratch(min(s.m, s.cut.row_step), s.cut.col_step, s.k) * s.itemsize, items, threads)
        s.scratch, s.scratch_size = scratch.start, scratch.size
        with nogil:
            fmha_pool_run(product_item, s, items, scratch.threads)
    return finish()


def matmul(a, b, c, bint trans_a, bint trans_b, double alpha, double beta, bias, slices, int threads):
    """c := alpha * op(a) @ op(b) + beta * c (+ bias) by BLAS, matrices with unit last stride and row strides that it takes.

    `slices`: (rows, columns) of c in one item of the pool. c may be heads (B, heads, L, width) with contiguous rows, for
    (B · L, heads · width) rows and columns: slices are then (rows, width).
    """
    cdef Product s
    prepare_product(&s, a, b, c, trans_a, trans_b, bias, slices)
    s.alpha, s.beta = alpha, beta
    multiply(&s, True, threads)


def pack_weights(b, packed):
    """packed <- b (K, N) with unit last stride as `matmul_tiled` takes it: K times N rounded up to whole vectors elements."""
    cdef fmha_array x
    cdef ptrdiff_t shape[4]
    cdef const fmha_kernels *kernels = kernel_tables[b.dtype.itemsize == 8]
    read_array(b, &x, shape, b.dtype.itemsize, False)
    kernels.gemm_pack(shape[2], shape[3], x.data, leading(&x, shape[3]), pointer(packed, True))


def matmul_tiled(a, b, c, bint trans_a, bint trans_b, bias, slices, int threads, packed=None, int activation=0,
                 residual=None):
    """c := activation(op(a) @ op(b) + bias) + residual by the kernels' own product; `packed`: b from `pack_weights`, slices then
    of a multiple of PANEL_COLUMNS columns, and b may be None. b may be of half precision (bfloat16 as uint16) where a and c are
    of float32. residual: as c, a matrix. Else as `matmul`."""
    cdef Product s
    cdef fmha_array added
    prepare_product(&s, a, b, c, trans_a, trans_b, bias, slices)
    s.packed = pointer(packed, False) if packed is not None else NULL
    s.last.activation = activation
    if residual is not None:
        read_array(residual, &added, NULL, s.itemsize, False)
        s.last.residual, s.last.ld = added.data, added.stride[2]
    multiply(&s, False, threads)


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


ctypedef struct TileProduct:
    const fmha_kernels *kernels
    fmha_tile_product x
    fmha_cut cut, packing
    fmha_array a, b, c
    fmha_finish last
    ptrdiff_t size_c
    int element_a, element_b
    bint trans_a, by_head, large
    char *tiles
    char *scratch
    ptrdiff_t scratch_size


cdef enum:
    PACKED_ROWS = 64            # of an operand of a product on matrix tiles, in an item that packs it


cdef void pack_first_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Some rows of op(a)."""
    cdef TileProduct *s = <TileProduct *>context
    cdef fmha_item item = fmha_item_of(&s.packing, index)
    if s.kernels.pack_tiles(1, s.trans_a, s.element_a, s.x.parts_a, item.i0, item.rows, s.x.K, s.a.data,
                            leading(&s.a, s.x.M if s.trans_a else s.x.K), s.x.M, s.tiles):
        s.large = True          # whoever writes it writes the same


cdef void pack_second_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Some columns of b."""
    cdef TileProduct *s = <TileProduct *>context
    cdef fmha_item item = fmha_item_of(&s.packing, index)
    if s.kernels.pack_tiles(0, True, s.element_b, s.x.parts_b, item.i0, item.rows, s.x.K, s.b.data, leading(&s.b, s.x.N), s.x.N,
                            s.tiles):
        s.large = True


cdef void tile_product_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    cdef TileProduct *s = <TileProduct *>context
    if s.large:                 # another item has seen that
        return
    cdef fmha_item item = fmha_item_of(&s.cut, index)
    cdef ptrdiff_t i0 = item.i0, j0 = item.j0, cols = item.cols, ldc = leading(&s.c, cols if s.by_head else s.x.N)
    cdef char *c = s.c.data + (i0 * ldc + j0) * s.size_c
    cdef fmha_finish last = s.last
    if s.by_head:
        c = s.c.data + (item.b * s.c.stride[0] + (j0 // cols if cols else 0) * s.c.stride[1] + i0 * ldc) * s.size_c
        i0 += item.b * s.cut.rows
    if last.bias != NULL:
        last.bias += j0 * sizeof(float)
    if last.residual != NULL:
        last.residual += (i0 * last.ld + j0) * s.size_c
    if s.kernels.tile_gemm(&s.x, i0, item.rows, j0, cols, c, ldc, &last, s.scratch + worker * s.scratch_size):
        s.large = True


def has_tiles():
    """Whether the kernels in use multiply on matrix tiles."""
    return kernel_tables[0].tile_gemm != NULL


def tiles_bytes(ptrdiff_t outer, ptrdiff_t terms, int parts):
    """Bytes of an operand packed for matrix tiles: so many rows or columns of the result, terms of its sums, and parts."""
    return parts * kernel_tables[0].tiles_size(outer, terms) * 2


def pack_tiles(b, tiles, int parts, int threads):
    """tiles (tiles_bytes(N, K, parts) bytes on a cache line) <- b (K, N) with unit last stride, of float32 or half precision (as
    uint16: bfloat16), as second operand. Returns whether it can be used: no number is too large or not finite."""
    cdef TileProduct s
    cdef ptrdiff_t shape[4]
    s.kernels = kernel_tables[0]
    s.element_b = element_of(b.dtype)
    read_array(b, &s.b, shape, b.dtype.itemsize, False)
    s.x.K, s.x.N, s.x.M = shape[2], shape[3], 0
    s.x.parts_b, s.large = parts, False
    s.tiles = pointer(tiles, True)
    s.packing = fmha_matrices_cut(1, s.x.N, PACKED_ROWS, 1, 0)
    with nogil:
        fmha_pool_run(pack_second_item, &s, fmha_items(&s.packing), threads)
    finish()
    return not s.large


def matmul_matrix(a, b, c, bint trans_a, bint trans_b, bias, slices, int threads, int parts, packed=None, int activation=0,
                  residual=None):
    """c := activation(op(a) @ op(b) + bias) + residual on matrix tiles; a, b, c of float32 or half precision (bfloat16 as
    uint16), bias of float32, residual as c. packed: b from `pack_tiles`, and b may be None. slices of multiples of 16 rows and
    columns.
    Returns False, with c undefined, where some number is too large or not finite."""
    cdef TileProduct s
    cdef ptrdiff_t shape[4]
    cdef ptrdiff_t slice_rows, slice_cols
    cdef fmha_array added
    cdef Scratch shared, scratch
    s.kernels = kernel_tables[0]
    s.trans_a, s.large = trans_a, False
    s.element_a, s.x.type_c, s.size_c = element_of(a.dtype), element_of(c.dtype), c.dtype.itemsize
    read_array(a, &s.a, shape, a.dtype.itemsize, False)
    s.x.M, s.x.K = (shape[3], shape[2]) if trans_a else (shape[2], shape[3])
    s.x.parts_a = 1 if s.element_a == FMHA_BFLOAT else parts
    s.x.parts_b = parts
    if b is not None:
        s.element_b = element_of(b.dtype)
        read_array(b, &s.b, NULL, b.dtype.itemsize, False)
        s.x.parts_b = 1 if s.element_b == FMHA_BFLOAT else parts
    read_array(c, &s.c, shape, s.size_c, True)
    s.by_head = c.ndim == 4
    slice_rows, slice_cols = slices
    s.x.N = shape[1] * slice_cols if s.by_head else shape[3]
    s.last.bias = pointer(bias, False) if bias is not None else NULL
    s.last.residual, s.last.ld, s.last.activation = NULL, 0, activation
    if residual is not None:
        read_array(residual, &added, NULL, s.size_c, False)
        s.last.residual, s.last.ld = added.data, added.stride[2]
    s.x.most_rows = slice_rows
    shared = Scratch(s.x.parts_a * s.kernels.tiles_size(s.x.M, s.x.K) * 2, 1)
    s.tiles = shared.start
    s.x.a, s.x.b = s.tiles, pointer(packed, False) if packed is not None else NULL
    s.x.raw, s.x.raw_type, s.x.raw_transposed, s.x.raw_stride = NULL, FMHA_SAME, False, 0
    if packed is None:
        s.x.raw, s.x.raw_type, s.x.raw_transposed = s.b.data, s.element_b, trans_b
        s.x.raw_stride = leading(&s.b, s.x.K if trans_b else s.x.N)
    s.packing = fmha_matrices_cut(1, s.x.M, PACKED_ROWS, 1, 0)
    s.cut = fmha_matrices_cut(shape[0], shape[2], slice_rows, s.x.N, slice_cols)
    cdef ptrdiff_t items = fmha_items(&s.cut)
    scratch = scratch_for(s.kernels.tile_scratch(&s.x), items, threads)
    s.scratch, s.scratch_size = scratch.start, scratch.size
    with nogil:
        fmha_pool_run(pack_first_item, &s, fmha_items(&s.packing), threads)
        if not s.large:
            fmha_pool_run(tile_product_item, &s, items, scratch.threads)
    finish()
    return not s.large


cdef enum:
    SOFTMAX_NUMBERS = 16384     # of an item, or one row


ctypedef struct Rows:
    const fmha_kernels *kernels
    fmha_cut cut
    ptrdiff_t itemsize
    const char *x
    const char *other
    char *y


cdef void softmax_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    cdef Rows *c = <Rows *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t rows = item.rows, cols = item.cols, at = item.i0 * cols * c.itemsize
    if c.other == NULL:
        c.kernels.softmax(rows, cols, c.x + at, cols, c.y + at, cols)
    else:
        c.kernels.softmax_backward(rows, cols, c.x + at, cols, c.other + at, cols, c.y + at, cols)


def softmax_rows(x, softmax_output, y, int threads):
    """y <- softmax of the rows of x; with softmax_output, y <- its gradient for grad_output x.

    All (rows, cols), C-contiguous.
    """
    cdef Rows c
    cdef ptrdiff_t shape[4]
    cdef fmha_array a
    c.itemsize = x.dtype.itemsize
    c.kernels = kernel_tables[c.itemsize == 8]
    read_array(x, &a, shape, c.itemsize, False)
    c.x = a.data
    c.other = pointer(softmax_output, False) if softmax_output is not None else NULL
    c.y = pointer(y, True)
    c.cut = fmha_matrices_cut(1, shape[2], max(1, SOFTMAX_NUMBERS // max(1, shape[3])), shape[3], 0)
    with nogil:
        fmha_pool_run(softmax_item, &c, fmha_items(&c.cut), threads)
    finish()


# ----------------------------------------------------------------------------------------------- activations and norms

cdef enum:
    ROW_NUMBERS = 16384         # of an item, or one row; fewer are work for one thread


ctypedef struct RowRun:
    # Rows (.., .., .., width) counted through over the leading axes; absent operands have data NULL.
    const fmha_kernels *kernels
    fmha_cut cut
    ptrdiff_t itemsize, lengths[3]
    fmha_array x, other, y, grad_output      # other: the residual of a norm
    int kind
    fmha_norm norm
    char *partials                  # backward of a norm: of each SUMMED_ROWS rows, grad_weight (and grad_bias)
    ptrdiff_t partial               # numbers of one
    char *sums


cdef ptrdiff_t read_rows(RowRun *c, x, other, y, grad_output) except -1:
    """The operands, alike in shape, of at most 4 axes, and aligned with unit last strides. Returns the number of rows."""
    cdef ptrdiff_t shape[4]
    c.itemsize = x.dtype.itemsize
    c.kernels = kernel_tables[c.itemsize == 8]
    read_array(x, &c.x, shape, c.itemsize, False)
    read_array(y, &c.y, NULL, c.itemsize, True)
    c.other.data = c.grad_output.data = NULL
    if other is not None:
        read_array(other, &c.other, NULL, c.itemsize, False)
    if grad_output is not None:
        read_array(grad_output, &c.grad_output, NULL, c.itemsize, False)
    c.lengths[0], c.lengths[1], c.lengths[2] = shape[0], shape[1], shape[2]
    c.norm.width = shape[3]
    return shape[0] * shape[1] * shape[2]


cdef ptrdiff_t rows_together(const RowRun *c, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t *at) noexcept nogil:
    """Where row `row` lies, and how many of the next `rows` lie at one stride from it."""
    cdef ptrdiff_t head
    at[0] = at[1] = 0
    at[2] = row
    if row >= c.lengths[2]:
        head = row // c.lengths[2]
        at[2] = row - head * c.lengths[2]
        at[0] = head // c.lengths[1]
        at[1] = head - at[0] * c.lengths[1]
    return min(rows, c.lengths[2] - at[2])


cdef inline char *row_of(const RowRun *c, const fmha_array *x, const ptrdiff_t *at) noexcept nogil:
    return head(x, at[0], at[1], at[2], c.itemsize) if x.data != NULL else NULL


cdef int row_threads(const RowRun *c, ptrdiff_t rows, int threads) noexcept nogil:
    return threads if rows * c.norm.width >= ROW_NUMBERS else 1


cdef void activation_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    cdef RowRun *c = <RowRun *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t row = item.i0, left = item.rows, together, _, shift = item.j0 * c.itemsize
    cdef ptrdiff_t at[3]
    while left > 0:
        together = rows_together(c, row, left, at)
        row += together
        left -= together
        for _ in range(together):
            if c.grad_output.data == NULL:
                c.kernels.activate_row(c.kind, item.cols, row_of(c, &c.x, at) + shift, row_of(c, &c.y, at) + shift)
            else:
                c.kernels.activate_row_backward(c.kind, item.cols, row_of(c, &c.grad_output, at) + shift,
                                                row_of(c, &c.x, at) + shift, row_of(c, &c.y, at) + shift)
            at[2] += 1


def activation_rows(int kind, grad_output, x, y, int threads):
    """y <- the activation of x; with grad_output, y <- grad_output times its derivative at x. As `read_rows` takes them."""
    cdef RowRun c
    cdef ptrdiff_t rows = read_rows(&c, x, None, y, grad_output), width = c.norm.width
    c.kind = kind
    c.cut = fmha_matrices_cut(1, rows, max(1, ROW_NUMBERS // max(1, width)), width, ROW_NUMBERS)
    with nogil:
        fmha_pool_run(activation_item, &c, fmha_items(&c.cut), row_threads(&c, rows, threads))
    finish()


cdef void norm_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    cdef RowRun *c = <RowRun *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t row = item.i0, left = item.rows, together
    cdef ptrdiff_t at[3]
    while left > 0:
        together = rows_together(c, row, left, at)
        c.kernels.norm_rows(&c.norm, together, row_of(c, &c.x, at), c.x.stride[2], row_of(c, &c.other, at), c.other.stride[2],
                            row_of(c, &c.y, at), c.y.stride[2])
        row += together
        left -= together


def norm_rows(x, residual, weight, bias, y, double eps, bint centered, int threads):
    """y <- the norm of the rows of x + residual; weight and bias (width,) contiguous, bias and residual may be None."""
    cdef RowRun c
    cdef ptrdiff_t rows = read_rows(&c, x, residual, y, None)
    c.norm.eps, c.norm.centered = eps, centered
    c.norm.weight = pointer(weight, False)
    c.norm.bias = pointer(bias, False) if bias is not None else NULL
    c.cut = fmha_matrices_cut(1, rows, max(1, ROW_NUMBERS // max(1, c.norm.width)), c.norm.width, 0)
    with nogil:
        fmha_pool_run(norm_item, &c, fmha_items(&c.cut), row_threads(&c, rows, threads))
    finish()


cdef void norm_backward_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Some partial sums, each of SUMMED_ROWS rows from a multiple of that on, the rows one after the other."""
    cdef RowRun *c = <RowRun *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t row = item.i0, end = item.i0 + item.rows, together
    cdef ptrdiff_t at[3]
    cdef char *sums = NULL
    while row < end:
        if row % FMHA_SUMMED_ROWS == 0:
            sums = c.partials + row // FMHA_SUMMED_ROWS * c.partial * c.itemsize
            memset(sums, 0, c.partial * c.itemsize)
        together = min(FMHA_SUMMED_ROWS - row % FMHA_SUMMED_ROWS, end - row)
        together = rows_together(c, row, together, at)
        c.kernels.norm_rows_backward(&c.norm, together, row_of(c, &c.grad_output, at), c.grad_output.stride[2],
                                     row_of(c, &c.x, at), c.x.stride[2], row_of(c, &c.other, at), c.other.stride[2],
                                     row_of(c, &c.y, at), c.y.stride[2], sums,
                                     sums + c.norm.width * c.itemsize if c.partial > c.norm.width else NULL)
        row += together


cdef void norm_sums_item(void *context, ptrdiff_t index, int worker) noexcept nogil:
    """Columns of the partial sums, added up in their order."""
    cdef RowRun *c = <RowRun *>context
    cdef fmha_item item = fmha_item_of(&c.cut, index)
    cdef ptrdiff_t shift = item.j0 * c.itemsize
    c.kernels.add_up_rows(item.rows, item.cols, c.partials + shift, c.partial, c.sums + shift)


def norm_rows_backward(grad_output, x, residual, weight, grad_x, partials, sums, double eps, bint centered, int threads):
    """grad_x <- the gradient of x (and of residual); sums (1 or 2, width) <- grad_weight (and grad_bias).

    partials (at least one for each SUMMED_ROWS rows, 1 or 2, width): scratch. Both contiguous.
    """
    cdef RowRun c
    cdef ptrdiff_t rows = read_rows(&c, x, residual, grad_x, grad_output)
    c.norm.eps, c.norm.centered = eps, centered
    c.norm.weight = pointer(weight, False)
    c.norm.bias = NULL
    c.partials, c.partial, c.sums = pointer(partials, True), sums.size, pointer(sums, True)
    threads = row_threads(&c, rows, threads)
    c.cut = fmha_matrices_cut(1, rows, FMHA_SUMMED_ROWS * max(1, ROW_NUMBERS // (FMHA_SUMMED_ROWS * max(1, c.norm.width))),
                              c.norm.width, 0)
    with nogil:
        fmha_pool_run(norm_backward_item, &c, fmha_items(&c.cut), threads)
    finish()
    c.cut = fmha_matrices_cut(1, (rows + FMHA_SUMMED_ROWS - 1) // FMHA_SUMMED_ROWS, 0, c.partial, ROW_NUMBERS // FMHA_SUMMED_ROWS)
    with nogil:
        fmha_pool_run(norm_sums_item, &c, fmha_items(&c.cut), threads)
    finish()


def exponential(x, y):
    """y <- exp(x) by the kernels' own function, for its test. (n,) contiguous."""
    cdef const char *source = pointer(x, False)
    cdef uint64_t before = fmha_flush_subnormals()
    kernel_tables[x.dtype.itemsize == 8].exponential(x.size, source, pointer(y, True))
    fmha_set_control(before)


def hyperbolic_tangent(x, y):
    """y <- tanh(x) by the kernels' own function, for its test. (n,) contiguous."""
    cdef const char *source = pointer(x, False)
    cdef uint64_t before = fmha_flush_subnormals()
    kernel_tables[x.dtype.itemsize == 8].hyperbolic_tangent(x.size, source, pointer(y, True))
    fmha_set_control(before)


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
