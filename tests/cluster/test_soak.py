"""What the soak of a cluster takes for documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import soak_cluster
from bench.soak_cluster import is_documented
from scheduler import runtime
from scheduler.bus import gateway, redis


@pytest.mark.parametrize(
    ("asked", "answered", "returned", "documented"),
    [
        pytest.param(0.0, 2.85, 5.0, True, id="new, when nobody has come"),
        pytest.param(0.0, 2.85, 2.6, True, id="new, a scheduler came a moment too late"),
        pytest.param(4.0, 4.01, 5.0, True, id="new, at once, as nobody has been there for long"),
        pytest.param(0.0, 0.05, 5.0, False, id="new, at once, as the leader has just died"),
        pytest.param(0.0, 2.4, 5.0, False, id="new, before anybody had to be given up"),
        pytest.param(0.0, 4.1, 9.0, False, id="new, later than within 3 s"),
        pytest.param(0.0, 2.85, 2.4, False, id="new, the absence was short"),
        pytest.param(3.0, 6.1, 5.0, False, id="new, the scheduler had long been back"),
        pytest.param(5.1, 5.2, 5.0, False, id="new, after its return"),
        pytest.param(-2.0, 2.9, 5.0, False, id="one that waits, as if it were new"),
        pytest.param(-2.0, 9.4, 12.0, False, id="one that waits, a little early"),
        pytest.param(-2.0, 10.1, 12.0, True, id="one that waits, after 10 s"),
        pytest.param(-0.1, 10.1, 12.0, True, id="one that waits, let in just before"),
    ],
)
def test_a_refusal_is_documented_only_as_early_and_as_late_as_the_document_says(
    asked: float, answered: float, returned: float, *, documented: bool
) -> None:
    assert is_documented(100 + asked, 100 + answered, 100.0, 100 + returned) is documented


def test_the_soak_reckons_with_what_the_gateways_and_the_checkpoints_keep_to() -> None:
    longest_admission = gateway.ADMISSION_SECONDS + gateway.SWEEP_SECONDS
    assert longest_admission < soak_cluster.REFUSED_SECONDS == gateway.OUT_OF_TOUCH_SECONDS
    assert soak_cluster.KEPT_SECONDS == gateway.GIVE_UP_SECONDS
    assert soak_cluster.BEAT_SECONDS == redis.BEAT_SECONDS
    # One that takes up to a tenth of a second does not put off the next.
    longest = runtime.CHECKPOINT_SECONDS / runtime.CHECKPOINT_PAUSE
    unsaved = runtime.CHECKPOINT_SECONDS + 2 * longest
    assert unsaved + soak_cluster.UNTOLD_SECONDS == soak_cluster.UNSAVED_SECONDS
    assert f"the last {unsaved:g} s at most" in Path("docs/cluster.md").read_text()
