"""Who is asking: staff sessions for the pages, API keys for the APIs, roles for permissions."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import AnonymousUser
from django.db.models import Model, Q
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from accounts.models import ApiKey, Role, User, hash_key

_OPERATOR_APPS = ("backends",)


class RoleBackend(ModelBackend):
    """Passwords as in Django; permissions from ``User.role`` instead of rows in the database."""

    def get_all_permissions(self, user_obj: Any, obj: Model | None = None) -> set[str]:
        """No enumerable set: ``has_perm`` decides by role. Superusers pass before this is asked."""
        return set()

    def has_perm(self, user_obj: Any, perm: str, obj: Model | None = None) -> bool:
        if isinstance(user_obj, AnonymousUser) or not user_obj.is_active:
            return False
        app, _, action = perm.partition(".")
        if user_obj.role == Role.OPERATOR:
            return action.startswith("view_") or app in _OPERATOR_APPS
        return user_obj.role == Role.AUDITOR and action.startswith("view_")

    def has_module_perms(self, user_obj: Any, app_label: str) -> bool:
        return bool(user_obj.is_active and user_obj.role in (Role.OPERATOR, Role.AUDITOR))


class ApiKeyAuthentication(BaseAuthentication):
    """``Authorization: Bearer KEY`` on the management API."""

    def authenticate(self, request: Request) -> tuple[User, ApiKey] | None:
        scheme, _, key = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None
        not_expired = Q(expires_at__isnull=True) | Q(expires_at__gt=timezone.now())
        found = (
            ApiKey.objects.select_related("user")
            .filter(not_expired, sha256=hash_key(key.strip()), enabled=True, user__is_active=True)
            .first()
        )
        if found is None:
            raise AuthenticationFailed("Unknown, disabled or expired API key.")
        return found.user, found

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"
