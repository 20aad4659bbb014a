"""The limits in SECURITY.md match the code, the tests that it names exist, and known vulnerabilities of
comparable servers are absent."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from servers import COMPLETIONS

from base.untrusted_files import LARGEST, LARGEST_OTHER, ModelError, check_size
from engine import watch_frames
from server import embeddings, openai, watch
from server.body_reader import MAX_STOP_LENGTH, MAX_STOPS, MAX_TOOLS, read_json
from server.protocol_adapter import APIError
from text.grammar import RULES, compiled
from text.tokenizer import OURS, Tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
LIMIT = re.compile(r"^\| (.+) \| ([\d.,]+)[^|]* \| `(.+)\.py`, `(.+)` \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)`, `(\w+)`")
SAID = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add"}}


def test_table_of_limits_has_the_values_of_the_code():
    rows = LIMIT.findall(PAGE)
    assert len(rows) == PAGE.split("## Limits")[1].split("\nThe waiting")[0].count("\n| ") - 1
    assert len(rows) > 30
    for limit, value, file, constant, _ in rows:
        module = importlib.import_module(file.replace("/", "."))
        assert float(value.replace(",", "")) == eval(constant, vars(module)), limit


def test_every_test_that_the_page_names_exists():
    named = TEST.findall(PAGE)
    assert len(named) > 40
    for file, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (file, name)
    tables = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert not [line for line in tables if "`tests" in line and not TEST.search(line)]


@pytest.mark.parametrize("end", ["XX", "\rX", "\n\n", ""])
def test_chunk_must_end_with_a_line_end(here, end):
    """h11 before 0.16 accepted any two bytes as the end of a chunk. If a proxy in front does not, one of the
    two takes part of a body for the next request (request smuggling, CVE-2025-43859)."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    hidden = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    said = here.line().send(f"{head}2\r\n{{}}{end}0\r\n\r\n{hidden}".encode()).everything()
    assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1") == 1


def test_n_is_bounded(here):
    """vLLM created as many sequences as `n` requested (CVE-2026-34756)."""
    for n in (openai.MAX_N + 1, 10**6, 10**400):
        assert here.complete(n=n).status == 400
    assert here.complete(n=2, max_tokens=1).status == 200


def test_template_arguments_override_nothing():
    """vLLM passed `chat_template_kwargs` on after its own arguments, so a client could replace the
    template or the messages (GHSA-69j4-grxj-j64p)."""
    tokenizer = Tokenizer(OURS, 1536)
    plain = tokenizer.render(SAID)
    for name, value in (
        ("messages", [{"role": "user", "content": "Another"}]),
        ("add_generation_prompt", False),
    ):
        assert tokenizer.render(SAID, [], {name: value}) == plain
    for name in ("chat_template", "tokenize", "documents_"):
        with pytest.raises(ValueError, match="does not know"):
            tokenizer.render(SAID, [], {name: "x"})


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        (openai.ChatCompletion, {"messages": SAID, "tools": [TOOL] * (MAX_TOOLS + 1)}),
        (openai.ChatCompletion, {"messages": SAID, "stop": ["a"] * (MAX_STOPS + 1)}),
        (openai.ChatCompletion, {"messages": SAID, "stop": "a" * (MAX_STOP_LENGTH + 1)}),
        (openai.Completion, {"prompt": ["a"] * (openai.MAX_CHOICES // 2 + 1), "n": 2}),
        (
            openai.Completion,
            {"prompt": "a", "logit_bias": {str(i): 1 for i in range(openai.MAX_LOGIT_BIASES + 1)}},
        ),
        (openai.Completion, {"prompt": "a", "logprobs": openai.MAX_TOP_LOGPROBS + 1}),
        (embeddings.Embedding, {"input": ["a"] * (embeddings.MAX_TEXTS + 1)}),
    ],
    ids=["tools", "stops", "stop length", "choices", "biases", "logprobs", "texts"],
)
def test_counts_over_the_limit_are_refused(protocol, body):
    with pytest.raises(APIError) as error:
        protocol.parse_request(read_json(json.dumps(body).encode()))
    assert error.value.status == 400 and re.search(r"\d", error.value.message)


def test_watchers_are_limited(here, monkeypatch):
    here.api._status.watchers = watch.MAX_WATCHERS
    reply = here.ask("/watch")
    assert (reply.status, reply.headers["retry-after"]) == (429, "5")
    here.api._status.watchers = 0


def test_frame_with_too_many_slots_is_refused(engine):
    """Regression: the screen drew the four billion slots that a hostile server reported."""
    view = engine.snapshot()
    watch_frames.check_slots(view)
    for count in (0, 3, watch_frames.SLOTS + 1, 4_000_000_000):
        limits = view.limits._replace(slots=count)
        with pytest.raises(ValueError, match="slots"):
            watch_frames.check_slots(replace(view, limits=limits))


@pytest.mark.parametrize(
    ("name", "most"),
    [("tokenizer.json", LARGEST["tokenizer.json"]), ("config.json", LARGEST_OTHER)],
)
def test_files_of_a_model_have_a_limit(tmp_path, name, most):
    path = tmp_path / name
    for size in (most, most + 1):
        with path.open("wb") as file:
            file.truncate(size)  # a sparse file
        if size == most:
            check_size(path)
    with pytest.raises(ModelError, match=f"{most:,}"):
        check_size(path)


def test_rules_of_a_grammar_are_limited():
    """llguidance needs more than linear time in the number of rules."""
    rules = "\n".join(f'a{i}: "a"' for i in range(RULES))
    assert compiled({"lark": rules})
    with pytest.raises(ValueError, match=f"at most {RULES}"):
        compiled({"lark": f'{rules}\nstart: "b"'})
