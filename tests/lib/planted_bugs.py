"""Faults that tests plant: bugs that would let the company show, and weights that make a number
which is not finite."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

import kv
import llama
from kernels import c_attention
from kernels.device import mx
from nanobatch import Model
from prefix import Prefixes
from runner import Runner


def all_of_the_slot(visible_rows: Callable) -> Callable:
    def planted(windows, *rest):
        rows = visible_rows(windows, *rest)
        rows[:, 2] = windows[0].slab.length - 1
        return rows

    return planted


def shared_offset(init: Callable) -> Callable:
    def planted(self, slab, slots, starts, *rest):
        init(self, slab, slots, starts, *rest)
        self.positions = mx.broadcast_to(self.positions[:1], self.positions.shape)

    return planted


def off_by_one(init: Callable) -> Callable:
    def planted(self, slab, slots, starts, L, *rest):
        init(self, slab, slots, starts, L, *rest)
        self.positions = self.positions + (L == 1)

    return planted


def misplaced(write: Callable) -> Callable:
    def planted(self, layer, k, v):
        if self.B > 1:
            k = mx.concatenate([k[1:], k[:1]])
        write(self, layer, k, v)

    return planted


def near(groups: cached_property) -> property:
    def planted(self):
        far = self.slab.length if self.L == 1 else self.L
        return [group._replace(T=min(group.T, far)) for group in groups.func(self)]

    return property(planted)


def near_rows(visible_rows: Callable) -> Callable:
    def planted(windows, *rest):
        far = [w.slab.length if w.L == 1 else w.L for w in windows for _ in w.positions]
        rows = visible_rows(windows, *rest)
        rows[:, 2] = mx.minimum(rows[:, 2], mx.array(far) - 1)
        return rows

    return planted


def one_too_long(common: Callable) -> Callable:
    return lambda self, prompt, *rest: min(common(self, prompt, *rest) + 1, len(prompt) - 1)


def not_written(prefix: Callable) -> Callable:
    return lambda self, slot, rows: [array[-1:, :, :rows] * 0 for array in self.arrays]


def a_step_old(finish: Callable) -> Callable:
    def planted(self, launched, rows):
        newest = mx.array(self._newest)
        flight = finish(self, launched, rows)
        if launched.batch.decodes:
            self._newest = newest
        return flight

    return planted


# Of each bug: whose function is replaced, its name, and what takes the function and returns the wrong one
BUGS = {
    "no mask": [
        (c_attention, "visible_rows", all_of_the_slot),
        (llama, "seen", lambda seen: lambda positions, T, span: mx.arange(T) < T),
    ],
    "one offset for all rows": [(kv.Window, "__init__", shared_offset)],
    "a decoding row's position is off by one": [(kv.Window, "__init__", off_by_one)],
    "a row lands in its neighbour's slot": [(kv.Window, "write", misplaced)],
    "a chunk reads no further than itself": [
        (kv.Window, "groups", near),
        (c_attention, "visible_rows", near_rows),
    ],
    "the newest token is a step old": [(Runner, "finish", a_step_old)],
    "a prefix is matched one token too long": [(Prefixes, "_common", one_too_long)],
    "a prefix is copied before it is written": [(kv.Slab, "prefix", not_written)],
}


def plant(monkeypatch, bug: str) -> None:
    for owner, name, planted in BUGS[bug]:
        monkeypatch.setattr(owner, name, planted(getattr(owner, name)))


def poisoned(model: Model, token: int) -> Model:
    """The same model with an embedding of NaN for one token: whoever says it gets a number that is
    not finite."""
    weight = np.array(model.table.weight)
    weight[token] = np.nan
    return replace(model, table=model.table._replace(weight=mx.array(weight)))
