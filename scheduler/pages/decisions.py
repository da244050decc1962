"""/admin/decisions/<request id>/: what happened to one request, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views.decorators.http import require_safe

from accounts.authentication import READ_CAPTURES
from accounts.captures import captured_keys
from accounts.models import ApiKey
from scheduler import energy, explain, explain_tables, services, spending
from scheduler.captures import capture_of, read_capture, text_of
from scheduler.models import Decision


@require_safe
def decisions(request: HttpRequest) -> HttpResponse:
    """The log is Django's list; there is one of it, under two addresses."""
    query = request.GET.urlencode()
    return redirect(reverse("admin:scheduler_decision_changelist") + (f"?{query}" if query else ""))


@require_safe
def decision(request: HttpRequest, request_id: str) -> HttpResponse:
    """One record, explained."""
    if not request.user.has_perm("scheduler.view_decision"):
        raise PermissionDenied
    record = get_object_or_404(Decision, request_id=request_id)
    request.current_app = admin.site.name
    context = {
        **admin.site.each_context(request),
        "title": f"Request {record.request_id}",
        **explained(record),
    }
    return TemplateResponse(request, "pages/decision.html", context)


@require_safe
def prompt(request: HttpRequest, request_id: str) -> HttpResponse:
    """What was captured of one request. That it was read is noted in the history of its key."""
    if not request.user.has_perm(READ_CAPTURES):
        raise PermissionDenied
    found = read_capture(request_id)
    if found is None:
        raise Http404
    request.current_app = admin.site.name
    context = {
        **admin.site.each_context(request),
        "title": f"Prompt of {found.request_id}",
        "capture": found,
        "has_decision": Decision.objects.filter(request_id=request_id).exists(),
        "key": ApiKey.objects.select_related("user").get(pk=found.key_id),
        "parts": [
            CapturedPart("Request", found.request, found.request_bytes),
            CapturedPart("Answer", found.answer, found.answer_bytes),
        ],
    }
    return TemplateResponse(request, "pages/prompt.html", context)


class CapturedPart(NamedTuple):
    """The request's body or its answer."""

    name: str
    data: bytes | None
    whole_bytes: int  # of which ``data`` is the beginning

    @property
    def text(self) -> str | None:
        return text_of(self.data)

    @property
    def is_cut(self) -> bool:
        return self.data is not None and len(self.data) < self.whole_bytes


def explained(record: Decision) -> dict[str, Any]:
    """What the page shows of one record. Others are in it as counts of groups only."""
    case = services.case_of(record)
    return {
        "decision": record,
        "sentence": explain.sentence(case),
        "reason": explain.reason_in_words(record.reason) if record.reason else "",
        "moments": explain_tables.moments(case),
        "parts": explain_tables.timeline(case),
        "backends": explain_tables.constraints(case),
        "scores": explain_tables.scores(case),
        "terms": explain_tables.priority_terms(case),
        "formula": explain_tables.priority_formula(case),
        "ahead": explain.served_ahead(case),
        "cost": spending.cost_of(record),
        "energy": energy.of_request(record),
        "currency": spending.currency(),
        "capture": capture_of(record.request_id),
        "captured_keys": captured_keys().filter(pk=record.key_id or 0).select_related("user"),
    }
