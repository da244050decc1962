"""The one AdminSite: theme, menu and the project's own pages beside Django's admin."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.urls import URLPattern, URLResolver, include, path, reverse_lazy
from unfold.sites import UnfoldAdminSite


class MindRouterSite(UnfoldAdminSite):  # type: ignore[misc]
    """Django's admin, with the pages on groups and decisions on the same site."""

    def get_urls(self) -> list[URLPattern | URLResolver]:
        return [path("", include("scheduler.pages.urls")), *super().get_urls()]


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """The menu, in the order in which an admin needs it."""
    return [
        _section(
            "Cluster",
            ("Groups and shares", "balance", "admin:groups"),
            ("Decisions", "receipt_long", "admin:decisions"),
            ("Backends", "dns", "admin:backends_backend_changelist"),
            ("Aliases", "alt_route", "admin:backends_alias_changelist"),
            ("Nodes", "memory", "admin:backends_node_changelist"),
            ("Settings", "tune", "admin:scheduler_sitesettings_changelist"),
        ),
        _section(
            "People",
            ("Users", "person", "admin:accounts_user_changelist"),
            ("API keys", "key", "admin:accounts_apikey_changelist"),
            ("Quotas", "speed", "admin:accounts_quota_changelist"),
        ),
    ]


def _section(title: str, *items: tuple[str, str, str]) -> dict[str, Any]:
    return {
        "title": title,
        "separator": True,
        "items": [
            {"title": name, "icon": icon, "link": reverse_lazy(url)} for name, icon, url in items
        ],
    }
