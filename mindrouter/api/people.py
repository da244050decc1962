"""/api/admin/groups, users, quotas and api-keys."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from django.db import transaction
from django.db.models import Count, QuerySet
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.captures import delete_captures
from accounts.models import ApiKey, Boost, Group, ModelLimits, Quota, Role, User
from mindrouter.api.fields import REASON, TextField
from mindrouter.api.listing import query_class
from mindrouter.api.resources import HistoryMixin, RowViewSet
from mindrouter.api.serializers import (
    ApiKeySerializer,
    BoostSerializer,
    GroupSerializer,
    ModelLimitsSerializer,
    ModelPriceSerializer,
    NewApiKeySerializer,
    QuotaSerializer,
    RotationSerializer,
    UserSerializer,
)
from scheduler.models import ModelPrice


def _flag() -> serializers.BooleanField:
    return serializers.BooleanField(required=False)


def _name() -> TextField:
    return TextField(required=False, max_length=300)


class GroupViewSet(HistoryMixin, RowViewSet[Group]):
    """Groups: weights, limits of each member, allowed models."""

    model = Group
    serializer_class = GroupSerializer
    query = query_class(
        "Group",
        orders=("name", "scheduler_weight"),
        search=("name", "description"),
        filters={"name": _name()},
    )

    def get_queryset(self) -> QuerySet[Group]:
        return Group.objects.annotate(member_count=Count("members")).order_by("name")


class UserViewSet(HistoryMixin, RowViewSet[User]):
    """Users. Only superusers change them."""

    model = User
    serializer_class = UserSerializer
    queryset = User.objects.select_related("group").order_by("username")
    query = query_class(
        "User",
        orders=("username", "email", "date_joined", "last_login"),
        search=("username", "first_name", "last_name", "email"),
        filters={
            "username": _name(),
            "group": _name(),
            "role": serializers.ChoiceField(choices=Role.choices, required=False),
            "is_staff": _flag(),
            "is_superuser": _flag(),
            "is_active": _flag(),
        },
    )
    columns: ClassVar = {"group": "group__name"}


class QuotaViewSet(HistoryMixin, RowViewSet[Quota]):
    """Quotas: what differs for one user from the group's defaults."""

    model = Quota
    serializer_class = QuotaSerializer
    queryset = Quota.objects.select_related("user").order_by("user__username")
    query = query_class(
        "Quota",
        orders=("user__username", "weight_override"),
        search=("user__username",),
        filters={"user": _name(), "group": _name()},
    )
    columns: ClassVar = {"user": "user__username", "group": "user__group__name"}


class BoostViewSet(HistoryMixin, RowViewSet[Boost]):
    """Timed boosts: factors on the weight of a group or a user. Set `ends_at` to end one early."""

    model = Boost
    serializer_class = BoostSerializer
    queryset = Boost.objects.select_related("group", "user", "made_by").order_by("ends_at", "name")
    query = query_class(
        "Boost",
        orders=("name", "starts_at", "ends_at", "factor"),
        search=("name", "reason", "group__name", "user__username"),
        filters={"name": _name(), "group": _name(), "user": _name()},
    )
    columns: ClassVar = {"group": "group__name", "user": "user__username"}


class ModelLimitsViewSet(HistoryMixin, RowViewSet[ModelLimits]):
    """What all users together may use of one model."""

    model = ModelLimits
    serializer_class = ModelLimitsSerializer
    queryset = ModelLimits.objects.order_by("model_name")
    query = query_class(
        "ModelLimits",
        orders=("model_name",),
        search=("model_name",),
        filters={"model_name": _name()},
    )


class ModelPriceViewSet(HistoryMixin, RowViewSet[ModelPrice]):
    """What a million tokens of a model cost; shown with usage, and never charged."""

    model = ModelPrice
    serializer_class = ModelPriceSerializer
    queryset = ModelPrice.objects.order_by("model_name")
    query = query_class(
        "ModelPrice",
        orders=("model_name",),
        search=("model_name",),
        filters={"model_name": _name()},
    )


@extend_schema_view(create=extend_schema(responses={201: NewApiKeySerializer}))
class ApiKeyViewSet(HistoryMixin, RowViewSet[ApiKey]):
    """API keys. A key itself is shown once: when it is made, or made anew."""

    model = ApiKey
    serializer_class = ApiKeySerializer
    queryset = ApiKey.objects.select_related("user", "use").order_by("user__username", "name")
    permissions: ClassVar = {"rotate": "change", "revoke": "change", "captures": "change"}
    query = query_class(
        "ApiKey",
        orders=("name", "user__username", "created_at", "expires_at"),
        search=("name", "prefix", "user__username"),
        filters={
            "user": _name(),
            "prefix": _name(),
            "enabled": _flag(),
            "may_name_end_user": _flag(),
        },
    )
    columns: ClassVar = {"user": "user__username"}

    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Make a key. The answer is the only place where it is ever shown."""
        serializer = ApiKeySerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        self.perform_create(serializer)
        return _shown_once(serializer.instance, serializer.secret, status=201)

    @extend_schema(request=RotationSerializer, responses=NewApiKeySerializer)
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, pk: int) -> Response:
        """Replace the key by a new one, with the same name, rights and limits. The old one stops
        at once, or after the overlap that is asked for."""
        row = self.get_object()
        asked = RotationSerializer(data=request.data)
        asked.is_valid(raise_exception=True)
        secret = row.rotate(timedelta(seconds=asked.validated_data["overlap_seconds"]))
        _save(row, "key rotated", *ApiKey.ROTATED)
        return _shown_once(row, secret)

    @extend_schema(request=None, responses=ApiKeySerializer)
    @action(detail=True, methods=["post"])
    def revoke(self, request: Request, pk: int) -> Response:
        """Refuse the key from now on."""
        row = self.get_object()
        row.enabled = False
        row.previous_sha256 = row.previous_until = None
        _save(row, "key revoked", "enabled", "previous_sha256", "previous_until")
        return Response(ApiKeySerializer(row).data)

    @extend_schema(request=None, responses={204: None})
    @action(detail=True, methods=["delete"])
    def captures(self, request: Request, pk: int) -> Response:
        """Delete all that was captured of this key's prompts, now."""
        delete_captures(self.get_object())
        return Response(status=204)


def _save(row: ApiKey, reason: str, *names: str) -> None:
    row._change_reason = f"{REASON}: {reason}"  # type: ignore[attr-defined]
    with transaction.atomic():  # the row and its history
        row.save(update_fields=names)


def _shown_once(row: ApiKey | None, secret: str, status: int = 200) -> Response:
    row.key = secret  # type: ignore[union-attr]
    data = NewApiKeySerializer(row).data
    return Response(data, status=status, headers={"Cache-Control": "no-store"})
