"""One model over several processes: shards add up, batches arrive unchanged, two processes answer like
one, and all processes exit when a rank is lost.

The processes communicate over MLX's ring, on loopback. `NANOBATCH_MPI=6 python -m pytest -k by_mpi` runs
two to four processes with MPI, and more models. It needs mpirun, such as Debian's openmpi-bin.
"""

import json
import os
import queue
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import random_asks, run_schedule
from processes import python
from rank import SIZES, again, live
from servers import free_ports, hail
from waiting import wait_for

from base.untrusted_files import ModelError
from distributed import channel, environment, group
from distributed.channel import NAME, OTHERS, PROOF, accept, connect, messages_of, proof
from distributed.group import LOST, Ranks
from distributed.rendezvous import LOOPBACK, join
from kernels import library
from kernels.device import mx
from models.config import read_config
from models.layers import Chain, Layer
from models.load import ModelReader
from models.memory import check_alike, is_batch_invariant
from models.sharding import Shard
from nanobatch import Engine
from runner import Prefill, Runner

ROOT = Path(__file__).parents[2]
RANK = str(ROOT / "tests" / "lib" / "rank.py")


# --- shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("H", "Hkv", "hidden"), [(8, 8, 96), (8, 4, 640), (9, 3, 1536), (8, 1, 100), (12, 2, 512)]
)
def test_the_shares_of_1_to_8_ranks_add_up(tmp_path, H, Hkv, hidden):
    """Each head and each hidden unit belongs to exactly one rank."""
    changes = {
        "num_attention_heads": H,
        "num_key_value_heads": Hkv,
        "intermediate_size": hidden,
        "head_dim": 16,
    }
    c = read_config(make_checkpoint(tmp_path / "model", **changes), True)
    for size in range(1, 9):
        shares = [Shard.for_rank(c, rank, size) for rank in range(size)]
        assert [head for share in shares for head in share.queries] == list(range(H))
        assert [number for share in shares for number in share.hidden] == list(range(hidden))
        for share in shares:
            assert share.queries and share.hidden
            # A rank has exactly the key heads that its query heads use
            own = [head * Hkv // H for head in share.queries]
            assert sorted(set(own)) == list(share.keys)
            assert len(set(Counter(own).values())) == 1, (
                "attention shares a key head among equally many query heads"
            )
        spread = Counter(len(share.hidden) for share in shares)
        assert max(spread) - min(spread) <= 64, "a rank has much more to do than another"


@pytest.mark.parametrize(
    ("family", "changes"),
    [("olmo2", {}), ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2})],
)
def test_unshardable_family_is_refused(tmp_path, family, changes):
    """OLMo 2, which normalizes q and k over all heads, and experts, which ranks might choose differently, are
    refused, because sums over ranks would be wrong without an error."""
    folder = make_checkpoint(tmp_path / "model", model_type=family, **changes)
    with pytest.raises(ModelError, match=rf"{family}.*one process"):
        ModelReader(folder, "float32", Ranks(1, 2))
    ModelReader(folder, "float32", Ranks(0, 1))


KINDS = {
    "gqa": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    "mqa": {"num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "granite": {
        "model_type": "granite",
        "attention_bias": True,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
    },
    "phi3": {"model_type": "phi3"},
    "phi3, a part turns": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [0, 1]},
    "gemma2": {"model_type": "gemma2", "head_dim": 16},
    "gemma3_text": {"model_type": "gemma3_text", "head_dim": 16},
    "interleaved, 4 bit": {"rope_traditional": True, "quantize": lambda module: (4, 32)},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True},
    "4 bit": {"quantize": lambda module: (4, 32) if "embed" not in module else None},
}


def own(branch):
    """Return a rank's part before the sum over all ranks."""
    return branch.steps[0] if isinstance(branch, Chain) else branch


def assert_shards_make_up(folder: Path, form: str, size: int, atol: float) -> list[Layer]:
    """Compare the first layer with the sum of its shards. Return the shards' layers."""
    models = [ModelReader(folder, form, Ranks(rank, size)).read_model() for rank in range(size)]
    layers = [model.layers[0] for model in models]
    reader = ModelReader(folder, form)
    c, whole = reader.config, reader.read_model().layers[0]
    shares = [Shard.for_rank(c, rank, size) for rank in range(size)]
    x = mx.random.normal((5, c.D), key=mx.random.key(1)).astype(models[0].dtype)
    heads = mx.random.normal((5, c.H, c.Dh), key=mx.random.key(2)).astype(x.dtype)

    def check(found: mx.array, expected: mx.array) -> None:
        assert mx.allclose(found, expected, rtol=atol / 10, atol=atol)

    q, k, v = mx.split(whole.qkv(x).reshape(5, -1, c.Dh), [c.H, c.H + c.Hkv], axis=1)
    for layer, share in zip(layers, shares, strict=True):
        parts = (q[:, [*share.queries]], k[:, [*share.keys]], v[:, [*share.keys]])
        check(layer.qkv(x), mx.concatenate(parts, axis=1).flatten(1))
    outs = [
        own(layer.out)(heads[:, [*share.queries]].flatten(1))
        for layer, share in zip(layers, shares, strict=True)
    ]
    check(sum(outs), own(whole.out)(heads.flatten(1)))
    check(sum(own(layer.mlp)(x) for layer in layers), own(whole.mlp)(x))
    assert [model.head(x) is x for model in models] == [False] + [True] * (size - 1)
    return layers


