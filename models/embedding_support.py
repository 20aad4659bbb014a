"""What a model was made for: answers, or vectors of texts.

The problem. Any model has a state behind a text's last token, and from nearly all models that state is
useless as a vector: nobody has trained it. A client that gets it does not notice. And a model that
was made for vectors may have no head to answer with.

The way out. The library that such models come from writes beside the weights how a vector is taken:

    modules.json             Transformer, Pooling, Normalize
    1_Pooling/config.json    {"pooling_mode_lasttoken": true, ...}

What this file keeps. A wish that a model was not made for is refused, with the reason. Vectors are the
last token's state behind the last norm, scaled to the length 1 (`runtime/embeddings.py`).

Where next: `Engine.embed` in `nanobatch.py`.
"""

from __future__ import annotations

from pathlib import Path

from runtime.files import read_json

MODE = "pooling_mode_"
OURS = "lasttoken"


def why_not(folder: Path) -> str:
    """Why a model's files do not make it one for embeddings; empty if they do."""
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return "its folder has no 1_Pooling/config.json"
    given = read_json(path)
    modes = [name.removeprefix(MODE) for name in given if name.startswith(MODE) and given[name]]
    named = given.get("pooling_mode")  # as newer versions of the library write
    modes += [named] if isinstance(named, str) else []
    if {*modes} != {OURS}:
        return f"{path} pools by {' and '.join(modes) or 'nothing'}, and only {OURS} is served"
    return ""


def check_embeds(folder: Path, wanted: bool, is_told: bool) -> None:
    """Refuse vectors of a model that has none, and answers of one without a head."""
    if not wanted:
        raise ValueError(
            "this model was made for embeddings: it has no head, so it answers nothing"
        )
    if not is_told and (why := why_not(folder)):
        raise ValueError(
            f"this model was not made for embeddings: {why}; if it was, start with --embeddings "
            "(Engine: embeds=True)"
        )
