"""Admin pages on nodes, backends, their models, aliases and strategies."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.contrib import admin, messages
from django.db import transaction
from django.db.models import Count, Max, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import display

from backends.catalog import effective_engine
from backends.engines.gpu import Gpu, combined
from backends.forms import AliasForm, BackendForm, BackendModelForm, NodeForm, SecretForm
from backends.models import (
    Alias,
    Backend,
    BackendModel,
    BackendStatus,
    Engine,
    ModelStrategy,
    Node,
    State,
)
from backends.services import probe_backends

DASH = "–"

#: The look of each state; the word itself is always shown too.
LABELS = {
    State.READY.value: "success",
    State.DOWN.value: "danger",
    State.UNANSWERED.value: "warning",
    State.UNKNOWN.value: "info",
    State.DRAINING.value: "warning",
    State.DISABLED.value: "default",
}


def known(value: Any, unit: str = "") -> str:
    """A value with its unit; unknown is a dash, never 0."""
    if value is None or value == "":
        return DASH
    text = f"{value:,.0f}" if isinstance(value, float) else str(value)
    return f"{text} {unit}".strip()


def age(moment: datetime | None) -> str:
    """ "4 s ago", "12 min ago" …, or "never"."""
    if moment is None:
        return "never"
    seconds = max(0.0, (timezone.now() - moment).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


class SecretAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    """For rows with a stored key, which no page may show: not to those who may only look either."""

    form: type[SecretForm]
    #: The title of the fields that only polls fill.
    polled = "As last polled"

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> list[tuple[Any, Any]]:
        hidden: set[str] = set()
        if obj is None or not getattr(obj, self.form.secret):
            hidden.add("remove_key")
        if obj is not None and not self.has_change_permission(request, obj):
            hidden |= {"remove_key", self.form.secret}
        return [
            (title, options | {"fields": [f for f in options["fields"] if f not in hidden]})
            for title, options in super().get_fieldsets(request, obj)
            if obj is not None or title != self.polled
        ]


class BackendModelInline(TabularInline):  # type: ignore[misc]
    model = BackendModel
    form = BackendModelForm
    fields = (*BackendModelForm.Meta.fields, "is_listed")
    readonly_fields = ("is_listed",)
    extra = 0
    # A request may carry a thousand fields at most, and Ollama servers have hundreds of models.
    per_page = 50
    verbose_name_plural = "models (auto: as detected; ? is unknown)"

    @admin.display(description="listed", boolean=True)
    def is_listed(self, row: BackendModel) -> bool:
        return row.listed


@admin.register(Backend)
class BackendAdmin(SecretAdmin):
    form = BackendForm
    inlines = (BackendModelInline,)
    list_display = (
        "name",
        "state",
        "last_answer",
        "engine_found",
        "model_count",
        "load",
        "slots",
        "max_concurrent",
        "node",
        "enabled",
        "draining",
    )
    list_filter = ("enabled", "draining", "status__detected_engine", "node")
    search_fields = ("name", "base_url")
    autocomplete_fields = ("node",)
    actions = ("enable", "disable", "drain", "resume", "poll_now")
    readonly_fields = (
        "state",
        "last_answer",
        "engine_found",
        "load",
        "slots",
        "kv_use",
        "vram",
        "loaded_models",
        "last_error",
    )
    fieldsets = (
        (None, {"fields": ("name", "base_url", "engine", "api_key", "remove_key", "node")}),
        (SecretAdmin.polled, {"fields": readonly_fields}),
        (
            "What it may get",
            {"fields": ("enabled", "draining", "max_concurrent", "max_queue", "priority")},
        ),
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
        return backends.select_related("status", "node").annotate(
            offered_models=Count("models", filter=offered)
        )

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        _warn_when_polls_have_stopped(request)
        response: HttpResponse = super().changelist_view(request, extra_context)
        return response

    # ---- what is shown

    @display(description="state", label=LABELS)  # type: ignore[untyped-decorator]
    def state(self, backend: Backend) -> str:
        return str(backend.state.value)

    @admin.display(description="last answer", ordering="status__observed_at")
    def last_answer(self, backend: Backend) -> str:
        return age(_status(backend).observed_at)

    @admin.display(description="engine", ordering="status__detected_engine")
    def engine_found(self, backend: Backend) -> str:
        status = _status(backend)
        if backend.engine == Engine.AUTO and not status.detected_engine:
            return "not found out yet"
        engine = Engine(effective_engine(backend.engine, status.detected_engine)).label
        return f"{engine} {status.version}".strip()

    @admin.display(description="models", ordering="offered_models")
    def model_count(self, backend: Any) -> int:
        return int(backend.offered_models)

    @admin.display(description="running / waiting")
    def load(self, backend: Backend) -> str:
        status = _status(backend)
        return f"{known(status.running)} / {known(status.waiting)}"

    @admin.display(description="its slots", ordering="status__slots")
    def slots(self, backend: Backend) -> str:
        return known(_status(backend).slots)

    @admin.display(description="KV cache in use")
    def kv_use(self, backend: Backend) -> str:
        use = _status(backend).kv_use
        return known(None if use is None else use * 100, "%")

    @admin.display(description="VRAM free of total")
    def vram(self, backend: Backend) -> str:
        status = _status(backend)
        free, total = known(status.vram_free_mib, "MiB"), known(status.vram_total_mib, "MiB")
        return f"{free} of {total}"

    @admin.display(description="loaded models")
    def loaded_models(self, backend: Backend) -> str:
        loaded = _status(backend).loaded_models
        if loaded is None:
            return DASH
        shown = (
            f"{name} ({known(vram, 'MiB')})" if vram else name for name, vram in loaded.items()
        )
        return ", ".join(shown) or "none"

    @admin.display(description="last error")
    def last_error(self, backend: Backend) -> str:
        return known(_status(backend).error)

    # ---- what happens on saving

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        super().save_related(request, form, formsets, change)
        # After the commit: no lock is held while a server that hangs is waited for.
        transaction.on_commit(partial(self._probe, request, form.instance.pk))

    def _probe(self, request: HttpRequest, pk: int) -> None:
        probe_backends([pk])
        backend = self.get_queryset(request).get(pk=pk)
        self.message_user(request, *_outcome(backend))
        if (warning := slots_warning(backend)) is not None:
            self.message_user(request, warning, messages.WARNING)

    # ---- actions

    @admin.action(description="Enable", permissions=["change"])
    def enable(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._set(request, backends, enabled=True)

    @admin.action(description="Disable: nothing new, and no polls", permissions=["change"])
    def disable(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._set(request, backends, enabled=False)

    @admin.action(description="Drain: finish what runs, nothing new", permissions=["change"])
    def drain(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._set(request, backends, draining=True)

    @admin.action(description="Resume: end the draining", permissions=["change"])
    def resume(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._set(request, backends, draining=False)

    @admin.action(description="Poll now", permissions=["view"])
    def poll_now(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        ids = list(backends.values_list("pk", flat=True))
        probe_backends(ids)
        for backend in self.get_queryset(request).filter(pk__in=ids):
            self.message_user(request, *_outcome(backend))

    def _set(self, request: HttpRequest, backends: QuerySet[Backend], **values: bool) -> None:
        """Saved one by one, since the history does not see an update of many rows."""
        changed = backends.exclude(**values)
        names = []
        for backend in changed:
            for name, value in values.items():
                setattr(backend, name, value)
            backend.save(update_fields=list(values))
            self.log_change(request, backend, [{"changed": {"fields": list(values)}}])
            names.append(backend.name)
        self.message_user(request, f"Changed: {', '.join(names) or 'none, all were so already'}.")


def _status(backend: Backend) -> BackendStatus:
    """Its status; an empty one while it has none, as on the page that adds a backend."""
    return getattr(backend, "status", None) or BackendStatus()


def _outcome(backend: Any) -> tuple[str, int]:
    """A message on what the last poll came to, and its level."""
    status = _status(backend)
    if status.answered_at is None:
        return f"{backend.name}: no answer yet; it is being polled.", messages.WARNING
    if status.reachable:
        engine = Engine(effective_engine(backend.engine, status.detected_engine)).label
        found = f"{engine} {status.version}".strip()
        return f"{backend.name}: {found}, models: {backend.offered_models}.", messages.SUCCESS
    return f"{backend.name}: {status.state.value}. {status.error}", messages.WARNING


def slots_warning(backend: Backend) -> str | None:
    """What to say when more is sent than the server runs at once, else None."""
    slots = _status(backend).slots
    if slots is None or backend.max_concurrent <= slots:
        return None
    return (
        f"{backend.name} is sent up to {backend.max_concurrent} requests at once but says that it "
        f"runs {slots}: the others wait inside of it, where shares do not count."
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


@admin.register(Node)
class NodeAdmin(SecretAdmin):
    form = NodeForm
    list_display = ("name", "gpu_count", "memory", "utilization", "last_answer", "backend_count")
    search_fields = ("name",)
    readonly_fields = ("gpu_count", "memory", "utilization", "last_answer", "last_error")
    fieldsets = (
        (None, {"fields": ("name", "telemetry_url", "telemetry_key", "remove_key")}),
        (SecretAdmin.polled, {"fields": readonly_fields}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        nodes: QuerySet[Node] = super().get_queryset(request)
        return nodes.select_related("status").annotate(backend_total=Count("backends"))

    @admin.display(description="GPUs")
    def gpu_count(self, node: Node) -> str:
        return known(len(_gpus(node)) or None)

    @admin.display(description="memory free of total")
    def memory(self, node: Node) -> str:
        memory = combined(_gpus(node))
        return f"{known(memory.free_mib, 'MiB')} of {known(memory.total_mib, 'MiB')}"

    @admin.display(description="GPU use")
    def utilization(self, node: Node) -> str:
        use = combined(_gpus(node)).utilization
        return known(None if use is None else use * 100, "%")

    @admin.display(description="last answer")
    def last_answer(self, node: Node) -> str:
        if not node.telemetry_url:
            return "not polled"
        return age(node.status.observed_at) if hasattr(node, "status") else "never"

    @admin.display(description="last error")
    def last_error(self, node: Node) -> str:
        return known(node.status.error if hasattr(node, "status") else None)

    @admin.display(description="backends", ordering="backend_total")
    def backend_count(self, node: Any) -> int:
        return int(node.backend_total)


def _gpus(node: Node) -> Sequence[Gpu]:
    return [Gpu(**gpu) for gpu in node.status.gpus] if hasattr(node, "status") else []


@admin.register(Alias)
class AliasAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    form = AliasForm
    list_display = ("name", "target_names")
    search_fields = ("name",)

    @admin.display(description="targets, best first")
    def target_names(self, alias: Alias) -> str:
        return ", ".join(alias.targets)


@admin.register(ModelStrategy)
class ModelStrategyAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    list_display = ("model_name", "strategy")
    list_filter = ("strategy",)
    search_fields = ("model_name",)
