"""Requests under a grammar next to others: no request's bits change, and no forward pass waits for a mask."""

import json
import math
import re
import threading

import numpy as np
import pytest
from harness import Tap, check, exactly
from kinds import KINDS
from planted_bugs import poisoned

import runner
from nanobatch import Engine, SamplingParams
from runner import Runner
from text import grammar as grammar_file
from text.grammar import Grammar

DIGITS = {"regex": "[0-9]{8}"}
LIST = {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}}
PLAIN = exactly(20)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, int(rng.integers(1, 60))).tolist() for _ in range(count)]


# --- the answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [True, False])
def test_grammar_holds_with_every_setting(parts, run_ahead):
    """The requests have every kind of sampling, with a grammar and without one."""
    wishes = []
    for n, settings in enumerate(KINDS.values()):
        wishes.append(SamplingParams(max_tokens=30, seed=n, grammar=DIGITS, **settings))
        wishes.append(SamplingParams(max_tokens=12, seed=n, ignore_eos=True, **settings))
    asks = list(zip(prompts(len(wishes)), wishes, strict=True))
    with Engine(*parts, slots=7, max_len=128, chunk=32, run_ahead=run_ahead) as engine:
        tap = Tap(engine)
        handles = [engine.submit(*ask) for ask in asks]
        engine.driver.wait(lambda: all(handle.finish_reason for handle in handles), engine.step)
    with Engine(*parts, slots=1, max_len=128, chunk=64, prefix_cache=False) as engine:
        lonely = Tap(engine)
        for handle, ask in zip(handles, asks, strict=True):
            alone = engine.submit(*ask)
            assert alone.result().tokens == handle.tokens
            assert lonely.of(alone).tobytes() == tap.of(handle).tobytes()
            assert alone.logprobs == handle.logprobs
    for handle in handles[::2]:
        assert handle.finish_reason == "stop" and re.fullmatch("[0-9]{8}", handle.text)
    assert len({handle.text for handle in handles[::2]}) > len(KINDS) / 2


def test_logprobs_under_a_grammar(engine):
    """Forbidden tokens have probability 0, and the others add up to 1."""
    handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=30, grammar=DIGITS, logprobs=12))
    for logprob in handle.result().logprobs:
        chances = {token: math.exp(value) for token, value in logprob.top}
        assert abs(sum(chances.values()) - 1) < 1e-4
        assert {token for token, chance in chances.items() if chance} <= {
            engine.text.tokenizer.token_to_id(digit) for digit in "0123456789"
        }


def test_cut_and_complete_answers_differ(engine):
    """An answer whose last allowed token completes the grammar does not count as truncated."""
    cut = engine.submit([1, 2], SamplingParams(max_tokens=7, grammar=DIGITS)).result()
    assert (cut.finish_reason, len(cut.text)) == ("length", 7)
    whole = engine.submit([1, 2], SamplingParams(max_tokens=8, grammar=DIGITS)).result()
    assert (whole.finish_reason, len(whole.text)) == ("stop", 8)


def test_stop_string_ends_before_the_grammar(engine):
    whole = engine.submit([1, 2], SamplingParams(max_tokens=30, grammar=DIGITS)).result()
    stopped = engine.submit(
        [1, 2], SamplingParams(max_tokens=30, grammar=DIGITS, stop=[whole.text[3:5]])
    ).result()
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(whole.text[3:5])]


def test_eos_where_the_grammar_allows_it(engine):
    """EOS is allowed as soon as the grammar permits the answer to end."""
    bias = {257: 1e9}  # makes EOS the most likely token
    result = engine.submit(
        [1], SamplingParams(grammar={"regex": "[0-9]{3,9}"}, max_tokens=30, logit_bias=bias)
    ).result()
    assert result.finish_reason == "stop" and len(result.text) == 3


def test_choices_have_separate_grammar_states(engine):
    """Regression: with n > 1 the choices shared one matcher."""
    wishes = [
        SamplingParams(grammar=LIST, temperature=1.0, seed=seed, max_tokens=90) for seed in range(6)
    ]
    handles = [engine.submit([7, 8, 9], wish) for wish in wishes]
    answers = [handle.result() for handle in handles]
    said = [json.loads(answer.text) for answer in answers if answer.finish_reason == "stop"]
    assert len(said) > 2 and all(2 <= len(numbers) <= 4 for numbers in said)


def test_reused_slot_has_no_grammar_left(engine):
    """Regression: after a cancel, the next request in the slot was masked by the cancelled request's grammar."""
    prompt = (prompts(1)[0] * 90)[:90]
    first = engine.submit(prompt, SamplingParams(max_tokens=30, grammar=DIGITS))
    while len(first.tokens) < 3:
        engine.step()
    first.cancel()
    second = engine.submit(prompt, SamplingParams(max_tokens=30, grammar=DIGITS))
    again = second.result()
    assert again.tokens[:3] == first.tokens[:3] and again.metrics.cached_tokens > 0
    assert first.grammar is None and second.grammar is None, "a handle may be kept for long"
    plain = engine.submit(prompt, PLAIN).result()
    assert not re.fullmatch("[0-9]*", plain.text)


