"""Who may do what: the permissions of the pages, asked for by method."""

from __future__ import annotations

from typing import Any

from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

_ACTIONS = {"GET": "view", "HEAD": "view", "POST": "add", "PATCH": "change", "DELETE": "delete"}


class RolePermission(BasePermission):
    """The role's permission on the view's ``model``.

    A view may name others in ``permissions``, as {action: permission or kind of permission}.
    """

    def has_permission(self, request: Request, view: APIView) -> bool:
        wanted = permission_for(request, view)
        return wanted is None or request.user.has_perm(wanted)


def permission_for(request: Request, view: Any) -> str | None:
    """ "accounts.change_user"; None for a method that only describes."""
    named = getattr(view, "permissions", {}).get(getattr(view, "action", None))
    wanted: str | None = named or _ACTIONS.get(request.method or "")
    if wanted is None or "." in wanted:
        return wanted
    return f"{view.model._meta.app_label}.{wanted}_{view.model._meta.model_name}"
