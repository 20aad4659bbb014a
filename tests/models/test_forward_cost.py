"""The bytes and products of a forward pass: counted by hand, and measured while it runs."""

from collections import Counter

import pytest
from checkpoints import make_checkpoint
from parity import GEMMA4, LFM2

import llama
from engine import roofline
from engine.handle import Handle
from experiments.step_cost import asked_of, chosen_experts, parts_of
from kernels import device
from kernels.device import device_lock, device_stream, mx
from kernels.packed import Matrix
from models.forward_cost import Roof, Work, pass_cost
from models.layers import Model
from models.load import read_model
from nanobatch import Engine, SamplingParams
from screen.timeline_columns import column

EXPERTS = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}


def test_a_small_llama_is_counted_as_by_hand(tmp_path):
    """D 64, 4 heads and 2 key heads of 16, 96 inside the MLP, 272 tokens, 2 layers."""
    view = read_model(make_checkpoint(tmp_path)).cost
    qkv = (64 + 32 + 32) * 64
    out = 64 * 64
    mlp = 3 * 96 * 64
    head = 272 * 64
    assert view.body_products == (qkv + out + mlp) + qkv
    assert view.tail_products == out + mlp + head
    norms = 3 * 64, 2 * 64  # after the last layer's attention: its second norm, and the final norm
    assert view.body_nbytes == 4 * (view.body_products + norms[0])
    assert view.tail_nbytes == 4 * (view.tail_products + norms[1])
    assert view.token_nbytes == 4 * 64
    assert view.row_nbytes == 2 * view.last_row_nbytes == 2 * 4 * 2 * 2 * 16
    assert (view.form, view.layers, view.width, view.last_width) == ("float32", 2, 128, 64)
    assert (view.experts, view.taken, view.expert_nbytes, view.window) == (0, 0, 0, None)


def test_packed_bytes(tmp_path):
    """A number takes four bits, and 32 numbers share a scale and an offset of two bytes each."""
    folder = make_checkpoint(
        tmp_path,
        dtype=mx.float16,
        hidden_size=128,
        intermediate_size=256,
        quantize=lambda module: (4, 32),
    )
    view = read_model(folder, "checkpoint").cost
    whole = read_model(folder, "float32").cost
    assert (view.form, whole.form) == ("4 bits in groups of 32", "float32, widened")
    assert (view.body_products, view.tail_products) == (whole.body_products, whole.tail_products)
    assert view.body_nbytes == view.body_products * 5 // 8 + 2 * 3 * 128
    assert view.tail_nbytes == view.tail_products * 5 // 8 + 2 * 2 * 128
    assert view.token_nbytes == 128 * 5 // 8
    assert (
        view.row_nbytes == whole.row_nbytes == read_model(folder, kv="float32").cost.row_nbytes // 2
    )
    if device.is_batch_invariant():  # quantized as well, except for norms and the slab
        kept = read_model(folder).cost
        others = {"row_nbytes": 0, "last_row_nbytes": 0, "body_nbytes": 0, "tail_nbytes": 0}
        assert kept._replace(**others) == view._replace(**others)
        assert kept.body_nbytes == view.body_nbytes + 2 * 3 * 128
        assert kept.row_nbytes == whole.row_nbytes


def test_experts_are_counted_apart(tmp_path):
    view = read_model(make_checkpoint(tmp_path, **EXPERTS)).cost
    assert (view.experts, view.taken) == (6, 2)
    assert view.expert_products == 3 * 40 * 64
    assert view.expert_nbytes == 4 * 3 * 40 * 64
    router = 6 * 64
    qkv = 128 * 64
    assert view.body_products == (qkv + 64 * 64 + router) + qkv
    assert view.tail_products == 64 * 64 + router + 272 * 64
    norms = 64 + 2 * 16  # before attention, and one per query and key head
    assert view.body_nbytes == 4 * (view.body_products + norms + 64 + norms)
    assert view.tail_nbytes == 4 * (view.tail_products + 2 * 64)
    assert view.nbytes == view.body_nbytes + view.tail_nbytes + 2 * 6 * view.expert_nbytes


