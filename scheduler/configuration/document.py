"""The configuration file as text: YAML in and out, and what single values may be."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import yaml
from django.db import models

from backends.fields import NumbersField

#: YAML 1.2's numbers like 1e9, which YAML 1.1 takes for text.
_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


class Invalid(Exception):  # noqa: N818  what is wrong with a file, not a failure of the program
    """A file that was not applied. ``errors`` are lines that each begin with a path in it."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


class Refused(Exception):  # noqa: N818
    """A value that cannot stand where it does; the text says why."""


class _Loader(yaml.SafeLoader):
    """``yaml.safe_load`` that refuses a key given twice instead of forgetting the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """``yaml.safe_dump``, quoting what ``_Loader`` would take for a number."""


for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_document(text: str) -> dict[str, Any]:
    """The sections of a file. Raises: Invalid."""
    try:
        # _Loader is a SafeLoader.
        document = yaml.load(text, Loader=_Loader)  # noqa: S506
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Invalid([f"file: not YAML: {error}"]) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise Invalid(["file: must be a mapping of sections such as groups and users"])
    return document


def write_document(document: dict[str, Any]) -> str:
    """The text of a file, as ``read_document`` reads it."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def read_value(field: models.Field[Any, Any], value: Any) -> Any:
    """A value of the file as the model field takes it. Its range is left to the field's validators.

    Raises: Refused.
    """
    if value is None:
        if not field.null:
            raise Refused("must not be null")
        return None
    for kind, read in _READERS:
        if isinstance(field, kind):
            return read(value)
    raise TypeError(f"no reader for {field!r}")


def read_text(value: Any) -> str:
    """Raises: Refused."""
    if not isinstance(value, str):
        raise Refused(f"must be a text, not {_kind(value)}; put it in quotes")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused("must be valid Unicode") from None
    if "\0" in value:
        raise Refused("must not contain NUL")
    return value


def read_flag(value: Any) -> bool:
    """Raises: Refused."""
    if not isinstance(value, bool):
        raise Refused(f"must be true or false, not {_kind(value)}")
    return value


def _read_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"must be a whole number, not {_kind(value)}")
    return value


def _read_number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Refused(f"must be a number, not {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise Refused("is too large") from None
    if not math.isfinite(number):
        raise Refused("must be a finite number")
    return number


def _read_decimal(value: Any) -> Decimal:
    _read_number(value)
    return Decimal(str(value))


def _read_time(value: Any) -> datetime:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise Refused("must be a time like 2026-12-31T23:59:59+00:00") from None
    match value:
        case datetime():
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        case date():
            return datetime.combine(value, time(), tzinfo=UTC)
    raise Refused(f"must be a time like 2026-12-31T23:59:59+00:00, not {_kind(value)}")


def _read_names(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise Refused(f"must be a list of names, not {_kind(value)}")
    if not all(isinstance(name, str) and name.strip() for name in value):
        raise Refused("must be a list of non-empty texts")
    return [read_text(name) for name in value]


def _read_counts(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise Refused(f"must be a list of whole numbers, not {_kind(value)}")
    return [_read_count(item) for item in value]


_READERS: tuple[tuple[type[models.Field[Any, Any]], Any], ...] = (
    (models.BooleanField, read_flag),
    (models.IntegerField, _read_count),
    (models.FloatField, _read_number),
    (models.DecimalField, _read_decimal),
    (models.DateTimeField, _read_time),
    (NumbersField, _read_counts),
    (models.JSONField, _read_names),
    (models.CharField, read_text),
    (models.TextField, read_text),
)


def _kind(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value[:40]!r}"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case None:
            return "null"
    return f"a {type(value).__name__}"


def write_value(value: Any) -> Any:
    """A model field's value as the file carries it."""
    match value:
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case datetime():
            return value.isoformat()
    return value


def show(value: Any) -> str:
    """A value in a line of differences."""
    match write_value(value):
        case None:
            return "null"
        case bool() as flag:
            return "true" if flag else "false"
        case list() as items:
            return "[" + ", ".join(map(str, items)) + "]"
        case float() as number if number == int(number):
            return str(int(number))
        case other:
            return str(other)
