"""The game: a hand can be played, even better than sched.py plays it, and the score does not depend on a
clock."""

from pathlib import Path

import pytest
from browsers import in_node, needs_node

from docs.make import page
from policies import POLICIES

ROOT = Path(__file__).parents[2]
SETUP = page.game_of(page.read_recording(str(ROOT / "docs" / "index.html")))
PLAYS = """
import { Hand, scoreText } from "./game.js";
import { BLOCKED } from "./recording.js";
const words = [/story/, /alphabet|Count|slot|batch/, /./];
const ranks = {
  asTheyCome: () => 0,
  byWords: (request) => words.findIndex((word) => word.test(request.prompt)),
};
const out = {};
for (const [name, rank] of Object.entries(ranks)) {
  const hand = new Hand(asked);
  hand.cut = 256;
  let most = 0;
  hand.step(); // nobody is admitted yet
  const open = hand.lane.cells[0].filter((cell) => cell.kind === BLOCKED).length;
  while (!hand.isOver) {
    const line = [...hand.line].sort((a, b) => rank(a) - rank(b) || a.id - b.id);
    for (const request of line) hand.admit(request);
    hand.step();
    most = Math.max(most, hand.lane.steps.at(-1)?.decode.length ?? 0);
  }
  const tokens = hand.lane.steps.reduce((sum, step) => sum + step.tokens, 0);
  const answered = hand.lane.figuresAt(hand.lane.end).answered;
  const address = name === "byWords" ? "https://ann.github.io/nanobatch/#game" : "";
  const text = scoreText([{ policy: "you", ...hand.figures }], address);
  out[name] = { ...hand.figures, tokens, answered, most, open, text };
}
tell(out);
"""


@pytest.fixture(scope="module")
def played() -> dict:
    return in_node(PLAYS, SETUP)


def test_every_policy_has_played_the_hand():
    assert [run["policy"] for run in SETUP["runs"]] == list(POLICIES)
    done = {run["policy"]: run["done"] for run in SETUP["runs"]}
    assert done["continuous"] < done["static"] < done["serial"]
    assert len(SETUP["requests"]) == 24 and SETUP["requests"][-1]["arrived"] < 0.5
    assert sum("long text" in request["prompt"] for request in SETUP["requests"]) == 4


@needs_node
def test_the_game_keeps_the_schedulers_rules(played):
    tokens = sum(request["output_tokens"] for request in SETUP["requests"])
    for hand in played.values():
        assert hand["answered"] == 24 and hand["tokens"] == tokens and 6 <= hand["most"] <= 8


@needs_node
def test_first_come_first_served_in_the_game(played):
    """The game has the same rules as the scheduler, so first come first served takes as long as in the
    recorded run."""
    continuous = SETUP["runs"][0]
    assert played["asTheyCome"]["done"] == pytest.approx(continuous["done"], rel=0.03)
    assert played["asTheyCome"]["useful"] == pytest.approx(continuous["useful"], rel=0.05)


@needs_node
def test_who_reads_the_prompts_beats_every_policy(played):
    """As the page claims, a visitor who reads the prompts can beat every policy, because the scheduler only
    counts tokens."""
    assert played["byWords"]["done"] < min(run["done"] for run in SETUP["runs"])


@needs_node
def test_idle_time_with_a_queue_is_waste(played):
    """Regression: the page says that such time is drawn in red, but it was blank."""
    assert [hand["open"] for hand in played.values()] == [8, 8]


@needs_node
def test_a_score_can_be_pasted(played):
    text = played["byWords"]["text"]
    assert text.startswith("nanobatch, be the scheduler: 24 prompts, 8 slots\nyou ")
    assert text.endswith(" %\nhttps://ann.github.io/nanobatch/#game")
    assert played["asTheyCome"]["text"].endswith(" %")  # the page has no address here