@pytest.mark.parametrize("kind", KINDS)
def test_shards_make_up_the_layer(tmp_path, kind):
    """The shards' outputs add up to the layer's output. Only rank 0 adds the bias of such a sum."""
    changes = {"num_hidden_layers": 1, "intermediate_size": 192, **KINDS[kind]}
    folder = make_checkpoint(tmp_path / "model", seed=3, **changes)
    for size in (2, 3, 4):
        assert_shards_make_up(folder, "float32", size, atol=1e-3)


@pytest.mark.parametrize("size", [2, 4])
def test_packed_shards_keep_their_scales(tmp_path, size):
    """On a GPU a quantized shard stays packed, unless the cut is inside a group of weights, which share a
    scale."""
    changes = {"dtype": mx.float16, "hidden_size": 128, "intermediate_size": 256}
    folder = make_checkpoint(tmp_path / "model", quantize=lambda module: (4, 64), **changes)
    for layer in assert_shards_make_up(folder, "checkpoint", size, atol=0.3):
        # One head of 32 numbers is half a group, so its part of `o` is dequantized
        assert own(layer.out).bits == (4 if size == 2 else 0)
        mlp = own(layer.mlp)
        assert [part.bits for part in (layer.qkv, mlp.gate_up, mlp.down)] == [4, 4, 4]


def test_a_rank_takes_the_memory_of_its_share(tmp_path):
    """A rank counts only its share, so a model that needs two machines is accepted on each."""
    folder = make_checkpoint(
        tmp_path / "model", hidden_size=128, intermediate_size=1024, num_key_value_heads=4
    )
    whole = ModelReader(folder, "float32").nbytes
    for size in (2, 4):
        readers = [ModelReader(folder, "float32", Ranks(rank, size)) for rank in range(size)]
        outside = 272 * 128 * 4  # every rank has the table; only rank 0 has the equally large head
        expected = (whole - 2 * outside) / size
        assert readers[1].nbytes == pytest.approx(expected + outside, rel=0.02)
        assert readers[0].nbytes == pytest.approx(expected + 2 * outside, rel=0.02)
        assert readers[1].fit().slots == 8


def test_more_ranks_than_heads_are_refused(tmp_path):
    """Each rank needs at least one attention head."""
    c = read_config(make_checkpoint(tmp_path / "model"), True)
    with pytest.raises(
        ModelError, match="5 ranks cannot share a model with 4 attention heads; start 4 or fewer"
    ):
        Shard.for_rank(c, 0, 5)


# --- batches ------------------------------------------------------------------------------------


class Wire(Ranks):
    """The connection between a leader and a follower, within one process."""

    def __init__(self):
        super().__init__()
        self.leads = True
        self.sent = []

    def broadcast(self, message):
        self.sent.append(json.dumps(message))

    def receive(self):
        return json.loads(self.sent.pop(0)) if self.sent else None


@pytest.mark.parametrize("budget", [32, 1000])
def test_orders_survive_the_wire(parts, budget):
    """A follower receives the batches that the leader ran."""
    orders, heard, wire, rng = [], [], Wire(), np.random.default_rng(budget + 1)
    options = {"slots": 4, "max_len": 128, "chunk": 32, "budget": budget, "speculate": 2}
    with Engine(*parts, **options) as engine:
        engine.sched.draft = again
        engine.runner.ranks = wire
        begin = engine.runner.start_forward
        engine.runner.start_forward = lambda order: orders.append(order) or begin(order)
        run_schedule(engine, random_asks(rng, 80, 100, 12, cancels=0.8, alike=0.6), rng)
    assert len(orders) > 50
    assert sum(bool(order.scrubs) for order in orders) > 0
    assert sum(len(order.prefills) > 1 for order in orders) > 0
    assert any(prefill.copied_from is not None for order in orders for prefill in order.prefills)
    assert any(len(each.ids) > 1 for order in orders for each in order.decodes)
    follower = Runner.__new__(Runner)
    follower.ranks = wire
    follower.run = lambda order, rows: heard.append(order) or SimpleNamespace(read_back=list)
    follower.follow()
    assert all(isinstance(prefill, Prefill) for order in heard for prefill in order.prefills)
    for order, same in zip(orders, heard, strict=True):
        assert json.dumps(same) == json.dumps(order)


