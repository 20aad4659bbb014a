"""Draft tokens change no bit: tokens, log probabilities, text, finish reasons and usage are the same with and
without them, for every kind of request, in random batches. Accepted and rejected draft tokens are counted."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import kinds
import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import Ask, exactly, run_schedule
from long_forms import number_of
from planted_bugs import plant, poisoned

import kv
from benchmarks.answer_diff import Bits, difference
from nanobatch import Engine, Handle, SamplingParams
from prompt_lookup import Drafter, PromptLookup
from request import Admission, Decode, Plan, Request
from sched import Scheduler

ROUNDS = number_of("GUESSES", 1)  # 100 take ten minutes
DIGITS = {"regex": "[0-9]{3,20}"}
LIST = {"json": {"type": "array", "items": {"enum": ["a long word", 17]}, "maxItems": 6}}
KINDS = kinds.KINDS | {
    "hot": {"temperature": 3.0},
    "grammar": {"ignore_eos": False, "grammar": DIGITS, "temperature": 1.0, "logprobs": 3},
    "schema": {"ignore_eos": False, "grammar": LIST, "repetition_penalty": 1.2, "temperature": 1.0},
    "ends": {"ignore_eos": False, "logit_bias": {257: 6.0}, "temperature": 1.0},
    "to the slot's end": {"max_tokens": None},
}


SIZES = {"slots": 5, "max_len": 80, "chunk": 32, "budget": 64}


def requests(rng: np.random.Generator) -> list[tuple[str, Ask]]:
    """Return two requests of each kind."""
    found = []
    for seed, (kind, settings) in enumerate(KINDS.items()):
        for again in range(2):
            prompt = rng.integers(0, 256, int(rng.integers(1, 40))).tolist()
            options = {"max_tokens": 24, "ignore_eos": True, "seed": 2 * seed + again} | settings
            found.append((kind, Ask(prompt, 24, settings=SamplingParams(**options))))
    return found


def stopped(asks: list[Ask], handles: list[Handle]) -> list[Ask]:
    """Return some of the same requests, each with a stop string from the middle of its answer."""
    found = []
    for ask, handle in list(zip(asks, handles, strict=True))[:: len(asks) // 6]:
        stop = handle.text[5:7]
        if stop and ask.settings.grammar is None:
            fields = SamplingParams.__dataclass_fields__
            settings = {name: getattr(ask.settings, name) for name in fields} | {"stop": [stop]}
            found.append(replace(ask, settings=SamplingParams(**settings)))
    return found


class Oracle(Drafter):
    """A drafter that knows the answers, and drafts them with some tokens replaced."""

    def __init__(self, plain: list[Handle], dice: np.random.Generator, wrong: int = -1):
        super().__init__(5)
        self.answers = {1 + n: handle.tokens for n, handle in enumerate(plain)}  # by request id
        self.dice = dice
        self.wrong = wrong  # the token to use for a wrong draft, or -1 for a random one

    def __call__(self, decoding: list[Request], left: int) -> dict[int, tuple[int, ...]]:
        drafts = {}
        for request in decoding:
            if request.drafting.source is None or request.planned != request.committed:
                continue
            most = min(left, request.max_tokens - request.planned - 1, int(self.dice.integers(6)))
            known = self.answers.get(request.id, [])[request.committed :][: max(most, 0)]
            draft = [self.bent(token) for token in known]
            if draft:
                left -= len(draft)
                drafts[request.id] = tuple(draft)
        return drafts

    def bent(self, token: int) -> int:
        if self.dice.random() < 0.75:
            return token
        return int(self.dice.integers(256)) if self.wrong < 0 else self.wrong

    def should_read_now(self, plan: Plan) -> bool:
        """Return False at random, so that some steps are planned while another is in flight."""
        return bool(self.dice.random() < 0.6)


def outcome(handle: Handle) -> tuple:
    m = handle.metrics
    usage = m.prompt_tokens, m.output_tokens
    return handle.text, handle.finish_reason, handle.error, handle.logprobs, usage


class Compared(NamedTuple):
    """A request with draft tokens, compared with the same request without them."""

    kind: str
    differs: str  # the difference, or "" if there is none
    right: int  # accepted draft tokens
    wrong: int


def compare(parts, seed: int, **options) -> list[Compared]:
    """Compare requests of every kind with and without drafts, in random batches."""
    rng = np.random.default_rng(seed)
    kinds, asks = map(list, zip(*requests(rng), strict=True))
    with Engine(*parts, speculate=0, **SIZES) as engine:
        plain = run_schedule(engine, asks, rng)
        more = stopped(asks, plain)
        plain += run_schedule(engine, more, rng)
    with Engine(*parts, speculate=Oracle(plain, rng), **SIZES, **options) as engine:
        found = run_schedule(engine, asks + more, rng)
        check_counts(engine, found)
    return [
        compared(*each) for each in zip(kinds + ["stop"] * len(more), plain, found, strict=True)
    ]


def compared(kind: str, plain: Handle, found: Handle) -> Compared:
    differs = difference(Bits.from_handle(plain), Bits.from_handle(found))
    words = differs.words if differs else "" if outcome(plain) == outcome(found) else "its end"
    right = found.metrics.accepted_tokens
    return Compared(kind, words, right, found.metrics.draft_tokens - right)


def check_counts(engine: Engine, handles: list[Handle]) -> None:
    """Check that steps and requests count the same tokens."""
    steps = engine.snapshot().steps
    assert sum(step.tokens for step in steps) == sum(len(handle.tokens) for handle in handles)
    for name in ("draft_tokens", "accepted_tokens"):
        by_step = sum(getattr(step, name) for step in steps)
        assert by_step == sum(getattr(handle.metrics, name) for handle in handles)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_drafts_change_no_answer(parts, run_ahead):
    found = [each for seed in range(ROUNDS) for each in compare(parts, seed, run_ahead=run_ahead)]
    assert not [each for each in found if each.differs]
    right = {each.kind for each in found if each.right}
    wrong = {each.kind for each in found if each.wrong}
    assert right == wrong == {*KINDS, "stop"}, "nothing was tried for some kinds"


@pytest.mark.parametrize(
    "bug", ["one index for all rows of a draft", "a penalty without the draft tokens"]
)
def test_planted_sampling_row_bug_is_caught(parts, monkeypatch, bug):
    plant(monkeypatch, bug)
    assert any(each.differs for each in compare(parts, 0))


@pytest.mark.parametrize("bug", ["", "its rows are not scrubbed", "it is not begun again"])
def test_non_finite_draft_spoils_no_row(parts, monkeypatch, bug):
    """A draft token whose row is not finite spoils the other rows of its step, too, because attention
    multiplies a masked row by 0, and 0 x NaN is NaN. So the step is repeated without the draft, and its rows
    are scrubbed."""
    model, text = poisoned(parts[0], 99), parts[1]
    model = replace(model, attention="formula")  # the C operation does not read leftover rows
    if bug == "its rows are not scrubbed":
        monkeypatch.setattr(kv.Slab, "scrub", lambda self, *rows: None)
    elif bug:
        monkeypatch.setattr(Scheduler, "_retry_without_draft", lambda self, decode: None)
    sizes = {"slots": 3, "max_len": 160, "chunk": 32}
    never = exactly(60, logit_bias={99: -100.0})  # drafted, but never sampled
    asks = [Ask([n, 5, 6], 60, settings=never) for n in range(6)]
    dice = np.random.default_rng(1)
    with Engine(model, text, speculate=0, **sizes) as engine:
        plain = run_schedule(engine, asks, dice)
    with Engine(model, text, speculate=Oracle(plain, dice, wrong=99), **sizes) as engine:
        try:
            found = run_schedule(engine, asks, dice)
        except AssertionError:
            assert bug
            return
        is_same = not any(compared("", *pair).differs for pair in zip(plain, found, strict=True))
        assert is_same == (not bug)
        if not bug:
            assert all(handle.metrics.draft_tokens for handle in found)
            assert all(handle.request.drafting.source is None for handle in found)


# --- drafts -------------------------------------------------------------------------------------


def hints_of(prompt: list[int]) -> PromptLookup:
    lookup = PromptLookup()
    lookup.index_prompt(prompt)
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
    """Regression: a single acceptance rate treated a copy with changes like an exact copy, and a pair of
    words like a quotation."""
    lookup = hints_of([1, 2, 3, 4, 5, 6, 7, 1])
    assert lookup.chances(6) == [1 / 2, 2 / 3, 3 / 4, 4 / 5, 5 / 6, 6 / 7]
    answer = []
    for n in range(40):  # two tokens that occurred before, and a third that did not
        answer += [2, 3, 100 + n, 1]
        lookup.follow(answer)
    assert lookup.matches == 0 and lookup.next_chance == (pytest.approx(0.25, abs=0.05), 0)
    lookup.follow([*answer, 2])
    first, second, third = lookup.chances(3)
    assert first > 0.9 and second < 0.1 and third == 0.75
    lookup.follow([*answer, 2, 3])
    assert lookup.next_chance == (second, 2)


def priced(row_s: float) -> Drafter:
    """Return a drafter that has measured 1 second for a step, and `row_s` more for each row."""
    speculate = Drafter()
    now = 0.0
    for n in range(300):
        rows = 1 + n % 3
        plan = SimpleNamespace(at=now, chunks=(), decodes=range(rows), draft_tokens=0)
        now += 1 + row_s * rows
        speculate.learn(plan, now)
    return speculate


def copying(id: int, client: str = "") -> Request:
    """Return a request whose answer copies its prompt, with nothing in flight."""
    request = Request(id, tuple(range(40)), 30, 0.0, client=client)
    request.drafting.source = PromptLookup()
    request.admission = Admission(0.0, "continuous", id, "")
    request.answer += range(8)
    request.planned = 8
    return request


def inventing(id: int) -> Request:
    request = copying(id)
    request.answer[:] = range(100, 120)
    request.planned = 20
    return request


class Silent:
    """A grammar that forces nothing, and counts how often `forced` is called."""

    asked = 0

    def forced(self) -> list[int]:
        self.asked += 1
        return []


def test_unforcing_grammar_is_asked_seldom():
    """Regression: in free text under a grammar, each step waited for the previous step's tokens, although the
    grammar forced none."""
    grammar = Silent()
    request = inventing(0)
    request.drafting.source = PromptLookup(grammar)
    speculate = priced(0.4)
    waited = 0
    for n in range(200):
        request.answer.append(200 + n)
        request.planned = len(request.answer)
        request.max_tokens = 1000
        decode = Decode(request, 0, request.next_row)
        if speculate.should_read_now(SimpleNamespace(emitters=(decode,))):
            waited += 1
            speculate([request], 100)
    assert 10 <= waited <= 40 and grammar.asked == waited


@pytest.mark.parametrize(("row_s", "wide"), [(0.02, 15), (0.4, 6), (2.0, 2)])
def test_expensive_rows_shorten_drafts(row_s, wide):
    speculate = priced(row_s)([copying(0)], 100)
    assert len(speculate[0]) == wide


def test_step_is_read_at_once_only_if_drafts_pay():
    """A step is read before the next one is planned only if the expected drafts are worth more than
    run-ahead: not if the text has no repetitions, and not if rows are expensive."""

    def should_read_now(row_s: float, *requests: Request) -> bool:
        emitters = tuple(Decode(request, request.slot, request.next_row) for request in requests)
        return priced(row_s).should_read_now(SimpleNamespace(emitters=emitters))

    assert should_read_now(0.1, copying(0))
    assert not should_read_now(0.1, inventing(0))
    assert should_read_now(0.1, *map(copying, range(8)))
    assert not should_read_now(9.0, *map(copying, range(8)))


def test_drafts_slow_others_by_at_most_5_percent():
    """Regression: an answer that copies its prompt slowed each step of three neighbours by half."""
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
    """Regression: another program delayed some steps of one row, so additional rows seemed to cost nothing."""
    usual = drafted_after(outlier=0.0)
    assert usual == 3 and drafted_after(outlier=2.0) == pytest.approx(usual, abs=1)


def drafted_after(outlier: float) -> int:
    """Return the number of draft tokens after every 20th step took `outlier` seconds longer."""
    speculate = Drafter()
    now = 0.0
    for n in range(60):
        decodes = [Decode(copying(0), 0, 48, tuple(range(n % 4)))]
        began = now
        now += 0.01 * (1 + 0.5 * (n % 4)) + (outlier if n % 20 == 12 else 0.0)
        plan = SimpleNamespace(at=began, chunks=(), decodes=decodes, draft_tokens=n % 4)
        speculate.learn(plan, now)
    return len(speculate([copying(0)], 100)[0])


@pytest.mark.parametrize("speculate", [None, 3])
def test_engine_drafts_by_itself(parts, speculate):
    """A random model soon repeats itself, so its text is drafted by prompt lookup. JSON's keys are forced by
    the grammar."""
    schema = {
        "json": {"type": "object", "properties": {"a_long_key_of_many_bytes": {"type": "boolean"}}}
    }
    schema["json"] |= {"required": ["a_long_key_of_many_bytes"], "additionalProperties": False}
    asks = [Ask([1, 2, 3], 90, settings=exactly(90, repetition_penalty=0.9))]
    asks += [Ask([4, 2, 3], 90, settings=SamplingParams(max_tokens=90, grammar=schema))]
    found = []
    for most in (0, speculate):
        with Engine(*parts, slots=2, max_len=128, chunk=32, speculate=most) as engine:
            found.append(run_schedule(engine, asks, np.random.default_rng(0)))
    pairs = list(zip(*found, strict=True))
    assert not any(compared("", *pair).differs for pair in pairs)
    (text, _), (keys, _) = [(drafted.metrics, plain) for plain, drafted in pairs]
    assert keys.accepted_tokens > 5, keys
    if speculate:
        assert text.draft_tokens > 5, text


def test_negative_speculate_is_refused(parts):
    with pytest.raises(ValueError, match="speculate = -1, but it must be at least 0"):
        Engine(*parts, slots=1, max_len=64, speculate=-1)


def test_drafts_need_batch_invariance_or_a_number(tmp_path):
    """With MLX's own quantized matrix product, which is not batch-invariant, nothing is drafted unless
    `speculate` is a number."""
    folder = make_checkpoint(tmp_path, quantize=lambda module: (4, 32))
    for asked, most in ((None, 0), (4, 4)):
        options = {"slots": 1, "max_len": 64, "speculate": asked}
        with Engine.load(folder, dtype="checkpoint", **options) as engine:
            assert not engine.is_batch_invariant and engine.drafter.most == most
