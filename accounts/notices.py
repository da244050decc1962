"""What people are told without having asked: by mail, and to a webhook if there is one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from urllib.parse import urlsplit

import httpx
from django.conf import settings
from django.core.mail import send_mail
from django.db.models import F, Q

from accounts.models import ApiKey, KeyUse, User

logger = logging.getLogger(__name__)

WEBHOOK_SECONDS = 10.0


def notify(kind: str, subject: str, text: str, users: Iterable[User]) -> None:
    """Tell these users, and the site's webhook: a POST of {"kind", "subject", "text", "users"}.

    What cannot be delivered is logged; nobody waits for it to be tried again.
    """
    people = list(users)
    addresses = [user.email for user in people if user.email]
    try:
        if addresses:
            send_mail(subject, text, None, addresses)
    except OSError as error:
        logger.error("Mail %r could not be sent: %s", subject, error)
    if not settings.NOTICE_WEBHOOK:
        return
    told = {"kind": kind, "subject": subject, "text": text, "users": [u.username for u in people]}
    try:
        httpx.post(settings.NOTICE_WEBHOOK, json=told, timeout=WEBHOOK_SECONDS).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        logger.error("The webhook at %s could not be told %r: %s", _host(), subject, _why(error))


def _host() -> str | None:
    """Where the webhook is; the rest of its address may be a secret."""
    address: str = settings.NOTICE_WEBHOOK
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _why(error: Exception) -> str:
    """What is known of the failure, without the address."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answered {error.response.status_code}"
    if isinstance(error, httpx.InvalidURL):
        return "its address is malformed"
    return f"{type(error).__name__} {error}".strip()


def managers() -> Iterable[User]:
    """Who is told of what concerns everybody."""
    return User.objects.filter(is_superuser=True, is_active=True)


def remind_of_expiry(now: datetime) -> int:
    """Tell the owners of keys that end within ``KEY_REMINDER_DAYS``, once for each end; returns
    how many keys there were."""
    soon = now + timedelta(days=float(settings.KEY_REMINDER_DAYS))
    ending = ApiKey.objects.filter(
        enabled=True, user__is_active=True, expires_at__gt=now, expires_at__lte=soon
    ).filter(Q(use=None) | Q(use__reminded_of=None) | ~Q(use__reminded_of=F("expires_at")))
    # First noted, then told: who is told twice believes it no more.
    keys = [key for key in ending.select_related("user") if _is_first_to_note(key)]
    for key in keys:
        notify(
            "key_expires",
            f"Your API key {key.name} expires soon",
            f"The key {key.prefix}… ({key.name}) of {key.user} expires at "
            f"{key.expires_at:%Y-%m-%d %H:%M %Z}. Rotate it, or ask for a longer time.",
            [key.user],
        )
    return len(keys)


def _is_first_to_note(key: ApiKey) -> bool:
    """Note that the owner is told; false where another worker has just done so."""
    KeyUse.objects.get_or_create(key=key)
    others = KeyUse.objects.filter(key=key).exclude(reminded_of=key.expires_at)
    return bool(others.update(reminded_of=key.expires_at))
