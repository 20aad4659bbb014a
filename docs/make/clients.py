"""A picture of the screen under HTTP load: python docs/make/clients.py docs/clients.svg --size 120x40

The door and its screen run in this process. A few clients ask over HTTP: some are answered, some
refused, one hangs up. In the midst of it the engine is paused, and the picture is taken.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import tui  # noqa: E402
from parts.files import write_whole  # noqa: E402
from screen.session import Session  # noqa: E402
from screen.state import State  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STORY = "Tell me a long story about a fox and a lantern."
SHORT = (
    "Count from 3 to 12.",
    "What is 17 + 6?",
    "Reverse the word stone.",
    "Why batch?",
    "What is a slot?",
)
WRONG = (
    (CHAT, {"messages": [], "n": 0}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "What is the weather?"}],
            "tools": [{"type": "function"}],
        },
    ),
    ("/v1/embeddings", {"input": "a text"}),
    (COMPLETIONS, {"prompt": "Once upon a time", "temperature": "hot"}),
)


def post(address: str, path: str, body: dict) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def chat(text: str, **fields) -> dict:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def traffic(address: str) -> None:
    """What several programs might ask, in the order of the picture."""
    for path, body in WRONG[:2]:
        post(address, path, body).read()
    askers = [
        threading.Thread(target=lambda t=text: post(address, CHAT, chat(t)).read())
        for text in SHORT
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    gone = post(address, CHAT, chat(STORY, stream=True))
    gone.read(200)
    gone.close()  # this hangs up, since nothing else holds the connection
    for path, body in WRONG[2:]:
        post(address, path, body).read()
    for i in range(6):  # two more than there are slots
        name = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn")[i]
        story = chat(f"{STORY[:-1]} named {name}.", stream=i % 3 > 0, max_tokens=400)
        threading.Thread(
            target=lambda story=story: post(address, CHAT, story).read(), daemon=True
        ).start()
        time.sleep(0.05)


def main(arguments: list[str]) -> None:
    path, *options = arguments
    script = ["--script", options.pop(0)] if options and not options[0].startswith("-") else []
    args = tui.parse_arguments(["--serve", "0", "--screenshot", path, *script, *options])
    room = tui.open_room(args)
    room.start()
    app = tui.Screen(Session(room, State(args.model)), args.script)

    def direct() -> None:
        while room.look().stage != "ready":
            time.sleep(0.05)
        traffic(room.door.address)
        time.sleep(0.5)
        room.pause(True)
        time.sleep(0.5)
        app.call_from_thread(app.take_picture)

    threading.Thread(target=direct, daemon=True).start()
    app.run(headless=True, size=args.size)
    room.door.close()
    room.stop(1)
    write_whole(path, app.picture)


if __name__ == "__main__":
    main(sys.argv[1:])
