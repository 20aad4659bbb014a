"""Prompts in, answers out: the plain command line, and the smallest user of the engine.

    python ask.py "Count from 3 to 12." "Why batch?"
    python ask.py --chat
    python ask.py --url http://127.0.0.1:8000 "Why batch?"

All prompts are submitted together. The answers stream in the order of the prompts, each followed by a line of
statistics. This is all of the engine that a program needs: `Engine.load`, `submit` once for each prompt,
and a thread that steps the engine while the main thread reads. (`engine.serving()` starts it. While there is work,
it calls `Engine.step`, the heart of the engine.) With `--chat`, or without a prompt in a terminal, the
program is a chat (`cli/terminal_chat.py`). With `--url` a running server answers (`cli/server_model.py`).

Where next: `llama.py`, chapter 1 of the book; or `Engine.step` in `nanobatch.py`, which generates the tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from base.status_line import StatusLine
from base.untrusted_files import read_some
from base.validation import one_line, printable
from cli import config_file, model_list, terminal_chat
from cli import options as cli
from cli.chat_model import Answer, EngineAnswer
from cli.http_client import base_of
from cli.options import say
from cli.server_model import ServerModel
from cli.text_output import WordWrap
from distributed import environment
from nanobatch import POLICIES, Engine, QueueFull, SamplingParams
from sampling_params import ADVICE, GRAMMAR, advised
from text.tool_formats import OutputFormat

KEY = "NANOBATCH_API_KEY"


def options() -> cli.CommandLine:
    says = "Run prompts through a model, all at once."
    parser = cli.CommandLine("ask.py", description=says)
    add = parser.add_argument
    reads = "'-': read standard input. Without one, talk in a terminal, else read standard input."
    reads += " Everything after '--' is a prompt."
    add("prompts", nargs="*", metavar="PROMPT", help=f"what to answer. {reads}")
    lists = "list the models on this machine, or in and below a folder, and which can be served"
    add("--list", nargs="?", const="", metavar="DIR", help=lists)
    add("--chat", action="store_true", help="chat: each question continues the conversation")
    add("--prompt", action="append", default=[], help="the same as PROMPT; may be repeated")
    plain = "take prompts as plain text, even if the model has a chat template"
    add("--raw", action="store_true", help=plain)
    add("--max-tokens", type=int, help="longest answer in tokens (default: to the end of the slot)")
    slots = "one for each prompt, up to 8"
    parser.add_engine(POLICIES, slots, "1024, or what fits", is_checked=False)
    says = "ask a running server, such as http://127.0.0.1:8000; options of the engine are its own"
    parser.add_read("--url", partial(base_of, "--url"), says, metavar="URL")
    add("--api-key", help="with --url: the server's key ($NANOBATCH_API_KEY)")
    advice = "(default: as generation_config.json advises"
    add("--temperature", type=float, help=f"0 is greedy {advice}, else 0)")
    add(
        "--top-p",
        type=float,
        help=f"keep the likeliest tokens that reach this probability together {advice})",
    )
    add("--top-k", type=int, help=f"keep the k likeliest tokens {advice})")
    add(
        "--min-p",
        type=float,
        help=f"keep tokens at least this fraction as likely as the likeliest {advice})",
    )
    add(
        "--repetition-penalty",
        type=float,
        help=f"above 1, recent tokens become less likely {advice})",
    )
    add("--seed", type=int, help="the same seed gives the same tokens")
    add("--stop", action="append", default=[], help="a text that ends the answer; may be repeated")
    add("--json", metavar="FILE", help="answer with JSON of the schema in this file")
    add("--ignore-eos", action="store_true", help="continue after the model's end token")
    return parser


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    # Everything after "--" is a prompt, even if it looks like an option
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = options()
    args = parser.parse_intermixed_args(config_file.expand(parser, "ask", arguments[:end]))
    args.prompts += arguments[end + 1 :]
    try:
        if args.url:
            args.api_key = server_key(args.api_key)
        else:
            args.model = cli.read_model("demo" if args.model is None else args.model)
    except ValueError as error:
        parser.error(str(error))
    return args


def server_key(given: str | None) -> str:
    key = os.environ.get(KEY) if given is None else given
    return "" if key is None else cli.read_key("--api-key", KEY, key)


def main(arguments: list[str] | None = None) -> int:
    """Run all prompts and stream the answers in order. Return 1 if a request failed, 2 for a user's mistake."""
    args = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    answers: list[Answer] = []
    try:
        if args.list is not None:
            return show_models(args.list)
        prompts = [*args.prompts, *args.prompt]
        is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        talks = args.chat or (is_terminal and not prompts and not args.raw)
        prompts = prompts or ["-"] * (not talks)
        stdin = ""
        if "-" in prompts and not environment.rank():
            stdin = sys.stdin.read()
            if not stdin:
                raise ValueError("standard input has no prompt; write one there, or as an argument")
        prompts = [stdin if prompt == "-" else prompt for prompt in prompts]
        args.grammar = {"json": read_schema(args.json)} if args.json else None
        slots = args.slots or (1 if talks else min(len(prompts), 8))
        asked = {f.name: vars(args)[f.name] for f in fields(SamplingParams) if f.name in vars(args)}
        for name in ADVICE:
            if asked[name] is None:  # the model's generation_config.json decides
                del asked[name]
        SamplingParams(**asked)  # reports a mistake before anything is loaded
        if args.url:
            model = ServerModel(args.url, args.api_key, args.model, asked)
            if talks:
                return terminal_chat.chat(model, model.summary, prompts)
            answers = [model.submit(prompt, args.raw) for prompt in prompts]
            say(model.summary)
            for answer, prompt in zip(answers, prompts, strict=True):
                show(answer, prompt)
            return exit_code(answers)
        options = cli.engine_options(args)
        options |= {"slots": slots, "usual_len": 8192 if talks else 1024}
        with Engine.load(args.model, **options) as engine:
            if engine.ranks.rank:  # only rank 0 answers (distributed/group.py)
                return engine.lifecycle.follow()
            sampling = SamplingParams(**advised(engine.text.folder) | asked)
            if talks:
                return terminal_chat.chat_in_terminal(engine, sampling, prompts)
            output_format = engine.text.output_format if terminal_chat.columns() else OutputFormat()
            for prompt in prompts:
                handle = engine.submit(engine.text.ask(prompt, args.raw), sampling)
                answers.append(EngineAnswer(handle, output_format))
            say(engine.summary)
            if not engine.text.has_template and not args.raw:
                say("this model has no chat template; prompts are taken as plain text")
            with engine.serving():
                for answer, prompt in zip(answers, prompts, strict=True):
                    show(answer, prompt)
            return exit_code(answers)
    except (ValueError, QueueFull) as error:
        say(one_line(error))
        return 2


