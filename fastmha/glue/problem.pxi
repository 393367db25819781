# Problem: one attention after validation.
from libc.math cimport INFINITY, sqrt
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int64_t, uint16_t, uint64_t

from numpy import ndarray, zeros

from fastmha._kernels cimport (
    FMHA_BFLOAT, FMHA_HALF, FMHA_OTHER, FMHA_SAME, FMHA_UNBOUNDED, fmha_array, fmha_mask_ranges, fmha_of_keys,
    fmha_problem,
)


cdef enum:
    MOST_PLACES = 256               # batch rows, for which offsets of 0 are kept

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
