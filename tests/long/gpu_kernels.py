"""How many operations has the graph of a decode step on a GPU? Counted for us and for mlx-lm, on
any machine.

    python tests/long/gpu_kernels.py

A step of a few tokens takes the time to read the weights, and some microseconds for each kernel.
The step's graph tells how many operations there are, without a GPU. Each node that computes is one,
each part of a concatenation, and each call of a function that MLX has a kernel for (`FUSED`). Nodes
that only look at an array in another way (views) are none. The shape is Llama 3.2 1B's but for its
widths, since no count depends on them: 32 heads of 64, 8 of keys and values, a tied head. The step
ends with the logits.

This is no count of kernels. A kernel may first copy an input that does not lie as it wants it. And
where MLX has no fused attention for a shape, one operation is several kernels: on CUDA, where
several sequences decode, because they come with a mask (docs/speed.md says when).
"""

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

import kv  # noqa: E402, I001
import llama  # noqa: E402
from parts.device import mlx as device  # noqa: E402
from parts.device.mlx import mx  # noqa: E402
from parts.model.load import read_model  # noqa: E402
from parts.model import fit, ops  # noqa: E402
import mlx_lm.utils  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, KVCache  # noqa: E402

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
# One node of a GPU's graph; on a CPU MLX makes several of them.
FUSED = (
    (mx.fast, "rms_norm"),
    (mx.fast, "rope"),
    (mx.fast, "scaled_dot_product_attention"),
    (mx, "dequantize"),
)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Whatever asks for the device is told that there is a GPU. MLX computes on the CPU all the
    same."""
    with ExitStack() as stack:
        for module in (device, kv, fit):
            stack.enter_context(mock.patch.object(module, "has_gpu", lambda: True))
        yield


def count(step: Callable[[], list[mx.array]]) -> Counter:
    """How many operations of each kind a step has that answers with all that it makes."""
    calls: Counter = Counter()
    inputs: list[mx.array] = []

    def fused(module, name: str):
        real = getattr(module, name)

        def stand_in(*args, **options) -> mx.array:
            made = real(*args, **options)  # on a CPU several nodes; for its shape alone
            calls[name] += 1
            inputs.extend(x for x in (*args, *options.values()) if isinstance(x, mx.array))
            leaf = mx.zeros(made.shape, made.dtype)
            mx.eval(leaf)
            return leaf

        return mock.patch.object(module, name, stand_in)

    with ExitStack() as stack:
        for module, name in FUSED:
            stack.enter_context(fused(module, name))
        # Compiled as on a GPU, but never evaluated, so that no compiler is called.
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
    """A step in which these of eight slots decode, all of them at rows of their own."""
    model = read_model(folder, "checkpoint")
    c = model.config
    slab = kv.Slab(c.layers, 8 if len(slots) > 1 else 1, c.Hkv, 256, c.Dh, model.dtype)
    starts = [20 + slot for slot in slots]
    newest = mx.array(slots)

    def step() -> list[mx.array]:
        window = kv.Window(slab, slots, starts, 1)
        states = llama.forward(model, newest, [window], range(len(slots)))
        return [model.head(states), *slab.k, *slab.v]

    return count(step)


def peers(folder: Path, rows: int) -> Counter:
    """The same with mlx-lm's cache for batches, or for a single row with the one for one."""
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


def compare(weights: str, slots: list[int]) -> tuple[Counter, Counter, Counter, Counter]:
    """Ours in a layer, and in the rest of a step; mlx-lm's in a layer, and in the rest."""
    counts = []
    with tempfile.TemporaryDirectory() as folder, as_on_a_gpu():
        for layers in (1, 2):
            path = make_checkpoint(
                Path(folder) / str(layers),
                dtype=mx.bfloat16,
                quantize=WEIGHTS[weights],
                num_hidden_layers=layers,
                **SHAPE,
            )
            counts.append((ours(path, slots), peers(path, len(slots))))
    (one, peers_one), (two, peers_two) = counts
    return two - one, one - (two - one), peers_two - peers_one, peers_one - (peers_two - peers_one)


def main() -> int:
    for weights in WEIGHTS:
        for slots in ([0], list(range(8)), [1, 2, 4, 5]):
            print(f"{weights}, of 8 slots {', '.join(map(str, slots))}:")
            names = "ours, a layer", "the rest", "mlx-lm, a layer", "the rest"
            for name, part in zip(names, compare(weights, slots), strict=True):
                what = ", ".join(f"{n} {kind}" for kind, n in sorted(part.items()))
                print(f"  {name:16} {part.total():3}   {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
