"""``manage.py backends``: every backend, its state and what runs there."""

from __future__ import annotations

from typing import Any

from mindrouter.cli.command import ApiCommand
from mindrouter.cli.management import Management


class Command(ApiCommand):
    help = "Backends and what runs there (Slurm's sinfo)."

    def ask(self, api: Management, options: dict[str, Any]) -> Any:
        live = {one["id"]: one for one in api.get("scheduler/stats")["backends"]}
        return [{**one, "live": live.get(one["id"])} for one in api.all("backends")]

    def show(self, found: Any, options: dict[str, Any]) -> None:
        self.table(
            ("<backend", "<state", "running", "slots", "waiting", "<engine", "<address", "<error"),
            [
                (
                    one["name"],
                    "paused" if one["paused"] else (one["live"] or one)["state"],
                    one["live"] and one["live"]["in_flight"],
                    one["max_concurrent"],
                    one["live"] and one["live"]["queued"],
                    (one["status"] or {}).get("detected_engine") or one["engine"],
                    one["base_url"],
                    (one["status"] or {}).get("error") or "",
                )
                for one in found
            ],
        )
