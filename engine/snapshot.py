"""Frozen views of an engine, as plain numbers without arrays or handles. The screen can draw them while the
engine runs, and a server can send them to another machine.

`Engine.snapshot()` returns a `Snapshot` with a view of each slot, of each visible request, and of each
step since the last snapshot.
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
    """Return the nearest-rank percentile: 95 for the values 1 to 100 and 0.95. None if there are no values."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(part * len(ordered))) - 1] if ordered else None


@dataclass(frozen=True)
class Metrics:
    """Metrics of one request. Times are in seconds, None if not available. `itl`: inter-token latency."""

    queued_s: float | None
    ttft_s: float | None  # submit to first token
    tokens_per_s: float | None  # from the first token to the last
    itl_mean_s: float | None
    itl_p95_s: float | None
    itl_max_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: int = 0  # draft tokens proposed
    accepted_tokens: int = 0  # draft tokens accepted
    cached_from: str = ""  # "slot" (the request's own) | "other_slot" | "disk"
    reread_tokens: int = 0  # prompt tokens whose rows were cached, but without a state


NARROWEST = 16  # the smallest chunk that can be set
WIDEST = 8  # the largest chunk that can be set, as a multiple of the engine's default


class Limits(NamedTuple):
    """The limits of an engine: slots, chunk, budget and queue."""

    slots: int
    max_len: int
    chunk: int
    budget: int
    max_queue: int
    eager_first_token: bool  # a step with a first token is committed before the next one is planned

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
        """The smallest and largest budgets that can be set: a row for each slot, plus the smallest or
        largest chunk."""
        least = min(NARROWEST, self.chunk)
        return self.slots + least, self.slots + min(self.max_len, WIDEST * self.chunk)

    def with_budget(self, budget: int | None) -> Limits:
        """Return these limits with a different budget, or unchanged for None.

        A step always has room for one full chunk, however small the budget is, and a prompt has at most
        one chunk in a step. So the chunk changes with the budget: it is the budget minus a row for each
        slot.
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
        """Return these limits with a different budget. "-" and "+" halve or double the chunk of `now`, as far as
        `budgets` allows."""
        if budget not in ("-", "+"):
            return self.with_budget(budget)
        least, most = self.budgets
        chunk = now.chunk // 2 if budget == "-" else now.chunk * 2
        if chunk == self.chunk:
            return self
        return self.with_budget(max(least, min(self.slots + chunk, most)))


class RanksView(NamedTuple):
    """The processes that share the model (`distributed/group.py`)."""

    backend: str = ""  # empty for a single process
    memory: tuple[int, ...] = ()  # bytes of weights and slab on each rank


class ExpertsView(NamedTuple):
    """The experts that a step used."""

    step: int
    # For each layer: (expert, number of tokens), most used first
    layers: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class SlotView:
    """The state of one slot."""

    slot: int
    # "free" | "blocked" (free, but the policy admits no waiting request) | "prefill" | "decode"
    phase: str
    request: int | None = None
    used: int = 0  # rows in the slab
    prompt_tokens: int = 0
    output_tokens: int = 0
    reused: int = 0  # rows reused from an earlier prompt and its answer
    # Rows in a free slot that are still cached, from its last prompt and answer
    remembered: int = 0
    checkpoints: tuple[int, ...] = ()  # rows with a checkpoint of the state
    prefill: PrefillProgress = UNREAD

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
            # The newest token's key and value are not computed yet
            used=owner.prefilled + max(0, owner.committed - 1),
            prompt_tokens=len(owner.prompt),
            output_tokens=owner.committed,
            reused=owner.prefix.cached,
            prefill=prefill,
            checkpoints=checkpoints,
        )


@dataclass(frozen=True)
class RequestView:
    """The state of one request, including its text."""

    id: int
    prompt: str
    client: str  # the client that sent it
    origin: Any  # as passed to `submit`
    policy: str  # the policy that admitted it; empty while it waits
    slot: int | None
    arrived: float
    metrics: Metrics
    ended: float | None = None
    text: str = ""
    lengths: tuple[int, ...] = ()  # the number of characters that each token added
    reason: str | None = None
    error: str | None = None
    # With a grammar: the newest token with its probability among the allowed tokens, then the most
    # likely tokens without the grammar. (text, probability, allowed)
    candidates: tuple[tuple[str, float, bool], ...] = ()
    is_thinking: bool = False  # the prompt opens a reasoning block
    max_tokens: int = 0  # 0: unknown

    @property
    def admitted(self) -> float | None:
        """When the request got its slot, or None."""
        waited = self.metrics.queued_s
        return None if waited is None else self.arrived + waited

    @property
    def size(self) -> int:
        """The size of the request's texts in bytes."""
        return sum(map(getsizeof, (self.prompt, self.text, self.lengths)))


