"""fastmha.torch: torch's own function is the oracle, in float64 and float32; autograd, torch.func, torch.compile, patch."""

import ctypes
import warnings

import numpy as np
import pytest
from support import assert_close, assert_same, oracle

torch = pytest.importorskip("torch", reason='needs torch: pip install "fastmha[torch]"')

import fastmha  # noqa: E402
import fastmha.torch as face  # noqa: E402
from fastmha import _core, reference, validate  # noqa: E402
from fastmha._core import Problem  # noqa: E402
from fastmha.validate import Rules  # noqa: E402

own = torch.nn.functional.scaled_dot_product_attention
sdpa = face.scaled_dot_product_attention
types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
without = pytest.mark.skipif(torch.bfloat16 not in face.TYPES, reason='needs ml_dtypes: pip install "fastmha[bfloat16]"')
halves = pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=without)], ids=str)
B, H, L, S, E, Ev = 2, 4, 7, 9, 8, 5


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.float64, grad=True):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)

    return normal


def close(ours, theirs):
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-14}.get(theirs.dtype, 0)        # of half precision: where it must be one
    assert ours.dtype is theirs.dtype
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * max(1, theirs.abs().max())


def check(tensors, *more, **keywords):
    """Outputs and gradients of every tensor that wants one."""
    results = []
    leaves = [x for x in (*tensors, *more) if isinstance(x, torch.Tensor) and x.requires_grad]
    for f in (sdpa, own):
        out = f(*tensors, *more, **keywords)
        grads = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum(), leaves)
        results.append((out, *grads))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


def operands(draw, dtype=torch.float64, heads=H):
    return [draw(B, h, n, w, dtype=dtype) for h, n, w in ((H, L, E), (heads, S, E), (heads, S, Ev))]


# ------------------------------------------------------------------------------------------------------ what torch computes

@types
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.3}, {"scale": 0}, {"is_causal": True, "scale": -2}],
                         ids=str)
def test_torchs_results(dtype, keywords, draw):
    check(operands(draw, dtype), **keywords)


@types
def test_causality_begins_at_the_first_key(dtype, draw):
    for n, m in ((3, 8), (8, 3), (1, 5), (5, 1)):
        check([draw(1, 2, n, E, dtype=dtype), draw(1, 2, m, E, dtype=dtype), draw(1, 2, m, Ev, dtype=dtype)], is_causal=True)


@types
@pytest.mark.parametrize("groups", [1, 2])
def test_heads_in_groups(dtype, groups, draw):
    check(operands(draw, dtype, groups), enable_gqa=True)


MASKS = [(L, S), (1, S), (L, 1), (1, 1), (H, L, S), (1, L, S), (H, 1, S), (1, 1, S), (B, H, L, S), (B, 1, L, S), (1, H, L, S),
         (1, 1, L, S), (B, 1, 1, S), (B, H, 1, S), (B, H, L, 1), (1, 1, 1, S), (1, 1, 1, 1)]  # fmt: skip


@types
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_bool_say_what_may_attend(dtype, shape, draw):
    mask = draw(*shape).detach() > -0.5
    mask[..., 0] = True     # no empty row: torch's gradients are NaN there
    check(operands(draw, dtype), mask)


@types
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_floats_are_added_and_have_gradients(dtype, shape, draw):
    check(operands(draw, dtype), draw(*shape, dtype=dtype))


def test_a_mask_may_lie_anyhow(draw):
    tensors = operands(draw)
    for mask in (draw(S, L).t(), draw(2 * L, S)[::2], draw(1, 1, 1, S).expand(B, H, L, S), draw(L, 1).expand(L, S)):
        check(tensors, mask)
    check(tensors, (draw(1, 1, 1, S).detach() < 1).expand(B, H, L, S))


def test_masks_are_torchs_and_no_warning_doubts_it(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check([draw(1, 1, 6, E) for _ in range(3)], torch.ones(6, 6, dtype=torch.bool).tril())


def test_a_query_that_may_attend_nothing_gets_zeros(draw):
    tensors = operands(draw)
    mask = torch.ones(L, S, dtype=torch.bool)
    mask[3] = False
    out = sdpa(*tensors, mask)
    assert (out[:, :, 3] == 0).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), tensors))


@types
@pytest.mark.parametrize("axes", [2, 3, 5])
def test_any_number_of_axes(dtype, axes, draw):
    before = (3, 2, 4)[: axes - 2]
    tensors = [draw(*before, n, w, dtype=dtype) for n, w in ((L, E), (S, E), (S, Ev))]
    check(tensors)
    check(tensors, is_causal=True)
    for shape in ((L, S), (*before, L, S), (*(1 for _ in before), 1, S)):
        check(tensors, draw(*shape, dtype=dtype))


def test_axes_before_the_last_two_broadcast(draw):
    check([draw(B, H, L, E), draw(1, H, S, E), draw(B, H, S, Ev)])
    check([draw(1, 1, L, E), draw(B, H, S, E), draw(1, H, S, Ev)])
    check([draw(L, E), draw(B, H, S, E), draw(H, S, Ev)])


def test_operands_of_fewer_axes_than_query(draw):
    for key, value in (((S, E), (S, Ev)), ((S, E), (B, H, S, Ev)), ((B, 1, S, E), (S, Ev)), ((H, S, E), (S, Ev))):
        check([draw(B, H, L, E), draw(*key), draw(*value)])
        check([draw(H, L, E), draw(*key[-3:]), draw(*value[-3:])], draw(L, S))


