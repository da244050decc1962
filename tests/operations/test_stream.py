"""Decisions for others: each at least once, in order, signed, and never in the recorder's way."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import DatabaseError

from scheduler import loading, streaming
from scheduler.loading import Loader
from scheduler.models import Decision
from scheduler.spool import encode
from scheduler.streaming import FileStream, Outbox, Webhook, line_of, open_stream, signature
from tests.factories import make_choice
from tests.operations.test_metrics import record

SECRET = "a secret"
Delivery = tuple[dict[str, str], bytes]


class Receiver:
    """A webhook: answers with the statuses it is given, then with 204."""

    def __init__(self) -> None:
        self.deliveries: queue.Queue[Delivery] = queue.Queue()
        self.statuses: queue.Queue[int] = queue.Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = 204 if receiver.statuses.empty() else receiver.statuses.get()
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                receiver.deliveries.put(({k.lower(): v for k, v in self.headers.items()}, body))

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/decisions"

    def next(self) -> Delivery:
        return self.deliveries.get(timeout=60)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def webhook(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Webhook]]:
    """Starts the recorder's end, as often as wanted, on one folder."""
    monkeypatch.setattr(streaming, "FIRST_PAUSE_SECONDS", 0.01)
    started: list[Webhook] = []

    def start() -> Webhook:
        started.append(Webhook(receiver.url, SECRET, tmp_path / "outbox", 1_000_000))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def ids(body: bytes) -> list[str]:
    return [json.loads(line)["request_id"] for line in body.splitlines()]


# ---- what a line says


def test_a_line_has_the_record_and_the_choice() -> None:
    told = json.loads(line_of(record(decision=make_choice(user_deficit=7.0), charged_tokens=9.0)))
    assert {
        "request_id": "r",
        "arrived_at": 100.0,
        "charged_tokens": 9.0,
        "selection_reason": "score",
        "user_deficit": 7.0,
        "candidate_backends": [1, 2],
    }.items() <= told.items()
    assert "decision" not in told
    assert json.loads(line_of(record(message="half \ud83d")))["message"] == "half ?"


# ---- a file


