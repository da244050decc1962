"""/api/admin/shares: what groups and users are entitled to, and what they have received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.models import User
from mindrouter.api.resources import ResourceView
from scheduler.core.views import ShareView
from scheduler.metering import split
from scheduler.models import Decision
from scheduler.serializers import NumberField
from scheduler.standing import GroupFigures, group_figures, setting, share_mode
from scheduler.views import live_view


class _ShareSerializer(serializers.Serializer[Any]):
    weight = NumberField(help_text="In force, with boosts.")
    entitled = serializers.FloatField(
        allow_null=True, help_text="Fraction, among those that have requests now; null: has none."
    )
    received = serializers.FloatField(
        allow_null=True, help_text="Fraction of the window's tokens; null: there were none."
    )
    recent_tokens = NumberField(help_text="Charged within the window.")
    queued = serializers.IntegerField()
    running = serializers.IntegerField()


class GroupShareSerializer(_ShareSerializer):
    name = serializers.CharField()
    members = serializers.IntegerField()
    active_members = serializers.IntegerField(help_text="With requests that wait or run.")
    entitled_if_all = serializers.FloatField(
        allow_null=True, help_text="Fraction, if each group had one busy user."
    )


class UserShareSerializer(_ShareSerializer):
    username = serializers.CharField()
    group = serializers.CharField(allow_null=True)
    deficit = NumberField(help_text="Tokens; what is still owed, or was had too early.")


class SharesSerializer(serializers.Serializer[Any]):
    share_mode = serializers.CharField()
    window_seconds = NumberField()
    groups = GroupShareSerializer(many=True)
    users = UserShareSerializer(many=True, help_text="With requests or recent tokens.")


class SharesView(ResourceView):
    """Every group, and the users with requests or recent tokens, at most 1 s old."""

    model: ClassVar = Decision

    @extend_schema(responses=SharesSerializer, filters=False)
    def get(self, request: Request) -> Response:
        view = live_view()
        figures = group_figures(view)
        shares = {
            "share_mode": share_mode(),
            "window_seconds": setting("fairness_window"),
            "groups": [_group(one) for one in figures],
            "users": sorted(_users(view.shares, figures), key=lambda one: one["username"]),
        }
        return Response(SharesSerializer(shares).data)


def _group(one: GroupFigures) -> dict[str, Any]:
    names = ("name", "weight", "members", "active_members", "received", "recent_tokens",
             "queued", "running")  # fmt: skip
    return {
        **{name: getattr(one, name) for name in names},
        "entitled": one.entitled_now,
        "entitled_if_all": one.entitled_all,
    }


def _users(
    shares: Iterable[ShareView], figures: Iterable[GroupFigures]
) -> Iterator[dict[str, Any]]:
    """A user's units together: end users and background calls have units of their own."""
    entitled = {one.name: one.entitled_now or 0.0 for one in figures if one.group_id is not None}
    alone = sum(one.entitled_now or 0.0 for one in figures if one.group_id is None)
    units: dict[int, list[ShareView]] = defaultdict(list)
    busy: dict[str | None, list[ShareView]] = defaultdict(list)
    for share in shares:
        if share.queued or share.running:
            busy[share.group].append(share)
        if share.queued or share.running or share.recent_tokens:
            units[share.user_id].append(share)
    parts = {
        user_id: part * entitled.get(group or "", alone)
        for group, those in busy.items()
        for user_id, part in split(those).items()
    }
    tokens = sum(share.recent_tokens for those in units.values() for share in those)
    names = dict(User.objects.filter(pk__in=list(units)).values_list("pk", "username"))
    for user_id, those in units.items():
        recent = sum(share.recent_tokens for share in those)
        yield {
            "username": names.get(user_id, f"#{user_id}"),
            "group": those[0].group,
            "weight": those[0].weight,
            "entitled": parts.get(user_id),
            "received": recent / tokens if tokens else None,
            "recent_tokens": recent,
            "deficit": sum(share.deficit for share in those),
            "queued": sum(share.queued for share in those),
            "running": sum(share.running for share in those),
        }
