"""Chapter 5, first part: one step on the device. A `ForwardBatch` goes in, tokens come out.

The problem. A plan names requests, with their clients, counters and records. A forward pass needs none
of that, and the other ranks of a model have none of it.

The solution. `ForwardBatch.from_plan` turns a plan into plain numbers: slots, token ids, rows. The runner
turns it into a lazy MLX graph and starts it, in two halves. `start_forward` starts the forward passes.
`start_sampling` adds the sampling, which may have to wait until the previous step is read back.

    ForwardBatch -> start_forward:  forward over the slab
                    start_sampling: sample               -> RunningStep -> read_back: tokens

The invariant: the same batches and sampling rows, in the same sequence, give the same bits. Only the
times of a step depend on the clock.

Where next: chapter 5, second part, `nanobatch.py`, which plans a step, runs it here and commits it.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

from kernels import device
from kernels.delta_net import LOG, Places
from kernels.device import device_lock, device_stream, mx
from kernels.slot_biases import SlotBiases
from kv import Slab, Window
from llama import forward
from logprobs import Logprobs
from models.delta_net import states_of
from models.layers import Model
from models.memory import Sizes, rows_of_layers, slab_shape
from request import PADDING, Chunk, Decode, Move, Plan
from sampling import PENALTY_CONTEXT, SamplingRow, sample
from sampling_params import SamplingParams
from step_output import StepOutput

if TYPE_CHECKING:
    from engine.disk_prefix_cache import RestoredRows


# --- the batch of a step ------------------------------------------------------------------------


class Prefill(NamedTuple):
    """A chunk of a prompt that goes into a slot."""

    slot: int
    ids: tuple[int, ...]
    start: int  # the row of its first token
    emits: bool  # the chunk ends its prompt: a token is sampled from its last row
    # Where the rows [0:start] come from first, if they are not in the slot
    copied_from: int | None = None  # another slot
    restored: RestoredRows | None = None  # disk
    move: Move | None = None  # in a model with states


class Decoding(NamedTuple):
    """One decode: a sequence's newest token goes into a row, and its draft tokens into the next rows."""

    slot: int
    row: int
    ids: tuple[int, ...]  # these tokens; empty if the newest one is still on the device
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
    def from_plan(plan: Plan) -> ForwardBatch:
        prefills = []
        for chunk in plan.chunks:
            ids = chunk.request.prompt[chunk.start : chunk.stop]
            move = plan.moves.get(chunk.slot)
            before = {"copied_from": chunk.copied_from, "restored": chunk.restored}
            prefills.append(Prefill(chunk.slot, ids, chunk.start, chunk.emits, move=move, **before))
        decodes = []
        for decode in plan.decodes:
            request = decode.request
            ids = (request.answer[-1], *decode.draft) if decode.is_known else ()
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
            if prefill.copied_from in written:
                passes.append([])
                written.clear()
            passes[-1].append(prefill)
            written.add(prefill.slot)
        *before, last = passes
        return [(prefills, ()) for prefills in before] + [(last, self.decodes)]


SamplingRows = Mapping[int, Sequence[SamplingRow]]  # by slot: the sampling of each of its rows


def sampling_rows(
    member: Chunk | Decode, sampling: SamplingParams, seed: int, masks: Sequence[bytes]
) -> list[SamplingRow]:
    """Describe how the tokens that a plan asks of one request are to be sampled.

    `masks`: the tokens that its grammar allows at each row, up to the first draft token that it forbids.
    """
    request = member.request
    before: tuple[int, ...] = ()
    if sampling.looks_back:
        before = (*request.prompt[-PENALTY_CONTEXT:], *request.answer)
    rows = []
    for i in range(1 + len(member.draft)):
        seen = (*before, *member.draft[:i]) if sampling.looks_back else ()
        mask = masks[min(i, len(masks) - 1)] if masks else None
        rows.append(SamplingRow(member.slot, sampling, seed, member.index + i, seen, mask))
    return rows


# --- a step on the device -----------------------------------------------------------------------


