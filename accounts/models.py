"""Groups, users, quotas and API keys: who may use the cluster, and with what weight and limits."""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, Self

from django.contrib.auth.models import AbstractUser
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinLengthValidator, MinValueValidator
from django.db import models
from django.db.models import ProtectedError, Q
from django.db.models.signals import post_delete
from django.dispatch import receiver
from django.utils import timezone

from audit.records import audited

MAX_WEIGHT = Decimal(1000000000)
KEY_PREFIX = "mr-"
MIN_KEY_LENGTH = 32
#: How far off the end of capturing may be, and how long what was captured may be kept.
MOST_CAPTURE_DAYS = 90


def weight_field(**options: Any) -> models.DecimalField[Any, Any]:
    """A share weight: decimal, 0 (background) to 1e9, or null for "not set here"."""
    return models.DecimalField(
        max_digits=16,
        decimal_places=6,
        validators=[MinValueValidator(0), MaxValueValidator(MAX_WEIGHT)],
        **{"null": True, "blank": True} | options,
    )


def weight_constraint(field: str, name: str) -> models.CheckConstraint:
    """Both ends are checked: a one-sided check would let NaN through."""
    in_range = Q(**{f"{field}__gte": 0}) & Q(**{f"{field}__lte": MAX_WEIGHT})
    return models.CheckConstraint(condition=Q(**{f"{field}__isnull": True}) | in_range, name=name)


class BudgetPeriod(models.TextChoices):
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Limits(models.Model):
    """What a user, a key or a model may use; of a group, what each member may by default.

    Null means no limit, 0 means nothing.
    """

    requests_per_minute = models.PositiveIntegerField(
        null=True, blank=True, help_text="Requests per minute. Empty: no limit; 0: none allowed."
    )
    tokens_per_minute = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Tokens per minute. Empty: no limit; 0: none allowed."
    )
    max_concurrent = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="Requests waiting or running at once. Empty: no limit.",
    )
    token_budget = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Tokens per budget period. Empty: no limit."
    )
    budget_period = models.CharField(
        max_length=5, choices=BudgetPeriod, null=True, blank=True, help_text="Calendar period."
    )
    max_wait = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="Longest wait in the queue, in seconds. Empty: the site's default.",
    )
    max_queued = models.PositiveIntegerField(
        null=True, blank=True, help_text="Requests waiting at once. Empty: no limit."
    )
    limits_shadow = models.BooleanField(
        default=False,
        help_text="Refuse nothing for these limits, and note what they would have refused.",
    )

    class Meta:
        abstract = True


LIMITS = tuple(column.name for column in Limits._meta.fields)


#: What limits all members of a group together.
TOTALS = (
    "total_requests_per_minute",
    "total_tokens_per_minute",
    "total_max_concurrent",
    "total_token_budget",
    "total_budget_period",
)


def _total(what: str, field: Any) -> Any:
    return field(
        null=True, blank=True, help_text=f"{what} of all members together. Empty: no limit."
    )


class Group(Limits):
    """People who share one weight, for example a faculty, its staff or its students."""

    name = models.CharField(max_length=100, unique=True)
    description = models.TextField(blank=True)
    scheduler_weight = weight_field(
        help_text="Share of the cluster relative to the other groups. 0: served only when nobody "
        "else can use the slot. Empty: the deprecated SCHEDULER_WEIGHT_* variables."
    )
    allowed_models = models.JSONField(
        null=True, blank=True, help_text="List of model names. Empty: every model."
    )
    total_requests_per_minute = _total("Requests per minute", models.PositiveIntegerField)
    total_tokens_per_minute = _total("Tokens per minute", models.PositiveBigIntegerField)
    total_max_concurrent = _total("Requests waiting or running", models.PositiveIntegerField)
    total_token_budget = _total("Tokens per budget period", models.PositiveBigIntegerField)
    total_budget_period = models.CharField(
        max_length=5, choices=BudgetPeriod, null=True, blank=True, help_text="Calendar period."
    )
    history = audited()

    class Meta:
        db_table = "groups"
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [weight_constraint("scheduler_weight", "group_weight_in_range")]

    def __str__(self) -> str:
        return self.name


