"""Database → the immutable picture that the runtime and the gateway decide from.

Loading takes a fixed number of queries and happens only when the configuration version has
changed. Polled status is read apart from it, each second, since it changes all the time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.utils import timezone

from accounts.limits import Holder, LimitSet
from accounts.models import ApiKey, Boost, ModelLimits, User
from backends.catalog import effective_engine, models_by_name, polled
from backends.models import Alias, Backend, BackendStatus, ModelStrategy
from backends.upstream import Origin
from scheduler.budgets import first_given, in_force, load_limits, model_holder
from scheduler.core.boosts import TimedFactor, boosted
from scheduler.core.jobs import (
    CAPABILITIES,
    BackendSpec,
    ModelSpec,
    Strategy,
    Telemetry,
    UserSpec,
)
from scheduler.core.tunables import Tunables
from scheduler.core.weights import effective_weight
from scheduler.models import ConfigurationVersion, SiteSettings

_BOOSTS_KEPT = timedelta(days=1)


class Capturing(NamedTuple):
    """An admin has prompts and answers of a key stored."""

    until: float  # epoch seconds
    kept: float  # seconds


@dataclass(frozen=True, slots=True)
class Key:
    """An API key that may be used now, unless it has expired meanwhile."""

    key_id: int
    user_id: int
    expires_at: float | None  # epoch seconds
    may_name_end_user: bool
    allowed_models: frozenset[str] | None = None  # None: its user's
    allowed_apis: frozenset[str] | None = None  # None: all
    max_wait: float | None = None  # seconds in the queue, if less than its user's
    capturing: Capturing | None = None  # None, as nearly always: nothing is stored


#: The line of ``Endpoint.headers`` for what most requests carry.
_JSON_LINE = b"content-type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What it takes to send a request to a backend. Time limits in seconds."""

    backend_id: int
    name: str
    engine: str
    origin: Origin
    headers: bytes  # ready-made lines, with the backend's own key if it has one
    connect_timeout: float
    first_byte_timeout: float
    chunk_timeout: float

    def sending(self, content_type: bytes) -> Endpoint:
        """The same for a request whose body is no JSON."""
        line = b"content-type: " + content_type + b"\r\n"
        return replace(self, headers=self.headers.replace(_JSON_LINE, line, 1))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The configuration at one version. Never changed; replaced as a whole."""

    version: int = 0
    keys: Mapping[str, Key] = field(default_factory=dict)  # by SHA-256, hex
    users: Mapping[int, UserSpec] = field(default_factory=dict)
    unboosted: Mapping[int, UserSpec] = field(default_factory=dict)
    boosts: tuple[TimedFactor, ...] = ()  # also those to come, and those just over
    boosts_in_force: tuple[TimedFactor, ...] = ()  # in ``users``
    allowed_models: Mapping[int, frozenset[str]] = field(default_factory=dict)  # by user
    backends: tuple[BackendSpec, ...] = ()
    endpoints: Mapping[int, Endpoint] = field(default_factory=dict)
    draining: frozenset[int] = frozenset()  # backends to be disabled once nothing runs there
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    limits: Mapping[Holder, LimitSet] = field(default_factory=dict)
    model_waits: Mapping[str, float] = field(default_factory=dict)  # longest waits, seconds
    models: Mapping[str, ModelSpec] = field(default_factory=dict)  # every name, one spec each
    listed_models: Mapping[str, ModelSpec] = field(default_factory=dict)  # shown to clients
    tunables: Tunables = field(default_factory=Tunables)
    keepalive_after: float = 10.0
    max_body_bytes: int = 32 * 1024 * 1024
    open_to: Key | None = None  # who Ollama's clients without a key are; None: nobody

    def at(self, wall: float) -> Snapshot:
        """The same with the boosts of that moment, epoch seconds; itself if nothing changes."""
        in_force = tuple(one for one in self.boosts if one.in_force(wall))
        if in_force == self.boosts_in_force:
            return self
        users = {key: boosted(spec, in_force) for key, spec in self.unboosted.items()}
        return replace(self, users=users, boosts_in_force=in_force)


@dataclass(frozen=True, slots=True)
class BackendTelemetry:
    """A poll's result with wall-clock time; the runtime puts it on its own clock."""

    backend_id: int
    observed_at: float  # epoch seconds
    telemetry: Telemetry  # with observed_at 0

    def at(self, moment: float) -> Telemetry:
        """The telemetry with its time on the runtime's clock."""
        return replace(self.telemetry, observed_at=moment)


def configuration_version() -> int:
    """The version that the database's triggers count."""
    return ConfigurationVersion.objects.values_list("version", flat=True).get(pk=1)