@pytest.mark.parametrize("heads", [(6, 2, 3), (6, 1, 3), (6, 6, 2), (4, 4, 1)], ids=str)
def test_heads_of_key_and_value_in_groups_of_their_own(heads, draw):
    check([draw(B, h, n, w) for h, n, w in zip(heads, (L, S, S), (E, E, Ev), strict=True)], enable_gqa=True)


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4), (3, 2, 0)], ids=str)
def test_no_rows_at_all_in_five_axes(shape, draw):
    tensors = [draw(*shape, n, w) for n, w in ((L, E), (S, E), (S, Ev))]
    for mask in (draw(L, S), draw(*(1 for _ in shape), 1, S), torch.ones(*shape, L, S, dtype=torch.bool)):
        assert sdpa(*tensors, mask).shape == (*shape, L, Ev)


def test_scale_may_be_a_tensor_of_no_axis(draw):
    tensors = operands(draw)
    check(tensors, scale=torch.tensor(0.25))
    for scale in (torch.tensor([0.25]), torch.tensor(0.25, requires_grad=True)):
        with pytest.raises(TypeError, match=r"^scale must be a number, or a tensor of no axis and without a gradient, got a "):
            sdpa(*tensors, scale=scale)


@pytest.mark.parametrize("lazily", [
    lambda x: torch._neg_view(-x), lambda x: torch.complex(x, -x).conj().imag,
    lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)], ids=["negated", "conjugate", "zero"])
@pytest.mark.parametrize("dtype", sorted(face.TYPES, key=str), ids=str)
def test_tensors_whose_elements_are_in_no_memory_yet(lazily, dtype, draw):
    tensors = [*operands(draw), draw(L, S)]
    tensors = [x.detach().to(dtype) for x in tensors]
    if dtype.itemsize == 2 and lazily(torch.ones(1)).is_neg():      # no complex numbers of these
        lazily = torch._neg_view
    for i in range(4):
        lazy = list(tensors)
        lazy[i] = lazily(tensors[i])
        full = [x + 0 for x in lazy]
        assert not any(x.is_neg() or x._is_zerotensor() for x in full)
        assert torch.equal(sdpa(*lazy), sdpa(*full))
    q, k, v, mask = (x.requires_grad_() for x in tensors)
    lazy = lazily(sdpa(q, k, v, mask).detach())
    results = [torch.autograd.grad(sdpa(q, k, v, mask), (q, k, v, mask), g) for g in (lazy, lazy + 0)]
    assert all(map(torch.equal, *results))


def test_every_stride(draw):
    x = draw(B, L, 3, H, E)
    check(list(x.permute(2, 0, 3, 1, 4)))           # heads side by side in one projection
    check([draw(B, H, E, L).mT, draw(B, H, S, 2 * E)[..., ::2], draw(H, B, S, Ev).transpose(0, 1)])


@pytest.mark.parametrize("dtype", sorted(face.TYPES, key=str), ids=str)
def test_nothing_is_copied(dtype, draw, monkeypatch):
    x = draw(B, L, 3, H, E, grad=False).to(dtype)
    q, k, v = x.permute(2, 0, 3, 1, 4)
    seen = []
    forward = face.algorithms.forward
    monkeypatch.setattr(face.algorithms, "forward", lambda name, *more: seen.append(more[0]) or forward(name, *more))
    sdpa(q, k, v)
    assert [p.ctypes.data for p in (seen[0].q, seen[0].k, seen[0].v)] == [t.data_ptr() for t in (q, k, v)]


LYING = {
    "by head": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "side by side": lambda x: x.repeat(1, 1, 2, 1).permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)[:, :, ::2],
    "in the middle": lambda x: torch.cat([x, x, x], 3)[..., x.shape[3] : 2 * x.shape[3]],
    "one for all": lambda x: x[:1, :, :1].expand_as(x),
    "the last ones": lambda x: x[1:, 1:],
}


def problems(tensors, grouped=True):
    return Problem.of_tensors(*tensors, grouped), validate.attention_problem(*map(face._array, tensors), "BHLD")


@pytest.mark.parametrize("lying", LYING)
@pytest.mark.parametrize("heads", [H, 2])
@pytest.mark.parametrize("dtype", sorted(face.TYPES, key=str), ids=str)
def test_tensors_are_operands_as_their_arrays_are(dtype, heads, lying, draw):
    tensors = [LYING[lying](x.detach().to(dtype)) for x in operands(draw, heads=heads)]
    if lying == "the last ones":
        tensors[0] = tensors[0][:, : tensors[1].shape[1]]
    ours, expected = problems(tensors)
    for name in ("shape", "types", "is_double", "itemsize", "element_size", "stored_size", "dtype", "element", "stored", "layout",
                 "bytes_copied", "scale", "softcap", "window", "offset", "parts", "precision", "bool_mask", "key_lengths"):
        assert getattr(ours, name) == getattr(expected, name), name
    results = []
    for problem in (ours, expected):
        results.append(np.empty((*problem.shape[:2], problem.shape[3], problem.shape[6]), problem.element))
        face.algorithms.forward("tiled", problem, results[-1], None, None, 1)
    assert_same(*(validate.bits(x) for x in results))
    for x, y, tensor in zip((ours.q, ours.k, ours.v), (expected.q, expected.k, expected.v), tensors, strict=True):
        assert (x.ctypes.data, x.strides, x.shape, x.dtype) == (y.ctypes.data, y.strides, y.shape, y.dtype)
        assert x.ctypes.data == tensor.data_ptr()


class Own(torch.Tensor):
    pass


