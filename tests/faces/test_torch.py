"""fastmha.torch: torch's own function is the oracle, in float64 and float32; half precision, autocast, dropout."""

import ctypes
import warnings

import numpy as np
import pytest
from support import assert_close, assert_same, oracle

torch = pytest.importorskip("torch", reason='needs torch: pip install "fastmha[torch]"')

from torch_support import B, E, Ev, H, L, S, check, close, halves, operands, own, sdpa  # noqa: E402

import fastmha  # noqa: E402
import fastmha.torch as face  # noqa: E402
from fastmha import _core, reference, validate  # noqa: E402
from fastmha._core import Problem  # noqa: E402
from fastmha.validate import Rules  # noqa: E402

types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


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
