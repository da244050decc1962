"""Pages that say no."""

from __future__ import annotations

import pytest
from django.template.loader import render_to_string
from django.test import Client

from tests.factories import make_admin, make_user

pytestmark = pytest.mark.django_db


def test_a_wrong_address_leads_back(client: Client):
    client.force_login(make_admin())
    answer = client.get("/admin/decisions/nothing/")
    assert answer.status_code == 404
    assert "<h1>Not found</h1>" in answer.content.decode()
    assert 'href="/admin/"' in answer.content.decode()


def test_a_refusal_says_what_helps(client: Client):
    client.force_login(make_user(is_staff=True))
    answer = client.get("/admin/accounts/user/add/")
    assert answer.status_code == 403
    assert "<h1>Not allowed</h1>" in answer.content.decode()


def test_the_page_of_last_resort_needs_nothing_from_the_request():
    assert "<h1>Something went wrong</h1>" in render_to_string("500.html")