NO_OPERANDS = {
    "an array": lambda x: x.numpy(), "None": lambda x: None, "a parameter": torch.nn.Parameter,
    "of a class": lambda x: x.as_subclass(Own), "negated": lambda x: torch._neg_view(x),
    "of zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.as_nested_tensor([*x]), "a shape": lambda x: x.to("meta"), "of integers": lambda x: x.int(),
    "complex": lambda x: x.to(torch.complex64), "of another dtype": lambda x: x.double(), "of bytes": lambda x: x.byte(),
    "of eight bits": lambda x: x.to(torch.float8_e5m2), "of four bits": lambda x: x.byte().view(torch.float4_e2m1fn_x2),
    "of 3 axes": lambda x: x[0], "of 5 axes": lambda x: x[None], "empty": lambda x: x[:0], "no width": lambda x: x[..., :0],
    "every second item": lambda x: x.repeat_interleave(2, 3)[..., ::2], "one item": lambda x: x[..., :1].expand_as(x),
    "another batch": lambda x: x[:1], "other heads": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "another width": lambda x: x[..., 1:], "unaligned": lambda x: torch.from_numpy(
        np.frombuffer(bytearray(1) + x.numpy().tobytes(), np.float32, offset=1, count=x.numel()).reshape(x.shape)),
}


@pytest.mark.filterwarnings("ignore")       # PyTorch's own, of nested tensors
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("case", NO_OPERANDS)
def test_other_tensors_are_left_to_those_who_know_them(case, at, draw):
    tensors = [draw(B, H, 1, 8, grad=False).float() for _ in range(3)]
    assert Problem.of_tensors(*tensors, False) is not None
    tensors[at] = NO_OPERANDS[case](tensors[at])
    if not (case == "another width" and at == 2):       # values may have one
        assert Problem.of_tensors(*tensors, True) is None


def test_heads_in_groups_are_operands_where_they_are_asked_for(draw):
    tensors = [x.detach() for x in operands(draw, heads=2)]
    assert Problem.of_tensors(*tensors, False) is None
    assert Problem.of_tensors(*tensors, True).shape[1:3] == (H, 2)
    with pytest.raises(ValueError, match="enable_gqa=True lets"):
        sdpa(*tensors)


@pytest.mark.parametrize("dtype", sorted(face.TYPES, key=str), ids=str)
def test_no_tensor_becomes_an_array_in_a_usual_call(dtype, draw, monkeypatch):
    q, k, v = (x.detach().to(dtype) for x in operands(draw))
    calls = [{}, {"is_causal": True}, {"scale": 0.3}]
    expected = [sdpa(*map(torch.nn.Parameter, (q, k, v)), **keywords).detach() for keywords in calls]
    monkeypatch.setattr(face, "_array", lambda x: pytest.fail("a tensor became an array"))
    for keywords, out in zip(calls, expected, strict=True):
        assert torch.equal(sdpa(q, k, v, **keywords), out)


def test_a_table_of_another_version_is_not_read(draw):
    tensors = [x.detach() for x in operands(draw)]
    table = (ctypes.c_uint32 * 64)(2, 0)        # its major version, and functions nowhere
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    _core.bind_tensors(object, capsule(ctypes.addressof(table), b"dlpack_exchange_api", None), face._array, None)
    assert Problem.of_tensors(object(), object(), object(), True) is None
    assert Problem.of_tensors(*tensors, True) is not None


# ---------------------------------------------------------------------------------------------------- half precision

def as_arrays(tensors):
    return [face._array(x.detach()) for x in tensors]


def half_case(case, draw, dtype, n=L, m=S):
    """Operands and a gradient of the output, the mask, keywords, and what these are in `fastmha.attention`."""
    heads = 2 if case == "groups" else H
    sizes = (H, n, E), (heads, m, E), (heads, m, Ev)
    q, k, v = (draw(B, *size, grad=False).to(dtype).requires_grad_() for size in sizes)
    g, mask = draw(B, H, n, Ev, grad=False).to(dtype), None
    if "mask" in case:
        mask = draw(1, H, n, m, grad=False)
        mask = mask > -0.5 if "bool" in case else mask.to(torch.float32 if "float32" in case else dtype).requires_grad_()
    keywords = {"causal": {"is_causal": True}, "groups": {"enable_gqa": True}, "scale": {"scale": -0.3}}.get(case, {})
    same = {name: x for name, x in keywords.items() if name != "enable_gqa"} | ({"offset": 0} if case == "causal" else {})
    if mask is not None:
        of_mask = face._array(mask.detach())
        same |= {"mask": ~of_mask} if mask.dtype is torch.bool else {"mask": of_mask, "need_bias_grad": True}
    return (q, k, v, g), mask, keywords, same


def with_gradients(f, tensors, g, mask, keywords):
    """The output and the gradients of q, k, v and of a mask of floats, each of the dtype of its tensor."""
    out = f(*tensors, mask, **keywords)
    leaves = [x for x in (*tensors, mask) if x is not None and x.requires_grad]
    results = [out, *torch.autograd.grad(out, leaves, g)]
    assert [x.dtype for x in results] == [tensors[0].dtype, *(x.dtype for x in leaves)]
    return results


half_cases = pytest.mark.parametrize("case", ["plain", "causal", "groups", "scale", "mask", "float32 mask", "bool mask"])


