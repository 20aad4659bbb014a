"""The blank book of course/from_zero: each stage passes on another book than ours, too, and says what
is wrong with one.

That our own chapters pass, the stages' files say by themselves: they are part of the suite. Here
other code is put into our functions and taken out again, and the tests of a stage are called in this
process. `NANOBATCH_ZERO=all` also tries each function by itself, and each mistake as a reader meets
it: with `check.py`, in processes of their own.
"""

import ast
import os
import re
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import getdoc
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import run

from benchmarks.plan import read_rival
from course import overlay
from course.from_zero import check, start
from course.from_zero.stages import STAGES, tasks
from screen.draw import status
from screen.draw.canvas import Canvas
from screen.draw.style import DARK
from screen.state import State

ROOT = Path(__file__).parents[2]
ZERO = ROOT / "course" / "from_zero"
FIRST = ROOT / "tests" / "lib" / "simple_core.py"

EVERYTHING = os.environ.get("NANOBATCH_ZERO") == "all"


class Mistake(NamedTuple):
    stage: int  # that names it
    name: str  # of the function
    right: str  # in `simple_core.py`
    wrong: str
    says: str  # what the stage says of it


MISTAKES = [
    Mistake(1, "llama.attention", " / Dh**0.5", "", "not divided by sqrt"),
    Mistake(1, "llama.attention", " + mask", "", "the mask is not added"),
    Mistake(
        2, "rope.rope_angles", "positions.res", "(positions + 1).res", "Position 0 is not turned"
    ),
    Mistake(2, "ops.rms_norm", " + eps", "", "eps keeps a small row small"),
    Mistake(3, "llama.seen", "rows <= at", "rows <= at + 1", "A token sees itself and all before"),
    Mistake(
        3, "kv.Window.write", "[slot, :, rows] = self", "[0, :, rows] = self", "lands in its slot"
    ),
    Mistake(
        4, "sampling.draw", "uniform(pick.seed", "uniform(pick.slot", "not on slot or neighbours"
    ),
    Mistake(4, "sampling.keep_first", " - shares", "", "top_k keeps"),
    Mistake(
        4, "sampling.inverse_cdf", "mx.minimum(place, last)", "place", "never on a weight of 0"
    ),
    Mistake(5, "runner.Runner._forward", "(count - 1)", "(0)", "side by side"),
    Mistake(5, "sched.Scheduler._admit", "[:room]", "[: len(free)]", "when all of it has ended"),
    Mistake(6, "sched.Request.next_row", " - 1", "", "the row behind all before it"),
    Mistake(
        6, "sched.Scheduler._leave_slot", "(0, self.max_len)", "(0, 0)", "rows of NaN are left"
    ),
    Mistake(6, "sched.Scheduler.commit", "== request.max", "> request.max", "timeline"),
    Mistake(7, "sched.Scheduler._chunks", "left -= chunk.cost", "pass", "costs"),
    Mistake(
        7, "sched.Scheduler._chunks", "max(left, self.chunk)", "left", "One whole chunk is let in"
    ),
    Mistake(
        6,
        "sched.Scheduler.commit",
        "if request.finish_reason:",
        "if False:",
        "A commit hands out tokens",
    ),
    Mistake(
        8, "nanobatch.Engine._max_in_flight", "else 1", "else 0", "starts before the last one is"
    ),
    Mistake(
        8, "runner.Runner.finish", "newest < 0", "newest < -1", "the newest token of each slot"
    ),
    Mistake(8, "nanobatch.Engine.step", "self._fail(error)", "raise", "came out of Engine.step"),
    Mistake(
        5,
        "sched.Scheduler._admit",
        "self.policy.next(self)",
        "self.waiting.values()",
        "The policy says who is next",
    ),
    Mistake(6, "sched.Scheduler.commit", "ended.append(request)", "pass", "who has ended"),
    Mistake(6, "sched.Scheduler.finish", "self._end_drain()", "pass", "the policy"),
    Mistake(6, "sched.Scheduler.plan", " if self.waiting else ", " or ", "nobody waits"),
    Mistake(
        8,
        "runner.Runner.finish",
        "self._enqueue(",
        "(lambda *them: None)(",
        "never handed to self._enqueue",
    ),
    Mistake(8, "nanobatch.Engine.step", "self._changing(), ", "", "`_changing` calls on_commit"),
    Mistake(
        4, "sampling.draw", "if ids is None else", "if True else", "a token came that is not likely"
    ),
    Mistake(
        6,
        "sched.Scheduler.plan",
        "r.planned < r.max_tokens",
        "True",
        "No token is planned behind the last one",
    ),
    Mistake(7, "sched.Scheduler._chunks", "(left + 1) // 2", "0", "leaves half to the oldest"),
    Mistake(
        7, "sched.Scheduler._chunks", "(left + 1) // 2", "left", "does not wait for a long one"
    ),
    Mistake(7, "sched.Scheduler._chunks", "kept = 0", "pass", "is cut into chunks"),
    Mistake(
        1,
        "llama.forward",
        "mx.concatenate([window.positions for window in windows])",
        "mx.arange(ids.size)",
        "Positions are those of the windows",
    ),
    Mistake(
        3,
        "llama.attend",
        "        at += size\n    at = 0\n    for window, masks in zip(windows, visible):\n",
        "",
        "all write before the first one reads",
    ),
    Mistake(
        4,
        "sampling.argmax",
        "x.max(axis=-1, keepdims=True)",
        "gather(x, mx.argmax(mx.where(x == x, x, 0), axis=-1, keepdims=True))",
        "nobody would notice",
    ),
    Mistake(
        5,
        "runner.Runner._forward",
        "self._start(self.slab.w",
        "(self.slab.w",
        "`self._start` is called",
    ),
    Mistake(
        6, "sched.Scheduler.plan", "if r not in with_chunk", "if False", "has no chunk is held"
    ),
    Mistake(
        8, "nanobatch.Engine.step", "except BaseException", "except Exception", "it is raised again"
    ),
    Mistake(
        9, "pages.Pool.grow", "-(-rows // PAGE)", "rows // PAGE", "when its next row needs one"
    ),
    Mistake(
        7,
        "sched.Scheduler._chunks",
        "self._cut(requests[0], (left + 1) // 2).cost",
        "(left + 1) // 2",
        "What the oldest cannot use",
    ),
    Mistake(8, "nanobatch.Engine.step", "while len", "if len", "so are all steps before it"),
    Mistake(
        8, "runner.Runner.finish", "newest = ", "newest = mx.eval(tokens) or ", "`finish` waits"
    ),
    Mistake(9, "pages.Pool.leave", "self.free += ", "", "of 6 pages each"),
    Mistake(9, "pages.Pool.place", "row % PAGE", "row", "row 37 is in page 2"),
    Mistake(
        9, "pages.PagedWindow.write", "sequence, row)", "sequence, start)", "New rows land where"
    ),
    Mistake(9, "pages.PagedWindow.read", "array(table)", "array(sorted(table))", "in their order"),
    Mistake(10, "lookup.draft", "len(text) - 3", "len(text) - 2", "newest two tokens"),
    Mistake(10, "lookup.draft", "range(len(text) - 3, -1, -1)", "range(len(text) - 2)", "the last"),
    Mistake(10, "lookup.accept", "right + 1", "max(1, right)", "what the model says instead"),
    Mistake(
        10, "lookup.accept", "drafted[right] == sampled[right]", "True", "Drafted tokens count"
    ),
    Mistake(10, "lookup.answer", " - 1)\n        for", ")\n        for", "is skipped"),
    Mistake(
        10, "lookup.answer", "                break\n", "                pass\n", "ends within"
    ),
    Mistake(10, "lookup.answer", "min(most, max_tokens - len(said) - 1)", "most", "at max_tokens"),
    Mistake(11, "eight_bits.quantize", "axis=-1, keep", "axis=(0, -1), keep", "that it has alone"),
    Mistake(11, "eight_bits.quantize", "/ 127", "/ 128", "is 127 or -127"),
    Mistake(11, "eight_bits.quantize", "mx.round(", "(", "is 127 or -127"),
    Mistake(11, "eight_bits.quantize", "mx.abs(x)", "x", "127 or -127"),
    Mistake(
        11, "eight_bits.SmallWindow.write", "i * self.L, (", "0, (", "Rows land in their slots"
    ),
    Mistake(
        11,
        "eight_bits.SmallWindow.read",
        "self.slots[group.slots.start]",
        "0",
        "the keys of slot 3",
    ),
    Mistake(12, "ranks.route", "replica.waiting + ", "", "where the fewest tokens"),
    Mistake(12, "ranks.route", "max(shared, same)", "same", "where the fewest tokens"),
    Mistake(12, "ranks.shard", 'in ("o_proj", "down_proj")', '== "o_proj"', "Rows of what heads"),
    Mistake(12, "ranks.shard", "if weight.ndim == 1", "if False", "a norm is whole"),
    Mistake(12, "ranks.block", "x = x + all_sum(h @", "x = x + (h @", "how often each rank"),
    Mistake(12, "ranks.block", "x + all_sum(h @ w", "all_sum(x + h @ w", "x itself is in no sum"),
]


