"""What docs/models.md computes is the formula of each architecture, written here in plain NumPy and float64."""

import re
from pathlib import Path

import numpy as np
import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
HEADINGS = re.split(r"^## (.*)$", TEXT, flags=re.MULTILINE)
CODE = {heading: re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for heading, text in zip(["", *HEADINGS[1::2]], HEADINGS[::2])}
(FIRST,) = CODE.pop("")
SECTIONS = {heading: "".join(code) for heading, code in CODE.items() if code}
EPS = np.finfo(np.float32).eps


def run(section, old="", new=""):
    """The names of a section after it has run, without its own assertions; `old` in its code is replaced by `new`."""
    names = {"__name__": "models"}
    exec(compile(FIRST, "models.md", "exec", optimize=1), names)
    assert old in SECTIONS[section], old
    code = SECTIONS[section].replace(old, new) if old else SECTIONS[section]
    exec(compile(code, f"models.md, {section}", "exec", optimize=1), names)
    return names


# ------------------------------------------------------------------------------------------------------ the formulas

def past(L, last=None):
    """(L, L): query i sees the keys up to its own, of these the last so many."""
    back = np.arange(L)[:, None] - np.arange(L)
    return (back >= 0) & (back < (L if last is None else last))


def everything(L, Lk=None):
    return np.ones((L, Lk or L), bool)


