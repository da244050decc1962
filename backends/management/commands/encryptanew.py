"""``manage.py encryptanew``: write stored keys with the encryption key that is in force now."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from backends.crypto import encrypt_anew


class Command(BaseCommand):
    help = (
        "Encrypt every stored key with FIELD_ENCRYPTION_KEY. Keys in FIELD_ENCRYPTION_OLD_KEYS "
        "are read, and may be taken away afterwards."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        written, unreadable = encrypt_anew()
        self.stdout.write(f"{written} values are encrypted with the key in force.")
        if unreadable:
            raise CommandError(
                f"{unreadable} values can be read with none of the keys. They stay as they are."
            )
