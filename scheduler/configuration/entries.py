"""From a parsed file to checked entries; what is wrong is collected with its path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import models

from accounts.models import MIN_KEY_LENGTH, User
from backends.models import Backend, BackendModel
from scheduler.configuration.document import (
    Refused,
    read_flag,
    read_text,
    read_value,
)
from scheduler.configuration.sections import (
    MODEL_FIELDS,
    MODEL_NAMES,
    SECTIONS,
    Section,
    column_of,
)
from scheduler.models import SiteSettings

#: Never changed here: the row's own number.
SETTINGS_NAMES = tuple(
    column.name for column in SiteSettings._meta.fields if not column.primary_key
)


@dataclass(kw_only=True)
class Entry:
    """One entry of a section. ``values`` holds model fields, and references by name."""

    section: Section
    path: str
    key: tuple[str, ...]
    absent: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, str | None] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] | None = None  # a backend's models given by hand

    @property
    def label(self) -> str:
        return f"{self.section.noun} {'/'.join(self.key)}"


class Reader:
    """Reads a document's sections; ``errors`` says all that is wrong with them."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.settings: dict[str, Any] = {}
        self.entries: list[Entry] = []

    def read(self, document: dict[str, Any]) -> None:
        known = {section.name for section in SECTIONS} | {"settings"}
        for name in document:
            if name not in known:
                self._refuse(str(name), f"unknown section; there are {', '.join(sorted(known))}")
        for section in SECTIONS:
            if document.get(section.name) is not None:
                self._read_section(section, document[section.name])
        if document.get("settings") is not None:
            self._read_settings(document["settings"])

    def _read_section(self, section: Section, items: Any) -> None:
        seen: dict[tuple[str, ...], str] = {}
        for path, item in self._mappings(section.name, items):
            entry = self._read_entry(section, path, item)
            if entry is None:
                continue
            if entry.key in seen:
                self._refuse(path, f"{entry.label} is already in {seen[entry.key]}")
            seen[entry.key] = path
            self.entries.append(entry)

    def _mappings(self, path: str, items: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
        if not isinstance(items, list):
            self._refuse(path, "must be a list")
            return
        for number, item in enumerate(items):
            if isinstance(item, dict):
                yield f"{path}[{number}]", item
            else:
                self._refuse(f"{path}[{number}]", "must be a mapping")

    def _read_entry(self, section: Section, path: str, item: dict[Any, Any]) -> Entry | None:
        self._refuse_unknown(path, item, section.names())
        key = tuple(self._read_name(path, item, name) for name in section.key)
        if "" in key:
            return None
        entry = Entry(section=section, path=path, key=key)
        entry.absent = self._read(path, "absent", read_flag, item.get("absent", False)) or False
        if entry.absent:
            return entry
        for name in section.fields:
            if name in item:
                self._read_field(
                    entry.values, path, name, column_of(section.model, name), item[name]
                )
        for name in section.references:
            if name in item and name not in section.key:
                nullable = column_of(section.model, name).null
                entry.values[name] = self._read(path, name, _text_or(nullable), item[name])
        self._read_secrets(entry, item)
        if section.model is Backend and item.get("models") is not None:
            entry.models = self._read_models(f"{path}.models", item["models"])
        return entry

    def _read_secrets(self, entry: Entry, item: dict[Any, Any]) -> None:
        for name in entry.section.secrets:
            if name not in item:
                continue
            if item[name] is None and name in ("password", "key"):
                continue  # left as it is; a backend, in contrast, may have no key
            text = self._read(entry.path, name, _text_or(nullable=True), item[name])
            if name == "key" and text is not None and len(text) < MIN_KEY_LENGTH:
                self._refuse(f"{entry.path}.key", f"needs at least {MIN_KEY_LENGTH} characters")
            elif name == "key" and text is not None and not (text.isascii() and text.isprintable()):
                self._refuse(f"{entry.path}.key", "must be printable ASCII, to go into a header")
            elif text == "" and name == "password":
                self._refuse(f"{entry.path}.password", "must not be empty")
            entry.secrets[name] = text

    def _read_models(self, path: str, items: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for at, item in self._mappings(path, items):
            self._refuse_unknown(at, item, MODEL_NAMES)
            name = self._read_name(at, item, "name")
            if name in found:
                self._refuse(at, f"model {name} is given twice")
            values: dict[str, Any] = {"by_hand": True}
            for key in ("by_hand", *MODEL_FIELDS):
                if key in item:
                    target = MODEL_FIELDS.get(key, key)
                    self._read_field(
                        values, at, key, column_of(BackendModel, target), item[key], target
                    )
            found[name] = values
        return found

    def _read_settings(self, item: Any) -> None:
        if not isinstance(item, dict):
            self._refuse("settings", "must be a mapping")
            return
        for name, value in item.items():
            if name in SETTINGS_NAMES:
                column = column_of(SiteSettings, name)
                self._read_field(self.settings, "settings", name, column, value)
            else:
                self._refuse(f"settings.{name}", _why_no_setting(str(name)))

    # ---- single values

    def _read_name(self, path: str, item: dict[Any, Any], name: str) -> str:
        """A value that identifies an entry; empty when it cannot be had, which is then noted."""
        if name not in item:
            self._refuse(f"{path}.{name}", "is missing")
            return ""
        text: str | None = self._read(path, name, read_text, item[name])
        if text is not None and name in ("user", "username"):
            text = User.normalize_username(text)  # as it is stored
        if text is not None and not text.strip():
            self._refuse(f"{path}.{name}", "must not be empty")
            return ""
        return text or ""

    def _read_field(
        self,
        values: dict[str, Any],
        path: str,
        name: str,
        column: models.Field[Any, Any],
        value: Any,
        target: str = "",
    ) -> None:
        try:
            values[target or name] = read_value(column, value)
        except Refused as why:
            self._refuse(f"{path}.{name}", str(why))

    def _read(self, path: str, name: str, read: Any, value: Any) -> Any:
        try:
            return read(value)
        except Refused as why:
            self._refuse(f"{path}.{name}", str(why))
            return None

    def _refuse_unknown(self, path: str, item: dict[Any, Any], known: set[str]) -> None:
        for name in item:
            if name not in known:
                self._refuse(f"{path}.{name}", f"unknown; there are {', '.join(sorted(known))}")

    def _refuse(self, path: str, why: str) -> None:
        self.errors.append(f"{path}: {why}")


def _text_or(nullable: bool) -> Any:
    return lambda value: None if value is None and nullable else read_text(value)


def _why_no_setting(name: str) -> str:
    for variable in (name.upper(), f"SCHEDULER_{name.upper()}"):
        if hasattr(settings, variable) and not name.startswith("_"):
            return f"can be set in the environment only, as {variable}"
    return f"unknown; there are {', '.join(SETTINGS_NAMES)}"