@halves
@half_cases
def test_half_precision_errs_as_float32_rounded_once(case, dtype, isa, draw):
    (*tensors, g), mask, keywords, same = half_case(case, draw, dtype)
    results = as_arrays(with_gradients(sdpa, tensors, g, mask, keywords))
    arrays = as_arrays((*tensors, g))
    exact, bounds = oracle(*arrays, arrays[0].dtype, **same)
    assert_close(results, *([x for i, x in enumerate(y) if i != 1] for y in (exact, bounds)), ("out", *"qkv", "mask"))


@halves
@half_cases
def test_half_precision_has_the_bits_of_attention(case, dtype, draw):
    """Long enough for matrix tiles, where there are some."""
    (*tensors, g), mask, keywords, same = half_case(case, draw, dtype, 40, 50)
    arrays = as_arrays((*tensors, g))
    forward = {name: x for name, x in same.items() if name != "need_bias_grad"}
    out, lse = fastmha.attention(*arrays[:3], return_lse=True, **forward)
    assert_same(as_arrays(with_gradients(sdpa, tensors, g, mask, keywords)),
                (out, *fastmha.attention_backward(arrays[3], *arrays[:3], out, lse, **same)))


@halves
def test_half_precision_of_any_strides_and_without_gradients(dtype, draw):
    tensors = [draw(B, L, H, E, grad=False).to(dtype).transpose(1, 2), draw(B, H, E, S, grad=False).to(dtype).mT,
               draw(B, H, S, 2 * Ev, grad=False).to(dtype)[..., ::2]]
    expected = fastmha.attention(*as_arrays([x.contiguous() for x in tensors]))
    assert_same(as_arrays([sdpa(*tensors)]), [expected])
    assert_same(as_arrays([sdpa(*[x.requires_grad_() for x in tensors])]), [expected])


@halves
def test_sinks_softcap_and_lse_of_half_precision(dtype, draw):
    for of_sinks in (dtype, torch.float32):
        q, k, v, sinks = (x.detach().to(dtype).requires_grad_() for x in (*operands(draw), draw(H)))
        sinks = sinks.detach().to(of_sinks).requires_grad_()
        out = face.attend(q, k, v, None, sinks, Rules(softcap=2.0))
        grads = torch.autograd.grad(out.sum(), (q, k, v, sinks))
        arrays = as_arrays((q, k, v))
        same = {"sinks": face._array(sinks), "softcap": 2.0}
        wanted, lse = fastmha.attention(*arrays, return_lse=True, **same)
        assert_same(as_arrays((out, *grads)),
                    (wanted, *fastmha.attention_backward(np.ones_like(wanted), *arrays, wanted, lse, **same)))
        call = q, k, v, None, sinks, None, *face._flat(Rules(softcap=2.0))
        out, lse = torch.ops.fastmha.attention(*call)
        assert lse.dtype is torch.float32
        torch.library.opcheck(face._operator, call)
        q, k, v, out, sinks = (x.detach() for x in (q, k, v, out, sinks))       # of gradients there are none
        torch.library.opcheck(face._backward_operator, (out, q, k, v, out, lse, None, sinks, *call[5:], False))


@halves
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "float32 mask"])
def test_half_precision_compiled_whole_and_mapped(case, dtype, draw):
    (*tensors, g), mask, keywords, _ = half_case(case, draw, dtype)
    compiled = torch.compile(lambda *x: sdpa(*x, **keywords), fullgraph=True, backend="aot_eager")
    expected = with_gradients(sdpa, tensors, g, mask, keywords)
    for ours, theirs in zip(with_gradients(compiled, tensors, g, mask, {}), expected, strict=True):
        close(ours, theirs)
    rules = Rules(offset=0 if keywords else None, **keywords)
    torch.library.opcheck(face._operator, (*tensors, mask, None, None, *face._flat(rules)))
    q, k, v = (x.detach() for x in tensors)
    mapped = torch.func.vmap(lambda q: sdpa(q, k, v, mask, **keywords))(torch.stack([q, 2 * q]))
    close(mapped, torch.stack([sdpa(x, k, v, mask, **keywords) for x in (q, 2 * q)]))


