"""Train a small character-level transformer on NumPy and fastmha, then let it write, with and without a key/value cache.

    pip install "fastmha[study]"
    python examples/generate.py
    python examples/generate.py --seconds 20 --temperature 0 --prompt "The dictionary "

The text is the language reference that Python itself ships (``pydoc_data.topics``), paragraphs that several topics share
taken once; its last tenth is held out. Training ends after ``--seconds`` or, for a run that can be repeated, ``--steps``.
The held-out loss then stands beside that of a bigram model of the same training part. Last, text is written twice, through
the cache and by a full forward for each character, with the speed of both. Exit status: 0; 1 if the held-out loss is not
below the bigram model's or the two texts differ; 2 if the arguments are wrong or a package is missing.

Shapes: B windows of L characters make N = B·L rows; V is the size of the alphabet, H the heads, D their width. Every layer
keeps from ``forward`` what its ``backward`` needs; ``backward`` turns the gradient of the loss with respect to the layer's
output into the one with respect to its input, and leaves those with respect to the weights in ``grads``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

import fastmha

INSTALL = 'pip install "fastmha[study]"'
CONTEXT, BATCH = 128, 8  # characters of a window, windows of a training step
HALF = CONTEXT // 2  # held-out characters are predicted from more than this many before them
PEAK_RATE, WARMUP, DECAY = 4e-3, 0.05, 1.0  # Adam's longest step, the part of the training before it, pull towards 0
REPORTS, SAMPLE = 8, 4  # lines printed while training; they look at one in SAMPLE stretches of held-out characters


# ------------------------------------------------------------------------------------------------------------ layers


class Embedding:
    """Tokens (N,) -> their rows of E, x (N, d_model)."""

    def __init__(self, V: int, d_model: int, dtype: Any, rng: np.random.Generator) -> None:
        self.params = {"E": (rng.standard_normal((V, d_model)) / 2).astype(dtype)}
        self.grads = {"E": np.zeros((V, d_model), dtype)}

    def forward(self, tokens: np.ndarray) -> np.ndarray:
        self.tokens = tokens
        return self.params["E"][tokens]  # x (N, d_model) <- one_hot (N, V) @ E, without the product

    def backward(self, grad_x: np.ndarray) -> None:
        # forward: x = one_hot @ E
        one_hot = (self.tokens[:, None] == np.arange(len(self.grads["E"]))).astype(grad_x.dtype)
        np.matmul(one_hot.T, grad_x, out=self.grads["E"])  # grad_E (V, d_model) <- one_hot.T @ grad_x


class Dense:
    """x (N, inputs) -> y (N, outputs) = x W + b."""

    def __init__(self, inputs: int, outputs: int, dtype: Any, rng: np.random.Generator) -> None:
        W = rng.standard_normal((inputs, outputs)) * math.sqrt(2 / (inputs + outputs))
        self.params = {"W": W.astype(dtype), "b": np.zeros(outputs, dtype)}
        self.grads = {name: np.zeros_like(param) for name, param in self.params.items()}

    def forward(self, x: np.ndarray) -> np.ndarray:
        self.x = x
        return fastmha.linear(x, self.params["W"], self.params["b"])  # y (N, outputs) <- x @ W + b

    def backward(self, grad_y: np.ndarray) -> np.ndarray:
        # forward: y = x @ W + b. grad_x <- grad_y @ W.T, grad_W <- x.T @ grad_y, grad_b <- the sum of grad_y's rows
        grad_x, *grads = fastmha.linear_backward(grad_y, self.x, self.params["W"], self.params["b"])
        self.grads = dict(zip(self.params, grads))
        return grad_x


class LayerNorm:
    """x (N, d_model) -> y = n · gain + bias, where n is x with each row shifted and stretched to mean 0 and variance 1."""

    def __init__(self, d_model: int, dtype: Any) -> None:
        self.params = {"gain": np.ones(d_model, dtype), "bias": np.zeros(d_model, dtype)}
        self.grads = {name: np.zeros_like(param) for name, param in self.params.items()}

    def forward(self, x: np.ndarray) -> np.ndarray:
        self.x = x
        return fastmha.layer_norm(x, self.params["gain"], self.params["bias"])

    def backward(self, grad_y: np.ndarray) -> np.ndarray:
        # forward: y = n * gain + bias, n = (x - mean) * inverse_std. Shifting or stretching a row of x leaves n as it is, so
        # grad_x has no part along a row of ones and, but for what is added to the variance, none along n.
        grad_x, *grads = fastmha.layer_norm_backward(grad_y, self.x, self.params["gain"], self.params["bias"])
        self.grads = dict(zip(self.params, grads))
        return grad_x


class Attention:
    """x (B·L, d_model) -> y of the same shape: each character looks at those up to itself. All of it is fastmha's."""

    def __init__(self, d_model: int, H: int, dtype: Any, rng: np.random.Generator) -> None:
        self.heads = fastmha.MultiHeadAttention(d_model, H, dtype=dtype, rng=rng)
        self.params = self.heads.parameters()  # W_Q, W_K, W_V, W_O: views, so that Adam's writing trains the module

    def forward(self, x: np.ndarray, slopes: np.ndarray, B: int, cache: Any, training: bool) -> np.ndarray:
        # y <- concat over the heads of (softmax(q @ k.T / sqrt(D) - slope · distance) @ v) @ W_O; q, k, v = x @ W_Q, W_K, W_V.
        # With a cache, x holds the new characters only: the keys and values of those before them are in it.
        x = x.reshape(B, -1, x.shape[1])
        y = self.heads.forward(x, is_causal=True, alibi=slopes, cache=cache, training=training and cache is None)
        return y.reshape(-1, y.shape[2])

    def backward(self, grad_y: np.ndarray, B: int) -> np.ndarray:
        grad_x = self.heads.backward(grad_y.reshape(B, -1, grad_y.shape[1]))
        self.grads = self.heads.gradients()  # grad_W_Q, grad_W_K, grad_W_V, grad_W_O, under the names of the weights
        return grad_x.reshape(grad_y.shape)


