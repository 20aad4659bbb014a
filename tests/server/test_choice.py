"""An answer's text becomes items that start, grow and stop, in each protocol's stream."""

import random
from itertools import groupby
from types import SimpleNamespace

import pytest

from server.choice import Choice, Words
from text.tokenizer import OURS, Tokenizer
from text.tool_formats import FORMATS, REASONING_MARKS, OutputFormat
from text.tool_parser import OutputParser, as_written

PIECES = [
    *["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "{", "fox", "den"],
    '{"name": "add", "arguments": {"a": ',
    "1}}",
]


def choice_of(reason: str) -> tuple[Choice, list]:
    handle = SimpleNamespace(finish_reason=reason, lengths=[], stop=None)
    parser = OutputParser(OutputFormat(REASONING_MARKS[0], FORMATS[0]), {"add": {}})
    return Choice(handle, parser, None), []


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_items_start_grow_and_stop_in_order(reason):
    kinds = set()
    for seed in range(400):
        dice = random.Random(seed)
        choice, changes = choice_of(reason)
        for _ in range(dice.randrange(12)):
            changes += choice.grow(dice.choice(PIECES))
        changes += choice.grow(None)
        rows = groupby(changes, key=lambda change: change.item.place)
        told = []
        for place, row in rows:
            start, *deltas, stop = row
            assert (start.kind, stop.kind) == ("start", "stop"), (seed, place)
            assert {delta.kind for delta in deltas} == {"delta"}, (seed, place)
            assert start.item.text == "".join(delta.text for delta in deltas)
            told.append(start.item)
        assert told == choice.items and [item.place for item in told] == [*range(len(told))]
        text = told[-1].text if told and told[-1].kind == "tool_call" else ""
        is_cut = reason == "length" or text.count("{") > text.count("}")
        last = "incomplete" if is_cut else "completed"
        assert [item.status for item in told] == ["completed"] * (len(told) - 1) + [last][
            : len(told)
        ]
        kinds |= {item.kind for item in told}
    assert kinds == {"reasoning", "content", "tool_call"}


def test_calls_are_numbered_among_themselves():
    choice, changes = choice_of("stop")
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    changes += choice.grow(f"<think>Hm.</think>I look.{call}{call}")
    changes += choice.grow(None)
    assert [(item.kind, item.place, item.nth) for item in choice.items] == [
        ("reasoning", 0, 0),
        ("content", 1, 0),
        ("tool_call", 2, 0),
        ("tool_call", 3, 1),
    ]
    assert choice.reason == "tool_calls" and choice.text("content") == "I look."


PROBED = (
    "<tool_call>\n<function=is_called>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
)
TAGS = as_written(FORMATS[0], PROBED, PROBED.index("is_called"))


@pytest.mark.parametrize(
    "format, text, is_called",
    [
        (FORMATS[0], '<tool_call>{"name": "add", "arguments": {"text": "', False),
        (FORMATS[0], '<tool_call>{"name": "add", "arguments": {"text": "a"', False),
        (FORMATS[0], '<tool_call>{"name": "add", "arguments": {"text": "a"}', True),
        (TAGS, "<tool_call>\n<function=add>\n<parameter=text>\na", False),
        (TAGS, "<tool_call>\n<function=add>\n<parameter=text>\na\n</parameter>", True),
    ],
)
def test_call_that_ends_in_its_arguments_is_not_complete(format, text, is_called):
    """Regression: a model at a high temperature may end its answer anywhere, and clients were told to run an
    incomplete call."""
    handle = SimpleNamespace(finish_reason="stop", lengths=[], stop=None)
    choice = Choice(handle, OutputParser(OutputFormat(None, format), {"add": {}}), None)
    assert [*choice.grow(text), *choice.grow(None)]
    (item,) = choice.items
    assert item.kind == "tool_call" and item.text.startswith('{"text": ')
    said = ("tool_calls", "completed") if is_called else ("stop", "incomplete")
    assert (choice.reason, item.status) == said


@pytest.mark.parametrize("read_early", [False, True])
def test_words_end_with_the_answer(read_early):
    """The end token and a trailing stop string have no log probability entries. Regression: the last entry
    had an empty text."""
    text = Tokenizer(OURS, 1536)
    kept = text.encode("Once upon a time")
    dropped = [*text.encode(" STOP"), min(text.end_tokens)]
    handle = SimpleNamespace(
        tokens=[*kept, *dropped],
        logprobs=[(-0.5, [], None)] * len(kept + dropped),
        text=text.tokenizer.decode(kept),
    )
    words = Words(text, handle)
    said = words.release(len(handle.text)) if read_early else []
    said += words.finish()
    assert [word.text for word in said] == [text.tokenizer.decode([token]) for token in kept]
    assert "".join(word.text for word in said) == handle.text
