"""The HTTP server: OpenAI's and Anthropic's protocols.

    python serve.py --model demo
    curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Why batch?"}]}' \
        -H 'Content-Type: application/json'

The socket is bound first; until the model is loaded, clients get 503. After the first signal, running
answers have `DRAIN_S` seconds to finish; the second stops the process without waiting for them.

Before this: `ask.py`, the smallest user of the engine. Next: `server/app.py`, what happens to a
request.
"""

from __future__ import annotations

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
from errno import EADDRINUSE
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from base import error_reports
from base.sandbox import BusyError
from base.validation import one_line, printable, shown
from cli import config_file
from cli import options as cli
from distributed import environment
from engine.idle_unload import Idle
from engine.loop import Loop
from engine.turns import Turns
from kernels import library
from policies import POLICIES
from sampling_params import advised
from server.access_log import AccessLog
from server.app import DRAIN_S, APIServer
from server.http import Options
from server.model_pool import ModelPool, PooledModel

if TYPE_CHECKING:
    from nanobatch import Engine


def options() -> cli.CommandLine:
    says = "Answer programs that speak OpenAI's or Anthropic's protocols."
    parser = cli.CommandLine("serve.py", description=says)
    add = parser.add_argument
    parser.add_engine(POLICIES, "4", "8192, or what the model allows", has_models=True)
    says = (
        "for weights and slabs of all models that are loaded (default: what is free, less a fifth)"
    )
    parser.add_read("--memory", partial(cli.read_size, "--memory"), says, metavar="SIZE")
    says = "the address to listen on (default: 127.0.0.1, for this machine alone)"
    add("--host", default="127.0.0.1", help=says)
    says = "0 takes any that is free (default: 8000)"
    parser.add_whole("--port", 0, 65535, says, default=8000)
    says = "requests that may wait; more are refused with 429 (default: 256)"
    parser.add_whole("--max-queue", 1, 10**6, says, default=256)
    parser.add_max_tokens()
    says = "seconds idle until the weights are unloaded"
    parser.add_whole("--unload-after", 1, 10**6, says, metavar="SECONDS")
    add("--embeddings", action="store_true", help="the model embeds, though no file says so")
    parser.add_keys()
    add(
        "--log-file",
        metavar="FILE",
        help="write a line for each request here (default: standard error)",
    )
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the options. A wrong value ends the program with one line and exit code 2."""
    parser = options()
    args = parser.parse_args(config_file.expand(parser, "serve", arguments))
    args.models = named_once(parser, args.model)
    args.given = arguments
    try:
        if environment.backend() and len(args.models) > 1:
            raise ValueError("--model: several ranks share one model; give one")
        if not (args.models or is_loopback(args.host) or environment.backend()):
            raise ValueError(
                f"--host {shown(args.host)}: others can reach it, so name the model to serve: --model"
            )
        if args.unload_after and environment.backend():
            raise ValueError("--unload-after: several ranks share the model; leave it out")
        args.log = sys.stderr
        if args.log_file:
            args.log = open(args.log_file, "a", encoding="utf-8", errors="replace")  # noqa: SIM115
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def named_once(parser: cli.CommandLine, models: list[tuple[str, str]]) -> dict[str, str]:
    """Return the models of all `--model` options, by name. Exit with a usage error if two have one name."""
    found: dict[str, str] = {}
    for name, model in models:
        if name in found:
            parser.error(
                f"--model: two are called {shown(name)}; give one another name: NAME=MODEL"
            )
        found[name] = model
    return found


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def options_of(args: argparse.Namespace, name: str, model: str) -> argparse.Namespace:
    """Return the options for one model, including its own tables in the `--config` file."""
    parser = options()
    own = parser.parse_args(config_file.expand(parser, "serve", args.given, (model, name)))
    own.model = model
    return own


def say(words: str, is_last: bool = True) -> None:
    """Print a line on standard error. On a terminal it replaces the progress of loading."""
    line = f"nanobatch: {printable(words)}"
    end = "\n"
    if sys.stderr.isatty():
        if not is_last:  # a wrapped line could not be erased
            line = line[: shutil.get_terminal_size().columns - 1]
            end = ""
        line = f"\r\033[K{line}"
    print(line, end=end, file=sys.stderr, flush=True)


def follow(args: argparse.Namespace) -> int:
    """Run a shard of the model, without a server, on every rank but the first (`distributed/group.py`)."""
    try:
        engine = load(args)
        return engine.lifecycle.follow()
    except (ValueError, OSError, RuntimeError) as error:
        say(one_line(error))
        return 2


def bind(args: argparse.Namespace, host: str, port: int, given: str) -> APIServer:
    """Bind the port before anything is loaded. `given`: the options, for the error message."""
    keys = (args.api_key, args.watch_key)
    names = (tuple(args.allow_host), tuple(args.alias))
    options = Options(host, port, *keys, *names, tuple(args.trust_proxy), args.max_tokens)
    try:
        server = APIServer(options)
    except OSError as error:  # for example, the port is in use
        remedy = "; choose another port, or 0 for a free one" * (error.errno == EADDRINUSE)
        raise ValueError(f"{given}: {error.strerror or error}{remedy}") from None
    if server.warning:
        say(server.warning)
    return server


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if environment.backend() or not args.models:
        args.model = next(iter(args.models.values()), "demo")
    if environment.rank():
        return follow(args)
    try:
        server = bind(args, args.host, args.port, f"--host {args.host} --port {args.port}")
    except ValueError as error:
        say(str(error))
        return 2
    with AccessLog(args.log) as log:
        server.log = log.add
        server.advise = say
        return serve(server, args)


def serve(server: APIServer, args: argparse.Namespace) -> int:
    """Serve until a signal arrives and running answers have finished. Return the exit code.

    subtle: the signal handler records the signal or exits. If it raised an exception, that could happen at
    any line, even between acquiring a lock and the `try` that releases it; the server would then hang.
    """
    signals = SimpleQueue()  # after the first, answers may finish; the second stops the process
    is_awaited = False
    overdue = math.inf

    def on_signal(number: int, _) -> None:
        nonlocal overdue
        # Exit immediately while a model is downloaded or loaded, because that cannot be interrupted, and
        # if the main thread has not handled the first signal, or hangs after it
        is_lost = not is_awaited and not signals.empty()
        if server.models is None or is_lost or time.monotonic() > overdue:
            os._exit(0)
        overdue = min(overdue, time.monotonic() + 2 * DRAIN_S)
        signals.put(number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    server.start()
    engine = None
    code = 0
    models = None
    try:
        found = args.models or find_models()
        if len(found) > 1:
            say(
                f"reading the files of {len(found)} models; {server.address} answers 503 until then"
            )
            models = open_pool(server, args, found)
        else:
            engine = open_one(server, args, *next(iter(found.items())))
        is_awaited = True
        if server.wait(signals):
            server.drain(DRAIN_S, lambda: not signals.empty())
    except (ValueError, OSError, RuntimeError) as error:
        say(one_line(error))
        code = 2
    server.close()
    if models:
        models.close()
    if engine:
        engine.close()
    # The exit code is final, so ignore further signals
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    return code


def find_models() -> dict[str, str]:
    """Find all models on this machine that can be served; the demo comes last."""
    if environment.backend():
        return {"demo": "demo"}
    from cli import model_list

    names = [line.name for line in model_list.listed() if line.served == "yes"]
    return {name: name for name in sorted(names, key=lambda name: name == "demo")}


def open_one(server: APIServer, args: argparse.Namespace, name: str, model: str) -> Engine:
    """Serve one model, which is loaded at start."""
    say(f"loading {name}; {server.address} answers 503 until then")
    own = options_of(args, name, model)
    engine = load(own, report=lambda stage: say(stage, is_last=False), embeds=own.embeddings)
    loop = engine.serving()
    if args.unload_after:
        loop = Loop(engine, Idle(engine, args.unload_after, cli.say))
    server.open(engine, loop.start(), name)
    say(f"{name} at {server.address}/v1; {engine.summary}")
    if engine.text.unfit:
        say(engine.text.unfit)
    return engine


def open_pool(server: APIServer, args: argparse.Namespace, found: dict[str, str]) -> ModelPool:
    """Serve several models, each loaded by its first request."""
    from engine.model_headers import ModelFacts
    from kernels import device

    free = device.free_memory()
    memory = args.memory or (free and int(0.8 * free))
    own = {name: options_of(args, name, model) for name, model in found.items()}

    def read_facts(name: str) -> ModelFacts:
        each = own[name]
        asked = cli.engine_options(each) | {"slots": each.slots or 4, "usual_len": 8192}
        fact = ModelFacts.from_files(each.model, asked, memory)
        advised(fact.place)  # raises ValueError if its settings are wrong
        return fact

    facts = {}
    for name in own:
        try:
            facts[name] = read_facts(name)
        except ValueError as error:
            if args.models:  # the user named these models
                raise
            say(f"{name} is left out: {one_line(error)}")
    if not facts:
        raise ValueError("no model fits; give more --memory, or fewer --slots")
    turns = Turns()

    def load_one(model: PooledModel, report: Callable[[str], None]) -> tuple[Engine, Loop]:
        each = own[model.name]
        each.slots, each.max_len = model.facts.slots, model.facts.max_len
        engine = load(each, report=report, embeds=each.embeddings)
        return engine, Loop(engine, turns=turns).start()

    models = ModelPool(
        [PooledModel(name, fact) for name, fact in facts.items()],
        load_one,
        check=lambda model: read_facts(model.name),
        memory=memory or math.inf,
        unload_after=args.unload_after,
        say=say,
        **server.pool_options,
    )
    server.open_pool(models.start())
    say(
        f"{len(facts)} models at {server.address}/v1, loaded by their first requests; {models.sums}"
    )
    return models


def load(args: argparse.Namespace, report: Callable[[str], None] | None = None, **how) -> Engine:
    """Load an `Engine`. With one model, MLX is first imported here. `report` receives the stages of loading."""
    if report:
        report("starting MLX")
        library.say = how["report"] = report  # show its messages among the stages of loading
    from nanobatch import Engine

    options = cli.engine_options(args)
    options |= {"slots": args.slots or 4, "usual_len": 8192, "max_queue": args.max_queue}
    engine = Engine.load(args.model, **options, **how)
    # Log the traceback, so that a bug in `forward` is not mistaken for a wrong option
    with error_reports.shown("the first step failed"):
        engine.runner.warm_up()
    if engine.text.has_template:
        with suppress(ValueError):
            engine.text.render([{"role": "user", "content": "compiles the template"}])
    # Compile a grammar now: the first time, llguidance reads the tokenizer, and holds the GIL for a second
    # if there are 152,000 tokens
    with suppress(ValueError, BusyError):  # requests with a grammar will report the reason
        engine.text.grammar({"json": "{}"})
    gc.collect()
    # Objects from loading live until exit, so the garbage collector need not scan them during a step
    gc.freeze()
    return engine


if __name__ == "__main__":
    cli.run(main)
