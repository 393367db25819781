"""The only door to BLAS: products of row-major matrices through scipy.linalg.cython_blas.

The functions are taken from that module's capsules at run time, so one build of fastmha serves every SciPy: its
signatures differ between versions (`int` or `blas_int`), which a cimport would compare and refuse. Integers are handed
over as 64-bit variables; on little-endian machines a BLAS that reads 32 bits finds the same value there.
"""
from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int64_t
from libc.string cimport memset


cdef extern from * nogil:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    typedef int fmha_blas_int;
    #else
    typedef int64_t fmha_blas_int;
    #endif
    typedef void (*fmha_sgemm)(char *, char *, fmha_blas_int *, fmha_blas_int *, fmha_blas_int *, float *,
                               const void *, fmha_blas_int *, const void *, fmha_blas_int *, float *, void *,
                               fmha_blas_int *);
    typedef void (*fmha_dgemm)(char *, char *, fmha_blas_int *, fmha_blas_int *, fmha_blas_int *, double *,
                               const void *, fmha_blas_int *, const void *, fmha_blas_int *, double *, void *,
                               fmha_blas_int *);
    typedef void (*fmha_sgemv)(char *, fmha_blas_int *, fmha_blas_int *, float *, const void *, fmha_blas_int *,
                               const void *, fmha_blas_int *, float *, void *, fmha_blas_int *);
    typedef void (*fmha_dgemv)(char *, fmha_blas_int *, fmha_blas_int *, double *, const void *, fmha_blas_int *,
                               const void *, fmha_blas_int *, double *, void *, fmha_blas_int *);
    static struct { fmha_sgemm sgemm; fmha_dgemm dgemm; fmha_sgemv sgemv; fmha_dgemv dgemv; } fmha_blas;
    """
    ctypedef int64_t fmha_blas_int
    ctypedef void (*fmha_sgemm)(char *, char *, fmha_blas_int *, fmha_blas_int *, fmha_blas_int *, float *,
                                const void *, fmha_blas_int *, const void *, fmha_blas_int *, float *, void *,
                                fmha_blas_int *) noexcept nogil
    ctypedef void (*fmha_dgemm)(char *, char *, fmha_blas_int *, fmha_blas_int *, fmha_blas_int *, double *,
                                const void *, fmha_blas_int *, const void *, fmha_blas_int *, double *, void *,
                                fmha_blas_int *) noexcept nogil
    ctypedef void (*fmha_sgemv)(char *, fmha_blas_int *, fmha_blas_int *, float *, const void *, fmha_blas_int *,
                                const void *, fmha_blas_int *, float *, void *, fmha_blas_int *) noexcept nogil
    ctypedef void (*fmha_dgemv)(char *, fmha_blas_int *, fmha_blas_int *, double *, const void *, fmha_blas_int *,
                                const void *, fmha_blas_int *, double *, void *, fmha_blas_int *) noexcept nogil
    struct fmha_blas_table:
        fmha_sgemm sgemm
        fmha_dgemm dgemm
        fmha_sgemv sgemv
        fmha_dgemv dgemv
    fmha_blas_table fmha_blas


cdef inline void *blas_capsule(capsules, name) except NULL:
    capsule = capsules[name]
    return PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule))


cdef inline int need_blas() except -1:
    """Take the four functions from SciPy, and those for its number of threads, unless that is done: whoever makes products by
    BLAS calls it before. Not at import: to import scipy.linalg takes longer than to import all that is needed without it."""
    cdef void *sgemm
    cdef void *dgemm
    cdef void *sgemv
    cdef void *dgemv
    if fmha_blas.sgemm != NULL:
        return 0
    from scipy.linalg import cython_blas

    from fastmha.threads import bind_blas
    capsules = cython_blas.__pyx_capi__
    sgemm, dgemm = blas_capsule(capsules, "sgemm"), blas_capsule(capsules, "dgemm")
    sgemv, dgemv = blas_capsule(capsules, "sgemv"), blas_capsule(capsules, "dgemv")
    bind_blas()
    # At once: another thread may ask meanwhile.
    fmha_blas.dgemm, fmha_blas.sgemv, fmha_blas.dgemv = <fmha_dgemm>dgemm, <fmha_sgemv>sgemv, <fmha_dgemv>dgemv
    fmha_blas.sgemm = <fmha_sgemm>sgemm
    return 0


cdef inline void gemv(bint is_double, bint trans, ptrdiff_t m, ptrdiff_t n, double alpha, const char *A, ptrdiff_t lda,
                      const char *x, ptrdiff_t incx, double beta, char *y, ptrdiff_t incy) noexcept nogil:
    """y := alpha * op(A) . x + beta * y, A (m, n) row-major with row stride lda, op(A) = A or A^T.

    Strides in elements, all at most INT_MAX (callers check); m, n >= 1. With beta 0 y is not read.
    """
    # Row-major A (m, n) is Fortran's (n, m): A . x is its transpose times x.
    cdef fmha_blas_int rows = n, cols = m, ld = lda, dx = incx, dy = incy
    cdef char op = b'N' if trans else b'T'
    cdef float alpha32 = <float>alpha, beta32 = <float>beta
    cdef ptrdiff_t i, size = 8 if is_double else 4
    if beta == 0:       # some builds scale y by 0, which keeps a NaN
        for i in range(n if trans else m):
            memset(y + i * incy * size, 0, size)
    if is_double:
        fmha_blas.dgemv(&op, &rows, &cols, &alpha, A, &ld, x, &dx, &beta, y, &dy)
    else:
        fmha_blas.sgemv(&op, &rows, &cols, &alpha32, A, &ld, x, &dx, &beta32, y, &dy)


cdef inline void gemm(bint is_double, bint trans_a, bint trans_b, ptrdiff_t m, ptrdiff_t n, ptrdiff_t k, double alpha,
                      const char *A, ptrdiff_t lda, const char *B, ptrdiff_t ldb, double beta, char *C,
                      ptrdiff_t ldc) noexcept nogil:
    """C := alpha * op(A) . op(B) + beta * C, row-major: op(A) (m, k), op(B) (k, n), C (m, n).

    A is (m, k), or (k, m) if trans_a; B is (k, n), or (n, k) if trans_b. lda, ldb, ldc are row strides in elements, at
    least the width and at most INT_MAX (callers check both); beta is 0 or 1, with 0 C is not read. A single row or
    column goes through gemv. Any size may be 0.
    """
    cdef fmha_blas_int fm = n, fn = m, fk = k, fa = ldb, fb = lda, fc = ldc
    cdef char op_a = b'T' if trans_b else b'N', op_b = b'T' if trans_a else b'N'
    cdef float alpha32 = <float>alpha, beta32 = <float>beta
    cdef ptrdiff_t i, size = 8 if is_double else 4
    if m == 0 or n == 0:
        return
    if k == 0:
        if beta == 0:
            for i in range(m):
                memset(C + i * ldc * size, 0, n * size)
        return
    if m == 1:
        gemv(is_double, not trans_b, n if trans_b else k, k if trans_b else n, alpha, B, ldb,
             A, lda if trans_a else 1, beta, C, 1)
    elif n == 1:
        gemv(is_double, trans_a, k if trans_a else m, m if trans_a else k, alpha, A, lda,
             B, 1 if trans_b else ldb, beta, C, ldc)
    # Row-major C = op(A) op(B) is Fortran's C^T = op(B)^T op(A)^T with the same memory: operands change places.
    elif is_double:
        fmha_blas.dgemm(&op_a, &op_b, &fm, &fn, &fk, &alpha, B, &fa, A, &fb, &beta, C, &fc)
    else:
        fmha_blas.sgemm(&op_a, &op_b, &fm, &fn, &fk, &alpha32, B, &fa, A, &fb, &beta32, C, &fc)
