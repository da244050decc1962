"""Every setting of the project, each readable from the environment.

Wrong values become numbered system checks (``scheduler.checks``). Secrets are generated on first
start into the data folder, readable by their owner only.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import dj_database_url
import django_stubs_ext
import environ
from cryptography.fernet import Fernet
from csp.constants import NONE, SELF, UNSAFE_INLINE
from pythonjsonlogger.core import RESERVED_ATTRS

django_stubs_ext.monkeypatch()

env = environ.Env()
BASE_DIR = Path(__file__).resolve().parent.parent


def env_number(name: str, default: float | None) -> Any:
    """A number; what is not one is returned as text, for the system checks to report."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def secret(name: str, generate: Any) -> str:
    """The environment's ``name``, else the data folder's file of that name, else a new one."""
    if os.environ.get(name):
        return os.environ[name]
    path = DATA_DIR / name.lower()
    try:
        # O_EXCL: of several processes started at once, one writes and the others read.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(handle, "w") as file:
        value = str(generate())
        file.write(value)
    return value


def broker_url(redis_url: str) -> str:
    """The same Redis, in the words of Celery, which takes sockets and databases by other names."""
    parts = urlsplit(redis_url)
    options = dict(parse_qsl(parts.query))
    database = options.pop("db", None)
    scheme, path = parts.scheme, parts.path
    if scheme == "unix":
        scheme = "redis+socket"
        options["virtual_host"] = database or "0"
    elif database is not None:
        path = f"/{database}"
    if scheme == "rediss":
        options.setdefault("ssl_cert_reqs", "required")  # by itself it would look at none
    return urlunsplit((scheme, parts.netloc, path, urlencode(options), ""))


# ---- where things are
DATA_DIR = Path(os.environ.get("MINDROUTER_DATA") or BASE_DIR / "var").resolve()
DATA_DIR.mkdir(parents=True, exist_ok=True, mode=0o700)
SPOOL_DIR = DATA_DIR / "spool"
STATE_DIR = DATA_DIR / "state"  # what the processes tell of themselves
HOST = env.str("HOST", "127.0.0.1")
PORT = env.int("PORT", 8000)

# ---- security
DEBUG = env.bool("DEBUG", False)
SECRET_KEY = secret("SECRET_KEY", lambda: secrets.token_urlsafe(50))
FIELD_ENCRYPTION_KEY = secret("FIELD_ENCRYPTION_KEY", lambda: Fernet.generate_key().decode())
# Former keys, which are still read: `manage.py encryptanew` makes them needless.
FIELD_ENCRYPTION_OLD_KEYS = env.list("FIELD_ENCRYPTION_OLD_KEYS", default=[])
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["*"])
CSRF_TRUSTED_ORIGINS = env.list("CSRF_TRUSTED_ORIGINS", default=[])
CORS_ALLOWED_ORIGINS = env.list("CORS_ALLOWED_ORIGINS", default=[])
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_AGE = 60 * 60 * env.int("SESSION_HOURS", 24 * 7)
X_FRAME_OPTIONS = "DENY"
# People reach the pages by https only: cookies stay on it, plain requests are sent there, and
# browsers are told to remember. A proxy's X-Forwarded-Proto counts if it is a trusted one's.
HTTPS = env.bool("HTTPS", False)
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
SECURE_SSL_REDIRECT = SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = HTTPS
# Of programs with a key, the command line on this machine for one: the key has come already.
SECURE_REDIRECT_EXEMPT = [r"^api/admin/"]
SECURE_HSTS_SECONDS = 31_536_000 if HTTPS else 0
SILENCED_SYSTEM_CHECKS = [
    "security.W005",  # other hosts below this one's name are none of ours
    "security.W021",  # nor do we ask browsers' makers to list it
]
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF],
        "style-src": [SELF, UNSAFE_INLINE],  # the theme's colours, and htmx's
        "img-src": [SELF, "data:"],
        "object-src": [NONE],
        "base-uri": [NONE],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
    }
}
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "accounts.authentication.RoleBackend",
]
AXES_FAILURE_LIMIT = 10
AXES_VERBOSE = False
AXES_COOLOFF_TIME = 0.25  # hours
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
# An identity provider that people may sign in at: its issuer's URL; empty: none, and nothing of
# it is loaded. Its client is told https://OUR-NAME/oidc/provider/login/callback/.
OIDC_ISSUER = env.str("OIDC_ISSUER", "")
OIDC_CLIENT_ID = env.str("OIDC_CLIENT_ID", "mindrouter")
OIDC_CLIENT_SECRET = env.str("OIDC_CLIENT_SECRET", "")
OIDC_NAME = env.str("OIDC_NAME", "Single sign-on")
OIDC_GROUP_CLAIM = env.str("OIDC_GROUP_CLAIM", "groups")
LOGIN_URL = "admin:login"
LOGIN_REDIRECT_URL = "admin:index"

