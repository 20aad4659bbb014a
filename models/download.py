"""Download a model from the hub and show the progress in one line.

The small files are fetched first, in parallel, then the weights, one file at a time. So Ctrl-C takes
effect immediately, and the next run resumes the interrupted file.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from base.status_line import StatusLine

LOOK_S = 0.5  # seconds between two updates of the line
RATE_S = 20.0  # seconds over which the rate is measured, because files grow by 10 MB at a time
MB = 1_000_000


def download(repo: str, small: Sequence[str], weights: str) -> Path:
    """Download a repository into the hub's cache and return its folder. Skip files that are cached.

    `small`, `weights`: patterns of the files to fetch.
    """
    import huggingface_hub as hub
    from huggingface_hub import utils

    # The hub's own progress bars would overwrite our line
    bars_are_on = not utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        folder = Path(hub.snapshot_download(repo, allow_patterns=[*small]))
        # The folder is named after the commit
        info = hub.HfApi().model_info(repo, revision=folder.name, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = [name for name in sizes if fnmatch(name, weights) and not (folder / name).exists()]
        total = sum(sizes[name] for name in files)
        with DownloadProgress(repo, folder.parents[1] / "blobs", total):
            for name in files:
                hub.hf_hub_download(repo, name, revision=folder.name)
        return folder
    finally:
        if bars_are_on:
            utils.enable_progress_bars()


class DownloadProgress:
    """A status line during a download: the amount downloaded so far, and the rate.

    `folder`: the files are downloaded into it, and its growth is shown.
    """

    def __init__(self, repo: str, folder: Path, total: int):
        self.repo = repo
        self.folder = folder
        self.total = total
        self.line = StatusLine()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="download progress", daemon=True)

    def __enter__(self) -> None:
        if self.total and not sys.stderr.isatty():  # a log gets one line per download
            print(f"nanobatch: {self.words(0, None)}", file=sys.stderr, flush=True)
        self.before = size_of(self.folder)
        self.thread.start()

    def __exit__(self, *exception: object) -> None:
        self.done.set()
        self.thread.join()
        self.line.show("")

    def _run(self) -> None:
        looks = deque([(time.monotonic(), 0)])
        while self.total and not self.done.wait(LOOK_S):
            now, came = time.monotonic(), size_of(self.folder) - self.before
            looks.append((now, came))
            while now - looks[0][0] > RATE_S:
                looks.popleft()
            began, before = looks[0]
            self.line.show(self.words(came, (came - before) / (now - began) if came else None))

    def words(self, came: int, rate: float | None) -> str:
        """Return the text of the line, such as "downloading owner/name: 512 of 942 MB, 23.0 MB/s"."""
        done = f"{came / MB:,.0f} of " if came else ""
        speed = "" if rate is None else f", {rate / MB:,.1f} MB/s"
        return f"downloading {self.repo}: {done}{self.total / MB:,.0f} MB{speed}"


def size_of(folder: Path) -> int:
    """Return the total size of a folder's files in bytes."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # it was renamed after it was listed
            continue
    return total