def with_mistake(mistake: Mistake, text: str, name: str) -> str:
    """This text, with the mistake in this function."""
    lines = text.splitlines(keepends=True)
    node = overlay.functions(text)[name]
    body = "".join(lines[node.lineno - 1 : node.end_lineno])
    assert mistake.right in body, f"{mistake.name} has no {mistake.right!r} any more"
    lines[node.lineno - 1 : node.end_lineno] = [body.replace(mistake.right, mistake.wrong)]
    return "".join(lines)


def simple(stage: int) -> str:
    """The functions of a stage, written as simply as can be: ours are, from stage 9 on."""
    return (FIRST if stage < 9 else STAGES[stage - 1].tasks[0].reference).read_text()


def stage_tests(stage: int) -> list[Callable[[], None]]:
    module = import_module(f"course.from_zero.{STAGES[stage - 1].tests.stem}")
    return [test for name, test in vars(module).items() if name.startswith("test_")]


def verdict(stage: int) -> str:
    """What the first test of a stage that fails says; empty if all pass."""
    for test in stage_tests(stage):
        try:
            test()
        except (Exception, pytest.fail.Exception) as error:
            return f"{test.__doc__} {error}"
    return ""


# --- the blank book -----------------------------------------------------------------------------


def without_bodies(text: str, names: Sequence[str]) -> str:
    """A chapter's code, in which these functions have no body."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def test_the_blank_book_differs_only_in_bodies():
    """A name that has gone, or a check of bounds that was blanked, would be seen here."""
    wanted = tasks()
    written = start.blank_book()
    assert sum(map(len, wanted.values())) >= 25 and len(written) == len(wanted)
    for name, text in written.items():
        chapter = name.removesuffix(".py")
        assert overlay.blanks(text).keys() == wanted[chapter].keys()
        ours = overlay.our_file(overlay.module_name(chapter)).read_text()
        if chapter == "nanobatch":
            for switch, off in start.SWITCHES.items():
                ours = re.sub(switch, off, ours, count=1)
        short = [function.rpartition(".")[2] for function in wanted[chapter]]
        assert without_bodies(text, short) == without_bodies(ours, short)
    assert "start <= slab.length - L" in written["kv.py"]
    assert "prefix_cache: bool = False" in written["nanobatch.py"]


def test_a_later_stage_can_be_begun_with():
    written = start.blank_book(first=6)
    left = [stage for text in written.values() for stage in overlay.blanks(text).values()]
    assert sorted(left)[:10] == [6] * 5 + [7] * 2 + [8] * 3


def about(test: Callable) -> list[str]:
    return [name for mark in getattr(test, "pytestmark", ()) for name in mark.args]


def test_every_task_has_hints_and_a_test():
    for stage in STAGES:
        assert stage.minutes <= 60
        tried = {name for test in stage_tests(stage.number) for name in about(test)}
        for task in stage.tasks:
            assert task.does.strip() and all(hint.strip() for hint in task.hints)
            assert task.short in tried or len(stage.tasks) == 1, task.name
        assert tried <= {task.short for task in stage.tasks}
        assert all(test.__doc__ for test in stage_tests(stage.number))
    assert [stage.number for stage in STAGES] == list(range(1, len(STAGES) + 1))


def test_the_page_lists_every_stage():
    page = (ZERO / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (\d+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    wanted = [(f"{s.number}", s.name, f"{s.minutes}", s.runs) for s in STAGES]
    assert [
        (number, name, minutes, runs) for number, name, minutes, _, runs in rows[: len(wanted)]
    ] == wanted
    for stage, row in zip(STAGES, rows, strict=False):
        assert re.findall(r"`(\w+)`", row[3]) == [task.short for task in stage.tasks]
    assert f"{sum(len(stage.tasks) for stage in STAGES)} functions without a body" in page


def test_the_recording_is_up_to_date():
    """`python docs/make/pictures.py stage` makes it anew."""
    shown = re.findall(r"> +✓ ([^<]*)<", (ZERO / "stage.svg").read_text())
    says = [" ".join(getdoc(test).split()) for test in stage_tests(1)]
    assert {*says} <= {*shown}


# --- the checks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(1, len(STAGES) + 1))
def test_stage_passes_simple_and_fails_blank(stage, tmp_path):
    """Whoever writes otherwise than we do must pass, too."""
    written = [task.name for task in STAGES[stage - 1].tasks]
    if stage < 9:
        with overlay.swapped(written, FIRST):
            assert not verdict(stage)
    empty = tmp_path / "blank.py"
    empty.write_text("\n".join(start.blank_book().values()).replace("from __future__ import", "# "))
    for names in [[name] for name in written] if EVERYTHING else [written]:
        with overlay.swapped(names, empty):
            assert f"stage {stage}: " in verdict(stage), names


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.stage}-{m.name}-{m.right}")
def test_mistake_is_named_by_its_stage(mistake, tmp_path, monkeypatch):
    """In CI pytest prints the whole difference of two values. Of two lists of 4,000 draws that took
    hours, and CI ended the run."""
    monkeypatch.setenv("CI", "true")
    file = tmp_path / "wrong.py"
    text = simple(mistake.stage)
    file.write_text(with_mistake(mistake, text, mistake.name.partition(".")[2]))
    with overlay.swapped([mistake.name], file):
        assert mistake.says in verdict(mistake.stage)


# --- as a reader meets them ---------------------------------------------------------------------


def full_book(folder: Path) -> Path:
    folder.mkdir()
    for chapter in tasks():
        shutil.copy(overlay.our_file(overlay.module_name(chapter)), folder)
    return folder


def change(folder: Path, name: str, right: str, wrong: str) -> None:
    chapter, _, function = name.partition(".")
    file = folder / f"{chapter}.py"
    file.write_text(with_mistake(Mistake(0, name, right, wrong, ""), file.read_text(), function))


def test_check_says_what_is_blank(tmp_path):
    """`start.py` makes a book once, and does not overwrite it."""
    folder = tmp_path / "mine"
    assert run(ZERO / "start.py", folder).returncode == 0
    again = run(ZERO / "start.py", folder)
    assert again.returncode == 2 and "is there already; name another folder" in again.stderr
    said = run(ZERO / "check.py", folder)
    assert said.returncode == 1 and "llama.py, attention is blank" in said.stdout
    hint = run(ZERO / "check.py", folder, "--hint", 3)
    assert "llama.attention, hint 3 of 3:" in hint.stdout and "scores = q @" in hint.stdout
    assert (folder / ".gitignore").read_text() == "*\n"


def test_mistake_shows_in_its_own_stage(tmp_path):
    """Earlier stages pass, and the message names the line."""
    folder = full_book(tmp_path / "mine")
    change(
        folder, "sched.Scheduler.plan", "admitted = self._admit(now)", "admitted = self._admit(new)"
    )
    before = run(ZERO / "check.py", folder, 5)
    assert before.returncode == 0, before.stdout + before.stderr
    said = run(ZERO / "check.py", folder, 6)
    assert said.returncode == 1 and "sched.py, line" in said.stdout and "in plan" in said.stdout
    assert "NameError: name 'new' is not defined" in said.stdout
    assert "Traceback" not in said.stdout + said.stderr


def test_crash_and_endless_loop_are_one_line(tmp_path, monkeypatch, capsys):
    """A wrong index is no exception in MLX: the process may die of it. On a busy machine an endless
    loop was said to wait for something."""
    folder = full_book(tmp_path / "mine")
    change(folder, "kv.Window.read", "return mx.split", "import os; os.kill(os.getpid(), 11)")
    assert not check.show_book(str(folder), [STAGES[2]], None)
    said = capsys.readouterr().out
    assert "The process crashed (signal 11)" in said and re.search(
        r"kv.py, line \d+, in read", said
    )
    change(folder, "sched.Scheduler._chunks", "left = max(left, self.chunk)", "while True: pass")
    monkeypatch.setenv("PYTEST_TIMEOUT", "3")
    assert not check.show_book(str(folder), [STAGES[6]], None)
    said = capsys.readouterr().out
    assert "no end after 3 s: an endless loop?" in said and "Stack of" not in said
    assert re.search(r"sched.py, line \d+, in _chunks", said)
    waits = "import time; time.sleep(600)"
    change(folder, "sched.Scheduler._chunks", "while True: pass", waits)
    assert not check.show_book(str(folder), [STAGES[6]], None)
    said = capsys.readouterr().out
    assert "no end after 3 s: an endless loop?" in said
    assert re.search(r"sched.py, line \d+, in _chunks", said)


def test_syntax_and_import_errors_say_where(tmp_path):
    """A book that cannot be imported."""
    folder = full_book(tmp_path / "mine")
    with (folder / "kv.py").open("a") as file:
        file.write("import nothing_of_this_name\n")
    said = run(ZERO / "check.py", folder, 3)
    assert said.returncode == 1 and "✗ The chapters can be imported." in said.stdout
    assert "No module named 'nothing_of_this_name'" in said.stdout and "kv.py, line" in said.stdout
    (folder / "kv.py").write_text("import math\n\ndef write(:\n")
    for program in (("ask.py", "--book", folder, "hi"), (ZERO / "check.py", folder)):
        said = run(*program)
        assert said.returncode == 2 and said.stderr.count("\n") == 1
        assert "kv.py, line 3: invalid syntax" in said.stderr


def test_a_teacher_sees_who_is_where(tmp_path, capsys):
    anna = tmp_path / "anna"
    ben = tmp_path / "ben"
    start.main([str(anna)])
    start.main([str(ben), "--from", "2"])
    capsys.readouterr()
    assert check.main([str(anna), str(ben), str(tmp_path / "carl")]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert f"{'·' * len(STAGES)}  at stage 1, one token says something: 0 of 3 written" in first
    assert f"■{'·' * (len(STAGES) - 1)}  at stage 2" in second and "is no folder" in third


@pytest.mark.parametrize("mistake", MISTAKES if EVERYTHING else [])
def test_check_names_each_mistake(mistake, tmp_path):
    """The first stage that fails, in a whole book of simple functions."""
    folder = tmp_path / "mine"
    start.main([str(folder)])
    for chapter, functions in tasks().items():
        file = folder / f"{chapter}.py"
        for name, (stage, _) in functions.items():
            file.write_text(with_body(file.read_text(), simple(stage), name))
    assert not dict(overlay.Book(folder).blanks())
    chapter, _, name = mistake.name.partition(".")
    file = folder / f"{chapter}.py"
    file.write_text(with_mistake(mistake, file.read_text(), name))
    said = run(ZERO / "check.py", folder).stdout
    stage = STAGES[mistake.stage - 1]
    assert f"stage {stage.number}, {stage.name}: not right yet" in said, said
    assert said.count("not right yet") == 1


def with_body(text: str, other: str, name: str) -> str:
    """A chapter, in which a blank function has the body of another file."""
    lines = text.splitlines(keepends=True)
    node = overlay.functions(text)[name]
    theirs = overlay.functions(other)[name]
    body = other.splitlines(keepends=True)[theirs.body[0].lineno - 1 : theirs.end_lineno]
    lines[node.end_lineno - 1 : node.end_lineno] = body
    return "".join(lines)


# --- programs run another book ------------------------------------------------------------------


def test_program_survives_a_mistake_in_a_book(tmp_path):
    """`forward` fails for the longest prompt: the traceback names the reader's line."""
    folder = tmp_path / "mine"
    folder.mkdir()
    text = overlay.our_file("llama").read_text()
    wrong = "assert ids.size < 13, 'a mistake in mine'\n    x = model.table.embed(ids)  # (N, D)"
    text = text.replace("x = model.table.embed(ids)  # (N, D)", wrong)
    blank = {"attention": tasks()["llama"]["attention"]}
    (folder / "llama.py").write_text(start.blank(text, blank))
    said = run(
        "ask.py",
        "--book",
        folder,
        "--slots",
        1,
        "What is 17 + 6?",
        "Tell me a very short story about an owl.",
        "Spell cat.",
    )
    assert said.returncode == 1
    assert "book mine (still blank: 1 function of stage 1; ours stand in)" in said.stderr
    assert f'File "{folder}/llama.py", line ' in said.stderr and "a mistake in mine" in said.stderr
    assert "17 + 6 = 23" in said.stdout and "c-a-t" in said.stdout
    wrong = run("ask.py", "--book", tmp_path / "none", "hi")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert "start.py mine makes one" in wrong.stderr


