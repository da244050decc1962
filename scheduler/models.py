"""What the scheduler keeps in the database: decisions, checkpoints, and the site's settings."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models.functions import Now
from django.db.models.signals import post_delete
from django.dispatch import receiver
from django.utils import timezone

from accounts.models import ApiKey, User
from audit.records import audited
from backends.crypto import EncryptedBytesField


def _price(help_text: str, **options: Any) -> models.DecimalField[Any, Any]:
    return models.DecimalField(
        max_digits=14,
        decimal_places=6,
        validators=[MinValueValidator(0)],
        help_text=help_text,
        **options,
    )


class Outcome(models.TextChoices):
    COMPLETED = "completed"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"
    ABORTED = "aborted"


class Decision(models.Model):
    """One row per request: what was asked, why it waited, where it went and what it cost.

    Append-only. Users, groups and backends are kept by number and by name, without foreign keys:
    a row stays true after they are renamed or deleted. Deficits, weights and the like are the
    values at the moment of the choice.
    """

    request_id = models.CharField(max_length=64, unique=True)
    client_request_id = models.CharField(max_length=128, null=True, db_index=True)
    user_id = models.BigIntegerField(null=True)
    user = models.CharField(max_length=150, blank=True)
    key_id = models.BigIntegerField(null=True)
    group = models.CharField(max_length=100, blank=True)
    end_user = models.CharField(max_length=200, blank=True)
    task = models.CharField(max_length=40, blank=True)  # what a background call is for
    model_requested = models.CharField(max_length=300, blank=True)
    model_served = models.CharField(max_length=300, blank=True)
    dialect = models.CharField(max_length=20)
    endpoint = models.CharField(max_length=40)
    stream = models.BooleanField(default=False)

    status = models.PositiveSmallIntegerField(null=True)
    outcome = models.CharField(max_length=10, choices=Outcome)
    reason = models.CharField(max_length=40, blank=True)
    message = models.TextField(blank=True)
    limits_shadowed = models.JSONField(default=list)

    selected_backend_id = models.BigIntegerField(null=True)
    selected_backend = models.CharField(max_length=100, blank=True)
    candidate_backends = models.JSONField(default=list)
    backend_names = models.JSONField(default=dict)
    scores = models.JSONField(default=dict)
    score_parts = models.JSONField(default=dict)
    constraints = models.JSONField(default=dict)
    selection_reason = models.CharField(max_length=30, blank=True)
    attempts = models.JSONField(default=list)

    user_deficit = models.FloatField(null=True)
    user_weight = models.FloatField(null=True)
    user_group = models.CharField(max_length=100, null=True)
    user_recent_usage = models.FloatField(null=True)
    burst_credits = models.FloatField(null=True)
    deprioritization_factor = models.FloatField(null=True)
    wait_bonus = models.FloatField(null=True)
    priority = models.FloatField(null=True)
    wait_reason = models.CharField(max_length=30, blank=True)
    position_at_arrival = models.PositiveIntegerField(null=True)
    served_ahead = models.JSONField(default=dict)

    prompt_tokens = models.PositiveBigIntegerField(null=True)
    cached_tokens = models.PositiveBigIntegerField(null=True)
    completion_tokens = models.PositiveBigIntegerField(null=True)
    usage_estimated = models.BooleanField(default=False)
    charged_tokens = models.FloatField(default=0)

    arrived_at = models.DateTimeField(db_index=True)
    queued_at = models.DateTimeField(null=True)
    dispatched_at = models.DateTimeField(null=True)
    first_byte_at = models.DateTimeField(null=True)
    first_token_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    configuration_version = models.PositiveBigIntegerField(null=True)

    class Meta:
        ordering: ClassVar = ["-arrived_at", "-id"]
        indexes: ClassVar = [
            models.Index(fields=["user", "-arrived_at"], name="decision_by_user"),
            models.Index(fields=["model_requested", "-arrived_at"], name="decision_by_model"),
            models.Index(fields=["selected_backend", "-arrived_at"], name="decision_by_backend"),
            models.Index(fields=["outcome", "-arrived_at"], name="decision_by_outcome"),
        ]

    def __str__(self) -> str:
        return self.request_id


class UsageHour(models.Model):
    """What the requests of one hour, user, group, key and model add up to.

    Added to in the transaction that inserts the decisions, so the sums are exact, and they stay
    when retention deletes the decisions. Names of people are not kept here. 0 or empty: none.
    """

    hour = models.DateTimeField(help_text="Its beginning, UTC; a request counts when it arrived.")
    user_id = models.BigIntegerField(default=0)
    group = models.CharField(max_length=100, blank=True, default="")
    key_id = models.BigIntegerField(default=0)
    model = models.CharField(
        max_length=300,
        blank=True,
        default="",
        help_text="The one that served; of those who left the queue, the one asked for.",
    )

    requests = models.PositiveBigIntegerField(default=0)
    completed = models.PositiveBigIntegerField(default=0)
    refused = models.PositiveBigIntegerField(default=0)
    cancelled = models.PositiveBigIntegerField(default=0)
    failed = models.PositiveBigIntegerField(default=0)
    aborted = models.PositiveBigIntegerField(default=0)

    prompt_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)  # part of the prompt tokens
    completion_tokens = models.PositiveBigIntegerField(default=0)
    # Prompt and completion tokens of the requests whose usage no backend has reported.
    estimated_tokens = models.PositiveBigIntegerField(default=0)
    charged_tokens = models.FloatField(default=0)

    queued = models.PositiveBigIntegerField(default=0)
    wait_seconds = models.FloatField(default=0)  # in the queue, all together
    service_seconds = models.FloatField(default=0)  # in a slot, all together

    # Added later, by scheduler.energy; the recorder's inserts do not know of it.
    estimated_energy_wh = models.FloatField(default=0, db_default=0)

    # Slow requests by cause (scheduler.causes).
    slow_no_backend = models.PositiveBigIntegerField(default=0)
    slow_own_backlog = models.PositiveBigIntegerField(default=0)
    slow_others_ahead = models.PositiveBigIntegerField(default=0)
    slow_all_full = models.PositiveBigIntegerField(default=0)
    slow_cold_load = models.PositiveBigIntegerField(default=0)
    slow_slow_backend = models.PositiveBigIntegerField(default=0)
    slow_long_prompt = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering: ClassVar = ["-hour", "user_id", "model"]
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["hour", "user_id", "group", "key_id", "model"], name="usage_once_per_hour"
            )
        ]
        indexes: ClassVar = [
            models.Index(fields=["user_id", "hour"], name="usage_by_user"),
            models.Index(fields=["key_id", "hour"], name="usage_by_key"),
        ]

    def __str__(self) -> str:
        return f"{self.hour:%Y-%m-%d %H}:00, user {self.user_id}, {self.model or 'no model'}"


class EnergyHour(models.Model):
    """That an hour's energy was added to those who used it, so that it happens once."""

    hour = models.DateTimeField(primary_key=True)
    measured_wh = models.FloatField(help_text="Of all GPUs whose power is known.")
    attributed_wh = models.FloatField(help_text="Of that, in minutes in which requests ran.")

    def __str__(self) -> str:
        return f"energy of {self.hour:%Y-%m-%d %H}:00"