def load_snapshot() -> Snapshot:
    """Read the whole configuration. Raises: django.db.Error."""
    # Not in a transaction: SQLite would take its write lock for it. Instead, what changed while
    # it was being read is read again.
    while True:
        version = configuration_version()
        snapshot = _load_snapshot(version)
        if configuration_version() == version:
            return snapshot.at(time.time())


def _load_snapshot(version: int) -> Snapshot:
    site = SiteSettings.objects.filter(pk=1).first() or SiteSettings()
    users, allowed_models = _load_users()
    backends, endpoints, draining = _load_backends()
    models = _merge_models(backends)
    return Snapshot(
        version=version,
        keys=_load_keys(),
        users=users,
        unboosted=users,
        boosts=load_boosts(),
        allowed_models=allowed_models,
        backends=backends,
        endpoints=endpoints,
        draining=draining,
        aliases={a.name: tuple(a.targets) for a in Alias.objects.all()},
        strategies=_load_strategies(),
        limits=load_limits(models),
        model_waits=_load_model_waits(models),
        models=models,
        listed_models=_listed_models(backends),
        tunables=_load_tunables(site),
        keepalive_after=_saved_or_setting(site, "queue_keepalive_after"),
        max_body_bytes=int(_saved_or_setting(site, "max_body_bytes")),
        open_to=_open_to(_saved_or_setting(site, "open_to"), users),
    )


def load_telemetry() -> list[BackendTelemetry]:
    """What polls last learned of each backend that ever answered one or refused it."""
    found = []
    for row in BackendStatus.objects.select_related("backend"):
        engine = effective_engine(row.backend.engine, row.detected_engine)
        known = polled(engine, row)
        if known is not None:
            found.append(BackendTelemetry(row.backend_id, known[0].timestamp(), known[1]))
    return found


def setting_name(field_name: str) -> str:
    """The settings variable behind a field of ``Tunables`` or ``SiteSettings``."""
    name = field_name.upper()
    return name if hasattr(settings, name) else f"SCHEDULER_{name}"


def _saved_or_setting(site: SiteSettings, name: str) -> Any:
    saved = getattr(site, name)
    return getattr(settings, setting_name(name)) if saved is None else saved


def _load_tunables(site: SiteSettings) -> Tunables:
    return Tunables(**{f.name: _saved_or_setting(site, f.name) for f in fields(Tunables)})


def _load_keys() -> dict[str, Key]:
    now = timezone.now()
    keys: dict[str, Key] = {}
    usable = ApiKey.objects.filter(enabled=True, user__is_active=True).exclude(expires_at__lte=now)
    for row in usable:
        key = keys[row.sha256] = Key(
            key_id=row.pk,
            user_id=row.user_id,
            expires_at=row.expires_at.timestamp() if row.expires_at else None,
            may_name_end_user=row.may_name_end_user,
            allowed_models=_names(row.allowed_models),
            allowed_apis=_names(row.allowed_apis),
            max_wait=row.max_wait,
            capturing=_capturing(row),
        )
        if row.previous_sha256 and row.previous_until and row.previous_until > now:
            until = row.previous_until.timestamp()
            ends = until if key.expires_at is None else min(until, key.expires_at)
            keys[row.previous_sha256] = replace(key, expires_at=ends)
    return keys


def _capturing(row: ApiKey) -> Capturing | None:
    if not row.is_captured or row.capture_until is None or row.capture_days is None:
        return None
    return Capturing(row.capture_until.timestamp(), timedelta(row.capture_days).total_seconds())