# ---- applications
INSTALLED_APPS = [
    # First, as its runserver is the one used. For that alone: it takes 0.6 s to import.
    *(["daphne"] if sys.argv[1:2] == ["runserver"] else []),
    "unfold.apps.BasicAppConfig",
    "unfold.contrib.filters",
    "unfold.contrib.simple_history",
    "mindrouter.apps.SiteConfig",
    "mindrouter.apps.MindRouterConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "axes",
    "simple_history",
    "audit.apps.AuditConfig",
    "accounts.apps.AccountsConfig",
    "backends.apps.BackendsConfig",
    "scheduler.apps.SchedulerConfig",
]
MIDDLEWARE = [
    "mindrouter.logs.RequestIdMiddleware",
    "mindrouter.headers.TrustedProxyMiddleware",
    "mindrouter.headers.NulMiddleware",
    "mindrouter.headers.PolicyMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "mindrouter.zone.ViewerZoneMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "simple_history.middleware.HistoryRequestMiddleware",
    "axes.middleware.AxesMiddleware",
]
if OIDC_ISSUER:
    INSTALLED_APPS += [
        "allauth",
        "allauth.account",
        "allauth.socialaccount",
        "allauth.socialaccount.providers.openid_connect",
    ]
    MIDDLEWARE.append("allauth.account.middleware.AccountMiddleware")
    ACCOUNT_ADAPTER = "accounts.oidc.AccountAdapter"
    ACCOUNT_EMAIL_VERIFICATION = "none"
    ACCOUNT_SIGNUP_FIELDS = ["username*"]  # an e-mail address is not needed
    ACCOUNT_UNIQUE_EMAIL = False  # nor does one prove who somebody is
    SOCIALACCOUNT_ONLY = True
    SOCIALACCOUNT_ADAPTER = "accounts.oidc.ProviderAdapter"
    SOCIALACCOUNT_PROVIDERS = {
        "openid_connect": {
            "OAUTH_PKCE_ENABLED": True,
            "APPS": [
                {
                    "provider_id": "provider",
                    "name": OIDC_NAME,
                    "client_id": OIDC_CLIENT_ID,
                    "secret": OIDC_CLIENT_SECRET,
                    "settings": {"server_url": OIDC_ISSUER, "oauth_pkce_enabled": True},
                }
            ],
        }
    }
    _issuer = urlsplit(OIDC_ISSUER)
    # The button's form leads there.
    CONTENT_SECURITY_POLICY["DIRECTIVES"]["form-action"].append(
        f"{_issuer.scheme}://{_issuer.netloc}"
    )
ROOT_URLCONF = "mindrouter.urls"
ASGI_APPLICATION = "mindrouter.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "mindrouter.site.sign_in_elsewhere",
            ]
        },
    }
]