# --- how ranks find each other ------------------------------------------------------------------


def test_single_process(monkeypatch):
    for name in ("MLX_RANK", "MLX_HOSTFILE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert environment.backend() == "" and environment.rank() == 0
    alone = join()
    assert (alone.rank, alone.size) == (0, 1)
    x = mx.ones(3)
    assert alone.sum(x) is x and alone.first(x) is x and alone.gather(4, 5) == [[4, 5]]


@pytest.mark.parametrize(
    ("rank", "text", "says"),
    [
        ("0", None, "MLX_RANK is set, but not MLX_HOSTFILE"),
        ("x", '[["127.0.0.1:1"], ["127.0.0.1:2"]]', "MLX_RANK"),
        (
            "2",
            '[["127.0.0.1:1"], ["127.0.0.1:2"]]',
            "MLX_RANK = 2, but .* lists 2 ranks, from 0 to 1",
        ),
        ("0", '[["127.0.0.1:1"]]', "is not a hostfile"),
        ("0", "{", "is not a hostfile"),
        ("0", '{"a": 1, "b": 2}', "is not a hostfile"),
        ("0", '[["127.0.0.1:1"], ["127.0.0.1:2", 3]]', "is not a hostfile"),
        ("0", '[["127.0.0.1:1"], ["127.0.0.1"]]', "'127.0.0.1' is not an address"),
        ("0", '[["127.0.0.1:1"], ["127.0.0.1:65537"]]', "'127.0.0.1:65537' is not an address"),
        ("0", '[["127.0.0.1:1"], [":2"]]', "':2' is not an address"),
        ("1", '[["127.0.0.1:1"], ["127.1:1"]]', "lists 127.0.0.1:1 twice"),
    ],
)
def test_a_wrong_rank_or_hostfile_takes_one_line(monkeypatch, tmp_path, rank, text, says):
    """With such values MLX itself aborts or waits forever, and it reads port 65537 as 1."""
    monkeypatch.setenv("MLX_RANK", rank)
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    if text:
        (tmp_path / "hosts.json").write_text(text)
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    join.cache_clear()
    with pytest.raises(ValueError, match=says) as caught:
        join()
    assert "\n" not in str(caught.value)


def test_taken_port(monkeypatch, tmp_path):
    """Regression: two processes with the same MLX_RANK listened on one port, which MLX allows, so a neighbour
    might connect to either."""
    with socket.socket() as other:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as MLX does
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        here = f"127.0.0.1:{other.getsockname()[1]}"
        (tmp_path / "hosts.json").write_text(json.dumps([["127.0.0.1:1"], [here]]))
        monkeypatch.setenv("MLX_RANK", "1")
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
        join.cache_clear()
        with pytest.raises(
            ModelError, match=rf"rank 1 \({here}\) cannot listen: Address already in use"
        ):
            join()


class Beside(Ranks):
    """Rank 0 of two. `says`: the numbers that rank 1 contributes to `gather`, and after them rank 0's own."""

    def __init__(self, says: list[int]):
        super().__init__(0, 2)
        self.said, self.says = [], iter(says)

    def gather(self, *numbers: int) -> list[list[int]]:
        self.said += numbers
        return [list(numbers), [next(self.says, numbers[0])]]


def test_ranks_with_other_weights_are_refused(tmp_path):
    """Regression: a model and a fine-tuned version have the same config. Combining half of each gave nonsense
    without an error."""
    models = [
        ModelReader(make_checkpoint(tmp_path / str(seed), seed=seed), "float32").read_model()
        for seed in (1, 2)
    ]
    said = []
    for model in models:
        check_alike(replace(model, ranks=(beside := Beside([]))))  # the other rank sends the same
        said.append(beside.said)
    assert len(said[0]) == 3 and said[0][:2] == said[1][:2]
    with pytest.raises(ModelError, match="rank 0: the ranks differ in their weights"):
        check_alike(replace(models[0], ranks=Beside(said[1])))
    with pytest.raises(ModelError, match="rank 0: the ranks differ in their version"):
        check_alike(replace(models[0], ranks=Beside([1])))


# --- connections --------------------------------------------------------------------------------------


class Ring(ExitStack):
    """Ranks in one process, connected in a ring. `ended` receives each rank that stops, with its reason."""

    def __init__(self, monkeypatch, size: int):
        super().__init__()
        self.ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        monkeypatch.setattr(group, "GRACE_S", 0)
        monkeypatch.setattr(os, "_exit", lambda code: sys.exit(code))  # ends only this thread
        threads = set(threading.enumerate())
        # Connection n leads to rank n, as a pair: the sender's end and rank n's end
        self.lines = [socket.socketpair() for _ in range(size)]
        self.all = [Ranks(rank, size, "ring") for rank in range(size)]
        for rank, each in enumerate(self.all):
            each.end_requests = lambda why, rank=rank: self.ended.put((rank, why))
            called = [self.lines[(rank + 1) % size][0]]
            each.attach(f"rank {(rank - 1) % size} (there)", [self.lines[rank][1]], called)
        self.threads = set(threading.enumerate()) - threads
        for line in self.lines:
            self.enter_context(line[0])
            self.enter_context(line[1])
        self.callback(self.cut)

    def cut(self) -> None:
        for line in self.lines:
            with suppress(OSError):  # already shut down
                line[0].shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def test_orders_are_passed_along_the_ring(monkeypatch):
    """The leader leaves only after all other ranks have run every batch, because each batch needs all ranks."""
    with Ring(monkeypatch, 4) as ring:
        leader, *others = ring.all
        orders = [[3, 1], list(range(5000))]
        for order in orders:
            leader.broadcast(order)
        leaves = threading.Thread(target=leader.leave)
        leaves.start()
        heard = queue.SimpleQueue()
        for other in others:
            hears = lambda other=other: heard.put([other.receive(), other.receive()])  # noqa: E731
            threading.Thread(target=hears, daemon=True).start()
        assert [heard.get(timeout=60) for _ in others] == [orders] * 3
        for other in others:
            assert leaves.is_alive()
            assert other.receive() is None
        leaves.join(60)
        assert not leaves.is_alive()
        ring.cut()
        # One receiver and one heartbeat per rank
        assert len(ring.threads) == 8 and ring.ended.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("lost", [0, 2])
def test_every_rank_hears_which_one_is_lost(monkeypatch, lost):
    """Regression: ranks that exit because of a lost one close their connections, too, so each rank blamed
    its neighbour."""
    with Ring(monkeypatch, 4) as ring:
        ring.lines[(lost + 1) % 4][0].shutdown(socket.SHUT_RDWR)
        said = dict(ring.ended.get(timeout=60) for _ in range(4))
        assert said.keys() == {0, 1, 2, 3}  # the lost rank still runs in this test
        for why in said.values():
            assert why.startswith(f"rank {lost} (there) is gone")


def test_heartbeat_within_a_message():
    """A heartbeat may arrive inside a message: another thread sends it, and a long batch is sent in pieces if
    the next rank reads slowly."""
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(b"\0[3, 1\x007, 5]\n\0\0null\n\0")
        assert list(messages_of(theirs)) == [[3, 17, 5], None]


KEY = b"only ranks know"


def soon() -> float:
    return time.monotonic() + 60


class Answering:
    """`accept` running in a thread, on a free port."""

    def __init__(self, *names: str, until: float = 0.0):
        server = socket.create_server((LOOPBACK, 0), backlog=200)
        self.address = "{}:{}".format(*server.getsockname())
        self._said = queue.SimpleQueue()
        until = until or soon()
        answers = lambda: self._said.put(accept([server], KEY, set(names), until))  # noqa: E731
        threading.Thread(target=answers, daemon=True).start()

    def lines(self) -> dict[str, socket.socket]:
        return self._said.get(timeout=60)

    def stranger(self, says: bytes = b"") -> socket.socket:
        host, port = self.address.split(":")
        stranger = socket.create_connection((host, int(port)), 60)
        with suppress(ConnectionError):  # the listener may have closed it already
            stranger.sendall(says)
        return stranger


def test_strangers_are_not_accepted():
    """Regression: whatever program connected first was accepted as the neighbour."""
    listener = Answering("a", "b")
    silent = [listener.stranger() for _ in range(150)]
    wrong = [
        listener.stranger(b"GET / HTTP/1.1\r\n\r\n"),
        listener.stranger(b"x" * 100_000),
        listener.stranger(b"a".ljust(NAME) + bytes(PROOF)),
    ]
    no_goodbye = struct.pack("ii", 1, 0)
    wrong[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_goodbye)
    wrong[0].close()
    calls = {name: connect(listener.address, KEY, name, soon()) for name in ("a", "b")}
    lines = listener.lines()
    for name, line in lines.items():
        calls[name].sendall(name.encode())
        assert line.recv(9) == name.encode()
    for stranger in (*silent, *wrong[1:]):
        with suppress(ConnectionResetError):
            stranger.settimeout(60)
            while stranger.recv(4096):  # the challenge
                pass
    with pytest.raises(ConnectionRefusedError):
        listener.stranger()
    for line in (*calls.values(), *lines.values(), *silent, *wrong):
        line.close()


def test_replayed_proof_is_refused():
    """A proof answers one challenge, so a recorded one is useless."""
    listener = Answering("a", "b")
    first = listener.stranger()
    question = first.recv(PROOF)
    named = b"a".ljust(NAME)
    heard = named + proof(KEY, question + named)
    other = listener.stranger(heard)
    assert len(other.recv(PROOF)) == PROOF and other.recv(1) == b""
    first.sendall(b"c".ljust(NAME) + proof(KEY, question + b"c".ljust(NAME)))
    assert first.recv(1) == b"", "there is no such line"
    one = connect(listener.address, KEY, "a", soon())
    two = connect(listener.address, KEY, "b", soon())
    assert listener.lines().keys() == {"a", "b"}
    for line in (first, other, one, two):
        line.close()


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (None, "Connection refused"),
        (b"", "another program"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 99\r\n\r\n" * 3, "another program"),
        (b"no goodbye", "another program"),  # like a rank with a different key that has timed out
    ],
)
def test_other_program_at_the_port(says, why):
    """The error says that the other program is not a rank."""
    with socket.create_server((LOOPBACK, 0)) as server:
        address = "{}:{}".format(*server.getsockname())

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with server.accept()[0] as line:
                        line.sendall(says)
                        if says == b"no goodbye":
                            linger = struct.pack("ii", 1, 0)
                            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

        if says is None:
            server.close()
        else:
            threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(TimeoutError, match=why):
            connect(address, KEY, "a", time.monotonic() + 0.5)
        with suppress(OSError):  # wakes the thread in accept()
            server.shutdown(socket.SHUT_RDWR)


