"""``fastmha tune``: measures the settings of `fastmha.tuning` on this machine, and writes the file that FASTMHA_TUNING reads.

For each setting both ways of computing take turns at shapes on either side of where the default puts it, with one thread, and the
best time of each counts. Of the values that a setting could have, the one with the least time over all these shapes (the
geometric mean) is taken, where it pays by more than `WORTH`; else the default stays.
"""
from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastmha import _core, algorithms, functional, multihead, tuning
from fastmha.study import words
from fastmha.study.folder import replace_text
from fastmha.study.trial import interleave
from fastmha.tuning import DEFAULTS, NEVER, OF_DECODE, OF_TILES, TILE, Tuning

DESCRIPTION = "Measure from which sizes on each way of computing pays on this machine, with one thread, in under five minutes."
failed = partial(words.failed, command="tune")
WORTH = 1.05            # the time with the default over that with another value, from which on that is taken
ON_VECTORS: dict[str, Any] = {"num_threads": 1, "precision": "highest"}      # whatever FASTMHA_PRECISION permits
Shape = tuple[int, ...]
Arms = tuple[Callable[[], object], Callable[[], object]]       # of the way below the crossover, and of that above


@dataclass(frozen=True)
class Setting:
    """A setting and how it is measured."""

    name: str
    default: Any
    others: Sequence[Any]                       # what else it could be
    shapes: Sequence[Shape]
    arms: Callable[..., Arms]                   # of the numbers of a shape
    above: Callable[[Any, Shape], bool]         # whether a value puts a shape above the crossover
    put: Callable[[Tuning, Any], Tuning]


@dataclass(frozen=True)
class Verdict:
    """What was measured of a setting: the value to take, and the time with the default over that with the best value."""

    setting: Setting
    value: Any
    pays: float


def judged(setting: Setting, times: Sequence[tuple[float, float]]) -> Verdict:
    """The verdict on the seconds of both arms at each shape."""
    def cost(value: Any) -> float:
        return math.fsum(math.log(pair[setting.above(value, shape)]) for shape, pair in zip(setting.shapes, times))

    best = min([setting.default, *setting.others], key=cost)        # the first of equals: the default before all others
    pays = math.exp((cost(setting.default) - cost(best)) / len(times))
    return Verdict(setting, best if pays > WORTH else setting.default, pays)


# ------------------------------------------------------------------------------------------------------- the settings

def _random(*shape: int, dtype: type[np.floating] = np.float32) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)


def _decode_arms(rows: int, D: int, Lk: int, other: str, dtype: type[np.floating]) -> Arms:
    q, k, v = (_random(1, 8, many, D, dtype=dtype) for many in (rows, Lk, Lk))
    below, above = (partial(functional.attention, q, k, v, algorithm=name, **ON_VECTORS) for name in (other, "decode"))
    return below, above


def _tile_arms(backward: bool, precision: str, rows: int, keys: int) -> Arms:
    q, k, v = _random(1, 2, rows, 64), _random(1, 2, keys, 64), _random(1, 2, keys, 64)
    given: dict[str, Any] = {"algorithm": "tiled", "num_threads": 1}
    if not backward:
        below, above = (partial(functional.attention, q, k, v, precision=name, **given) for name in ("highest", precision))
        return below, above
    out, lse = functional.attention(q, k, v, return_lse=True, **given)
    below, above = (partial(functional.attention_backward, out, q, k, v, out, lse, precision=name, **given)
                    for name in ("highest", precision))
    return below, above


def _product_tile_arms(precision: str, rows: int, terms: int) -> Arms:
    a, b, out = _random(rows, terms), _random(terms, terms), np.empty((rows, terms), np.float32)
    below, above = (partial(algorithms.product, a, b, out, 1, precision=name) for name in ("highest", precision))
    return below, above


