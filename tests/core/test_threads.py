"""Threads: how many, what they leave behind, BLAS's own, Python's, forks, and the end of the process."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import support

import fastmha
from fastmha import _core, threads

D_MODEL, HEADS = 32, 4
on_linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
with_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CPUS = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), threads._granted_cpus())
normal = partial(support.normal, dtype=np.float32)
VARIABLES = ("FASTMHA_NUM_THREADS", "OMP_NUM_THREADS")
SETTER = threads.bind_blas()        # the name of the function by which SciPy's BLAS is held at one thread, or None


def module(layout="auto", algorithm="auto"):
    return fastmha.MultiHeadAttention(D_MODEL, HEADS, num_kv_heads=2, use_bias=True, layout=layout, algorithm=algorithm, rng=0)


def in_a_process(code, tmp_path, **environment):
    """What the code printed, in a Python of its own, which must end well and soon. Only the variables given are set. Nothing is
    buffered: a forked child would print what its parent has not yet."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    ran = subprocess.run(
        [sys.executable, "-u", "-W", "error", "-c", textwrap.dedent(code)], cwd=tmp_path, env=inherited | environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(autouse=True)
def settings_restored():
    chosen = threads._chosen
    yield
    fastmha.set_num_threads(chosen)


# ------------------------------------------------------------------------------------------------------------- how many


def test_set_num_threads_holds_until_none():
    fastmha.set_num_threads(None)
    default = fastmha.get_num_threads()
    fastmha.set_num_threads(3)
    assert fastmha.get_num_threads() == 3
    fastmha.set_num_threads(np.int64(5))
    assert fastmha.get_num_threads() == 5
    fastmha.set_num_threads(None)
    assert fastmha.get_num_threads() == default


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FASTMHA_NUM_THREADS": "3"}, 3),
        ({"FASTMHA_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"FASTMHA_NUM_THREADS": " 6 "}, 6),
        ({"FASTMHA_NUM_THREADS": "", "OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": " 7 , 2"}, 7),
        ({"OMP_NUM_THREADS": ""}, CPUS),
        ({"OMP_NUM_THREADS": "many"}, CPUS),  # other libraries' variable: what it means there is not our business
        ({"OMP_NUM_THREADS": "0"}, CPUS),
        ({}, CPUS),
    ],
)
def test_default_is_ours_then_openmps_then_the_cpus_we_may_use(monkeypatch, environment, expected):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fastmha.set_num_threads(None)
    assert fastmha.get_num_threads() == expected
    monkeypatch.undo()
    fastmha.set_num_threads(None)


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "two", "4,2", "1e3", "²"])
def test_an_invalid_variable_of_ours_is_named(monkeypatch, value):
    monkeypatch.setenv("FASTMHA_NUM_THREADS", value)
    fastmha.set_num_threads(None)
    with pytest.raises(ValueError, match="FASTMHA_NUM_THREADS must be a positive integer, got") as caught:
        module().forward(normal(2, 3, D_MODEL))
    assert repr(value) in str(caught.value)
    fastmha.set_num_threads(2)  # what is set in the program needs no variable
    assert fastmha.get_num_threads() == 2
    monkeypatch.undo()
    fastmha.set_num_threads(None)


WORKERS = """
    import numpy as np, fastmha
    from fastmha import _core
    _core.share_from(0)
    x = np.ones((4, 4, 8, 8), np.float32)
    def workers(**keywords):
        fastmha.attention(x, x, x, **keywords)
        return _core.pool_workers()
"""


