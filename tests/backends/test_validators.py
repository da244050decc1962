"""Which addresses, keys and numbers may be saved. Pure."""

from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError

from backends.validators import (
    validate_base_url,
    validate_key,
    validate_mib,
    validate_model_names,
    validate_priority,
    validate_seconds,
    validate_server_url,
)


@pytest.mark.parametrize(
    "url",
    [
        "http://gpu-1:8000",
        "http://gpu-1:8000/v1",
        "https://llm.example.org/prefix/v1/",
        "http://127.0.0.1:9001",
        "http://10.1.2.3:8000",
        "http://192.168.0.7",
        "http://[::1]:8000",
        "http://[fd12::7]:8000",
    ],
)
def test_servers_may_live_at_private_and_loopback_addresses(url: str) -> None:
    validate_base_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "http://169.254.43518",
        "http://2852039166",
        "http://0xA9FEA9FE",
        "http://[::ffff:169.254.169.254]",
        "http://[fe80::1]",
        "http://[fe80::1%25eth0]",
        "http://[fd00:ec2::254]",
        "http://100.100.100.200",
        "http://metadata.google.internal/",
        "http://METADATA.google.internal.",
        "http://0.0.0.0:8000",
        "http://0",
        "http://[::]:8000",
        "http://224.0.0.1",
    ],
)
def test_link_local_and_metadata_addresses_are_refused_however_they_are_spelt(url: str) -> None:
    with pytest.raises(ValidationError):
        validate_server_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gpu-1:8000",
        "ftp://gpu-1",
        "file:///etc/passwd",
        "http://",
        "http://user:password@gpu-1",
        "http://gpu-1:0",
        "http://gpu-1:99999",
        "http://gpu-1:x",
        "http://gpu 1",
        "http://gpu-1/\r\nX: y",
        "http://gpu-1/?a=b",
        "http://gpu-1/#a",
        "http://gpu-1/modèles",
        "http://[::1",
    ],
)
def test_what_is_no_plain_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        validate_base_url(url)


def test_a_telemetry_address_may_have_a_query() -> None:
    validate_server_url("http://gpu-1:9400/metrics?collect=gpu")


@pytest.mark.parametrize("key", ["a b", "a\nb", "a\r\nX-Evil: 1", "schlüssel", "\x00"])
def test_a_key_that_cannot_stand_in_a_header_is_refused(key: str) -> None:
    with pytest.raises(ValidationError):
        validate_key(key)


def test_an_ordinary_key_is_accepted() -> None:
    validate_key("sk-0123_ABC.def/+=~")


@pytest.mark.parametrize("validate", [validate_seconds, validate_mib, validate_priority])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
def test_numbers_that_are_none_are_refused(validate: object, value: float) -> None:
    assert callable(validate)
    with pytest.raises(ValidationError):
        validate(value)


def test_bounds_belong_to_what_is_accepted() -> None:
    validate_seconds(0.001)
    validate_seconds(864_000)
    validate_mib(0)
    validate_priority(-5.5)
    with pytest.raises(ValidationError):
        validate_seconds(0)
    with pytest.raises(ValidationError):
        validate_mib(-1)


@pytest.mark.parametrize("value", [[], "a", None, [""], [" "], [1], {"a": 1}])
def test_an_alias_needs_at_least_one_name(value: object) -> None:
    with pytest.raises(ValidationError):
        validate_model_names(value)
