"""How long each page takes, and how many queries, over a large database.

    python -m bench.pages [--decisions 1000000] [--users 2000] [--database postgresql] [--explain]

Makes a database of its own in a temporary folder (SQLite, or a PostgreSQL server of its own), fills
it by SQL, and asks for every page three times as a superuser; the median is printed. ``--explain``
adds the plan of each query that takes longer than ``SLOW_SECONDS``.
"""

# ruff: noqa: S608  only names and numbers of this file are put into SQL

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROUNDS = 3
SLOW_SECONDS = 0.1
GROUPS, BACKENDS, MODELS, DAYS = 20, 10, 8, 30
PAGES = {
    "overview": "/admin/",
    "overview, figures": "/admin/figures/",
    "overview, 24 h": "/admin/charts/?hours=24",
    "groups": "/admin/groups/",
    "queue": "/admin/queue/",
    "log": "/admin/scheduler/decision/",
    "log, one user": "/admin/scheduler/decision/?user=user-7",
    "log, refused": "/admin/scheduler/decision/?outcome=refused",
    "log, one model": "/admin/scheduler/decision/?model_requested=model-3",
    "log, one backend": "/admin/scheduler/decision/?selected_backend=gpu-3",
    "log, search by id": "/admin/scheduler/decision/?q=req-500",
    "log, nothing found": "/admin/scheduler/decision/?q=nobody-has-this",
    "log, page 50": "/admin/scheduler/decision/?p=50",
    "one decision": "/admin/decisions/req-500/",
    "reports, 7 days": "/admin/reports/",
    "reports, 30 days": "/admin/reports/?first={month_ago}",
    "reports, users.csv": "/admin/reports/users.csv",
    "what-if": "/admin/what-if/",
    "history": "/admin/history/",
    "users": "/admin/accounts/user/",
    "users, search": "/admin/accounts/user/?q=user-19",
    "keys": "/admin/accounts/apikey/",
    "backends": "/admin/backends/backend/",
    "api: decisions": "/api/admin/decisions",
    "api: decisions of a user": "/api/admin/decisions?user=user-7",
    "api: one decision": "/api/admin/decisions/req-500",
    "api: users": "/api/admin/users",
    "api: reports": "/api/admin/reports/groups",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=2_000)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite")
    parser.add_argument("--explain", action="store_true")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mindrouter-pages-"))
        os.environ["DATABASE_URL"] = f"sqlite:///{folder}/pages.sqlite3"
        if arguments.database == "postgresql":
            from tests.scheduler.postgres import postgresql

            os.environ["DATABASE_URL"] = stack.enter_context(postgresql()).url
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mindrouter.settings")
        import django

        django.setup()
        stack.callback(_close)
        started = time.monotonic()
        fill(arguments.decisions, arguments.users)
        print(f"{arguments.database}: filled in {time.monotonic() - started:.0f} s")
        measure(explain=arguments.explain)


def _close() -> None:
    from django.db import connections

    connections.close_all()


# ---- filling


def fill(decisions: int, users: int) -> None:
    """People, keys and backends through the models, the rest by SQL."""
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0)
    _people(users)
    with connection.cursor() as cursor:
        for statement in _statements(decisions, users, connection.vendor):
            cursor.execute(statement)
        cursor.execute("ANALYZE")


def _people(users: int) -> None:
    from accounts.models import ApiKey, Group, User, hash_key
    from backends.models import Backend, BackendModel

    groups = [
        Group.objects.create(name=f"group-{n}", scheduler_weight=1 + n % 4) for n in range(GROUPS)
    ]
    people = User.objects.bulk_create(
        User(username=f"user-{n}", group=groups[n % GROUPS]) for n in range(users)
    )
    ApiKey.objects.bulk_create(
        ApiKey(user=user, name="laptop", prefix="mr-000000", sha256=hash_key(user.username))
        for user in people
    )
    User.objects.create_superuser("root")
    for n in range(BACKENDS):
        backend = Backend.objects.create(name=f"gpu-{n}", base_url=f"http://127.0.0.1:{9000 + n}")
        BackendModel.objects.bulk_create(
            BackendModel(backend=backend, name=f"model-{m}") for m in range(MODELS)
        )


