"""Arrays of other libraries enter without a copy and NumPy's come out; what cannot enter is named, with what to do."""

import importlib
import tracemalloc

import numpy as np
import pytest
from support import normal, raises

import fastmha
from fastmha import validate

B, H, L, D, WIDTH = 2, 2, 5, 4, 8


class OnlyDLPack:
    """Memory of NumPy's that is offered by DLPack alone."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.asked, self._device = array, 0, device

    def __dlpack__(self, **keywords):
        self.asked += 1
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._device


class OnlyArray:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def of_torch(x):
    return importlib.import_module("torch").from_numpy(x)


def of_jax(x):
    return importlib.import_module("jax.numpy").asarray(x)


def strided(x):
    """The same numbers, the last two axes turned in memory."""
    return x.swapaxes(-1, -2).copy().swapaxes(-1, -2) if x.ndim > 1 else x


@pytest.fixture(params=["dlpack", "array", "torch", "jax"])
def foreign(request):
    """A function that makes NumPy's arrays those of another library."""
    if request.param in ("torch", "jax"):
        pytest.importorskip(request.param)
    return {"dlpack": OnlyDLPack, "array": OnlyArray, "torch": of_torch, "jax": of_jax}[request.param]


not_jax = pytest.mark.parametrize("foreign", ["dlpack", "array", "torch"], indirect=True)


def address(x):
    return x.__array_interface__["data"][0]


def where(x):
    """The address of the memory of another library's array."""
    if hasattr(x, "array"):
        return address(x.array)
    return x.data_ptr() if hasattr(x, "data_ptr") else x.unsafe_buffer_pointer()


HEADS = [normal(B, H, L, D, seed=i, dtype=np.float32) for i in range(3)]
ROWS = [normal(B, L, WIDTH, seed=i, dtype=np.float32) for i in range(3)]
MASK, LENGTHS, SINKS = np.triu(np.ones((L, L), bool), 1), np.array([3, 5]), np.float32([0.5, -1.0])
OUT, LSE = fastmha.attention(*HEADS, return_lse=True)
SQUARE, LINE = normal(WIDTH, WIDTH, seed=7, dtype=np.float32), normal(WIDTH, seed=8, dtype=np.float32)
OF_HEADS = {"W_Q": SQUARE, "W_K": SQUARE, "W_V": SQUARE, "W_O": SQUARE, "b_O": LINE}


def module(**more):
    return fastmha.MultiHeadAttention(WIDTH, H, rng=0, **more)


def forward_and_backward(x, grad_out, own=None):
    m = own or module()
    return m.forward(x), m.backward(grad_out), m.grad_W_Q


def assigned(*values):
    m = module(use_bias="out")
    m.W_Q, m.b_O = values
    return m.W_Q, m.b_O


def loaded(*values):
    m = module()
    m.load_state_dict(dict(zip(("W_Q", "W_K", "W_V", "W_O"), values, strict=True)))
    return list(m.parameters().values())


def appended(k, v, lengths):
    cache = fastmha.KVCache(B, H, D)
    cache.append(k, v, lengths)
    return cache.k[:, :, :3], cache.v[:, :, :3]     # behind these a row is not written


