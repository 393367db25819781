"""The settings that depend on the machine: from which sizes on which way of computing pays, one table per instruction set.

`DEFAULTS` are chosen for the worst of the machines seen; FASTMHA_TUNING names a file of ``fastmha tune``, of settings measured
on the CPU at hand. It is read once, so that what a call does remains a function of shapes, dtype and instruction set. What has to
be known when the kernels are compiled is in csrc/tuning.h.
"""
from __future__ import annotations

import json
import os
import platform
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from fastmha import _core, validate

VARIABLE = "FASTMHA_TUNING"
FORMAT = 3
TILE = (16, 32)             # rows, and keys or terms, of one matrix tile: no setting of tiles is below, but for rows of products
_MOST = 2**62
NEVER = 2**50               # no lengths, and no bytes of keys, are so many
_MOST_BYTES = 1 << 20       # of a file: hundreds of times what there is to say


@dataclass(frozen=True, eq=False)      # compared by identity: a key of caches that costs nothing
class Tuning:
    """The settings of one instruction set.

    Attributes
    ----------
    decode, decode_float64, decode_half : tuple of (rows, bytes of a key, bytes of all keys)
        "auto" decodes up to so many query rows per key/value head, from so many bytes on, those of the numbers computed with; the
        first step for the rows counts, and NEVER bytes of all keys leave its rows to others. In float32; in float64, whose rows
        fill twice as much of the vectors of "tiled"; and of keys of half precision, which "tiled" converts before it multiplies.
    one_part_forward, one_part_backward, two_parts_forward, two_parts_backward : (rows, keys)
        Query rows per key/value head, and keys, from which on attention in so many bfloat16 parts pays on matrix tiles.
    one_part_products, two_parts_products : (rows, terms)
        Rows, and columns and terms, of a product in so many parts from which on matrix tiles pay.
    contiguous : (tokens, bytes of a token and head, bytes of a head)
        From where on "auto" has projections write heads contiguous.
    attention_by_blas : bool
        Whether "auto" takes "blas" and not "tiled" where neither "decode" nor matrix tiles serve.
    products_by_blas : bool
        Whether projections are products of BLAS. For any number of rows: a row's bits must not depend on those beside it.
    """

    decode: tuple[tuple[int, int, int], ...]
    decode_float64: tuple[tuple[int, int, int], ...]
    decode_half: tuple[tuple[int, int, int], ...]
    one_part_forward: tuple[int, int]
    one_part_backward: tuple[int, int]
    two_parts_forward: tuple[int, int]
    two_parts_backward: tuple[int, int]
    one_part_products: tuple[int, int]
    two_parts_products: tuple[int, int]
    contiguous: tuple[int, int, int]
    attention_by_blas: bool
    products_by_blas: bool

    def least_on_tiles(self, parts: int, of: Literal["forward", "backward", "products"]) -> tuple[int, int]:
        """From which sizes on attention or products in so many parts pay on matrix tiles; NEVER: they do not."""
        least: tuple[int, int] = getattr(self, _ON_TILES[parts, of])
        return least

    @lru_cache(maxsize=1024)        # noqa: B019  (of a few settings, which live as long as the process)
    def decode_least(self, rows: int, itemsize: int, stored: int) -> tuple[int, int] | None:
        """Bytes of a key and of all keys from which on "auto" decodes so many query rows, computed with items of so many bytes
        where keys have so many `stored`; None: it never does."""
        for most, of_key, of_keys in self.decode_half if stored == 2 else self.decode_float64 if itemsize == 8 else self.decode:
            if rows <= most:
                return (of_key, of_keys) if of_keys < NEVER else None
        return None