def _statements(decisions: int, users: int, vendor: str) -> list[str]:
    """Decisions of the last ``DAYS``, newest last, with their hourly totals and the samples of
    the shares. A few users do most; one request of 25 is refused."""
    begin = int(time.time()) - DAYS * 86400
    step = DAYS * 86400 / decisions
    sqlite = vendor == "sqlite"

    def at(seconds: str) -> str:
        if sqlite:
            return f"strftime('%Y-%m-%d %H:%M:%f', {begin} + {seconds}, 'unixepoch')"
        return f"to_timestamp({begin} + {seconds})"

    def hour(column: str) -> str:
        if sqlite:
            return f"strftime('%Y-%m-%d %H:00:00', {column})"
        return f"date_trunc('hour', {column})"

    numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i+1 FROM n WHERE i < {} - 1)"
    user = f"((i % 97) * (i % 89) * 7919 % {users})"
    sent = f"CASE WHEN i % 25 = 0 THEN NULL ELSE {at(f'i*{step} + i%13')} END"
    parts = '{"model_loaded": 100.0, "low_utilization": 20.0, "latency": 10.0}'
    values = {
        "request_id": "'req-' || i",
        "user_id": f"{user} + 1",
        "user": f"'user-' || {user}",
        "key_id": f"{user} + 1",
        "group": f"'group-' || ({user} % {GROUPS})",
        "model_requested": f"'model-' || (i % {MODELS})",
        "model_served": f"'model-' || (i % {MODELS})",
        "dialect": "'openai'",
        "endpoint": "'chat'",
        "status": "CASE WHEN i % 25 = 0 THEN 429 ELSE 200 END",
        "outcome": "CASE WHEN i % 25 = 0 THEN 'refused' ELSE 'completed' END",
        "reason": "CASE WHEN i % 25 = 0 THEN 'queue_full' ELSE '' END",
        "selected_backend_id": f"i % {BACKENDS} + 1",
        "selected_backend": f"'gpu-' || (i % {BACKENDS})",
        "candidate_backends": "'[1, 2, 3]'",
        "backend_names": """'{"1": "gpu-0", "2": "gpu-1", "3": "gpu-2"}'""",
        "scores": """'{"1": 130.0, "2": 90.0, "3": 70.0}'""",
        "score_parts": f"""'{{"1": {parts}, "2": {parts}, "3": {parts}}}'""",
        "selection_reason": "'score'",
        "wait_reason": "'others_ahead'",
        "served_ahead": """'{"group-1": [2, 400.0]}'""",
        "prompt_tokens": "i % 900",
        "completion_tokens": "i % 300",
        "charged_tokens": "i % 900 + i % 300",
        "arrived_at": at(f"i*{step}"),
        "queued_at": at(f"i*{step}"),
        "dispatched_at": sent,
        "ended_at": at(f"i*{step} + i%13 + 3"),
    }
    values = _plain_values(sqlite) | values
    names = ", ".join(f'"{name}"' for name in values)
    decision = (
        f"INSERT INTO scheduler_decision ({names}) {numbers.format(decisions)} "
        f"SELECT {', '.join(values.values())} FROM n"
    )
    zeros = (
        "cancelled, failed, aborted, cached_tokens, estimated_tokens, slow_no_backend, "
        "slow_own_backlog, slow_all_full, slow_cold_load, slow_slow_backend, slow_long_prompt"
    )
    usage = (
        'INSERT INTO scheduler_usagehour (hour, user_id, "group", key_id, model, requests, '
        "completed, refused, prompt_tokens, completion_tokens, charged_tokens, queued, "
        f"wait_seconds, service_seconds, slow_others_ahead, {zeros}) "
        f'SELECT {hour("arrived_at")}, user_id, "group", key_id, model_served, count(*), '
        "count(*), 0, sum(prompt_tokens), sum(completion_tokens), sum(charged_tokens), "
        f"count(*), 6.0, 3.0, 1, {', '.join('0' * len(zeros.split(',')))} FROM scheduler_decision "
        "GROUP BY 1, 2, 3, 4, 5"
    )
    samples = 360.0
    shares = [
        'INSERT INTO scheduler_sharehour (hour, "group", user_id, entitled, nominal) '
        f'SELECT hour, "group", 0, {samples} / {GROUPS}, {samples} / {GROUPS} '
        "FROM scheduler_usagehour GROUP BY 1, 2",
        'INSERT INTO scheduler_sharehour (hour, "group", user_id, entitled, nominal) '
        'SELECT hour, "group", user_id, 1.0, 0.0 FROM scheduler_usagehour GROUP BY 1, 2, 3',
    ]
    minutes = 7 * 1440
    moment = at(f"{(DAYS - 7) * 86400} + i*60")
    lines = [
        "INSERT INTO scheduler_clusterminute "
        f"(at, gap, gap_bound, queued, running, tokens_per_second) {numbers.format(minutes)} "
        f"SELECT {moment}, i % 500, 2000, i % 40, 30, 900 FROM n",
        'INSERT INTO scheduler_shareminute (at, "group", entitled, received, queued, running) '
        f"{numbers.format(minutes)} SELECT {moment}, 'group-' || g.j, 0.05, 0.05, 2, 2 FROM n, "
        f"(SELECT DISTINCT i % {GROUPS} AS j FROM n) g",
    ]
    return [decision, usage, *shares, *lines]


