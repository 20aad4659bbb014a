"""The blank book of course/from_zero: each stage also passes with code that differs from ours, and names
the mistake in a wrong book.

The stages' own tests, which are part of the suite, show that our chapters pass. Here other code replaces
our functions for a moment, and the tests of a stage are called in this process. The long form also
blanks each function separately, and plants every mistake instead of one per stage.
"""

import ast
import os
import re
import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import NamedTuple

import pytest
from books import SIMPLE, change, full_book, simple, with_mistake
from long_forms import IS_LONG
from processes import run

from benchmarks.plan import read_rival
from course import overlay
from course.from_zero import check, start
from course.from_zero.stages import STAGES, tasks

ROOT = Path(__file__).parents[2]
ZERO = ROOT / "course" / "from_zero"
RUN = ROOT / "course" / "run.py"


class Mistake(NamedTuple):
    name: str  # the function, such as kv.Window.write
    right: str  # text in `simple_core.py`
    wrong: str
    says: str  # what the stage's message must contain

    @property
    def stage(self) -> int:
        chapter, _, function = self.name.partition(".")
        return tasks()[chapter][function][0]


MISTAKES = [
    Mistake("llama.attention", " / Dh**0.5", "", "not divided by sqrt"),
    Mistake("llama.attention", " + mask", "", "the mask is not added"),
    Mistake(
        "rope.rope_angles", "positions.res", "(positions + 1).res", "Position 0 is not rotated"
    ),
    Mistake("ops.rms_norm", " + eps", "", "eps keeps a small row small"),
    Mistake("llama.seen", "rows <= at", "rows <= at + 1", "A token sees itself and all tokens"),
    Mistake(
        "kv.Window.write", "[slot, :, rows] = self", "[0, :, rows] = self", "written to its slot"
    ),
    Mistake("sampling.draw", "uniform(pick.seed", "uniform(pick.slot", "not on slot or neighbours"),
    Mistake("sampling.keep_first", " - shares", "", "top_k keeps"),
    Mistake("token_choice.inverse_cdf", "mx.minimum(place, last)", "place", "never a weight of 0"),
    Mistake("runner.Runner._forward", "(count - 1)", "(0)", "side by side"),
    Mistake("sched.Scheduler._admit", "[:room]", "[: len(free)]", "when all of it has ended"),
    Mistake("request.Request.next_row", " - 1", "", "the row after all tokens before"),
    Mistake(
        "sched.Scheduler._keep_proven_rows", "(0, self.max_len)", "(0, 0)", "rows of NaN are left"
    ),
    Mistake("sched.Scheduler.commit", "== request.max", "> request.max", "timeline"),
    Mistake("sched.Scheduler._allot", "left -= chunk.tokens", "pass", "may have"),
    Mistake(
        "sched.Scheduler.plan",
        "max(self.budget - len(decoding), self.chunk)",
        "self.budget - len(decoding)",
        "One whole chunk always fits",
    ),
    Mistake(
        "sched.Scheduler.plan",
        "room = min(room, prompt_tokens)",
        "pass",
        "unless it would take too long",
    ),
    Mistake(
        "sched.Scheduler.commit",
        "if request.finish_reason:",
        "if False:",
        "A commit hands out tokens",
    ),
    Mistake(
        "nanobatch.Engine._may_stay_in_flight",
        "return not plan.is_due(self.eager_first_token)",
        "return False",
        "starts before the last one is",
    ),
    Mistake(
        "runner.Runner.start_sampling", "newest < 0", "newest < -1", "the newest token of each slot"
    ),
    Mistake("nanobatch.Engine.step", "self._fail(error)", "raise", "escaped from Engine.step"),
    Mistake(
        "sched.Scheduler._admit",
        "self.policy.next(self)",
        "self.waiting.values()",
        "The policy decides which request is next",
    ),
    Mistake("sched.Scheduler.commit", "ended.append(request)", "pass", "requests have ended"),
    Mistake("sched.Scheduler.finish", "self._end_drain()", "pass", "change of policy"),
    Mistake("sched.Scheduler.plan", " if self.waiting else ", " or ", "nobody waits"),
    Mistake(
        "runner.Runner.start_sampling",
        "self._enqueue(",
        "(lambda *them: None)(",
        "never handed to self._enqueue",
    ),
    Mistake("nanobatch.Engine.step", "self._changing(), ", "", "`_changing` calls on_commit"),
    Mistake(
        "sampling.draw", "if ids is None else", "if True else", "a token came that is not likely"
    ),
    Mistake(
        "sched.Scheduler.plan",
        "r.planned < r.max_tokens",
        "True",
        "No more than `max_tokens` tokens",
    ),
    Mistake("sched.Scheduler._allot", "(left + 1) // 2", "0", "leaves half of the budget"),
    Mistake("sched.Scheduler._allot", "(left + 1) // 2", "left", "does not wait for a long one"),
    Mistake("sched.Scheduler._allot", "reserved = 0", "pass", "is cut into chunks"),
    Mistake(
        "llama.forward",
        "mx.concatenate([window.positions for window in windows])",
        "mx.arange(ids.size)",
        "Positions come from the windows",
    ),
    Mistake(
        "llama.attend",
        "        at += size\n    return operation.run(layer.slab_index, q)",
        "        at += size\n        sums = operation.run(layer.slab_index, q)\n    return sums",
        "all write before the first one reads",
    ),
    Mistake(
        "token_choice.argmax",
        "x.max(axis=-1, keepdims=True)",
        "gather(x, mx.argmax(mx.where(x == x, x, 0), axis=-1, keepdims=True))",
        "the fault would stay hidden",
    ),
    Mistake(
        "runner.Runner._forward",
        "self._start(self.slab.w",
        "(self.slab.w",
        "`self._start` is called",
    ),
    Mistake(
        "sched.Scheduler.plan", "if r not in with_chunk", "if False", "without a chunk is held"
    ),
    Mistake("nanobatch.Engine.step", "except BaseException", "except Exception", "is raised again"),
    Mistake("pages.Pool.grow", "-(-rows // PAGE)", "rows // PAGE", "when its next row needs one"),
    Mistake(
        "sched.Scheduler._allot",
        "self._cut(wanted[0], (left + 1) // 2).tokens",
        "(left + 1) // 2",
        "Budget that the oldest",
    ),
    Mistake(
        "nanobatch.Engine.step",
        "_in_flight) > 1",
        "_in_flight) > 2",
        "starts before the last one is read",
    ),
    Mistake(
        "runner.Runner.start_sampling",
        "newest = ",
        "newest = mx.eval(step.tokens) or ",
        "`start_sampling` waits",
    ),
    Mistake("pages.Pool.leave", "self.free += ", "", "of 6 pages each"),
    Mistake("pages.Pool.place", "row % PAGE", "row", "row 37 is in page 2"),
    Mistake(
        "pages.PagedWindow.write",
        "sequence, row)",
        "sequence, start)",
        "New rows are written where",
    ),
    Mistake("pages.PagedWindow.read", "array(table)", "array(sorted(table))", "in their order"),
    Mistake(
        "llama.attention",
        "sums.transpose(0, 2, 1, 3)",
        "sums",
        "are not brought back to (B, L, H, Dh)",
    ),
    Mistake(
        "llama.forward",
        "layer.mlp(layer.mlp_norm(x))",
        "layer.mlp(x)",
        "the logits (check two norms",
    ),
    Mistake(  # as `cut` does it, whose last part is what is left
        "llama.Formula.run",
        "size = group.B * window.L",
        "size = window.L * (group.B if len(window.groups) == 1 else 1)",
        "Several windows share a pass",
    ),
    Mistake(
        "runner.Runner._sample", "in slots]", "in sorted(rows)]", "likeliest token of each slot"
    ),
    Mistake("sched.Scheduler.plan", "each.request.planned += 1", "pass", "but none is planned"),
    Mistake("sched.Scheduler._cut", "min(left, self.chunk)", "left", "and may have 1 to 4"),
    Mistake("lookup.draft", "len(text) - 3", "len(text) - 2", "newest two"),
    Mistake(
        "lookup.draft", "range(len(text) - 3, -1, -1)", "range(len(text) - 2)", "last occurred"
    ),
    Mistake("lookup.accept", "right + 1", "max(1, right)", "the model's own token"),
    Mistake(
        "lookup.accept", "drafted[right] == sampled[right]", "True", "Drafted tokens are accepted"
    ),
    Mistake("lookup.answer", " - 1)\n        for", ")\n        for", "is skipped"),
    Mistake("lookup.answer", "                break\n", "                pass\n", "end within"),
    Mistake("lookup.answer", "min(most, max_tokens - len(said) - 1)", "most", "at max_tokens"),
    Mistake("eight_bits.quantize", "axis=-1, keep", "axis=(0, -1), keep", "codes and scale alone"),
    Mistake("eight_bits.quantize", "/ 127", "/ 128", "code 127 or -127"),
    Mistake("eight_bits.quantize", "mx.round(", "(", "code 127 or -127"),
    Mistake("eight_bits.quantize", "mx.abs(x)", "x", "127 or -127"),
    Mistake(
        "eight_bits.SmallWindow.write", "i * self.L, (", "0, (", "Rows are written to their slots"
    ),
    Mistake(
        "eight_bits.SmallWindow.read", "self.slots[group.slots.start]", "0", "the keys of slot 3"
    ),
    Mistake("ranks.route", "replica.waiting + ", "", "that has the fewest tokens"),
    Mistake("ranks.route", "max(shared, same)", "same", "that has the fewest tokens"),
    Mistake(
        "ranks.shard",
        'in ("o_proj", "down_proj")',
        '== "o_proj"',
        "Weights whose outputs are heads",
    ),
    Mistake("ranks.shard", "if weight.ndim == 1", "if False", "a norm is whole"),
    Mistake("ranks.block", "x = x + all_sum(h @", "x = x + (h @", "how often each rank"),
    Mistake("ranks.block", "x + all_sum(h @ w", "all_sum(x + h @ w", "x is added after each"),
]


