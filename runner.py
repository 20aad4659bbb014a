"""Chapter 5, first part: one step on the device. A `ForwardBatch` goes in, tokens come out.

The problem. A plan names requests, and a request has a handle, text and a client. A forward pass
needs none of that, and the other ranks of a model have none of it.

The solution. `ForwardBatch.of` turns a plan into plain numbers: slots, token ids, rows. The runner
turns it into a lazy MLX graph and starts it, in two halves. `begin` starts the forward passes.
`finish` adds the sampling, which may have to wait until the previous step has been read back.

    ForwardBatch -> begin: forward over the slab -> LaunchedStep
                    finish: sample               -> InFlightStep -> read: tokens

The invariant: the same batches and sampling rows, in the same sequence, give the same bits. Only the
times of a step depend on the clock.

Where next: chapter 5, second part, `nanobatch.py`, which plans a step, runs it here and commits it.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from kernels import device
from kernels.delta_net import LOG, Places
from kernels.device import device_lock, device_stream, mx
from kv import Slab, Window
from llama import forward
from models.delta_net import states_of
from models.layers import Model
from models.memory import Sizes, rows_of_layers, slab_shape
from prefix import Source
from sampling import PENALTY_CONTEXT, Logprobs, SamplingRow, SlotState, sample
from sampling_params import SamplingParams
from sched import Chunk, Decode, Plan
from state_places import Move
from step_output import StepOutput

PADDING = 16  # on a GPU, a chunk is padded to a multiple of this many tokens


# --- the batch of a step ------------------------------------------------------------------------


class Prefill(NamedTuple):
    """A chunk of a prompt that goes into a slot."""

    slot: int
    ids: tuple[int, ...]
    start: int  # the row of its first token
    source: Source  # rows [0:start] are copied from this slot first, or from disk
    asked: bool  # the chunk ends its prompt: a token is sampled from its last row
    move: Move | None = None  # of its state, in a model with states


class Decoding(NamedTuple):
    """A sequence whose newest token goes into a row, and its draft tokens into the rows after it."""

    slot: int
    row: int
    ids: tuple[int, ...]  # of these tokens; empty if the newest one is still on the device
    move: Move | None = None


class ForwardBatch(NamedTuple):
    """A plan without its requests: plain numbers.

    Together with the slab and each slot's newest token, a batch determines the logits. So all other
    ranks of a model run the same batch.
    """

    scrubs: Sequence[tuple[int, int, int]]  # (slot, start, stop): rows to be zeroed first
    prefills: Sequence[Prefill]
    decodes: Sequence[Decoding]

    @staticmethod
    def of(plan: Plan) -> ForwardBatch:
        prefills = []
        for chunk in plan.chunks:
            ids = chunk.request.prompt[chunk.start : chunk.stop]
            where = (chunk.slot, ids, chunk.start, chunk.source)
            prefills.append(Prefill(*where, chunk.emits, plan.moves.get(chunk.slot)))
        decodes = []
        for decode in plan.decodes:
            request = decode.request
            is_known = first_of(decode) == len(request.answer)  # none of its tokens is in flight
            ids = (request.answer[-1], *decode.draft) if is_known else ()
            move = plan.moves.get(decode.slot)
            decodes.append(Decoding(decode.slot, decode.position, ids, move))
        decodes.sort()  # neighbouring slots are one view of the slab
        return ForwardBatch(plan.scrubs, prefills, decodes)

    def passes(self) -> list[tuple[list[Prefill], Sequence[Decoding]]]:
        """The chunks and the decoding sequences of each forward pass.

        Nearly all steps have one pass, so each weight is read once. Only a chunk that copies
        rows which the same pass writes starts another one.
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
    """The index, in its answer, of the first token that this part of a plan yields."""
    return member.request.planned - 1 - len(member.draft)


SamplingRows = Mapping[int, Sequence[SamplingRow]]  # by slot: the sampling of each of its rows


def sampling_rows(
    member: Chunk | Decode, sampling: SamplingParams, seed: int, masks: Sequence[bytes]
) -> list[SamplingRow]:
    """How the tokens of a request that has just been planned are sampled.

    `masks`: what its grammar allows at each row, as far as it allows the draft tokens.
    """
    request = member.request
    before: tuple[int, ...] = ()
    if sampling.looks_back:
        before = (*request.prompt[-PENALTY_CONTEXT:], *request.answer)
    rows = []
    for i in range(1 + len(member.draft)):
        seen = before and (*before, *member.draft[:i])
        mask = masks[min(i, len(masks) - 1)] if masks else None
        rows.append(SamplingRow(member.slot, sampling, seed, first_of(member) + i, seen, mask))
    return rows


