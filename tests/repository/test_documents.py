"""What the README and the documents show runs as it is shown, and prints what they say."""

import ast
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import fastmha
from fastmha.study import report, runner
from fastmha.study.questions import ALL as STUDY_ORDER

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
IN_ORDER = ("docs/tutorial.md",)        # of these a snippet runs after all those before it
README = TEXTS["README.md"]
# what Python shows, and the text right behind it that it prints
SHOWN = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
# what a document quotes of the specification
QUOTED = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)
IMPORTS = "import numpy as np\nimport fastmha\n"
NEEDS = {
    "bfloat16\"": ("ml_dtypes", 'bfloat16 needs ml_dtypes: pip install "fastmha[bfloat16]"'),
    ".bfloat16()": ("ml_dtypes", 'bfloat16 needs ml_dtypes: pip install "fastmha[bfloat16]"'),
    "import torch\n": ("torch", 'needs torch: pip install "fastmha[torch]"'),
    "from mpi4py import": ("mpi4py", 'needs MPI: pip install "fastmha[mpi]" mpich'),
    "from transformers import": ("transformers", 'needs transformers: pip install "fastmha[transformers]"'),
}


def snippets():
    """A snippet runs by itself if it imports what it needs, else after the first of its document."""
    for name, text in TEXTS.items():
        found = list(SHOWN.finditer(text))
        for i, match in enumerate(found):
            heading = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
            earlier = found[:i] if name in IN_ORDER else found[:1]
            before = "" if IMPORTS in match[1] else "".join(m[1] for m in earlier)
            line = text[: match.start()].count("\n") + 2
            yield pytest.param(name, before, match[1], match[2], line, id=f"{name}-{heading}")


def run(name, before, code, line):
    """What the code prints."""
    names = {"__name__": "snippet"}
    with redirect_stdout(StringIO()):
        exec(compile(before, name, "exec"), names)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile("\n" * (line - 1) + code, name, "exec"), names)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ("README.md", ("attention(", "attention_backward(", "plan(", "MultiHeadAttention(", ".forward(", ".backward(",
                       "KVCache(")),
        ("docs/inference.md", ("KVCache(", ".append(", ".truncate(", ".reorder(", ".attend(", "merge(", "Capture(", "window=",
                               "project_context(", "mean_pool_kv_heads(", "transform_qk=", "kv_cache_bytes(")),
        ("docs/models.md", ("num_kv_heads=", "head_dim=", 'use_bias="qkv"', "key_ranges=", "window=", "transform_qk=",
                            "rms_norm(", "softcap=", "sinks=", "mask=", "need_bias_grad=", "attention_packed(", "scale=",
                            "v_head_dim=", "project_context(", "alibi=", "KVCache(")),
    ],
)  # fmt: skip
def test_what_matters_is_shown(document, names):
    code = "\n".join(match[1] for match in SHOWN.finditer(TEXTS[document]))
    assert [name for name in names if name not in code] == []


@pytest.mark.parametrize(("name", "before", "code", "prints", "line"), list(snippets()))
def test_python_runs_and_prints_what_is_shown(name, before, code, prints, line):
    for words, (module, reason) in NEEDS.items():
        if words in before + code:
            pytest.importorskip(module, reason=reason)
    printed = run(name, before, code, line)
    if prints is not None:
        assert printed == prints


def test_what_a_snippet_prints_is_compared_and_what_it_asserts_is_run():
    """The tests of the documents can fail."""
    text = "```python\nprint(1)\n```\n\n```text\n2\n```\n\n```python\nassert 0\n```\n\nbehind\n\n```text\n3\n```\n"
    (code, prints), (wrong, nothing) = SHOWN.findall(text)
    assert (run("x.md", "", code, 1), prints, nothing) == ("1\n", "2\n", "")
    with pytest.raises(AssertionError):
        run("x.md", "", wrong, 1)


def quotes(text):
    """The lines of each quotation, without their indentation."""
    return [[line.strip() for line in quoted.splitlines()] for quoted in QUOTED.findall(text)]


def stands_in(lines, source):
    """Whether they stand there, one right after the other."""
    of_source = [line.strip() for line in source.splitlines()]
    return any(of_source[i : i + len(lines)] == lines for i in range(len(of_source)))


