"""What has been changed of a row: who, when, why, before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from django.db import models
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.utils.urls import replace_query_param

from mindrouter.api.listing import MOST_ROWS, PAGE_SIZE, PageQuery
from scheduler.serializers import number

_KINDS = {"+": "created", "~": "changed", "-": "deleted"}


class HistoryQuery(PageQuery):
    offset = None  # type: ignore[assignment]  # the number of a change is the cursor
    before = serializers.IntegerField(
        required=False, min_value=0, max_value=2**63 - 1, help_text="Changes older than this one."
    )


class ChangeSerializer(serializers.Serializer[Any]):
    field = serializers.CharField()
    before = serializers.JSONField(allow_null=True)
    after = serializers.JSONField(allow_null=True)


class HistoryEntrySerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField()
    at = serializers.DateTimeField()
    user = serializers.CharField(allow_null=True, help_text="null: not a person.")
    address = serializers.CharField(allow_null=True, help_text="The client's; null: a command.")
    via = serializers.CharField(allow_null=True, help_text="The page, operation or command.")
    reason = serializers.CharField(allow_null=True)
    kind = serializers.ChoiceField(choices=["created", "changed", "deleted"])
    changes = ChangeSerializer(many=True)


class HistoryPageSerializer(serializers.Serializer[Any]):
    next = serializers.URLField(allow_null=True)
    results = HistoryEntrySerializer(many=True)


def history_page(
    request: Request, model: type[models.Model], pk: int, query: dict[str, Any]
) -> dict[str, Any] | None:
    """The newest changes first; None where there never was such a row.

    As many queries as the model has references, whatever the page's size.
    """
    rows = model.history.filter(id=pk).select_related("history_user")  # type: ignore[attr-defined]
    if not rows.exists():
        return None
    if "before" in query:
        rows = rows.filter(history_id__lt=query["before"])
    size = min(query.get("limit", PAGE_SIZE), MOST_ROWS)
    found = list(rows.order_by("-history_id")[: size + 1])  # one more, to compare with
    has_more = len(found) > size
    url = request.build_absolute_uri()
    return {
        "next": replace_query_param(url, "before", found[size - 1].pk) if has_more else None,
        "results": _entries(found, size),
    }


def _entries(found: Sequence[Any], size: int) -> list[dict[str, Any]]:
    names = _names(found)
    return [
        {
            "id": row.pk,
            "at": row.history_date,
            "user": row.history_user.username if row.history_user else row.history_actor or None,
            "address": row.history_address or None,
            "via": row.history_via or None,
            "reason": row.history_change_reason,
            "kind": _KINDS[row.history_type],
            "changes": _changes(found[place + 1] if place + 1 < len(found) else None, row, names),
        }
        for place, row in enumerate(found[:size])
    ]


def _columns(row: Any) -> Iterable[models.Field[Any, Any]]:
    return (field for field in row.tracked_fields if not field.primary_key)


def _changes(before: Any, row: Any, names: dict[Any, dict[Any, str]]) -> list[dict[str, Any]]:
    if row.history_type == "-":
        return []
    changes = []
    for field in _columns(row):
        old = None if before is None else getattr(before, field.attname)
        new = getattr(row, field.attname)
        if old != new:
            values = {"before": _shown(field, old, names), "after": _shown(field, new, names)}
            changes.append({"field": field.name, **values})
    return changes


def _shown(field: models.Field[Any, Any], value: Any, names: dict[Any, dict[Any, str]]) -> Any:
    """As the API shows it: rows by name, decimals as numbers."""
    if value is None:
        return None
    if field.related_model is not None:
        return names[field.related_model].get(value, f"#{value}")
    if isinstance(field, models.DecimalField):
        return number(value)
    if isinstance(field, models.DateTimeField):
        return value.isoformat()
    return value


def _names(found: Sequence[Any]) -> dict[Any, dict[Any, str]]:
    """{model: {id: name}} of what the rows refer to."""
    wanted: dict[Any, set[Any]] = defaultdict(set)
    for row in found:
        for field in _columns(row):
            if field.related_model is not None:
                wanted[field.related_model].add(getattr(row, field.attname))
    return {
        related: {one.pk: str(one) for one in related._default_manager.filter(pk__in=ids)}  # noqa: SLF001
        for related, ids in wanted.items()
    }
