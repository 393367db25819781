"""The example train_torch_model.py: the same losses with PyTorch's attention and with fastmha's."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason='the example needs torch: pip install "fastmha[torch]"')
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_torch_model

    yield train_torch_model
    sys.modules.pop("train_torch_model")


@pytest.mark.parametrize("model", ["encoder", "t5"])
def test_losses_are_the_same(example, model, capsys):
    if model == "t5":
        pytest.importorskip("transformers", reason='the model needs transformers: pip install "fastmha[transformers]"')
    assert example.main(["--model", model, "--steps", "3", "--length", "33", "--batch", "2"]) == 0
    printed = capsys.readouterr().out
    first, last = map(float, re.search(r"first and the last step +(\S+) +(\S+)", printed).groups())
    assert last < first
    assert float(re.search(r"apart by at most +(\S+)", printed)[1]) < 1e-5


def test_losses_apart_are_an_error(example, monkeypatch):
    """With an attention that does nothing."""
    import fastmha.torch

    monkeypatch.setattr(fastmha.torch, "attend", lambda q, k, v, *rules: 0 * q)
    assert example.main(["--steps", "2", "--length", "16", "--batch", "2"]) == 1


def test_numbers_below_one_are_an_error(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["--steps", "0"])
    assert "must be at least 1" in capsys.readouterr().err