@pytest.mark.django_db
def test_every_decision_that_is_stored_is_in_the_file(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    records = [record(request_id=f"r{n}") for n in range(3)]
    (spool / "x-1.open").write_bytes(b"".join(map(encode, [*records, records[0]])))
    stream = FileStream(tmp_path / "decisions.jsonl")
    Loader(spool, keep=stream.write).load()
    Loader(spool, keep=stream.write).load()  # there is nothing new
    assert ids((tmp_path / "decisions.jsonl").read_bytes()) == ["r0", "r1", "r2"]
    assert Decision.objects.count() == 3


@pytest.mark.django_db
def test_what_is_rolled_back_is_written_again_and_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x-1.open").write_bytes(encode(record(request_id="r0")))
    stream = FileStream(tmp_path / "decisions")
    with monkeypatch.context() as broken:

        def fail(*_: object, **__: object) -> None:
            raise DatabaseError("away")

        broken.setattr(loading.SpoolCursor.objects, "bulk_create", fail)
        with pytest.raises(DatabaseError):
            Loader(tmp_path, keep=stream.write).load()
    assert Decision.objects.count() == 0
    Loader(tmp_path, keep=stream.write).load()
    assert ids((tmp_path / "decisions").read_bytes()) == ["r0", "r0"]  # one id: one decision


@pytest.mark.django_db
def test_a_stream_that_cannot_be_written_holds_no_records_up(tmp_path: Path) -> None:
    (tmp_path / "x-1.open").write_bytes(encode(record()))
    stream = FileStream(tmp_path)  # a folder
    Loader(tmp_path, keep=stream.write).load()
    assert (Decision.objects.count(), stream.lost) == (1, 1)


def test_standard_output_is_a_stream(
    settings: Any, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    settings.DECISION_STREAM = "stdout"
    stream = open_stream()
    assert stream is not None
    stream.write([record(request_id="seen")])
    assert ids(capfdbinary.readouterr().out) == ["seen"]
    settings.DECISION_STREAM = ""
    assert open_stream() is None


# ---- a webhook


def test_a_webhook_gets_signed_lines(receiver: Receiver, webhook: Callable[[], Webhook]) -> None:
    webhook().write([record(request_id="a"), record(request_id="b")])
    headers, body = receiver.next()
    assert ids(body) == ["a", "b"]
    assert headers["content-type"] == "application/x-ndjson"
    timestamp = headers["x-mindrouter-timestamp"]
    assert headers["x-mindrouter-signature"] == signature(SECRET.encode(), timestamp, body)
    assert signature(b"another", timestamp, body) != headers["x-mindrouter-signature"]


def test_a_delivery_that_is_not_taken_is_tried_again_with_the_same_name(
    receiver: Receiver, webhook: Callable[[], Webhook]
) -> None:
    for status in (503, 429):
        receiver.statuses.put(status)
    hook = webhook()
    hook.write([record(request_id="a")])
    tries = [receiver.next() for _ in range(3)]
    assert [ids(body) for _, body in tries] == [["a"]] * 3
    assert len({headers["x-mindrouter-delivery"] for headers, _ in tries}) == 1
    hook.write([record(request_id="b")])
    headers, body = receiver.next()
    assert ids(body) == ["b"]
    assert headers["x-mindrouter-delivery"] != tries[0][0]["x-mindrouter-delivery"]


def test_after_a_restart_nothing_is_sent_twice_and_nothing_is_missing(
    receiver: Receiver, webhook: Callable[[], Webhook]
) -> None:
    first = webhook()
    first.write([record(request_id="a")])
    receiver.next()
    first.stop()
    first.write([record(request_id="b")])  # in the outbox, and nobody sends it any more
    assert first.waiting_bytes > 0
    second = webhook()
    second.write([record(request_id="c")])
    got: list[str] = []
    while len(got) < 2:
        got += ids(receiver.next()[1])
    assert got == ["b", "c"]
    second.stop()
    assert receiver.deliveries.empty()


def test_the_outbox_is_bounded_and_says_what_it_lost(tmp_path: Path) -> None:
    one = record()
    outbox = Outbox(tmp_path, most_bytes=len(line_of(one)) * 3)
    outbox.put([one, one])
    outbox.put([one, one])
    assert outbox.lost == 2
    assert len(ids(outbox.next_batch())) == 2


def test_the_outbox_goes_from_file_to_file_and_keeps_none_that_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SEGMENT_BYTES", 1)
    outbox = Outbox(tmp_path, 1_000_000)
    names = [f"r{number}" for number in range(5)]
    for name in names:
        outbox.put([record(request_id=name)])
    (tmp_path / "2.jsonl").open("ab").write(b'{"half a li')  # its writer died
    assert len(list(tmp_path.glob("*.jsonl"))) == 5
    got = []
    while batch := outbox.next_batch():
        got += ids(batch)
        outbox.sent(len(batch))
    assert got == names
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["5.jsonl"]
    assert outbox.waiting_bytes() == 0
    # The next process writes into a file of its own.
    again = Outbox(tmp_path, 1_000_000)
    again.put([record(request_id="next")])
    assert ids(again.next_batch()) == ["next"]


@pytest.mark.parametrize(
    ("target", "secret", "fits"),
    [
        ("", "", True),
        ("stdout", "", True),
        ("/var/log/decisions.jsonl", "", True),
        ("decisions.jsonl", "", False),
        ("https://example.org/hook", "", False),
        ("https://example.org/hook", "s", True),
    ],
)
def test_a_stream_that_cannot_be_meant_is_reported(
    settings: Any, target: str, secret: str, fits: bool
) -> None:
    settings.DECISION_STREAM, settings.DECISION_STREAM_SECRET = target, secret
    found = [one.id for one in run_checks(tags=["mindrouter"])]
    assert ("mindrouter.E005" not in found) is fits
