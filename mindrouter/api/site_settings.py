"""/api/admin/settings: what may be changed while running, and where each value comes from."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import transaction
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from mindrouter.api.fields import RowSerializer, columns
from mindrouter.api.history import HistoryPageSerializer, HistoryQuery, history_page
from mindrouter.api.listing import read_query
from mindrouter.api.resources import ResourceView
from scheduler.models import SiteSettings
from scheduler.settings_admin import in_force
from scheduler.snapshot import setting_name


class SettingsChangeSerializer(RowSerializer[SiteSettings]):
    """What to save. null: the environment's value, or the default, applies again."""

    class Meta:
        model = SiteSettings
        fields = columns(SiteSettings)


class SettingSerializer(serializers.Serializer[Any]):
    value = serializers.JSONField(allow_null=True, help_text="In force. null: no limit.")
    source = serializers.ChoiceField(  # type: ignore[assignment]  # a field's own attribute
        choices=["saved", "environment", "default"]
    )
    saved = serializers.JSONField(allow_null=True, help_text="null: nothing is.")
    variable = serializers.CharField(help_text="Its name in the environment.")


class SettingsSerializer(serializers.Serializer[Any]):
    """Every setting by name."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {name: SettingSerializer() for name in columns(SiteSettings)}


class SettingsView(ResourceView):
    """The one row of settings."""

    model: ClassVar = SiteSettings

    @extend_schema(responses=SettingsSerializer)
    def get(self, request: Request) -> Response:
        """Every setting by name: its value in force and where that comes from."""
        return Response(_described(_row()))

    @extend_schema(
        request=SettingsChangeSerializer(partial=True),
        responses=SettingsSerializer,
    )
    def patch(self, request: Request) -> Response:
        """Save some of them; in force within 5 s."""
        change = SettingsChangeSerializer(_row(), data=request.data, partial=True)
        change.is_valid(raise_exception=True)
        if change.validated_data:
            with transaction.atomic():  # the row and its history
                change.save()
        return Response(_described(_row()))


class SettingsHistory(ResourceView):
    """Who changed which setting, when and why."""

    model: ClassVar = SiteSettings

    @extend_schema(parameters=[HistoryQuery], responses=HistoryPageSerializer)
    def get(self, request: Request) -> Response:
        """Newest first."""
        page = history_page(request, SiteSettings, 1, read_query(request, HistoryQuery))
        return Response(HistoryPageSerializer(page or {"next": None, "results": []}).data)


def _row() -> SiteSettings:
    # Made by the first save, so that merely looking changes nothing.
    return SiteSettings.objects.filter(pk=1).first() or SiteSettings(pk=1)


def _described(row: SiteSettings) -> dict[str, Any]:
    found = {}
    for name in columns(SiteSettings):
        value, source = in_force(row, name)
        found[name] = {
            "value": value,
            "source": source,
            "saved": getattr(row, name),
            "variable": setting_name(name),
        }
    return found