# ---- database
DATABASE_URL = env.str("DATABASE_URL", f"sqlite:///{DATA_DIR / 'db.sqlite3'}")
DATABASES: dict[str, Any] = {"default": dj_database_url.parse(DATABASE_URL)}
_options: dict[str, Any] = DATABASES["default"].setdefault("OPTIONS", {})  # sslmode and the like
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    _options |= {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
    # A file: in memory, the threads and processes of a test would not see one database.
    DATABASES["default"]["TEST"] = {"NAME": str(DATA_DIR / "test.sqlite3")}
else:
    _options["pool"] = {
        "min_size": 0,
        "max_size": env.int("DATABASE_POOL_SIZE", 8),
        "timeout": 10,
        # After that long it starts anew; else the pauses between its attempts double on and
        # on, and after an outage of a minute it comes back most of a minute late.
        "reconnect_timeout": 5,
    }
    DATABASES["default"]["CONN_HEALTH_CHECKS"] = True  # no broken connection after an outage
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# ---- processes
# With Redis, `manage.py runscheduler` schedules for any number of gateways (docs/cluster.md):
# redis://, rediss:// (with ssl_… options) or unix://, a password in it, the database's number.
REDIS_URL = env.str("REDIS_URL", "")
# What a gateway process serves: "api", "pages" (the admin and its API), or "all" of it.
SERVES = env.str("SERVES", "all")
CHANNEL_LAYERS = {
    "default": (
        {
            "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
            "CONFIG": {"hosts": [REDIS_URL]},
        }
        if REDIS_URL
        else {"BACKEND": "channels.layers.InMemoryChannelLayer"}
    )
}
CELERY_BROKER_URL = broker_url(REDIS_URL) if REDIS_URL else "filesystem://localhost"
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TIMEZONE = "UTC"
if REDIS_URL:
    CELERY_BEAT_SCHEDULER = "mindrouter.beat:GuardedScheduler"
    CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {
        # What a worker took and did not begin before it died is another one's after a minute.
        "visibility_timeout": 60,
        "unacked_restore_throttle": 1,
        # A connection on which nothing comes any more is made anew within some ten seconds.
        "health_check_interval": 5,
        "socket_timeout": 10,
        "socket_connect_timeout": 5,
    }
else:
    _BROKER_DIR = DATA_DIR / "celery"
    for _name in ("queue", "control"):
        (_BROKER_DIR / _name).mkdir(parents=True, exist_ok=True)
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": str(_BROKER_DIR / "queue"),
        "data_folder_out": str(_BROKER_DIR / "queue"),
        "control_folder": str(_BROKER_DIR / "control"),
    }
CELERY_BEAT_SCHEDULE_FILENAME = str(DATA_DIR / "celerybeat-schedule")
CELERY_BEAT_SCHEDULE = {
    "poll": {"task": "backends.poll", "schedule": 1.0, "options": {"expires": 2.0}},
    "forget-samples": {
        "task": "backends.forget_samples",
        "schedule": 600.0,
        "options": {"expires": 600.0},
    },
}

CELERY_BEAT_SCHEDULE |= {
    "add-up-energy": {
        "task": "scheduler.add_up_energy",
        "schedule": 600.0,
        "options": {"expires": 600.0},
    },
    "warn-of-budgets": {
        "task": "scheduler.warn_of_budgets",
        "schedule": 60.0,
        "options": {"expires": 60.0},
    },
    "forget-decisions": {
        "task": "scheduler.forget_decisions",
        "schedule": 60.0,
        "options": {"expires": 60.0},
    },
    "remind-of-expiry": {
        "task": "accounts.remind_of_expiry",
        "schedule": 3600.0,
        "options": {"expires": 3600.0},
    },
}

# ---- mail and other notices
# smtp://user:password@host:25, smtp+tls://… and the like; empty: nothing is sent.
vars().update(env.email_url("EMAIL_URL", default="dummymail://"))
DEFAULT_FROM_EMAIL = env.str("DEFAULT_FROM_EMAIL", "mindrouter@localhost")
NOTICE_WEBHOOK = env.str("NOTICE_WEBHOOK", "")
KEY_REMINDER_DAYS = env_number("KEY_REMINDER_DAYS", 7)
CURRENCY = env.str("CURRENCY", "EUR")
ENERGY_PRICE = env_number("ENERGY_PRICE", None)  # of a kilowatt hour, in that currency

