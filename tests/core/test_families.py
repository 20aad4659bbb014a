"""Recent model families: the same bits under every policy, in random batches, and alone."""

from dataclasses import replace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import Tap, random_asks, run_schedule
from long_forms import IS_LONG
from parity import CONFIGS, seed_of

from kernels import device
from models.load import read_model
from nanobatch import Engine, Tokenizer
from policies import POLICIES

WIDE = ["lfm2", "granitemoehybrid", "ministral3", "olmo3", "gemma4_text", "gpt_oss"]
NARROW = [
    "lfm2, four taps, as published, 4 bits",
    "granitemoehybrid, without positions, 8 bits",
    "ministral3, tied, 4 bits",
    "olmo3, yarn in full layers, 4 bits",
    "gemma4_text, as published, 8 bits",
    "gpt_oss, experts in MXFP4, 8 bits",
]


@pytest.mark.skipif(not device.is_batch_invariant(), reason="our own product does not run here")
@pytest.mark.parametrize(
    ("name", "activations"),
    [*((name, 32) for name in (*WIDE, *NARROW)), *((name, 8) for name in NARROW)],
)
def test_every_policy_gives_the_same_bits(name, activations, tmp_path):
    """`test_parity.py` compares one policy with mlx-lm. Here prompts share prefixes, so that rows are reused,
    and the reference computes attention by its formula. In the short form, quantized weights with float
    activations run under all policies, and all other configurations under two."""
    seed = seed_of(name)
    folder = make_checkpoint(tmp_path, seed=seed, **CONFIGS[name])
    model = read_model(folder, activations=activations)
    text = Tokenizer(folder, model.config.V)
    asks = random_asks(np.random.default_rng(seed), 4, longest=50, tokens=4, alike=0.7)
    plain = replace(model, attention="formula")
    policies = [*POLICIES]
    if not IS_LONG and (name in WIDE or activations == 8):
        policies = ["continuous", policies[1 + seed % (len(policies) - 1)]]
    with Engine(plain, text, slots=1, max_len=128, chunk=64, prefix_cache=False) as engine:
        tap = Tap(engine)
        alone = [engine.submit(ask.prompt, ask.sampling()) for ask in asks]
        expected = [(handle.result().tokens, tap.of(handle)) for handle in alone]
    for policy in policies:
        with Engine(model, text, slots=3, max_len=128, chunk=32, policy=policy) as engine:
            tap = Tap(engine)
            handles = run_schedule(engine, asks, np.random.default_rng(seed))
            for handle, (tokens, logits) in zip(handles, expected, strict=True):
                assert handle.tokens == tokens, policy
                assert np.array_equal(tap.of(handle), logits), policy
