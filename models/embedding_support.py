"""Check that a model was trained for embeddings. The files of such a model say how vectors are pooled.

    modules.json             Transformer, Pooling, Normalize
    1_Pooling/config.json    {"pooling_mode_lasttoken": true, ...}

Any model has a hidden state after the last token of a text, but it is a useful embedding only if the
model was trained for that. Vectors of other models look valid but are not, so those models are refused.
"""

from __future__ import annotations

from pathlib import Path

from base.untrusted_files import read_json

MODE = "pooling_mode_"
OURS = "lasttoken"


def why_not(folder: Path) -> str:
    """Return why a model is not an embedding model; empty if it is one."""
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return "its folder has no 1_Pooling/config.json"
    given = read_json(path)
    modes = [name.removeprefix(MODE) for name in given if name.startswith(MODE) and given[name]]
    named = given.get("pooling_mode")  # written by newer versions of sentence-transformers
    modes += [named] if isinstance(named, str) else []
    if {*modes} != {OURS}:
        return f"{path} pools by {' and '.join(modes) or 'nothing'}, and only {OURS} is served"
    return ""


def check_embeds(folder: Path, wanted: bool, is_told: bool) -> None:
    """Refuse embeddings from a model that was not trained for them, and text from a model without a
    head.

    `wanted`: the request asks for an embedding. It may be False only for a model without a head.
    `is_told`: the user asserts that the model was trained for embeddings.
    """
    if not wanted:
        raise ValueError(
            "this model was made for embeddings: it has no head, so it cannot generate"
        )
    if not is_told and (why := why_not(folder)):
        raise ValueError(
            f"this model was not made for embeddings: {why}; if it was, start with --embeddings "
            "(Engine: embeds=True)"
        )
