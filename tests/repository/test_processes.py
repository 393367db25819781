"""The arms of the benches in processes of their own."""

import os

import pytest
from support import script

processes, steps = script("benches", "processes"), script("benches", "steps")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not let processes choose their cores")
def test_cores_of_this_process_are_as_they_were_after_another_was_started(processes):
    before = os.sched_getaffinity(0)
    with processes.cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_a_process_that_ends_before_its_answer_is_named(processes, steps, capfd):
    arm = ["no library", {"B": 1, "d_model": 8, "H": 2, "Hkv": 2, "tokens": 3}]
    with (pytest.raises(RuntimeError, match="the process of no library has ended before its answer"),
          processes.Process(steps.__file__, arm, 1) as process):
        process.ask("answers")
    assert "KeyError" in capfd.readouterr().err
