"""Stage 12: two ranks on one machine.

The problem. One process is not enough: there are more requests than it can answer, or the model does
not fit.

The first solution, data parallelism: two complete engines, and a router in front of them. It sends
a request to the engine that has the fewest tokens to compute first: those that wait there, and
those of the prompt that are not in its prefix cache. Nothing else is shared.

The second solution, tensor parallelism: each rank has half of every layer, and all ranks run every
step.

    q, k, v, gate, up    some rows of the weight: the heads, or hidden numbers, of this rank
    o, down              the columns that belong to them

    rank 0   x - norm - q k v - attention - o --+        +-- + x - norm - gate up - down --+
                                               sum ------+                                sum - + x
    rank 1   x - norm - q k v - attention - o --+        +-- + x - norm - gate up - down --+

On each rank, o and down yield a part of the result, for all of D. `mx.distributed.all_sum` adds up
the parts of all ranks. x, the norms and the embedding are the same on every rank.

The invariant: the tokens are the same as on one rank. Numbers differ by rounding, because a sum in
two parts is added in a different order. All ranks must call the same sums in the same order, or they
wait forever.

The price: two messages per layer, of N * D numbers each, which wait for the slowest rank. For the
demo these are 12 messages per token. Data parallelism has none, but holds the weights twice.

Where it loses: data parallelism makes no single answer faster, and it splits the prefix cache.
Tensor parallelism loses if a message takes longer than the time it saves. On one machine, both
ranks also share the memory bandwidth that decode is limited by.

Where next: distributed/group.py, where rank 0 leads, and `vllm/model_executor/layers/linear.py`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from course.from_zero.small_llama import norm
from kernels.device import mx


class Replica(NamedTuple):
    """One of several complete engines, as the router sees it."""

    waiting: int  # number of tokens to compute for its requests
    texts: list[list[int]]  # texts in its prefix cache


def route(prompt: list[int], replicas: Sequence[Replica]) -> int:
    """Return the number of the replica that should get this prompt.

    That is the one with the lowest cost: the tokens that wait there, plus the prompt's tokens after
    its longest cached prefix. If costs are equal, the first one is taken.
    """
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
    """Return a rank's part of a layer's weight.

    It is a `size`-th of the rows (q_proj, k_proj, v_proj, gate_proj, up_proj) or of the columns
    (o_proj, down_proj). A norm's weight is not split. A weight is (out, in), and `x @ weight.T`
    uses it.
    """
    if weight.ndim == 1:
        return weight
    axis = 1 if name in ("o_proj", "down_proj") else 0
    return mx.split(weight, size, axis=axis)[rank]


def block(x: mx.array, w: dict[str, mx.array], attend: Callable, all_sum: Callable) -> mx.array:
    """Run one layer on one rank: (N, D) -> (N, D), the same on every rank.

    `w` has this rank's weights by name, as `shard` has cut them: "input_layernorm", "q_proj",
    "k_proj", "v_proj", "o_proj", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj".
    `norm(x, weight)` is RMSNorm. `attend(q, k, v)` does rotation, cache and attention, for the
    heads that it is given. `all_sum(part)` returns the sum of all ranks' parts.
    """
    h = norm(x, w["input_layernorm"])
    h = attend(h @ w["q_proj"].T, h @ w["k_proj"].T, h @ w["v_proj"].T)
    x = x + all_sum(h @ w["o_proj"].T)
    h = norm(x, w["post_attention_layernorm"])
    gate = h @ w["gate_proj"].T
    h = gate * mx.sigmoid(gate) * (h @ w["up_proj"].T)
    return x + all_sum(h @ w["down_proj"].T)