_FUSED = Tuning(
    # below, what an item costs before its arithmetic, the horizontal sums of each score and the merging exceed the lanes that
    # "tiled" leaves empty; of more than 4 rows it goes through the keys a second time
    decode=((1, 0, 0), (2, 32, 256), (4, 64, 1536), (8, 256, NEVER)),
    decode_float64=((1, 0, 0), (2, 64, 1536), (3, 512, 4096), (4, 256, 1024 * 1024)),
    decode_half=((1, 0, 0), (2, 32, 256), (4, 64, 1536), (5, 256, 2048), (6, 512, 4096), (8, 256, 1024 * 1024)),
    # backward and two parts prepare more before the first product
    one_part_forward=(24, 32), one_part_backward=(48, 48), two_parts_forward=(64, 64), two_parts_backward=(96, 96),
    one_part_products=TILE, two_parts_products=TILE,        # a whole tile is enough
    contiguous=(256, 128, 64 * 1024),       # a product for each head is neither small nor narrow, and heads leave the first cache
    attention_by_blas=False, products_by_blas=False,
)
# more lanes are empty; of up to 12 rows of float32 "tiled" fills them with terms
_WIDE = replace(_FUSED, decode=((1, 0, 0), (2, 32, 192), (3, 32, 768), (4, 32, 1024), (8, 256, NEVER)),
                decode_float64=((1, 0, 0), (2, 32, 1024), (3, 128, 4096), (4, 256, 4096)),
                decode_half=((1, 0, 0), (2, 32, 192), (3, 32, 768), (4, 32, 1024), (5, 256, 3072), (6, 128, 4096), (8, 256, 4096),
                             (9, 512, 24 * 1024)))
_BASELINE_DECODE = ((1, 64, 0), (2, 128, 2048), (4, 128, 16 * 1024), (8, 256, 64 * 1024), (16, 512, 2 * 1024 * 1024))
_BASELINE = replace(_FUSED, attention_by_blas=not _core.BASELINE_FUSES,     # BLAS chooses its kernels by the CPU, and may have
                    products_by_blas=not _core.BASELINE_FUSES,              # fused multiply-add there
                    decode=_BASELINE_DECODE, decode_half=_BASELINE_DECODE,
                    decode_float64=((1, 64, 0), (2, 128, 16 * 1024), (4, 256, 64 * 1024), (8, 512, 2 * 1024 * 1024)))
DEFAULTS: Mapping[str, Tuning] = MappingProxyType({
    "baseline": _BASELINE,
    "avx2": _FUSED,             # of vectors with fused multiply-add the worst of the machines seen decided
    "avx512": _WIDE,
    # twice the rate of float32, so that the three products of two parts take longer than one of float32
    "avx512bf16": replace(_WIDE, two_parts_forward=(NEVER, NEVER), two_parts_backward=(NEVER, NEVER),
                          two_parts_products=(NEVER, NEVER), one_part_products=(6, TILE[1])),       # its tiles are vectors
    "amx": _WIDE,               # its vectors are those of AVX-512
    "amx-emulated": _BASELINE,  # for tests; its vectors are the baseline's
})
_ON_TILES: Mapping[tuple[int, str], str] = MappingProxyType({(parts, of): f"{name}_{of}" for parts, name in
                                                             ((1, "one_part"), (2, "two_parts"))
                                                             for of in ("forward", "backward", "products")})
OF_PRODUCTS = ("one_part_products", "two_parts_products")
OF_DECODE = ("decode", "decode_float64", "decode_half")
OF_TILES = ("one_part_forward", "one_part_backward", "two_parts_forward", "two_parts_backward", *OF_PRODUCTS)
# What the numbers of a setting are, each with the least that is taken.
_NUMBERS: Mapping[str, tuple[tuple[str, int], ...]] = MappingProxyType({
    **dict.fromkeys(OF_DECODE, (("rows", 1), ("bytes of a key", 0), ("bytes of all keys", 0))),
    **{name: (("rows", 1 if name in OF_PRODUCTS else TILE[0]), ("terms" if name in OF_PRODUCTS else "keys", TILE[1]))
       for name in OF_TILES},
    "contiguous": (("tokens", 1), ("bytes of a token and head", 1), ("bytes of a head", 1)),
})
_lock = threading.Lock()
_tables: Mapping[str, Tuning] | None = None     # read once
_source: str | None = None                      # the file whose settings are in use
_forced: Tuning | None = None                   # by `using`


def current() -> Tuning:
    """The settings of the instruction set in use.

    Raises
    ------
    ValueError
        If FASTMHA_TUNING names a file that does not hold settings; the message names the file, the key and what came.
    """
    if _forced is not None:
        return _forced
    return (_tables if _tables is not None else _read_once())[_core.selected_isa()[0]]


def source() -> str | None:
    """The file whose settings are in use; None: the defaults are."""
    current()
    return _source


@contextmanager
def using(tuning: Tuning) -> Iterator[None]:
    """Other settings for all instruction sets and threads of the process meanwhile: to measure and test on both sides of one."""
    global _forced
    before, _forced = _forced, tuning
    try:
        yield
    finally:
        _forced = before