def test_endless_step_of_a_book_ends(tmp_path):
    """A plan holds the engine's lock: the screen waited for it, and could not be left."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(ROOT / "sched.py", folder)
    endless = "left = max(left, self.chunk)\n        while self.submitted == 1: pass"
    change(folder, "sched.Scheduler._chunks", "left = max(left, self.chunk)", endless)
    code = """
import sys
from course import overlay
overlay.PATIENCE_S = 1
overlay.open_book(sys.argv[1])
from nanobatch import Engine, SamplingParams
short = SamplingParams(max_tokens=20)
with Engine.load("demo", slots=1, max_len=64) as engine, engine.serving():
    for _ in range(2):
        result = engine.submit(engine.text.ask("What is 17 + 6?"), short).result(timeout=60)
        print(result.finish_reason, result.error)
"""
    said = run("-c", code, folder)
    first, second = said.stdout.splitlines()
    assert first == "error Endless: Python alone took more than 1 s for a step: an endless loop?", (
        said.stderr
    )
    assert second == "stop None" and "sched.py" in said.stderr


def test_other_book_is_not_batch_invariant(tmp_path):
    """The claim is about our code. The screen and the benchmark name the book."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(ROOT / "kv.py", folder)
    code = """
import sys
from course import overlay
overlay.open_book(sys.argv[1])
from nanobatch import Engine
import kv
with Engine.load("demo", slots=1, max_len=64) as engine:
    print(kv.__file__, engine.is_batch_invariant, engine.summary, sep="\\n")
"""
    said = run("-c", code, folder)
    file, exact, summary = said.stdout.splitlines()
    assert (file, exact) == (str(folder / "kv.py"), "False"), said.stderr
    assert summary.endswith(", book mine")
    column = read_rival(str(folder), "continuous")
    assert (column.checkout, column.environment) == (None, {"NANOBATCH_BOOK": str(folder)})
    assert read_rival(str(ROOT), "continuous").environment == {"NANOBATCH_BOOK": ""}
    log = run("tui.py", "--book", folder, "--plain", "--script", "burst2 wait")
    assert "nanobatch: book mine\n" in log.stderr and log.returncode == 0, log.stderr
    parts = status.parts_of_status(State(book="mine"), Canvas(DARK, 100, 1))
    assert [text for text, *_ in islice(parts, 3)] == ["nanobatch", "demo", "book mine"]
