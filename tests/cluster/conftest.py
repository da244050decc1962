"""A Redis for this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scheduler.redis import RedisServer, redis_server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    try:
        with redis_server() as server:
            yield server
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
