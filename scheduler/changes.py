"""Every change of the configuration, of all kinds of rows together; and taking one back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db import models, transaction
from django.db.models import OuterRef, Subquery
from django.utils import timezone

from accounts.forms import weight_text
from accounts.models import ApiKey, Boost, Group, ModelLimits, Quota, User
from audit.models import Deed
from backends.models import Alias, Backend, BackendModel, ModelStrategy, Node
from scheduler.models import ModelPrice, SiteSettings

#: {name in addresses: (model, its columns that name a row)}
TRACKED: Mapping[str, tuple[type[models.Model], str]] = {
    "group": (Group, "name"),
    "user": (User, "username"),
    "quota": (Quota, "user"),
    "key": (ApiKey, "name"),
    "boost": (Boost, "name"),
    "backend": (Backend, "name"),
    "model": (BackendModel, "name backend"),
    "node": (Node, "name"),
    "alias": (Alias, "name"),
    "model limits": (ModelLimits, "model_name"),
    "price": (ModelPrice, "model_name"),
    "strategy": (ModelStrategy, "model_name"),
    "settings": (SiteSettings, ""),
    "deed": (Deed, "subject"),
}
PAGE_ROWS = 50
_INSTANT = timedelta(microseconds=1)
NOTHING = "–"
_ACTIONS = {"+": "made", "~": "changed", "-": "deleted"}
_WHAT_IF = re.compile(r"What-if (\d{1,18}):")
_REASON_LENGTH = 100  # of the history's column


class CannotRevert(Exception):  # noqa: N818  a state of the row, told to whoever asked
    """Why a change cannot be taken back, in words."""


@dataclass(frozen=True, slots=True)
class Value:
    """One column before and after."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row of the page."""

    kind: str  # a key of ``TRACKED``
    history_id: int
    at: datetime
    who: str
    address: str  # the client's; empty for a command
    via: str  # the page, operation or command
    what: str  # the row's name
    action: str  # made, changed, deleted
    values: Sequence[Value]
    reason: str
    what_if_id: int | None
    may_revert: bool


def changes(
    user: Any, *, kind: str = "", before: datetime | None = None
) -> tuple[list[Change], datetime | None]:
    """The newest ``PAGE_ROWS`` changes that ``user`` may read, and where the next page begins.

    Two queries for each kind of row, however many changes there are.
    """
    found: list[tuple[str, Any]] = []
    for name, (model, _) in TRACKED.items():
        if (not kind or kind == name) and may(user, "view", model):
            found += [(name, row) for row in _newest(model, before)]
    found.sort(key=lambda one: (one[1].history_date, one[1].history_id), reverse=True)
    page, rest = found[:PAGE_ROWS], found[PAGE_ROWS:]
    earlier = _earlier(page)
    return (
        [_change(user, name, row, earlier.get((name, row.previous_id))) for name, row in page],
        page[-1][1].history_date if rest else None,
    )


def every_change(user: Any, kind: str = "") -> Iterator[Change]:
    """All that ``user`` may read, newest first, page by page."""
    before: datetime | None = None
    seen: set[tuple[str, int]] = set()
    while True:
        # Rows of one instant may lie on both sides of a page's end: those are looked at again.
        page, further = changes(user, kind=kind, before=before and before + _INSTANT)
        new = [one for one in page if (one.kind, one.history_id) not in seen]
        yield from new
        seen = {(one.kind, one.history_id) for one in page}
        if further is None:
            return
        before = further if new else further - _INSTANT


def may(user: Any, action: str, model: type[models.Model]) -> bool:
    """Whether ``user`` may ``view`` or ``change`` such rows."""
    return bool(user.has_perm(f"{model._meta.app_label}.{action}_{model._meta.model_name}"))


def _newest(model: Any, before: datetime | None) -> Iterable[Any]:
    history = model.history
    previous = history.filter(
        **{model._meta.pk.name: OuterRef(model._meta.pk.name)},
        history_id__lt=OuterRef("history_id"),
    ).order_by("-history_id")
    rows = history.select_related("history_user", *_references(history.model))
    if before is not None:
        rows = rows.filter(history_date__lt=before)
    rows = rows.annotate(previous_id=Subquery(previous.values("history_id")[:1]))
    return list(rows.order_by("-history_date", "-history_id")[: PAGE_ROWS + 1])


