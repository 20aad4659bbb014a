"""Snapshots: watchers miss nothing, see nothing twice, and cost the engine little, however many requests
wait."""

import dataclasses
import threading

import pytest
from harness import exactly
from word_engine import Clock, word_engine

from engine.handle import Handle
from engine.registry import Log, RequestRegistry
from nanobatch import Engine

SHORT = exactly(3)


def settle(engine: Engine) -> None:
    while engine.step():
        pass


# --- steps --------------------------------------------------------------------------------------


def test_rare_snapshots_count_missed_steps():
    """A snapshot after thousands of steps contains all of them, or reports how many are missing."""
    clock = Clock()
    with word_engine(clock, clock, slots=1, max_len=4_000) as engine:
        first = engine.snapshot()
        engine.submit([1], exactly(3_900)).result()
        look = engine.snapshot(first)
        assert look.missed == 0 and [step.step for step in look.steps] == list(range(1, 3_901))
        engine.submit([1], exactly(900)).result()
        late = engine.snapshot(first)
        assert len(late.steps) == 4096 and late.missed == 4_800 - 4096
        assert [late.steps[0].step, late.steps[-1].step] == [late.missed + 1, 4_800]
        assert [step.step for step in engine.snapshot(look).steps] == list(range(3_901, 4_801))
        now = engine.snapshot(look)
        assert now.missed == 0 and now.planned == engine.registry.steps.count
        again = engine.snapshot(now)
        assert (again.steps, again.ended, again.missed, again.seen) == ((), (), 0, now.seen)


def test_step_view(make_engine):
    """With chunks of 32 and a budget of 40, A decodes, D gets all of its 6 tokens, C 13 of its 20, and B, the
    oldest, 20 of its 70. E waits in the queue."""
    engine = make_engine(slots=4, budget=40, run_ahead=False, prefix_cache=False)
    a = engine.submit([1, 2], exactly(9))
    engine.step()
    b, c, d, e = (engine.submit([3 + n] * length, SHORT) for n, length in enumerate((70, 20, 6, 1)))
    engine.step()
    step = engine.snapshot().steps[-1]
    assert step.admitted == tuple((r.request.slot, r.id) for r in (b, c, d)) and step.waiting == 1
    chunks = [(h.request.slot, h.id, 0, stop) for h, stop in ((d, 6), (c, 13), (b, 20))]
    assert step.prefill == tuple(chunks)
    assert step.decode == ((a.request.slot, a.id),) and step.held == ()
    assert (step.tokens, step.computed, step.budget) == (2, 40, 40)
    assert step.policy == "continuous" and step.ghosts == () and step.blocked == ()
    settle(engine)
    assert e.result().finish_reason == "length"


def test_ghost_is_shown_in_its_step(make_engine):
    engine = make_engine(slots=1, speculate=0)
    token = engine.submit([1, 2], SHORT).result().tokens[1]
    before = engine.snapshot()
    engine.submit([1, 2], exactly(9, stop=[token])).result()
    settle(engine)
    steps = engine.snapshot(before).steps
    assert [step.ghosts for step in steps][-1] == (0,) and steps[-1].tokens == 0
    assert not any(step.ghosts for step in steps[:-1])


# --- requests that ended ------------------------------------------------------------------------


def test_kept_texts_are_bounded(make_engine, monkeypatch):
    """Regression: the prompts of 500 ended requests, 400 kB each, took 200 MB as long as the server ran."""
    monkeypatch.setattr(RequestRegistry, "TEXTS", 1000)
    engine = make_engine()
    for number in range(10):
        engine.submit(str(number) * 100, SHORT).result()
    look = engine.snapshot()
    kept = [view.prompt[0] for view in look.ended]
    assert kept == list("0123456789")[-len(kept) :] and look.missed_ends == 10 - len(kept) > 0
    assert 500 < sum(view.size for view in look.ended) <= 1000


def test_newest_log_entry_is_always_kept():
    """The newest entry is kept however much memory it takes."""
    log = Log(3, room=10, size=len)
    for word in ("one", "two", "three", "four"):
        log.add(word)
    assert (log.since(0), log.since(3), log.count) == (("three", "four"), ("four",), 4)
    log.add("x" * 100)
    assert log.since(0) == ("x" * 100,)
    for word in "abcde":
        log.add(word)
    assert log.since(0) == ("c", "d", "e") and log.since(9) == ("e",)


def test_ended_requests_are_seen_once(engine):
    """Each ended request is in one snapshot, with everything that its client received."""
    start = engine.snapshot()
    origins = [{"client": n} for n in range(4)]
    stop = engine.submit([1, 2], SHORT).result().tokens[1]
    length = engine.submit([1, 2], SHORT, origin=origins[0])
    stopped = engine.submit([1, 2], exactly(9, stop=[stop]), origin=origins[1])
    error = engine.submit([1, 2], SHORT, origin=origins[2], ends=lambda piece: 1 / 0)
    settle(engine)
    cancelled = engine.submit("never admitted", SHORT, origin=origins[3])
    cancelled.cancel()
    look = engine.snapshot(start)
    views = {view.id: view for view in look.ended}
    assert [view.id for view in look.ended][-1] == cancelled.id and len(views) == len(
        look.ended
    ) == 5
    for handle, reason, origin in zip(
        (length, stopped, error, cancelled),
        ("length", "stop", "error", "cancelled"),
        origins,
        strict=True,
    ):
        view, result = views[handle.id], handle.result()
        assert (view.text, view.metrics, view.reason, view.error) == (
            result.text,
            result.metrics,
            reason,
            result.error,
        )
        assert (
            view.origin is origin
            and view.prompt == handle.prompt
            and view.arrived == handle.request.arrived
        )
        assert view.ended >= view.arrived
    assert views[cancelled.id].slot is None and views[cancelled.id].policy == ""
    assert views[length.id].policy == "continuous" and views[length.id].slot is not None
    assert "ZeroDivisionError" in views[error.id].error
    assert engine.snapshot(look).ended == ()


