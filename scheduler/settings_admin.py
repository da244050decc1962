"""The page of the site's settings: each with its value in force, its source, unit and limits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.html import format_html
from django.utils.safestring import SafeString
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin

from backends.admin.showing import table
from scheduler.checks import NUMBERS
from scheduler.models import SiteSettings
from scheduler.snapshot import setting_name


@dataclass(frozen=True, slots=True)
class Setting:
    """What a setting does. ``without``: what the absence of a value means."""

    unit: str
    effect: str
    without: str = "no limit"


_TOKENS, _SECONDS, _POINTS = "tokens", "seconds", "points"

#: The page's groups, and what is in each, in this order.
GROUPS: Mapping[str, Mapping[str, Setting]] = {
    "Shares": {
        "share_mode": Setting(
            "",
            "Who gets the weights: each user the group's own, or each group as a whole, split "
            "among its members that are active.",
        ),
        "end_user_share": Setting(
            "",
            "End users behind one key: each counts like the key's owner, or they share the owner's "
            "weight.",
        ),
        "background_weight": Setting(
            "of the weight of who makes them",
            "Background calls that a trusted key marks, such as a chat's title. 0: served only "
            "when nobody else waits; 1: like any other request.",
        ),
        "quantum": Setting(
            f"{_TOKENS} per unit of weight and round",
            "How much a user may be ahead before the next one is served. Less follows the shares "
            "more closely.",
        ),
        "cost_input_token": Setting("per token", "What a prompt token counts."),
        "cost_output_token": Setting("per token", "What a token of the answer counts."),
        "cost_cached_token": Setting(
            "per token",
            "What a prompt token counts that the backend had cached.",
            without="the price of a prompt token",
        ),
        "debt_cap": Setting(
            _TOKENS, "The most that a user who was away still owes on coming back."
        ),
        "fairness_window": Setting(
            _SECONDS, "The time over which received shares and heavy use are measured."
        ),
        "deprioritize_threshold": Setting(
            "of the window's tokens",
            "A user with more than this part is heavy, and is served after the others for a while.",
        ),
        "burst_credit_rate": Setting(
            f"{_TOKENS} per idle second",
            "Credit that gathers while slots are idle, and lets a user exceed the share later.",
        ),
        "burst_credit_cap": Setting(f"{_TOKENS} per unit of weight", "The most such credit."),
        "wait_bonus_rate": Setting(
            f"{_TOKENS} per second", "How fast a waiting request gains priority."
        ),
    },
    "Queue": {
        "max_wait": Setting(
            _SECONDS,
            "After so long in the queue a request is refused; groups and users may have less.",
        ),
        "max_queued": Setting("requests", "That may wait in total. More are refused."),
        "max_queued_per_user": Setting("requests", "That may wait for one user."),
    },
    "Placement": {
        "score_model_loaded": Setting(_POINTS, "For a backend that has the model loaded."),
        "score_low_utilization": Setting(_POINTS, "For a backend with all its slots free."),
        "score_latency": Setting(_POINTS, "For a backend that begins to answer at once."),
        "score_short_queue": Setting(_POINTS, "For a backend on which nothing runs or waits."),
        "score_high_throughput": Setting(_POINTS, "For a backend that writes fast."),
        "score_cache_affinity": Setting(
            _POINTS, "For the backend that served the conversation before."
        ),
    },
    "Backends": {
        "backend_fail_window": Setting(
            _SECONDS, "A backend that failed gets nothing for so long, then one request as a test."
        ),
        "backend_stale_after": Setting(
            _SECONDS, "Polled numbers older than this count as unknown."
        ),
        "backend_max_attempts": Setting("backends", "Tried for one request, the first included."),
    },
    "Records": {
        "decision_retention": Setting(
            "days",
            "The log keeps a request for so long. Totals of usage and reports stay.",
            without="for ever",
        ),
    },
    "Gateway": {
        "queue_keepalive_after": Setting(
            _SECONDS, "A stream that waits for longer is kept open with comments on its position."
        ),
        "max_body_bytes": Setting("bytes", "The largest request that is read."),
        "open_to": Setting(
            "",
            "The user that Ollama's clients without a key count as, with its group, share and "
            "limits. Never set this where strangers can connect.",
            without="nobody, a key is needed",
        ),
    },
}
DESCRIBED: Mapping[str, Setting] = {
    name: one for group in GROUPS.values() for name, one in group.items()
}

#: Read when a process starts, so they cannot be changed on a page.
ENVIRONMENT: Mapping[str, Setting] = {
    "SCHEDULER_WEIGHT_STUDENT": Setting("weight", "Of the group student, if it has none itself."),
    "SCHEDULER_WEIGHT_STAFF": Setting("weight", "Of the group staff, if it has none itself."),
    "SCHEDULER_WEIGHT_FACULTY": Setting("weight", "Of the group faculty, if it has none itself."),
    "SCHEDULER_WEIGHT_ADMIN": Setting("weight", "Of the group admin, if it has none itself."),
    "BACKEND_POLL_INTERVAL": Setting(_SECONDS, "Between polls: new backends, and nodes."),
    "BACKEND_CONNECT_TIMEOUT": Setting(_SECONDS, "To open a connection: new backends."),
    "BACKEND_FIRST_BYTE_TIMEOUT": Setting(_SECONDS, "Until an answer begins: new backends."),
    "BACKEND_CHUNK_TIMEOUT": Setting(_SECONDS, "Between parts of an answer: new backends."),
    "VLLM_MAX_NUM_SEQS": Setting("requests", "At once: new backends."),
    "VLLM_MAX_QUEUE_DEPTH": Setting("requests", "Waiting: new backends."),
    "TELEMETRY_INTERVAL": Setting(_SECONDS, "Between two stored rows of a GPU or a backend."),
    "TELEMETRY_RETENTION": Setting("days", "That those rows are kept."),
    "FAILED_KEYS_PER_MINUTE": Setting("keys", "That one address may get wrong before it waits."),
    "KEY_REMINDER_DAYS": Setting("days", "Before a key expires its owner is told."),
    "QUOTA_DEFAULT_OUTPUT_TOKENS": Setting(
        _TOKENS, "Reserved of limits for an answer whose request sets no limit itself."
    ),
    "SHUTDOWN_GRACE": Setting(_SECONDS, "That running streams have to end when it stops."),
}


def source_of(variable: str) -> str:
    """Where a value comes from that is not saved."""
    return "environment" if os.environ.get(variable, "").strip() else "default"


def in_force(site: SiteSettings, name: str) -> tuple[Any, str]:
    """A setting's value, and "saved", "environment" or "default"."""
    saved = getattr(site, name)
    if saved is not None:
        return saved, "saved"
    variable = setting_name(name)
    return getattr(settings, variable), source_of(variable)


