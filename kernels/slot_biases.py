"""What is added to logits and outlives a step: the `logit_bias` of each slot's request, and a table that
unpacks grammar masks."""

import math
from collections.abc import Mapping, Sequence

from kernels.device import mx


class SlotState:
    """The biases that were built, by slot, and the table."""

    def __init__(self, slots: int, V: int):
        self._no_bias = mx.zeros(V)
        self._biases = [({}, self._no_bias)] * slots  # each with the settings it was built for
        octets = mx.arange(256)[:, None]
        bits = octets >> mx.arange(8) & 1  # (256, 8)
        self._mask_of_byte = mx.where(bits == 1, 0, -math.inf)

    def bias(self, slot: int, wanted: Mapping[int, float]) -> mx.array:  # (V,)
        """A request's logit_bias as array, built once: 100,000 entries take longer than a step."""
        if not wanted:
            return self._no_bias
        built_for, bias = self._biases[slot]
        if built_for is not wanted:
            ids = mx.array(list(wanted))
            values = mx.array(list(wanted.values()))
            bias = self._no_bias.at[ids].add(values)
            self._biases[slot] = (wanted, bias)
        return bias

    def mask(self, masks: Sequence[bytes]) -> mx.array:  # (n, V)
        """0 for each token that is allowed, and minus infinity for the others.

        On a CPU, looking up each byte of eight tokens takes MLX a fifth of the time of shifting bits.
        """
        octets = mx.array(memoryview(b"".join(masks)))
        each = self._mask_of_byte[octets].reshape(len(masks), -1)
        return each[:, : len(self._no_bias)]
