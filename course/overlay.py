"""The overlay: core files of a student's folder run in place of ours.

A student who writes the core anew (course/from_zero) wants to run it with everything around it: the
screen, the benchmark, the server. `--book DIR` or NANOBATCH_BOOK names the folder, and child processes
inherit it. A finder before all others in `sys.meta_path` serves the files in that folder. A function
is blank if its body is `raise NotImplementedError("stage 3: ...")`; then our code is put into it, and
calls the student's other functions.

The folder is chosen before the first core module is imported, once for a process. Tracebacks name the
file in which the code was written. The engine's first line names the folder, and
`engine.is_batch_invariant` is False, because our proof is about our files.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

ROOT = Path(__file__).resolve().parents[1]
START = ROOT / "course" / "from_zero" / "start.py"
VARIABLE = "NANOBATCH_BOOK"
CHAPTERS = (
    "llama",
    "models.ops",
    "models.rope",
    "kv",
    "sampling",
    "sched",
    "policies",
    "prefix",
    "runner",
    "nanobatch",
    "course.from_zero.reference.pages",
    "course.from_zero.reference.lookup",
    "course.from_zero.reference.eight_bits",
    "course.from_zero.reference.ranks",
)
PATIENCE_S = 10  # for a step of another book
raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(chapter: str) -> str:
    """The module of a chapter such as "ops"."""
    return next(name for name in CHAPTERS if name.rpartition(".")[2] == chapter)


def our_file(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def file_in(folder: Path, module: str) -> Path:
    """The chapters of a reader lie side by side."""
    return folder / f"{module.rpartition('.')[2]}.py"


def functions(text: str) -> dict[str, Function]:
    """All functions of a chapter, by name: "forward", "Window.write"."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, Function):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, Function):
                    found[f"{node.name}.{inner.name}"] = inner
    return found


@cache
def blanks(text: str) -> dict[str, int]:
    """The functions that are still blank, and the stage of each."""
    found = {}
    for name, node in functions(text).items():
        if len(node.body) == 1 + (ast.get_docstring(node) is not None):
            body = ast.unparse(node.body[-1])
            if said := re.match(r"raise NotImplementedError\('stage (\d+)\b", body):
                found[name] = int(said[1])
    return found


def has_reference() -> bool:
    """False in a handout (course/handout.py): there our functions are blank, too."""
    return not blanks(our_file("llama").read_text(encoding="utf-8"))


# --- our functions in the place of others -------------------------------------------------------


def function_of(module: ModuleType, name: str) -> FunctionType:
    """The function with a name such as "Window.write"; a property's, too."""
    try:
        found = attrgetter(name)(module)
    except AttributeError as error:
        raise ImportError(f"{module.__file__}: {error}: write it again") from None
    return found.fget if isinstance(found, property) else found


@cache
def codes(file: Path) -> dict[str, CodeType]:
    """The code of a file's functions, by name, as it is when the file is run."""
    found = [compile(file.read_bytes(), str(file), "exec", dont_inherit=True)]
    for code in found:  # it grows while we look
        found += [const for const in code.co_consts if isinstance(const, CodeType)]
    return {code.co_qualname: code for code in found}


@contextmanager
def swapped(names: Iterable[str], file: Path | None = None) -> Iterator[None]:
    """Inside, these functions ("kv.Window.write") have the code of this file, or else ours."""
    before = []
    try:
        for each in names:
            chapter, _, name = each.partition(".")
            module = import_module(module_name(chapter))
            function = function_of(module, name)
            before.append((function, function.__code__))
            function.__code__ = codes(file or our_file(module.__name__))[name]
        yield
    finally:
        for function, code in before:
            function.__code__ = code


# --- the book of this process -------------------------------------------------------------------


