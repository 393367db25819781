"""The script benches/peers.py: its arms, on tiny sizes; no speed."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benches"))

import models
import peers
from findings import agree

import fastmha
from fastmha import reference

pytestmark = pytest.mark.filterwarnings("default")
TINY = {"B": 2, "H": 4, "Hkv": 4, "Lq": 9, "Lk": 9, "D": 8}
CASES = {
    **{name: of | TINY for name, of in peers.ATTENTION.items()},
    **{name: of | TINY | {"Hkv": 2, "Lq": 1, "Lk": 30} for name, of in peers.DECODE.items()},
    **{name: of | {"B": 2, "L": 9, "d_model": 32, "H": 4} for name, of in peers.LAYERS.items()},
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(peers, "CACHED", 100_000)
    before = fastmha.get_num_threads()
    yield
    fastmha.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_the_libraries_that_are_here_give_the_same(name):
    of = CASES[name]
    first, *others = (models.Arm(peers.made(library, of, 1)).first for library in peers.libraries(of))
    assert len(first) == (4 if of["gradients"] else 1)
    for results in others:
        for own, other in zip(first, results, strict=True):
            assert own.shape == np.shape(other)
            agree(name, np.asarray(other, np.float64), own.astype(np.float64), "float32")


def test_attention_is_that_of_the_reference():
    of = CASES["12 heads of 1024 tokens, causal"]
    arrays, _ = peers.operands(of)
    wanted = reference.attention(*(x.astype(np.float64) for x in arrays[0]), is_causal=True)
    agree("numpy", models.Arm(peers.made("numpy", of, 1)).first[0].astype(np.float64), wanted, "float32")
