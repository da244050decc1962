"""Users from a CSV file: read, checked row by row, then saved whole or not at all.

The columns are named like the fields. ``username`` is needed; an empty cell leaves what is stored
(of a new user: the default) as it is. New users get no usable password.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import transaction
from simple_history.utils import bulk_create_with_history, bulk_update_with_history

from accounts.models import LIMITS, Group, Quota, User

_BATCH = 200  # rows in one statement
MOST_ROWS = 20_000
MOST_BYTES = 2_000_000  # the checked file comes back in a form, which may not be much larger
USER_COLUMNS = ("email", "first_name", "last_name", "role", "is_active")
QUOTA_COLUMNS = ("weight_override", *LIMITS)
COLUMNS = ("username", "group", *USER_COLUMNS, *QUOTA_COLUMNS)
_FLAGS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(kw_only=True)
class Row:
    """One line of the file. ``changes`` are like "email a@x → b@x"; empty: as it is already."""

    line: int
    username: str
    is_new: bool = False
    changes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    user: User | None = None  # as it is to be saved
    quota: Quota | None = None
    quota_changes: bool = False

    @property
    def is_changed(self) -> bool:
        return self.is_new or bool(self.changes)


@dataclass
class Import:
    """A file that was read. ``errors`` are about the whole; nothing is saved where any is."""

    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        return not self.errors and not any(row.errors for row in self.rows)

    def counts(self) -> dict[str, int]:
        """Of rows: new, changed, unchanged, wrong."""
        found = dict.fromkeys(("new", "changed", "unchanged", "wrong"), 0)
        for row in self.rows:
            found[_kind(row)] += 1
        return found


def _kind(row: Row) -> str:
    if row.errors:
        return "wrong"
    return "new" if row.is_new else "changed" if row.changes else "unchanged"


def decode(data: bytes) -> str:
    """A file's text. Raises: ValidationError."""
    if len(data) > MOST_BYTES:
        raise ValidationError(f"The file is larger than {MOST_BYTES:,} bytes; divide it.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValidationError("The file is not UTF-8 text. Save it as CSV UTF-8.") from None


def read(text: str) -> Import:
    """Check a file against what is stored, in a few queries however many rows it has."""
    if "\0" in text:
        return Import(errors=["The file is not text."])
    lines = csv.DictReader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    try:
        names = [name.strip().lower() for name in lines.fieldnames or []]
        if errors := _header_errors(names):
            return Import(errors=errors)
        lines.fieldnames = names
        cells = [(lines.line_num, line) for line in lines]
    except csv.Error as error:
        return Import(errors=[f"After line {lines.line_num}: {error}."])
    if not cells or len(cells) > MOST_ROWS:
        return Import(errors=[f"The file has {len(cells):,} rows; 1 to {MOST_ROWS:,} can be read."])
    return Import(rows=list(_Reader(names).rows(cells)))


def save(found: Import, reason: str, by: User | None = None) -> int:
    """Save a valid import in one transaction; returns how many users were made or changed.

    In bulk, since the database is locked meanwhile: 5,000 users with quotas take some 3 s.
    """
    rows = [row for row in found.rows if row.is_changed and row.user is not None]
    note = {"batch_size": _BATCH, "default_user": by, "default_change_reason": reason}
    with transaction.atomic():
        new = [row.user for row in rows if row.is_new]
        old = [row.user for row in rows if not row.is_new]
        bulk_create_with_history(new, User, **note)
        bulk_update_with_history(old, User, [*USER_COLUMNS, "group", "is_staff"], **note)
        changed = [row for row in rows if row.quota_changes]
        for row in changed:
            row.quota.user = row.user  # type: ignore[union-attr]
        fresh = [row.quota for row in changed if row.quota and not row.quota.pk]
        kept = [row.quota for row in changed if row.quota and row.quota.pk]
        bulk_create_with_history(fresh, Quota, **note)
        bulk_update_with_history(kept, Quota, list(QUOTA_COLUMNS), **note)
    return len(rows)


def _delimiter(text: str) -> str:
    """Spreadsheets of many countries write semicolons."""
    header = text.partition("\n")[0]
    return max(",;\t", key=header.count)


def _header_errors(names: list[str]) -> list[str]:
    errors = []
    if "username" not in names:
        errors.append("There is no column username.")
    if unknown := sorted({name for name in names if name not in COLUMNS}):
        errors.append(f"Unknown columns: {', '.join(unknown)}. Known: {', '.join(COLUMNS)}.")
    if len(set(names)) < len(names):
        errors.append("A column is given twice.")
    return errors


class _Reader:
    """Turns cells into rows, with what is stored read once."""

    def __init__(self, names: list[str]) -> None:
        self._groups = {group.name: group for group in Group.objects.all()}
        self._users = {user.username: user for user in User.objects.select_related("group")}
        self._quotas = {quota.user_id: quota for quota in Quota.objects.all()}
        self._forms = {name: _form_field(name) for name in names if name not in _OWN}
        self._seen: dict[str, int] = {}

    def rows(self, cells: list[tuple[int, dict[Any, Any]]]) -> Iterator[Row]:
        for number, line in cells:
            yield self._row(number, line)

    def _row(self, number: int, line: dict[Any, Any]) -> Row:
        extra, missing = line.pop(None, None), [n for n, cell in line.items() if cell is None]
        texts = {name: (cell or "").strip() for name, cell in line.items()}
        row = Row(line=number, username=User.normalize_username(texts.pop("username")))
        if extra or missing:
            row.errors.append("The number of cells is not that of the columns.")
        elif not row.username:
            row.errors.append("username: is missing.")
        elif first := self._seen.get(row.username):
            row.errors.append(f"username: is already in line {first}.")
        else:
            self._seen[row.username] = number
            self._read(row, {name: text for name, text in texts.items() if text})
        return row

    def _read(self, row: Row, texts: dict[str, str]) -> None:
        values = {}
        for name, text in texts.items():
            try:
                values[name] = self._value(name, text)
            except ValidationError as error:
                row.errors += [f"{name}: {message}" for message in error.messages]
        user = self._users.get(row.username)
        row.is_new = user is None
        if user is None:
            user = User(username=row.username)
            user.set_unusable_password()
        row.user = user
        quota = self._quotas.get(user.pk) or Quota()
        row.quota = quota if any(name in QUOTA_COLUMNS for name in values) else None
        for name, value in values.items():
            _assign(row, quota if name in QUOTA_COLUMNS else user, name, value)
        user.imply_staff()
        _check(row)

    def _value(self, name: str, text: str) -> Any:
        if name == "group":
            if text not in self._groups:
                raise ValidationError(f"there is no group {text!r}.")
            return self._groups[text]
        if name == "is_active":
            if text.lower() not in _FLAGS:
                raise ValidationError("must be yes or no.")
            return _FLAGS[text.lower()]
        value = self._forms[name].clean(text)
        return User.objects.normalize_email(value) if name == "email" else value


_OWN = ("username", "group", "is_active")
_NOT_IN_FILES = {one.name for one in User._meta.fields} - {"username", *USER_COLUMNS}


def _form_field(name: str) -> forms.Field:
    """The form's field of a column, so that a cell is read as what is typed there."""
    column: Any = (Quota if name in QUOTA_COLUMNS else User)._meta.get_field(name)
    found: forms.Field = column.formfield()
    return found


def _assign(row: Row, target: User | Quota, name: str, value: Any) -> None:
    before = getattr(target, name)
    if before != value:
        setattr(target, name, value)
        row.quota_changes |= target is row.quota
        row.changes.append(f"{name} {_shown(before)} → {_shown(value)}")


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    # Weights without the zeros that the database keeps.
    return f"{value.normalize():f}" if isinstance(value, Decimal) else str(value)


def _check(row: Row) -> None:
    """The models' own checks, without asking the database what was already read."""
    user, quota = row.user, row.quota
    if row.errors or user is None:
        return
    checks: list[Callable[[], None]] = [lambda: user.clean_fields(exclude=_NOT_IN_FILES)]
    if user.is_superuser:
        checks.append(user.clean)  # the last one stays active
    if quota is not None:
        checks.append(lambda: quota.clean_fields(exclude=("user",)))
    for check in checks:
        try:
            check()
        except ValidationError as error:
            row.errors += _messages(error)


def _messages(error: ValidationError) -> list[str]:
    if not hasattr(error, "error_dict"):
        return error.messages
    return [f"{name}: {text}" for name, texts in error.message_dict.items() for text in texts]
