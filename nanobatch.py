"""A serving engine for Llama models: the forward pass, the engine around it, and a plain command line.

The problem. A language model answers one token at a time, and for each token the machine reads every weight it has.
That reading is what takes the time, and it costs almost the same for eight sequences as for one. So whoever serves
many people wants many sequences in every step: that is batching. This file holds the step.

    prompt -> submit -> plan (sched.py) -> run: forward over the slab (kv.py), sample -> commit -> text
              any thread                  one thread at a time                                   any thread

Read it in this order: the forward pass below (one page, everything a Llama does), then `kv.py` (where keys and values
live), `sched.py` (who runs next), and back here for `Engine.step`, which ties them together: plan -> run -> commit.
Then, as you like: `sampling.py` (how a token is chosen), `text.py` (tokens to text), `checkpoint.py` (what is in a
model folder, and what can be wrong with it), `blas.py` (why MLX is fast on a Linux CPU here).

The glossary, used everywhere in this project:

    N    tokens in one forward pass                   D    model width
    B    rows: sequences in one window of it          H    query heads
    L    new tokens of each row                       Hkv  key and value heads; G = H / Hkv queries share one
    S    length of a slot of the slab                 Dh   size of one head
    T    how far attention reads (`reach`)            C    width of a prefill chunk
    V    vocabulary

    slot     a sequence's place in the slab: S places for a token's key and value
    row      in a forward pass, one of the B sequences; in a slot, one of the S places
    window   what a chunk, or all decoding rows, write into the slab and read from it
    prefill  the prompt goes into the slot, in chunks
    decode   one new token for a sequence
    ghost    a member of a step that was planned before anybody knew that its request had ended: it runs, and is dropped

The invariant: what a request is answered depends on its prompt, its `Sampling` and the model. Not on its neighbours,
its slot, or the moment it came.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, compress
from pathlib import Path
from typing import NamedTuple

from kv import Slab, Window
from parts import checkpoint, device
from parts.answers import Handle, Listener, Result, SlotView, Snapshot, StepView, TokenLogprob, describe
from parts.checkpoint import Config, ModelError
from parts.device import device_stream, has_gpu, mx, size
from parts.load import Layer, Model, ModelReader, check_count, far_position, fit, slab_sizes
from parts.ops import rms_norm, rope_frequencies, rotate, silu, softmax
from parts.sampling import PENALTY_CONTEXT, Logprobs, Pick, Sampling, choose
from parts.text import Text
from sched import PADDING, Chunk, Decode, Plan, QueueFull, Request, Scheduler

__all__ = ["Engine", "Handle", "Model", "ModelError", "QueueFull", "Result", "Sampling", "Snapshot", "forward"]


# --- the forward pass --------------------------------------------------------------------------------------------


def forward(
    model: Model, ids: Sequence[mx.array], windows: Sequence[Window], asked: Sequence[bool] = ()
) -> list[mx.array]:  # for each window its token ids -> its hidden states (tokens, D)
    """Everything a Llama does, for the chunks of prompts and the decoding rows that share this pass.

    Each chunk, and all decoding rows together, look at the slab through a window: B = 1 and L = C there, L = 1 here.
    Their tokens lie side by side, N in all, since norms, projections and the MLP treat each token by itself, and so
    the weights are read once for everybody. Only attention asks whose a token is.

    Nothing is computed here. MLX is lazy: each line adds nodes to a graph, and `Engine._run` starts the whole of it
    at once. What nobody asks for is never computed: a chunk that emits nothing, not `asked`, is in the last layer only
    for its keys and values.

    A layer with small numbers. Two rows decode, and that is all (B = 2, L = 1, N = 2); D = 8, H = 4 heads of Dh = 2,
    Hkv = 2 of them have keys and values, and attention looks back on T = 6 rows of the slab:

        x (2,8) - norm - qkv (2,16) -+- q (2,4,1,2) - turn - folded (2,2,2,2) -+- scores (2,2,2,6) - softmax -+
            |                        +- k (2,2,1,2) - turn - slab - keys (2,2,6,2)                            |
            |                        +- v (2,2,1,2) -------- slab - values (2,2,6,2) -------------------------+
            + <--------------------------------- o (2,8) <- heads side by side (2,8) <- sums of values -------+
            |
            +- norm - gate, up (2,hidden) each - silu(gate) * up - down (2,8)
            + <-------------------------------------------------------+
    """
    c = model.config
    sizes = [array.size for array in ids]  # N is their sum
    angles = [rope_angles(model, window) for window in windows]
    masks = [window.mask_for(c.H // c.Hkv) for window in windows]
    x = model.table.rows(ids[0] if len(ids) == 1 else mx.concatenate([array.flatten() for array in ids]))  # (N, D)
    for index, layer in enumerate(model.layers):
        # Attention: every token asks (q) all tokens up to itself what they have to say (k: to whom, v: what).
        qkv = layer.qkv(rms_norm(x, layer.attn_norm, c.norm_eps))  # (N, (H + 2 Hkv) * Dh)
        asking = []
        for own, window, turn, mask in zip(cut(qkv, sizes), windows, angles, masks, strict=True):
            q, k, v = heads(c, layer, own, window, turn)
            window.write(index, k, v)  # all windows write before the first one reads
            asking.append((q, window, mask))
        if index == c.layers - 1 and any(asked) and not all(asked):
            x = mx.concatenate(list(compress(cut(x, sizes), asked)))
            sizes, asking = list(compress(sizes, asked)), compress(asking, asked)
        sums = [attention(q, *window.read(index), mask).reshape(-1, c.H * c.Dh) for q, window, mask in asking]
        x = x + layer.o(mx.concatenate(sums).reshape(*x.shape[:-1], -1))
        # The MLP: each token by itself.
        h = rms_norm(x, layer.mlp_norm, c.norm_eps)
        gate, up = mx.split(layer.gate_up(h), 2, axis=-1)  # (N, hidden) each
        x = x + layer.down(silu(gate) * up)
    return cut(rms_norm(x, model.norm, c.norm_eps).reshape(-1, c.D), sizes)


def cut(x: mx.array, sizes: Sequence[int]) -> list[mx.array]:  # (N, ...) -> (size, ...) each
    return mx.split(x, list(accumulate(sizes))[:-1]) if len(sizes) > 1 else [x]


def heads(
    c: Config, layer: Layer, qkv: mx.array, window: Window, turn: tuple[mx.array, mx.array]
) -> tuple[mx.array, mx.array, mx.array]:  # (B * L, (H + 2 Hkv) * Dh) -> (B, H, L, Dh), twice (B, Hkv, L, Dh)
    """A window's queries, keys and values, head by head, queries and keys turned by their positions."""
    qkv = qkv.reshape(window.B, window.L, c.H + 2 * c.Hkv, c.Dh).transpose(0, 2, 1, 3)  # (B, H + 2 Hkv, L, Dh)
    qk, v = mx.split(qkv, [c.H + c.Hkv], axis=1)
    if c.qk_norm:
        q, k = mx.split(qk, [c.H], axis=1)
        q, k = rms_norm(q, layer.q_norm, c.norm_eps), rms_norm(k, layer.k_norm, c.norm_eps)
        qk = mx.concatenate([q, k], axis=1)
    q, k = mx.split(rotate(qk, *turn), [c.H], axis=1)  # q and k turn alike: one operation for both
    return q, k, v


