"""Stage 12: two ranks on one machine. You write `route`, `shard` and `block` in ranks.py."""

from functools import partial

import pytest

from course.from_zero.reference import ranks
from course.from_zero.reference.ranks import Replica
from course.from_zero.shared_by_tests import SUM, assert_close, drawn
from course.from_zero.small_llama import answer, block, tokenizer, weights_of
from course.from_zero.two_ranks import launch
from kernels.device import mx


@pytest.mark.about("route")
def test_route():
    """A request goes to the replica that has the fewest tokens to compute before the request's
    first token."""
    a, b = [1, 2, 3, 4, 5, 6], [1, 2, 9]
    cases = (
        (Replica(0, []), Replica(0, [])),
        (Replica(9, []), Replica(5, [])),
        (Replica(0, []), Replica(3, [a, b])),
        (Replica(0, []), Replica(4, [a])),
        (Replica(0, []), Replica(1, [b])),
        (Replica(7, [a + a]), Replica(2, [b])),
        (Replica(9, []), Replica(9, []), Replica(5, [])),
        (Replica(3, []), Replica(4, [[9], [8], a])),
    )
    assert [ranks.route([1, 2, 3, 4], each) for each in cases] == [0, 1, 1, 0, 1, 1, 2, 1]
    assert ranks.route(a + b, [Replica(4, [a]), Replica(0, [b])]) == 0


@pytest.mark.about("route")
def test_replicas():
    """A chat's turns go to the replica with their prefix, and both replicas do the same amount of work."""
    texts: list[list[list[int]]] = [[], []]
    work = [0, 0]
    for turn in (1, 2, 3):
        for talk in (0, 1, 2, 3) if turn % 2 else (3, 0, 2, 1):
            prompt = [100 * talk + i for i in range(20 * turn)]
            known = [Replica(work[i] - min(work), texts[i]) for i in (0, 1)]
            at = ranks.route(prompt, known)
            is_known = any(text[0] == prompt[0] for text in texts[at])
            work[at] += 20 if is_known else len(prompt)
            texts[at].append(prompt)
    assert work == [120, 120], "tokens computed on each replica"
    print("four talks of three turns: 240 prompt tokens are computed, and 480 without the prefixes")


@pytest.mark.about("shard")
def test_shard():
    """Weights whose outputs are heads or hidden numbers are split by rows; weights whose inputs
    they are, by columns."""
    weight = 10 * mx.arange(6)[:, None] + mx.arange(4)  # 42 is in row 4, column 2
    found = []
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "down_proj"):
        parts = [ranks.shard(name, weight, rank, 2) for rank in (0, 1)]
        cells = [f"{part[0, 0].item():02} to {part[-1, -1].item()}" for part in parts]
        found.append(f"{name:<9} {cells[0]}, {cells[1]}")
    assert found == [
        "q_proj    00 to 23, 30 to 53",
        "k_proj    00 to 23, 30 to 53",
        "v_proj    00 to 23, 30 to 53",
        "gate_proj 00 to 23, 30 to 53",
        "up_proj   00 to 23, 30 to 53",
        "o_proj    00 to 51, 02 to 53",
        "down_proj 00 to 51, 02 to 53",
    ]
    eight = mx.arange(8)[:, None]
    assert [ranks.shard("q_proj", eight, rank, 4)[0].item() for rank in range(4)] == [0, 2, 4, 6]
    norm = mx.arange(4)
    assert ranks.shard("input_layernorm", norm, 1, 2).tolist() == norm.tolist(), "a norm is whole"


def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """A stand-in for attention, head by head, with three query heads for each key head."""
    heads = mx.repeat((k + v).reshape(len(k), -1, 32), 3, axis=1)
    return q * heads.reshape(q.shape)


def on_ranks(x: mx.array, size: int) -> tuple[list[mx.array], list[list[mx.array]]]:
    """Return the results of `block` on each rank, and each rank's parts of the sums.

    There are no processes: the ranks run one after the other, several times. In each sum, the parts
    of the other ranks are taken from the previous round. So after each round, one more sum is right
    on all ranks.
    """
    layer = weights_of(0)
    parts: list[list[mx.array]] = [[] for _ in range(size)]
    for _ in range(4):
        before = parts
        parts = [[] for _ in range(size)]
        results = []
        for rank in range(size):
            own = {name: ranks.shard(name, weight, rank, size) for name, weight in layer.items()}
            others = [each for i, each in enumerate(before) if i != rank]
            results.append(ranks.block(x, own, attend, partial(add, parts[rank], others)))
    return results, parts


def add(parts: list[mx.array], others: list[list[mx.array]], part: mx.array) -> mx.array:
    at = len(parts)
    parts.append(part)
    return sum((each[at] for each in others if at < len(each)), part)


@pytest.mark.about("block")
def test_block():
    """One rank and two ranks compute the same. x is added after each of two calls of `all_sum`."""
    x = drawn((3, 192), 1)
    wanted = block(x, weights_of(0), attend)
    for size in (1, 2):
        found, parts = on_ranks(x, size)
        assert [len(each) for each in parts] == [2] * size, "how often each rank calls all_sum"
        for rank in range(size):
            assert_close(found[rank], wanted, f"the block on rank {rank} of {size}")


def test_processes():
    """Two processes over MLX's ring give the same tokens as one."""
    alone = answer(tokenizer().ask(SUM))
    try:
        first, second = launch(SUM)
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
    assert first["tokens"] == alone
    assert second["tokens"] == alone
    assert first["messages"] == second["messages"] == 12 * len(alone)
    whole = sum(weight.nbytes for layer in range(6) for weight in weights_of(layer).values())
    print(f"a rank holds {first['weights'] / whole:.0%} of the layers' weights")
    print(f"the price: 12 messages a token, {first['bytes']:,} bytes each")
