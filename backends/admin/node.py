"""Nodes: their GPUs as last told, and the backends on them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display

from backends.admin.lasthour import gpus_last_hour
from backends.admin.secret import SecretAdmin
from backends.admin.showing import (
    DASH,
    age,
    age_and_use,
    gpu_table,
    gpus_of,
    is_stale,
    known,
    node_status_of,
    percent,
    short_age,
)
from backends.engines.gpu import combined
from backends.forms import NodeForm
from backends.models import Node

_STATES = {"answers": "success", "old": "warning", "no answer": "danger", "not polled": "default"}


@admin.register(Node)
class NodeAdmin(SecretAdmin):
    form = NodeForm
    list_display = (
        "name",
        "state",
        "age_in_list",
        "gpu_count",
        "memory",
        "utilization",
        "backend_count",
    )
    search_fields = ("name",)
    readonly_fields = ("state", "last_answer", "gpus", "last_hour", "last_error", "its_backends")
    fieldsets = (
        (None, {"fields": ("name", "telemetry_url", "telemetry_key", "remove_key")}),
        (SecretAdmin.polled, {"fields": readonly_fields}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        nodes: QuerySet[Node] = super().get_queryset(request)
        return nodes.select_related("status").annotate(backend_total=Count("backends"))

    @display(description="state", label=_STATES)  # type: ignore[untyped-decorator]
    def state(self, node: Node) -> str:
        if not node.telemetry_url:
            return "not polled"
        status = node_status_of(node)
        if status.error:
            return "no answer"
        return "old" if is_stale(status.observed_at) else "answers"

    @admin.display(description="GPUs")
    def gpu_count(self, node: Node) -> str:
        return known(len(gpus_of(node)) or None)

    @admin.display(description="memory free of total")
    def memory(self, node: Node) -> str:
        memory = combined(gpus_of(node))
        return f"{known(memory.free_mib, 'MiB')} of {known(memory.total_mib, 'MiB')}"

    @admin.display(description="GPU use")
    def utilization(self, node: Node) -> str:
        return percent(combined(gpus_of(node)).utilization)

    @admin.display(description="last answer")
    def last_answer(self, node: Node) -> str:
        return age_and_use(node_status_of(node).observed_at) if node.telemetry_url else "not polled"

    @admin.display(description="last answer", ordering="status__observed_at")
    def age_in_list(self, node: Node) -> SafeString | str:
        return short_age(node_status_of(node).observed_at) if node.telemetry_url else DASH

    @admin.display(description="GPUs")
    def gpus(self, node: Node) -> SafeString | str:
        return gpu_table(gpus_of(node))

    @admin.display(description="last hour")
    def last_hour(self, node: Node) -> SafeString | str:
        return gpus_last_hour(node)

    @admin.display(description="last error")
    def last_error(self, node: Node) -> str:
        status = node_status_of(node)
        if not status.error:
            return DASH
        return f"{status.error} ({age(status.attempted_at)})"

    @admin.display(description="backends", ordering="backend_total")
    def backend_count(self, node: Any) -> int:
        return int(node.backend_total)

    @admin.display(description="backends")
    def its_backends(self, node: Node) -> SafeString | str:
        links = format_html_join(
            ", ",
            '<a class="mr-link" href="{}">{}</a>{}',
            (
                (reverse("admin:backends_backend_change", args=[b.pk]), b.name, _gpus_told(b))
                for b in node.backends.all()
            ),
        )
        return links or DASH


def _gpus_told(backend: Any) -> str:
    if backend.gpu_indexes is None:
        return " (all GPUs)"
    return f" (GPU {', '.join(map(str, backend.gpu_indexes))})"
