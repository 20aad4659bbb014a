"""Grammars: which tokens are allowed next, and which grammars are refused. No model is needed."""

import json
import random
import resource
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_tokenizer
from hostile import HOSTILE

from base.sandbox import Sandbox
from base.validation import GrammarError
from sampling_params import GRAMMAR, SamplingParams
from text import grammar as grammar_file
from text.grammar import Grammars
from text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
V, ENDS = 272, (257, 259)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(make_tokenizer(), V, ENDS)


@cache
def tokens() -> Any:
    """Return the tokenizer's tokens in the grammar library's form."""
    known = {"tokenizer": make_tokenizer().to_str(), "n_vocab": V, "eos_token": sorted(ENDS)}
    return grammar_file.read_tokens(known)


def make(grammars: Grammars, **source):
    return grammars.grammar(SamplingParams(grammar=source).grammar)


def allowed(grammar) -> set[int]:
    return {*bits_of(grammar.mask())}


def bits_of(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(len(mask) * 8) if bits >> token & 1]


def say(grammars: Grammars, grammar, text: str) -> None:
    for token in tokens().tokenize_str(text):
        assert token in allowed(grammar), (text, token)
        grammar.accept(token)


def random_answer(grammars: Grammars, grammar, seed: int, longest: int = 3000) -> str | None:
    """Return an answer of random allowed tokens, or None if it is too long."""
    dice, said = random.Random(seed), []
    while not grammar.is_complete:
        token = dice.choice(sorted(allowed(grammar)))
        if token in ENDS:
            break
        grammar.accept(token)
        said.append(token)
        if len(said) == longest:
            return None
    return tokens().decode_str(said)


# --- what is allowed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, texts",
    [
        ({"json": {"type": "object"}}, ["{}", '{"a": [1, null]}', '{\n  "a": {"b": 1e5}\n}']),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 11}}, ["3", "10", "11"]),
        ({"json": '{"enum": ["x", 7]}'}, ['"x"', "7"]),
        ({"regex": "[0-9]{3}-(ab|c)"}, ["123-ab", "000-c"]),
        ({"choice": ['say "no"', "日本", "a\\b\n"]}, ['say "no"', "日本", "a\\b\n"]),
        ({"lark": 'start: "(" start? ")"'}, ["()", "(((())))"]),
    ],
)
def test_grammar_accepts_what_it_describes(grammars, source, texts):
    for text in texts:
        grammar = make(grammars, **source)
        say(grammars, grammar, text)
        assert grammar.is_complete or allowed(grammar) & set(ENDS), text


@pytest.mark.parametrize("seed", range(8))
def test_random_answers_match_the_grammar(grammars, seed):
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2,4}$"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            "size": {"type": "number", "minimum": -2, "maximum": 2.5},
        },
        "required": ["id", "size"],
        "additionalProperties": False,
    }
    answer = None
    while answer is None:
        answer = random_answer(grammars, make(grammars, json=schema), seed)
        seed += 100
    said = json.loads(answer)
    assert said.keys() <= schema["properties"].keys() and {"id", "size"} <= said.keys()
    assert -2 <= said["size"] <= 2.5 and set(said.get("tags", [])) <= {"a", "b"}


def test_every_end_token_is_allowed(grammars):
    """All end tokens are allowed where the answer may end. Another server's mask hid the second one, so a
    model wrote 21,000 tokens of garbage."""
    grammar = make(grammars, json={"type": "integer"})
    assert not allowed(grammar) & set(ENDS)
    say(grammars, grammar, "12")
    assert allowed(grammar) >= set(ENDS)


def test_no_end_token_no_grammars():
    """An end token that is not in the tokenizer does not count."""
    for ends in ((), (271,)):
        with pytest.raises(ValueError, match="grammar: this model names no end token"):
            make(Grammars(make_tokenizer(), V, ends), choice=["yes", "no"])
    assert make(Grammars(make_tokenizer(), V, (257, 271)), choice=["yes"]).mask()


def test_white_space_is_bounded(grammars):
    """The amount of whitespace is bounded, because a model that prefers spaces would write nothing else."""
    grammar = make(grammars, json={"type": "object"})
    say(grammars, grammar, "{\n" + " " * 40)
    assert not allowed(grammar) & {ord(" "), ord("\n"), ord("\t")}


def test_unused_ids_are_forbidden(grammars):
    """Ids that only the model's head has, and not its tokenizer, are forbidden."""
    for source in ({"regex": "(.|\n)*"}, {"json": {"type": "string"}}):
        assert max(allowed(make(grammars, **source))) <= max(ENDS)


def test_tokenizer_compiles_grammars(tmp_path):
    text = Tokenizer(ROOT / "demo" / "model", 1536)
    grammar = text.grammar(SamplingParams(grammar={"choice": ["yes", "no"]}).grammar)
    assert {text.tokenizer.id_to_token(token) for token in allowed(grammar)} >= {"y", "n"}


