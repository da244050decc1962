"""Who is asking: staff sessions for the pages, API keys for the APIs, roles for permissions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from django.apps import apps
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import AnonymousUser
from django.core.signing import BadSignature, TimestampSigner
from django.db.models import Model, Q
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied, Throttled
from rest_framework.request import Request

from accounts.attempts import note_failed_key, subscriber_of, too_many_failed
from accounts.models import Api, ApiKey, Role, User, hash_key

#: Removing a waiting request; Django has no such permission of its own.
CANCEL_JOB = "scheduler.cancel_job"
#: Reading captured prompts, which those who read everything else may not.
READ_CAPTURES = "scheduler.read_capture"


@cache
def _permissions() -> Mapping[str, frozenset[str]]:
    """{who: "app.action_model"}: of auditors, operators and superusers."""
    known = {
        f"{model._meta.app_label}.{action}_{model._meta.model_name}"
        for model in apps.get_models()
        for action in model._meta.default_permissions
    }
    reading = {name for name in known if name.partition(".")[2].startswith("view_")}
    # What has been is read by everybody and rewritten by nobody.
    past = {name for name in known - reading if "_historical" in name}
    operating = {name for name in known - past if name.startswith("backends.")}
    return {
        "auditor": frozenset(reading),
        "operator": frozenset(reading | operating | {CANCEL_JOB}),
        "superuser": frozenset(known | {CANCEL_JOB, READ_CAPTURES}),
    }


def permissions_of(user: User | AnonymousUser) -> frozenset[str]:
    """What ``user`` may do on the pages and with the management API.

    A superuser everything; an operator reads everything, changes backends and removes waiting
    requests; an auditor, and staff without a role, reads everything; anybody else nothing.
    """
    if not user.is_active:
        return frozenset()
    if user.is_superuser:
        return _permissions()["superuser"]
    role = getattr(user, "role", Role.USER)
    if role == Role.OPERATOR:
        return _permissions()["operator"]
    if role == Role.AUDITOR or user.is_staff:
        return _permissions()["auditor"]
    return frozenset()


class RoleBackend(ModelBackend):
    """Passwords as in Django; permissions from ``User.role`` instead of rows in the database.

    ``has_perm`` and ``has_module_perms`` are Django's, on the set given here. A permission holds
    for every object.
    """

    def get_user_permissions(self, user_obj: Any, obj: Model | None = None) -> set[str]:
        return self.get_all_permissions(user_obj)

    def get_group_permissions(self, user_obj: Any, obj: Model | None = None) -> set[str]:
        return set()  # our groups are about shares

    def get_all_permissions(self, user_obj: Any, obj: Model | None = None) -> set[str]:
        return set(permissions_of(user_obj))


_LOCAL = "local:"
_LOCAL_SECONDS = 60


def local_pass(username: str) -> str:
    """What the command line sends in a key's place: who can read the site's secret may act as
    anybody anyhow. Good for a minute, as that user."""
    return _LOCAL + TimestampSigner(salt=_LOCAL).sign(username)


def _holder_of(local: str) -> User:
    try:
        name = TimestampSigner(salt=_LOCAL).unsign(local.removeprefix(_LOCAL), _LOCAL_SECONDS)
        return User.objects.get(username=name, is_active=True)
    except (BadSignature, User.DoesNotExist):
        raise AuthenticationFailed("This pass is not valid, or not any more.") from None


def management_key(key: str) -> ApiKey:
    """The key, with its user. Raises: AuthenticationFailed, PermissionDenied."""
    now, digest = timezone.now(), hash_key(key)
    not_expired = Q(expires_at__isnull=True) | Q(expires_at__gt=now)
    this = Q(sha256=digest) | Q(previous_sha256=digest, previous_until__gt=now)
    found = (
        ApiKey.objects.select_related("user")
        .filter(not_expired, this, enabled=True, user__is_active=True)
        .first()
    )
    if found is None:
        raise AuthenticationFailed("Unknown, disabled or expired API key.")
    if found.allowed_apis is not None and Api.MANAGEMENT not in found.allowed_apis:
        raise PermissionDenied("This key is not for the management API.")
    return found


def check_attempts(subscriber: str) -> None:
    """A wrong key has come. Raises: Throttled where there were too many."""
    wait = note_failed_key(subscriber)
    if wait is not None:
        raise Throttled(wait, too_many_failed())


class ApiKeyAuthentication(BaseAuthentication):
    """``Authorization: Bearer KEY`` on the management API, or a local pass in the key's place."""

    def authenticate(self, request: Request) -> tuple[User, ApiKey | None] | None:
        scheme, _, key = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None
        try:
            if key.startswith(_LOCAL):
                return _holder_of(key), None
            found = management_key(key.strip())
        except AuthenticationFailed:
            check_attempts(subscriber_of(request.META.get("REMOTE_ADDR") or ""))
            raise
        return found.user, found

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"