@dataclass(slots=True)
class RunningStep:
    """A step on the device. `Runner.start_forward` makes it, `Runner.start_sampling` adds what is sampled, and the
    engine reads it back."""

    batch: ForwardBatch
    began: float
    # In the order of the logits. A slot with draft tokens appears once, and has 1 + draft tokens rows of them
    slots: list[int] = field(default_factory=list)
    hidden: list[mx.array] = field(default_factory=list)  # (n, D), one part for each pass
    logits: list[mx.array] = field(default_factory=list)  # (n, V), one part for each pass
    # By slot, for each chunk without a sampled token: a scalar that is 0 if its rows are finite
    proofs: Mapping[int, mx.array] = field(default_factory=dict)
    # (slots, 1 + draft tokens): the token of each row. -1 where no token is sampled, or where the
    # logits were not finite
    tokens: mx.array | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    # By slot, the last hidden state of a prompt to embed, (D,)
    vectors: Mapping[int, mx.array] = field(default_factory=dict)
    build_s: float = 0.0  # Python builds the graph
    device_s: float = 0.0  # MLX takes the graph into its queue (`Runner._enqueue`)
    wait_s: float = 0.0  # Python waits for the previous pass (`Runner._start`)

    @property
    def finite(self) -> list[int]:
        """The slots whose chunks are proven to be finite. Only valid after `read_back`."""
        return [slot for slot, proof in self.proofs.items() if proof.item() == 0]

    def read_back(self) -> tuple[list[list[int]], dict[tuple[int, int], StepOutput]]:
        """Wait for the step. Return the tokens by slot, and the outputs that are more than a token by
        slot and index in the answer."""
        # Python blocks only here, in `_start` and in `_enqueue`
        mx.eval(self.tokens, self.logprobs, self.vectors, self.proofs)
        outputs = {}
        for part in self.logprobs:
            for row, output in part.by_row():
                outputs[row.slot, row.index] = output
        tokens = self.tokens.tolist()
        for slot, hidden in self.vectors.items():
            vector = array("f", bytes(memoryview(hidden)))
            outputs[slot, 0] = StepOutput(tokens[slot][0], vector=vector)
        return tokens, outputs


