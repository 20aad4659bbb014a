"""Bugs for tests to plant: answers that depend on their batch, and weights that produce numbers that are
not finite."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np

import kv
import llama
import nanobatch
import runner
import sampling
from engine.disk_prefix_cache import RestoredRows
from kernels import c_attention
from kernels.device import mx
from kernels.packed import Matrix
from kernels.slot_biases import SlotBiases
from nanobatch import Model, SamplingParams
from prefix import Prefixes
from runner import Runner
from sched import Scheduler


def all_of_the_slot(visible_rows: Callable) -> Callable:
    def planted(windows, *rest):
        rows = visible_rows(windows, *rest)
        rows[:, 2] = windows[0].slab.length - 1
        return rows

    return planted


def shared_offset(init: Callable) -> Callable:
    def planted(self, slab, slots, starts, L, *rest):
        init(self, slab, slots, starts, L, *rest)
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
    def planted(self, step, rows):
        newest = mx.array(self._newest)
        step = finish(self, step, rows)
        if step.batch.decodes:
            self._newest = newest
        return step

    return planted


# --- bugs that do not affect a request alone in its batch ---------------------------------------


def hidden_in_company(is_hidden: Callable[[int], bool]) -> Callable:
    """Hide the newest row from some tokens when several sequences decode together."""

    def replace_function(visible_rows: Callable) -> Callable:
        def planted(windows, *rest):
            rows = visible_rows(windows, *rest)
            hidden = [
                window.B > 1 and is_hidden(start + i)
                for window in windows
                for start in window.starts
                for i in range(window.L)
            ]
            rows[:, 2] = rows[:, 2] - mx.array(hidden)
            return rows

        return planted

    return replace_function


def two_halves(product: Callable) -> Callable:
    """Sum 8 or more rows in two halves, like a library with separate kernels for few and many rows."""

    def planted(self, x):
        if x.shape[0] < 8:
            return product(self, x)
        is_near = mx.arange(x.shape[-1]) < x.shape[-1] // 2
        near = is_near.astype(x.dtype)
        return product(self, x * near) + product(self, x * (1 - near))

    return planted


def trusting_from(first: int) -> Callable:
    """Accept all tokens of a draft from this index on."""

    def replace_function(commit: Callable) -> Callable:
        def planted(self, plan, tokens, *rest):
            tokens = [list(row) for row in tokens]
            for decode in plan.decodes:
                tokens[decode.slot][first : len(decode.draft)] = decode.draft[first:]
            return commit(self, plan, tokens, *rest)

        return planted

    return replace_function


def first_index(sampling_rows: Callable) -> Callable:
    def planted(*member):
        rows = sampling_rows(*member)
        return [row._replace(index=rows[0].index) for row in rows]

    return planted


def without_draft(sampling_rows: Callable) -> Callable:
    def planted(*member):
        rows = sampling_rows(*member)
        return [row._replace(before=rows[0].before) for row in rows]

    return planted


def changed_late(sample: Callable) -> Callable:
    def planted(logits, rows, state):
        factors = [1.001 if len(rows) > 1 and row.index >= 24 else 1.0 for row in rows]
        return sample(logits * mx.array(factors)[:, None], rows, state)

    return planted


def first_text(apply_penalties: Callable) -> Callable:
    def planted(x, rows, state):
        return apply_penalties(x, [row._replace(before=rows[0].before) for row in rows], state)

    return planted


def first_setting(name: str) -> Callable:
    """Apply the first row's value of this setting to all rows that are sampled together."""

    def replace_function(draw: Callable) -> Callable:
        def planted(spread, rows, group):
            value = getattr(rows[0].sampling, name)
            changed = [row._replace(sampling=copied(row.sampling, name, value)) for row in rows]
            return draw(spread, changed, group)

        return planted

    return replace_function


def copied(settings: SamplingParams, name: str, value: object) -> SamplingParams:
    """Copy the settings with one change, without validating all fields, which takes as long as a step."""
    found = copy(settings)
    vars(found)[name] = value
    return found


