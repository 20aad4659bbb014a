"""Chapter 5: the engine. An order becomes tokens (`Runner`), and the wheel turns (`Engine`): plan
-> run -> commit.

The problem. Requests come at any moment, and each is at another place of its answer. The chapters
before have the parts: a forward pass that takes them all (`llama.py`), a slab that holds their keys
and values (`kv.py`), a scheduler that decides what runs next (`sched.py`), and a sampler for each
of them (`sampling.py`). Here they are tied together:

    prompt -> submit -> plan (sched.py) -> order -> Runner: forward, sample -> commit -> text
              any thread |_____________ one thread at a time ______________|      any thread

One turn of the wheel is `Engine.step`. A plan names requests; an order names slots and numbers, and
is all that a forward pass needs to know. A pick says how a token is chosen from its logits.

    flight   a step that has been started, and not been read
    ghost    a sequence that runs in a step although its request has ended meanwhile
    rank     one of several processes that share a model; rank 0 leads, the others follow

The invariant: a request's answer depends on its prompt, its `SamplingParams` and the model alone: not on
its neighbours, not on its slot, and not on the moment when it came. (A request that draws its
tokens at random needs a seed for that.)

Where next: what all of this leans on lies in `parts/`, and can wait. Handles and snapshots and the
thread that steps, how a folder becomes a model, how tokens become text.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from analysis.roofline import measure
from kernels import mlx as device
from kernels.mlx import device_lock, device_stream, mx
from kv import Slab, Window
from llama import forward
from models.embedding_support import check_embeds
from models.layers import Model
from models.memory import (
    Sizes,
    agreed,
    described,
    far_position,
    fit_beside,
    is_batch_invariant,
    slab_of,
    slab_shape,
)
from models.param_count import nbytes_of
from policies import DEFAULT, POLICIES, policy_of
from prompt_lookup import Drafter, PromptLookup
from runtime.embeddings import unit
from runtime.errors import describe, let_go, show_fault
from runtime.files import ModelError
from runtime.handle import Handle, Result, TokenLogprob
from runtime.loop import Loop
from runtime.model_source import Checked, Report, Source
from runtime.registry import RequestRegistry
from runtime.sampling_params import SamplingParams
from runtime.signals import Held
from runtime.snapshot import ExpertsView, Limits, Roof, Snapshot, StepView
from sampling import PENALTY_CONTEXT, Logprobs, SamplingRow, SlotState, choose
from sched import Chunk, Decode, Plan, QueueFull, Request, Scheduler
from text.tokenizer import Tokenizer

__all__ = [
    "POLICIES",
    "Engine",
    "Handle",
    "Model",
    "ModelError",
    "QueueFull",
    "Result",
    "SamplingParams",
    "Snapshot",
]


# --- an order: what the device does in one step -------------------------------------------------


class Prefill(NamedTuple):
    """A chunk of a prompt that goes into a slot."""

    slot: int
    ids: tuple[int, ...]
    start: int  # the row of its first token
    source: int | None  # rows [0:start] are copied from this slot before
    asked: bool  # the chunk ends its prompt: a token is sampled from its last one


class Decoding(NamedTuple):
    """A sequence whose newest token goes into a row, and guesses into the rows behind."""

    slot: int
    row: int
    ids: tuple[int, ...]  # of these tokens; empty: the device alone knows the newest one


class ForwardBatch(NamedTuple):
    """A plan without its requests: plain numbers.

    Together with the slab and each slot's newest token, an order decides the logits. So other ranks
    can run it, too, and the same orders give the same bits.
    """

    scrubs: Sequence[tuple[int, int, int]]  # (slot, start, stop): rows to be zeroed first
    prefills: Sequence[Prefill]
    decodes: Sequence[Decoding]

    @staticmethod
    def of(plan: Plan) -> ForwardBatch:
        prefills = []
        for chunk in plan.chunks:
            ids = chunk.request.prompt[chunk.start : chunk.stop]
            prefills.append(Prefill(chunk.slot, ids, chunk.start, chunk.source, asked=chunk.emits))
        decodes = []
        for decode in plan.decodes:
            request = decode.request
            is_known = first_of(decode) == request.committed  # nothing of it is in flight
            ids = (request.answer[-1], *decode.guess) if is_known else ()
            decodes.append(Decoding(decode.slot, decode.position, ids))
        decodes.sort()  # neighbouring slots are one view of the slab
        return ForwardBatch(plan.scrubs, prefills, decodes)

    def passes(self) -> list[tuple[list[Prefill], Sequence[Decoding]]]:
        """The chunks and the decoding sequences of each forward pass.

        In nearly all steps there is one pass, so each weight is read once. Only a chunk that copies
        rows which the pass itself writes starts another one.
        """
        passes: list[list[Prefill]] = [[]]
        written: set[int] = set()  # the slots that the newest pass writes
        for prefill in self.prefills:
            if prefill.source in written:
                passes.append([])
                written.clear()
            passes[-1].append(prefill)
            written.add(prefill.slot)
        *before, last = passes
        return [*((prefills, ()) for prefills in before), (last, self.decodes)]


def first_of(member: Chunk | Decode) -> int:
    """Which token of its answer comes first out of this part of a plan, from 0."""
    return member.request.planned - 1 - len(member.guess)


Picks = Mapping[int, Sequence[SamplingRow]]  # by slot: how a token is chosen for each of its rows


def picks_of(member: Chunk | Decode, handle: Handle, masks: Sequence[bytes]) -> list[SamplingRow]:
    """How the next tokens are chosen of a request that has just been planned.

    `masks`: what its grammar allows at each place, as far as its guesses are allowed.
    """
    request = member.request
    before: tuple[int, ...] = ()
    if handle.sampling.looks_back:
        before = (*request.prompt[-PENALTY_CONTEXT:], *request.answer)
    picks = []
    for i in range(1 + len(member.guess)):
        seen = before and (*before, *member.guess[:i])
        mask = masks[min(i, len(masks) - 1)] if masks else None
        pick = SamplingRow(
            member.slot, handle.sampling, handle.seed, first_of(member) + i, seen, mask
        )
        picks.append(pick)
    return picks


# --- the runner: an order becomes tokens --------------------------------------------------------


def alike(decodes: Sequence[Decoding]) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Those that decode, by how many tokens are known of each: slots, rows, and all these tokens."""

    def known(decode: Decoding) -> int:
        return len(decode.ids)

    for _, group in groupby(sorted(decodes, key=known), key=known):
        slots, rows, ids = zip(*group, strict=True)
        yield list(slots), list(rows), list(chain(*ids))


