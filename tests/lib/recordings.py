"""Recordings of the engine of words, and texts that would break a page."""

import json

from stage import Stage

from screen import record
from screen.state import prompt_of

# The engine of words answers with what stands between the quotes
HOSTILE = (
    '"</script><script>alert(1)</script>"',
    '"<!-- <script> {style} &lt;"',
    '"\u202eevil\u2066 \u2028 \u2029"',
    '"<img src=x onerror=alert(1)>"',
)


def recording(prompts=None, burst: int = 12) -> dict:
    """A burst on the engine of words, which answers with what stands between quotes."""
    stage = Stage(prompts=prompts) if prompts else Stage()
    stage.load().session.obey(f"/burst {burst}")
    stage.finish()
    ids = lambda request: stage.engine.text.ask(prompt_of(request))  # noqa: E731
    return json.loads(record.as_text(record.record(stage.state, {"command": "x"}, ids)))
