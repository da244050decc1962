"""The one AdminSite: theme, menu and the project's own pages beside Django's admin."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static
from django.urls import URLPattern, URLResolver, include, path, reverse_lazy
from unfold.sites import UnfoldAdminSite


class MindRouterSite(UnfoldAdminSite):  # type: ignore[misc]
    """Django's admin, with the pages on groups and decisions on the same site."""

    index_title = "Overview"

    def get_urls(self) -> list[URLPattern | URLResolver]:
        return [path("", include("scheduler.pages.urls")), *super().get_urls()]


def stylesheet(request: HttpRequest) -> str:
    """The project's own styles, on every page of the site."""
    return static("mindrouter/pages.css")


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """The menu, in the order in which an admin needs it; only what this user may see."""
    return [
        _section(
            request,
            "Cluster",
            ("Groups and shares", "balance", "admin:groups", "accounts.view_group"),
            (
                "Decisions",
                "receipt_long",
                "admin:scheduler_decision_changelist",
                "scheduler.view_decision",
            ),
            ("Backends", "dns", "admin:backends_backend_changelist", "backends.view_backend"),
            ("Aliases", "alt_route", "admin:backends_alias_changelist", "backends.view_alias"),
            ("Nodes", "memory", "admin:backends_node_changelist", "backends.view_node"),
            (
                "Settings",
                "tune",
                "admin:scheduler_sitesettings_changelist",
                "scheduler.view_sitesettings",
            ),
        ),
        _section(
            request,
            "People",
            ("Users", "person", "admin:accounts_user_changelist", "accounts.view_user"),
            ("API keys", "key", "admin:accounts_apikey_changelist", "accounts.view_apikey"),
            ("Quotas", "speed", "admin:accounts_quota_changelist", "accounts.view_quota"),
        ),
    ]


def _section(
    request: HttpRequest, title: str, *items: tuple[str, str, str, str]
) -> dict[str, Any]:
    return {
        "title": title,
        "separator": True,
        "items": [
            {"title": name, "icon": icon, "link": reverse_lazy(url)}
            for name, icon, url, permission in items
            if request.user.has_perm(permission)
        ],
    }
