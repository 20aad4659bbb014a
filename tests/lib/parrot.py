"""A model with scripted answers: an engine on random weights whose tokens are replaced.

Clients and tests of tools need a model that calls them. Real ones are large, and none does so on
demand. Here the user's last message contains the answer:

    say: <think>Easy.</think>It is 8.

After a tool's result, the answer quotes the result. Everything else is real: the template, the
engine, its steps, and the stream of text, in which each token is one byte.

    python tests/lib/parrot.py 8123           # serve it to other clients
    python tests/lib/parrot.py 8123 --tags    # with calls written in tags, as Qwen 3 Coder does
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernels import device  # noqa: F401  imported first, as in our programs

# isort: split
from checkpoints import EOS, make_checkpoint, make_tokenizer
from servers import Server
from tokenizers import AddedToken

from engine.loop import Loop, Stopwatch
from nanobatch import Engine
from server.app import APIServer
from server.http import Options
from step_output import StepOutput

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather in a city.", "parameters": CITY}
TIME = {"name": "get_time", "description": "The time.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, TIME)]
FLAT = [{"type": "function", **each} for each in (WEATHER, TIME)]
SCHEMAS = [
    {"name": each["name"], "description": "What it does.", "input_schema": each["parameters"]}
    for each in (WEATHER, TIME)
]
PARIS = {"city": "Paris"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLS = CALL + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nIt is easy.\n</think>\n\n"
# In the style of Hermes and Qwen
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
    {{- 'Answer with <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""


# In the style of Qwen 3 Coder
HERMES = """\
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
"""
TAGS = """\
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value | string if value is not mapping else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
"""
IN_TAGS = TEMPLATE.replace(HERMES, TAGS)
assert IN_TAGS != TEMPLATE


def said(text: str) -> dict:
    return {"role": "user", "content": f"say: {text}"}


def answer_to(prompt: str) -> str:
    if "<|im_start|>" not in prompt:
        return "Hello there."
    turn = prompt.split("<|im_start|>")[-2].split("\n", 1)[1].rpartition("<|im_end|>")[0]
    if turn.startswith("<tool_response>"):
        result = turn.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        return f"The tool says: {result}"
    _, is_told, text = turn.partition("say: ")
    return text if is_told else "Hello there."


def teach(engine: Engine) -> None:
    """Replace the engine's answers with those of `answer_to`."""
    submit = engine.submit

    def wrapped(prompt: Any, *arguments: Any, **options: Any):
        with engine.changed:
            handle = submit(prompt, *arguments, **options)
            if handle.sampling.embeds:
                return handle
            text = engine.text.tokenizer.decode(handle.request.prompt, skip_special_tokens=False)
            script = [*engine.text.encode(answer_to(text))[1:], EOS]
            append_token = handle.append_token

            def scripted(output: StepOutput, *rest: Any) -> str | None:
                token = script[min(len(handle.tokens), len(script)) - 1]
                handle.tokens[-1] = token
                return append_token(output._replace(token=token), *rest)

            handle.append_token = scripted
        return handle

    engine.submit = wrapped


class Parrot:
    """A server in this process whose model has scripted answers."""

    def __init__(
        self,
        port: int = 0,
        slots: int = 4,
        max_len: int = 4096,
        template: str = TEMPLATE,
        is_taught: bool = True,
        marks: Sequence[str] = (),
        **options: Any,
    ):
        self._place = tempfile.TemporaryDirectory()
        folder = Path(self._place.name) / "parrot"
        make_checkpoint(folder, seed=1, max_position_embeddings=max_len)
        (folder / "chat_template.jinja").write_text(template)
        if marks:  # added but not special, as in Qwen's tokenizer
            tokenizer = make_tokenizer()
            tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
            tokenizer.save(str(folder / "tokenizer.json"))
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
        self.engine = Engine.load(folder, slots=slots, max_len=max_len, embeds=True)
        if is_taught:
            teach(self.engine)
        self.api = APIServer(Options(port=port, **options)).start()
        self.loop = Loop(self.engine, clock=Stopwatch()).start()
        self.api.open(self.engine, self.loop, "parrot")

    def close(self) -> None:
        self.api.close()
        self.loop.stop()
        self.engine.close()
        self._place.cleanup()


class Taught(Server):
    """A server in this process, with the interface of one in another process."""

    def __init__(self, **options):
        self.parrot = Parrot(**options)
        self.address = self.parrot.api.address
        self.host, _, port = self.address.removeprefix("http://").rpartition(":")
        self.port = int(port)

    def __exit__(self, *exception) -> None:
        self.parrot.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--tags", action="store_true", help="the template writes calls in tags")
    parser.add_argument("--max-len", type=int, default=16384)
    args = parser.parse_args()
    template = IN_TAGS if args.tags else TEMPLATE
    parrot = Parrot(args.port, max_len=args.max_len, template=template, aliases=("*",))
    print(parrot.api.address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
