"""Wrong settings become numbered system checks instead of surprises at run time."""

from __future__ import annotations

import ipaddress
import math
import re
import ssl
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from cryptography.fernet import Fernet
from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.core.checks import Warning as CheckWarning

#: setting -> (lowest allowed value, may it be None)
NUMBERS: dict[str, tuple[float, bool]] = {
    "SCHEDULER_BACKGROUND_WEIGHT": (0, False),
    "SCHEDULER_QUANTUM": (1, False),
    "SCHEDULER_COST_INPUT_TOKEN": (0, False),
    "SCHEDULER_COST_OUTPUT_TOKEN": (0, False),
    "SCHEDULER_COST_CACHED_TOKEN": (0, True),
    "SCHEDULER_DEBT_CAP": (0, False),
    "SCHEDULER_FAIRNESS_WINDOW": (1, False),
    "SCHEDULER_DEPRIORITIZE_THRESHOLD": (0.5, False),
    "SCHEDULER_BURST_CREDIT_RATE": (0, False),
    "SCHEDULER_BURST_CREDIT_CAP": (0, False),
    "SCHEDULER_WAIT_BONUS_RATE": (0, False),
    "SCHEDULER_MAX_WAIT": (0, False),
    "SCHEDULER_MAX_QUEUED": (0, True),
    "SCHEDULER_MAX_QUEUED_PER_USER": (0, True),
    "SCHEDULER_SCORE_MODEL_LOADED": (0, False),
    "SCHEDULER_SCORE_LOW_UTILIZATION": (0, False),
    "SCHEDULER_SCORE_LATENCY": (0, False),
    "SCHEDULER_SCORE_SHORT_QUEUE": (0, False),
    "SCHEDULER_SCORE_HIGH_THROUGHPUT": (0, False),
    "SCHEDULER_SCORE_CACHE_AFFINITY": (0, False),
    "SCHEDULER_WEIGHT_STUDENT": (0, False),
    "SCHEDULER_WEIGHT_STAFF": (0, False),
    "SCHEDULER_WEIGHT_FACULTY": (0, False),
    "SCHEDULER_WEIGHT_ADMIN": (0, False),
    "BACKEND_FAIL_WINDOW": (0, False),
    "BACKEND_STALE_AFTER": (0.1, False),
    "BACKEND_MAX_ATTEMPTS": (1, False),
    "BACKEND_POLL_INTERVAL": (0.1, False),
    "BACKEND_CONNECT_TIMEOUT": (0.001, False),
    "BACKEND_FIRST_BYTE_TIMEOUT": (0.001, False),
    "BACKEND_CHUNK_TIMEOUT": (0.001, False),
    "QUEUE_KEEPALIVE_AFTER": (0, False),
    "MAX_BODY_BYTES": (1, False),
    "QUOTA_DEFAULT_OUTPUT_TOKENS": (0, False),
    "FAILED_KEYS_PER_MINUTE": (0, False),
    "KEY_REMINDER_DAYS": (0, False),
    "ENERGY_PRICE": (0, True),
    "DECISION_STREAM_MAX_BYTES": (1, False),
    "OTEL_TRACES_SAMPLER_ARG": (0, False),
    "SHUTDOWN_GRACE": (0, False),
    "TELEMETRY_INTERVAL": (0, False),
    "TELEMETRY_RETENTION": (0.01, False),
    "DECISION_RETENTION": (1, True),
    "VLLM_MAX_NUM_SEQS": (0, False),
    "VLLM_MAX_QUEUE_DEPTH": (0, False),
}
#: As browsers write them; a host may begin with a star, for all below it.
_ORIGIN = re.compile(r"https?://((\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
CHOICES: dict[str, tuple[str, ...]] = {
    "LOG_FORMAT": ("console", "json"),
    "SERVES": ("all", "api", "pages"),
    "SCHEDULER_SHARE_MODE": ("user", "group"),
    "SCHEDULER_END_USER_SHARE": ("member", "split"),
}


@register("mindrouter")
def check_numbers(**_: Any) -> list[CheckMessage]:
    """mindrouter.E001: a setting is not a number, or below its lowest value."""
    problems: list[CheckMessage] = []
    for name, (low, may_be_none) in NUMBERS.items():
        value = getattr(settings, name)
        if value is None and may_be_none:
            continue
        if not isinstance(value, int | float) or math.isnan(value) or not low <= value < math.inf:
            problems.append(
                Error(
                    f"{name} is {value!r}.",
                    hint=f"Set the variable {name} to a number of at least {low:g}.",
                    id="mindrouter.E001",
                )
            )
    return problems


@register("mindrouter")
def check_choices(**_: Any) -> list[CheckMessage]:
    """mindrouter.E002: a setting is not one of its allowed words."""
    problems: list[CheckMessage] = []
    for name, allowed in CHOICES.items():
        value = getattr(settings, name)
        if value not in allowed:
            hint = f"Set it to {' or '.join(allowed)}."
            problems.append(Error(f"{name} is {value!r}.", hint=hint, id="mindrouter.E002"))
    return problems


@register("mindrouter")
def check_stream(**_: Any) -> list[CheckMessage]:
    """mindrouter.E005: decisions cannot be written where they are to go."""
    target: str = settings.DECISION_STREAM
    is_webhook = target.startswith(("http://", "https://"))
    if is_webhook and not settings.DECISION_STREAM_SECRET:
        wrong = "DECISION_STREAM is a webhook and DECISION_STREAM_SECRET is empty."
        hint = "Set a secret: what is sent is signed with it."
    elif target and target != "stdout" and not is_webhook and not target.startswith("/"):
        wrong = f"DECISION_STREAM is {target!r}."
        hint = "Set it to stdout, to a file's path from the root, or to an http address."
    else:
        return []
    return [Error(wrong, hint=hint, id="mindrouter.E005")]


@register("mindrouter")
def check_redis(**_: Any) -> list[CheckMessage]:
    """mindrouter.E006: not every part of MindRouter would reach the same Redis. The address is not
    repeated here, as it may hold a password."""
    wrong = _wrong_with_redis(settings.REDIS_URL) if settings.REDIS_URL else None
    if wrong is None:
        return []
    hint = (
        "redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// also with ssl_… options, or "
        "unix://[[USER]:PASSWORD@]/PATH[?db=DATABASE]."
    )
    return [Error(f"REDIS_URL {wrong}.", hint=hint, id="mindrouter.E006")]


def _wrong_with_redis(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # it may name what a password in the address was taken for
        return "cannot be read"
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    database = options.pop("db", "0")
    if parts.scheme not in ("redis", "rediss", "unix"):
        return f"begins with {parts.scheme!r}"
    if parts.scheme == "unix":
        if not parts.path.strip("/") or parts.hostname:
            return "names no socket's path from the root"
    elif not parts.hostname:
        return "names no host"
    elif parts.path.strip("/"):
        database = parts.path[1:]
    if not database.isdecimal():
        return "names a database that is no number"
    if unknown := [name for name in options if not name.startswith("ssl_")]:
        return f"has options that only some parts would heed: {', '.join(unknown)}"
    if options and parts.scheme != "rediss":
        return "has options of rediss:// and another beginning"
    return None


@register("mindrouter")
def check_connection_age(**_: Any) -> list[CheckMessage]:
    """mindrouter.W001: persistent connections without a pool leak under ASGI."""
    database = settings.DATABASES["default"]
    pooled = database.get("OPTIONS", {}).get("pool")
    if database.get("CONN_MAX_AGE", 0) == 0 or pooled:
        return []
    return [
        CheckWarning(
            "CONN_MAX_AGE is not 0 and the database has no connection pool.",
            hint="Under ASGI each request's thread keeps its connection; use the pool instead.",
            id="mindrouter.W001",
        )
    ]


@register("mindrouter")
def check_backend_certificates(**_: Any) -> list[CheckMessage]:
    """mindrouter.E003: own authorities' certificates cannot be read."""
    if not settings.BACKEND_CA_FILE:
        return []
    try:
        ssl.create_default_context(cafile=settings.BACKEND_CA_FILE)
    except OSError as error:  # ssl.SSLError too
        problem = f"BACKEND_CA_FILE cannot be read: {error}."
        return [Error(problem, hint="It is a file of PEM certificates.", id="mindrouter.E003")]
    return []


@register("mindrouter")
def check_encryption_keys(**_: Any) -> list[CheckMessage]:
    """mindrouter.E004: a key for stored keys is none. It is not repeated here."""
    keys = (settings.FIELD_ENCRYPTION_KEY, *settings.FIELD_ENCRYPTION_OLD_KEYS)
    for key in keys:
        try:
            Fernet(key)
        except ValueError:
            hint = "32 bytes in URL-safe base64, as cryptography's Fernet.generate_key() gives."
            what = "FIELD_ENCRYPTION_KEY or one of FIELD_ENCRYPTION_OLD_KEYS is not a Fernet key."
            return [Error(what, hint=hint, id="mindrouter.E004")]
    return []


@register("mindrouter")
def check_proxies(**_: Any) -> list[CheckMessage]:
    """mindrouter.E007: a trusted proxy is neither an address nor a network."""
    problems: list[CheckMessage] = []
    for one in settings.TRUSTED_PROXIES:
        try:
            ipaddress.ip_network(one, strict=False)
        except ValueError:
            hint = "Addresses or networks, comma-separated: 10.0.0.5,fd12::/64."
            what = f"TRUSTED_PROXIES names {one!r}, which is neither."
            problems.append(Error(what, hint=hint, id="mindrouter.E007"))
    return problems


@register("mindrouter")
def check_origins(**_: Any) -> list[CheckMessage]:
    """mindrouter.E008: an origin whose forms are to be accepted is none, and would match nothing.

    Django's own check asks for the scheme only.
    """
    problems: list[CheckMessage] = []
    for one in settings.CSRF_TRUSTED_ORIGINS:
        if not _ORIGIN.fullmatch(one):
            what = f"CSRF_TRUSTED_ORIGINS names {one!r}, which is no origin."
            hint = "Scheme, host and port alone, comma-separated: https://llm.example.org:8443."
            problems.append(Error(what, hint=hint, id="mindrouter.E008"))
    return problems


@register("mindrouter", deploy=True)
def check_hosts(**_: Any) -> list[CheckMessage]:
    """mindrouter.W002: pages answer under any name."""
    if "*" not in settings.ALLOWED_HOSTS:
        return []
    hint = "Set it to the names that people use, comma-separated."
    return [CheckWarning("ALLOWED_HOSTS allows any name.", hint=hint, id="mindrouter.W002")]
