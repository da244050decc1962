"""Admin pages on decisions (read-only); registers the page of the site's settings."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin
from unfold.contrib.filters.admin import DropdownFilter, TextFilter
from unfold.views import ChangeList

from accounts.captures import captured_keys
from backends.models import Alias, Backend, BackendModel
from scheduler.captures_admin import CaptureAdmin
from scheduler.explain import NOTHING, duration
from scheduler.models import Capture, Decision, ModelPrice, Outcome, SiteSettings
from scheduler.settings_admin import SiteSettingsAdmin

#: Rows that the log can be paged through; older ones are reached by a filter or a search.
MOST_ROWS = 5000

LIST_COLUMNS = (
    "request_id",
    "arrived_at",
    "user",
    "group",
    "model_requested",
    "selected_backend",
    "outcome",
    "reason",
    "queued_at",
    "dispatched_at",
    "first_token_at",
    "ended_at",
    "prompt_tokens",
    "completion_tokens",
    "usage_estimated",
    "charged_tokens",
)


_CAPTURED = format_html(
    ' <span class="mr-outcome mr-warning" title="{}">captured</span>',
    "The prompt and the answer are stored",
)


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no further than ``MOST_ROWS``: a full count takes seconds at a million rows."""

    @cached_property
    def count(self) -> int:
        rows: QuerySet[Decision] = self.object_list  # type: ignore[assignment]
        return rows.order_by()[:MOST_ROWS].count()

    @property
    def is_bounded(self) -> bool:
        """Whether there may be more rows than can be paged through."""
        return self.count >= MOST_ROWS


class ExactTextFilter(TextFilter):  # type: ignore[misc]
    """What is typed must equal the column, so that its index is used."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Decision]) -> QuerySet[Decision]:
        value = self.value()
        return queryset.filter(**{self.parameter_name: value}) if value else queryset


class UserFilter(ExactTextFilter):
    title = "user name"
    parameter_name = "user"


class ColumnFilter(DropdownFilter):  # type: ignore[misc]
    """One of the values that are configured now; older values are found by their address."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Decision]) -> QuerySet[Decision]:
        value = self.value()
        return queryset.filter(**{self.parameter_name: value}) if value else queryset

    def has_output(self) -> bool:
        return True


class OutcomeFilter(ColumnFilter):
    title = "outcome"
    parameter_name = "outcome"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(value, value) for value in Outcome.values]


class ModelFilter(ColumnFilter):
    title = "model"
    parameter_name = "model_requested"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = (
            BackendModel.objects.order_by()
            .values_list("name")
            .union(Alias.objects.order_by().values_list("name"))
        )
        return [(name, name) for (name,) in sorted(names)]


class BackendFilter(ColumnFilter):
    title = "backend"
    parameter_name = "selected_backend"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, name) for name in Backend.objects.values_list("name", flat=True)]


class PeriodFilter(DropdownFilter):  # type: ignore[misc]
    title = "period"
    parameter_name = "period"
    hours: ClassVar = {
        "1": "last hour",
        "24": "last day",
        "168": "last week",
        "720": "last 30 days",
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return list(self.hours.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Decision]) -> QuerySet[Decision]:
        if self.value() not in self.hours:
            return queryset
        return queryset.filter(arrived_at__gte=timezone.now() - timedelta(hours=int(self.value())))


class DecisionList(ChangeList):  # type: ignore[misc]
    """Reads only the columns shown: the JSON ones can be large."""

    def get_queryset(self, request: HttpRequest, *args: Any) -> QuerySet[Decision]:
        rows: QuerySet[Decision] = super().get_queryset(request, *args)
        return rows.only(*LIST_COLUMNS)

    def get_results(self, request: HttpRequest) -> None:
        """Which of the page's requests are captured, in one query more."""
        super().get_results(request)
        ids = [row.request_id for row in self.result_list]
        stored = Capture.objects.order_by().filter(request_id__in=ids)
        captured = set(stored.values_list("request_id", flat=True))
        for row in self.result_list:
            row.is_captured = row.request_id in captured


