"""The rules and the dashboard: they load, speak of metrics that exist, and are documented."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from django.conf import settings

from scheduler import pulse
from scheduler.counting import COUNTS_FILE, Counts, save_counts
from scheduler.spool import Attempt
from tests.operations.test_metrics import record, scraped
from tests.running import RunningRouter, until

DEPLOY = settings.BASE_DIR / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
_METRIC = re.compile(r"\bmindrouter_[a-z0-9_]+")


def targets() -> list[dict[str, Any]]:
    return [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


async def test_every_metric_of_the_rules_and_the_dashboard_exists(
    router: RunningRouter, backend: int, settings: Any
) -> None:
    counts = Counts()
    served = record(wait_reason="none", attempts=[Attempt(backend="a", status=200)])
    counts.add([served, record(reason="quota_exceeded", outcome="refused")])
    save_counts(settings.STATE_DIR / COUNTS_FILE, counts)
    pulse.write_recorder(pulse.RecorderPulse(at=0, caught_up_at=0, offsets={}))
    await until(lambda: bool(pulse.pulses()), 60.0)
    assert (await router.chat()).status_code == 200  # else there is nothing to compare
    there = {name for name, _ in await scraped(router)}
    # Of what can be seen only while requests run or backends are polled.
    there |= {"mindrouter_jain_index", "mindrouter_backend_telemetry_age_seconds"}
    there |= {"mindrouter_model_queued"}
    text = [rule["expr"] for rule in RULES] + [target["expr"] for target in targets()]
    used = {name for one in text for name in _METRIC.findall(one)}
    assert used - there == set()
    assert len(used) > 20


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    text = (settings.BASE_DIR / "docs" / "alerts.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n\n(.+?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert len(sections[rule["alert"]]) > 80


def test_the_dashboards_panels_are_whole_and_lie_apart() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] in ("row", "timeseries")
        assert panel["type"] == "row" or panel["targets"]
    assert all(one["expr"] and one["datasource"]["uid"] == "${datasource}" for one in targets())


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    return found


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    command = [promtool(), "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RULES)} rules found" in checked.stdout


async def test_promtool_finds_nothing_wrong_with_the_metrics(
    router: RunningRouter, backend: int, settings: Any
) -> None:
    counts = Counts()
    counts.add([record(wait_reason="none")])
    save_counts(settings.STATE_DIR / COUNTS_FILE, counts)
    text = (await router.client.get("/metrics", headers={"Authorization": ""})).content
    checked = subprocess.run(  # noqa: ASYNC221  it is short
        [promtool(), "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
