"""fastmha.torch beside torch's own function: rules and sinks for other faces, patched models, fallback, errors."""

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "fastmha[torch]"')

from torch_support import B, E, Ev, H, L, S, close, halves, operands, own, sdpa  # noqa: E402

import fastmha.torch as face  # noqa: E402
from fastmha import reference  # noqa: E402
from fastmha.validate import Rules  # noqa: E402

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
