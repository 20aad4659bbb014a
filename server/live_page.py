"""The server's page: the files of `web/` joined to a single self-contained HTML document.

The modules are concatenated without their imports, which works without a bundler as long as no two
modules define the same name. A content security policy allows this script, by its hash, and what it creates
itself (`blob:`, for the lab). Data are embedded as JSON with `<` escaped, so a prompt that contains
`</script>` cannot end the element.
`docs/make/page.py` builds a recording's page in the same way.
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

# The types in a frame of `/watch`. The page needs their field names, because frames contain only values
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
# In dependency order: each module imports only from earlier ones
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
    """Return all modules as one script. Assert that no module imports from a later one."""
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
    """Return a script element that contains the data, escaped so that no text can end the element."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="data-{name}">{text}</script>\n'


def hash_of(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def without(template: str, part: str) -> str:
    """Remove the lines between `<!-- part -->` and `<!-- /part -->` from the template."""
    return re.sub(rf"<!-- {part} -->.*?<!-- /{part} -->\n?", "", template, flags=re.DOTALL)


@cache
def live() -> tuple[str, str]:
    """Return a server's page and its content security policy, which allows requests to this server only."""
    text = page({"shape": SHAPE | {"protocol": watch_frames.PROTOCOL}}, connects="'self'")
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1]
    return text, f"{policy}; frame-ancestors 'none'"


def page(
    data: Mapping[str, Any], *, parts: Mapping[str, str] | None = None, connects: str = "'none'"
) -> str:
    """Return the page as one HTML document.

    `data`: name -> data for the scripts. A string must already be JSON.
    `parts`: name -> HTML to insert into a recording's page; None builds a server's page.
    `connects`: the page's `connect-src` in the content security policy.
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
