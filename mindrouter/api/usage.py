"""/api/admin/usage and /api/admin/limits: what is used, and how much of the limits."""

from __future__ import annotations

import csv
import io
from datetime import datetime, timedelta
from typing import Any

from django.http import HttpResponse
from django.utils import timezone
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.limits import Holder
from accounts.models import ApiKey, Group, User
from mindrouter.api.fields import TextField
from mindrouter.api.listing import StrictQuery, read_query
from scheduler import services, spending
from scheduler.pages.reports import harmless
from scheduler.serializers import NumberField
from scheduler.views import NoScheduler, StaffView


class UsageQuery(StrictQuery):
    by = serializers.ChoiceField(choices=spending.BYS, required=False, default="user")
    since = serializers.DateTimeField(required=False, help_text="Default: 30 days ago.")
    until = serializers.DateTimeField(required=False, help_text="Default: now.")
    user = TextField(required=False, max_length=150, help_text="A username.")
    form = serializers.ChoiceField(
        choices=("json", "csv"), required=False, default="json", help_text="csv: a file."
    )


class UsageRowSerializer(serializers.Serializer[Any]):
    """One user's, group's, model's, key's, hour's or day's. Tokens; ``cost`` in ``currency``."""

    name = serializers.CharField()
    requests = serializers.IntegerField()
    completed = serializers.IntegerField()
    refused = serializers.IntegerField()
    cancelled = serializers.IntegerField()
    failed = serializers.IntegerField()
    aborted = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField(help_text="Part of the prompt tokens.")
    completion_tokens = serializers.IntegerField()
    estimated_tokens = serializers.IntegerField(help_text="That no backend has reported.")
    charged_tokens = NumberField(help_text="What budgets count.")
    cost = serializers.FloatField(allow_null=True, help_text="null: a price is missing.")
    estimated_energy_wh = NumberField(help_text="Watt hours, from the power of the GPUs.")
    estimated_energy_cost = serializers.FloatField(
        allow_null=True, help_text="null: ENERGY_PRICE is not set."
    )


class UsageSerializer(serializers.Serializer[Any]):
    by = serializers.CharField()
    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    currency = serializers.CharField()
    rows = UsageRowSerializer(many=True)


class UsageView(StaffView):
    """Exact totals of whole hours, which outlive the records."""

    @extend_schema(
        parameters=[UsageQuery],
        responses={
            (200, "application/json"): UsageSerializer,
            (200, "text/csv"): OpenApiTypes.STR,
        },
    )
    def get(self, request: Request) -> Any:
        asked = read_query(request, UsageQuery)
        until = asked.get("until") or timezone.now()
        since = asked.get("since") or until - timedelta(days=30)
        user = _user(asked["user"]) if "user" in asked else None
        rows = [
            {"name": row[asked["by"]], **row}
            for row in spending.totals(
                asked["by"], since, until, user_id=None if user is None else user.pk
            )
        ]
        if asked["form"] == "csv":
            return _as_file(asked["by"], since, rows)
        told = {"by": asked["by"], "since": since, "until": until, "rows": rows}
        return Response(UsageSerializer({**told, "currency": spending.currency()}).data)


def _as_file(by: str, since: datetime, rows: list[dict[str, Any]]) -> HttpResponse:
    text = io.StringIO()
    writer = csv.writer(text)
    costs = ("cost", "estimated_energy_cost")
    titles = (f"{name} ({spending.currency()})" for name in costs)
    writer.writerow([by, *spending.COUNTS, *titles])
    for row in rows:
        writer.writerow([harmless(row["name"]), *(row[n] for n in (*spending.COUNTS, *costs))])
    name = f"usage-by-{by}-{since:%Y-%m-%d}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return HttpResponse(text.getvalue(), content_type="text/csv; charset=utf-8", headers=headers)


class LimitQuery(StrictQuery):
    """Whose limits; all of one user's, the group's as a whole and the keys' included."""

    user = TextField(required=False, max_length=150)
    group = TextField(required=False, max_length=100)
    model = TextField(required=False, max_length=300)


class LimitUseSerializer(serializers.Serializer[Any]):
    """One limit of one holder. ``used`` is without what is reserved for running requests."""

    holder = serializers.ChoiceField(choices=("key", "user", "group", "model"))
    id = serializers.CharField()
    limit = serializers.CharField()
    period = serializers.CharField(allow_null=True)
    value = serializers.IntegerField()
    used = NumberField()
    reserved = NumberField()
    remaining = NumberField()
    resets_at = serializers.CharField(allow_null=True)
    shadow = serializers.BooleanField()


class LimitsSerializer(serializers.Serializer[Any]):
    limits = LimitUseSerializer(many=True)


class LimitsView(StaffView):
    """How much is used of the limits of a user, a group as a whole or a model, as of now."""

    @extend_schema(parameters=[LimitQuery], responses=LimitsSerializer)
    def get(self, request: Request) -> Response:
        query = read_query(request, LimitQuery)
        holders = []
        if "user" in query:
            user = _user(query["user"])
            keys = ApiKey.objects.filter(user=user).values_list("pk", flat=True)
            holders += [Holder("user", user.pk), *(Holder("key", pk) for pk in keys)]
            if user.group_id is not None:
                holders.append(Holder("group", user.group_id))
        if "group" in query:
            group = Group.objects.filter(name=query["group"]).first()
            if group is None:
                raise NotFound("There is no such group.")
            holders.append(Holder("group", group.pk))
        if "model" in query:
            holders.append(Holder("model", query["model"]))
        try:
            limits = services.use_of(holders)
        except TimeoutError:
            raise NoScheduler("The scheduler does not answer.") from None
        return Response(LimitsSerializer({"limits": limits}).data)


def _user(username: str) -> User:
    user = User.objects.filter(username=username).first()
    if user is None:
        raise NotFound("There is no such user.")
    return user
