"""Exercise 4: a metric of the server.

    python -m pytest -x course/exercises/test_4_metric.py

The task. `python serve.py` serves a page /metrics for Prometheus. It does not say how often clients
hung up. An operator wants to know that, because people who leave have waited too long. Add the
counter

    # TYPE nanobatch_hung_up_total counter
    nanobatch_hung_up_total 3.0

A client may hang up before its answer has begun (then the status is 499), or in the middle of a
stream, whose status 200 was sent long before. Both count. An answer that the server itself cancels
while it shuts down does not count, because its client was still there. A counter starts at 0, is
listed from the start, and never goes down.

Read first: `RequestRecord` in `engine/server_snapshot.py`, `ServerMetrics` in `server/metrics.py`.

Where: `ServerMetrics` in `server/metrics.py`, which names its counters in `__init__` and updates
them in `count`.

How to check: run the command above and `python -m pytest tests/server/test_serve.py -k metrics`.
Then try it. Start `python serve.py`, and in another terminal request more than you want to read:

    curl -N localhost:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"prompt": "A", "max_tokens": 999, "ignore_eos": true, "stream": true}'

Press Ctrl-C during the answer, and look at http://127.0.0.1:8000/metrics.
"""

import re

from short_failures import not_done

from engine.server_snapshot import RequestRecord
from server.metrics import ServerMetrics

NAME = "nanobatch_hung_up_total"


def call(number: int, **fields) -> RequestRecord:
    return RequestRecord(
        number, 0.0, "127.0.0.1", "POST /v1/completions", requests=(number,), **fields
    )


def told(figures: ServerMetrics) -> int:
    """Return the counter's value in /metrics."""
    lines = figures.text({}, {}).splitlines()
    values = [line.split()[1] for line in lines if line.split()[0] == NAME]
    if not values:
        not_done(f"server/metrics.py: ServerMetrics.text has no line {NAME}")
    assert len(values) == 1 and re.fullmatch(r"\d+(\.0)?", values[0]), values
    at = lines.index(f"{NAME} {values[0]}")
    assert lines[at - 1] == f"# TYPE {NAME} counter", "the line before it says what it is"
    return int(float(values[0]))


def test_the_metric_is_there_before_anything_came():
    assert told(ServerMetrics()) == 0


def test_the_metric_counts_those_who_hang_up_before_and_during_an_answer():
    figures = ServerMetrics()
    figures.count(call(1, status=499, reason="cancelled", hung_up=True))
    assert told(figures) == 1
    figures.count(call(2, status=200, reason="cancelled", hung_up=True, stream=True))
    assert told(figures) == 2
    # The client hung up while it was sending its prompt, so there was nothing to cancel
    figures.count(call(3, status=499, hung_up=True))
    assert told(figures) == 3


def test_the_metric_counts_nobody_else():
    """Complete answers, refusals, errors, and answers that the server itself cancelled do not
    count."""
    figures = ServerMetrics()
    told(figures)
    others = [
        (200, "stop"),
        (400, "invalid"),
        (429, "queue_full"),
        (500, "error"),
        (503, "cancelled"),
    ]
    for number, (status, reason) in enumerate(others):
        figures.count(call(number, status=status, reason=reason))
        assert told(figures) == 0, f"status {status}, {reason}: this client did not hang up"
    figures.count(call(9, status=200, reason="cancelled", stream=True))
    assert told(figures) == 0, (
        "a stream that the server itself cancelled: this client did not hang up"
    )
