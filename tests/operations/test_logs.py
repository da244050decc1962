"""Log lines: of which request, in which form."""

from __future__ import annotations

import io
import json
import logging
import logging.config
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.test import Client

from mindrouter import logs
from mindrouter.gateway import consumer
from scheduler.request_lines import log_requests
from scheduler.spool import Attempt
from tests.operations.test_metrics import record
from tests.running import RunningRouter

Lines = tuple[logging.Logger, io.StringIO]


@pytest.fixture(params=["console", "json"])
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    """A logger in the form of our settings, and what it has written."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    formatters = {"formatters": deepcopy(django_settings.LOGGING["formatters"]), "version": 1}
    configurator = logging.config.DictConfigurator(formatters)
    handler.setFormatter(
        configurator.configure_formatter(formatters["formatters"][request.param])  # type: ignore[attr-defined]
    )
    handler.addFilter(logs.RequestIds())
    logger = logging.getLogger("mindrouter.requests")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logger, written
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_line_names_the_request_that_is_served(lines: Lines) -> None:
    logger, written = lines
    token = logs.request_id.set("abc")
    logger.warning("Something with %s", "braces {}")
    logs.request_id.reset(token)
    logger.warning("Of none")
    first, second = written.getvalue().splitlines()
    if first.startswith("{"):
        told = json.loads(first)
        assert told.pop("time")
        assert told == {
            "level": "WARNING",
            "logger": "mindrouter.requests",
            "message": "Something with braces {}",
            "request_id": "abc",
        }
        assert "request_id" not in json.loads(second)
    else:
        assert first.endswith(" WARNING mindrouter.requests: [abc] Something with braces {}")
        assert second.endswith(" WARNING mindrouter.requests: Of none")


def test_a_request_has_one_line_with_its_figures(lines: Lines) -> None:
    _, written = lines
    tried = [Attempt(backend="a", reason="upstream_error"), Attempt(backend="b", status=200)]
    served: dict[str, Any] = {"status": 200, "user": "ada", "selected_backend": "b"}
    served |= {"prompt_tokens": 0, "completion_tokens": 30, "client_request_id": "mine"}
    log_requests([record(request_id="ff", endpoint="completions", attempts=tried, **served)])
    [line] = written.getvalue().splitlines()
    if line.startswith("{"):
        told = json.loads(line)
        assert {
            "request_id": "ff",
            "waited": 2.0,
            "first_token": 3.0,
            "took": 6.0,
            "attempts": 2,
            "prompt_tokens": 0,
            "user": "ada",
        }.items() <= told.items()
        assert "reason" not in told
    else:
        assert line.endswith(
            "[ff] outcome=completed status=200 endpoint=completions model=m user=ada group=staff "
            "backend=b attempts=2 waited=2.0 first_token=3.0 took=6.0 prompt_tokens=0 "
            "completion_tokens=30 client_request_id=mine"
        )


def test_a_name_with_line_breaks_stays_on_one_line(lines: Lines) -> None:
    _, written = lines
    log_requests([record(model_served="m\nINFO forged: x")])
    assert len(written.getvalue().splitlines()) == 1


async def test_the_gateways_lines_carry_the_id_that_the_client_got(
    router: RunningRouter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("forced")

    monkeypatch.setattr(consumer, "authenticate", broken)
    caplog.handler.addFilter(logs.RequestIds())
    answer = await router.chat()
    [line] = [one for one in caplog.records if one.name == consumer.__name__]
    assert line.request_id == answer.headers["x-request-id"]  # type: ignore[attr-defined]


@pytest.mark.django_db
def test_pages_tell_their_requests_id(client: Client) -> None:
    given = client.get("/admin/login/", headers={"X-Request-Id": "my-own.7"})
    assert given["X-Request-Id"] == "my-own.7"
    made = client.get("/admin/login/", headers={"X-Request-Id": "a b\r\n"})
    assert len(made["X-Request-Id"]) == 32
    assert logs.request_id.get() == ""
