"""fastmha.weights: round trips, the originals of torch and transformers, refusals, damaged files, saves as a whole or not."""

import io
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
from support import all_dtypes, dtypes, normal, raises, same_bits

import fastmha
from fastmha import weights

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason='needs safetensors: pip install "fastmha[weights]"')
endings = pytest.mark.parametrize("ending", ["npz", "safetensors"])
WIDTH, HEADS = 8, 2
D_HEAD = {"head_dim": 3}
GROUPED = {"num_kv_heads": 1}
OTHER_WIDTHS = {"kdim": 6, "vdim": 5}


def module(seed=0, width=WIDTH, heads=HEADS, **more):
    """With biases that are drawn too."""
    m = fastmha.MultiHeadAttention(width, heads, rng=seed, **more)
    for i, p in enumerate(m.parameters().values()):
        p[...] = normal(*p.shape, seed=100 * seed + i)
    return m


def bits(m):
    return {name: (p.dtype, p.tobytes()) for name, p in m.parameters().items()}


def write(path, tensors):
    """A file as others write it."""
    np.savez(path, **tensors) if path.suffix == ".npz" else safetensors_numpy.save_file(tensors, path)
    return path


def read(path):
    if path.suffix == ".npz":
        with np.load(path) as file:
            return dict(file)
    return safetensors_numpy.load_file(path)


def refused(error, message, source, m=None, **more):
    """`load` fails with this message, and the module is bit for bit as it was."""
    m = m or module()
    before = bits(m)
    with raises(error, message):
        weights.load(source, m, **more)
    assert bits(m) == before


# -------------------------------------------------------------------------------------------------------------- round trips

TORCH = ["in_proj_weight", "out_proj.weight"]
APART = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
TORCH_B = ["in_proj_bias", "out_proj.bias"]
LLAMA = [f"{x}_proj.weight" for x in "qkvo"]
LLAMA_B = [f"{x}_proj.bias" for x in "qkvo"]
BERT = [f"{x}.{kind}" for x in ("self.query", "self.key", "self.value", "output.dense") for kind in ("weight", "bias")]
CASES = {
    "torch": ("torch", {}, TORCH),
    "torch with biases": ("torch", {"use_bias": True}, TORCH + TORCH_B),
    "torch, other widths": ("torch", OTHER_WIDTHS, APART),
    "torch, other widths and biases": ("torch", {"use_bias": True, **OTHER_WIDTHS}, APART + TORCH_B),
    "torch, one other width": ("torch", {"kdim": 6, "vdim": 6}, APART),
    "bert": ("bert", {"use_bias": True}, BERT),
    "gpt2": ("gpt2", {"use_bias": True}, ["c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"]),
    "llama": ("llama", {}, LLAMA),
    "llama, grouped heads of their own width": ("llama", {**GROUPED, **D_HEAD}, LLAMA),
    "llama with biases": ("llama", {"use_bias": True, **GROUPED}, LLAMA + LLAMA_B),
    "llama, biases of the inputs": ("llama", {"use_bias": "qkv", **GROUPED}, LLAMA + LLAMA_B[:3]),
    "fastmha": ("fastmha", {}, ["W_Q", "W_K", "W_V", "W_O"]),
    "fastmha of all kinds": ("fastmha", {"use_bias": "out", **GROUPED, **D_HEAD, **OTHER_WIDTHS},
                             ["W_Q", "W_K", "W_V", "W_O", "b_O"]),
}
cases = pytest.mark.parametrize(("layout", "kind", "names"), CASES.values(), ids=CASES)


@all_dtypes
@endings
@cases
def test_round_trip(layout, kind, names, ending, dtype, tmp_path):
    ours, other, third = (module(i, dtype=dtype, **kind) for i in range(3))
    file = tmp_path / f"layer.{ending}"
    weights.save(ours, file, layout)
    stored = read(file)
    assert sorted(stored) == sorted(names)
    in_file = "float32" if np.dtype(dtype).name == "bfloat16" and ending == "npz" else dtype    # NumPy's files have no bfloat16
    assert {x.dtype for x in stored.values()} == {np.dtype(in_file)}
    assert weights.load(file, other) is other       # the layout is told from the names
    assert bits(other) == bits(ours)
    assert bits(weights.load(stored, third, layout=layout)) == bits(ours)


@endings
@cases
def test_a_layer_among_others_is_found_by_its_prefix(layout, kind, names, ending, tmp_path):
    first, second, ours = (module(i, **kind) for i in range(3))
    weights.save(first, tmp_path / f"a.{ending}", layout, prefix="layers.1")
    weights.save(second, tmp_path / f"b.{ending}", layout, prefix="layers.11.")
    both = read(tmp_path / f"a.{ending}") | read(tmp_path / f"b.{ending}") | {"embedding": np.arange(3)}
    file = write(tmp_path / f"c.{ending}", both)
    assert bits(weights.load(file, ours, "layers.1")) == bits(first)
    assert bits(weights.load(str(file), ours, "layers.11.", layout)) == bits(second)
    hint = "its attention layers begin with layers.1., layers.11."
    for prefix, start in (("layers", "layers."), ("other", "other."), ("", "")):
        message = f"c.{ending} has not the weights of any layout after prefix '{start}'; {hint}"
        refused(ValueError, message, file, ours, prefix=prefix)
    last = sorted(names)[-1]
    write(file, both | {f"layers.{last}": both[f"layers.1.{last}"]})        # there is more of that name, as in BERT's layers
    if last.endswith("weight") or last.startswith("W"):
        refused(ValueError, f"c.{ending} has no layers...; {hint}", file, ours, prefix="layers", layout=layout)


