"""Ctrl-C in the middle of a call, and forks beside one: each in a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="signals and forks are POSIX's")

# A call that would take many seconds; `call()` runs it once.
LONG = {
    "tiled forward": "f = lambda: fastmha.attention(q, q, q, algorithm='tiled', num_threads=n)",
    "tiled backward": "f = lambda: fastmha.attention_backward(q, q, q, q, q, lse, algorithm='tiled', num_threads=n)",
    "blas forward": "f = lambda: fastmha.attention(q, q, q, algorithm='blas', num_threads=n)",
    "blas backward": "f = lambda: fastmha.attention_backward(q, q, q, q, q, lse, algorithm='blas', num_threads=n)",
    "weights": "f = lambda: again(lambda: fastmha.scaled_dot_product_attention(p, p, p))",
    "decode": "f = lambda: again(lambda: fastmha.attention(q[:, :, :1], q, q, algorithm='decode', num_threads=n))",
    "packed": "f = lambda: fastmha.attention_packed(t, t, t, [100000, 1, 19999], algorithm='tiled', num_threads=n)",
    "packed backward": "f = lambda: fastmha.attention_packed_backward(t, t, t, t, t, lse[0], [100000, 20000], num_threads=n)",
    "packed, many": "f = lambda: again(lambda: fastmha.attention_packed(t, t, t, [2] * 60000, num_threads=n))",
    "softmax": "f = lambda: again(lambda: fastmha.softmax(p, num_threads=n))",
    "norm": "f = lambda: again(lambda: fastmha.layer_norm(p, p[0, 0, 0], num_threads=n))",
    "norm backward": "f = lambda: again(lambda: fastmha.layer_norm_backward(p, p, p[0, 0, 0], num_threads=n))",
    "projection": "f = lambda: again(lambda: m.forward(X, training=False, num_threads=n))",
}
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import fastmha
signal.signal(signal.SIGINT, signal.default_int_handler)     # also where whoever started this ignores it
n = {threads}
rng = np.random.default_rng(0)
q = rng.standard_normal((1, 1, 120000, 64), np.float32)
p, t = q[:, :, :6000], q[0].swapaxes(0, 1)
lse = np.zeros((1, 1, 120000), np.float32)
m = fastmha.MultiHeadAttention(512, 8, rng=0)
X = rng.standard_normal((1, 512, 512), np.float32)
def again(call):
    while True:         # no result is kept: gigabytes would come together before a signal on a busy machine
        call()
{call}
"""
INTERRUPTED = PROGRAM + """
sent = []
def send():
    time.sleep(0.6)
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send).start()
try:
    f()
except KeyboardInterrupt:
    took = time.perf_counter() - sent[0]
else:
    sys.exit("it ended before the signal came")
# The pool is alive and right.
small = np.ones((2, 4, 70, 16), np.float32)
one = fastmha.attention(small, small, small, num_threads=1)
for _ in range(20):
    assert np.array_equal(fastmha.attention(small, small, small, num_threads=n), one)
print(took)
"""
# Until the timer is set nothing interrupts; then `handler` is called several times in the middle of a call.
HANDLED = PROGRAM + """
seen = []
q = q[:, :, :16000].reshape(1, 2, 8000, 64)         # long enough for several signals on a fast machine
p, lse = q, lse[:, :, :16000].reshape(1, 2, 8000)
def results():
    x = f()
    return x if isinstance(x, tuple) else (x,)
wanted = results()
x = np.ones((2, 4, 70, 16), np.float32)
attended = fastmha.attention(x, x, x, num_threads=1)
def handler(*_):
    seen.append(1)
    {handler}
signal.signal(signal.SIGALRM, lambda *_: handler())
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
try:
    got = results()
except RuntimeError as error:
    if "a signal handler forked the process in the middle of this call" not in str(error): raise
    got = None
signal.setitimer(signal.ITIMER_REAL, 0)
"""
UNCHANGED = HANDLED.replace("{handler}", "pass") + """
# A handler that does not raise changes nothing: the call goes on and is right.
assert all(map(np.array_equal, wanted, got))
print(len(seen))
"""
CALLING = HANDLED.replace("{handler}", """
    assert np.float32(1e-40) * np.float32(1) != 0
    assert np.array_equal(fastmha.attention(x, x, x, num_threads=2), attended)
""") + """
assert all(map(np.array_equal, wanted, got))
print(len(seen))
"""
FORKING = HANDLED.replace("{handler}", """
    signal.setitimer(signal.ITIMER_REAL, 0)
    seen.append(os.fork())
""") + """
if seen[-1] == 0:
    os._exit(0 if got is None and np.array_equal(fastmha.attention(x, x, x, num_threads=2), attended) else 7)
assert all(map(np.array_equal, wanted, got))
assert os.waitstatus_to_exitcode(os.waitpid(seen[-1], 0)[1]) == 0
print(1)
"""
FORKED = PROGRAM + """
# The forking thread waits for no more than a block of the run that another thread has under way.
thread = threading.Thread(target=f, daemon=True)
thread.start()
time.sleep(0.5)
longest = 0
for _ in range(20):
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    longest = max(longest, time.perf_counter() - began)
    os.waitpid(child, 0)
print(longest)
sys.stdout.flush()
os._exit(0)
"""