# --- what is refused ------------------------------------------------------------------------------

DEEP = {"type": "string"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}
DOUBLING = "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(40)) + 'A40: "a"'


@pytest.mark.parametrize(
    "source, words",
    [
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"type": "string", "enum": [1]}}, "Unsatisfiable schema"),
        ({"json": {"$ref": "#"}}, "no answer can match it"),
        ({"json": {"$ref": "http://example.com/a.json"}}, "not fetch"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": DEEP}, "recursion limit"),
        ({"json": "{"}, "line 1"),
        ({"json": "[]"}, "must be an object"),
        ({"json": {"x-guidance": {"lenient": True}, "uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(" * 9000 + ")" * 9000}, "nested parentheses"),
        ({"lark": "start: x"}, 'unknown name: "x"'),
        ({"lark": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "too deeply nested"),
        ({"lark": "".join(f"a{n}: a{n + 1}\n" for n in range(600))}, "at most 500"),
        ({"lark": DOUBLING}, "too big"),
    ],
)
def test_impossible_grammar_is_refused(grammars, source, words):
    with pytest.raises(ValueError, match=r"^grammar: ") as refusal:
        make(grammars, **source)
    said = str(refusal.value)
    assert words in said and "\n" not in said and len(said) < 400


@pytest.mark.parametrize(
    "source, words",
    [
        (5, "must be {'json': schema}"),
        ({}, "must be"),
        ({"type": "object"}, "must be"),
        ({"json": {}, "regex": "a"}, "must be"),
        ({"regex": 5}, "must be"),
        ({"choice": []}, "must be"),
        ({"choice": "yes"}, None),
        ({"choice": ["yes", 5]}, "must be"),
        ({"json": {"minimum": float("nan")}}, "not JSON"),
        ({"json": {"a": {1, 2}}}, "not JSON"),
        ({"regex": "a" * (GRAMMAR + 1)}, "at most 32,768"),
    ],
)
def test_sampling_params_validate_grammars(source, words):
    if words is None:  # a single choice
        assert SamplingParams(grammar=source).grammar == {"choice": ("yes",)}
        return
    with pytest.raises(ValueError, match="grammar") as refusal:
        SamplingParams(grammar=source)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_validated_grammar_is_immutable():
    schema = {"type": "integer"}
    sampling = SamplingParams(grammar={"json": schema})
    schema["type"] = "nonsense"
    assert json.loads(sampling.grammar["json"]) == {"type": "integer"}
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(grammar={"json": {}}, ignore_eos=True)


# --- hostile grammars -----------------------------------------------------------------------------


TRIED = (
    "deep references",
    "deep lists of references",
    "deep choices",
    "rules in a row",
    "terminals in a row",
    "1,500 that may be left out",
    "a common multiple of 2,310",
    "nested repeats",
    "an automaton of 2^30 states",
    "a long list",
    "many ways to read it",
    "rules that double",
)


@pytest.mark.parametrize("name", TRIED)
def test_hostile_grammar_is_refused_or_within_budget(grammars, name):
    """Regression: a chain of 3,000 references crashed the process, because the library recurses. The grammar
    is stepped in a thread, whose stack has the usual size."""
    try:
        grammar = make(grammars, **HOSTILE[name])
    except ValueError as error:
        assert "\n" not in str(error)
        return
    taken = []
    thread = threading.Thread(target=step_it, args=(grammar, taken))
    thread.start()
    thread.join()
    [(seconds, tokens, longest)] = taken
    # Processor time excluding the longest call, because a single call is bounded only by the library's own
    # limits. The measurement itself may take another twentieth.
    assert seconds - longest <= 1.05 * (grammar_file.AT_FIRST + grammar_file.A_TOKEN * tokens)


def step_it(grammar, taken: list) -> None:
    dice, tokens, calls = random.Random(1), 0, []

    def timed(function, *arguments):
        began = time.thread_time()
        try:
            return function(*arguments)
        finally:
            calls.append(time.thread_time() - began)

    with suppress(GrammarError):
        while tokens < 100 and not grammar.is_complete:
            tokens += 1
            choices = bits_of(timed(grammar.mask))
            timed(grammar.accept, dice.choice(choices))
    taken.append((sum(calls), tokens, max(calls, default=0.0)))


@pytest.mark.parametrize("name", ["a large divisor", "a schema in it", "a large common multiple"])
def test_grammar_over_a_limit_is_killed_and_remembered(name, monkeypatch):
    """Regression: two requests with such grammars blocked both threads that compile them. The process grew
    to 4 GiB, and every other schema was refused."""
    grammars = Grammars(make_tokenizer(), V, ENDS)
    make(grammars, choice=["yes"])
    before = len(threading.enumerate()), peak()
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^grammar: it takes more than (1 s|64 MB) .*simplify"
        ):
            make(grammars, **HOSTILE[name])
        monkeypatch.setattr(Sandbox, "run", None)  # the second time nothing is compiled
    monkeypatch.undo()
    assert make(grammars, choice=["yes", "no"]).mask()
    assert len(threading.enumerate()) == before[0] and peak() - before[1] < 32 * 2**20


