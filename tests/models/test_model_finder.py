"""Local models are found without the network, and unsupported ones are listed with the reason."""

import json
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import huggingface_hub
import pytest
from checkpoints import make_checkpoint
from gguf_models import make_pair
from huggingface_hub import constants

import ask
from base.untrusted_files import ModelError
from cli import model_list
from kernels import device
from kernels.device import mx
from models import model_finder as models
from nanobatch import Engine


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Use an empty hub cache, LM Studio folder and Ollama store, and no network. Return their parent folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(models, "LM_STUDIO", (tmp_path / "studio",))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return tmp_path


def cached(home: Path, name: str, **settings) -> Path:
    """Write a checkpoint into the hub cache, in huggingface_hub's layout."""
    repo = home / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("1" * 40)
    (repo / "snapshots" / ("2" * 40)).mkdir(parents=True)  # an older snapshot without files
    return make_checkpoint(repo / "snapshots" / ("1" * 40), **settings)


def refused(model: str, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        models.find(model)
    for word in words:
        assert word in str(caught.value), caught.value


def test_cached_model_needs_no_network(home, monkeypatch):
    """Regression: without a network, each start waited for the hub to time out."""
    folder = cached(home, "someone/tiny")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, **options: pytest.fail("asked")
    )
    assert models.find("someone/tiny") == folder
    with Engine.load("someone/tiny", slots=1, max_len=64):
        pass


