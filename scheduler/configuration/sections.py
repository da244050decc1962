"""Which sections a configuration file has, and which model fields stand behind their entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import models

from accounts.models import LIMITS, TOTALS, ApiKey, Boost, Group, ModelLimits, Quota, User
from backends.models import Alias, Backend, BackendModel, ModelStrategy, Node
from scheduler.core.jobs import CAPABILITIES
from scheduler.models import ModelPrice


def column_of(model: type[models.Model], name: str) -> models.Field[Any, Any]:
    """A model's own column, by its name."""
    return next(column for column in model._meta.fields if column.name == name)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A list of entries, each of which is a row of ``model``."""

    name: str
    noun: str  # in lines of differences
    model: type[models.Model]
    key: tuple[str, ...]  # what identifies an entry
    fields: tuple[str, ...]  # what else it may say; named like the model's fields
    references: Mapping[str, str] = field(default_factory=dict)  # field -> section it names
    secrets: tuple[str, ...] = ()  # may be given, is never exported or shown

    def names(self) -> set[str]:
        """Every key that an entry may have."""
        nested = {"models"} if self.model is Backend else set()
        return {*self.key, *self.fields, *self.references, *self.secrets, "absent"} | nested

    def manager(self) -> models.Manager[Any]:
        return self.model._default_manager  # noqa: SLF001  Django's documented way


#: In the order in which they refer to each other.
SECTIONS = (
    Section(
        name="groups",
        noun="group",
        model=Group,
        key=("name",),
        fields=("description", "scheduler_weight", *LIMITS, *TOTALS, "allowed_models"),
    ),
    Section(
        name="users",
        noun="user",
        model=User,
        key=("username",),
        fields=(
            "first_name",
            "last_name",
            "email",
            "role",
            "is_staff",
            "is_superuser",
            "is_active",
        ),
        references={"group": "groups"},
        secrets=("password",),
    ),
    Section(
        name="quotas",
        noun="quota of",
        model=Quota,
        key=("user",),
        fields=("weight_override", *LIMITS),
        references={"user": "users"},
    ),
    Section(
        name="api_keys",
        noun="API key",
        model=ApiKey,
        key=("user", "name"),
        fields=(
            "enabled",
            "expires_at",
            "may_name_end_user",
            "allowed_models",
            "allowed_apis",
            *LIMITS,
            *ApiKey.CAPTURE,
        ),
        references={"user": "users"},
        secrets=("key",),
    ),
    Section(
        name="boosts",
        noun="boost",
        model=Boost,
        key=("name",),
        fields=("factor", "starts_at", "ends_at", "reason"),
        references={"group": "groups", "user": "users"},
    ),
    Section(
        name="nodes",
        noun="node",
        model=Node,
        key=("name",),
        fields=("telemetry_url",),
        secrets=("telemetry_key",),
    ),
    Section(
        name="backends",
        noun="backend",
        model=Backend,
        key=("name",),
        fields=(
            "base_url",
            "engine",
            "max_concurrent",
            "max_queue",
            "priority",
            "enabled",
            "draining",
            "paused",
            "gpu_indexes",
            "connect_timeout",
            "first_byte_timeout",
            "chunk_timeout",
            "poll_interval",
        ),
        references={"node": "nodes"},
        secrets=("api_key",),
    ),
    Section(
        name="model_limits",
        noun="limits of",
        model=ModelLimits,
        key=("model_name",),
        fields=LIMITS,
    ),
    Section(
        name="model_prices",
        noun="price of",
        model=ModelPrice,
        key=("model_name",),
        fields=("prompt", "cached", "completion"),
    ),
    Section(name="aliases", noun="alias", model=Alias, key=("name",), fields=("targets",)),
    Section(
        name="strategies",
        noun="strategy of",
        model=ModelStrategy,
        key=("model_name",),
        fields=("strategy",),
    ),
)

#: The entries of a backend's ``models``: key in the file -> field of BackendModel.
MODEL_FIELDS = {
    "context_length": "context_length",
    "vram_mb": "vram_mib",
    **{name: name for name in CAPABILITIES},
}
MODEL_NAMES = {"name", "by_hand", *MODEL_FIELDS}


def set_by_hand(row: BackendModel) -> bool:
    """Whether a model, or anything about it, was given by hand and not only found by a poll."""
    return row.by_hand or any(getattr(row, name) is not None for name in MODEL_FIELDS.values())
