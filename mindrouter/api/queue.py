"""/api/admin/queue: what waits, and removing one of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from accounts.authentication import CANCEL_JOB
from accounts.models import User
from mindrouter.api.listing import PageQuery, Pages, read_query
from mindrouter.api.resources import ResourceView
from scheduler import services
from scheduler.core.jobs import Unit
from scheduler.core.views import QueuedView
from scheduler.models import Decision
from scheduler.serializers import NumberField
from scheduler.serving import Serving, current
from scheduler.views import NoScheduler


class QueueQuery(PageQuery):
    user = serializers.CharField(required=False, max_length=150, help_text="A username.")
    model = serializers.CharField(required=False, max_length=300, help_text="After aliases.")
    request_id = serializers.CharField(required=False, max_length=200)


class QueuedSerializer(serializers.Serializer[Any]):
    """A waiting request and the parts of its priority, in tokens."""

    request_id = serializers.CharField()
    user_id = serializers.IntegerField()
    username = serializers.CharField(allow_null=True, help_text="null: deleted meanwhile.")
    group = serializers.CharField(allow_null=True)
    model_name = serializers.CharField()
    position = serializers.IntegerField(help_text="1: next on its backends, as estimated.")
    waited_seconds = serializers.FloatField()
    estimate_seconds = serializers.FloatField(
        allow_null=True, help_text="Until it is served, at the pace of late; null: not known."
    )
    weight = NumberField()
    deficit = NumberField()
    burst_credits = NumberField()
    deprioritization_factor = NumberField(source="factor")
    wait_bonus = NumberField()
    priority = NumberField()


@extend_schema_view(
    destroy=extend_schema(
        parameters=[OpenApiParameter("request_id", OpenApiTypes.STR, OpenApiParameter.PATH)],
        responses={204: None},
    )
)
class QueueViewSet(ResourceView, ViewSet):
    """What waits in the running scheduler."""

    model = Decision
    permissions: ClassVar = {"destroy": CANCEL_JOB}
    lookup_field = "request_id"
    lookup_value_converter = "str"
    query = QueueQuery
    serializer_class = QueuedSerializer
    pagination_class = Pages

    def list(self, request: Request) -> Response:
        """Every waiting request, in the order of service on each set of backends."""
        query = read_query(request, QueueQuery)
        try:
            running = _running()
            jobs, flows = running.waiting(), running.queue_picture().flows
        except TimeoutError:
            raise NoScheduler("The scheduler does not answer.") from None
        owners = {pk: (name, group) for pk, name, group in _owners({job.user_id for job in jobs})}
        if "user" in query:
            jobs = [job for job in jobs if owners.get(job.user_id, ("",))[0] == query["user"]]
        if "model" in query:
            jobs = [job for job in jobs if job.model_name == query["model"]]
        if "request_id" in query:
            jobs = [job for job in jobs if job.request_id == query["request_id"]]
        pages = Pages()
        page = pages.paginate_queryset(jobs, request, self)
        now = time.monotonic()
        nobody = (None, None)
        paces = {(flow.unit, flow.model_name): flow.per_second for flow in flows}
        shown = [_described(job, owners.get(job.user_id, nobody), paces, now) for job in page or []]
        return pages.get_paginated_response(QueuedSerializer(shown, many=True).data)

    def destroy(self, request: Request, request_id: str) -> Response:
        """Remove a waiting request; its client gets an error. One that runs is not removed."""
        _running()
        try:
            removed = services.evict(request_id)
        except TimeoutError:
            raise NoScheduler("The scheduler does not answer.") from None
        if not removed:
            raise NotFound("No such request waits.")
        return Response(status=204)


def _running() -> Serving:
    runtime = current()
    if runtime is None:
        raise NoScheduler
    return runtime


def _owners(user_ids: set[int]) -> Any:
    """Of at most as many users as a statement takes; else of all."""
    users = User.objects.order_by()
    if len(user_ids) <= 500:
        users = users.filter(pk__in=user_ids)
    return users.values_list("pk", "username", "group__name")


def _described(
    job: QueuedView,
    owner: tuple[str | None, str | None],
    paces: Mapping[tuple[Unit, str], float | None],
    now: float,
) -> dict[str, Any]:
    names = ("request_id", "user_id", "model_name", "position", "weight", "deficit",
             "burst_credits", "factor", "wait_bonus", "priority")  # fmt: skip
    figures = {name: getattr(job, name) for name in names}
    waited = max(0.0, now - job.enqueued_at)
    pace = paces.get((job.unit, job.model_name))  # services a second, of the whole pool
    return {
        **figures,
        "username": owner[0],
        "group": owner[1],
        "waited_seconds": waited,
        "estimate_seconds": job.position / pace if pace else None,
    }