class ClusterMinute(models.Model):
    """The running scheduler's figures in one minute: means of its samples, the gap its highest."""

    at = models.DateTimeField(primary_key=True)
    gap = models.FloatField()  # tokens per unit of weight (T1)
    gap_bound = models.FloatField()
    queued = models.FloatField()
    running = models.FloatField()
    tokens_per_second = models.FloatField()

    def __str__(self) -> str:
        return f"the cluster at {self.at:%Y-%m-%d %H:%M}"


class ShareMinute(models.Model):
    """What a group was entitled to and has received in one minute. Empty: users without a group."""

    at = models.DateTimeField()
    group = models.CharField(max_length=100, blank=True)
    entitled = models.FloatField()  # 0..1, among those with work
    received = models.FloatField()  # 0..1, of the tokens in the fairness window
    queued = models.FloatField()
    running = models.FloatField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["at", "group"], name="share_once_per_minute")
        ]

    def __str__(self) -> str:
        return f"{self.group or 'no group'} at {self.at:%Y-%m-%d %H:%M}"


class ShareHour(models.Model):
    """What a group (``user_id`` 0) or a user of it was entitled to in one hour, as sums over its
    samples: the entitled sums of all groups together are the number of samples with any work."""

    hour = models.DateTimeField()
    group = models.CharField(max_length=100, blank=True)
    user_id = models.BigIntegerField(default=0)
    entitled = models.FloatField(default=0)  # among those with work at that moment
    nominal = models.FloatField(default=0)  # of groups only: if all of them had work

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["hour", "group", "user_id"], name="entitled_once_per_hour"
            )
        ]

    def __str__(self) -> str:
        return f"{self.group or 'no group'}, user {self.user_id} at {self.hour:%Y-%m-%d %H}:00"


