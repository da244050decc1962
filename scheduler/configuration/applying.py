"""``manage.py apply``: a file's entries into the database, all of them or none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.contrib.auth.hashers import check_password, make_password
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import models, transaction
from django.db.models import ProtectedError

from accounts.models import ApiKey, User, hash_key
from backends.models import Backend, BackendModel
from scheduler.configuration.document import Invalid, read_document, show
from scheduler.configuration.entries import Entry, Reader
from scheduler.configuration.rows import BY_NAME, Rows
from scheduler.configuration.sections import MODEL_FIELDS, set_by_hand
from scheduler.models import SiteSettings

#: Deleted after everything else was saved, since other entries may leave them only then.
_REFERRED_TO = ("groups", "nodes")
_IN_FILE = {column: name for name, column in MODEL_FIELDS.items()}


@dataclass
class Changes:
    """What applying did, or would do: lines of differences, and the backends to ask anew."""

    lines: list[str] = field(default_factory=list)
    backend_ids: list[int] = field(default_factory=list)


def apply_text(text: str, *, dry_run: bool = False, reason: str = "apply") -> Changes:
    """Bring the database to what ``text`` says, in one transaction; ``reason`` goes into the
    history. With ``dry_run`` nothing is kept. Raises: Invalid, and then nothing has changed."""
    reader = Reader()
    reader.read(read_document(text))
    passwords = _hashed_passwords(reader.entries)
    with transaction.atomic():
        application = _Application(reader, passwords, reason)
        application.run()
        if application.errors:
            raise Invalid(application.errors)
        if dry_run:
            transaction.set_rollback(True)
    return application.changes


def _hashed_passwords(entries: list[Entry]) -> dict[str, str]:
    """Hashes for the users whose password changes. Before the transaction, since hashing is slow
    on purpose and the database would be locked meanwhile."""
    given = {
        entry.key[0]: entry.secrets["password"]
        for entry in entries
        if entry.section.model is User and entry.secrets.get("password")
    }
    stored: dict[str, str] = {}
    if given:
        stored = dict(User.objects.values_list("username", "password"))
    return {
        username: make_password(password)
        for username, password in given.items()
        if not check_password(password, stored.get(username, ""))
    }


class _Application:
    """One run over a file's entries, inside a transaction."""

    def __init__(self, reader: Reader, passwords: dict[str, str], reason: str) -> None:
        self.errors = reader.errors
        self.changes = Changes()
        self._reader = reader
        self._passwords = passwords
        self._reason = reason
        self._rows = Rows(reader.entries)
        self._named = {(e.section.name, e.key) for e in reader.entries if not e.absent}

    def run(self) -> None:
        absent = [entry for entry in self._reader.entries if entry.absent]
        for entry in reversed(absent):
            if entry.section.name not in _REFERRED_TO:
                self._delete(entry)
        for entry in self._reader.entries:
            if not entry.absent:
                self._upsert(entry)
        for entry in absent:
            if entry.section.name in _REFERRED_TO:
                self._delete(entry)
        self._save_settings()

    # ---- entries

    def _delete(self, entry: Entry) -> None:
        row = self._rows.pop(entry.section, entry.key)
        if row is None:
            return
        try:
            self._give_reason(row)
            row.delete()
        except ProtectedError as error:
            holders = sorted(map(str, error.protected_objects))
            shown = ", ".join(holders[:5]) + (" …" if len(holders) > 5 else "")
            self._refuse(entry.path, f"{entry.label} is still used by {shown}")
            return
        self.changes.lines.append(f"- {entry.label}")

    def _upsert(self, entry: Entry) -> None:
        values = self._resolved(entry)
        if values is None:
            return
        row = self._rows.get(entry.section, entry.key)
        is_new = row is None
        if row is None:
            row = entry.section.model(
                **{name: values[name] for name in entry.section.key if name in values}
            )
        old = _assign(row, values)
        secrets = self._assign_secrets(entry, row, is_new)
        differences = _differences(old, row) + secrets
        if is_new or differences:
            if not self._check(entry, row):
                return
            # Checking brings e-mail addresses into their usual form: maybe nothing differs now.
            differences = _differences(old, row) + secrets
        if is_new or differences:
            self._keep(row)
            self._rows.add(entry.section, entry.key, row)
        nested = self._apply_models(entry, row) if isinstance(row, Backend) else []
        if is_new:
            self.changes.lines.append(f"+ {entry.label}")
        elif differences:
            self.changes.lines.append(f"~ {entry.label}: {', '.join(differences)}")
        self.changes.lines += nested
        if isinstance(row, Backend) and (is_new or differences or nested):
            self.changes.backend_ids.append(row.pk)

    def _resolved(self, entry: Entry) -> dict[str, Any] | None:
        """The values to set, with rows in place of their names; None when one is unknown."""
        values = dict(zip(entry.section.key, entry.key, strict=True)) | entry.values
        for name, target in entry.section.references.items():
            text = values.get(name)
            if text is None:
                continue
            section = BY_NAME[target]
            values[name] = self._rows.get(section, (text,))
            if values[name] is None:
                # One that this file names but that could not be saved has its own error.
                if (target, (text,)) not in self._named:
                    self._refuse(f"{entry.path}.{name}", f"there is no {section.noun} {text!r}")
                return None
        return values

    def _assign_secrets(self, entry: Entry, row: models.Model, is_new: bool) -> list[str]:
        match row:
            case User():
                if is_new:
                    row.set_unusable_password()
                if encoded := self._passwords.get(row.username):
                    row.password = encoded
                    return ["password changed"]
            case ApiKey():
                return self._assign_key(entry, row, is_new)
            case _:
                given = {name: text or None for name, text in entry.secrets.items()}
                old = _assign(row, given)
                return [f"{name} changed" for name in given if given[name] != old[name]]
        return []

    def _assign_key(self, entry: Entry, row: ApiKey, is_new: bool) -> list[str]:
        key = entry.secrets.get("key")
        if key is not None and row.sha256 != hash_key(key):
            row.set_key(key)
            return ["key changed"]
        if is_new and "key" not in entry.secrets:
            self._refuse(f"{entry.path}.key", f"is missing: there is no {entry.label} yet")
        return []

    def _check(self, entry: Entry, row: models.Model) -> bool:
        """Whether a row may be saved; why not is noted."""
        try:
            row.full_clean(exclude=set(entry.section.references))
        except ValidationError as error:
            self._refuse_each(entry.path, error)
            return False
        return True

    def _keep(self, row: models.Model) -> None:
        self._give_reason(row)
        row.save()

    def _give_reason(self, row: models.Model) -> None:
        row._change_reason = self._reason  # type: ignore[attr-defined]

    # ---- a backend's models

    def _apply_models(self, entry: Entry, backend: Backend) -> list[str]:
        """Make the models given by hand those of the entry; what polls found stays as found."""
        if entry.models is None:
            return []
        rows = {row.name: row for row in backend.models.all()}
        lines = []
        for number, (name, values) in enumerate(entry.models.items()):
            row = rows.get(name) or BackendModel(backend=backend, name=name, by_hand=False)
            is_new = row.pk is None
            differences = _differences(_assign(row, values), row)
            if not (is_new or differences):
                continue
            try:
                row.full_clean(exclude={"backend"})
            except ValidationError as error:
                self._refuse_each(f"{entry.path}.models[{number}]", error)
                continue
            row.save()
            label = f"model {name} of {entry.label}"
            lines.append(f"+ {label}" if is_new else f"~ {label}: {', '.join(differences)}")
        left_out = sorted(rows.keys() - entry.models.keys())
        forgotten = [name for name in left_out if _forget_by_hand(rows[name])]
        return lines + [f"- model {name} of {entry.label}" for name in forgotten]

    # ---- settings

    def _save_settings(self) -> None:
        row = SiteSettings.objects.filter(pk=1).first() or SiteSettings(pk=1)
        differences = _differences(_assign(row, self._reader.settings), row)
        if not differences:
            return
        try:
            row.full_clean(validate_unique=False)
        except ValidationError as error:
            self._refuse_each("settings", error)
            return
        self._keep(row)
        self.changes.lines.append(f"~ settings: {', '.join(differences)}")

    # ---- errors

    def _refuse(self, path: str, why: str) -> None:
        self.errors.append(f"{path}: {why}")

    def _refuse_each(self, path: str, error: ValidationError) -> None:
        known = {line.split(": ")[0] for line in self.errors}
        for name, messages in error.message_dict.items():
            if name == "sha256":
                self._refuse(f"{path}.key", "is in use already")
                continue
            at = path if name == NON_FIELD_ERRORS else f"{path}.{_IN_FILE.get(name, name)}"
            # What could not be read is not there, which need not be said too.
            if at not in known:
                self.errors += [f"{at}: {message}" for message in messages]


def _assign(row: models.Model, values: dict[str, Any]) -> dict[str, Any]:
    """Set ``values`` and return what was there before."""
    old = {name: getattr(row, name, None) for name in values}
    for name, value in values.items():
        setattr(row, name, value)
    return old


def _differences(old: dict[str, Any], row: models.Model) -> list[str]:
    """What is not as it was, each like ``max_concurrent 4 → 8``."""
    return [
        f"{name} {show(before)} → {show(getattr(row, name))}"
        for name, before in old.items()
        if getattr(row, name) != before
    ]


def _forget_by_hand(row: BackendModel) -> bool:
    """Take back what was given by hand; a model that no poll found goes. False: nothing to do."""
    if not set_by_hand(row):
        return False
    if not row.listed:
        row.delete()
        return True
    row.by_hand = False
    for name in MODEL_FIELDS.values():
        setattr(row, name, None)
    row.save()
    return True