# what is called, and with which arrays
CALLS = {
    "attention": (fastmha.attention, HEADS),
    "attention of all rules": (
        lambda q, k, v, mask, lengths, sinks: fastmha.attention(q, k, v, mask=mask, key_padding_lengths=lengths, sinks=sinks),
        [*HEADS, MASK, LENGTHS, SINKS]),
    "attention, offset and ranges": (
        lambda q, k, v, offset, ends: fastmha.attention(q, k, v, is_causal=True, offset=offset, key_ranges=(None, ends)),
        [*HEADS, LENGTHS, LENGTHS]),
    "attention_backward": (fastmha.attention_backward, [HEADS[0], *HEADS, OUT, LSE]),
    "merge": (fastmha.merge, [OUT, LSE, OUT, LSE]),
    "attention_packed": (fastmha.attention_packed, [*(x.reshape(-1, H, D) for x in HEADS), np.array([4, 6])]),
    "softmax": (fastmha.softmax, [ROWS[0]]),
    "softmax_backward": (fastmha.softmax_backward, ROWS[:2]),
    "scaled_dot_product_attention": (fastmha.scaled_dot_product_attention, [*ROWS, MASK]),
    "multi_head_attention_core": (lambda *x: fastmha.multi_head_attention_core(*x[:3], H, x[3]), [*ROWS, MASK]),
    "multi_head_attention": (
        lambda q, k, v, *weights: fastmha.multi_head_attention(q, k, v, H, dict(zip(OF_HEADS, weights, strict=True))),
        [*ROWS, *OF_HEADS.values()]),
    "split_heads": (lambda x: fastmha.split_heads(x, H), [ROWS[0]]),
    "combine_heads": (fastmha.combine_heads, [HEADS[0]]),
    "create_padding_mask": (lambda lengths: fastmha.create_padding_mask(lengths, 6), [LENGTHS]),
    "linear": (lambda *x: fastmha.linear(*x[:3], residual=x[3]), [ROWS[0], SQUARE, LINE, ROWS[1]]),
    "linear of packed weights": (lambda x, W: fastmha.linear(x, fastmha.pack_weights(W)), [ROWS[0], SQUARE]),
    "linear_backward": (fastmha.linear_backward, [ROWS[0], ROWS[1], SQUARE, LINE]),
    "layer_norm": (lambda *x: fastmha.layer_norm(*x[:3], residual=x[3]), [ROWS[0], LINE, LINE, ROWS[1]]),
    "layer_norm_backward": (fastmha.layer_norm_backward, [*ROWS[:2], LINE]),
    "rms_norm": (fastmha.rms_norm, [ROWS[0], LINE]),
    "rms_norm_backward": (fastmha.rms_norm_backward, [*ROWS[:2], LINE]),
    "gelu": (fastmha.gelu, [ROWS[0]]),
    "silu_backward": (fastmha.silu_backward, ROWS[:2]),
    "module": (forward_and_backward, ROWS[:2]),
    "module of one head": (lambda *x: forward_and_backward(*x, fastmha.SelfAttention(WIDTH, D, D, rng=0)), ROWS[:2]),
    "module, context and lengths": (lambda x, c, n: module().forward(x, context=c, key_padding_lengths=n), [*ROWS[:2], LENGTHS]),
    "module, keys and values": (lambda x, *c: module().forward(x, context=c), ROWS),
    "project_context": (lambda c: module().project_context(c).k, [ROWS[0]]),
    "assignment": (assigned, [SQUARE, LINE]),
    "load_state_dict": (loaded, [SQUARE, SQUARE, SQUARE, SQUARE]),
    "cache": (appended, [HEADS[1], HEADS[2], LENGTHS]),
}


def flat(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


@pytest.mark.parametrize("way", [np.array, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("call", CALLS)
def test_results_are_numpys_with_the_bits_of_numpys_arrays(call, way, foreign):
    function, arrays = CALLS[call]
    arrays = [way(x) for x in arrays]
    given = [foreign(x) for x in arrays]
    for ours, expected in zip(flat(function(*given)), flat(function(*(way(x) for x in arrays))), strict=True):
        assert type(ours) is np.ndarray
        np.testing.assert_array_equal(ours, expected)
    assert all(x.asked for x in given if isinstance(x, OnlyDLPack))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, bool])
def test_memory_is_shared(dtype, foreign):
    x = foreign(normal(7, 5).astype(dtype))
    array = validate.as_array("x", x)
    assert type(array) is np.ndarray
    assert array.dtype == dtype
    assert address(array) == where(x)


@not_jax        # whose arrays are contiguous
def test_a_view_of_other_strides_is_shared(foreign):
    view = normal(7, 6)[1:, ::2]
    array = validate.as_array("x", foreign(view))
    assert (address(array), array.strides) == (address(view), view.strides)


@pytest.mark.parametrize("function", [lambda x: fastmha.attention(x, x, x, num_threads=1), lambda x: fastmha.softmax(x),
                                      lambda x: fastmha.gelu(x), lambda x: fastmha.linear(x, np.zeros((64, 1), np.float32))],
                         ids=["attention", "softmax", "gelu", "linear"])
def test_no_more_memory_than_for_numpys(function, foreign):
    x = normal(1, 1, 4096, 64, dtype=np.float32)
    peaks = []
    for given in (x, foreign(x)):
        function(given)     # what is made once
        tracemalloc.start()
        try:
            function(given)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] <= peaks[0] + x.nbytes / 8


def test_a_module_keeps_the_memory_it_was_given(foreign):
    m, x = module(), foreign(ROWS[0].copy())
    m.forward(x)
    assert address(m.intermediates["X"]) == where(x)


