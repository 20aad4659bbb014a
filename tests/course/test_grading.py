"""Automatic grading, and the handout without answers."""

import ast
import json
from pathlib import Path

import jsonschema
import pytest
from books import change, fill, full_book
from long_forms import long_form
from processes import run

from course import overlay
from course.from_zero import grade, run_stage_tests, start
from course.from_zero.stages import STAGES, tasks

ROOT = Path(__file__).parents[2]
ZERO = ROOT / "course" / "from_zero"
HIDDEN = ZERO / "hidden_example"
LEFT = "left -= chunk.tokens"  # in Scheduler._allot, stage 7

# https://gradescope-autograders.readthedocs.io/en/latest/specs/, "Output format"
SHOWN = {"enum": ["hidden", "after_due_date", "after_published", "visible"]}
FORMAT = {"enum": ["text", "html", "simple_format", "md", "ansi"]}
TEST = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "score", "max_score", "number", "output", "visibility", "tags"],
    "properties": {
        "score": {"type": "number", "minimum": 0},
        "max_score": {"type": "number"},
        "status": {"enum": ["passed", "failed"]},
        "name": {"type": "string"},
        "number": {"type": "string"},
        "output": {"type": "string"},
        "output_format": FORMAT,
        "tags": {"type": "array", "items": {"type": "string"}},
        "visibility": SHOWN,
    },
}
RESULTS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["score", "execution_time", "output", "tests"],
    "properties": {
        "score": {"type": "number"},
        "execution_time": {"type": "integer"},
        "output": {"type": "string"},
        "output_format": FORMAT,
        "visibility": SHOWN,
        "stdout_visibility": SHOWN,
        "extra_data": {"type": "object"},
        "tests": {"type": "array", "items": TEST},
    },
}


def graded(folder: Path, patch: pytest.MonkeyPatch, numbers: str, *options: str) -> list[dict]:
    """Grade some of the parts, and return the results of each, followed by the total."""
    every_part = grade.parts
    chosen = numbers.split()
    patch.setattr(grade, "parts", lambda *how: [p for p in every_part(*how) if p.number in chosen])
    patch.setenv("NANOBATCH_SEED", "")
    file = folder.parent / "results.json"
    assert grade.main([str(folder), "--json", str(file), *options]) == 0
    results = json.loads(file.read_text())
    jsonschema.validate(results, RESULTS)
    return [*results["tests"], results]


def test_right_folder_has_full_points(tmp_path, monkeypatch):
    options = f"--hidden {HIDDEN} --show after_due_date --seed anna"
    seventh, hidden, whole = graded(
        full_book(tmp_path / "anna"), monkeypatch, "7 7h", *options.split()
    )
    assert seventh["score"] == 10 and hidden["score"] == 5, whole
    assert hidden["visibility"] == "after_due_date" and "10 of 10" in whole["output"]
    assert whole["score"] == 15 and whole["extra_data"] == {"seed": "anna"}


def test_mistakes_lose_points(tmp_path, monkeypatch):
    """The message names the mistake. A stand-in taken from the handout gets no points, and computing each row
    of logits twice loses some. A file with a syntax error gets no points and a message."""
    folder = full_book(tmp_path / "ben")
    change(folder, "sched.Scheduler._allot", LEFT, "pass")
    wrong = "self.model.head(mx.concatenate([hidden, hidden]))[: len(hidden)]"
    change(folder, "runner.Runner._forward", "self.model.head(hidden)", wrong)
    stand_in = overlay.functions(grade.STAND_INS.read_text())["rotate"]
    with (folder / "rope.py").open("a") as file:
        file.write(f"\n\n{ast.unparse(stand_in)}\n")
    second, seventh, work, _ = graded(folder, monkeypatch, "2 7 8w")
    assert second["score"] == 7.5
    assert second["output"].endswith("   ✗ rope.py, rotate is the handout's stand-in.")
    assert 0 < seventh["score"] < 10
    assert "✗ The last chunk is cut where the budget ends." in seventh["output"]
    assert "rows of logits: 182, reference 91" in work["output"] and work["score"] == 2.5
    (folder / "sched.py").write_text("def (")
    (whole,) = graded(folder, monkeypatch, "7")
    assert whole["score"] == 0 and "sched.py, line 1: invalid syntax" in whole["output"]


