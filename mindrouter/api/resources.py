"""The base of the management API's views on rows: list, read, make, change, delete, history."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from django.db import models, transaction
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.exceptions import NotFound
from rest_framework.mixins import (
    CreateModelMixin,
    DestroyModelMixin,
    ListModelMixin,
    RetrieveModelMixin,
    UpdateModelMixin,
)
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from mindrouter.api.fields import REASON
from mindrouter.api.history import HistoryPageSerializer, HistoryQuery, history_page
from mindrouter.api.listing import ListQuery, Pages, QueryFilter, read_query
from mindrouter.api.permissions import RolePermission
from scheduler.views import IsStaff, StaffView

M = TypeVar("M", bound=models.Model)


class ResourceView(StaffView):
    """What a role may do is asked after whether it is staff at all."""

    permission_classes: Any = (IsStaff, RolePermission)
    model: ClassVar[type[models.Model]]
    permissions: ClassVar[dict[str, str]] = {}


class HistoryMixin:
    """``…/{id}/history`` of rows with a history, of deleted ones too."""

    model: ClassVar[type[models.Model]]

    @extend_schema(parameters=[HistoryQuery], responses=HistoryPageSerializer, filters=False)
    @action(detail=True, url_path="history", pagination_class=None)
    def history(self, request: Request, pk: int) -> Response:
        """Who changed it, when, why and how; newest first."""
        page = history_page(request, self.model, pk, read_query(request, HistoryQuery))
        if page is None:
            raise NotFound
        return Response(HistoryPageSerializer(page).data)


class RowViewSet(
    ResourceView,
    ListModelMixin,
    RetrieveModelMixin,
    CreateModelMixin,
    UpdateModelMixin,
    DestroyModelMixin,
    GenericViewSet[M],
):
    """Rows of ``model``. Changes are partial."""

    http_method_names = ["get", "post", "patch", "delete", "head", "options"]
    lookup_value_converter = "int"
    pagination_class = Pages
    filter_backends = (QueryFilter,)
    query: ClassVar[type[ListQuery]]
    #: {parameter: lookup}, where they differ.
    columns: ClassVar[dict[str, str]] = {}

    def filter_queryset(self, queryset: Any) -> Any:
        return super().filter_queryset(queryset) if self.action == "list" else queryset

    def perform_create(self, serializer: serializers.BaseSerializer[M]) -> None:
        with transaction.atomic():  # the row and its history
            row = serializer.save()
        # As it is read: with what the list's query adds.
        serializer.instance = self.get_queryset().get(pk=row.pk)

    def perform_update(self, serializer: serializers.BaseSerializer[M]) -> None:
        self.perform_create(serializer)

    def perform_destroy(self, instance: M) -> None:
        instance._change_reason = REASON  # type: ignore[attr-defined]
        with transaction.atomic():
            instance.delete()
