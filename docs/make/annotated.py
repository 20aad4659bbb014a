"""Write the core files as pages, with the prose on the left and the code on the right.

    python docs/make/annotated.py                     # writes docs/annotated/
    python -m webbrowser docs/annotated/index.html

The prose is taken from the files: docstrings, and comments on their own lines. A word such as "ghost"
links to the first step of the recorded run (`docs/index.html`) with a ghost.

The pages are not committed, because every change of a core file would change them, too. GitHub's
workflow builds them when it publishes `docs/`.
"""

import ast
import html
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "annotated"
STYLE = ROOT / "docs" / "make" / "annotated.css"
# In reading order
CORE = ["llama", "kv", "request", "prefix", "sched", "policies", "sampling", "runner", "nanobatch"]
CORE += ["prompt_lookup"]
# Marks in a paragraph. All except code and emphasis are moments of the run, named as in EXAMPLES of
# web/details.js. Code comes first, so that words within code do not become links.
MARKS = re.compile(
    r"""
    `(?P<code>[^`]+)`
    | \*?\b(?P<join>plan\ -&gt;\ run\ -&gt;\ commit|next\s+step|admitted|admission)\b\*?
    | \*?\b(?P<chunk>chunks?)\b\*?
    | \*?\b(?P<prefix>prefix(?:es|\ caching)?)\b\*?
    | \*?\b(?P<ghost>ghosts?)\b\*?
    | \*?\b(?P<blocked>blocked|admits\s+no\s+more)\b\*?
    | \*(?P<em>\w[^*]*)\*
    """,
    re.VERBOSE,
)
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="style.css">
<nav><a href="index.html">nanobatch, annotated</a>
{links}</nav>
<header><h1>{title}</h1>
{essay}</header>
<main>
{rows}
</main>
"""
LINKS = {f"{module}.py": f'<a href="{module}.html">{module}.py</a>' for module in CORE}
ROW = """<section id="{}"><div class="prose">{}</div>
<pre class="code">{}</pre></section>"""
HOME = """<p>The core of the engine, in the order in which it is best read. Each page is one file: its docstrings and
comments on the left, its code on the right. Words such as <a class="moment" href="../index.html#ghost">ghost</a> link
to a step of <a href="../index.html">the recorded run</a> in which one occurs.</p>"""


class Section(NamedTuple):
    """A part of a file: some lines of code, and the prose about them."""

    name: str  # the function or class that begins here, such as "Scheduler.plan"; may be empty
    prose: list[str]
    code: list[str]  # lines of HTML


def definitions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the module and all its classes and functions, with qualified names."""
    yield name, node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from definitions(child, f"{name}.{child.name}".lstrip("."))


def parts_of(text: str) -> list[Section]:
    """Split a file before each function, class and comment. The first section has the essay."""
    lines = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
    begins: dict[int, Section] = {}
    docstrings: set[int] = set()
    for name, node in definitions(ast.parse(text)):
        decorators = getattr(node, "decorator_list", [])
        line = min(getattr(each, "lineno", 1) for each in [node, *decorators])
        prose = ast.get_docstring(node)
        begins[line] = Section(name, [prose] if prose else [], [])
        if prose:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    parts: list[Section] = []
    before = ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if number in begins:
            parts.append(begins[number])
        if number in docstrings:
            continue
        if not line.startswith("#"):
            parts[-1].code.append(lines[number - 1])
        elif before.startswith("#"):
            parts[-1].prose.append(line.strip("# "))
        else:
            parts.append(Section("", [line.strip("# ")], []))
        before = line
    return parts


def in_html(prose: str) -> str:
    """Convert prose to HTML paragraphs. Indented blocks become preformatted text."""
    blocks = []
    # List items, argument descriptions and drawings start a block without a blank line before them
    prose = re.sub(r"(?m)^( {0,3}\S.*)\n(?=    |- |`.+`: )", r"\1\n\n", prose)
    for block in re.split(r"\n\n+", prose):
        escaped = html.escape(dedent(block))
        if block.startswith("    "):
            blocks.append(f"<pre>{escaped}</pre>")
        elif block.startswith("---"):
            blocks.append(f"<h2>{escaped.strip('- ')}</h2>")
        elif block:
            linked: set[str] = set()
            blocks.append(f"<p>{MARKS.sub(partial(link, linked), escaped)}</p>")
    return "\n".join(blocks)


def link(linked: set[str], found: re.Match) -> str:
    """Return the HTML of a mark. Only the first mention of each moment becomes a link; `linked` records
    them."""
    kind = found.lastgroup
    words = found[kind]
    if kind == "em":
        return f"<em>{words}</em>"
    if kind == "code":
        return LINKS.get(words, f"<code>{words}</code>")
    if kind in linked:
        return words
    linked.add(kind)
    return f'<a class="moment" href="../index.html#{kind}">{words}</a>'


def page_of(file: str, text: str) -> str:
    essay, *parts = parts_of(text)
    rows = []
    for part in [essay._replace(name="imports", prose=[]), *parts]:
        code = "\n".join(part.code).strip("\n")
        rows.append(ROW.format(part.name, in_html("\n".join(part.prose)), code))
    shown = in_html(essay.prose[0])
    return PAGE.format(
        title=file, links="\n".join(LINKS.values()), essay=shown, rows="\n".join(rows)
    )


def pages() -> dict[str, str]:
    """Return all pages, by file name."""
    found = {"style.css": STYLE.read_text(encoding="utf-8")}
    items = ""
    for file, link_to in LINKS.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        found[file.replace(".py", ".html")] = page_of(file, text)
        about = ast.get_docstring(ast.parse(text)).split("\n\n")[0]
        items += f"<li>{link_to} {in_html(about)}</li>\n"
    home = f"{HOME}<ol>{items}</ol>"
    found["index.html"] = PAGE.format(title="nanobatch, annotated", links="", essay=home, rows="")
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"begin with {FOLDER / 'index.html'}")


if __name__ == "__main__":
    main()