class Block:
    """x (B·L, d_model) -> x + attention(norm_1(x)); to that, narrow(relu(widen(norm_2(x)))²) is added.

    The square makes of ReLU something as smooth as GELU, for one multiplication instead of a tanh.
    """

    def __init__(self, d_model: int, H: int, dtype: Any, rng: np.random.Generator) -> None:
        self.norm_1, self.norm_2 = LayerNorm(d_model, dtype), LayerNorm(d_model, dtype)
        self.attention = Attention(d_model, H, dtype, rng)
        self.widen, self.narrow = Dense(d_model, 4 * d_model, dtype, rng), Dense(4 * d_model, d_model, dtype, rng)

    def forward(self, x: np.ndarray, slopes: np.ndarray, B: int, cache: Any, training: bool) -> np.ndarray:
        x = x + self.attention.forward(self.norm_1.forward(x), slopes, B, cache, training)
        self.r = np.maximum(self.widen.forward(self.norm_2.forward(x)), 0)  # r (N, 4·d_model) <- relu(widen(norm_2(x)))
        return x + self.narrow.forward(self.r * self.r)

    def backward(self, grad_x: np.ndarray, B: int) -> np.ndarray:
        # forward: x = x + narrow(r * r), where r = relu(widen(norm_2(x))): the gradient goes round all that and through it
        grad_a = 2 * self.r * self.narrow.backward(grad_x)  # r is 0 where relu is flat
        grad_x = grad_x + self.norm_2.backward(self.widen.backward(grad_a))
        # forward: x = x + attention(norm_1(x))
        return grad_x + self.norm_1.backward(self.attention.backward(grad_x, B))