@on_linux
@pytest.mark.parametrize(
    ("environment", "steps", "expected"),
    [
        ({"FASTMHA_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, "workers()", 2),
        ({"OMP_NUM_THREADS": "4,2"}, "workers()", 3),
        ({"OMP_NUM_THREADS": "4,2"}, "fastmha.set_num_threads(2), workers()", 1),
        ({"FASTMHA_NUM_THREADS": "3"}, "fastmha.set_num_threads(2), workers(num_threads=5)", 4),
        ({"FASTMHA_NUM_THREADS": "1"}, "workers()", 0),
        ({"FASTMHA_NUM_THREADS": "4"}, "workers(num_threads=1)", 0),
        ({"FASTMHA_NUM_THREADS": "3"}, "fastmha.set_num_threads(7), fastmha.set_num_threads(None), workers()", 2),
    ],
)
def test_as_many_threads_work_as_were_asked_for(tmp_path, environment, steps, expected):
    """The caller is one of them; the pool has the others."""
    code = textwrap.dedent(WORKERS) + f"steps = ({steps},)\nprint(steps[-1])"
    assert in_a_process(code, tmp_path, **environment) == f"{expected}\n"


@on_linux
@pytest.mark.parametrize(("d_model", "L", "workers"), [(64, 10, 0), (64, 200, 1)])
def test_a_call_of_little_work_stays_in_its_thread(tmp_path, d_model, L, workers):
    code = f"""
        import numpy as np, fastmha
        m = fastmha.MultiHeadAttention({d_model}, 8, rng=0)
        X = np.ones((2, {L}, {d_model}), np.float32)
        m.backward(m.forward(X, num_threads=2), num_threads=2)
        m.forward(X[:, :1], cache=fastmha.KVCache(2, 8, {d_model} // 8), num_threads=2)
        print(fastmha._core.pool_workers())
    """
    assert in_a_process(code, tmp_path) == f"{workers}\n"


@on_linux
@pytest.mark.parametrize(("tokens", "workers"), [(5, 0), (200, 1)])
def test_few_short_sequences_stay_in_the_calling_thread(tmp_path, tokens, workers):
    code = f"""
        import numpy as np, fastmha
        x, lengths = np.ones((9 * {tokens}, 8, 16), np.float32), [{tokens}] * 9
        out, lse = fastmha.attention_packed(x, x, x, lengths, return_lse=True, num_threads=2)
        forward = fastmha._core.pool_workers()
        fastmha.attention_packed_backward(x, x, x, x, out, lse, lengths, num_threads=2)
        print(forward, fastmha._core.pool_workers())
    """
    assert in_a_process(code, tmp_path) == f"{workers} {workers}\n"


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_has_one_thread_for_little_work(backward):
    before = _core.share_from(2**19)
    try:
        little, more = np.empty((2, 8, 10, 8), np.float32), np.empty((2, 8, 100, 8), np.float32)
        assert fastmha.plan(little, little, little, backward=backward, num_threads=2).threads == 1
        assert fastmha.plan(more, more, more, backward=backward, num_threads=2).threads == 2
    finally:
        _core.share_from(before)


@pytest.mark.parametrize(
    ("groups", "files", "granted"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/", {"cpu.max": "max 100000\n"}, 1024),
        ("0::/a/b", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),       # of a group above
        ("0::/not/seen/inside", {"cpu.max": "50000 100000\n"}, 1),                             # of a container
        ("4:cpu,cpuacct:/x\n3:cpuset:/",
         {"cpu,cpuacct/x/cpu.cfs_quota_us": "400000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}, 4),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1024),
        ("0::/", {"cpu.max": "nonsense"}, 1024),
        ("nonsense", {"cpu.max": "nonsense"}, 1024),
        ("0::/", {}, 1024),
    ],
)
def test_default_respects_the_share_of_time_of_the_control_group(tmp_path, monkeypatch, groups, files, granted):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    found = threads._granted_cpus(tmp_path / "groups", tmp_path / "root")
    assert found == granted
    monkeypatch.setattr(threads, "_granted_cpus", lambda: found)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert threads._environment_threads() == min(CPUS, granted)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_default_respects_the_affinity_of_the_process(tmp_path):
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import fastmha
        print(fastmha.get_num_threads())
    """
    assert in_a_process(code, tmp_path) == "1\n"


@on_linux
@pytest.mark.skipif(CPUS < 2, reason="needs two CPUs")
def test_a_worker_that_leaves_the_cpu_of_its_caller_may_run_where_it_might_before(tmp_path):
    """The other CPU is busy: else the system would wake it there."""
    code = """
        import os, subprocess, sys, time
        import numpy as np
        import fastmha
        cpus = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, cpus[:1])       # what starts now is on the CPU of the caller
        fastmha.set_num_threads(2)
        q = np.ones((1, 8, 128, 64), np.float32)
        before = set(os.listdir("/proc/self/task"))
        fastmha.attention(q, q, q)
        worker, = set(os.listdir("/proc/self/task")) - before
        busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{cpus[1]}]); any(iter(int, 1))"])
        try:
            time.sleep(0.2)
            os.sched_setaffinity(int(worker), cpus)
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                fastmha.attention(q, q, q)
            print(cpus == sorted(os.sched_getaffinity(int(worker))))
        finally:
            busy.kill()
            busy.wait()
    """
    assert in_a_process(code, tmp_path) == "True\n"


@pytest.mark.parametrize("number", [10**4, 2**31, 10**12])
def test_absurd_numbers_of_threads_work(number):
    """There are never more threads than items, so a number beyond any machine is a number like another."""
    x = normal(1, 2, 5, 8)
    expected = fastmha.attention(x, x, x, num_threads=1)
    np.testing.assert_array_equal(fastmha.attention(x, x, x, num_threads=number), expected)
    fastmha.set_num_threads(number)
    np.testing.assert_array_equal(fastmha.attention(x, x, x), expected)


@pytest.mark.parametrize("variable", VARIABLES)
def test_absurd_numbers_of_threads_in_the_environment_work(monkeypatch, variable):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "999999999999")
    fastmha.set_num_threads(None)
    x = normal(1, 2, 5, 8)
    np.testing.assert_array_equal(fastmha.attention(x, x, x), fastmha.attention(x, x, x, num_threads=1))
    monkeypatch.undo()
    fastmha.set_num_threads(None)


# --------------------------------------------------------------------------------------------------------- import, exit


@on_linux
def test_import_starts_no_thread_and_changes_no_setting_of_blas(tmp_path):
    code = """
        import ctypes, os
        import numpy
        from scipy.linalg import cython_blas

        def count():
            return len(os.listdir("/proc/self/task"))

        def setting():
            library = ctypes.CDLL(cython_blas.__file__)
            names = "scipy_openblas_get_num_threads", "scipy_openblas_get_num_threads64_", "openblas_get_num_threads"
            return [getattr(library, name)() for name in names if hasattr(library, name)]

        environment, before, blas = dict(os.environ), count(), setting()
        import fastmha
        from fastmha import _core
        _core.share_from(0)
        m = fastmha.MultiHeadAttention(8, 2)
        assert count() == before, (before, count())
        assert setting() == blas
        assert dict(os.environ) == environment
        assert _core.pool_workers() == 0 and _core.blas_held() == 0
        m.forward(numpy.ones((1, 4, 8)), num_threads=1)
        assert count() == before
        m.forward(numpy.ones((8, 4, 8)), num_threads=3)
        assert count() == before + 2 == before + _core.pool_workers()   # or counting would prove nothing
        assert setting() == blas
    """
    in_a_process(code, tmp_path)


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "del m, X"])
def test_a_process_with_a_live_pool_ends(tmp_path, ending):
    code = f"""
        import sys, numpy as np, fastmha
        fastmha._core.share_from(0)
        m = fastmha.MultiHeadAttention(32, 4)
        X = np.ones((4, 16, 32), np.float32)
        m.backward(m.forward(X, num_threads=3))
        print(fastmha._core.pool_workers())
        {ending}
    """
    assert in_a_process(code, tmp_path) == "2\n"


def test_workers_are_joined_at_exit_and_later_calls_are_serial(tmp_path):
    code = """
        import atexit, numpy as np

        def last():     # registered before fastmha's own, so it runs after that
            print(_core.pool_workers())
            print(np.array_equal(fastmha.attention(x, x, x, num_threads=3), expected), _core.pool_workers())

        atexit.register(last)
        import fastmha
        from fastmha import _core
        _core.share_from(0)
        x = np.random.default_rng(0).standard_normal((2, 4, 8, 8))
        expected = fastmha.attention(x, x, x, num_threads=3)
        print(_core.pool_workers())
    """
    assert in_a_process(code, tmp_path) == "2\n0\nTrue 0\n"


@pytest.mark.parametrize("seconds", [0, 0.15])
def test_a_process_ends_while_a_daemon_thread_is_calling(tmp_path, seconds):
    """Also in a call so long that it asks for the GIL meanwhile."""
    code = f"""
        import threading, time, numpy as np, fastmha
        started = threading.Event()

        def call():
            length = 64
            while True:
                x = np.ones((2, 4, length, 16), np.float32)
                began = time.perf_counter()
                fastmha.attention(x, x, x, num_threads=2)
                took = time.perf_counter() - began
                if took >= {seconds}:
                    started.set()
                else:
                    length *= 2

        threading.Thread(target=call, daemon=True).start()
        started.wait()
        print("end")
    """
    assert in_a_process(code, tmp_path) == "end\n"


# ------------------------------------------------------------------------------------------------------- BLAS's threads


def blas_functions():
    """(get, set) of SciPy's BLAS, by the names that threads.py binds."""
    from scipy.linalg import cython_blas

    if SETTER is None:
        pytest.skip("SciPy's BLAS exports no setter of its thread count")
    library = ctypes.CDLL(cython_blas.__file__)
    getter = next(get for get, set_ in threads.BLAS_NAMES if set_ == SETTER)
    return getattr(library, getter), getattr(library, SETTER)


@pytest.fixture(params=[1, 2, 3])
def blas_count(request):
    """A function that reads BLAS's thread count, set to 1, 2 or 3 for the test."""
    get, set_ = blas_functions()
    before = get()
    set_(request.param)
    if get() != request.param:
        set_(before)
        pytest.skip(f"this BLAS does not take {request.param} threads")
    yield get
    assert _core.blas_held() == 0
    assert get() == request.param
    set_(before)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_call_leaves_blas_as_it_was(blas_count, num_threads):
    m, X = module(), normal(3, 9, D_MODEL)
    q = normal(2, 4, 9, 8)
    before = blas_count()
    for call in (
        lambda: forward_and_backward(module(algorithm="blas"), X, num_threads),
        lambda: m.forward(X, num_threads=num_threads),
        lambda: m.backward(X, num_threads=num_threads),
        lambda: m.forward(X, need_weights=True, training=False, num_threads=num_threads),
        lambda: fastmha.attention(q, q, q, num_threads=num_threads),
        lambda: fastmha.scaled_dot_product_attention(q, q, q),
        lambda: fastmha.multi_head_attention(X, X, X, HEADS, {name: np.eye(D_MODEL, dtype=np.float32)
                                                              for name in ("W_Q", "W_K", "W_V", "W_O")}),
    ):  # fmt: skip
        call()
        assert blas_count() == before
        assert _core.blas_held() == 0


def test_refused_calls_leave_blas_as_it_was(blas_count):
    m, X = module(), normal(3, 9, D_MODEL)
    before = blas_count()
    wrong = {"softcap": -1, "key_padding_lengths": [1], "mask": np.zeros((2, 2), bool), "num_threads": 0}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            m.forward(X, **{name: value})
        assert blas_count() == before
        assert _core.blas_held() == 0


@on_linux
def test_an_error_inside_a_call_leaves_blas_as_it_was(tmp_path):
    """Memory runs out where values that are not finite need a copy: in the middle of the run."""
    if "libasan" in Path("/proc/self/maps").read_text():
        pytest.skip("the address sanitizer's own memory does not fit under a limit")
    code = """
        import ctypes, resource, numpy as np, fastmha
        from fastmha import _core, threads
        from scipy.linalg import cython_blas
        library, get, setter = ctypes.CDLL(cython_blas.__file__), None, threads.bind_blas()
        if setter:
            get = getattr(library, dict((s, g) for g, s in threads.BLAS_NAMES)[setter])
            getattr(library, setter)(2)
        q, k = np.ones((1, 1, 1, 1)), np.ones((1, 1, 100_000, 1))
        v = np.full((1, 1, 100_000, 64), np.nan)            # 51 MB
        mask = np.arange(100_000)[None] == 50               # without one there is nothing to be kept from the rows
        fastmha.attention(q, k, v[..., :1], mask=mask, algorithm="blas")      # everything warm
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 20_000_000, resource.RLIM_INFINITY))
        try:
            fastmha.attention(q, k, v, mask=mask, algorithm="blas")
        except MemoryError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert _core.blas_held() == 0
        assert get is None or get() == 2
        assert np.isnan(fastmha.attention(q, k, v, algorithm="blas")).all()
    """
    assert in_a_process(code, tmp_path) == "no memory to treat values that are not finite\n"


def at_once(work, number):
    """Runs work(i) in as many Python threads, begun together; raises what one of them raised."""
    errors, start = [], threading.Barrier(number)

    def guarded(i):
        start.wait()
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded, args=(i,)) for i in range(number)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_several_python_threads_at_once_leave_blas_as_it_was(blas_count, num_threads):
    m, X = module(), normal(3, 40, D_MODEL)
    expected = m.forward(X)

    def work(i):
        for repeat in range(25):
            if (i + repeat) % 5 == 0:
                with pytest.raises(ValueError, match="softcap"):
                    m.forward(X, softcap=-1, training=False)
            np.testing.assert_array_equal(m.forward(X, training=False, num_threads=num_threads), expected)

    at_once(work, 4)  # the fixture looks at the end