def prompt(length: int) -> list[int]:
    """Return a prompt that shares no prefix with prompts of other lengths, so no cached rows are reused."""
    return [length, *range(1, length)]


# --- compared with actual passes ----------------------------------------------------------------


class Meter:
    """Counters of the products and the attention in a graph, updated while it is built."""

    def __init__(self, monkeypatch):
        self.counts: Counter[str] = Counter()
        self.attention = llama.attention
        monkeypatch.setattr(Matrix, "__call__", self.metered(Matrix.__call__))
        monkeypatch.setattr(Matrix, "of_experts", self.metered(Matrix.of_experts))
        monkeypatch.setattr(llama, "attention", self.look)

    def metered(self, call):
        def multiply(matrix, x, *chosen):
            y = call(matrix, x, *chosen)
            self.counts["products"] += 2 * x.shape[-1] * y.size
            return y

        return multiply

    def look(self, q, k, v, mask, kind):
        tokens, heads, size = q.shape
        rows = k.shape[2]
        self.counts["attention"] += 4 * tokens * heads * size * rows
        self.counts["keys"] += k.nbytes + v.nbytes
        return self.attention(q, k, v, mask, kind)


class EndsAfter:
    """A set of end tokens that contains every token once the answer has this many tokens."""

    def __init__(self, handle: Handle, tokens: int):
        self.handle = handle
        self.tokens = tokens

    def __contains__(self, token: int) -> bool:
        return len(self.handle.tokens) >= self.tokens


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        EXPERTS,
        {"quantize": lambda module: (4, 32)},
        {"model_type": "gemma4_text", **GEMMA4},
        {"model_type": "lfm2", **LFM2},
    ],
    ids=["llama", "tied", "experts", "packed", "keys that layers share", "convolutions"],
)
@pytest.mark.parametrize("slots", [1, 3])
def test_cost_of_each_step(tmp_path, monkeypatch, changes, slots):
    """The steps contain prompts of several chunks, chunks that end no prompt, decoding rows next to them, and
    ghosts. A single sequence reads only its own rows; in a batch, each may read as many as the longest."""
    folder = make_checkpoint(tmp_path, **changes)
    dtype = "checkpoint" if "quantize" in changes else "float32"
    options = {"slots": slots, "max_len": 256, "chunk": 32, "budget": 34}
    with Engine.load(folder, dtype=dtype, attention="plain", **options) as engine:
        meter = Meter(monkeypatch)
        for length in (70, 5, 40, 96):
            handle = engine.submit(prompt(length), SamplingParams(max_tokens=8, ignore_eos=True))
            handle._end_tokens = EndsAfter(handle, tokens=length // 10)
        seen = Counter()
        before = None
        metered = {}
        while True:
            meter.counts.clear()
            worked = engine.step()
            if meter.counts:
                metered[engine.sched.steps] = Counter(meter.counts)
            if not worked:
                break
        for step in engine.snapshot().steps:
            before = column(step, slots, before)
            compare(engine.model, before, metered[step.step], exact=slots == 1)
            seen["steps"] += 1
            seen["silent"] += not asked_of(step)
            seen["both"] += bool(step.prefill and step.decode)
            seen["ghosts"] += len(step.ghosts)
    assert seen["steps"] > 12 and seen["silent"] >= 1 and seen["ghosts"] >= 1, seen
    assert slots == 1 or seen["both"] > 2, seen


def compare(model: Model, step, metered: Counter, exact: bool) -> None:
    asked = asked_of(step.view)
    bill = pass_cost(model.cost, Work.from_members(parts_of(step), asked))
    assert bill.products == metered["products"]
    # The last layer's attention is in the graph, but not computed if no token is sampled
    cost = model.cost
    looked = dict(metered)
    if not asked:
        looked["keys"] *= 1 - cost.last_row_nbytes / cost.row_nbytes
        looked["attention"] *= 1 - cost.last_width / cost.width
    looked["keys"] += bill.tokens * cost.convolution_nbytes
    assert 0 < bill.keys <= looked["keys"] and 0 < bill.attention <= looked["attention"]
    if exact:
        assert bill.keys == pytest.approx(looked["keys"])
        assert bill.attention == pytest.approx(looked["attention"])


def test_experts_of_the_newest_step(tmp_path):
    """Each token uses two experts in each layer, except that in the last layer only sampled tokens do. Some
    steps sample no token."""
    with Engine.load(
        make_checkpoint(tmp_path, **EXPERTS), slots=3, max_len=256, chunk=32
    ) as engine:
        for length in (200, 5, 40):
            engine.submit(prompt(length), SamplingParams(max_tokens=4, ignore_eos=True))
        seen = Counter()
        engine.run_ahead = False
        while engine.step():
            step = engine.snapshot().steps[-1]
            found = chosen_experts(engine)
            assert found.step == step.step
            tokens = sum(stop - start for *_, start, stop in step.prefill) + len(step.decode)
            first, last = (sum(dict(layer).values()) for layer in found.layers)
            assert (first, last) == (2 * tokens, 2 * asked_of(step))
            assert all(0 <= expert < 6 for layer in found.layers for expert, _ in layer)
            seen["silent"] += not asked_of(step)
            seen["steps"] += 1
            seen["distinct"] += len(found.layers[0])
    assert seen["steps"] > 6 and seen["silent"] and seen["distinct"] > seen["steps"]


def test_kept_experts_copy_no_slab(tmp_path):
    """If a chunk ends no prompt, the last layer's choices are never computed. They are dropped before the next
    pass, because they reference the slab, which a step would then have to copy."""
    with Engine.load(
        make_checkpoint(tmp_path, **EXPERTS), slots=2, max_len=16_384, chunk=32, budget=34
    ) as engine:
        for length in (200, 170):
            engine.submit(prompt(length), SamplingParams(max_tokens=4, ignore_eos=True))
        steps = copies = 0
        before = mx.get_active_memory()
        while True:
            mx.reset_peak_memory()
            if not engine.step():
                break
            copies += mx.get_peak_memory() - before > engine.runner.slab.arrays[0].nbytes
            steps += 1
        silent = sum(not asked_of(step) for step in engine.snapshot().steps)
    assert copies == 0 and silent > 8 and steps > silent


@pytest.mark.parametrize("rate", [1e9, 1e12])
def test_roofline_on_a_fast_machine(monkeypatch, rate):
    """The pieces grow until a trial takes long enough to exclude start-up time and caches. The clock is
    simulated."""
    sizes = []

    def quickest(pairs):
        sizes.append(pairs[0][1].nbytes)
        assert len({id(weight) for _, weight in pairs}) == len(pairs) == 8
        return sizes[-1] / rate

    monkeypatch.setattr(roofline, "quickest", quickest)
    with device_lock, device_stream():
        assert roofline.reading(2**23, 2**27, piece=2**20) == pytest.approx(rate)
    assert sizes == ([2**20] if rate == 1e9 else [2**n for n in range(20, 25)])


def test_the_roof_is_as_much_as_was_ever_seen(engine, monkeypatch):
    """The best of all trials counts, because a trial is slower while other programs run. The first trial
    without other programs marks the roof as undisturbed."""
    assert engine.snapshot().roof == Roof()
    tries = [(3.0, 5.0, 7.0), (4.0, 2.0, 7.5), (1.0, 1.0, 1.0)]
    monkeypatch.setattr(roofline, "measure", lambda nbytes, dtype: tries.pop(0))
    for others, roof_then in (
        (1.5, Roof(3.0, 5.0, 7.0, 1.5)),
        (0.0, Roof(4.0, 5.0, 7.5, 0.0)),
        (1.9, Roof(4.0, 5.0, 7.5, 0.0)),
    ):
        roofline.measure_roofline(engine, others)
        assert engine.snapshot().roof == roof_then
