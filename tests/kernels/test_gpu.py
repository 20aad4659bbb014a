"""The code for GPUs, run on a CPU: the branches are taken, but MLX replaces each fused operation
with several simple ones.

So this proves that the numbers are right, and how many operations a step has. It does not show their
speed, the number of kernels on a GPU, or that those kernels are correct.
"""

import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mlx_lm.utils
import numpy as np
import pytest
from checkpoints import Reference, make_checkpoint
from harness import random_asks, run_schedule
from mlx_lm.models.cache import BatchKVCache, KVCache
from parity import CONFIGS, QWEN3_5, compare, whole

import kv
import llama
from kernels import device, fused_attention_check
from kernels.device import device_lock, device_stream, mx
from kv import Slab, Window
from models import memory, ops
from models.load import read_model
from models.rope import AttentionType
from nanobatch import Engine, SamplingParams
from policies import POLICIES
from runner import ForwardBatch, Prefill
from sampling import SamplingRow


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Make all code believe that there is a GPU. MLX still computes on the CPU."""
    monkeypatch.setattr(device, "is_gpu", True)


# --- the numbers --------------------------------------------------------------------------------

CHOSEN = {
    name: CONFIGS[name]
    for name in (
        "multi-query attention",
        "head_dim smaller than hidden / heads",
        "all biases, tied",
        "rope llama3",
        "rope yarn",
        "rope dynamic, within the trained length",
        "gemma2, scores near the cap, 4 bits",
        "gemma3_text, as published",
        "qwen3_moe, 4 bits",
        "phi3, longrope, a part of each head turns, 8 bits",
        "float16",  # computed in float32, like the others
        "some layers quantized, each in its way",
        "granite, 4 bits, tied",
        "olmo2, 8 bits",
    )
}


@pytest.mark.parametrize("name", CHOSEN)
def test_tokens_equal_mlx_lm_under_every_policy(name, tmp_path):
    """The GPU branches scale, mask and rotate like mlx-lm, so the tokens are the same."""
    seed = list(CHOSEN).index(name)
    folder = make_checkpoint(tmp_path, seed=seed, **CHOSEN[name])
    options = {"slots": 2 + seed % 5, "policy": [*POLICIES][seed % len(POLICIES)]}
    with Engine.load(
        folder, dtype="float32", kv="float32", max_len=256, chunk=32, **options
    ) as engine:
        compare(engine, Reference(folder), seed, prompts=6)


@pytest.mark.parametrize(
    ("weights", "policy"), [("bfloat16", "continuous"), ("float16", "fair"), ("4 bits", "static")]
)
def test_half_and_packed_are_as_close_as_mlx_lm(weights, policy, tmp_path):
    """Compare our logits and mlx-lm's with mlx-lm's in float32 on the same weights, for the tokens that our
    engine chose in a batch."""
    packed = {"quantize": lambda module: (4, 64), "hidden_size": 128, "intermediate_size": 192}
    dtype = mx.float16 if weights == "float16" else mx.bfloat16
    folder = make_checkpoint(
        tmp_path, seed=3, dtype=dtype, **(packed if weights == "4 bits" else {})
    )
    theirs, _ = mlx_lm.utils.load_model(folder)
    truth, rng = Reference(folder), np.random.default_rng(3)
    ours, peers = [], []
    with Engine.load(folder, slots=3, max_len=256, chunk=32, policy=policy) as engine:
        assert engine.model.dtype == dtype and not engine.is_batch_invariant
        bits = 4 if weights == "4 bits" else 0
        assert all(
            part.bits == bits
            for layer in engine.model.layers
            for part in (layer.qkv, layer.mlp.gate_up)
        )
        handles = run_schedule(engine, random_asks(rng, 6, longest=60, tokens=10), rng)
        for handle in handles:
            ids = [*handle.request.prompt, *handle.tokens[:-1]]
            wanted, first = truth.logits(ids), len(handle.request.prompt) - 1
            found = np.array(theirs(mx.array([ids]))[0].astype(mx.float32))
            ours.append(np.abs(whole(engine.model, ids, dtype) - wanted).mean())
            peers.append(np.abs(found - wanted).mean())
            margin = 12 * peers[-1]  # half precision may choose a token this close to the best
            chosen = np.take_along_axis(wanted[first:], np.array(handle.tokens)[:, None], 1)[:, 0]
            assert (wanted[first:].max(-1) - chosen < margin).all()
    assert np.mean(ours) < 1.1 * np.mean(peers), (np.mean(ours), np.mean(peers))


def two_pass(q, k, v, right) -> mx.array:
    """Stand in for a kernel that is wrong from 1,024 rows on with grouped heads, as on some chips."""
    is_wrong = k.shape[2] >= 1024 and q.shape[1] > k.shape[1]
    return right[:, ::-1] if is_wrong else right


def of_chunks(q, k, v, right) -> mx.array:
    return right * 0 if q.shape[2] > 1 else right


def not_a_number(q, k, v, right) -> mx.array:
    return right * float("nan")


@pytest.mark.parametrize("plant", [two_pass, of_chunks, not_a_number])
def test_wrong_fused_attention_is_found_at_load_and_the_formula_runs(plant, tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, dtype=mx.bfloat16)
    assert read_model(folder).attention == "kernel"
    right = mx.fast.scaled_dot_product_attention

    def wrong(q, k, v, **options) -> mx.array:
        return plant(q, k, v, right(q, k, v, **options))

    fused_attention_check.is_right.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "scaled_dot_product_attention", wrong)
        engine = Engine.load(folder, dtype="float32", kv="float32", slots=4, max_len=256, chunk=32)
    fused_attention_check.is_right.cache_clear()
    with engine:
        assert "MLX's fused attention is wrong here, so the formula runs" in engine.summary
        compare(engine, Reference(folder), 0, prompts=4)


@pytest.mark.parametrize(("whole", "limit"), [(None, 2**28), (2**30, 2**28), (2**34, 2**30)])
def test_buffers_that_mlx_keeps_are_bounded(whole, limit, tmp_path, monkeypatch):
    """Regression: MLX caches buffers of each shape that it has seen, so memory grew to 1.5 times the
    recommended size."""
    info = {"max_recommended_working_set_size": whole} if whole else {}
    limits = []
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    read_model(make_checkpoint(tmp_path))
    assert limits == [limit]


def test_a_small_mac_is_not_filled(monkeypatch):
    """MLX reports how much memory a Mac's GPU may use, but not what other programs use of it. So the default
    sizes use far less: a fifth for Llama 3.2 3B on a Mac with 8 GB."""
    whole = 5_726_633_984
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": whole})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1_800_000_000)  # the weights in 4 bits
    heads = {"Hkv": 8, "Dh": 128, "row": lambda layer: (16, 128), "delta": None}
    shape = SimpleNamespace(layers=28, writing=28, max_positions=131_072, **heads)
    sizes = memory.fit(shape, 2, device.free_memory())
    assert sizes[:3] == (8, 1024, 512)
    assert memory.slab_nbytes(*memory.slab_shape(shape, *sizes[:3]), 2) < whole / 5


# --- the number of operations -------------------------------------------------------------------


# How many operations does the graph of a decode step have on a GPU?
#
# These count as one: each node that computes, each part of a concatenation, and each call of a function
# that MLX has a kernel for (`FUSED`). Views do not count. The shape is that of Llama 3.2 1B except for
# its widths, since no count depends on them: 32 heads of 64, 8 of keys and values, a tied head. The step
# ends with the logits.
#
# This is not a count of kernels. A kernel may first copy an input whose layout it does not support. And
# where MLX has no fused attention for a shape, one operation is several kernels: on CUDA, where several
# sequences decode, because they come with a mask (docs/speed.md says when).

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
WEIGHTS = {"bfloat16": None, "4 bits": lambda module: (4, 64)}
VIEWS = {
    "AsStrided",
    "Broadcast",
    "ExpandDims",
    "Flatten",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unflatten",
}
# One node of a GPU's graph, but several on a CPU
FUSED = (
    (mx.fast, "rms_norm"),
    (mx.fast, "rope"),
    (mx.fast, "scaled_dot_product_attention"),
    (mx, "dequantize"),
)


def count(step: Callable[[], list[mx.array]]) -> Counter:
    """Count the operations of a step by kind."""
    calls: Counter = Counter()
    inputs: list[mx.array] = []

    def fused(module, name: str):
        real = getattr(module, name)

        def stand_in(*args, **options) -> mx.array:
            made = real(*args, **options)  # several nodes on a CPU; only its shape is used
            calls[name] += 1
            inputs.extend(x for x in (*args, *options.values()) if isinstance(x, mx.array))
            leaf = mx.zeros(made.shape, made.dtype)
            mx.eval(leaf)
            return leaf

        return mock.patch.object(module, name, stand_in)

    with ExitStack() as stack:
        for module, name in FUSED:
            stack.enter_context(fused(module, name))
        # Compiled as on a GPU, but never evaluated, so that no compiler is called
        stack.enter_context(mock.patch.object(ops, "one_kernel", mx.compile(ops.one_kernel)))
        made = step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.dot"
        mx.export_to_dot(str(path), *made, *inputs)
        graph = path.read_text()
    for node, name in re.findall(r"\{ (\d+) \[label =\"(\w+)\"", graph):
        if name not in VIEWS:
            calls[name] += graph.count(f"-> {node}\n") if name == "Concatenate" else 1
    return calls


def ours(folder: Path, slots: list[int]) -> Counter:
    """Count the operations of a step in which these slots decode, each at a different row."""
    model = read_model(folder, "checkpoint")
    c = model.config
    slab = kv.Slab(c.layers, 8 if len(slots) > 1 else 1, c.Hkv, 256, c.Dh, model.dtype)
    starts = [20 + slot for slot in slots]
    newest = mx.array(slots)

    def step() -> list[mx.array]:
        window = kv.Window(slab, slots, starts, 1)
        states = llama.forward(model, newest, [window], range(len(slots)))
        return [model.head(states), *slab.arrays]

    return count(step)


def peers(folder: Path, rows: int) -> Counter:
    """Count mlx-lm's operations, with its batch cache, or with its plain cache for a single row."""
    model, _ = mlx_lm.utils.load_model(folder)
    layers = len(model.layers)
    caches = [KVCache() if rows == 1 else BatchKVCache([0] * rows) for _ in range(layers)]

    def state() -> list[mx.array]:
        return [
            x
            for cache in caches
            for x in (cache.keys, cache.values, cache.offset)
            if isinstance(x, mx.array)
        ]

    mx.eval(model(mx.zeros((rows, 3), mx.int32), cache=caches), state())
    newest = mx.zeros(rows, mx.int32)
    mx.eval(newest)
    return count(lambda: [model(newest[:, None], cache=caches)[:, -1], *state()])


