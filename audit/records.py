"""Columns of every history: the actor by name, the address, and the way a change came."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Any

from django.db import models
from simple_history.models import HistoricalRecords

VIA_LENGTH = 200


def current_actor() -> str:
    """Who is asking, by name; in a command, whom the operating system knows."""
    request = _request()
    if request is not None:
        user = getattr(request, "user", None)
        return user.get_username() if user is not None and user.is_authenticated else ""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return ""


def current_address() -> str:
    """The client's address; empty in a command."""
    request = _request()
    return "" if request is None else str(request.META.get("REMOTE_ADDR") or "")[:45]


def current_via() -> str:
    """The page or operation, with the key that it was asked with; or the command."""
    request = _request()
    if request is None:
        name = " ".join(one for one in sys.argv[1:2] if not one.startswith("-"))
        return f"{Path(sys.argv[0]).name} {name}".strip()[:VIA_LENGTH]
    prefix = getattr(getattr(request, "auth", None), "prefix", "")
    by = f" with key {prefix}…" if prefix else ""
    return f"{request.method} {request.path}{by}"[:VIA_LENGTH]


def _request() -> Any:
    return getattr(HistoricalRecords.context, "request", None)


class Audited(models.Model):
    """A base for histories. The name stays where the actor's account is deleted."""

    history_actor = models.CharField(max_length=150, default=current_actor, editable=False)
    history_address = models.CharField(max_length=45, default=current_address, editable=False)
    history_via = models.CharField(max_length=VIA_LENGTH, default=current_via, editable=False)

    class Meta:
        abstract = True


def audited(**options: Any) -> HistoricalRecords:
    """A history with these columns."""
    return HistoricalRecords(bases=[Audited], **options)
