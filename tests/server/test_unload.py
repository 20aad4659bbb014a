"""An idle server unloads its weights and reports it."""

import pytest
from servers import Server
from waiting import wait_for

import serve

QUESTION = {"messages": [{"role": "user", "content": "Count from 3 to 7."}], "temperature": 0}
GONE = "idle for 1 s: weights and slab are unloaded until the next request"


def test_idle_server_unloads_and_reloads():
    with Server("--unload-after", "1") as server:

        def answer() -> str:
            reply = server.ask("/v1/chat/completions", QUESTION)
            return reply.json["choices"][0]["message"]["content"]

        assert answer() == "3, 4, 5, 6, 7."
        wait_for(lambda: server.ask("/health").json["status"] == "unloaded")
        assert server.ask("/health").status == 200
        assert answer() == "3, 4, 5, 6, 7."
        streamed = server.ask("/v1/chat/completions", QUESTION | {"stream": True})
        assert len(streamed.events) > 5
        said = server.log.read_text()
    assert GONE in said and "the weights are loaded again" in said and "Traceback" not in said


@pytest.mark.parametrize("given", ["0", "-1", "soon", "1.5"])
def test_wrong_unload_time_is_refused(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        serve.parse_arguments([f"--unload-after={given}"])
    said = capsys.readouterr().err
    assert "--unload-after" in said and given in said and said.count("\n") == 1
