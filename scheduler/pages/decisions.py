"""/admin/decisions/<request id>/: what happened to one request, and why."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.views.decorators.http import require_safe

from scheduler import energy, explain, explain_tables, services, spending
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
    }
