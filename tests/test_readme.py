"""What the README shows runs as it is shown."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_readme_shows_a_function_and_a_module():
    text = "\n".join(BLOCKS)
    for name in ("attention(", "attention_backward(", "plan(", "MultiHeadAttention(", ".forward(", ".backward("):
        assert name in text


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: re.findall(r"fastmha\.(\w+)", block)[0])
def test_python_of_the_readme_runs_by_itself(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_extras_and_files_that_the_readme_names_exist():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for group in re.findall(r'pip install "[^"\[]*\[([\w,]+)\]"', README) for name in group.split(",")}
    assert named
    assert named <= set(extras)
    for path in re.findall(r"\]\(([\w./]+)\)", README) + re.findall(r"python (\S+\.py)", README):
        assert (ROOT / path).is_file(), path