def test_torchs_precision_of_float32_is_not_followed(draw):
    tensors = [draw(1, 2, 64, 16, dtype=torch.float32) for _ in range(3)]
    before, expected = torch.get_float32_matmul_precision(), sdpa(*tensors)
    try:
        torch.set_float32_matmul_precision("medium")
        assert torch.equal(sdpa(*tensors), expected)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def without_bfloat16(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(face, "_BFLOAT16", None)
        patched.setattr(face, "TYPES", face.TYPES - {torch.bfloat16})
        face._bind()
        yield
    face._bind()


def test_bfloat16_without_its_package_is_refused_by_name_or_left_to_torch(draw, without_bfloat16):
    tensors = [x.detach().bfloat16() for x in operands(draw)]
    with pytest.raises(TypeError, match=r'^query is a tensor of bfloat16, which needs the package ml_dtypes: pip install '
                                        r'"fastmha\[bfloat16\]"; with fallback=True PyTorch computes it$'):
        sdpa(*tensors)
    face._said.clear()
    with pytest.warns(UserWarning, match="leaves a call to PyTorch: query is a tensor of bfloat16, which needs"):
        assert torch.equal(sdpa(*tensors, fallback=True), own(*tensors))


# ---------------------------------------------------------------------------------------------------------- autocast

@halves
def test_autocast_casts_as_for_torchs_own(dtype, draw):
    q, k, v, mask = (x.detach().float().requires_grad_() for x in (*operands(draw), draw(L, S)))
    allowed = torch.ones(L, S, dtype=torch.bool).tril()
    for tensors in ((q, k, v), (q, k.to(dtype), v), (q.half(), k, v.bfloat16()), (q, k, v, mask), (q, k, v, allowed),
                    (q.to(dtype), k, v.to(dtype), mask)):
        leaves = (q, k, v, mask)
        with torch.autocast("cpu", dtype=dtype):
            out, theirs = sdpa(*tensors), own(*tensors)
        assert out.dtype is theirs.dtype is dtype
        by_hand = sdpa(*(x if x.dtype is torch.bool else x.to(dtype) for x in tensors))
        assert torch.equal(out, by_hand)
        results = [torch.autograd.grad(x.float().sin().sum(), leaves, allow_unused=True) for x in (out, by_hand)]
        for ours, expected in zip(*results, strict=True):
            assert (ours is None) is (expected is None)
            assert ours is None or (ours.dtype is torch.float32 and torch.equal(ours, expected))


def test_autocast_leaves_float64(draw):
    tensors = operands(draw)
    with torch.autocast("cpu", dtype=torch.float16):
        close(sdpa(*tensors), own(*tensors))


@halves
def test_autocast_compiled_whole(dtype, draw):
    tensors = [x.detach().float() for x in operands(draw)]

    def f(*tensors):
        with torch.autocast("cpu", dtype=dtype):
            return sdpa(*tensors)

    out = torch.compile(f, fullgraph=True, backend="aot_eager")(*tensors)
    assert out.dtype is dtype
    assert torch.equal(out, f(*tensors))


def test_a_patched_rotary_model_under_autocast(draw):
    """Whose queries and keys a rotation by float32 leaves in float32."""
    linear = torch.nn.Linear(16, 48)
    x = draw(2, 6, 16, dtype=torch.float32, grad=False)

    def attention():
        with torch.autocast("cpu", dtype=torch.float16):
            q, k, v = linear(x).view(2, 6, 3, 2, 8).permute(2, 0, 3, 1, 4)
            return torch.nn.functional.scaled_dot_product_attention(q * torch.ones(1), k * torch.ones(1), v)

    expected = attention()
    with face.patch(), warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = attention()
    assert ours.dtype is expected.dtype is torch.float16
    assert (ours - expected).abs().max() < 1e-3 * expected.abs().max()


# ----------------------------------------------------------------------------------------------------------- dropout

@types
def test_dropout_of_all_weights_gives_zeros(dtype, draw):
    check(operands(draw, dtype), draw(L, S, dtype=dtype), dropout_p=1.0)


def test_dropout_mapped_over_samples(draw):
    """The same draw for each of them, or one of its own."""
    q, k, v = (x.detach() for x in operands(draw))

    def loss(q, p=0.5):
        return sdpa(q, k, v, dropout_p=p).square().sum()

    for function in (lambda q: sdpa(q, k, v, dropout_p=0.5), torch.func.grad(loss)):
        torch.manual_seed(5)
        one = function(q)
        torch.manual_seed(5)
        same = torch.func.vmap(function, randomness="same")(q.expand(3, *q.shape))
        assert all(torch.equal(x, one) for x in same)
        different = torch.func.vmap(function, randomness="different", in_dims=1)(q.unsqueeze(1).expand(-1, 3, -1, -1, -1))
        assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(loss)(q[None])
    mask = draw(1, 1, L, S)
    torch.manual_seed(6)
    expected = torch.autograd.grad(sdpa(q, k, v, mask, dropout_p=0.5).square().sum(), mask)[0]
    torch.manual_seed(6)
    gradient = torch.func.grad(lambda mask, q: sdpa(q, k, v, mask, dropout_p=0.5).square().sum())
    close(torch.func.vmap(gradient, in_dims=(None, 0), randomness="same")(mask, q[None])[0], expected)


def test_dropout_follows_torchs_seed_and_has_the_gradients_of_what_it_dropped(draw):
    tensors = operands(draw)
    torch.manual_seed(5)
    first, other = sdpa(*tensors, dropout_p=0.4), sdpa(*tensors, dropout_p=0.4)
    torch.manual_seed(5)
    seed = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64))
    torch.manual_seed(5)
    assert (sdpa(*tensors, dropout_p=0.4) == first).all()
    assert not (first == other).all()
    arrays = [x.detach().numpy() for x in tensors]
    out, lse = reference.attention(*arrays, dropout=0.4, seed=seed, return_lse=True)
    grads = reference.attention_backward(np.ones_like(out), *arrays, out, lse, dropout=0.4, seed=seed)
    close(first.detach(), torch.from_numpy(out))
    for ours, theirs in zip(torch.autograd.grad(first.sum(), tensors), grads, strict=True):
        close(ours, torch.from_numpy(theirs))


# ---------------------------------------------------------------------------------------- autograd, torch.func, torch.compile

@pytest.mark.parametrize("case", ["plain", "causal", "groups", "mask", "bool"])
def test_gradients_by_differences(case, draw):
    heads = 1 if case == "groups" else 2
    tensors = [draw(1, 2, 3, 4), draw(1, heads, 5, 4), draw(1, heads, 5, 3)]
    more = {"mask": (draw(1, 2, 3, 5),), "bool": (torch.tensor([[1, 0, 1, 1, 0]]).bool(),)}.get(case, ())
    keywords = {"causal": {"is_causal": True}, "groups": {"enable_gqa": True}}.get(case, {})
    assert torch.autograd.gradcheck(lambda *x: sdpa(*x, **keywords), (*tensors, *more))


