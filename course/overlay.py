"""Run core files of a student's folder in place of ours.

A student who rewrites the core (course/from_zero) wants to run it with everything around it: the
screen, the benchmark, the server. `run.py` puts the folder first on Python's path, and child
processes inherit that. A function is blank if its body is `raise NotImplementedError("stage 3:
...")`. Each chapter ends with `fill_blanks(__name__)`, which puts our code into the blank
functions. Our code then calls the student's other functions.

The rest of nanobatch does not know about this. It only detects that files other than ours are
running (`base/foreign_modules.py`). In that case the first line of the output says so, and
`engine.is_batch_invariant` is False, because our proof is about our files.
"""

from __future__ import annotations

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
from inspect import getmodulename
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

ROOT = Path(__file__).resolve().parents[1]
START = ROOT / "course" / "from_zero" / "start.py"
CHAPTERS = (
    "llama",
    "models.ops",
    "models.rope",
    "kv",
    "sampling",
    "token_choice",
    "request",
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
PACKAGE = "models.py"  # a student's package `models`, with the student's ops.py and rope.py
PATIENCE_S = 10  # limit for a step of a student's book
raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(chapter: str) -> str:
    """Return the module of a chapter such as "ops"."""
    return next(name for name in CHAPTERS if name.rpartition(".")[2] == chapter)


def our_file(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def file_in(folder: Path, module: str) -> Path:
    """Return the file of a chapter in a student's folder, which has no subfolders."""
    return folder / f"{module.rpartition('.')[2]}.py"


def functions(text: str) -> dict[str, Function]:
    """Return all functions of a chapter, by name: "forward", "Window.write"."""
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
    """Return the functions that are still blank, each with its stage."""
    found = {}
    for name, node in functions(text).items():
        if len(node.body) == 1 + (ast.get_docstring(node) is not None):
            body = ast.unparse(node.body[-1])
            if said := re.match(r"raise NotImplementedError\('stage (\d+)\b", body):
                found[name] = int(said[1])
    return found


def has_reference() -> bool:
    """False in a handout (course/handout.py), where our functions are blank, too."""
    return not blanks(our_file("llama").read_text(encoding="utf-8"))


# --- replacing functions ------------------------------------------------------------------------


def function_of(module: ModuleType, name: str) -> FunctionType:
    """Return the function with a name such as "Window.write", or the getter of a property."""
    try:
        found = attrgetter(name)(module)
    except AttributeError as error:
        raise ImportError(f"{module.__file__}: {error}: write it again") from None
    return found.fget if isinstance(found, property) else found


@cache
def codes(file: Path) -> dict[str, CodeType]:
    """Compile a file, and return the code objects of its functions by name."""
    found = [compile(file.read_bytes(), str(file), "exec", dont_inherit=True)]
    for code in found:  # the list grows during the loop
        found += [const for const in code.co_consts if isinstance(const, CodeType)]
    return {code.co_qualname: code for code in found}


@contextmanager
def swapped(names: Iterable[str], file: Path | None = None) -> Iterator[None]:
    """Within the block, these functions ("kv.Window.write") have the code of `file`, or ours."""
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


# --- a student's book ---------------------------------------------------------------------------


def fill_blanks(name: str) -> None:
    """Put our code into the functions of a student's chapter that are still blank."""
    module = sys.modules[name]
    for each in blanks(Path(module.__file__).read_text(encoding="utf-8")):
        function_of(module, each).__code__ = codes(our_file(name))[each]
    start_watch()


def opened() -> Book | None:
    """Return the book that `run.py` has opened for this process, or None."""
    book = Book(Path(os.environ.get("PYTHONPATH", "").partition(os.pathsep)[0]).resolve())
    return book if sys.flags.safe_path and book.folder != ROOT and book.files else None


class Book:
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
        """Return the blank functions of stages 1 to 8; no engine runs the others."""
        found = dict(self.blanks())
        return {name: stage for name, stage in found.items() if stage < 9}

    def check_whole(self) -> None:
        """Refuse blanks in a handout, because it has no reference to replace them."""
        left = [*self.blanks_of_engine()]
        if left and not has_reference():
            count = f"{len(left)} functions are blank, {left[0]} among them"
            wants = "a handout has no reference to stand in for them: write them first"
            raise ValueError(f"{self.folder.name}: {count}; {wants}")

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that runs these chapters, and of its children.

        PYTHONSAFEPATH keeps a program's own folder from being first on the path.
        """
        path = [str(self.folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, path))
        return os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}

    def __str__(self) -> str:
        """Name the book, and say how much of it is still ours."""
        left = self.blanks_of_engine()
        named = f"book {self.folder.name}"
        if not left:
            return named
        stages = sorted(set(left.values()))
        which = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        count = f"{len(left)} function{'s' * (len(left) > 1)}"
        return f"{named} (still blank: {count} of {which}; ours stand in)"


def check_book(folder: str) -> Path:
    """Return the path of a student's folder, after checking it.

    ValueError unless it contains chapters that are valid Python, and no other modules.
    """
    path = Path(folder).expanduser().resolve()
    files = Book(path).files
    if not files:
        raise ValueError(
            f"{folder!r} is not a folder with a chapter such as llama.py in it; "
            f"python {os.path.relpath(START)} mine makes one"
        )
    if os.pathsep in str(path):
        raise ValueError(
            f"{folder!r}: Python's path takes no folder with {os.pathsep!r} in its name"
        )
    names = {file.name for file in files}
    for file in sorted(path.iterdir()):
        module = file.name if (file / "__init__.py").exists() else getmodulename(file.name)
        if module and module.isidentifier() and file.name not in {*names, PACKAGE}:
            why = "it would run in place of any other module of that name"
            raise ValueError(f"{folder!r}: {file.name} is not a chapter; move it elsewhere: {why}")
    if names & {"ops.py", "rope.py"} and not (path / PACKAGE).is_file():
        why = f"{PACKAGE} is missing, without which ops.py and rope.py are not found"
        raise ValueError(f"{folder!r}: {why}; start.py writes it into a new folder")
    for file in files:
        try:
            ast.parse(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            said = getattr(error, "msg", error)
            raise ValueError(f"{folder!r}: {file.name}, line {line}: {said}") from None
    return path


@cache
def start_watch() -> None:
    if "pytest" not in sys.modules:  # pytest has a timeout of its own
        threading.Thread(target=watch, name="patience", daemon=True).start()


class Endless(RuntimeError):
    def __init__(self) -> None:
        super().__init__(f"Python alone took more than {PATIENCE_S} s for a step: an endless loop?")


def watch() -> None:
    """Raise an exception in a thread whose step never finishes.

    A step holds the engine's lock, and the screen waits for that lock. So with an endless loop the
    program could not be quit. With the exception, it is a mistake like any other.
    """
    steps: dict[
        int, tuple[FrameType, float]
    ] = {}  # thread -> its step, and when that step was first seen
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
    """Return a thread's processor time, if known: on a busy machine each step takes long."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def step_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame of a thread's current step; None outside of one, or in a debugger."""
    while frame is not None:
        file = os.path.basename(frame.f_code.co_filename)
        if file == "bdb.py":
            return None
        if (file, frame.f_code.co_name) == ("nanobatch.py", "step"):
            return frame
        frame = frame.f_back
    return None