def attention(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> mx.array:
    """softmax(q k^T + mask) v     q (B, H, L, Dh), k and v (B, Hkv, T, Dh) -> (B, L, H, Dh)

    Where is the 1 / sqrt(Dh) of the papers? In `rope_angles`, half of it with each of q and k: so it is free.

    G = H / Hkv query heads share a key head. They stand next to each other, so they fold into the rows of one
    matrix product, and each key is read once for all of them.
    """
    B, H, L, Dh = q.shape
    folded = q.reshape(B, k.shape[1], -1, Dh)  # (B, Hkv, G * L, Dh)
    weights = softmax(folded @ k.swapaxes(-1, -2) + mask).astype(v.dtype)  # (B, Hkv, G * L, T)
    return (weights @ v).reshape(B, H, L, Dh).transpose(0, 2, 1, 3)


def rope_angles(model: Model, window: Window) -> tuple[mx.array, mx.array]:  # (B, 1, L, Dh) each
    """cos and sin of each row's positions times each plane's frequency, once for both numbers that are turned in it."""
    rope, Dh = model.config.rope, model.config.Dh
    frequencies = model.frequencies  # (Dh/2,)
    if rope.type == "dynamic" and max(window.lengths) > rope.original_length:
        frequencies = mx.stack([rope_frequencies(rope, Dh, n) for n in window.lengths])[:, None]  # (B, 1, Dh/2)
    positions = window.positions * (1 / rope.factor if rope.type == "linear" else 1.0)  # (B, L)
    angles = (positions[:, :, None] * frequencies)[:, None]  # (B, 1, L, Dh/2)
    # What is turned becomes Dh^1/4 times shorter in the same go: attention wants the product of q and k / sqrt(Dh).
    cos, sin = mx.cos(angles) * Dh**-0.25, mx.sin(angles) * Dh**-0.25
    return mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)