class SpoolCursor(models.Model):
    """How far a spool file has been loaded; moved in the transaction that inserts its rows."""

    file_name = models.CharField(max_length=200, unique=True)
    offset = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.file_name}@{self.offset}"


class Capture(models.Model):
    """The body of one request and its answer, of a key whose prompts an admin has captured.

    Without default permissions, so that no role reads them that reads everything else
    (``accounts.authentication.READ_CAPTURES``). Stored is the beginning; ``…_bytes`` tells of the
    whole.
    """

    request_id = models.CharField(max_length=64, unique=True)
    key_id = models.BigIntegerField(db_index=True)
    at = models.DateTimeField(help_text="When the answer had ended.")
    delete_at = models.DateTimeField(db_index=True)
    request = EncryptedBytesField(null=True)
    request_bytes = models.PositiveBigIntegerField(default=0)
    answer = EncryptedBytesField(null=True)
    answer_bytes = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering: ClassVar = ["-at", "-id"]
        default_permissions = ()
        verbose_name = "captured prompt"

    def __str__(self) -> str:
        return self.request_id


@receiver(post_delete, sender=ApiKey)
def _forget_captures(instance: ApiKey, **_: Any) -> None:
    """What was captured of a key goes with it, and with the user that it belongs to."""
    Capture.objects.filter(key_id=instance.pk).delete()


class ModelPrice(models.Model):
    """What a model's tokens cost, per million, in the site's currency; shown, and never charged."""

    model_name = models.CharField(max_length=300, unique=True, help_text="As its backends list it.")
    prompt = _price("A million prompt tokens.")
    cached = _price(
        "A million prompt tokens that the backend had cached. Empty: as other prompt tokens.",
        null=True,
        blank=True,
    )
    completion = _price("A million tokens of answers.")
    history = audited()

    class Meta:
        ordering: ClassVar = ["model_name"]

    def __str__(self) -> str:
        return f"price of {self.model_name}"


class BudgetWarning(models.Model):
    """That somebody was warned, so that it happens once."""

    kind = models.CharField(max_length=5)
    ident = models.CharField(max_length=300)
    start = models.FloatField()  # of the budget's period, epoch seconds
    percent = models.PositiveSmallIntegerField()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(
                fields=["kind", "ident", "start", "percent"], name="budget_warned_of_once"
            )
        ]

    def __str__(self) -> str:
        return f"{self.percent} % of {self.kind} {self.ident}"


class ShareCheckpoint(models.Model):
    """The scheduler's memory of who has had how much, so that a restart forgives no debt."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    saved_at = models.DateTimeField()
    state = models.JSONField()

    def __str__(self) -> str:
        return f"checkpoint of {self.saved_at}"


class ConfigurationVersion(models.Model):
    """One row that database triggers raise on any change of the configuration."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=1)
    version = models.PositiveBigIntegerField(default=1)

    def __str__(self) -> str:
        return str(self.version)


def _number(help_text: str, low: float = 0, high: float | None = None) -> models.FloatField:  # type: ignore[type-arg]
    limits = [MinValueValidator(low)] + ([MaxValueValidator(high)] if high is not None else [])
    return models.FloatField(null=True, blank=True, validators=limits, help_text=help_text)


def _count(help_text: str, low: int = 0) -> models.PositiveIntegerField:  # type: ignore[type-arg]
    return models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(low)], help_text=help_text
    )


class ShareMode(models.TextChoices):
    USER = "user", "user: each user carries the group's weight"
    GROUP = "group", "group: each group gets its weight's share, split among its members"


class EndUserShare(models.TextChoices):
    MEMBER = "member", "member: each end user counts like the key's owner"
    SPLIT = "split", "split: all end users of a key share its owner's weight"


