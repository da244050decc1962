"""``manage.py export``: the database as a file that ``apply`` reads, without secrets."""

from __future__ import annotations

from typing import Any

from django.db import models, transaction

from backends.models import Backend, BackendModel
from scheduler.configuration.document import write_document, write_value
from scheduler.configuration.entries import SETTINGS_NAMES
from scheduler.configuration.sections import MODEL_FIELDS, SECTIONS, Section, set_by_hand
from scheduler.models import SiteSettings


def export_text() -> str:
    """The whole configuration. Applying it to the same database changes nothing."""
    with transaction.atomic():
        document: dict[str, Any] = {section.name: _entries(section) for section in SECTIONS}
        document["settings"] = _settings()
    return write_document(document)


def _entries(section: Section) -> list[dict[str, Any]]:
    references = tuple(section.references)
    rows = section.manager().select_related(*references).order_by(*_order(section))
    if section.model is Backend:
        rows = rows.prefetch_related("models")
    return [_entry(section, row) for row in rows]


def _order(section: Section) -> list[str]:
    """By the key; a user in it by name, not by number."""
    return [f"{name}__username" if name == "user" else name for name in section.key]


def _entry(section: Section, row: models.Model) -> dict[str, Any]:
    names = (*section.key, *(n for n in section.references if n not in section.key))
    entry = {name: _name_or_value(getattr(row, name)) for name in (*names, *section.fields)}
    if isinstance(row, Backend):
        entry["models"] = [_model(one) for one in row.models.all() if set_by_hand(one)]
    return entry


def _name_or_value(value: Any) -> Any:
    return str(value) if isinstance(value, models.Model) else write_value(value)


def _model(row: BackendModel) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": row.name}
    if not row.by_hand:
        entry["by_hand"] = False
    return entry | {key: write_value(getattr(row, name)) for key, name in MODEL_FIELDS.items()}


def _settings() -> dict[str, Any]:
    """Only what is saved; the rest is the environment's."""
    row = SiteSettings.objects.filter(pk=1).first() or SiteSettings(pk=1)
    values = {name: getattr(row, name) for name in SETTINGS_NAMES}
    return {name: value for name, value in values.items() if value is not None}
