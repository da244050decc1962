"""Backends: what they are, how they are, and what is done to them."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin, messages
from django.db import transaction
from django.db.models import Count, Max, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.admin import TabularInline
from unfold.decorators import display

from backends.admin.actions import LifeActions
from backends.admin.lasthour import backend_last_hour
from backends.admin.secret import SecretAdmin
from backends.admin.showing import (
    DASH,
    LABELS,
    age,
    age_and_use,
    gpu_table,
    gpus_of,
    known,
    node_status_of,
    percent,
    short_age,
    status_of,
)
from backends.catalog import available_mib, effective_engine
from backends.engines.gpu import assigned
from backends.forms import BackendForm, BackendModelForm
from backends.models import Backend, BackendModel, Engine
from backends.services import probe_backends
from scheduler.core.jobs import TASKS


class BackendModelInline(TabularInline):  # type: ignore[misc]
    model = BackendModel
    form = BackendModelForm
    # What else a model may be for is on a page of its own: the table has no room for it.
    fields = (*(f for f in BackendModelForm.Meta.fields if f not in TASKS), "is_listed")
    show_change_link = True
    readonly_fields = ("is_listed",)
    extra = 0
    # A request may carry a thousand fields at most, and Ollama servers have hundreds of models.
    per_page = 50
    verbose_name_plural = "models (auto: as detected; ? is unknown)"

    @admin.display(description="listed", boolean=True)
    def is_listed(self, row: BackendModel) -> bool:
        return row.listed


@admin.register(Backend)
class BackendAdmin(LifeActions, SecretAdmin):
    form = BackendForm
    inlines = (BackendModelInline,)
    list_display = (
        "name",
        "state",
        "age_in_list",
        "engine_found",
        "model_count",
        "load",
        "slots_in_use",
        "node_link",
        "more",
    )
    list_filter = ("enabled", "draining", "paused", "status__detected_engine", "node")
    list_before_template = "backends/_all_backends.html"
    change_form_outer_before_template = "backends/_one_backend.html"
    search_fields = ("name", "base_url")
    autocomplete_fields = ("node",)
    readonly_fields = (
        "state",
        "last_answer",
        "engine_found",
        "load",
        "slots",
        "kv_use",
        "vram",
        "gpus",
        "loaded_models",
        "last_hour",
        "last_error",
    )
    fieldsets = (
        (None, {"fields": ("name", "base_url", "engine", "api_key", "remove_key")}),
        (SecretAdmin.polled, {"fields": readonly_fields}),
        (
            "What it may get",
            {
                "fields": (
                    "enabled",
                    "draining",
                    "paused",
                    "max_concurrent",
                    "max_queue",
                    "priority",
                )
            },
        ),
        ("Where it runs", {"fields": ("node", "gpu_indexes")}),
        (
            "Time limits",
            {
                "fields": (
                    "connect_timeout",
                    "first_byte_timeout",
                    "chunk_timeout",
                    "poll_interval",
                )
            },
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Backend]:
        offered = Q(models__by_hand=True) | Q(models__listed=True)
        backends: QuerySet[Backend] = super().get_queryset(request)
        return backends.select_related("status", "node__status").annotate(
            offered_models=Count("models", filter=offered)
        )

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        _warn_when_polls_have_stopped(request)
        _warn_when_all_are_paused(request)
        may = {"may_change": self.has_change_permission(request)}
        response: HttpResponse = super().changelist_view(request, may | (extra_context or {}))
        return response

    # ---- what is shown

    @display(description="state", label=LABELS)  # type: ignore[untyped-decorator]
    def state(self, backend: Backend) -> str:
        return str(backend.state.value)

    @admin.display(description="last answer", ordering="status__observed_at")
    def last_answer(self, backend: Backend) -> str:
        return age_and_use(status_of(backend).observed_at)

    @admin.display(description="last answer", ordering="status__observed_at")
    def age_in_list(self, backend: Backend) -> SafeString | str:
        return short_age(status_of(backend).observed_at)

    @admin.display(description="engine", ordering="status__detected_engine")
    def engine_found(self, backend: Backend) -> str:
        status = status_of(backend)
        if backend.engine == Engine.AUTO and not status.detected_engine:
            return "not found out yet"
        engine = Engine(effective_engine(backend.engine, status.detected_engine)).label
        return f"{engine} {status.version}".strip()

    @admin.display(description="models", ordering="offered_models")
    def model_count(self, backend: Any) -> SafeString:
        address = _list_of("backends_backendmodel", backend__id__exact=backend.pk)
        return _link(address, str(backend.offered_models))

    @admin.display(description="running / waiting")
    def load(self, backend: Backend) -> str:
        status = status_of(backend)
        return f"{known(status.running)} / {known(status.waiting)}"

    @admin.display(description="slots", ordering="max_concurrent")
    def slots_in_use(self, backend: Backend) -> SafeString | str:
        """How many it is sent at once, and how many it says that it runs."""
        own = status_of(backend).slots
        if own is None or own == backend.max_concurrent:
            return str(backend.max_concurrent)
        text = '{} <span class="mr-small">it has {}</span>'
        return format_html(text, backend.max_concurrent, own)

    @admin.display(description="its slots")
    def slots(self, backend: Backend) -> str:
        return known(status_of(backend).slots)

    @admin.display(description="KV cache in use")
    def kv_use(self, backend: Backend) -> str:
        return percent(status_of(backend).kv_use)

    @admin.display(description="VRAM free of total")
    def vram(self, backend: Backend) -> str:
        status = status_of(backend)
        free, total = known(status.vram_free_mib, "MiB"), known(status.vram_total_mib, "MiB")
        available = available_mib(effective_engine(backend.engine, status.detected_engine), status)
        text = f"{free} of {total}"
        if available == status.vram_free_mib:
            return text
        return f"{text}; {known(available, 'MiB')} with what Ollama can unload"

    @admin.display(description="its GPUs")
    def gpus(self, backend: Backend) -> SafeString | str:
        if backend.node is None:
            return DASH
        gpus = assigned(gpus_of(backend.node), backend.gpu_indexes)
        told = age_and_use(node_status_of(backend.node).observed_at)
        address = reverse("admin:backends_node_change", args=[backend.node_id])
        return format_html("{} {}{}", _link(address, backend.node.name), told, gpu_table(gpus))

    @admin.display(description="loaded models")
    def loaded_models(self, backend: Backend) -> str:
        loaded = status_of(backend).loaded_models
        if loaded is None:
            return DASH
        shown = (
            f"{name} ({known(vram, 'MiB')})" if vram else name for name, vram in loaded.items()
        )
        return ", ".join(shown) or "none"

    @admin.display(description="last hour")
    def last_hour(self, backend: Backend) -> SafeString | str:
        return backend_last_hour(backend)

    @admin.display(description="last error")
    def last_error(self, backend: Backend) -> str:
        return known(status_of(backend).error)

    @admin.display(description="node", ordering="node__name")
    def node_link(self, backend: Backend) -> SafeString | str:
        if backend.node is None:
            return DASH
        return _link(
            reverse("admin:backends_node_change", args=[backend.node_id]), backend.node.name
        )

    @admin.display(description="see also")
    def more(self, backend: Backend) -> SafeString:
        address = _list_of("scheduler_decision", selected_backend=backend.name)
        return _link(address, "decisions")

    # ---- what happens on saving

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        super().save_related(request, form, formsets, change)
        # After the commit: no lock is held while a server that hangs is waited for.
        transaction.on_commit(partial(self._probe, request, form.instance.pk))

    def _probe(self, request: HttpRequest, pk: int) -> None:
        probe_backends([pk])
        backend = self.get_queryset(request).get(pk=pk)
        self.message_user(request, *self.outcome(backend))
        for warning in (slots_warning(backend), gpus_warning(backend)):
            if warning is not None:
                self.message_user(request, warning, messages.WARNING)


def _link(address: str, text: str) -> SafeString:
    return format_html('<a class="mr-link" href="{}">{}</a>', address, text)


def _list_of(model: str, **filters: Any) -> str:
    return f"{reverse(f'admin:{model}_changelist')}?{urlencode(filters)}"


def slots_warning(backend: Backend) -> str | None:
    """What to say when more is sent than the server runs at once, else None."""
    slots = status_of(backend).slots
    if slots is None or backend.max_concurrent <= slots:
        return None
    return (
        f"{backend.name} is sent up to {backend.max_concurrent} requests at once but says that it "
        f"runs {slots}: the others wait inside of it, where shares do not count."
    )


def gpus_warning(backend: Backend) -> str | None:
    """What to say when it is given GPUs that its node does not tell of, else None."""
    if backend.gpu_indexes is None:
        return None
    if backend.node is None:
        return f"{backend.name} is given GPUs, but no node that they are on."
    told = [gpu.index for gpu in gpus_of(backend.node)]
    missing = [str(index) for index in backend.gpu_indexes if str(index) not in told]
    if not told or not missing:
        return None
    return (
        f"{backend.node.name} tells of no GPU {', '.join(missing)}; it has {', '.join(told)}. "
        f"Until then {backend.name}'s memory is taken as unknown."
    )


def _warn_when_polls_have_stopped(request: HttpRequest) -> None:
    last = Backend.objects.filter(enabled=True).aggregate(at=Max("status__attempted_at"))["at"]
    longest = timedelta(seconds=2 * float(settings.BACKEND_STALE_AFTER))
    if last is not None and timezone.now() - last > longest:
        messages.warning(
            request,
            f"The last poll of any backend was {age(last)}: the worker seems not to run. "
            "What is shown here is old; requests go on without it.",
        )


def _warn_when_all_are_paused(request: HttpRequest) -> None:
    """Whatever each one's state: a backend that is down shows that, and not that it is paused."""
    enabled = Backend.objects.filter(enabled=True)
    told = enabled.aggregate(all=Count("pk"), paused=Count("pk", filter=Q(paused=True)))
    if told["all"] and told["all"] == told["paused"]:
        messages.warning(request, "All backends are paused: requests wait until one is resumed.")
