"""Train a torch model, unchanged, with PyTorch's attention and with fastmha's, and compare losses and seconds per step.

    pip install "fastmha[transformers]"
    python examples/train_torch_model.py
    python examples/train_torch_model.py --model t5 --steps 20 --length 512

``encoder``: a `torch.nn.TransformerEncoder` that predicts the next character, first as it is, then inside
``fastmha.torch.patch()``. ``t5``: a small T5 of transformers that restores the rest of a text from its beginning, with
``attn_implementation="eager"`` and ``"fastmha"``: its attention has a bias that is learned. Weights, windows of text and dropout
(none) are the same both times, so that losses differ by rounding alone.

The text is the language reference that Python itself ships (``pydoc_data.topics``). Exit status: 0; 1 if a loss differs by more
than 1e-4; 2 if the arguments are wrong or a package is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

INSTALL = 'pip install "fastmha[transformers]"'
MOST_APART = 1e-4
WIDTH, HEADS, LAYERS = 128, 4, 2

try:
    import torch
    from torch import Tensor, nn

    import fastmha
    import fastmha.torch
except ImportError as error:
    print(f"{error}\nThis example needs: {INSTALL}", file=sys.stderr)
    sys.exit(2)


def text() -> tuple[Tensor, int]:
    """The characters of the language reference as numbers, and how many different ones there are."""
    from pydoc_data.topics import topics

    characters = "\n\n".join(topics.values())
    alphabet = {c: i for i, c in enumerate(sorted(set(characters)))}
    return torch.tensor([alphabet[c] for c in characters]), len(alphabet)


def windows(tokens: Tensor, batch: int, length: int, steps: int) -> Iterator[Tensor]:
    """(batch, length + 1) pieces of the text, the same at every run."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length - 1, (batch,), generator=generator)
        yield torch.stack([tokens[i : i + length + 1] for i in starts.tolist()])


class NextCharacter(nn.Module):
    """Causal `nn.TransformerEncoder` on characters and positions."""

    def __init__(self, alphabet: int, length: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(alphabet, WIDTH), nn.Embedding(length, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, alphabet)

    def loss(self, piece: Tensor) -> Tensor:
        tokens, targets = piece[:, :-1], piece[:, 1:]
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.out(self.encoder(x, mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def encoder(alphabet: int, length: int, ours: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor], AbstractContextManager[Any]]:
    model = NextCharacter(alphabet, length)
    return model, model.loss, fastmha.torch.patch() if ours else nullcontext()


def t5(alphabet: int, length: int, ours: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor], AbstractContextManager[Any]]:
    try:
        import transformers

        import fastmha.transformers
    except ImportError as error:
        print(f"{error}\nThis model needs: {INSTALL}", file=sys.stderr)
        sys.exit(2)
    fastmha.transformers.register()
    transformers.logging.set_verbosity_error()
    config = transformers.T5Config(
        vocab_size=alphabet + 1, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_layers=LAYERS, num_heads=HEADS,
        dropout_rate=0.0, decoder_start_token_id=alphabet, pad_token_id=alphabet)  # fmt: skip
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="fastmha" if ours else "eager")

    def loss(piece: Tensor) -> Tensor:
        half = piece.shape[1] // 2
        return model(input_ids=piece[:, :half], labels=piece[:, half:].contiguous()).loss

    return model, loss, nullcontext()


MODELS = {"encoder": encoder, "t5": t5}


def train(make: Callable[..., Any], options: argparse.Namespace, ours: bool) -> tuple[list[float], float]:
    """Losses of all steps, and the least seconds of one."""
    tokens, alphabet = text()
    torch.manual_seed(0)
    model, loss_of, context = make(alphabet, options.length, ours)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    losses, best = [], float("inf")
    with context:
        for piece in windows(tokens, options.batch, options.length, options.steps):
            start = time.perf_counter()
            adam.zero_grad()
            loss = loss_of(piece)
            loss.backward()
            adam.step()
            losses.append(loss.item())
            best = min(best, time.perf_counter() - start)
    return losses, best


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="encoder", help="what to train (default: %(default)s)")
    for name, default, what in (("steps", 30, "of training"), ("length", 256, "characters of a window"),
                                ("batch", 8, "windows of a step"), ("threads", 1, "of both libraries")):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")
    options = parser.parse_args(arguments)
    if min(options.steps, options.length, options.batch, options.threads) < 1:
        parser.error("steps, length, batch and threads must be at least 1")
    torch.set_num_threads(options.threads)
    fastmha.set_num_threads(options.threads)
    (theirs, their_seconds), (mine, my_seconds) = (train(MODELS[options.model], options, ours) for ours in (False, True))
    apart = max(abs(a - b) for a, b in zip(theirs, mine, strict=True))
    print(f"{options.model}, {options.batch} windows of {options.length} characters, {options.steps} steps, "
          f"{options.threads} threads")
    print(f"loss of the first and the last step   {theirs[0]:.4f}  {theirs[-1]:.4f}")
    print(f"losses apart by at most               {apart:.1e}")
    print(f"a step with PyTorch's attention       {1e3 * their_seconds:.1f} ms")
    print(f"a step with fastmha's                 {1e3 * my_seconds:.1f} ms")
    return 0 if apart <= MOST_APART else 1


if __name__ == "__main__":
    sys.exit(main())
