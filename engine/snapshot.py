"""Frozen views of an engine, in plain numbers without arrays or handles: a screen can draw them while the
engine runs, and a server can send them to another machine.

`Engine.snapshot()` returns a `Snapshot` with a view of each slot, of each visible request, and of each
step since the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from sys import getsizeof
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.prefill_progress import UNREAD, PrefillProgress
from models.forward_cost import ModelCost, Roof
from request import Committed, Plan, Request, StateCounts
from sched import Scheduler

if TYPE_CHECKING:
    from runner import RunningStep


def percentile(values: Iterable[float], part: float) -> float | None:
    """The nearest-rank percentile: of 1 to 100, 95 for 0.95. None if there is no value."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(part * len(ordered))) - 1] if ordered else None


@dataclass(frozen=True)
class Metrics:
    """Times in seconds; None where there is no such thing. `itl` is the inter-token latency."""

    queued_s: float | None
    ttft_s: float | None  # submit to first token
    tokens_per_s: float | None  # after the first
    itl_mean_s: float | None
    itl_p95_s: float | None
    itl_max_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: int = 0  # proposed
    accepted_tokens: int = 0  # of these
    cached_from: str = ""  # "slot" (the request's own) | "other_slot" | "disk"
    reread_tokens: int = 0  # prompt tokens whose rows were there, but no state


NARROWEST = 16  # the narrowest chunk that can be set
WIDEST = 8  # the widest, as a multiple of the engine's own


class Limits(NamedTuple):
    """The limits of an engine now: its slots, budget and policy, as last changed."""

    slots: int
    max_len: int
    chunk: int
    budget: int
    max_queue: int
    eager_first_token: bool  # a step with a first token is read before the next one is planned

    @staticmethod
    def from_scheduler(sched: Scheduler, eager_first_token: bool) -> Limits:
        return Limits(
            slots=sched.slots,
            max_len=sched.max_len,
            chunk=sched.chunk,
            budget=sched.budget,
            max_queue=sched.max_queue,
            eager_first_token=eager_first_token,
        )

    @property
    def budgets(self) -> tuple[int, int]:
        """The smallest and the largest budget that can be set: a row for each slot, and the narrowest
        or the widest chunk."""
        least = min(NARROWEST, self.chunk)
        return self.slots + least, self.slots + min(self.max_len, WIDEST * self.chunk)

    def with_budget(self, budget: int | None) -> Limits:
        """The same with another budget; None: as the engine was made.

        A step always has room for one whole chunk, however small the budget is, and a prompt has at
        most one chunk in a step. So the chunk changes with the budget: it gets what a row for each
        slot leaves.
        """
        if budget in (None, self.budget):
            return self
        least, most = self.budgets
        if not least <= budget <= most:
            raise ValueError(
                f"budget = {budget:,}, but here it is {least:,} to {most:,}: a row for each of "
                f"{self.slots:,} slots, and a chunk of {least - self.slots:,} to {most - self.slots:,}"
            )
        return self._replace(budget=budget, chunk=budget - self.slots)

    def adjusted(self, now: Limits, budget: int | str | None) -> Limits:
        """The same with another budget. "-" and "+": with a chunk half as wide as now, or twice."""
        if budget not in ("-", "+"):
            return self.with_budget(budget)
        least, most = self.budgets
        chunk = now.chunk // 2 if budget == "-" else now.chunk * 2
        if chunk == self.chunk:
            return self
        return self.with_budget(max(least, min(self.slots + chunk, most)))


class RanksView(NamedTuple):
    """The processes that share the model (`distributed/group.py`)."""

    backend: str = ""  # empty: there is one process
    memory: tuple[int, ...] = ()  # bytes of weights and slab, of each rank


