"""Books for the tests of the course: our chapters, simpler ones, and mistakes in them."""

import shutil
from pathlib import Path

from course import overlay
from course.from_zero import start
from course.from_zero.stages import STAGES, tasks

SIMPLE = Path(__file__).with_name("simple_core.py")


def simple(stage: int) -> str:
    """Return the functions of a stage in their simplest form. From stage 9 on, ours are simple enough."""
    return (SIMPLE if stage < 9 else STAGES[stage - 1].tasks[0].reference).read_text()


def full_book(folder: Path) -> Path:
    """Write our own chapters into a folder."""
    folder.mkdir()
    (folder / overlay.PACKAGE).write_text(start.OUR_PACKAGE)
    for chapter in tasks():
        shutil.copy(overlay.our_file(overlay.module_name(chapter)), folder)
    return folder


def fill(folder: Path, stages: list[int]) -> Path:
    """Write the simple functions of these stages into a blank book."""
    for chapter, functions in tasks().items():
        file = folder / f"{chapter}.py"
        for name, (stage, _) in functions.items():
            if stage in stages:
                file.write_text(start.filled(file.read_text(), name, simple(stage)))
    return folder


def with_mistake(text: str, name: str, right: str, wrong: str) -> str:
    """Return a chapter in which one function has a mistake."""
    lines = text.splitlines(keepends=True)
    node = overlay.functions(text)[name]
    body = "".join(lines[node.lineno - 1 : node.end_lineno])
    assert right in body, f"{name} has no {right!r} any more"
    lines[node.lineno - 1 : node.end_lineno] = [body.replace(right, wrong)]
    return "".join(lines)


def change(folder: Path, name: str, right: str, wrong: str) -> None:
    """Plant a mistake in a book. `name` looks like "kv.Window.write"."""
    chapter, _, function = name.partition(".")
    file = folder / f"{chapter}.py"
    file.write_text(with_mistake(file.read_text(), function, right, wrong))
