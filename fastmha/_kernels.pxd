"""What the Cython glue sees of the C kernels: the declarations of csrc/*.h, in their order."""
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "csrc/items.h" nogil:
    ctypedef struct fmha_item:
        ptrdiff_t b, h, i0, rows, j0, cols

    ctypedef struct fmha_cut:
        ptrdiff_t heads, head_step, first, last, rows, row_step, cols, col_step
        int from_end

    ptrdiff_t fmha_items(const fmha_cut *)
    fmha_item fmha_item_of(const fmha_cut *, ptrdiff_t)
    fmha_cut fmha_matrices_cut(ptrdiff_t count, ptrdiff_t rows, ptrdiff_t row_step, ptrdiff_t cols, ptrdiff_t col_step)


cdef extern from "csrc/fastmha.h" nogil:
    ctypedef struct fmha_array:
        char *data
        ptrdiff_t stride[4]

    ctypedef struct fmha_dropout:
        double factor
        uint32_t below
        uint64_t seed
        int64_t b, h, i, j

    ctypedef struct fmha_problem:
        ptrdiff_t B, H, Hkv, Lq, Lk, D, Dv
        double scale, softcap
        int banded
        int64_t left, right
        const int64_t *offset
        const int64_t *key_start
        const int64_t *key_length
        int element, stored, parts, mask_element
        fmha_array q, k, v, bool_mask, additive_mask
        const char *sinks
        const char *alibi
        fmha_dropout dropout
        int part
        ptrdiff_t copies

    ctypedef struct fmha_block:
        ptrdiff_t b, h, i0, rows, j0, cols, ld

    ctypedef struct fmha_run:
        fmha_problem p
        fmha_cut cut
        fmha_array out
        char *lse
        char *weights
        fmha_array grad_out, grad_q, grad_k, grad_v, grad_mask
        int mode
        ptrdiff_t share
        int *apart
        int again
        char *copies
        char *row_states
        char *scratch
        ptrdiff_t scratch_size, threads, some
        char *kept
        char *chunks
        ptrdiff_t neighbours
        double reach
        ptrdiff_t whole, part_keys
        int *turns
        char *shared
        ptrdiff_t first_shared, items_before
        double all_bytes
        const fmha_run *behind

    ctypedef struct fmha_finish:
        const char *bias
        const char *residual
        ptrdiff_t ld
        int activation

    fmha_finish fmha_finish_at(const fmha_finish *, ptrdiff_t m, ptrdiff_t n, size_t itemsize)

    ctypedef struct fmha_tile_product:
        const void *a
        const void *b
        const void *raw
        ptrdiff_t M, N, K, raw_stride, most_rows
        int parts_a, parts_b, type_c, raw_type, raw_transposed

    ctypedef struct fmha_norm:
        ptrdiff_t width
        double eps
        int centered
        const void *weight
        const void *bias

    ctypedef struct fmha_kernels:
        const char *name
        int vector_bytes
        void (*softmax)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, void *, ptrdiff_t) noexcept nogil
        void (*softmax_backward)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, const void *, ptrdiff_t, void *,
                                 ptrdiff_t) noexcept nogil
        void (*attend_rows)(const fmha_problem *, const fmha_block *, void *, void *, void *) noexcept nogil
        void (*attend_rows_backward)(const fmha_problem *, const fmha_block *, void *, void *, void *, const void *,
                                     const fmha_array *, const fmha_array *, void *) noexcept nogil
        void (*drop_rows)(const fmha_problem *, const fmha_block *, void *) noexcept nogil
        void (*divide_rows)(ptrdiff_t, ptrdiff_t, void *, ptrdiff_t, const void *) noexcept nogil
        int (*all_finite)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t) noexcept nogil
        void (*copy_rows)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, void *, ptrdiff_t) noexcept nogil
        void (*load_rows)(int, ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, void *, ptrdiff_t) noexcept nogil
        void (*store_rows)(int, ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, void *, ptrdiff_t) noexcept nogil
        void (*copy_finite)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, void *, ptrdiff_t) noexcept nogil
        void (*multiply)(ptrdiff_t, void *, double) noexcept nogil
        void (*add_nonfinite)(const fmha_problem *, const fmha_block *, int, double, const void *, const void *,
                              ptrdiff_t, ptrdiff_t, void *, ptrdiff_t) noexcept nogil
        int (*exceeds)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, double, double) noexcept nogil
        int (*tiny_row)(ptrdiff_t, const void *) noexcept nogil
        int (*nonzero)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t) noexcept nogil
        void (*lift_rows)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, void *, ptrdiff_t) noexcept nogil
        void (*lower_row)(ptrdiff_t, const void *, const void *, void *) noexcept nogil
        void (*tiled_forward)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*tiled_scratch)(const fmha_problem *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*run_scratch)(const fmha_problem *) noexcept nogil
        void (*tiled_merge)(void *, ptrdiff_t, int) noexcept nogil
        void (*tiled_weights)(void *, ptrdiff_t, int) noexcept nogil
        void (*decode)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*decode_scratch)(const fmha_problem *) noexcept nogil
        void (*decode_neighbours)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*neighbours_scratch)(const fmha_problem *, ptrdiff_t) noexcept nogil
        ptrdiff_t (*chunk_scratch)(const fmha_problem *) noexcept nogil
        void (*decode_merge)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*merge_scratch)(const fmha_problem *) noexcept nogil
        void (*tiled_backward)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*backward_scratch)(const fmha_problem *, int, ptrdiff_t) noexcept nogil
        ptrdiff_t (*backward_kept)(const fmha_problem *, ptrdiff_t) noexcept nogil
        ptrdiff_t (*copy_sums)(const fmha_problem *) noexcept nogil
        void (*add_copies)(void *, ptrdiff_t, int) noexcept nogil
        void (*mask_gradient)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*mask_gradient_scratch)(const fmha_problem *) noexcept nogil
        void (*matrix_head)(void *, ptrdiff_t, int) noexcept nogil
        void (*matrix_pack)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*matrix_bytes)(const fmha_problem *) noexcept nogil
        fmha_cut (*matrix_cut)(const fmha_problem *, ptrdiff_t) noexcept nogil
        void (*matrix_forward)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*matrix_scratch)(const fmha_problem *, int, int) noexcept nogil
        void (*gradient_pack_keys)(void *, ptrdiff_t, int) noexcept nogil
        void (*gradient_pack_rows)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*gradient_bytes)(const fmha_problem *) noexcept nogil
        void (*matrix_backward)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*gradient_scratch)(const fmha_problem *, int, ptrdiff_t) noexcept nogil
        ptrdiff_t (*gradient_kept)(const fmha_problem *, ptrdiff_t) noexcept nogil
        ptrdiff_t (*gradient_sums)(const fmha_problem *) noexcept nogil
        void (*gradient_add)(void *, ptrdiff_t, int) noexcept nogil
        ptrdiff_t (*tiles_size)(ptrdiff_t, ptrdiff_t) noexcept nogil
        int (*pack_tiles)(int, int, int, int, ptrdiff_t, ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, ptrdiff_t,
                          void *) noexcept nogil
        int (*tile_gemm)(const fmha_tile_product *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t, void *, ptrdiff_t,
                         const fmha_finish *, void *) noexcept nogil
        ptrdiff_t (*tile_scratch)(const fmha_tile_product *) noexcept nogil
        void (*gemm)(int, int, int, ptrdiff_t, ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, const void *, ptrdiff_t,
                     void *, ptrdiff_t, const fmha_finish *, const void *, void *) noexcept nogil
        void (*gemm_pack)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, void *) noexcept nogil
        ptrdiff_t (*gemm_scratch)(ptrdiff_t M, ptrdiff_t N, ptrdiff_t K) noexcept nogil
        void (*finish)(ptrdiff_t, ptrdiff_t, void *, ptrdiff_t, const fmha_finish *) noexcept nogil
        void (*activate_row)(int, ptrdiff_t, const void *, void *) noexcept nogil
        void (*activate_row_backward)(int, ptrdiff_t, const void *, const void *, void *) noexcept nogil
        void (*norm_rows)(const fmha_norm *, ptrdiff_t, const void *, ptrdiff_t, const void *, ptrdiff_t, void *,
                          ptrdiff_t) noexcept nogil
        void (*norm_rows_backward)(const fmha_norm *, ptrdiff_t, const void *, ptrdiff_t, const void *, ptrdiff_t,
                                   const void *, ptrdiff_t, void *, ptrdiff_t, void *, void *) noexcept nogil
        void (*add_up_rows)(ptrdiff_t, ptrdiff_t, const void *, ptrdiff_t, void *) noexcept nogil
        void (*exponential)(ptrdiff_t, const void *, void *) noexcept nogil
        void (*hyperbolic_tangent)(ptrdiff_t, const void *, void *) noexcept nogil

    int FMHA_ISA_COUNT, FMHA_BASELINE_FUSES, FMHA_IS_CHECKED
    int FMHA_WHOLE, FMHA_PREPARE, FMHA_TURNS, FMHA_SHARES, FMHA_RESULTS, FMHA_MEND, FMHA_RESTART
    int FMHA_NO_ACTIVATION, FMHA_GELU, FMHA_GELU_TANH, FMHA_RELU, FMHA_SILU
    ptrdiff_t FMHA_SUMMED_ROWS
    int FMHA_SAME, FMHA_HALF, FMHA_BFLOAT, FMHA_OTHER
    ptrdiff_t FMHA_BLOCK_ROWS, FMHA_TILE_KEYS, FMHA_DECODE_ROWS, FMHA_CHUNK_KEYS, FMHA_PACK_ROWS, FMHA_PANEL_COLUMNS
    ptrdiff_t FMHA_NEIGHBOURS_FROM
    ptrdiff_t FMHA_KNOWN_FROM
    ptrdiff_t FMHA_REACH_ROWS
    ptrdiff_t FMHA_UNKNOWN_FROM
    double FMHA_HALF_COST, FMHA_QUARTER_COST, FMHA_RUN_COST
    ptrdiff_t FMHA_RUN_KEYS, FMHA_RUN_TURNS, FMHA_CACHE_LINE, FMHA_ROW_STATE, FMHA_KEPT_BYTES
    int64_t FMHA_UNBOUNDED
    const fmha_kernels *fmha_kernels_of(int isa, int is_double)
    int fmha_isa_runs(int isa)
    void fmha_ask_large_pages(void *, size_t) nogil
    int fmha_cpu_fetches
    const char *fmha_isa_name(int isa)
    double FMHA_LARGE(bint is_double)
    double fmha_folded_scale(const fmha_problem *, int, double *)
    void fmha_valid_keys(const fmha_problem *, ptrdiff_t, ptrdiff_t *, ptrdiff_t *)
    void fmha_block_keys(const fmha_problem *, ptrdiff_t, ptrdiff_t, ptrdiff_t, ptrdiff_t *, ptrdiff_t *)
    fmha_cut fmha_heads_cut(const fmha_problem *)
    fmha_problem fmha_in_copies(const fmha_problem *) nogil
    fmha_cut fmha_copies_cut(const fmha_problem *)
    fmha_cut fmha_forward_cut(const fmha_problem *)
    ctypedef struct fmha_split:
        int mode
        ptrdiff_t whole, keys, share, together
        double balance
    ptrdiff_t fmha_dealt(ptrdiff_t items, double bytes, int threads)
    ptrdiff_t fmha_decode_dealt(ptrdiff_t many, ptrdiff_t threads) nogil
    fmha_cut fmha_backward_cut(const fmha_problem *, int mode, const fmha_split *)
    fmha_split fmha_backward_split(const fmha_problem *, int threads, int *quick)
    ptrdiff_t fmha_chunks(const fmha_problem *)
    ptrdiff_t fmha_waiting_chunks(const fmha_problem *)
    fmha_cut fmha_decode_cut(const fmha_problem *, ptrdiff_t threads)
    ptrdiff_t fmha_neighbours(const fmha_problem *, ptrdiff_t rows, ptrdiff_t size, ptrdiff_t chunks, ptrdiff_t threads)
    fmha_cut fmha_neighbours_cut(const fmha_problem *, ptrdiff_t)
    ctypedef struct fmha_blocks:
        ptrdiff_t whole, fine, rows, keys
        bint runs, heads_inside
        ptrdiff_t listed, merged
    ptrdiff_t fmha_runs_left(const fmha_problem *, const fmha_blocks *)
    fmha_blocks fmha_forward_blocks(const fmha_problem *, int threads, bint runs, int *quick)
    int fmha_list_blocks(const fmha_problem *, fmha_blocks *)
    void fmha_free_blocks(fmha_blocks *)
    bint fmha_blocks_vary(const fmha_problem *, int threads)
    fmha_cut fmha_blocks_cut(const fmha_problem *, const fmha_blocks *, bint merging)
    bint fmha_by_heads(const fmha_problem *, int threads)
    bint fmha_of_keys(const fmha_array *mask)
    bint fmha_mask_ranges(const fmha_problem *, ptrdiff_t size, const void *removed, int64_t *starts, int64_t *ends)
    fmha_cut fmha_mask_cut(const fmha_problem *, const fmha_array *grad_mask)
    fmha_cut fmha_blas_forward_cut(const fmha_problem *, ptrdiff_t rows)