class Chapter(SourceFileLoader):
    """Runs a reader's file, and puts our code into what is blank."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name in blanks(Path(self.path).read_text(encoding="utf-8")):
            function_of(module, name).__code__ = codes(our_file(self.name))[name]


class Book(MetaPathFinder):
    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def files(self) -> list[Path]:
        files = (file_in(self.folder, chapter) for chapter in CHAPTERS)
        return [file for file in files if file.is_file()]

    def blanks(self) -> Iterator[tuple[str, int]]:
        for file in self.files:
            for name, stage in blanks(file.read_text(encoding="utf-8")).items():
                yield f"{file.stem}.{name}", stage

    def blanks_of_engine(self) -> dict[str, int]:
        """Without those of stages 9 to 12, which no engine runs."""
        found = dict(self.blanks())
        return {name: stage for name, stage in found.items() if stage < 9}

    def check_whole(self) -> None:
        """In a handout nothing can stand in for what is blank."""
        left = [*self.blanks_of_engine()]
        if left and not has_reference():
            count = f"{len(left)} functions are blank, {left[0]} among them"
            wants = "a handout has no reference to stand in for them: write them first"
            raise ValueError(f"{self.folder.name}: {count}; {wants}")

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name not in CHAPTERS:
            return None
        file = file_in(self.folder, name)
        if not file.is_file():
            return None
        return spec_from_file_location(name, file, loader=Chapter(name, str(file)))

    def __str__(self) -> str:
        """What runs: which book, and what in it is ours."""
        left = self.blanks_of_engine()
        named = f"book {self.folder.name}"
        if not left:
            return named
        stages = sorted(set(left.values()))
        which = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        count = f"{len(left)} function{'s' * (len(left) > 1)}"
        return f"{named} (still blank: {count} of {which}; ours stand in)"


def check_book(folder: str) -> Path:
    """A folder with chapters in it that are Python, or a ValueError."""
    path = Path(folder).expanduser().resolve()
    files = Book(path).files
    if not files:
        raise ValueError(
            f"{folder!r} is no folder with a chapter such as llama.py in it; "
            f"python {os.path.relpath(START)} mine makes one"
        )
    for file in files:
        try:
            ast.parse(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            said = getattr(error, "msg", error)
            raise ValueError(f"{folder!r}: {file.name}, line {line}: {said}") from None
    return path


def asked() -> str:
    """The book that the command line names, or the environment. Read before the other options are,
    because these need the chapters."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--book", nargs="?", default=os.environ.get(VARIABLE))
    return parser.parse_known_args()[0].book or ""


def open_book(folder: str) -> Book:
    """From now on its chapters are found in the place of ours."""
    book = Book(check_book(folder))
    os.environ[VARIABLE] = str(book.folder)
    sys.meta_path.insert(0, book)
    if (
        "pytest" not in sys.modules
    ):  # it has a clock of its own, and prints the stack of each thread
        threading.Thread(target=watch, name="patience", daemon=True).start()
    return book


class Endless(RuntimeError):
    def __init__(self) -> None:
        super().__init__(f"Python alone took more than {PATIENCE_S} s for a step: an endless loop?")


def watch() -> None:
    """Raise an exception in a thread whose step never ends.

    A plan holds the engine's lock, for which the screen waits: so a loop without an end would be a
    program that cannot be left. As an exception it is a mistake like any other.
    """
    steps: dict[
        int, tuple[FrameType, float]
    ] = {}  # by thread: its step, and when it was first seen
    while True:
        time.sleep(PATIENCE_S / 20)
        before, steps = steps, {}
        for thread, frame in sys._current_frames().items():
            step = step_of(frame)
            if step is None:
                continue
            now = seconds_of(thread)
            known, since = before.get(thread, (None, now))
            if step is not known:
                steps[thread] = step, now
            elif now - since <= PATIENCE_S:
                steps[thread] = step, since
            else:
                raise_in(ctypes.c_ulong(thread), ctypes.py_object(Endless))


def seconds_of(thread: int) -> float:
    """The processor time of a thread, where that is known: on a busy machine each step takes long."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def step_of(frame: FrameType | None) -> FrameType | None:
    """The step that a thread is in; None if it is in none, or in a debugger."""
    while frame is not None:
        file = os.path.basename(frame.f_code.co_filename)
        if file == "bdb.py":
            return None
        if (file, frame.f_code.co_name) == ("nanobatch.py", "step"):
            return frame
        frame = frame.f_back
    return None


def labelled(device: str) -> str:
    """What a program says of its device; and whose core runs, if it is not ours."""
    book = opened()
    return f"{device}, {book}" if book else device


def opened() -> Book | None:
    """The book that runs in the place of ours."""
    books = (finder for finder in sys.meta_path if isinstance(finder, Book))
    return next(books, None)
