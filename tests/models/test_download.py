"""Downloads from a local stand-in for the hub: one line of progress, Ctrl-C, and no network."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from hub_stand_in import COMMIT, Hub
from huggingface_hub import constants, errors

from base.untrusted_files import ModelError
from models import download, model_finder

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"downloading owner/tiny: [\d,]+ of 8 MB, [\d.]+ MB/s")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A repository with two shards of 4 MB."""
    folder = make_checkpoint(tmp_path / "tiny", shards=2)
    for path in folder.glob("model-*.safetensors"):
        path.write_bytes(path.read_bytes().ljust(4_000_000, b"\0"))
    (folder / "model.bin").write_bytes(b"nobody reads this")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_finder, "LM_STUDIO", ())
    return tmp_path / "cache" / "models--owner--tiny"


def meet(monkeypatch, address: str) -> None:
    """Use this address as the hub from now on."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_the_progress_of_a_download_is_one_line(tiny, cache, monkeypatch):
    """Regression: the hub's library drew a progress bar for each file, on top of each other."""
    shown = threading.Event()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(download, "LOOK_S", 0.01)
    write = terminal.write

    def watched(text: str) -> int:
        if LINE.search(text):
            shown.set()
        return write(text)

    terminal.write = watched
    pause = lambda name, sent: shown.wait(20) if "-00002-" in name and sent else None  # noqa: E731
    with Hub(tiny, pause) as hub:
        meet(monkeypatch, hub.address)
        folder = model_finder.find("owner/tiny")
    assert folder == cache / "snapshots" / COMMIT and model_finder.is_whole(folder)
    assert "model.bin" not in hub.fetched
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[0] == "" and lines[-1] == "", "the line is cleared"
    assert LINE.fullmatch(lines[-2]) and all(line.startswith("downloading") for line in lines[1:-1])


def test_a_log_has_one_line_of_a_download(tiny, cache, monkeypatch, capsys):
    with Hub(tiny) as hub:
        meet(monkeypatch, hub.address)
        model_finder.find("owner/tiny")
    assert capsys.readouterr().err == "nanobatch: downloading owner/tiny: 8 MB\n"


def test_a_download_goes_on_after_ctrl_c(tiny, cache, tmp_path):
    """Regression: Ctrl-C took effect only after all files in progress were complete."""
    is_cut = True

    def pause(name: str, sent: int) -> None:
        if is_cut and "-00002-" in name and sent:
            running.send_signal(signal.SIGINT)
            running.wait(20)

    with Hub(tiny, pause) as hub:
        environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(cache.parent)}
        command = [sys.executable, "ask.py", "--model", "owner/tiny", "--max-tokens", "1", "hello"]
        how = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}
        running = subprocess.Popen(command, **how)
        _, said = running.communicate(timeout=60)
        assert running.returncode == 130 and "Traceback" not in said
        assert not list(cache.rglob("*.incomplete")), "nobody would ever finish it"
        assert "model-00001-of-00002.safetensors" in hub.fetched
        is_cut = False
        hub.fetched.clear()
        with pytest.MonkeyPatch.context() as patched:
            meet(patched, hub.address)
            patched.setattr(constants, "HF_HUB_CACHE", str(cache.parent))
            assert model_finder.is_whole(model_finder.find("owner/tiny"))
        assert hub.fetched == ["model-00002-of-00002.safetensors"], "the other one is there"


def test_a_fault_of_ours_is_not_taken_for_the_networks(cache, monkeypatch):
    def faulty(*args: object) -> None:
        raise TypeError("a fault of ours")

    monkeypatch.setattr(model_finder, "download", faulty)
    with pytest.raises(TypeError, match="a fault of ours"):
        model_finder.find("owner/tiny")


@pytest.mark.parametrize(
    "fault",
    [
        OSError(28, "No space left on device"),
        errors.HTTPError("502"),
        errors.XetDownloadError("reset"),
    ],
)
def test_a_fault_of_network_or_disk_is_one_line(fault, cache, monkeypatch):
    def failing(*args: object) -> None:
        raise fault

    meet(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(model_finder, "download", failing)
    with pytest.raises(ModelError, match="could not be downloaded"):
        model_finder.find("owner/tiny")


@pytest.mark.parametrize("is_begun", [False, True])
def test_without_a_network_a_line_says_so(tiny, cache, monkeypatch, is_begun):
    """The line also appears if an earlier download fetched only some of the files."""
    if is_begun:
        with Hub(tiny) as hub:
            meet(monkeypatch, hub.address)
            model_finder.find("owner/tiny")
        next(cache.rglob("snapshots/*/model-00002-*")).unlink()
    meet(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(ModelError) as caught:
        model_finder.find("owner/tiny")
    assert "check the network, or name a folder" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
