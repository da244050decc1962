"""/api/admin/reports: the tables of the page of reports, as JSON."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from mindrouter.api.listing import PageQuery
from mindrouter.api.resources import ResourceView
from scheduler.causes import CAUSES
from scheduler.models import Decision
from scheduler.reports import MOST_DAYS, Period, as_values
from scheduler.serializers import NumberField

_USUAL_DAYS = 7


class PeriodQuery(PageQuery):
    limit = offset = None  # type: ignore[assignment]  # as many rows as the period has
    first = serializers.DateField(required=False, help_text="Default: six days before the last.")
    last = serializers.DateField(required=False, help_text="Default: today.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        values = super().validate(attrs)
        last = values.get("last") or timezone.localdate()
        first = values.get("first") or last - timedelta(days=_USUAL_DAYS - 1)
        if not 0 <= (last - first).days < MOST_DAYS:
            raise serializers.ValidationError(
                {"first": [f"0 to {MOST_DAYS - 1} days before last."]}
            )
        return {"first": first, "last": last}


class _StandingSerializer(serializers.Serializer[Any]):
    requests = serializers.IntegerField()
    tokens = NumberField(help_text="As charged.")
    entitled_tokens = NumberField(help_text="Among those who had work, hour by hour.")
    received_tokens = NumberField(help_text="In hours for which entitlements are known.")
    entitled_share = NumberField(allow_null=True, help_text="0..1")
    received_share = NumberField(allow_null=True, help_text="0..1")


class GroupDaySerializer(_StandingSerializer):
    """One group on one day."""

    day = serializers.DateField()
    group = serializers.CharField()
    borrowed_tokens = NumberField(help_text="Beyond its weight's part of all groups.")
    lent_tokens = NumberField(help_text="What it left of that part to others.")


class UserDaySerializer(_StandingSerializer):
    """One user on one day."""

    day = serializers.DateField()
    user = serializers.CharField()


class CausesSerializer(serializers.Serializer[Any]):
    """Slow requests of one week, each under its one cause."""

    week_of = serializers.DateField(help_text="Its Monday.")
    requests = serializers.IntegerField()
    slow = serializers.IntegerField()

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        causes = {name: serializers.IntegerField(help_text=words) for name, words in CAUSES.items()}
        return {**super().get_fields(), **causes}


class _ReportView(ResourceView):
    model: ClassVar = Decision

    def _rows(self, request: Request, what: Any) -> Response:
        query = PeriodQuery(data=request.query_params.dict())
        query.is_valid(raise_exception=True)
        period = Period(query.validated_data["first"], query.validated_data["last"])
        return Response(as_values(period, what))


class GroupReport(_ReportView):
    """Entitled against received."""

    @extend_schema(parameters=[PeriodQuery], responses=GroupDaySerializer(many=True))
    def get(self, request: Request) -> Response:
        """Each group's standing day by day."""
        return self._rows(request, "groups")


class UserReport(_ReportView):
    """Entitled against received."""

    @extend_schema(parameters=[PeriodQuery], responses=UserDaySerializer(many=True))
    def get(self, request: Request) -> Response:
        """Each user's standing day by day."""
        return self._rows(request, "users")


class CausesReport(_ReportView):
    """Why requests were slow."""

    @extend_schema(parameters=[PeriodQuery], responses=CausesSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Slow requests by cause and week, the newest first."""
        return self._rows(request, "causes")
