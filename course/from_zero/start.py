"""Make a blank book.

    python course/from_zero/start.py mine
    python course/from_zero/start.py late --from 5      stages 1 to 4 are written already

The book has our current chapters: essays, names, shapes, docstrings. The functions of the stages
are blank and say what they must do. All other functions stay, and so does every bounds check,
because MLX has none and would write a wrong row into other memory. Where next: README.md in this
folder.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course.from_zero.stages import STAGES, Task, tasks
from course.overlay import CHAPTERS, PACKAGE, file_in, functions, has_reference, our_file

MADE_OF = "made-of.txt"
# Appended to each chapter
STAND_IN = """

# What is blank above runs with our code
from course.overlay import fill_blanks

fill_blanks(__name__)
"""
OUR_PACKAGE = '''"""Our package `models`, in which ops.py and rope.py of this folder come first."""

from pathlib import Path

from course.overlay import ROOT

__path__ = [str(Path(__file__).parent), str(ROOT / "models")]
'''
# Engine defaults that are switched off in the blank book, until they are wanted
SWITCHES = {
    r"(prefix_cache: bool) = \w+": r"\1 = False",
    r"(speculate: int \| Drafter \| None) = \w+": r"\1 = 0",
}


def task_of(task: Task, stage: int, indent: int) -> list[str]:
    """Return the lines that replace a function's body."""
    margin = " " * indent
    says = " ".join(task.does.split())
    lines = textwrap.wrap(f"Stage {stage}. {says}", 96 - indent, break_on_hyphens=False)
    named = task.name.partition(".")[2]
    told = f'raise NotImplementedError("stage {stage}: {named} is blank")'
    return [*(f"{margin}# {line}" for line in lines), margin + told]


def blank(text: str, wanted: dict[str, tuple[int, Task]]) -> str:
    """Return the chapter with the bodies of these functions replaced by their tasks."""
    lines = text.splitlines()
    nodes = functions(text)
    for name in sorted(wanted, key=lambda name: -nodes[name].lineno):
        node = nodes[name]
        stage, task = wanted[name]
        has_docstring = ast.get_docstring(node) is not None
        # A comment before the first statement is removed with it
        last_kept = node.body[0].end_lineno if has_docstring else header_end(lines, node)
        lines[last_kept : node.end_lineno] = task_of(task, stage, node.body[0].col_offset)
    return "\n".join(lines) + "\n"


def filled(text: str, name: str, other: str) -> str:
    """Return the chapter with the body of a blank function taken from another text."""
    lines = text.splitlines(keepends=True)
    end = functions(text)[name].end_lineno
    theirs = functions(other)[name]
    body = other.splitlines(keepends=True)[theirs.body[0].lineno - 1 : theirs.end_lineno]
    lines[end - 1 : end] = body
    return "".join(lines)


def header_end(lines: list[str], node: ast.FunctionDef) -> int:
    """Return the last line of `def ...:`, counted from 1."""
    at = node.lineno
    while not re.search(r":\s*(#.*)?$", lines[at - 1]):
        at += 1
    return at


def blank_book(first: int = 1) -> dict[str, str]:
    """Return the text of every chapter that has a function of some stage, by file name."""
    book = {}
    blanks = tasks(first)
    for chapter in CHAPTERS:
        name = chapter.rpartition(".")[2]
        if name not in tasks():
            continue
        text = our_file(chapter).read_text(encoding="utf-8")
        if chapter == "nanobatch":
            for switch, off in SWITCHES.items():
                text, count = re.subn(switch, off, text, count=1)  # the first match is the engine's
                assert count == 1, switch
        book[f"{name}.py"] = blank(text, blanks.get(name, {}))
    return book


def mark() -> str:
    """Return a checksum of the blank book. Books of other versions have a different one."""
    return f"{zlib.crc32(''.join(blank_book().values()).encode()):08x}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="start.py", description="Make a blank book."
    )
    parser.add_argument("folder", help="where: a new folder, such as mine")
    parser.add_argument(
        "--from",
        dest="first",
        type=int,
        choices=range(1, len(STAGES) + 2),
        metavar="STAGE",
        default=1,
        help="leave blank what is written from this stage on (default: 1)"
        if has_reference()
        else argparse.SUPPRESS,
    )
    args = parser.parse_args(arguments)
    if args.first > 1 and not has_reference():
        print("start.py: --from takes our functions, and a handout has none", file=sys.stderr)
        return 2
    folder = Path(args.folder)
    there = [file_in(folder, chapter) for chapter in CHAPTERS]
    there = [file for file in there if file.exists()]
    if there:
        print(f"start.py: {there[0]} is there already; name another folder", file=sys.stderr)
        return 2
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in blank_book(args.first).items():
            (folder / name).write_text(text + STAND_IN, encoding="utf-8")
        (folder / PACKAGE).write_text(OUR_PACKAGE)
        if has_reference():  # not in a handout, where students hand the folder in
            (folder / ".gitignore").write_text("*\n")  # ruff respects it, too
        (folder / MADE_OF).write_text(f"{mark()}\n")
    except OSError as error:
        print(f"start.py: {folder}: {error.strerror}; name another folder", file=sys.stderr)
        return 2
    count = sum(len(stage.tasks) for stage in STAGES if stage.number >= args.first)
    page = "course/from_zero/README.md" if has_reference() else "README.md"
    print(f"{folder}: {count} functions to write. Begin with {page}, and then:")
    print(f"    python course/from_zero/check.py {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
