# Arrays and tensors: their element types, addresses and strides.
from cpython.buffer cimport PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stddef cimport ptrdiff_t

from fastmha._kernels cimport (
    FMHA_BFLOAT, FMHA_HALF, FMHA_OTHER, FMHA_SAME, FMHA_TENSORS_MAJOR, FMHA_TENSOR_BFLOAT, FMHA_TENSOR_FLOAT,
    FMHA_TENSOR_ON_CPU, fmha_array, fmha_tensor, fmha_tensors,
)


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
