"""Fails if a test was skipped in every job that collected it. Arguments: the JUnit XML files of the jobs.

A test of tools that no job installs (a cross compiler, an emulator) says so and does not count: it runs where they are.
"""
import sys
from xml.etree import ElementTree

OF_THE_MACHINE = "this machine has no "
ran: set[tuple[str, str]] = set()           # (module, test)
skipped: dict[tuple[str, str], str] = {}    # -> reason; a whole file is ("", module)
for path in sys.argv[1:]:
    for case in ElementTree.parse(path).iter("testcase"):
        test, skip = (case.get("classname", ""), case.get("name", "")), case.find("skipped")
        if skip is None or skip.get("type") == "pytest.xfail":
            ran.add(test)
        else:
            skipped[test] = skip.get("message", "")
modules = {("", module) for module, _ in ran}
never = sorted(test for test in skipped if test not in ran | modules)
for test in never:
    print(f"skipped in all jobs: {'::'.join(test).lstrip(':')}: {skipped[test]}")
never = [test for test in never if not skipped[test].startswith(OF_THE_MACHINE)]
print(f"{len(ran)} tests ran in some job, {len(never)} in none")
sys.exit(bool(never))
