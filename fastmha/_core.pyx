# cython: language_level=3, freethreading_compatible=False
"""Glue between Python and the kernels: arrays become pointers and strides, scratch is allocated, the GIL is released,
and the "blas" algorithm loops over heads. No checks of user input here: `fastmha.validate` has made them.

One module, so that all of it shares one pool, one set of kernels and C without a Python call in between; its source is in
the files of glue/, each with what it takes from C and Python at its head.
"""
from libc.stdint cimport uintptr_t

from numpy import dtype as numpy_dtype

from fastmha._kernels cimport (
    FMHA_BASELINE_FUSES, FMHA_BLOCK_ROWS, FMHA_GELU, FMHA_GELU_TANH, FMHA_HALF_COST, FMHA_ISA_COUNT, FMHA_MOST_IN_BLAS,
    FMHA_NO_ACTIVATION, FMHA_PANEL_COLUMNS, FMHA_QUARTER_COST, FMHA_RELU, FMHA_ROW_STATE, FMHA_RUN_COST, FMHA_RUN_KEYS,
    FMHA_SILU, FMHA_SUMMED_ROWS, fmha_blas_held, fmha_blas_threads_bind, fmha_blas_threads_bound, fmha_isa_name,
    fmha_isa_runs, fmha_kernels, fmha_kernels_of, fmha_pool_shutdown, fmha_pool_workers,
)


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
RUN_KEYS = FMHA_RUN_KEYS
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


include "glue/arrays.pxi"
include "glue/reach.pxi"
include "glue/runs.pxi"
include "glue/problem.pxi"
include "glue/blas.pxi"
include "glue/tiled.pxi"
include "glue/decode.pxi"
include "glue/packed.pxi"
include "glue/items.pxi"
include "glue/products.pxi"
include "glue/projected.pxi"
include "glue/tile_products.pxi"
include "glue/rows.pxi"
include "glue/moves.pxi"
