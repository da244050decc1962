"""/admin/reports/: entitled against received, borrowed and lent, and why requests were slow."""

from __future__ import annotations

import csv
from datetime import date, timedelta
from typing import Any, cast, get_args

from django import forms
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.views.decorators.http import require_safe

from accounts.forms import INPUT_CLASS
from scheduler import reports, spending
from scheduler.charts import Chart, Span, chart
from scheduler.reports import MOST_DAYS, Period, Row, What
from scheduler.templatetags.figures import percent

READER = "scheduler.view_decision"
_USUAL_DAYS = 7
_MOST_USERS = 100
_MOST_GROUPS = 12
_DAY_SECONDS = 86400.0
#: What a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class PeriodForm(forms.Form):
    """From which day to which, both included. Nothing: the last week."""

    first = forms.DateField(
        label="From",
        required=False,
        widget=forms.DateInput({"type": "date", "class": INPUT_CLASS}, "%Y-%m-%d"),
    )
    last = forms.DateField(
        label="To",
        required=False,
        widget=forms.DateInput({"type": "date", "class": INPUT_CLASS}, "%Y-%m-%d"),
    )

    def clean(self) -> dict[str, Any]:
        values = super().clean() or {}
        if self.errors:
            return values
        last = values.get("last") or timezone.localdate()
        first = values.get("first") or last - timedelta(days=_USUAL_DAYS - 1)
        if first > last:
            raise forms.ValidationError("The first day comes after the last.")
        if (last - first).days >= MOST_DAYS:
            raise forms.ValidationError(f"At most {MOST_DAYS} days at a time.")
        return {"first": first, "last": last}

    def period(self) -> Period:
        """Of a valid form."""
        return Period(self.cleaned_data["first"], self.cleaned_data["last"])


@require_safe
def report(request: HttpRequest) -> HttpResponse:
    """The page."""
    _require(request)
    form = PeriodForm(request.GET)
    context: dict[str, Any] = {
        **admin.site.each_context(request),
        "title": "Reports",
        "form": form,
        "errors": [],
    }
    if form.is_valid():
        period = form.period()
        form = context["form"] = PeriodForm({"first": period.first, "last": period.last})
        days = reports.shares(period, "group")
        users = reports.users(period)
        context |= {
            "period": period,
            "query": f"first={period.first}&last={period.last}",
            "groups": (groups := reports.whole(days)),
            "charts": _charts(period, days, groups),
            "users": users[:_MOST_USERS],
            "further_users": max(0, len(users) - _MOST_USERS),
            "usage": _usage(period),
            "currency": spending.currency(),
            "weeks": reports.weeks(period),
        }
    else:
        context["errors"] = [text for texts in form.errors.values() for text in texts]
    request.current_app = admin.site.name
    return TemplateResponse(request, "pages/reports.html", context)


@require_safe
def export(request: HttpRequest, what: str, form: str) -> HttpResponse:
    """One of the tables as ``csv`` or ``json``, day by day."""
    _require(request)
    asked = PeriodForm(request.GET)
    if not asked.is_valid() or what not in get_args(What) or form not in ("csv", "json"):
        return HttpResponseBadRequest("There is no such report.", content_type="text/plain")
    period = asked.period()
    rows = reports.as_values(period, cast("What", what))
    name = f"mindrouter-{what}-{period.first}-{period.last}.{form}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    if form == "json":
        return JsonResponse(rows, safe=False, headers=headers)
    answer = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
    if rows:
        writer = csv.DictWriter(answer, rows[0].keys())
        writer.writeheader()
        writer.writerows({key: harmless(value) for key, value in row.items()} for row in rows)
    return answer


def _usage(period: Period) -> list[tuple[str, list[dict[str, Any]]]]:
    """(of whom, rows): groups, and the users with the most tokens."""
    tables: list[tuple[str, list[dict[str, Any]]]] = []
    bys: tuple[spending.By, ...] = ("group", "user")
    for by in bys:
        rows = [
            {"name": row[by] or reports.NO_GROUP, **row}
            for row in spending.totals(by, period.since, period.until)
        ]
        rows.sort(key=lambda row: -row["charged_tokens"])
        tables.append((by, rows[:_MOST_USERS]))
    return tables


def _require(request: HttpRequest) -> None:
    if not request.user.has_perm(READER):
        raise PermissionDenied


def harmless(value: Any) -> Any:
    """A name that a spreadsheet would run is shown to it as text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _charts(period: Period, days: list[Row], groups: list[Row]) -> list[Chart]:
    """Entitled and received of the largest groups, day by day."""
    if period.first == period.last:
        return []
    span = Span(period.since.timestamp(), period.until.timestamp(), _DAY_SECONDS)
    found = []
    for group in groups[:_MOST_GROUPS]:
        mine = [row for row in days if row.name == group.name and row.day]
        curves = {
            name: (kind, [(_noon(row.day), value) for row in mine
                          if row.day and (value := getattr(row, f"{name}_share")) is not None])
            for name, kind in (("entitled", "before"), ("received", "after"))
        }  # fmt: skip
        found.append(chart(group.name, curves, span, percent, top=1.0))
    return [one for one in found if one is not None]


def _noon(day: date) -> float:
    return Period(day, day).since.timestamp() + _DAY_SECONDS / 2
