"""The recording in docs/index.html is genuine: the scheduler and the model reproduce it."""

import hashlib
import json
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest

import tui
from docs.make import page
from nanobatch import SamplingParams
from policies import POLICIES
from web import simulate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "index.html"
RECORDING = page.read_recording(str(PAGE))
TALK = page.read_talk(str(PAGE))
FIELDS = RECORDING["fields"]
at_every_run = pytest.mark.parametrize("run", RECORDING["runs"], ids=lambda run: run["policy"])


def named(kind: str, values: list) -> dict:
    return simulate.named(FIELDS[kind], values)


@at_every_run
def test_the_scheduler_plans_each_step_of_the_page_again(run):
    """The plans follow from the prompts and the ends of the answers."""
    limits = named("Limits", run["limits"])
    prompts = simulate.sent_of(run, FIELDS)
    played = simulate.play(limits, POLICIES[run["policy"]], prompts, page.price_of(RECORDING))
    assert len(played["steps"]) == len(run["steps"]) > 400
    for plan, packed in zip(played["steps"], run["steps"], strict=True):
        step = named("StepView", packed)
        for name, value in plan.items():
            assert json.loads(json.dumps(value)) == step[name], (plan["step"], name)
    # With a mean cost per prompt token, the replay takes as long as the recording
    assert played["clock"][-1][1] == pytest.approx(run["clock"][-1][1], rel=0.02)


@pytest.fixture(scope="module")
def answered():
    """Run the page's prompts again. Yield the engine, and the text of each answer."""
    args = tui.parse_arguments(["--model", "demo", "--slots", "8"])
    run = RECORDING["runs"][-1]
    with tui.load_engine(args, lambda stage: None, time.perf_counter) as engine:
        handles = []
        for packed, asked in zip(run["requests"], run["asked"], strict=True):
            prompt = engine.text.ask(named("RequestView", packed)["prompt"])
            handles.append(engine.submit(prompt, SamplingParams(max_tokens=asked, temperature=0)))
        yield engine, [handle.result().text for handle in handles]


def check_form(engine) -> None:
    """Skip the test if this machine computes products in a different form from the recorded one, which may
    lead to different tokens."""
    form = re.compile(r"rows \((\w+)")
    recorded, here = (form.search(s) for s in (RECORDING["about"]["engine"], engine.summary))
    if not (recorded and here and recorded[1] == here[1]):
        pytest.skip(f"recorded with {recorded and recorded[1]}, and this is {here and here[1]}")


def test_the_model_gets_the_restored_conversation(answered):
    check_form(answered[0])
    assert page.talk_demo() == TALK
    assert len(TALK) == 4 and not TALK[0]["cached"]
    for before, turn in pairwise(TALK):
        # Everything is cached except for the last token of the answer, which has no row
        assert turn["cached"] == before["prompt"] + before["tokens"] - 1


def test_the_model_gives_each_answer_of_the_page_again(answered):
    engine, texts = answered
    check_form(engine)
    hashes = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    assert len(hashes) == 24
    assert all(run["hashes"] == hashes for run in RECORDING["runs"])


@at_every_run
def test_the_hashes_of_the_page_are_those_of_its_texts(run):
    texts = [named("RequestView", packed)["text"] for packed in run["requests"]]
    assert [hashlib.sha256(t.encode()).hexdigest()[:16] for t in texts] == run["hashes"]


def test_the_words_about_speed_are_those_of_the_table():
    """llama.cpp is faster when all rows decode, or with fewer than four users, and slower with four or more."""
    cells = re.findall(
        r"<tr><td>(\d+) (requests?|users?)</td>(.*?)</tr>", page.table_of("bench-15m.json")
    )
    assert len(cells) == 8
    for many, what, values in cells:
        ours, _, theirs = (float(v.replace(",", "")) for v in re.findall(r"<td>(.*?)</td>", values))
        assert (ours < theirs) == ("request" in what or int(many) < 4), (many, what)


def test_the_page_is_made_of_what_lies_here():
    """The page is up to date, except for its copies of the scheduler's files, which the exercises change."""
    anew, there = page.make([page.read_recording(str(PAGE))], talk=TALK), PAGE.read_text()
    data = re.compile(r'<script type="application/json" id="data-lab">(.*?)</script>')
    labs = [json.loads(data.search(text)[1]) for text in (anew, there)]
    for lab in labs:
        assert "class Scheduler" in lab["sources"].pop("sched.py")
        assert "POLICIES = " in lab["sources"].pop("policies.py")
        assert "class Prefixes" in lab["sources"].pop("prefix.py")
    says = "make it anew: python docs/make/page.py docs/index.html docs/index.html"
    assert labs[0] == labs[1], says
    assert data.sub("", anew) == data.sub("", there), says


def test_the_page_tells_how_it_was_made():
    assert len(PAGE.read_bytes()) < page.MOST
    text = PAGE.read_text()
    assert "python tui.py --script race24 --record run.json" in text
    assert page.ASKS in text and "Be the scheduler" in text
