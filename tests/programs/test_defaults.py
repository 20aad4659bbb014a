"""Every program uses the same defaults for sampling, those of the model's generation_config.json."""

import http.client
import io
import json
import sys

import pytest
from checkpoints import make_checkpoint

import ask
from base.untrusted_files import ModelError
from nanobatch import Engine
from sampling_params import ADVICE, advised
from screen.engine_client import LocalEngineClient
from screen.workload import Settings
from server.app import APIServer
from server.http import Options

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
ADVISED = [
    (None, (0.0, 1.0, 0, 0.0, 1.0)),
    ({"eos_token_id": 257}, (0.0, 1.0, 0, 0.0, 1.0)),
    (QWEN | {"do_sample": True}, (0.7, 0.8, 20, 0.0, 1.1)),
    ({"do_sample": True}, (1.0, 1.0, 0, 0.0, 1.0)),
    ({"do_sample": False, "temperature": 0.6}, (0.0, 1.0, 0, 0.0, 1.0)),
]


@pytest.fixture
def seen(monkeypatch) -> list[tuple]:
    """Record the sampling settings of each request."""
    seen = []
    submit = Engine.submit

    def note(engine, prompt, sampling=None, **how):
        seen.append(tuple(getattr(sampling, name) for name in ADVICE))
        return submit(engine, prompt, sampling, **how)

    monkeypatch.setattr(Engine, "submit", note)
    return seen


@pytest.mark.parametrize(("advice", "expected"), ADVISED)
def test_all_programs_begin_alike(tmp_path, monkeypatch, seen, advice, expected):
    """Regression: the default temperature was 1 over HTTP, where a small model gives wrong answers, and 0
    elsewhere, regardless of the model's generation_config.json."""
    folder = make_checkpoint(tmp_path, seed=1)
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    if advice:
        (folder / "generation_config.json").write_text(json.dumps(advice))
    few = ["--model", str(folder), "--max-tokens", "2", "--max-len", "64"]
    assert ask.main([*few, "Hi"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert ask.main([*few, "--chat"]) == 0
    api = APIServer(Options(port=0))
    room = LocalEngineClient(
        lambda report, clock: Engine.load(folder, clock=clock, slots=1, max_len=64), api, "small"
    )
    room.load()
    room.fire([Settings(max_tokens=2).ask("Hi")])
    while len(seen) < 3:
        room.loop.turn()
    while room.engine.has_work:
        room.loop.turn()
    room.loop.start()
    api.start()
    # An empty field of the page is sent as null
    for more in ({}, {"temperature": None}):
        line = http.client.HTTPConnection(api.address.removeprefix("http://"), timeout=60)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2} | more
        line.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        assert line.getresponse().status == 200
        line.close()
    api.close()
    assert room.stop(20)
    assert seen == [expected] * 5


def test_what_a_user_gives_goes_before_advice(tmp_path, seen):
    folder = make_checkpoint(tmp_path, seed=1)
    (folder / "generation_config.json").write_text(json.dumps(QWEN))
    given = ["--temperature", "0", "--top-k", "3", "--max-tokens", "2", "--max-len", "64"]
    assert ask.main(["--model", str(folder), *given, "--raw", "Hi"]) == 0
    assert seen == [(0.0, 0.8, 3, 0.0, 1.1)]


@pytest.mark.parametrize("advice", [{"temperature": -1}, {"top_p": "much"}, {"top_k": 1.5}])
def test_bad_generation_config_is_named(tmp_path, advice):
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    with pytest.raises(ModelError, match=rf"generation_config\.json: {next(iter(advice))}"):
        advised(tmp_path)
