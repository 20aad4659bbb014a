"""Chapter 5, second part: the engine. One step is plan -> run -> commit.

The problem. Requests arrive at any moment, and each is at a different point of its answer. There is
a forward pass that runs them all (`llama.py`), a slab that holds their keys and values (`kv.py`), a
scheduler that decides what runs next (`sched.py`), and a runner that computes it (`runner.py`).

The solution. `Engine` ties them together:

    prompt -> submit -> plan (sched.py) -> ForwardBatch -> Runner: forward, sample -> commit -> text
              any thread |________________ one thread at a time _________________|    any thread

A plan names requests; a `ForwardBatch` holds slots and plain numbers, all that a forward pass
needs. With run-ahead, the next step is started before the tokens of the last one are read back. A
step that is started but not read is *in flight*. If it runs a request that has ended, that is a
*ghost*.

The invariant: a request's answer depends on its prompt, its `SamplingParams` and the model alone:
not on its neighbours in the batch, not on its slot, and not on when it arrived. (A request that
samples at random needs a seed for that, and the engine has to be `is_batch_invariant`.)

Where next: `prompt_lookup.py`, or `engine/`: handles and snapshots, the thread that calls `step`, and
loading and unloading the model (`engine/model_lifecycle.py`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from base.error_reports import let_go, show_fault
from base.untrusted_files import ModelError
from base.validation import check_type
from engine.deferred_interrupt import defer_interrupt
from engine.disk_prefix_cache import SlotCache
from engine.handle import Handle, Result
from engine.loop import Driver, Loop
from engine.model_lifecycle import Lifecycle
from engine.model_source import ModelSource, Report
from engine.registry import RequestRegistry
from engine.runner_protocol import RunnerProtocol
from engine.snapshot import Snapshot, StepTimes
from engine.step_time import StepTime
from kernels import device
from kernels.device import device_lock, device_stream
from models import memory
from models.embedding_support import check_embeds
from models.layers import Model
from policies import DEFAULT, POLICIES, policy_of
from prompt_lookup import Drafter, PromptLookup
from request import Chunk, Decode, Plan, QueueFull, Request
from runner import ForwardBatch, RunningStep, sampling_rows
from sampling import SamplingRow
from sampling_params import SamplingParams
from sched import Scheduler
from text.grammar import Grammar
from text.tokenizer import Tokenizer

__all__ = ["POLICIES", "Engine", "Handle", "Model", "ModelError", "QueueFull", "Result"]
__all__ += ["SamplingParams", "Snapshot"]


class Engine:
    """A scheduler and a runner, tied together by `step`.

    `slots` sequences run at once, each at most `max_len` tokens long. By default both are
    sized to the free memory, up to 8 slots of `usual_len` tokens. `summary` says what was chosen.
    `chunk`: tokens of a prefill chunk, 128 by default on a CPU and 512 on a GPU.
    `budget`: tokens of a step, as in `Scheduler`. By default one for each slot, and two chunks.
    `step_ms`: milliseconds of a step while somebody decodes, which decide how much of a prompt it
    reads. By default the larger of 200 and four times a step without a chunk.
    `prefix_cache`: prefix caching. A prompt that begins like an earlier one starts from its rows.
    `speculate`: speculative decoding by prompt lookup, up to this many draft tokens per request and
    step; 0 turns it off. By default they are tried where they pay. A `Drafter` proposes its own.
    (If not `is_batch_invariant`, `step_ms` and `speculate` are off by default: tokens would depend on them.)
    `slot_cache`: "DIR" or "DIR:SIZE". Slots are saved there, and found again after a restart.
    `state_memory`: bytes for checkpoints, in a model with states (Qwen 3.5). By default two a slot.
    `embeds`: treat the model as an embedding model, even if its files do not say so.
    `on_commit` may be set by the caller. It receives the handles with new output, after each commit
    with tokens, and after a request ends outside a commit (cancel, close, a failed step). No lock
    is held then, so it may do anything, except wait for results in the thread of a `Loop`.
    """

    model: Model  # `Lifecycle` sets this and the next six, and most fields of `sched`
    text: Tokenizer
    runner: RunnerProtocol | None  # None while the model is unloaded
    drafter: Drafter
    step_time: StepTime
    is_batch_invariant: bool  # no bit of a request's logits depends on its neighbours
    summary: str

    def __init__(
        self,
        model: Model,
        text: Tokenizer,
        *,
        slots: int | None = None,
        max_len: int | None = None,
        usual_len: int = 1024,
        policy: str = DEFAULT,
        chunk: int | None = None,
        budget: int | None = None,
        step_ms: int | None = None,
        max_queue: int = 10_000,
        prefix_cache: bool = True,
        run_ahead: bool = True,
        speculate: int | Drafter | None = None,
        slot_cache: str | None = None,
        state_memory: int | None = None,
        embeds: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        runner: RunnerProtocol | None = None,  # a fake one, for tests
        sizes: memory.Sizes | None = None,  # set by `load`, before it reads the weights
    ):
        asked = (slots, max_len, chunk, budget, usual_len, None, state_memory)
        sizes = memory.agreed(model, sizes or memory.fit_beside(model, *asked))
        self.prefix_cache = prefix_cache
        self.run_ahead = run_ahead
        self.embeds = embeds
        self.eager_first_token = not device.has_gpu()  # see `_may_stay_in_flight`
        self.clock = clock
        self.ranks = model.ranks
        self.sched = Scheduler(sizes.slots, sizes.max_len, policy_of(policy), max_queue=max_queue)
        self.changed = threading.Condition()  # guards everything but arrays, and wakes waiters
        self.slot_cache = SlotCache(slot_cache, self.ranks.size, self.changed)
        self.driver = Driver(self.changed)
        self.on_commit: Callable[[list[Handle]], None] | None = None
        self.registry = RequestRegistry(model.cost)
        self._unstarted: Plan | None = None  # planned, but not started yet
        self._in_flight: deque[tuple[Plan, RunningStep]] = deque()  # oldest first
        self.lifecycle = Lifecycle(self, speculate, step_ms)
        self.lifecycle.serve(model, text, sizes, runner)
        self.summary += self.ranks.settle(model.config, partial(self._end_all, "error"))
        device.close_at_exit(self)

    # --- submit -> plan -> run -> commit

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping],
        sampling: SamplingParams | None = None,
        *,
        client: str = "",
        origin: object = None,
        grammar: Grammar | None = None,
        ends: Callable[[str], bool] | None = None,
        prefix_cache: bool = True,
        speculate: bool = True,
    ) -> Handle:
        """Queue a prompt: a text, chat messages, or token ids. Does not wait for a step.

        `client`: any name for the user. The policy `fair` shares the slots among clients.
        `origin`: any value; observers find it in `Snapshot`.
        `grammar`: `sampling.grammar` in compiled form, if there is one already (`text.grammar`).
        `ends`: called with each piece of the answer; True makes it the last one.
        `prefix_cache`, `speculate`: False forbids cached prefixes, or draft tokens.
        """
        sampling = SamplingParams() if sampling is None else sampling
        check_type("sampling", sampling, SamplingParams, "SamplingParams")
        check_type("client", client, str, "a text")
        text = self.text
        if sampling.embeds or not self.model.config.has_head:
            check_embeds(text.folder, sampling.embeds, self.embeds)
        if sampling.stop_tokens or sampling.logit_bias:
            text.check_ids([*sampling.stop_tokens, *sampling.logit_bias])
        ids, shown, is_thinking, _ = text.encode_prompt(prompt)
        if sampling.grammar and grammar is None:
            grammar = text.grammar(sampling.grammar)
        max_tokens = sampling.max_tokens or max(1, self.sched.max_len - len(ids))
        with defer_interrupt(), self.changed:
            if self.driver.is_closed:
                raise RuntimeError("the engine is closed; load another")
            if self.lifecycle.is_reloading or self.text is not text:  # another tokenizer's ids
                raise RuntimeError("the engine is loading another model; try again later")
            id = self.sched.submitted + 1
            shares = prefix_cache and self.prefix_cache
            request = Request(id, ids, max_tokens, self.clock(), shares, client)
            if speculate and self.drafter.most != 0:
                request.drafting.source = PromptLookup(grammar)
            handle = Handle(self, request, sampling, shown, origin, grammar, is_thinking, ends)
            self.sched.submit(request)  # raises if the request does not fit, or the queue is full
            self.registry.open[request.id] = handle
            self.changed.notify_all()
        return handle

    def step(self, plan: bool = True) -> bool:
        """Plan, run and commit once. With `plan=False`, only read back what is in flight. Return False if
        there was nothing to do, not even waiting for rows from disk.

        With run-ahead, step N+1 is started before N's tokens are read: what N sampled goes into N+1
        on the device, and Python's work overlaps with the device's (on a CPU, only a little).
        Without run-ahead, N is committed before N+1 is planned.

            device   |   run N             |   run N+1           |   run N+2
            Python   plan, build N+1 ------> commit N, plan, build N+2 ------> commit N+1 ...
                                           ^ N's tokens are read here, and N+1 already runs
        """
        if plan and self.lifecycle.needs_slab:
            self.lifecycle.open_files()  # without a lock, because a folder may be slow
        with self._changing(), device_lock, device_stream():  # one thread at a time
            try:
                planned = self._plan() if plan else None
                if planned:
                    self._run(planned)
                worked = bool(self._in_flight)
                while len(self._in_flight) > 1:
                    self._commit()
                if self._in_flight and not self._may_stay_in_flight(planned):
                    self._commit()
            except BaseException as error:
                self._fail(error)  # ends requests, but not the engine
                if not isinstance(error, Exception):  # SystemExit, for instance
                    raise
                return True
        return worked or (plan and self.slot_cache.wait(self.sched.running.values()))

    def _plan(self) -> Plan | None:
        """Ask the scheduler for the next step."""
        if self.lifecycle.needs_slab and not self.lifecycle.restore():
            return None
        with self.changed:
            limit = self.step_time.prompt_tokens(self.sched.running.values())
            plan = self.sched.plan(self.clock(), limit)
            self._unstarted = plan  # for `_fail`, until it is started
            self.registry.blocked = plan.blocked if plan else ()
            return plan

    def _run(self, plan: Plan) -> None:
        """Start a step on the device.

        A penalty or a grammar needs the previous token. With run-ahead, that token is still on the
        device. But only sampling has to wait for it. So a step with one of these starts its forward
        pass first. Then the previous step is committed, and sampling follows:

            device   |   run N          |   forward N+1           |   sample N+1
            Python   start N+1 --------> commit N, ask grammars --> sample N+1
        """
        if plan.overwritten:
            self.slot_cache.save(self.runner.slab, plan.overwritten)
        step = self.runner.start_forward(ForwardBatch.from_plan(plan))
        emitters = plan.emitters
        handles = [self.registry.open.get(member.request.id) for member in emitters]
        if any(handle and handle.needs_last_token for handle in handles):
            while self._in_flight:
                self._commit()
        rows = {member.slot: self._sampling_rows(member) for member in emitters}
        self._in_flight.append((plan, self.runner.start_sampling(step, rows)))
        self._unstarted = None

    def _commit(self) -> None:
        """Read the tokens of the oldest step in flight, and hand them to their requests."""
        plan, step = self._in_flight[0]
        began = self.clock()
        tokens, outputs = step.read_back()
        read = self.clock()
        accept = partial(self.registry.deliver, outputs, self.clock)
        with self.changed:
            self.sched.prove(plan, step.finite)
            done = self.sched.commit(plan, tokens, accept, read)
            times = StepTimes(step.began, began, read, self.clock())
            seconds = self.registry.record(plan, step, done, times)
            self.step_time.learn(plan, done, seconds)
            self.registry.record_time_left(self.step_time.estimates(self.sched, read))
            self.drafter.learn(plan, read)
            self.changed.notify_all()
        self._in_flight.popleft()

    def _sampling_rows(self, member: Chunk | Decode) -> list[SamplingRow]:
        """Describe how the tokens of a request are sampled. A failing grammar ends only its request."""
        handle = self.registry.open.get(member.request.id)
        if handle is None:  # the request has ended, and its tokens will be dropped
            return [SamplingRow(member.slot, SamplingParams(), 0, 0)] * (1 + len(member.draft))
        try:  # the tokens that the grammar allows at each row
            masks = handle.grammar.masks(member.draft) if handle.grammar else ()
        except BaseException as error:  # a panic in Rust is not an Exception
            masks = ()
            let_go(error)
            with self.changed:
                self._end(handle, "error", error)
        return sampling_rows(member, handle.sampling, handle.seed, masks)

    def _may_stay_in_flight(self, plan: Plan | None) -> bool:
        """True if the next step may start before the tokens of this one are read.

        On a CPU, a step that yields a first token is read at once (`eager_first_token`). MLX's queue is
        short there: starting the next step takes nearly as long as running it, and the token would be
        delivered only then. A step is also read at once if it, or the next one, may have draft tokens.
        """
        if plan is None or not self.run_ahead or plan.is_due(self.eager_first_token):
            return False
        return not self.drafter.should_read_now(plan)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Defer Ctrl-C during a change, then call `on_commit` without holding a lock."""
        try:
            with defer_interrupt():
                yield
        finally:
            self.registry.notify(self.on_commit, self.changed)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Block steps while the model is changed."""
        with self._changing(), device_lock, device_stream():
            while self._in_flight:
                self._commit()
            yield

    def _fail(self, error: BaseException) -> None:
        """Show the traceback of a step that failed, and end as few requests as possible.

        - If the step could not be started, the step before it is committed first.
        - Requests with a chunk in a failed step end, and those with a token planned (`lost_with`).
        - The others have yielded nothing. They go back to the queue, or stay in it.
        - All end if no step was planned or in flight (the cause is unknown then), or if no new
          slab could be allocated. With tensor parallelism, the process ends.
        """
        unstarted, self._unstarted = self._unstarted, None
        what = "a step" if unstarted is None else f"step {unstarted.step:,}"
        show_fault(f"{what} failed", error)
        self.ranks.fail(error)
        if unstarted is not None:
            try:
                while self._in_flight:
                    self._commit()
            except BaseException as fault:
                show_fault("the previous step failed, too", fault)
        plans = [plan for plan, _ in self._in_flight] + [unstarted] * (unstarted is not None)
        with self.changed:
            all_end = self.lifecycle.needs_slab or not plans
            for handle in self.registry.lost_with(plans, all_end):
                self._end(handle, "error", error)
            self._in_flight.clear()
            self.lifecycle.needs_slab = True
            self.sched.start_over()

    def _end(self, handle: Handle, reason: str, error: BaseException | str | None = None) -> None:
        """End a request outside a commit, in any thread. The caller holds the lock."""
        if handle.finish_reason is None:
            handle.close(error)
            self.sched.finish(handle.request, reason, self.clock())
        self.registry.retire(handle.id)
        self.changed.notify_all()

    def _end_all(self, reason: str, error: str | None = None) -> None:
        """End every open request, and accept no more."""
        with self._changing(), self.changed:
            self.driver.is_closed = True
            for handle in list(self.registry.open.values()):
                self._end(handle, reason, error)

    # --- for any thread

    def cancel(self, handle: Handle) -> None:
        """End a request in any phase. Does nothing if it has already ended."""
        with self._changing(), self.changed:
            if handle.id in self.registry.open:
                self._end(handle, "cancelled")

    def generate(self, prompts: Sequence, sampling: SamplingParams | None = None) -> list[Result]:
        """Run all prompts at once. Returns the results in the order of the prompts."""
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                with defer_interrupt():  # so that each submitted request is in the list
                    handles.append(self.submit(prompt, sampling))
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:  # some are open only if a submit raised, or after Ctrl-C
                handle.cancel()

    def embed(self, texts: Sequence, dimensions: int | None = None) -> list[Sequence[float]]:
        """Return an L2-normalized vector for each text or list of token ids. `dimensions`: keep only
        the first components, for models trained for that (Matryoshka)."""
        results = self.generate(texts, SamplingParams(embeds=True))
        return [result.unit_vector(dimensions) for result in results]

    def serving(self) -> Loop:
        """Step the engine in a thread: `with engine.serving(): ...`."""
        return Loop(self)

    @property
    def has_work(self) -> bool:
        return bool(self.sched.waiting or self.sched.running or self._in_flight)

    def snapshot(self, since: Snapshot | None = None) -> Snapshot:
        """Return what the engine is doing now, and what has happened since an earlier snapshot."""
        with self.changed:
            return self.registry.snapshot(self, since)

    def drain(self, to: str) -> None:
        """Change the policy once all running requests have ended, and clear the prefix cache."""
        with self.changed:
            self.sched.drain(policy_of(to))

    def set_budget(self, budget: int, chunk: int) -> None:
        """Limit the tokens of each future step (as in `Scheduler`), and of each chunk."""
        with self.changed:
            self.sched.set_budget(budget, chunk)

    # --- from load to close (`engine/model_lifecycle.py`)

    @classmethod
    def load(
        cls,
        model: str | Path = "demo",
        *,
        dtype: str = "auto",
        kv: str = "auto",
        attention: str = "auto",
        activations: str | int = "auto",
        report: Report = lambda stage: None,
        **options,
    ) -> Engine:
        """Load a folder, a hub id, a GGUF file or "demo", with the options of `Engine`. `kv`, `attention`
        and `activations` are passed to `ModelReader`. `report` receives a line for each stage."""
        source = ModelSource(str(model), dtype, kv, attention, activations, report, options)
        checked = source.check()
        engine = cls(checked.read_model(), checked.text, sizes=checked.sizes, **options)
        engine.lifecycle.source = checked.source
        return engine

    def release(self) -> None:
        """Unload weights and slab. The first step of the next request loads them again."""
        self.lifecycle.unload()

    def reload(self, model: str | Path | None = None, **sizes: int | None) -> None:
        """Load another model, or this one again, with new sizes (slots, max_len, usual_len, chunk,
        budget) if given. The new model is checked before this one is unloaded. If it fails to load
        even so, this one is loaded again. No request is accepted during a reload."""
        self.lifecycle.reload(model, sizes)

    def close(self) -> None:
        """Cancel every open request, and leave the device idle. May be called twice."""
        self._end_all("cancelled")
        self.driver.stop()
        with device_lock:  # no step runs
            self._in_flight.clear()
        self.lifecycle.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
