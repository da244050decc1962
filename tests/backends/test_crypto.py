"""Stored keys: encrypted, readable with former keys, written anew with the one in force."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.core.checks import run_checks
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from backends.models import Backend, Node
from tests.factories import make_backend

pytestmark = pytest.mark.django_db

SECRET = "sk-secret-of-the-backend"


def stored() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT api_key FROM backends_backend")
        return str(cursor.fetchone()[0])


def test_a_key_is_encrypted_where_it_lies() -> None:
    make_backend(api_key=SECRET)
    assert SECRET not in stored()
    assert Backend.objects.get().api_key == SECRET


def test_keys_outlive_a_new_encryption_key_and_are_then_written_with_it(settings: Any) -> None:
    old, new = settings.FIELD_ENCRYPTION_KEY, Fernet.generate_key().decode()
    make_backend(api_key=SECRET)
    Node.objects.create(name="n", telemetry_key="sk-of-the-node")
    before = Backend.history.count()
    settings.FIELD_ENCRYPTION_KEY, settings.FIELD_ENCRYPTION_OLD_KEYS = new, [old]
    assert Backend.objects.get().api_key == SECRET
    out = StringIO()
    call_command("encryptanew", stdout=out)
    assert out.getvalue() == "2 values are encrypted with the key in force.\n"
    settings.FIELD_ENCRYPTION_OLD_KEYS = []
    assert Backend.objects.get().api_key == SECRET
    assert Node.objects.get().telemetry_key == "sk-of-the-node"
    settings.FIELD_ENCRYPTION_KEY = old
    assert Backend.objects.get().api_key is None
    assert Backend.history.count() == before


def test_what_no_key_can_read_stays_and_is_said(settings: Any) -> None:
    make_backend(api_key=SECRET)
    before = stored()
    settings.FIELD_ENCRYPTION_KEY = Fernet.generate_key().decode()
    with pytest.raises(CommandError, match="1 values can be read with none of the keys"):
        call_command("encryptanew", stdout=StringIO())
    assert stored() == before


def test_an_encryption_key_that_is_none_is_said_without_repeating_it(settings: Any) -> None:
    settings.FIELD_ENCRYPTION_OLD_KEYS = ["sk-not-a-key"]
    [message] = run_checks(tags=["mindrouter"])
    assert message.id == "mindrouter.E004"
    assert "sk-not-a-key" not in str(message)


def test_certificates_that_cannot_be_read_are_said(settings: Any, tmp_path: Any) -> None:
    settings.BACKEND_CA_FILE = str(tmp_path / "nothing.pem")
    assert [str(m.id) for m in run_checks(tags=["mindrouter"])] == ["mindrouter.E003"]