def test_one_head(tmp_path):
    ours, other = (fastmha.SelfAttention(6, 3, 4, 5, rng=seed) for seed in (0, 1))
    for layout in ("fastmha", "llama"):
        weights.save(ours, tmp_path / "head.npz", layout)
        assert bits(weights.load(tmp_path / "head.npz", other)) == bits(ours)


def test_rounding_and_widening_between_the_modules_types(tmp_path):
    wide, narrow = module(dtype=np.float64), module(1)
    weights.save(wide, tmp_path / "wide.npz")
    weights.load(tmp_path / "wide.npz", narrow)
    assert all(same_bits(p, q.astype(np.float32)) for p, q in zip(narrow.parameters().values(), wide.parameters().values()))
    weights.save(narrow, tmp_path / "narrow.safetensors")
    weights.load(tmp_path / "narrow.safetensors", wide)
    assert all(same_bits(p.astype(np.float64), q) for p, q in zip(narrow.parameters().values(), wide.parameters().values()))


def test_numbers_that_are_none_pass_and_numbers_beyond_the_type_do_not():
    state = module(dtype=np.float64).state_dict()
    state["W_K"][0, :3] = np.inf, -np.inf, np.nan
    np.testing.assert_array_equal(weights.load(state, module()).W_K, state["W_K"].astype(np.float32))
    state["W_O"][0, 0] = -1e39
    refused(ValueError, "W_O in the mapping holds numbers beyond float32", state)
    assert weights.load(state, module(dtype=np.float64)).W_O[0, 0] == -1e39


def test_byte_order_and_order_of_axes_of_files_of_numpy(tmp_path):
    ours, other = module(), module(1)
    state = {name: np.asfortranarray(x.astype(">f4")) for name, x in ours.state_dict().items()}
    assert bits(weights.load(write(tmp_path / "big.npz", state), other)) == bits(ours)
    np.savez_compressed(tmp_path / "small.npz", **ours.state_dict())
    assert bits(weights.load(tmp_path / "small.npz", module(2))) == bits(ours)
    with zipfile.ZipFile(tmp_path / "later.npz", "w") as file:
        for name, x in ours.state_dict().items():
            with file.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, x, version=(2, 0))
    assert bits(weights.load(tmp_path / "later.npz", module(2))) == bits(ours)


def test_lazy_mappings_are_read_once_and_no_more_than_needed(tmp_path):
    ours, asked = module(), []

    class Lazy(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    weights.load(Lazy(ours.state_dict()), module(1))
    assert asked == ["W_Q", "W_K", "W_V", "W_O"]
    with np.load(write(tmp_path / "a.npz", ours.state_dict())) as file:
        assert bits(weights.load(file, module(1))) == bits(ours)


def test_a_modules_own_memory_may_be_loaded_into_it():
    m = module()
    expected = {name: x.T.copy() for name, x in m.parameters().items()}
    weights.load({name: x.T for name, x in zip(("W_K", "W_Q", "W_V", "W_O"), m.parameters().values())}, m)
    np.testing.assert_array_equal(m.W_K, expected["W_Q"])
    np.testing.assert_array_equal(m.W_Q, expected["W_K"])


# -------------------------------------------------------------------------------------------------------------- the originals

@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["mapping", "npz", "safetensors"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [{}, OTHER_WIDTHS, {"vdim": 5}], ids=str)
def test_outputs_of_torchs_module(widths, bias, way, torch, tmp_path):
    torch.manual_seed(1)
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True, **widths)
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    state = theirs.state_dict()
    if way != "mapping":
        state = write(tmp_path / f"layer.{way}", {name: x.numpy() for name, x in state.items()})
    ours = weights.load(state, module(use_bias=bias, **widths))
    X, keys, values = (normal(2, n, w, seed=i, dtype=np.float32)
                       for i, (n, w) in enumerate([(4, WIDTH), (5, ours.kdim), (5, ours.vdim)]))
    close(ours.forward(X, context=(keys, values)), theirs(*map(torch.from_numpy, (X, keys, values)))[0])
    if not widths:
        close(ours.forward(X), theirs(*[torch.from_numpy(X)] * 3)[0])
    # and back
    weights.save(ours, tmp_path / "back.npz", "torch")
    theirs.load_state_dict({name: torch.from_numpy(x) for name, x in read(tmp_path / "back.npz").items()})
    close(ours.forward(X, context=(keys, values)), theirs(*map(torch.from_numpy, (X, keys, values)))[0])


def test_a_layer_of_a_model_of_torch(torch):
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True).eval()
    ours = weights.load(layer.state_dict(), module(use_bias=True), "self_attn")
    X = normal(2, 4, WIDTH, dtype=np.float32)
    close(ours.forward(X), layer.self_attn(*[torch.from_numpy(X)] * 3)[0])


