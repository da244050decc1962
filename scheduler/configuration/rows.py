"""The rows that a file's entries name, read in a few queries however many entries there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from django.db import models

from scheduler.configuration.entries import Entry
from scheduler.configuration.sections import SECTIONS, Section

_NAMES_PER_QUERY = 500
BY_NAME = {section.name: section for section in SECTIONS}
Key = tuple[str, ...]


class Rows:
    """{section and key: row} of what is stored under the names in the file."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._rows: dict[tuple[str, Key], models.Model] = {}
        for section_name, names in _names(entries).items():
            ordered = sorted(names)
            for start in range(0, len(ordered), _NAMES_PER_QUERY):
                self._load(BY_NAME[section_name], ordered[start : start + _NAMES_PER_QUERY])

    def _load(self, section: Section, names: list[str]) -> None:
        """Read the rows whose key begins with one of ``names``."""
        first = section.key[0]
        if first in section.references:
            first = f"{first}__{BY_NAME[section.references[first]].key[0]}"
        found = section.manager().filter(**{f"{first}__in": names})
        for row in found.select_related(*section.references):
            self.add(section, tuple(str(getattr(row, name)) for name in section.key), row)

    def get(self, section: Section, key: Key) -> models.Model | None:
        return self._rows.get((section.name, key))

    def add(self, section: Section, key: Key, row: models.Model) -> None:
        self._rows[section.name, key] = row

    def pop(self, section: Section, key: Key) -> models.Model | None:
        return self._rows.pop((section.name, key), None)


def _names(entries: Iterable[Entry]) -> dict[str, set[str]]:
    """{section: what its keys begin with}, of the entries and of what they refer to."""
    names: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        names[entry.section.name].add(entry.key[0])
        values = dict(zip(entry.section.key, entry.key, strict=True)) | entry.values
        for name, target in entry.section.references.items():
            if values.get(name) is not None:
                names[target].add(values[name])
    return names