class Transformer:
    """Tokens (B, L) -> logits (B·L, V) of the character that follows each.

    Positions enter as a bias on the scores that grows with the distance, -slope · (i - j), with a slope for each head
    (Press et al., "Train Short, Test Long", 2022): it needs no training, and text may grow longer than a training window.
    """

    def __init__(self, V: int, rng: np.random.Generator, d_model: int = 128, H: int = 4, num_blocks: int = 4,
                 dtype: Any = np.float32) -> None:
        self.H, self.D, self.dtype = H, d_model // H, dtype
        self.embedding = Embedding(V, d_model, dtype, rng)
        self.blocks = [Block(d_model, H, dtype, rng) for _ in range(num_blocks)]
        self.norm = LayerNorm(d_model, dtype)
        self.head = Dense(d_model, V, dtype, rng)
        for block in self.blocks:  # what the blocks add to x starts small, whatever their number
            for W in (block.attention.params["W_O"], block.narrow.params["W"]):
                W /= math.sqrt(2 * num_blocks)
        self.slopes = (2.0 ** -np.linspace(0, 6, H)).astype(dtype)  # 1 ... 1/64

    def layers(self) -> dict[str, Any]:
        """Name -> layer, for all layers with weights."""
        parts = ("norm_1", "attention", "norm_2", "widen", "narrow")
        inside = {f"{i}.{part}": getattr(block, part) for i, block in enumerate(self.blocks) for part in parts}
        return {"embedding": self.embedding, **inside, "norm": self.norm, "head": self.head}

    def params(self) -> dict[str, np.ndarray]:
        """Name -> weights, the arrays themselves."""
        return {f"{layer}.{name}": p for layer, found in self.layers().items() for name, p in found.params.items()}

    def grads(self) -> dict[str, np.ndarray]:
        """Name of the weights -> their gradient from the last backward."""
        return {f"{layer}.{name}": g for layer, found in self.layers().items() for name, g in found.grads.items()}

    def forward(self, tokens: np.ndarray, caches: list[Any] | None = None, training: bool = True) -> np.ndarray:
        """With caches, tokens are those that follow what the caches hold."""
        self.B = len(tokens)
        x = self.embedding.forward(tokens.ravel())  # (B·L, d_model)
        for i, block in enumerate(self.blocks):
            x = block.forward(x, self.slopes, self.B, caches[i] if caches else None, training)
        return self.head.forward(self.norm.forward(x))

    def backward(self, grad_logits: np.ndarray) -> None:
        grad_x = self.norm.backward(self.head.backward(grad_logits))
        for block in reversed(self.blocks):
            grad_x = block.backward(grad_x, self.B)
        self.embedding.backward(grad_x)


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean of -log p(target) over the rows, in nats, and its gradient with respect to the logits (N, V)."""
    rows = np.arange(len(targets))
    shifted = logits - logits.max(axis=1, keepdims=True)
    p = np.exp(shifted)
    total = p.sum(axis=1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) - shifted[rows, targets]))
    # forward: loss = mean(log(sum(exp(logits))) - logits[target]), so the gradient is (softmax - one_hot) / N
    p /= total
    p[rows, targets] -= 1
    p /= len(targets)
    return loss, p


# ---------------------------------------------------------------------------------------------------------- training


class Adam:
    """Steps along running means of the gradients over the roots of running means of their squares; matrices decay."""

    def __init__(self, params: dict[str, np.ndarray]) -> None:
        self.params, self.steps = params, 0
        self.mean = {name: np.zeros_like(p) for name, p in params.items()}
        self.square = {name: np.zeros_like(p) for name, p in params.items()}

    def step(self, grads: dict[str, np.ndarray], rate: float, beta_1: float = 0.9, beta_2: float = 0.99) -> None:
        self.steps += 1
        correction = math.sqrt(1 - beta_2**self.steps) / (1 - beta_1**self.steps)  # the means start at 0
        for name, p in self.params.items():
            g, mean, square = grads[name], self.mean[name], self.square[name]
            mean += (1 - beta_1) * (g - mean)
            square += (1 - beta_2) * (g * g - square)
            p -= rate * correction * mean / (np.sqrt(square) + 1e-8)
            if p.ndim == 2:
                p *= 1 - rate * DECAY


def windows(text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (B, CONTEXT) that begin at the starts, and for each the one that follows it."""
    found = text[starts[:, None] + np.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


def train(model: Transformer, text: np.ndarray, rng: np.random.Generator, seconds: float,
          steps: int | None = None) -> Iterator[tuple[float, float]]:
    """Adam on random windows for so many seconds, or steps if given; after each step (part of it done, loss)."""
    adam, began, done = Adam(model.params()), time.perf_counter(), 0.0
    while done < 1:
        tokens, targets = windows(text, rng.integers(0, len(text) - CONTEXT, BATCH))
        loss, grad_logits = cross_entropy(model.forward(tokens), targets.ravel())
        model.backward(grad_logits)
        # The step length rises for a short while, then falls to 0 at the end.
        adam.step(model.grads(), PEAK_RATE * min(1, (done + 0.001) / WARMUP) * (1 - done))
        done = min(1.0, adam.steps / steps if steps else (time.perf_counter() - began) / seconds)
        yield done, loss


def evaluate(model: Transformer, text: np.ndarray, first: int, count: int, every: int = 1) -> float:
    """Nats per character of text[first : first + count], each predicted from HALF + 1 to CONTEXT characters before it.

    HALF divides count; of the stretches of HALF characters one in `every` is looked at.
    """
    starts, total = np.arange(first, first + count, every * HALF) - HALF - 1, 0.0
    for some in np.split(starts, range(32, len(starts), 32)):
        tokens, targets = windows(text, some)
        logits = model.forward(tokens, training=False).reshape(len(some), CONTEXT, -1)[:, HALF:]
        total += len(some) * cross_entropy(logits.reshape(-1, logits.shape[2]), targets[:, HALF:].ravel())[0]
    return total / len(starts)


def bigram(text: np.ndarray, V: int, smoothing: float) -> np.ndarray:
    """(V, V): the probability of each character after each; `smoothing` is added to every count."""
    counts = np.bincount(text[:-1] * V + text[1:], minlength=V * V).reshape(V, V) + smoothing
    return counts / counts.sum(axis=1, keepdims=True)


def bigram_loss(text: np.ndarray, V: int, first: int, count: int) -> float:
    """As `evaluate`, of a bigram model of text[:first]; the last tenth of that chooses the smoothing."""

    def loss(known: int, end: int, smoothing: float) -> float:
        return float(-np.log(bigram(text[:known], V, smoothing)[text[known - 1 : end - 1], text[known:end]]).mean())

    best = min((1.0, 0.3, 0.1, 0.03, 0.01), key=lambda smoothing: loss(first * 9 // 10, first, smoothing))
    return loss(first, first + count, best)


# ----------------------------------------------------------------------------------------------------------- writing


def draw(logits: np.ndarray, temperature: float, uniform: float) -> int:
    """The character at `uniform` (0 to 1) of softmax(logits / temperature) summed up; at temperature 0 the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    summed = np.cumsum(np.exp((logits - logits.max()).astype(np.float64) / temperature))
    return int(np.searchsorted(summed, uniform * summed[-1], side="right"))


def write(model: Transformer, prompt: np.ndarray, uniforms: np.ndarray, temperature: float, cached: bool) -> np.ndarray:
    """The prompt (P,), then a character for each of the uniforms: cached or not, the same but for ties within rounding."""
    text = np.concatenate([prompt, np.zeros(len(uniforms), prompt.dtype)])
    caches, known = None, 0
    if cached:
        caches = [fastmha.KVCache(1, model.H, model.D, capacity=len(text), dtype=model.dtype) for _ in model.blocks]
    for end, uniform in enumerate(uniforms, len(prompt)):
        logits = model.forward(text[None, known:end], caches, training=False)
        text[end] = draw(logits[-1], temperature, uniform)
        known = end if cached else 0
    return text


def load_text() -> tuple[np.ndarray, str]:
    """Tokens of the text, and the alphabet that they index."""
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics[name].strip() for name in sorted(topics)).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs))  # else parts of the held-out text would be in the training part too
    alphabet, tokens = np.unique(np.array(list(text)), return_inverse=True)
    return tokens, "".join(alphabet)


# ------------------------------------------------------------------------------------------------------ command line


def number(text: str, kind: Callable[[str], Any], least: float) -> Any:
    """For argparse: a finite number of at least `least`."""
    with suppress(ValueError):
        if least <= (value := kind(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"must be a{' whole' * (kind is int)} number of at least {least}, got {text!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a small transformer on Python's own documentation; let it write.")
    add, positive = parser.add_argument, partial(number, kind=int, least=1)
    add("--seconds", type=partial(number, kind=float, least=0.1), default=120.0, help="of training (default: %(default)s)")
    add("--steps", type=positive, help="train for so many steps instead")
    add("--seed", type=partial(number, kind=int, least=0), default=0, help="of everything random (default: %(default)s)")
    add("--prompt", default="The ", help="what the writing begins with (default: %(default)r)")
    add("--length", type=positive, default=600, help="characters to write (default: %(default)s)")
    add("--temperature", type=partial(number, kind=float, least=0), default=0.6,
        help="of the draws; 0: always the likeliest character (default: %(default)s)")
    add("--threads", type=positive, help="threads of fastmha; NumPy's products follow the setting of its BLAS")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("rich") is None:
        print(f"This example needs the package rich, which is not installed: {INSTALL} provides it.", file=sys.stderr)
        return 2
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    text, alphabet = load_text()
    if not options.prompt or not set(options.prompt) <= set(alphabet):
        parser.error(f"argument --prompt: must be one or more of the characters {alphabet!r}, got {options.prompt!r}")
    fastmha.set_num_threads(options.threads)
    rng, V, count = np.random.default_rng(options.seed), len(alphabet), len(text) // 10 // HALF * HALF
    first = len(text) - count
    model = Transformer(V, rng)
    print(f"text       {first} characters to train on, the last {count} held out, alphabet of {V}")
    print(f"model      {sum(p.size for p in model.params().values())} weights, {len(model.blocks)} blocks of {model.H} heads")

    print("           part   training loss   held-out loss (of a sample), nats per character")
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        bar, steps, reported, losses = progress.add_task("", total=1.0), 0, 0, []
        for done, loss in train(model, text[:first], rng, options.seconds, options.steps):
            steps += 1
            losses.append(loss)
            progress.update(bar, completed=done)
            if int(done * REPORTS) > reported:
                reported, held = int(done * REPORTS), evaluate(model, text, first, count, SAMPLE)
                progress.print(f"          {reported / REPORTS:5.0%}   {np.mean(losses):13.3f}   {held:13.3f}", highlight=False)
                losses.clear()
    ours, pairs = evaluate(model, text, first, count), bigram_loss(text, V, first, count)
    below = ours < pairs
    print(f"held out   {ours:.3f} nats ({ours / math.log(2):.3f} bits) per character after {steps} steps")
    print(f"bigram     {pairs:.3f} nats ({pairs / math.log(2):.3f} bits): the model is {'' if below else 'NOT '}below")

    prompt, uniforms = np.array([alphabet.index(character) for character in options.prompt]), rng.random(options.length)
    written = []
    for cached, name in ((True, "with the cache"), (False, "without it")):
        began = time.perf_counter()
        tokens = write(model, prompt, uniforms, options.temperature, cached)
        seconds = time.perf_counter() - began
        written.append("".join(alphabet[token] for token in tokens))
        if cached:
            print(f"\n{written[0]}\n")
        print(f"{name:14} {options.length / seconds:7.0f} characters per second")
    same = written[0] == written[1]
    print(f"the two texts are {'' if same else 'NOT '}identical")
    return 0 if below and same else 1


if __name__ == "__main__":
    sys.exit(main())
