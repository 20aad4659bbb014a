"""Faults that tests plant: bugs that would let the company show, and weights that make a number
which is not finite."""

from dataclasses import replace

import numpy as np

import kv
import llama
from kernels import c_attention
from kernels.mlx import mx
from nanobatch import Model
from prefix import Prefixes
from runner import Runner


def plant(monkeypatch, bug: str) -> None:
    init, visible_rows = kv.Window.__init__, c_attention.visible_rows
    if bug == "no mask":

        def all_of_the_slot(windows, *rest):
            rows = visible_rows(windows, *rest)
            rows[:, 2] = windows[0].slab.length - 1
            return rows

        monkeypatch.setattr(c_attention, "visible_rows", all_of_the_slot)
        monkeypatch.setattr(llama, "seen", lambda positions, T, span: mx.arange(T) < T)
    elif bug == "one offset for all rows":

        def shared_offset(self, slab, slots, starts, *rest):
            init(self, slab, slots, starts, *rest)
            self.positions = mx.broadcast_to(self.positions[:1], self.positions.shape)

        monkeypatch.setattr(kv.Window, "__init__", shared_offset)
    elif bug == "a decoding row's position is off by one":

        def off_by_one(self, slab, slots, starts, L, *rest):
            init(self, slab, slots, starts, L, *rest)
            self.positions = self.positions + (L == 1)

        monkeypatch.setattr(kv.Window, "__init__", off_by_one)
    elif bug == "a row lands in its neighbour's slot":
        write = kv.Window.write

        def misplaced(self, layer, k, v):
            if self.B > 1:
                k = mx.concatenate([k[1:], k[:1]])
            write(self, layer, k, v)

        monkeypatch.setattr(kv.Window, "write", misplaced)
    elif bug == "a chunk reads no further than itself":
        find = kv.Window.groups.func

        def near(self):
            far = self.slab.length if self.L == 1 else self.L
            return [group._replace(T=min(group.T, far)) for group in find(self)]

        def near_rows(windows, *rest):
            far = [w.slab.length if w.L == 1 else w.L for w in windows for _ in w.positions]
            rows = visible_rows(windows, *rest)
            rows[:, 2] = mx.minimum(rows[:, 2], mx.array(far) - 1)
            return rows

        monkeypatch.setattr(kv.Window, "groups", property(near))
        monkeypatch.setattr(c_attention, "visible_rows", near_rows)
    elif bug == "a prefix is matched one token too long":
        common = Prefixes._common
        monkeypatch.setattr(
            Prefixes,
            "_common",
            lambda self, prompt, *rest: min(common(self, prompt, *rest) + 1, len(prompt) - 1),
        )
    elif bug == "a prefix is copied before it is written":
        monkeypatch.setattr(
            kv.Slab,
            "prefix",
            lambda self, slot, rows: [array[-1:, :, :rows] * 0 for array in self.arrays],
        )
    elif bug == "the newest token is a step old":
        begin, finish = Runner.begin, Runner.finish
        decodes = []

        def noted(self, order):
            decodes[:] = order.decodes
            return begin(self, order)

        def stale(self, begun, picks):
            newest = mx.array(self._newest)
            flight = finish(self, begun, picks)
            if decodes:
                self._newest = newest
            return flight

        monkeypatch.setattr(Runner, "begin", noted)
        monkeypatch.setattr(Runner, "finish", stale)


def poisoned(model: Model, token: int) -> Model:
    """The same model with an embedding of NaN for one token: whoever says it gets a number that is
    not finite."""
    weight = np.array(model.table.weight)
    weight[token] = np.nan
    return replace(model, table=model.table._replace(weight=mx.array(weight)))
