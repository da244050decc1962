"""/admin/queue/: everything that waits, why it stands where it stands, and removing one of it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST, require_safe

from accounts.authentication import CANCEL_JOB
from scheduler import services
from scheduler.waiting_list import SORTS, WINDOW_ROWS, Filter, Window, window

#: The table's columns: (name in ``SORTS`` or "", heading, what it says, whether it is a number).
COLUMNS = (
    ("position", "Position", "Served as the how-manieth on the same backends, as estimated", True),
    ("user", "User", "", False),
    ("group", "Group", "", False),
    ("model", "Model", "", False),
    ("waited", "Waited", "", True),
    ("", "Estimate", "Until it is served, at the present rate", True),
    ("priority", "Priority", "Tokens per unit of weight", True),
    ("deficit", "Deficit", "Tokens that the user is still owed in this round", True),
    ("", "Burst credits", "Tokens", True),
    ("weight", "Weight", "0: background", True),
    ("", "Factor", "Below 1: a heavy user", True),
    ("", "Wait bonus", "Tokens", True),
)


@require_safe
def queue(request: HttpRequest) -> HttpResponse:
    """The page. Which rows: ``user``, ``group``, ``model``, ``sort``, ``start`` of the query."""
    _require_reader(request)
    request.current_app = admin.site.name
    context = {
        **admin.site.each_context(request),
        **_context(request),
        "title": "Queue",
        "may_cancel": request.user.has_perm(CANCEL_JOB),
    }
    return TemplateResponse(request, "pages/queue.html", context)


@require_GET
def rows(request: HttpRequest) -> HttpResponse:
    """The table alone, for htmx to put into place; the filter being edited is left alone."""
    _require_reader(request)
    context = {**_context(request), "may_cancel": request.user.has_perm(CANCEL_JOB)}
    return TemplateResponse(request, "pages/_queue_table.html", context)


@require_POST
def cancel(request: HttpRequest) -> HttpResponse:
    """Drop one waiting request; its client gets an error."""
    if not request.user.has_perm(CANCEL_JOB):
        raise PermissionDenied
    request_id = request.POST.get("request_id", "")
    if services.evict(request_id):
        messages.success(request, f"Request {request_id} was removed from the queue.")
    else:
        messages.warning(request, f"Request {request_id} does not wait any more.")
    query = _known(QueryDict(request.POST.get("query", ""))).copy()
    return redirect(reverse("admin:queue") + (f"?{urlencode(query)}" if query else ""))


def _require_reader(request: HttpRequest) -> None:
    if not request.user.has_perm("scheduler.view_decision"):
        raise PermissionDenied


def _known(query: QueryDict) -> dict[str, str]:
    """The parameters that mean something here."""
    names = ("user", "group", "model", "sort", "start")
    return {name: value for name in names if (value := query.get(name, "").strip())}


def _context(request: HttpRequest) -> dict[str, Any]:
    query = _known(request.GET)
    sort = query.get("sort", "")
    column = sort.removeprefix("-")
    if column not in SORTS:
        query.pop("sort", None)
        sort = column = "position"
    wanted = Filter(**{name: query.get(name, "") for name in ("user", "group", "model")})
    picture = services.queue_picture()
    found = None
    if picture is not None:
        found = window(
            picture.flows,
            picture.taken_at,
            wanted=wanted,
            sort=column,
            descending=sort.startswith("-"),
            start=_whole(query.get("start", "")),
        )
    return {
        "window": found,
        "live": picture is not None,
        "filter": wanted,
        "sort": query.get("sort", ""),
        "query": urlencode(query),
        "columns": [_heading(query, sort, *one) for one in COLUMNS],
        **_pages(query, found),
    }


def _whole(text: str) -> int:
    """A number of a query; 0 for what is none."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _heading(
    query: dict[str, str], sort: str, name: str, title: str, hint: str, number: bool
) -> dict[str, Any]:
    """A column's heading, with the address that sorts by it, or the other way round."""
    other = f"-{name}" if sort == name else name
    link = _address({**query, "sort": other, "start": ""}) if name else ""
    order = {name: "ascending", f"-{name}": "descending"}.get(sort, "none") if name else ""
    return {"title": title, "hint": hint, "number": number, "link": link, "order": order}


def _pages(query: dict[str, str], found: Window | None) -> dict[str, str]:
    """Addresses of the windows before and after this one; empty where there is none."""
    if found is None:
        return {"before": "", "after": ""}
    start = found.start
    before = _address({**query, "start": str(max(0, start - WINDOW_ROWS))}) if start else ""
    after = _address({**query, "start": str(found.end)}) if found.end < found.matching else ""
    return {"before": before, "after": after}


def _address(query: dict[str, str]) -> str:
    return "?" + urlencode({name: value for name, value in query.items() if value})
