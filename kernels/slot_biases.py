"""Logit biases that are kept between steps: the `logit_bias` of each slot's request, and a table that unpacks
grammar masks."""

import math
from collections.abc import Mapping, Sequence

from kernels.device import mx


class SlotBiases:
    """The bias array of each slot, and the table for grammar masks."""

    def __init__(self, slots: int, V: int):
        self._no_bias = mx.zeros(V)
        self._biases = [({}, self._no_bias)] * slots  # (the request's logit_bias, its array)
        octets = mx.arange(256)[:, None]
        bits = octets >> mx.arange(8) & 1  # (256, 8)
        self._mask_of_byte = mx.where(bits == 1, 0, -math.inf)

    def bias(self, slot: int, wanted: Mapping[int, float]) -> mx.array:  # (V,)
        """Return a request's logit_bias as an array. It is built once, because building 100,000 entries
        takes longer than a step."""
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
        """Return 0 for allowed tokens and minus infinity for the others.

        On a CPU, looking up each byte of eight tokens takes MLX a fifth of the time that shifting bits takes.
        """
        octets = mx.array(memoryview(b"".join(masks)))
        each = self._mask_of_byte[octets].reshape(len(masks), -1)
        return each[:, : len(self._no_bias)]
