"""A text column that is encrypted at rest."""

from __future__ import annotations

from functools import cache
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings
from django.db import models


@cache
def _fernet(key: str) -> Fernet:
    return Fernet(key)


class EncryptedTextField(models.TextField):  # type: ignore[type-arg]
    """Encrypted with ``FIELD_ENCRYPTION_KEY`` (Fernet). A value that this key cannot read, for
    example after the key was lost, reads as None instead of breaking every page that loads it."""

    def get_prep_value(self, value: Any) -> Any:
        text = super().get_prep_value(value)
        if not text:
            return None
        return _fernet(settings.FIELD_ENCRYPTION_KEY).encrypt(text.encode()).decode()

    def from_db_value(self, value: str | None, expression: Any, connection: Any) -> str | None:
        if not value:
            return None
        try:
            return _fernet(settings.FIELD_ENCRYPTION_KEY).decrypt(value.encode()).decode()
        except InvalidToken:
            return None