class Part(NamedTuple):
    """What a chunk, or all the decoding rows, put into a forward pass, and want from it."""

    ids: mx.array  # (1, C) or (B,)
    window: Window
    rows: slice  # those of its tokens whose logits are wanted
    members: list[tuple[Chunk | Decode, int]]  # each with its row of these logits; none if the chunk emits nothing


def keeps_bits(model: Model, slots: int, chunk: int, budget: int) -> bool:
    """Are a row's numbers in a product the same, bit by bit, whatever else goes through the weights with it?

    Then all that a step does can be one pass. MKL keeps them from four rows on, OpenBLAS does not. But rather than
    believe it, try it: each of a layer's matrices, on what may stand alone, on pairs, and on the most a step can hold.
    """
    if has_gpu() or "mkl" not in device.name:
        return False
    layer, c = model.layers[0], model.config
    for dense, inputs in ((layer.qkv, c.D), (layer.o, c.H * c.Dh), (layer.gate_up, c.D), (layer.down, c.hidden)):
        x = mx.random.normal((max(budget, chunk) + slots, inputs), model.dtype, key=mx.random.key(0))
        whole = dense(x)
        alone = [dense(x[:slots]), dense(x[None, :PADDING])[0], dense(x[None, :chunk])[0]]
        for part in (*alone, dense(x[: slots + PADDING]), dense(x[: slots + chunk])):
            if not mx.array_equal(part, whole[: part.shape[0]]).item():
                return False
    return True


# --- the model: weights, in the shape that the forward pass wants them ---------------------------------------------


# --- what is answered --------------------------------------------------------------------------------------------


# --- the engine --------------------------------------------------------------------------------------------------


@dataclass
class Flight:
    """A step that has been started, and whose tokens have not been read yet."""

    plan: Plan
    tokens: mx.array  # (slots,): what each emitter's slot sampled, -1 where its logits were not finite
    logprobs: list[Logprobs]
    began: float
    plan_s: float
    build_s: float
    wait_s: float


