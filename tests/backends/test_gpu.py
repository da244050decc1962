"""What a node's exporter or sidecar says about its GPUs. Pure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends.engines.gpu import Gpu, Memory, assigned, combined, parse_gpus
from backends.engines.replies import Reply
from tests.stubs.engines import DCGM_METRICS, GPU_INFO


def page(*lines: str) -> Reply:
    return Reply(200, "\n".join(lines).encode())


def test_a_dcgm_exporter_tells_mebibytes_and_percent() -> None:
    gpus = parse_gpus(Reply(200, DCGM_METRICS.encode()))
    assert gpus == (
        Gpu(
            index="0",
            uuid="GPU-a",
            name="NVIDIA A100",
            memory_total_mib=40480.0,
            memory_used_mib=20480.0,
            memory_free_mib=20000.0,
            utilization=0.9,
        ),
        Gpu(
            index="1",
            uuid="GPU-b",
            name="NVIDIA A100",
            memory_total_mib=40480.0,
            memory_used_mib=1024.0,
            memory_free_mib=39456.0,
            utilization=0.1,
        ),
    )
    assert combined(gpus) == Memory(total_mib=80960.0, free_mib=59456.0, utilization=0.5)


def test_reserved_memory_is_part_of_the_total() -> None:
    gpus = parse_gpus(
        page(
            'DCGM_FI_DEV_FB_USED{gpu="0",UUID="a"} 10',
            'DCGM_FI_DEV_FB_FREE{gpu="0",UUID="a"} 20',
            'DCGM_FI_DEV_FB_RESERVED{gpu="0",UUID="a"} 5',
        )
    )
    assert gpus is not None
    assert gpus[0].memory_total_mib == 35.0


def test_slices_of_a_card_are_not_counted_beside_it() -> None:
    gpus = parse_gpus(
        page(
            'DCGM_FI_DEV_FB_USED{gpu="0",UUID="a"} 10',
            'DCGM_FI_DEV_FB_FREE{gpu="0",UUID="a"} 20',
            'DCGM_FI_DEV_FB_FREE{gpu="0",UUID="a",GPU_I_ID="1",GPU_I_PROFILE="1g.5gb"} 9',
        )
    )
    assert gpus is not None
    assert combined(gpus).free_mib == 20.0


def test_a_sidecar_tells_gibibytes() -> None:
    gpus = parse_gpus(Reply(200, json.dumps(GPU_INFO).encode()))
    assert gpus is not None
    assert combined(gpus) == Memory(total_mib=81920.0, free_mib=59904.0, utilization=0.5)
    assert (gpus[1].name, gpus[1].memory_used_mib) == ("NVIDIA A100", 1536.0)


def test_what_one_board_does_not_tell_is_unknown_for_the_whole_node() -> None:
    told = Gpu(index="0", memory_total_mib=10.0, memory_free_mib=4.0, utilization=0.5)
    silent = Gpu(index="1", memory_total_mib=10.0)
    assert combined([told, silent]) == Memory(total_mib=20.0, free_mib=None, utilization=0.5)
    assert combined([]) == Memory()


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"{}", b"[]", b'{"gpus": 3}', b"DCGM_FI_DEV_FB_USED nonsense", b"\xff"]
)
def test_what_is_neither_form_tells_no_gpus(body: bytes) -> None:
    assert parse_gpus(Reply(200, body)) is None


def test_a_failed_answer_tells_no_gpus() -> None:
    assert parse_gpus(Reply(500, DCGM_METRICS.encode())) is None


@pytest.mark.parametrize("value", ["12", -1, None, True, [], 10**400])
def test_impossible_numbers_are_unknown(value: Any) -> None:
    body = {"gpus": [{"memory_total_gb": value, "memory_free_gb": 1, "utilization_gpu": 250}]}
    gpus = parse_gpus(Reply(200, json.dumps(body).encode()))
    assert gpus == (Gpu(index="0", memory_free_mib=1024.0),)


def test_temperature_and_power_are_told_in_degrees_and_watts() -> None:
    from_dcgm = parse_gpus(
        page(
            'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="a"} 41',
            'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="a"} 61.25',
        )
    )
    entry = {"index": 0, "temperature_gpu": 41, "power_draw_watts": 61.25}
    from_json = parse_gpus(Reply(200, json.dumps({"gpus": [entry]}).encode()))
    for found in (from_dcgm, from_json):
        assert found is not None
        assert (found[0].temperature_celsius, found[0].power_watts) == (41.0, 61.25)
        assert (found[0].memory_total_mib, found[0].utilization) == (None, None)


def test_a_backend_has_the_gpus_it_is_given() -> None:
    gpus = [Gpu(index=str(n), memory_total_mib=100.0 * (n + 1)) for n in range(3)]
    assert assigned(gpus, None) == gpus
    assert combined(assigned(gpus, [0, 2])).total_mib == 400.0
    assert assigned(gpus, [2, 0]) == [gpus[2], gpus[0]]


def test_a_gpu_that_the_node_does_not_tell_of_makes_the_sum_unknown() -> None:
    gpus = [Gpu(index="0", memory_total_mib=100.0)]
    assert combined(assigned(gpus, [0, 7])).total_mib is None
    assert combined(assigned(gpus, [7])).total_mib is None
