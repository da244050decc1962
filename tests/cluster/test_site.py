"""Whom the site of the tests takes for its leader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.site import ClusterSite
from tests.scheduler.redis import RedisServer


@pytest.mark.parametrize("epochs", [(9, 10), (10, 9), (99, 100)])
def test_of_two_that_say_they_lead_the_one_of_the_higher_epoch_does(
    epochs: tuple[int, int], tmp_path: Path
) -> None:
    site = ClusterSite(tmp_path, RedisServer("", tmp_path), "postgres://nowhere")
    for process, epoch in zip(site.schedulers, epochs, strict=True):
        line = f"2026-01-01 00:00:00,000 INFO scheduler: Leading in epoch {epoch}\n"
        (tmp_path / f"{process.name}.log").write_text(line)
    assert site.leader() is site.schedulers[epochs.index(max(epochs))]
