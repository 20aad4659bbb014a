"""Files are written atomically: a file has either the complete new content or the old one."""

import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from long_forms import number_of
from processes import run
from servers import COMPLETIONS, Server

from base.atomic_write import check_writable, write_whole

ROOT = Path(__file__).parents[2]
NOBODY = 65534
OLD = "what was there before\n" * 100
KILLS = number_of("KILLS", 12)


def python(code: str, *arguments: object, **how) -> subprocess.CompletedProcess[str]:
    """Run a few lines that write files, in a separate process. As root, which may write anywhere, switch to
    another user."""
    drop = f"os.setgid({NOBODY}); os.setuid({NOBODY})" if os.geteuid() == 0 else ""
    code = f"import os, sys, time\nfrom base.atomic_write import *\n{drop}\n{code}"
    return run("-c", code, *arguments, **how)


def limited() -> None:
    """Limit files to 4,000 bytes, so that the next write to a longer one fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may access."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777)
    shutil.rmtree(folder)


# --- write_whole --------------------------------------------------------------------------------


def test_write_leaves_no_other_file(tmp_path):
    file = tmp_path / "file"
    for text in ("one", "", "ü" * 100_000, "two"):
        write_whole(file, text)
        assert file.read_text() == text and [*tmp_path.iterdir()] == [file]


def test_write_follows_a_link(tmp_path):
    file, link, dangling = tmp_path / "a" / "file", tmp_path / "link", tmp_path / "dangling"
    file.parent.mkdir()
    file.write_text(OLD)
    link.symlink_to(file)
    dangling.symlink_to(Path("a", "other"))
    for each in (link, dangling):
        check_writable(str(each))
        write_whole(each, "new")
        assert each.is_symlink() and each.read_text() == "new"
    assert file.read_text() == "new" and len([*file.parent.iterdir()]) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_an_error_names_the_file():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_whole("/dev/full", "text")


def test_a_new_file_has_the_usual_permissions(tmp_path):
    write_whole(tmp_path / "new", "text")
    (tmp_path / "usual").write_text("text")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_write_to_a_pipe(tmp_path):
    """A pipe is opened only once, because its reader waits for one writer: `--json /dev/stdout`, and `--json
    >(jq .)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    check_writable(str(pipe))
    write_whole(pipe, "x" * 100_000)
    assert reader.communicate(timeout=60)[0] == b"x" * 100_000
    code = "from base.atomic_write import *; check_writable('/dev/stdout'); write_whole('/dev/stdout', 'x')"
    assert run("-c", code).stdout == "x"
    write_whole("/dev/null", "text")
    assert Path("/dev/null").is_char_device()


def test_what_cannot_be_written_is_refused_before(open_folder):
    (open_folder / "folder" / "closed").mkdir(parents=True)
    (open_folder / "folder" / "closed").chmod(0o555)
    (open_folder / "file").write_text(OLD)
    code = """
for name in ("folder", "folder/closed/file", "file/inside", "none/file"):
    try:
        check_writable(f"{sys.argv[1]}/{name}")
    except OSError as error:
        print(type(error).__name__)
"""
    errors = "IsADirectoryError PermissionError NotADirectoryError FileNotFoundError"
    assert python(code, open_folder).stdout.split() == errors.split()


def test_size_limit_keeps_the_old_file(open_folder):
    """Regression: on a full disk the file was empty or truncated, and the exit code was 0."""
    folder = open_folder / "folder"
    folder.mkdir()
    file = folder / "file"
    file.write_text(OLD)
    file.chmod(0o666)
    folder.chmod(0o777)
    code = "write_whole(sys.argv[1], 'x' * 100_000)"
    done = python(code, file, preexec_fn=limited)
    assert done.returncode == 1 and f"File too large: '{file}'" in done.stderr
    assert file.read_text() == OLD and [*folder.iterdir()] == [file]


def test_kill_leaves_the_old_or_the_new_file(tmp_path):
    file = tmp_path / "file"
    texts = ("a" * 3_000_000, "b" * 2_000_000)
    write_whole(file, texts[0])
    dice = random.Random(0)
    code = """
print("begins", flush=True)
while True:
    write_whole(sys.argv[1], "b" * 2_000_000)
    write_whole(sys.argv[1], "a" * 3_000_000)
"""
    cut = 0
    for count in range(30 * KILLS):
        if cut and count >= KILLS:
            break  # on a fast disk a kill rarely hits the middle of a write
        command = [
            sys.executable,
            "-c",
            f"import sys\nfrom base.atomic_write import *\n{code}",
            file,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            process.stdout.readline()
            time.sleep(dice.uniform(0, 0.03))
            process.kill()
        assert file.read_text() in texts
        cut += len([path for path in tmp_path.iterdir() if path.name.startswith(".nanobatch-")])
        for path in tmp_path.glob(".nanobatch-*"):
            path.unlink()
    assert cut, "no kill came in the middle of a write"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_server_survives_an_unwritable_log():
    with Server("--log-file", "/dev/full") as server:
        body = {"prompt": "Hello", "max_tokens": 2}
        assert [server.ask(COMPLETIONS, body).status for _ in range(3)] == [200, 200, 200]
        said = server.says("/dev/full: No space left on device; serving continues")
        assert server.stop() == 0
        assert server.log.read_text().count(said[0]) == 1


# --- the programs -------------------------------------------------------------------------------


def test_screen_on_a_full_disk(tmp_path):
    """Regression: the program reported success with exit code 0, and the earlier files were gone."""
    names = ("record.json", "picture.svg")
    files = [tmp_path / name for name in names]
    for file in files:
        file.write_text(OLD)
    record, picture = files
    options = ("--script", "burst2", "--record", record, "--screenshot", picture)
    # Python would keep truncated bytecode, and the next program would crash on it
    done = run("tui.py", *options, preexec_fn=limited, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "File too large" in line]
    assert len(said) == 2 and all(str(file) in done.stderr for file in files), done.stderr
    assert " holds " not in done.stderr, "it says that it was written"
    assert [file.read_text() for file in files] == [OLD] * 2
    assert sorted(tmp_path.iterdir()) == sorted(files)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_unwritable_output_ends_a_program():
    """Regression: Python flushes again at exit, which gave a traceback and exit code 120."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    how = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "tui.py", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, **how)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("nanobatch: standard output cannot be written: ")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=writer, **how)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