# ---- traces: as OpenTelemetry's own variables say (docs/operations.md)
TRACING = (
    bool(
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    )
    and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"
)
OTEL_TRACES_SAMPLER_ARG = env_number("OTEL_TRACES_SAMPLER_ARG", 1.0)  # of traces that begin here

# ---- decisions, for others besides the database (docs/operations.md)
# Where the recorder writes each: "stdout", a file's path, or a webhook's address. Empty: nowhere.
DECISION_STREAM = env.str("DECISION_STREAM", "")
DECISION_STREAM_SECRET = env.str("DECISION_STREAM_SECRET", "")  # signs what a webhook gets
DECISION_STREAM_MAX_BYTES = env_number("DECISION_STREAM_MAX_BYTES", 256 * 1024 * 1024)

# ---- language, time, static files
LANGUAGE_CODE = "en-us"
TIME_ZONE = env.str("TIME_ZONE", "UTC")
USE_I18N = True
USE_TZ = True
STATIC_URL = "/static/"
STATIC_ROOT = DATA_DIR / "static"
STATIC_ROOT.mkdir(exist_ok=True)  # whitenoise warns about a missing one
STATICFILES_DIRS = [BASE_DIR / "mindrouter" / "static"]
WHITENOISE_USE_FINDERS = True

# ---- scheduling (docs/scheduling.md); a value saved on the settings page wins over these
SCHEDULER_SHARE_MODE = env.str("SCHEDULER_SHARE_MODE", "user")
SCHEDULER_END_USER_SHARE = env.str("SCHEDULER_END_USER_SHARE", "member")
SCHEDULER_BACKGROUND_WEIGHT = env_number("SCHEDULER_BACKGROUND_WEIGHT", 1)
SCHEDULER_QUANTUM = env_number("SCHEDULER_QUANTUM", 1000)
SCHEDULER_COST_INPUT_TOKEN = env_number("SCHEDULER_COST_INPUT_TOKEN", 1)
SCHEDULER_COST_OUTPUT_TOKEN = env_number("SCHEDULER_COST_OUTPUT_TOKEN", 1)
SCHEDULER_COST_CACHED_TOKEN = env_number("SCHEDULER_COST_CACHED_TOKEN", None)
SCHEDULER_DEBT_CAP = env_number("SCHEDULER_DEBT_CAP", 8192)
SCHEDULER_FAIRNESS_WINDOW = env_number("SCHEDULER_FAIRNESS_WINDOW", 300)
SCHEDULER_DEPRIORITIZE_THRESHOLD = env_number("SCHEDULER_DEPRIORITIZE_THRESHOLD", 0.5)
SCHEDULER_BURST_CREDIT_RATE = env_number("SCHEDULER_BURST_CREDIT_RATE", 100)
SCHEDULER_BURST_CREDIT_CAP = env_number("SCHEDULER_BURST_CREDIT_CAP", 1000)
SCHEDULER_WAIT_BONUS_RATE = env_number("SCHEDULER_WAIT_BONUS_RATE", 1)
SCHEDULER_MAX_WAIT = env_number("SCHEDULER_MAX_WAIT", 300)
SCHEDULER_MAX_QUEUED = env_number("SCHEDULER_MAX_QUEUED", None)
SCHEDULER_MAX_QUEUED_PER_USER = env_number("SCHEDULER_MAX_QUEUED_PER_USER", None)
SCHEDULER_SCORE_MODEL_LOADED = env_number("SCHEDULER_SCORE_MODEL_LOADED", 100)
SCHEDULER_SCORE_LOW_UTILIZATION = env_number("SCHEDULER_SCORE_LOW_UTILIZATION", 50)
SCHEDULER_SCORE_LATENCY = env_number("SCHEDULER_SCORE_LATENCY", 40)
SCHEDULER_SCORE_SHORT_QUEUE = env_number("SCHEDULER_SCORE_SHORT_QUEUE", 30)
SCHEDULER_SCORE_HIGH_THROUGHPUT = env_number("SCHEDULER_SCORE_HIGH_THROUGHPUT", 20)
SCHEDULER_SCORE_CACHE_AFFINITY = env_number("SCHEDULER_SCORE_CACHE_AFFINITY", 60)
# Deprecated: groups carry their weights in the database now. Fallbacks where they carry none.
SCHEDULER_WEIGHT_STUDENT = env_number("SCHEDULER_WEIGHT_STUDENT", 1)
SCHEDULER_WEIGHT_STAFF = env_number("SCHEDULER_WEIGHT_STAFF", 2)
SCHEDULER_WEIGHT_FACULTY = env_number("SCHEDULER_WEIGHT_FACULTY", 3)
SCHEDULER_WEIGHT_ADMIN = env_number("SCHEDULER_WEIGHT_ADMIN", 10)

