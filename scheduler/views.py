"""The management API: decisions and live statistics, for staff."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import extend_schema
from drf_spectacular.views import SpectacularAPIView
from rest_framework.authentication import SessionAuthentication
from rest_framework.exceptions import APIException
from rest_framework.generics import ListAPIView, RetrieveAPIView
from rest_framework.permissions import BasePermission
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from accounts.authentication import ApiKeyAuthentication
from scheduler import services
from scheduler.models import Decision
from scheduler.pagination import DecisionPagination
from scheduler.serializers import (
    DecisionDetailSerializer,
    DecisionFilterSerializer,
    DecisionSerializer,
    StatsSerializer,
)
from scheduler.serving import LiveView


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """How the description of this API names our keys; being defined is enough."""

    target_class = ApiKeyAuthentication
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        return {"type": "http", "scheme": "bearer"}


class IsStaff(BasePermission):
    """Staff and superusers, by session or by one of their API keys."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        user: Any = request.user
        return bool(user and user.is_active and (user.is_staff or user.is_superuser))


class StaffView(APIView):
    """Base of the views here. A missing or bad key is 401, somebody else's 403."""

    # The key's first: it names the scheme of a 401.
    authentication_classes = (ApiKeyAuthentication, SessionAuthentication)
    permission_classes = (IsStaff,)
    renderer_classes = (JSONRenderer,)


class NoScheduler(APIException):
    status_code = 503
    default_detail = "No scheduler runs in this process."
    default_code = "no_scheduler"


def live_view() -> LiveView:
    """The running scheduler's view of itself, at most 1 s old. Raises: NoScheduler."""
    try:
        view = services.live()
    except TimeoutError:
        raise NoScheduler("The scheduler does not answer.") from None
    if view is None:
        raise NoScheduler
    return view


class DecisionList(StaffView, ListAPIView[Decision]):
    """Requests, newest first."""

    serializer_class = DecisionSerializer
    pagination_class = DecisionPagination

    @extend_schema(parameters=[DecisionFilterSerializer])
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return super().get(request, *args, **kwargs)

    def get_queryset(self) -> QuerySet[Decision]:
        query = self.request.query_params.dict()
        if "T" in query.get("since", ""):  # the + of a zone, when not encoded, is a space here
            query["since"] = query["since"].strip().replace(" ", "+")
        wanted = DecisionFilterSerializer(data=query)
        wanted.is_valid(raise_exception=True)
        columns = {
            "model": "model_requested",
            "backend": "selected_backend",
            "since": "arrived_at__gte",
        }
        filters = {
            columns.get(name, name): value
            for name, value in wanted.validated_data.items()
            if name not in ("page_size", "cursor")
        }
        # What the list does not show is not fetched: the JSON columns are large.
        return Decision.objects.filter(**filters).only("id", *DecisionSerializer.Meta.fields)


class DecisionDetail(StaffView, RetrieveAPIView[Decision]):
    """One request, with all that is known of it."""

    serializer_class = DecisionDetailSerializer
    queryset = Decision.objects.all()
    lookup_field = "request_id"


class SchedulerStats(StaffView):
    """The running scheduler's queue, shares and backends, at most 1 s old."""

    @extend_schema(responses=StatsSerializer)
    def get(self, request: Request) -> Response:
        return Response(StatsSerializer(live_view()).data)


class Schema(SpectacularAPIView):
    """The OpenAPI description of this API."""

    authentication_classes = StaffView.authentication_classes
    permission_classes = StaffView.permission_classes