def test_second_derivatives_are_refused(draw):
    tensors = operands(draw)
    grad = torch.autograd.grad(sdpa(*tensors).square().sum(), tensors[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit")       # PyTorch's own, of its decompositions
def test_derivatives_forward_are_refused(draw):
    q, k, v, mask = (x.detach() for x in (*operands(draw), draw(L, S)))
    refused = pytest.raises(NotImplementedError, match=r"^fastmha.torch has no derivatives forward: an operand has a tangent, ")
    for grad in (False, True):
        for i in range(4):
            tensors = [q.clone().requires_grad_(grad), k, v, mask]
            with torch.autograd.forward_ad.dual_level(), refused:
                tensors[i] = torch.autograd.forward_ad.make_dual(tensors[i], tensors[i].detach())
                sdpa(*tensors)
    for f in (lambda q: sdpa(q, k, v), torch.func.vmap(lambda q: sdpa(q, k[0], v[0])),
              torch.func.grad(lambda q: sdpa(q, k, v).sum())):
        with refused:
            torch.func.jvp(f, (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with refused:
            torch.func.vmap(lambda x: sdpa(x, k[0], v[0]))(dual)
        close(sdpa(q, k, v), own(q, k, v))      # no operand has one


@pytest.mark.filterwarnings("ignore")
def test_what_traces_a_program_records_the_call(draw):
    fx = pytest.importorskip("torch.fx.experimental.proxy_tensor")
    tensors, others = operands(draw), [x.detach().sin().requires_grad_() for x in operands(draw)]

    def f(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    expected = torch.autograd.grad(f(*others).sin().sum(), others)
    for traced in (torch.jit.trace(f, tensors, check_trace=False),
                   *(fx.make_fx(f, tracing_mode=mode)(*[x.detach() for x in tensors]) for mode in ("real", "fake", "symbolic"))):
        close(traced(*others), f(*others))
        for ours, theirs in zip(torch.autograd.grad(traced(*others).sin().sum(), others), expected, strict=True):
            close(ours, theirs)
    gradient = torch.func.grad(lambda q, k, v: f(q, k, v).sin().sum())
    close(fx.make_fx(gradient)(*[x.detach() for x in tensors])(*[x.detach() for x in others]), expected[0])
    mapped = torch.func.vmap(lambda q: f(q, *(x.detach() for x in others[1:])))
    q = others[0].detach()
    close(fx.make_fx(mapped)(torch.zeros(1, *q.shape, dtype=q.dtype))(q[None]), mapped(q[None]))
    dropped = torch.jit.trace(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), tensors, check_trace=False)
    assert not torch.equal(dropped(*others), dropped(*others))

    def weights(q, k, v):
        return face.weights(q, k, v, None, None, Rules())

    with pytest.raises(NotImplementedError, match=r"^fastmha.torch gives no weights to what traces a program"):
        torch.jit.trace(weights, tensors)


def test_a_mode_of_torchs_dispatch_sees_the_operator(draw):
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensors = [x.detach() for x in operands(draw)]
    with Seen():
        out = sdpa(*tensors)
    assert torch.ops.fastmha.attention.default in seen
    close(out, own(*tensors))


def test_tensors_of_other_classes_decide_what_the_call_means(draw):
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Plain(torch.Tensor):
        pass

    tensors = [x.detach() for x in operands(draw)]
    for i in range(3):
        asked.clear()
        out = sdpa(*[x.as_subclass(Asked) if i == j else x for j, x in enumerate(tensors)])
        assert asked == [sdpa]
        assert type(out) is Asked
        close(out.as_subclass(torch.Tensor), own(*tensors))
    with face.patch():
        asked.clear()
        torch.nn.functional.scaled_dot_product_attention(tensors[0].as_subclass(Asked), *tensors[1:])
        assert asked == [own]
    assert type(sdpa(tensors[0].as_subclass(Plain), *tensors[1:])) is Plain
    traced = torch.fx.symbolic_trace(lambda q, k, v: sdpa(q, k, v, is_causal=True))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [sdpa]
    close(traced(*tensors), own(*tensors, is_causal=True))


def test_gradients_of_some_tensors_alone(draw):
    q, k, v = operands(draw)
    for wanted in ((q,), (k,), (v,), (q, v)):
        tensors = [x if any(x is w for w in wanted) else x.detach() for x in (q, k, v)]
        check(tensors)
        check(tensors, draw(L, S))
        check(tensors, draw(L, S, grad=False))
    check([x.detach() for x in (q, k, v)], draw(L, S))


def test_no_grad_gives_the_bits_of_grad(draw):
    tensors = operands(draw, torch.float32)
    with torch.no_grad():
        out = sdpa(*tensors, is_causal=True)
    assert not out.requires_grad
    assert (sdpa(*tensors, is_causal=True) == out).all()


def test_vmap(draw):
    q, k, v = draw(3, B, H, L, E), draw(B, H, S, E), draw(B, 3, H, S, Ev)
    mask, masks = draw(L, S), draw(3, 1, 1, L, S)
    for m, of_m, dim in ((None, lambda i: None, None), (mask, lambda i: mask, None), (masks, lambda i: masks[i], 0)):
        mapped = torch.func.vmap(sdpa, in_dims=(0, None, 1, dim))(q, k, v, m)
        close(mapped, torch.stack([sdpa(q[i], k, v[:, i], of_m(i)) for i in range(3)]))


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_each_result(batch, draw):
    """Each sees one lse, which is laid out over all of them."""
    q, k, v = draw(batch, H, L, E), draw(batch, H, S, E), draw(batch, H, S, Ev)
    expected = torch.autograd.functional.jacobian(lambda q: own(q, k, v)[0, 0, :2], q)
    for _ in range(20):     # what lies behind an lse is not always another one
        close(torch.func.jacrev(lambda q: sdpa(q, k, v)[0, 0, :2])(q.detach()), expected)


def test_several_gradients_at_once_are_refused(draw):
    q, k, v = draw(1, H, L, E), draw(1, H, S, E), draw(1, H, S, Ev)
    with pytest.raises(NotImplementedError, match=r"^fastmha.torch computes one gradient at a time: .*torch.func.jacrev do$"):
        torch.autograd.functional.jacobian(lambda q: sdpa(q, k, v), q, vectorize=True)


def test_gradients_of_each_sample(draw):
    q, k, v, mask = draw(3, B, H, L, E), draw(B, H, S, E), draw(B, H, S, Ev), draw(1, 1, L, S)

    def loss(q, k, v, mask):
        return sdpa(q, k, v, mask).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=(0, None, None, None))(q, k, v, mask)
    each = [torch.autograd.grad(loss(x, k, v, mask), (x, k, v, mask)) for x in (y.detach().requires_grad_() for y in q)]
    for i, ours in enumerate(mapped):
        close(ours, torch.stack([grads[i] for grads in each]))


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "five axes"])
def test_compiled_whole(case, draw):
    tensors = operands(draw)
    more = (draw(L, S),) if case == "mask" else ()
    keywords = {"is_causal": True} if case == "causal" else {}
    if case == "five axes":
        tensors = [draw(2, *x.shape) for x in tensors]

    def f(*tensors):
        return sdpa(*tensors, **keywords).sin()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*tensors, *more), f(*tensors, *more)
    close(out, expected)
    leaves = (*tensors, *more)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, expected)), strict=True):
        close(ours, theirs)