# ---- backends and gateway; seconds and bytes
BACKEND_FAIL_WINDOW = env_number("BACKEND_FAIL_WINDOW", 30)
BACKEND_STALE_AFTER = env_number("BACKEND_STALE_AFTER", 30)
BACKEND_MAX_ATTEMPTS = env_number("BACKEND_MAX_ATTEMPTS", 3)
BACKEND_POLL_INTERVAL = env_number("BACKEND_POLL_INTERVAL", 5)
BACKEND_CONNECT_TIMEOUT = env_number("BACKEND_CONNECT_TIMEOUT", 5)
BACKEND_FIRST_BYTE_TIMEOUT = env_number("BACKEND_FIRST_BYTE_TIMEOUT", 600)
BACKEND_CHUNK_TIMEOUT = env_number("BACKEND_CHUNK_TIMEOUT", 120)
# Certificates (PEM) of own authorities that backends may be signed by, besides the system's.
BACKEND_CA_FILE = env.str("BACKEND_CA_FILE", "")
TELEMETRY_INTERVAL = env_number("TELEMETRY_INTERVAL", 10)
TELEMETRY_RETENTION = env_number("TELEMETRY_RETENTION", 7)  # days
DECISION_RETENTION = env_number("DECISION_RETENTION", None)  # days; None: for ever
VLLM_MAX_NUM_SEQS = env_number("VLLM_MAX_NUM_SEQS", 16)
VLLM_MAX_QUEUE_DEPTH = env_number("VLLM_MAX_QUEUE_DEPTH", 128)
QUEUE_KEEPALIVE_AFTER = env_number("QUEUE_KEEPALIVE_AFTER", 10)
MAX_BODY_BYTES = env_number("MAX_BODY_BYTES", 32 * 1024 * 1024)
# Addresses or networks of proxies whose X-Forwarded-For and -Proto are believed.
TRUSTED_PROXIES = env.list("TRUSTED_PROXIES", default=[])
# Who may read /metrics without a key: addresses or networks.
METRICS_ALLOWED = env.list("METRICS_ALLOWED", default=["127.0.0.0/8", "::1"])
# Wrong keys a minute that one address may send until it is told to wait.
FAILED_KEYS_PER_MINUTE = env_number("FAILED_KEYS_PER_MINUTE", 30)
# Tokens that an answer is taken to need at most where its request sets no limit itself.
QUOTA_DEFAULT_OUTPUT_TOKENS = env_number("QUOTA_DEFAULT_OUTPUT_TOKENS", 1024)
SHUTDOWN_GRACE = env_number("SHUTDOWN_GRACE", 30)
# The user that Ollama's clients without a key count as; empty: they need a key.
OPEN_TO = env.str("OPEN_TO", "") or None
# Headers in which a trusted key's client may name its end user; the first one present counts.
END_USER_HEADERS = env.list(
    "END_USER_HEADERS",
    default=["X-OpenWebUI-User-Id", "X-OpenWebUI-User-Email", "X-OpenWebUI-User-Name"],
)
# The header in which it may mark a background call, and say what for.
BACKGROUND_HEADER = env.str("BACKGROUND_HEADER", "X-OpenWebUI-Task")

