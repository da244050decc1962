"""Columns that are encrypted at rest, and going over to another key."""

from __future__ import annotations

from functools import cache
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.apps import apps
from django.conf import settings
from django.db import models, transaction


@cache
def _fernet(*keys: str) -> MultiFernet:
    return MultiFernet([Fernet(key) for key in keys])


def _current() -> MultiFernet:
    """Encrypts with the key in force; reads what older ones have written too."""
    return _fernet(settings.FIELD_ENCRYPTION_KEY, *settings.FIELD_ENCRYPTION_OLD_KEYS)


def seal(data: bytes) -> bytes:
    """Encrypted with ``FIELD_ENCRYPTION_KEY``; one line of ASCII."""
    return _current().encrypt(data)


def unseal(sealed: bytes) -> bytes | None:
    """What ``seal`` was given; None where no key can read it."""
    try:
        return _current().decrypt(sealed)
    except InvalidToken:
        return None


class EncryptedTextField(models.TextField):  # type: ignore[type-arg]
    """Encrypted with ``FIELD_ENCRYPTION_KEY`` (Fernet). A value that no key can read, for
    example after the key was lost, reads as None instead of breaking every page that loads it."""

    def get_prep_value(self, value: Any) -> Any:
        text = super().get_prep_value(value)
        return seal(text.encode()).decode() if text else None

    def from_db_value(self, value: str | None, expression: Any, connection: Any) -> str | None:
        plain = unseal(value.encode()) if value else None
        return None if plain is None else plain.decode()


class EncryptedBytesField(models.BinaryField):  # type: ignore[type-arg]
    """The same for bytes."""

    def get_prep_value(self, value: Any) -> Any:
        return seal(bytes(value)) if value else None

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> bytes | None:
        return unseal(bytes(value)) if value else None


@transaction.atomic
def encrypt_anew() -> tuple[int, int]:
    """Write every encrypted value with the key in force; returns how many were written, and how
    many no key can read. Those stay as they are."""
    written = unreadable = 0
    for model in apps.get_models():
        for column in model._meta.concrete_fields:
            if not isinstance(column, EncryptedTextField | EncryptedBytesField):
                continue
            rows: Any = model._default_manager.exclude(**{column.name: None})  # noqa: SLF001
            # One at a time: captured prompts may be more than fits into memory.
            for pk in list(rows.order_by("pk").values_list("pk", flat=True)):
                row = rows.filter(pk=pk).select_for_update()
                for value in row.values_list(column.name, flat=True):  # none: deleted meanwhile
                    if value is None:
                        unreadable += 1
                    else:
                        rows.filter(pk=pk).update(**{column.name: value})
                        written += 1
    return written, unreadable
