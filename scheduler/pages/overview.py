"""The first page's figures: served with the page, by poll, or over a WebSocket."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.views.decorators.http import require_GET

from scheduler import overview, services, standing, timelines

READER = "accounts.view_group"
TEMPLATE = "pages/_overview_live.html"


def overview_context(request: HttpRequest) -> dict[str, Any]:
    """What the page shows; nothing for staff who may not read groups."""
    if not request.user.has_perm(READER):
        return {}
    return {**_figures(), **_charts(request), "is_reader": True}


@require_GET
def figures(request: HttpRequest) -> HttpResponse:
    """The figures alone, for htmx to put into place where there is no WebSocket."""
    if not request.user.has_perm(READER):
        raise PermissionDenied
    return TemplateResponse(request, TEMPLATE, _figures())


@require_GET
def charts(request: HttpRequest) -> HttpResponse:
    """The time lines alone, which htmx renews each minute."""
    if not request.user.has_perm(READER):
        raise PermissionDenied
    return TemplateResponse(request, "pages/_charts.html", _charts(request))


def _charts(request: HttpRequest) -> dict[str, Any]:
    asked = request.GET.get("hours", "")
    hours = int(asked) if asked in map(str, timelines.WINDOWS) else min(timelines.WINDOWS)
    events = timelines.markers(request.user, hours)
    cluster, groups = timelines.charts(hours, events)
    return {
        "hours": hours,
        "windows": list(timelines.WINDOWS),
        "events": events[::-1],
        "cluster_charts": cluster,
        "group_charts": groups,
    }


def figures_html() -> str:
    """The same as text: it is the same for everybody who may read it."""
    return render_to_string(TEMPLATE, _figures())


def _figures() -> dict[str, Any]:
    """A fixed number of queries, whatever there is of users, groups, backends and records."""
    view = services.live()
    rows = overview.backend_rows(view)
    return {
        "live": view,
        "overview": standing.overview(view),
        "groups": standing.group_figures(view),
        "backend_rows": rows,
        "attention": overview.attention(rows),
        "refusals": overview.refusals(),
        "waits": overview.waits(),
        "gap_part": view.gap / view.gap_bound if view is not None and view.gap_bound else None,
    }
