"""Measurements without a machine, for the tests of the study's store and of its command."""

import pytest
from study_support import LIMITS

from fastmha.study import machine, pace
from fastmha.study.trial import Trial


class Measurements:
    """Trials of the question "fake" that note what was called; `fail` maps a label to what to raise."""

    def __init__(self, labels="abc"):
        self.called, self.fail = [], {}
        self.trials = [Trial("fake", label, {"µ": label}, self.measure(label), 1.0, 10**12) for label in labels]

    def measure(self, label):
        def measure(seconds):
            self.called.append(label)
            if label in self.fail:
                raise self.fail[label]
            return {"seconds": seconds, "value": f"of {label}"}

        return measure


@pytest.fixture
def measurements(monkeypatch):
    monkeypatch.setattr(machine, "limits", lambda threads: dict(LIMITS))
    monkeypatch.setattr(pace, "calibrated", lambda *a: {"process": 1.0, "picture": 0.5})
    return Measurements()