def long_call():
    """A few tenths of a second in the kernels."""
    x = normal(1, 8, 2048, 64)
    return lambda: fastmha.attention(x, x, x, algorithm="blas", num_threads=2)


def test_blas_is_held_at_one_thread_during_a_call(blas_count):
    seen, done, call = [], threading.Event(), long_call()

    def watch():
        while not done.is_set():
            before, setting, after = _core.blas_held(), blas_count(), _core.blas_held()
            if before == after == 1:  # one long run: the setting was read inside it
                seen.append(setting)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    assert set(seen) == {1}


def test_the_gil_is_released():
    """No thread is ever asked to give the GIL up here: the other one can only count while the call has let it go."""
    count, done, call = [0], threading.Event(), long_call()

    def work():
        while not done.is_set():
            count[0] += 1
            time.sleep(0.001)

    interval = sys.getswitchinterval()
    other = threading.Thread(target=work)
    try:
        sys.setswitchinterval(1000)
        other.start()
        before = count[0]
        call()
        after = count[0]
    finally:
        sys.setswitchinterval(interval)
        done.set()
        other.join()
    assert after - before >= 3


# ------------------------------------------------------------------------------------------------ a BLAS without setter


@pytest.fixture
def hidden_setter(monkeypatch):
    """As with a BLAS that exports no setter: products run one after the other, under one lock."""
    monkeypatch.setattr(threads, "BLAS_NAMES", ())
    assert threads.bind_blas() is None
    assert not _core.blas_threads_bound()
    yield
    monkeypatch.undo()
    assert threads.bind_blas() == SETTER
    assert _core.blas_threads_bound() is (SETTER is not None)
    assert _core.blas_held() == 0


