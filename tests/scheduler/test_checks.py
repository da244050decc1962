"""Wrong settings are said by number before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as loaded_settings
from django.core.checks import run_checks
from pytest_django.fixtures import Settings

from scheduler import checks
from scheduler.checks import NUMBERS


def ids() -> list[str]:
    return [str(message.id) for message in run_checks(tags=["mindrouter"])]


def test_the_settings_as_they_are_have_no_problem() -> None:
    assert ids() == []


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_lowest_value(name: str, settings: Settings) -> None:
    low, may_be_none = NUMBERS[name]
    setattr(settings, name, low)
    assert ids() == []
    setattr(settings, name, low - 1)
    assert ids() == ["mindrouter.E001"]
    setattr(settings, name, None)
    assert ids() == ([] if may_be_none else ["mindrouter.E001"])


@pytest.mark.parametrize("value", ["many", float("nan"), float("inf"), "1e"])
def test_what_is_no_finite_number_is_refused(value: Any, settings: Settings) -> None:
    settings.BACKEND_FAIL_WINDOW = value
    [message] = run_checks(tags=["mindrouter"])
    assert message.id == "mindrouter.E001"
    assert message.msg == f"BACKEND_FAIL_WINDOW is {value!r}."
    assert message.hint == "Set the variable BACKEND_FAIL_WINDOW to a number of at least 0."


def test_a_choice_is_one_of_its_words(settings: Settings) -> None:
    settings.SCHEDULER_SHARE_MODE = "group"
    assert ids() == []
    settings.SCHEDULER_SHARE_MODE = "both"
    assert ids() == ["mindrouter.E002"]


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("", None),
        ("redis://localhost", None),
        ("redis://:s%40e@[::1]:6380/2", None),
        ("redis://ada:secret@localhost?db=2", None),
        ("rediss://localhost/0?ssl_ca_certs=/etc/ca.pem", None),
        ("unix:///run/redis.sock?db=3", None),
        ("unix://:secret@/run/redis.sock", None),
        ("redis+socket:///run/redis.sock", "begins with 'redis+socket'"),
        ("localhost:6379", "begins with 'localhost'"),
        ("redis:///0", "names no host"),
        ("redis://localhost:port/0", "cannot be read."),
        ("redis://:half/a-secret@localhost/0", "cannot be read."),
        ("redis://localhost/zero", "names a database that is no number"),
        ("unix:///run/redis.sock?db=zero", "names a database that is no number"),
        ("unix://run/redis.sock", "names no socket's path from the root"),
        (
            "redis://h?socket_timeout=1",
            "has options that only some parts would heed: socket_timeout",
        ),
        ("redis://h?ssl_cert_reqs=none", "has options of rediss:// and another beginning"),
    ],
)
def test_an_address_of_redis_that_not_every_part_understands_is_refused(
    url: str, wrong: str | None, settings: Settings
) -> None:
    settings.REDIS_URL = url
    problems = run_checks(tags=["mindrouter"])
    assert [problem.id for problem in problems] == ([] if wrong is None else ["mindrouter.E006"])
    if wrong is not None:
        assert problems[0].msg.startswith(f"REDIS_URL {wrong}")


@pytest.mark.parametrize(
    ("database", "warnings"),
    [
        ({"CONN_MAX_AGE": 60, "OPTIONS": {}}, ["mindrouter.W001"]),
        ({"CONN_MAX_AGE": 60, "OPTIONS": {"pool": {"max_size": 8}}}, []),
        ({"CONN_MAX_AGE": 0}, []),
    ],
)
def test_lasting_connections_without_a_pool_are_warned_of(
    database: dict[str, Any], warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_settings, "DATABASES", {"default": database})
    assert ids() == warnings


@pytest.mark.parametrize(
    ("named", "problems"),
    [
        (["10.0.0.1", "fd12::/64", "10.1.2.3/8"], 0),
        (["10.0.0.0/33", "proxy.example.org", ""], 3),
    ],
)
def test_a_trusted_proxy_is_an_address_or_a_network(
    named: list[str], problems: int, settings: Settings
) -> None:
    settings.TRUSTED_PROXIES = named
    found = run_checks(tags=["mindrouter"])
    assert [one.id for one in found] == ["mindrouter.E007"] * problems
    assert all(repr(name) in one.msg for one, name in zip(found, named, strict=False))


@pytest.mark.parametrize(
    "origin", ["https://llm.example.org", "http://localhost:8443", "https://*.example.org",
               "https://[fd12::1]:8443"],
)  # fmt: skip
def test_an_origin_is_scheme_host_and_port(origin: str, settings: Settings) -> None:
    settings.CSRF_TRUSTED_ORIGINS = [origin]
    assert ids() == []


@pytest.mark.parametrize(
    "origin", ["llm.example.org", "https://llm.example.org/", "https://a@b", "https://", "*",
               "https://x/path", "ftp://x", "https://x:y", "HTTPS://X", "https://x https://y"],
)  # fmt: skip
def test_what_is_no_origin_is_said_as_it_would_match_nothing(
    origin: str, settings: Settings
) -> None:
    settings.CSRF_TRUSTED_ORIGINS = [origin]
    [found] = run_checks(tags=["mindrouter"])
    assert (found.id, found.msg) == (
        "mindrouter.E008",
        f"CSRF_TRUSTED_ORIGINS names {origin!r}, which is no origin.",
    )


def test_no_two_checks_have_the_same_number() -> None:
    text = Path(checks.__file__).read_text()
    said = re.findall(r'"""mindrouter\.([EW]\d{3}):', text)
    assert len(said) == len(set(said)) >= 9