class SiteSettings(models.Model):
    """What an admin may change while running. Null: the environment variable, or its default.

    The fields are named like the variables, in lower case and without ``SCHEDULER_``.
    """

    share_mode = models.CharField(max_length=5, choices=ShareMode, null=True, blank=True)
    end_user_share = models.CharField(
        max_length=6, choices=EndUserShare, null=True, blank=True, help_text="Behind one key (R15)."
    )
    background_weight = _number("Of background calls, per weight of their user (R15).", 0, 1)
    quantum = _number("Tokens per unit of weight and round (R2).", 1)
    cost_input_token = _number("Price of a prompt token (R1).")
    cost_output_token = _number("Price of an output token (R1).")
    cost_cached_token = _number("Price of a cached prompt token (R1). Empty: the input price.")
    debt_cap = _number("Tokens of debt a returning user keeps at most (R7).")
    fairness_window = _number("Seconds over which heavy use is measured (R9).", 1)
    deprioritize_threshold = _number("Share of recent tokens that makes a user heavy (R9).", 0.5, 1)
    burst_credit_rate = _number("Credits per idle second and unit of weight (R10).")
    burst_credit_cap = _number("Most credits per unit of weight (R10).")
    wait_bonus_rate = _number("Tokens of priority per second waited (R11).")
    max_wait = _number("Longest wait in the queue, in seconds (R16).")
    max_queued = _count("Waiting requests in total (R16).")
    max_queued_per_user = _count("Waiting requests per user (R16).")
    score_model_loaded = _number("Points for a loaded model (P2).")
    score_low_utilization = _number("Points for a little-used backend (P2).")
    score_latency = _number("Points for a fast first byte (P2).")
    score_short_queue = _number("Points for a short queue (P2).")
    score_high_throughput = _number("Points for a high token rate (P2).")
    score_cache_affinity = _number("Points for the conversation's own backend (P3).")
    backend_fail_window = _number("Seconds a failed backend is left alone (P5).")
    backend_stale_after = _number("Seconds after which polled numbers are ignored (P1).", 0.1)
    backend_max_attempts = _count("Backends tried for one request (P6).", 1)
    queue_keepalive_after = _number("Seconds until a waiting stream gets comments.")
    max_body_bytes = _count("Largest request body, in bytes.", 1)
    decision_retention = _number("Days that the log keeps a request. Empty: for ever.", 1)
    open_to = models.CharField(
        max_length=150,
        null=True,
        blank=True,
        help_text="The user that Ollama's clients without a key count as. Empty: a key is needed.",
    )
    history = audited()

    class Meta:
        verbose_name = "settings"
        verbose_name_plural = "settings"

    def __str__(self) -> str:
        return "settings"

    def clean(self) -> None:
        if self.open_to and not User.objects.filter(username=self.open_to).exists():
            raise ValidationError({"open_to": f"There is no user {self.open_to!r}."})


class WhatIfState(models.TextChoices):
    QUEUED = "queued", "waits for a worker"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class WhatIf(models.Model):
    """A named scenario: recorded traffic of a period, replayed under another configuration.

    ``changes`` is what ``scheduler.what_if.Changes`` makes of it, ``result`` what
    ``scheduler.what_if.replay`` found.
    """

    name = models.CharField(max_length=80)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    since = models.DateTimeField()
    until = models.DateTimeField()
    changes = models.JSONField(default=dict)
    state = models.CharField(max_length=7, choices=WhatIfState, default=WhatIfState.QUEUED)
    replayed = models.PositiveBigIntegerField(default=0)  # requests, of both runs together
    total = models.PositiveBigIntegerField(default=0)
    error = models.TextField(blank=True)
    result = models.JSONField(null=True)
    started_at = models.DateTimeField(null=True)
    #: When somebody last worked at it. (For the version before, the database has a default, too.)
    alive_at = models.DateTimeField(default=timezone.now, db_default=Now())
    ended_at = models.DateTimeField(null=True)
    saved_at = models.DateTimeField(null=True, help_text="When its weights were put in force.")

    class Meta:
        ordering: ClassVar = ["-created_at", "-id"]
        verbose_name = "what-if"

    def __str__(self) -> str:
        return f"What-if {self.pk}: {self.name}"

    @property
    def progress(self) -> float:
        """0..1"""
        if self.state == WhatIfState.DONE:
            return 1.0
        return min(1.0, self.replayed / self.total) if self.total else 0.0

    @property
    def is_over(self) -> bool:
        return self.state in (WhatIfState.DONE, WhatIfState.FAILED)