def forward_and_backward(m, X, num_threads):
    out = m.forward(X, is_causal=True, num_threads=num_threads)
    grad_X = m.backward(X, num_threads=num_threads)
    return [out, grad_X, *(g.copy() for g in m.gradients().values())]


@pytest.mark.parametrize("layout", ["strided", "contiguous"])
def test_results_without_a_setter_are_the_same(request, layout):
    m, X = module(layout, "blas"), normal(3, 150, D_MODEL)
    expected = forward_and_backward(m, X, 2)
    request.getfixturevalue("hidden_setter")
    one, two, again = (forward_and_backward(m, X, n) for n in (1, 2, 2))
    for a, b, c, d in zip(expected, one, two, again, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)  # BLAS may use its own threads now
        np.testing.assert_array_equal(c, b)
        np.testing.assert_array_equal(d, b)


@pytest.mark.usefixtures("hidden_setter")
def test_without_a_setter_blas_is_left_alone():
    if SETTER is None:
        pytest.skip("there is no setting to read")
    from scipy.linalg import cython_blas

    getter = SETTER.replace("_set_", "_get_").replace("Set_Num", "Get_Max")
    get = getattr(ctypes.CDLL(cython_blas.__file__), getter)
    before = get()
    forward_and_backward(module(algorithm="blas"), normal(3, 9, D_MODEL), 2)
    assert get() == before
    assert _core.blas_held() == 0


