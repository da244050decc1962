"""Clients of the management API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client

from tests.factories import make_admin, make_api_key


class Api:
    """Asks with a key, as a program does."""

    def __init__(self, key: str) -> None:
        self._client = Client(headers={"Authorization": f"Bearer {key}"})

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        data = "" if body is None else json.dumps(body)
        return self._client.generic(
            method, f"/api/admin/{path}", data, content_type="application/json"
        )

    def ok(self, method: str, path: str, body: Any = None) -> Any:
        """The document of an answer that must be a good one."""
        answer = self(method, path, body)
        assert 200 <= answer.status_code < 300, answer.content
        return answer.json() if answer.content else None


@pytest.fixture
def api(db: None) -> Api:
    """Of the superuser "root"."""
    return Api(make_api_key(make_admin("root"), name="root's"))