def exit_code(answers: Sequence[Answer]) -> int:
    return 1 if any(answer.result().finish_reason == "error" for answer in answers) else 0


def read_schema(path: str) -> str:
    try:
        return read_some(path, GRAMMAR)
    except (OSError, ValueError) as error:
        raise ValueError(f"--json {path} cannot be read: {one_line(error)}") from None


def show_models(folder: str) -> int:
    """Print a table of local models, or of those in a folder. Their names are values for `--model`."""
    missing = ""
    if folder:
        found, missing = model_list.listed_in(Path(os.path.expanduser(folder)))
    else:
        found = model_list.listed()
    if not found:
        say(f"{folder}: {missing or 'no GGUF file and no model folder'}")
        return 0
    lines = [("model", "family", "parameters", "weights", "on disk", "in memory", "served"), *found]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    if missing:
        say(f"{folder}: {missing}")
    return 0


def show(answer: Answer, prompt: str) -> None:
    """Print one answer as it streams, and a line of statistics after it."""
    print(f"--- {answer.id}: {printable(' '.join(prompt.split()))[:100]}")
    width = terminal_chat.columns()
    wrap = WordWrap(width) if width else None
    answer.wait_for_text(StatusLine().show)
    for _, shown in terminal_chat.spoken(answer, is_dim=bool(width)):
        print(wrap.push(shown) if wrap else shown, end="", flush=True)
    print(wrap.flush() if wrap else "", end="")
    result = answer.result()
    m = result.metrics
    ttft = "-" if m.ttft_s is None else f"{m.ttft_s * 1000:.0f} ms"
    rate = "-" if m.tokens_per_s is None else f"{m.tokens_per_s:.0f} tokens/s"
    right = f", drafted {m.draft_tokens}, {m.accepted_tokens} accepted" if m.draft_tokens else ""
    print(
        f"\n    [{result.finish_reason}: {m.output_tokens} tokens, TTFT {ttft}, {rate}{right}]",
        flush=True,
    )
    if result.error:
        say(f"request {answer.id}: {one_line(result.error)}")


if __name__ == "__main__":
    cli.run(main)