@admin.register(Decision)
class DecisionAdmin(ModelAdmin):  # type: ignore[misc]
    """The log of requests. One row opens the page that explains it."""

    list_display = (
        "arrived",
        "who",
        "where",
        "result",
        "waited",
        "first_token",
        "tokens",
        "charged",
    )
    list_display_links = ("arrived",)
    list_filter = (PeriodFilter, OutcomeFilter, ModelFilter, BackendFilter, UserFilter)
    list_filter_submit = True
    list_fullwidth = True
    list_before_template = "pages/_log_note.html"
    list_per_page = 50
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # they count the whole table, once for each choice
    paginator = BoundedPaginator
    search_fields = ("request_id__exact", "client_request_id__exact")
    search_help_text = "A whole request id, the router's or the client's."
    sortable_by = ()

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Decision], search_term: str
    ) -> tuple[QuerySet[Decision], bool]:
        """Found by one index each: asked for either in one condition, a database that knows the
        clients' ids to be rare reads the whole table."""
        if not search_term:
            return queryset, False
        found = Decision.objects.order_by().values_list("pk", flat=True)
        names = ("request_id", "client_request_id")
        ids = {pk for name in names for pk in found.filter(**{name: search_term})[:MOST_ROWS]}
        return queryset.filter(pk__in=ids), False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return DecisionList

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        keys = {"captured_keys": captured_keys().select_related("user")}
        answer: HttpResponse = super().changelist_view(request, keys | (extra_context or {}))
        return answer

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Decision | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Decision | None = None) -> bool:
        return False

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """The row's own page explains it; this address only leads there."""
        decision = self.get_object(request, object_id)
        if decision is None:
            raise Http404
        return redirect("admin:decision", request_id=decision.request_id)

    @admin.display(description="arrived")
    def arrived(self, decision: Decision) -> str:
        moment = timezone.localtime(decision.arrived_at)
        return _cell(f"{moment:%H:%M:%S}") + _cell(f"{moment:%Y-%m-%d}", quiet=True)

    @admin.display(description="user, group")
    def who(self, decision: Decision) -> str:
        return _cell(decision.user or NOTHING) + _cell(decision.group or "no group", quiet=True)

    @admin.display(description="model, backend")
    def where(self, decision: Decision) -> str:
        backend = decision.selected_backend or NOTHING
        return _cell(decision.model_requested or NOTHING) + _cell(backend, quiet=True)

    @admin.display(description="outcome")
    def result(self, decision: Decision) -> str:
        badge = format_html(
            '<span class="mr-outcome mr-{}">{}</span>', decision.outcome, decision.outcome
        )
        captured = _CAPTURED if getattr(decision, "is_captured", False) else SafeString()
        return badge + captured + _cell(decision.reason, quiet=True)

    @admin.display(description="waited")
    def waited(self, decision: Decision) -> str:
        return _figure(duration(_seconds(decision.queued_at, _left_queue(decision))))

    @admin.display(description="first token")
    def first_token(self, decision: Decision) -> str:
        return _figure(duration(_seconds(decision.arrived_at, decision.first_token_at)))

    @admin.display(description="tokens in + out")
    def tokens(self, decision: Decision) -> str:
        if decision.prompt_tokens is None:
            return _figure(NOTHING)
        about = "≈ " if decision.usage_estimated else ""
        return _figure(f"{about}{decision.prompt_tokens:,} + {decision.completion_tokens or 0:,}")

    @admin.display(description="charged")
    def charged(self, decision: Decision) -> str:
        return _figure(f"{decision.charged_tokens:,.0f}")


def _cell(text: str, *, quiet: bool = False) -> SafeString:
    """One line, cut where it is too long; the whole text shows on hovering."""
    if not text:
        return SafeString()
    style = "mr-cell mr-small" if quiet else "mr-cell"
    return format_html('<span class="{}" title="{}">{}</span>', style, text, text)


def _figure(text: str) -> str:
    return format_html('<span class="mr-figure">{}</span>', text)


def _left_queue(decision: Decision) -> datetime | None:
    return decision.dispatched_at or decision.ended_at


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else (end - start).total_seconds()


admin.site.register(SiteSettings, SiteSettingsAdmin)
admin.site.register(Capture, CaptureAdmin)


@admin.register(ModelPrice)
class ModelPriceAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    list_display = ("model_name", "prompt", "cached", "completion")
    search_fields = ("model_name",)
