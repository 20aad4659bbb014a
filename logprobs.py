"""Log probabilities for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernels.device import mx
from kernels.sampling_ops import gather, likeliest
from step_output import StepOutput, TokenLogprob

if TYPE_CHECKING:
    from sampling import SamplingRow, Spread


class Logprobs(NamedTuple):
    """Log probabilities of some rows, still on the device. A row has those of the chosen token, of the
    most likely tokens, and, under a grammar, of the tokens that would be most likely without it."""

    picks: Sequence[SamplingRow]
    most: int  # number of most likely tokens
    ids: mx.array  # (n, 1 + most), or (n, 1 + 2 most) with a grammar
    values: mx.array  # the same shape

    def by_row(self) -> Iterator[tuple[SamplingRow, StepOutput]]:
        """Yield each row with its token and log probabilities."""
        all_ids = self.ids.tolist()
        all_values = self.values.tolist()
        for pick, ids, values in zip(self.picks, all_ids, all_values, strict=True):
            (token, logprob), *pairs = zip(ids, values, strict=True)
            top = tuple(pairs[: self.most])
            free = tuple(pairs[self.most :])
            yield pick, StepOutput(token, TokenLogprob(logprob, top, free))


def measure(
    spread: Spread,
    picks: Sequence[SamplingRow],
    ids: mx.array,  # (n, 1)
    V: int,
    free: Spread | None,  # without the grammar
) -> Logprobs:
    """Compute log(e^-gap / total) for the chosen tokens and the likeliest ones, before any filter."""
    most = min(max(pick.sampling.logprobs for pick in picks), V)
    if most:
        top = likeliest(spread.gap, most)
        ids = mx.concatenate([ids, top], axis=-1)
    values = -gather(spread.gap, ids) - mx.log(spread.total)
    if most and free is not None:
        top = likeliest(free.gap, most)
        ids = mx.concatenate([ids, top], axis=-1)
        unmasked = -gather(free.gap, top) - mx.log(free.total)
        values = mx.concatenate([values, unmasked], axis=-1)
    return Logprobs(picks, most, ids, values)
