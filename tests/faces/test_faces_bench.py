"""The script benches/faces.py: its arms, on tiny sizes; no speed."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason='needs transformers: pip install "fastmha[transformers]"')
sys.path.append(str(Path(__file__).resolve().parents[2] / "benches"))

import faces
import models
from findings import agree

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("name", faces.MODELS)
def test_implementations_give_the_same(name, monkeypatch):
    monkeypatch.setitem(faces.MODELS, name, faces.MODELS[name] | {"hidden_size": 64, "head_dim": 8, "intermediate_size": 32})
    arms = [x for x in faces.IMPLEMENTATIONS if (name, x) not in faces.REFUSED]
    results = {x: models.Arm(faces.make(x, {"model": name, "L": 24}, 1)).first[0] for x in arms}
    assert results["fastmha"].shape == (1, 24, 64)
    for x in arms[1:]:
        agree(f"{name} {x}", results[x], results["fastmha"], "float32")


def test_what_transformers_refuses_is_refused(monkeypatch):
    """Else the table lacks a column that could be had."""
    for name, implementation in faces.REFUSED:
        with pytest.raises(ValueError, match=r"(?i)sdpa|scaled_dot_product"):
            models.Arm(faces.make(implementation, {"model": name, "L": 4}, 1))


def test_both_ways_load_the_same_weights(tmp_path):
    pytest.importorskip("safetensors", reason='needs safetensors: pip install "fastmha[weights]"')
    pytest.importorskip("ml_dtypes", reason='needs ml_dtypes: pip install "fastmha[bfloat16]"')
    faces.write_layers(tmp_path / "layers.safetensors", 64)
    of = {"file": str(tmp_path / "layers.safetensors"), "d_model": 64}
    for own, other in zip(*(faces.load(x, of, 1)() for x in ("fastmha", "whole file")), strict=True):
        assert own.any()
        assert np.array_equal(own, other)


def test_tiny_calls(capsys):
    assert faces.main(["--only", "calls", "--seconds", "0.01"]) in (0, 1)
    assert "fastmha.torch beyond fastmha.attention" in capsys.readouterr().out
