"""The benchmark: what does nanobatch do in a second, and where does the second go?

The question. An engine has several speeds. A user feels the time to the first token (TTFT) and the gaps between the
next ones; the owner of the machine counts the tokens of all users. Both depend on how many requests there are, and when
they come. (Here, a row is one sequence of the batch.)

    decode    B rows decode, and nothing else happens: how fast is a step?
    closed    c users, each of whom sends a prompt when the last one's answer has ended: what does a known crowd get?
    open      prompts come at random times, however many are waiting: from which load on does the line grow for ever?
    steps     one decode step taken apart, beside the time that the machine would need at best
    far       the same, where each row looks back on 2,048 tokens
    long      a prompt of 2,000 tokens arrives while seven rows decode: how much does each delay the other?
    chat      a conversation's fifth turn: how long does it take to read what was said before, if a slot remembers it?
    idle      one request runs: how much longer are its steps in an engine of 32 slots than in an engine of one?
    growth    a longer line, more slots, longer slots, longer prompts: what costs more than it seems to?
    plan      planning by itself, where most is to be compared: how long are 64 slots kept waiting?
    sampling  a step in which all rows want the same setting, beside a greedy one: what does one user's wish cost all?
    busy      a decode step, and a burst of 24 prompts, while other programs keep each core busy: how much worse?
    newcomer  mlx-lm as installed, on the slow BLAS that MLX's wheel for Linux brings (`parts/device/blas.py`)
    same      how many of a peer's tokens are ours, on the peer's BLAS: a peer that computes something else is no peer

How a fair answer is made. `--vs` measures others beside this checkout, in all parts that they can do. Each of them has
a column, and its figures have their ratio to ours:

    --vs mlx-lm            on OpenBLAS, the best that its users can put under MLX (`peers.py`)
    --vs llama.cpp         with products of its own, and a thread for each core
    --vs ../before         another checkout of nanobatch, on the BLAS that it chooses: is the new version faster?
    --vs .@openblas        a checkout, here this one, with NANOBATCH_BLAS=openblas; mlx-lm@off works, too
    --vs mlx-lm,llama.cpp  several

This checkout runs on what NANOBATCH_BLAS says in the user's environment. All have the same weights in the same
precision. All get the same prompts at the same times, answer greedily, and never stop early. One loop (`drive`) talks
to all engines in the same words. Each sample has a process of its own, so it inherits no other sample's memory, caches
or threads; it warms up on a burst of the same shapes. Columns take turns (A B, B A, A B), so a machine that slows down
slows all of them. A table shows the median of the samples, and in brackets the lowest and the highest. One thing
differs: nanobatch turns its tokens into text on the way, while a peer leaves that to its caller.

A token counts when the loop holds it as a plain number. In an open loop, TTFT begins when the prompt was due, not when
a busy loop got round to sending it; otherwise a slow engine would make its own examination easier.

    python bench.py                                          about a minute, on the demo model
    python bench.py --shape 15m --vs mlx-lm --parts decode,closed,open --json run.json --plot run.svg
    python bench.py --from run.json --plot run.svg           the tables and the picture again; nothing is measured

Read `drive` first, then `Sample`. Where next: `sched.py`, whose three policies `open` compares, and `Engine.step` in
`nanobatch.py`, whose stages `steps` measures.
"""

from __future__ import annotations

# It comes first, so that Ctrl-C is quiet during the other imports, too.
from parts import program  # isort: split

import argparse
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from nanobatch import POLICIES, Engine, Handle, QueueFull, Request, Sampling, Scheduler
from parts.api.handle import Result
from parts.api.views import Metrics, StepView
from parts.checks import one_line, read_whole, shown
from parts.device import mlx as device
from parts.device.mlx import mx
from parts.model.config import read_config
from parts.model.find import find
from parts.ranks.meet import join
from peers import ENVIRONMENT, PEERS, LlamaCpp, MlxLm, News, cores, obstacle

ROOT = Path(__file__).resolve().parent
PARTS = {  # the name of a part, and the caption of its table
    "decode": "all rows decode, and nothing else happens",
    "closed": "users who send a prompt when the last one's answer has ended",
    "open": "prompts arrive at random; load 1 is what static batching can do, at load inf all come at once",
    "steps": "a decode step of nanobatch, and what the machine would need for it at best",
    "far": "the same, where each row looks back on 2,048 tokens",
    "long": "a long prompt arrives while seven rows decode",
    "chat": "a chat's fifth turn, beside a chunk of as many new tokens at the same row",
    "idle": "a decode step of one request in an engine of 1 slot, and in one of 32",
    "growth": "a decode step of nanobatch; ratios are to the first line of each kind",
    "plan": "the scheduler alone, without a model: 64 slots, prompts of 16,000 tokens that begin alike",
    "sampling": "a decode step in which all rows have a setting, beside a greedy step of the same run",
    "busy": "a decode step, and a burst of prompts: alone, and beside one process on each core that never rests",
    "newcomer": "mlx-lm as installed, on the slow BLAS that MLX's wheel for Linux brings",
    "same": "the peer's answers beside ours: equal tokens, up to the first difference of each answer",
}
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
SETTINGS["all of them"] = {name: value for settings in SETTINGS.values() for name, value in settings.items()}
PARTS_OF_A_PEER = "decode", "closed", "open", "long", "same"  # a peer does not say what its steps are made of
ROWS = 8  # in the parts that do not vary it
CROWD, LONGEST = 40, 256  # requests of `open`, and their longest answer; the shortest has 16 tokens
LOADS = math.inf, 0.4, 0.6, 0.8, 1.0, 1.2  # `open`: as shares of what static batching can do; inf has to come first
TURNS = 5  # of `chat`
CHAT = {"rows": 1, "prompt": 64, "output": 33, "length": TURNS * (64 + 33)}
CHUNK = 128  # `chat`: from a multiple of it every version of nanobatch can go on
MANY = 32  # slots of `idle`
BURST = 24  # prompts of `busy`, as many as a burst of the screen has
PATIENCE_S = 1800  # for one sample


# --- figures: all that is reported is computed here, from plain times -------------------------------------------------


