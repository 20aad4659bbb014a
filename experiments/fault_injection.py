"""What does a failure, a NaN or a lost client do to the other requests?

    step      raise an exception after the forward pass of the next step has been launched
    nan       overwrite the newest values of one slot with NaN
    client    cancel a request in the middle of its answer, as when a client hangs up

The open requests are the witnesses. Afterwards each one runs again alone, and the two answers are compared:
all tokens and all bits of the log probabilities, up to the point where the witness was cut off. The engine
contains no code for it: a different runner injects the fault for one step (`running_on`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from base.validation import shown
from benchmarks.answer_diff import Bits, Difference, difference
from engine.handle import Handle
from engine.runner_protocol import RunnerProtocol
from experiments.experiment import Experiment, draw_title, progress
from screen.draw.canvas import Canvas, Figure
from screen.draw.style import count, shorten
from screen.engine_view import ExperimentRecord
from screen.page import Page
from screen.state import State
from screen.workload import BURST, Ask

if TYPE_CHECKING:
    from nanobatch import Engine
    from runner import ForwardBatch, Runner, RunningStep
    from screen.commands import Session

# --- question -------------------------------------------------------------------------------------

BREAKS = {  # name -> title, mechanism
    "step": ("an exception in the next step", "raised when the forward pass has begun"),
    "nan": ("NaN in a slot", "written over the newest values of one request"),
    "client": ("a client that vanishes", "its request is cancelled in mid-answer"),
}
LIKELIEST = 5  # number of likeliest tokens compared at each position
LONGEST = 48  # maximum number of tokens of a witness that the experiment submits
FEWEST = 4  # with fewer open requests, the experiment submits its own witnesses
LONG_ANSWERS = [prompt for prompt, most in BURST if most >= 64]

# --- run ------------------------------------------------------------------------------------------


class Planted(Exception):
    """An exception raised on purpose."""


class Saboteur:
    """A wrapper of a runner that injects one fault. Before a step, `harm` may damage something, and returns a
    description if it did. Then `fault`, if any, is raised after the forward pass has been launched."""

    def __init__(self, ours: Runner, harm: Callable[[ForwardBatch], str], fault: Exception | None):
        self.did = ""
        self._ours = ours
        self._harm = harm
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def start_forward(self, order: ForwardBatch) -> RunningStep:
        if self.did:
            return self._ours.start_forward(order)
        self.did = self._harm(order)
        begun = self._ours.start_forward(order)
        if self.did and self._fault:
            raise self._fault
        return begun


@contextmanager
def running_on(engine: Engine, runner: RunnerProtocol) -> Iterator[None]:
    """Replace the engine's runner inside the `with` block."""
    with engine.changed:
        own = engine.runner
        engine.runner = runner
    try:
        yield
    finally:
        with engine.changed:
            engine.runner = own


