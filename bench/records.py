"""How records get into PostgreSQL, and how the table of decisions is best indexed:

    python -m bench.records [--rows 200000] [--batch 500]

On a PostgreSQL server of its own. First what a row costs: CPU of this process and of the server's
own, by the kernel's count, which is sound on a busy machine; the time is told, too. Then the same
rows in five forms of the table, with what the pages, the API and the worker ask of each: the time
and the pages of 8 KiB that it reads, which a machine whose memory is too small takes from its disk.
Twice: while the newest day is as it was written, and after VACUUM, before which no index answers
alone.
"""

# ruff: noqa: S608, SLF001  only names of this file are put into SQL; the ways in are private

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DAYS = 20
BTREES = ("user", "model_requested", "selected_backend", "outcome")
# What an index would have to hold to answer alone, without the table. Not the log's lists.
COVERED = {
    "arrived_at": 'id, user_id, key_id, "group", model_served, selected_backend_id, reason, '
    "queued_at, dispatched_at, ended_at, charged_tokens",
    "user": "id, user_id, request_id, wait_reason, queued_at, dispatched_at, ended_at, "
    "charged_tokens",
    "outcome": "id, reason",
}
_NEWEST = "ORDER BY arrived_at DESC, id DESC LIMIT"
_HOUR = "arrived_at >= {day} AND arrived_at < {day} + interval '1 hour'"
_ONE = "\"user\" = 'user-7'"
_WEEK = "arrived_at >= {day} - interval '6 days'"
QUERIES = {
    "the log's first page": f"SELECT {{log}} FROM form {_NEWEST} 50",
    "one user's first page": f"SELECT {{log}} FROM form WHERE {_ONE} {_NEWEST} 50",
    "the API's first page": f"SELECT {{api}} FROM form {_NEWEST} 101",
    "one record": "SELECT * FROM form WHERE request_id = '{id}'",
    "count of the last day": "SELECT count(*) FROM "
    "(SELECT id FROM form WHERE arrived_at >= {day} LIMIT 5000) AS found",
    "count of one user": f"SELECT count(*) FROM (SELECT id FROM form WHERE {_ONE} LIMIT 5000) "
    "AS found",
    "sums of the last day": "SELECT sum(charged_tokens) FROM form WHERE arrived_at >= {day}",
    "sums of an hour": f"SELECT sum(charged_tokens) FROM form WHERE {_HOUR}",
    "sums of an hour by group": 'SELECT "group", sum(charged_tokens) FROM form '
    f"WHERE {_HOUR} AND NOT charged_tokens = 0 GROUP BY 1",
    "one user's sum of a week": f"SELECT sum(charged_tokens) FROM form WHERE {_ONE} AND {_WEEK}",
    "one user's waits of a week": "SELECT request_id, wait_reason, queued_at, dispatched_at, "
    f"ended_at FROM form WHERE {_ONE} AND user_id = 7 AND {_WEEK} AND queued_at IS NOT NULL "
    f"{_NEWEST} 1000",
    "an hour's refusals": "SELECT reason, count(id) FROM form "
    f"WHERE outcome = 'refused' AND {_HOUR} GROUP BY 1",
    "what ran in an hour": 'SELECT arrived_at, user_id, "group", key_id, model_served, '
    f"selected_backend_id, dispatched_at, ended_at FROM form WHERE {_HOUR} "
    "AND ended_at > {day} AND selected_backend_id IN (1)",
    "what a replay takes": "SELECT count(*) FROM form WHERE (queued_at IS NOT NULL "
    "OR reason IN ('queue_full')) AND arrived_at >= {day} AND user_id IS NOT NULL",
    "the oldest 1,000": "SELECT id FROM form WHERE arrived_at < {oldest} "
    "ORDER BY arrived_at LIMIT 1000",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=500)
    arguments = parser.parse_args()
    from tests.scheduler.postgres import postgresql

    with (
        tempfile.TemporaryDirectory(prefix="mindrouter-records-") as folder,
        postgresql() as server,
    ):
        os.environ |= {"DATABASE_URL": server.url, "MINDROUTER_DATA": folder}
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mindrouter.settings")
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        compare_ways(arguments.batch)
        compare_forms(arguments.rows)
        from django.db import connections

        connections.close_all()


# ---- ways in


def entries(first: int, count: int) -> Iterator[Any]:
    """Records as the recorder reads them, spread evenly over ``DAYS``, in order."""
    from bench.spool import record
    from scheduler.loading import read

    begin = time.time() - DAYS * 86400
    chance = random.Random(first)
    for number in range(first, first + count):
        one = record(number)
        one.user = f"user-{chance.randrange(500)}"
        if chance.random() < 0.1:
            one.outcome, one.reason = "refused", "queue_full"
        one.arrived_at = begin + DAYS * 86400 * (number - first) / count
        yield read(msgspec.json.encode(one))