class ExpertsView(NamedTuple):
    """Which experts a step took."""

    step: int
    # By layer: (expert, number of tokens), the most used first
    layers: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class SlotView:
    """One slot at one moment."""

    slot: int
    # "free" | "blocked" (free, but the policy admits no waiting request) | "prefill" | "decode"
    phase: str
    request: int | None = None
    used: int = 0  # rows in the slab
    prompt_tokens: int = 0
    output_tokens: int = 0
    reused: int = 0  # rows of an earlier prompt and its answer
    # Rows in a free slot: of its last prompt and answer
    remembered: int = 0
    checkpoints: tuple[int, ...] = ()  # rows at which a state of this text is kept
    prefill: PrefillProgress = UNREAD  # how far the prompt has been read, and how fast

    @staticmethod
    def from_scheduler(
        slot: int,
        owner: Request | None,
        sched: Scheduler,
        blocked: bool,
        prefill: PrefillProgress = UNREAD,
        checkpoints: tuple[int, ...] = (),
    ) -> SlotView:
        if owner is None:
            phase = "blocked" if blocked else "free"
            held = sched.prefixes.rows[slot]
            return SlotView(slot, phase, remembered=held, checkpoints=checkpoints)
        return SlotView(
            slot=slot,
            phase=owner.phase,
            request=owner.id,
            # The newest token's key and value are not there yet
            used=owner.prefilled + max(0, owner.committed - 1),
            prompt_tokens=len(owner.prompt),
            output_tokens=owner.committed,
            reused=owner.prefix.cached,
            prefill=prefill,
            checkpoints=checkpoints,
        )


@dataclass(frozen=True)
class RequestView:
    """One request at one moment, its text included."""

    id: int
    prompt: str
    client: str  # who asked
    origin: Any  # what was given to `submit`
    policy: str  # the one that admitted it; empty as long as it waits
    slot: int | None
    arrived: float
    metrics: Metrics
    ended: float | None = None
    text: str = ""
    lengths: tuple[int, ...] = ()  # the number of characters that came with each token
    reason: str | None = None
    error: str | None = None
    # With a grammar: the newest token, and its probability among those that were allowed. Then the
    # likeliest others, had there been no grammar: each with its probability, and whether allowed
    candidates: tuple[tuple[str, float, bool], ...] = ()
    is_thinking: bool = False  # the prompt has opened a block of reasoning
    max_tokens: int = 0  # 0: not known

    @property
    def admitted(self) -> float | None:
        """When it got its slot."""
        waited = self.metrics.queued_s
        return None if waited is None else self.arrived + waited

    @property
    def size(self) -> int:
        """Bytes that its texts take."""
        return sum(map(getsizeof, (self.prompt, self.text, self.lengths)))


class StepTimes(NamedTuple):
    """When a step reached each of its stages, on the engine's clock."""

    built: float  # the runner began to build it
    waited: float  # the engine began to wait for its tokens
    read: float
    committed: float


