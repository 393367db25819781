"""The script benches/models.py: its arms, its checks of answers, on tiny sizes; no speed."""

import argparse
from importlib.util import find_spec

import numpy as np
import pytest
from support import script

from fastmha import reference
from fastmha.study.trial import ArmsDisagreeError

models = script("benches", "models")
PACKED = {"sequences": 5, "least": 1, "most": 9, "H": 2, "D": 4}
RULES = [{"rule": rule, "B": 2, "H": 2, "L": 7, "D": 4} for rule in ("sinks", "bias gradient", "dropout")]
LAYERS = [{"layer": layer, "M": 5, "K": 12, "N": N} for layer, N in (
    ("linear", 20), ("linear gelu", 20), ("linear residual", 20), ("linear backward", 20), ("gelu", 0), ("gelu_tanh", 0),
    ("gelu backward", 0), ("layer_norm", 0), ("layer_norm residual", 0), ("layer_norm backward", 0))]  # fmt: skip


@pytest.fixture
def tiny(models, monkeypatch):
    for name, value in {"PACKED": PACKED, "RULES": RULES, "LAYERS": LAYERS, "REST": 0, "TURNS": 2}.items():
        monkeypatch.setattr(models, name, value)


def arrays(of, models):
    return [x.astype(np.float64) for x in models.rule_operands(of)]


@pytest.mark.parametrize("section", ["packed", "rules", "layers"])
def test_a_section_times_every_arm_and_says_what_it_cost(models, tiny, section, monkeypatch, capsys):
    monkeypatch.setattr(models, "has", lambda package: False)       # PyTorch is no test's need
    monkeypatch.setattr(models, "Floor", lambda low: None)
    assert models.main(["--only", section, "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    assert models.NO_TORCH in printed
    lines = {"packed": 1, "rules": len(RULES), "layers": len(LAYERS)}[section]
    assert sum(line.startswith("  ") and any(c.isdigit() for c in line) for line in printed.splitlines()[2:]) >= lines
    assert "0 floors met, 0 missed" in printed


def test_packed_and_padded_arms_give_the_same_and_what_attention_gives(models):
    lengths, (q, k, v, _) = models.packed_operands(PACKED)
    packed, padded = (make(PACKED, 1)() for make in (models.fastmha_packed, models.fastmha_padded))
    expected = reference.attention_packed(*(x.astype(np.float64) for x in (q, k, v)), lengths)
    np.testing.assert_allclose(packed[0], expected, rtol=0, atol=1e-5)
    for x, y in zip(packed, padded, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("of", RULES[:2], ids=["sinks", "bias gradient"])
def test_arms_of_the_rules_give_what_the_reference_gives(models, of):
    q, k, v, g, more = arrays(of, models)
    rules = {"sinks": more} if of["rule"] == "sinks" else {"mask": more}
    out, lse = reference.attention(q, k, v, return_lse=True, **rules)
    expected = out, *reference.attention_backward(g, q, k, v, out, lse, need_bias_grad="mask" in rules, **rules)
    makes = [models.fastmha_rule, *([models.torch_rule] if find_spec("torch") else [])]
    for make in makes:
        for x, y in zip(make(of, 1)(), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("of", LAYERS, ids=lambda of: of["layer"])
def test_arms_of_a_layer_give_the_same(models, of):
    own = models.fastmha_layer(of, 1)()
    others = []
    if of["layer"].startswith("linear") and "backward" not in of["layer"]:
        others.append(models.fastmha_layer(of, 1, packed=True)())
    if find_spec("torch"):
        others.append(models.torch_layer(of, 1)())
    for other in others:
        for x, y in zip(own, other, strict=True):
            assert np.asarray(x).shape == np.asarray(y).shape
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["numbers", "shape"])
def test_a_wrong_answer_stops_a_section(models, tiny, monkeypatch, wrong):
    class Spoilt(models.Process):
        def ask(self, method, *arguments):
            found = super().ask(method, *arguments)
            if method == "answers" and "padded" in self.name:
                found[1] = [[1, *found[1][0]], found[1][1]] if wrong == "shape" else [found[1][0], [x + 1 for x in found[1][1]]]
            return found

    monkeypatch.setattr(models, "Process", Spoilt)
    monkeypatch.setattr(models, "has", lambda package: False)
    with pytest.raises(ArmsDisagreeError, match="result 1 of fastmha padded"):
        models.main(["--only", "packed", "--seconds", "0"])


def test_sentences_are_of_the_lengths_asked_for_and_their_packages_are_named(models, monkeypatch):
    of = {"sentences": 40, "least": 4, "most": 9}
    counts = [len(text.split()) for text in models.sentences_of(of)]
    assert len(counts) == 40
    assert set(counts) == set(range(4, 10))
    monkeypatch.setattr(models, "has", lambda package: False)
    (table,) = models.sentences(argparse.Namespace(threads=1, seconds=0))
    assert "The packages that examples/embed_sentences.py needs are not installed." in str(table)
