"""The finished race of the page, as the picture that a message shows beside a link to the page.

    python docs/make/card.py docs/card.png

It is the page itself in a browser, without all that cannot be read at this size. So it needs what
`tests/web/test_browser.py` needs: `pip install -e '.[browser]'`, and Chromium.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZE = {"width": 1200, "height": 630}  # what messengers and networks show whole
LOOK = """
.bar a, .lead, .key, .transport, .hint, [data-answers], section ~ section { display: none !important; }
body { max-width: none; padding: 10px 60px; }
.bar strong { font-size: 26px; }
h1 { font-size: 46px; margin: 22px 0 26px; }
h3, .figures { font-size: 22px; }
.lane { margin-bottom: 20px; }
.verdict { font-size: 23px; line-height: 1.4; max-width: none; }
"""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def draw(out: str, chromium: str) -> None:
    from playwright import sync_api  # not installed with the rest

    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        # Who wants no motion sees the race at its end. The page's own policy allows no other style.
        context = browser.new_context(viewport=SIZE, reduced_motion="reduce", bypass_csp=True)
        tab = context.new_page()
        tab.goto(f"file://{ROOT / 'docs' / 'index.html'}")
        tab.add_style_tag(content=LOOK)
        # The canvases have another size now, and are drawn anew in the next frame
        tab.evaluate("nanobatch.player.change({ looks: 1 }); new Promise(requestAnimationFrame)")
        tab.screenshot(path=out)
        browser.close()


def main() -> int:
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".png"):
        print(
            "docs/make/card.py: name the picture: python docs/make/card.py docs/card.png",
            file=sys.stderr,
        )
        return 2
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), "")
    if not (chromium and find_spec("playwright")):
        words = "it takes Chromium, and pip install -e '.[browser]'"
        print(f"docs/make/card.py: there is no browser; {words}", file=sys.stderr)
        return 2
    draw(sys.argv[1], chromium)
    print(f"{sys.argv[1]}: {Path(sys.argv[1]).stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
