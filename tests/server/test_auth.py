"""Who may connect, submit and watch: host names, origins, keys, and clients behind a proxy."""

import ipaddress
import json

import pytest
from here import Here
from servers import CHAT, COMPLETIONS, MESSAGES
from waiting import wait_for

import serve
import tui
from server import auth
from server.forwarded_for import client_of, seen_through
from server.http import Options

BODY = {"prompt": "Hello", "max_tokens": 1}
SAID = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def key(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}".encode().decode("latin-1")}


def test_options_reach_the_server(monkeypatch, capsys):
    monkeypatch.setenv("NANOBATCH_API_KEY", "kéy")
    given = "--watch-key eye --allow-host llm.example --alias gpt-4o --trust-proxy 10.0.0.0/8"
    given += " --max-tokens 99 --allow-host app://obsidian.md"
    args = serve.parse_arguments(given.split())
    server = serve.bind(args, "127.0.0.1", 0, "")
    proxies = (ipaddress.ip_network("10.0.0.0/8"),)
    names = (("llm.example", "app://obsidian.md"), ("gpt-4o",))
    assert server.options == Options("127.0.0.1", 0, "kéy", "eye", *names, proxies, 99)
    server.close()
    screen = tui.parse_arguments(["--serve", "0", *given.split()])
    server = serve.bind(screen, *screen.serve, "")
    assert server.options == Options("127.0.0.1", 0, "kéy", "eye", *names, proxies, 99)
    server.close()
    assert not capsys.readouterr().err