@dataclass(frozen=True)
class StepView:
    """One step as it was run: which request did what, and how long each stage took."""

    step: int
    admitted: tuple[tuple[int, int], ...]  # (slot, request)
    why: tuple[str, ...]  # for each of these: why this slot
    # (slot, request, start, stop): which piece of which prompt
    prefill: tuple[tuple[int, int, int, int], ...]
    decode: tuple[tuple[int, int], ...]  # (slot, request)
    # (slot, request): in a slot, but without a chunk in this step
    held: tuple[tuple[int, int], ...]
    # Slots whose request had ended before this step: their tokens were dropped
    ghosts: tuple[int, ...]
    blocked: tuple[int, ...]  # free slots for which the policy admitted no waiting request
    waiting: int  # requests in the queue afterwards
    policy: str  # the one that the step was planned under
    tokens: int  # that were delivered
    budget: int  # the most tokens that it might have had
    began: float  # on the engine's clock: planned
    ended: float  # committed
    # Where the time of the thread that steps went. The five add up to `seconds`.
    plan_s: float  # Python decided what the step does
    build_s: float  # Python built the step's graph
    # MLX took the graph's operations into its queue (`mx.async_eval`). On a CPU the queue is short,
    # and Python blocks until there is room, so the device does nearly all of its work in this time.
    # On a GPU this is the launch of kernels, and the device's own time is in `wait_s`. (No GPU has
    # been measured.)
    device_s: float
    # Python waited until the device had done the rest (`mx.eval`), and read the tokens
    wait_s: float
    commit_s: float  # Python delivered the tokens
    # (slot, draft tokens, accepted)
    drafts: tuple[tuple[int, int, int], ...] = ()
    # (slot, request, row): a chunk leaves a checkpoint at this row, in a model with states
    checkpoints: tuple[tuple[int, int, int], ...] = ()

    @staticmethod
    def from_plan(plan: Plan, **rest: Any) -> StepView:
        """A plan in plain numbers, once it has been run. `rest`: the fields that a plan lacks."""
        return StepView(
            plan.step,
            admitted=tuple((r.slot, r.id) for r in plan.admitted),
            why=tuple(r.admission.why for r in plan.admitted),
            prefill=tuple((c.slot, c.request.id, c.start, c.stop) for c in plan.chunks),
            decode=tuple((d.slot, d.request.id) for d in plan.decodes),
            held=tuple((r.slot, r.id) for r in plan.held),
            blocked=plan.blocked,
            waiting=plan.waiting,
            policy=plan.policy,
            budget=plan.budget,
            began=plan.at,
            checkpoints=tuple(
                (c.slot, c.request.id, c.stop)
                for c in plan.chunks
                if plan.moves and plan.moves[c.slot].target != c.slot
            ),
            **rest,
        )

    @staticmethod
    def from_commit(
        plan: Plan, run: RunningStep, done: Committed, tokens: int, times: StepTimes
    ) -> StepView:
        """A step of the engine. `tokens`: the number that was delivered."""
        return StepView.from_plan(
            plan,
            ghosts=done.ghosts,
            tokens=tokens,
            ended=times.committed,
            plan_s=times.built - plan.at,
            build_s=run.build_s,
            device_s=run.device_s,
            wait_s=run.wait_s + times.read - times.waited,
            commit_s=times.committed - times.read,
            drafts=done.drafts,
        )

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that were read."""
        return sum(stop - start for *_, start, stop in self.prefill)

    @property
    def draft_tokens(self) -> int:
        return sum(tried for _, tried, _ in self.drafts)

    @property
    def computed(self) -> int:
        """Tokens of the budget that it used."""
        return self.prompt_tokens + len(self.decode) + self.draft_tokens

    @property
    def accepted_tokens(self) -> int:
        return sum(accepted for *_, accepted in self.drafts)

    @property
    def python_s(self) -> float:
        """Python's own work on the step."""
        return self.plan_s + self.build_s + self.commit_s

    @property
    def seconds(self) -> float:
        """What it took of the engine's time. From `began` to `ended` is longer: the next step is
        planned meanwhile."""
        return self.python_s + self.device_s + self.wait_s


class Seen(NamedTuple):
    """How far an observer has seen: numbers of steps, ends and faults, and the newest request."""

    steps: int = 0
    ended: int = 0
    faults: int = 0
    request: int = -1


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment, and what has happened since the observer's last snapshot."""

    now: float
    limits: Limits
    policy: str
    draining_to: str | None  # the policy that takes over when all that runs has ended
    slots: tuple[SlotView, ...]
    waiting: int  # the length of the queue
    queue: tuple[tuple[int, float], ...]  # its head: (request, seconds waited), oldest first
    # All in a slot, and those that have come into the queue since
    requests: tuple[RequestView, ...]
    ended: tuple[RequestView, ...]  # since, oldest first
    missed_ends: int  # ends since that are no longer kept
    steps: tuple[StepView, ...]  # since, oldest first
    missed: int  # steps since that are no longer kept
    # Failures since, outside of any request: in `on_commit`, or in a command of an observer
    faults: tuple[str, ...]
    planned: int  # the newest step, which may still be in flight
    submitted: int
    finished: int
    output_tokens: int
    prompt_tokens: int  # read by all steps so far: cached tokens do not count
    steps_s: float  # the seconds of all steps so far
    seen: Seen
    ranks: RanksView
    model: ModelCost
    roof: Roof
    states: StateCounts
    step_s: float = 0.0  # what a step may take now while somebody decodes; 0: as long as it takes

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of all prompts that are being read now."""
        reading = [slot.prefill for slot in self.slots if slot.prefill.done < slot.prefill.total]
        return sum(each.tokens_per_s or 0.0 for each in reading)
