"""Samples: the contestants, the loop that drives them, and each sample in a process of its own.

The problem. A sample must inherit no other sample's memory, caches or threads, and what slows the
machine down must slow all columns down.

What this file keeps. One loop (`drive`) talks to all engines in the same words. Each sample has a
process of its own, and no such process outlives ours. Columns take turns.

Where next: `figures.py`, which makes figures of the times.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

from measure.dictation import Dictation, texts
from measure.fair import fair_figures
from measure.figures import (
    Delivery,
    Figures,
    closed_figures,
    decode_figures,
    floor_figures,
    guess_figures,
    long_figures,
    open_figures,
    step_figures,
    sums_of,
)
from measure.peers import PEERS, Errand, LlamaCpp, MlxLm, News
from measure.plan import (
    TURNS,
    Contestant,
    Setup,
    Spec,
    capacity,
    crowd_lengths,
)
from measure.turns import beside, busy_cores, compared, in_turn, median_ms
from nanobatch import Engine, Handle, QueueFull, Sampling
from parts import program
from parts.api.answer import first_other
from parts.api.handle import Result
from parts.api.views import Metrics, StepView
from parts.device import mlx as device
from parts.device.mlx import mx
from parts.ranks.meet import join

HOT = {"temperature": 1.0}
SETTINGS = {  # for `sampling`
    "logprobs=0": {"logprobs": 0},
    "logprobs=20": {"logprobs": 20},
    "logit_bias of 100,000 tokens": {"logit_bias": dict.fromkeys(range(100_000), 0.25)},
    "repetition_penalty=1.3": {"repetition_penalty": 1.3},
    "temperature=1": HOT,
    "top_k=40": {"top_k": 40, **HOT},
    "top_k=1000": {"top_k": 1000, **HOT},
    "min_p=0.1": {"min_p": 0.1, **HOT},
    "top_p=0.9": {"top_p": 0.9, **HOT},
    "top_p=0.9, temperature=1.5": {"top_p": 0.9, "temperature": 1.5},
}
SETTINGS["all of them"] = {
    name: value for settings in SETTINGS.values() for name, value in settings.items()
}
GUESSED = 3  # texts, or for several rows as many at a time
SCHEMA = {
    "type": "object",
    "properties": {
        f"is_the_{name}_of_this_order_known": {"type": "boolean"}
        for name in ("customer", "address", "shipment", "supplier", "warehouse", "discount")
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])
CHUNK = 128  # `chat`: from a multiple of it every version of nanobatch can go on
MANY = 32  # slots of `idle`
BURST = 24  # prompts of `busy`, as many as a burst of the screen has
PATIENCE_S = 1800  # for one sample


class Nanobatch:
    def __init__(self, spec: Spec, slots: int, max_len: int):
        self.engine = Engine.load(
            spec.folder,
            dtype=spec.dtype,
            policy=spec.contestant.split()[1],
            guesses=program.read_guesses(spec.guesses),
            slots=slots,
            max_len=max_len,
        )
        self.handles: dict[int, Handle] = {}  # those under way
        self.reported = Counter()  # how many tokens of each

    def submit(self, ask: Errand, **settings) -> int:
        handle = self.engine.submit(
            ask.prompt, Sampling(max_tokens=ask.max_tokens, ignore_eos=True, **settings)
        )
        self.handles[handle.id] = handle
        return handle.id

    def step(self) -> Iterator[News]:
        """For each request under way: the id, the new tokens, and whether the request has ended."""
        self.engine.step()
        for key, handle in list(self.handles.items()):
            if handle.finish_reason == "error":
                raise Failure(handle.error)
            if handle.finish_reason:
                del self.handles[key]
            tokens = handle.tokens[self.reported[key] :]
            self.reported[key] += len(tokens)
            yield key, tokens, handle.finish_reason is not None

    def close(self) -> None:
        self.engine.close()


def drive(
    contestant: Nanobatch | MlxLm | LlamaCpp,
    asks: Iterable[Errand],
    users: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Delivery]:
    """Send each ask when it is due, and step until all have ended. The answers are in the order of
    the asks.

    In a closed loop with so many `users`, an ask is due when a user is idle. In an open loop, an ask
    is due at the time that it names.
    """
    waiting = deque(asks)
    answers = []
    under_way = {}
    began = clock()

    def is_due(ask: Errand, now: float) -> bool:
        if users is not None:
            return len(under_way) < users
        return began + ask.at <= now and all(
            len(answer.times) >= ask.after for answer in under_way.values()
        )

    while waiting or under_way:
        now = clock()
        while waiting and is_due(waiting[0], now):
            ask = waiting.popleft()
            answers.append(Delivery(now if ask.after or users is not None else began + ask.at))
            under_way[contestant.submit(ask)] = answers[-1]
        if not under_way:
            sleep(max(0.0, began + waiting[0].at - now))
            continue
        came = list(contestant.step())
        now = clock()
        for key, tokens, has_ended in came:
            under_way[key].times += [now] * len(tokens)
            under_way[key].tokens += tokens
            if has_ended:
                del under_way[key]
    return answers


class Sample:
    """A contestant, warmed up, and prompts. The prompts are random, so that no engine can reuse
    computed prefixes."""

    def __init__(self, spec: Spec, slots: int | None = None):
        """`slots`: how many the engine has; by default one for each row."""
        self.spec = spec
        self.random = random.Random(0)
        self.longest = spec.length or max(spec.prompt, spec.late) + spec.output + spec.overlap
        if spec.contestant.startswith("nanobatch"):
            self.contestant = Nanobatch(spec, slots or spec.rows, self.longest)
        else:
            self.contestant = PEERS[spec.contestant](spec.folder, spec.rows, self.longest)
        if program.rank():  # of several processes (parts/ranks/ranks.py), one measures
            self.contestant.engine.follow()
            return
        drive(self.contestant, self.asks(spec.rows, output=min(spec.output, 16)))
        mx.reset_peak_memory()  # loading does not count

    def asks(
        self, count: int, prompt: int | None = None, output: int | None = None
    ) -> list[Errand]:
        """Asks with the spec's lengths, unless others are given."""
        ids = range(self.spec.vocabulary)
        prompt = prompt or self.spec.prompt
        output = output or self.spec.output
        return [Errand(self.random.choices(ids, k=prompt), output) for _ in range(count)]

    def decode(self) -> Figures:
        spec = self.spec
        asks = self.asks(spec.rows, output=spec.output + spec.overlap)
        return decode_figures(drive(self.contestant, asks), spec.output)

    def closed(self) -> Figures:
        users = self.spec.rows
        figures = closed_figures(drive(self.contestant, self.asks(4 * users), users), users)
        if not isinstance(self.contestant, LlamaCpp):
            figures["peak memory MiB"] = mx.get_peak_memory() / 2**20  # of MLX alone
        return figures

    def open(self) -> Figures:
        """Prompts come as a Poisson process: the times between them are exponential, and only
        scaled by the rate."""
        draw = random.Random(1)
        at = 0.0
        asks = []
        for length in crowd_lengths(self.spec.output):
            asks.append(Errand(self.asks(1)[0].prompt, length, at))
            at += draw.expovariate(1) / self.spec.rate
        return open_figures(drive(self.contestant, asks))

    def long(self) -> Figures:
        spec = self.spec
        for _ in range(2):  # once to warm up
            (alone,) = drive(self.contestant, self.asks(1, spec.late, 2))
        rows = self.asks(spec.rows - 1, output=spec.output + spec.overlap)
        late = Errand(self.asks(1, spec.late)[0].prompt, 2, after=min(32, spec.output // 4))
        *answers, last = drive(self.contestant, [*rows, late])
        return long_figures(answers, last, alone)

    def same(self) -> Figures:
        spec = self.spec
        asks = self.asks(spec.rows)
        usual = spec._replace(contestant="nanobatch continuous")
        with closing(Nanobatch(usual, spec.rows, self.longest)) as ours:
            mine = [answer.tokens for answer in drive(ours, asks)]
        theirs = [answer.tokens for answer in drive(self.contestant, asks)]
        tokens = spec.rows * spec.output
        places = map(first_other, mine, theirs)
        equal = sum(spec.output if place is None else place for place in places)
        return {
            "equal tokens %": 100 * equal / tokens,
            "tokens": tokens,
            "distinct tokens": len(set(chain(*mine))),
        }

    def growth(self) -> Figures:
        figures = step_figures(self.decode_steps())
        return {name: figures[name] for name in ("step ms", "plan + commit ms")}

    def steps(self) -> Figures:
        spec = self.spec
        figures = step_figures(self.decode_steps())
        length = spec.prompt + spec.output // 2
        figures |= floor_figures(self.contestant.engine, spec.rows, length)
        figures["floor / step"] = figures["floor ms"] / figures["step ms"]
        return figures

    def chat(self) -> Figures:
        """In turn: a conversation, and a prompt as long as the conversation's last one, with all
        earlier rows in the slab."""
        turns, chunks = in_turn(self.last_turn, self.lone_chunk)
        turn_ms = median_ms(turn.ttft_s for turn in turns)
        chunk_ms = median_ms(chunk.ttft_s for chunk in chunks)
        return {
            f"turn {TURNS} TTFT ms": turn_ms,
            "lone chunk TTFT ms": chunk_ms,
            f"turn {TURNS} / lone chunk": turn_ms / chunk_ms,
            f"turn {TURNS} tokens read": turns[-1].prompt_tokens - turns[-1].cached_tokens,
            "lone chunk tokens read": chunks[-1].prompt_tokens - chunks[-1].cached_tokens,
        }

    def last_turn(self) -> list[Metrics]:
        """Of a conversation: each prompt is everything said before, and something new."""
        said = []
        for _ in range(TURNS):
            (ask,) = self.asks(1)
            said += ask.prompt
            result = self.answer(said, self.spec.output)
            said += result.tokens
        return [result.metrics]

    def lone_chunk(self) -> list[Metrics]:
        """Of a prompt about as long as that of the last turn. All rows are in the slab, but for as
        many as a turn has new tokens."""
        new = self.spec.prompt + 1  # an answer's newest token is not in the slab yet
        before = (TURNS - 1) * (self.spec.prompt + self.spec.output) - 1
        rows = before // CHUNK * CHUNK
        (ask,) = self.asks(1, prompt=rows + new)
        self.answer(ask.prompt[:rows], 1)
        return [self.answer(ask.prompt, 1).metrics]

    def answer(self, prompt: list[int], max_tokens: int) -> Result:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        return self.contestant.engine.submit(prompt, sampling).result()

    def idle(self) -> Figures:
        roomy = Sample(self.spec, slots=MANY)
        with closing(roomy.contestant):
            return compared(
                {
                    "step of 1 slot": self.step_seconds,
                    f"step of {MANY} slots": roomy.step_seconds,
                }
            )

    def sampling(self) -> Figures:
        ways = {"greedy": self.step_seconds}
        for name, settings in SETTINGS.items():
            bias = settings.get("logit_bias", {})
            known = {id: value for id, value in bias.items() if id < self.spec.vocabulary}
            ways[name] = partial(self.step_seconds, **(settings | {"logit_bias": known}))
        return compared(ways)

    def guesses(self) -> Figures:
        """Texts are dictated to all rows, or the first text to the first row and the second to the
        others. A schema is answered by the model itself. What is counted begins when all decode, and
        ends with the first row."""
        engine = self.contestant.engine
        if self.spec.text == "schema":
            return self.in_schema()
        dictation = Dictation(engine)
        kinds = [texts(kind, self.spec.vocabulary) for kind in self.spec.text.split()]
        figures = []
        for _ in range(GUESSED):
            rows = [kinds[0], *[kinds[-1]] * (self.spec.rows - 1)]
            handles = [dictation.submit(next(kind)) for kind in rows]
            until = handles[: 1 if kinds[1:] else None]
            figures.append(guess_figures(engine, handles, until))
        return sums_of(figures)

    def in_schema(self) -> Figures:
        engine = self.contestant.engine
        wish = Sampling(max_tokens=200, grammar={"json": SCHEMA})
        try:
            handles = [engine.submit(self.asks(1, 16)[0].prompt, wish)]
        except ValueError:  # a tokenizer without letters writes no JSON
            return {}
        return sums_of([guess_figures(engine, handles, handles)])

    def door(self) -> Figures:
        from measure.door_price import door_figures  # and with it the packages of the door

        asks = partial(self.asks, self.spec.rows)
        return door_figures(self.contestant.engine, asks, self.spec.output)

    def busy(self) -> Figures:
        figures = {}
        for name, way in {"step": self.step_seconds, "burst": self.burst_seconds}.items():
            figures |= compared({name: way, f"{name} beside others": beside(busy_cores, way)})
        return figures

    def burst_seconds(self) -> list[float]:
        """How long a burst takes. As in one of the screen's, prompts are short, and answers differ
        in length."""
        prompt = max(1, self.spec.prompt // 4)
        lengths = crowd_lengths(self.spec.output)[:BURST]
        asks = [self.asks(1, prompt, length)[0] for length in lengths]
        began = time.perf_counter()
        drive(self.contestant, asks)
        return [time.perf_counter() - began]

    def step_seconds(self, **settings) -> list[float]:
        """How long the steps of `decode_steps` take. Afterwards nothing runs."""
        steps = self.decode_steps(**settings)
        while self.contestant.handles:
            list(self.contestant.step())  # until all have ended
        return [later.ended - earlier.ended for earlier, later in pairwise(steps)]

    def decode_steps(self, **settings) -> list[StepView]:
        """Steps in which all rows decode with these settings, `queue` requests wait, and nothing
        else happens."""
        spec = self.spec
        engine = self.contestant.engine
        for ask in self.asks(spec.rows, output=spec.output + spec.overlap):
            self.contestant.submit(ask, **settings)
        handles = list(self.contestant.handles.values())
        while not all(handle.tokens for handle in handles):
            engine.step()
        for ask in self.asks(spec.queue, prompt=1):
            engine.submit(ask.prompt, Sampling(max_tokens=1))
        seen = engine.snapshot()
        for _ in range(spec.output + 2):
            engine.step()
        for handle in handles:
            handle.cancel()
        later = engine.snapshot(seen).steps[1:]  # the first was in flight already
        return [step for step in later if len(step.decode) == spec.rows and not step.prefill]


class Failure(RuntimeError):
    """A sample could not be taken, and the request was not to blame."""


def take(spec: Spec) -> Figures:
    policy = spec.contestant.split()[-1]
    if spec.part == "fair":
        return fair_figures(policy)
    if spec.part == "screen":
        from measure.screen_price import screen_figures  # and with it the packages of the screen

        return screen_figures(spec.folder, policy, spec.rows, spec.queue)
    sample = Sample(spec)
    with closing(sample.contestant):
        try:
            return {} if program.rank() else getattr(sample, spec.part)()
        except Exception as error:
            # With other ranks this is the end: they would wait for the next sample
            join().fail(error)
            raise


def take_sample(text: str) -> int:
    """Runs in the sample's process. Prints a line of JSON: the figures, or what is wrong with the
    request."""
    spec = Spec(**json.loads(text))
    # See `measure`
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    try:
        answer = {"figures": take(spec)}
        if spec.contestant != "llama.cpp":  # llama.cpp has products of its own
            blas = device.blas
            answer["blas"] = f"{blas.name} ({blas.kernels})" if blas.kernels else blas.name
    except (ValueError, QueueFull) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


def measure(spec: Spec, column: Contestant) -> dict:
    """One sample of a column, in a fresh process: the figures, and the BLAS under them.

    The process cannot outlive this call: the process ends when the pipe to its input does. Ranks
    stay in their processes. They have found each other, and over MPI no other process could join.

    subtle: `subprocess.run` kills the process when it is interrupted, but not while it still starts
    the process.
    """
    spec = spec._replace(contestant=column.engine, dtype=column.dtype, guesses=column.guesses)
    if program.backend():
        return {"figures": take(spec)}
    program_file = os.path.join(column.checkout or program.ROOT, "bench.py")
    # Another checkout may not know what is new, and has defaults of its own
    usual = Spec._field_defaults
    wanted = {name: value for name, value in spec._asdict().items() if value != usual.get(name)}
    theirs, ours = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, program_file, "--sample", json.dumps(wanted)],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=os.environ | column.environment,
            cwd=column.checkout,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise Failure(
            f"a sample took more than {PATIENCE_S} s; choose a smaller model or less --output"
        ) from None
    except (IndexError, ValueError):
        said = done.stderr.splitlines() or ["it said nothing"]
        raise Failure(
            f"a sample of {column.name} ended with code {done.returncode}: {said[-1]}"
        ) from None
    finally:
        os.close(theirs)
        os.close(ours)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def take_all(
    plan: Sequence[Setup], samples: int, records: list[dict], report: Callable[[str], None]
) -> Iterator[None]:
    """The record of each sample joins the others; `report` is told the next one before."""
    for setup in plan:
        for number in range(samples):
            for column in setup.columns[:: -1 if number % 2 else 1]:
                spec = setup.spec
                report(f"{spec.part}, {setup.x}, {column.name}")
                if spec.rate < math.inf and not program.rank():
                    spec = spec._replace(rate=spec.rate * capacity(records))
                record = {
                    "part": spec.part,
                    "x": setup.x,
                    "contestant": column.name,
                    "sample": number,
                    **measure(spec, column),
                }
                records.append(record)
                yield


def describe_machine(rivals: Sequence[Contestant]) -> dict[str, str]:
    """Everything that the figures depend on."""
    machine = {
        "processor": program.processor(),
        "version": program.version(),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "device": device.named(),
        "commit": commit_of(program.ROOT),
    }
    for package in ("mlx-lm", "llama-cpp-python"):
        with suppress(importlib.metadata.PackageNotFoundError):
            machine[package] = importlib.metadata.version(package)
    for rival in rivals:
        if rival.checkout:
            machine[f"commit of {rival.name}"] = commit_of(rival.checkout)
    return machine


def commit_of(folder: str | Path) -> str:
    """Where there is no git, nothing is said."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    return ""
