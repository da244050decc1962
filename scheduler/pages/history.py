"""/admin/history/: who changed what of the configuration, when and why; and taking it back."""

from __future__ import annotations

import csv
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.utils.dateparse import parse_datetime
from django.views.decorators.http import require_POST, require_safe

from scheduler.changes import TRACKED, CannotRevert, Change, Value, changes, every_change, may
from scheduler.changes import revert as take_back
from scheduler.pages.reports import harmless


@require_safe
def history(request: HttpRequest) -> HttpResponse:
    """Newest first; ``kind`` and ``before`` of the query say which."""
    if not request.user.has_perm("accounts.view_group"):
        raise PermissionDenied
    kind = request.GET.get("kind", "")
    kind = kind if kind in TRACKED else ""
    rows, further = changes(request.user, kind=kind, before=_moment(request.GET.get("before", "")))
    request.current_app = admin.site.name
    query = {"kind": kind, "before": further.isoformat() if further else ""}
    context = {
        **admin.site.each_context(request),
        "title": "History",
        "rows": rows,
        "kind": kind,
        "kinds": list(TRACKED),
        "older": "?" + urlencode({k: v for k, v in query.items() if v}) if further else "",
        "is_later_page": bool(request.GET.get("before")),
    }
    return TemplateResponse(request, "pages/history.html", context)


@require_safe
def export(request: HttpRequest, form: str) -> HttpResponseBase:
    """Every change that the reader may see, as ``csv`` (a row for each value) or ``json``."""
    if not request.user.has_perm("accounts.view_group"):
        raise PermissionDenied
    if form not in ("csv", "json"):
        raise Http404
    kind = request.GET.get("kind", "")
    found = every_change(request.user, kind if kind in TRACKED else "")
    headers = {"Content-Disposition": f'attachment; filename="mindrouter-history.{form}"'}
    if form == "json":
        return JsonResponse([_as_values(one) for one in found], safe=False, headers=headers)
    answer = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
    writer = csv.writer(answer)
    writer.writerow([*_COLUMNS, "value", "before", "after"])
    for one in found:
        values = _as_values(one)
        row = [harmless(values[name]) for name in _COLUMNS]
        for value in one.values or [Value("", "", "")]:
            writer.writerow([*row, *map(harmless, (value.name, value.before, value.after))])
    return answer


_COLUMNS = ("at", "who", "address", "via", "kind", "what", "action", "reason")


def _as_values(change: Change) -> dict[str, Any]:
    values = {name: getattr(change, name) for name in _COLUMNS}
    told = [{"name": v.name, "before": v.before, "after": v.after} for v in change.values]
    return values | {"at": change.at.isoformat(), "values": told}


@require_POST
def revert(request: HttpRequest, kind: str, history_id: int) -> HttpResponseBase:
    """Take one change back."""
    if kind not in TRACKED:
        raise Http404
    if not may(request.user, "change", TRACKED[kind][0]):
        raise PermissionDenied
    try:
        said = take_back(kind, history_id)
    except CannotRevert as why:
        messages.error(request, f"Not taken back: {why}")
    else:
        messages.success(request, f"Taken back: {said}.")
    return redirect("admin:history")


def _moment(text: str) -> datetime | None:
    try:
        found = parse_datetime(text)
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None