# By default one mistake per stage, the last one listed
TRIED = MISTAKES if IS_LONG else [*{mistake.stage: mistake for mistake in MISTAKES}.values()]


def stage_tests(stage: int) -> list[Callable[[], None]]:
    module = import_module(f"course.from_zero.{STAGES[stage - 1].tests.stem}")
    return [test for name, test in vars(module).items() if name.startswith("test_")]


def verdict(stage: int) -> str:
    """Return the message of a stage's first failing test, or "" if all pass."""
    for test in stage_tests(stage):
        try:
            test()
        except (Exception, pytest.fail.Exception) as error:
            return f"{test.__doc__} {error}"
    return ""


# --- the blank book -----------------------------------------------------------------------------


def without_bodies(text: str, names: Sequence[str]) -> str:
    """Return a chapter's code with the bodies of these functions removed."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.body = [ast.Pass()]
    return ast.unparse(tree)


def test_the_blank_book_differs_only_in_bodies():
    """The book has all our names and keeps the bounds checks. Only bodies are removed, and switches turned off."""
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
    """`python docs/make/pictures.py stage` regenerates it."""
    shown = re.findall(r"> +✓ ([^<]*)<", (ZERO / "stage.svg").read_text())
    says = [" ".join(getdoc(test).split()) for test in stage_tests(1)]
    assert {*says} <= {*shown}


# --- the checks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(1, len(STAGES) + 1))
def test_stage_passes_simple_and_fails_blank(stage, tmp_path):
    """Up to stage 8, a correct solution that differs from ours passes. A blank one fails with its stage's number."""
    written = [task.name for task in STAGES[stage - 1].tasks]
    if stage < 9:
        with overlay.swapped(written, SIMPLE):
            assert not verdict(stage)
    empty = tmp_path / "blank.py"
    empty.write_text("\n".join(start.blank_book().values()).replace("from __future__ import", "# "))
    for names in [[name] for name in written] if IS_LONG else [written]:
        with overlay.swapped(names, empty):
            assert f"stage {stage}: " in verdict(stage), names


