"""Stage 5: static batching. You write `_admit` in sched.py, `_forward` and `_sample` in
runner.py."""

from collections.abc import Sequence

import pytest
from scheduler_story import name

from course.from_zero.shared_by_tests import (
    ANSWERS,
    SUM,
    Tale,
    demo,
    ids_of,
    new_engine,
    steps_for,
    text_of,
    varied,
)
from models.memory import Sizes
from nanobatch import SamplingParams
from runner import Decoding, ForwardBatch, Prefill, Runner
from sampling import SamplingRow


@pytest.mark.about("_admit")
def test_static_batching():
    """A batch is admitted, and the next one only when all of it has ended."""
    tale = Tale(slots=2, policy="static")
    tale.submit_all((3, 2), (3, 5), (3, 2))
    first, second = tale.sched._admit(0.0)
    del tale.sched.running[first.id]
    assert tale.sched._admit(1.0) == [], f"slot 0 is free, but {name(second)} still runs"
    del tale.sched.running[second.id]
    assert [name(request) for request in tale.sched._admit(2.0)] == ["C"]


@pytest.mark.about("_admit")
def test_admission():
    """An admitted request has a slot, a time and a policy, and no longer waits."""
    tale = Tale(slots=2, policy="static")
    tale.submit_all((3, 2), (3, 2), (3, 2))
    first, second = tale.sched._admit(now=5.0)
    assert [name(first), name(second)] == ["A", "B"]
    assert [first.slot, second.slot] == [0, 1]
    assert [first.admission.at, second.admission.at] == [5.0, 5.0]
    assert [first.admission.policy, second.admission.policy] == ["static", "static"]
    assert [*tale.sched.running] == [first.id, second.id]
    assert [*tale.sched.waiting] == [2]


@pytest.mark.about("_admit")
def test_the_policy_says_who_is_next():
    """The policy decides which request is next."""
    tale = Tale(slots=1, policy="short")
    tale.submit(9, 2)
    short = tale.submit(2, 2)
    assert tale.sched._admit(now=0.0) == [short]


def run(runner: Runner, prefills: Sequence[Prefill], *decodes: tuple[int, int], **settings) -> dict:
    """Run a step with 3 slots. Return texts by slot, or `logprobs` by slot and index. `decodes`: slots, rows."""
    order = ForwardBatch((), prefills, [Decoding(slot, row, ()) for slot, row in decodes])
    slots = [prefill.slot for prefill in prefills if prefill.emits]
    slots += [slot for slot, _ in decodes]
    picks = {
        slot: [SamplingRow(slot, SamplingParams(**settings), seed=0, index=0)] for slot in slots
    }
    tokens, outputs = runner.run(order, picks).read_back()
    assert [len(each) for each in tokens] == [1, 1, 1], "a token of each slot, or -1"
    if settings.get("logprobs"):
        return {key: output.logprob for key, output in outputs.items()}
    return {slot: text_of(token) for slot, token in enumerate(tokens) if token[0] >= 0}


COUNT = varied("Count from 5 to 9.", "Spell lantern.")


def parts(prompt: str) -> list[str]:
    """Return the answer, token by token."""
    said = demo()[1].tokenizer.encode(ANSWERS[prompt], add_special_tokens=False)
    return [text_of([token]) for token in said.ids]


def new_runner() -> Runner:
    return Runner(demo()[0], Sizes(slots=3, max_len=128, chunk=32, budget=64))


@pytest.mark.about("_forward", "_sample")
def test_prompts_of_different_lengths():
    """Prompts of different lengths go in side by side, then a token of each."""
    runner = new_runner()
    one = ids_of(SUM)
    two = ids_of(COUNT)
    wanted = [{0: b, 2: a} for a, b in zip(parts(SUM), parts(COUNT), strict=False)]
    prompts = [Prefill(2, one, 0, emits=True), Prefill(0, two, 0, emits=True)]
    assert run(runner, prompts) == wanted[0]
    assert run(runner, [], (0, len(two)), (2, len(one))) == wanted[1]
    assert run(runner, [], (0, len(two) + 1), (2, len(one) + 1)) == wanted[2]


@pytest.mark.about("_forward", "_sample")
def test_chunks():
    """A chunk that does not end its prompt yields no token, and others decode next to it."""
    runner = new_runner()
    one = ids_of(SUM)
    two = ids_of(COUNT)
    assert run(runner, [Prefill(1, one[:4], 0, emits=False)]) == {}
    both = [Prefill(0, two, 0, emits=True), Prefill(1, one[4:7], 4, emits=False)]
    assert run(runner, both) == {0: parts(COUNT)[0]}
    rest = [Prefill(1, one[7:], 7, emits=True)]
    assert run(runner, rest, (0, len(two))) == {0: parts(COUNT)[1], 1: parts(SUM)[0]}


@pytest.mark.about("_forward")
def test_every_pass_is_started():
    """`self._start` is called in each step, even if no token is sampled, so that keys and values are
    written."""
    runner = new_runner()
    start = runner._start
    started: list[tuple] = []
    runner._start = lambda *results: (started.append(results), start(*results))
    run(runner, [Prefill(1, ids_of()[:4], 0, emits=False)])
    assert len(started) == 1
    run(runner, [Prefill(1, ids_of()[4:], 4, emits=True)])
    assert len(started) == 2


@pytest.mark.about("_sample")
def test_logprobs():
    """Each request that asks for log probabilities gets its own."""
    both = [Prefill(2, ids_of(SUM), 0, emits=True), Prefill(0, ids_of(COUNT), 0, emits=True)]
    logprobs = run(new_runner(), both, logprobs=2)
    assert {*logprobs} == {(2, 0), (0, 0)}, "by slot and index"
    likeliest = {slot: text_of([output.top[0][0]]) for (slot, _), output in logprobs.items()}
    assert likeliest == {2: parts(SUM)[0], 0: parts(COUNT)[0]}, "the likeliest token of each slot"
    assert logprobs[2, 0].top[0][1] == logprobs[2, 0].logprob


def test_answers_in_batches():
    """Six prompts, three at a time, get the same answers as alone."""
    with new_engine(slots=3, policy="static", run_ahead=False) as engine:
        steps = steps_for(engine, ANSWERS)
    with new_engine(slots=1, policy="serial", run_ahead=False) as engine:
        alone = steps_for(engine, ANSWERS)
    print(f"six prompts: {alone} steps one at a time, {steps} in batches of three")
