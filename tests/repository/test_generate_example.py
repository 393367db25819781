"""The example that trains a transformer: its gradient by finite differences, what it computes, its baseline, its command line."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support import difference, script

import fastmha
from fastmha import reference

example = script("examples", "generate")

needs_cache = pytest.mark.skipif(not hasattr(fastmha, "KVCache"), reason="needs fastmha.KVCache")
V, B, L = 7, 2, 5


@pytest.fixture
def small(example):
    """A float64 model of two blocks whose vectors (gains, biases) are not what they start as."""
    rng = np.random.default_rng(0)
    model = example.Transformer(V, rng, d_model=8, H=2, num_blocks=2, dtype=np.float64)
    for param in model.params().values():
        if param.ndim == 1:
            param += rng.standard_normal(param.shape) / 4
    return model


@pytest.fixture
def tokens(rng):
    return rng.integers(0, V, (B, L))


def loss_of(example, model, tokens, targets):
    return example.cross_entropy(model.forward(tokens), targets.ravel())[0]


def test_gradient_of_every_weight_is_that_of_finite_differences(example, small, tokens, rng):
    targets = rng.integers(0, V, (B, L))
    small.backward(example.cross_entropy(small.forward(tokens), targets.ravel())[1])
    grads = {name: grad.copy() for name, grad in small.grads().items()}
    params = small.params()
    assert grads.keys() == params.keys()
    assert len(params) == 1 + 2 * (4 + 4 * 2) + 2 + 2
    for name, param in params.items():
        assert grads[name].shape == param.shape
        for place in {tuple(rng.integers(0, param.shape)) for _ in range(12)}:
            slope = difference(lambda: loss_of(example, small, tokens, targets), param, place, 1e-6)
            assert abs(grads[name][place] - slope) < 1e-8, f"{name}{place}: {grads[name][place]:.3e}, slope {slope:.3e}"


@pytest.mark.parametrize("training", [True, False])
def test_logits_are_those_of_a_transformer_written_out(example, small, tokens, training):
    params = small.params()

    def norm(x, name):
        n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return n * params[f"{name}.gain"] + params[f"{name}.bias"]

    def dense(x, name):
        return x @ params[f"{name}.W"] + params[f"{name}.b"]

    distance = np.arange(L)[:, None] - np.arange(L)
    mask = np.where(distance < 0, -np.inf, -np.array([1, 1 / 64])[:, None, None] * distance)[None]
    x = params["embedding.E"][tokens]
    for i in range(2):
        weights = {name: params[f"{i}.attention.{name}"] for name in ("W_Q", "W_K", "W_V", "W_O")}
        x = x + reference.mha_forward_backward(norm(x, f"{i}.norm_1"), weights, 2, mask=mask)["output"]
        x = x + dense(np.maximum(dense(norm(x, f"{i}.norm_2"), f"{i}.widen"), 0) ** 2, f"{i}.narrow")
    expected = dense(norm(x, "norm"), "head").reshape(B * L, V)
    np.testing.assert_allclose(small.forward(tokens, training=training), expected, rtol=0, atol=1e-12)


def test_logits_do_not_depend_on_later_characters(small, tokens):
    before = small.forward(tokens).reshape(B, L, V)
    tokens[:, 3:] = (tokens[:, 3:] + 1) % V
    after = small.forward(tokens).reshape(B, L, V)
    assert np.array_equal(before[:, :3], after[:, :3])
    assert not np.allclose(before[:, 3:], after[:, 3:])


def test_cross_entropy_and_its_gradient_of_large_logits(example, rng):
    logits, targets = rng.standard_normal((4, V)) * 1000, rng.integers(0, V, 4)
    loss, grad = example.cross_entropy(logits, targets)
    lse = logits.max(1) + np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
    np.testing.assert_allclose(loss, np.mean(lse - logits[np.arange(4), targets]), rtol=1e-13)
    np.testing.assert_allclose(grad, (np.exp(logits - lse[:, None]) - np.eye(V)[targets]) / 4, rtol=0, atol=1e-12)


def test_loss_falls_within_a_few_steps(example):
    text, rng = np.tile(np.arange(V), 60), np.random.default_rng(0)
    model = example.Transformer(V, rng, d_model=16, H=2, num_blocks=1)
    before = example.evaluate(model, text, 200, 2 * example.HALF)
    parts, losses = zip(*example.train(model, text[:200], rng, seconds=60, steps=30), strict=True)
    np.testing.assert_allclose(parts, np.arange(1, 31) / 30)
    assert losses[0] > np.log(V) / 2
    assert losses[-1] < losses[0] / 2
    assert example.evaluate(model, text, 200, 2 * example.HALF) < before / 2


def test_training_by_steps_gives_the_same_weights_every_time_and_by_seconds_ends(example):
    text = np.tile(np.arange(V), 60)

    def trained(seed, seconds, steps):
        rng = np.random.default_rng(seed)
        model = example.Transformer(V, rng, d_model=16, H=2, num_blocks=1)
        parts = [part for part, _ in example.train(model, text, rng, seconds, steps)]
        assert parts[-1] == 1
        return np.concatenate([param.ravel() for param in model.params().values()])

    first = trained(0, 60, 3)
    assert np.array_equal(first, trained(0, 0.001, 3))
    assert not np.array_equal(first, trained(1, 60, 3))
    assert np.isfinite(trained(0, 0.05, None)).all()


def test_evaluation_counts_each_character_once_from_those_before_it(example):
    seen = []

    class Counts:
        """Says the character after each token with logit 1, and which tokens the loss looks at."""

        def forward(self, tokens, training):
            seen.append(tokens)
            return np.eye(len(text))[(tokens.ravel() + 1) % len(text)]

    half = example.HALF
    text = np.arange(3 * example.CONTEXT)
    first, count = example.CONTEXT, 4 * half
    loss = example.evaluate(Counts(), text, first, count)
    np.testing.assert_allclose(loss, np.log(np.e + len(text) - 1) - 1)      # every character that is counted is the next
    looked_at = np.concatenate(seen)[:, half:].ravel() + 1
    assert np.array_equal(looked_at, text[first : first + count])
    seen.clear()
    example.evaluate(Counts(), text, first, count, every=2)
    assert np.array_equal(np.concatenate(seen)[:, half] + 1, [first, first + 2 * half])


@pytest.mark.parametrize("smoothing", [0.01, 1.0])
def test_bigram_probabilities_sum_to_one(example, rng, smoothing):
    table = example.bigram(rng.integers(0, V - 1, 50), V, smoothing)    # the last character never occurs
    assert table.shape == (V, V)
    assert (table > 0).all()
    np.testing.assert_allclose(table.sum(axis=1), 1, rtol=1e-14)


def test_bigram_counts_pairs(example):
    np.testing.assert_allclose(example.bigram(np.array([0, 1, 0, 1, 1]), 2, 1), [[1 / 4, 3 / 4], [2 / 4, 2 / 4]])


def test_bigram_loss_looks_at_the_training_part_and_at_the_held_out_characters_alone(example, rng):
    text = rng.integers(0, V, 500)
    loss = example.bigram_loss(text, V, 400, 50)
    assert loss == example.bigram_loss(np.concatenate([text[:450], text[:50]]), V, 400, 50)
    by_hand = {
        smoothing: np.mean([-np.log(example.bigram(text[:400], V, smoothing)[text[i - 1], text[i]]) for i in range(400, 450)])
        for smoothing in (1.0, 0.3, 0.1, 0.03, 0.01)
    }
    assert min(abs(loss - value) for value in by_hand.values()) < 1e-12
    assert example.bigram_loss(np.tile([0, 1, 2], 200), 3, 500, 90) < 0.01


def test_draw_follows_the_probabilities_and_takes_the_likeliest_at_temperature_zero(example):
    p = np.array([0.1, 0.2, 0.7])
    assert [example.draw(np.log(p), 1.0, u) for u in (0.0, 0.09, 0.11, 0.29, 0.31, 0.999)] == [0, 0, 1, 1, 2, 2]
    squares = p**2 / (p**2).sum()
    assert [example.draw(np.log(p), 0.5, u) for u in (squares[0] - 0.01, squares[0] + 0.01)] == [0, 1]
    assert example.draw(np.log(p), 0, 0.0) == 2


def test_no_paragraph_of_the_text_repeats(example):
    tokens, alphabet = example.load_text()
    text = "".join(alphabet[token] for token in tokens)
    paragraphs = text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))
    assert len(text) > 100_000
    assert "dictionary" in text
    assert sorted(set(text)) == list(alphabet)


@needs_cache
def test_logits_through_the_cache_are_those_of_the_whole_text(small, tokens):
    text = tokens[:1]
    expected = small.forward(text, training=False)
    caches = [fastmha.KVCache(1, 2, 4, capacity=L, dtype=np.float64) for _ in small.blocks]
    parts = [small.forward(text[:, some], caches) for some in (slice(0, 2), slice(2, 3), slice(3, 5))]
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=1e-12)


@needs_cache
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_text_is_the_same_with_and_without_the_cache(example, small, temperature):
    prompt, uniforms = np.array([3, 1]), np.random.default_rng(2).random(40)
    with_cache, without = (example.write(small, prompt, uniforms, temperature, cached) for cached in (True, False))
    assert np.array_equal(with_cache, without)
    assert np.array_equal(with_cache[:2], prompt)
    assert len(with_cache) == 42


@pytest.fixture
def main(example):
    pytest.importorskip("rich", reason='the example needs rich: pip install "fastmha[study]"')
    yield example.main
    fastmha.set_num_threads(None)


@needs_cache
def test_script_with_three_steps_writes_and_says_that_it_is_not_below_the_bigram_model(example, main, capsys):
    assert main(["--steps", "3", "--length", "20", "--threads", "1", "--prompt", "A class"]) == 1
    printed = capsys.readouterr().out
    assert "after 3 steps" in printed
    assert "the model is NOT below" in printed
    assert "\n\nA class" in printed
    assert printed.count("characters per second") == 2
    assert printed.endswith("the two texts are identical\n")


@needs_cache
@pytest.mark.parametrize(("pairs", "differ", "status"), [(99.0, False, 0), (99.0, True, 1), (float("nan"), False, 1)])
def test_exit_status_says_whether_the_loss_is_below_and_the_texts_are_identical(
    example, main, capsys, monkeypatch, pairs, differ, status
):
    monkeypatch.setattr(example, "bigram_loss", lambda *arguments: pairs)
    monkeypatch.setattr(example, "evaluate", lambda *arguments: 1.0)
    monkeypatch.setattr(
        example, "write", lambda model, prompt, uniforms, t, cached: np.append(prompt, 5 + (differ and cached))
    )
    assert main(["--steps", "1", "--length", "1", "--threads", "1"]) == status
    assert ("NOT identical" in capsys.readouterr().out) == differ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "argument --seconds: must be a number of at least 0.1, got '0'"),
        (["--seconds", "inf"], "argument --seconds: must be a number of at least 0.1, got 'inf'"),
        (["--steps", "0"], "argument --steps: must be a whole number of at least 1, got '0'"),
        (["--length", "many"], "argument --length: must be a whole number of at least 1, got 'many'"),
        (["--seed", "-1"], "argument --seed: must be a whole number of at least 0, got '-1'"),
        (["--threads", "1.5"], "argument --threads: must be a whole number of at least 1, got '1.5'"),
        (["--temperature", "nan"], "argument --temperature: must be a number of at least 0, got 'nan'"),
        (["--prompt", ""], "argument --prompt: must be one or more of the characters"),
        (["--prompt", "A \u4e00"], "got 'A \u4e00'"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_trained(main, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_missing_rich_ends_with_one_sentence_that_names_the_extra(example, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert example.main(["--steps", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        'This example needs the package rich, which is not installed: pip install "fastmha[study]" provides it.\n'
    )