CHEATS = {
    "exit": "import os\nos._exit(0)",
    "pytest": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None",
    "flood": """import sys, contextlib
def flood(*_):
    with contextlib.suppress(OSError):
        while print('7 passed' * 10**6) is None: pass
    while True: pass
open(sys.argv[2], 'a').write('00 ["test_chunks", "passed"]')
Scheduler._allot = flood""",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheat_has_no_points(cheat, tmp_path, monkeypatch):
    monkeypatch.setattr(run_stage_tests, "MOST_TEXT", 1000)  # as if the paths in a stack were long
    folder = full_book(tmp_path / "carl")
    with (folder / "sched.py").open("a") as file:
        file.write(f"\nScheduler._allot = lambda *_: []\n{CHEATS[cheat]}\n")
    (part,) = (part for part in grade.parts(None, "hidden") if part.number == "7")
    limits = {"seconds": 2, "gigabytes": 8}
    without = grade.pass_without(folder, [part.tests], **limits) if cheat == "pytest" else set()
    lines, share = grade.tried(folder, part, without, **limits)
    said = "\n".join(lines)
    assert share == 0 and "✗" in said
    if cheat == "flood":
        assert "2 s of processor time" in said and "in flood" in said


@long_form
def test_a_whole_book_of_simple_functions_has_full_points(tmp_path, monkeypatch):
    folder = tmp_path / "dora"
    start.main([str(folder)])
    fill(folder, range(1, len(STAGES) + 1))
    numbers = " ".join(part.number for part in grade.parts(HIDDEN, "hidden"))
    *parts, whole = graded(folder, monkeypatch, numbers, "--hidden", str(HIDDEN))
    assert len(parts) >= 20
    assert all(part["score"] == part["max_score"] for part in parts), whole


# --- the handout --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("handed") / "out"
    done = run(ROOT / "course" / "handout.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(tree: ast.AST) -> list[str]:
    """Return the lines of code without comments, docstrings and indentation."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return [line.strip() for line in ast.unparse(tree).splitlines()]


def test_handout_has_no_answers(handout):
    """The handout contains no body of ours, not even three consecutive lines, no hint, and no hidden check."""
    files = [*handout.rglob("*.py")]
    there = "\n".join("\n".join(code_lines(ast.parse(file.read_text()))) for file in files)
    for chapter, wanted in tasks().items():
        ours = overlay.functions(overlay.our_file(overlay.module_name(chapter)).read_text())
        for name in wanted:
            body = code_lines(ast.Module(code_body(ours[name]), []))
            for at in range(max(1, len(body) - 2)):
                assert "\n".join(body[at : at + 3]) not in there, name
    texts = [file.read_text() for file in handout.rglob("*") if file.suffix in (".py", ".md")]
    for stage in STAGES:
        for task in stage.tasks:
            assert not any(hint in text for hint in task.hints for text in texts), task.name
    assert not [*handout.rglob("*hidden*")]


def code_body(function: ast.FunctionDef) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) else function.body


def test_handout_runs_alone(handout, tmp_path):
    """If stages 4 and 7 to 12 are not solved, the others pass, and checks that need another stage are skipped.
    Regressions: the first skipped check ended the stage, and the stand-in for `_allot` failed in stage 6."""
    mine = tmp_path / "mine"
    zero = handout / "course" / "from_zero"
    assert run(zero / "start.py", mine, cwd=tmp_path).returncode == 0
    fill(mine, [1, 2, 3, 5, 6])
    for stage in (3, 6):
        said = run(zero / "check.py", mine, stage, cwd=tmp_path)
        assert said.returncode == 0, said.stdout + said.stderr
    said = run(zero / "check.py", mine, 5, cwd=tmp_path)
    assert said.returncode == 0 and said.stdout.count("waits for stage") == 5, said.stdout
    assert "stage 5, static batching: right so far" in said.stdout
    file = mine / "llama.py"
    file.write_text(file.read_text().replace(" / Dh**0.5", ""))
    said = run(zero / "check.py", mine, 1, cwd=tmp_path).stdout
    assert "not divided by sqrt" in said and "hint" not in said
    said = run(zero / "check.py", mine, 6, "--hint", cwd=tmp_path).stdout
    assert said == "A handout has no hints.\n"
    said = run("-m", "pytest", STAGES[5].tests.relative_to(ROOT), cwd=handout)
    assert (
        "try yours: python course/run.py mine" in said.stderr and not (mine / ".gitignore").exists()
    )
    said = run(handout / "course" / "run.py", mine, "ask.py", "hi", cwd=tmp_path)
    assert said.returncode == 2 and "a handout has no reference" in said.stderr
