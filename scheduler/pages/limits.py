"""/admin/limits/: how much of their limits is used now."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.views.decorators.http import require_safe

from accounts.limits import Holder
from accounts.models import ApiKey, Group, ModelLimits, Quota, User
from scheduler import services

#: Of each kind of holder, where no user is asked for.
MOST = 100


@require_safe
def limits(request: HttpRequest) -> HttpResponse:
    """Of one user with keys and group; else of all with limits of their own."""
    if not request.user.has_perm("accounts.view_quota"):
        raise PermissionDenied
    request.current_app = admin.site.name
    username = request.GET.get("user", "").strip()[:150]
    names = _of_user(username) if username else _of_all()
    try:
        rows: list[dict[str, Any]] | None = services.use_of(names)
    except TimeoutError:
        rows = None
    context = {
        **admin.site.each_context(request),
        "title": "Use of limits",
        "username": username,
        "rows": None if rows is None else [_row(one, names) for one in rows],
        "most": MOST,
    }
    return TemplateResponse(request, "pages/limits.html", context)


def _of_user(username: str) -> dict[Holder, str]:
    """{holder: what it is called}"""
    user = User.objects.select_related("group").filter(username=username).first()
    if user is None:
        return {}
    names = {Holder("user", user.pk): f"user {user}"}
    if user.group is not None:
        names[Holder("group", user.group.pk)] = f"group {user.group}, all together"
    keys = ApiKey.objects.filter(user=user)
    return names | {Holder("key", key.pk): f"key {key.name} of {user}" for key in keys}


def _of_all() -> dict[Holder, str]:
    own = Q(requests_per_minute=None, tokens_per_minute=None, max_concurrent=None,
            token_budget=None)  # fmt: skip
    names = {
        Holder("group", group.pk): f"group {group}, all together"
        for group in Group.objects.all()[:MOST]
    }
    names |= {
        Holder("model", row.model_name): f"model {row.model_name}"
        for row in ModelLimits.objects.all()[:MOST]
    }
    quotas = Quota.objects.exclude(own).select_related("user").order_by("user__username")
    names |= {Holder("user", row.user_id): f"user {row.user}" for row in quotas[:MOST]}
    keys = ApiKey.objects.exclude(own).filter(enabled=True).select_related("user")
    return names | {Holder("key", key.pk): f"key {key.name} of {key.user}" for key in keys[:MOST]}


def _row(use: dict[str, Any], names: dict[Holder, str]) -> dict[str, Any]:
    return {
        **use,
        "whose": names[Holder(use["holder"], use["id"])],
    }