def test_self_connection_is_retried(monkeypatch):
    """Regression: while nothing listens on a port, the system may assign that port to the caller itself. The
    caller then connects to itself, and the rank cannot listen there."""
    made = []

    def itself(*_) -> socket.socket:
        line = socket.socket()
        line.bind((LOOPBACK, 0))
        line.connect(line.getsockname())
        made.append(line)
        return line

    monkeypatch.setattr(socket, "create_connection", itself)
    with pytest.raises(TimeoutError, match="itself"):
        connect(f"{LOOPBACK}:1", KEY, "a", time.monotonic() + 0.2)
    assert len(made) > 1 and all(line.fileno() == -1 for line in made)


def test_silent_neighbour_times_out():
    """`accept` times out if a neighbour never calls, for example because it failed after joining MLX's ring."""
    with socket.create_server((LOOPBACK, 0)) as server, pytest.raises(TimeoutError):
        accept([server], KEY, {"a"}, time.monotonic() + 0.01)


CALLER = """
import sys, time
from distributed import channel
line = channel.connect(sys.argv[1], sys.argv[2].encode(), "a", time.monotonic() + 60)
channel.send(line, [1])
sys.stdin.read()
channel.send(line, [2])
"""


def test_stopped_rank_is_not_lost(monkeypatch):
    """A rank that sends no heartbeat, because of Ctrl-Z or a thread that holds the GIL, is not lost as long as
    its connection is open."""
    monkeypatch.setattr(channel, "SILENCE_S", 2)
    listener = Answering("a")
    command = [sys.executable, "-c", CALLER, listener.address, KEY.decode()]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as rank:
        (line,) = listener.lines().values()
        messages = messages_of(line)
        assert next(messages) == [1]
        rank.send_signal(signal.SIGSTOP)
        time.sleep(3)
        rank.send_signal(signal.SIGCONT)
        rank.stdin.close()
        assert list(messages) == [[2]]
    line.close()