@dataclass
class Answer:
    """One request as its user saw it."""

    sent: float
    times: list[float] = field(default_factory=list)  # of its tokens
    tokens: list[int] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.times[0] - self.sent)

    def gaps_ms(self, since: float = -math.inf, until: float = math.inf) -> list[float]:
        """Times between a token and the next, without gaps that lie wholly outside of the given span."""
        return [1e3 * (b - a) for a, b in pairwise(self.times) if b > since and a < until]


Figures = dict[str, float]  # by name and unit, as the tables have them


def rank(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed: rank(range(1, 101), 0.95) is 95."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def decode_figures(answers: Sequence[Answer], count: int) -> Figures:
    """The rate once all rows have their first token, until one of them has `count` more; and the time until then."""
    began = max(a.times[0] for a in answers)
    later = [[t for t in a.times if t > began] for a in answers]
    if not all(later):
        raise ValueError(f"a row ended before all {len(answers)} had begun; give a longer --output")
    ended = min(times[:count][-1] for times in later)
    rate = sum(t <= ended for times in later for t in times) / (ended - began)
    return {"decode tokens/s": rate, "prefill ms": 1e3 * (began - min(a.sent for a in answers))}


def open_figures(answers: Sequence[Answer]) -> Figures:
    began, ended = min(a.sent for a in answers), max(a.times[-1] for a in answers)
    ttft = [a.ttft_ms for a in answers]
    return {
        "total tokens/s": sum(len(a.times) for a in answers) / (ended - began),
        "TTFT mean ms": statistics.mean(ttft),
        **{f"TTFT p{p} ms": rank(ttft, p / 100) for p in (50, 95, 99)},
    }


def closed_figures(answers: Sequence[Answer], users: int) -> Figures:
    """`decode` is the rate of all users together while their answers run; `total` also counts the time they wait."""
    gaps = [gap for a in answers for gap in a.gaps_ms()]
    return {
        "decode tokens/s": users * statistics.mean(1e3 / statistics.mean(a.gaps_ms()) for a in answers),
        **open_figures(answers),
        "gap mean ms": statistics.mean(gaps),
        "gap p95 ms": rank(gaps, 0.95),
        "gap max ms": max(gaps),
    }


def long_figures(rows: Sequence[Answer], late: Answer, alone: Answer) -> Figures:
    """The rows' gaps before the late prompt was sent, and from then to its first token."""
    began = max(a.times[0] for a in rows)
    calm = statistics.median(gap for a in rows for gap in a.gaps_ms(began, late.sent))
    rough = rank((gap for a in rows for gap in a.gaps_ms(late.sent, late.times[0])), 0.95)
    return {
        "gap undisturbed ms": calm,
        "gap p95 ms": rough,
        "gap p95 / undisturbed": rough / calm,
        "TTFT alone ms": alone.ttft_ms,
        "TTFT ms": late.ttft_ms,
        "TTFT / alone": late.ttft_ms / alone.ttft_ms,
    }


PARTS_OF_A_STEP = ("python", "device", "wait", "plan", "build", "commit")  # the last three are Python's


def step_figures(steps: Sequence[StepView]) -> Figures:
    """Medians. With run-ahead the stages of a step overlap those of the next, so a step's own time is its period."""
    seconds = {
        "step ms": [b.ended - a.ended for a, b in pairwise(steps)],
        **{f"{part} ms": [getattr(s, f"{part}_s") for s in steps] for part in PARTS_OF_A_STEP},
        "plan + commit ms": [s.plan_s + s.commit_s for s in steps],
    }
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


# --- the contestants, and the loop that drives them ------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    max_tokens: int
    at: float = 0.0  # when an open loop sends it, in seconds after the start
    after: int = 0  # an open loop does not send it before all answers under way have so many tokens


class Nanobatch:
    def __init__(self, folder: str, name: str, rows: int, max_len: int):
        _, policy = name.split()
        self.engine = Engine.load(folder, slots=rows, max_len=max_len, policy=policy)
        self.handles: dict[int, Handle] = {}  # those under way
        self.reported = Counter()  # how many tokens of each

    def submit(self, ask: Ask, **settings) -> int:
        handle = self.engine.submit(ask.prompt, Sampling(max_tokens=ask.max_tokens, ignore_eos=True, **settings))
        self.handles[handle.id] = handle
        return handle.id

    def step(self) -> Iterator[News]:
        """For each request under way: its id, the tokens that it got, and whether it has ended."""
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
    asks: Iterable[Ask],
    users: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Answer]:
    """Send each ask when it is due, and step until all have ended. The answers are in the order of the asks.

    In a closed loop with so many `users`, an ask is due when a user is idle. In an open loop, it is due when its time
    has come.
    """
    waiting, answers, under_way, began = deque(asks), [], {}, clock()

    def is_due(ask: Ask, now: float) -> bool:
        if users is not None:
            return len(under_way) < users
        return began + ask.at <= now and all(len(answer.times) >= ask.after for answer in under_way.values())

    while waiting or under_way:
        now = clock()
        while waiting and is_due(waiting[0], now):
            ask = waiting.popleft()
            answers.append(Answer(now if ask.after or users is not None else began + ask.at))
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


# --- one sample, in a process of its own -----------------------------------------------------------------------------


class Spec(NamedTuple):
    """What one sample measures. It travels to its process as JSON."""

    part: str  # a method of `Sample`
    contestant: str  # the name of a peer, or "nanobatch" and a policy
    folder: str
    vocabulary: int
    rows: int
    prompt: int
    output: int
    rate: float = math.inf  # open: requests a second (in a plan: the load)
    late: int = 0  # long: length of the late prompt
    queue: int = 0  # growth: how many more wait in line
    length: int = 0  # growth: of a slot; 0 means as long as the longest prompt and its answer need

    @property
    def overlap(self) -> int:
        """How much longer answers must be so that all of them run at once. Ours begin one after another, because their
        prompts go in by chunks, one a step, and late in a long prompt a chunk may be as narrow as 16 tokens."""
        narrow = 64 if self.prompt <= 512 else 16
        return 0 if self.part in ("closed", "open") else self.rows * math.ceil(self.prompt / narrow)


