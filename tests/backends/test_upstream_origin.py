"""Reading a backend's base URL."""

from __future__ import annotations

import pytest

from backends.upstream import Origin


@pytest.mark.parametrize(
    ("url", "scheme", "host", "port", "prefix", "host_header"),
    [
        ("http://gpu1:8000", "http", "gpu1", 8000, "", b"gpu1:8000"),
        ("http://gpu1:8000/", "http", "gpu1", 8000, "", b"gpu1:8000"),
        ("http://gpu1:8000/v1", "http", "gpu1", 8000, "", b"gpu1:8000"),
        ("http://gpu1:8000/v1/", "http", "gpu1", 8000, "", b"gpu1:8000"),
        ("https://llm.example.org", "https", "llm.example.org", 443, "", b"llm.example.org"),
        (
            "https://LLM.example.org/a/b/v1",
            "https",
            "llm.example.org",
            443,
            "/a/b",
            b"llm.example.org",
        ),
        ("http://llm/v1x", "http", "llm", 80, "/v1x", b"llm"),
        ("http://[::1]:11434/v1", "http", "::1", 11434, "", b"[::1]:11434"),
        ("http://[fd00::1]", "http", "fd00::1", 80, "", b"[fd00::1]"),
        ("http://müller.example", "http", "müller.example", 80, "", b"xn--mller-kva.example"),
    ],
)
def test_a_base_url_is_read_into_its_parts(
    url: str, scheme: str, host: str, port: int, prefix: str, host_header: bytes
) -> None:
    origin = Origin.parse(url)
    assert (origin.scheme, origin.host, origin.port) == (scheme, host, port)
    assert origin.path_prefix == prefix
    assert origin.host_header == host_header


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gpu1:8000",
        "ftp://gpu1",
        "http://",
        "http://:8000",
        "http://user:secret@gpu1",
        "http://@gpu1",
        "http://gpu1/?a=b",
        "http://gpu1/#x",
        "http://gpu1:99999",
        "http://gpu1:0",
        "http://gpu1:x",
        "http://gpu1/a b",
        "http://gpu1/größe",
        "http://gpu 1/",
        "http://[::1",
        "http://" + "a" * 64 + ".ö",
    ],
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Origin.parse(url)


def test_origins_that_differ_in_the_path_only_share_their_connections() -> None:
    one, other = Origin.parse("http://gpu1:80/a"), Origin.parse("http://gpu1/b/v1")
    assert one.key == other.key
    assert one != other
