"""When keys were last used, stored many at a time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from accounts.models import ApiKey, KeyUse


def note_uses(used: Mapping[int, float]) -> None:
    """{key: when, epoch seconds}; of keys that are gone nothing is kept. Raises: DatabaseError."""
    rows = [
        KeyUse(key_id=pk, last_used_at=datetime.fromtimestamp(used[pk], UTC))
        for pk in ApiKey.objects.filter(pk__in=used).values_list("pk", flat=True)
    ]
    KeyUse.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["key"],
        update_fields=["last_used_at"],
        batch_size=500,
    )
