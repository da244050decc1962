"""Models on backends: what each can do, and hints to Ollama to load or unload one."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin

from backends.admin.showing import DASH, age, known, status_of
from backends.catalog import with_tag
from backends.forms import BackendModelForm
from backends.hints import KEEP_ALIVE, hint, takes_hints
from backends.models import BackendModel
from backends.services import probe_backends
from scheduler.core.jobs import CAPABILITIES, TASKS


@admin.register(BackendModel)
class BackendModelAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    form = BackendModelForm
    list_display = ("name", "on", "offered", "loaded", "memory", "context", "abilities")
    list_filter = ("backend", "listed", "by_hand")
    search_fields = ("name", "backend__name")
    autocomplete_fields = ("backend",)
    list_select_related = ("backend__status",)
    list_per_page = 50
    actions = ("load", "unload")
    readonly_fields = ("offered", "loaded")
    fields = ("backend", *BackendModelForm.Meta.fields, "offered", "loaded")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        # Another backend's model of that name is another row.
        return self.readonly_fields if obj is None else (*self.readonly_fields, "backend")

    @admin.display(description="backend", ordering="backend__name")
    def on(self, row: BackendModel) -> SafeString:
        address = reverse("admin:backends_backend_change", args=[row.backend_id])
        return format_html('<a class="mr-link" href="{}">{}</a>', address, row.backend.name)

    @admin.display(description="offered", ordering="listed")
    def offered(self, row: BackendModel) -> str:
        if row.listed:
            return "listed by the backend"
        return "by hand only" if row.by_hand else "no longer listed: not offered"

    @admin.display(description="loaded")
    def loaded(self, row: BackendModel) -> str:
        """As of the last poll, with its age."""
        status = status_of(row.backend) if row.backend_id else None
        if status is None or status.loaded_models is None:
            return DASH
        sizes = {with_tag(name): size for name, size in status.loaded_models.items()}
        name = with_tag(row.name)
        if name not in sizes:
            return f"no ({age(status.observed_at)})"
        size = f", {known(sizes[name], 'MiB')}" if sizes[name] is not None else ""
        return f"yes{size} ({age(status.observed_at)})"

    @admin.display(description="memory it needs")
    def memory(self, row: BackendModel) -> str:
        own = row.detected_vram_mib if row.vram_mib is None else row.vram_mib
        return known(own, "MiB")

    @admin.display(description="context")
    def context(self, row: BackendModel) -> str:
        own = row.detected_context_length if row.context_length is None else row.context_length
        return known(None if own is None else float(own), "tokens")

    @admin.display(description="can do")
    def abilities(self, row: BackendModel) -> str:
        return ", ".join(filter(None, (_ability(row, name) for name in CAPABILITIES))) or DASH

    @admin.action(description=f"Ollama: load, keep for {KEEP_ALIVE}", permissions=["change"])
    def load(self, request: HttpRequest, rows: QuerySet[BackendModel]) -> None:
        self._hint(request, rows, load=True)

    @admin.action(description="Ollama: unload from memory", permissions=["change"])
    def unload(self, request: HttpRequest, rows: QuerySet[BackendModel]) -> None:
        self._hint(request, rows, load=False)

    def _hint(self, request: HttpRequest, rows: QuerySet[BackendModel], *, load: bool) -> None:
        chosen = list(rows.select_related("backend__status"))
        taken = [row for row in chosen if takes_hints(row)]
        for row in chosen:
            if row not in taken:
                text = f"{row}: only Ollama loads and unloads models when it is told to."
                self.message_user(request, text, messages.WARNING)
        done = "is loaded" if load else "is out of memory"
        for row, error in zip(taken, hint(taken, load=load), strict=True):
            if error:
                self.message_user(request, f"{row}: {error}", messages.ERROR)
            else:
                self.message_user(request, f"{row} {done}.", messages.SUCCESS)
        probe_backends({row.backend_id for row in taken})


def _ability(row: BackendModel, name: str) -> str:
    """What a model can do, or is not known to: "vision", "tools ?", or nothing.

    Of the tasks only known ones are told: most models are for none of them.
    """
    own = getattr(row, name)
    can = getattr(row, f"detected_{name}") if own is None else own
    label = "JSON" if name == "json" else name
    return {True: label, None: "" if name in TASKS else f"{label} ?", False: ""}[can]
