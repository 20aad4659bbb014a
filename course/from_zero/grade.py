"""Grade a student's folder, and write the results in Gradescope's format.

    python course/from_zero/grade.py submission --json results.json
    python course/from_zero/grade.py submission --json results.json --hidden ../checks --seed anna

Each stage's checks run in a process of their own, with limits of processor time and memory. A check
counts if it passes with the student's functions, and fails when they are taken out. `--hidden` names a
folder with further checks, such as `hidden_example/`. What this does not guard against: course/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course import overlay
from course.from_zero.check import HERE, blank_tasks, tests_of
from course.from_zero.run_stage_tests import Check, run
from course.from_zero.stages import STAGES, Stage

POINTS = 10  # a stage
HIDDEN_POINTS = 5  # its hidden checks
WORK_POINTS = 5  # as much work as the reference, or less
WORK = HERE / "work" / "test_8_work.py"


def tried(folder: Path, stage: Stage, file: Path, **limits) -> tuple[list[Check], float]:
    """What came of the checks in a file, and the share that passed."""
    checks = run(folder, file, **limits)
    passed = {check.name for check in checks if check.outcome == "passed"}
    if passed:
        control = run(folder, file, without=stage.number, **limits)
        passed -= {check.name for check in control if check.outcome == "passed"}
    for i, check in enumerate(checks):
        if check.outcome == "passed" and check.name not in passed:
            why = "It passes without your functions, too: it does not count."
            checks[i] = check._replace(outcome="failed", text=why)
    count = len(re.findall(r"^def test_", file.read_text(encoding="utf-8"), re.MULTILINE))
    return checks, len(passed) / max(count, len(checks))


def entry(number: str, name: str, most: int, share: float, lines: list[str], show: str) -> dict:
    return {
        "number": number,
        "name": name,
        "score": round(most * share, 2),
        "max_score": most,
        "status": "passed" if share == 1 else "failed",
        "output": "\n".join(lines),
        "output_format": "text",
        "visibility": show,
        "tags": [f"stage {number.rstrip('hw')}"],
    }


def grade_stage(folder: Path, stage: Stage, hidden: Path | None, show: str, **limits) -> list[dict]:
    blank = blank_tasks(folder, stage)
    found = []
    for directory, letter, most in ((HERE, "", POINTS), (hidden, "h", HIDDEN_POINTS)):
        file = directory and tests_of(stage, directory)
        if not file:
            continue
        checks, share = [], 0.0
        if len(blank) < len(stage.tasks):
            checks, share = tried(folder, stage, file, **limits)
        lines = [line for check in checks for line in check.lines()]
        lines += [f"   · {task.name.replace('.', '.py, ', 1)} is blank" for task in blank]
        name = f"{stage.name}{', hidden checks' * bool(letter)}"
        found.append(
            entry(
                f"{stage.number}{letter}", name, most, share, lines, show if letter else "visible"
            )
        )
    return found


def grade_work(folder: Path, **limits) -> dict:
    """Work in proportion to the reference's in the same run: no seconds, so no machine matters."""
    checks, share = [], 0.0
    if not any(blank_tasks(folder, stage) for stage in STAGES[:8]):
        checks, share = tried(folder, STAGES[7], WORK, **limits)
    lines = [line for check in checks for line in check.lines()]
    ratio = re.findall(r"ratio ([\d.]+)", "\n".join(lines))
    share *= min(1.0, float(ratio[-1])) if ratio else 0.0
    lines = lines or ["   · Counted when stages 1 to 8 are written."]
    return entry("8w", "work, compared with the reference", WORK_POINTS, share, lines, "visible")


def grade(folder: str, hidden: Path | None, show: str, **limits) -> dict:
    began = time.monotonic()
    tests = []
    said = ""
    try:
        path = overlay.check_book(folder)
        for stage in STAGES:
            tests += grade_stage(path, stage, hidden, show, **limits)
            print(f"{tests[-1]['number']:>4} {tests[-1]['score']:g} of {tests[-1]['max_score']}")
        tests.append(grade_work(path, **limits))
    except ValueError as error:
        said = str(error)
    score = round(sum(test["score"] for test in tests), 2)
    most = sum(test["max_score"] for test in tests)
    return {
        "score": score,
        "execution_time": round(time.monotonic() - began),
        "output": said or f"{score:g} of {most} points",
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "extra_data": {"seed": os.environ.get("NANOBATCH_SEED", "")},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grade.py", description=__doc__.partition("\n")[0])
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