def _layout_arms(L: int, D: int) -> Arms:
    x = _random(1, L, 512)
    modules = (multihead.MultiHeadAttention(512, 512 // D, layout=layout, precision="highest", rng=0)
               for layout in ("strided", "contiguous"))
    below, above = (partial(m.forward, x, training=False, num_threads=1) for m in modules)
    return below, above


def _attention_arms(L: int, D: int) -> Arms:
    q = _random(1, 4, L, D)
    below, above = (partial(functional.attention, q, q, q, algorithm=name, **ON_VECTORS) for name in ("tiled", "blas"))
    return below, above


def _product_arms(rows: int, terms: int) -> Arms:
    a, b, out = _random(rows, terms), _random(terms, terms), np.empty((rows, terms), np.float32)
    return partial(algorithms.own_product, a, b, out, 1), partial(algorithms.product, a, b, out, 1, blas=True)


def _reaches(least: Shape, shape: Shape) -> bool:
    return all(n >= at_least for n, at_least in zip(shape, least))


def _yes(value: bool, shape: Shape) -> bool:
    return value


def _grid(*axes: Iterable[int]) -> list[Shape]:
    """Large values first: of equal ones, those that change least."""
    return list(itertools.product(*(sorted(axis, reverse=True) for axis in axes)))


def _field(name: str) -> Callable[[Tuning, Any], Tuning]:
    return lambda tuned, value: replace(tuned, **{name: value})


def settings(default: Tuning) -> Iterator[Setting]:
    """The settings that can be measured with the kernels in use, in the order of what rests on what."""
    yield Setting("attention_by_blas", default.attention_by_blas, (not default.attention_by_blas,),
                  _grid((64, 256, 512), (32, 64, 128)), _attention_arms, _yes, _field("attention_by_blas"))
    yield Setting("products_by_blas", default.products_by_blas, (not default.products_by_blas,),
                  _grid((16, 64, 256, 1024), (256, 512)), _product_arms, _yes, _field("products_by_blas"))
    lengths, widths = (128, 256, 512, 1024), (16, 32, 64, 128)
    yield Setting("contiguous", default.contiguous, _grid(lengths, [4 * D for D in widths], (2**14, 2**16, 2**18, 2**20)),
                  _grid(lengths, widths), _layout_arms,
                  lambda least, shape: _reaches(least, (shape[0], 4 * shape[1], 4 * shape[0] * shape[1])), _field("contiguous"))
    other = "blas" if default.attention_by_blas else "tiled"
    # and the bytes of the numbers that are computed with
    of_types: tuple[tuple[type[np.floating], int], ...] = ((np.float32, 4), (np.float64, 8), (np.float16, 4))
    for name, (dtype, size) in zip(OF_DECODE, of_types):
        for i, step in enumerate(getattr(default, name)):
            yield Setting(f"{name}[{i}]", step, [(step[0], *least) for least in _grid(
                              (0, 64, 128, 256, 512), (0, 2**10, 2**11, 2**12, 2**13, 2**14, 2**15, 2**18, 2**20, NEVER))],
                          [(step[0], D, Lk) for D, Lk in _grid((8, 16, 32, 64, 128), (7, 16, 64, 256, 2048))],
                          partial(_decode_arms, other=other, dtype=dtype), partial(_decoded, size), partial(_with_step, name, i))
    if not _core.has_tiles():
        return
    of_attention, of_products = _grid((16, 24, 48, 96, 192), (32, 64, 192)), _grid((16, 32, 64, 128), (32, 64, 128, 256))
    for parts, precision in (("one_part", "medium"), ("two_parts", "high")):
        for of, shapes, arms in (("forward", of_attention, partial(_tile_arms, False)),
                                 ("backward", of_attention, partial(_tile_arms, True)),
                                 ("products", of_products, _product_tile_arms)):
            name = f"{parts}_{of}"
            yield Setting(name, getattr(default, name), [(NEVER, NEVER), *shapes], shapes, partial(arms, precision), _reaches,
                          _field(name))


def _decoded(size: int, least: tuple[int, int, int], shape: Shape) -> bool:
    return _reaches(least[1:], (size * shape[1], size * shape[1] * shape[2]))


def _with_step(name: str, i: int, tuned: Tuning, step: tuple[int, int, int]) -> Tuning:
    steps = getattr(tuned, name)
    changed: dict[str, Any] = {name: (*steps[:i], step, *steps[i + 1:])}
    return replace(tuned, **changed)


def on_tiles_always(tuned: Tuning) -> Tuning:
    """Settings with which both ways can be measured at any shape."""
    least: dict[str, Any] = dict.fromkeys(OF_TILES, TILE)
    return replace(tuned, **least)


# -------------------------------------------------------------------------------------------------------- the command

def measured(asked: Sequence[Setting], seconds: float, step: Callable[[str], None]) -> Iterator[Verdict]:
    """The verdict on each setting, so many seconds for each shape; `step` is told what is measured next."""
    for setting in asked:
        times = []
        for shape in setting.shapes:
            step(setting.name)
            below, above = setting.arms(*shape)
            taken = interleave({"below": below, "above": above}, seconds)
            times.append((float(taken["below"].min()), float(taken["above"].min())))
        yield judged(setting, times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isa", choices=_core.runnable_isas(), metavar="NAME",
                        help=f"instruction set (default: the one in use): {', '.join(_core.runnable_isas())}")
    parser.add_argument("--seconds", type=_seconds, default=1.0, metavar="S",
                        help="of each shape, at least five rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="write the settings there; what it holds of other instruction sets of this CPU stays")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError
    return seconds


_seconds.__name__ = "positive number of seconds"        # argparse puts it into its message


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file. Returns the exit status: 2 if the file cannot serve, 130 if interrupted."""
    before = _core.selected_isa()[0]
    isa, cpu = options.isa or before, tuning.cpu_name()
    kept: dict[str, Tuning] = {}
    try:
        if options.out is not None and options.out.exists():       # nothing else is written over
            of, kept = tuning.read(options.out, "--out")
            if of != cpu:
                return failed(f"--out: {options.out} was measured on {of!r}, this is {cpu!r}")
        elif options.out is not None and not options.out.absolute().parent.is_dir():
            return failed(f"--out: there is no folder {options.out.parent}")
    except ValueError as error:
        return failed(str(error))
    _core.select_isa(isa)
    try:
        found, verdicts = tuned(isa, options.seconds)
    except KeyboardInterrupt:
        return failed("interrupted; nothing is written", 130)
    finally:
        _core.select_isa(before)
    print(f"{cpu}, {isa} kernels, one thread; a setting changes where that pays by more than {WORTH - 1:.0%}\n")
    print(table(verdicts))
    if options.out is not None:
        try:
            replace_text(options.out, tuning.text_of(cpu, {**kept, isa: found}))
        except OSError as error:
            return failed(f"--out: cannot write {options.out}: {error.strerror}")
        print(f"\n{tuning.VARIABLE}={options.out} uses these settings")
    return 0


def tuned(isa: str, seconds: float) -> tuple[Tuning, list[Verdict]]:
    """The settings of the instruction set, which is in use, and the verdicts behind them."""
    found = DEFAULTS[isa]
    asked, verdicts = list(settings(found)), []
    with tuning.using(on_tiles_always(found)), _progress(sum(len(setting.shapes) for setting in asked)) as step:
        for verdict in measured(asked, seconds, step):
            found = verdict.setting.put(found, verdict.value)
            verdicts.append(verdict)
    return found, verdicts


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar beside the table, where what draws it is installed."""
    if importlib.util.find_spec("rich") is None:
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=steps)
        yield lambda name: progress.update(bar, advance=1, description=name)


def table(verdicts: Sequence[Verdict]) -> str:
    """A line for each setting: the default, what was measured, and the share of time that the best value saves."""
    lines = [("setting", "default", "measured", "pays")]
    lines += [(v.setting.name, _shown(v.setting.default), _shown(v.value), f"{v.pays - 1:.1%}") for v in verdicts]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def _shown(value: Any) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else ", ".join("never" if n == NEVER else str(n) for n in value)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command by itself."""
    parser = argparse.ArgumentParser(prog="fastmha tune", description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