@pytest.mark.parametrize("mistake", TRIED, ids=lambda m: f"{m.stage}-{m.name}-{m.right}")
def test_mistake_is_named_by_its_stage(mistake, tmp_path, monkeypatch):
    """Regression: in CI pytest prints the full difference of two values. For two lists of 4,000 draws that
    took hours, until CI stopped the run."""
    monkeypatch.setenv("CI", "true")
    file = tmp_path / "wrong.py"
    function = mistake.name.partition(".")[2]
    text = with_mistake(simple(mistake.stage), function, mistake.right, mistake.wrong)
    file.write_text(text)
    with overlay.swapped([mistake.name], file):
        assert mistake.says in verdict(mistake.stage)


# --- the programs of the course -----------------------------------------------------------------


def test_check_says_what_is_blank(tmp_path, capsys):
    """`start.py` writes a book once, and does not overwrite it."""
    folder = str(tmp_path / "mine")
    assert start.main([folder]) == 0 and start.main([folder]) == 2
    assert "is there already; name another folder" in capsys.readouterr().err
    assert check.main([folder]) == 1
    assert "llama.py, attention is blank" in capsys.readouterr().out
    assert check.main([folder, "--hint", "3"]) == 0
    said = capsys.readouterr().out
    assert "llama.attention, hint 3 of 3:" in said and "scores = q @" in said
    assert Path(folder, ".gitignore").read_text() == "*\n"


