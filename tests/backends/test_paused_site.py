"""A site of which every backend is paused says so where it is ended."""

from __future__ import annotations

import pytest
from django.test import Client

from backends.models import Backend
from tests.factories import make_admin, make_backend

pytestmark = pytest.mark.django_db


def test_the_list_says_that_all_are_paused_and_only_then() -> None:
    browser = Client()
    browser.force_login(make_admin("root"), backend="accounts.authentication.RoleBackend")
    make_backend("gpu-1", paused=True)
    make_backend("gpu-2")
    make_backend("old", enabled=False)

    def warned() -> bool:
        page = browser.get("/admin/backends/backend/").content.decode()
        return "All backends are paused" in page

    assert not warned()
    Backend.objects.filter(name="gpu-2").update(paused=True)
    assert warned()
    Backend.objects.update(enabled=False)
    assert not warned()