def _shown(value: Any, one: Setting) -> str:
    if value is None:
        return one.without
    if isinstance(value, int | float):
        return f"{value:,.15g} {one.unit}".strip()
    return str(value)


def _limits(column: models.Field[Any, Any]) -> str:
    """What may be saved, in words."""
    if column.choices or not isinstance(column, models.IntegerField | models.FloatField):
        return ""
    lowest = [v.limit_value for v in column.validators if isinstance(v, MinValueValidator)]
    highest = [v.limit_value for v in column.validators if isinstance(v, MaxValueValidator)]
    if isinstance(column, models.PositiveIntegerField):
        # The database's own bounds say nothing about the setting.
        return f"A whole number, at least {max(lowest)}."
    if highest:
        return f"From {max(lowest):g} to {min(highest):g}."
    return f"At least {max(lowest):g}."


def help_text(site: SiteSettings, column: models.Field[Any, Any]) -> SafeString:
    """A field's help: its value in force, where that is from, what it does, its limits."""
    name = column.name
    one = DESCRIBED.get(name, Setting("", str(column.help_text)))
    value, source = in_force(site, name)
    other = "" if source != "saved" else _when_emptied(name, one)
    return format_html(
        '<b>In force: {}</b> ({}{}). {} {} <span class="mr-code">{}</span>',
        _shown(value, one),
        source,
        other,
        one.effect,
        _limits(column),
        setting_name(name),
    )


def _when_emptied(name: str, one: Setting) -> str:
    variable = setting_name(name)
    return f"; emptied: {_shown(getattr(settings, variable), one)}, {source_of(variable)}"


def _columns() -> Iterable[models.Field[Any, Any]]:
    return (one for one in SiteSettings._meta.fields if one.editable and not one.primary_key)


def _fieldsets() -> list[tuple[str, dict[str, Any]]]:
    """The groups; a setting that none of them names comes last and is not left out."""
    others = [one.name for one in _columns() if one.name not in DESCRIBED]
    groups = [(title, {"fields": list(group)}) for title, group in GROUPS.items()]
    return [*groups, *([("Others", {"fields": others})] if others else [])]


class SiteSettingsAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    """One row. An empty field leaves the value to the environment, or to the default."""

    readonly_fields = ("environment",)
    fieldsets = (
        *_fieldsets(),
        ("Only in the environment, read at the start", {"fields": readonly_fields}),
    )

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        return redirect("admin:scheduler_sitesettings_change", 1)

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> SiteSettings | None:
        if object_id != "1":
            return None
        # The row is made by the first save, so that merely looking changes nothing.
        return SiteSettings.objects.filter(pk=1).first() or SiteSettings(pk=1)

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> Any:
        site = obj or SiteSettings(pk=1)
        # Given to the form's class, so that those who may only look are told as well.
        texts = {column.name: help_text(site, column) for column in _columns()}
        return super().get_form(request, obj, change, **(kwargs | {"help_texts": texts}))

    def environment(self, site: SiteSettings) -> SafeString:
        """What is set where the processes are started, and cannot be changed here."""
        saved = {setting_name(one.name) for one in _columns()}
        rows = []
        for variable in NUMBERS:
            if variable not in saved:
                one = ENVIRONMENT.get(variable, Setting("", ""))
                value = _shown(getattr(settings, variable), one)
                rows.append((variable, value, source_of(variable), one.effect))
        return table("Settings of the environment", ("variable", "value", "from", "effect"), rows)
