"""A running server's model for the terminal (`ask.py --url`), over OpenAI's protocol."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlsplit

from base.installation import command
from base.validation import printable
from cli import http_client
from cli.chat_model import REMEDY, SETTABLE, Outgrown
from cli.http_client import why
from cli.options import say
from cli.text_output import PROGRESS_S
from engine.handle import Result
from engine.snapshot import Metrics
from sampling_params import SamplingParams
from text.tool_parser import ParsedPart

PATIENCE_S = 60.0  # timeout for connecting, and for the start of an answer's stream


class ServerModel:
    """A model on a server. `settings`: the `SamplingParams` that the user set; the server chooses the rest."""

    def __init__(self, url: str, key: str, name: str | None, settings: Mapping[str, Any]):
        self._url = url
        self._key = key
        self._fields = {"model": name} if name else {}
        self._settings = settings
        self._asked = 0  # number of answers so far
        facts = self._look_up(name)
        length = facts.get("max_model_len")
        self.length = length if isinstance(length, int) else 0
        self.summary = printable(f"{facts.get('id', '')} @ {urlsplit(url).netloc}")

    def _look_up(self, name: str | None) -> Mapping[str, Any]:
        """Return the server's description of the named model, or of its first model."""
        answer = self._request("GET", f"/v1/models/{quote(name)}" if name else "/v1/models")
        try:
            found = json.loads(answer.read(2**20))
            return found if name else found["data"][0]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(f"--url {self._url}: not a server of OpenAI's protocol") from None

    def _request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body)
        try:
            answer = http_client.request(self._url, method, path, self._key, PATIENCE_S, data)
        except (OSError, http.client.HTTPException) as error:
            words = f"{why(error)}; is a server there? ({command('serve.py')})"
            raise ValueError(f"--url {self._url}: {words}") from None
        if answer.status == 200:
            return answer
        words, code = http_client.refusal(answer)
        if code == "context_length_exceeded":
            raise Outgrown(words)
        raise ValueError(f"--url {self._url}: {words}")

    def settings(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        given = given_in({**self._settings, **changes})
        SamplingParams(**given)
        return {name: given.get(name, "default") for name in SETTABLE}

    def size_of(self, text: str) -> str:
        return f"{len(text):,} characters"

    def ask(
        self, messages: Sequence[Mapping[str, str]], changes: Mapping[str, Any]
    ) -> ServerAnswer:
        try:
            return self._submit("/v1/chat/completions", {"messages": messages}, changes)
        except Outgrown as error:
            raise Outgrown(f"{error}; {REMEDY}") from None

    def submit(self, prompt: str, is_raw: bool) -> ServerAnswer:
        """Submit a prompt as a question; as plain text if `is_raw`, or if the model has no chat template."""
        if not is_raw:
            messages = [{"role": "user", "content": prompt}]
            try:
                return self._submit("/v1/chat/completions", {"messages": messages})
            except ValueError as error:
                if "no chat template" not in str(error):
                    raise
            say("this model has no chat template; prompts are taken as plain text")
        return self._submit("/v1/completions", {"prompt": prompt})

    def _submit(
        self, path: str, prompt: dict[str, Any], changes: Mapping[str, Any] = {}
    ) -> ServerAnswer:
        given = given_in({**self._settings, **changes})
        if grammar := given.pop("grammar", None):
            given["guided_json"] = grammar["json"]
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        answer = self._request("POST", path, self._fields | prompt | given | stream)
        answer.line.settimeout(None)  # some servers send nothing during prefill
        self._asked += 1
        return ServerAnswer(self._asked, answer, began)


def given_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have an effect."""
    return {
        name: value
        for name, value in settings.items()
        if value not in (None, (), []) and value is not False
    }


class ServerAnswer:
    """An answer whose events are still arriving. A thread reads them, so that the server does not have to wait
    while this client shows another answer."""

    def __init__(self, id: int, answer: http.client.HTTPResponse, began: float):
        self.id = id
        self._answer = answer
        self._began = began
        self._comment = ""  # the newest comment, such as "prompt 512/2048, 182 tokens/s"
        self._parts: queue.SimpleQueue[ParsedPart | None] = queue.SimpleQueue()
        self._first: list[ParsedPart | None] = []  # taken from the queue but not yielded yet
        self._texts: list[str] = []
        self._times: list[float] = []  # arrival times of the parts
        self._usage: dict[str, Any] = {}
        self._reason = ""
        self._error: str | None = None
        self._is_cancelled = False
        threading.Thread(target=self._read, name="answer", daemon=True).start()

    def _read(self) -> None:
        try:
            for event in http_client.read_events(self._answer, self._note):
                self._receive(event)
            if not self._reason and not self._error:
                self._error = "the server closed the connection"
        except Exception as error:  # the server may send anything
            self._error = why(error)
        self._parts.put(None)
        self._answer.close()
        self._answer.line.close()

    def _note(self, comment: str) -> None:
        self._comment = comment

    def _receive(self, event: Any) -> None:
        if error := event.get("error"):
            self._error = printable(error["message"])
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._reason = choice.get("finish_reason") or self._reason
            delta = choice.get("delta") or {}
            texts = {
                "reasoning": delta.get("reasoning_content"),
                "content": delta.get("content") or choice.get("text"),
            }
            for kind, text in texts.items():
                if text:
                    self._times.append(time.perf_counter())
                    self._texts.append(text)
                    self._parts.put(ParsedPart(kind, text))

    def wait_for_text(self, show: Callable[[str], None]) -> None:
        try:
            while not self._first:
                try:
                    self._first.append(self._parts.get(timeout=PROGRESS_S))
                except queue.Empty:
                    show(f"    {self._comment}" if self._comment else "")
        finally:
            show("")

    def __iter__(self) -> Iterator[ParsedPart]:
        self.wait_for_text(lambda words: None)
        part = self._first.pop()
        while part:
            yield part
            part = self._parts.get()
        self._first.append(None)

    def cancel(self) -> None:
        self._is_cancelled = True
        with suppress(OSError):
            self._answer.line.shutdown(socket.SHUT_RDWR)

    def result(self) -> Result:
        """Wait for the end of the answer. Drop parts that were not yielded."""
        for _ in self:
            pass
        reason = "error" if self._error else self._reason
        error = self._error
        if self._is_cancelled:
            reason, error = "cancelled", None
        return Result("".join(self._texts), [], reason, self._metrics(), None, error)

    def _metrics(self) -> Metrics:
        usage, times = self._usage, self._times
        output = usage.get("completion_tokens", len(times))
        seconds = times[-1] - times[0] if times else 0.0
        return Metrics(
            queued_s=None,
            ttft_s=times[0] - self._began if times else None,
            tokens_per_s=(output - 1) / seconds if seconds else None,
            itl_mean_s=None,
            itl_p95_s=None,
            itl_max_s=None,
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            output_tokens=output,
            cached_from="slot",
        )
