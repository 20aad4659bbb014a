"""The process of one rank in the tests: `python rank.py answers ROUNDS FOLDER ...` or `python rank.py FAULT`.

Rank 0 prints the results as JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernels import device  # noqa: F401  imported first, as in our programs

# isort: split
import numpy as np
from harness import Tap, check, random_asks, run_schedule

from models.load import ModelReader
from nanobatch import POLICIES, Engine, SamplingParams
from request import Request

# With 8 bits, activations that differ in the last bit between one process and two may round differently
SIZES = {"slots": 3, "max_len": 192, "chunk": 32, "speculate": 2, "activations": 32}
OPENING = list(range(40, 110))  # longer than two chunks
SETTINGS = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.3},
    {"presence_penalty": 0.9, "frequency_penalty": 0.3},
    {"logprobs": 2, "logit_bias": {70: 2.0}},
]


def again(decoding: Sequence[Request], left: int) -> dict[int, tuple[int, ...]]:
    """Draft the newest token twice, which is nearly always wrong."""
    speculate = {}
    for request in decoding:
        most = min(2, left // len(decoding), request.max_tokens - request.planned - 1)
        if most > 0 and request.planned == request.committed:
            speculate[request.id] = (request.answer[-1],) * most
    return speculate


def live(engine: Engine) -> list[list[int]]:
    """Run bursts under each policy, with drafts, shared prefixes, and cancels in the queue, in prefill and
    in decode. Return the tokens of the requests that were not cancelled."""
    engine.sched.draft = again
    answers = []
    for policy in POLICIES:
        engine.drain(policy)
        handles = []
        for n in range(6):
            prompt = [*OPENING[: 14 * n], 33 + n, 80 - n, 50 + 3 * n]
            sampling = SamplingParams(
                max_tokens=3 + n, ignore_eos=True, **SETTINGS[n % len(SETTINGS)]
            )
            handles.append(engine.submit(prompt, sampling))
        handles[5].cancel()
        step = 0
        while engine.step():
            check(engine)
            step += 1
            running = sorted(engine.sched.running.values(), key=lambda request: request.id)
            phases = {2: "prefill", 4: "decode"}
            for request in [r for r in running if r.phase == phases.get(step)][-1:]:
                next(handle for handle in handles if handle.id == request.id).cancel()
        answers += [handle.tokens for handle in handles if handle.finish_reason == "length"]
    return answers


def compare_bits(engine: Engine, rng: np.random.Generator, rounds: int) -> tuple[int, int]:
    """Run random schedules, then each request alone. Return the number of logit vectors compared, and how
    many differ."""
    compared = different = 0
    for _ in range(rounds):
        asks = random_asks(rng, 10, 90, 10, alike=0.5)
        tap = Tap(engine)
        together = [tap.of(handle) for handle in run_schedule(engine, asks, rng)]
        for ask, logits in zip(asks, together, strict=True):
            (handle,) = run_schedule(engine, [ask], rng)
            alone = tap.of(handle)
            compared += len(alone)
            different += int((alone != logits).any(axis=1).sum())
    return compared, different


def answer(rounds: int, folders: list[str]) -> None:
    """For each model, print the tokens of a short run, whether the engine is batch-invariant, and the counts
    of `compare_bits`."""
    for folder in folders:
        with Engine.load(folder, **SIZES) as engine:
            if engine.ranks.rank:
                engine.lifecycle.follow()
                continue
            tokens = live(engine)
            engine.drain("continuous")
            found = compare_bits(engine, np.random.default_rng(1), rounds)
            print(json.dumps([tokens, engine.is_batch_invariant, *found]), flush=True)


def fail(fault: str) -> None:
    """Submit long requests, and let one rank fail in the sixth step."""
    engine = Engine.load("demo", slots=2, max_len=1024)
    is_there = engine.ranks.rank == (0 if fault == "raises at rank 0" else 1)
    begin, calls = engine.runner.start_forward, []

    def failing(order):
        calls.append(order)
        if len(calls) == 6 and is_there:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OverflowError("planted")
        return begin(order)

    engine.runner.start_forward = failing
    if engine.ranks.rank:
        sys.exit(engine.lifecycle.follow())
    results = []

    def wait(handle) -> None:
        results.append(handle.result())
        if len(results) == 4:
            print(json.dumps([[r.finish_reason, r.error] for r in results]), flush=True)

    with engine.serving():
        handles = [
            engine.submit("Tell me a story.", SamplingParams(max_tokens=900, ignore_eos=True))
            for _ in range(4)
        ]
        for handle in handles:
            threading.Thread(target=wait, args=(handle,), daemon=True).start()
        time.sleep(120)


def kill_in_load() -> None:
    """Kill rank 1 while it loads its shard of the weights."""
    read = ModelReader.read_model

    def dying(reader: ModelReader, *between):
        if reader.ranks.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(reader, *between)

    ModelReader.read_model = dying
    Engine.load("demo", slots=2, max_len=1024)


if __name__ == "__main__":
    if sys.argv[1] == "answers":
        answer(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "killed in load":
        kill_in_load()
    else:
        fail(sys.argv[1])