class FaultInjection(Experiment):
    """Injects one of `BREAKS` and compares each witness with the same request run alone."""

    what = "breakage"

    def __init__(self, what: str):
        super().__init__(FaultInjectionRecord(what))
        self.handles: list[Handle] = []  # the witnesses

    def run(self) -> Iterator[FaultInjectionRecord]:
        if self.engine.snapshot().ranks.memory:
            raise ValueError("with several ranks a failed step ends them all; break one process")
        self.update(exact=self.engine.is_batch_invariant)
        ways = {"step": self._raise, "nan": self._poison, "client": self._hang_up}
        yield from self._gather()
        yield from ways[self.record.what]()
        while self._open(self.handles):
            yield self._update_witnesses()
        yield from self._compare()
        yield self.update(stage="over")

    def _gather(self) -> Iterator[FaultInjectionRecord]:
        """Use the running requests as witnesses, or submit some, and wait until they decode."""
        self.handles = self._open(self.client.own.values())
        if len(self.handles) < FEWEST:
            many = self.engine.sched.slots + FEWEST
            for i, prompt in enumerate(islice(cycle(LONG_ANSWERS), many)):
                temperature = 0.8 * (i % 2)
                ask = Ask(prompt, LONGEST, temperature, i, logprobs=LIKELIEST)
                self.handles.append(self.submit(ask))
        yield from self.until(lambda: self._victim() or not self._open(self.handles))
        self.handles = self._open(self.handles)

    @staticmethod
    def _open(handles: Sequence[Handle]) -> list[Handle]:
        return [handle for handle in handles if handle.finish_reason is None]

    def _victim(self) -> Handle | None:
        """Return the witness with the most tokens left, once half of the running witnesses decode."""
        running = [h for h in self._open(self.handles) if h.request.slot is not None]
        at_it = [handle for handle in running if len(handle.tokens) >= 3]
        if not at_it or 2 * len(at_it) < len(running):
            return None
        return max(at_it, key=lambda h: (h.request.max_tokens - len(h.tokens), -h.id))

    def _record_witnesses(self) -> None:
        """Record each witness's slot and token count when the fault is injected."""
        witnesses = [Witness(handle.id, where(handle)) for handle in self.handles]
        self.update(stage="goes on", witnesses=witnesses)

    def _update_witnesses(self) -> FaultInjectionRecord:
        witnesses = []
        for handle, known in zip(self.handles, self.record.witnesses, strict=True):
            changes = {"reason": handle.finish_reason, "error": handle.error or ""}
            witnesses.append(known._replace(tokens=len(handle.tokens), **changes))
        return self.update(witnesses=witnesses)

    # --- the three faults

    def _raise(self) -> Iterator[FaultInjectionRecord]:
        def harm(order: ForwardBatch) -> str:
            self._record_witnesses()
            return f"step {self.engine.sched.steps:,} raised an exception"

        fault = Planted("planted by /break step, to see who ends; nothing is wrong")
        yield from self._sabotage(harm, fault)

    def _poison(self) -> Iterator[FaultInjectionRecord]:
        """Write NaN into a slot. Only rows of the answer are overwritten, because other requests may share
        the prompt's rows and would legitimately become NaN, too."""
        slab = self.engine.runner.slab
        if slab is None:
            raise ValueError("this engine has no slab to write into")

        def harm(order: ForwardBatch) -> str:
            victim = self._victim()
            if victim is None:
                return ""
            slot = victim.request.slot
            first = len(victim.request.prompt)
            last = {decode.slot: decode.row for decode in order.decodes}.get(slot, 0)
            if last <= first:
                return ""
            self._record_witnesses()
            rows = slab.prefix(slot, last)
            rows[-1][:, :, first:] = math.nan
            slab.fill(slot, rows)
            where = f"rows {first:,} to {last - 1:,} of slot {slot}, of r{victim.id}"
            return f"the last layer's values in {where}, became NaN"

        yield from self._sabotage(harm)

    def _sabotage(
        self, harm: Callable[[ForwardBatch], str], fault: Exception | None = None
    ) -> Iterator[FaultInjectionRecord]:
        """Replace the runner until the fault is injected."""
        saboteur = Saboteur(self.engine.runner, harm, fault)
        with running_on(self.engine, saboteur):
            yield from self.until(lambda: saboteur.did or not self.engine.has_work)
        self._record_damage(saboteur.did)

    def _hang_up(self) -> Iterator[FaultInjectionRecord]:
        victim = self._victim()
        if victim is None:
            self._record_damage("")
        self._record_witnesses()
        self._record_damage(
            f"r{victim.id} was cancelled after {count(len(victim.tokens), 'token')}"
        )
        victim.cancel()
        yield self.record

    def _record_damage(self, words: str) -> None:
        if not words:
            raise ValueError("all requests had finished before anything could be broken; try again")
        self.update(did=words)

    # --- the comparison

    def _compare(self) -> Iterator[FaultInjectionRecord]:
        """Run each witness again, alone and without cached rows."""
        self._update_witnesses()
        self.update(stage="compares")
        for i, handle in enumerate(self.handles):
            again = yield from self.run_alone(partial(self._submit_again, handle))
            answer = Bits.from_handle(handle)
            witnesses = [*self.record.witnesses]
            until = None if witnesses[i].went_on else len(answer.tokens)
            found = difference(Bits.from_handle(again, until), answer)
            witnesses[i] = witnesses[i]._replace(covers=answer.numbers, difference=found)
            self.update(witnesses=witnesses)

    def _submit_again(self, handle: Handle) -> Handle:
        request = handle.request
        sampling = replace(handle.sampling, max_tokens=request.max_tokens, seed=handle.seed)
        origin = handle.origin._replace(mute=True)
        prompt = self.engine.text.encode_prompt(list(request.prompt))._replace(shown=handle.prompt)
        again = self.engine.submit(prompt, sampling, origin=origin, prefix_cache=False)
        return self.client.keep(again)


def where(handle: Handle) -> str:
    """Describe a request's slot and number of tokens."""
    slot = handle.request.slot
    words = "in line" if slot is None else f"slot {slot}"
    return f"{words}, {count(len(handle.tokens), 'token')}" if handle.tokens else words


def read_fault(text: str) -> str:
    """Parse the name of a fault."""
    if text not in BREAKS:
        raise ValueError(f"break = {shown(text)}; choose one of {', '.join(BREAKS)}")
    return text


def obey(session: Session, rest: str) -> str:
    """Inject a fault: /break step, nan or client."""
    if not rest:
        return f"break what? /break {', '.join(BREAKS)}"
    what = read_fault(rest)
    session.run_experiment(FaultInjection(what))
    return ""


# --- record ---------------------------------------------------------------------------------------


class Witness(NamedTuple):
    """A request that was open when the fault was injected."""

    id: int
    where: str  # its slot and number of tokens at that time
    reason: str | None = None
    error: str = ""
    tokens: int = 0
    covers: int | None = None  # number of log probabilities compared; None before the comparison
    difference: Difference | None = None  # compared with the same request alone

    @property
    def went_on(self) -> bool:
        return self.reason in ("stop", "length")