class Role(models.TextChoices):
    USER = "user", "User: own data"
    AUDITOR = "auditor", "Auditor: reads everything"
    OPERATOR = "operator", "Operator: backends and queue"


class User(AbstractUser):
    """Somebody who sends requests, signs in to the pages, or both.

    A role above "user", and being a superuser, imply ``is_staff``: whoever has one may sign in to
    the pages. Taking the role away takes that away too.
    """

    # The project's own group and roles replace Django's groups and per-user permissions.
    groups = None  # type: ignore[assignment]
    user_permissions = None  # type: ignore[assignment]
    group = models.ForeignKey(
        Group, on_delete=models.PROTECT, null=True, blank=True, related_name="members"
    )
    role = models.CharField(max_length=10, choices=Role, default=Role.USER)
    history = audited(excluded_fields=["password", "last_login"])
    stored_role: str = Role.USER  # as it was read or last saved

    class Meta:
        ordering: ClassVar = ["username"]

    def __str__(self) -> str:
        return self.username

    @classmethod
    def from_db(cls, *args: Any, **options: Any) -> Self:
        user = super().from_db(*args, **options)
        user.stored_role = user.__dict__.get("role", Role.USER)  # absent when it was deferred
        return user

    def clean(self) -> None:
        super().clean()
        self.imply_staff()
        gives_up = not (self.is_active and self.is_superuser)
        if gives_up and self.pk and is_last_superuser(self.pk):
            raise ValidationError(LAST_SUPERUSER)

    def save(self, *args: Any, **options: Any) -> None:
        names = options.get("update_fields")
        if self.imply_staff() and names is not None:
            options["update_fields"] = {*names, "is_staff"}
        super().save(*args, **options)
        self.stored_role = self.role

    def imply_staff(self) -> bool:
        """Bring ``is_staff`` into line with the role; returns whether this changed it."""
        before = self.is_staff
        if self.role != Role.USER or self.is_superuser:
            self.is_staff = True
        elif self.stored_role != Role.USER:
            self.is_staff = False
        return self.is_staff != before


LAST_SUPERUSER = (
    "This is the last active superuser, without whom nobody could manage people. Make somebody "
    "else a superuser first."
)


def is_last_superuser(user_id: int) -> bool:
    """Whether nobody else could manage people. Two that step down in the same instant may pass."""
    superusers = User.objects.filter(is_superuser=True, is_active=True)
    return list(superusers.values_list("pk", flat=True)[:2]) == [user_id]


@receiver(post_delete, sender=User)
def _keep_a_superuser(instance: User, **_: Any) -> None:
    """After the rows of a deletion are gone, so that all superusers at once do not pass either;
    what is raised here undoes the deletion."""
    if instance.is_superuser and instance.is_active:
        superusers = User.objects.filter(is_superuser=True, is_active=True)
        if not superusers.exists():
            raise ProtectedError(LAST_SUPERUSER, {instance})


class BoostState(models.TextChoices):
    COMING = "coming"
    IN_FORCE = "in force"
    OVER = "over"


class Quota(Limits):
    """What differs for one user from the group's defaults. At most one per user."""

    user = models.OneToOneField(User, on_delete=models.CASCADE, related_name="quota")
    weight_override = weight_field(
        help_text="Takes precedence over the group's weight. Empty: the group's weight."
    )
    history = audited()

    class Meta:
        constraints: ClassVar = [weight_constraint("weight_override", "quota_weight_in_range")]

    def __str__(self) -> str:
        return f"quota of {self.user}"


