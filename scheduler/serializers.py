"""Decisions and live figures as the management API shows them."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from accounts.models import User
from scheduler import services
from scheduler.core.jobs import end_user_of, is_background_call
from scheduler.core.views import ShareView
from scheduler.explain import sentence
from scheduler.models import Decision, Outcome
from scheduler.serving import LiveView

#: Up to this many users are looked up by number, above all are read: databases bound the number
#: of parameters of a statement.
_MOST_PARAMETERS = 500
_EXACT = 2.0**53


class NumberField(serializers.FloatField):
    """A float, shown without a fraction where it has none, as in the documented examples."""

    def to_representation(self, value: Any) -> Any:
        return number(value)


def number(value: float) -> float:
    """``value`` as an int if it is one; so 3.0 is shown as 3."""
    value = float(value)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


# ---- decisions


class AttemptSerializer(serializers.Serializer[dict[str, Any]]):
    backend = serializers.CharField()
    status = serializers.IntegerField(allow_null=True)
    reason = serializers.CharField()
    started_at = serializers.CharField(allow_null=True, help_text="ISO 8601")
    ended_at = serializers.CharField(allow_null=True, help_text="ISO 8601")


class DecisionSerializer(serializers.ModelSerializer[Decision]):
    """One request, as in lists."""

    candidate_backends = serializers.ListField(child=serializers.IntegerField())
    scores = serializers.DictField(child=NumberField(), help_text="{backend id: points}")
    attempts = AttemptSerializer(many=True)
    user_deficit = NumberField(allow_null=True)
    user_weight = NumberField(allow_null=True)
    user_recent_usage = NumberField(allow_null=True)
    charged_tokens = NumberField()

    class Meta:
        model = Decision
        fields: tuple[str, ...] = (
            "request_id",
            "client_request_id",
            "user",
            "group",
            "end_user",
            "task",
            "model_requested",
            "model_served",
            "dialect",
            "endpoint",
            "stream",
            "status",
            "outcome",
            "reason",
            "message",
            "selected_backend_id",
            "selected_backend",
            "candidate_backends",
            "scores",
            "attempts",
            "user_deficit",
            "user_weight",
            "user_group",
            "user_recent_usage",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "usage_estimated",
            "charged_tokens",
            "arrived_at",
            "queued_at",
            "dispatched_at",
            "first_byte_at",
            "first_token_at",
            "ended_at",
        )


class DecisionDetailSerializer(DecisionSerializer):
    """One request with everything that is known of it."""

    backend_names = serializers.DictField(
        child=serializers.CharField(), help_text="{backend id: its name then}"
    )
    score_parts = serializers.DictField(
        child=serializers.DictField(child=NumberField()),
        help_text="{backend id: {scorer: points}}",
    )
    constraints = serializers.DictField(
        child=serializers.DictField(), help_text="{backend id: {constraint: why it failed}}"
    )
    served_ahead = serializers.DictField(help_text="{group: jobs and tokens served meanwhile}")
    slow_because = serializers.SerializerMethodField(help_text="Its one cause; empty: not slow.")
    explanation = serializers.SerializerMethodField(help_text="In one sentence.")
    burst_credits = NumberField(allow_null=True)
    deprioritization_factor = NumberField(allow_null=True)
    wait_bonus = NumberField(allow_null=True)
    priority = NumberField(allow_null=True)

    class Meta(DecisionSerializer.Meta):
        fields: tuple[str, ...] = (
            *DecisionSerializer.Meta.fields,
            "user_id",
            "key_id",
            "limits_shadowed",
            "backend_names",
            "score_parts",
            "constraints",
            "selection_reason",
            "burst_credits",
            "deprioritization_factor",
            "wait_bonus",
            "priority",
            "wait_reason",
            "position_at_arrival",
            "served_ahead",
            "configuration_version",
            "slow_because",
            "explanation",
        )

    def get_slow_because(self, decision: Decision) -> str:
        return services.cause_of(decision)

    def get_explanation(self, decision: Decision) -> str:
        return sentence(services.case_of(decision))


class DecisionFilterSerializer(serializers.Serializer[dict[str, Any]]):
    """The query of the list; anything else in it is passed over."""

    request_id = serializers.CharField(required=False)
    client_request_id = serializers.CharField(required=False)
    user = serializers.CharField(required=False, help_text="username")
    model = serializers.CharField(required=False, help_text="as the client named it")
    backend = serializers.CharField(required=False, help_text="name of the one chosen")
    outcome = serializers.ChoiceField(choices=Outcome.choices, required=False)
    since = serializers.DateTimeField(required=False, help_text="arrived then or later, ISO 8601")
    page_size = serializers.IntegerField(required=False, min_value=1, max_value=1000)
    cursor = serializers.CharField(required=False, help_text="from next or previous")


# ---- statistics


class QueueStatsSerializer(serializers.Serializer[Any]):
    total = serializers.IntegerField()
    by_user = serializers.DictField(child=serializers.IntegerField(), help_text="{user id: n}")
    by_model = serializers.DictField(child=serializers.IntegerField())
    average_wait_seconds = NumberField()


class UserStatsSerializer(serializers.Serializer[Any]):
    user_id = serializers.IntegerField()
    username = serializers.CharField(allow_null=True, help_text="null: deleted meanwhile")
    end_user = serializers.CharField(allow_null=True, help_text="behind a trusted key (R15)")
    background_calls = serializers.BooleanField(help_text="with a weight of their own (R15)")
    group = serializers.CharField(allow_null=True)
    weight = NumberField()
    deficit = NumberField()
    burst_credits = NumberField()
    deprioritization_factor = NumberField()
    recent_tokens = NumberField()
    queued = serializers.IntegerField()
    running = serializers.IntegerField()


class FairShareStatsSerializer(serializers.Serializer[Any]):
    total_users = serializers.IntegerField()
    global_recent_tokens = NumberField()
    user_stats = UserStatsSerializer(many=True)


class BackendStatsSerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField()
    name = serializers.CharField()
    in_flight = serializers.IntegerField()
    queued = serializers.IntegerField()
    max_concurrent = serializers.IntegerField()
    state = serializers.ChoiceField(
        choices=["ready", "failed", "down", "draining", "disabled", "unknown"]
    )
    observed_age_seconds = NumberField(allow_null=True)


class LimitStatsSerializer(serializers.Serializer[Any]):
    """Requests by limit, since the scheduler began."""

    refused = serializers.DictField(child=serializers.IntegerField())
    shadowed = serializers.DictField(
        child=serializers.IntegerField(), help_text="Admitted, as the limit is in shadow."
    )


class StatsSerializer(serializers.Serializer[Any]):
    """The running scheduler's figures, at most 1 s old."""

    taken_at = serializers.FloatField(help_text="epoch seconds")
    configuration_version = serializers.IntegerField()
    queue = QueueStatsSerializer()
    fair_share = FairShareStatsSerializer()
    backends = BackendStatsSerializer(many=True)
    limits = LimitStatsSerializer()

    def to_representation(self, instance: LiveView) -> dict[str, Any]:
        return super().to_representation(_stats(instance))