def _references(history: Any) -> list[str]:
    """The columns of a history that point to other rows."""
    return [one.name for one in history.tracked_fields if one.related_model is not None]


def _earlier(page: Iterable[tuple[str, Any]]) -> dict[tuple[str, int], Any]:
    """{(kind, history id): the version before} of the page's rows."""
    wanted: dict[str, list[int]] = {}
    for name, row in page:
        if row.previous_id is not None:
            wanted.setdefault(name, []).append(row.previous_id)
    found = {}
    for name, ids in wanted.items():
        history: Any = TRACKED[name][0].history  # type: ignore[attr-defined]
        rows = history.filter(history_id__in=ids).select_related(*_references(history.model))
        found.update({(name, row.history_id): row for row in rows})
    return found


def _change(user: Any, kind: str, row: Any, earlier: Any) -> Change:
    model, columns = TRACKED[kind]
    reason = row.history_change_reason or ""
    link = _WHAT_IF.match(reason)
    # A deed is said by what was done; of other rows, what was done to them.
    action = getattr(row, "action", "") or _ACTIONS[row.history_type]
    values = [
        Value(str(one.verbose_name), _shown(earlier, one), _shown(row, one))
        for one in _changed(row, earlier)
    ]
    return Change(
        kind=kind,
        history_id=row.history_id,
        at=row.history_date,
        who=row.history_user.username if row.history_user else row.history_actor,
        address=row.history_address,
        via=row.history_via,
        what=" on ".join(_shown(row, model._meta.get_field(one)) for one in columns.split()),
        action=action,
        values=values if row.history_type == "~" else [],
        reason=reason,
        what_if_id=int(link[1]) if link else None,
        may_revert=row.history_type == "~" and bool(values) and may(user, "change", model),
    )


def _changed(row: Any, earlier: Any) -> list[Any]:
    if earlier is None:
        return []
    return [
        one
        for one in row.tracked_fields
        if not one.primary_key and getattr(row, one.attname) != getattr(earlier, one.attname)
    ]


def _shown(row: Any, column: Any) -> str:
    value = getattr(row, column.attname)
    if value is None or value == "":
        return NOTHING
    if column.related_model is not None:
        try:
            return str(getattr(row, column.name))
        except ObjectDoesNotExist:
            return f"#{value} (deleted)"
    if isinstance(value, Decimal):
        return weight_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return f"{timezone.localtime(value):%Y-%m-%d %H:%M:%S %Z}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@transaction.atomic
def revert(kind: str, history_id: int) -> str:
    """Take one change back and say what was done. What else was changed since stays.

    Raises: CannotRevert.
    """
    model: Any = TRACKED[kind][0]
    row = model.history.filter(history_id=history_id, history_type="~").first()
    if row is None:
        raise CannotRevert("There is no such change.")
    earlier = row.prev_record
    columns = _changed(row, earlier)
    instance = (
        model.objects.select_for_update().filter(pk=getattr(row, model._meta.pk.attname)).first()
    )
    if instance is None:
        raise CannotRevert("What was changed has been deleted.")
    for one in columns:
        if getattr(instance, one.attname) != getattr(row, one.attname):
            raise CannotRevert(f"Its {one.verbose_name} has been changed again since.")
        setattr(instance, one.attname, getattr(earlier, one.attname))
    try:
        instance.full_clean()
    except ValidationError as error:
        raise CannotRevert("; ".join(error.messages)) from None
    when = row.history_date.strftime("%Y-%m-%d %H:%M")
    instance._change_reason = f"Takes back the change of {when}"[:_REASON_LENGTH]
    instance.save()
    return ", ".join(
        f"{one.verbose_name} {_shown(row, one)} → {_shown(earlier, one)}" for one in columns
    )
