"""Recordings of the word engine, and texts whose markup or form could break a page."""

import json

from screen_stage import Stage

from screen import export_recording as record
from screen.state import prompt_of

# The word engine answers with the text between the quotes
HOSTILE = (
    '"</script><script>alert(1)</script>"',
    '"<!-- <script> {style} &lt;"',
    '"\u202eevil\u2066 \u2028 \u2029"',
    '"<img src=x onerror=alert(1)>"',
)

# Texts like those of real models, and harder cases
TEXTS = (
    "1. Blisse\n2. Flame\n\n\n3. Ember\r\n4. Ash\r5. Coal\n",
    "\n" * 60 + "behind sixty empty lines",
    "def f(x):\n\tif x:\n\t\treturn [\n\t\t\tx\n\t\t]\n" * 4,
    "name\tyear\tplace\t\t\t" * 30,
    "\x0bvertical\x0cform\x1b[2Jescape\x85next\u2028line\u2029paragraph\x7f\x00" * 4,
    "键值缓存把键和值留在内存里，每一步只算一个记号。" * 12,
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇨🇭" * 30,
    "שלום עולם, זה ארוך.\nשורה שנייה\n" * 12,
    "مرحبا بالعالم، هذا نص طويل.\n" * 12,
    "the word שלום and the word مرحبا in a line " * 8,
    ("z" + "\u0301\u0327\u0335\u0360\u036f" * 4 + "algo ") * 10 + "e\u0301" * 200,
    "W" * 2000,
    "iiii" * 500,
    "http://example.com/" + "a-long-path/" * 100,
    "क्षत्रिय ภาษาไทยไม่มีช่องว่าง བོད་སྐད " * 12,
    "<b>no markup</b> &amp; {style} `code` | a | table |\n|---|---|\n" * 6,
)


def recording(prompts=None, burst: int = 12, **options: int) -> dict:
    """Record a burst on the word engine, which answers with the words between quotes."""
    stage = Stage(prompts=prompts, **options) if prompts else Stage()
    stage.load().session.obey(f"/burst {burst}")
    stage.finish()
    ids = lambda request: stage.engine.text.ask(prompt_of(request))  # noqa: E731
    return json.loads(record.as_text(record.record(stage.state, {"command": "x"}, ids)))
