"""From a commit to the client: one delta for each request, one wake-up for each step."""

import random
import sys
import threading
from pathlib import Path

import pytest
from here import Here
from long_forms import number_of
from servers import CHAT
from waiting import wait_for

from nanobatch import Engine, Handle, SamplingParams
from server.app import APIServer

ROOT = Path(__file__).parents[2]
LIST = {"json": {"type": "array", "items": {"enum": ["a long word", 17]}, "maxItems": 6}}
QUESTION = [{"role": "user", "content": "Count from 3 to 30."}]
# Each kind of request handles the tokens of a commit in its own way
KINDS = {
    "plain": {},
    "drawn": {"temperature": 1.0},
    "stop text": {"stop": ["12", " 14"]},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": LIST["json"]}}},
    "regular expression": {"guided_regex": "[0-9]{3,20}"},
    "two choices": {"n": 2, "temperature": 1.2},
}


@pytest.fixture(scope="module")
def demo():
    """The demo model, because it counts, and drafts need repetition."""
    with Engine.load("demo", slots=4, max_len=256, speculate=3) as engine:
        yield engine


def said(choices: list[dict], index: int) -> str:
    """Return the text of one choice, from a complete response or from all events."""
    text = ""
    for choice in choices:
        if choice["index"] != index:
            continue
        part = choice.get("delta") or choice.get("message") or {}
        text += part.get("content") or ""
    return text


def test_random_deltas_join_to_the_answer(demo):
    """Several tokens of a step (accepted drafts) make one delta, and a slow reader loses nothing."""
    dice = random.Random(7)
    settings = [
        {},
        {"temperature": 0.9},
        {"stop": ["1", " 2"]},
        {"grammar": LIST},
        {"logprobs": 2},
    ]
    taken = 0
    for seed in range(number_of("DELTAS", 3)):
        handles = []
        for each in settings:
            prompt = f"Count from {dice.randrange(3, 9)} to {dice.randrange(20, 40)}."
            sampling = SamplingParams(max_tokens=60, seed=seed, **each)
            handles.append(demo.submit(demo.text.ask(prompt), sampling))
        texts = dict.fromkeys(handles, "")
        open_handles = list(handles)
        while open_handles:
            demo.step()
            for handle in list(open_handles):
                if dice.random() < 0.4:
                    text, is_last, _ = handle.take_delta(dice.choice([1, 2, 64]))
                    texts[handle] += text
                    taken += bool(text)
                    if is_last:
                        open_handles.remove(handle)
        for handle in handles:
            assert texts[handle] == handle.result().text, seed
            assert handle.take_delta(64) == ("", True, False)
    assert taken > 90
    assert sum(handle.metrics.accepted_tokens for handle in handles) > 0, "no draft was accepted"


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_equals_whole(demo, kind):
    asked = {"messages": QUESTION, "max_tokens": 50, "temperature": 0, "seed": 5} | KINDS[kind]
    with Here(demo) as here:
        whole = here.ask(CHAT, asked).json["choices"]
        events = here.ask(CHAT, asked | {"stream": True}).events
    streamed = [choice for event in events[:-1] for choice in event["choices"]]
    for index in range(asked.get("n", 1)):
        assert said(streamed, index) == said(whole, index) != ""
        reasons = [c["finish_reason"] for c in streamed if c["index"] == index]
        assert reasons[-1] == whole[index]["finish_reason"] and not any(reasons[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_one_wake_up_per_step(demo, monkeypatch, stream):
    """A step wakes the server's thread only once, because a wake-up is a system call in the thread that
    steps."""
    wakes = []
    wake = APIServer._wake

    def counted(api, answers) -> None:
        wakes.append(demo.registry.steps.count)
        wake(api, answers)

    monkeypatch.setattr(APIServer, "_wake", counted)
    asked = {"messages": QUESTION, "max_tokens": 30, "ignore_eos": True, "n": 3, "stream": stream}
    with Here(demo) as here:
        before = demo.registry.steps.count
        assert here.ask(CHAT, asked).status == 200
    steps = demo.registry.steps.count - before
    if stream:
        assert 5 < len(wakes) <= steps + 1
    else:
        assert 1 <= len(wakes) <= 3, "each of three choices ends once"


class Tracer:
    """A profiler that counts how often execution crosses from one of our files into another, in all threads,
    excluding the forward pass."""

    FORWARD = ("llama.py", "kv.py", "sampling.py", "token_choice.py", "models/", "kernels/")

    def __init__(self) -> None:
        self.changes = 0
        self.is_on = False
        self._files: dict[int, str] = {}  # by thread id

    def is_ours(self, frame) -> bool:
        file = frame.f_code.co_filename
        inside = file.removeprefix(f"{ROOT}/")
        return inside != file and not inside.startswith((*self.FORWARD, "tests/", ".venv"))

    def __call__(self, frame, event: str, argument) -> None:
        if not self.is_on or event not in ("call", "return") or not self.is_ours(frame):
            return
        if event == "return":  # execution continues in the nearest of our callers
            frame = frame.f_back
            while frame and not self.is_ours(frame):
                frame = frame.f_back
        if frame:
            thread = threading.get_ident()
            if self._files.get(thread) != frame.f_code.co_filename:
                self.changes += 1
                self._files[thread] = frame.f_code.co_filename


def test_file_changes_to_the_first_token(demo, monkeypatch):
    """Regression: from a POST to the first event with text, execution crossed from file to file 353 times,
    because three classes polled each other and each field of a body was parsed by a separate call."""
    tracer = Tracer()
    ask = {"messages": QUESTION, "max_tokens": 20, "temperature": 0, "stream": True}
    take = Handle.take_delta

    def first(handle: Handle, most: int):
        delta = take(handle, most)
        tracer.is_on = tracer.is_on and not delta.text
        return delta

    monkeypatch.setattr(Handle, "take_delta", first)
    threading.setprofile(tracer)
    try:
        with Here(demo) as here:
            counts = []
            for _ in range(6):
                wait_for(lambda: not here.api._connections)
                tracer.changes = 0
                tracer.is_on = True
                assert here.ask(CHAT, ask).status == 200
                counts.append(tracer.changes)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    print(f"changes of file before a first token: {counts}")
    # About 255, plus about 37 for each step that has begun by then (two on a busy machine)
    assert 50 < min(counts) <= 340
