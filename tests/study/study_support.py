"""What tests of the study share: whether its extra is there, made-up results, a picture of each kind, questions with answers."""

import importlib.util

import pytest

from fastmha.study import __main__ as command
from fastmha.study.answer import Answer, Picture, Question, Table

EXTRA = [name for name in command.EXTRA if importlib.util.find_spec(name) is None]
needs_extra = pytest.mark.skipif(bool(EXTRA), reason=f'{", ".join(EXTRA)} not installed: pip install "fastmha[study]"')
ABOUT = {"command": "fastmha study", "date": "2025-01-02T03:04:05+00:00", "quick": True, "threads": 2,
         "machine": {"cpu": "A CPU", "cpus_usable": 2, "caches": {"L1d": 49152, "L3": 32 << 20}, "system": "Linux",
                     "architecture": "x86_64"},
         "versions": {"fastmha": "1.0", "python": "3.11"}, "kernels": {"isa": "avx2", "vector_bytes": 32}}
LIMITS = {"float32": 200e9, "float64": 100e9, "read": 20e9}
FOUND = {**ABOUT, "limits": LIMITS, "records": []}
LONG = "B1 H16/4 L512x1024 D64 causal row12288 f32 tiled"
ARMS = ("strided", "contiguous, packing included", "packed before the clock starts")


def label(row):
    return f"{LONG if row % 3 == 0 else LONG[:22]} {row}"


def heat(panels, rows, missing=True):
    columns = [str(64 << i) for i in range(7)]
    value = [[[None if missing and (p + r + c) % 9 == 4 else 0.6 * 1.12 ** ((5 * p + 3 * r + c) % 9) for c in range(7)]
              for r in range(rows)] for p in range(panels)]
    return {"title": "Strided over contiguous", "x": "length L (rows)", "y": "case",
            "shade": "time strided / time contiguous (no unit)",
            "panels": [{"title": f"tiled, part {p}", "columns": columns, "rows": [str(64 * r) for r in range(rows)],
                        "values": value[p], "texts": [["" if v is None else f"= {v:.2f}" for v in row] for row in value[p]]}
                       for p in range(panels)]}


def stacked(panels, rows):
    return {"title": "Where the time goes", "x": "time (ms)", "reference": 1.0 if panels > 1 else None,
            "bars": [{"label": ARMS[r % 2], "group": label(r // 2),
                      "low": 0.9 + r % 3, "high": 1.1 + r % 3,
                      "parts": [{"name": name, "value": 0.1 + 0.3 * ((r + i) % 3)} for i, name in enumerate(ARMS)]}
                     for r in range(rows)]}


def side(panels, rows):
    return {"title": "Strided over contiguous", "x": "time / time of strided (no unit; median of the ratios)", "reference": 1.0,
            "panels": [{"title": f"part {p}", "rows": [
                {"label": label(r), "values": [{"name": name, "value": (v := 0.5 + 0.1 * ((p + r + 3 * i) % 11)), "low": 0.95 * v,
                                                "high": 1.05 * v} for i, name in enumerate(ARMS[:1 + panels % 3])]}
                for r in range(rows)]} for p in range(panels)]}


def curves(panels, rows):
    xs = [3072 + 640 * i for i in range(rows)] if rows > 8 else [512 << i for i in range(rows)]
    return {"title": "Time over the stride", "x": "bytes from one row to the next (bytes)", "y": "time / time packed (no unit)",
            "x_log2": True, "y_log": panels > 1,
            "panels": [{"title": f"part {p}", "reference": 1.0,
                        "marks": [(xs[0], "3072"), (xs[-1], "equal at 1536")],
                        "series": [{"name": name, "x": xs, "y": (y := [1 + 0.3 * ((i + j) % 4) for j in range(rows)]),
                                    "low": [0.9 * v for v in y], "high": [1.2 * v for v in y]} for i, name in enumerate(ARMS)]}
                       for p in range(panels)]}


def roofs(panels, rows):
    return {"title": "Speed against the roofs",
            "points": [{"group": f"{ARMS[p % 3]} {p}", "dtype": dtype, "intensity": 0.5 * 1.3**r, "rate": 1e9 * (p + 1) * (r + 1)}
                       for p in range(panels) for r in range(rows) for dtype in ("float32", "float64")]}


KINDS = {"heat_maps": heat, "stacked_bars": stacked, "bars": side, "lines": curves, "roofline": roofs}

HARD = 'a|b <i>1 & 2</i> "q" x_y _z_ 2*3*4'
SOME = Table("Ratios", ["case", "GFLOP/s strided", "strided / contiguous", "faster"],
             [[LONG, "123.4", "= 1.00 ±0.02", "neither"], [HARD, "1,234", "0.93 ±0.02", "strided | not"], ["x", "–", "", ""]],
             "GFLOP/s at the median time.")
WIDE = Table("Many columns", ["case", *(f"with {n} threads" for n in range(14))],
             [[LONG, *(f"{100.25 + n} ±0.1" for n in range(14))] for _ in range(2)])


def question(answer, name="fake", trials=()):
    """A question whose answer, with its pictures, is the same or what a function makes of all results, whatever was measured."""
    class Fake(Question):
        def answered(self, found):
            return answer(found) if callable(answer) else answer

    return Fake(name, f"Title of {name}", f"Is it so, {name} & <all>?", lambda quick, threads: list(trials), None)


def full_answer(kinds=tuple(KINDS)):
    pictures = [Picture(f"{kind}_picture", f"Caption of {kind}: {HARD}", kind, KINDS[kind](1, 3)) for kind in kinds]
    return Answer(f"Short: {HARD}", "Method one.\n\nMethod two.", "Limits <here>.", [SOME, WIDE], pictures)
