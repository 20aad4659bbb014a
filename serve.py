"""The HTTP server, for programs that speak OpenAI's or Anthropic's protocols. We call it the
*door*, and an HTTP request a *visit*.

    python serve.py --model demo
    curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Why batch?"}]}' \
        -H 'Content-Type: application/json'

The problem. To load a model takes seconds, or minutes, and a server that is told to end is in the
middle of answers. So the socket is bound first: until the model is loaded, clients get 503. The
first signal lets answers come to their end, and the second ends them.

Before this: `ask.py`, the smallest user of the engine. Next: `server/app.py`, what happens to a
request.
"""

from __future__ import annotations

# First, because it opens the chapters of `--book` in the place of ours
from runtime import cli  # isort: split

import argparse
import gc
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from kernels import blas
from policies import POLICIES
from runtime import errors
from runtime.idle import Idle
from runtime.loop import Loop
from runtime.validation import one_line, printable
from server.access_log import AccessLog
from server.app import DRAIN_S, APIServer
from server.http import Options
from text.sandbox import BusyError


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """A wrong value gets one line and exit code 2, before anything is loaded."""
    says = "Answer programs that speak OpenAI's or Anthropic's protocols."
    parser = cli.CommandLine("serve.py", description=says)
    add = parser.add_argument
    parser.add_engine(POLICIES, "4", "8192, or what the model allows")
    says = "the address to listen on (default: 127.0.0.1, for this machine alone)"
    add("--host", default="127.0.0.1", help=says)
    says = "0 takes any that is free (default: 8000)"
    parser.add_whole("--port", 0, 65535, says, default=8000)
    says = "requests that may wait; more are refused with 429 (default: 256)"
    parser.add_whole("--max-queue", 1, 10**6, says, default=256)
    says = "idle for so long, let go of the weights"
    parser.add_whole("--unload-after", 1, 10**6, says, metavar="SECONDS")
    add("--embeddings", action="store_true", help="the model embeds, though no file says so")
    parser.add_keys()
    add(
        "--log-file",
        metavar="FILE",
        help="where a line for each request goes (default: standard error)",
    )
    args = parser.parse_args(arguments)
    try:
        if args.unload_after and cli.backend():
            raise ValueError("--unload-after: several ranks share the model; leave it out")
        args.log = sys.stderr
        if args.log_file:
            args.log = open(args.log_file, "a", encoding="utf-8", errors="replace")  # noqa: SIM115
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def say(words: str, is_last: bool = True) -> None:
    """A line on standard error. On a terminal, the next one takes the place of what was said while
    the model was loading."""
    line = f"nanobatch: {printable(words)}"
    end = "\n"
    if sys.stderr.isatty():
        if not is_last:  # a line that is broken could not be taken back
            line = line[: shutil.get_terminal_size().columns - 1]
            end = ""
        line = f"\r\033[K{line}"
    print(line, end=end, file=sys.stderr, flush=True)


def follow(args: argparse.Namespace) -> int:
    """On every rank but the first (`distributed/group.py`): no door, but a share of the model."""
    try:
        return load(args).follow()
    except (ValueError, OSError, RuntimeError) as error:
        say(one_line(error))
        return 2


def open_door(args: argparse.Namespace, host: str, port: int, given: str) -> APIServer:
    """Bind the port, before anything is loaded. `given`: the options that name it."""
    keys = (args.api_key, args.watch_key)
    options = Options(host, port, *keys, tuple(args.allow_host), tuple(args.alias))
    try:
        door = APIServer(options)
    except OSError as error:  # the port is taken
        raise ValueError(f"{given}: {error.strerror or error}") from None
    if door.warning:
        say(door.warning)
    return door


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if cli.rank():
        return follow(args)
    try:
        door = open_door(args, args.host, args.port, f"--host {args.host} --port {args.port}")
    except ValueError as error:
        say(str(error))
        return 2
    with AccessLog(args.log) as log:
        door.log = log.add
        door.hint = say
        return serve(door, args)


def serve(door: APIServer, args: argparse.Namespace) -> int:
    """From a bound socket to the end of the last answer; returns the exit code.

    subtle: a signal is noted, and raises nothing. An exception may come at any line, also where a
    lock has been taken and is not yet sure to be released: the server then waited for ever.
    """
    signals = SimpleQueue()  # the first lets answers end, the second ends them
    is_awaited = False
    overdue = math.inf

    def note(number: int, _) -> None:
        nonlocal overdue
        # A download, or a layer that is being read, cannot be interrupted, but it can be left. So
        # can a main thread that does not come to the first signal, or hangs behind it.
        is_lost = not is_awaited and not signals.empty()
        if door.served is None or is_lost or time.monotonic() > overdue:
            os._exit(0)
        overdue = min(overdue, time.monotonic() + 2 * DRAIN_S)
        signals.put(number)

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)
    door.start()
    engine = None
    code = 0
    try:
        name = cli.name_of(args.model)
        say(f"{door.address} answers 503 while {name} is being loaded")
        engine = load(args, report=lambda stage: say(stage, is_last=False), embeds=args.embeddings)
        loop = engine.serving()
        if args.unload_after:
            loop = Loop(engine, Idle(engine, args.unload_after))
        door.open(engine, loop.start(), name)
        say(f"{name} at {door.address}/v1; {engine.summary}")
        if engine.text.unfit:
            say(engine.text.unfit)
        is_awaited = True
        if door.wait(signals):
            door.drain(DRAIN_S, lambda: not signals.empty())
    except (ValueError, OSError, RuntimeError) as error:
        say(one_line(error))
        code = 2
    door.close()
    if engine:
        engine.close()
    # Whatever comes now, the exit code is decided
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    return code


def load(args: argparse.Namespace, report: Callable[[str], None] | None = None, **how) -> Any:
    """An `Engine`. This is the first code to import MLX. The screen gives a clock and a report."""
    if report:
        report("starting MLX")
        blas.say = report  # what it has to say belongs among the stages of loading
    from nanobatch import Engine

    sizes = {"slots": args.slots or 4, "max_len": args.max_len, "usual_len": 8192}
    options = {"policy": args.policy, "max_queue": args.max_queue, "guesses": args.guesses}
    options |= {"kv": args.kv, "attention": args.attention}
    engine = Engine.load(args.model, report=report, **options, **sizes, **how)
    # Else a bug in `forward` would look like a wrong option
    with errors.shown("the first step failed"):
        engine.runner.warm_up()
    if engine.text.has_template:
        with suppress(ValueError):
            engine.text.render([{"role": "user", "content": "compiles the template"}])
    # The library reads the tokenizer anew, and holds Python's lock: with 152,000 tokens for a second
    with suppress(ValueError, BusyError):  # a request with a grammar is told why
        engine.text.grammar({"json": "{}"})
    gc.collect()
    # What loading has left is never garbage, so the collector need not search it in mid-step
    gc.freeze()
    return engine


if __name__ == "__main__":
    cli.run(main)
