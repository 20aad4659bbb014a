"""Fixtures shared by the tests of the server."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from here import Here
from servers import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`serve.py` with the demo model. After the last test it must be idle, without a traceback in its log,
    and answer correctly."""
    with Server() as server:
        yield server
        assert server.is_idle()
        assert (
            server.chat(temperature=0).json["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7."
        )
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(server.chat, max_tokens=2) for _ in range(4)]
        assert all(each.result().status == 200 for each in asked)
        assert server.process.poll() is None and "Traceback" not in server.log.read_text()


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


@pytest.fixture
def here(engine) -> Iterator[Here]:
    """A server in this process, on a small random model."""
    with Here(engine) as here:
        yield here