def peak() -> int:
    """Return this process's peak memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    "source",
    [
        {"json": {"type": "object", "properties": {f"k{n}": {} for n in range(1500)}}},
        {"json": {"anyOf": [{"properties": {f"k{n}": {}}} for n in range(300)]}},
        {"json": {"const": "x y" * 10_000}},
    ],
)
def test_grammar_that_fails_later_is_refused_before(grammars, source):
    """Regression: an object with 1,500 properties was accepted, and its answer ended with a 500 at the first
    token."""
    with pytest.raises(ValueError, match=r"too many|Too many|more than 1 ms a token"):
        make(grammars, **source)


@pytest.mark.parametrize(
    "source",
    [
        {"json": {"type": "object", "properties": {f"key {n}": {} for n in range(300)}}},
        {"json": {"enum": [f"word {n}" for n in range(1500)]}},
        {"choice": [f"c{n}" for n in range(5000)]},
        {"json": {"const": "x y" * 300}},
        {"json": {"type": "integer", "multipleOf": 997}},
        {"lark": 'start: e\ne: e ("+" | "-" | "*") e | /[0-9]+/ | "(" e ")"'},
    ],
)
def test_large_grammars_are_compiled(grammars, source):
    assert make(grammars, **source).mask()


def test_grammar_over_budget_ends_the_answer():
    """Regression: one request with an ambiguous grammar made all others 20 to 80 times as slow."""
    source = {"lark": "start: start start | start start start | /[a-z ]/ | "}
    grammar = grammar_file.make(tokens(), source)  # as if the sandbox had accepted it
    said = 0
    with pytest.raises(GrammarError, match=r"takes more than 1 ms a token|cannot continue"):
        for token in tokens().tokenize_str("a b c d e " * 40):
            grammar.mask()
            grammar.accept(token)
            said += 1
    assert 2 < said < 400


def test_masks_of_several_tokens_leave_the_state_unchanged(grammars):
    """Try drafts that the grammar allows, a draft that it forbids, and drafts beyond its end."""
    dice = random.Random(1)
    source = {"json": {"type": "array", "items": {"enum": [17, "ab", None]}, "maxItems": 3}}
    right = wrong = beyond = 0
    for _ in range(30):
        grammar = make(grammars, **source)
        while not grammar.is_complete:
            drafts, expected, ahead = [], [grammar.mask()], grammar.copy()
            for _ in range(dice.randint(0, 6)):
                draft = dice.randrange(256) if dice.random() < 0.2 else inside(ahead, dice)
                drafts.append(draft)
                if ahead.is_complete or draft not in allowed(ahead):
                    beyond += ahead.is_complete
                    wrong += not ahead.is_complete
                    break
                ahead.accept(draft)
                expected.append(ahead.mask())
                right += 1
            assert grammar.masks(drafts) == expected
            assert grammar.mask() == expected[0]
            grammar.accept(inside(grammar, dice))
    assert right > 100 and wrong > 20 and beyond > 10


def inside(grammar, dice: random.Random) -> int:
    """Return an allowed token, if possible one that does not end the answer."""
    return dice.choice(sorted(allowed(grammar) - {*ENDS}) or [ENDS[0]])


def test_llguidance_panic_is_a_refusal(monkeypatch):
    class PanicException(BaseException):
        """Stands in for a Rust panic."""

    def panic(source):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(grammar_file, "compiled", panic)
    said = grammar_file.fault_of(tokens(), ENDS, {"json": "{}"})
    assert said == "the library failed (index out of bounds)"


def test_late_grammar_failure_is_reported(grammars):
    grammar = make(grammars, choice=["yes", "no"])
    with pytest.raises(GrammarError, match="it cannot continue"):
        grammar.accept(ord("q"))


def test_verdicts_are_short(grammars):
    """Regression: a refusal quoted the grammar, so a thousand cached ones took 30 MB."""
    for source in ({"regex": "(" * 30_000}, {"json": '{"$ref": "#/' + "a" * 30_000 + '"}'}):
        with pytest.raises(ValueError, match="grammar: ") as refused:
            make(grammars, **source)
        assert 250 < len(str(refused.value)) < 350


def test_grammar_verdicts_are_cached_and_bounded(monkeypatch):
    grammars = Grammars(make_tokenizer(), V, ENDS)
    monkeypatch.setattr(grammar_file, "KNOWN", 3)
    tried = []
    run = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda self, job: tried.append(job) or run(self, job))
    for word in ("a", "b", "a", "c", "a", "d", "a", "b"):
        make(grammars, choice=[word])
    assert "".join(job["choice"][0] for job in tried) == "abcdab"