GOODBYE = """
import socket
from distributed.group import Ranks
ours, theirs = socket.socketpair()
leader = Ranks(0, 2, "ring")
leader.attach("rank 1 (there)", [ours], [ours])
theirs.close()
leader.leave()
"""


def test_rank_lost_during_goodbye():
    """Regression: after a signal that stopped both ranks, rank 0 waited forever for rank 1's goodbye."""
    done = python(GOODBYE)
    assert done.returncode == LOST and "rank 1 (there) is gone" in done.stderr


# --- two processes ------------------------------------------------------------------------------


def test_full_send_buffer_does_not_block_the_exit():
    """Regression: after `mlx.launch` was killed, the message about a lost rank raised a BrokenPipeError,
    and rank 0 waited forever."""
    code = "from distributed.group import Ranks; Ranks(0, 2)._end('rank 1 is gone', 3)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=writer, timeout=120)
    os.close(writer)
    assert done.returncode == 3


class Pair(ExitStack):
    """Two ranks, started without a launcher and stopped at the end of the block. `only` lists the ranks to
    start, and `forms` the matrix product of each rank."""

    def __init__(
        self,
        tmp_path: Path,
        *command: str,
        only: tuple[int, ...] = (0, 1),
        host: str = "127.0.0.1",
        forms: Sequence[str] = (),
    ):
        super().__init__()
        self.hosts = [f"{host}:{port}" for port in free_ports(2)]
        (tmp_path / "hosts.json").write_text(json.dumps([[host] for host in self.hosts]))
        self.logs = [tmp_path / f"rank{rank}.log" for rank in (0, 1)]
        self.processes = {}
        self._command = [sys.executable, *map(str, command)]
        self._environment = os.environ | {
            "NANOBATCH_THREADS": "1",  # the ranks wait for each other and share the cores
            "MLX_HOSTFILE": str(tmp_path / "hosts.json"),
        }
        self._forms = forms
        for rank in only:
            self.start(rank)

    def start(self, rank: int) -> None:
        environment = self._environment | {"MLX_RANK": str(rank)}
        if self._forms:
            environment["NANOBATCH_BLAS"] = f"rows:{self._forms[rank]}"
        log = self.enter_context(self.logs[rank].open("wb"))
        # A test may run in a background job, whose children would ignore Ctrl-C
        reset = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
        options = {
            "stdout": log,
            "stderr": subprocess.STDOUT,
            "stdin": subprocess.DEVNULL,
            "env": environment,
            "cwd": ROOT,
        }
        process = subprocess.Popen(self._command, preexec_fn=reset, **options)
        self.processes[rank] = process
        self.callback(self.end, process)

    @staticmethod
    def end(process: subprocess.Popen) -> None:
        process.kill()
        process.wait()

    def codes(self, seconds: float = 300) -> list[int]:
        deadline = time.monotonic() + seconds
        return [
            process.wait(max(0.1, deadline - time.monotonic()))
            for process in self.processes.values()
        ]

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def found(self) -> list[list]:
        """Return the lists of lists that rank 0 printed as JSON. MLX may have printed something at the end of
        such a line."""
        texts = self.said(0).split("[[")[1:]
        return [json.JSONDecoder().raw_decode(f"[[{text}")[0] for text in texts]

    def says(self, rank: int, pattern: str) -> re.Match:
        def find() -> re.Match | None:
            found = re.search(pattern, self.said(rank))
            assert found or self.processes[rank].poll() is None, self.said(rank)
            return found

        return wait_for(find)