def counts_of_steps(folder: Path, weights: str, slots: list[int]) -> list[tuple[int, int]]:
    """Return our and mlx-lm's numbers of operations, for one layer and for two."""
    counts = []
    for layers in (1, 2):
        path = make_checkpoint(
            folder / str(layers),
            dtype=mx.bfloat16,
            quantize=WEIGHTS[weights],
            num_hidden_layers=layers,
            **SHAPE,
        )
        counts.append((ours(path, slots).total(), peers(path, len(slots)).total()))
    return counts


@pytest.mark.parametrize("slots", [[0], [0, 1, 2], [1, 2, 4, 5]])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_step_has_no_more_operations_than_mlx_lm(weights, slots, tmp_path):
    """Regression: a layer took 22 operations in half precision, compared with mlx-lm's 17. Each unnecessary
    index, split or cast adds one."""
    (one, peers_one), (two, peers_two) = counts_of_steps(tmp_path, weights, slots)
    layer, peers_layer = two - one, peers_two - peers_one
    rest, peers_rest = one - layer, peers_one - peers_layer
    assert 13 <= layer <= peers_layer and peers_layer >= 17
    assert 3 <= rest <= peers_rest + (slots == [1, 2, 4, 5])  # two groups need a mask each


def test_attention_copies_no_slab(monkeypatch):
    """Attention reads the slab in place, because copying all keys and values in each layer would take longer
    than the rest of a step."""
    monkeypatch.setattr(mx, "take", None)
    slab = Slab(1, 8, 2, 256, 16, mx.float32)
    slots, starts = [0, 1, 3, 7], [5, 200, 100, 64]
    window = Window(slab, slots, starts, 1)
    groups = [(group.slots, group.T) for group in window.groups]
    assert groups == [(slice(0, 2), 224), (slice(3, 4), 101), (slice(7, 8), 65)]
    new = mx.arange(4 * 2 * 16).reshape(4, 2, 16) + 1.0
    window.write(0, new, -new)
    read = [window.read(0, group) for group in window.groups]
    keys = [k[row] for k, _ in read for row in range(len(k))]
    values = [v[row] for _, v in read for row in range(len(v))]
    for row, start in enumerate(starts):
        assert mx.array_equal(keys[row][:, start], new[row])
        assert mx.array_equal(values[row][:, start], -new[row])
    assert np.count_nonzero(np.array(slab.arrays[0])) == 2 * new.size, "another row was written"