def split(X, H):
    B, L, width = X.shape
    return X.reshape(B, L, H, width // H).transpose(0, 2, 1, 3)


def joined(heads):
    B, H, L, D = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(B, L, H * D)


def rope(x, base, slower=1, stretch=1, neighbours=False):
    """Pairs of the last axis as complex numbers, times exp(i · position · frequency)."""
    L, D = x.shape[-2:]
    turn = stretch * np.exp(1j * np.arange(L)[:, None] * float(base) ** (-2 * np.arange(D // 2) / D) / slower)
    real, imaginary = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(0, D // 2), slice(D // 2, None))
    turned = (x[..., real] + 1j * x[..., imaginary]) * turn
    out = np.empty_like(x)
    out[..., real], out[..., imaginary] = turned.real, turned.imag
    return out


def rms(x, weight, eps=1e-6):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def attend(q, k, v, seen, scale=None, cap=None, bias=0.0, sinks=None):
    """softmax over the keys that are seen, (..., Lq, Lk), and a sink; each query head on the key/value head of its group."""
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    powers = np.where(seen, np.exp(scores + bias), 0)
    return powers / (powers.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None, None])) @ v


def layer(W, X, H, Hkv, seen, C=None, change_qk=None, biases="", **rules):
    """W: float64 arrays by the names of parameters; biases: of which projections there are some."""
    b = {letter: W[f"b_{letter}"] if letter in biases else 0.0 for letter in "QKVO"}
    C = X if C is None else C
    q, k, v = split(X @ W["W_Q"] + b["Q"], H), split(C @ W["W_K"] + b["K"], Hkv), split(C @ W["W_V"] + b["V"], Hkv)
    if change_qk is not None:
        q, k = change_qk(q, k)
    return joined(attend(q, k, v, seen, **rules)) @ W["W_O"] + b["O"]


def double(x):
    return np.asarray(x, np.float64)


def weights(m, **others):
    return {name: double(array) for name, array in {**m.parameters(), **others}.items()}


def both(change, *arguments, **keywords):
    return lambda q, k: (change(q, *arguments, **keywords), change(k, *arguments, **keywords))


# ----------------------------------------------------------------------------- of each section what it has and should

def bert(n):
    seen = np.array([np.ones(7), [1, 1, 1, 1, 0, 0, 0]], bool)[:, None, None, :]
    yield n["Y"], layer(weights(n["m"]), double(n["X"]), 4, 4, seen, biases="QKVO")


def gpt2(n):
    X, fused = double(n["X"]), n["c_attn"]
    q, k, v = (split(x, 4) for x in np.split(X @ fused + n["b_attn"], 3, axis=2))
    yield n["Y"], joined(attend(q, k, v, past(7))) @ n["c_proj"] + n["b_proj"]


def llama(n):
    W, X = weights(n["m"], W_Q=n["metas_W_Q"], W_K=n["metas_W_K"]), double(n["X"])
    yield n["Y"], layer(W, X, 8, 2, past(9), change_qk=both(rope, 5e5))
    yield n["Y_metas"], layer(W, X, 8, 2, past(9), change_qk=both(rope, 5e5, neighbours=True))


def mistral(n):
    yield n["Y"], layer(weights(n["m"]), double(n["X"]), 8, 2, past(12, last=4), change_qk=both(rope, 1e4))


def qwen2(n):
    yield n["Y"], layer(weights(n["m"]), double(n["X"]), 14, 2, past(9), change_qk=both(rope, 1e6), biases="QKV")


def qwen3_formula(W, X, weight_q, weight_k):
    return layer(W, X, 8, 4, past(9), change_qk=lambda q, k: (rope(rms(q, weight_q), 1e6), rope(rms(k, weight_k), 1e6)))


def qwen3(n):
    yield n["Y"], qwen3_formula(weights(n["m"]), double(n["X"]), double(n["weight_q"]), double(n["weight_k"]))


def gemma2(n):
    W, X = weights(n["m"], W_Q=n["published_W_Q"]), double(n["X"])
    for got, last in (("Y_local", 4), ("Y_global", None)):
        yield n[got], layer(W, X, 8, 4, past(9, last), change_qk=both(rope, 1e4), scale=9**-0.5, cap=50)


def gemma3(n):
    W, X, w_q, w_k = weights(n["m"]), double(n["X"]), double(n["w_q"]), double(n["w_k"])
    for got, last, base, slower in (("Y_local", 4, 1e4, 1), ("Y_global", None, 1e6, 8)):
        def change(q, k, base=base, slower=slower):
            return rope(rms(q, 1 + w_q), base, slower), rope(rms(k, 1 + w_k), base, slower)
        yield n[got], layer(W, X, 8, 4, past(9, last), change_qk=change, scale=10**-0.5)


def gpt_oss_formula(W, X, sinks, last):
    return layer(W, X, 8, 2, past(12, last), change_qk=both(rope, 1.5e5, stretch=1.3465735902799727), biases="QKVO", sinks=sinks)


def gpt_oss(n):
    W, X, sinks = weights(n["m"]), double(n["X"]), double(n["sinks"])
    yield n["Y_global"], gpt_oss_formula(W, X, sinks, None)
    yield n["Y_local"], gpt_oss_formula(W, X, sinks, 4)


def t5_bucket(distance, both_ways):
    """Without logarithms: bucket single + s begins where (n / single) ** wide = (far / single) ** s, in integers."""
    side = 16 if both_ways else 32
    n = abs(distance) if both_ways else max(-distance, 0)
    single = wide = side // 2
    steps = [s for s in range(1, wide) if n**wide * single**s >= 128**s * single**wide]
    number = n if n < single else single + len(steps)
    return number + side * (both_ways and distance > 0)


def t5_formula(W, X, table, seen, both_ways):
    numbers = np.array([[t5_bucket(j - i, both_ways) for j in range(X.shape[1])] for i in range(X.shape[1])])
    return layer(W, X, 6, 6, seen, scale=1, bias=np.moveaxis(table[numbers], 2, 0))


def t5_seen():
    return np.array([np.ones(40), np.arange(40) < 31], bool)[:, None, None, :]


def t5(n):
    W, X, table = weights(n["m"], W_Q=n["published_W_Q"]), double(n["X"]), double(n["table"])
    yield n["Y"], t5_formula(W, X, table, t5_seen(), True)
    yield n["Y_decoder"], t5_formula(W, X, table, past(40), False)


def modernbert(n):
    X, fused, out = double(n["X"]), double(n["Wqkv"]), double(n["Wo"])
    for got, base, near in (("Y_local", 1e4, 2), ("Y_global", 1.6e5, 9)):
        parts = []
        for x in np.split(X, np.cumsum([5, 2])):
            q, k, v = (split(p, 4) for p in np.split(x[None] @ fused, 3, axis=2))
            seen = abs(np.arange(len(x))[:, None] - np.arange(len(x))) <= near
            parts.append(joined(attend(rope(q, base), rope(k, base), v, seen))[0] @ out)
        yield n[got], np.concatenate(parts)


def deepseek(n):
    W, X = {name: double(w) for name, w in n["W"].items()}, double(n["X"])
    q = split(rms(X @ W["DQ"], n["norm_q"]) @ W["UQ"], 4)
    latent = X @ W["DKV"]
    made = split(rms(latent[..., :16], n["norm_kv"]) @ W["UKV"], 4)
    shared = rope(latent[:, None, :, 16:], 1e4, neighbours=True)
    q = np.concatenate([q[..., :8], rope(q[..., 8:], 1e4, neighbours=True)], axis=-1)
    k = np.concatenate([made[..., :8], np.repeat(shared, 4, axis=1)], axis=-1)
    heads = attend(q, k, made[..., 8:], past(9), scale=1.3688879454113937**2 / 12**0.5)
    yield n["Y"], joined(heads) @ W["O"]
    yield np.einsum("bhlr,rhd->bhld", n["inner"], n["W_UV"]), heads[:, :, 8:]


def vit(n):
    yield n["Y"], layer(weights(n["m"]), double(n["X"]), 4, 4, everything(10), biases="QKVO")


def whisper(n):
    X, frames = double(n["X"]), double(n["frames"])
    yield n["Y_encoder"], layer(weights(n["encoder"]), frames, 6, 6, everything(20), biases="QVO")
    yield n["Y_decoder"], layer(weights(n["decoder"]), X, 6, 6, past(5), biases="QVO")
    yield n["Y_cross"], layer(weights(n["cross"]), X, 6, 6, everything(5, 20), C=frames, biases="QVO")


def bloom(n):
    fused = (double(n["X"]) @ n["query_key_value"] + n["bias"]).reshape(2, 9, 8, 3, 6)
    q, k, v = (fused[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3))
    m = n["m"]
    for first in (0, 8):                # BLOOM counts from the first key, MPT from the last
        bias = np.array([[[2.0 ** -(h + 1) * (j - first) for j in range(9)]] for h in range(8)])
        yield n["Y"], joined(attend(q, k, v, past(9), bias=bias)) @ double(m.W_O) + double(m.b_O)


FORMULAS = {
    "BERT": bert, "GPT-2": gpt2, "Llama": llama, "Mistral": mistral, "Qwen2": qwen2, "Qwen3": qwen3, "Gemma 2": gemma2,
    "Gemma 3": gemma3, "gpt-oss": gpt_oss, "T5": t5, "ModernBERT": modernbert, "DeepSeek V2 and V3": deepseek, "ViT": vit,
    "Whisper": whisper, "BLOOM and MPT": bloom,
}


def differs(got, expected):
    """Beyond what the roundings of a layer's products in float32 make, a few hundred sums of a few dozen terms."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    return not np.abs(got - expected).max() <= 32 * EPS * np.abs(expected).max()


def test_each_family_of_the_table_has_a_section_whose_code_is_compared():
    linked = dict.fromkeys(re.findall(r"^\| \[[^]]*\]\(#([\w-]+)\)", TEXT, re.MULTILINE))
    assert list(linked) == [heading.lower().replace(" ", "-") for heading in SECTIONS]
    assert list(FORMULAS) == list(SECTIONS)


@pytest.mark.parametrize("section", FORMULAS)
def test_a_section_computes_its_formula(section):
    compared = list(FORMULAS[section](run(section)))
    assert compared
    assert [differs(*pair) for pair in compared] == [False] * len(compared)


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("BERT", "key_padding_lengths=attention_mask.sum(axis=1)", "is_causal=True"),
        ("GPT-2", '("W_Q", "W_K", "W_V")', '("W_K", "W_Q", "W_V")'),
        ("GPT-2", "Y = m.forward(X, is_causal=True)", "Y = m.forward(X)"),
        ("Llama", "base=500000.0", "base=10000.0"),
        ("Llama", "swapaxes(2, 3)", "copy()"),
        ("Mistral", "4 - 1", "4"),
        ("Qwen2", '"qkv"', "True"),
        ("Qwen2", "base=1000000.0", ""),
        ("Qwen3", "weight_q, weight_k)", "weight_k, weight_q)"),
        ("Qwen3", "Y = m.forward(", "Y = m.forward(X, is_causal=True, transform_qk=normed.rotary)\nm.forward("),
        ("Gemma 2", "softcap=50.0, ", ""),
        ("Gemma 2", "m.W_Q *= np.sqrt(m.head_dim / query_pre_attn_scalar)", ""),
        ("Gemma 2", "4 - 1", "4"),
        ("Gemma 3", "(1 + w_q)", "w_q"),
        ("Gemma 3", "np.sqrt(m.head_dim / query_pre_attn_scalar)", "1"),
        ("Gemma 3", "of_global.frequencies /= 8", ""),
        ("gpt-oss", "sinks=sinks, ", ""),
        ("gpt-oss", "0.1 * np.log(32) + 1", "1.0"),
        ("gpt-oss", "4 - 1", "4"),
        ("T5", "m.W_Q *= np.sqrt(m.head_dim)", ""),
        ("T5", "both_ways=True", "both_ways=False"),
        ("T5", "both_ways=False", "both_ways=True"),
        ("T5", "far=128", "far=64"),
        ("ModernBERT", "window=(2, 2))\nY_global", "window=(2, 0))\nY_global"),
        ("ModernBERT", "(heads.reshape", "(heads[::-1].reshape"),
        ("DeepSeek V2 and V3", "(0.1 * np.log(40) + 1) ** 2", "1.0"),
        ("DeepSeek V2 and V3", "[x[..., ::2], x[..., 1::2]]", "np.split(x, 2, axis=-1)"),
        ("DeepSeek V2 and V3", "latents.k[..., :rank]", "latents.k[..., rope:]"),
        ("ViT", "m.forward(X)", "m.forward(X, is_causal=True)"),
        ("Whisper", "decoder.forward(X, is_causal=True)", "decoder.forward(X)"),
        ("Whisper", "Y_cross = cross.forward(X, context=frames)", "Y_cross = cross.forward(X)"),
        ("BLOOM and MPT", "alibi=slopes", "alibi=slopes / 2"),
        ("BLOOM and MPT", "reshape(H * D, H, 3, D)", "reshape(H * D, 3, H, D).swapaxes(1, 2)"),
    ],
)  # fmt: skip
def test_a_section_without_one_of_its_rules_does_not(section, old, new):
    assert any(differs(*pair) for pair in FORMULAS[section](run(section, old, new)))


# ------------------------------------------------------------------------------------------------------- gradients

def assert_gradient(gradient, loss, at):
    """Against the central difference of the formula's loss along a direction."""
    direction = np.random.default_rng(1).standard_normal(at.shape)
    slope = (loss(at + 1e-5 * direction) - loss(at - 1e-5 * direction)) / 2e-5
    assert abs((gradient * direction).sum() - slope) <= 64 * EPS * np.linalg.norm(gradient) * np.linalg.norm(direction)
    assert np.linalg.norm(gradient) > 0


def test_gradients_pass_the_rotation():
    n = run("Llama")
    W, grad_Y = weights(n["m"], W_Q=n["metas_W_Q"], W_K=n["metas_W_K"]), double(n["grad_Y"])
    assert_gradient(n["grad_X"], lambda X: (layer(W, X, 8, 2, past(9), change_qk=both(rope, 5e5)) * grad_Y).sum(), double(n["X"]))


@pytest.mark.parametrize("what", ["X", "weight_q", "weight_k"])
def test_gradients_pass_the_norms_of_queries_and_keys(what):
    n = run("Qwen3")
    W, grad_Y = weights(n["m"]), double(n["grad_Y"])
    given = {name: double(n[name]) for name in ("X", "weight_q", "weight_k")}
    assert_gradient(n[f"grad_{what}"], lambda x: (qwen3_formula(W, **{**given, what: x}) * grad_Y).sum(), given[what])


def test_the_gradient_of_sinks_is_that_of_the_last_forward():
    n = run("gpt-oss")
    W, X, grad_Y = weights(n["m"]), double(n["X"]), double(n["grad_Y"])
    assert_gradient(n["grad_sinks"], lambda sinks: (gpt_oss_formula(W, X, sinks, 4) * grad_Y).sum(), double(n["sinks"]))


def test_the_gradient_of_a_bias_reaches_its_bucket_and_that_of_the_scale_the_published_weights():
    n = run("T5")
    W, X, grad_Y, table = weights(n["m"], W_Q=n["published_W_Q"]), double(n["X"]), double(n["grad_Y"]), double(n["table"])
    assert_gradient(n["grad_table"], lambda table: (t5_formula(W, X, table, t5_seen(), True) * grad_Y).sum(), table)
    assert_gradient(n["grad_published_W_Q"],
                    lambda W_Q: (t5_formula({**W, "W_Q": W_Q}, X, table, t5_seen(), True) * grad_Y).sum(), W["W_Q"])


def test_the_buckets_of_every_distance():
    """Also those beyond the section's sequence, and where a bucket begins."""
    buckets = run("T5")["buckets"]
    distances = np.arange(-1200, 1201)
    for both_ways in (True, False):
        assert buckets(distances, both_ways).tolist() == [t5_bucket(int(d), both_ways) for d in distances]


def test_a_bias_of_keys_changes_no_softmax_and_has_no_gradient():
    n = run("Whisper")
    cross, X, frames = n["cross"], n["X"], n["frames"]
    cross.b_K = np.linspace(-1, 1, 48)
    Y = cross.forward(X, context=frames)
    assert not differs(Y, double(n["Y_cross"]))
    cross.backward(Y)
    assert np.abs(cross.grad_b_K).max() <= 64 * EPS * np.abs(cross.grad_b_Q).max()