def test_two_processes_answer_like_one(tmp_path):
    """The model has grouped heads, biases, an untied head and 4 bits, and the ranks use different
    instruction sets where there are two. Each request has the same bits in a batch and alone."""
    kinds = {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attention_bias": True,
    }
    packed = lambda module: (4, 32) if "mlp" in module else None  # noqa: E731
    folder = str(make_checkpoint(tmp_path / "other", seed=2, quantize=packed, **kinds))
    forms = (library.forms_here() * 2)[:2]
    with Pair(tmp_path, RANK, "answers", "1", folder, forms=forms) as pair:
        with Engine.load(folder, **SIZES) as engine:
            alone = live(engine)
            assert sum(step.draft_tokens for step in engine.snapshot().steps) > 20
        assert pair.codes() == [0, 0], pair.said(0) + pair.said(1)
        ((tokens, exact, compared, different),) = pair.found()
        assert tokens == alone and len({token for answer in alone for token in answer}) > 12
        assert exact and compared > 40 and different == 0
        heads = r"rank 1 of 2 by ring: 3 query and 1 key heads in .*; follows rank 0"
        assert re.search(heads, pair.said(1))


def test_ranks_run_a_students_core(tmp_path):
    """Both processes that `course/run.py` starts use the student's files, and say so."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(ROOT / "kv.py", folder)
    with Pair(tmp_path, str(ROOT / "course" / "run.py"), folder, "ask.py", "Spell cat.") as pair:
        assert pair.codes() == [0, 0], pair.said(0) + pair.said(1)
        assert "c-a-t." in pair.said(0)
        assert all("with 1 module of mine" in pair.said(rank) for rank in (0, 1))


# The number of random schedules for each model
MPI_ROUNDS = int(os.environ.get("NANOBATCH_MPI", 0))


@pytest.mark.skipif(not MPI_ROUNDS, reason="a long form: NANOBATCH_MPI=6")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_by_mpi(size, tmp_path):
    """Two to four ranks give the same tokens as one process, and are batch-invariant."""
    folders = [
        str(make_checkpoint(tmp_path / kind, seed=2, **changes)) for kind, changes in KINDS.items()
    ]
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(size), sys.executable]
    done = subprocess.run(
        [*command, RANK, "answers", str(MPI_ROUNDS), *folders],
        env={"MLX_MPI_LIBNAME": "libmpi.so.40"} | os.environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    for folder, (tokens, exact, compared, different) in zip(folders, lines, strict=True):
        with Engine.load(folder, **SIZES) as engine:
            assert tokens == live(engine), folder
        assert exact and compared and not different, folder


@pytest.mark.parametrize(
    ("own", "says", "exact"), [(True, 1, True), (True, 0, False), (False, 1, False)]
)
def test_an_engine_is_exact_if_each_of_its_processes_is(parts, monkeypatch, own, says, exact):
    """Ranks may use different instruction sets and numbers of threads, if each is batch-invariant."""
    monkeypatch.setattr("kernels.device.is_batch_invariant", lambda: own)
    assert is_batch_invariant(replace(parts[0], ranks=Beside([says]))) is exact


def test_benchmark_on_ranks(tmp_path):
    """The ranks run all samples themselves, because with MPI a new process per sample could not join."""
    small = [
        "--parts",
        "decode",
        "--rows",
        "1",
        "--samples",
        "2",
        "--prompt",
        "16",
        "--output",
        "8",
        "--json",
    ]
    with Pair(tmp_path, str(ROOT / "bench.py"), *small, str(tmp_path / "run.json")) as pair:
        assert pair.codes() == [0, 0], pair.said(0) + pair.said(1)
    records = json.loads((tmp_path / "run.json").read_text())["records"]
    assert len(records) == 2 and all(record["figures"]["decode tokens/s"] > 0 for record in records)


@pytest.mark.parametrize(
    ("fault", "codes", "says"),
    [
        ("killed", [LOST, -signal.SIGKILL], r"rank 1 \(127.0.0.1:\d+\) is gone"),
        ("raises at rank 0", [1, LOST], "OverflowError: planted"),
    ],
)
def test_lost_rank_ends_every_process(tmp_path, fault, codes, says):
    """Requests fail and all processes exit, although the engine's thread may wait in MLX forever."""
    with Pair(tmp_path, RANK, fault) as pair:
        assert pair.codes() == codes, pair.said(0) + pair.said(1)
        (results,) = pair.found()
        assert len(results) == 4
        for reason, error in results:
            assert reason == "error" and re.search(says, error), error
        planted = "nanobatch: rank 0 of 2: OverflowError: planted" in pair.said(0)
        assert planted == (fault == "raises at rank 0")


