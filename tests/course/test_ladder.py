"""The programs of course/ladder run as printed, give the engine's tokens, and refer to code that exists."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run, without_backend
from source import places

from nanobatch import Engine, Result, SamplingParams
from sched import check_invariants

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "course" / "ladder"
RUNGS = sorted(LEARN.glob("[0-9]*_*.py"))


@pytest.fixture(scope="module")
def engine():
    with Engine.load("demo", slots=8, max_len=1024) as engine:
        yield engine


def check_that_the_cache_pays(said: str, prompts: list[int], results: list[Result]) -> None:
    """Check the number of tokens computed in all steps: without a cache all tokens so far in each step, with
    it each token but the last once."""
    ((prompt,), (result,)) = prompts, results
    tokens = len(result.tokens)
    none, cached = sum(range(prompt, prompt + tokens)), prompt + tokens - 1
    columns = re.findall(r"^ *all +(\d+) +(\d+)?", said, re.MULTILINE)
    assert columns in ([(str(none), "")], [(str(none), str(cached))]), (columns, none, cached)


def check_that_whole_pages_are_copied(said: str, prompts: list[int], results: list[Result]) -> None:
    """Check the most rows that a step copies: those of all pages in use, of 32 rows each."""
    lengths = [
        (prompt, len(result.tokens)) for prompt, result in zip(prompts, results, strict=True)
    ]
    rows = [
        sum(-(-(prompt + step) // 32) * 32 for prompt, tokens in lengths if step < tokens)
        for step in range(max(tokens for _, tokens in lengths))
    ]
    assert f"a step copies up to {max(rows)} rows in each layer" in said


def test_rung_piped_into_head():
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, RUNGS[0]], stdout=write, stderr=subprocess.PIPE, text=True, timeout=300
    )
    os.close(write)
    assert run.returncode and not run.stderr, run.stderr


def test_continued_timeline_line(monkeypatch, capsys):
    monkeypatch.syspath_prepend(LEARN)
    from board import WIDTH, Timeline

    timeline = Timeline(slots=2)
    for step in range(WIDTH + 1):
        timeline.step({0: ("decode" if step else "prefill", 1), 1: ("blocked", 0)})
    timeline.show("a title")
    said = capsys.readouterr().out.splitlines()
    assert said[3:6] == ["slot 1  " + "╳" * WIDTH, f"from step {WIDTH + 1}", "slot 0  █"]
    assert said[-1].split() == ["▒", "prefill", "█", "decode", "╳", "blocked"]


@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_rung_equals_the_engine(path, engine, tmp_path):
    """Run a rung from another folder, as a reader does, and compare its answers with the engine's."""
    done = run(path, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = done.stdout
    answers = re.findall(r"^ +\d+  (.+)\n     (.+)  \[(\d+) tokens\]$", said, re.MULTILINE)
    assert answers
    sampling = SamplingParams(max_tokens=128)
    results = engine.generate([engine.text.ask(prompt) for prompt, _, _ in answers], sampling)
    for (prompt, text, count), result in zip(answers, results, strict=True):
        assert (text, int(count)) == (result.text, len(result.tokens)), prompt
    assert re.search(r"^slot 0  ▒1[▒█]+", said, re.MULTILINE)
    pictures = re.findall(r"slot \d  (\S+)", ast.get_docstring(ast.parse(path.read_text())))
    assert all(f"  {picture}\n" in said for picture in pictures), "the text shows another picture"
    # These columns are counts, so they are exact even on a busy machine
    prompts = [len(engine.text.ask(prompt)) for prompt, _, _ in answers]
    if path.stem in ("1_one_token", "2_cache"):
        check_that_the_cache_pays(said, prompts, results)
    if path.stem == "6_pages":
        check_that_whole_pages_are_copied(said, prompts, results)
    figures = re.findall(r"(\d+) (?:steps|tokens computed) for (\d+) .*\([\d.]+ s\)", said)
    assert figures and all(int(tokens) > 0 for _, tokens in figures)
    if path.stem in (
        "3_static",
        "4_continuous",
    ):  # the second way takes fewer steps, on any machine
        first, second = (int(steps) for steps, _ in figures)
        assert second < first


@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_rung_ends_with_a_question(path):
    """The code that answers the question exists, and the next program is named."""
    text = path.read_text()
    assert f"    python course/ladder/{path.name}\n" in ast.get_docstring(ast.parse(text))
    question = text.index("\nQuestion: ")
    (answer,) = re.findall(
        r"^The real code answers: ([\w/]+\.py), ([\w.]+)\.$", text[question:], re.MULTILINE
    )
    assert answer[1] in places(ROOT / answer[0]), answer
    (named,) = re.findall(r"^Next: (.*)", text[question:], re.MULTILINE)
    following = RUNGS[RUNGS.index(path) + 1 :]
    assert following[0].name in named if following else "llama.py" in named


def test_run_ahead_in_a_long_conversation(engine, monkeypatch):
    """The rung prefills a conversation of several chunks, and gives the engine's answer to it. (The test
    above uses only the last message.)"""
    monkeypatch.syspath_prepend(LEARN)
    rung = runpy.run_path(str(LEARN / "5_run_ahead.py"))
    question = rung["PROMPTS"][-1]
    talk = engine.text.encode_chat([*rung["TALK"], {"role": "user", "content": question}])
    assert len(talk) > 500
    alone, within = engine.generate([engine.text.ask(question), talk])
    # The answer printed below the rung is the one to the whole conversation
    assert alone.tokens == within.tokens
    # Without neighbours, the steps before the end of the prompt yield no token
    for runs_ahead in (False, True):
        last = rung["Engine"](64, runs_ahead)
        request = last.submit(talk)
        while last.turn():
            check_invariants(last.sched)
        assert tuple(request.answer) == tuple(within.tokens)


def test_run_ahead_when_all_slots_end_at_once(monkeypatch):
    """When all requests finish in the same step, the next plan is empty, although a step is in flight and a
    request is queued."""
    monkeypatch.syspath_prepend(LEARN)
    rung = runpy.run_path(str(LEARN / "5_run_ahead.py"))
    engine = rung["Engine"](64, runs_ahead=True)
    story = rung["TEXT"].ask("Tell me a story about a fox.")
    requests = [engine.submit(story) for _ in range(rung["SLOTS"] + 1)]
    while engine.turn():
        check_invariants(engine.sched)
    assert [request.committed for request in requests] == [64] * len(requests)
    assert len({tuple(request.answer) for request in requests}) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's MLX always has its backend")
def test_rung_without_mlx(tmp_path):
    """Without MLX, one line says what to install."""
    done = run(RUNGS[0], **without_backend(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "pip install -e '.[cpu]'" in done.stderr


def test_readme_lists_every_rung():
    text = (LEARN / "README.md").read_text()
    assert re.findall(r"`python course/ladder/(\w+\.py)`", text) == [path.name for path in RUNGS]
    assert all((LEARN / link).exists() for link in re.findall(r"\]\(([^)]+)\)", text))