def cpu_name() -> str:
    """What the CPU calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _read_once() -> Mapping[str, Tuning]:
    global _tables, _source
    with _lock:
        if _tables is None:
            path, found = os.environ.get(VARIABLE), DEFAULTS
            if path:
                cpu, settings = read(Path(path), VARIABLE)
                if cpu == cpu_name():
                    found, _source = MappingProxyType({**DEFAULTS, **settings}), path
                else:   # one file for all machines of a cluster is no reason to stop
                    warnings.warn(f"{VARIABLE}: {path} was measured on {validate.short(cpu)}, this is {cpu_name()!r}: the "
                                  "defaults are used", RuntimeWarning, stacklevel=2)
            _tables = found
        return _tables


# ----------------------------------------------------------------------------------------------------------- files

def text_of(cpu: str, settings: Mapping[str, Tuning]) -> str:
    """What a file says of settings by the names of instruction sets."""
    found = {isa: asdict(of) for isa, of in settings.items()}
    return json.dumps({"format": FORMAT, "cpu": cpu, "settings": found}, indent=1) + "\n"


def read(path: Path, of: str) -> tuple[str, dict[str, Tuning]]:
    """The CPU that a file was measured on, and its settings by the names of instruction sets. `of` opens the messages.

    Raises
    ------
    ValueError
        If anything in it is not as ``fastmha tune`` writes it.
    """
    where = f"{of}: {path}"
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:      # a name with a zero in it
        raise ValueError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{where} must be a file of `fastmha tune`, got more than {_MOST_BYTES} bytes")
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON: {error}") from None
    top = _object(where, "the file", found, ("format", "cpu", "settings"))
    if type(top["format"]) is not int or top["format"] != FORMAT:
        raise _wrong(where, "format", f"{FORMAT}", top["format"])
    if type(top["cpu"]) is not str:
        raise _wrong(where, "cpu", "the name of a CPU", top["cpu"])
    if type(top["settings"]) is not dict:
        raise _wrong(where, "settings", "an object", top["settings"])
    return top["cpu"], {isa: _tuning(where, isa, values) for isa, values in top["settings"].items()}


def _tuning(where: str, isa: str, values: object) -> Tuning:
    if isa not in DEFAULTS:
        raise ValueError(f"{where}: a key of settings must be one of {', '.join(DEFAULTS)}, got {validate.short(isa)}")
    names = tuple(field.name for field in fields(Tuning))
    given = _object(where, f"settings.{isa}", values, names)
    taken: dict[str, Any] = {}
    for name, value in given.items():
        key = f"settings.{isa}.{name}"
        if name in OF_DECODE:
            taken[name] = _steps(where, key, value)
        elif name in _NUMBERS:
            taken[name] = _numbers(where, key, value, _NUMBERS[name])
        elif type(value) is bool:
            taken[name] = value
        else:
            raise _wrong(where, key, "true or false", value)
    return Tuning(**taken)


def _steps(where: str, key: str, value: object) -> tuple[tuple[int, ...], ...]:
    if type(value) is not list:
        raise _wrong(where, key, "a list of steps", value)
    steps = tuple(_numbers(where, f"{key}[{i}]", step, _NUMBERS[OF_DECODE[0]]) for i, step in enumerate(value))
    rows = [step[0] for step in steps]
    if rows != sorted(set(rows)):
        raise _wrong(where, key, "steps of ascending rows", value)
    return steps


def _numbers(where: str, key: str, value: object, numbers: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    if type(value) is not list or len(value) != len(numbers):
        raise _wrong(where, key, f"[{', '.join(name for name, _ in numbers)}]", value)
    for number, (name, least) in zip(value, numbers):
        if type(number) is not int or not least <= number <= _MOST:
            raise _wrong(where, f"{key} ({name})", f"an integer of at least {least}", number)
    return tuple(value)


def _object(where: str, key: str, value: object, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        got = f"an object with {', '.join(value) or 'nothing'}" if isinstance(value, dict) else validate.short(value)
        raise ValueError(f"{where}: {key} must be an object with {', '.join(names)}, got {got}")
    return value


def _wrong(where: str, key: str, wanted: str, got: object) -> ValueError:
    return ValueError(f"{where}: {key} must be {wanted}, got {validate.short(got)}")
