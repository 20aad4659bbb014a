"""Divide a model among several ranks (tensor parallelism).

Each layer is divided: every rank has some of the heads and some of the hidden units of the MLP. For
example, with H = 6 query heads and Hkv = 2 key heads, G = 3 query heads share a key head:

    2 ranks   queries 0 1 2, key 0    |  queries 3 4 5, key 1
    4 ranks   queries 0, key 0  |  queries 1 2, key 0  |  queries 3, key 1  |  queries 4 5, key 1

Next: `load.py` reads a rank's shard of the weights; `distributed/group.py` connects the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from base.untrusted_files import ModelError
from models.config import ATTENTION, MLP, Config


def evenly(count: int, ranks: int) -> list[range]:
    """Divide 0..count into consecutive ranges whose lengths differ by at most one."""
    return [range(count * r // ranks, count * (r + 1) // ranks) for r in range(ranks)]


class Shard(NamedTuple):
    """The part of each layer that one rank has."""

    queries: range  # query heads
    keys: range  # key heads, and the value heads with the same indices
    hidden: range  # hidden units of the MLP

    @staticmethod
    def for_rank(c: Config, rank: int, size: int) -> Shard:
        """Compute the shard of a rank. With more ranks than key heads, several ranks have the same key
        head and divide its query heads."""
        if size > 1 and c.qk_norm == "width":
            raise ModelError(
                f"{c.model_type} cannot be shared: it has a norm over all heads. Start one process."
            )
        if size > 1 and c.convolved:
            raise ModelError(
                f"{c.model_type} cannot be shared: it has convolutions. Start one process."
            )
        if size > 1 and c.deltas:
            raise ModelError(
                f"{c.model_type} cannot be shared: its delta nets have states. Start one process."
            )
        if size > 1 and (c.far or c.reusing or c.scalars):
            raise ModelError(
                f"{c.model_type} cannot be shared: its layers have different heads. Start one process."
            )
        # The last bit of a sum may decide which experts a token uses, and all ranks must use the same
        if size > 1 and c.experts:
            raise ModelError(
                f"{c.model_type} cannot be shared: each process would choose experts. Start one process."
            )
        if size > min(c.H, c.hidden):
            most = min(c.H, c.hidden)
            raise ModelError(
                f"{size} ranks cannot share a model with {c.H} attention heads; start {most} or fewer."
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
        # Blocks of quantized weights share a scale, so they are not divided
        block = 64 if c.hidden % 64 == 0 and c.hidden >= 64 * size else 1
        hidden = evenly(c.hidden // block, size)[rank]
        return Shard(queries, keys, range(hidden.start * block, hidden.stop * block))

    def config(self, c: Config) -> Config:
        """Return the config of this rank's shard."""
        return replace(
            c,
            H=len(self.queries),
            Hkv=len(self.keys),
            hidden=len(self.hidden),
        )

    def cut(self, module: str, Dh: int) -> tuple[slice, slice]:
        """Return the rows and columns of a module's weight (out, in) that belong to this rank."""
        own = {
            "queries": slice(self.queries.start * Dh, self.queries.stop * Dh),
            "keys": slice(self.keys.start * Dh, self.keys.stop * Dh),
            "hidden": slice(self.hidden.start, self.hidden.stop),
        }
        name = ".".join(module.split(".")[-2:])
        out, width = (ATTENTION | MLP).get(name, ("", ""))
        return own.get(out, slice(None)), own.get(width, slice(None))
