"""Grading by machine, and the handout without answers."""

import ast
import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from processes import run

from course import overlay
from course.from_zero import grade
from course.from_zero.stages import STAGES, tasks

ROOT = Path(__file__).parents[2]
ZERO = ROOT / "course" / "from_zero"
FIRST = ROOT / "tests" / "lib" / "simple_core.py"
LEFT = "left = max(left, self.chunk)"  # the first line of Scheduler._chunks, stage 7
CHUNKS = STAGES[6]

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


def handed_in(folder: Path, more: str = "", **wrong: str) -> Path:
    """Our chapters, with `more` at the end of sched.py, and `wrong` in the place of a line in it."""
    folder.mkdir()
    for chapter in tasks():
        shutil.copy(overlay.our_file(overlay.module_name(chapter)), folder)
    text = (folder / "sched.py").read_text()
    assert LEFT in text
    (folder / "sched.py").write_text(text.replace(LEFT, wrong.get("left", LEFT)) + more)
    return folder


def graded(folder: Path, monkeypatch, stages: list, *options: str) -> dict:
    """By the program, in some of the stages (in all of them it takes half a minute)."""
    monkeypatch.setattr(grade, "STAGES", stages)
    monkeypatch.setattr(
        grade, "grade_work", lambda *_, **__: grade.entry("8w", "", 0, 1, [], "visible")
    )
    monkeypatch.setenv("NANOBATCH_SEED", "")
    file = folder.parent / "results.json"
    assert grade.main([str(folder), "--json", str(file), *options]) == 0
    results = json.loads(file.read_text())
    jsonschema.validate(results, RESULTS)
    return results


def test_right_folder_has_full_points(tmp_path, monkeypatch):
    hidden = (
        "--hidden",
        str(ZERO / "hidden_example"),
        "--show",
        "after_due_date",
        "--seed",
        "anna",
    )
    results = graded(handed_in(tmp_path / "anna"), monkeypatch, [CHUNKS], *hidden)
    assert [test["number"] for test in results["tests"]] == ["7", "7h", "8w"]
    assert all(test["score"] == test["max_score"] for test in results["tests"]), results
    assert results["score"] == 15 and results["extra_data"] == {"seed": "anna"}
    assert results["tests"][1]["visibility"] == "after_due_date"


def test_wrong_stage_loses_points(tmp_path, monkeypatch):
    """The message names the mistake; the other stage keeps its points. A folder that is no Python
    has none, and says why."""
    folder = handed_in(tmp_path / "ben", left="pass")
    second, seventh, _ = graded(folder, monkeypatch, [STAGES[1], CHUNKS])["tests"]
    assert second["score"] == 10 and 0 < seventh["score"] < 10
    assert "✗ One whole chunk is let in, however many decode." in seventh["output"]
    (folder / "sched.py").write_text("def (")
    results = graded(folder, monkeypatch, [CHUNKS])
    assert results["score"] == 0 and "sched.py, line 1: invalid syntax" in results["output"]


CHEATS = {
    "exit": "import os\nos._exit(0)",
    "pytest": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None",
    "flood": "import sys\nopen(sys.argv[2], 'a').write('00 [\"test_chunks\", \"passed\"]')\n"
    "Scheduler._chunks = lambda *_: [print('7 passed' * 10**6) for _ in iter(int, 1)]",
    "loop": "Scheduler._chunks = lambda *_: [0 for _ in iter(int, 1)]",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheat_has_no_points(cheat, tmp_path):
    folder = handed_in(tmp_path / "carl", f"\nScheduler._chunks = lambda *_: []\n{CHEATS[cheat]}\n")
    (result,) = grade.grade_stage(folder, CHUNKS, None, "hidden", seconds=3, gigabytes=8)
    assert result["score"] == 0 and "✗" in result["output"]
    if cheat == "loop":
        assert "3 s of processor time" in result["output"] and "in <lambda>" in result["output"]


def test_stand_ins_of_a_handout_have_no_points(tmp_path):
    folder = handed_in(tmp_path / "dora")
    ours = overlay.functions(grade.STAND_INS.read_text())
    with (folder / "rope.py").open("a") as file:
        file.write(f"\n\n{ast.unparse(ours['rotate'])}\n")
    lines, share = grade.tried(folder, STAGES[1], STAGES[1].tests, seconds=60)
    assert share == 0.75 and lines[-1] == "   ✗ rope.py, rotate is the handout's stand-in."


def test_work_is_compared_with_the_reference(tmp_path):
    """Logits for all tokens, where some are asked, are work in vain."""
    folder = handed_in(tmp_path / "mine")
    file = folder / "runner.py"
    right = "logits = self.model.head(states)"
    assert right in file.read_text()
    wrong = "logits = self.model.head(mx.concatenate([states, states]))[: len(states)]"
    file.write_text(file.read_text().replace(right, wrong))
    result = grade.grade_work(folder, seconds=60, gigabytes=8)
    assert "rows of logits: 182, reference 91" in result["output"] and result["score"] == 2.5


# --- the handout --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def handout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("handed") / "out"
    done = run(ROOT / "course" / "handout.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(tree: ast.AST) -> list[str]:
    """Line by line, without comments, docstrings and margins."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return [line.strip() for line in ast.unparse(tree).splitlines()]


def test_handout_has_no_answers(handout):
    """No body of ours, nor three lines of one after each other; no hint, and no hidden check."""
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
    """Stages 1 to 3 and 5 are written there: they pass, and what needs another waits for it. The first
    check that waited once ended the stage."""
    mine = tmp_path / "mine"
    zero = handout / "course" / "from_zero"
    assert run(zero / "start.py", mine, cwd=tmp_path).returncode == 0
    written = [task.name for stage in (*STAGES[:3], STAGES[4]) for task in stage.tasks]
    write(mine, written)
    said = run(zero / "check.py", mine, 3, cwd=tmp_path)
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
    assert "try yours: --book mine" in said.stderr and not (mine / ".gitignore").exists()
    said = run(handout / "ask.py", "--book", mine, "hi", cwd=tmp_path)
    assert said.returncode == 2 and "a handout has no reference" in said.stderr


def write(folder: Path, names: list[str]) -> None:
    """Give blank functions the bodies of simple_core.py."""
    other = FIRST.read_text()
    for each in names:
        chapter, _, name = each.partition(".")
        file = folder / f"{chapter}.py"
        lines = file.read_text().splitlines(keepends=True)
        node = overlay.functions("".join(lines))[name]
        theirs = overlay.functions(other)[name]
        body = other.splitlines(keepends=True)[theirs.body[0].lineno - 1 : theirs.end_lineno]
        lines[node.end_lineno - 1 : node.end_lineno] = body
        file.write_text("".join(lines))