class StepTimes(NamedTuple):
    """When a step reached each stage, on the engine's clock."""

    built: float  # the runner began to build the graph
    waited: float  # the engine began to wait for the tokens
    read: float
    committed: float


@dataclass(frozen=True)
class StepView:
    """A committed step: the work of each request, and the time of each stage."""

    step: int
    admitted: tuple[tuple[int, int], ...]  # (slot, request)
    why: tuple[str, ...]  # for each admitted request: why it got this slot
    # (slot, request, start, stop): the chunk prompt[start:stop]
    prefill: tuple[tuple[int, int, int, int], ...]
    decode: tuple[tuple[int, int], ...]  # (slot, request)
    # (slot, request): requests in prefill without a chunk in this step
    held: tuple[tuple[int, int], ...]
    # Slots whose request had already ended, so that the step's tokens for them were dropped
    ghosts: tuple[int, ...]
    blocked: tuple[int, ...]  # free slots for which the policy admitted no waiting request
    waiting: int  # length of the queue after admission
    policy: str  # the policy that planned the step
    tokens: int  # number of tokens delivered
    budget: int  # maximum number of tokens in the step
    began: float  # when it was planned, on the engine's clock
    ended: float  # when it was committed
    # The time of the stepping thread. The five stages add up to `seconds`
    plan_s: float  # planning in Python
    build_s: float  # building the graph in Python
    # Passing the graph's operations to MLX (`mx.async_eval`). On a CPU its queue is short, and Python
    # blocks until there is room, so the device does nearly all of its work in this time. On a GPU this
    # is the launch of kernels, and the device's time is in `wait_s`. (Not measured on a GPU.)
    device_s: float
    # Waiting for the device to finish (`mx.eval`), and reading the tokens
    wait_s: float
    commit_s: float  # delivering the tokens
    # (slot, draft tokens, accepted)
    drafts: tuple[tuple[int, int, int], ...] = ()
    # (slot, request, row): chunks that leave a checkpoint at this row, in a model with states
    checkpoints: tuple[tuple[int, int, int], ...] = ()

    @staticmethod
    def from_plan(plan: Plan, **rest: Any) -> StepView:
        """Return the view of a plan that has been run. `rest`: the fields that a plan lacks."""
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
        """Return the view of a committed step. `tokens`: the number of tokens delivered."""
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
        """The number of prompt tokens in the step's chunks."""
        return sum(stop - start for *_, start, stop in self.prefill)

    @property
    def draft_tokens(self) -> int:
        return sum(tried for _, tried, _ in self.drafts)

    @property
    def computed(self) -> int:
        """The number of tokens that count towards the budget."""
        return self.prompt_tokens + len(self.decode) + self.draft_tokens

    @property
    def accepted_tokens(self) -> int:
        return sum(accepted for *_, accepted in self.drafts)

    @property
    def python_s(self) -> float:
        """The seconds spent in Python: planning, building and committing."""
        return self.plan_s + self.build_s + self.commit_s

    @property
    def seconds(self) -> float:
        """The engine's time for this step. With run-ahead, `ended - began` is longer, because the next step is
        planned before this one is committed."""
        return self.python_s + self.device_s + self.wait_s


class Seen(NamedTuple):
    """What an observer has seen so far: the counts of steps, ended requests and faults, and the newest
    request."""

    steps: int = 0
    ended: int = 0
    faults: int = 0
    request: int = -1


@dataclass(frozen=True)
class Snapshot:
    """The state of the engine, and the events since the observer's last snapshot."""

    now: float
    limits: Limits
    policy: str
    draining_to: str | None  # the next policy, once all running requests have ended
    slots: tuple[SlotView, ...]
    waiting: int  # length of the queue
    queue: tuple[tuple[int, float], ...]  # its head: (request, seconds waited), oldest first
    # Requests in slots, and requests that joined the queue since the last snapshot
    requests: tuple[RequestView, ...]
    ended: tuple[RequestView, ...]  # ended since the last snapshot, oldest first
    missed_ends: int  # number of requests that ended since then, but are no longer kept
    steps: tuple[StepView, ...]  # committed since then, oldest first
    missed: int  # number of steps since then that are no longer kept
    # Failures since then outside any request: in `on_commit`, or in an observer's command
    faults: tuple[str, ...]
    planned: int  # the newest step, which may still be in flight
    submitted: int
    finished: int
    output_tokens: int
    prompt_tokens: int  # in all steps so far, excluding cached tokens
    steps_s: float  # total seconds of all steps so far
    seen: Seen
    ranks: RanksView
    model: ModelCost
    roof: Roof
    states: StateCounts
    step_s: float = 0.0  # the current time limit of a step while a request decodes; 0: no limit

    @property
    def prompt_tokens_per_s(self) -> float:
        """The total rate of all prompts in prefill."""
        reading = [slot.prefill for slot in self.slots if slot.prefill.done < slot.prefill.total]
        return sum(each.tokens_per_s or 0.0 for each in reading)
