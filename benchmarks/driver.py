"""Take the samples of a benchmark. The same loop (`drive`) sends requests to every engine.

Each sample runs in a process of its own, so that it inherits no memory, caches or threads. Samples of
different columns alternate, so that a slowdown of the machine affects all columns. A sample's process
exits when this one does.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path

from base import installation
from base.foreign_modules import labelled
from base.machine import has_large_pages, processor
from benchmarks.answer_diff import first_other
from benchmarks.dictated_model import DictatedModel, texts
from benchmarks.metrics import (
    Delivery,
    Figures,
    bandwidth_figures,
    closed_figures,
    decode_figures,
    draft_figures,
    floor_figures,
    long_figures,
    open_figures,
    step_figures,
    sums_of,
)
from benchmarks.peers import PEERS, LlamaCpp, MlxLm, News, TimedRequest
from benchmarks.plan import (
    TURNS,
    Contestant,
    Setup,
    Spec,
    capacity,
    crowd_lengths,
)
from cli import options
from distributed import environment
from distributed.rendezvous import join
from engine.handle import Result
from engine.snapshot import Metrics, StepView
from engine.step_time import MOST_MS
from kernels import device
from kernels.device import mx
from nanobatch import Engine, Handle, QueueFull, SamplingParams

DRAFTED = 3  # number of texts per row in `speculate`
SCHEMA = {
    "type": "object",
    "properties": {
        f"is_the_{name}_of_this_order_known": {"type": "boolean"}
        for name in ("customer", "address", "shipment", "supplier", "warehouse", "discount")
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])
CHUNK = 128  # `chat`: all versions of nanobatch can resume prefill at a multiple of it
INTERLEAVED = 3  # `chat`: number of repetitions of each measurement
PATIENCE_S = 1800  # timeout of a sample in seconds
BESIDE = ("closed", "open", "long")  # parts that keep the default time limit of a step
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


class Nanobatch:
    def __init__(self, spec: Spec, slots: int, max_len: int):
        self.engine = Engine.load(
            spec.folder,
            dtype=spec.dtype,
            kv=spec.kv,
            attention=spec.attention,
            activations=spec.activations,
            policy=spec.contestant.split()[1],
            speculate=options.read_speculate(spec.speculate),
            slots=slots,
            max_len=max_len,
            step_ms=None if spec.part in BESIDE else MOST_MS,
        )
        self.handles: dict[int, Handle] = {}  # running requests
        self.reported = Counter()  # request id -> number of tokens reported so far

    def submit(self, request: TimedRequest) -> int:
        sampling = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
        handle = self.engine.submit(request.prompt, sampling)
        self.handles[handle.id] = handle
        return handle.id

    def step(self) -> Iterator[News]:
        """Run a step. Yield the id, the new tokens and the end flag of each running request."""
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
    requests: Iterable[TimedRequest],
    users: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Delivery]:
    """Send each request when it is due, and step until all have finished. Return the answers in the order
    of the requests.

    With `users` (a closed loop), a request is due when a user is idle. Without `users` (an open loop),
    it is due at its own time `at`, if all running answers have `after` tokens.
    """
    waiting = deque(requests)
    answers = []
    under_way = {}
    began = clock()

    def is_due(request: TimedRequest, now: float) -> bool:
        if users is not None:
            return len(under_way) < users
        return began + request.at <= now and all(
            len(answer.times) >= request.after for answer in under_way.values()
        )

    while waiting or under_way:
        now = clock()
        while waiting and is_due(waiting[0], now):
            request = waiting.popleft()
            is_timed = users is None and not request.after
            answers.append(Delivery(began + request.at if is_timed else now))
            under_way[contestant.submit(request)] = answers[-1]
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
    """A warmed-up contestant, with random prompts so that no prefix cache can help."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.random = random.Random(0)
        self.longest = spec.length or max(spec.prompt, spec.late) + spec.output + spec.overlap
        if spec.contestant.startswith("nanobatch"):
            self.contestant = Nanobatch(spec, spec.rows, self.longest)
        else:
            peer = PEERS[spec.contestant]
            self.contestant = peer(spec.folder, spec.rows, self.longest, spec.kv)
        if environment.rank():  # only rank 0 measures
            self.contestant.engine.lifecycle.follow()
            return
        drive(self.contestant, self.requests(spec.rows, output=min(spec.output, 16)))
        mx.reset_peak_memory()  # excludes the memory for loading

    def requests(
        self, count: int, prompt: int | None = None, output: int | None = None
    ) -> list[TimedRequest]:
        """Return requests with these lengths, by default the spec's."""
        ids = range(self.spec.vocabulary)
        prompt = prompt or self.spec.prompt
        output = output or self.spec.output
        return [TimedRequest(self.random.choices(ids, k=prompt), output) for _ in range(count)]

    def decode(self) -> Figures:
        spec = self.spec
        requests = self.requests(spec.rows, output=spec.output + spec.overlap)
        answers = drive(self.contestant, requests, clock=CLOCKS[spec.clock])
        figures = decode_figures(answers, spec.output)
        if (
            not isinstance(self.contestant, Nanobatch)
            or not device.is_batch_invariant()
            or spec.clock != "wall"
        ):
            return figures
        length = spec.prompt + spec.output // 2
        rate = figures["decode tokens/s"]
        return figures | bandwidth_figures(self.contestant.engine, spec.rows, length, rate)

    def closed(self) -> Figures:
        users = self.spec.rows
        clock = CLOCKS[self.spec.clock]
        answers = drive(self.contestant, self.requests(4 * users), users, clock)
        figures = closed_figures(answers, users)
        if not isinstance(self.contestant, LlamaCpp):
            figures["peak memory MiB"] = mx.get_peak_memory() / 2**20  # only MLX's memory
        return figures

    def open(self) -> Figures:
        """Measure an open loop with Poisson arrivals: gaps are exponentially distributed, with the spec's rate."""
        draw = random.Random(1)
        at = 0.0
        requests = []
        for length in crowd_lengths(self.spec.output):
            requests.append(TimedRequest(self.requests(1)[0].prompt, length, at))
            at += draw.expovariate(1) / self.spec.rate
        return open_figures(drive(self.contestant, requests))

    def long(self) -> Figures:
        spec = self.spec
        for _ in range(2):  # the first run is a warm-up
            (alone,) = drive(self.contestant, self.requests(1, spec.late, 2))
        rows = self.requests(spec.rows - 1, output=spec.output + spec.overlap)
        late = TimedRequest(
            self.requests(1, spec.late)[0].prompt, 2, after=min(32, spec.output // 4)
        )
        *answers, last = drive(self.contestant, [*rows, late])
        return long_figures(answers, last, alone)

    def same(self) -> Figures:
        spec = self.spec
        requests = self.requests(spec.rows)
        usual = spec._replace(contestant="nanobatch continuous")
        with closing(Nanobatch(usual, spec.rows, self.longest)) as ours:
            mine = [answer.tokens for answer in drive(ours, requests)]
        theirs = [answer.tokens for answer in drive(self.contestant, requests)]
        tokens = spec.rows * spec.output
        places = map(first_other, mine, theirs)
        equal = sum(spec.output if place is None else place for place in places)
        return {
            "equal tokens %": 100 * equal / tokens,
            "tokens": tokens,
            "distinct tokens": len(set(chain(*mine))),
        }

    def steps(self) -> Figures:
        spec = self.spec
        figures = step_figures(self.decode_steps())
        length = spec.prompt + spec.output // 2
        figures |= floor_figures(self.contestant.engine, spec.rows, length)
        figures["floor / step"] = figures["floor ms"] / figures["step ms"]
        return figures | (self.waits() if device.has_gpu() else {})

    def waits(self) -> Figures:
        """Measure decode with and without the wait before each pass (`Runner._start`)."""
        figures = {}
        for waits, way in ((True, "waiting"), (False, "not waiting")):
            self.contestant.engine.runner.waits = waits
            mx.reset_peak_memory()
            step = step_figures(self.decode_steps())["step ms"]
            figures[f"{way}: tokens/s"] = 1e3 * self.spec.rows / step
            figures[f"{way}: peak MB"] = mx.get_peak_memory() / 1e6
        return figures

    def chat(self) -> Figures:
        """Compare the last turn of a conversation with a single prompt of about the same length whose
        earlier rows are cached. Alternate the two measurements."""
        turns = []
        chunks = []
        for _ in range(INTERLEAVED):
            turns.append(self.last_turn())
            chunks.append(self.lone_chunk())
        turn_ms = 1e3 * statistics.median(turn.ttft_s for turn in turns)
        chunk_ms = 1e3 * statistics.median(chunk.ttft_s for chunk in chunks)
        return {
            f"turn {TURNS} TTFT ms": turn_ms,
            "lone chunk TTFT ms": chunk_ms,
            f"turn {TURNS} / lone chunk": turn_ms / chunk_ms,
            f"turn {TURNS} tokens read": turns[-1].prompt_tokens - turns[-1].cached_tokens,
            "lone chunk tokens read": chunks[-1].prompt_tokens - chunks[-1].cached_tokens,
        }

    def last_turn(self) -> Metrics:
        """Run a conversation in which each prompt consists of all earlier turns and new tokens. Return the
        metrics of the last turn."""
        said = []
        for _ in range(TURNS):
            (request,) = self.requests(1)
            said += request.prompt
            result = self.answer(said, self.spec.output)
            said += result.tokens
        return result.metrics

    def lone_chunk(self) -> Metrics:
        """Run a prompt about as long as the last turn's, with all but a turn's new tokens cached. Return its
        metrics."""
        new = self.spec.prompt + 1  # an answer's last token is not in the slab yet
        before = (TURNS - 1) * (self.spec.prompt + self.spec.output) - 1
        rows = before // CHUNK * CHUNK
        (request,) = self.requests(1, prompt=rows + new)
        self.answer(request.prompt[:rows], 1)
        return self.answer(request.prompt, 1).metrics

    def answer(self, prompt: list[int], max_tokens: int) -> Result:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self.contestant.engine.submit(prompt, sampling).result()

    def speculate(self) -> Figures:
        """Measure decode with dictated texts: one kind for all rows, or one for the first row and
        another for the others. The text "schema" measures the model's own answer to a JSON schema."""
        engine = self.contestant.engine
        if self.spec.text == "schema":
            return self.in_schema()
        dictated = DictatedModel(engine)
        kinds = [texts(kind, self.spec.vocabulary) for kind in self.spec.text.split()]
        figures = []
        for _ in range(DRAFTED):
            rows = [kinds[0], *[kinds[-1]] * (self.spec.rows - 1)]
            handles = [dictated.submit(next(kind)) for kind in rows]
            until = handles[: 1 if kinds[1:] else None]
            figures.append(draft_figures(engine, handles, until))
        return sums_of(figures)

    def in_schema(self) -> Figures:
        engine = self.contestant.engine
        (request,) = self.requests(1, 16)
        sampling = SamplingParams(max_tokens=200, grammar={"json": SCHEMA})
        try:
            handles = [engine.submit(request.prompt, sampling)]
        except ValueError:  # a tokenizer without letters cannot produce JSON
            return {}
        return sums_of([draft_figures(engine, handles, handles)])

    def decode_steps(self) -> list[StepView]:
        """Return steps in which all rows decode and nothing else happens."""
        spec = self.spec
        engine = self.contestant.engine
        for request in self.requests(spec.rows, output=spec.output + spec.overlap):
            self.contestant.submit(request)
        handles = list(self.contestant.handles.values())
        while not all(handle.tokens for handle in handles):
            engine.step()
        seen = engine.snapshot()
        for _ in range(spec.output + 2):
            engine.step()
        for handle in handles:
            handle.cancel()
        later = engine.snapshot(seen).steps[1:]  # the first step was already in flight
        return [step for step in later if len(step.decode) == spec.rows and not step.prefill]


class Failure(RuntimeError):
    """A sample failed for a reason other than a user's mistake."""


def run_sample(spec: Spec) -> Figures:
    sample = Sample(spec)
    with closing(sample.contestant):
        try:
            return {} if environment.rank() else getattr(sample, spec.part)()
        except Exception as error:
            # Otherwise the other ranks would wait for the next sample
            join().fail(error)
            raise


def take_sample(text: str) -> int:
    """Take one sample in this process, and print the figures or the user's mistake as a line of JSON."""
    spec = Spec(**json.loads(text))
    # Exit when the parent process does: see `measure`
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    try:
        answer = {"figures": run_sample(spec)}
        if spec.contestant != "llama.cpp":  # llama.cpp does not use a BLAS
            blas = device.blas
            name = os.environ.get("LD_PRELOAD") if spec.contestant == "mlx-lm" else ""
            answer["blas"] = f"{blas.name} ({blas.kernels})" if blas.kernels else name or blas.name
    except (ValueError, QueueFull) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0


def measure(spec: Spec, column: Contestant) -> dict:
    """Take one sample of a column in a new process. Return the figures, and the BLAS if one was used.

    The process exits when its input pipe is closed, so it cannot outlive this call. Ranks take samples in
    their own processes, because they are already connected and MPI does not let other processes join.

    subtle: `subprocess.run` kills the process on an interrupt, but not on one that arrives while it
    starts the process.
    """
    same = ("dtype", "activations", "speculate")
    spec = spec._replace(contestant=column.engine, **{name: getattr(column, name) for name in same})
    if environment.backend():
        return {"figures": run_sample(spec)}
    program = installation.start("bench.py")
    if column.checkout:
        program = [sys.executable, os.path.join(column.checkout, "bench.py")]
    # Pass only changed values: another checkout may lack new fields and have different defaults
    usual = Spec._field_defaults
    wanted = {name: value for name, value in spec._asdict().items() if value != usual.get(name)}
    theirs, ours = os.pipe()
    try:
        done = subprocess.run(
            [*program, "--sample", json.dumps(wanted)],
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
        said = done.stderr.splitlines() or ["it printed nothing"]
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
    """Append a record for each sample to `records`, then yield. `report` is called before each sample."""
    for setup in plan:
        for number in range(samples):
            for column in setup.columns[:: -1 if number % 2 else 1]:
                spec = setup.spec
                report(f"{spec.part}, {setup.x}, {column.name}")
                if spec.rate < math.inf and not environment.rank():
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
    """Describe the machine and the versions that the figures depend on."""
    machine = {
        "processor": processor(),
        "version": installation.version(),
        "load average": f"{os.getloadavg()[0]:.2f}",
        "device": labelled(device.named()),
        "commit": commit_of(installation.ROOT),
    }
    if device.is_batch_invariant() and not has_large_pages():
        machine["memory"] = (
            "without pages of 2 MiB (transparent_hugepage), so weights are read more slowly"
        )
    for package in ("mlx-lm", "llama-cpp-python"):
        with suppress(importlib.metadata.PackageNotFoundError):
            machine[package] = importlib.metadata.version(package)
    for rival in rivals:
        if rival.checkout:
            machine[f"commit of {rival.name}"] = commit_of(rival.checkout)
    return machine


def commit_of(folder: str | Path) -> str:
    """Return the commit that is checked out in a folder; "" without git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    return ""