PADDING = 16  # on a GPU, a chunk is padded to a multiple of this many tokens


class LaunchedStep(NamedTuple):
    """A step whose forward passes have been started, and whose tokens have yet to be chosen."""

    order: ForwardBatch
    states: list[mx.array]  # (n, D): one for each pass that asks
    logits: list[mx.array]  # (n, V)
    slots: list[int]  # whose rows of logits follow each other
    proofs: dict[int, mx.array]  # (), by slot: of each chunk that asks for no token
    began: float
    took: float


class InFlightStep(NamedTuple):
    """A step that has been started, and whose tokens have not been read yet."""

    # (slots, 1 + guesses): what each row of a slot says. -1 if nothing was asked there, or if the
    # logits were not finite
    tokens: mx.array
    logprobs: list[Logprobs]
    vectors: dict[int, mx.array]  # (D,), by slot: the last states of prompts without an answer
    began: float
    build_s: float  # Python built the graph
    device_s: float  # MLX took the graph into its queue (`Runner._enqueue`)
    wait_s: float  # Python waited for the pass before (`Runner._start`)
    proofs: Mapping[int, mx.array] = {}  # (), by slot: 0 if the rows of a chunk are finite

    @property
    def finite(self) -> list[int]:
        """Once the step is read: the slots of chunks that asked for no token, and are finite."""
        return [slot for slot, proof in self.proofs.items() if proof.item() == 0]

    def read(self) -> tuple[list[list[int]], dict[tuple[int, int], TokenLogprob | array]]:
        """Wait for the step: the tokens by slot, and by slot and index the log probabilities that
        were asked for, or the vector."""
        # Here, in `_start` and in `_enqueue` Python waits
        mx.eval(self.tokens, self.logprobs, self.vectors, self.proofs)
        found = {}
        for part in self.logprobs:
            for pick, logprob, top, free in part.read():
                found[pick.slot, pick.index] = TokenLogprob(logprob, top, free)
        for slot, vector in self.vectors.items():
            found[slot, 0] = array("f", bytes(memoryview(vector)))
        return self.tokens.tolist(), found