@pytest.mark.usefixtures("hidden_setter")
def test_without_a_setter_one_caller_is_inside_at_a_time():
    x, inside, done = normal(1, 8, 512, 64), set(), threading.Event()

    def watch():
        while not done.is_set():
            inside.add(_core.blas_held())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    at_once(lambda i: [fastmha.attention(x, x, x, algorithm="blas", num_threads=2) for _ in range(10)], 3)
    done.set()
    watcher.join()
    assert max(inside) == 1


@pytest.mark.usefixtures("hidden_setter")
def test_several_python_threads_without_a_setter():
    m, X = module(), normal(3, 60, D_MODEL)
    expected = m.forward(X)

    def work(i):
        for _ in range(15):
            np.testing.assert_array_equal(m.forward(X, training=False, num_threads=1 + i % 2), expected)

    at_once(work, 4)


# ----------------------------------------------------------------------------------------------------- Python's threads


def test_python_threads_with_modules_of_their_own_do_not_disturb_each_other():
    inputs = [normal(2 + i, 30 + 11 * i, D_MODEL, seed=i) for i in range(4)]
    modules = [module() for _ in inputs]
    expected = [forward_and_backward(m, X, 1) for m, X in zip(modules, inputs, strict=True)]

    def work(i):
        for repeat in range(15):
            for a, b in zip(forward_and_backward(modules[i], inputs[i], 1 + repeat % 3), expected[i], strict=True):
                np.testing.assert_array_equal(a, b)

    at_once(work, 4)


