"""Grade a student's folder, and write the results in Gradescope's format.

    python course/from_zero/grade.py submission --json results.json
    python course/from_zero/grade.py submission --json results.json --hidden ../checks --seed anna

Each stage's checks run in a process of their own, with limits on processor time and memory. All
checks also run on a copy without the student's functions, and a check that passes there does not
count. `--hidden` names a folder with additional checks, such as `hidden_example/`. course/README.md
says what this does not guard against.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course import overlay
from course.from_zero.check import blank_tasks
from course.from_zero.run_stage_tests import Check, run
from course.from_zero.stages import STAGES, Stage, Task, tasks
from course.from_zero.start import OUR_PACKAGE, blank

POINTS = 10  # for each stage
HIDDEN_POINTS = 5  # for all hidden checks of a stage
WORK_POINTS = 5  # for doing no more work than the reference
WORK = Path(__file__).with_name("work") / "test_8_work.py"
STAND_INS = Path(__file__).with_name("stand_ins.py")


def without_bodies(folder: Path, copy: Path) -> Path:
    """Copy the chapters, with all functions of the stages replaced by an error. Return the copy."""
    copy.mkdir()
    (copy / overlay.PACKAGE).write_text(OUR_PACKAGE)
    for file in overlay.Book(folder).files:
        text = file.read_text(encoding="utf-8")
        there = overlay.functions(text)
        wanted = {n: task for n, task in tasks().get(file.stem, {}).items() if n in there}
        text = blank(text, wanted).replace("raise NotImplementedError(", "raise RuntimeError(")
        (copy / file.name).write_text(text, encoding="utf-8")
    return copy


def pass_without(folder: Path, files: list[Path], **limits) -> set[str]:
    """Return the checks in these files that pass without the student's functions."""
    with TemporaryDirectory() as scratch:
        copy = without_bodies(folder, Path(scratch, folder.name))
        return passed(run(copy, files, **limits))


def passed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.outcome == "passed"}


def stand_ins(folder: Path, stage: Stage) -> list[Task]:
    """Return the functions of a stage that were copied from a handout's stand-ins."""
    ours = overlay.functions(STAND_INS.read_text(encoding="utf-8"))
    found = []
    for task in stage.tasks:
        name = task.name.removeprefix(f"{task.chapter}.")
        file = folder / f"{task.chapter}.py"
        theirs = overlay.functions(file.read_text(encoding="utf-8")) if file.exists() else {}
        if name in ours and name in theirs:
            bodies = [[*map(ast.dump, each.body)] for each in (ours[name], theirs[name])]
            if bodies[0] == bodies[1][-len(bodies[0]) :]:  # stand-ins have no docstring
                found.append(task)
    return found


class Part(NamedTuple):
    """A file of checks, and the points for it."""

    number: str
    name: str
    points: int
    stage: Stage
    tests: Path
    visibility: str = "visible"


def parts(hidden: Path | None, show: str) -> Iterator[Part]:
    for stage in STAGES:
        yield Part(f"{stage.number}", stage.name, POINTS, stage, stage.tests)
        for file in hidden.glob(f"test_{stage.number}_*.py") if hidden else ():
            name = f"{stage.name}, hidden checks"
            yield Part(f"{stage.number}h", name, HIDDEN_POINTS, stage, file, show)
    yield Part("8w", "work, compared with the reference", WORK_POINTS, STAGES[7], WORK)


def tried(folder: Path, part: Part, without: set[str], **limits) -> tuple[list[str], float]:
    """Run the checks of a part. Return lines for the student, and the share of the points.

    `without`: the checks that pass without the student's functions.
    """
    stage = part.stage
    left = blank_tasks(folder, stage)
    blanks = [f"   · {task.name.replace('.', '.py, ', 1)} is blank" for task in left]
    if len(left) == len(stage.tasks):
        return blanks, 0.0
    checks = run(folder, [part.tests], **limits)
    lines = []
    for check in checks:
        if check.outcome == "passed" and check.name in without:
            why = "It passes without your functions, too: it does not count."
            check = check._replace(outcome="failed", text=why)
        lines += check.lines()
    copied = stand_ins(folder, stage)
    for task in copied:
        lines.append(f"   ✗ {task.name.replace('.', '.py, ', 1)} is the handout's stand-in.")
    count = len(re.findall(r"^def test_", part.tests.read_text(encoding="utf-8"), re.MULTILINE))
    own = 1 - len(copied) / len(stage.tasks)
    return lines + blanks, own * len(passed(checks) - without) / max(count, len(checks))


def work(folder: Path, part: Part, without: set[str], **limits) -> tuple[list[str], float]:
    """Compare the work with the reference's in the same run.

    Work is not measured in seconds, so the machine does not matter.
    """
    if any(blank_tasks(folder, stage) for stage in STAGES[: part.stage.number]):
        return ["   · Counted when stages 1 to 8 are written."], 0.0
    lines, share = tried(folder, part, without, **limits)
    ratio = re.findall(r"ratio ([\d.]+)", "\n".join(lines))
    return lines, share * min(1.0, float(ratio[-1])) if ratio else 0.0


def entry(part: Part, lines: list[str], share: float) -> dict:
    return {
        "number": part.number,
        "name": part.name,
        "score": round(part.points * share, 2),
        "max_score": part.points,
        "status": "passed" if share == 1 else "failed",
        "output": "\n".join(lines),
        "output_format": "text",
        "visibility": part.visibility,
        "tags": [f"stage {part.stage.number}"],
    }


def grade(folder: str, hidden: Path | None, show: str, **limits) -> dict:
    began = time.monotonic()
    tests = []
    said = ""
    try:
        path = overlay.check_book(folder)
        todo = [*parts(hidden, show)]
        without = pass_without(path, [part.tests for part in todo], **limits)
        for part in todo:
            of_part = work if part.tests == WORK else tried
            test = entry(part, *of_part(path, part, without, **limits))
            tests.append(test)
            print(f"{part.number:>4} {test['score']:g} of {part.points}", flush=True)
    except ValueError as error:
        said = str(error)
    # Students read this line, so it does not include hidden checks
    shown = [test for test in tests if test["visibility"] == "visible"]
    score, most = (round(sum(test[key] for test in shown), 2) for key in ("score", "max_score"))
    return {
        "score": round(sum(test["score"] for test in tests), 2),
        "execution_time": round(time.monotonic() - began),
        "output": said or f"{score:g} of {most} points",
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "extra_data": {"seed": os.environ.get("NANOBATCH_SEED", "")},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="grade.py", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("folder", help="what a student handed in")
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--hidden", type=Path, help="a folder with hidden checks: test_6_mine.py")
    shows = ("hidden", "after_due_date", "after_published", "visible")
    parser.add_argument("--show", choices=shows, default="hidden", help="who sees hidden checks")
    parser.add_argument("--seed", default="", help="other shapes, numbers and prompts: a name")
    parser.add_argument("--seconds", type=int, default=60, help="of processor time for a stage")
    parser.add_argument("--memory", type=float, default=8, help="GiB of addresses for a stage")
    args = parser.parse_args(arguments)
    os.environ["NANOBATCH_SEED"] = args.seed
    if args.hidden and not any(args.hidden.glob("test_*_*.py")):
        parser.error(f"--hidden {args.hidden}: no file such as test_6_mine.py in it")
    limits = {"seconds": args.seconds, "gigabytes": args.memory}
    hidden = args.hidden and args.hidden.resolve()
    results = grade(args.folder, hidden, args.show, **limits)
    args.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    print(f"{args.folder}: {results['output']}; {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