def by_known_tokens(
    decodes: Sequence[Decoding],
) -> Iterator[tuple[list[int], list[int], list[int], list[Move | None]]]:
    """Group the decoding sequences by their number of known token ids, and yield the slots, rows, ids
    and moves of each group. 0 ids: the newest token is still on the device."""

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
        self._device_s = 0.0  # for the step that is being started
        self._wait_s = 0.0
        self.waits = os.environ.get("NANOBATCH_WAIT") != "off"  # see `_start`
        self._shape = slab_shape(model.config, sizes.slots, sizes.max_len, sizes.chunk)
        self._places = (sizes.slots, sizes.checkpoints, LOG)
        self.slab: Slab | None = None
        self.reset()

    def reset(self) -> None:
        """Make a new, empty slab."""
        # Results of the newest pass or copy, and proofs. Once they are computed, no operation reads the
        # slab, but a view (`Slab.written`) still holds its memory
        self._reading: Sequence[mx.array] = ()
        self.slab = None  # free the old slab before allocating a new one
        rows = rows_of_layers(self.model.config)
        self.slab = Slab(*self._shape, self.model.kv_dtype, rows)
        self.slab.states = states_of(self.model, Places(*self._places))
        self._newest = mx.zeros(self.slab.slots, mx.int32)  # (slots,): each slot's newest token
        self._slot_biases = SlotBiases(self.slab.slots, self.model.config.V)

    def warm_up(self) -> None:
        """Run a prompt of one token and one decode, because first steps are slow."""
        if self.ranks.rank:
            return  # rank 0 sends these batches
        with device_lock, device_stream():
            rows = {0: [SamplingRow(0, SamplingParams(), 0, 0)]}
            moves = [Move(-1, 0, 0, 0), Move(0, 0, 0, 1)]
            prompt = Prefill(0, ids=(0,), start=0, emits=True, move=moves[0])
            self.run(ForwardBatch((), (prompt,), ()), rows).read_back()
            self.run(ForwardBatch((), (), [Decoding(0, 1, (), moves[1])]), rows).read_back()
            self.reset()

    def run(self, batch: ForwardBatch, rows: SamplingRows) -> RunningStep:
        """Start both halves of a step."""
        return self.start_sampling(self.start_forward(batch), rows)

    def start_forward(self, batch: ForwardBatch) -> RunningStep:
        """The first half of a step: start each forward pass as soon as it is built."""
        step = RunningStep(batch, began=self.clock())
        self._device_s = 0.0
        self._wait_s = 0.0
        if self.ranks.leads:
            self.ranks.broadcast(list(batch))
        for slot, start, stop in batch.scrubs:
            self.slab.scrub(slot, start, stop)
        self._forward(step)
        step.proofs = self._prove(batch.prefills)
        step.build_s = self.clock() - step.began
        return step

    def start_sampling(self, step: RunningStep, rows: SamplingRows) -> RunningStep:
        """The second half: sample a token for each row, and start that, too."""
        resumed = self.clock()
        tokens, step.logprobs, step.vectors = self._sample(step, rows)
        step.hidden = step.logits = []  # they are large, and only the graph still needs them
        if self.ranks.size > 1:
            tokens = self.ranks.first(tokens)  # rank 0's tokens, on every rank
        # With draft tokens, only `commit` can tell the newest token; the next batch contains its id
        first = tokens[:, 0]
        self._newest = mx.where(first >= 0, first, self._newest)
        self._enqueue(tokens, self._newest, step.logprobs, step.vectors)
        step.tokens = tokens
        step.device_s = self._device_s
        step.wait_s = self._wait_s
        step.build_s += self.clock() - resumed - step.device_s - step.wait_s
        return step

    def _forward(self, step: RunningStep) -> None:
        """Build and start the passes of a step."""
        for prefills, decodes in step.batch.passes():
            ids, windows, logits_at, slots = self._gather(prefills, decodes)
            hidden = forward(self.model, ids, windows, logits_at)  # (n, D)
            if logits_at:
                logits = self.model.head(hidden)  # (n, V)
                self._start([logits])
                step.slots += slots
                step.hidden.append(hidden)
                step.logits.append(logits)
            else:  # hidden states are not needed, so start the writes
                self._start(self.slab.written())

    def _gather(
        self, prefills: Sequence[Prefill], decodes: Sequence[Decoding]
    ) -> tuple[mx.array, list[Window], list[int], list[int]]:
        """Collect the input of one pass, the chunks, then the decoding sequences. Start the copies of prefixes.

        Returns the tokens of all windows, one window after the other; the windows; the indices of
        the tokens whose next token is sampled; and the slots of these tokens, each once.
        """
        ids: list[mx.array] = []
        windows: list[Window] = []
        logits_at: list[int] = []
        slots: list[int] = []
        count = 0  # tokens in `ids`
        for prefill in prefills:
            self._copy_prefix(prefill)
            padded = self._padded(prefill)
            slot, start, move = [prefill.slot], [prefill.start], [prefill.move]
            windows.append(Window(self.slab, slot, start, len(padded), move))
            ids.append(mx.array(padded))
            if prefill.emits:
                logits_at.append(count + len(prefill.ids) - 1)
                slots.append(prefill.slot)
            count += len(padded)
        for group, starts, known, moves in by_known_tokens(decodes):
            # If no ids are known, one token of each sequence is still on the device
            newest = mx.array(known) if known else self._newest[mx.array(group)]
            windows.append(Window(self.slab, group, starts, newest.size // len(group), moves))
            ids.append(newest)
            logits_at += range(count, count + newest.size)
            slots += group
            count += newest.size
        return mx.concatenate(ids), windows, logits_at, slots

    def _prove(self, prefills: Sequence[Prefill]) -> dict[int, mx.array]:
        """Start the proofs that chunks are finite (`RunningStep.proofs`). A chunk with a sampled token
        needs none, because finite logits prove it."""
        proofs = {}
        for prefill in prefills:
            if not prefill.emits:
                is_in_place = prefill.copied_from is None and prefill.restored is None
                start = prefill.start if is_in_place else 0  # copied rows are proven, too
                stop = prefill.start + len(prefill.ids)
                proof = self.slab.proof(prefill.slot, start, stop)
                proofs[prefill.slot] = self.ranks.sum(proof)  # each rank holds different heads
        if proofs:
            self._enqueue(*proofs.values())
            self._reading = [*self._reading, *proofs.values()]  # proofs read the slab, too
        return proofs

    def _padded(self, prefill: Prefill) -> list[int]:
        """The token ids of a chunk, padded with zeros on a GPU, so that there are few widths.

        A GPU prepares its kernels for each new shape. The keys of the padding land in rows that the
        sequence will overwrite later.
        """
        width = len(prefill.ids)
        if device.has_gpu() and not self.slab.states:  # padding would change the states
            rounded = -(-width // PADDING) * PADDING
            width = min(rounded, self.slab.length - prefill.start)
        return [*prefill.ids, *[0] * (width - len(prefill.ids))]

    def _sample(
        self, step: RunningStep, rows: SamplingRows
    ) -> tuple[mx.array, list[Logprobs], dict[int, mx.array]]:
        """Sample the tokens of all slots, (slots, 1 + draft tokens), with -1 where none is sampled. Also
        return the log probabilities and vectors that requests asked for. On any rank but the first,
        all tokens are -1."""
        most = max([1, *(len(decode.ids) for decode in step.batch.decodes)])
        sampled = mx.full((self.slab.slots, most), -1, mx.int32)
        if not step.slots or self.ranks.rank:
            return sampled, [], {}
        all_rows: list[SamplingRow] = []
        columns: list[int] = []  # the index of each row within its slot
        for slot in step.slots:
            all_rows += rows[slot]
            columns += range(len(rows[slot]))
        tokens, logprobs = sample(mx.concatenate(step.logits), all_rows, self._slot_biases)
        sampled[mx.array([row.slot for row in all_rows]), mx.array(columns)] = tokens
        hidden = mx.concatenate(step.hidden)
        vectors = {}
        for i, row in enumerate(all_rows):
            if row.sampling.embeds:
                vectors[row.slot] = hidden[i].astype(mx.float32)
        return sampled, logprobs, vectors

    def _copy_prefix(self, prefill: Prefill) -> None:
        """Fill in the rows before this chunk, if they come from another slot or from disk."""
        if prefill.restored:
            prefix = prefill.restored.prefix(prefill.start)
            self.slab.fill_state(prefill.slot, prefill.restored.states(), prefill.restored.base)
        elif prefill.copied_from is not None:
            prefix = self.slab.prefix(prefill.copied_from, prefill.start)
            self._start(prefix)
        else:
            return
        self.slab.fill(prefill.slot, prefix)

    def _start(self, results: Sequence[mx.array]) -> None:
        """Start a forward pass, or a copy of a prefix, as soon as the previous pass has finished reading the slab.

        subtle: an array is written in place only if nothing else holds its memory. A running pass
        keeps a reference to the slab until it has read it; writing then would copy the slab, layer
        by layer. So we wait for the previous pass: its logits exist once every layer has read the
        slab. Its sampling, which still has to run, leaves enough time to start the next one. (Waiting
        for less than the results would not help: MLX marks everything that was started together as
        computed at the same time.)

        On a GPU this has not been measured: there the device idles while the next pass is
        encoded. `NANOBATCH_WAIT=off` copies instead of waiting; `bench.py --parts steps` with and
        without it shows which is faster.
        """
        began = self.clock()
        if self.waits:
            mx.eval(self._reading)
        self._reading = []  # a view holds the slab's memory: drop it before the slab is written
        self._wait_s += self.clock() - began
        if not device.has_gpu():
            # MLX walks through a whole graph before it starts any of it. So the first layer's keys and
            # values are started alone, and computed during the walk
            self._enqueue(self.slab.arrays[0])
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
        """The loop of every rank but the first: run the batches that rank 0 sends."""
        with device_lock, device_stream():
            while message := self.ranks.receive():
                scrubs, prefills, decodes = message
                prefills = [Prefill(*each) for each in prefills]
                decodes = [Decoding(*each) for each in decodes]
                self.run(ForwardBatch(scrubs, prefills, decodes), rows={}).read_back()