# --- a step on the device -----------------------------------------------------------------------


class Pass:
    """The input of a forward pass: the tokens of all its windows, one window after the other."""

    def __init__(self) -> None:
        self.ids: list[mx.array] = []
        self.windows: list[Window] = []
        self.asked: list[int] = []  # indices of the tokens whose next token is sampled
        self.slots: list[int] = []  # the slots of these, each once
        self.size = 0

    def add(self, ids: mx.array, window: Window, asked: Iterable[int]) -> None:
        """Append a window. `asked`: indices among its own tokens."""
        asked = [self.size + i for i in asked]
        if asked:
            self.asked += asked
            self.slots += window.slots
        self.ids.append(ids)
        self.windows.append(window)
        self.size += ids.size


class PassOutput(NamedTuple):
    """What a forward pass yields for its n rows that are sampled."""

    slots: list[int]  # whose rows follow each other; a slot with draft tokens has several
    states: mx.array  # (n, D)
    logits: mx.array  # (n, V)


class LaunchedStep(NamedTuple):
    """A step whose forward passes have been started, and whose tokens have yet to be sampled."""

    batch: ForwardBatch
    outputs: list[PassOutput]  # of the passes with a row to sample
    proofs: dict[int, mx.array]  # (), by slot: of each chunk without a token to sample
    began: float
    took: float

    @property
    def slots(self) -> list[int]:
        return [slot for output in self.outputs for slot in output.slots]


class InFlightStep(NamedTuple):
    """A step that has been started, and whose tokens have not been read yet."""

    # (slots, 1 + draft tokens): the token of each row. -1 where no token is sampled, or where the
    # logits were not finite
    tokens: mx.array
    logprobs: list[Logprobs]
    states: dict[int, mx.array]  # (D,), by slot: the last hidden states of prompts to embed
    began: float
    build_s: float  # while Python built the graph
    device_s: float  # while MLX took the graph into its queue (`Runner._enqueue`)
    wait_s: float  # while Python waited for the previous pass (`Runner._start`)
    proofs: Mapping[int, mx.array] = {}  # (), by slot: 0 if the rows of a chunk are finite

    @property
    def finite(self) -> list[int]:
        """The slots of finite chunks without a sampled token. Only valid after `read`."""
        return [slot for slot, proof in self.proofs.items() if proof.item() == 0]

    def read(self) -> tuple[list[list[int]], dict[tuple[int, int], StepOutput]]:
        """Wait for the step. Returns the tokens by slot and, by slot and index in the answer, the
        outputs that are more than a token."""
        # Python blocks here, in `_start` and in `_enqueue`
        mx.eval(self.tokens, self.logprobs, self.states, self.proofs)
        outputs = {}
        for part in self.logprobs:
            for row, output in part.read():
                outputs[row.slot, row.index] = output
        tokens = self.tokens.tolist()
        for slot, state in self.states.items():
            vector = array("f", bytes(memoryview(state)))
            outputs[slot, 0] = StepOutput(tokens[slot][0], state=vector)
        return tokens, outputs


def by_known_tokens(
    decodes: Sequence[Decoding],
) -> Iterator[tuple[list[int], list[int], list[int], list[Move | None]]]:
    """The decoding sequences, grouped by how many token ids are known of each: slots, rows, ids,
    moves."""

    def known(decode: Decoding) -> int:
        return len(decode.ids)

    for _, group in groupby(sorted(decodes, key=known), key=known):
        slots, rows, ids, moves = zip(*group, strict=True)
        yield list(slots), list(rows), list(chain(*ids)), list(moves)