class Boost(models.Model):
    """A factor on a group's or one user's weight, from a time until another (R17).

    It is in force by the time of day alone: nothing is written when it begins or ends.
    """

    name = models.CharField(max_length=100, unique=True, help_text="For example: class project.")
    group = models.ForeignKey(
        Group, on_delete=models.CASCADE, null=True, blank=True, related_name="boosts"
    )
    user = models.ForeignKey(
        User, on_delete=models.CASCADE, null=True, blank=True, related_name="boosts"
    )
    factor = weight_field(
        null=False,
        blank=False,
        help_text="The weight is multiplied by it. 0: served only when nobody else can use the "
        "slot.",
    )
    starts_at = models.DateTimeField("from", default=timezone.now)
    ends_at = models.DateTimeField("until")
    reason = models.CharField(max_length=200, blank=True)
    made_by = models.ForeignKey(
        User, on_delete=models.SET_NULL, null=True, editable=False, related_name="+"
    )
    history = audited()

    class Meta:
        ordering: ClassVar = ["-ends_at", "name"]
        constraints: ClassVar = [
            weight_constraint("factor", "boost_factor_in_range"),
            models.CheckConstraint(
                condition=Q(group__isnull=False, user__isnull=True)
                | Q(group__isnull=True, user__isnull=False),
                name="boost_of_a_group_or_a_user",
            ),
            models.CheckConstraint(
                condition=Q(ends_at__gte=models.F("starts_at")), name="boost_ends_after_its_start"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        super().clean()
        if (self.group_id is None) == (self.user_id is None):
            raise ValidationError({"group": "A boost is of either a group or one user."})
        # Either is None where a form could not read it.
        times: tuple[datetime | None, datetime | None] = (self.starts_at, self.ends_at)
        if None not in times and self.ends_at <= self.starts_at:
            raise ValidationError({"ends_at": "It must end after it begins."})

    @property
    def whose(self) -> str:
        return f"group {self.group}" if self.group_id is not None else f"user {self.user}"

    def state(self, now: datetime) -> BoostState:
        if now < self.starts_at:
            return BoostState.COMING
        return BoostState.IN_FORCE if now < self.ends_at else BoostState.OVER

    def end(self, now: datetime, reason: str) -> None:
        """End it at once; one that has not begun is deleted, one that is over stays as it was."""
        self._change_reason: str | None = reason
        state = self.state(now)
        if state == BoostState.COMING:
            self.delete()
        elif state == BoostState.IN_FORCE:
            self.ends_at = now
            self.save(update_fields=["ends_at"])


class ModelLimits(Limits):
    """What all users together may use of one model, by the name that its backends list."""

    model_name = models.CharField(max_length=300, unique=True)
    history = audited()

    class Meta:
        ordering: ClassVar = ["model_name"]
        verbose_name = verbose_name_plural = "model limits"

    def __str__(self) -> str:
        return f"limits of {self.model_name}"


def hash_key(key: str) -> str:
    """SHA-256 of a key, hex. A key carries 256 random bits, so a slow hash would add nothing."""
    return hashlib.sha256(key.encode()).hexdigest()


class Api(models.TextChoices):
    """What a key may be limited to."""

    OPENAI = "openai", "OpenAI's: /v1"
    ANTHROPIC = "anthropic", "Anthropic's: /anthropic, /v1/messages"
    OLLAMA = "ollama", "Ollama's: /api"
    MANAGEMENT = "management", "management: /api/admin"


def check_apis(value: Any) -> None:
    """Raises: ValidationError."""
    if not isinstance(value, list) or not value or set(map(str, value)) - set(Api.values):
        raise ValidationError(f"A list of some of {', '.join(Api.values)}.")


def check_names(value: Any) -> None:
    """Raises: ValidationError."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValidationError("A list of model names.")


class ApiKey(Limits):
    """A bearer key. Only its hash and a recognisable prefix are stored.

    A rotated key's predecessor goes on working until ``previous_until``.
    """

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="api_keys")
    name = models.CharField(max_length=100, help_text="What the key is for, e.g. laptop.")
    prefix = models.CharField(max_length=16, editable=False)
    sha256 = models.CharField(
        max_length=64, unique=True, editable=False, validators=[MinLengthValidator(64)]
    )
    enabled = models.BooleanField(default=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    may_name_end_user = models.BooleanField(
        default=False, help_text="Trusted to name the end user behind it, who then gets the share."
    )
    allowed_models = models.JSONField(
        null=True,
        blank=True,
        validators=[check_names],
        help_text="List of model names or aliases. Empty: all that its user may use.",
    )
    allowed_apis = models.JSONField(
        null=True,
        blank=True,
        validators=[check_apis],
        help_text=f"List of some of {', '.join(Api.values)}. Empty: all.",
    )
    previous_sha256 = models.CharField(max_length=64, null=True, unique=True, editable=False)
    previous_until = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    capture_until = models.DateTimeField(
        null=True,
        blank=True,
        help_text="Prompts and answers are stored until then, and the key's owner is told so. "
        f"Empty: none are. At most {MOST_CAPTURE_DAYS} days ahead.",
    )
    capture_reason = models.CharField(
        max_length=200,
        blank=True,
        default="",
        db_default="",  # for the version before, which may still make keys
        help_text="Why. The key's owner reads it too.",
    )
    capture_days = models.PositiveSmallIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(MOST_CAPTURE_DAYS)],
        help_text=f"Days that each prompt is kept: 1 to {MOST_CAPTURE_DAYS}.",
    )
    captures_deleted_at = models.DateTimeField(null=True, editable=False)
    history = audited(excluded_fields=["sha256", "previous_sha256", "captures_deleted_at"])

    class Meta:
        ordering: ClassVar = ["user", "name"]
        verbose_name = "API key"
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["user", "name"], name="key_name_once_per_user"),
            models.CheckConstraint(
                condition=Q(capture_until__isnull=True, capture_days__isnull=True)
                | (
                    Q(capture_until__isnull=False, capture_days__isnull=False)
                    & Q(capture_days__gte=1, capture_days__lte=MOST_CAPTURE_DAYS)
                    & ~Q(capture_reason="")
                ),
                name="key_capture_is_bounded_and_has_a_reason",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.prefix}… ({self.name})"

    @property
    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= timezone.now()

    def clean(self) -> None:
        super().clean()
        self.capture_reason = (self.capture_reason or "").strip()
        if self.capture_until is None:
            if self.capture_reason or self.capture_days is not None:
                raise ValidationError({"capture_until": "Say until when prompts are stored."})
            return
        wrong = {}
        if self.capture_until > timezone.now() + timedelta(days=MOST_CAPTURE_DAYS):
            wrong["capture_until"] = f"At most {MOST_CAPTURE_DAYS} days from now."
        if not self.capture_reason:
            wrong["capture_reason"] = "Say why: the key's owner reads it."
        if self.capture_days is None:
            wrong["capture_days"] = "Say for how many days each prompt is kept."
        if wrong:
            raise ValidationError(wrong)

    @property
    def is_captured(self) -> bool:
        """Whether prompts and answers are stored now."""
        return self.capture_until is not None and self.capture_until > timezone.now()

    def stop_capture(self) -> None:
        """Store no more of them; what is stored stays until its date."""
        self.capture_until, self.capture_reason, self.capture_days = None, "", None

    CAPTURE = ("capture_until", "capture_reason", "capture_days")

    def set_key(self, key: str) -> None:
        """Take over ``key``, of which only the hash and the prefix are kept."""
        self.sha256 = hash_key(key)
        self.prefix = key[:9]

    @property
    def last_used_at(self) -> datetime | None:
        """To some seconds; None: never, or before this was noted."""
        use = getattr(self, "use", None)
        return use.last_used_at if use is not None else None

    def rotate(self, overlap: timedelta) -> str:
        """Take a new key, which is returned; the old one works for ``overlap`` more."""
        self.previous_sha256 = self.sha256 if overlap else None
        self.previous_until = timezone.now() + overlap if overlap else None
        key = self.generate()
        self.set_key(key)
        return key

    ROTATED = ("sha256", "prefix", "previous_sha256", "previous_until")

    @staticmethod
    def generate() -> str:
        """A new key: 256 random bits in hex after a recognisable prefix."""
        return KEY_PREFIX + secrets.token_hex(32)


class KeyUse(models.Model):
    """When a key was last used; apart from it, since writing it changes no configuration."""

    key = models.OneToOneField(
        ApiKey, on_delete=models.CASCADE, primary_key=True, related_name="use"
    )
    last_used_at = models.DateTimeField(null=True)
    reminded_of = models.DateTimeField(null=True)  # the expiry that its user was told of

    def __str__(self) -> str:
        return f"use of {self.key}"