def test_chunk_reads_no_further_than_itself(tmp_path):
    with Engine.load(make_checkpoint(tmp_path), slots=2, max_len=512) as engine:
        plans, plan = [], engine.sched.plan
        engine.sched.plan = lambda *given: plans.append(plan(*given)) or plans[-1]
        engine.submit([1] * 400, SamplingParams(max_tokens=2)).result()
        assert [(chunk.start, chunk.stop) for chunk in plans[0].chunks] == [(0, 400)]
    window = Window(Slab(1, 2, 2, 256, 16, mx.float32), [1], [64], 48)
    kind = AttentionType(*[None] * 5)
    (group,) = window.groups
    kernel = llama.ATTENTION["kernel"]
    assert group[:2] == (slice(1, 2), 112) and kernel(kind, 4, [window]).masks == [["causal"]]
    both = Window(window.slab, [0, 1], [64, 9], 48)
    (masks,) = kernel(kind, 4, [both]).masks
    assert [mask.shape for mask in masks] == [(2, 4, 48, 128)]


@pytest.mark.parametrize(
    ("start", "count", "width"), [(0, 1, 16), (0, 16, 16), (5, 17, 32), (90, 30, 32), (120, 5, 8)]
)
def test_chunk_padding(tmp_path, start, count, width):
    """Padding writes keys only into rows that the sequence has not reached yet. On a CPU nothing is padded."""
    prefill = Prefill(1, tuple(range(1, count + 1)), start, True)
    rows = {1: [SamplingRow(1, SamplingParams(), 0, 0)]}
    with Engine.load(make_checkpoint(tmp_path), slots=2, max_len=128, chunk=32) as engine:
        runner = engine.runner
        for is_gpu, wide in ((True, width), (False, count)):
            runner.reset()
            with mock.patch.object(device, "is_gpu", is_gpu), device_lock, device_stream():
                runner.run(ForwardBatch((), (prefill,), ()), rows).read_back()
            written = np.abs(np.array(runner.slab.arrays[0][1, :, :128])).sum((0, 2)).nonzero()[0]
            assert written.tolist() == list(range(start, start + wide))