def test_a_limit_of_answers_needs_a_server(capsys):
    with pytest.raises(SystemExit):
        tui.parse_arguments(["--max-tokens", "99"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "--max-tokens" in line and "--serve" in line and "/set max=99" in line


@pytest.mark.parametrize("value", ["", "key\n"])
@pytest.mark.parametrize("name", ["API", "WATCH"])
@pytest.mark.parametrize("program", [serve.parse_arguments, tui.parse_arguments])
def test_empty_key_in_the_environment_is_refused(monkeypatch, capsys, program, name, value):
    """Regression: a variable without a value, for example in a compose file, opened the server to
    everybody."""
    monkeypatch.setenv(f"NANOBATCH_{name}_KEY", value)
    with pytest.raises(SystemExit) as exit:
        program([])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and f"NANOBATCH_{name}_KEY is empty" in line
    args = program([f"--{name.lower()}-key", "given"])
    assert vars(args)[f"{name.lower()}_key"] == "given"


def test_open_server_without_a_key_warns(capsys):
    server = serve.bind(serve.parse_arguments([]), "0.0.0.0", 0, "")
    server.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanobatch: without --api-key everybody")
    for word in ("send requests", "read texts", "--allow-host"):
        assert word in line


# --- names and origins ----------------------------------------------------------------------------


def test_host_is_checked_on_loopback(here):
    """The owner of a web page can point its host name at 127.0.0.1, which makes the page's requests
    same-origin (DNS rebinding)."""
    for host in ("localhost", "127.0.0.1:80", "[::1]:8000", "LOCALHOST:8000"):
        assert here.ask("/v1/models", Host=host).status == 200, host
    foreign = ("evil.example", "localhost.evil.example", "127.0.0.1.evil", "[", "0.0.0.0")
    for host in (*foreign, "evil.example:80@localhost"):
        reply = here.ask("/v1/models", Host=host)
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed"), host


def test_foreign_pages_are_refused(engine):
    """Host and Origin are equal for a page whose owner has pointed its host name at this server's address
    (DNS rebinding)."""
    with Here(engine, host="0.0.0.0", allow_hosts=("llm.example",)) as everywhere:
        everywhere.host = "127.0.0.1"
        for host, origin, status in (
            ("evil.example", "http://evil.example", 403),
            ("evil.example:80", "http://evil.example:80", 403),
            (f"127.0.0.1:{everywhere.port}", "http://evil.example", 403),
            ("llm.example", "https://llm.example", 200),
            (
                "10.0.0.5:8000",
                "http://10.0.0.5:8000",
                200,
            ),  # a DNS name could be the attacker's, an address cannot
            ("[fe80::1]:8000", "http://[fe80::1]:8000", 200),
            ("[fe80::1", "http://[fe80::1", 403),
            ("box.example", "", 200),  # not from a web page
        ):
            headers = {"Origin": origin} if origin else {}
            reply = everywhere.ask(COMPLETIONS, BODY, Host=host, **headers)
            assert reply.status == status, (host, origin, reply)
            if status == 403:
                assert reply.error["code"] == "origin_not_allowed"
                assert "access-control-allow-origin" not in reply.headers


def test_local_pages_are_allowed(here):
    asked = {"Access_Control_Request_Method": "POST"}
    # A byte above 127 used to leave a preflight without a response
    asked["Access_Control_Request_Headers"] = "authorization,x-stainless-os,x-\xe9"
    for origin in ("http://localhost:3000", "http://127.0.0.1:8080", "https://localhost"):
        reply = here.ask(CHAT, method="OPTIONS", Origin=origin, **asked)
        assert reply.status == 200 and reply.headers["access-control-allow-origin"] == origin
        assert "POST" in reply.headers["access-control-allow-methods"]
        allowed = reply.headers["access-control-allow-headers"]
        assert allowed == asked["Access_Control_Request_Headers"]
        reply = here.ask("/v1/models", Origin=origin)
        assert reply.headers["access-control-allow-origin"] == origin
        # Without these a page's client can read neither the request id nor when to retry.
        assert reply.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After"
        refused = here.ask(CHAT, b"{}", Origin=origin)
        assert refused.status == 400 and refused.headers["access-control-allow-origin"] == origin
    foreign = ("http://evil.example", "null", "http://localhost.evil.example", "file://", "[")
    for origin in (*foreign, "http://[", "javascript://localhost/"):
        reply = here.ask(COMPLETIONS, BODY, Origin=origin)
        assert reply.status == 403 and "access-control-allow-origin" not in reply.headers


def test_apps_are_allowed_by_their_exact_origin(engine):
    """Regression: the refusal of an app, such as an extension of a browser, advised `--allow-host`, which took
    only hosts."""
    apps = ("app://obsidian.md", "chrome-extension://abcdef")
    with Here(engine, allow_hosts=(*apps, "null")) as here:
        for origin in apps:
            for extra in ({}, {"method": "OPTIONS", "Access_Control_Request_Method": "POST"}):
                reply = here.ask(COMPLETIONS, BODY, Origin=origin, **extra)
                assert reply.status == 200
                assert reply.headers["access-control-allow-origin"] == origin
            assert here.ask("/watch", Origin=origin).status == 403
        others = ("app://obsidian.md:1", "app://obsidian.mdx", "apps://obsidian.md", "obsidian.md")
        for origin in (*others, "http://obsidian.md", "http://app://obsidian.md"):
            reply = here.ask(COMPLETIONS, BODY, Origin=origin)
            assert reply.status == 403 and "access-control-allow-origin" not in reply.headers
            assert "--allow-host adds" in reply.error["message"]
        for origin in ("null", "file://"):  # every local file and sandboxed frame has this one
            reply = here.ask(COMPLETIONS, BODY, Origin=origin)
            assert reply.status == 403 and "--allow-host" not in reply.error["message"]
        assert here.ask("/v1/models", Host=apps[0]).status == 403


# --- keys -----------------------------------------------------------------------------------------


def test_api_key_protects_all_but_health(engine):
    with Here(engine, api_key="kéy", watch_key="eye", allow_hosts=("llm.example",)) as guarded:
        assert guarded.ask("/health").status == 200
        plain = {"Authorization": "kéy".encode().decode("latin-1")}
        for path in ("/v1/models", "/metrics", "/watch", "/nope", CHAT):
            for headers in ({}, key("wrong"), plain, key("")):
                reply = guarded.ask(path, **headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
                assert reply.headers["www-authenticate"] == "Bearer"
        assert guarded.ask("/v1/models", **key("kéy")).status == 200
        assert guarded.ask("/v1/models", **key("eye")).status == 401  # this key is for /watch only
        assert guarded.ask("/v1/models", Host="llm.example", **key("kéy")).status == 200


def test_x_api_key_header(engine):
    """Anthropic's clients send this header, and expect errors in their own format."""
    with Here(engine, api_key="secret") as guarded:
        for headers in ({"x_api_key": "secret"}, key("secret")):
            assert guarded.ask(MESSAGES, SAID, **headers).status == 400  # the model has no template
        for headers in ({}, {"x_api_key": "wrong"}, {"Authorization": "Basic secret"}):
            reply = guarded.ask(MESSAGES, SAID, **headers)
            assert (reply.status, reply.error["type"]) == (401, "authentication_error")
            assert reply.json["type"] == "error"


# --- /watch ---------------------------------------------------------------------------------------


def watched(engine, head: list[str], version: str = "1.1", **keys) -> str:
    """Return what `/watch` shows: "texts", "figures" or "refused"."""
    with Here(engine, allow_hosts=("llm.example",), **keys) as here:
        line = here.line().send("\n".join([f"GET /watch HTTP/{version}", *head, "", ""]))
        if line.until(b"\r\n").split()[1] != b"200":
            line.until(b'"origin_not_allowed"')
            return "refused"
        line.until(b"event: hello\ndata: ")
        has_texts = json.loads(line.until(b"\n\n"))["texts"]
        line.hang_up()
        return "texts" if has_texts else "figures"


# The headers that nginx 1.22 sends for `GET /watch`: with a minimal `proxy_pass`, and with those that are
# usually added.
PLAIN = ["Host: 127.0.0.1:8000", "Connection: close", "User-Agent: curl/7.88.1"]
USUAL = ["Host: llm.example", "X-Real-IP: 127.0.0.1", "X-Forwarded-For: 127.0.0.1", *PLAIN[1:]]
BOTH = {"api_key": "key", "watch_key": "eye"}


@pytest.mark.parametrize(
    ("keys", "given", "head", "shown"),
    [
        ({"api_key": "key"}, "key", PLAIN, "figures"),
        (BOTH, "key", PLAIN, "figures"),
        (BOTH, "key", USUAL, "figures"),
        (BOTH, "eye", PLAIN, "texts"),
        (BOTH, "eye", USUAL, "texts"),
        ({"watch_key": "eye"}, "", PLAIN, "figures"),
        ({}, "", PLAIN, "texts"),  # looks like a local request: docs/server.md warns about it
        ({}, "", USUAL, "figures"),
        ({}, "", ["Host: llm.example", *PLAIN[1:]], "figures"),
        ({}, "", [*PLAIN, "X-Forwarded-Host: llm.example"], "figures"),
        ({}, "", [*PLAIN, "Forwarded: for=10.0.0.1"], "figures"),
        ({}, "", [*PLAIN, "Via: 1.1 proxy"], "figures"),
    ],
)
def test_texts_through_a_local_proxy(engine, keys, given, head, shown):
    """Regression: behind a plain proxy on this machine every client seems to be local, so the API key gave
    access to everybody's prompts."""
    head = [*head, f"Authorization: Bearer {given}"] if given else head
    assert watched(engine, head, "1.0", **keys) == shown


OWN, NEIGHBOUR = "http://localhost:8000", "http://localhost:3000"


@pytest.mark.parametrize(
    ("keys", "origin", "given", "shown"),
    [
        ({}, "", "", "texts"),  # tui.py --watch, curl, or a page of this server
        ({}, OWN, "", "texts"),
        ({}, "https://localhost:8000", "", "texts"),  # a proxy on this machine terminates TLS
        ({}, NEIGHBOUR, "", "refused"),
        ({}, "http://localhost", "", "refused"),
        ({}, "http://127.0.0.1:8000", "", "refused"),  # the same server by another name
        ({}, "http://localhost:8000.evil.example", "", "refused"),
        ({}, "http://llm.example", "", "refused"),  # refused although --allow-host names it
        ({}, f"{OWN}, {NEIGHBOUR}", "", "refused"),
        ({}, "null", "", "refused"),  # a file, or a sandboxed frame
        ({"watch_key": "eye"}, NEIGHBOUR, "", "refused"),
        ({"watch_key": "eye"}, NEIGHBOUR, "wrong", "refused"),
        ({"watch_key": "eye"}, NEIGHBOUR, "eye", "texts"),
        ({"watch_key": "eye"}, OWN, "", "figures"),
        ({"api_key": "key"}, NEIGHBOUR, "key", "figures"),
        (BOTH, NEIGHBOUR, "eye", "texts"),
    ],
)
def test_foreign_page_needs_a_key_to_watch(engine, keys, origin, given, shown):
    """Regression: any page on this machine, on any port, could read everybody's prompts and answers."""
    head = ["Host: localhost:8000"]
    head += [f"Origin: {origin}"] if origin else []
    head += [f"Authorization: Bearer {given}"] if given else []
    assert watched(engine, head, **keys) == shown


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("127.0.0.1", True),
        ("127.9.8.7", True),
        ("::1", True),
        ("::ffff:127.0.0.2", True),  # as a server on [::] sees 127.0.0.2
        ("10.0.0.2", False),
        ("::ffff:10.0.0.2", False),
        ("2001:db8::1", False),
        ("", False),
    ],
)
def test_loopback_addresses(address, is_here):
    assert auth.is_loopback(address) is is_here


TRUSTED = tuple(ipaddress.ip_network(each) for each in ("127.0.0.1", "10.0.0.0/8", "fd00::/8"))


@pytest.mark.parametrize(
    "peer, forwarded, client",
    [
        ("127.0.0.1", "192.0.2.7", "192.0.2.7"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("192.0.2.9", "192.0.2.7", "192.0.2.9"),  # not a trusted proxy, whatever it sends
        ("127.0.0.1", "192.0.2.1, 192.0.2.7", "192.0.2.7"),  # the client itself sent the first one
        ("127.0.0.1", "192.0.2.1, 192.0.2.7, 10.1.2.3", "192.0.2.7"),  # two proxies
        ("127.0.0.1", "10.1.2.4, 10.1.2.3", "10.1.2.4"),  # all are proxies: use the first
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


def test_log_names_the_client_and_not_the_proxy(engine):
    """Regression: behind nginx all users counted as one client, in the log, for limits and for `--policy
    fair`."""
    assert seen_through(serve, ()) is serve, "the header counts for nothing without the option"
    with Here(engine, trusted_proxies=TRUSTED) as here:
        for address in ("192.0.2.7", "192.0.2.1, 192.0.2.8"):
            assert here.ask(COMPLETIONS, BODY, x_forwarded_for=address).status == 200
        assert here.ask(COMPLETIONS, BODY).status == 200
        clients = [request.client for request in engine.snapshot().ended]
        # A request is recorded after its answer has been sent
        wait_for(lambda: [call.client for call in here.api.view().ended] == clients)
    assert clients == ["192.0.2.7", "192.0.2.8", "127.0.0.1"]