class Sample:
    """A contestant, warmed up, and prompts for it. They are random, so that no engine can reuse computed prefixes."""

    def __init__(self, spec: Spec, slots: int | None = None):
        """`slots`: how many the engine has; by default one for each row."""
        self.spec, self.random = spec, random.Random(0)
        self.longest = spec.length or max(spec.prompt, spec.late) + spec.output + spec.overlap
        if spec.contestant.startswith("nanobatch"):
            self.contestant = Nanobatch(spec.folder, spec.contestant, slots or spec.rows, self.longest)
        else:
            peer, *_ = PEERS[spec.contestant]
            self.contestant = peer(spec.folder, spec.rows, self.longest)
        if program.rank():  # of several processes (parts/ranks/ranks.py), one measures
            self.contestant.engine.follow()
            return
        drive(self.contestant, self.asks(spec.rows, output=min(spec.output, 16)))
        mx.reset_peak_memory()  # what loading took does not count

    def asks(self, count: int, prompt: int | None = None, output: int | None = None) -> list[Ask]:
        """Asks with the spec's lengths, unless others are given."""
        ids, spec = range(self.spec.vocabulary), self.spec
        return [Ask(self.random.choices(ids, k=prompt or spec.prompt), output or spec.output) for _ in range(count)]

    def decode(self) -> Figures:
        spec = self.spec
        asks = self.asks(spec.rows, output=spec.output + spec.overlap)
        return decode_figures(drive(self.contestant, asks), spec.output)

    def closed(self) -> Figures:
        users = self.spec.rows
        figures = closed_figures(drive(self.contestant, self.asks(4 * users), users), users)
        memory = mx.get_peak_memory() / 2**20  # of MLX alone
        return figures | ({} if isinstance(self.contestant, LlamaCpp) else {"peak memory MiB": memory})

    def open(self) -> Figures:
        """Prompts come as a Poisson process: the times between them are exponential, and only scaled by the rate."""
        draw, at, asks = random.Random(1), 0.0, []
        for length in crowd_lengths(self.spec.output):
            asks.append(Ask(self.asks(1)[0].prompt, length, at))
            at += draw.expovariate(1) / self.spec.rate
        return open_figures(drive(self.contestant, asks))

    def long(self) -> Figures:
        spec = self.spec
        for _ in range(2):  # once to warm up
            (alone,) = drive(self.contestant, self.asks(1, spec.late, 2))
        rows = self.asks(spec.rows - 1, output=spec.output + spec.overlap)
        late = Ask(self.asks(1, spec.late)[0].prompt, 2, after=min(32, spec.output // 4))
        *answers, last = drive(self.contestant, [*rows, late])
        return long_figures(answers, last, alone)

    def same(self) -> Figures:
        spec, asks = self.spec, self.asks(self.spec.rows)
        with closing(Nanobatch(spec.folder, "nanobatch continuous", spec.rows, self.longest)) as ours:
            mine = [answer.tokens for answer in drive(ours, asks)]
        pairs = zip(mine, (answer.tokens for answer in drive(self.contestant, asks)), strict=True)
        equal = sum(sum(takewhile(bool, map(int.__eq__, *pair))) for pair in pairs)
        figures = {"equal tokens %": 100 * equal / (spec.rows * spec.output), "tokens": spec.rows * spec.output}
        return figures | {"distinct tokens": len(set(chain(*mine)))}

    def growth(self) -> Figures:
        figures = step_figures(self.decode_steps())
        return {name: figures[name] for name in ("step ms", "plan + commit ms")}

    def steps(self) -> Figures:
        spec, engine = self.spec, self.contestant.engine
        figures = step_figures(self.decode_steps())
        handles = list(self.contestant.handles.values())
        began = time.perf_counter()  # now the tokens become text once more, and nothing else happens
        for handle in handles:
            stream = engine.text.stream(())
            for token in handle.tokens:
                stream.push(token)
        text_ms = 1e3 * (time.perf_counter() - began) / max(len(handle.tokens) for handle in handles)
        floor = floor_figures(engine, spec.rows, spec.prompt + spec.output // 2)
        share = {"floor / step": floor["floor ms"] / figures["step ms"]}
        return figures | {"text, of commit ms": text_ms} | floor | share

    def chat(self) -> Figures:
        """In turn: a conversation, and a prompt as long as its last one, whose earlier rows are in the slab already."""
        turns_s = []
        chunks_s = []
        ratios = []
        for _ in range(3):
            turn = self.last_turn()
            chunk = self.lone_chunk(turn.prompt_tokens)
            turns_s.append(turn.ttft_s)
            chunks_s.append(chunk.ttft_s)
            ratios.append(turn.ttft_s / chunk.ttft_s)
        return {
            f"turn {TURNS} TTFT ms": 1e3 * statistics.median(turns_s),
            "lone chunk TTFT ms": 1e3 * statistics.median(chunks_s),
            f"turn {TURNS} / lone chunk": statistics.median(ratios),
            f"turn {TURNS} tokens read": turn.prompt_tokens - turn.cached_tokens,
            "lone chunk tokens read": chunk.prompt_tokens - chunk.cached_tokens,
        }

    def last_turn(self) -> Metrics:
        """Of a conversation: each prompt is all that was said before, and something new."""
        said = []
        for _ in range(TURNS):
            (ask,) = self.asks(1)
            said += ask.prompt
            result = self.answer(said, self.spec.output)
            said += result.tokens
        return result.metrics

    def lone_chunk(self, length: int) -> Metrics:
        """Of a prompt of about this length. All its rows are in the slab but for as many as a turn has new tokens."""
        new = self.spec.prompt + 1  # an answer's newest token is not in the slab yet
        rows = (length - new) // CHUNK * CHUNK
        (ask,) = self.asks(1, prompt=rows + new)
        self.answer(ask.prompt[:rows], 1)
        return self.answer(ask.prompt, 1).metrics

    def answer(self, prompt: list[int], max_tokens: int) -> Result:
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        return self.contestant.engine.submit(prompt, sampling).result()

    def idle(self) -> Figures:
        """In turn, so that a noisy machine is noisy for both engines."""
        one = []
        many = []
        roomy = Sample(self.spec, slots=MANY)
        with closing(roomy.contestant):
            for _ in range(3):
                one += self.step_seconds()
                many += roomy.step_seconds()
        one_ms = 1e3 * statistics.median(one)
        many_ms = 1e3 * statistics.median(many)
        return {
            "step of 1 slot ms": one_ms,
            f"step of {MANY} slots ms": many_ms,
            f"{MANY} slots / 1 slot": many_ms / one_ms,
        }

    def sampling(self) -> Figures:
        """In turn, so that a noisy machine is noisy for both: some steps with the setting, some greedy ones."""
        spec, seconds = self.spec, defaultdict(list)
        for name, settings in SETTINGS.items():
            bias = {id: value for id, value in settings.get("logit_bias", {}).items() if id < spec.vocabulary}
            for _ in range(3):
                for kind, wish in (("greedy", {}), (name, settings | {"logit_bias": bias})):
                    seconds[name, kind] += self.step_seconds(**wish)
        median = {key: statistics.median(values) for key, values in seconds.items()}
        ratios = {f"{name} / greedy": median[name, name] / median[name, "greedy"] for name in SETTINGS}
        return {"greedy ms": 1e3 * statistics.median(median[name, "greedy"] for name in SETTINGS)} | ratios

    def busy(self) -> Figures:
        """In turn, as a machine may also have other things to do."""
        alone = []
        beside = []
        for _ in range(3):
            alone += self.step_seconds()
            with busy_cores():
                beside += self.step_seconds()
        step_ms = 1e3 * statistics.median(alone)
        step_beside_ms = 1e3 * statistics.median(beside)
        burst_s = self.burst_seconds()
        with busy_cores():
            burst_beside_s = self.burst_seconds()
        return {
            "step ms": step_ms,
            "step beside others ms": step_beside_ms,
            "beside others / alone": step_beside_ms / step_ms,
            "burst s": burst_s,
            "burst beside others s": burst_beside_s,
            "burst beside others / alone": burst_beside_s / burst_s,
        }

    def burst_seconds(self) -> float:
        """How long a burst takes. As in one of the screen's, prompts are short, and answers differ in length."""
        prompt = max(1, self.spec.prompt // 4)
        asks = []
        for length in crowd_lengths(self.spec.output)[:BURST]:
            asks += self.asks(1, prompt, length)
        began = time.perf_counter()
        drive(self.contestant, asks)
        return time.perf_counter() - began

    def step_seconds(self, **settings) -> list[float]:
        """How long the steps of `decode_steps` take. Afterwards nothing runs."""
        steps = self.decode_steps(**settings)
        while self.contestant.handles:
            list(self.contestant.step())  # until all have ended
        return [later.ended - earlier.ended for earlier, later in pairwise(steps)]

    def decode_steps(self, **settings) -> list[StepView]:
        """Steps in which all rows decode with these settings, `queue` requests wait, and nothing else happens."""
        spec, engine = self.spec, self.contestant.engine
        for ask in self.asks(spec.rows, output=spec.output + spec.overlap):
            self.contestant.submit(ask, **settings)
        handles = list(self.contestant.handles.values())
        while not all(handle.tokens for handle in handles):
            engine.step()
        for ask in self.asks(spec.queue, prompt=1):
            engine.submit(ask.prompt, Sampling(max_tokens=1))
        first = engine.snapshot().steps[-1].step + 2  # one more is in flight
        for _ in range(spec.output + 2):
            engine.step()
        for handle in handles:
            handle.cancel()
        return [s for s in engine.snapshot().steps if s.step >= first and len(s.decode) == spec.rows and not s.prefill]


@contextmanager
def busy_cores() -> Iterator[None]:
    """One process on each core that never rests. Each ends when this process does, too."""
    command = [sys.executable, "-c", "import os; ours = os.getppid()\nwhile os.getppid() == ours: pass"]
    others = []
    try:
        for _ in range(cores()):
            others.append(subprocess.Popen(command))
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def plan_figures(slots: int = 64, length: int = 16_000) -> Figures:
    """What planning takes where most is to be compared: all prompts are alike but for their last thousand tokens.

    A plan takes as long as the fastest of five: what other programs do to it is not ours.
    """
    prompts, runs = [(*range(length - 1000), *[id] * 1000) for id in range(slots)], []
    for _ in range(5):
        sched, seconds = Scheduler(slots, length + 1, budget=slots + 64 * (2 + slots // 8)), []
        for id, prompt in enumerate(prompts):
            sched.submit(Request(id, prompt, 1, arrived=0.0))
        while sched.waiting or sched.running:
            began = time.perf_counter()
            plan = sched.plan(0.0)
            seconds.append(time.perf_counter() - began)
            sched.commit(plan, [0] * len(plan.emitters), lambda request, token: None, 0.0)
        runs.append(seconds)
    fastest = list(map(min, *runs))
    return {"plan median ms": 1e3 * statistics.median(fastest), "plan max ms": 1e3 * max(fastest)}


def crowd_lengths(longest: int) -> list[int]:
    """How long the answers of an open loop are, the same for all contestants."""
    draw = random.Random(2)
    return [draw.randint(max(1, longest // 16), longest) for _ in range(CROWD)]


def floor_figures(engine: Engine, rows: int, length: int) -> Figures:
    """What the machine would need at best for a step of so many rows, each `length` tokens long.

    A step reads each weight once and each row's keys and values, and multiplies what it has read. The longer of the two
    times is the floor. Both rates are measured here and now, reading on a matrix as large as what a step reads, because
    small weights stay in the processor's caches, and the rate of the memory would be no floor for them.
    """
    from mlx.utils import tree_flatten

    c = engine.model.config
    cached = 2 * c.layers * rows * length * c.Hkv * c.Dh  # numbers of the slab
    weights = [a for _, a in tree_flatten((engine.model.layers, engine.model.head)) if isinstance(a, mx.array)]
    reads = sum(a.nbytes for a in weights) + cached * engine.model.dtype.size
    # An embedding is looked up, not multiplied with, unless it is the head as well.
    matrices = [s for name, s in c.tensors().items() if len(s) == 2 and (c.tied or "embed_tokens" not in name)]
    flops = 2 * rows * sum(map(math.prod, matrices)) + 2 * cached * c.H // c.Hkv
    bandwidth, thin, square = machine_rates(reads, rows, engine.model.dtype)
    return {
        "reading ms": 1e3 * reads / bandwidth,
        "arithmetic ms": 1e3 * flops / square,
        "floor ms": 1e3 * max(reads / bandwidth, flops / square),
        f"arithmetic at {rows} rows' rate ms": 1e3 * flops / thin,
        "machine GB/s": bandwidth / 1e9,
        f"machine GFLOP/s at {rows} rows": thin / 1e9,
        "machine GFLOP/s at 1024 rows": square / 1e9,
    }


def machine_rates(nbytes: int, rows: int, dtype: mx.Dtype) -> tuple[float, float, float]:
    """Bytes a second through a matrix, FLOP/s of `rows` rows times it, and FLOP/s of two square matrices."""
    matrix = mx.random.normal((1024, max(64, nbytes // (1024 * dtype.size)))).astype(dtype)
    one, some, square = (mx.random.normal((n, 1024)).astype(dtype) for n in (1, rows, 1024))
    mx.eval(matrix, one, some, square)

    def best(compute: Callable[[], mx.array]) -> float:
        return min(timeit.repeat(lambda: mx.eval(compute()), number=1, repeat=10))

    read = min(best(lambda: one @ matrix), best(lambda: matrix.sum()))
    return (
        matrix.nbytes / read,
        2 * rows * matrix.size / best(lambda: some @ matrix),
        2 * square.size * 1024 / best(lambda: square @ square),
    )


class Failure(RuntimeError):
    """A sample could not be taken, and nothing is wrong with what was asked for."""


def take(spec: Spec) -> Figures:
    if spec.part == "plan":
        return plan_figures()
    sample = Sample(spec)
    with closing(sample.contestant):
        try:
            return {} if program.rank() else getattr(sample, spec.part)()
        except Exception as error:
            join().fail(error)  # with other ranks this is the end: they would wait for the next sample
            raise


def take_sample(text: str) -> int:
    """Runs in the sample's process. Prints a line of JSON: the figures, or what is wrong with what was asked for."""
    spec = Spec(**json.loads(text))
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()  # see `measure`
    try:
        answer = {"figures": take(spec)}
        if spec.contestant != "llama.cpp":  # which has products of its own
            answer["blas"] = blas_name()
    except (ValueError, QueueFull) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


def measure(spec: Spec, column: Column) -> dict:
    """One sample of a column, in a fresh process: its figures, and the BLAS that it ran on.

    The process cannot outlive this call, because it ends when its standard input does. Ranks stay in their process:
    they have found each other, and over MPI another process could not join them.

    subtle: an interrupted `run` kills its process, but not if the interrupt comes while it starts the process.
    """
    spec = spec._replace(contestant=column.engine)
    if program.backend():
        return {"figures": take(spec)}
    program_file = (column.checkout or ROOT) / "bench.py"
    theirs, ours = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, str(program_file), "--sample", json.dumps(spec._asdict())],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=os.environ | column.environment,
            cwd=column.checkout,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise Failure(f"a sample took more than {PATIENCE_S} s; choose a smaller model or less --output") from None
    except (IndexError, ValueError):
        said = done.stderr.splitlines() or ["it said nothing"]
        raise Failure(f"a sample of {column.name} ended with code {done.returncode}: {said[-1]}") from None
    finally:
        os.close(theirs)
        os.close(ours)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


# --- all samples, in turns -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of the tables: what is measured beside the other columns, and in which surroundings."""

    name: str
    engine: str  # as a sample's process knows it: a peer, or "nanobatch" and a policy
    environment: Mapping[str, str] = field(default_factory=dict)  # set in its processes, beside the user's own
    checkout: Path | None = None  # another version of nanobatch, whose bench.py takes the samples; None: this one

    def can(self, part: str) -> bool:
        return self.engine not in PEERS or part in PARTS_OF_A_PEER


NEWCOMER = Column("mlx-lm as installed", "mlx-lm", {"NANOBATCH_BLAS": "off"})


def our_column(policy: str) -> Column:
    """This checkout, on the BLAS that the user's environment asks for."""
    return Column(f"nanobatch {policy}", f"nanobatch {policy}")


def read_rivals(names: str, policy: str) -> list[Column]:
    """What `--vs` means."""
    rivals = {}
    for name in names.split(",") if names else ():
        rivals[name] = read_rival(name, policy)
    return list(rivals.values())


def read_rival(name: str, policy: str) -> Column:
    """What a name of `--vs` means: a peer, or a folder with another checkout. After an @ stands its NANOBATCH_BLAS."""
    rival, _, blas = name.partition("@")
    environment = {"NANOBATCH_BLAS": blas} if blas else {}
    if rival in PEERS:
        if blas and rival == "llama.cpp":
            raise ValueError(f"--vs: llama.cpp has products of its own; leave out @{shown(blas)}")
        return Column(name, rival, ENVIRONMENT[rival] | environment)
    checkout = Path(rival).expanduser().absolute()
    if not rival or not (checkout / "bench.py").is_file():
        raise ValueError(f"--vs: {shown(rival)} is neither {' nor '.join(PEERS)} nor a folder that holds a bench.py")
    return Column(name, f"nanobatch {policy}", environment, checkout)


class Cell(NamedTuple):
    """A few lines of a table: what is measured there, and in which columns."""

    part: str  # whose table it is
    x: str  # a word and a number, such as "rows 8"
    spec: Spec  # complete but for the contestant
    columns: list[Column]


def make_plan(
    parts: Sequence[str],
    rows: Sequence[int],
    usual: Spec,
    ours: Column,
    rivals: Sequence[Column],
) -> list[Cell]:
    """All cells of these parts."""
    plan = []
    for part in parts:
        columns = columns_of(part, ours, rivals)
        for x, change in lines_of(part, rows).items():
            spec = usual._replace(**{"part": part, **change})
            plan.append(Cell(part, x, spec, columns))
    return plan


def columns_of(part: str, ours: Column, rivals: Sequence[Column]) -> list[Column]:
    """The columns of a part's table. Ours stands first, and the ratios of the others are to it."""
    able = [rival for rival in rivals if rival.can(part)]
    if part == "open":
        policies = [our_column(policy) for policy in POLICIES]
        others = [column for column in policies if column != ours]
        return [ours, *others, *able]
    if part == "newcomer":
        return [ours, NEWCOMER]
    if part == "busy" and not program.backend():
        single = Column(f"{ours.name}, one thread", ours.engine, {"NANOBATCH_THREADS": "1"})
        return [ours, single, *able]
    if part == "same":
        return [rival for rival in able if rival.engine in PEERS]
    return [ours, *able]


def lines_of(part: str, rows: Sequence[int]) -> dict[str, dict]:
    """The lines of a part's table: what each is called, and what its spec has that the usual one has not."""
    if part == "decode":
        return {f"rows {n}": {"rows": n} for n in rows}
    if part == "closed":
        return {f"users {n}": {"rows": n} for n in rows}
    if part == "open":
        return {f"load {load}": {"output": LONGEST, "rate": load} for load in LOADS}
    if part == "growth":
        return {
            **{f"queue {n}": {"queue": n} for n in (0, 100, 1_000, 10_000)},
            **{f"slots {n}": {"rows": n} for n in (1, 4, 16, 64)},
            **{f"slab {n}": {"rows": 4, "length": n} for n in (512, 1_024, 4_096, 16_384)},
            **{f"prompt {n}": {"rows": 4, "prompt": n} for n in (64, 256, 1_024)},
        }
    return {
        "far": {f"rows {ROWS}": {"part": "steps", "prompt": 2_048}},
        "newcomer": {f"rows {ROWS}": {"part": "decode"}},
        "long": {"prompt 2000": {"late": 2000, "output": 256}},
        "chat": {f"turn {TURNS}": CHAT},
        "idle": {"rows 1": {"rows": 1}},
        "plan": {"slots 64": {}},
        "sampling": {f"rows {ROWS}": {"prompt": 16, "output": 10}},
    }.get(part, {f"rows {ROWS}": {}})


def take_all(plan: Sequence[Cell], samples: int, tell: Callable[[str], None]) -> Iterator[dict]:
    """The record of each sample; `tell` is told what will be measured next."""
    records = []
    for cell in plan:
        for number in range(samples):
            for column in cell.columns[:: -1 if number % 2 else 1]:
                tell(f"{cell.part}, {cell.x}, {column.name}")
                spec = cell.spec
                if spec.rate < math.inf and not program.rank():
                    spec = spec._replace(rate=spec.rate * capacity(records))
                record = {
                    "part": cell.part,
                    "x": cell.x,
                    "contestant": column.name,
                    "sample": number,
                    **measure(spec, column),
                }
                records.append(record)
                yield record


def capacity(records: Sequence[dict]) -> float:
    """Requests a second that static batching can do, as measured when all of them come at once."""
    rates = []
    for record in records:
        if record["x"] == "load inf" and record["contestant"] == "nanobatch static":
            rates.append(record["figures"]["total tokens/s"])
    return statistics.median(rates) / statistics.mean(crowd_lengths(LONGEST))


def describe_machine(rivals: Sequence[Column]) -> dict[str, str]:
    """What the figures depend on."""
    checkouts = {rival.name: rival.checkout for rival in rivals if rival.checkout}
    cpu = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", cpu.read_text()) if cpu.exists() else None
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    installed = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return {
        "processor": model[1] if model else output_of("sysctl -n machdep.cpu.brand_string") or platform.machine(),
        "cores": str(cores()),
        "device": str(mx.device_info().get("device_name", "GPU")) if on_gpu else "CPU",
        "system": f"{platform.system()} {platform.release()}",
        "load average": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "mlx": installed["mlx"],
        "mlx-lm": installed.get("mlx-lm", "none"),
        "llama-cpp-python": installed.get("llama-cpp-python", "none"),
        "BLAS": blas_name(),
        "commit": commit_of(ROOT),
        **{f"commit of {name}": commit_of(folder) for name, folder in checkouts.items()},
    }


def blas_name() -> str:
    """What multiplies matrices in this process, short enough for the head of a column."""
    blas = device.blas
    return f"{blas.name} ({blas.kernels})" if blas.kernels else blas.name


def commit_of(folder: Path) -> str:
    changed = output_of("git status --porcelain", folder)
    return output_of("git rev-parse --short HEAD", folder) + " dirty" * bool(changed)


def output_of(command: str, folder: Path = ROOT) -> str:
    try:
        return subprocess.run(command.split(), capture_output=True, text=True, cwd=folder, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# --- what is shown ---------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    median: float
    low: float
    high: float


Key = tuple[str, str, str, str]  # part, x, name of the figure, contestant


def summarise(records: Iterable[dict]) -> dict[Key, Summary]:
    samples = defaultdict(list)
    for r in records:
        for name, value in r["figures"].items():
            samples[r["part"], r["x"], name, r["contestant"]].append(value)
    return {key: Summary(statistics.median(values), min(values), max(values)) for key, values in samples.items()}


def compared_with(key: Key, known: Iterable[Key]) -> Key:
    """The figure that this one is divided by: of the first column, ours; in `growth` of the first line of its kind."""
    part, x, *figure = key

    def is_like(other: Key) -> bool:
        if part != "growth":
            return other[:3] == key[:3]
        other_part, other_x, *other_figure = other
        return other_part == part and other_x.split()[0] == x.split()[0] and other_figure == figure

    return next(filter(is_like, known))


def cell_text(key: Key, table: dict[Key, Summary]) -> str:
    """12.3 (11.9–12.8) ×1.25"""
    if key not in table:
        return ""
    figure = table[key]
    text = number(figure.median)
    low = number(figure.low)
    high = number(figure.high)
    if low != high:
        text += f" ({low}–{high})"
    first = compared_with(key, table)
    if first != key and table[first].median:
        text += f" ×{figure.median / table[first].median:.2f}"
    return text


def number(value: float) -> str:
    """Three significant digits: 1234.5 -> '1,234', 12.345 -> '12.3', 0.012345 -> '0.0123'"""
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def column_heads(records: Iterable[dict]) -> dict[str, str]:
    """What stands above each contestant's column: its name, and the BLAS that its samples ran on."""
    heads = {}
    for record in records:
        name = record["contestant"]
        heads[name] = f"{name}\nBLAS {record['blas']}" if "blas" in record else name
    return heads


def show(data: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(data["command"], "; ".join(f"{name} {value}" for name, value in data["machine"].items()), sep="\n")
    console.print("median (lowest–highest) ×ratio to the first column", style="dim")
    figures = summarise(data["records"])
    heads = column_heads(data["records"])
    for part, caption in PARTS.items():
        keys = [key for key in figures if key[0] == part]
        if not keys:
            continue
        columns = list(dict.fromkeys(key[3] for key in keys))
        table = Table("", "", *(heads[who] for who in columns))
        for x in dict.fromkeys(key[1] for key in keys):
            for name in dict.fromkeys(key[2] for key in keys if key[1] == x):
                label = x if not table.rows or table.rows[-1].end_section else ""
                table.add_row(label, name, *(cell_text((part, x, name, who), figures) for who in columns))
            table.add_section()
        console.print(f"\n{part}: {caption}", table, sep="\n")


COLOURS = {"continuous": "#2f8f5b", "static": "#c27c1a", "serial": "#a3599f", "mlx-lm": "#3d7fc4", "llama": "#c4473d"}
GREY = "#7d858d"  # can be read on white and on black


def draw(records: Sequence[dict]) -> str:
    """An SVG with a panel for each part that has a curve. It has no background, so it takes the page's."""
    curves = defaultdict(lambda: defaultdict(list))
    for (part, x, name, who), figure in summarise(records).items():
        if (part, name) in (("decode", "decode tokens/s"), ("open", "TTFT p95 ms")) and x != "load inf":
            curves[part, f"{name}, by {x.split()[0]}"][who].append((float(x.split()[1]), figure))
    if not curves:
        raise ValueError("there is nothing to plot: decode and open can be drawn, and neither has been measured")
    panels = [panel(title, curves[part, title], part == "open", 430 * i) for i, (part, title) in enumerate(curves)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {430 * len(panels)} 300" font-size="12" '
        f'font-family="system-ui, sans-serif" fill="{GREY}">\n' + "\n".join(panels) + "\n</svg>\n"
    )


def panel(title: str, curves: dict[str, list[tuple[float, Summary]]], log: bool, left: int) -> str:
    """Axes, and a curve of medians for each contestant, with a thick line from the lowest sample to the highest."""
    xs = sorted({x for curve in curves.values() for x, _ in curve})
    marks = ticks([value for curve in curves.values() for _, figure in curve for value in figure], log)
    scale = math.log if log else float

    def across(x: float) -> str:
        return f"{left + 60 + 340 * (x - xs[0]) / (xs[-1] - xs[0] or 1):.1f}"

    def down(y: float) -> str:
        return f"{260 - 190 * (scale(y) - scale(marks[0])) / (scale(marks[-1]) - scale(marks[0])):.1f}"

    parts = [f'<text x="{left + 16}" y="18" font-size="14">{title}</text>']
    for mark in marks:
        parts.append(f'<path d="M{left + 56} {down(mark)}h348" stroke="{GREY}" stroke-opacity="0.3"/>')
        parts.append(f'<text x="{left + 50}" y="{down(mark)}" dy="4" text-anchor="end">{mark:,g}</text>')
    parts += [f'<text x="{across(x)}" y="280" text-anchor="middle">{x:g}</text>' for x in xs]
    for i, (who, curve) in enumerate(curves.items()):
        colour = next((value for word, value in COLOURS.items() if word in who), GREY)
        points = " ".join(f"{across(x)},{down(figure.median)}" for x, figure in curve)
        spreads = "".join(f"M{across(x)} {down(figure.low)}V{down(figure.high)}" for x, figure in curve)
        place = f'x="{left + 16 + 200 * (i % 2)}" y="{36 + 15 * (i // 2)}"'
        parts.append(f'<text {place} fill="{colour}">{escape(who)}</text>')
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<path d="{spreads}" stroke="{colour}" stroke-width="6" stroke-linecap="round" opacity="0.6"/>')
    return "\n".join(parts)


def ticks(values: Sequence[float], log: bool) -> list[float]:
    """Round numbers around the values, from zero or, for a logarithmic axis, powers of ten: 370 -> 0, 100, ... 400"""
    if log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return [10.0**e for e in range(low, max(high, low + 1) + 1)]
    tenth = 10 ** math.floor(math.log10(max(values)))
    step = next(tenth * factor for factor in (0.2, 0.5, 1, 2) if max(values) <= 5 * tenth * factor)
    return [step * i for i in range(math.ceil(max(values) / step) + 1)]


# --- models that need no download ------------------------------------------------------------------------------------

SHAPES = {  # width, layers, heads, key and value heads, width of the MLP, vocabulary
    "15m": (288, 6, 6, 6, 768, 32_000),
    "smollm2-135m": (576, 30, 9, 3, 1536, 49_152),
    "llama-1b": (2048, 16, 32, 8, 8192, 128_256),
    "flat-152k": (128, 2, 4, 2, 384, 152_000),  # little but a vocabulary, and flat logits: the worst case for sampling
}
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def make_model(folder: Path, shape: str) -> Path:
    """Random weights in float32, a tied head, and a tokenizer with a text for each id, as real ones have."""
    from tokenizers import Tokenizer, decoders, models

    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True}
    config |= {"max_position_embeddings": 4096, **dict(zip((*FIELDS, "vocab_size"), SHAPES[shape], strict=True))}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={f"Ġ{i}": i for i in range(config["vocab_size"])}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    mx.random.seed(0)  # of several processes, all make the same
    shapes = read_config(folder, has_head=False).tensors()
    weights = {name: mx.ones(s) if len(s) == 1 else 0.02 * mx.random.normal(s) for name, s in shapes.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    del weights
    mx.clear_cache()  # the samples want the memory
    return folder


# --- the command line ------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = program.Parser("bench.py", description="Measure nanobatch, and others beside it.")
    add, usual = parser.add_argument, "decode,closed,steps"
    add("--model", help="a model folder, a hub id such as owner/name, or 'demo' (the default)")
    add("--shape", choices=SHAPES, help="random weights of this shape instead, in a temporary folder")
    says = f"measure these, too: {', '.join(PEERS)}, the folder of another checkout; mlx-lm@off: on that NANOBATCH_BLAS"
    add("--vs", default="", metavar="NAME,...", help=says)
    add("--parts", default=usual, help=f"among {','.join(PARTS)} (default: {usual})")
    add("--policy", default=next(iter(POLICIES)), choices=POLICIES, help="for every part but open, which has all")
    add("--rows", default="1,4,8,16", help="rows of decode, users of closed (default: 1,4,8,16)")
    add("--prompt", default="128", help="tokens of a prompt (default: 128)")
    add("--output", default="64", help="tokens of an answer (default: 64)")
    add("--samples", default="3", help="processes for each figure (default: 3)")
    add("--json", metavar="FILE", help="write all that was measured, after each sample")
    add("--plot", metavar="FILE.svg", help="draw decode and open")
    add("--from", dest="source", metavar="FILE", help="show what --json has written; measure nothing")
    add("--sample", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        args.rows = [read_whole("--rows", count, 1, 1024) for count in args.rows.split(",")]
        for name, least in (("prompt", 1), ("output", 2), ("samples", 1)):
            setattr(args, name, read_whole(f"--{name}", getattr(args, name), least, 100_000))
    except ValueError as error:
        parser.error(str(error))
    args.parts = args.parts.split(",")
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"--parts: {shown(part)} is no part; choose among {','.join(PARTS)}")
    if args.model is not None and args.shape:
        parser.error(f"--model {args.model} and --shape {args.shape} exclude each other; give one")
    if args.plot and not args.source and not {"decode", "open"} & set(args.parts):
        parser.error("--plot draws decode and open; add one of them to --parts")
    try:
        args.rivals = read_rivals(args.vs, args.policy)
        check_rivals(args.parts, args.rivals)
    except ValueError as error:
        parser.error(str(error))
    for path in filter(None, (args.json, args.plot)):
        try:
            Path(path).open("a").close()
        except OSError as error:
            parser.error(f"{path!r} cannot be written ({error.strerror}); name a file in a folder that is there")
    return args


def check_rivals(parts: Sequence[str], rivals: Sequence[Column]) -> None:
    """What stands in the way of measuring them is said before anything is measured."""
    peers = [rival.engine for rival in rivals if rival.engine in PEERS]
    for peer in peers:
        if why := obstacle(peer):
            raise ValueError(f"{why} --vs {peer}")
    if "newcomer" in parts:
        if why := obstacle("mlx-lm"):
            raise ValueError(f"{why} newcomer")
        if device.blas.name == "mlx":
            raise ValueError(
                "newcomer needs another BLAS than MLX's own; on Linux without a GPU: pip install -e '.[cpu]'"
            )
    if "same" in parts and not peers:
        raise ValueError(f"same compares with a peer; add --vs {' or --vs '.join(PEERS)}")
    alone = [part for part in ("newcomer", "idle") if part in parts]
    if program.backend() and (rivals or alone):
        raise ValueError(f"ranks measure one engine; leave out {alone[0] if alone else '--vs'}")


def load_data(path: str) -> dict:
    """What `--json` has written. If the file holds something else, one line says so."""
    try:
        data = json.loads(Path(path).read_text())
        summarise(data["records"])
        return {"command": str(data["command"]), "machine": dict(data["machine"]), "records": data["records"]}
    except OSError as error:
        raise ValueError(f"--from {path!r} cannot be read ({error.strerror}); name what --json has written") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"--from {path!r} holds something else; name what --json has written") from None


def measure_all(args: argparse.Namespace) -> dict:
    """Take all samples of all parts."""
    data = {
        "command": shlex.join(["python", "bench.py", *sys.argv[1:]]),
        "machine": describe_machine(args.rivals),
        "records": [],
    }
    with ExitStack() as stack:
        if args.shape:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="nanobatch-"))
            folder = make_model(Path(temporary), args.shape)
        else:
            folder = find(args.model or "demo").absolute()  # another checkout's samples run in a folder of their own
        usual = Spec(
            part="",
            contestant="",
            folder=str(folder),
            vocabulary=read_config(folder, has_head=False).V,
            rows=ROWS,
            prompt=args.prompt,
            output=args.output,
        )
        ours = our_column(args.policy)
        plan = make_plan(args.parts, args.rows, usual, ours, args.rivals)
        total = args.samples * sum(len(cell.columns) for cell in plan)
        tell = stack.enter_context(progress(total))
        for record in take_all(plan, args.samples, tell):
            data["records"].append(record)
            if args.json and not program.rank():  # after each sample, so that an interrupted run is not lost
                Path(args.json).write_text(json.dumps(data, indent=1))
    return data


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Gives a function that is told before each sample what the sample measures, and shows it on standard error.

    A terminal gets a bar, which draws between two samples and never during one. A file or a pipe gets a line a sample.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=total)
    began = time.perf_counter()
    done = 0

    def tell(stage: str) -> None:
        nonlocal done
        bar.update(task, completed=done, description=stage, refresh=True)
        done += 1
        if not console.is_terminal and not program.rank():
            seconds = time.perf_counter() - began
            print(f"nanobatch: {done} of {total} after {seconds:.0f} s: {stage}", file=sys.stderr, flush=True)

    with bar:
        yield tell


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if args.sample:
        return take_sample(args.sample)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception it ends the sample's process, too
    try:
        data = load_data(args.source) if args.source else measure_all(args)
        if program.rank():
            return 0
        show(data)
        if args.plot:
            Path(args.plot).write_text(draw(data["records"]))
    except (ValueError, Failure, OSError) as error:
        print(f"nanobatch: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    program.run(main)
