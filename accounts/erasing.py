"""Erasing a user's personal data: the person goes, the totals stay.

What is done is listed in docs/api.md. Rows of requests stay, with the user's number and without
the name, so that sums per group, model and day are as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from axes.models import AccessAttempt, AccessFailureLog, AccessLog
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from accounts.models import LAST_SUPERUSER, ApiKey, Boost, Role, User, is_last_superuser
from audit.triggers import histories

#: Rows of requests that are rewritten in one transaction, so that the log is never locked for long.
BATCH = 500
#: How long after they arrived requests may be recorded.
LATE = timedelta(days=1)
_ERASED = "erased"


def erased_name(user: User) -> str:
    return f"{_ERASED}-{user.pk}"


def erase(user: User, reason: str = "personal data erased") -> int:
    """Erase ``user``; returns how many rows of requests were rewritten.

    Erasing again within a day does the rest: requests that ran meanwhile are recorded with the
    old name.

    Raises: ValidationError for the last superuser, and when the new name is somebody else's.
    """
    names = _names_ever_used(user)
    with transaction.atomic():
        _erase_account(user, reason)
        _erase_history(user)
        _erase_traces(user, names)
    return _erase_decisions(user, names)


def _names_ever_used(user: User) -> set[str]:
    past: Any = User.history.filter(id=user.pk)
    return {user.username, *past.values_list("username", flat=True)}


def _erase_account(user: User, reason: str) -> None:
    if is_last_superuser(user.pk):
        raise ValidationError(LAST_SUPERUSER)
    name = erased_name(user)
    if User.objects.filter(username=name).exclude(pk=user.pk).exists():
        raise ValidationError(f"Another user is named {name}.")
    user.username = name
    user.first_name = user.last_name = user.email = ""
    user.is_active = user.is_staff = user.is_superuser = False
    user.role = Role.USER
    user.set_unusable_password()
    user._change_reason = reason  # type: ignore[attr-defined]
    user.save()
    rows: list[Any] = [*user.api_keys.all(), *user.boosts.all()]
    for row in rows:
        row._change_reason = reason
        row.delete()


def _erase_history(user: User) -> None:
    """Of user, keys and boosts: what was changed and by whom stays, without the person."""
    past: Any = User.history.filter(id=user.pk)
    past.update(username=user.username, first_name="", last_name="", email="")
    keys: Any = ApiKey.history.filter(user_id=user.pk)
    keys.update(name=_ERASED, prefix="", capture_reason="")
    boosts: Any = Boost.history.filter(user_id=user.pk)
    boosts.update(name=_ERASED, reason="")
    for history in histories():
        rows: Any = history._default_manager  # noqa: SLF001
        rows.filter(history_user=user).update(history_actor=user.username)


def _erase_traces(user: User, names: Iterable[str]) -> None:
    """Django's log of the pages, and the sign-ins with their addresses."""
    kind = ContentType.objects.get_for_model(User)
    LogEntry.objects.filter(content_type=kind, object_id=str(user.pk)).update(
        object_repr=user.username
    )
    for log in (AccessAttempt, AccessFailureLog, AccessLog):
        log.objects.filter(username__in=names).delete()


def _erase_decisions(user: User, names: Iterable[str]) -> int:
    """Every row with one of the names, found by its index, and what came late by its date."""
    erased = 0
    # By its label: this app may not import the one that is built on it.
    decisions: Any = apps.get_model("scheduler", "Decision").objects
    mine = decisions.filter(user_id=user.pk).exclude(user=user.username).order_by()
    late = mine.filter(arrived_at__gte=timezone.now() - LATE)
    for rows in (*(mine.filter(user=name) for name in names), late):
        for batch in _batches(rows):
            with transaction.atomic():
                erased += decisions.filter(pk__in=batch).update(
                    user=user.username, end_user="", client_request_id=None
                )
    return erased


def _batches(rows: QuerySet[Any]) -> Iterator[list[int]]:
    """Numbers of the rows that are still to be done, which each batch makes fewer."""
    while batch := list(rows.values_list("pk", flat=True)[:BATCH]):
        yield batch
