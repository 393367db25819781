"""The study's report, as HTML, as Markdown and in a terminal: it holds every text, number and picture, whatever these are."""

import base64
import io
import re
from html.parser import HTMLParser

import pytest
from study_support import EXTRA, FOUND, HARD, KINDS, LONG, SOME, WIDE, full_answer, needs_extra, question

from fastmha.study import report
from fastmha.study.answer import Answer, Table


class Page(HTMLParser):
    """Tags with attributes and the text of an HTML file; asserts that tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def of(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a report with every kind of picture, its HTML and what was returned."""
    if EXTRA:
        pytest.skip(f'{", ".join(EXTRA)} not installed: pip install "fastmha[study]"')
    folder = tmp_path_factory.mktemp("report")
    files = report.write(folder, FOUND, [question(full_answer()), question(None, "other")], None)
    return folder, Page((folder / "report.html").read_text(encoding="utf-8")), files


def test_a_report_is_pictures_html_and_markdown(written):
    folder, _, files = written
    assert files == {"Results": folder / "results.json", "Report": folder / "report.html", "Pictures": folder}
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["report.html", "report.md", *(f"{kind}_picture.png" for kind in KINDS)])


def test_the_html_report_refers_to_nothing_outside_itself(written):
    folder, page, _ = written
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "script", "iframe", "object", "base"})
    for _, attributes in page.tags:
        assert attributes.get("href", "#").startswith("#")
        assert attributes.get("src", "data:").startswith("data:image/png;base64,") or "src" not in attributes
        assert not attributes.keys() & {"srcset", "style", "action", "poster"}
    assert not re.search(r"url\(|@import|https?:", re.sub(r"base64,[^\"]*", "", text))
    drawn = [base64.b64decode(image["src"].partition(",")[2]) for image in page.of("img")]
    assert drawn == [(folder / f"{kind}_picture.png").read_bytes() for kind in KINDS]


def test_the_html_report_has_language_charset_title_and_texts_for_pictures(written):
    _, page, _ = written
    assert page.of("html") == [{"lang": "en"}]
    assert {"charset": "utf-8"} in page.of("meta")
    assert len(page.of("title")) == len(page.of("h1")) == 1
    assert [image["alt"] for image in page.of("img")] == [make(1, 3)["title"] for make in KINDS.values()]
    assert {link["href"] for link in page.of("a")} == {f"#{s['id']}" for s in page.of("section")} == {"#fake", "#other"}


def test_the_html_report_shows_every_text_as_it_is(written):
    folder, page, _ = written
    for expected in ("Title of fake", "Is it so, fake & <all>?", f"Short: {HARD}", "Method one.", "Method two.", "Limits <here>.",
                     f"Caption of bars: {HARD}", "Ratios", "GFLOP/s at the median time.", "Title of other", "Not measured.",
                     *(cell for table in (SOME, WIDE) for row in table.rows for cell in row)):
        assert expected in page.text
    assert page.of("i") == []
    assert "@media print" in (folder / "report.html").read_text(encoding="utf-8")


def test_reports_say_where_and_how_was_measured(written):
    folder, page, _ = written
    for text in (page.text, (folder / "report.md").read_text(encoding="utf-8")):
        for expected in ("fastmha study", "2025-01-02T03:04:05", "A CPU", "2 usable", "L1d 48 KiB, L3 32 MiB", "2 threads, avx2",
                         "fastmha 1.0, python 3.11", "200 GFLOP/s in float32, 100 GFLOP/s in float64", "20 GB/s"):
            assert expected in text


@needs_extra
def test_reports_explain_names_of_cases_and_ratios_before_the_first_of_them(tmp_path):
    from rich.console import Console

    out = io.StringIO()
    found = {**FOUND, "left_out": [{"question": "fake", "label": LONG}]}
    report.write(tmp_path, found, [question(full_answer([]))], Console(file=out, width=2000))
    html, marked = ((tmp_path / name).read_text(encoding="utf-8") for name in ("report.html", "report.md"))
    for text in (Page(html).text, marked, out.getvalue()):
        explained = text.index("Cases are named by their shape: B batch rows, H heads (H16/4: 16 query heads")
        assert explained < text.index("Short: a|b")
        assert explained < text.index(LONG)
        assert "no difference was found" in text[explained:text.index(LONG)]


def test_numbers_stand_to_the_right(written):
    _, page, _ = written
    assert report.numbers(SOME) == [False, True, True, False]
    kinds = [cell.get("class") for cell in page.of("td")]
    assert kinds.count("n") == 3 * 2 + 2 * 14
    assert report.markdown_table(SOME).splitlines()[1] == "| --- | ---: | ---: | --- |"


def test_a_markdown_table_has_its_cells_whatever_they_hold():
    lines = report.markdown_table(SOME).splitlines()
    assert len(lines) == 2 + len(SOME.rows)
    for line in lines:
        assert len(re.split(r"(?<!\\)\|", line)) == len(SOME.columns) + 2
    assert lines[2] == f"| {LONG} | 123.4 | = 1.00 ±0.02 | neither |"
    assert lines[3].startswith(r'| a\|b &lt;i>1 &amp; 2&lt;/i> "q" x_y \_z\_ 2\*3\*4 | 1,234 |')


def test_the_markdown_report_holds_the_sentences_and_links_the_pictures_beside_it(written):
    folder, _, _ = written
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == ["Title of fake", "Title of other"]
    assert re.findall(r"^!\[[^\]]+\]\((.*)\)$", text, re.M) == [f"{kind}_picture.png" for kind in KINDS]
    for expected in (report.markdown_table(SOME), report.markdown_table(WIDE), "Method one.\n\nMethod two.", "Limits &lt;here>.",
                     "Not measured."):
        assert expected in text


@needs_extra
@pytest.mark.parametrize("width", [80, 60, 200])
def test_the_tables_fit_the_terminal_with_every_number_whole(width, tmp_path):
    from rich.console import Console

    out = io.StringIO()
    report.write(tmp_path, FOUND, [question(full_answer([])), question(None, "other")], Console(file=out, width=width))
    printed = out.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    for table in (SOME, WIDE):
        for row in table.rows:
            for number, cell in zip(report.numbers(table), row, strict=True):
                assert not number or cell in printed
    for expected in ("Title of fake", "Short: a|b <i>1 & 2</i>", "Ratios", SOME.note, "Title of other", "Not measured."):
        assert expected in printed


@needs_extra
def test_markup_in_texts_is_no_markup_of_the_terminal(tmp_path):
    from rich.console import Console

    out = io.StringIO()
    answer = Answer("[bold]short[/bold]", "m", "l", [Table("[red]t", ["[b]c"], [["[/]"]], "[i]n")])
    report.write(tmp_path, FOUND, [question(answer)], Console(file=out, width=80))
    for text in ("[bold]short[/bold]", "[red]t", "[b]c", "[/]", "[i]n"):
        assert text in out.getvalue()


@needs_extra
def test_an_answer_that_fails_is_not_swallowed(tmp_path):
    with pytest.raises(ZeroDivisionError):
        report.write(tmp_path, FOUND, [question(lambda found: 1 / 0)], None)