def test_operators_pass_torchs_own_checks(draw):
    q, k, v = operands(draw)
    plain = False, None, None, None, None, None, 0.0
    torch.library.opcheck(face._operator, (q, k, v, None, None, None, *plain))
    across = draw(B, L, H, E, grad=False).transpose(1, 2).requires_grad_()
    torch.library.opcheck(face._operator, (across, k, v, None, None, None, *plain))
    torch.library.opcheck(face._operator, (q, k, v, draw(1, 1, L, S), draw(H), None, True, 2, 3, None, 0.3, 2.0, 0.0))


# ------------------------------------------------------------------------------- what other faces ask for beside torch's own

RULES = {
    "softcap": {"softcap": 0.5},
    "window": {"window": (1, 2), "offset": 1},
    "causal window": {"is_causal": True, "window": (2, None), "offset": 2},
    "ranges": {"key_ranges": (np.array([0, 3]), np.array([5, 9]))},
}


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("case", RULES)
def test_rules_and_sinks_have_their_gradients(case, with_sinks, draw):
    q, k, v, sinks, mask = draw(2, 2, 3, 4), draw(2, 1, 9, 4), draw(2, 1, 9, 3), draw(2), draw(1, 1, 3, 9)
    rules = Rules(**RULES[case])

    def f(q, k, v, sinks, mask):
        return face.attend(q, k, v, mask, sinks if with_sinks else None, rules)

    tensors = q, k, v, sinks, mask
    assert torch.autograd.gradcheck(lambda *x: f(*x), tensors)
    grad = torch.autograd.grad(f(*tensors).square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    arrays = [x.detach().numpy() for x in tensors]
    expected = reference.attention(*arrays[:3], mask=arrays[4], sinks=arrays[3] if with_sinks else None,
                                   **RULES[case])
    close(f(*tensors).detach(), torch.from_numpy(expected))


@pytest.mark.parametrize("case", ["softcap", "window", "causal window"])
def test_rules_and_sinks_compiled_whole(case, draw):
    tensors = *operands(draw), draw(H)

    def f(q, k, v, sinks):
        return face.attend(q, k, v, None, sinks, Rules(**RULES[case])).sin()

    results = [[x, *torch.autograd.grad(x.sum(), tensors)] for x in
               (g(*tensors) for g in (f, torch.compile(f, fullgraph=True, backend="aot_eager")))]
    for mine, compiled in zip(*results, strict=True):
        close(compiled, mine)


def test_ranges_of_keys_are_mapped_with_the_batch(draw):
    q, k, v = draw(3, B, H, L, E), draw(B, H, S, E), draw(B, H, S, Ev)
    rules = Rules(key_ranges=(np.array([0, 3]), np.array([5, 9])))
    mapped = torch.func.vmap(lambda x: face.attend(x, k, v, None, None, rules))(q)
    close(mapped, torch.stack([face.attend(x, k, v, None, None, rules) for x in q]))
    sinks = draw(H)
    with pytest.raises(NotImplementedError, match="maps no sinks"):
        torch.func.vmap(lambda x: face.attend(x, k, v, None, sinks, rules))(q)


# -------------------------------------------------------------------------------------------------------- patch, fallback

def test_a_patched_model_gives_what_it_gave(draw):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
    x, padding = draw(3, 6, 16, dtype=torch.float32, grad=False), torch.arange(6) >= torch.tensor([[6], [3], [5]])
    for training in (True, False):
        model.train(training)
        calls = []
        expected = model(x, src_key_padding_mask=padding)
        with face.patch(), pytest.MonkeyPatch.context() as patched:
            forward = face.algorithms.forward
            patched.setattr(face.algorithms, "forward", lambda *a, forward=forward, calls=calls: calls.append(a) or forward(*a))
            out = model(x, src_key_padding_mask=padding)
        assert len(calls) == 2
        assert (out - expected).abs()[~padding[:, : out.shape[1]]].max() < 2e-6
        assert torch.nn.functional.scaled_dot_product_attention is own
    assert torch.backends.mha.get_fastpath_enabled()


@halves
def test_a_patched_model_of_half_precision_errs_no_more_than_torchs(dtype, draw):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True), 2)
    x, padding = draw(3, 40, 64, dtype=torch.float32, grad=False), torch.arange(40) >= torch.tensor([[40], [33], [25]])
    model = model.to(dtype)
    exact = model.double()(x.to(dtype).double(), src_key_padding_mask=padding)
    theirs = model.to(dtype)(x.to(dtype), src_key_padding_mask=padding)
    with face.patch(), warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = model(x.to(dtype), src_key_padding_mask=padding)
    error, allowed = ((y.double() - exact)[~padding].abs().mean() for y in (ours, theirs))
    assert ours.dtype is dtype
    assert error <= 1.1 * allowed


