"""Signing in at an identity provider: who somebody is there, and the group that a claim names.

Only loaded where ``OIDC_ISSUER`` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import requests
from allauth.account.adapter import DefaultAccountAdapter
from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest
from django.shortcuts import redirect
from django.urls import reverse

from accounts.models import Group, User

#: How long the provider may take for each answer.
SECONDS = 5.0


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]
    """Nobody makes an account by himself here."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False

    def get_login_redirect_url(self, request: HttpRequest) -> str:
        return reverse("home")  # the admin for staff, the account for everybody else


class ProviderAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]
    """Whoever the provider vouches for may sign in, and gets an account at the first time.

    An account that was made here is never taken over by somebody who has the same name or e-mail
    address there: the new one gets a name of its own.
    """

    def is_open_for_signup(self, request: HttpRequest, sociallogin: Any) -> bool:
        return True

    def pre_social_login(self, request: HttpRequest, sociallogin: Any) -> None:
        """Each time: the group is the one that the provider names now, if it names one."""
        group = _group_of(sociallogin.account.extra_data)
        user: User = sociallogin.user
        if sociallogin.is_existing and not user.is_active:
            self._refuse(request, "This account is disabled.")
        if group is None or user.group_id == group.pk:
            return
        user.group = group
        if sociallogin.is_existing:
            user._change_reason = "group named by the identity provider"  # type: ignore[attr-defined]
            user.save()

    def on_authentication_error(
        self,
        request: HttpRequest,
        provider: Any,
        error: Any = None,
        exception: Any = None,
        extra_context: Any = None,
    ) -> None:
        self._refuse(request, "The identity provider did not confirm who you are. Try again.")

    def get_requests_session(self) -> requests.Session:
        return _Session(self._not_reached)

    def _not_reached(self) -> None:
        self._refuse(self.request, "The identity provider cannot be reached at the moment.")

    def _refuse(self, request: HttpRequest, why: str) -> None:
        messages.error(request, why)
        raise ImmediateHttpResponse(redirect("account_login"))


class _Session(requests.Session):
    """A provider that cannot be asked is an error of the sign-in, not of ours."""

    def __init__(self, not_reached: Callable[[], None]) -> None:
        super().__init__()
        self._not_reached = not_reached

    def request(self, *args: Any, **options: Any) -> requests.Response:
        options["timeout"] = SECONDS
        try:
            return super().request(*args, **options)
        except requests.RequestException:
            self._not_reached()
            raise


def _group_of(data: dict[str, Any]) -> Group | None:
    """The first group that a claim names and that there is here."""
    claims = data.get("userinfo") or data.get("id_token") or data
    named = claims.get(settings.OIDC_GROUP_CLAIM)
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list):
        return None
    texts = [name for name in names if isinstance(name, str)]
    known = {group.name: group for group in Group.objects.filter(name__in=texts)}
    return next((known[name] for name in texts if name in known), None)