def test_memory_outlives_the_array_that_offered_it(foreign):
    m = module()
    m.forward(foreign(ROWS[0].copy()))
    kept = m.intermediates["X"]
    [np.full(ROWS[0].shape, np.nan, np.float32) for _ in range(50)]     # would lie where freed memory was
    np.testing.assert_array_equal(kept, ROWS[0])


@not_jax        # whose memory is nobody's to write
def test_out_that_is_memory_of_an_input_is_refused(foreign):
    x = HEADS[0].copy()
    with raises(ValueError, "out overlaps q in memory"):
        fastmha.attention(foreign(x), HEADS[1], HEADS[2], out=x)


@pytest.mark.parametrize("call", [lambda out: fastmha.attention(*HEADS, out=out), lambda out: fastmha.gelu(HEADS[0], out=out),
                                  lambda out: fastmha.linear(HEADS[0], np.zeros((D, D), np.float32), out=out)],
                         ids=["attention", "gelu", "linear"])
def test_out_must_be_numpys(call, foreign):
    out = foreign(np.zeros((B, H, L, D), np.float32))
    with raises(TypeError, f"out must be a NumPy array, got {type(out).__name__}"):
        call(out)


# ---------------------------------------------------------------------------------------------------------- what cannot enter

@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks", "key_padding_lengths"])
def test_arrays_of_another_device_are_named(name):
    given = dict(zip("qkv", HEADS)) | {name: OnlyDLPack(HEADS[0], (2, 0))}
    with raises(TypeError, f"{name} lies in memory of another device (not the CPU): pass one on the CPU, such as {name}.cpu()"):
        fastmha.attention(**given)
    given[name].device = "cuda:0"
    with raises(TypeError, f"{name} lies in memory of another device (cuda:0): pass one on the CPU, such as {name}.cpu()"):
        fastmha.attention(**given)


@pytest.mark.parametrize("device", [3, 11, 13])
def test_memory_of_another_device_that_the_cpu_reads_is_asked_for(device):
    x = OnlyDLPack(HEADS[0], (device, 0))
    np.testing.assert_array_equal(validate.as_array("x", x), HEADS[0])
    assert x.asked


def test_a_failing_export_is_named_and_keeps_its_cause():
    x = OnlyDLPack(np.zeros(3, np.float32))
    x.array = None
    with pytest.raises(TypeError, match=r"^q cannot be made an array: ") as caught:
        fastmha.attention(x, *HEADS[1:])
    assert isinstance(caught.value.__cause__, AttributeError)


def test_tensors_of_torch_that_cannot_enter():
    torch = pytest.importorskip("torch")
    x = torch.zeros(B, H, L, D)
    for tensor, message in (
        (x.clone().requires_grad_(), "q is a torch tensor that requires grad: pass q.detach()"),
        (torch.nn.Parameter(x), "q is a torch tensor that requires grad: pass q.detach()"),
        (x.bfloat16(), "q is a tensor of bfloat16, which NumPy does not have: pass q.float()"),
        (x.to("meta"), "q cannot be made an array: can't convert meta device type tensor to numpy. Use Tensor.cpu()..."),
        (x.to_sparse(), "q cannot be made an array: ...to_dense()..."),
        (x.half(), "k has dtype float32 but q has float16: they must share one dtype"),
    ):
        with raises(TypeError, message):
            fastmha.attention(tensor, *HEADS[1:])
    with raises(TypeError, "X is a torch tensor that requires grad: pass X.detach()"):
        module().forward(torch.zeros(B, L, WIDTH, requires_grad=True))
    with raises(TypeError, "weight is a torch tensor that requires grad: pass weight.detach()"):
        fastmha.rms_norm(ROWS[0], torch.nn.Parameter(torch.ones(WIDTH)))


def test_arrays_of_jax_that_cannot_enter():
    jax = pytest.importorskip("jax")
    with raises(TypeError, "k has dtype float32 but q has bfloat16: they must share one dtype"):
        fastmha.attention(jax.numpy.zeros((B, H, L, D), "bfloat16"), *HEADS[1:])
    with pytest.raises(TypeError, match=r"^q cannot be made an array: .* was called on traced array"):
        jax.jit(lambda x: fastmha.attention(x, *HEADS[1:]))(HEADS[0])
