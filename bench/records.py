"""How records get into PostgreSQL, and how the table of decisions is best indexed:

    python -m bench.records [--rows 200000] [--batch 500]

On a PostgreSQL server of its own. First what a row costs: CPU of this process and of the server's
own, by the kernel's count, which is sound on a busy machine; the time is told, too. Then the same
rows in three forms of the table, with what the pages and retention ask of each.
"""

# ruff: noqa: S608, SLF001  only names of this file are put into SQL; the ways in are private

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DAYS = 20
BTREES = ("user", "model_requested", "selected_backend", "outcome")
QUERIES = {
    "the log's first page": "SELECT * FROM {t} ORDER BY arrived_at DESC, id DESC LIMIT 50",
    "one user's first page": "SELECT * FROM {t} WHERE \"user\" = 'user-7' "
    "ORDER BY arrived_at DESC, id DESC LIMIT 50",
    "sums of the last day": "SELECT sum(charged_tokens) FROM {t} WHERE arrived_at >= {day}",
    "sums of an hour": "SELECT sum(charged_tokens) FROM {t} "
    "WHERE arrived_at >= {day} AND arrived_at < {day} + interval '1 hour'",
    "one record": "SELECT * FROM {t} WHERE request_id = '{id}'",
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
    for number in range(first, first + count):
        one = record(number)
        one.user = f"user-{number % 500}"
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
    """Indexes as the product has them; BRIN for the time; partitions by day."""
    from django.db import connection

    from scheduler.models import Decision

    Decision.objects.all().delete()
    for start in range(0, count, 10_000):
        _copy(list(entries(start, 10_000)))
    with connection.cursor() as cursor:
        # ``entries`` spreads each part over all days; a log is in the order of arrival.
        cursor.execute(f"CREATE TABLE source AS SELECT * FROM {_TABLE} ORDER BY arrived_at")
        cursor.execute(f"TRUNCATE {_TABLE}")
        for name, create in (("btree", _btree), ("BRIN", _brin), ("partitions", _partitions)):
            create(cursor)
            _report(cursor, name, count)
            cursor.execute("DROP TABLE form")


_TABLE = "scheduler_decision"


def _composite(cursor: Any) -> None:
    for column in BTREES:
        cursor.execute(f'CREATE INDEX ON form ("{column}", arrived_at DESC)')
    cursor.execute("CREATE INDEX ON form (client_request_id)")


def _btree(cursor: Any) -> None:
    cursor.execute("CREATE TABLE form (LIKE source, PRIMARY KEY (id), UNIQUE (request_id))")
    cursor.execute("CREATE INDEX by_time ON form (arrived_at)")
    _composite(cursor)


def _brin(cursor: Any) -> None:
    cursor.execute("CREATE TABLE form (LIKE source, PRIMARY KEY (id), UNIQUE (request_id))")
    cursor.execute("CREATE INDEX by_time ON form USING brin (arrived_at)")
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
    cursor.execute("CREATE INDEX by_time ON form (arrived_at)")
    _composite(cursor)


def _report(cursor: Any, name: str, count: int) -> None:
    cursor.execute("SELECT pg_backend_pid()")
    pid = cursor.fetchone()[0]
    cpu = _cpu_of(pid)
    cursor.execute("INSERT INTO form SELECT * FROM source")
    cpu = _cpu_of(pid) - cpu
    cursor.execute("VACUUM ANALYZE form")
    cursor.execute(
        "SELECT sum(pg_table_size(relid))::bigint, sum(pg_indexes_size(relid))::bigint "
        "FROM pg_stat_user_tables WHERE relname = 'form' OR relname LIKE 'form\\_%'"
    )
    table, indexes = cursor.fetchone()
    print(
        f"\n{name}: {cpu / count * 1e6:.0f} µs CPU a row, table {table >> 20} MiB, "
        f"indexes {indexes >> 20} MiB"
    )
    for question, template in QUERIES.items():
        day = "(SELECT max(arrived_at) - interval '1 day' FROM source)"
        cursor.execute(f"SELECT {day}, (SELECT request_id FROM source LIMIT 1)")
        since, request_id = cursor.fetchone()
        query = template.format(t="form", day=f"timestamptz '{since}'", id=request_id)
        print(f"  {question:26}{_median_ms(cursor, query):10.2f} ms")
    oldest = "(SELECT min(arrived_at) + interval '1 day' FROM source)"
    began = time.perf_counter()
    if name == "partitions":
        cursor.execute("DROP TABLE form_0")
    else:
        cursor.execute(f"DELETE FROM form WHERE arrived_at < {oldest}")
    print(f"  {'deleting the oldest day':26}{(time.perf_counter() - began) * 1e3:10.2f} ms")


def _median_ms(cursor: Any, query: str) -> float:
    """Of five executions, as the server counts them: planning and execution."""
    times = []
    for _ in range(5):
        cursor.execute("EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + query)
        found = cursor.fetchone()[0][0]
        times.append(found["Planning Time"] + found["Execution Time"])
    return sorted(times)[2]


if __name__ == "__main__":
    main()
