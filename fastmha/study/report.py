"""Answers as text for the terminal, as Markdown, and as one HTML file that opens without a network."""
from __future__ import annotations

import base64
import html
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastmha.study.answer import Answer, Found, Question, Table
from fastmha.study.folder import replace_text
from fastmha.study.words import failed

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "Memory-layout study"
PAGE, TEXT = "report.html", "report.md"
NOT_MEASURED = "Not measured."
FIRST, OTHER = 24, 30       # columns of the terminal that a folded first column keeps, and that another column of text takes
NUMBER = re.compile(r"[=<>≈~]?\s*[-−+±]?\d")
SIGNS = re.compile(r"[\\*\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")     # of Markdown; not the _ within a name
FOLD = 12                   # rows of a table that a document shows unfolded
NOTHING = ("", "-", "–", "—", "not measured")

READING = (
    "Cases are named by their shape: B batch rows, H heads (H16/4: 16 query heads on 4 key/value heads), L tokens (L128x1024: "
    "128 queries on 1024 keys; M: rows of a projection alone), d the width d_model, D that of a head, row the bytes from one "
    "token to the next; f32 or f64, the algorithm, the direction, T threads; cold: operands come from memory. A ratio \"time A / "
    "time B\" of 1.05 ±0.01: A takes 5 % longer, median of the rounds, beside half its interval of 95 %; with \"=\" before it "
    "the interval holds 1, no difference was found.")

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h1, h2, h3 { line-height: 1.2 }
h2 { margin-top: 3rem; border-top: 1px solid #999; padding-top: 1rem }
.question { font-style: italic }
.short { border-left: 4px solid #111; padding-left: .8rem; font-size: 1.1em }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: .5rem 0; font-size: .9em }
caption { text-align: left; font-weight: bold; padding: .3rem 0 }
th, td { text-align: left; vertical-align: top; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid #ccc }
thead th { vertical-align: bottom; border-bottom: 1px solid #111 }
tbody th { font-weight: normal }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.note, figcaption { font-size: .9em; color: #444; margin: .2rem 0 1.2rem }
figure { margin: 1.5rem 0 }
img { max-width: 100%; height: auto }
@media print {
  body { font-size: 10pt; max-width: none; margin: 0; padding: 0 }
  h2 { break-before: page; border: 0 }
  h2, h3, caption { break-after: avoid }
  figure, tr { break-inside: avoid }
  img { max-height: 23cm }
  .wide { overflow: visible }
  a { color: inherit; text-decoration: none }
}"""

Answers = Sequence[tuple[Question, "Answer | None"]]


def write(folder: Path, found: Found, asked: Sequence[Question], console: Console | None) -> dict[str, Path]:
    """Draw the pictures of the answers, write report.html and report.md, print the tables to the console unless it is None.
    Returns what was written, by what it is."""
    from fastmha.study import runner

    answers = [(question, question.answered(found)) for question in asked]
    if console is not None:
        _print(console, found, answers)
    draw(folder, found, answers)
    for name, text in ((PAGE, _page(folder, found, answers)), (TEXT, markdown(found, answers))):
        replace_text(folder / name, text)
    return {"Results": folder / runner.RESULTS, "Report": folder / PAGE, "Pictures": folder}


def draw(folder: Path, found: Found, answers: Answers) -> None:
    from fastmha.study import plots

    for _, answer in answers:
        for picture in answer.pictures if answer else ():
            getattr(plots, picture.kind)(folder / f"{picture.name}.png", found, **picture.data)


def facts(found: Found) -> list[tuple[str, str]]:
    """What a reader needs to judge the figures: name and text."""
    machine, versions, limits, count = found["machine"], found["versions"], found["limits"], found["threads"]
    caches = ", ".join(f"{name} " + (f"{size / 2**20:g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB")
                       for name, size in machine["caches"].items())
    products = [f"{limits[name] / 1e9:,.0f} GFLOP/s in {name}" for name in ("float32", "float64")]
    return [
        ("Command", found["command"]),
        ("Date", found["date"]),
        ("CPU", f"{machine['cpu']}, {machine['cpus_usable']} usable{f'; caches {caches}' if caches else ''}"),
        ("System", f"{machine['system']}, {machine['architecture']}"),
        ("Threads, kernels", f"{count} thread{'s' * (count != 1)}, {found['kernels']['isa']}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Limits, measured", f"products: {', '.join(products)}; read from memory: {limits['read'] / 1e9:.3g} GB/s"),
        ("Measurements", f"{len(found['records'])}{' (a quick look)' if found.get('quick') else ''}"),
        *left_out(found),
    ]


def left_out(found: Found) -> list[tuple[str, str]]:
    """Which measurements there was no time for, and how many: name and text, or nothing."""
    by_question: dict[str, list[str]] = {}
    for each in found.get("left_out", ()):
        by_question.setdefault(each["question"], []).append(each["label"])
    count = sum(map(len, by_question.values()))
    names = "; ".join(f"{question}: {', '.join(labels)}" for question, labels in by_question.items())
    return [("Left out for lack of time", f"{count} ({names})")] if count else []


def numbers(table: Table) -> list[bool]:
    """Which columns hold numbers; the first names its row."""
    columns = [[row[at] for row in table.rows] for at in range(1, len(table.columns))]
    return [False, *(any(map(NUMBER.match, cells)) and all(NUMBER.match(cell) or cell in NOTHING for cell in cells)
                     for cells in columns)]


# ------------------------------------------------------------------------------------------------ the terminal

def _print(console: Console, found: Found, answers: Answers) -> None:
    from rich.text import Text

    count = found["threads"]
    console.print(Text(f"{found['machine']['cpu']}, {count} thread{'s' * (count != 1)}, {found['kernels']['isa']} kernels"))
    console.print(Text(READING, "dim"))     # before the names of what was left out
    for name, text in left_out(found):
        console.print(Text(f"{name}: {text}"))
    for question, answer in answers:
        console.print()
        console.print(Text(question.title, "bold"))
        console.print(Text(answer.short if answer else NOT_MEASURED))
        for table in answer.tables if answer else ():
            console.print()
            print_table(console, table)


def print_table(console: Console, table: Table) -> None:
    """Title, table and note: as many columns as fit beside the first, then the first again with the others."""
    from rich import box
    from rich.table import Table as Shown
    from rich.text import Text

    console.print(Text(table.title, "italic"))
    numeric = numbers(table)
    longest = [max(map(len, cells)) for cells in zip(*table.rows)]
    words = [max(map(len, name.split()), default=0) for name in table.columns]
    widths = [max(long if number else min(OTHER, max(long, len(name))), word)
              for number, long, name, word in zip(numeric, longest, table.columns, words)]
    first = max(longest[0], words[0])
    parts: list[list[int]] = [[]]
    for at in range(1, len(widths)):
        beside = sum(widths[i] + 2 for i in [*parts[-1], at])
        if parts[-1] and min(first, FIRST) + beside > console.width:
            parts.append([])
        parts[-1].append(at)
    for number, part in enumerate(parts):
        if number:
            console.print()
        shown = Shown(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        left = max(8, console.width - sum(widths[at] + 2 for at in part))
        shown.add_column(Text(table.columns[0]), width=min(first, left), overflow="fold")
        for at in part:
            shown.add_column(Text(table.columns[at]), width=widths[at], justify="right" if numeric[at] else "left",
                             overflow="fold")
        for row in table.rows:
            shown.add_row(*(Text(row[at], no_wrap=numeric[at]) for at in (0, *part)))
        console.print(shown)
    if table.note:
        console.print(Text(table.note, "dim"))


# ------------------------------------------------------------------------------------------------ Markdown

def markdown(found: Found, answers: Answers) -> str:
    """The report as Markdown, with links to the pictures beside it."""
    parts = [f"# {TITLE}", _marked(READING), markdown_table(Table("", ("", ""), facts(found)))]
    for question, answer in answers:
        parts += [f"## {_marked(question.title)}", *_marked_section(question, answer, "", None)]
    return "\n\n".join(parts) + "\n"


def _marked_section(question: Question, answer: Answer | None, folder: str, fold: int | None) -> list[str]:
    """Paragraphs of an answer; tables of more than `fold` rows are folded away."""
    parts = [f"*{_marked(question.question)}*"]
    if answer is None:
        return [*parts, NOT_MEASURED]
    parts += [f"**Answer:** {_marked(answer.short)}", f"**Method:** {_marked(answer.method)}"]
    for table in answer.tables:
        shown = [markdown_table(table), *([_marked(table.note)] if table.note else ())]
        if fold is not None and len(table.rows) > fold:
            parts += [f"<details>\n<summary>{html.escape(table.title)}: {len(table.rows)} rows</summary>", *shown, "</details>"]
        else:
            parts += [f"### {_marked(table.title)}", *shown]
    for picture in answer.pictures:
        parts += [f"![{_marked(picture.data['title'].replace('`', ''))}]({folder}{picture.name}.png)", _marked(picture.caption)]
    return [*parts, f"**Limits:** {_marked(answer.limits)}"]


def refreshed(text: str, found: Found, folder: str) -> str:
    """A document with what stands between ``<!-- study NAME -->`` and ``<!-- end -->`` written anew from results: the answer to
    the question NAME, or the machine for NAME "about". Pictures are linked in `folder`."""
    from fastmha.study import questions

    by_name = {question.name: question for question in questions.ALL}

    def block(match: re.Match[str]) -> str:
        name = match[1]
        parts = ([markdown_table(Table("", ("", ""), facts(found)))] if name == "about" else
                 _marked_section(by_name[name], by_name[name].answered(found), folder, FOLD))
        return "\n\n".join([f"<!-- study {name} -->", *parts, "<!-- end -->"])

    return re.sub(r"<!-- study (\w+) -->.*?<!-- end -->", block, text, flags=re.DOTALL)


def markdown_table(table: Table) -> str:
    """The rows of a table as Markdown, numbers to the right; without its title and note."""
    first, *rows = ([_marked(" ".join(cell.split())).replace("|", "\\|") for cell in row] for row in (table.columns, *table.rows))
    rule = ["---:" if number else "---" for number in numbers(table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (first, rule, *rows))


def _marked(text: str) -> str:
    """Text in which Markdown finds no signs of its own but `code`."""
    parts = re.split(r"(`[^`\n]+`)", text)      # every second is code
    parts[::2] = [SIGNS.sub(r"\\\g<0>", part.replace("&", "&amp;").replace("<", "&lt;")) for part in parts[::2]]
    return "".join(parts)


# ------------------------------------------------------------------------------------------------ HTML

def _page(folder: Path, found: Found, answers: Answers) -> str:
    about = "".join(f"<tr><th>{_shown(name)}</th><td>{_shown(text)}</td></tr>\n" for name, text in facts(found))
    contents = "".join(f'<li><a href="#{_shown(q.name)}">{_shown(q.title)}</a></li>\n' for q, _ in answers)
    sections = "".join(_section(folder, question, answer) for question, answer in answers)
    title = _shown(f"fastmha: {TITLE.lower()}, {found['machine']['cpu']}, {found['date'][:10]}")
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n<header>\n<h1>{TITLE}</h1>\n{_paragraphs(READING)}"
            f'<div class="wide"><table>\n<tbody>\n{about}</tbody>\n</table></div>\n</header>\n'
            f"<nav>\n<ol>\n{contents}</ol>\n</nav>\n<main>\n{sections}</main>\n</body>\n</html>\n")


def _section(folder: Path, question: Question, answer: Answer | None) -> str:
    head = (f'<section id="{_shown(question.name)}">\n<h2>{_shown(question.title)}</h2>\n'
            f'{_paragraphs(question.question, "question")}')
    if answer is None:
        return f"{head}<p>{NOT_MEASURED}</p>\n</section>\n"
    pictures = ""
    for picture in answer.pictures:
        image = base64.b64encode((folder / f"{picture.name}.png").read_bytes()).decode("ascii")
        alternative = _shown(picture.data["title"].replace("`", ""))
        pictures += (f'<figure>\n<img alt="{alternative}" src="data:image/png;base64,{image}">\n'
                     f"<figcaption>{_shown(picture.caption)}</figcaption>\n</figure>\n")
    return (f'{head}{_paragraphs(answer.short, "short")}<h3>Method</h3>\n{_paragraphs(answer.method)}'
            f'{"".join(map(_table, answer.tables))}{pictures}<h3>Limits</h3>\n{_paragraphs(answer.limits)}</section>\n')


def _table(table: Table) -> str:
    kinds = [' class="n"' if number else "" for number in numbers(table)]
    head = "".join(f'<th scope="col"{kind}>{_shown(name)}</th>' for kind, name in zip(kinds, table.columns))
    rows = "".join(f'<tr><th scope="row">{_shown(row[0])}</th>'
                   + "".join(f"<td{kind}>{_shown(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:])) + "</tr>\n"
                   for row in table.rows)
    return (f'<div class="wide"><table>\n<caption>{_shown(table.title)}</caption>\n<thead>\n<tr>{head}</tr>\n</thead>\n'
            f"<tbody>\n{rows}</tbody>\n</table></div>\n" + (_paragraphs(table.note, "note") if table.note else ""))


def _paragraphs(text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return "".join(f"<p{named}>{_shown(part)}</p>\n" for part in text.split("\n\n"))


def _shown(text: str) -> str:
    """Text as HTML; `code` as such."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text))


def main(document: Path) -> int:
    """``python -m fastmha.study.report docs/layouts.md``: refresh a document, and draw its pictures, from results.json in the
    folder of its name. Returns the exit status: 2 if the results cannot be read."""
    from fastmha.study import questions, runner

    folder = document.with_suffix("")
    results = folder / runner.RESULTS
    try:
        found = runner.read(results)
    except (OSError, ValueError) as error:
        return failed(f"cannot read {results}: {error.strerror}" if isinstance(error, OSError) else str(error))
    try:
        draw(folder, found, [(question, question.answered(found)) for question in questions.ALL])
        text = refreshed(document.read_text(encoding="utf-8"), found, f"{folder.name}/")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return failed(f"{results} holds what no measurement of this version has found: {type(error).__name__}: {error}")
    replace_text(document, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))