def test_mistake_shows_in_its_own_stage(tmp_path, capsys):
    """Earlier stages pass, and the message names the line."""
    folder = full_book(tmp_path / "mine")
    change(folder, "sched.Scheduler.plan", "self._admit(now)", "self._admit(new)")
    assert not check.show_book(str(folder), [STAGES[4], STAGES[5]], None)
    said = capsys.readouterr().out
    assert f"stage 5, {STAGES[4].name}: done" in said and f"6, {STAGES[5].name}: not right" in said
    assert re.search(r"sched.py, line \d+, in plan", said) and "Traceback" not in said
    assert "NameError: name 'new' is not defined" in said


def test_crash_and_endless_loop_are_one_line(tmp_path, monkeypatch, capsys):
    """A crash or an endless loop is reported in one line with the reader's line. (MLX checks no indices, so a
    mistake may crash the process instead of raising an exception.)"""
    folder = full_book(tmp_path / "mine")
    change(folder, "kv.Window.read", "return mx.split", "import os; os.kill(os.getpid(), 11)")
    assert not check.show_book(str(folder), [STAGES[2]], None)
    said = capsys.readouterr().out
    assert "The process crashed (signal 11)" in said and re.search(
        r"kv.py, line \d+, in read", said
    )
    change(folder, "sched.Scheduler._allot", "oldest = requests[0]", "while True: pass")
    monkeypatch.setenv("PYTEST_TIMEOUT", "1")
    assert not check.show_book(str(folder), [STAGES[6]], None)
    said = capsys.readouterr().out
    assert "no end after 1 s: an endless loop?" in said and "Stack of" not in said
    assert re.search(r"sched.py, line \d+, in _allot", said)


