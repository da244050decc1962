"""Rows as the management API shows and takes them.

Names are those of ``manage.py apply``'s file: groups, users and nodes are referred to by name.
Secrets are taken and never shown.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError as ModelValidationError
from django.utils import timezone
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from accounts.models import LIMITS, Api, ApiKey, Boost, BoostState, Group, ModelLimits, Quota, User
from backends.models import (
    Alias,
    Backend,
    BackendModel,
    BackendStatus,
    ModelStrategy,
    Node,
    NodeStatus,
)
from mindrouter.api.fields import (
    CountField,
    FiniteField,
    NamesField,
    RowSerializer,
    TextField,
    columns,
)
from scheduler.core.jobs import CAPABILITIES
from scheduler.models import ModelPrice

_HIDDEN_STATUS = ("claimed_until", "fingerprint", "missing_models", "id", "backend", "node")


def _by_name(rows: Any, column: str = "name", **options: Any) -> Any:
    return serializers.SlugRelatedField(slug_field=column, queryset=rows, **options)


# ---- people


class GroupSerializer(RowSerializer[Group]):
    allowed_models = NamesField(
        required=False, allow_null=True, allow_empty=False, help_text="null: every model."
    )
    members = serializers.IntegerField(source="member_count", read_only=True)

    class Meta:
        model = Group
        fields = ("id", *columns(Group), "members")


class UserSerializer(RowSerializer[User]):
    group = _by_name(Group.objects, required=False, allow_null=True, help_text="A group's name.")
    password = TextField(
        write_only=True, required=False, max_length=128, help_text="Without one: none is usable."
    )

    class Meta:
        model = User
        fields = (
            "id",
            "username",
            "first_name",
            "last_name",
            "email",
            "group",
            "role",
            "is_staff",
            "is_superuser",
            "is_active",
            "password",
            "date_joined",
            "last_login",
        )
        read_only_fields = ("date_joined", "last_login")
        extra_kwargs: ClassVar = {
            "is_staff": {"help_text": "Reads everything. Implied by a role and by is_superuser."}
        }

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        self._password = attrs.pop("password", None)
        if self._password is not None:
            try:
                validate_password(self._password, self._with(attrs))
            except ModelValidationError as error:
                raise serializers.ValidationError({"password": error.messages}) from None
        return super().validate(attrs)

    def _with(self, attrs: dict[str, Any]) -> User:
        row = super()._with(attrs)
        if not row.pk:
            row.set_unusable_password()
        return row

    def _save(self) -> User:
        if self._password is not None:
            self._row.set_password(self._password)
        return super()._save()


class ModelLimitsSerializer(RowSerializer[ModelLimits]):
    class Meta:
        model = ModelLimits
        fields = ("id", *columns(ModelLimits))


class ModelPriceSerializer(RowSerializer[ModelPrice]):
    class Meta:
        model = ModelPrice
        fields = ("id", *columns(ModelPrice))


class RotationSerializer(serializers.Serializer[Any]):
    overlap_seconds = serializers.IntegerField(
        required=False,
        default=0,
        min_value=0,
        max_value=30 * 86400,
        help_text="How long the old key goes on working.",
    )


class QuotaSerializer(RowSerializer[Quota]):
    user = _by_name(User.objects, "username", help_text="A username.")

    class Meta:
        model = Quota
        fields = ("id", *columns(Quota))


class BoostSerializer(RowSerializer[Boost]):
    group = _by_name(Group.objects, required=False, allow_null=True, help_text="A group's name.")
    user = _by_name(
        User.objects, "username", required=False, allow_null=True, help_text="Or a username."
    )
    made_by: Any = serializers.SlugRelatedField(
        slug_field="username", read_only=True, allow_null=True
    )
    state = serializers.SerializerMethodField()

    class Meta:
        model = Boost
        fields = ("id", *columns(Boost), "made_by", "state")

    def _with(self, attrs: dict[str, Any]) -> Boost:
        row = super()._with(attrs)
        if not row.pk:
            row.made_by = self.context["request"].user
        return row

    @extend_schema_field(serializers.ChoiceField(choices=BoostState.choices))
    def get_state(self, boost: Boost) -> str:
        return boost.state(timezone.now()).value


class ApiKeySerializer(RowSerializer[ApiKey]):
    user = _by_name(User.objects, "username", help_text="A username; it stays.")
    allowed_models = NamesField(
        required=False, allow_null=True, help_text="null: all that its user may use."
    )
    allowed_apis = serializers.ListField(
        child=serializers.ChoiceField(choices=Api.choices),
        required=False,
        allow_null=True,
        allow_empty=False,
        help_text="null: all.",
    )
    last_used_at = serializers.DateTimeField(
        read_only=True, allow_null=True, help_text="To some seconds; null: never."
    )

    class Meta:
        model = ApiKey
        fields = (
            "id",
            "user",
            "name",
            "prefix",
            "enabled",
            "expires_at",
            "may_name_end_user",
            "allowed_models",
            "allowed_apis",
            *LIMITS,
            *ApiKey.CAPTURE,
            "created_at",
            "previous_until",
            "last_used_at",
        )
        read_only_fields = ("prefix", "created_at", "previous_until", "last_used_at")
        validators: ClassVar[list[Any]] = []  # the model's own check says the same

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if (
            self.instance is not None
            and attrs.get("user", self.instance.user) != self.instance.user
        ):
            # A key handed to somebody else would take its user's share along.
            raise serializers.ValidationError({"user": ["A key keeps its user."]})
        return super().validate(attrs)

    def _with(self, attrs: dict[str, Any]) -> ApiKey:
        row = super()._with(attrs)
        if row.capture_until is None and "capture_until" in attrs:
            row.stop_capture()
        if not row.pk:
            self.secret = ApiKey.generate()
            row.set_key(self.secret)
        return row


class NewApiKeySerializer(ApiKeySerializer):
    """With the key itself, which is shown this once."""

    key = serializers.CharField(read_only=True)

    class Meta(ApiKeySerializer.Meta):
        fields = (*ApiKeySerializer.Meta.fields, "key")


# ---- the cluster


class NodeStatusSerializer(serializers.ModelSerializer[NodeStatus]):
    gpus = serializers.ListField(child=serializers.DictField())

    class Meta:
        model = NodeStatus
        fields = tuple(
            one.name for one in NodeStatus._meta.fields if one.name not in _HIDDEN_STATUS
        )


class NodeSerializer(RowSerializer[Node]):
    status = NodeStatusSerializer(read_only=True, allow_null=True, default=None)
    has_telemetry_key = serializers.SerializerMethodField()

    class Meta:
        model = Node
        fields = ("id", *columns(Node), "has_telemetry_key", "status")
        extra_kwargs: ClassVar = {"telemetry_key": {"write_only": True}}

    def get_has_telemetry_key(self, node: Node) -> bool:
        return bool(node.telemetry_key)


class BackendStatusSerializer(serializers.ModelSerializer[BackendStatus]):
    """What the last polls said; null is unknown."""

    loaded_models = serializers.DictField(
        child=serializers.FloatField(allow_null=True), allow_null=True, help_text="{name: MiB}"
    )

    class Meta:
        model = BackendStatus
        fields = tuple(
            one.name for one in BackendStatus._meta.fields if one.name not in _HIDDEN_STATUS
        )


class BackendSerializer(RowSerializer[Backend]):
    node = _by_name(Node.objects, required=False, allow_null=True, help_text="A node's name.")
    gpu_indexes = serializers.ListField(
        child=CountField(min_value=0, max_value=255),
        required=False,
        allow_null=True,
        allow_empty=False,
        help_text="Of the node's GPUs. null: all.",
    )
    has_api_key = serializers.SerializerMethodField()
    state = serializers.SerializerMethodField()
    status = BackendStatusSerializer(read_only=True, allow_null=True, default=None)

    class Meta:
        model = Backend
        fields = ("id", *columns(Backend), "has_api_key", "state", "status")
        extra_kwargs: ClassVar = {"api_key": {"write_only": True}}

    def get_has_api_key(self, backend: Backend) -> bool:
        return bool(backend.api_key)

    def get_state(self, backend: Backend) -> str:
        return str(backend.state.value)


class BackendModelSerializer(RowSerializer[BackendModel]):
    """What is set here wins over what was detected; null: as detected."""

    backend = _by_name(Backend.objects, help_text="A backend's name.")
    vram_mb = FiniteField(
        source="vram_mib", required=False, allow_null=True, min_value=0, max_value=2.0**30,
        help_text="MiB that it needs to be loaded.",
    )  # fmt: skip
    detected_vram_mb = FiniteField(source="detected_vram_mib", read_only=True, allow_null=True)

    class Meta:
        model = BackendModel
        fields = (
            "id",
            *columns(BackendModel, without=("vram_mib",)),
            "vram_mb",
            "listed",
            *(f"detected_{name}" for name in CAPABILITIES),
            "detected_context_length",
            "detected_vram_mb",
        )
        read_only_fields = tuple(name for name in fields if name.startswith(("detected", "listed")))
        validators: ClassVar[list[Any]] = []


class AliasSerializer(RowSerializer[Alias]):
    targets = NamesField(allow_empty=False, help_text="Model names, best first.")

    class Meta:
        model = Alias
        fields = ("id", *columns(Alias))


class ModelStrategySerializer(RowSerializer[ModelStrategy]):
    class Meta:
        model = ModelStrategy
        fields = ("id", *columns(ModelStrategy))


class TrialQuestionSerializer(serializers.Serializer[Any]):
    model = TextField(required=False, max_length=300, help_text="Default: its first one.")
    prompt = TextField(required=False, max_length=4000)


class TrialSerializer(serializers.Serializer[Any]):
    """What came of one real request."""

    succeeded = serializers.BooleanField()
    backend = serializers.CharField()
    model = serializers.CharField(source="model_name", help_text="Empty: it offers none.")
    path = serializers.CharField()
    seconds = serializers.FloatField()
    status = serializers.IntegerField(allow_null=True, help_text="null: no answer.")
    answer = serializers.CharField()
    error = serializers.CharField()


class DetectionSerializer(serializers.Serializer[Any]):
    """``engine`` is what was chosen, ``detected_engine`` what the server is found to be."""

    engine = serializers.CharField()
    detected_engine = serializers.CharField(help_text="Empty: nothing was found out.")
    reachable = serializers.BooleanField(allow_null=True)
    error = serializers.CharField()