def test_output_of_bert(torch):
    bert = pytest.importorskip("transformers.models.bert.modeling_bert")
    config = bert.BertConfig(hidden_size=WIDTH, num_attention_heads=HEADS, attn_implementation="sdpa")
    theirs = bert.BertAttention(config).eval()
    torch.nn.init.normal_(theirs.self.query.bias)
    torch.nn.init.normal_(theirs.self.query.weight)
    torch.nn.init.normal_(theirs.output.dense.bias)
    ours = weights.load(theirs.state_dict(), module(use_bias=True))
    X = normal(2, 4, WIDTH, dtype=np.float32)
    close(ours.forward(X), theirs.output.dense(theirs.self(torch.from_numpy(X))[0]))
    refused(ValueError, "the mapping has not the weights of any layout after prefix ''", theirs.self.state_dict())


def test_output_of_gpt2(torch):
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    theirs = gpt2.GPT2Attention(gpt2.GPT2Config(n_embd=WIDTH, n_head=HEADS, attn_implementation="sdpa"), layer_idx=0).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    once_stored = {"bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "masked_bias": torch.tensor(-1e4)}
    ours = weights.load(theirs.state_dict() | once_stored, module(use_bias=True))
    X = normal(2, 4, WIDTH, dtype=np.float32)
    close(ours.forward(X, is_causal=True), theirs(torch.from_numpy(X))[0])


def test_tensors_whose_elements_are_in_no_memory_yet(torch):
    state = {name: torch.randn(WIDTH, WIDTH) for name in ("W_Q", "W_K", "W_V", "W_O")}
    lazy = state | {"W_Q": torch._neg_view(state["W_Q"]), "W_K": torch.complex(state["W_K"], state["W_K"]).conj().imag,
                    "W_V": torch._efficientzerotensor((WIDTH, WIDTH))}
    expected = state | {"W_Q": -state["W_Q"], "W_K": -state["W_K"], "W_V": 0 * state["W_V"]}
    for name, p in weights.load(lazy, module()).parameters().items():
        np.testing.assert_array_equal(p, expected[name].numpy())


ROTARY = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": WIDTH, "head_dim": 3}


@pytest.mark.parametrize(("name", "more", "use_bias"), [
    ("Llama", {}, False), ("Llama", {"attention_bias": True}, True), ("Mistral", {}, False), ("Qwen2", {}, "qkv"),
    ("Gemma", {}, False),
])
def test_projections_of_models_with_rotary_positions(name, more, use_bias, torch):
    modeling = pytest.importorskip(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    config = getattr(modeling, f"{name}Config")(**ROTARY, **more)
    head_dim = getattr(config, "head_dim", WIDTH // 4)
    theirs = getattr(modeling, f"{name}Attention")(config, 0)
    for p in theirs.parameters():
        torch.nn.init.normal_(p)
    prefix = "model.layers.3.self_attn"
    state = {f"{prefix}.{key}": x for key, x in theirs.state_dict().items()}
    ours = weights.load(state, module(heads=4, num_kv_heads=2, head_dim=head_dim, use_bias=use_bias), prefix)
    X = normal(2, 5, WIDTH, dtype=np.float32)
    out = ours.forward(X)
    for letter in "QKV":
        product = getattr(theirs, f"{letter.lower()}_proj")(torch.from_numpy(X))
        close(ours.intermediates[letter], product.unflatten(-1, (-1, head_dim)).transpose(1, 2))
    close(out, theirs.o_proj(torch.from_numpy(ours.intermediates["concat"])))


@dtypes
@pytest.mark.parametrize("way", ["mapping", "safetensors"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_halves_are_widened_exactly(half, way, dtype, torch, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    every = torch.arange(-2**15, 2**15, dtype=torch.int16).view(getattr(torch, half))
    every = torch.where(every.isnan(), 1.0, every)      # infinities and numbers below the smallest normal one among them
    state = {f"W_{letter}": every.roll(i).reshape(256, 256) for i, letter in enumerate("QKVO")}
    source = state
    if way == "safetensors":
        source = tmp_path / "half.safetensors"
        save_file({"first": torch.ones(3), **state}, source)
    refused(ValueError, "... holds first, which is no part of attention in ...", {"first": every, **state}, module(width=256))
    if way == "safetensors":
        save_file({"other.first": torch.ones(3), **{f"x.{name}": x for name, x in state.items()}}, source)
    ours = weights.load(source, fastmha.MultiHeadAttention(256, 2, dtype=dtype, rng=0), "x" if way == "safetensors" else "")
    for name, p in ours.parameters().items():
        np.testing.assert_array_equal(p, state[name].to(torch.float64).numpy().astype(dtype))


def test_halves_of_numpy_and_of_ml_dtypes(tmp_path):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    for half in (np.float16, bfloat16):
        state = {name: x.astype(half) for name, x in module().state_dict().items()}
        ours = weights.load(state, module(1))
        assert all(same_bits(p, state[name].astype(np.float32)) for name, p in ours.parameters().items())
    state = {name: x.astype(np.float16) for name, x in module().state_dict().items()}
    ours = weights.load(write(tmp_path / "half.npz", state), module(1))
    assert all(same_bits(p, state[name].astype(np.float32)) for name, p in ours.parameters().items())


def test_tensors_with_gradients_and_of_other_kinds(torch):
    ours = module()
    state = {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in ours.state_dict().items()}
    assert bits(weights.load(state, module(1))) == bits(ours)
    for kind, said in ((torch.int8, "int8"), (torch.bool, "bool"), (torch.complex64, "complex64")):
        refused(ValueError, f"W_V in the mapping must hold floats of 16, 32 or 64 bits, got {said}",
                {**state, "W_V": state["W_V"].detach().to(kind)})
    refused(ValueError, "W_V in the mapping cannot be read: ...", {**state, "W_V": state["W_V"].to("meta")})


# -------------------------------------------------------------------------------------------------------------- memory

PROBE = """
import resource, sys, fastmha.weights, safetensors.numpy
m = fastmha.MultiHeadAttention(8, 2, rng=0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fastmha.weights.load(sys.argv[1], m, "layer")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, *(float(p[0, 0]) for p in m.parameters().values()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files with holes, and their pages counted")
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_of_a_large_file_only_the_layer_is_read(dtype, tmp_path):
    huge, item = 2**30, {"F32": 4, "BF16": 2}[dtype]
    header, at = {"first": {"dtype": "U8", "shape": [huge], "data_offsets": [0, huge]}}, huge
    for letter in "QKVO":
        header[f"layer.W_{letter}"] = {"dtype": dtype, "shape": [8, 8], "data_offsets": [at, at + 64 * item]}
        at += 64 * item
    header["last"] = {"dtype": "U8", "shape": [huge], "data_offsets": [at, at + huge]}
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        file.seek(start + huge)
        for i in range(4):
            file.write((np.full(64, i + 1, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes() if dtype == "BF16"
                       else np.full(64, i + 1, np.float32).tobytes())
        file.truncate(start + at + huge)
    printed = subprocess.check_output([sys.executable, "-c", PROBE, tmp_path / "model.safetensors"], text=True, cwd=tmp_path)
    grown, *values = printed.split()
    assert values == ["1.0", "2.0", "3.0", "4.0"]
    assert int(grown) < 32 << 10       # KiB


def test_of_a_large_archive_only_the_layer_is_read(tmp_path):
    ours = module()
    big = np.zeros(8 << 20, np.float32)
    file = write(tmp_path / "model.npz", {"a": big, **{f"layer.{n}": x for n, x in ours.state_dict().items()}, "z": big})
    target = module(1)
    tracemalloc.start()
    try:
        weights.load(file, target, "layer")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert bits(target) == bits(ours)


# -------------------------------------------------------------------------------------------------------------- refusals

FLOATS = "x.W_O in {} must hold floats of 16, 32 or 64 bits, got ..."
REFUSALS = {
    "a name of ours": (
        {"W_Z": 1.0}, '{} holds x.W_Z, which is no part of attention in layout "fastmha": prefix and layout say what to read'),
    "missing": ({"W_K": None}, '{} has no x.W_K, which holds W_K in layout "fastmha"'),
    "misnamed": (
        {"W_K": None, "W_k": 1.0},
        '{} has no x.W_K, which holds W_K in layout "fastmha"; it holds x.W_k, which is no part of that'),
    "shape": ({"W_V": np.ones((8, 7))}, "x.W_V in {} must hold W_V (8, 8) of the module as (8, 8), got shape (8, 7)"),
    "axes": ({"W_V": np.ones(64)}, "x.W_V in {} must hold W_V (8, 8) of the module as (8, 8), got shape (64,)"),
    "a bias that the module has not": (
        {"b_Q": np.ones(8)}, "{} holds x.b_Q, but the module has no b_Q: use_bias says which biases there are"),
    "integers": ({"W_O": np.ones((8, 8), int)}, FLOATS),
    "bytes": ({"W_O": np.ones((8, 8), np.uint8)}, FLOATS),
    "bools": ({"W_O": np.ones((8, 8), bool)}, FLOATS),
    "complex": ({"W_O": np.ones((8, 8), np.complex64)}, FLOATS),
    **{name: ({name: np.ones(8)}, f"{{}} holds x.{name}, {reason}") for name, reason in (
        ("bias_k", "a learned key that every sequence gets: the module has none"),
        ("bias_v", "a learned value that every sequence gets: the module has none"),
        ("q_norm.weight", "of a norm of queries, which forward's transform_qk would have to compute"),
        ("k_norm.weight", "of a norm of keys, which forward's transform_qk would have to compute"),
        ("sinks", "which forward takes as sinks, not the module"),
    )},
}


@pytest.mark.parametrize("way", ["mapping", "npz", "safetensors"])
@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refused_by_name(change, message, way, tmp_path):
    state = module(1).state_dict() | change
    state = {f"x.{name}": np.asarray(x) for name, x in state.items() if x is not None}
    source = state if way == "mapping" else write(tmp_path / f"layer.{way}", state)
    refused(ValueError, message.format("the mapping" if way == "mapping" else source.name), source, prefix="x")


@pytest.mark.parametrize("x", [np.ones((8, 8), object), np.full((8, 8), "a"), np.ones((8, 8), np.longdouble),
                               np.ones((8, 8), [("a", "f4")]), np.ones((8, 8), "M8[s]")], ids=lambda x: x.dtype.name)
@pytest.mark.parametrize("way", ["mapping", "npz"])
def test_other_types_of_numpy_are_refused(x, way, tmp_path):
    state = module(1).state_dict() | {"W_K": x}
    source = state if way == "mapping" else write(tmp_path / "layer.npz", state)
    where = "the mapping" if way == "mapping" else "layer.npz"
    refused(ValueError, f"W_K in {where} must hold floats of 16, 32 or 64 bits, got ...", source)


class Trap:
    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


def test_pickles_are_never_read(tmp_path):
    trap = np.array([[Trap()] * 8] * 8, object)
    file = write(tmp_path / "trap.npz", module(1).state_dict() | {"W_Q": trap})
    refused(ValueError, "W_Q in trap.npz must hold floats of 16, 32 or 64 bits, got |O", file)
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            archive.writestr(f"{name}.npy", pickle.dumps(Trap()))
    refused(ValueError, "W_Q in trap.npz cannot be read: it does not begin as .npy files of version 1, 2 or 3 do", file)
    assert not Trap.sprung


def test_a_frozen_module_is_refused():
    m = module()
    m.freeze()
    refused(ValueError, "module is frozen: call unfreeze() first", module(1).state_dict(), m)


def test_a_module_whose_weights_do_not_lie_side_by_side():
    state = {"in_proj_weight": np.ones((24, 8), np.float32), "out_proj.weight": np.ones((8, 8), np.float32)}
    refused(ValueError, "in_proj_weight in the mapping must hold W_Q (8, 8), W_K (6, 8), W_V (5, 8) of the module, side by side "
            "in one tensor, got shape (24, 8)", state, module(**OTHER_WIDTHS))


def test_biases_that_only_the_module_has():
    refused(ValueError, 'the mapping has no in_proj_bias, which holds b_Q, b_K, b_V in layout "torch"',
            {"in_proj_weight": np.ones((24, 8)), "out_proj.weight": np.ones((8, 8))}, module(use_bias=True))


def test_buffers_of_one_layout_are_none_of_another():
    refused(ValueError, 'the mapping holds bias, which is no part of attention in layout "fastmha": ...',
            module(1).state_dict() | {"bias": np.ones(3)})


def test_a_layout_that_is_named_is_the_only_one():
    missing = "the mapping has not the weights of layout \"llama\" after prefix ''"
    refused(ValueError, missing, module(1).state_dict(), layout="llama")
    both = module(1).state_dict() | {f"x.{name}": np.ones((8, 8)) for name in LLAMA}
    refused(ValueError, f"{missing}; its attention layers begin with x.", both, layout="llama")


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_arguments_are_named(ending, tmp_path, monkeypatch):
    state = module(1).state_dict()
    refused(TypeError, "file_or_mapping must be a path or a mapping of names to arrays, got int", 3)
    refused(TypeError, "file_or_mapping must be a path or a mapping of names to arrays, got bytes", b"a.npz")
    refused(ValueError, "file_or_mapping must end in .safetensors or .npz, got 'model.bin'", "model.bin")
    refused(TypeError, "file_or_mapping must map names to arrays, got the name 3", {3: state["W_Q"]})
    refused(TypeError, "prefix must be a str, got NoneType", state, prefix=None)
    refused(ValueError, "prefix must be printable, got 'a\\x00b'", state, prefix="a\0b")
    refused(ValueError, 'layout must be "fastmha", "torch", "bert", "gpt2" or "llama", got \'GPT\'', state, layout="GPT")
    refused(TypeError, "W_K is a masked array, whose mask would be lost: ...", state | {"W_K": np.ma.ones((8, 8))})
    with raises(TypeError, "module must be a MultiHeadAttention, got dict"):
        weights.load(state, {})
    refused(FileNotFoundError, f"...{tmp_path}/none.{ending}'", tmp_path / f"none.{ending}")
    (tmp_path / f"folder.{ending}").mkdir()
    refused(IsADirectoryError, f"...folder.{ending}'", tmp_path / f"folder.{ending}")
    (tmp_path / f"empty.{ending}").touch()
    refused(ValueError, f"empty.{ending} cannot be read: ...", tmp_path / f"empty.{ending}")


def test_without_safetensors_its_extra_is_named(tmp_path, monkeypatch):
    file = write(tmp_path / "a.safetensors", module().state_dict())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = '.safetensors files need safetensors: pip install "fastmha[weights]"'
    refused(ImportError, message, file)
    with raises(ImportError, message):
        weights.save(module(), tmp_path / "b.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]
    weights.save(module(), tmp_path / "b.npz")


# -------------------------------------------------------------------------------------------------------------- damaged files

DAMAGED = 10_000
OLD = 7.25      # in every element of the module before


def pick(rng, things):
    return things[rng.integers(len(things))]


def npy(x, **changes):
    """A .npy file with other words in its header, or another length of it."""
    words = {"descr": repr(np.lib.format.dtype_to_descr(x.dtype)), "order": "False", "shape": repr(x.shape), "more": "",
             "length": None, "version": b"\1\0", **changes}
    text = "{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}\n".format(**words).encode()
    length = len(text) if words["length"] is None else words["length"]
    size = struct.pack("<H", length % 2**16) if words["version"][0] == 1 else struct.pack("<I", length % 2**32)
    return b"\x93NUMPY" + words["version"] + size + text + x.tobytes()


SHAPES = ["(99999999999, 99999999999)", "(-1, 4)", "(4, -4)", "(4,)", "()", "(4, 4, 1)", "(4.0, 4)", "'4'", "(4, 4", "None",
          "(" * 3000, "(" * 90 + ")" * 90, "(" + "9" * 5000 + ",)", "(1e999, 4)", "(4L, 4L)", "4, 4", "[4, 4]", "(2, 8)",
          "(9223372036854775807, 2)", "(18446744073709551616,)", "(True, 4)", "(4, 4, 0)"]  # fmt: skip
TYPES = ["'|O'", "'O'", "'<i4'", "'<f16'", "'<c8'", "'|V4'", "'<M8[ns]'", "'|b1'", "'f4, f4'", "'<f4'" * 9, "[('a', '<f4')]",
         "[]", "None", "4", "'float32'", "'\\x00'", "'" + "f" * 9000 + "'", "__import__('os').abort()", "'>f4'", "'|f4'", "'<f8'",
         "'<f2'", "{}", "'<f4', 'descr': '<f8'", "-" * 5000 + "1", "'\\d'"]  # fmt: skip
HEADERS = [
    *({"shape": words} for words in SHAPES), *({"descr": words} for words in TYPES),
    *({"order": words} for words in ("True", "None", "1")), *({"more": words} for words in ("'x': 1", "}", " " * 20_000)),
    *({"version": pair} for pair in (b"\2\0", b"\3\0", b"\0\0", b"\xff\1")), *({"length": n} for n in (0, 1, 65535)),
    *({"version": b"\2\0", "length": n} for n in (2**31, 2**32 - 1)),
]
NAMES = ["../../W_Q.npy", "/W_Q.npy", "W_Q", "W_Q.npy.npy", "", ".npy", "W_Q.npy/", "C:\\W_Q.npy", "W_q.npy", "x" * 60_000,
         "W_\u0416.npy", "W_K.npy"]  # fmt: skip


def damaged_archive(rng, state):
    """Of parts that are valid as such, one of them strange."""
    file, strange = io.BytesIO(), pick(rng, list(state))
    how = rng.integers(6)
    with zipfile.ZipFile(file, "w", pick(rng, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, x in state.items():
            data = npy(x)
            if name == strange and how < 3:
                data = npy(x, **pick(rng, HEADERS))
            if name == strange and how == 3:        # far more, or less, than its header says
                data = data + bytes(pick(rng, [1, 10, 1000, 1 << 21])) if rng.random() < 0.7 else data[:rng.integers(len(data))]
            if name == strange and how == 4:
                name = pick(rng, NAMES).removesuffix(".npy")
            if name == strange and how == 5:
                archive.writestr(f"{name}.npy", data)
            archive.writestr(f"{name}.npy", data, compress_type=zipfile.ZIP_LZMA if rng.random() < 0.01 else None)
    return file.getvalue()


STRANGE = [-1, 0, 1, 4, 63, 65, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 1e30, -0.5, None, True, "64", [],
           [4, 4], {}, [[4, 4]], "F32", "F64", "BF16", "F16", "I32", "U8", "C64", "F8_E4M3", "f32", "", "x" * 5000,
           {"dtype": "F32"}]  # fmt: skip
DEEP = '{"a":' + '[' * 5000 + ']' * 5000 + "}"


def damaged_tensors(rng, whole):
    """A .safetensors file with another header in front of its numbers."""
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8:8 + length]), whole[8 + length:]
    names = list(header)
    a, b = (header[names[i]] for i in rng.choice(len(names), 2, replace=False))
    how, said = rng.integers(10), None
    strange = pick(rng, STRANGE)
    if how == 0:
        a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]
    elif how == 1:
        a["data_offsets"] = [int(x) for x in np.asarray(a["data_offsets"]) + rng.integers(-8, 9, 2)]
    elif how == 2:
        a["data_offsets"][rng.integers(2)] = strange
    elif how == 3:
        a["shape"] = strange if rng.random() < 0.3 else [strange, 4]
    elif how == 4:
        a[pick(rng, ["dtype", "shape", "data_offsets", "more"])] = strange
    elif how == 5:
        a.pop(pick(rng, list(a)))
    elif how == 6:
        header[pick(rng, [*NAMES, *names, "__metadata__"])] = a
    elif how == 7:
        said = json.dumps(header)[:-1] + f', "{pick(rng, names)}": {json.dumps(a)}}}'
    elif how == 8:
        said = json.dumps(header)
        said = pick(rng, [DEEP, "", "{}", "[]", "null", "{", said[:-1], said + "x", "\ufeff{}", "\0" * 50])
    text = (json.dumps(header) if said is None else said).encode()
    size = len(text) if how != 9 else pick(rng, [0, 1, len(text) - 1, len(text) + 1, len(text) + 64, 10**8 + 1, 2**62])
    return struct.pack("<Q", size) + text + data


def damaged_bytes(rng, whole):
    """With bytes that were changed, lost or added anywhere."""
    data, at = bytearray(whole), int(rng.integers(len(whole)))
    how = rng.integers(7)
    if how == 0:
        return bytes(data[:at])
    if how == 1:
        for i in rng.integers(len(data), size=rng.integers(1, 5)):
            data[i] ^= 1 << rng.integers(8)
    elif how == 2:
        data[at] = pick(rng, [0, 255, 127, 128, data[at] ^ 255])
    elif how == 3:
        del data[at:at + rng.integers(1, 40)]
    elif how == 4:
        data[at:at] = rng.bytes(rng.integers(1, 40))
    elif how == 5:
        data[at:at + 8] = pick(rng, [b"\xff" * 8, bytes(8), b"\xff\xff\xff\x7f" * 2])[:len(data) - at]
    else:
        other = int(rng.integers(len(data)))
        data[at:at + 16], data[other:other + 16] = data[other:other + 16], data[at:at + 16]
    return bytes(data)


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory):
    """(ending, bytes, state): what is damaged."""
    folder = tmp_path_factory.mktemp("whole")
    state = module(width=4, use_bias=True).state_dict()
    np.savez(folder / "stored.npz", **state)
    np.savez_compressed(folder / "deflated.npz", **state)
    write(folder / "singles.safetensors", state)
    files = [(file.suffix, file.read_bytes(), state) for file in sorted(folder.iterdir())]
    # bfloat16, which NumPy has not, beside float16 and float64, the widest first
    header, data, halved = {}, b"", {}
    for i, (name, x) in enumerate(state.items()):
        kind = ("F64", "F32", "F16", "BF16")[i // 2]
        stored = (x.view(np.uint32) >> 16).astype("<u2") if kind == "BF16" else x.astype(f"<f{int(kind[1:]) // 8}")
        halved[name] = (stored.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else stored.astype(np.float32)
        header[name] = {"dtype": kind, "shape": x.shape, "data_offsets": [len(data), len(data) + stored.nbytes]}
        data += stored.tobytes()
    text = json.dumps(header).encode()
    return [*files, (".safetensors", struct.pack("<Q", len(text)) + text + data, halved)]


def outcome(file, m):
    """What `load` makes of a file: whether it returned, what it raised if not, and the most memory that it took."""
    tracemalloc.start()
    try:
        weights.load(file, m)
    except (ValueError, TypeError, OSError) as error:
        return False, str(error), tracemalloc.get_traced_memory()[1]
    else:
        return True, "", tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("part", range(4))
def test_damaged_files_are_refused_or_read_as_a_whole(part, whole_files, tmp_path):
    m = fastmha.MultiHeadAttention(4, 2, use_bias=True, rng=0)
    parameters = list(m.parameters().values())
    ending, whole, state = whole_files[part]
    strange = damaged_archive if ending == ".npz" else damaged_tensors
    times_loaded = 0
    for seed in range(part, DAMAGED, 4):
        rng = np.random.default_rng(seed)
        changed = damaged_bytes if rng.random() < 0.5 else strange
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # of two members of one name, when they are written
            data = changed(rng, state if changed is damaged_archive else whole)
        file = tmp_path / f"{seed}{ending}"
        file.write_bytes(data)
        for p in parameters:
            p[...] = OLD
        loaded, said, memory = outcome(file, m)
        assert memory < 1 << 20, seed
        if loaded:
            assert not any((p == OLD).any() for p in parameters), seed
            # archives hold sums of their members, .safetensors files none of their numbers
            if ending == ".npz" and changed is damaged_bytes:
                assert all(same_bits(p, x) for p, x in zip(parameters, state.values(), strict=True)), seed
        else:
            assert file.name in said, seed
            assert all((p == OLD).all() for p in parameters), seed
        times_loaded += loaded
        file.unlink()
    assert 0.02 < times_loaded / (DAMAGED / 4) < 0.98     # the damage is neither none nor all


def test_a_byte_of_a_tensor_changes_that_tensor_alone(whole_files, tmp_path):
    for ending, whole, state in whole_files[1::2]:
        start = 8 + int.from_bytes(whole[:8], "little")
        for at in range(start, len(whole), 7):
            data = bytearray(whole)
            data[at] ^= 1
            (tmp_path / f"a{ending}").write_bytes(data)
            m = weights.load(tmp_path / f"a{ending}", module(1, width=4, use_bias=True))
            assert sum(int((p != state[name]).sum()) for name, p in m.parameters().items()) <= 1


def test_lengths_that_a_header_claims_are_not_allocated(tmp_path):
    """What would have to be held is known from the module, before anything is read."""
    claims = tmp_path / "claims.npz"
    with zipfile.ZipFile(claims, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("W_Q.npy", b"\x93NUMPY\2\0" + struct.pack("<I", 2**28) + b" " * 2**24)
        for name in ("W_K", "W_V", "W_O"):
            archive.writestr(f"{name}.npy", npy(np.ones((8, 8), np.float32)) + bytes(2**20))
    tracemalloc.start()
    try:
        refused(ValueError, f"W_Q in claims.npz cannot be read: its header would be {2**28} bytes long", claims)
        with zipfile.ZipFile(claims, "a") as archive:
            archive.writestr("x.W_Q.npy", npy(np.ones((8, 8), np.float32)))
            for name in ("x.W_K", "x.W_V", "x.W_O"):
                archive.writestr(f"{name}.npy", npy(np.ones((8, 8), np.float32)) + bytes(2**20), zipfile.ZIP_DEFLATED)
        tracemalloc.reset_peak()
        refused(ValueError, "x.W_K in claims.npz cannot be read: more than the 256 bytes of its shape", claims, prefix="x")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_archives_with_two_members_of_one_name_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "two.npz", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("W_Q", "W_K", "W_V", "W_O", "W_Q"):
            archive.writestr(f"{name}.npy", npy(np.ones((8, 8), np.float32)))
    refused(ValueError, "two.npz cannot be read: it holds two members of one name", tmp_path / "two.npz")


# -------------------------------------------------------------------------------------------------------------- saving

def failing(monkeypatch, error, where):
    """Half of what is written is there when it happens."""
    def writer(*args, **kwargs):
        if where == "write":
            args[0].write(b"PK half of it")
        raise error
    if where == "write":
        monkeypatch.setattr(np, "savez", writer)
    else:
        monkeypatch.setattr(os, where, writer)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left"), MemoryError()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_file_appears_as_a_whole_or_not_at_all(where, error, tmp_path, monkeypatch):
    new, kept = tmp_path / "new.npz", tmp_path / "kept.npz"
    weights.save(module(), kept)
    before = kept.read_bytes()
    failing(monkeypatch, error, where)
    for file in (new, kept):
        with pytest.raises(type(error)):
            weights.save(module(1), file)
    assert os.listdir(tmp_path) == ["kept.npz"]
    assert kept.read_bytes() == before


@endings
def test_a_file_is_replaced_and_has_the_permissions_of_any_other(ending, tmp_path):
    file, other = tmp_path / f"a.{ending}", tmp_path / "b"
    before = os.umask(0o027)
    try:
        weights.save(module(), file)
        other.touch()
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
    weights.save(module(1), str(file))
    assert sorted(os.listdir(tmp_path)) == [file.name, "b"]
    assert bits(weights.load(file, module(2))) == bits(module(1))


@pytest.mark.skipif(os.name != "posix", reason="links")
def test_what_a_link_points_to_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "a.npz", tmp_path / "b.npz"
    weights.save(module(), target)
    link.symlink_to(target)
    weights.save(module(1), link)
    assert link.is_symlink()
    assert bits(weights.load(target, module(2))) == bits(module(1))
    assert os.listdir(tmp_path / "folder") == ["a.npz"]


@endings
def test_the_longest_of_names(ending, tmp_path):
    file = tmp_path / ("x" * (254 - len(ending)) + f".{ending}")
    weights.save(module(), file)
    assert bits(weights.load(file, module(2))) == bits(module())


def test_frozen_modules_are_saved(tmp_path):
    m = module()
    m.freeze()
    weights.save(m, tmp_path / "a.npz")
    assert bits(weights.load(tmp_path / "a.npz", module(1))) == bits(m)


NOT_SQUARE = [{"use_bias": True, **kind} for kind in (GROUPED, D_HEAD, OTHER_WIDTHS, {"kdim": 6, "vdim": 6})]
UNNAMED = [
    *(("torch", kind) for kind in ({"use_bias": "qkv"}, {"use_bias": "out"}, GROUPED, D_HEAD, *NOT_SQUARE[:2])),
    *((layout, kind) for layout in ("bert", "gpt2") for kind in ({}, {"use_bias": "qkv"}, {"use_bias": "out"}, *NOT_SQUARE)),
]


@pytest.mark.parametrize(("layout", "kind"), UNNAMED, ids=str)
def test_modules_that_a_layout_cannot_name(layout, kind, tmp_path):
    with raises(ValueError, f'layout "{layout}" has no names for a module with W_Q (8, ...), W_K ...'):
        weights.save(module(**kind), tmp_path / "a.npz", layout)
    assert os.listdir(tmp_path) == []


def test_arguments_of_save_are_named(tmp_path):
    for given, error, message in (
        ((module(), tmp_path / "a.pt"), ValueError, "file must end in .safetensors or .npz, got 'a.pt'"),
        ((module(), "npz"), ValueError, "file must end in .safetensors or .npz, got 'npz'"),
        ((module(), io.BytesIO()), TypeError, "file must be a path, got BytesIO"),
        ((3, "a.npz"), TypeError, "module must be a MultiHeadAttention, got int"),
        ((module(), "a.npz", "keras"), ValueError, 'layout must be "fastmha", "torch", "bert", "gpt2" or "llama", got \'keras\''),
        ((module(), "a.npz", "torch", 3), TypeError, "prefix must be a str, got int"),
        ((module(), "a.npz", "torch", "a\ud800"), ValueError, "prefix must be printable, got ..."),
    ):
        with raises(error, message):
            weights.save(*given)
    with pytest.raises(FileNotFoundError, match="none"):
        weights.save(module(), tmp_path / "none" / "a.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(OSError, match=r"folder\.npz"):
        weights.save(module(), tmp_path / "folder.npz")
    assert os.listdir(tmp_path) == ["folder.npz"]