def compare_ways(batch: int) -> None:
    """What each way costs a row; every one in a transaction for each batch."""
    from scheduler.models import Decision

    ways = {"bulk_create": _bulk_create, "executemany": _executemany, "COPY": _copy}
    ways["COPY, then INSERT … SELECT"] = _copy_by_way_of_another
    print(f"{'':30}{'µs CPU here':>14}{'µs CPU server':>16}{'rows/s':>10}")
    for place, (name, way) in enumerate(ways.items()):
        rows = list(entries(place * 1_000_000, 10_000))
        Decision.objects.all().delete()
        here, there, seconds = _cost(way, rows, batch)
        count = len(rows)
        print(
            f"{name:30}{here / count * 1e6:14.0f}{there / count * 1e6:16.0f}{count / seconds:10.0f}"
        )


def _cost(
    way: Callable[[list[Any]], None], rows: list[Any], batch: int
) -> tuple[float, float, float]:
    """CPU seconds of this process and of the connection's server, and seconds."""
    from django.db import connection, transaction

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]
    here, there, began = time.process_time(), _cpu_of(pid), time.perf_counter()
    for start in range(0, len(rows), batch):
        with transaction.atomic():
            way(rows[start : start + batch])
    return (
        time.process_time() - here,
        _cpu_of(pid) - there,
        time.perf_counter() - began,
    )


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _bulk_create(batch: list[Any]) -> None:
    from django.db import models

    from scheduler import loading
    from scheduler.models import Decision

    columns = loading._COLUMNS
    Decision.objects.bulk_create(
        [
            Decision(
                **{
                    column.attname: msgspec.json.decode(value)
                    if isinstance(column, models.JSONField)
                    else value
                    for column, value in zip(columns, one.row, strict=True)
                }
            )
            for one in batch
        ],
        ignore_conflicts=True,
    )


def _executemany(batch: list[Any]) -> None:
    from scheduler import loading

    loading._insert_many([one.row for one in batch])


def _copy(batch: list[Any]) -> None:
    from scheduler import loading

    loading._copy([one.row for one in batch])


def _copy_by_way_of_another(batch: list[Any]) -> None:
    from django.db import connection

    from scheduler import loading

    table, names = loading._table_and_columns()
    with connection.cursor() as cursor:
        cursor.execute(
            f"CREATE TEMP TABLE incoming ON COMMIT DROP AS SELECT {names} FROM {table} LIMIT 0"
        )
        with cursor.copy(f"COPY incoming ({names}) FROM STDIN") as copy:
            for one in batch:
                copy.write_row(one.row)
        cursor.execute(
            f"INSERT INTO {table} ({names}) SELECT {names} FROM incoming "
            "ON CONFLICT (request_id) DO NOTHING"
        )


# ---- forms of the table


def compare_forms(count: int) -> None:
    """B-trees as the product has them, two kinds of covering ones, BRIN, and partitions by day."""
    from django.db import connection

    from scheduler.models import Decision

    Decision.objects.all().delete()
    for start in range(0, count, 10_000):
        _copy(list(entries(start, 10_000)))
    forms = {
        "B-trees": _btree,
        "covering": _covering,
        "covering the log's list": _covering_the_list,
        "BRIN": _brin,
        "partitions": _partitions,
    }
    with connection.cursor() as cursor:
        # Only where it is said here: what a server does by itself falls on one form or another.
        cursor.execute("ALTER SYSTEM SET autovacuum = off")
        cursor.execute("ALTER SYSTEM SET max_wal_size = '8GB'")
        cursor.execute("SELECT pg_reload_conf()")
        # ``entries`` spreads each part over all days; a log is in the order of arrival.
        cursor.execute(f"CREATE TABLE source AS SELECT * FROM {_TABLE} ORDER BY arrived_at")
        cursor.execute(f"TRUNCATE {_TABLE}")
        cursor.execute("VACUUM ANALYZE source")  # or the first form pays for reading it first
        for name, create in forms.items():
            create(cursor)
            cursor.execute("CHECKPOINT")
            _report(cursor, name, count)
            cursor.execute("DROP TABLE form")


_TABLE = "scheduler_decision"


def _table(cursor: Any) -> None:
    cursor.execute("CREATE TABLE form (LIKE source, PRIMARY KEY (id), UNIQUE (request_id))")


def _composite(cursor: Any, included: Mapping[str, str] = MappingProxyType({})) -> None:
    for column in BTREES:
        _index(cursor, f'"{column}", arrived_at DESC', included.get(column))
    _index(cursor, "client_request_id")


def _index(cursor: Any, keys: str, included: str | None = None) -> None:
    cursor.execute(f"CREATE INDEX ON form ({keys})" + (f" INCLUDE ({included})" * bool(included)))


def _btree(cursor: Any) -> None:
    _table(cursor)
    _index(cursor, "arrived_at")
    _composite(cursor)


def _covering(cursor: Any) -> None:
    _table(cursor)
    _index(cursor, "arrived_at", COVERED["arrived_at"])
    _composite(cursor, COVERED)