class Engine:
    """The forward pass, the slab and the scheduler, tied together. `step` is the heart.

    `slots` sequences run at once, each at most `max_len` tokens long, prompt and answer together; where they are not
    given they are chosen to fit the memory that is free, and `summary` says what was chosen. `chunk` is the width of a
    prefill chunk (less where it looks back far: `Scheduler._widest`), `budget` what one step may cost, in tokens: by
    default one for each slot, two chunks, and another chunk for every eight slots, because the more there are, the
    more of them fall free at a time. `exact` keeps the device's shapes constant, so that a request has the same bits in
    any company; without, idle rows are left out. `reuse` lets prompts that begin alike share rows. `run_ahead` starts a
    step before the one before has been read.
    """

    def __init__(
        self,
        model: Model,
        text: Text,
        *,
        slots: int | None = None,
        max_len: int | None = None,
        policy: str = "continuous",
        chunk: int = 64,
        budget: int | None = None,
        max_queue: int = 10_000,
        exact: bool = True,
        reuse: bool = True,
        run_ahead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        for name, value in (("budget", budget), ("max_queue", max_queue)):
            check_count(name, value)
        self.model, self.text, self.exact, self.run_ahead, self.clock = model, text, exact, run_ahead, clock
        slots, max_len, self.summary = fit(model.config, model.dtype.size, device.free_memory(), slots, max_len, chunk)
        budget = slots + chunk * (2 + slots // 8) if budget is None else budget
        self.sched = Scheduler(
            slots,
            max_len,
            chunk=chunk,
            budget=budget,
            far=far_position(model.config),
            policy=policy,
            max_queue=max_queue,
            reuse=reuse,
        )
        self._handles: dict[int, Handle] = {}
        self._steps: deque[StepView] = deque(maxlen=256)
        self._output_tokens = self._next_id = 0
        self._state = threading.Condition()  # guards everything that is not an array; whoever waits sleeps on it
        self._thread: threading.Thread | None = None
        self._stopping = self._closed = False
        self._reset_device()
        with device._device_lock, device_stream():
            self.one_pass = not exact or keeps_bits(model, slots, chunk, budget)
        device._engines.add(self)

    @classmethod
    def load(
        cls, model: str | Path = "demo", *, dtype: str = "auto", report: Callable[[str], None] | None = None, **options
    ) -> Engine:
        """An engine for a folder, a hub id, or "demo". Options are those of `Engine`; `report` is told what is done."""
        report = report or (lambda stage: None)
        report(f"finding {model}")
        folder = checkpoint.find(str(model))
        with device._device_lock, device_stream():
            reader = ModelReader(folder, dtype)
            text = Text(folder, reader.config.V)
            free = device.free_memory()  # a slab that will not fit is refused now, not when the weights have been read
            room = None if free is None else free - reader.nbytes
            sizes = (options.get(name) for name in ("slots", "max_len", "chunk"))
            *_, slab = fit(reader.config, reader.itemsize, room, *sizes)
            report(f"reading {size(reader.nbytes)} of weights from {folder.name}")
            weights = reader.read()
        report(f"allocating the slab: {slab}")
        return cls(weights, text, **options)

    def _reset_device(self) -> None:
        """A new slab, and nothing in flight."""
        with device._device_lock, device_stream():
            self._flight: Flight | None = None
            self._started: tuple[mx.array, ...] = ()  # what the last forward pass to be started yields
            self._waited = 0.0
            self._dirty: dict[int, tuple[int, int]] = {}  # slot -> rows that may hold numbers that are not finite
            self.slab: Slab | None = None  # let the old one go before a new one is made
            sizes = slab_sizes(self.model.config, len(self.sched.owners), self.sched.max_len, self.sched.chunk)
            self.slab = Slab(*sizes, self.model.dtype)
            slots = self.slab.slots
            self._newest = mx.zeros(slots, mx.int32)  # (slots,): each slot's newest token, on the device
            # (slots, 20): the tokens before it, for those whose repetitions are penalised; V stands for none
            self._history = mx.full((slots, PENALTY_CONTEXT), self.model.config.V, mx.int32)

    # --- plan -> run -> commit

    def step(self) -> bool:
        """One turn of the wheel. False if there was nothing to do.

        With run-ahead, step N+1 is started before N's tokens are read: what N sampled goes into N+1 on the device,
        and Python's work hides behind the device's. Without, the same three lines run in their plain order.

            device   |   run N             |   run N+1           |   run N+2
            Python   plan, build N+1 ------> commit N, plan, build N+2 ------> commit N+1 ...
                                           ^ N's tokens are read here, and N+1 already runs

        What goes wrong ends as few as possible. A token that is not finite, a listener or a tokenizer that raises ends
        its own request (`_accept`). A step that raises ends those who were in it (`_fail`), or in one that had been
        started after it: the others prefill again.
        Ctrl-C, or a device that gives no new slab, ends all (`_abandon`), and still the engine can be used.
        """
        plan = flight = None
        with device._device_lock, device_stream():
            try:
                if self.slab is None:  # after a failure there was not enough memory for a new one: try again
                    self._reset_device()
                began = self.clock()
                plan, scrubs = self._plan(began)
                flight = self._run(plan, scrubs, began) if plan else None
                if self.run_ahead:
                    flight, self._flight = self._flight, flight  # commit the one before; the new one stays in flight
                if flight:
                    self._commit(flight)
            except BaseException as error:
                self._recover(plan, flight, error)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C is for the whole program
                return True
        return bool(plan or flight)

    def _plan(self, now: float) -> tuple[Plan | None, list[tuple[int, int, int]]]:
        """The scheduler's plan, and the rows to scrub (slot, start, stop) before it runs."""
        with self._state:
            plan = self.sched.plan(now)
            slots = [request.slot for request in plan.admitted] if plan else []
            return plan, [(slot, *self._dirty.pop(slot)) for slot in slots if slot in self._dirty]

    def _run(self, plan: Plan, scrubs: Iterable[tuple[int, int, int]], began: float) -> Flight:
        """Turn a plan into one lazy graph, sampling included, and start it."""
        run_began, self._waited = self.clock(), 0.0
        chosen = []
        for rows in scrubs:
            self.slab.scrub(*rows)
        for parts in self._passes(plan):
            ids, windows, asked = zip(*[(part.ids, part.window, bool(part.members)) for part in parts], strict=True)
            states = forward(self.model, ids, windows, asked)
            if not any(asked):
                self._start(*self.slab.written())  # nobody asks for x, so the rest of its last layer is never run
                continue
            self._start(*states)
            for x, part in zip(states, compress(parts, asked), strict=True):
                chosen.append(self._choose(self.model.head(x[part.rows]), part.members))
        emitted = mx.full(self.slab.slots, -1, mx.int32)
        logprobs = []
        for slots, tokens, measured in chosen:
            emitted[slots] = tokens
            logprobs += measured
        if chosen:
            self._newest = mx.where(emitted >= 0, emitted, self._newest)
        mx.async_eval(emitted, self._newest, self._history, logprobs)
        build_s = self.clock() - run_began - self._waited
        return Flight(plan, emitted, logprobs, began, run_began - began, build_s, self._waited)

    def _start(self, *results: mx.array) -> None:
        """Start a forward pass, as soon as the one before has read the last of the slab.

        subtle: an array is written in place only if nothing else holds its memory, and a pass that has been started
        holds all that it has yet to read. Start the next one too early, and it copies the slab, layer by layer: with
        two layers of 75 MB, a step took 82 ms instead of 12. So wait for the pass before. What remains to be done for
        it, the head and the sampling, is time enough to get the next one going: the device does not stand still.
        """
        began = self.clock()
        mx.eval(self._started)
        self._started = ()  # these may be views of the slab: let go of it before it is to be written
        self._waited += self.clock() - began
        mx.async_eval(results)
        self._started = results

    def _passes(self, plan: Plan) -> Iterator[list[Part]]:
        """The plan's chunks and its decoding rows, those together that go through the weights in one forward pass.

        All of them, if that changes no bit (`keeps_bits`) or nobody minds: eight users of the 15M shape, with prompts
        of 128 tokens, are served in 11 % less time. Who takes over another slot's rows begins a pass, since one before
        it may be writing them.
        """
        parts: list[Part] = []
        for chunk in plan.chunks:
            if parts and (chunk.source is not None or not self.one_pass):
                yield parts
                parts = []
            parts.append(self._prefill(chunk))
        if parts and plan.decodes and not self.one_pass:
            yield parts
            parts = []
        if plan.decodes:
            parts.append(self._decode(plan.decodes))
        if parts:
            yield parts

    def _prefill(self, chunk: Chunk) -> Part:
        """One chunk of a prompt, padded to C tokens. C depends on the prompt and the place: any company has this shape.

        The padding's keys land in rows that the sequence has yet to reach, and it overwrites them when it does.
        """
        C, prompt = chunk.width, chunk.request.prompt
        if chunk.source is not None:
            prefix = self.slab.prefix(chunk.source, chunk.start)
            self._start(*prefix)
            self.slab.fill(chunk.slot, prefix)
        ids = [*prompt[chunk.start : chunk.stop], *[0] * (C - (chunk.stop - chunk.start))]
        reach = self.slab.reach(chunk.start + C)
        window = Window(self.slab, [chunk.slot], [chunk.start], C, reach, [len(prompt)])
        last = chunk.stop - chunk.start - 1
        return Part(mx.array([ids]), window, slice(last, last + 1), [(chunk, 0)] if chunk.emits else [])

    def _decode(self, members: Sequence[Decode]) -> Part:
        """One token for each member. Exact: every slot is a row, idle ones too, so that the shape never changes.

        A matrix product of another shape may add its numbers in another order, and rounding makes that show: compact
        rows give equal tokens, constant rows give equal bits. One shape does change with the company: how far
        attention reads. Past a row's own length that adds weights of exactly 0, and in whole buckets the numbers before
        are added in the same order (tests/test_exact.py counts the bits that differ, over random companies: none).
        """
        at = {member.slot: member.position for member in members}
        slots = list(range(self.slab.slots)) if self.exact else list(at)
        starts = [at.get(slot, self.slab.spare) for slot in slots]
        while not self.exact and len(slots) & (len(slots) - 1):  # compact: a power of two, so that shapes are few
            slots.append(slots[0])
            starts.append(self.slab.spare)
        lengths = [at.get(slot, 0) + 1 for slot in slots]
        window = Window(self.slab, slots, starts, 1, self.slab.reach(max(at.values()) + 1), lengths)
        ids = self._newest[mx.array(slots)]  # (B,): on the device, read by nobody yet
        return Part(ids, window, slice(None), [(member, slots.index(member.slot)) for member in members])

    def _pick(self, member: Chunk | Decode, row: int) -> Pick:
        """What the sampler needs to know of a member of this step: its token will be the request's index-th."""
        index = member.position - len(member.request.prompt) + 1 if isinstance(member, Decode) else 0
        handle = self._handles.get(member.request.id)  # gone if it was cancelled just now: then anything will do
        sampling, seed = (handle.sampling, handle._seed) if handle else (Sampling(), 0)
        if index == 0 and sampling.repetition_penalty != 1:
            recent = member.request.prompt[-PENALTY_CONTEXT:]
            none = [self.model.config.V] * (PENALTY_CONTEXT - len(recent))
            self._history[member.slot] = mx.array([*none, *recent])
        return Pick(row, member.slot, sampling, seed, index)

    def _choose(
        self, logits: mx.array, members: Sequence[tuple[Chunk | Decode, int]]
    ) -> tuple[mx.array, mx.array, list[Logprobs]]:
        """Choose from logits (B, V): the slots of the members, their tokens, and the log probabilities asked for."""
        picks = [self._pick(member, row) for member, row in members]
        tokens, measured = choose(logits, picks, self._history)
        penalised = [i for i, pick in enumerate(picks) if pick.sampling.repetition_penalty != 1]
        if penalised:
            which = mx.array([picks[i].slot for i in penalised])
            newest = mx.maximum(tokens[mx.array(penalised)], 0)[:, None]
            self._history[which] = mx.concatenate([self._history[which][:, 1:], newest], axis=1)
        return mx.array([pick.slot for pick in picks]), tokens, measured

    def _commit(self, flight: Flight) -> None:
        """Read what a step sampled, hand it to its owners, and let go of those who end."""
        began = self.clock()
        mx.eval(flight.tokens, flight.logprobs)  # the step is done: here, and in `_start`, Python asks to wait
        values, read = flight.tokens.tolist(), self.clock()
        measured = {slot: logprob for part in flight.logprobs for slot, logprob in read_logprobs(part)}
        members = flight.plan.emitters
        tokens = [values[member.slot] for member in members]
        logprobs = {member.request.id: measured.get(member.slot) for member in members}

        def accept(request: Request, token: int) -> str | None:
            return self._accept(request, token, logprobs[request.id])

        with self._state:
            ghosts = tuple(member.slot for member in members if member.request.finish_reason is not None)
            for request in self.sched.commit(flight.plan, tokens, accept, read):
                self._retire(request)
            self._record(flight, ghosts, began, read)
            self._state.notify_all()

    def _accept(self, request: Request, token: int, logprob: TokenLogprob | None) -> str | None:
        """Deliver one token. Whatever goes wrong here is this request's own failure."""
        handle = self._handles[request.id]
        self._output_tokens += 1
        try:
            reason = handle._accept(token, self.clock(), logprob)
            if reason == "stop" or request.committed == request.max_tokens:
                handle._flush()
            return reason
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in the tokenizer's Rust is no Exception, nor is a listener's sys.exit
            handle.error = describe(error)
            return "error"

    def _retire(self, request: Request) -> None:
        """Forget a request that has ended. Called under the lock, so before its slot can be given away.

        Rows of it may hold numbers that are not finite, and nobody has looked: after an error, all of them; before its
        first token, the prompt's; and the ghost's row, if a step that was planned before the end is still in flight.
        """
        self._handles.pop(request.id, None)
        if request.slot is None or not request.prefilled:
            return
        seen = len(request.prompt) + request.committed - 1  # rows that a finite token has vouched for
        if request.finish_reason == "error" or request.committed == 0:
            seen = 0
            self.sched.memory[request.slot] = None  # and nobody may take them over
        if seen == 0 or request.planned > request.committed:
            chunk = self.sched.chunk  # no chunk's padding reaches further
            self._dirty[request.slot] = seen, -(-(len(request.prompt) + request.planned) // chunk) * chunk

    def _record(self, flight: Flight, ghosts: tuple[int, ...], began: float, read: float) -> None:
        ended = self.clock()
        times = {"began": flight.began, "ended": ended, "plan_s": flight.plan_s, "build_s": flight.build_s}
        waited = flight.wait_s + read - began
        self._steps.append(StepView.of(flight.plan, ghosts, **times, wait_s=waited, commit_s=ended - read))

    def _recover(self, plan: Plan | None, flight: Flight | None, error: BaseException) -> None:
        """After an exception in a step: end as few as possible, and all if nothing can be trusted."""
        if not isinstance(error, Exception) or not (plan or flight):  # Ctrl-C at any line, or a fault of the scheduler
            self._abandon(error)
            return
        try:
            self._fail(plan, flight, error)
        except BaseException as worse:  # no memory for a new slab, or Ctrl-C now
            self._abandon(worse)
            raise

    def _fail(self, plan: Plan | None, flight: Flight | None, error: Exception) -> None:
        """A step raised. All who were in it, or in one already started after it, end with the error; others go on."""
        lost = [plan] if plan else []
        if flight is None and self._flight:  # the new step could not be built; the one before may be quite all right
            flight, self._flight = self._flight, None
            with suppress(Exception):
                self._commit(flight)
                flight = None
        lost += [f.plan for f in (flight, self._flight) if f]
        with self._state:
            for member in (member for plan in lost for member in (*plan.chunks, *plan.decodes)):
                self._end(member.request, "error", describe(error))
            self.sched.start_over()
        self._reset_device()

    def _abandon(self, error: BaseException | None) -> None:
        """End everything that is open: cancelled, or with an error. Right whatever state the scheduler is in."""
        with self._state:
            reason = "cancelled" if error is None else "error"
            self.sched.clear(reason, self.clock())
            for handle in self._handles.values():
                handle.error = None if error is None else describe(error)
                handle._request.finish_reason = handle._request.finish_reason or reason
            self._handles.clear()
            rows = slab_sizes(self.model.config, 1, self.sched.max_len, self.sched.chunk)[3]
            self._dirty = dict.fromkeys(range(len(self.sched.owners)), (0, rows))
            self._flight = None
            self._state.notify_all()

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request from outside a step, in whatever thread: so its listener is not called."""
        with self._state:
            handle = self._handles.get(request.id)
            if handle is None:
                return
            try:
                handle.error = error
                with suppress(Exception):
                    handle._flush(tell=False)
                self.sched.finish(request, reason, self.clock())
                self._retire(request)
                self._state.notify_all()
            except BaseException as interrupt:  # Ctrl-C half way
                self._abandon(interrupt)
                raise

    # --- what everybody may call, from any thread

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping],
        sampling: Sampling | None = None,
        listener: Listener | None = None,
    ) -> Handle:
        """Put a prompt in line: a text, chat messages, or token ids as they are. Never blocks; QueueFull if it is full.

        `listener(handle, piece)` is called with each piece of text, by the thread that steps: it must not wait.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling is a {type(sampling).__name__}; give a Sampling")
        self._check_ids(sampling.token_ids())
        ids = self._ids(prompt)
        room = self.sched.max_len - len(ids)
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            if room < 1:
                raise ValueError(f"prompt of {len(ids)} tokens leaves no room in a slot of {self.sched.max_len}")
            max_tokens = room
        rope = self.model.config.rope
        with self._state:
            if self._closed:
                raise RuntimeError("the engine is closed; load another")
            request = Request(self._next_id, ids, max_tokens, self.clock())
            request.shares = rope.type != "dynamic" or len(ids) <= rope.original_length
            self._next_id += 1
            handle = Handle(self, request, sampling, listener)
            try:
                self._handles[request.id] = handle
                self.sched.submit(request)
            except Exception:  # it does not fit, or the line is full
                del self._handles[request.id]
                raise
            except BaseException as interrupt:  # Ctrl-C half way
                self._abandon(interrupt)
                raise
            self._state.notify_all()
        return handle

    def _ids(self, prompt: str | Sequence[int] | Sequence[Mapping]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty; give at least one token")
            prompt = self.text.encode(prompt)
        elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            prompt = self.text.encode_chat(prompt)
        elif (
            not isinstance(prompt, Sequence)
            or isinstance(prompt, (bytes, bytearray))
            or not all(type(token) is int for token in prompt)
        ):
            raise ValueError(f"a prompt is a text, chat messages or token ids, not {type(prompt).__name__} like this")
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token")
        self._check_ids((min(prompt), max(prompt)))
        return tuple(prompt)

    def _check_ids(self, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.model.config.V:  # MLX would read whatever lies there
                raise ValueError(f"token id {token} is outside the vocabulary of {self.model.config.V}")

    def generate(self, prompts: Sequence, sampling: Sampling | None = None) -> list[Result]:
        """All prompts at once; the results in the prompts' order."""
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                handles.append(self.submit(prompt, sampling))
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:  # if one could not be submitted or waiting was interrupted; else this does nothing
                handle.cancel()

    def _cancel(self, request: Request) -> None:
        self._end(request, "cancelled")

    @contextmanager
    def serving(self) -> Iterator[Engine]:
        """Inside this block a thread steps the engine whenever there is work, and sleeps when there is none."""
        with self._state:
            if self._closed or self._thread:
                raise RuntimeError("the engine is closed" if self._closed else "the engine is serving already")
            self._stopping = False
            thread = threading.Thread(target=self._serve, name="nanobatch", daemon=True)
            thread.start()
            self._thread = thread
        try:
            yield self
        finally:
            self._stop_thread()

    def _serve(self) -> None:
        try:
            while True:
                with self._state:
                    self._state.wait_for(lambda: self._stopping or self._has_work())
                    if self._stopping:
                        return
                # What step lets through (not even a new slab could be made) has ended all there was. Go on: this
                # thread must not die while somebody may come and wait for it.
                with suppress(BaseException):
                    self.step()
        finally:
            with self._state:
                self._thread = None
                self._state.notify_all()

    def _has_work(self) -> bool:
        return bool(self.sched.waiting or self.sched.running or self._flight)

    def _stop_thread(self) -> None:
        with self._state:
            thread, self._stopping = self._thread, True
            self._state.notify_all()
        if thread and thread is not threading.current_thread():
            thread.join()

    def _wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until `ready()`: asleep while a thread serves, else by stepping the engine. False if time runs out."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with self._state:
                left = deadline - time.monotonic()
                if self._thread:
                    patience = min(left, threading.TIMEOUT_MAX)
                    self._state.wait_for(lambda: ready() or not self._thread, patience)
                if ready():
                    return True
                if left <= 0:
                    return False
            if not self._thread:
                self.step()

    def snapshot(self) -> Snapshot:
        """What the engine is doing now."""
        with self._state:
            now = self.clock()
            return Snapshot(
                policy=self.sched.policy,
                slots=tuple(self._slot_view(slot) for slot in range(len(self.sched.owners))),
                queue=tuple((r.id, now - r.arrived) for r in self.sched.waiting.values()),
                submitted=self.sched.submitted,
                finished=self.sched.finished,
                output_tokens=self._output_tokens,
                steps=tuple(self._steps),
            )

    def _slot_view(self, slot: int) -> SlotView:
        owner, memory = self.sched.owners[slot], self.sched.memory[slot]
        if owner is None:
            return SlotView(slot, "free", None, 0, 0, 0, 0, memory.prefilled if memory else 0)
        used = owner.prefilled + max(0, owner.committed - 1)  # the newest token's key and value are not there yet
        return SlotView(slot, owner.phase, owner.id, used, len(owner.prompt), owner.committed, owner.reused, 0)

    def check(self) -> None:
        """Assert the invariants of scheduler and slab. The tests do so after every step."""
        with self._state:
            self.sched.check()
            self.slab.check()
            assert self._handles.keys() == self.sched.running.keys() | self.sched.waiting.keys()

    def close(self) -> None:
        """End every open request as cancelled, and leave the device idle. Closing twice does nothing."""
        with self._state:
            self._closed = True
            for handle in list(self._handles.values()):
                handle.cancel()
        self._stop_thread()
        with device._device_lock, device_stream():
            self._flight = None
            mx.synchronize(device._stream[0])

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def read_logprobs(part: Logprobs) -> Iterator[tuple[int, TokenLogprob]]:
    """What the device measured for some slots, as plain numbers."""
    rows = zip(part.slots, part.chosen.tolist(), part.top_ids.tolist(), part.top.tolist(), strict=True)
    for slot, chosen, ids, values in rows:
        yield slot, TokenLogprob(chosen, tuple(zip(ids, values, strict=True)))