def test_idle_slots_take_no_part(tmp_path):
    """A batch has no rows for idle slots, because every row takes time on a GPU, especially with quantized
    weights."""
    with Engine.load(make_checkpoint(tmp_path), slots=4, max_len=256) as engine:
        widths, head = [], engine.runner.model.head
        object.__setattr__(
            engine.runner.model, "head", lambda x: widths.append(x.shape[0]) or head(x)
        )
        engine.generate([[1, 2], [3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert set(widths) == {2}


def test_no_compiler_is_called_for_a_cpu():
    """On a CPU no function is compiled, because on Linux MLX needs a C++ compiler for it, which may be
    missing."""
    assert type(ops.one_kernel) is type(lambda: None)
    gate_up = mx.array([-3.0, 0.0, 2.0, 1.0, 2.0, 3.0])
    assert np.allclose(
        np.array(ops.swiglu(gate_up)), [-3 / (1 + np.exp(3)), 0, 6 / (1 + np.exp(-2))], atol=1e-6
    )


def test_without_the_wait_tokens_are_the_same(tmp_path, monkeypatch):
    """With NANOBATCH_WAIT=off, MLX copies the slab if a running pass still reads it."""
    monkeypatch.setenv("NANOBATCH_WAIT", "off")
    folder = make_checkpoint(tmp_path, seed=1)
    with Engine.load(
        folder, dtype="float32", kv="float32", slots=3, max_len=256, chunk=32
    ) as engine:
        assert not engine.runner.waits
        compare(engine, Reference(folder), 1, prompts=6)


def test_states_are_computed_by_the_formula_and_a_line_says_so(tmp_path):
    folder, tokens = make_checkpoint(tmp_path, **QWEN3_5), []
    for is_gpu in (True, False):
        with (
            mock.patch.object(device, "is_gpu", is_gpu),
            Engine.load(folder, slots=2, max_len=128, chunk=32, kv="float32") as engine,
        ):
            said = "; states are computed by the formula, slowly" in engine.summary
            assert said == is_gpu
            handles = [
                engine.submit([*range(50)] * 2, SamplingParams(max_tokens=n)) for n in (9, 5)
            ]
            tokens.append([handle.result().tokens for handle in handles])
    assert tokens[0] == tokens[1]


def test_buffers_of_many_shapes_do_not_pile_up(tmp_path):
    """The cache of freed buffers stays bounded, although MLX reuses a buffer only for arrays of about its size,
    and sizes vary with the sequence length."""
    folder = make_checkpoint(tmp_path, seed=1)
    dice = random.Random(1)
    held = []
    with Engine.load(folder, slots=4, max_len=512, chunk=64) as engine:
        while engine.registry.steps.count < 500:
            if not engine.has_work:
                for _ in range(4):
                    prompt = [dice.randrange(1, 200) for _ in range(dice.randint(3, 300))]
                    tokens = dice.randint(5, 200)
                    engine.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
            engine.step()
            if engine.registry.steps.count % 125 == 0:
                held.append(mx.get_cache_memory())
    assert len(held) >= 4 and held[-1] < 1.25 * held[2], held  # the cache levels off
