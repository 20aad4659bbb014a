"""Stage 12: two ranks on one machine.

The problem. One process is not enough: there are more requests than it can answer, or the model does
not fit.

The first solution, data parallelism: two whole engines, and a router before them. It sends a request
where the fewest tokens are to be computed first: those that wait there, and those of the prompt that
the engine does not remember. Nothing else is shared.

The second, tensor parallelism: each rank has half of every layer, and all ranks take every step.

    q, k, v, gate, up    some rows of the weight: the heads, or hidden numbers, of this rank
    o, down              the columns that belong to them

    rank 0   x - norm - q k v - attention - o --+        +-- + x - norm - gate up - down --+
                                               sum ------+                                sum - + x
    rank 1   x - norm - q k v - attention - o --+        +-- + x - norm - gate up - down --+

What o and down yield on a rank is a part of the result, for all of D. `mx.distributed.all_sum` adds up
the parts of all ranks. x, the norms and the embedding are the same on each.

The invariant: the tokens are those of one rank; numbers differ by rounding, because a sum in two
parts is added in another order. All ranks call the same sums in the same order, or wait forever.

The price: two messages a layer, of N * D numbers, and each waits for the slowest rank. For the demo
12 messages a token. Data parallelism has none, but holds the weights twice.

Where it loses: data parallelism makes no single answer quicker, and splits the prefix cache. Tensor
parallelism loses where a message takes longer than what it saves, and on one machine both ranks share
the memory that decode waits for.

Where next: distributed/group.py, where rank 0 leads, and `vllm/model_executor/layers/linear.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from course.from_zero.small_llama import norm
from kernels.device import mx


class Replica(NamedTuple):
    """One of several whole engines, as its router sees it."""

    waiting: int  # tokens to be computed for requests that it has
    texts: list[list[int]]  # that its prefix cache remembers


def route(prompt: list[int], replicas: Sequence[Replica]) -> int:
    """The number of the replica that should have this prompt: where the sum of the tokens that wait
    and the prompt's own, without its longest remembered prefix, is least. Of equals, the first."""
    costs = []
    for replica in replicas:
        shared = 0
        for text in replica.texts:
            same = 0
            while same < min(len(text), len(prompt)) and text[same] == prompt[same]:
                same += 1
            shared = max(shared, same)
        costs.append(replica.waiting + len(prompt) - shared)
    return costs.index(min(costs))


def shard(name: str, weight: mx.array, rank: int, size: int) -> mx.array:
    """The part of a layer's weight that a rank has: a `size`-th of its rows (q_proj, k_proj, v_proj,
    gate_proj, up_proj) or of its columns (o_proj, down_proj); all of a norm's.

    A weight is (out, in), and `x @ weight.T` uses it.
    """
    if weight.ndim == 1:
        return weight
    axis = 1 if name in ("o_proj", "down_proj") else 0
    return mx.split(weight, size, axis=axis)[rank]


def block(x: mx.array, w: dict[str, mx.array], attend: Callable, all_sum: Callable) -> mx.array:
    """One layer on one rank: (N, D) -> (N, D), the same on every rank.

    `w` has this rank's weights by name, as `shard` has cut them: "input_layernorm", "q_proj",
    "k_proj", "v_proj", "o_proj", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj".
    `norm(x, weight)` is RMSNorm. `attend(q, k, v)` is rotation, cache and attention, for as many heads
    as it gets. `all_sum(part)` returns the sum of all ranks' parts.
    """
    h = norm(x, w["input_layernorm"])
    h = attend(h @ w["q_proj"].T, h @ w["k_proj"].T, h @ w["v_proj"].T)
    x = x + all_sum(h @ w["o_proj"].T)
    h = norm(x, w["post_attention_layernorm"])
    gate = h @ w["gate_proj"].T
    h = gate * mx.sigmoid(gate) * (h @ w["up_proj"].T)
    return x + all_sum(h @ w["down_proj"].T)
