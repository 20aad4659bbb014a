"""Which share of a model each of several processes holds.

The problem. A model that does not fit one machine must be cut up. Each layer is cut: every process
has some of the heads and some of the hidden numbers of the MLP. With small numbers: H = 6 query
heads, Hkv = 2 key heads, so G = 3. What each rank has:

    2 ranks   queries 0 1 2, key 0    |  queries 3 4 5, key 1
    4 ranks   queries 0, key 0  |  queries 1 2, key 0  |  queries 3, key 1  |  queries 4 5, key 1

Where next: `load.py`, which takes a rank's share of the weights; `distributed/group.py`, how the
ranks work together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from models.config import ATTENTION, MLP, Config
from runtime.files import ModelError


def evenly(count: int, ranks: int) -> list[range]:
    """0..count in neighbouring pieces that differ by one at most."""
    return [range(count * r // ranks, count * (r + 1) // ranks) for r in range(ranks)]


class Shard(NamedTuple):
    """What one rank has of each layer."""

    queries: range  # heads
    keys: range  # heads, and as many value heads
    hidden: range  # numbers inside the MLP

    @staticmethod
    def of(c: Config, rank: int, size: int) -> Shard:
        """With fewer key heads than ranks, several ranks have the same key head and divide its
        query heads."""
        if size > 1 and c.qk_norm == "width":
            raise ModelError(
                f"{c.model_type} cannot be shared: it has a norm over all heads. Start one process."
            )
        # A last bit may decide which experts a token takes, and it must be the same on all
        if size > 1 and c.experts:
            raise ModelError(
                f"{c.model_type} cannot be shared: each process would choose experts. Start one process."
            )
        if size > min(c.H, c.hidden):
            most = min(c.H, c.hidden)
            raise ModelError(
                f"{size} ranks cannot share a model with {c.H} attention heads; start {most} or less."
            )
        G = c.H // c.Hkv
        if size <= c.Hkv:
            keys = evenly(c.Hkv, size)[rank]
            queries = range(keys.start * G, keys.stop * G)
        else:
            key = rank * c.Hkv // size
            sharers = [r for r in range(size) if r * c.Hkv // size == key]
            part = evenly(G, len(sharers))[sharers.index(rank)]
            keys = range(key, key + 1)
            queries = range(key * G + part.start, key * G + part.stop)
        # Quantized numbers share scales in blocks
        block = 64 if c.hidden % 64 == 0 and c.hidden >= 64 * size else 1
        hidden = evenly(c.hidden // block, size)[rank]
        return Shard(queries, keys, range(hidden.start * block, hidden.stop * block))

    def config(self, c: Config) -> Config:
        """The model as this rank sees it."""
        return replace(
            c,
            H=len(self.queries),
            Hkv=len(self.keys),
            hidden=len(self.hidden),
        )

    def cut(self, module: str, Dh: int) -> tuple[slice, slice]:
        """Which rows and which columns of a module's weight (out, in)."""
        own = {
            "queries": slice(self.queries.start * Dh, self.queries.stop * Dh),
            "keys": slice(self.keys.start * Dh, self.keys.stop * Dh),
            "hidden": slice(self.hidden.start, self.hidden.stop),
        }
        name = ".".join(module.split(".")[-2:])
        out, width = (ATTENTION | MLP).get(name, ("", ""))
        return own.get(out, slice(None)), own.get(width, slice(None))