def first_seed(draw: Callable) -> Callable:
    return lambda spread, rows, group: draw(
        spread, [row._replace(seed=rows[0].seed) for row in rows], group
    )


def old_bias(bias: Callable) -> Callable:
    """Compute a slot's bias once instead of for each request that gets the slot."""

    def planted(self, slot, wanted):
        known, _ = self._biases[slot]
        return bias(self, slot, known if known and wanted else wanted)

    return planted


def mask_of_a_neighbour(mask: Callable) -> Callable:
    return lambda self, masks: mask(self, [*masks[1:], *masks[:1]])


def vector_of_a_neighbour(sampled: Callable) -> Callable:
    def planted(self, step, rows):
        step.hidden = [mx.roll(part, 1, axis=0) for part in step.hidden]
        return sampled(self, step, rows)

    return planted


def without_last_row(prefix: Callable) -> Callable:
    def planted(self, rows):
        found = prefix(self, rows)
        found[0][:, :, rows - 1] = 0
        return found

    return planted


# For each bug: the owner of a function, its name, and a wrapper that breaks it
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
    "the newest token is a step old": [(Runner, "start_sampling", a_step_old)],
    "a prefix is matched one token too long": [(Prefixes, "_common_with_slot", one_too_long)],
    "a prefix is copied before it is written": [(kv.Slab, "prefix", not_written)],
}
VISIBLE = (c_attention, "visible_rows")
# Bugs that `verify.py` must find, too, each with the kind of check that reveals it
FAULTS = {
    "the mask is wrong from row 256 on": (
        "company",
        *VISIBLE,
        hidden_in_company(lambda row: row >= 256),
    ),
    "the mask is wrong every 256 rows": (
        "company",
        *VISIBLE,
        hidden_in_company(lambda row: row % 256 == 255),
    ),
    "the mask is wrong from row 513 on": (
        "company",
        *VISIBLE,
        hidden_in_company(lambda row: row >= 513),
    ),
    "sums of 8 rows and more have another order": ("company", Matrix, "__call__", two_halves),
    "draft tokens are right from the 4th on": (
        "draft tokens",
        Scheduler,
        "commit",
        trusting_from(3),
    ),
    "draft tokens are right from the 9th on": (
        "draft tokens",
        Scheduler,
        "commit",
        trusting_from(8),
    ),
    "one index for all rows of a draft": ("draft tokens", nanobatch, "sampling_rows", first_index),
    "a penalty without the draft tokens": (
        "draft tokens",
        nanobatch,
        "sampling_rows",
        without_draft,
    ),
    "logits change from token 25 on": ("company", runner, "sample", changed_late),
    "the first one's text is penalized": ("company", sampling, "apply_penalties", first_text),
    "the first one's temperature": ("company", sampling, "draw", first_setting("temperature")),
    "the first one's top_p": ("company", sampling, "draw", first_setting("top_p")),
    "the first one's seed": ("company", sampling, "draw", first_seed),
    "an old owner's bias": ("company", SlotBiases, "bias", old_bias),
    "a neighbour's grammar": ("company", SlotBiases, "mask", mask_of_a_neighbour),
    "an embedding is a neighbour's": ("company", Runner, "_sample", vector_of_a_neighbour),
    "a restored slot lacks its last row": ("slot_cache", RestoredRows, "prefix", without_last_row),
}


def plant(monkeypatch, bug: str) -> None:
    places = BUGS[bug] if bug in BUGS else [FAULTS[bug][1:]]
    for owner, name, planted in places:
        monkeypatch.setattr(owner, name, planted(getattr(owner, name)))


def poisoned(model: Model, token: int) -> Model:
    """Return the same model with an embedding of NaN for one token: a request that contains it computes
    numbers that are not finite."""
    weight = np.array(model.table.weight)
    weight[token] = np.nan
    return replace(model, table=model.table._replace(weight=mx.array(weight)))
