"""Draft tokens change no bit: tokens, log probabilities, text, reasons and usage are the same with and
without them, for every kind of request, in company. Right and wrong draft tokens are counted."""

import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import kinds
import numpy as np
import pytest
from harness import check, exactly
from planted_bugs import poisoned

import kv
import nanobatch
from nanobatch import Engine, Handle, SamplingParams
from prompt_lookup import Drafter, PromptLookup
from sched import Decode, Request, Scheduler

ROUNDS = int(os.environ.get("NANOBATCH_GUESSES", 1))  # 100 take ten minutes
DIGITS = {"regex": "[0-9]{3,20}"}
LIST = {"json": {"type": "array", "items": {"enum": ["a long word", 17]}, "maxItems": 6}}
KINDS = kinds.KINDS | {
    "hot": {"temperature": 3.0},
    "grammar": {"ignore_eos": False, "grammar": DIGITS, "temperature": 1.0, "logprobs": 3},
    "schema": {"ignore_eos": False, "grammar": LIST, "repetition_penalty": 1.2, "temperature": 1.0},
    "ends": {"ignore_eos": False, "logit_bias": {257: 6.0}, "temperature": 1.0},
    "to the slot's end": {"max_tokens": None},
}


def asks(rng: np.random.Generator) -> list[tuple[str, list[int], SamplingParams]]:
    """Requests of each kind, and some whose stop text stands in the midst of what they say."""
    found = []
    for seed, (kind, settings) in enumerate(KINDS.items()):
        for again in range(2):
            prompt = rng.integers(0, 256, int(rng.integers(1, 40))).tolist()
            wish = {"max_tokens": 24, "ignore_eos": True, "seed": 2 * seed + again} | settings
            found.append((kind, prompt, SamplingParams(**wish)))
    return found


class Oracle:
    """Knows how answers go on without draft tokens, and draft tokens that, but for some tokens."""

    def __init__(self, answers: dict[int, list[int]], dice: np.random.Generator, wrong: int = -1):
        self.answers = answers  # by request
        self.dice = dice
        self.wrong = wrong  # the token of a wrong draft; -1: any

    def __call__(self, decoding: list[Request], left: int) -> dict[int, tuple[int, ...]]:
        speculate = {}
        for request in decoding:
            if request.draft_source is None or request.planned != request.committed:
                continue
            most = min(left, request.max_tokens - request.planned - 1, int(self.dice.integers(6)))
            known = self.answers.get(request.id, [])[request.committed :][: max(most, 0)]
            draft = [self.bent(token) for token in known]
            if draft:
                left -= len(draft)
                speculate[request.id] = tuple(draft)
        return speculate

    def bent(self, token: int) -> int:
        if self.dice.random() < 0.75:
            return token
        return int(self.dice.integers(256)) if self.wrong < 0 else self.wrong


def outcome(handle: Handle) -> tuple:
    m = handle.metrics
    usage = m.prompt_tokens, m.output_tokens
    return handle.tokens, handle.text, handle.finish_reason, handle.error, handle.logprobs, usage


def serve(
    engine: Engine, wishes: list[tuple[str, list[int], SamplingParams]], dice
) -> list[Handle]:
    """They come one by one, and every invariant is checked in every step."""
    handles: list[Handle] = []
    while len(handles) < len(wishes) or engine.has_work:
        if len(handles) < len(wishes) and dice.random() < 0.5:
            handles.append(engine.submit(*wishes[len(handles)][1:]))
        engine.step()
        check(engine)
    return handles


