"""The one AdminSite: theme, menu and the project's own pages beside Django's admin."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.conf import settings
from django.contrib import admin
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.templatetags.static import static
from django.urls import URLPattern, URLResolver, include, path, reverse
from unfold.sites import UnfoldAdminSite

from scheduler.pages.overview import overview_context


class MindRouterSite(UnfoldAdminSite):  # type: ignore[misc]
    """Django's admin, with the pages on groups and decisions on the same site."""

    index_title = "Overview"
    index_template = "pages/index.html"

    def index(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        """Django's list of models, below the cluster's figures for those who may see them."""
        context = {**overview_context(request), **(extra_context or {})}
        answer: TemplateResponse = super().index(request, context)
        return answer

    def get_urls(self) -> list[URLPattern | URLResolver]:
        return [path("", include("scheduler.pages.urls")), *super().get_urls()]


def stylesheet(request: HttpRequest) -> str:
    """The project's own styles, on every page of the site."""
    return static("mindrouter/pages.css")


def zone_script(request: HttpRequest) -> str:
    """Says the viewer's time zone, on every page of the site."""
    return static("mindrouter/zone.js")


def sign_in_elsewhere(request: HttpRequest) -> dict[str, Any]:
    """For templates: the identity provider's name, if there is one."""
    return {"identity_provider": settings.OIDC_NAME if settings.OIDC_ISSUER else ""}


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    """The menu, in the order in which an admin needs it; only what this user may see."""
    decisions = _model(request, "Decisions", "receipt_long", "scheduler.decision")
    if decisions and request.path.startswith(reverse("admin:decisions")):
        decisions["active"] = True
    cluster = [
        decisions,
        _model(request, "Backends", "dns", "backends.backend"),
        _model(request, "Models", "neurology", "backends.backendmodel"),
        _model(request, "Aliases", "alt_route", "backends.alias"),
        _model(request, "Model strategies", "rule", "backends.modelstrategy"),
        _model(request, "Nodes", "memory", "backends.node"),
        _model(request, "Settings", "tune", "scheduler.sitesettings"),
    ]
    if request.user.has_perm("accounts.view_group"):
        cluster.append({"title": "Advice", "icon": "lightbulb", "link": reverse("admin:advice")})
        cluster.append({"title": "History", "icon": "history", "link": reverse("admin:history")})
    if request.user.has_perm("scheduler.view_decision"):
        cluster.append({"title": "Reports", "icon": "bar_chart", "link": reverse("admin:reports")})
        queue = {"title": "Queue", "icon": "hourglass_top", "link": reverse("admin:queue")}
        cluster.insert(0, queue)
    if request.user.has_perm("scheduler.view_whatif"):
        what_if = {"title": "What if", "icon": "science", "link": reverse("admin:what_ifs")}
        cluster.insert(2, what_if)
    if request.user.has_perm("accounts.view_group"):
        groups = {"title": "Groups and shares", "icon": "balance", "link": reverse("admin:groups")}
        cluster.insert(0, groups)
    people = [
        _model(request, "Users", "person", "accounts.user"),
        _model(request, "API keys", "key", "accounts.apikey"),
        _model(request, "Captured prompts", "visibility", "scheduler.capture"),
        _model(request, "Quotas", "speed", "accounts.quota"),
        _model(request, "Model prices", "payments", "scheduler.modelprice"),
        _model(request, "Model limits", "production_quantity_limits", "accounts.modellimits"),
    ]
    if request.user.has_perm("accounts.view_quota"):
        use = {"title": "Use of limits", "icon": "data_usage", "link": reverse("admin:limits")}
        people.append(use)
    own: list[dict[str, Any] | None] = [
        {"title": title, "icon": icon, "link": reverse(name), "active": name == _here(request)}
        for title, icon, name in (
            ("My share", "pie_chart", "account"),
            ("My requests", "list_alt", "account_requests"),
            ("My keys", "vpn_key", "account_keys"),
            ("Connect a client", "terminal", "account_clients"),
        )
        if request.user.is_authenticated
    ]
    sections = [
        _section("Cluster", cluster),
        _section("People", people),
        _section("My account", own),
    ]
    return [section for section in sections if section["items"]]


def _here(request: HttpRequest) -> str:
    """The name of the account page that is asked for; a request's page is below the list."""
    name = (request.resolver_match.url_name if request.resolver_match else None) or ""
    return "account_requests" if name == "account_request" else name


def _section(title: str, items: list[dict[str, Any] | None]) -> dict[str, Any]:
    return {"title": title, "separator": True, "items": [item for item in items if item]}


def _model(request: HttpRequest, title: str, icon: str, label: str) -> dict[str, Any] | None:
    """An entry for a model's list, where it has an admin that this user may see."""
    model = apps.get_model(label)
    if not admin.site.is_registered(model):
        return None
    if not admin.site.get_model_admin(model).has_view_permission(request):
        return None
    address = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
    return {"title": title, "icon": icon, "link": address}
