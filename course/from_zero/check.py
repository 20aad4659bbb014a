"""Check a book, stage by stage, and say what fails first.

    python course/from_zero/check.py mine              all stages, up to the first that is not done
    python course/from_zero/check.py mine 6            one stage, independent of the others
    python course/from_zero/check.py mine --hint       a hint for what fails; --hint 2 and 3 say more
    python course/from_zero/check.py anna ben carl     a line for each book: its progress

A stage is a file of tests, such as `test_6_continuous_batching.py`. pytest runs each file in a
process of its own and stops at the first test that fails. A process that crashes or hangs is
reported in one line. For full tracebacks, a single test or a debugger, run such a file yourself:

    python course/run.py mine -m pytest course/from_zero/test_6_continuous_batching.py -k cancel --pdb
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course import overlay
from course.from_zero.run_stage_tests import run
from course.from_zero.stages import STAGES, Stage, Task
from course.from_zero.start import MADE_OF, mark


def blank_tasks(folder: Path, stage: Stage) -> list[Task]:
    """Return the tasks of a stage that are still blank."""
    left = {name for name, _ in overlay.Book(folder).blanks()}
    return [task for task in stage.tasks if task.name in left]


def run_stage(folder: Path, stage: Stage) -> tuple[bool, str]:
    """Return whether the written functions of a stage pass, and a line for each check."""
    checks = run(folder, [stage.tests], "-x")
    said = "".join(f"{line}\n" for check in checks for line in check.lines())
    return not any(check.outcome == "failed" for check in checks), said


def check_stage(folder: Path, stage: Stage) -> bool:
    """Print the state of a stage. Return True if it is done."""
    blank = blank_tasks(folder, stage)
    is_right = True
    said = ""
    if len(blank) < len(stage.tasks):  # run the checks if anything is written
        is_right, said = run_stage(folder, stage)
    state = "done" if is_right else "not right yet"
    if is_right and (blank or "waits for stage" in said):
        state = "right so far" if said else "still blank"
    print(f"stage {stage.number}, {stage.name}: {state}")
    print(said, end="")
    for task in blank:
        print(f"   · {task.name.replace('.', '.py, ', 1)} is blank")
    return is_right and not blank


def failing(folder: Path, stage: Stage, said: str) -> list[Task]:
    """Return the functions that a hint should cover: the one named in a traceback, or those that
    the failing test covers, or the first blank one, or all functions of the stage.
    """
    about = re.search(r"^   ✗ .*\((.*)\)$", said, re.MULTILINE)
    about = about[1].split(", ") if about else []
    places = re.findall(r", line \d+, in (\w+)$", said, re.MULTILINE)
    for place in reversed(places):
        if named := [task for task in stage.tasks if task.short == place]:
            return named
    named = [task for task in stage.tasks if task.short in about]
    return named or blank_tasks(folder, stage)[:1] or list(stage.tasks)


def give_hints(folder: Path, stage: Stage, number: int) -> None:
    _, said = run_stage(folder, stage)
    for task in failing(folder, stage, said):
        print(f"{task.name}, hint {number} of 3:")
        hint = task.hints[number - 1]
        lines = hint.splitlines() if "\n" in hint else textwrap.wrap(hint, 92)
        print("\n".join(f"    {line}" for line in lines))


def first_open(folder: Path) -> Stage | None:
    """Return the first stage that is not done, if any."""
    for stage in STAGES:
        if blank_tasks(folder, stage) or not run_stage(folder, stage)[0]:
            return stage
    return None


def show_class(books: list[str]) -> None:
    """Print the progress of each book."""
    width = max(map(len, books))
    for shown in books:
        try:
            line = progress(overlay.check_book(shown))
        except ValueError as error:
            line = str(error)
        print(f"{shown:<{width}}  {line}", flush=True)


def progress(folder: Path) -> str:
    stage = first_open(folder)
    if stage is None:
        return f"{'■' * len(STAGES)}  done"
    bar = "■" * (stage.number - 1) + "·" * (len(STAGES) - stage.number + 1)
    count = len(stage.tasks)
    written = count - len(blank_tasks(folder, stage))
    return f"{bar}  at stage {stage.number}, {stage.name}: {written} of {count} written"


def show_book(shown: str, chosen: list[Stage], hint: int | None) -> bool:
    folder = overlay.check_book(shown)
    made_of = folder / MADE_OF
    if made_of.is_file() and made_of.read_text().strip() != mark():
        print(f"(This book was made from an earlier nanobatch. If a name is missing: {MADE_OF})")
    if hint is not None:
        if not STAGES[0].tasks[0].hints:
            print("A handout has no hints.")
            return True
        stage = chosen[0] if len(chosen) == 1 else first_open(folder)
        if stage:
            give_hints(folder, stage, hint)
        else:
            print("all stages are done: there is nothing left to hint at")
        return True
    for stage in chosen:
        if not check_stage(folder, stage):
            which = "" if len(chosen) > 1 else f" {stage.number}"
            if stage.tasks[0].hints:
                print(f"A hint: python course/from_zero/check.py {shown}{which} --hint")
            return False
        sys.stdout.flush()
    if len(chosen) == len(STAGES):
        print(f"All stages are done. See it work: python course/run.py {shown} tui.py")
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "books", nargs="+", help="folders that start.py has made; or one, and a stage"
    )
    parser.add_argument("--hint", type=int, choices=(1, 2, 3), nargs="?", const=1)
    args = parser.parse_args(arguments)
    stages = list(STAGES)
    books = args.books
    if len(books) == 2 and books[1].isdigit() and not Path(books[1]).is_dir():
        number = int(books.pop())
        if not 1 <= number <= len(STAGES):
            print(
                f"check.py: {number} is not a stage; there are 1 to {len(STAGES)}", file=sys.stderr
            )
            return 2
        stages = [STAGES[number - 1]]
    if len(books) > 1:
        show_class(books)
        return 0
    try:
        return 0 if show_book(books[0], stages, args.hint) else 1
    except ValueError as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
