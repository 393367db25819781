"""Fixtures, and the instruction sets that they run through; all else that tests share is in support.py."""

from collections import Counter
from xml.etree import ElementTree
from zlib import crc32

import pytest

pytest.register_assert_rewrite("support")

from support import isa, rng  # noqa: E402, F401

from fastmha import _core  # noqa: E402

_core.share_from(0)     # small arrays, too, are shared between threads here; test_threads.py has the default
_core.neighbours_from(0)    # and decoded side by side, but where a test asks for `neighbours`


@pytest.fixture(params=[False, True], ids=["asked", "alone"])
def fetched(request):
    """Whether the CPU is taken for one that fetches far ahead by itself."""
    before = _core.fetched_by_cpu(request.param)
    yield
    assert _core.fetched_by_cpu(before) == request.param


@pytest.fixture(params=[0, float("inf")], ids=["side by side", "one by one"])
def neighbours(request):
    """Whether heads that lie in rows of all heads are decoded side by side or each by itself."""
    before = _core.neighbours_from(request.param)
    yield
    assert _core.neighbours_from(before) == request.param


def pytest_addoption(parser):
    parser.addoption("--one-in", type=int, default=1, metavar="N",
                     help="of a test's cases, take one in N, by a hash of the name; of four or fewer, all")  # fmt: skip
    parser.addoption("--beyond", metavar="XML",
                     help="leave out the tests that ran in another run, of which this is what --junit-xml wrote")  # fmt: skip


def pytest_configure(config):
    config.addinivalue_line("markers", "every_case: --one-in leaves none of its cases out")


def place_in_xml(nodeid):
    """The class and the name that a test has in the XML of a run."""
    path, bracket, case = nodeid.partition("[")
    *names, last = path.split("::")
    names[0] = names[0].removesuffix(".py").replace("/", ".")
    return ".".join(names), last + bracket + case


def ran_in(path):
    """Which tests did, by their places in the XML of a run."""
    cases = ElementTree.parse(path).iter("testcase")
    return {(case.get("classname"), case.get("name")) for case in cases if case.find("skipped") is None}


def pytest_collection_modifyitems(config, items):
    """Every process of a run must come to the same cases: by their names."""
    one_in, beyond = config.getoption("--one-in"), config.getoption("--beyond")
    ran = ran_in(beyond) if beyond else set()
    cases = Counter(item.nodeid.partition("[")[0] for item in items)
    taken, left_out = [], []
    for item in items:
        few = cases[item.nodeid.partition("[")[0]] <= 4 or item.get_closest_marker("every_case") is not None
        drawn = few or crc32(item.nodeid.encode()) % one_in == 0
        (taken if drawn and place_in_xml(item.nodeid) not in ran else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = taken
