"""Why a request waited: the phases of its life, the requests that it waited for, and the replays."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from long_forms import number_of
from screen_stage import (
    Stage,
    draft_at_random,
    drawn,
    like_golden,
    on_screen,
    plain,
)

from experiments import latency_breakdown as breakdown
from experiments import request_latency
from nanobatch import SamplingParams
from policies import POLICIES
from screen.commands import orders_of
from screen.draw import style
from screen.pages import request_details
from screen.state import State, prices
from tui import MENU

EVENINGS = [[97 + i] * 80 for i in range(3)]  # common prefixes of the prompts


def random_run(seed: int, cancels: bool, shares: bool = False, drafts: bool = False) -> Stage:
    """Run bursts of several clients, one after another, under a policy that depends on the seed."""
    dice = random.Random(seed)
    stage = Stage(policy=list(POLICIES)[seed % len(POLICIES)], slots=dice.randint(1, 5)).load()
    engine = stage.engine
    engine.prefix_cache = shares
    engine.sched.chunk = dice.choice([16, 32])
    engine.sched.budget = dice.randint(1, 60)
    engine.eager_first_token = dice.random() < 0.5
    if drafts:
        draft_at_random(engine, dice)
    clients = "abc"[: dice.randint(1, 3)]
    handles = []
    for _ in range(dice.randint(1, 2)):
        for _ in range(dice.randint(1, 6)):
            for _ in range(dice.randint(1, 6)):
                prompt = [dice.randint(97, 122) for _ in range(dice.randint(1, 80))]
                if shares:
                    prompt = EVENINGS[dice.randint(0, 2)][: dice.randint(0, 80)] + prompt
                stop = f"<{dice.randint(1, 12)}>" if dice.random() < 0.5 else ()
                most = SamplingParams(max_tokens=dice.randint(1, 25), stop=stop)
                handles.append(engine.submit(prompt, most, client=dice.choice(clients)))
            for _ in range(dice.randint(1, 12)):
                stage.turns()
                stage.time.now += 1e-4  # no prompt arrives exactly when a plan is made
            engine.run_ahead = dice.random() < 0.8
            running = [handle for handle in handles if handle.tokens and not handle.finish_reason]
            if cancels and running and dice.random() < 0.5:
                dice.choice(running).cancel()
        stage.finish()
    return stage


def lives(stage: Stage) -> dict[int, breakdown.LatencyBreakdown]:
    state = stage.state
    return {r.id: breakdown.breakdown_in(state, r) for r in state.requests.values()}


def test_the_parts_of_random_requests_add_up():
    """Each piece starts where the previous one ends. The time in the queue is what the engine reports, and
    only a ghost follows the end."""
    seen = 0
    parts = Counter()
    seed = 0
    while seen < 200:
        stage = random_run(seed, cancels=True)
        for id, lived in lives(stage).items():
            request = stage.state.requests[id]
            pieces = lived.pieces
            assert pieces[0].began == request.arrived
            assert all(a.ended == b.began for a, b in pairwise(pieces))
            assert all(piece.seconds >= 0 for piece in pieces)
            last = [piece for piece in pieces if piece.part != "ghost"][-1]
            assert last.ended == request.ended
            sums = lived.parts()
            assert sum(sums.values()) == pytest.approx(lived.seconds)
            if request.metrics.queued_s is not None:
                assert sums.get("line", 0.0) == pytest.approx(request.metrics.queued_s)
            parts.update(dict.fromkeys(sums, 1))
            seen += 1
        seed += 1
    assert {*breakdown.PARTS} - {"unseen"} == {*parts}, parts
    assert min(parts.values()) >= 3, parts


def outcomes(state: State, id: int) -> list[breakdown.Outcome]:
    requests, limits = state.requests, state.view.engine.limits
    return breakdown.outcomes(requests[id], requests.values(), state.history, limits, prices(state))


def test_random_requests_are_replayed_to_their_whole_length():
    """Regression: the replay ignored draft tokens, so each answer took a step for each token."""
    compared = Counter()
    for seed in range(number_of("REPLAYS", 4)):
        shares, cancels, drafts = (seed % 2 > 0, seed % 3 > 0, seed % 4 > 1)
        stage = random_run(seed, cancels, shares, drafts)
        for request in stage.state.requests.values():
            if not request.metrics.output_tokens:
                continue  # it was cancelled before its first token, so it has no replay
            found = outcomes(stage.state, request.id)
            steps = {each.name: each.steps for each in found}
            assert {*steps} == {"measured", "alone", *POLICIES}
            assert steps["measured"] == steps[request.policy], (seed, request.id)
            is_whole = request.reason != "cancelled"
            assert steps["alone"][0] == 0
            assert steps["alone"][2] == steps["measured"][2] or not is_whole
            for each in found:
                assert 0 <= each.line < each.ttft <= each.total, (seed, request.id, each)
            compared["waited"] += steps["measured"][0] > 0
            compared["shared"] += request.metrics.cached_tokens > 0
            compared["accepted"] += request.metrics.accepted_tokens > 0
            compared["cancelled"] += not is_whole
    assert len(compared) == 4 and min(compared.values()) > 1, compared


def test_an_unread_prompt_counts_in_a_replay():
    """Regression: the replay left out a prompt that was still in prefill, so its chunks took no time. A
    request that was cancelled next to it had its first token 10.50 ms before it arrived."""
    stage = Stage(slots=4, max_len=4_000).load()
    stage.engine.submit([97] * 5, SamplingParams(max_tokens=600))
    stage.turns(10)
    stage.engine.submit([98] * 3_000, SamplingParams(max_tokens=5))
    stage.turns(60)
    late = stage.engine.submit([99] * 5, SamplingParams(max_tokens=200))
    stage.turns(20)
    late.cancel()
    stage.turns(3)
    found = {each.name: each for each in outcomes(stage.state, late.id)}
    measured = found["measured"]
    assert measured.steps == found["continuous"].steps
    assert found["continuous"].ttft == pytest.approx(measured.ttft, rel=0.5)
    assert all(0 < each.ttft <= each.total for each in found.values()), found


def test_overtaking_and_shares_of_two_clients():
    """Client "one" submits last and gets the second slot, although r2 to r9 of "many" arrived before."""
    stage = Stage(policy="fair", slots=2).load()
    for id in range(1, 10):
        stage.engine.submit([97] * 5, SamplingParams(max_tokens=6 + id % 2), client="many")
    late = stage.engine.submit([98] * 5, SamplingParams(max_tokens=6), client="one")
    stage.finish()
    breakdown = lives(stage)
    assert late.id == 10
    assert [id for id in breakdown if 10 in breakdown[id].overtakers] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert not any(set(breakdown[id].overtakers) - {10} for id in breakdown)
    for request in stage.state.requests.values():
        seconds = request.metrics.queued_s
        # Both slots were busy, except for the steps between a request's end and the next admission
        assert 1.5 * seconds <= sum(breakdown[request.id].ahead.values()) <= 2 * seconds + 1e-9
    text = " ".join(" ".join(plain(page(stage, "9", 120))).split())
    assert "overtaken by r10, which came later" in text
    assert "clients many " in text and " %, one " in text


def page(stage: Stage, which: str, width: int = 80) -> list[style.Line]:
    stage.obey(f"/why {which}")
    return drawn(request_latency.draw, stage.state, width, 40)


def test_what_cannot_be_replayed_says_why():
    stage = Stage(slots=1).load()
    for _ in range(2):
        stage.engine.submit([97] * 5, SamplingParams(max_tokens=9))
    stage.turns(4)
    assert "it has no token yet" in "\n".join(plain(page(stage, "2")))
    stage.finish()
    assert "measured" in "\n".join(plain(page(stage, "2")))
    del stage.state.history[:3]
    assert "not all steps of that time are remembered" in "\n".join(plain(page(stage, "2")))


def test_an_answer_that_fills_its_slot_is_replayed():
    """Regression: the replay planned one token more than the slot holds, and was refused."""
    stage = Stage(slots=1, max_len=40).load()
    for _ in range(2):
        stage.engine.submit([97] * 10, SamplingParams(max_tokens=30, stop="<30>"))
    stage.finish()
    assert [r.reason for r in stage.state.ended] == ["stop", "stop"]
    found = {each.name: each.steps for each in outcomes(stage.state, 2)}
    assert found["measured"] == found["continuous"]


def test_what_is_not_known_is_refused_in_a_line(stage):
    for order in ("/why", "/why p95", "/why 7"):
        with pytest.raises(
            ValueError, match=r"^(no request has ended yet|.* is not known here); b "
        ):
            stage.obey(order)
    for order in ("/why x", "/why p101", "/why -1"):
        with pytest.raises(ValueError, match="why = "):
            stage.obey(order)
    assert orders_of("why why7 why:p95", MENU, logged=True) == [
        ("why", ""),
        ("why", "7"),
        ("why", "p95"),
    ]


@pytest.mark.parametrize(
    ("cached", "where"), [(77, "; the last one before that is at 77"), (0, " or before")]
)
def test_tokens_read_again_are_explained(cached, where):
    """The page gives the reason, which is a missing checkpoint in a model with states."""
    stage = Stage().load()
    handle = stage.engine.submit([97] * 120, SamplingParams(max_tokens=2))
    stage.finish()
    state = stage.state
    request = state.requests[handle.id]
    again = replace(request.metrics, cached_tokens=cached, reread_tokens=100 - cached)
    state.requests[handle.id] = replace(request, metrics=again)
    state.opened = handle.id
    said = " ".join(" ".join(plain(drawn(request_latency.draw, state, 160, 40))).split())
    assert f"read again {100 - cached} tokens: a slot had its first 100 rows" in said
    assert f"there was no checkpoint at 100{where}" in said
    details = " ".join(" ".join(plain(drawn(request_details.draw, state, 160, 40))).split())
    assert f"read again: {100 - cached} tokens" in details


@on_screen((120, 40), make=lambda: Stage(policy="short"))
async def test_the_waterfall_is_as_drawn(it):
    it.stage.obey("/burst 24")
    await it.turns(40)
    it.stage.obey("/burst 6")
    it.stage.finish()
    await it.press("w", "tab")
    assert it.state.open is breakdown.at_percent(95, breakdown.ranked(it.state.ended))
    like_golden("why-120x40", it.text())


@on_screen((120, 40))
async def test_w_and_the_arrows(it):
    await it.press("w")
    await it.sees("no request has ended yet")
    it.stage.obey("/burst 20")
    await it.turns(30)
    await it.press("down", "w")
    request = it.state.owner(1)
    assert f"Why did r{request.id} wait? open, continuous" in it.text()
    await it.press("w")
    assert "Slots" in it.text()
    it.stage.finish()
    await it.turns()
    order = breakdown.ranked(it.state.ended)
    await it.press("f", "w")
    assert f"Why did r{it.state.open.id} wait?" in it.text()
    seen = []
    for key in ("tab", "tab", "tab", "tab", "right", "left"):
        await it.press(key, turns=0)
        seen.append(it.state.open.id)
    marks = [breakdown.at_percent(mark, order).id for mark in request_latency.MARKS]
    first, second, third, again, after, before = seen
    assert {first, second, third} == {*marks} and again == first == before
    assert after == order[[r.id for r in order].index(first) + 1].id
    row = next(i for i, line in enumerate(it.text().split("\n")) if " p95 " in line)
    column = it.text().split("\n")[row].index("p95")
    await it.pilot.click("#sheet", offset=(column + 1, row))
    await it.turns(0)
    assert it.state.open.id == marks[1]
    await it.press("g")
    assert it.state.cursor is not None and "Slots" in it.text()