REFERENCE = "\n".join(file.read_text(encoding="utf-8") for file in Path(fastmha.reference.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", TEXTS)
def test_lines_that_the_documents_quote_stand_in_the_reference(name):
    assert [lines for lines in quotes(TEXTS[name]) if not stands_in(lines, REFERENCE)] == []


def test_the_tutorial_quotes_each_step_and_a_quotation_can_be_wrong():
    found = quotes(TEXTS["docs/tutorial.md"])
    assert len(found) > 8
    for lines in found:
        for i, line in enumerate(lines):
            assert not stands_in(lines, REFERENCE.replace(line, line + " + 1"))
            assert not stands_in([*lines[:i], line + " + 1", *lines[i + 1 :]], REFERENCE)
            assert line


def test_every_public_name_has_its_page():
    listed, module = set(), ""
    for line in TEXTS["docs/api.md"].splitlines():
        if line.startswith(".. currentmodule:: "):
            module = line.split()[-1]
        elif re.fullmatch(r" {3}\w+", line):
            listed.add(f"{module}.{line.strip()}")
    expected = {f"fastmha.{name}" for name in fastmha.__all__} | {"fastmha.weights.load", "fastmha.weights.save"}
    # read, not imported: they need their extras
    for face, file in {**{face: f"{face}.py" for face in ("torch", "transformers", "jax", "plot")},
                       "parallel": "parallel/__init__.py"}.items():
        for node in ast.parse((ROOT / "fastmha" / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                expected |= {f"fastmha.{face}.{name}" for name in ast.literal_eval(node.value)}
    assert "fastmha.torch.patch" in expected
    assert listed == expected


def test_the_index_has_a_line_for_each_page():
    text = TEXTS["docs/index.md"]
    pages = {name.removeprefix("docs/").removesuffix(".md") for name in DOCUMENTS if name.startswith("docs/")} - {"index"}
    lines = re.findall(r"^\* \[[^]]+\]\((\w+)\.md\): .+\.$", text, re.MULTILINE)
    tree = re.search(r"^```\{toctree\}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
    assert sorted(lines) == sorted(pages)
    assert re.findall(r"^\w+$", tree, re.MULTILINE) == lines


def test_pictures_that_the_documents_ask_for_are_drawn():
    drawn = re.findall(r"^def ([a-z]\w*)\(", (ROOT / "docs" / "pictures.py").read_text(encoding="utf-8"), re.MULTILINE)
    asked = [name for text in TEXTS.values() for name in re.findall(r"<!-- picture (\w+): .+? -->", text)]
    assert sorted(asked) == sorted(drawn)


def test_extras_that_the_documents_name_exist():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for text in (*TEXTS.values(), contributing):
        groups = re.findall(r'pip install (?:-e )?"[^"\[]*\[([\w,]+)\]"', text)
        assert {name for group in groups for name in group.split(",")} <= set(extras)
    assert "[test]" in README
    assert "[study]" in README


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_the_documents_name_exist(name):
    """Links count from the document, commands from the top."""
    for path in re.findall(r"\]\(([\w./]+)(?:#[\w-]*)?\)", TEXTS[name]):
        assert ((ROOT / name).parent / path).is_file(), path
    for path in re.findall(r"python (\S+\.py)", TEXTS[name]):
        assert (ROOT / path).is_file(), path


FOLDERS = [ROOT / name for name in ("fastmha", "tests", "benches", "examples", "docs", ".ci")]
SOURCES = [path for path in (*ROOT.glob("*"), *(path for folder in FOLDERS for path in folder.rglob("*")))
           if path.is_file() and path.suffix not in {".so", ".pyc", ".md"}]


@pytest.mark.parametrize("name", sorted({*TEXTS, "CONTRIBUTING.md", "CHANGELOG.md"} - {"docs/models.md"}))      # cites others
def test_sources_that_the_documents_name_exist(name):
    known = {path.name for path in SOURCES}
    for source in re.findall(r"[`/ ]([\w*]+\.(?:py|pyx|pxd|pxi|c|h|inc\.h))[` ]", (ROOT / name).read_text(encoding="utf-8")):
        assert source in known or "*" in source, source


def test_what_contributing_names_is_in_the_sources():
    """Recipes that name what is gone help nobody."""
    words = {word for path in SOURCES if path != Path(__file__).resolve()
             for word in re.findall(r"[\w-]+", f"{path.name} {path.read_text(encoding='utf-8', errors='ignore')}")}
    text = re.sub(r"^```.*?^```$", "", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = {part for name in re.findall(r"`([A-Za-z_][\w.]*)`", text) for part in name.split(".")}
    assert len(named) > 50
    assert named - words == {"prange"}      # which is not to be used


# -------------------------------------------------------------------------------------------------------- the study

STUDY = ROOT / "docs" / "layouts" / "results.json"


def test_the_study_in_the_documents_is_what_its_measurements_say():
    found = runner.read(STUDY)
    text = TEXTS["docs/layouts.md"]
    assert re.findall(r"<!-- study (\w+) -->", text) == ["about", *(question.name for question in STUDY_ORDER)]
    assert report.refreshed(text, found, "layouts/") == text
    answers = [question.answered(found) for question in STUDY_ORDER]
    assert all(answers)
    drawn = {picture.name for answer in answers for picture in answer.pictures}
    assert {path.stem for path in STUDY.parent.glob("*.png")} == drawn
    assert not found["quick"]


def test_documents_agree_on_how_many_questions_there_are():
    number = {9: "nine"}[len(STUDY_ORDER)]
    for name in ("README.md", "CHANGELOG.md"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert re.findall(r"(\w+) questions", text) == [number], name
    headings = re.findall(r"^## (\d+)\. ", TEXTS["docs/layouts.md"], re.M)
    assert headings == [str(n + 1) for n in range(len(STUDY_ORDER))]


def test_what_the_study_says_changes_with_its_measurements():
    found = runner.read(STUDY)
    for record in found["records"]:
        for ratio in record.get("ratios", {}).values():
            ratio["median"] *= 1.5
    assert report.refreshed(TEXTS["docs/layouts.md"], found, "layouts/") != TEXTS["docs/layouts.md"]
