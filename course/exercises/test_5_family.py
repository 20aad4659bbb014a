"""Exercise 5: a model family.

    python -m pytest -x course/exercises/test_5_family.py

The task. Serve MiniCPM. It is a Llama with three multipliers, given in its config.json:

    scale_emb        the embedding's output is multiplied by it
    scale_depth      what attention and the MLP add to the residual is multiplied by scale_depth / sqrt(layers)
    dim_model_base   what goes into the head, tied or not, is divided by hidden_size / dim_model_base

None of this has to be done in every step. A multiplication by a number can be folded into the
weights when they are loaded, so `forward` does not change. One family does so already: granite.

Read first: docs/models.md, then what `models/families.py` does for granite, and `tensor` in
`models/load.py`. What if the head is tied to the embedding, so that one array needs two factors? (In
that case mlx-lm's minicpm does not divide at all, but the published model does. That makes no
difference for greedy answers, but it does for scores and for sampling.)

Where: in `models/families.py`, a record in `FAMILIES`, and for its `own` a function like granite's,
which takes the config's fields and returns what is specific to the family.

How to check: run the command above. A supported family also needs an entry in `CONFIGS` of
`tests/lib/parity.py` and a line in docs/models.md; `python -m pytest` says so.
"""

import numpy as np
import pytest
from checkpoints import Reference, make_checkpoint, make_config, save
from short_failures import not_done, not_right

from base.untrusted_files import ModelError
from kernels.device import mx
from kv import Slab, Window
from llama import forward
from models.families import FAMILIES
from models.load import read_model
from models.memory import slab_shape
from nanobatch import Engine, SamplingParams
from text.tokenizer import Tokenizer

CONFIG = {
    "model_type": "minicpm",
    "num_hidden_layers": 3,
    "scale_emb": 1.5,
    "scale_depth": 1.4,
    "dim_model_base": 16,
    "rope_theta": 10000.0,
}
TOKENS = 24
IDS = list(range(7, 47))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if "minicpm" not in FAMILIES:
        not_done("models/families.py: FAMILIES has no 'minicpm'")
    try:
        return make_checkpoint(tmp_path_factory.mktemp("minicpm"), seed=4, **CONFIG)
    except ModelError as error:
        not_done(str(error))


def scores(folder) -> np.ndarray:
    model = read_model(folder)
    slab = Slab(*slab_shape(model.config, 1, 64, 32), model.dtype)
    window = Window(slab, slots=[0], starts=[0], L=len(IDS))
    states = forward(model, mx.array(IDS), [window], logits_at=range(len(IDS)))
    return np.array(model.head(states))


def compare(ours: np.ndarray, wanted: np.ndarray, hint: str) -> None:
    """Compare all logits of a prompt, to 1e-3. A wrong multiplier changes them by far more."""
    off = np.abs(ours - wanted).max()
    if off >= 1e-3 * max(1, np.abs(wanted).max()):
        not_right(f"logits differ by up to {off:.3g}: {hint}")


def test_the_familys_scores_are_those_of_mlx_lm(folder):
    compare(
        scores(folder),
        Reference(folder).logits(IDS),
        "are all three multipliers in, and each as it is meant?",
    )


def test_a_tied_head_has_the_scores_of_an_untied_one_that_holds_the_same_numbers(folder, tmp_path):
    """One array is both the embedding and the head, but only the embedding is multiplied by
    scale_emb."""
    weights = mx.load(str(folder / "model.safetensors"))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    untied = save(tmp_path / "untied", make_config(**CONFIG), weights)
    del weights["lm_head.weight"]
    tied = save(tmp_path / "tied", make_config(**CONFIG, tie_word_embeddings=True), weights)
    compare(
        scores(tied),
        scores(untied),
        "is a tied head's input divided by both, scale_emb and the third multiplier?",
    )


def test_the_family_answers_as_mlx_lm_does(folder):
    """Compare greedy answers to three prompts at once with mlx-lm's.

    The comparison ends at the first near tie of its two best tokens.
    """
    prompts, reference = [(5, 9, 200), tuple(range(30, 90)), (77,)], Reference(folder)
    with Engine(
        read_model(folder), Tokenizer(folder, 272), slots=2, max_len=128, chunk=32
    ) as engine:
        results = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    for prompt, result in zip(prompts, results, strict=True):
        tokens, margins = reference.greedy(prompt, TOKENS)
        decided = next((i for i, margin in enumerate(margins) if margin < 1e-4), TOKENS)
        assert decided > 3 and result.tokens[:decided] == tokens[:decided]