def compare(parts, seed: int, **options) -> tuple[list[str], Counter, Counter]:
    """All kinds of requests without draft tokens and with them. Which differ? How many draft tokens were right
    and wrong, by kind?"""
    rng = np.random.default_rng(seed)
    wishes = asks(rng)
    sizes = {"slots": 5, "max_len": 80, "chunk": 32, "budget": 64}
    with Engine(*parts, speculate=0, **sizes) as engine:
        plain = serve(engine, wishes, rng)
        for kind, prompt, sampling in wishes[:: len(wishes) // 6]:
            stop = plain[wishes.index((kind, prompt, sampling))].text[5:7]
            if stop and sampling.grammar is None:
                wishes.append(("stop", prompt, replaced(sampling, stop)))
        plain += serve(engine, wishes[len(plain) :], rng)
        assert engine.snapshot().steps[-1].draft_tokens == 0
    right: Counter = Counter()
    wrong: Counter = Counter()
    differ = []
    with Engine(*parts, speculate=5, **sizes, **options) as engine:
        answers = {1 + n: handle.tokens for n, handle in enumerate(plain)}
        engine.sched.draft = Oracle(answers, rng)
        # Else no step would be in flight while another is planned.
        engine.drafter.may_follow = lambda plan: bool(rng.random() < 0.6)
        found = serve(engine, wishes, rng)
        steps = engine.snapshot().steps
        assert sum(step.tokens for step in steps) == sum(len(h.tokens) for h in found)
        assert sum(step.draft_tokens for step in steps) == sum(
            h.metrics.draft_tokens for h in found
        )
        assert sum(step.accepted_tokens for step in steps) == sum(
            h.metrics.accepted_tokens for h in found
        )
        for (kind, _, _), one, other in zip(wishes, plain, found, strict=True):
            right[kind] += other.metrics.accepted_tokens
            wrong[kind] += other.metrics.draft_tokens - other.metrics.accepted_tokens
            if outcome(one) != outcome(other):
                differ.append(f"{kind}: {one.tokens} became {other.tokens}")
    return differ, right, wrong


def replaced(sampling: SamplingParams, stop: str) -> SamplingParams:
    settings = {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}
    return SamplingParams(**settings | {"stop": [stop]})


@pytest.mark.parametrize("run_ahead", [True, False])
def test_drafts_change_no_answer(parts, run_ahead):
    right: Counter = Counter()
    wrong: Counter = Counter()
    for seed in range(ROUNDS):
        differ, *counts = compare(parts, seed, run_ahead=run_ahead)
        assert not differ, differ
        right += counts[0]
        wrong += counts[1]
    print(f"\nright: {dict(right)}\nwrong: {dict(wrong)}")
    for kind in (*KINDS, "stop"):
        assert right[kind] and wrong[kind], f"{kind}: nothing was tried"


@pytest.mark.parametrize("bug", ["one index for all rows", "a penalty without the draft tokens"])
def test_planted_sampling_row_bug_is_caught(parts, monkeypatch, bug):
    sampling_rows = nanobatch.sampling_rows
    field = "index" if bug == "one index for all rows" else "before"

    def planted(*member):
        picks = sampling_rows(*member)
        return [pick._replace(**{field: getattr(picks[0], field)}) for pick in picks]

    monkeypatch.setattr(nanobatch, "sampling_rows", planted)
    differ, _, _ = compare(parts, 0)
    assert differ


@pytest.mark.parametrize("bug", ["", "its rows are not scrubbed", "it is not begun again"])
def test_non_finite_draft_spoils_no_row(parts, monkeypatch, bug):
    """Attention multiplies a hidden row by 0, and 0 x NaN is NaN. So the right rows of that piece
    say nothing, too, and later steps would read what it has left."""
    model, text = poisoned(parts[0], 99), parts[1]
    model = replace(model, attention="formula")  # fused attention reads no rows that were left
    if bug == "its rows are not scrubbed":
        monkeypatch.setattr(kv.Slab, "scrub", lambda self, *rows: None)
    elif bug:
        monkeypatch.setattr(Scheduler, "_begin_again", lambda self, decode: None)
    sizes = {"slots": 3, "max_len": 160, "chunk": 32}
    never = {99: -100.0}  # it is drafted, and never said
    wish = exactly(60, logit_bias=never)
    wishes = [("", [n, 5, 6], wish) for n in range(6)]
    dice = np.random.default_rng(1)
    with Engine(model, text, speculate=0, **sizes) as engine:
        plain = serve(engine, wishes, dice)
    with Engine(model, text, speculate=5, **sizes) as engine:
        answers = {1 + n: handle.tokens for n, handle in enumerate(plain)}
        engine.sched.draft = Oracle(answers, dice, wrong=99)
        try:
            found = serve(engine, wishes, dice)
        except AssertionError:
            assert bug
            return
        is_same = [outcome(handle) for handle in plain] == [outcome(handle) for handle in found]
        assert is_same == (not bug)
        if not bug:
            assert all(handle.metrics.draft_tokens for handle in found)
            assert all(handle.request.draft_source is None for handle in found)


# --- what is drafted ----------------------------------------------------------------------------


def hints_of(prompt: list[int]) -> PromptLookup:
    lookup = PromptLookup()
    lookup.begin(prompt)
    return lookup


def test_draft_continues_the_last_bigram():
    lookup = hints_of([1, 2, 3, 4, 5, 9, 1])
    assert lookup.draft(3) == []
    lookup.follow([2])
    assert lookup.draft(3) == [3, 4, 5] and lookup.matches == 0
    lookup.follow([2, 3, 4])
    assert lookup.draft(9) == [5, 9, 1, 2, 3, 4] and lookup.matches == 2
    lookup.follow([2, 3, 4, 8])
    assert lookup.draft(3) == [] and lookup.matches == 0


def test_acceptance_is_learned_by_run_length():
    """One rate for all took a copy with changes for a copy, and a pair of words for a quotation."""
    lookup = hints_of([1, 2, 3, 4, 5, 6, 7, 1])
    assert lookup.chances(6) == [0.4, 0.6, 0.7, 0.85, 0.93, 0.93]
    answer = []
    for n in range(40):  # two tokens that stood before, and a third that did not
        answer += [2, 3, 100 + n, 1]
        lookup.follow(answer)
    assert lookup.matches == 0 and lookup.next == (pytest.approx(0.25, abs=0.05), 0)
    lookup.follow([*answer, 2])
    first, second, third = lookup.chances(3)
    assert first > 0.95 and second < 0.05 and third == 0.7
    lookup.follow([*answer, 2, 3])
    assert lookup.next == (second, 2)


def priced(row_s: float) -> Drafter:
    """A step takes 1 second, and so many more for each row."""
    speculate = Drafter()
    speculate._step_s = 1.0
    speculate._row_s = row_s
    return speculate


def copying(id: int, client: str = "") -> Request:
    """An answer that copies its prompt, and one token of which is to be planned."""
    request = Request(id, tuple(range(40)), 30, 0.0, client=client)
    request.draft_source = PromptLookup()
    request.slot = id
    request.answer += range(8)
    request.planned = 8
    return request


def inventing(id: int) -> Request:
    request = copying(id)
    request.answer[:] = range(100, 120)
    request.planned = 20
    return request


class Silent:
    """A grammar that forces nothing, and counts how often it is asked."""

    asked = 0

    def forced(self) -> list[int]:
        self.asked += 1
        return []


def test_unforcing_grammar_is_asked_seldom():
    """Each step of free text under a grammar waited for its tokens, and asked in vain."""
    grammar = Silent()
    request = inventing(0)
    request.draft_source = PromptLookup(grammar)
    speculate = priced(0.4)
    waited = 0
    for n in range(200):
        request.answer.append(200 + n)
        request.planned = len(request.answer)
        request.max_tokens = 1000
        decode = Decode(request, 0, request.next_row)
        if speculate.may_follow(SimpleNamespace(emitters=(decode,))):
            waited += 1
            speculate([request], 100)
    assert 10 <= waited <= 40 and grammar.asked == waited


@pytest.mark.parametrize(("row_s", "wide"), [(0.02, 15), (0.4, 8), (2.0, 3), (9.0, 1)])
def test_expensive_rows_shorten_drafts(row_s, wide):
    speculate = priced(row_s)([copying(0)], 100)
    assert len(speculate[0]) == wide


def test_step_is_read_at_once_only_if_drafts_pay():
    """Else every answer in which a pair came again lost run-ahead, though nothing was drafted."""

    def may_follow(row_s: float, *requests: Request) -> bool:
        emitters = tuple(Decode(request, request.slot, request.next_row) for request in requests)
        return priced(row_s).may_follow(SimpleNamespace(emitters=emitters))

    assert may_follow(0.1, copying(0))
    assert not may_follow(0.1, inventing(0))
    assert may_follow(0.1, *map(copying, range(8)))
    assert not may_follow(9.0, *map(copying, range(8)))


def test_drafts_slow_others_by_at_most_5_percent():
    """A copier took the half of a step more of three neighbours, in each of its steps."""
    requests = [copying(0), inventing(1), inventing(2), inventing(3)]
    speculate = priced(0.1)
    longer = 0.0
    made = 0
    for _ in range(1000):
        found = speculate(requests, 100)
        count = sum(map(len, found.values()))
        longer += (0.05 + 0.1 * count / 1.4) if count else 0
        made += count > 0
    assert made > 20 and longer / 1000 == pytest.approx(0.05, rel=0.1)
    alone = [speculate([copying(0), copying(1)], 100) for _ in range(10)]
    assert all(len(found) == 2 for found in alone), "among themselves they may"


def test_outlier_step_is_no_price():
    speculate = Drafter()
    now = 0.0
    for n in range(60):
        decodes = [Decode(copying(0), 0, 48, tuple(range(n % 4)))]
        began = now
        now += 0.01 * (1 + 0.1 * (n % 4)) + (2.0 if n % 20 == 10 else 0.0)
        plan = SimpleNamespace(at=began, chunks=(), decodes=decodes, draft_tokens=n % 4)
        speculate.learn(plan, now)
    assert speculate._seconds(1) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("speculate", [None, 3])
def test_engine_drafts_by_itself(parts, speculate):
    """A random model soon repeats itself. And JSON's keys are forced."""
    schema = {
        "json": {"type": "object", "properties": {"a_long_key_of_many_bytes": {"type": "boolean"}}}
    }
    schema["json"] |= {"required": ["a_long_key_of_many_bytes"], "additionalProperties": False}
    wishes = [("", [1, 2, 3], exactly(90, repetition_penalty=0.9))]
    wishes += [("", [4, 2, 3], SamplingParams(max_tokens=90, grammar=schema))]
    found = []
    for most in (0, speculate):
        with Engine(*parts, slots=2, max_len=128, chunk=32, speculate=most) as engine:
            handles = serve(engine, wishes, np.random.default_rng(0))
            found.append([outcome(handle) for handle in handles])
            last = [
                (handle.metrics.draft_tokens, handle.metrics.accepted_tokens) for handle in handles
            ]
    assert found[0] == found[1]
    assert last[1][1] > 5, last
    if speculate:
        assert last[0][0] > 5, last


def test_negative_speculate_is_refused(parts):
    with pytest.raises(ValueError, match="speculate = -1, but it must be at least 0"):
        Engine(*parts, slots=1, max_len=64, speculate=-1)


def test_drafts_need_batch_invariance_or_a_number(parts, monkeypatch):
    monkeypatch.setattr("models.memory.is_batch_invariant", lambda model: False)
    for asked, most in ((None, 0), (4, 4)):
        with Engine(*parts, slots=1, max_len=64, speculate=asked) as engine:
            assert engine.drafter.most == most