def _names(names: list[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _load_model_waits(models: Mapping[str, ModelSpec]) -> dict[str, float]:
    """Under every name that a job may carry."""
    rows = ModelLimits.objects.exclude(max_wait=None).values_list("model_name", "max_wait")
    waits = {model_holder(name, models).ident: wait for name, wait in rows if wait is not None}
    return {name: waits[spec.name] for name, spec in models.items() if spec.name in waits}


def _open_to(username: str | None, users: Mapping[int, UserSpec]) -> Key | None:
    """A key that needs no key. None where it is closed, or the user is gone or inactive."""
    for user in users.values() if username else ():
        if user.username == username:
            return Key(key_id=0, user_id=user.user_id, expires_at=None, may_name_end_user=False)
    return None


def _load_users() -> tuple[dict[int, UserSpec], dict[int, frozenset[str]]]:
    specs: dict[int, UserSpec] = {}
    allowed: dict[int, frozenset[str]] = {}
    for user in User.objects.select_related("group", "quota").filter(is_active=True):
        specs[user.pk] = _user_spec(user)
        if user.group is not None and user.group.allowed_models is not None:
            allowed[user.pk] = frozenset(user.group.allowed_models)
    return specs, allowed


def load_boosts() -> tuple[TimedFactor, ...]:
    """Those in force and to come, and the latest that are over: a clock may be set back."""
    rows = Boost.objects.filter(ends_at__gt=timezone.now() - _BOOSTS_KEPT).order_by("starts_at")
    return tuple(
        TimedFactor(
            name=row.name,
            factor=float(row.factor),
            starts_at=row.starts_at.timestamp(),
            ends_at=row.ends_at.timestamp(),
            group_id=row.group_id,
            user_id=row.user_id,
        )
        for row in rows
    )


def fallback_weights() -> dict[str, float]:
    """The deprecated variables' weights, by the group name that each stood for (R13)."""
    return {
        "student": float(settings.SCHEDULER_WEIGHT_STUDENT),
        "staff": float(settings.SCHEDULER_WEIGHT_STAFF),
        "faculty": float(settings.SCHEDULER_WEIGHT_FACULTY),
        "admin": float(settings.SCHEDULER_WEIGHT_ADMIN),
    }


def _user_spec(user: User) -> UserSpec:
    group = user.group
    quota = getattr(user, "quota", None)
    holders = (quota, group)
    override = quota.weight_override if quota else None
    group_weight = group.scheduler_weight if group else None

    def weight(override: Any) -> float:
        return effective_weight(
            override=None if override is None else float(override),
            group_weight=None if group_weight is None else float(group_weight),
            group_name=group.name if group else None,
            is_superuser=user.is_superuser,
            is_staff=user.is_staff,
            fallbacks=fallback_weights(),
        )

    return UserSpec(
        user_id=user.pk,
        username=user.username,
        group_id=group.pk if group else None,
        group_name=group.name if group else None,
        weight=weight(override),
        group_weight=weight(None),
        max_concurrent=in_force("max_concurrent", holders),
        max_queued=in_force("max_queued", [quota]),
        group_max_queued=in_force("max_queued", [group]),
        max_wait_seconds=first_given("max_wait", holders),
    )


def _load_backends() -> tuple[tuple[BackendSpec, ...], dict[int, Endpoint], frozenset[int]]:
    specs, endpoints, draining = [], {}, set()
    for backend in Backend.objects.select_related("status").prefetch_related("models"):
        status = getattr(backend, "status", None)
        engine = effective_engine(backend.engine, status.detected_engine if status else "")
        specs.append(
            BackendSpec(
                backend_id=backend.pk,
                name=backend.name,
                address=backend.base_url,
                max_concurrent=backend.max_concurrent,
                max_queue=backend.max_queue,
                priority=backend.priority,
                enabled=backend.enabled,
                draining=backend.draining,
                paused=backend.paused,
                models=models_by_name(engine, backend.models.all()),
            )
        )
        endpoints[backend.pk] = _endpoint(backend, engine)
        if backend.enabled and backend.draining:
            draining.add(backend.pk)
    return tuple(specs), endpoints, frozenset(draining)


def _endpoint(backend: Backend, engine: str) -> Endpoint:
    headers = _JSON_LINE + b"user-agent: mindrouter\r\n"
    if backend.api_key:
        headers += b"authorization: Bearer " + backend.api_key.encode() + b"\r\n"
    return Endpoint(
        backend_id=backend.pk,
        name=backend.name,
        engine=engine,
        origin=Origin.parse(backend.base_url),
        headers=headers,
        connect_timeout=backend.connect_timeout,
        first_byte_timeout=backend.first_byte_timeout,
        chunk_timeout=backend.chunk_timeout,
    )


def _load_strategies() -> dict[str, Strategy]:
    rows = ModelStrategy.objects.values_list("model_name", "strategy")
    return dict(rows)  # type: ignore[arg-type]


def _merge_models(backends: tuple[BackendSpec, ...]) -> dict[str, ModelSpec]:
    """One spec for each name: able if any backend is, with the largest context."""
    found: dict[str, list[ModelSpec]] = defaultdict(list)
    for backend in backends:
        for name, spec in backend.models.items():
            found[name].append(spec)
    return {name: _merged(specs) for name, specs in found.items()}


def _listed_models(backends: tuple[BackendSpec, ...]) -> dict[str, ModelSpec]:
    """The models that can be used now, under the names their backends give them.

    ``x:latest`` is left out where there is an ``x``, which stands for it too.
    """
    usable = tuple(b for b in backends if b.in_service)
    named = {spec.name for backend in usable for spec in backend.models.values()}
    return {
        name: spec
        for name, spec in _merge_models(usable).items()
        if name in named and not (name.endswith(":latest") and name[: -len(":latest")] in named)
    }


def _merged(specs: list[ModelSpec]) -> ModelSpec:
    def best(name: str) -> bool | None:
        values = [getattr(spec, name) for spec in specs]
        return True if True in values else None if None in values else False

    return ModelSpec(
        name=specs[0].name,
        **{name: best(name) for name in CAPABILITIES},
        context_length=max((s.context_length for s in specs if s.context_length), default=None),
    )
