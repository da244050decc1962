"""/api/admin/advice."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.models import Group
from mindrouter.api.resources import ResourceView
from scheduler.advising import advice, as_json


class AdviceSerializer(serializers.Serializer[dict[str, Any]]):
    """One thing that is worth a look."""

    rule = serializers.CharField()
    weight = serializers.ChoiceField(choices=["problem", "warning", "hint"])
    subject = serializers.CharField()
    what = serializers.CharField()
    why = serializers.CharField()
    do = serializers.CharField()
    kind = serializers.CharField(help_text="The kind of row that mends it.")
    row = serializers.IntegerField(allow_null=True)
    url = serializers.CharField(help_text="The admin page that mends it.")


class AdviceView(ResourceView):
    """What of the configuration does not do what it seems to, the gravest first."""

    model: ClassVar = Group

    @extend_schema(responses=AdviceSerializer(many=True), filters=False)
    def get(self, request: Request) -> Response:
        found: Any = [as_json(one) for one in advice()]
        return Response(AdviceSerializer(found, many=True).data)
