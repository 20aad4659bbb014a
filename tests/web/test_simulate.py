"""The scheduler in the page, without the page: lines that are changed, and errors that know their line."""

import base64
import json
import re
from pathlib import Path

import pytest

from policies import POLICIES
from web import simulate

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests" / "web" / "recording-0.5.json"
LIMITS = {"slots": 4, "max_len": 200, "chunk": 16, "budget": 32}
PRICE = {"step": 0.002, "row": 0.0003, "token": 0.0001}
FIELDS = {
    "RequestView": ["metrics"],
    "Metrics": ["prompt_tokens", "output_tokens"],
    "StepView": ["decode", "ghosts", "drafts"],
}
RUN = {
    "requests": [[[20, 5 + 7 * (number % 4)]] for number in range(12)],
    "ids": [[number] * 20 for number in range(12)],
    "asked": [40] * 12,
    "arrivals": [0.0] * 12,
    "steps": [],
}


def asked(lines: str = "", policy: str = "continuous", rate: float = 0, run: dict = RUN) -> dict:
    question = {"run": run, "fields": FIELDS, "rate": rate, "limits": LIMITS, "price": PRICE}
    question |= {"lines": lines or simulate.lines(), "policy": policy}
    return json.loads(simulate.answer(json.dumps(question)))


def test_the_page_offers_every_policy():
    """A reader's record is known in the page's own lines, and not to the project."""
    assert json.loads(simulate.start())["policies"] == [*POLICIES, "mine"]
    assert "mine" not in POLICIES


@pytest.mark.parametrize("policy", [*POLICIES, "mine"])
def test_the_lines_as_they_are_change_no_plan(policy):
    """They are those of `policies.py`, and one record more."""
    played = asked(policy=policy)
    assert "error" not in played and len(played["steps"]) > 20
    if policy in POLICIES:
        prompts = simulate.sent_of(RUN, FIELDS)
        plain = simulate.play(LIMITS, POLICIES[policy], prompts, PRICE)
        assert json.loads(json.dumps(plain["steps"])) == played["steps"]


def test_drafts_in_the_pages_replay():
    """r3 decodes in three steps, with seven drafts in the second, five of which were right."""
    steps = [[[[0, 3]], [], []], [[[0, 3]], [], [[0, 7, 5]]], [[[0, 3]], [], []]]
    played = asked(run=RUN | {"steps": steps})
    plain = asked()
    assert [step["drafts"] for step in played["steps"] if step["drafts"]] == [[[2, 7, 5]]]
    tokens = [sum(step["tokens"] for step in run["steps"]) for run in (plain, played)]
    assert tokens[0] == tokens[1]


def test_a_changed_line_changes_the_plans():
    one = simulate.lines().replace("running: free,", "running: min(free, 1),", 1)
    assert one != simulate.lines()
    assert [len(step["admitted"]) for step in asked()["steps"][:2]] == [4, 0]
    assert [len(step["admitted"]) for step in asked(one)["steps"][:3]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("free if free >= 2", "fre if free >= 2", "NameError: name 'fre' is not defined"),
        ("TABLE = (", "TABLE = = (", "SyntaxError"),
        ("return iter(scheduler.waiting.values())", "return [][1]", "IndexError"),
    ],
)
def test_an_error_names_its_line(before, after, said):
    lines = simulate.lines().replace(before, after, 1)
    at = next(i for i, line in enumerate(lines.split("\n"), start=1) if after in line)
    played = asked(lines, policy="mine")
    assert played["line"] == at and played["error"].startswith(said)
    assert "<lines>" not in played["error"]


def test_a_policy_that_admits_nobody_is_said_to_do_so():
    lines = simulate.lines().replace("running: free,", "running: 0,", 1)
    assert asked(lines)["error"] == "no slots are taken, 12 wait, and no step is planned"


def test_a_load_spreads_the_arrivals_the_same_each_time():
    played = asked(rate=20.0)
    assert played["arrivals"] == asked(rate=20.0)["arrivals"] == sorted(played["arrivals"])
    assert 0.2 < played["arrivals"][-1] < 3
    for step, (began, ended) in zip(played["steps"], played["clock"], strict=True):
        assert (
            ended
            > began
            >= max((played["arrivals"][r - 1] for _, r in step["admitted"]), default=0)
        )


def test_pyodide_is_pinned_by_hash():
    pyodide = json.loads((ROOT / "web" / "pyodide.json").read_text())
    assert pyodide["at"].startswith("https://") and pyodide["at"].count("@") == 1
    assert set(pyodide["files"]) >= {"pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm"}
    for integrity in pyodide["files"].values():
        kind, _, digest = integrity.partition("-")
        assert kind == "sha384" and len(base64.b64decode(digest)) == 48


def test_a_recording_of_version_0_5_plays():
    """Its steps and metrics have older names: guesses, guessed, right."""
    recording = json.loads(OLD.read_text())
    fields, (run,) = recording["fields"], recording["runs"]
    assert "guesses" in fields["StepView"]
    limits = simulate.named(fields["Limits"], run["limits"])
    price = {"step": 0.01, "row": 0.0, "token": 0.0}
    played = simulate.play(limits, POLICIES["continuous"], simulate.sent_of(run, fields), price)
    steps = [simulate.named(fields["StepView"], step) for step in run["steps"]]
    assert [step["tokens"] for step in played["steps"]] == [step["tokens"] for step in steps]
    assert sum(len(step["drafts"]) for step in steps) > 5


def test_python_and_the_page_have_the_same_table_of_old_names():
    line = re.search(
        r"const RENAMED = \{(.*?)\}", (ROOT / "web" / "recording.js").read_text(), re.S
    )
    pairs = re.findall(r'(\w+): "(\w+)"', line[1])
    assert dict(pairs) == simulate.RENAMED and len(pairs) == len(simulate.RENAMED)