# ---- management API
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "rest_framework.authentication.SessionAuthentication",
        "accounts.authentication.ApiKeyAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAdminUser"],
    "DEFAULT_SCHEMA_CLASS": "mindrouter.api.schema.ApiSchema",
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "EXCEPTION_HANDLER": "mindrouter.api.problems.problem_response",
    "COERCE_DECIMAL_TO_STRING": False,
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "MindRouter management API",
    "VERSION": "1",
    "SCHEMA_PATH_PREFIX": "/api/admin",
    "COMPONENT_SPLIT_REQUEST": True,  # what is only taken or only shown is in one of the two
    "ENUM_NAME_OVERRIDES": {
        "EngineEnum": "backends.models.Engine",
        "BudgetPeriodEnum": "accounts.models.BudgetPeriod",
    },
    "SERVE_INCLUDE_SCHEMA": False,  # it need not describe itself
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "mindrouter.api.schema.describe_problems",
    ],
    "SWAGGER_UI_DIST": "SIDECAR",  # served from here, not by others
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
}

# ---- logs: one line each, to standard error (docs/operations.md)
LOG_FORMAT = env.str("LOG_FORMAT", "console")  # or "json"
LOG_REQUESTS = env.bool("LOG_REQUESTS", True)  # a line for each request, by the recorder
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"request_ids": {"()": "mindrouter.logs.RequestIds"}},
    "formatters": {
        "console": {"format": "{asctime} {levelname} {name}: {tag}{message}", "style": "{"},
        "json": {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "format": "{levelname}{name}{message}",
            "style": "{",
            "rename_fields": {"levelname": "level", "name": "logger"},
            "timestamp": "time",
            "reserved_attrs": [*RESERVED_ATTRS, "tag"],
        },
    },
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "json" if LOG_FORMAT == "json" else "console",  # a check tells of others
            "filters": ["request_ids"],
        }
    },
    "loggers": {
        # It writes each address that it asks, and those of webhooks may be secrets.
        "httpx": {"level": "WARNING"},
        # It warns of what clients do wrong, which they are told themselves.
        "python_multipart": {"level": "ERROR"},
    },
    "root": {"handlers": ["stderr"], "level": env.str("LOG_LEVEL", "INFO")},
}

UNFOLD = {
    "SITE_TITLE": "MindRouter",
    "SITE_HEADER": "MindRouter",
    "SITE_SUBHEADER": "fair shares of an LLM cluster",
    "SITE_SYMBOL": "hub",
    "SITE_FAVICONS": [
        {
            "rel": "icon",
            "type": "image/svg+xml",
            "href": f"/{STATIC_URL.strip('/')}/mindrouter/icon.svg",
        }
    ],
    "SITE_URL": None,  # there is no other site to return to
    "SHOW_HISTORY": True,
    "SIDEBAR": {"navigation": "mindrouter.site.navigation"},
    "STYLES": ["mindrouter.site.stylesheet"],
    "SCRIPTS": ["mindrouter.site.zone_script"],
    "COLORS": {
        "primary": {
            "50": "oklch(97% .014 254.604)",
            "100": "oklch(93.2% .032 255.585)",
            "200": "oklch(88.2% .059 254.128)",
            "300": "oklch(80.9% .105 251.813)",
            "400": "oklch(70.7% .165 254.624)",
            "500": "oklch(62.3% .214 259.815)",
            "600": "oklch(54.6% .245 262.881)",
            "700": "oklch(48.8% .243 264.376)",
            "800": "oklch(42.4% .199 265.638)",
            "900": "oklch(37.9% .146 265.522)",
            "950": "oklch(28.2% .091 267.935)",
        }
    },
}