def test_syntax_and_import_errors_say_where(tmp_path, capsys):
    """A book that cannot be imported is reported with its file and line."""
    folder = full_book(tmp_path / "mine")
    with (folder / "kv.py").open("a") as file:
        file.write("import nothing_of_this_name\n")
    assert check.main([str(folder), "3"]) == 1
    said = capsys.readouterr().out
    assert "✗ The chapters can be imported." in said
    assert "No module named 'nothing_of_this_name'" in said and "kv.py, line" in said
    (folder / "kv.py").write_text("import math\n\ndef write(:\n")
    for program in ((RUN, folder, "ask.py", "hi"), (ZERO / "check.py", folder)):
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
    assert f"■{'·' * (len(STAGES) - 1)}  at stage 2" in second and "is not a folder" in third


# --- running our programs with another book -----------------------------------------------------


def test_program_survives_a_mistake_in_a_book(tmp_path):
    """If the book fails for the longest prompt, the others are answered, and the traceback names the line."""
    folder = tmp_path / "mine"
    folder.mkdir()
    text = overlay.our_file("llama").read_text()
    wrong = "assert ids.size < 13, 'a mistake in mine'\n    x = model.table.embed(ids)  # (N, D)"
    text = text.replace("x = model.table.embed(ids)  # (N, D)", wrong)
    blank = {"attention": tasks()["llama"]["attention"]}
    (folder / "llama.py").write_text(start.blank(text, blank) + start.STAND_IN)
    said = run(
        RUN,
        folder,
        "ask.py",
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
    wrong = run(RUN, tmp_path / "none", "ask.py", "hi")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    assert "start.py mine makes one" in wrong.stderr
    (folder / "text.py").write_text("")  # this would replace our package
    wrong = run(RUN, folder, "ask.py", "hi")
    assert wrong.returncode == 2 and "text.py is not a chapter; move it elsewhere" in wrong.stderr
    old = run("ask.py", "--book", folder, "hi")
    assert old.returncode == 2 and "--book was removed: use python course/run.py" in old.stderr


def test_endless_step_of_a_book_ends(tmp_path):
    """Regression: the engine plans with its lock held, so the screen waited for it and could not be closed."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "sched.py").write_text((ROOT / "sched.py").read_text() + start.STAND_IN)
    endless = "oldest = requests[0]\n        while self.submitted == 1: pass"
    change(folder, "sched.Scheduler._allot", "oldest = requests[0]", endless)
    code = """
import sys
from course import overlay
overlay.PATIENCE_S = 1
from nanobatch import Engine, SamplingParams
short = SamplingParams(max_tokens=20)
with Engine.load("demo", slots=1, max_len=64) as engine, engine.serving():
    for _ in range(2):
        result = engine.submit(engine.text.ask("What is 17 + 6?"), short).result(timeout=60)
        print(result.finish_reason, result.error)
"""
    said = run("-c", code, **overlay.Book(folder).environment())
    first, second = said.stdout.splitlines()
    assert first == "error Endless: Python alone took more than 1 s for a step: an endless loop?", (
        said.stderr
    )
    assert second == "stop None" and "sched.py" in said.stderr


def test_other_book_is_not_batch_invariant(tmp_path):
    """Only our own code is known to be batch-invariant. The screen names the book, and the benchmark can run it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(ROOT / "kv.py", folder)
    code = """
from nanobatch import Engine
import kv
with Engine.load("demo", slots=1, max_len=64) as engine:
    print(kv.__file__, engine.is_batch_invariant, engine.summary, sep="\\n")
"""
    said = run("-c", code, **overlay.Book(folder).environment())
    file, exact, summary = said.stdout.splitlines()
    assert (file, exact) == (str(folder / "kv.py"), "False"), said.stderr
    assert summary.endswith(", with 1 module of mine")
    column = read_rival(str(folder), "continuous")
    path = column.environment["PYTHONPATH"].split(os.pathsep)
    assert column.checkout is None and path == [str(folder), str(ROOT)]
    log = run(RUN, folder, "tui.py", "--plain", "--script", "burst2 wait")
    assert "nanobatch: book mine\n" in log.stderr and log.returncode == 0, log.stderr
