"""Names that clients ask for: aliases, and how backends are chosen for a model."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin
from unfold.views import ChangeList

from backends.admin.showing import DASH
from backends.forms import AliasForm
from backends.models import Alias, ModelStrategy
from backends.naming import Names, live_target, load_names


class NamesList(ChangeList):  # type: ignore[misc]
    """Reads once which backends have which models, for all rows."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        names = load_names()
        for row in self.result_list:
            row.known_names = names


class NamesAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    """For rows that speak of models by name, whether or not a backend has them."""

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return NamesList


def _names_of(row: Any) -> Names:
    names: Names = getattr(row, "known_names", None) or load_names()
    return names


def _held_by(target: str, names: Names) -> str:
    """Which backends have a model, in words."""
    if target in names.usable:
        return f"on {', '.join(names.usable[target])}"
    if target in names.others:
        return f"only on {', '.join(names.others[target])}, out of service"
    return "no backend has it"


@admin.register(Alias)
class AliasAdmin(NamesAdmin):
    form = AliasForm
    list_display = ("name", "target_states")
    search_fields = ("name",)
    readonly_fields = ("target_states",)
    fields = ("name", "targets", "target_states")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return self.fields if obj is not None else self.fields[:2]

    @admin.display(description="targets, best first")
    def target_states(self, alias: Alias) -> SafeString | str:
        names = _names_of(alias)
        live = live_target(alias.targets, names)
        lines = ((_mark(t, live, names), t, _held_by(t, names)) for t in alias.targets)
        return (
            format_html_join(
                "",
                '<span class="mr-target">{}{} <span class="mr-small">{}</span></span>',
                lines,
            )
            or DASH
        )

    def save_model(self, request: HttpRequest, obj: Alias, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        names = load_names()
        if live_target(obj.targets, names) is None:
            self.message_user(
                request,
                f"No backend in service has a target of {obj.name}: requests for it are refused "
                "or wait.",
                messages.WARNING,
            )
        nested = Alias.objects.filter(name__in=obj.targets).exclude(pk=obj.pk)
        for other in nested:
            self.message_user(
                request,
                f"{other.name} is an alias itself; as a target it means a model of that name.",
                messages.WARNING,
            )


def _mark(target: str, live: str | None, names: Names) -> SafeString:
    if target == live:
        return format_html('<b class="mr-outcome mr-completed">{}</b> ', "used now")
    if target in names.usable:
        return SafeString()
    return format_html('<b class="mr-outcome mr-failed">{}</b> ', "dead")


@admin.register(ModelStrategy)
class ModelStrategyAdmin(NamesAdmin):
    list_display = ("model_name", "strategy", "backends")
    list_filter = ("strategy",)
    search_fields = ("model_name",)

    @admin.display(description="backends")
    def backends(self, row: ModelStrategy) -> str:
        return _held_by(row.model_name, _names_of(row))