@dataclass(frozen=True)
class FaultInjectionRecord(ExperimentRecord):
    """The outcome of an injected fault."""

    name = "break"
    what: str  # one of `BREAKS`
    exact: bool = False  # the engine is batch-invariant
    # stage: "waits" | "goes on" | "compares" | "over"
    did: str = ""
    witnesses: Sequence[Witness] = ()

    @property
    def ended(self) -> list[Witness]:
        return [each for each in self.witnesses if each.reason and not each.went_on]

    @property
    def compared(self) -> list[Witness]:
        return [each for each in self.witnesses if each.covers is not None]

    @property
    def changed(self) -> list[Witness]:
        return [each for each in self.witnesses if each.difference]

    @property
    def so_far(self) -> str:
        if self.stage == "waits":
            return "Requests are submitted, so that a fault has something to hit."
        on = [each for each in self.witnesses if each.went_on]
        left = len(self.witnesses) - len(on) - len(self.ended)
        words = f"{len(self.ended):,} ended by it, {len(on):,} went on to the end of their answers"
        if left:
            return f"{words}, {left:,} still run"
        changed = len(self.changed)
        if len(self.compared) < len(self.witnesses):
            return f"{words}; {len(self.compared):,} compared so far, {changed:,} changed"
        return f"{words}; {changed:,} changed in a bit" if changed else f"{words}; no bit changed"

    @property
    def receipt(self) -> str:
        """A description of how much was compared."""
        tokens = sum(each.tokens for each in self.compared)
        numbers = sum(each.covers for each in self.compared)
        words = f"{count(tokens, 'token')} and {numbers:,} log probabilities"
        return f"{words} with those of the same requests alone, all bits"


def by_end(witnesses: Sequence[Witness]) -> list[tuple[str, list[Witness]]]:
    """Group witnesses by their error or finish reason."""
    found: dict[str, list[Witness]] = {}
    for each in witnesses:
        found.setdefault(each.error or each.reason, []).append(each)
    return list(found.items())


def ids(witnesses: Sequence[Witness]) -> str:
    return " ".join(f"r{each.id}" for each in witnesses)


# --- drawing --------------------------------------------------------------------------------------

NOT_INVARIANT = "this matrix product is not batch-invariant (engine.is_batch_invariant is False)"
COLUMNS = (
    Figure("request", 9, is_text=True),
    Figure("in that moment", 19, is_text=True),
    Figure("end", 11, is_text=True),
    Figure("tokens", 8, is_text=True),
)


def draw(state: State, on: Canvas) -> None:
    """Draw the three faults, and the outcome of the last one: which requests ended and what changed."""
    record = state.records.get("break")
    draw_title(state, on, "Break it", "1 to 3 break it")
    for number, (what, (title, how)) in enumerate(BREAKS.items(), 1):
        here = record is not None and record.what == what
        do = f"command('/break {what}')"
        pen = on.pen().put("▸" if here else " ", on.accent)
        pen.put(f"{number}  ", on.accent, True, do).put(title, "", here, do)
        pen.put(shorten(f": {how}", on.width - pen.width - 3), on.muted, do=do)
    if record is None:
        on.lines.append([])
        words = "Requests come, something is broken, and then each is run once more, alone."
        on.say(words, on.muted)
        return
    on.heading(f"What came of it: {BREAKS[record.what][0]}")
    name = "result" if record.stage == "over" else "so far"
    on.entry(name, progress(state.view, record), on.accent)
    on.entry("done", record.did)
    for how, some in by_end(record.ended):
        on.entry("ended", f"{ids(some)}: {how}", on.bad)
    if record.compared:
        on.entry("compared", record.receipt, on.muted)
    if record.changed and not record.exact:
        on.entry("but", NOT_INVARIANT, on.muted)
    if record.what == "step" and record.ended and on.has_keys:
        on.entry("errors", "E shows its traceback: Planted", on.muted)
    if record.witnesses:
        draw_witnesses(on, record)


def draw_witnesses(on: Canvas, record: FaultInjectionRecord) -> None:
    """Draw a row for each witness."""
    shown = on.columns(COLUMNS, more="as alone?")
    for each in record.witnesses:
        texts = {
            "request": f"r{each.id}",
            "in that moment": each.where,
            "end": each.reason or "runs",
            "tokens": f"{each.tokens:,}",
        }
        pen = on.row(shown, texts, "" if each.went_on or each.reason is None else on.bad)
        pen.put(verdict_of(each), on.bad if each.difference else "")


def verdict_of(each: Witness) -> str:
    if each.covers is None or not (each.tokens or each.went_on):
        return "–"
    if each.difference:
        return "✗ other bits" if each.difference.parted is None else "✗ other words"
    if not each.went_on:
        return "✓ until then"
    return "✓ all bits" if each.covers else "✓ all tokens"


PAGE = Page(
    "break",
    "K",
    "Break it",
    "an exception, NaN, a client that vanishes: who ends, who goes on?",
    draw,
    footer=18,
    obey=obey,
    example="nan",
    words=[*BREAKS],
    read=read_fault,
    own={str(number): f"command('/break {what}')" for number, what in enumerate(BREAKS, 1)},
    is_live=True,
    disturbs=True,
)
