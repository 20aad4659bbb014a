"""What is done of a book, stage by stage, and what fails first.

    python course/from_zero/check.py mine              all stages, up to the first that is not done
    python course/from_zero/check.py mine 6            one stage, whatever the others do
    python course/from_zero/check.py mine --hint       a hint for what fails; --hint 2 and 3 say more
    python course/from_zero/check.py mine --trace      with the whole traceback of an exception
    python course/from_zero/check.py anna ben carl     a line for each book: who is where

Each stage is tried in a process of its own, in which your functions run up to this stage, and ours
in the place of all that comes later. A process that crashes or never ends is a line like any other.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stages import STAGES, Stage, Task, tasks
from start import MADE_OF, mark

from course import overlay as book


def limit() -> int:
    """Seconds of processor time for a stage, which takes about two. (Of time as such a busy machine
    may have little.)"""
    return int(os.environ.get("NANOBATCH_ZERO_LIMIT", 60))


DONE = 0  # exit codes of a stage's process
FAILED = 1
WAITS = 3


# --- in the process of a stage ------------------------------------------------------------------


def try_stage(folder: Path, number: int, whole_trace: bool) -> int:
    """Run the checks of a stage on a reader's chapters."""
    faulthandler.enable()
    faulthandler.register(signal.SIGXCPU, chain=True)  # where it was then
    resource.setrlimit(resource.RLIMIT_CPU, (limit(), limit() + 10))
    threading.Thread(target=end_a_wait, daemon=True).start()
    book.open_book(str(folder))
    try:
        import checks  # and with them all chapters

        for chapter, functions in tasks(number + 1).items():
            (name,) = (name for name in book.CHAPTERS if name.rpartition(".")[2] == chapter)
            book.stand_in(sys.modules[name], functions, book.our_file(name))
    except (Exception, SystemExit) as error:
        print("   ✗ the chapters can be imported")
        say_exception(error, folder, whole_trace)
        return FAILED
    blank = [task.name.split(".")[-1] for task in blank_tasks(folder, STAGES[number - 1])]
    found = checks.trouble(number, blank)
    for each in checks.CHECKS[number]:
        if found and each == found[0]:
            break
        if checks.can_try(each, blank):
            print(f"   ✓ {each.says}")
    if not found:
        for line in checks.told:
            print(f"       {line}")
        return DONE
    failed, error = found
    print(f"   ✗ {failed.says}{f' ({failed.about})' if failed.about else ''}")
    if isinstance(error, checks.Wrong):
        print("\n".join(f"       {line}" for line in str(error).splitlines()))
    else:
        say_exception(error, folder, whole_trace)
    return FAILED


def end_a_wait() -> None:
    """End this process, and say where it was, once it has done nothing for so long. (Time as such
    says little: on a busy machine an endless loop, too, is slow to come to its limit.)"""
    done = -limit()
    while time.process_time() > done + limit() / 50:
        done = time.process_time()
        time.sleep(limit())
    faulthandler.dump_traceback(all_threads=True)
    os._exit(WAITS)


def say_exception(error: BaseException, folder: Path, whole: bool) -> None:
    """The lines of the reader's own chapters, and the error."""
    if whole:
        print("".join(traceback.format_exception(error)))
        return
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent == folder]
    for frame in theirs[-3:] or frames[-2:]:
        print(f"       {Path(frame.filename).name}, line {frame.lineno}, in {frame.name}")
        print(f"           {frame.line}")
    said = traceback.format_exception_only(error)
    print("".join(f"       {line}" for line in said).rstrip())


# --- around it ----------------------------------------------------------------------------------


def blank_tasks(folder: Path, stage: Stage) -> list[Task]:
    """What of a stage is not written."""
    left = {name for name, _ in book.Book(folder).blanks()}
    return [task for task in stage.tasks if task.name in left]


def run_stage(folder: Path, stage: Stage, trace: bool) -> tuple[int, str]:
    """The exit code of a stage's process, and what it said."""
    command = [sys.executable, __file__, str(folder), str(stage.number), "--inside"]
    command += ["--trace"] if trace else []
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    said = done.stdout
    if done.returncode == WAITS:
        waits = f"   ✗ no end, and no work for {limit()} s: does it wait for something?"
        return FAILED, f"{said}{waits}\n{where(done.stderr, folder)}"
    if done.returncode == -signal.SIGXCPU:
        loop = f"   ✗ no end after {limit()} s of work: an endless loop?"
        return FAILED, f"{said}{loop}\n{where(done.stderr, folder)}"
    if done.returncode < 0:
        crash = f"   ✗ the process crashed (signal {-done.returncode})"
        why = "an index or a row beyond its array? MLX checks no bounds"
        return FAILED, f"{said}{crash}: {why}\n{where(done.stderr, folder)}"
    if done.returncode not in (DONE, FAILED):
        return FAILED, f"{said}   ✗ the process ended with {done.returncode}\n{done.stderr[-2000:]}"
    if done.returncode == FAILED and not said:
        return FAILED, done.stderr[-2000:]
    return done.returncode, said