class Runner:
    """The device half of the engine: the model, the slab, each slot's newest tokens. No request.

    The same orders and picks in the same sequence give the same bits. Only the times of a flight
    depend on the clock.
    """

    def __init__(self, model: Model, sizes: Sizes, clock: Callable[[], float] = time.perf_counter):
        self.model = model.for_slots_of(sizes.max_len)
        self.ranks = model.ranks
        self.clock = clock
        self._device_s = 0.0  # of the step that is being started
        self._wait_s = 0.0
        self._shape = slab_shape(model.config, sizes.slots, sizes.max_len, sizes.chunk)
        self.slab: Slab | None = None
        self.reset()

    def reset(self) -> None:
        """A new slab, with nothing in it."""
        self._reading: Sequence[mx.array] = ()  # until these are computed, the slab is read
        self.slab = None  # let the old one go before a new one is made
        self.slab = Slab(*self._shape, self.model.kv_dtype, self.model.is_fused)
        self._newest = mx.zeros(self.slab.slots, mx.int32)  # (slots,): each slot's newest token
        self._slot_state = SlotState(self.slab.slots, self.model.config.V)

    def warm_up(self) -> None:
        """Run a prompt of one token, and the next token. What comes first is slow."""
        if self.ranks.rank:
            return  # it will be told to
        with device_lock, device_stream():
            picks = {0: [SamplingRow(0, SamplingParams(), 0, 0)]}
            prompt = Prefill(slot=0, ids=(0,), start=0, source=None, asked=True)
            self.run(ForwardBatch((), (prompt,), ()), picks).read()
            self.run(ForwardBatch((), (), [Decoding(0, 1, ())]), picks).read()
            self.reset()

    def run(self, order: ForwardBatch, picks: Picks) -> InFlightStep:
        """Both halves of a step, one after the other."""
        return self.finish(self.begin(order), picks)

    def begin(self, order: ForwardBatch) -> LaunchedStep:
        """The first half of a step: start each forward pass as soon as it is built."""
        began = self.clock()
        self._device_s = 0.0
        self._wait_s = 0.0
        if self.ranks.leads:
            self.ranks.tell(list(order))
        for slot, start, stop in order.scrubs:
            self.slab.scrub(slot, start, stop)
        states, logits, slots = self._forward(order)
        proofs = self._prove(order.prefills)
        return LaunchedStep(order, states, logits, slots, proofs, began, took=self.clock() - began)

    def finish(self, begun: LaunchedStep, picks: Picks) -> InFlightStep:
        """The second half: choose a token for each row, and start that, too."""
        resumed = self.clock()
        emitted, logprobs, vectors = self._choose(begun, picks)
        emitted = self.ranks.first(emitted)  # those of rank 0, on every rank
        # With guesses, Python alone will know which token is the newest, and hand it in.
        first = emitted[:, 0]
        self._newest = mx.where(first >= 0, first, self._newest)
        self._enqueue(emitted, self._newest, logprobs, vectors)
        took = begun.took + self.clock() - resumed
        return InFlightStep(
            tokens=emitted,
            logprobs=logprobs,
            vectors=vectors,
            began=begun.began,
            build_s=took - self._device_s - self._wait_s,
            device_s=self._device_s,
            wait_s=self._wait_s,
            proofs=begun.proofs,
        )

    def _forward(self, order: ForwardBatch) -> tuple[list[mx.array], list[mx.array], list[int]]:
        """Run the passes of a step. Returns each pass's states (n, D) and logits (n, V), and the
        slots whose rows they are."""
        states = []
        logits = []
        slots: list[int] = []
        for prefills, decodes in order.passes():
            ids: list[mx.array] = []
            windows: list[Window] = []
            asked: list[int] = []  # places among the tokens of this pass
            count = 0  # tokens of this pass so far
            for prefill in prefills:
                self._copy_prefix(prefill)
                padded = self._padded(prefill)
                ids.append(mx.array(padded))
                windows.append(Window(self.slab, [prefill.slot], [prefill.start], len(padded)))
                if prefill.asked:
                    asked.append(count + len(prefill.ids) - 1)
                    slots.append(prefill.slot)
                count += len(padded)
            for decoding, rows, given in alike(decodes):
                if given:
                    ids.append(mx.array(given))
                else:  # on the device, and not read yet
                    ids.append(self._newest[mx.array(decoding)])
                tokens = ids[-1].size
                windows.append(Window(self.slab, decoding, rows, L=tokens // len(decoding)))
                asked += range(count, count + tokens)
                slots += decoding
                count += tokens
            found = forward(self.model, mx.concatenate(ids), windows, asked)
            if asked:
                states.append(found)
                logits.append(self.model.head(found))
                self._start([logits[-1]])
            else:  # the states are never computed: we start what has been written
                self._start(self.slab.written())
        return states, logits, slots

    def _prove(self, prefills: Sequence[Prefill]) -> dict[int, mx.array]:
        """Are the rows of each chunk finite? Of a chunk that asks for a token, the token tells."""
        proofs = {}
        for prefill in prefills:
            if not prefill.asked:
                stop = prefill.start + len(prefill.ids)
                proof = self.slab.proof(prefill.slot, prefill.start, stop)
                proofs[prefill.slot] = self.ranks.sum(proof)  # each rank has heads of its own
        if proofs:
            self._enqueue(*proofs.values())
            self._reading = [*self._reading, *proofs.values()]  # they read the slab, too
        return proofs

    def _padded(self, prefill: Prefill) -> list[int]:
        """The token ids of a chunk. On a GPU some zeros follow, so that the widths are few.

        A GPU prepares its kernels for each shape anew. The padding's keys land in rows that the
        sequence has yet to reach and will write over.
        """
        width = len(prefill.ids)
        if device.has_gpu():
            rounded = -(-width // PADDING) * PADDING
            width = min(rounded, self.slab.length - prefill.start)
        return [*prefill.ids, *[0] * (width - len(prefill.ids))]

    def _choose(
        self, begun: LaunchedStep, picks: Picks
    ) -> tuple[mx.array, list[Logprobs], dict[int, mx.array]]:
        """A token for each row that asks, -1 for the others. On a rank that follows, all are -1.
        Beside them log probabilities and vectors, as far as they are wanted."""
        most = max([1, *(len(decode.ids) for decode in begun.order.decodes)])
        emitted = mx.full((self.slab.slots, most), -1, mx.int32)
        if not begun.slots or self.ranks.rank:
            return emitted, [], {}
        chosen: list[SamplingRow] = []
        places: list[int] = []  # of each pick, among the rows of its slot
        for slot in begun.slots:
            chosen += picks[slot]
            places += range(len(picks[slot]))
        tokens, logprobs = choose(mx.concatenate(begun.logits), chosen, self._slot_state)
        slots = mx.array([pick.slot for pick in chosen])
        emitted[slots, mx.array(places)] = tokens
        vectors = {}
        states = mx.concatenate(begun.states)
        for row, pick in enumerate(chosen):
            if pick.sampling.embeds:
                vectors[pick.slot] = states[row].astype(mx.float32)
        return emitted, logprobs, vectors

    def _copy_prefix(self, prefill: Prefill) -> None:
        """Take over another slot's first rows, if this chunk goes on from there."""
        if prefill.source is None:
            return
        prefix = self.slab.prefix(prefill.source, prefill.start)
        self._start(prefix)
        self.slab.fill(prefill.slot, prefix)

    def _start(self, results: Sequence[mx.array]) -> None:
        """Start a forward pass, as soon as the one before has read the last of the slab.

        subtle: an array is written in place only if nothing else holds its memory. A running pass
        keeps a reference to the slab until it has read it; writing then would copy the slab, layer
        by layer. So we wait for the pass before. What remains to be done for it, the sampling, is
        time enough to get the next one going. (To wait for less than the results is no use: MLX
        says of all that was started together at once that it is computed.)
        """
        began = self.clock()
        mx.eval(self._reading)
        self._reading = []  # these may be views of the slab: let go of it before it is written
        self._wait_s += self.clock() - began
        self._enqueue(*results)
        self._reading = results

    def _enqueue(self, *results) -> None:
        """Add the operations that lead to these results to MLX's queue. The device takes them.

        On a CPU the queue holds about fifty operations, and adding to a full queue waits. So nearly
        all of the device's work is done while Python stands here.
        """
        began = self.clock()
        mx.async_eval(results)
        self._device_s += self.clock() - began

    # --- several processes (`distributed`)

    def follow(self) -> None:
        """What every rank but the first does: it runs the orders of rank 0, until there are no
        more."""
        with device_lock, device_stream():
            while message := self.ranks.hear():
                scrubs, prefills, decodes = message
                prefills = [Prefill(*each) for each in prefills]
                decodes = [Decoding(*each) for each in decodes]
                self.run(ForwardBatch(scrubs, prefills, decodes), picks={}).read()


# --- the engine ---------------------------------------------------------------------------------


class Engine:
    """The scheduler and the runner, tied together. `step` is the heart.

    `slots` sequences run at once, each at most `max_len` tokens long. By default both are what fits
    the free memory: up to 8 slots of `usual_len` tokens. `summary` says what was chosen, and which
    BLAS multiplies.
    `chunk` is how wide a prefill chunk is: 128 tokens on a CPU, 512 on a GPU.
    `budget` bounds a step, in tokens. By default it is one token a slot, one chunk, and half a
    chunk for every eight slots.
    `guesses`: so many tokens of each answer are guessed whenever there is something to guess, at any
    price. By default guesses are made where they pay, and never if the engine is not `exact`. Where
    it is, no token depends on them.
    `embeds`: the model was made for embeddings, although its files do not say so.
    `exact` says whether a request's logits have the same bits beside any neighbours.
    `on_commit` is yours to set: a function that is called after each commit with tokens, and after
    each end from elsewhere (cancel, close, a failed step), with the handles that have new output. No
    lock is held then, so the function may do anything but wait in a loop's own thread.
    """

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
        max_queue: int = 10_000,
        reuse: bool = True,
        run_ahead: bool = True,
        guesses: int | None = None,
        embeds: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        runner: Runner | None = None,  # another device half, for tests
        sizes: Sizes | None = None,  # what fits, if `load` has asked before it read the weights
    ):
        if sizes is None:
            sizes = fit_beside(model, slots, max_len, chunk, budget, usual_len)
        sizes = agreed(model, sizes)
        self.reuse = reuse
        self.run_ahead = run_ahead
        self._most_guesses = guesses
        self.embeds = embeds
        self.hurries = not device.has_gpu()  # see `_may_fly`
        self.clock = clock
        self.ranks = model.ranks
        self.sched = Scheduler(sizes.slots, sizes.max_len, policy_of(policy), max_queue=max_queue)
        self.changed = threading.Condition()  # guards all that is not an array; waiters sleep on it
        self.on_commit: Callable[[list[Handle]], None] | None = None
        self._ledger = RequestRegistry(model.view)
        self._unstarted: Plan | None = None  # planned, but not yet started
        self._flights: deque[tuple[Plan, InFlightStep]] = (
            deque()
        )  # started, not committed; oldest first
        self._blocked: tuple[int, ...] = ()  # the slots that the newest plan has kept shut
        self._loop: Loop | None = None
        self._closed = False
        self._source: Source | None = None  # where the model was read, if `load` has read it
        self._is_reloading = False
        self._serve(model, text, sizes, runner)
        self.summary += self.ranks.settle(model.config, partial(self._end_all, "error"))
        device.close_at_exit(self)

    def _serve(
        self,
        model: Model,
        text: Tokenizer,
        sizes: Sizes,
        runner: Runner | None = None,
    ) -> None:
        """From here on this model is served, with what fits beside it."""
        summary = described(model, sizes)
        with device_lock, device_stream():
            runner = runner or Runner(model, sizes, self.clock)
        with self.changed:
            self.runner: Runner | None = runner
            self._slab_is_lost = False  # with a step that failed
            self._ledger.model = model.view
            self.model = model
            self.text = text
            self.exact = is_batch_invariant(model)
            most = self._most_guesses
            self.guesser = Drafter(0 if most is None and not self.exact else most)
            self._sizes = sizes
            self.sched.resize(*sizes)
            self.sched.far = far_position(model.config)
            self.sched.guess = self.guesser
            self.summary = f"{summary}; {device.named()}"

    @classmethod
    def load(
        cls,
        model: str | Path = "demo",
        *,
        dtype: str = "auto",
        kv: str = "auto",
        attention: str = "auto",
        report: Report | None = None,
        **options,
    ) -> Engine:
        """An engine for a folder, a hub id, or "demo". The options are those of `Engine`.

        `kv`: how keys and values are stored: "float32", or "auto", which is float16 if the checkpoint
        has 16 bits a weight or fewer.
        `attention`: "plain", which is the formula in `llama.py`, or "auto", which is one operation of
        our own product where that runs, and has the same bits.
        `report` is told what is being done.
        """
        source = Source(str(model), dtype, kv, attention, report or (lambda stage: None), options)
        checked = source.check()
        engine = cls(checked.read(), checked.text, sizes=checked.sizes, **options)
        engine._source = checked.source
        return engine

    # --- submit -> plan -> run -> commit

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping],
        sampling: SamplingParams | None = None,
        *,
        client: str = "",
        origin: Any = None,
        grammar: Any = None,
        ends: Callable[[str], bool] | None = None,
        reuse: bool = True,
        guesses: bool = True,
    ) -> Handle:
        """Put a prompt in line: a text, chat messages, or token ids as they are.

        This never waits for a step. It raises QueueFull if the line is full.
        `client`: who asks, by any name. The policy `fair` shares the slots among clients.
        `origin` may be anything: it is shown to those who watch.
        `grammar`: that of the `sampling`, if it has been made already (`text.grammar`).
        `ends`: is called with each piece of the answer, and says whether it is the last one.
        `reuse`: whether it may take over the rows of others, and give its own.
        `guesses`: whether its tokens may be guessed, as the engine guesses.
        """
        if sampling is None:
            sampling = SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling is a {type(sampling).__name__}; give SamplingParams")
        if not isinstance(client, str):
            raise ValueError(f"client is a {type(client).__name__}; give a text")
        text = self.text
        if sampling.embeds or not self.model.config.has_head:
            check_embeds(text.folder, sampling.embeds, self.embeds)
        text.check_ids([*sampling.stop_tokens, *sampling.logit_bias])
        ids, shown, is_thinking = text.read(prompt)
        if sampling.grammar and grammar is None:
            grammar = text.grammar(sampling.grammar)
        max_tokens = sampling.max_tokens or max(1, self.sched.max_len - len(ids))
        with Held(), self.changed:
            if self._closed:
                raise RuntimeError("the engine is closed; load another")
            if self._is_reloading or self.text is not text:  # the ids would mean something else
                raise RuntimeError("the engine reads another model; try again in a while")
            reuse = reuse and self.reuse
            id = self.sched.submitted + 1
            request = Request(id, ids, max_tokens, self.clock(), reuse, client)
            request.hints = PromptLookup(grammar) if guesses and self.guesser.most != 0 else None
            handle = Handle(self, request, sampling, shown, origin, grammar, is_thinking, ends)
            self.sched.submit(request)  # raises if the request does not fit, or if the line is full
            self._ledger.open[request.id] = handle
            self.changed.notify_all()
        return handle

    def step(self, plan: bool = True) -> bool:
        """One turn of the wheel: plan -> run -> commit. False if there was nothing to do.

        `plan=False` plans nothing: what is in flight is only read back.

        With run-ahead, step N+1 is started before N's tokens are read: what N sampled goes into N+1
        on the device, and Python's work hides behind the device's (on a CPU little of it). Without,
        N is committed before N+1 is planned.

            device   |   run N             |   run N+1           |   run N+2
            Python   plan, build N+1 ------> commit N, plan, build N+2 ------> commit N+1 ...
                                           ^ N's tokens are read here, and N+1 already runs
        """
        with self._changing(), device_lock, device_stream():  # one thread at a time
            try:
                planned = self._plan() if plan else None
                if planned:
                    self._run(planned)
                worked = bool(self._flights)
                while len(self._flights) > self._may_fly(planned):
                    self._commit()
                return worked
            except BaseException as error:
                self._fail(error)  # ends requests, and not the engine
                if not isinstance(error, Exception):  # such as SystemExit: for the whole program
                    raise
                return True  # something was done, but it failed

    def _plan(self) -> Plan | None:
        """What the scheduler decides."""
        if self.has_work:
            self._be_ready()
        with self.changed:
            plan = self.sched.plan(self.clock())
            self._unstarted = plan
            self._blocked = plan.blocked if plan else ()
            return plan

    def _run(self, plan: Plan) -> None:
        """Start a step on the device.

        A penalty or a grammar needs to know the token before. With run-ahead, that token is still
        on the device. But only the choice of the next token has to wait for it. So in a step with
        one of these, the forward pass is started first. Then the step before is committed, and the
        choice follows:

            device   |   run N          |   forward N+1           |   choose N+1
            Python   begin N+1 --------> commit N, ask grammars --> finish N+1
        """
        begun = self.runner.begin(ForwardBatch.of(plan))
        handles = [self._ledger.open.get(member.request.id) for member in plan.emitters]
        settings = [handle.sampling for handle in handles if handle]
        if any(each.looks_back or each.grammar for each in settings):
            while self._flights:
                self._commit()
        picks = {member.slot: self._picks(member) for member in plan.emitters}
        flight = self.runner.finish(begun, picks)
        self._flights.append((plan, flight))
        self._unstarted = None

    def _picks(self, member: Chunk | Decode) -> list[SamplingRow]:
        """How its tokens are chosen. A grammar that fails ends its own request."""
        handle = self._ledger.open.get(member.request.id)
        if handle is None:  # the request has ended, and what its rows say will be dropped
            return [SamplingRow(member.slot, SamplingParams(), 0, 0)] * (1 + len(member.guess))
        masks: Sequence[bytes] = ()
        grammar = handle.grammar
        if grammar is not None:
            try:
                masks = grammar.masks(member.guess)
            except BaseException as error:  # a panic in the library's Rust is no Exception
                let_go(error)
                with self.changed:
                    self._end(handle, "error", describe(error), error)
        return picks_of(member, handle, masks)

    def _may_fly(self, plan: Plan | None) -> int:
        """How many steps may stay in flight: one if the engine runs ahead.

        On a CPU, a step that yields a first token is read at once (`hurries`). MLX's queue is short
        there: to start the next step takes nearly as long as that step itself, and the token would
        come only then. A step is read at once, too, where guesses are in it, or may be in the next.
        """
        if plan is None or not self.run_ahead:
            return 0
        is_due = plan.is_due(self.hurries) or self.guesser.may_follow(plan)
        return 0 if is_due else 1

    def _commit(self) -> None:
        """Read the tokens of the oldest step in flight, and hand them to their requests."""
        plan, flight = self._flights[0]
        began = self.clock()
        tokens, logprobs = flight.read()
        read = self.clock()
        accept = partial(self._ledger.deliver, logprobs, self.clock)
        said = self._ledger.output_tokens
        with self.changed:
            self.sched.prove(plan, flight.finite)
            done = self.sched.commit(plan, tokens, accept, read)
            for request in done.ended:
                self._ledger.retire(request.id)
            ended = self.clock()
            view = StepView.of(
                plan,
                ghosts=done.ghosts,
                tokens=self._ledger.output_tokens - said,
                ended=ended,
                plan_s=flight.began - plan.at,
                build_s=flight.build_s,
                device_s=flight.device_s,
                wait_s=flight.wait_s + read - began,
                commit_s=ended - read,
                guesses=done.tried,
            )
            self._ledger.record(view)
            self.guesser.learn(plan, read)
            self.changed.notify_all()
        self._flights.popleft()

    # --- around a step, and after a failure

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around a change: Ctrl-C waits for its end, and `on_commit` is called after it."""
        try:
            with Held():
                yield
        finally:
            self._tell()

    def _tell(self) -> None:
        """Call `on_commit` with the handles that have new output, if any. No lock is held here.

        What the function raises is noted, and disturbs no request. Ctrl-C goes to the program.
        """
        with self.changed:
            news = self._ledger.take_news()
        on_commit = self.on_commit
        if on_commit is None or not news:
            return
        try:
            on_commit(news)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.note("on_commit failed", error)

    def _fail(self, error: BaseException) -> None:
        """An exception came out of a step: show its traceback, and end as few requests as possible.

        - If the step could not be started, the step before it is committed first.
        - Each request with a chunk in a failed step ends with the error: its rows are lost with the
          slab.
        - Each request that has a token planned ends, too: it cannot begin again. (So does each that
          decodes in a failed step.)
        - The others have yielded nothing: they go back to the line, or stay in it.
        - All end if no step was planned or in flight, since then it is not known what failed, and
          if not even a new slab could be made.
        - With other ranks the process ends.
        """
        unstarted = self._unstarted
        self._unstarted = None
        which = "a step" if unstarted is None else f"step {unstarted.step}"
        show_fault(f"{which} failed", error)
        self.ranks.fail(error)
        plans = []
        if unstarted is not None:
            plans.append(unstarted)
            try:
                while self._flights:
                    self._commit()
            except BaseException as fault:
                show_fault("the step before failed, too", fault)
        plans += [plan for plan, _ in self._flights]
        with self.changed:
            failed = set()
            for plan in plans:
                failed |= {chunk.request.id for chunk in plan.chunks}
            all_end = self._slab_is_lost or not plans
            for handle in list(self._ledger.open.values()):
                request = handle.request
                if all_end or request.planned or request.finish_reason or request.id in failed:
                    self._end(handle, "error", describe(error), error)
            self._flights.clear()
            self._slab_is_lost = True
            self.sched.start_over()

    def _end(
        self,
        handle: Handle,
        reason: str,
        error: str | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """End a request from outside a commit, in any thread. Called under the lock."""
        if handle.finish_reason is None:
            handle.error = error
            handle.exception = exception
            try:
                handle.flush()
            except BaseException as fault:  # a panic in the tokenizer's Rust is no Exception
                show_fault(f"the last text of request {handle.id} is lost", fault)
            self.sched.finish(handle.request, reason, self.clock())
        self._ledger.retire(handle.id)
        self.changed.notify_all()

    def _end_all(self, reason: str, error: str | None = None) -> None:
        """End every open request, and take no other."""
        with self._changing(), self.changed:
            self._closed = True
            for handle in list(self._ledger.open.values()):
                self._end(handle, reason, error)

    # --- what any thread may call

    def cancel(self, handle: Handle) -> None:
        """End a request now, whatever it is doing. After its end, this does nothing."""
        with self._changing(), self.changed:
            if handle.id in self._ledger.open:
                self._end(handle, "cancelled")

    def generate(self, prompts: Sequence, sampling: SamplingParams | None = None) -> list[Result]:
        """All prompts at once; the results in the prompts' order."""
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                with Held():  # a request that has been submitted is in the list
                    handles.append(self.submit(prompt, sampling))
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:  # after a refusal or Ctrl-C; else all have ended
                handle.cancel()

    def embed(self, texts: Sequence, dimensions: int | None = None) -> list[array]:
        """A vector of length 1 for each text, or for each list of token ids.

        `dimensions`: only so many of its numbers, for models that were trained for that.
        """
        results = self.generate(texts, SamplingParams(embeds=True))
        for result in results:
            if result.vector is None:
                raise RuntimeError(f"a text has no vector: {result.error or result.finish_reason}")
        return [unit(result.vector, dimensions) for result in results]

    def serving(self) -> Loop:
        """Inside `with engine.serving():` a thread steps the engine whenever there is work."""
        return Loop(self)

    def attach(self, loop: Loop | None) -> None:
        """From now on this loop steps the engine, and those who wait sleep.

        None: those who wait step the engine again.
        """
        with self.changed:
            if loop and self._closed:
                raise RuntimeError("the engine is closed")
            if loop and self._loop:
                raise RuntimeError("the engine is serving already")
            self._loop = loop
            self.changed.notify_all()

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready()`, asleep if a loop steps the engine, else by stepping it.

        False if the time runs out.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not ready():
            loop = self._loop
            if loop is not None and loop.is_here:
                raise RuntimeError("the thread that steps the engine cannot wait for it")
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if loop is None:
                self.step()
            else:
                loop.sleep(lambda: ready() or not self._loop, left)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.sched.waiting or self.sched.running or self._flights)

    @property
    def is_released(self) -> bool:
        """Have weights and slab been let go of, and not been read again?"""
        return self.runner is None

    @property
    def steps(self) -> int:
        """How many have been run, from plan to commit."""
        return self._ledger.steps.count

    def snapshot(self, since: Snapshot | None = None) -> Snapshot:
        """What the engine is doing now, and what has happened since an earlier snapshot."""
        with self.changed:
            now = self.clock()
            limits = Limits.of(self.sched, self.hurries)
            ranks = self.ranks.view
            return self._ledger.snapshot(self.sched, limits, self._blocked, ranks, now, since)

    def note(self, what: str, error: BaseException) -> None:
        """Something failed outside of any request: snapshots have a line of it, stderr the rest."""
        self._ledger.faults.add(f"{what}: {describe(error)}")
        show_fault(what, error)

    def measure_roof(self, others: float = 0.0) -> None:
        """How fast this machine can read and multiply at most: snapshots say so from now on.

        `others`: how many cores other programs take meanwhile, as far as that is known.
        """
        with device_lock, device_stream():
            found = Roof(*measure(self.model.view.nbytes, self.model.dtype), others)
        self._ledger.roof = self._ledger.roof.joined(found)

    def chosen(self) -> ExpertsView:
        """Which experts the newest step takes, layer by layer. It is asked between two steps."""
        choices = self.model.choices
        with device_lock, device_stream():
            layers = choices.read() if choices else ()
        return ExpertsView(self.sched.steps, tuple(tuple(each.most_common()) for each in layers))

    def drain(self, to: str) -> None:
        """Change the policy as soon as all that runs has ended. The slots forget what they hold."""
        with self.changed:
            self.sched.drain(policy_of(to))

    def set_budget(self, budget: int, chunk: int) -> None:
        """Bound each step that is planned from now on, and each chunk of a prompt."""
        with self.changed:
            self.sched.budget = budget
            self.sched.chunk = chunk

    @contextmanager
    def running_on(self, runner: Runner) -> Iterator[None]:
        """Inside, steps are run by another runner in the place of ours, such as one that fails."""
        with self.changed:
            ours = self.runner
            self.runner = runner
        try:
            yield
        finally:
            with self.changed:
                self.runner = ours

    def check(self) -> None:
        """Assert the invariants of scheduler and slab. The tests do so after every step."""
        self.sched.check()
        if self.runner is not None and self.runner.slab is not None:
            self.runner.slab.check()
        assert self._ledger.open.keys() == self.sched.running.keys() | self.sched.waiting.keys()

    def follow(self) -> int:
        """What every rank but the first does, to its end. Returns the program's exit code."""
        return self.ranks.follow(self.runner.follow, self.summary)

    def close(self) -> None:
        """End every open request as cancelled, and leave the device idle. May be called twice."""
        self._end_all("cancelled")
        loop = self._loop
        if loop is not None:
            loop.stop()
        with Held(), device_lock, device_stream():
            self._flights.clear()
            device.synchronize()  # the goodbye says that no other rank is needed any more
            self.ranks.leave()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # --- weights come and go

    def release(self) -> None:
        """Let go of weights and slab. The next request's first step reads the weights again."""
        with self._changing(), device_lock, device_stream():
            self._let_go()

    def reload(self, model: str | Path | None = None, **sizes: int | None) -> None:
        """Serve another model from here on, or this one read again, with other sizes if given.

        `sizes`: slots, max_len, usual_len, chunk and budget, as `Engine` takes them.
        What can be wrong with another model is looked at before this one goes. If the other one
        cannot be read all the same, this one is read again. Meanwhile no request is taken.
        """
        if unknown := sizes.keys() - {*Sizes._fields, "usual_len"}:
            raise ValueError(f"reload knows no size {min(unknown)!r}; see Engine")
        with self.changed:
            self._check_unused()
        asked = {**self._source.asked, **sizes}
        source = self._source._replace(model=str(model or self._source.model), asked=asked)
        held = 0 if self.is_released else slab_of(self.model, self._sizes)
        checked = source.check(held + nbytes_of(self.model))
        with self._changing(), device_lock, device_stream():
            self._let_go(is_reloading=True)
            try:
                self._take(checked)
                self._source = checked.source
            except BaseException:
                self._come_back()
                raise
            finally:
                self._is_reloading = False

    def _check_unused(self) -> None:
        """Raise an error if weights and slab have to stay. Called under the lock."""
        if self._closed:
            raise RuntimeError("the engine is closed; load another")
        if self.ranks.size > 1:
            raise RuntimeError("several ranks share this model, so it stays to their end")
        if self._source is None:
            raise RuntimeError("this model came without its files; use an engine of Engine.load")
        if count := len(self._ledger.open):
            raise RuntimeError(f"requests that are open: {count}; wait for their end, or cancel")

    def _let_go(self, is_reloading: bool = False) -> None:
        while self._flights:  # nothing but ghosts runs in them, or else the check fails
            self._commit()
        with self.changed:
            self._check_unused()
            self._is_reloading = is_reloading
            self.runner = None
            self.model = self.model.without_weights()
            self.sched.start_over()  # no slot remembers anything
        device.give_back()

    def _be_ready(self) -> None:
        """Before a step: weights that were let go of come back, or a slab that was lost with a step
        that failed. If they cannot, this step fails, too."""
        if self.is_released:
            self._come_back()
        elif self._slab_is_lost:
            self.runner.reset()
            self._slab_is_lost = False

    def _come_back(self) -> None:
        """Read the same model again, for a slab of the same sizes."""
        source = self._source._replace(asked=self._sizes._asdict())
        self._take(source.check(text=self.text))

    def _take(self, checked: Checked) -> None:
        """Read what has been checked, and serve it from here on."""
        self._serve(checked.read(), checked.text, checked.sizes)
