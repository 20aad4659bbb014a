"""The annotated pages of the core: python docs/make/annotated.py"""

import html
import re
from collections import Counter
from pathlib import Path

import pytest

from docs.make import annotated

ROOT = Path(__file__).parents[2]
PAGES = annotated.pages()


def shown(markup: str) -> str:
    return html.unescape(re.sub("<.*?>", "", markup))


@pytest.mark.parametrize("file", annotated.LINKS)
def test_annotated_page_has_the_whole_file(file):
    """Each word of the file appears as often as in the file, and the lines of code are in order."""
    text = (ROOT / file).read_text()
    page = PAGES[file.replace(".py", ".html")].partition("</h1>")[2]
    assert Counter(re.findall(r"\w+", shown(page))) == Counter(re.findall(r"\w+", text))
    code = "\n".join(re.findall(r'(?s)<pre class="code">(.*?)</pre>', page))
    source = iter(text.splitlines())
    assert all(line in source for line in shown(code).splitlines() if line.strip())


def test_links_of_annotated_pages_lead_somewhere():
    details = (ROOT / "web" / "details.js").read_text()
    moments = set()
    for name, page in PAGES.items():
        for target, anchor in re.findall(r'href="([^"#]+)#?([^"]*)"', page):
            if target == "../index.html":
                moments.add(anchor)
            else:
                assert target in PAGES and not anchor, (name, target)
    there = set(re.findall(r'^  \["(\w+)", "', details, re.MULTILINE))
    assert len(there) == 5 and moments - {""} <= there
    assert 'id="Scheduler.plan"' in PAGES["sched.html"]
