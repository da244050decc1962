"""/api/admin/captures: what was captured of prompts, for those who may read them."""

from __future__ import annotations

import base64
from typing import ClassVar

from django.db.models import QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.mixins import ListModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from accounts.authentication import READ_CAPTURES
from mindrouter.api.listing import Pages, QueryFilter, query_class
from mindrouter.api.resources import ResourceView
from scheduler.captures import kept, read_capture, text_of
from scheduler.models import Capture


class CaptureSerializer(serializers.ModelSerializer[Capture]):
    """That a request was captured."""

    key_id = serializers.IntegerField()

    class Meta:
        model = Capture
        fields: tuple[str, ...] = (
            "request_id",
            "key_id",
            "at",
            "delete_at",
            "request_bytes",
            "answer_bytes",
        )


class ReadCaptureSerializer(CaptureSerializer):
    """With the body and the answer: their beginning, where they are longer than what is stored."""

    request = serializers.SerializerMethodField(help_text="null: not captured, as forms are not.")
    answer = serializers.SerializerMethodField(help_text="null: it is no text.")
    answer_base64 = serializers.SerializerMethodField(help_text="null: it is text.")

    class Meta(CaptureSerializer.Meta):
        fields = (*CaptureSerializer.Meta.fields, "request", "answer", "answer_base64")

    def get_request(self, capture: Capture) -> str | None:
        return text_of(capture.request)

    def get_answer(self, capture: Capture) -> str | None:
        return text_of(capture.answer)

    def get_answer_base64(self, capture: Capture) -> str | None:
        if capture.answer is None or text_of(capture.answer) is not None:
            return None
        return base64.b64encode(capture.answer).decode()


@extend_schema_view(
    retrieve=extend_schema(
        parameters=[OpenApiParameter("request_id", OpenApiTypes.STR, OpenApiParameter.PATH)],
        responses=ReadCaptureSerializer,
    )
)
class CaptureViewSet(ResourceView, ListModelMixin, GenericViewSet[Capture]):
    """Captured prompts, newest first."""

    model = Capture
    permissions: ClassVar = {"list": READ_CAPTURES, "retrieve": READ_CAPTURES}
    serializer_class = CaptureSerializer
    lookup_field = "request_id"
    lookup_value_converter = "str"
    pagination_class = Pages
    filter_backends = (QueryFilter,)
    query = query_class(
        "Capture",
        orders=("at", "delete_at"),
        search=("request_id",),
        filters={
            "key_id": serializers.IntegerField(required=False, min_value=1, max_value=2**63 - 1)
        },
    )

    def get_queryset(self) -> QuerySet[Capture]:
        return kept()

    def retrieve(self, request: Request, request_id: str) -> Response:
        """The prompt and the answer of one request. That they were read is noted in the history
        of its key."""
        found = read_capture(request_id)
        if found is None:
            raise NotFound
        headers = {"Cache-Control": "no-store"}
        return Response(ReadCaptureSerializer(found).data, headers=headers)