def _stats(view: LiveView) -> dict[str, Any]:
    """The figures in the shape of ``StatsSerializer``. One query, for names."""
    stats = view.stats
    usernames = _usernames({share.user_id for share in stats.users})
    return {
        "taken_at": view.taken_at,
        "configuration_version": view.configuration_version,
        "limits": {"refused": view.limits_refused, "shadowed": view.limits_shadowed},
        "queue": {
            "total": stats.queue_total,
            "by_user": stats.queue_by_user,
            "by_model": stats.queue_by_model,
            "average_wait_seconds": stats.average_wait_seconds,
        },
        "fair_share": {
            "total_users": stats.total_users,
            "global_recent_tokens": stats.global_recent_tokens,
            "user_stats": [
                _user_stats(share, usernames.get(share.user_id)) for share in stats.users
            ],
        },
        "backends": view.backends,
    }


def _user_stats(share: ShareView, username: str | None) -> dict[str, Any]:
    return {
        "user_id": share.user_id,
        "username": username,
        "end_user": end_user_of(share.unit),
        "background_calls": is_background_call(share.unit),
        "group": share.group,
        "weight": share.weight,
        "deficit": share.deficit,
        "burst_credits": share.burst_credits,
        "deprioritization_factor": share.factor,
        "recent_tokens": share.recent_tokens,
        "queued": share.queued,
        "running": share.running,
    }


def _usernames(user_ids: set[int]) -> dict[int, str]:
    """{user id: username}"""
    users = User.objects.all()
    if len(user_ids) <= _MOST_PARAMETERS:
        users = users.filter(pk__in=user_ids)
    return dict(users.values_list("pk", "username"))