def _plain_values(sqlite: bool) -> dict[str, str]:
    """{column: an empty value, as SQL} of the decisions' columns that must have one."""
    from django.db import models

    from scheduler.models import Decision

    def empty(column: Any) -> str:
        match column:
            case models.JSONField():
                return "'{}'" if column.default is dict else "'[]'"
            case models.BooleanField():
                return "0" if sqlite else "false"
            case models.CharField() | models.TextField():
                return "''"
        return "0"

    return {c.name: empty(c) for c in Decision._meta.fields if not c.null and not c.primary_key}


# ---- asking


def measure(*, explain: bool) -> None:
    """Prints a line for each page."""
    from django.conf import settings
    from django.core.cache import cache
    from django.db import connection
    from django.test import Client
    from django.utils import timezone

    from accounts.models import User

    settings.ALLOWED_HOSTS = ["*"]
    client = Client()
    client.force_login(User.objects.get(username="root"))
    month_ago = timezone.localdate() - timezone.timedelta(days=DAYS - 1)
    print(f"{'page':28} {'ms':>7} {'queries':>8} {'KiB':>6}")
    for name, address in PAGES.items():
        times: list[float] = []
        for _ in range(ROUNDS):
            cache.clear()
            watch = Watch()
            started = time.perf_counter()
            with connection.execute_wrapper(watch):
                answer = client.get(address.format(month_ago=month_ago))
                body = answer.content
            times.append(time.perf_counter() - started)
            if answer.status_code != 200:
                print(f"{name:28} answers {answer.status_code}")
        print(
            f"{name:28} {statistics.median(times) * 1000:7.0f} {watch.count:8d} "
            f"{len(body) / 1024:6.0f}",
            flush=True,
        )
        if explain:
            watch.explain()


class Watch:
    """Counts queries and keeps the slow ones."""

    def __init__(self) -> None:
        self.count = 0
        self._slow: list[tuple[float, str, Any]] = []

    def __call__(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        self.count += 1
        started = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            seconds = time.perf_counter() - started
            if seconds > SLOW_SECONDS and not many:
                self._slow.append((seconds, sql, params))

    def explain(self) -> None:
        """Prints the plans."""
        from django.db import connection

        prefix = "EXPLAIN QUERY PLAN " if connection.vendor == "sqlite" else "EXPLAIN "
        for seconds, sql, params in self._slow:
            print(f"    {seconds * 1000:.0f} ms: {sql[:300]}")
            with connection.cursor() as cursor:
                cursor.execute(prefix + sql, params)
                for row in cursor.fetchall()[:8]:
                    print("       ", row[-1])


if __name__ == "__main__":
    main()
