"""An example of hidden checks: copy the folder, change the numbers, and keep it.

Hidden checks are written like the stages' own, one file for each stage, and can use the same names.
"""

import random

import pytest

from course.from_zero.shared_by_tests import assert_close, logits, our_logits
from course.from_zero.test_1_one_token import check_attention

dice = random.Random(1)


@pytest.mark.about("attention")
def test_other_shapes():
    """Attention is right for different numbers of heads, sequences and tokens."""
    for _ in range(6):
        Hkv = dice.randint(1, 4)
        L = dice.randint(1, 5)
        T = L + dice.randint(0, 9)
        check_attention(H=Hkv * dice.randint(1, 4), Hkv=Hkv, B=dice.randint(1, 4), L=L, T=T)


def test_other_tokens():
    """The logits of random tokens are right, not only those of a prompt."""
    ids = [dice.randrange(1500) for _ in range(40)]
    assert_close(logits(ids), our_logits(ids), "the logits", 1e-3)
