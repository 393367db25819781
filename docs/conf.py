"""How the pages are built: ``sphinx-build -W --keep-going -n docs docs/_build``, with the extra ``docs`` installed."""
from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref

import fastmha

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project, author, copyright = "fastmha", "the authors of fastmha", "the authors of fastmha"
version = release = fastmha.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode", "numpydoc"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
html_theme = "alabaster"
html_theme_options = {
    "description": "Fast multi-head attention on CPUs for NumPy arrays", "page_width": "1180px", "body_max_width": "none",
    "sidebar_width": "190px", "font_size": "16px",
}
html_static_path, html_css_files = ["_static"], ["pages.css"]
html_copy_source = False

default_role = "py:obj"                             # of single backticks in docstrings: a name that there is
nitpick_ignore_regex = [("py:obj", r"(torch|jax)\..+")]     # their own names, whose pages are elsewhere
autodoc_mock_imports = ["torch", "transformers", "jax"]    # the pages are built without them
autodoc_typehints = "none"                          # the docstrings say types with shapes
autodoc_member_order = "bysource"
numpydoc_show_class_members = False                 # _templates/autosummary/class.rst shows them
autosummary_filename_map = {"fastmha.Plan": "fastmha.Plan-class"}      # beside fastmha.plan, whatever the file system
myst_heading_anchors = 3


def arguments() -> set[str]:
    """What numpydoc puts in single backticks beside names of objects: arguments of functions and fields of classes."""
    found = set()
    for module in (fastmha, *(import_module(f"fastmha.{name}") for name in ("analysis", "parallel", "plot", "reference",
                                                                              "weights"))):
        for x in vars(module).values():
            functions = [f for _, f in inspect.getmembers(x, inspect.isfunction)] if inspect.isclass(x) else [x]
            found |= {name for f in functions if inspect.isfunction(f) for name in inspect.signature(f).parameters}
    return found


ARGUMENTS = arguments()


def argument(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A reference that names an argument is no missing one."""
    return contnode if node.get("reftype") == "obj" and node["reftarget"] in ARGUMENTS else None


def draw(app: Any) -> None:
    """The pictures."""
    folder = HERE / "_pictures"
    folder.mkdir(exist_ok=True)
    for name, picture in import_module("pictures").PICTURES.items():
        picture().savefig(folder / f"{name}.svg", bbox_inches="tight")


def put_in(app: Any, page: str, source: list[str]) -> None:
    """A picture in the place of the comment that asks for it."""
    source[0] = re.sub(r"<!-- picture (\w+): (.*?) -->", r"![\2](_pictures/\1.svg)", source[0])


def without_citations(app: Any, tree: nodes.document) -> None:
    """In the tables of every name, the first line of a docstring is away from its references."""
    for table in tree.findall(nodes.table):
        for cited in [x for x in table.findall(pending_xref) if x["refdomain"] == "citation"]:
            before = cited.parent[cited.parent.index(cited) - 1]
            if isinstance(before, nodes.Text):
                cited.parent.replace(before, nodes.Text(before.rstrip()))
            cited.parent.remove(cited)


def setup(app: Any) -> None:
    app.connect("builder-inited", draw)
    app.connect("source-read", put_in)
    app.connect("doctree-read", without_citations)
    app.connect("missing-reference", argument)