def test_server_of_rank_0_stops_all_ranks(tmp_path):
    """Regression: in a terminal, Ctrl-C reaches all ranks. When it was pressed again, it interrupted rank 0's
    goodbye, and rank 1 reported rank 0 as lost."""
    with Pair(tmp_path, str(ROOT / "serve.py"), "--port", "0") as pair:
        address = pair.says(0, r"at http://(\S+)/v1; .*rank 0 of 2 by ring")[1]
        pair.says(1, "follows rank 0")
        body = json.dumps({"prompt": "Count.", "max_tokens": 8}).encode()
        asked = urllib.request.Request(
            f"http://{address}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.status == 200
        for process in reversed(pair.processes.values()):
            process.send_signal(signal.SIGINT)
        hail(pair.processes[0], signal.SIGINT)
        assert pair.codes() == [0, 0], pair.said(0) + pair.said(1)
        assert "Traceback" not in pair.said(0) + pair.said(1)


def test_idle_rank_loss_is_noticed(tmp_path):
    """Regression: MLX sends nothing while idle, so a lost rank was noticed only at the next request. If the
    hostfile spelled an address differently, for example as a name, it was never noticed."""
    with Pair(tmp_path, str(ROOT / "serve.py"), "--port", "0", host="127.1") as pair:
        pair.says(0, r"at http://(\S+)/v1;")
        pair.says(1, "follows rank 0")
        pair.processes[1].kill()
        assert pair.codes() == [LOST, -signal.SIGKILL], pair.said(0)
        assert (
            "rank 1" in pair.said(0).splitlines()[-1] and "is gone" in pair.said(0).splitlines()[-1]
        )


@pytest.fixture
def inside():
    """Return a prefix for commands that run in a separate network namespace."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("no network of its own without unshare, nsenter and ip")
    script = "ip link set lo up && echo up && exec sleep 600"
    with subprocess.Popen(
        ["unshare", "-rn", "sh", "-c", script], stdout=subprocess.PIPE
    ) as network:
        try:
            enter = ("nsenter", "-t", str(network.pid), "-U", "-n", "--preserve-credentials")
            if (
                not network.stdout.readline()
                or subprocess.run([*enter, "true"], stderr=subprocess.DEVNULL).returncode
            ):
                pytest.skip("this user may have no network of its own")
            yield enter
        finally:
            network.kill()


CUT = """
import queue, socket, subprocess, threading, time
from distributed import channel
channel.SILENCE_S = 2
server = socket.create_server(("127.0.0.1", 0))
host, port = server.getsockname()
until = time.monotonic() + 60
said = queue.SimpleQueue()
threading.Thread(target=lambda: said.put(channel.accept([server], b"key", {"a"}, until))).start()
leader = channel.connect(f"{host}:{port}", b"key", "a", until)
follower = said.get()["a"]
channel.send(leader, [1])
heard = channel.messages_of(follower)
print(next(heard), flush=True)
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
channel.send(leader, [2])
print(list(heard))
"""


def test_connection_cut_during_an_order(inside):
    """While data is unacknowledged, the sender's system sends no keepalive probes, but retransmits for a
    quarter of an hour. So the receiver must probe."""
    done = subprocess.run(
        [*inside, sys.executable, "-c", CUT],
        cwd=ROOT,
        check=True,
        timeout=120,
        text=True,
        stdout=subprocess.PIPE,
    )
    assert done.stdout.split("\n") == ["[1]", "[]", ""]


def test_rank_lost_while_loading(tmp_path):
    """The remaining rank exits although it waits in MLX and has no request that could fail."""
    with Pair(tmp_path, RANK, "killed in load") as pair:
        assert pair.codes() == [LOST, -signal.SIGKILL], pair.said(0)
        assert re.search(r"rank 0 of 2: rank 1 \(127.0.0.1:\d+\) is gone", pair.said(0))


def test_missing_rank_is_named(tmp_path):
    """Regression: MLX waited for a missing rank without a message, and held the GIL."""
    with Pair(tmp_path, str(ROOT / "ask.py"), "Hello", only=(1,)) as pair:
        pair.says(1, re.escape(f"rank 1 waits for rank 0 ({pair.hosts[0]})"))
        pair.processes[1].send_signal(signal.SIGINT)
        assert pair.codes() == [130] and "Traceback" not in pair.said(1)


def test_server_answers_while_ranks_meet(tmp_path):
    """Regression: MLX held the GIL while it waited for other ranks, so the server did not answer."""
    (port,) = free_ports(1)
    command = [str(ROOT / "serve.py"), "--port", str(port)]
    with Pair(tmp_path, *command, only=(0,)) as pair:
        pair.says(0, "rank 0 waits for rank 1")
        with socket.create_connection((LOOPBACK, port), 60) as line:
            line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"503" in line.recv(4096)
        pair.processes[0].send_signal(signal.SIGINT)
        assert pair.codes() == [0]


OTHER_KEYS = """
import os, sys, time
from distributed import rendezvous
rendezvous.MEET_S = 1.0
hosts, rank = os.environ["MLX_HOSTFILE"], os.environ["MLX_RANK"]
os.environ["NANOBATCH_RING_KEY"] = rank
meets = rendezvous.meet

def together(*given):
    open(hosts + rank, "w").close()
    while not os.path.exists(hosts + "10"[int(rank)]):
        time.sleep(0.01)
    return meets(*given)

rendezvous.meet = together  # one rank may start seconds after the other
sys.argv = ["ask.py", "Hello"]
import ask
sys.exit(ask.main())
"""


def test_ranks_with_other_keys_end_with_one_line(tmp_path):
    """Regression: ranks with different keys waited forever in MLX."""
    with Pair(tmp_path, "-c", OTHER_KEYS) as pair:
        assert pair.codes() == [2, 2], pair.said(0) + pair.said(1)
        for rank in (0, 1):
            first, last = pair.said(rank).splitlines()
            other = f"rank {1 - rank} ({pair.hosts[1 - rank]})"
            assert first == f"nanobatch: rank {rank} waits for {other}"
            assert last == (
                f"nanobatch: rank {rank} gave up waiting for {other} ({OTHERS}); start all ranks."
            )


RING_OF_STRANGERS = """
import sys
from distributed import rendezvous
rendezvous.CALLS = rendezvous.CALLS.replace(".close()", ".sendall(b'GET / HTTP/1.1')")
assert "sendall" in rendezvous.CALLS
sys.argv = ["ask.py", "What is 17 + 6?"]
import ask
sys.exit(ask.main())
"""


def test_stranger_at_mlx_is_kept_out(tmp_path):
    """MLX accepts whatever program connects first. Our own connections replace MLX's before it reads
    from them."""
    with Pair(tmp_path, "-c", RING_OF_STRANGERS) as pair:
        assert pair.codes() == [0, 0], pair.said(0) + pair.said(1)
        assert "23" in pair.said(0)
