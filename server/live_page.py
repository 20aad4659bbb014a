"""The server's page: the files of `web/` joined to one HTML text that needs nothing else.

The modules are concatenated without their imports (no bundler is needed as long as each name is
used once). A content security policy allows only this script, by its hash. Data are JSON in
elements of their own with `<` escaped, so no prompt with `</script>` can end the element.
`docs/make/page.py` makes the page of a recording in the same way.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engine import watch_frames
from engine.prefill_progress import PrefillProgress
from engine.server_snapshot import ServerView
from engine.snapshot import Limits, Metrics, RequestView, SlotView, Snapshot, StepView

# Fields of the views in a frame of `/watch`, by type: the page reads frames by names.
VIEWS = (
    watch_frames.Frame,
    ServerView,
    Snapshot,
    SlotView,
    PrefillProgress,
    RequestView,
    Metrics,
    StepView,
    Limits,
)
SHAPE = {view.__name__: watch_frames.names_of(view) for view in VIEWS}
FOLDER = Path(__file__).parent.parent / "web"
# Each module imports only from those before it.
MODULES = (
    "recording",
    "words",
    "elements",
    "draw",
    "player",
    "lane_view",
    "details",
    "live",
    "code",
    "markdown",
    "talks",
    "attachments",
    "chat",
    "lab",
    "game",
    "main",
)
IMPORT = re.compile(r"^import (?:[^;]*?) from \"\./(\w+)\.js\";\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) )", re.MULTILINE)


def script(modules: Iterable[str] = MODULES) -> str:
    """All modules as one. An import from a later module is a mistake of ours."""
    out = []
    known: set[str] = set()
    for name in modules:
        text = (FOLDER / f"{name}.js").read_text(encoding="utf-8")
        asked = set(IMPORT.findall(text))
        assert asked <= known, f"{name}.js imports {asked - known}, which come later"
        known.add(name)
        out.append(f"// --- {name}.js\n\n" + EXPORT.sub("", IMPORT.sub("", text)).strip())
    return "\n" + "\n\n".join(out) + "\n"


def embedded(name: str, data: Any) -> str:
    """Data as an element. No text in the data can end it."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="data-{name}">{text}</script>\n'


def hash_of(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def without(template: str, part: str) -> str:
    """The template without the lines between `<!-- part -->` and `<!-- /part -->`."""
    return re.sub(rf"<!-- {part} -->.*?<!-- /{part} -->\n?", "", template, flags=re.DOTALL)


@cache
def live() -> tuple[str, str]:
    """The page of a server and its policy: it may send requests to this server only."""
    text = page({"shape": SHAPE | {"protocol": watch_frames.PROTOCOL}}, connects="'self'")
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1]
    return text, f"{policy}; frame-ancestors 'none'"


def page(
    data: Mapping[str, Any], *, parts: Mapping[str, str] | None = None, connects: str = "'none'"
) -> str:
    """One HTML text.

    `data`: data for the scripts, by name. A string is JSON already.
    `parts`: HTML of our own for a recording, by name; None: a server's page.
    `connects`: the addresses that the page may connect to, as in a content security policy.
    """
    template = (FOLDER / "index.html").read_text(encoding="utf-8")
    template = without(template, "story" if parts is None else "live")
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    code = script()
    rules = (
        "default-src 'none'",
        f"script-src {hash_of(code)} 'wasm-unsafe-eval' blob:",
        f"style-src {hash_of(style)}",
        f"connect-src {connects}",
        "worker-src blob:",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    texts = {
        "policy": "; ".join(rules),
        "style": style,
        "data": "".join(embedded(name, value) for name, value in data.items()),
        "script": code,
        **(parts or {}),
    }
    return re.sub(r"\{(\w+)\}", lambda found: texts[found[1]], template)