def where(stderr: str, folder: Path) -> str:
    """The reader's own lines in a dump of `faulthandler`."""
    lines = re.findall(r'File "(.*)", line (\d+) in (\w+)', stderr)
    own = [line for line in lines if Path(line[0]).parent == folder]
    return "".join(f"       {Path(f).name}, line {n}, in {name}\n" for f, n, name in own[:3])


def check_stage(folder: Path, stage: Stage, trace: bool) -> bool:
    """Say how a stage stands. Is it done?"""
    head = f"stage {stage.number}, {stage.name}"
    blank = blank_tasks(folder, stage)
    code = DONE
    said = ""
    if len(blank) < len(stage.tasks):  # what is written of a stage is tried
        code, said = run_stage(folder, stage, trace)
    state = "done" if code == DONE else "not right yet"
    if blank and code == DONE:
        state = "right so far" if said else "still blank"
    print(f"{head}: {state}")
    print(said, end="")
    for task in blank:
        print(f"   · {task.name.replace('.', '.py, ', 1)} is blank")
    return code == DONE and not blank


def failing(folder: Path, stage: Stage, said: str) -> list[Task]:
    """The functions that a hint should be about: the one that a traceback names, or those that the
    check is about, or the first that is blank, or all of the stage."""
    about = re.search(r"^   ✗ .*\((.*)\)$", said, re.MULTILINE)
    about = about[1].split(", ") if about else []
    named = [task for task in stage.tasks if f"in {task.name.split('.')[-1]}\n" in said]
    named = named[-1:] or [task for task in stage.tasks if task.name.split(".")[-1] in about]
    return named or blank_tasks(folder, stage)[:1] or list(stage.tasks)


def give_hints(folder: Path, stage: Stage, number: int) -> None:
    said = run_stage(folder, stage, False)[1]
    for task in failing(folder, stage, said):
        print(f"{task.name}, hint {number} of 3:")
        hint = task.hints[number - 1]
        lines = hint.splitlines() if "\n" in hint else textwrap.wrap(hint, 92)
        print("\n".join(f"    {line}" for line in lines))


def first_open(folder: Path) -> Iterator[Stage]:
    """The stage that is not done, if any."""
    for stage in STAGES:
        if blank_tasks(folder, stage) or run_stage(folder, stage, False)[0] != DONE:
            yield stage
            return


def show_class(books: list[str]) -> None:
    """Who is where."""
    width = max(map(len, books))
    for shown in books:
        try:
            line = progress(book.check_book(shown))
        except ValueError as error:
            line = str(error)
        print(f"{shown:<{width}}  {line}", flush=True)


def progress(folder: Path) -> str:
    stage = next(first_open(folder), None)
    if stage is None:
        return f"{'■' * len(STAGES)}  done"
    bar = "■" * (stage.number - 1) + "·" * (len(STAGES) - stage.number + 1)
    count = len(stage.tasks)
    written = count - len(blank_tasks(folder, stage))
    return f"{bar}  at stage {stage.number}, {stage.name}: {written} of {count} written"


def show_book(shown: str, chosen: list[Stage], hint: int | None, trace: bool) -> bool:
    folder = book.check_book(shown)
    made_of = folder / MADE_OF
    if made_of.is_file() and made_of.read_text().strip() != mark():
        print(f"(This book was made of an earlier nanobatch. If a name is missing: {MADE_OF})")
    if hint is not None:
        stage = chosen[0] if len(chosen) == 1 else next(first_open(folder), None)
        if stage:
            give_hints(folder, stage, hint)
        else:
            print("all stages are done: there is nothing left to hint at")
        return True
    for stage in chosen:
        if not check_stage(folder, stage, trace):
            which = "" if len(chosen) > 1 else f" {stage.number}"
            print(f"A hint: python course/from_zero/check.py {shown}{which} --hint")
            return False
        sys.stdout.flush()
    if len(chosen) == len(STAGES):
        print(f"All stages are done. See it work: python tui.py --book {shown}")
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "books", nargs="+", help="folders that start.py has made; or one, and a stage"
    )
    parser.add_argument("--hint", type=int, choices=(1, 2, 3), nargs="?", const=1)
    parser.add_argument("--trace", action="store_true", help="show whole tracebacks")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    stages = list(STAGES)
    books = args.books
    if len(books) == 2 and books[1].isdigit() and not Path(books[1]).is_dir():
        number = int(books.pop())
        if not 1 <= number <= len(STAGES):
            print(f"check.py: {number} is no stage; there are 1 to {len(STAGES)}", file=sys.stderr)
            return 2
        stages = [STAGES[number - 1]]
    if len(books) > 1:
        show_class(books)
        return 0
    try:
        folder = book.check_book(books[0])
    except ValueError as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 2
    if args.inside:
        code = try_stage(folder, stages[0].number, args.trace)
        sys.stdout.flush()
        os._exit(code)  # whatever the reader's engine has left running
    return 0 if show_book(books[0], stages, args.hint, args.trace) else 1


if __name__ == "__main__":
    sys.exit(main())