@pytest.mark.parametrize("place", ["in the prompt", "in the answer"])
def test_a_row_of_nan_is_seen_behind_a_mask(parts, place):
    """The mask is added to the logits instead of replacing them, so a NaN among forbidden tokens is detected."""
    model, text = parts
    token = 99 if place == "in the prompt" else text.tokenizer.token_to_id("5")
    grammar = {"regex": "[a-z]{9}"} if place == "in the prompt" else {"regex": "5{9}"}
    with Engine(poisoned(model, token), text, slots=2, max_len=64, chunk=32) as engine:
        bad = engine.submit([1, 99, 2], SamplingParams(max_tokens=30, grammar=grammar))
        assert bad.result().finish_reason == "error" and "finite" in bad.error
        assert (
            engine.submit([1], SamplingParams(max_tokens=30, grammar={"choice": ["x"]}))
            .result()
            .text
            == "x"
        )


# --- run-ahead ----------------------------------------------------------------------------------


def events_of(parts, monkeypatch, *wishes) -> list[tuple[str, int]]:
    """Return the events in order: ("forward", step), ("read", step), ("sample", step)."""
    events: list[tuple[str, int]] = []
    forward, sample, read = (
        Runner.start_forward,
        Runner.start_sampling,
        runner.RunningStep.read_back,
    )
    count = {"forward": 0, "sample": 0, "read": 0}

    def noted(name, function):
        def call(*arguments):
            count[name] += 1
            events.append((name, count[name]))
            return function(*arguments)

        return call

    with Engine(*parts, slots=4, max_len=64, chunk=32, speculate=0) as engine:
        engine.eager_first_token = False  # as on a GPU, where first tokens are read a step later
        monkeypatch.setattr(Runner, "start_forward", noted("forward", forward))
        monkeypatch.setattr(Runner, "start_sampling", noted("sample", sample))
        monkeypatch.setattr(runner.RunningStep, "read_back", noted("read", read))
        for handle in [engine.submit([1, 2, n], wish) for n, wish in enumerate(wishes)]:
            handle.result()
    monkeypatch.undo()
    assert count["forward"] == count["sample"] == count["read"] > 5
    return events


def test_run_ahead_without_a_grammar(parts, monkeypatch):
    """A step is fully started before the previous one is read."""
    events = events_of(parts, monkeypatch, PLAIN, PLAIN)
    steps = max(step for _, step in events)
    for step in range(2, steps):
        assert events.index(("sample", step)) < events.index(("read", step - 1))


def test_forward_overlaps_with_a_grammar(parts, monkeypatch):
    """Under a grammar the next forward pass starts before the previous step is read, and only sampling waits.
    Once no row has a grammar, sampling does not wait either."""
    events = events_of(
        parts, monkeypatch, SamplingParams(max_tokens=30, grammar={"regex": "[0-9]{6}"}), PLAIN
    )
    steps = max(step for _, step in events)
    waited = 0
    for step in range(2, steps):
        assert events.index(("forward", step)) < events.index(("read", step - 1))
        waited += events.index(("read", step - 1)) < events.index(("sample", step))
    assert 5 <= waited <= 7 < steps - 2


# --- threads and failures -----------------------------------------------------------------------


def test_grammar_is_compiled_at_submit(engine, monkeypatch):
    """A grammar is compiled in a thread of its own, because compiling it in the thread that steps would delay
    every request."""
    makers = []
    make = grammar_file.make

    def noted(*arguments):
        makers.append(threading.current_thread().name.partition("_")[0])
        return make(*arguments)

    monkeypatch.setattr(grammar_file, "make", noted)
    with engine.serving():
        handle = engine.submit([1], SamplingParams(max_tokens=30, grammar=DIGITS))
        assert makers == ["grammar"]
        with pytest.raises(ValueError, match="unknown name"):
            engine.submit([1], SamplingParams(grammar={"lark": "start: x"}))
        assert handle.result().finish_reason == "stop"
    assert makers == ["grammar"]


class PanicException(BaseException):
    """Stands in for a Rust panic, which reaches Python as a BaseException."""


@pytest.mark.parametrize(
    ("method", "error", "run_ahead"),
    [
        ("mask", RuntimeError, True),
        ("mask", PanicException, False),
        ("accept", PanicException, True),
        ("accept", RuntimeError, False),
    ],
)
def test_failing_grammar_ends_its_request_alone(
    make_engine, monkeypatch, caplog, method, error, run_ahead
):
    """The neighbours' tokens stay the same."""
    engine = make_engine(slots=3, max_len=64, run_ahead=run_ahead)
    good = [SamplingParams(max_tokens=30, grammar=DIGITS), PLAIN]
    expected = [engine.submit([n], wish).result().tokens for n, wish in enumerate(good)]
    handles = [engine.submit([n], wish) for n, wish in enumerate(good)]
    bad = engine.submit([9], SamplingParams(max_tokens=30, grammar=DIGITS))
    usual = getattr(Grammar, method)

    def fail(self, *arguments):
        if self is bad.grammar and len(bad.tokens) == 4:
            raise error("out of fuel")
        return usual(self, *arguments)

    monkeypatch.setattr(Grammar, method, fail)
    engine.driver.wait(lambda: all(handle.finish_reason for handle in (*handles, bad)), engine.step)
    check(engine)
    assert bad.finish_reason == "error" and "out of fuel" in bad.error
    assert [handle.tokens for handle in handles] == expected
