"""OpenAI's embeddings protocol: POST /v1/embeddings.

Each text is a prompt whose request finishes after prefill, without an answer. `Submission` submits a
few texts at a time, so that chats do not wait behind thousands of them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from server.body_reader import BodyReader, invalid
from server.choice import Choice
from server.openai import read_prompts
from server.protocol_adapter import ParsedRequest, ProtocolAdapter, Usage
from step_output import unit_vector

MAX_TEXTS = 2048  # texts in one request


def parse_request(request: BodyReader) -> ParsedRequest:
    prompts = read_prompts(request, "input", MAX_TEXTS)
    form = request.one_of("encoding_format", ("float", "base64"), "float")
    dimensions = request.whole("dimensions", 1)
    request.reject_unknown()
    settings = {"embeds": True}
    return ParsedRequest(
        prompts, settings=settings, fields={"form": form, "dimensions": dimensions}
    )


class Embedding(ProtocolAdapter):
    """The adapter for OpenAI's embeddings protocol, which has no streams."""

    parse_request = staticmethod(parse_request)
    prompt = "input"
    prefix = "embd-"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict:
        data = []
        for index, choice in enumerate(choices):
            try:
                vector = unit_vector(choice.handle.vector, self._parsed.fields["dimensions"])
            except ValueError as error:
                raise invalid("dimensions", str(error)) from None
            # Clients expect little-endian bytes, the native order of every machine that MLX supports
            written = vector.tolist()
            if self._parsed.fields["form"] == "base64":
                written = base64.b64encode(vector).decode()
            data.append({"object": "embedding", "index": index, "embedding": written})
        counts = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        return {"object": "list", "data": data, "model": self._model, "usage": counts}
