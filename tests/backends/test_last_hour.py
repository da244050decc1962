"""The curves of the last hour on the pages of nodes and backends."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from backends.admin.lasthour import curve
from backends.models import BackendSample, GpuSample, Node
from tests.backends.test_admin import browser_of
from tests.factories import make_admin, make_backend

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def browser() -> Client:
    return browser_of(make_admin())


def plain(response: Any) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", response.content.decode()))


def ago(seconds: float) -> datetime:
    return timezone.now() - timedelta(seconds=seconds)


def path_of(html: Any) -> str:
    found = re.search(r'd="([^"]*)"', str(html))
    assert found is not None
    return found[1]


def test_a_curve_is_interrupted_where_nothing_is_known(settings: Any) -> None:
    settings.TELEMETRY_INTERVAL = 10
    points = [(0.0, 0.0), (20.0, 100.0), (40.0, None), (60.0, 50.0), (80.0, 50.0), (3600.0, 0.0)]
    path = path_of(curve(points, 100.0, "use", "%"))
    assert path == "M0.0 27.0h0.5L1.0 1.0M3.0 14.0h0.5L4.0 14.0M180.0 27.0h0.5"


def test_a_curve_is_told_in_words_too() -> None:
    text = str(curve([(0.0, 10.0), (10.0, None), (20.0, 90.0), (30.0, 40.0)], 100.0, "use", "%"))
    assert "10 % to 90 %, last 40 %" in text
    assert 'aria-label="use in the last hour"' in text
    assert curve([(0.0, None)], 100.0, "use", "%") == "–"


def test_values_above_the_scale_stay_in_the_picture() -> None:
    assert path_of(curve([(0.0, 200.0)], 100.0, "use", "%")) == "M0.0 1.0h0.5"
    assert path_of(curve([(0.0, 0.0)], 0.0, "running", "")) == "M0.0 27.0h0.5"


def test_a_nodes_page_shows_the_last_hour_of_its_own_gpus(browser: Client) -> None:
    node, other = Node.objects.create(name="n"), Node.objects.create(name="o")
    for seconds, used in ((20.0, 1024.0), (10.0, 2048.0), (4000.0, 9999.0)):
        GpuSample.objects.create(
            node_id=node.pk,
            node="n",
            gpu="0",
            at=ago(seconds),
            memory_total_mib=40960.0,
            memory_used_mib=used,
        )
    GpuSample.objects.create(node_id=other.pk, node="o", gpu="7", at=ago(5.0), utilization=1.0)
    page = plain(browser.get(reverse("admin:backends_node_change", args=[node.pk])))
    assert "0 1,024 MiB to 2,048 MiB, last 2,048 MiB –" in page
    assert "9,999" not in page
    assert "100 %" not in page


def test_a_backends_page_shows_what_polls_said_of_it(browser: Client) -> None:
    backend = make_backend()
    for seconds, running in ((30.0, 2), (20.0, None), (10.0, 0)):
        BackendSample.objects.create(
            backend_id=backend.pk, backend=backend.name, at=ago(seconds), running=running
        )
    page = plain(browser.get(reverse("admin:backends_backend_change", args=[backend.pk])))
    assert "running 0 to 2, last 0" in page
    assert "KV cache 0" not in page