def test_python_threads_calling_functions_at_once_get_their_own_results():
    arrays = [normal(2, 4, 20 + 13 * i, 8, seed=i, dtype=np.float64) for i in range(4)]
    expected = [fastmha.attention(x, x, x, is_causal=True, return_lse=True, num_threads=1) for x in arrays]

    def work(i):
        x = arrays[i]
        for _ in range(30):
            out, lse = fastmha.attention(x, x, x, is_causal=True, return_lse=True, num_threads=2)
            np.testing.assert_array_equal(out, expected[i][0])
            np.testing.assert_array_equal(lse, expected[i][1])

    at_once(work, 4)


# ----------------------------------------------------------------------------------------------------------------- fork

FORKED = """
    import os, signal, sys, threading, time, warnings
    import numpy as np, fastmha
    from fastmha import _core, threads

    _core.share_from(0)

    warnings.filterwarnings("ignore", category=DeprecationWarning)   # Python 3.12: fork of a process with threads
    m = fastmha.MultiHeadAttention(32, 4, num_kv_heads=2, use_bias=True, rng=0)
    X = np.random.default_rng(1).standard_normal((4, 24, 32), dtype=np.float32)

    def both():
        out = m.forward(X, is_causal=True, num_threads=2)
        return [out, m.backward(X, num_threads=2), m.grad_W_Q.copy()]

    expected = both()

    def right():
        return _core.blas_held() == 0 and all(map(np.array_equal, both(), expected)) and _core.pool_workers() == 1

    def child(*checks, end=os._exit):       # with sys.exit through atexit, which is slow where other threads are busy
        process = os.fork()
        if process == 0:
            end(0 if all(check() for check in checks) else 5)
        give_up = time.monotonic() + 20     # a child that hangs must not outlive the test
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
            time.sleep(0.001)
            if time.monotonic() > give_up:
                os.kill(process, signal.SIGKILL)
        return os.waitstatus_to_exitcode(ended[1])
"""


def forked(code, tmp_path, **environment):
    return in_a_process(textwrap.dedent(FORKED) + textwrap.dedent(code), tmp_path, **environment)


@with_fork
def test_a_forked_child_starts_its_own_workers_and_ends_well(tmp_path):
    code = """
        assert _core.pool_workers() == 1
        print([child(lambda: _core.pool_workers() == 0, right, end=end) for end in (sys.exit, os._exit) * 2], right())
        print(child(lambda: child(right, end=sys.exit) == 0, right))      # and its child
    """
    assert forked(code, tmp_path) == "[0, 0, 0, 0] True\n0\n"


@with_fork
def test_a_child_forked_before_the_first_call_works(tmp_path):
    code = """
        import os, sys, numpy as np, fastmha
        fastmha._core.share_from(0)
        x = np.ones((2, 4, 8, 8), np.float32)
        process = os.fork()
        out = fastmha.attention(x, x, x, num_threads=2)
        if process == 0:
            sys.exit(0 if np.allclose(out, 1) and fastmha._core.pool_workers() == 1 else 5)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), fastmha._core.pool_workers())
    """
    assert in_a_process(code, tmp_path) == "0 1\n"