@pytest.mark.parametrize(
    "gone", ["tokenizer.json", "model-00002-of-00003.safetensors", "model.safetensors.index.json"]
)
def test_a_download_that_was_interrupted_goes_on(home, monkeypatch, gone):
    """If a model's folder in the cache is incomplete, its download continues."""
    folder = cached(home, "someone/tiny", shards=3)
    (folder / gone).unlink()
    if "index" in gone:
        (folder / "model-00003-of-00003.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: "fetched")
    assert models.find("someone/tiny") == Path("fetched")


def test_lm_studios_folder_is_looked_at_too(home):
    folder = make_checkpoint(home / "studio" / "owner" / "name")
    assert models.find("owner/name") == folder


def in_studio(home: Path, name: str, **settings) -> Path:
    """Write a small GGUF file into LM Studio's folder."""
    file, _ = make_pair(home / "made" / name, num_hidden_layers=1, **settings)
    place = home / "studio" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    return file.rename(place)


def in_ollama(home: Path, name: str, tag: str, **settings) -> Path:
    """Write a small GGUF file into Ollama's store."""
    file, _ = make_pair(home / "made" / f"{name}-{tag}", num_hidden_layers=1, **settings)
    blob = home / "ollama" / "blobs" / f"sha256-{sha256(file.read_bytes()).hexdigest()}"
    manifest = home / "ollama" / "manifests" / "registry.ollama.ai" / name / tag
    for path in (blob, manifest):
        path.parent.mkdir(parents=True, exist_ok=True)
    digest = blob.name.replace("-", ":")
    kind = "application/vnd.ollama.image.model"
    layers = [{"mediaType": "other", "digest": 1}, {"mediaType": kind, "digest": digest}]
    manifest.write_text(json.dumps({"layers": layers}))
    return file.rename(blob)


def test_a_gguf_file_is_found_by_its_path_its_folder_and_its_name(home):
    file = in_studio(home, "owner/Tiny-GGUF/Tiny-Q8_0.gguf")
    in_studio(home, "owner/Tiny-GGUF/mmproj-Tiny-F16.gguf")  # a projector for images
    for name in (str(file), str(file.parent), "owner/Tiny-GGUF", "owner/Tiny-GGUF:q8_0"):
        assert models.find(name) == file
    with Engine.load(str(file.parent), slots=1, max_len=64) as engine:
        assert engine.summary.startswith("Tiny-Q8_0.gguf; llama, ")  # named after the file
    other = in_studio(home, "owner/Tiny-GGUF/Tiny-Q4_0.gguf", kind="Q4_0")
    assert models.find("owner/Tiny-GGUF:Q4_0") == other
    for name in (str(file.parent), "owner/Tiny-GGUF"):
        refused(name, "2 GGUF models", "Tiny-Q4_0.gguf", "name the file")
    refused("owner/Tiny-GGUF:Q6_K", "'Q6_K'", "--list")
    refused(
        "elsewhere/Tiny-3B-GGUF", "not in the cache", "hf download", "mlx-community/Tiny-3B-4bit"
    )
    refused(f"{file}.gguf", "is missing")
    refused(
        str(home / "made" / "owner" / "Tiny-GGUF" / "Tiny-Q8_0.gguf" / "config.json"), "not a GGUF"
    )


def test_ollamas_models_are_found_by_their_names(home):
    first = in_ollama(home, "library/tiny", "latest")
    other = in_ollama(home, "someone/tiny", "1b", kind="Q4_0")
    assert models.find("ollama:tiny") == models.find("ollama:tiny:latest") == first
    assert models.find("ollama:someone/tiny:1b") == other
    refused("ollama:tiny:70b", "'ollama:tiny:70b'", "--list")
    refused("ollama:../../etc/passwd", "--list")
    manifest = home / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.write_text('{"layers": [{"mediaType": 1, "digest": "sha256:../../x"}, 2]}')
    refused("ollama:tiny", "names no weights", "ollama pull")
    with Engine.load("ollama:someone/tiny:1b", slots=1, max_len=64):
        pass


def headless(folder: Path) -> None:
    """Make a checkpoint look like a large embedding model: no head, although its config claims one."""
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["lm_head.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')


def test_list_says_why_a_model_is_not_served(home, monkeypatch, capsys):
    wide = {"hidden_size": 128, "intermediate_size": 256}  # multiples of a quantization block
    cached(home, "a/four", quantize=lambda module: (4, 32), **wide)
    cached(home, "b/other")
    for name, changes in (
        ("c/unknown", {"model_type": "mamba2"}),
        ("c/near", {"model_type": "qwen3_next"}),
        ("d/mrope", {"rope_scaling": {"rope_type": "mrope"}}),
        ("e/strange", {"model_type": ["x" * 5000], "quantization": {"bits": "\x1b[2J"}}),
    ):
        path = cached(home, name) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (cached(home, "f/half") / "model.safetensors").unlink()
    make_checkpoint(home / "studio" / "g" / "studio", model_type="olmo2")
    (home / "studio" / "h" / "gguf").mkdir(parents=True)
    (home / "studio" / "h" / "gguf" / "x.gguf").write_bytes(b"GGUF")
    in_studio(home, "k/gguf/Tiny-Q4_0.gguf", kind="Q4_0")
    in_studio(home, "l/gguf/odd.gguf", fields={"tokenizer.ggml.pre": "other"})
    in_ollama(home, "library/tiny", "latest", arch="qwen2")
    mixed = {"general.file_type": 15}
    in_ollama(home, "library/mixed", "latest", kind="Q5_0", fields=mixed)
    broken = make_checkpoint(home / "studio" / "i" / "broken") / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-5])
    headless(make_checkpoint(home / "studio" / "j" / "vectors", tie_word_embeddings=False))
    assert ask.main(["--list"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: line for line in said.splitlines()}
    assert list(lines)[:2] == ["model", "demo"] and len(lines) == 17
    assert "\x1b" not in said
    for name, part, end in (
        ("demo", " float16 ", "yes"),
        ("demo", " 3M ", "yes"),
        ("a/four", " 4-bit ", "yes"),
        ("b/other", " float32 ", "yes"),
        ("c/unknown", " mamba2 ", "mamba2 is not served"),
        ("c/near", " qwen3_next ", "qwen3_next is not served; qwen3_5 is"),
        ("d/mrope", "", "rope type 'mrope' not supported"),
        ("e/strange", "", "is not served"),
        ("f/half", "", "not fully downloaded"),
        ("g/studio", " olmo2 ", "yes"),
        ("h/gguf:x.gguf", "", "broken: load it to see why"),
        ("i/broken", "", "broken: load it to see why"),
        ("j/vectors", "", "yes"),
        ("k/gguf:Q4_0", " Q4_0 ", "yes"),
        ("l/gguf:odd.gguf", "", "tokenizer 'other' not supported"),
        ("ollama:tiny:latest", " Q8_0 ", "yes"),
        ("ollama:mixed:latest", " Q4_K_M ", "yes"),  # most tensors of a small model are Q5_0
    ):
        assert part in lines[name] and lines[name].endswith(end), lines[name]
    if device.is_batch_invariant():  # as in the files, except for norms, which become float32
        on_disk, in_memory = (float(lines["a/four"].split()[n]) for n in (4, 6))
        assert lines["a/four"].split()[7] == "KiB" and 0.8 < in_memory / on_disk < 1
    monkeypatch.setattr(device, "free_memory", lambda: 100_000)
    ask.main(["--list"])
    assert "KiB of memory" in capsys.readouterr().out


def test_list_survives_a_vanishing_file(home, monkeypatch, capsys):
    """A file may vanish while models are listed, because a download renames the files that it has fetched."""
    gone = cached(home, "a/downloaded") / "model.safetensors"
    stat = Path.stat

    def look(path: Path, **options):
        found = stat(path, **options)
        if path == gone:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "stat", look)
    assert ask.main(["--list"]) == 0
    _, _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("a/downloaded") and line.endswith("not fully downloaded")


