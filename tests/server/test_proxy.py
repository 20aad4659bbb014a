"""Clients that come through a proxy. The test is the proxy: it sends what nginx would."""

import ipaddress

import pytest
from servers import COMPLETIONS, Server

from server.proxy import client_of, seen_through

ASKED = {"prompt": "Count", "max_tokens": 2}
TRUSTED = [ipaddress.ip_network(each) for each in ("127.0.0.1", "10.0.0.0/8", "fd00::/8")]


@pytest.mark.parametrize(
    "peer, forwarded, client",
    [
        ("127.0.0.1", "192.0.2.7", "192.0.2.7"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("192.0.2.9", "192.0.2.7", "192.0.2.9"),  # it is no proxy of ours, whatever it says
        ("127.0.0.1", "192.0.2.1, 192.0.2.7", "192.0.2.7"),  # the first was sent by the client
        ("127.0.0.1", "192.0.2.1, 192.0.2.7, 10.1.2.3", "192.0.2.7"),  # two proxies
        ("127.0.0.1", "10.1.2.4, 10.1.2.3", "10.1.2.4"),  # all are proxies: the first of them
        ("127.0.0.1", "192.0.2.1, unknown", "127.0.0.1"),
        ("127.0.0.1", "192.0.2.1,, 10.0.0.1", "10.0.0.1"),
        ("127.0.0.1", "192.0.2.7:4711", "192.0.2.7"),
        ("127.0.0.1", "[2001:db8::7]:4711", "2001:db8::7"),
        ("::ffff:127.0.0.1", "2001:db8::7", "2001:db8::7"),
        ("fd00::1", "::ffff:192.0.2.7", "192.0.2.7"),
        ("", "192.0.2.7", ""),
    ],
)
def test_client_is_the_last_address_that_is_no_proxy(peer, forwarded, client):
    assert client_of(peer, forwarded, TRUSTED) == client


def test_header_counts_for_nothing_without_the_option():
    async def serve(connection, head): ...

    assert seen_through(serve, ()) is serve


def test_log_names_the_client_and_not_the_proxy():
    """Behind nginx all users were one client, for the log, for limits and for `--policy fair`."""
    with Server("--trust-proxy", "127.0.0.1", "--policy", "fair") as server:
        for address in ("192.0.2.7", "192.0.2.1, 192.0.2.8"):
            answer = server.ask(COMPLETIONS, ASKED, x_forwarded_for=address)
            assert answer.status == 200
        server.ask(COMPLETIONS, ASKED)
        for client in ("192.0.2.7", "192.0.2.8", "127.0.0.1"):
            server.says(rf"client={client} route={COMPLETIONS}")


def test_address_that_is_none_gets_one_line():
    server = Server("--trust-proxy", "nginx", wait=False)
    assert server.process.wait(60) == 2
    assert server.log.read_text() == (
        "nanobatch: --trust-proxy 'nginx' is neither an address nor a network such as 10.0.0.0/8\n"
    )
