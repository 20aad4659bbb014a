"""The runner without the engine: its batches are plain numbers, and the same batches give the same bits."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from harness import random_asks
from kinds import KINDS

from kernels.device import device_lock, device_stream, mx
from models.memory import Sizes
from nanobatch import Engine, SamplingParams
from runner import ForwardBatch, Prefill, Runner, SamplingRows

SIZES = Sizes(slots=4, max_len=192, chunk=32, budget=100)
SETTINGS = [*KINDS.values()]


class Recorded:
    """The batches that a runner received, and its results."""

    def __init__(self, runner: Runner):
        self.runner, self.steps, self.tokens, self.logprobs = runner, [], [], []

    @property
    def orders(self) -> list[ForwardBatch]:
        return [order for order, _ in self.steps]

    @property
    def picks(self) -> list[SamplingRows]:
        return [picks for _, picks in self.steps]

    def play(self, order: ForwardBatch, picks: SamplingRows) -> None:
        tokens, logprobs = self.runner.run(order, picks).read_back()
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)

    def play_all(self, steps: list[tuple[ForwardBatch, SamplingRows]]) -> Recorded:
        with device_lock, device_stream():
            for step in steps:
                self.play(*step)
        return self

    @property
    def slab(self) -> list[bytes]:
        slab = self.runner.slab
        return [np.array(array).tobytes() for array in slab.arrays]


@pytest.fixture(scope="module")
def record(parts) -> Recorded:
    """Record an engine that serves random prompts with common prefixes, chunks, copied rows, and every kind
    of sampling."""
    model, text = parts
    rng = np.random.default_rng(4)
    asks = random_asks(rng, 36, longest=120, tokens=14, alike=0.7)
    with Engine(model, text, sizes=SIZES) as engine:
        handles = []
        recorded, finish = Recorded(engine.runner), engine.runner.start_sampling

        def reading(begun, picks):
            recorded.steps.append((begun.batch, picks))
            flight = finish(begun, picks)
            tokens, logprobs = flight.read_back()
            recorded.tokens.append(tokens)
            recorded.logprobs.append(logprobs)
            return flight

        engine.runner.start_sampling = reading
        for n, ask in enumerate(asks):
            settings = {"max_tokens": ask.max_tokens, "ignore_eos": True, "seed": n} | SETTINGS[
                n % len(SETTINGS)
            ]
            handles.append(engine.submit(ask.prompt, SamplingParams(**settings)))
            for _ in range(n % 3):
                engine.step()
            if n % 7 == 6:
                # Cancel the newest request, so that its slot is scrubbed
                handles[[*engine.sched.running][-1] - 1].cancel()
        while engine.step():
            pass
        yield recorded


def test_recorded_batches_are_complete(record):
    """The recording contains scrubs, copied rows, batches with several chunks, and every kind of sampling."""
    orders = record.orders
    assert sum(bool(order.scrubs) for order in orders) >= 1
    assert (
        sum(len(order.prefills) > 1 for order in orders) > 5
        and sum(len(order.decodes) > 1 for order in orders) > 20
    )
    assert (
        sum(prefill.copied_from is not None for order in orders for prefill in order.prefills) > 2
    )
    asked = [[prefill.emits for prefill in order.prefills] for order in orders]
    assert sum(any(each) and not all(each) for each in asked) > 2, (
        "no pass in which only some chunks end their prompts"
    )
    assert sum(bool(logprobs) for logprobs in record.logprobs) > 10
    picks = [pick for each in record.picks for pick, *_ in each.values()]
    assert {pick.sampling.group for pick in picks} >= {
        "greedy",
        "edited",
        "open",
        "short list",
        "long list",
    }
    assert sum(bool(pick.before) for pick in picks) > 3


def test_batch_alone_says_who_samples(record):
    """Only the batch decides which rows are sampled."""
    compared = 0
    for (order, picks), tokens in zip(record.steps, record.tokens, strict=True):
        decoding = [slot for slot, *_ in order.decodes]
        slots = [*(prefill.slot for prefill in order.prefills), *decoding]
        asked = {*(prefill.slot for prefill in order.prefills if prefill.emits), *decoding}
        assert picks.keys() == asked
        assert len(set(slots)) == len(slots), "a slot occurs twice in a batch"
        said = {slot for slot, rows in enumerate(tokens) if max(rows) >= 0}
        assert said == asked
        compared += len(asked)
    assert compared > 100


def test_replayed_batches_give_the_same_bits(parts, record):
    """Replay the batches on a runner that was reset, with a random clock."""
    rng = random.Random(1)
    played = Recorded(Runner(parts[0], SIZES, clock=lambda: rng.uniform(-1e9, 1e9)))
    played.play_all(record.steps[::-1][:10])  # nonsense: they refer to rows that were never written
    with device_lock, device_stream():
        played.runner.reset()
    played.tokens.clear()
    played.logprobs.clear()
    played.play_all(record.steps)
    assert played.tokens == record.tokens
    assert played.logprobs == record.logprobs
    assert played.slab == record.slab


def test_separate_passes_give_the_same_bits(parts, record, monkeypatch):
    """How tokens are grouped into passes and windows affects only speed."""

    def one_by_one(order: ForwardBatch) -> list:
        return [([prefill], ()) for prefill in order.prefills] + [
            ([], (decode,)) for decode in order.decodes
        ]

    monkeypatch.setattr(ForwardBatch, "passes", one_by_one)
    played = Recorded(Runner(parts[0], SIZES)).play_all(record.steps)
    assert played.tokens == record.tokens and played.logprobs == record.logprobs
    assert played.slab == record.slab


def test_step_is_one_pass(record):
    """Each chunk is in one pass, in order, and all decoding sequences are in the last pass."""
    copies = 0
    for order in record.orders:
        passes = order.passes()
        assert [prefill for chunks, _ in passes for prefill in chunks] == order.prefills
        assert [decodes for _, decodes in passes] == [()] * (len(passes) - 1) + [order.decodes]
        for chunks, _ in passes:
            written = set()
            for prefill in chunks:
                assert prefill.copied_from not in written
                written.add(prefill.slot)
        copies += sum(prefill.copied_from is not None for prefill in order.prefills)
    idle = sum(len(order.prefills) + len(order.decodes) < SIZES.slots for order in record.orders)
    assert copies > 1 and idle > 10


def test_chunk_waits_for_rows_it_copies():
    """A chunk that copies rows of the same step goes into a separate pass."""
    first, other = Prefill(0, (1, 2, 3), 0, True), Prefill(1, (4, 5), 0, True)
    copies, copies_old = Prefill(2, (9,), 2, True, 0), Prefill(3, (9,), 2, True, 7)
    order = ForwardBatch((), (first, other, copies_old, copies), ((5, 8, ()),))
    assert order.passes() == [([first, other, copies_old], ()), ([copies], ((5, 8, ()),))]


def test_head_computes_only_sampled_rows(parts, record):
    """The head is the widest weight, so it is computed for sampled rows only."""
    sizes = []
    model = replace(parts[0], head=lambda x: sizes.append(len(x)) or parts[0].head(x))
    with device_lock, device_stream():
        played = Recorded(Runner(model, SIZES))
        for order, picks in record.steps:
            sizes.clear()
            played.play(order, picks)
            rows = sum(map(len, picks.values()))
            assert sum(sizes) == rows and len(sizes) <= len(order.passes())
            assert 0 not in sizes
        assert played.tokens == record.tokens


def test_chunk_keeps_no_reference_to_the_slab(parts):
    """If a chunk samples nothing, the output of its last layer is never computed. A reference to it would
    keep the slab's arrays alive, and the next write would copy them."""
    sizes = Sizes(slots=4, max_len=16_384, chunk=32, budget=100)
    with device_lock, device_stream():
        runner = Runner(parts[0], sizes)
        runner.run(ForwardBatch((), (Prefill(0, (7,) * 32, 0, False),), ()), {}).read_back()
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        runner.run(
            ForwardBatch(((1, 0, 64),), (Prefill(2, (7,) * 8, 32, False, 0),), ()), {}
        ).read_back()
        mx.synchronize()
        assert mx.get_peak_memory() - before < runner.slab.arrays[0].nbytes


@pytest.mark.parametrize("is_finite", [True, False])
def test_chunk_proves_the_rows_it_copies(parts, is_finite):
    """A chunk is proven to be finite together with the rows that were copied from another slot."""
    runner = Runner(parts[0], SIZES)
    with device_lock, device_stream():
        first = Prefill(0, ids=(1, 2, 3, 4), start=0, emits=False)
        step = runner.run(ForwardBatch((), (first,), ()), {})
        step.read_back()
        assert step.finite == [0]
        if not is_finite:
            runner.slab.arrays[-1][0, :, 1] = mx.nan
        chunk = Prefill(1, ids=(5, 6), start=4, emits=False, copied_from=0)
        step = runner.run(ForwardBatch((), (chunk,), ()), {})
        step.read_back()
    assert step.finite == [1] * is_finite