def test_list_of_a_folder(home, capsys):
    """Regression: GGUF files were found only where other programs store them."""
    make_checkpoint(home / "a" / "whole")
    in_studio(home, "owner/Tiny-GGUF/Tiny-Q8_0.gguf")
    in_studio(home, "owner/Tiny-GGUF/mmproj-Tiny-F16.gguf")  # a projector for images
    (home / "studio" / "owner" / "again").symlink_to(home)  # a loop
    (home / "studio" / "broken.gguf").write_bytes(b"GGUF")
    (home / "studio" / ".hidden.gguf").write_bytes(b"GGUF")
    assert ask.main(["--list", str(home)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    made = home / "made" / "owner" / "Tiny-GGUF"  # where `make_pair` wrote the files
    lines = [line.split() for line in lines if str(made) not in line]
    assert [(line[0], line[-1]) for line in lines] == [
        (str(home / "studio" / "broken.gguf"), "why"),
        (str(home / "a" / "whole"), "yes"),
        (str(home / "studio" / "owner" / "Tiny-GGUF" / "Tiny-Q8_0.gguf"), "yes"),
    ]
    assert ask.main(["--list", str(home / "hub")]) == 2
    assert "hub: No such file or directory; name a folder" in capsys.readouterr().err
    (home / "hub").mkdir()
    assert ask.main(["--list", str(home / "hub")]) == 0
    assert capsys.readouterr() == ("", f"nanobatch: {home}/hub: no GGUF file and no model folder\n")


def test_list_of_a_folder_that_does_not_answer(home, monkeypatch, capsys):
    """A network folder whose machine is off does not hang the list."""
    hangs = threading.Event()

    def search(root: Path) -> Iterator[Path]:
        yield models.DEMO
        hangs.wait(20)

    monkeypatch.setattr(model_list, "models_in", search)
    monkeypatch.setattr(model_list, "PATIENCE_S", 0.3)
    assert ask.main(["--list", str(home)]) == 0
    hangs.set()
    said = capsys.readouterr()
    assert said.out.splitlines()[1].startswith(str(models.DEMO))
    assert "were not enough; name a folder further down" in said.err
