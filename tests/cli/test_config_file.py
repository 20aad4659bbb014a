"""`--config`: which options each program takes from a file, and the errors for an invalid file."""

import pytest

import serve
from cli import config_file
from cli import options as cli

FILE = """
model = "owner/one"
slots = 2

[serve]
port = 8001
alias = ["gpt-4o", "other"]
embeddings = true

[ask]
temperature = 0.7
chat = false

[models."owner/one"]
max_len = 512

[models."owner/two"]
slots = 8

[models."owner/two".ask]
temperature = 0
"""


def expanded(tmp_path, program: str, *arguments: str, text: str = FILE) -> list[str]:
    (tmp_path / "my.toml").write_text(text)
    parser = cli.CommandLine("serve.py")
    for name in ("alias", "config", "max-len", "model", "port", "slots", "temperature"):
        parser.add_argument(f"--{name}", action="append", default=[])
    for name in ("chat", "embeddings"):
        parser.add_argument(f"--{name}", action="store_true")
    given = ["--config", str(tmp_path / "my.toml"), *arguments]
    words = config_file.expand(parser, program, given)
    assert words[-len(given) :] == given
    return words[: -len(given)]


@pytest.mark.parametrize(
    "program, arguments, words",
    [
        ("screen", "", "--model=owner/one --slots=2 --max-len=512"),
        ("ask", "", "--model=owner/one --slots=2 --temperature=0.7 --max-len=512"),
        ("ask", "--model owner/two", "--model=owner/one --slots=8 --temperature=0"),
        ("screen", "--model demo", "--model=owner/one --slots=2"),
        (
            "serve",
            "",
            "--model=owner/one --slots=2 --port=8001 --alias=gpt-4o --alias=other --embeddings "
            "--max-len=512",
        ),
    ],
)
def test_special_table_wins(tmp_path, program, arguments, words):
    assert expanded(tmp_path, program, *arguments.split()) == words.split()


def test_command_line_wins(tmp_path):
    (tmp_path / "my.toml").write_text("slots = 3\nport = 8001\nmax-tokens = 99\nalias = ['a']\n")
    file = str(tmp_path / "my.toml")
    args = serve.parse_arguments(["--config", file, "--port", "8002", "--alias", "b"])
    found = (args.slots, args.port, args.max_tokens, args.alias)
    assert found == (3, 8002, 99, ["a", "b"])


@pytest.mark.parametrize(
    "text, said",
    [
        ("slot_count = 3", "serve has no option 'slot-count'"),
        ("slot = 3", "serve has no option 'slot'"),
        ('"api-key=x" = "y"', "serve has no option 'api-key=x'"),
        ('"api-key x" = "y"', "serve has no option 'api-key x'"),
        ('"" = "y"', "serve has no option ''"),
        ("[model.demo]\nslots = 3", "[model] is not a table; use models, ask, serve, screen"),
        ("slots = 0", "--slots = '0', but it must be"),
        ("slots = 2026-01-01", "slots: give a string, a number"),
        ("slots =", "Invalid value"),
        (None, "No such file or directory"),
        ("config = 'other.toml'", "config belongs on the command line"),
        ("[serve]\nbook = 'mine'", "book belongs on the command line"),
        ("models = 5", "models = 5, but it must be a table"),
        ("[models]\nother = 5", "models.other = 5, but it must be a table"),
        ("[models.demo]\nask = 5", "serve has no option 'ask'"),
        ("policy = []", "policy = [], but it takes one value"),
        ("api-key = []", "api-key = [], but it takes one value"),
        ("api-key = false", "api-key = False, but it is not a switch"),
        ("embeddings = []", "embeddings = [], but it takes one value"),
        ("typo = false", "typo = False, but it is not a switch"),
        ("trust-proxy = []\ntrust_proxy = ['::1']", "trust_proxy is given twice"),
        ("a = " + "[" * 3000, "nested too deep"),
        ("a = " + "1" * 5000, "4300 digits"),
    ],
)
def test_wrong_file_gets_one_line(tmp_path, capsys, text, said):
    file = tmp_path / "my.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as exit:
        serve.parse_arguments(["--config", str(file)])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and line.startswith("nanobatch: ") and said in line


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--conf {0}", "unrecognized arguments: --conf"),
        ("--conf={0} --port 8001", "unrecognized arguments: --conf"),
        ("--config {0} --config {1}", "--config is given twice"),
        ("--config {1} --config={0}", "--config is given twice"),
        ("--config=", "No such file or directory"),
    ],
)
def test_no_file_is_dropped(tmp_path, capsys, arguments, said):
    """Regression: the file with the key was silently ignored, so the server accepted every client."""
    files = [tmp_path / "key.toml", tmp_path / "other.toml"]
    files[0].write_text("api-key = 'secret'\n")
    files[1].write_text("slots = 2\n")
    with pytest.raises(SystemExit) as exit:
        serve.parse_arguments(arguments.format(*files).split())
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and said in line


def test_special_table_wins_in_either_spelling(tmp_path):
    text = "trust_proxy = ['127.0.0.1']\n[serve]\ntrust-proxy = []\n"
    (tmp_path / "my.toml").write_text(text)
    assert serve.parse_arguments(["--config", str(tmp_path / "my.toml")]).trust_proxy == []