@with_fork
@pytest.mark.parametrize(("callers", "num_threads", "forks"), [(3, 2, 15), (16, 1, 40)])
def test_children_forked_while_other_threads_are_calling_work(tmp_path, callers, num_threads, forks):
    """Many callers of many small products: a fork finds some of them in whatever BLAS locks for itself."""
    code = f"""
        x = np.random.default_rng(1).standard_normal((64, 8, 8, 8))
        done = threading.Event()

        def call():
            while not done.is_set():
                fastmha.attention(x, x, x, algorithm="blas", num_threads={num_threads})

        callers = [threading.Thread(target=call) for _ in range({callers})]
        for t in callers:
            t.start()
        code = 0
        for i in range({forks}):
            code = code or child(right, end=sys.exit if i == 0 else os._exit)
        done.set()
        for t in callers:
            t.join()
        print(code, right(), _core.blas_held())
    """
    assert forked(code, tmp_path) == "0 True 0\n"


@with_fork
def test_a_child_forked_while_blas_is_held_has_blas_as_it_was(tmp_path):
    code = """
        import ctypes
        from scipy.linalg import cython_blas
        setter = threads.bind_blas()
        if setter is None:
            print("{0}")
            sys.exit()
        library = ctypes.CDLL(cython_blas.__file__)
        get = getattr(library, dict((s, g) for g, s in threads.BLAS_NAMES)[setter])
        getattr(library, setter)(2)
        big = np.random.default_rng(0).standard_normal((1, 8, 1024, 64), dtype=np.float32)
        done = threading.Event()

        def call():
            while not done.is_set():
                fastmha.attention(big, big, big, algorithm="blas", num_threads=2)

        caller = threading.Thread(target=call)
        caller.start()
        codes, inside = set(), 0
        while inside < 5:
            inside += _core.blas_held() == 1
            codes.add(child(lambda: _core.blas_held() == 0, lambda: get() == 2))
        done.set()
        caller.join()
        print(codes)
    """
    assert forked(code, tmp_path) == "{0}\n"


@with_fork
def test_the_fork_context_of_multiprocessing_works(tmp_path):
    code = """
        import multiprocessing

        def work(seed):
            x = np.random.default_rng(seed).standard_normal((2, 4, 8, 8))
            return fastmha.attention(x, x, x, num_threads=2)

        with multiprocessing.get_context("fork").Pool(2) as pool:
            results = pool.map(work, range(8))
            pool.close()
            pool.join()
        print(all(np.array_equal(work(seed), result) for seed, result in enumerate(results)))
    """
    assert forked(code, tmp_path) == "True\n"


def test_no_run_calls_blas_from_more_threads_than_it_has_buffers_for(tmp_path):
    """Beyond some 130 OpenBLAS writes to stderr, then crashes."""
    code = """
        import numpy as np, fastmha
        x = np.broadcast_to(np.ones((1, 1, 128, 64)), (1, 512, 128, 64))
        out, lse = fastmha.attention(x, x, x, algorithm="blas", num_threads=512, return_lse=True)
        fastmha.attention_backward(out, x, x, x, out, lse, algorithm="blas", num_threads=512)
        print(fastmha._core.pool_workers(), float(abs(out - 1).max()) < 1e-12)
    """
    workers, right = in_a_process(code, tmp_path).split()
    assert int(workers) < 64
    assert right == "True"


def test_any_number_of_python_threads_may_call_blas_at_once(tmp_path):
    """More of them than it has buffers for, of which some wait; without that, one run in three of these was aborted."""
    code = """
        import threading
        import numpy as np, fastmha
        x = np.ones((1, 8, 512, 64), np.float32)
        errors, gate = [], threading.Barrier(400)
        def call():
            gate.wait()
            errors.append(abs(fastmha.attention(x, x, x, algorithm="blas", num_threads=64) - 1).max())
        threads = [threading.Thread(target=call) for _ in range(400)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(errors), float(max(errors)) < 1e-5, fastmha._core.blas_held())
    """
    assert in_a_process(code, tmp_path) == "400 True 0\n"