class Runner:
    """The model, the slab and each slot's newest token, on the device, without requests."""

    def __init__(self, model: Model, sizes: Sizes, clock: Callable[[], float] = time.perf_counter):
        self.model = model.for_slots_of(sizes.max_len)
        self.ranks = model.ranks
        self.clock = clock
        self._device_s = 0.0  # of the step that is being started
        self._wait_s = 0.0
        self.waits = os.environ.get("NANOBATCH_WAIT") != "off"  # see `_start`
        self._shape = slab_shape(model.config, sizes.slots, sizes.max_len, sizes.chunk)
        self._places = (sizes.slots, sizes.checkpoints, LOG)
        self.slab: Slab | None = None
        self.reset()

    def reset(self) -> None:
        """Make a new, empty slab."""
        self._reading: Sequence[mx.array] = ()  # until these are computed, the slab is read
        self.slab = None  # free the old one before a new one is made
        rows = rows_of_layers(self.model.config)
        self.slab = Slab(*self._shape, self.model.kv_dtype, rows)
        self.slab.states = states_of(self.model, Places(*self._places))
        self._newest = mx.zeros(self.slab.slots, mx.int32)  # (slots,): each slot's newest token
        self._slot_state = SlotState(self.slab.slots, self.model.config.V)

    def warm_up(self) -> None:
        """Run a prompt of one token and one decode, because first steps are slow."""
        if self.ranks.rank:
            return  # rank 0 sends it these batches
        with device_lock, device_stream():
            rows = {0: [SamplingRow(0, SamplingParams(), 0, 0)]}
            moves = [Move(-1, 0, 0, 0), Move(0, 0, 0, 1)]
            prompt = Prefill(0, ids=(0,), start=0, source=None, asked=True, move=moves[0])
            self.run(ForwardBatch((), (prompt,), ()), rows).read()
            self.run(ForwardBatch((), (), [Decoding(0, 1, (), moves[1])]), rows).read()
            self.reset()

    def run(self, batch: ForwardBatch, rows: SamplingRows) -> InFlightStep:
        """Both halves of a step, one after the other."""
        return self.finish(self.begin(batch), rows)

    def begin(self, batch: ForwardBatch) -> LaunchedStep:
        """The first half of a step: start each forward pass as soon as it is built."""
        began = self.clock()
        self._device_s = 0.0
        self._wait_s = 0.0
        if self.ranks.leads:
            self.ranks.broadcast(list(batch))
        for slot, start, stop in batch.scrubs:
            self.slab.scrub(slot, start, stop)
        outputs = self._forward(batch)
        proofs = self._prove(batch.prefills)
        return LaunchedStep(batch, outputs, proofs, began, took=self.clock() - began)

    def finish(self, launched: LaunchedStep, rows: SamplingRows) -> InFlightStep:
        """The second half: sample a token for each row, and start that, too."""
        resumed = self.clock()
        tokens, logprobs, states = self._sample(launched, rows)
        if self.ranks.size > 1:
            tokens = self.ranks.first(tokens)  # those of rank 0, on every rank
        # With draft tokens, only `commit` finds the newest token; the next batch then contains it
        first = tokens[:, 0]
        self._newest = mx.where(first >= 0, first, self._newest)
        self._enqueue(tokens, self._newest, logprobs, states)
        took = launched.took + self.clock() - resumed
        return InFlightStep(
            tokens=tokens,
            logprobs=logprobs,
            states=states,
            began=launched.began,
            build_s=took - self._device_s - self._wait_s,
            device_s=self._device_s,
            wait_s=self._wait_s,
            proofs=launched.proofs,
        )

    def _forward(self, batch: ForwardBatch) -> list[PassOutput]:
        """Build and start the passes of a step. Returns those in which a row is sampled."""
        outputs = []
        for prefills, decodes in batch.passes():
            tokens = self._gather(prefills, decodes)
            states = forward(
                self.model, mx.concatenate(tokens.ids), tokens.windows, tokens.asked
            )  # (n, D)
            if tokens.asked:
                logits = self.model.head(states)  # (n, V)
                self._start([logits])
                outputs.append(PassOutput(tokens.slots, states, logits))
            else:  # the states are never computed: start what has been written
                self._start(self.slab.written())
        return outputs

    def _gather(self, prefills: Sequence[Prefill], decodes: Sequence[Decoding]) -> Pass:
        """The tokens and windows of one pass: the chunks, then the decoding sequences."""
        tokens = Pass()
        for prefill in prefills:
            self._copy_prefix(prefill)
            padded = self._padded(prefill)
            where = ([prefill.slot], [prefill.start], len(padded), [prefill.move])
            window = Window(self.slab, *where)
            asked = [len(prefill.ids) - 1] if prefill.asked else []
            tokens.add(mx.array(padded), window, asked)
        for slots, rows, known, moves in by_known_tokens(decodes):
            # Ids that are not known here are still on the device
            ids = mx.array(known) if known else self._newest[mx.array(slots)]
            window = Window(self.slab, slots, rows, ids.size // len(slots), moves)
            tokens.add(ids, window, range(ids.size))
        return tokens

    def _prove(self, prefills: Sequence[Prefill]) -> dict[int, mx.array]:
        """Are the rows of each chunk finite? A chunk with a sampled token needs no proof."""
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
        """The token ids of a chunk. On a GPU zeros follow, so that there are few widths.

        A GPU prepares its kernels for each shape anew. The padding's keys land in rows that the
        sequence has yet to reach and will overwrite.
        """
        width = len(prefill.ids)
        if device.has_gpu() and not self.slab.states:  # which padding would change
            rounded = -(-width // PADDING) * PADDING
            width = min(rounded, self.slab.length - prefill.start)
        return [*prefill.ids, *[0] * (width - len(prefill.ids))]

    def _sample(
        self, launched: LaunchedStep, rows: SamplingRows
    ) -> tuple[mx.array, list[Logprobs], dict[int, mx.array]]:
        """Sample a token for each row that is asked for one, -1 for the others: (slots, 1 + draft
        tokens). Also returns the log probabilities and the states that are wanted. On a rank that
        follows, all tokens are -1."""
        most = max([1, *(len(decode.ids) for decode in launched.batch.decodes)])
        sampled = mx.full((self.slab.slots, most), -1, mx.int32)
        outputs = launched.outputs
        if not outputs or self.ranks.rank:
            return sampled, [], {}
        all_rows: list[SamplingRow] = []
        columns: list[int] = []  # of each row, among those of its slot
        for slot in launched.slots:
            all_rows += rows[slot]
            columns += range(len(rows[slot]))
        logits = mx.concatenate([output.logits for output in outputs])
        tokens, logprobs = sample(logits, all_rows, self._slot_state)
        sampled[mx.array([row.slot for row in all_rows]), mx.array(columns)] = tokens
        last_states = mx.concatenate([output.states for output in outputs])
        states = {}
        for i, row in enumerate(all_rows):
            if row.sampling.embeds:
                states[row.slot] = last_states[i].astype(mx.float32)
        return sampled, logprobs, states

    def _copy_prefix(self, prefill: Prefill) -> None:
        """Copy another slot's first rows, or rows from disk, if this chunk continues from there."""
        if prefill.source is None:
            return
        if isinstance(prefill.source, int):
            prefix = self.slab.prefix(prefill.source, prefill.start)
            self._start(prefix)
        else:
            prefix = prefill.source.prefix(prefill.start)
            self.slab.fill_state(prefill.slot, prefill.source.states())
        self.slab.fill(prefill.slot, prefix)

    def _start(self, results: Sequence[mx.array]) -> None:
        """Start a forward pass as soon as the previous one has finished reading the slab.

        subtle: an array is written in place only if nothing else holds its memory. A running pass
        keeps a reference to the slab until it has read it; writing then would copy the slab, layer
        by layer. So we wait for the previous pass. Its sampling, which still has to run, leaves
        enough time to start the next one. (Waiting for less than the results would not help: MLX
        marks everything that was started together as computed at the same time.)

        On a GPU this has not been measured: there the device idles while the next pass is
        encoded. `NANOBATCH_WAIT=off` copies instead of waiting; `bench.py --parts steps` with and
        without it shows which is faster.
        """
        began = self.clock()
        if self.waits:
            mx.eval(self._reading)
        self._reading = []  # these may be views of the slab: drop them before it is written
        self._wait_s += self.clock() - began
        self._enqueue(*results)
        self._reading = results

    def _enqueue(self, *results) -> None:
        """Add the operations that lead to these results to MLX's queue, for the device to run.

        On a CPU the queue holds about fifty operations, and adding to a full queue blocks. So
        nearly all of the device's work is done during this call.
        """
        began = self.clock()
        mx.async_eval(results)
        self._device_s += self.clock() - began

    # --- several processes (`distributed`)

    def follow(self) -> None:
        """The loop of every rank but the first: run the batches of rank 0 until there are no more."""
        with device_lock, device_stream():
            while message := self.ranks.receive():
                scrubs, prefills, decodes = message
                prefills = [Prefill(*each) for each in prefills]
                decodes = [Decoding(*each) for each in decodes]
                self.run(ForwardBatch(scrubs, prefills, decodes), rows={}).read()