def test_patch_ends_with_an_error_too():
    with pytest.raises(KeyError), face.patch():
        raise KeyError
    assert torch.nn.functional.scaled_dot_product_attention is own


def test_what_is_not_served_goes_to_torch_and_is_said_once(draw):
    tensors = [*(x.detach() for x in operands(draw)), torch.zeros(L, S)]
    with pytest.raises(TypeError, match=r"^attn_mask must be a dense tensor of bool or torch.float64 .*float32.*fallback=True"):
        sdpa(*tensors)
    face._said.clear()
    with pytest.warns(UserWarning, match="leaves a call to PyTorch: attn_mask must be"):
        out = sdpa(*tensors, fallback=True)
    assert (out == own(*tensors)).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa(*tensors, fallback=True)


@pytest.mark.parametrize(("call", "error", "match"), [
    (lambda q, k, v: sdpa(q.numpy(), k, v), TypeError, r"^query must be a torch tensor, got ndarray$"),
    (lambda q, k, v: sdpa(q, k.float(), v), TypeError, r"^key has dtype torch.float32 but query has torch.float64$"),
    (lambda q, k, v: sdpa(q, k, v, torch.ones(L, S).bool(), is_causal=True), ValueError, r"^is_causal and attn_mask are given"),
    (lambda q, k, v: sdpa(q, k[:, :2], v[:, :2]), ValueError, r"^key has 2 heads on axis -3 but query has 4: enable_gqa=True"),
    (lambda q, k, v: sdpa(q, k, v[:, :2]), ValueError, r"^value has 2 heads on axis -3 but query has 4: enable_gqa=True"),
    (lambda q, k, v: sdpa(q[:, :3], k[:, :2], v[:, :2]), ValueError, r"^key has 2 heads on axis -3 but query has 3$"),
    (lambda q, k, v: sdpa(q[:, :3], k[:, :2], v[:, :2], enable_gqa=True), ValueError,
     r"^key has 2 heads on axis -3 but query has 3, which must be a multiple of them$"),
    (lambda q, k, v: sdpa(q, torch.cat([k, k])[:3], v), ValueError, r"^key has axes \(3,\) before its heads, .* others, \(2,\)$"),
    (lambda q, k, v: sdpa(q, k[..., :-1], v), ValueError, rf"^key has width {E - 1} on axis -1 but query has {E}$"),
    (lambda q, k, v: sdpa(q, k, v[:, :, :-1]), ValueError, rf"^value has length {S - 1} on axis -2 but key has {S}$"),
    (lambda q, k, v: sdpa(q, k, v, torch.ones(L, S + 1, dtype=q.dtype)), ValueError,
     rf"^attn_mask of shape \({L}, {S + 1}\) does not broadcast to \(..., H, L, S\) = \({B}, {H}, {L}, {S}\)$"),
    (lambda q, k, v: sdpa(q, k, v, is_causal=1), TypeError, r"^is_causal must be True or False, got 1$"),
    (lambda q, k, v: sdpa(q, k, v, dropout_p=None), TypeError, r"^dropout_p must be a number in \[0, 1\], got None$"),
    (lambda q, k, v: sdpa(q, k[0, :2], v), ValueError, r"^key has 2 heads on axis -3 but query has 4: enable_gqa=True"),
    (lambda q, k, v: sdpa(q, k, v, dropout_p=1.5), ValueError, r"^dropout_p must be a number in \[0, 1\], got 1.5$"),
    (lambda q, k, v: sdpa(q, k, v, torch.ones(L, S).int()), TypeError, r"^attn_mask must be .* of bool or torch.float64 .*int32"),
    (lambda q, k, v: sdpa(q.half(), k.half(), v.half(), torch.ones(L, S).double()), TypeError,
     r"^attn_mask must be a dense tensor of bool or torch.float16 or torch.float32 on the CPU, got a dense one of torch.float64"),
    (lambda q, k, v: sdpa(q.half(), k.float(), v), TypeError, r"^key has dtype torch.float32 but query has torch.float16$"),
    (lambda q, k, v: sdpa(q.int(), k, v), TypeError, r"^query must be a dense tensor of float32, float64, float16 or bfloat16 "),
    (lambda q, k, v: sdpa(q.to("meta"), k, v), TypeError, r"^query must be .* on the CPU .* on meta"),
])  # fmt: skip
def test_errors(call, error, match, draw):
    with pytest.raises(error, match=match):
        call(*[x.detach() for x in operands(draw)])