def _covering_the_list(cursor: Any) -> None:
    """Every index that the log's list is filtered or ordered by holds all that it shows."""
    from scheduler.admin import LIST_COLUMNS

    shown = {
        keyed: _names(["id", *(one for one in LIST_COLUMNS if one not in (keyed, "arrived_at"))])
        for keyed in ("arrived_at", *BTREES)
    }
    _table(cursor)
    _index(cursor, "arrived_at", shown["arrived_at"])
    _composite(cursor, shown)


def _brin(cursor: Any) -> None:
    _table(cursor)
    cursor.execute("CREATE INDEX ON form USING brin (arrived_at)")
    _composite(cursor)


def _partitions(cursor: Any) -> None:
    """A unique request id alone is not to be had: the key has to hold the day's column as well."""
    cursor.execute(
        "CREATE TABLE form (LIKE source, PRIMARY KEY (id, arrived_at), "
        "UNIQUE (request_id, arrived_at)) PARTITION BY RANGE (arrived_at)"
    )
    cursor.execute(
        "SELECT min(arrived_at)::date, max(arrived_at)::date - min(arrived_at)::date FROM source"
    )
    first, days = cursor.fetchone()
    for day in range(days + 1):
        cursor.execute(
            f"CREATE TABLE form_{day} PARTITION OF form FOR VALUES "
            f"FROM (date '{first}' + {day}) TO (date '{first}' + {day + 1})"
        )
    _index(cursor, "arrived_at")
    _composite(cursor)


def _names(columns: Iterable[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


def _report(cursor: Any, name: str, count: int) -> None:
    known = _values(cursor)
    before, log_before = _filled(cursor, f"arrived_at < {known['day']}")
    cursor.execute("VACUUM ANALYZE form")
    newest, log_of_newest = _filled(cursor, f"arrived_at >= {known['day']}")
    cpu, log = before + newest, log_before + log_of_newest
    cursor.execute("ANALYZE form")
    written = _answers(cursor, known)
    cursor.execute("VACUUM ANALYZE form")
    vacuumed = _answers(cursor, known)
    cursor.execute(
        "SELECT sum(pg_table_size(relid))::bigint, sum(pg_indexes_size(relid))::bigint "
        "FROM pg_stat_user_tables WHERE relname = 'form' OR relname LIKE 'form\\_%'"
    )
    table, indexes = cursor.fetchone()
    print(
        f"\n{name}: {cpu / count * 1e6:.1f} µs CPU and {log / count:.0f} bytes of log (WAL) a row, "
        f"table {table >> 20} MiB, indexes {indexes >> 20} MiB"
    )
    print(f"  {'':26}{'as written':>24}{'vacuumed':>24}")
    for question in QUERIES:
        print(f"  {question:26}{written[question]:>24}{vacuumed[question]:>24}")
    began = time.perf_counter()
    if name == "partitions":
        cursor.execute("DROP TABLE form_0")
    else:
        cursor.execute(f"DELETE FROM form WHERE arrived_at < {known['oldest']}")
    print(f"  {'deleting the oldest day':26}{(time.perf_counter() - began) * 1e3:48.2f} ms")


def _values(cursor: Any) -> dict[str, str]:
    """What the questions ask for; ``day``: where the newest one begins, ``oldest``: its end."""
    from scheduler.admin import LIST_COLUMNS
    from scheduler.serializers import DecisionSerializer

    cursor.execute(
        "SELECT max(arrived_at) - interval '1 day', min(arrived_at) + interval '1 day', "
        "max(request_id) FROM source"
    )
    day, oldest, request_id = cursor.fetchone()
    return {
        "day": f"timestamptz '{day}'",
        "oldest": f"timestamptz '{oldest}'",
        "id": request_id,
        "log": _names(["id", *LIST_COLUMNS]),
        "api": _names(["id", *DecisionSerializer.Meta.fields]),
    }


def _filled(cursor: Any, which: str) -> tuple[float, int]:
    """CPU seconds of the server that these rows took, and bytes of its write-ahead log."""
    cursor.execute("SELECT pg_backend_pid(), pg_current_wal_insert_lsn()")
    pid, place = cursor.fetchone()
    before = _cpu_of(pid)
    cursor.execute(f"INSERT INTO form SELECT * FROM source WHERE {which}")
    cpu = _cpu_of(pid) - before
    cursor.execute(f"SELECT (pg_current_wal_insert_lsn() - '{place}')::bigint")
    return cpu, cursor.fetchone()[0]


def _answers(cursor: Any, known: Mapping[str, str]) -> dict[str, str]:
    return {
        question: _cost_of_query(cursor, template.format(**known))
        for question, template in QUERIES.items()
    }


def _cost_of_query(cursor: Any, query: str) -> str:
    """Time, the median of nine, as the server counts planning and execution; and pages.

    A star: an index answered alone, as far as VACUUM has come.
    """
    times = []
    for _ in range(9):
        cursor.execute("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + query)
        found = cursor.fetchone()[0][0]
        times.append(found["Planning Time"] + found["Execution Time"])
    plan = found["Plan"]
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    star = "*" if "Index Only Scan" in str(plan) else " "
    return f"{sorted(times)[4]:.2f} ms {pages:5} p.{star}"


if __name__ == "__main__":
    main()