# --- the queue ----------------------------------------------------------------------------------


def test_snapshot_of_a_long_queue(engine, monkeypatch):
    """A snapshot describes the first 32 queued requests. Each request that has arrived since the previous
    snapshot is described once."""
    described = []
    view_of = Handle.view
    monkeypatch.setattr(
        Handle, "view", lambda handle: described.append(handle.id) or view_of(handle)
    )
    handles = [engine.submit([n % 256], SHORT) for n in range(5_000)]
    engine.step()
    look = engine.snapshot()
    assert look.waiting == 4_998 and len(look.queue) == 32
    assert [id for id, _ in look.queue] == list(range(3, 35)) and all(
        waited >= 0 for _, waited in look.queue
    )
    assert [view.id for view in look.requests] == list(range(1, 35)) and len(described) == 34
    described.clear()
    look = engine.snapshot(look)
    assert [view.id for view in look.requests] == [1, 2] and len(described) == 2
    new = [engine.submit([7], SHORT).id for _ in range(3)]
    described.clear()
    look = engine.snapshot(look)
    assert [view.id for view in look.requests] == [1, 2, *new] and len(described) == 5
    assert look.waiting == 5_001 and (look.submitted, look.finished) == (5_003, 0)
    for handle in handles:
        handle.cancel()


# --- slots --------------------------------------------------------------------------------------


def phases(engine: Engine) -> list[str]:
    return [slot.phase for slot in engine.snapshot().slots]


def test_text_of_any_earlier_step(parts):
    """The text at any earlier step can be rebuilt, because the screen can go back to that step. Characters
    that may become a stop string, or are incomplete, appear later than their token."""
    engine = Engine(*parts, slots=2, max_len=128)
    stops = [engine.generate(["a prompt"], exactly(40))[0].text[20:23]]
    handles = [engine.submit("a prompt", exactly(40, stop=stop)) for stop in ([], stops)]
    seen = {handle.id: {} for handle in handles}
    while engine.step():
        for handle in handles:
            seen[handle.id][len(handle.tokens)] = handle.text
    for request in engine.snapshot().ended[-2:]:
        texts = {n: request.text[: sum(request.lengths[:n])] for n in seen[request.id]}
        texts[request.metrics.output_tokens] = request.text  # held-back text is released at the end
        assert texts == seen[request.id] and len(texts) > 3, request


def test_slot_is_blocked_only_while_others_wait(make_engine):
    engine = make_engine(policy="static", run_ahead=False)
    engine.submit([2], exactly(20))
    engine.step()
    assert phases(engine) == ["decode", "free"]
    waiting = engine.submit([3], SHORT)
    engine.step()
    assert phases(engine) == ["decode", "blocked"]
    waiting.cancel()
    assert phases(engine) == ["decode", "free"]


def test_snapshot_names_the_next_policy(engine):
    running, waiting = engine.submit([1] * 40, SHORT), None
    engine.step()
    engine.drain("serial")
    waiting = engine.submit([2], SHORT)
    look = engine.snapshot()
    assert (look.policy, look.draining_to) == ("continuous", "serial")
    engine.step()
    assert phases(engine)[1] == "blocked"
    running.result()
    look = engine.snapshot()
    assert (look.policy, look.draining_to, waiting.finish_reason) == ("serial", None, None)
    assert [slot.remembered for slot in look.slots] == [0, 0]
    waiting.result()
    views = {view.id: view.policy for view in engine.snapshot().ended}
    assert views == {running.id: "continuous", waiting.id: "serial"}
    with pytest.raises(ValueError, match="magic"):
        engine.drain("magic")


# --- what a snapshot is -------------------------------------------------------------------------


def test_snapshot_is_immutable(engine):
    handle = engine.submit([1], exactly(20))
    for _ in range(5):
        engine.step()
    look = engine.snapshot()
    before = repr(look)
    handle.result()
    assert repr(look) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        look.waiting = 7


def test_snapshot_from_another_thread(engine):
    """While the engine works, each snapshot is consistent."""
    wrong, looks, done = [], 0, threading.Event()

    def watch():
        nonlocal looks
        look = engine.snapshot()
        while not done.wait(0.0005):
            look = engine.snapshot(look)
            looks += 1
            busy = [slot.request for slot in look.slots if slot.request is not None]
            described = [view.id for view in look.requests if view.slot is not None]
            if sorted(busy) != sorted(
                described
            ) or look.submitted != look.finished + look.waiting + len(busy):
                wrong.append(look)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for n in range(30):
        engine.submit([n], exactly(10))
    settle(engine)
    done.set()
    watcher.join(60)
    assert looks > 10 and not wrong