def measured(program, call, threads, tmp_path):
    code = textwrap.dedent(program).format(threads=threads, call=LONG[call])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", LONG)
def test_an_interrupt_is_answered_within_half_a_second(call, threads, tmp_path):
    """Twice that here: the machine may be busy with other tests."""
    assert measured(INTERRUPTED, call, threads, tmp_path) < 1.0


@pytest.mark.parametrize("call", ["tiled forward", "tiled backward", "blas forward", "blas backward"])
def test_a_signal_handler_that_does_not_raise_runs_meanwhile_and_changes_nothing(call, tmp_path):
    assert measured(UNCHANGED, call, 2, tmp_path) >= 2


@pytest.mark.parametrize("call", ["blas forward", "blas backward"])
def test_a_fork_waits_for_a_block_at_most(call, tmp_path):
    """And beside other tests for its turn at a CPU: 0.52 s were seen. The call itself would take minutes."""
    assert measured(FORKED, call, 2, tmp_path) < 1.0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", ["tiled forward", "tiled backward", "blas forward"])
def test_a_signal_handler_runs_as_outside_of_the_call(call, threads, tmp_path):
    """Its own numbers below the smallest normal one are not flushed, and it may call the library."""
    assert measured(CALLING, call, threads, tmp_path) >= 2


@pytest.mark.parametrize("call", ["tiled forward", "tiled backward", "blas forward", "blas backward"])
def test_a_child_forked_by_a_signal_handler_says_that_the_call_has_no_result(call, tmp_path):
    """It has none of the threads that were at work; the parent's call goes on and is right."""
    measured(FORKING, call, 2, tmp_path)


def test_an_interrupt_stops_the_run_of_its_caller_alone(tmp_path):
    """Two threads at a time, of which the main one is interrupted: the other's result is right."""
    code = textwrap.dedent(PROGRAM + """
    part = q[:, :, :6000]
    wanted = fastmha.attention(part, part, part, algorithm="tiled", num_threads=1)
    results = []
    def other():
        for _ in range(10):
            results.append(fastmha.attention(part, part, part, algorithm="tiled", num_threads=2))
    thread = threading.Thread(target=other)
    thread.start()
    def send():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=send).start()
    try:
        f()
    except KeyboardInterrupt:
        pass
    else:
        sys.exit("it ended before the signal came")
    thread.join()
    assert len(results) == 10 and all(np.array_equal(r, wanted) for r in results)
    """.replace("\n    ", "\n")).format(threads=2, call=LONG["tiled forward"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
