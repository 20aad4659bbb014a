"""Helpers for the engine tests: a tap on the logits, random schedules, and Ctrl-C at any line."""

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import nanobatch
import prefix
import request
import runner
import sched
from engine import deferred_interrupt, loop, snapshot
from engine import handle as handle_file
from engine import registry as request_registry
from nanobatch import Engine, Handle, SamplingParams
from runner import ForwardBatch
from sched import check_invariants


def exactly(tokens: int | None, **more) -> SamplingParams:
    """Return settings for answers of exactly this length: EOS does not end them. None: fill the slot."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


class Tap:
    """A tap that records the logits from which each token was sampled: `logits[request id, index]`, (V,)."""

    def __init__(self, engine: Engine):
        self.logits: dict[tuple[int, int], np.ndarray] = {}
        device, calls = engine.runner, []
        head, begin, finish = device.model.head, device.start_forward, device.start_sampling

        def tapped_head(x):
            logits = head(x)
            if len(x):  # empty in a pass that samples no token
                calls.append(logits)
            return logits

        owners = {}

        def tapped_begin(order: ForwardBatch):
            calls.clear()
            owners.update((request.slot, request.id) for request in engine.sched.running.values())
            begun = begin(order)
            assert len(calls) <= len(order.passes()), "the head is read once a pass"
            return begun

        def tapped_finish(begun, picks):
            chosen = [pick for slot in begun.slots for pick in picks[slot]]
            found = [row for logits in calls for row in np.array(logits)]
            # After a wrong draft, the logits are recorded once more when the right token is known
            for pick, logits in zip(chosen, found, strict=True):
                # A ghost's rows have index 0, like a new request's first token (`Engine._sampling_rows`)
                if owners[pick.slot] in engine.sched.running:
                    self.logits[owners[pick.slot], pick.index] = logits
            return finish(begun, picks)

        device.model = replace(device.model, head=tapped_head)
        device.start_forward = tapped_begin
        device.start_sampling = tapped_finish

    def of(self, handle: Handle) -> np.ndarray:
        """Return the logits that the request's tokens were sampled from, (tokens, V)."""
        return np.stack([self.logits[handle.id, index] for index in range(len(handle.tokens))])


@dataclass
class Ask:
    """A future request: its prompt, the length of its answer, and the number of steps before it is
    cancelled."""

    prompt: list[int]
    max_tokens: int
    cancel_after: int | None = None
    grammar: dict | None = None
    settings: SamplingParams | None = None  # replaces the usual settings

    def sampling(self) -> SamplingParams:
        if self.settings:
            return self.settings
        if self.grammar:
            return SamplingParams(max_tokens=self.max_tokens, grammar=self.grammar)
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)


def random_asks(
    rng: np.random.Generator,
    count: int,
    longest: int,
    tokens: int,
    cancels: float = 0.0,
    alike: float = 0.0,
) -> list[Ask]:
    """Return prompts of 1 to `longest` tokens, half of them short, with answers of 1 to `tokens`.

    A share `alike` of the prompts has a common prefix, of random length. A share `cancels` of the requests
    is cancelled after up to 19 steps.
    """
    asks, opening = [], rng.integers(0, 256, longest).tolist()
    for _ in range(count):
        length = int(
            rng.integers(1, longest if rng.random() < 0.5 else min(longest, 12), endpoint=True)
        )
        prompt = rng.integers(0, 256, length).tolist()
        if rng.random() < alike:
            common = int(rng.integers(1, longest, endpoint=True))
            prompt = (opening[:common] + prompt)[:longest]
        cancel = int(rng.integers(0, 20)) if rng.random() < cancels else None
        asks.append(Ask(prompt, int(rng.integers(1, tokens, endpoint=True)), cancel))
    return asks


def check(engine: Engine) -> None:
    """Assert the invariants of scheduler, slab and registry."""
    check_invariants(engine.sched)
    if engine.runner is not None and engine.runner.slab is not None:
        engine.runner.slab.check()
    assert engine.registry.open.keys() == engine.sched.running.keys() | engine.sched.waiting.keys()


def run_schedule(
    engine: Engine,
    asks: list[Ask],
    rng: np.random.Generator,
    at_last: Callable[[], object] = lambda: None,
) -> list[Handle]:
    """Submit the asks at random times and step until all requests have ended, checking every invariant
    after every step. `at_last` is called after every step from then on.
    """
    waiting, handles, cancels = list(asks), [], {}
    step = 0
    while True:
        while waiting and rng.random() < 0.4:
            ask = waiting.pop(0)
            handles.append(engine.submit(ask.prompt, ask.sampling()))
            if ask.cancel_after is not None:
                cancels.setdefault(step + ask.cancel_after, []).append(handles[-1])
        for handle in cancels.pop(step, []):
            handle.cancel()
        worked = engine.step()
        check(engine)
        step += 1
        if not waiting and all(handle.finish_reason for handle in handles):
            at_last()
        if not (worked or waiting):
            return handles


MODULES = (
    nanobatch,
    runner,
    request,
    sched,
    prefix,
    handle_file,
    request_registry,
    loop,
    snapshot,
    deferred_interrupt,
    threading,
)
WATCHED = {module.__file__ for module in MODULES}


def interrupt(function: Callable[[], object], at: int) -> bool:
    """Raise Ctrl-C at line number `at`, from 0, of our lines that a function runs. Return True if the function
    raised it, False if it returned.

    The signal is real, so the engine's own handling applies. The lines of Python's `threading` count, too,
    because a condition releases its lock there.
    """
    lines = iter(range(10**9))

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line" and next(lines) == at:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        function()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