cdef extern from "Python.h":
    int check_signals "PyErr_CheckSignals" ()       # without `except`: what is raised waits for `finish`

cdef extern from "csrc/pool.h" nogil:
    ctypedef void (*fmha_task)(void *, ptrdiff_t, int) noexcept nogil
    int fmha_pool_run(fmha_task, void *, ptrdiff_t, int)
    int fmha_pool_deal(fmha_task, void *, ptrdiff_t, int, ptrdiff_t)
    void fmha_pool_ask(int (*question)() noexcept nogil)
    int fmha_pool_stopped()
    int fmha_pool_lost()
    int fmha_pool_workers()
    void fmha_pool_shutdown()

cdef extern from "csrc/subnormals.h" nogil:
    uint64_t fmha_flush_subnormals()
    void fmha_keep_subnormal_operands()
    void fmha_set_control(uint64_t)

cdef extern from "csrc/blas_threads.h" nogil:
    void fmha_blas_threads_bind(int (*)() noexcept nogil, void (*)(int) noexcept nogil)
    int fmha_blas_threads_bound()
    int fmha_blas_enter()
    void fmha_blas_leave(int)
    int FMHA_MOST_IN_BLAS
    void fmha_blas_item_begin()
    void fmha_blas_item_end()
    int fmha_blas_held()

cdef extern from "csrc/tensors.h":
    ctypedef struct fmha_tensor:
        char *data
        int32_t device, axes
        uint8_t kind, bits
        uint16_t lanes
        const int64_t *shape
        const int64_t *stride
        uint64_t offset

    ctypedef struct fmha_tensors:
        uint32_t major
        int (*look)(void *, fmha_tensor *) except -1

    enum:
        FMHA_TENSORS_MAJOR
        FMHA_TENSOR_ON_CPU
        FMHA_TENSOR_FLOAT
        FMHA_TENSOR_BFLOAT
