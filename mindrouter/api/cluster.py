"""/api/admin/backends, backend-models, nodes, aliases and model-strategies."""

from __future__ import annotations

from typing import ClassVar

from django.db import transaction
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from backends.life import change
from backends.models import (
    Alias,
    Backend,
    BackendModel,
    BackendStatus,
    Engine,
    ModelStrategy,
    Node,
    Strategy,
)
from backends.probe import ProbeResult
from backends.services import detect_engines, probe_backends
from backends.trial import PROMPT, offered_models, try_backend
from mindrouter.api.fields import REASON, TextField
from mindrouter.api.listing import query_class
from mindrouter.api.resources import HistoryMixin, RowViewSet
from mindrouter.api.serializers import (
    AliasSerializer,
    BackendModelSerializer,
    BackendSerializer,
    DetectionSerializer,
    ModelStrategySerializer,
    NodeSerializer,
    TrialQuestionSerializer,
    TrialSerializer,
)


def _flag() -> serializers.BooleanField:
    return serializers.BooleanField(required=False)


def _name() -> TextField:
    return TextField(required=False, max_length=500)


class BackendViewSet(HistoryMixin, RowViewSet[Backend]):
    """LLM servers. New and changed ones are polled within a second or two; "poll" does it now."""

    model = Backend
    serializer_class = BackendSerializer
    queryset = Backend.objects.select_related("status", "node").order_by("name")
    permissions: ClassVar = {
        "poll": "view",  # as on the pages: it changes nothing that anybody has set
        "detect": "change",
        "test": "change",
        "enable": "change",
        "disable": "change",
        "drain": "change",
        "pause": "change",
        "resume": "change",
    }
    query = query_class(
        "Backend",
        orders=("name", "priority", "max_concurrent"),
        search=("name", "base_url"),
        filters={
            "name": _name(),
            "base_url": _name(),
            "node": _name(),
            "engine": serializers.ChoiceField(choices=Engine.choices, required=False),
            "enabled": _flag(),
            "draining": _flag(),
            "paused": _flag(),
        },
    )
    columns: ClassVar = {"node": "node__name"}

    @extend_schema(request=None, responses=BackendSerializer)
    @action(detail=True, methods=["post"])
    def enable(self, request: Request, pk: int) -> Response:
        """Let it serve, and poll it."""
        return self._live("enable")

    @extend_schema(request=None, responses=BackendSerializer)
    @action(detail=True, methods=["post"])
    def disable(self, request: Request, pk: int) -> Response:
        """Nothing new, and no polls. What runs goes on."""
        return self._live("disable")

    @extend_schema(request=None, responses=BackendSerializer)
    @action(detail=True, methods=["post"])
    def drain(self, request: Request, pk: int) -> Response:
        """Finish what runs, nothing new; then it disables itself."""
        return self._live("drain")

    @extend_schema(request=None, responses=BackendSerializer)
    @action(detail=True, methods=["post"])
    def pause(self, request: Request, pk: int) -> Response:
        """Nothing new until it is resumed."""
        return self._live("pause")

    @extend_schema(request=None, responses=BackendSerializer)
    @action(detail=True, methods=["post"])
    def resume(self, request: Request, pk: int) -> Response:
        """End a pause or a drain that has not ended yet."""
        return self._live("resume")

    @extend_schema(request=None, responses=BackendSerializer)
    @action(detail=True, methods=["post"])
    def poll(self, request: Request, pk: int) -> Response:
        """Poll it now, in at most about 3 s; what was found is in ``status``."""
        probe_backends([self.get_object().pk])
        return Response(BackendSerializer(self.get_object()).data)

    @extend_schema(request=None, responses=DetectionSerializer)
    @action(detail=True, methods=["post"])
    def detect(self, request: Request, pk: int) -> Response:
        """Find out anew what it is. An engine that was chosen by hand stays chosen."""
        backend = self.get_object()
        found: BackendStatus | ProbeResult
        if backend.engine == Engine.AUTO:
            probe_backends([backend.pk], anew=True)
            status = BackendStatus.objects.filter(backend=backend).first() or BackendStatus()
            found, engine = status, status.detected_engine
        else:
            found = detect_engines([backend])[backend.pk]
            engine = found.engine
        detection = {
            "engine": backend.engine,
            "detected_engine": engine or "",
            "reachable": found.reachable,
            "error": found.error or "",
        }
        return Response(DetectionSerializer(detection).data)

    @extend_schema(request=TrialQuestionSerializer, responses=TrialSerializer)
    @action(detail=True, methods=["post"])
    def test(self, request: Request, pk: int) -> Response:
        """Send it a real request, past queue and shares; takes at most a minute."""
        question = TrialQuestionSerializer(data=request.data)
        question.is_valid(raise_exception=True)
        backend = self.get_object()
        models = offered_models(backend)
        name = question.validated_data.get("model")
        if name is None:
            name = next(iter(models), "")
        elif name not in models:
            raise ValidationError({"model": ["It does not offer this model."]})
        prompt = question.validated_data.get("prompt", PROMPT)
        return Response(TrialSerializer(try_backend(backend, name, prompt)).data)

    def _live(self, name: str) -> Response:
        backend = self.get_object()
        with transaction.atomic():  # the row and its history
            change([backend], name, reason=f"{REASON}: {name}")
        return Response(BackendSerializer(backend).data)


class BackendModelViewSet(HistoryMixin, RowViewSet[BackendModel]):
    """Models of backends: found by polls, named by hand, or both."""

    model = BackendModel
    serializer_class = BackendModelSerializer
    queryset = BackendModel.objects.select_related("backend").order_by("backend__name", "name")
    query = query_class(
        "BackendModel",
        orders=("name", "backend__name"),
        search=("name", "backend__name"),
        filters={"name": _name(), "backend": _name(), "by_hand": _flag(), "listed": _flag()},
    )
    columns: ClassVar = {"backend": "backend__name"}


class NodeViewSet(HistoryMixin, RowViewSet[Node]):
    """Machines with GPUs."""

    model = Node
    serializer_class = NodeSerializer
    queryset = Node.objects.select_related("status").order_by("name")
    query = query_class(
        "Node", orders=("name",), search=("name", "telemetry_url"), filters={"name": _name()}
    )


class AliasViewSet(HistoryMixin, RowViewSet[Alias]):
    """Other names for models."""

    model = Alias
    serializer_class = AliasSerializer
    queryset = Alias.objects.order_by("name")
    query = query_class("Alias", orders=("name",), search=("name",), filters={"name": _name()})


class ModelStrategyViewSet(HistoryMixin, RowViewSet[ModelStrategy]):
    """How a backend is chosen, for models that are not placed by score."""

    model = ModelStrategy
    serializer_class = ModelStrategySerializer
    queryset = ModelStrategy.objects.order_by("model_name")
    query = query_class(
        "ModelStrategy",
        orders=("model_name", "strategy"),
        search=("model_name",),
        filters={
            "model_name": _name(),
            "strategy": serializers.ChoiceField(choices=Strategy.choices, required=False),
        },
    )
