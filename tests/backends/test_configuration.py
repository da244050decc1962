"""``manage.py apply`` and ``export`` on nodes, GPUs and pauses."""

from __future__ import annotations

import pytest
import yaml

from backends.models import Backend, Node
from scheduler.configuration.applying import apply_text
from scheduler.configuration.document import Invalid
from scheduler.configuration.exporting import export_text
from tests.factories import make_backend

pytestmark = pytest.mark.django_db


def test_a_backend_is_given_gpus_and_paused_by_a_file() -> None:
    changes = apply_text(
        """
        nodes: [{name: gpu-1, telemetry_url: "http://gpu-1:8007/gpu-info", telemetry_key: sk-1}]
        backends:
          - {name: a, base_url: "http://gpu-1:8000", node: gpu-1, gpu_indexes: [0, 2], paused: true}
        """
    )
    assert changes.lines == ["+ node gpu-1", "+ backend a"]
    backend = Backend.objects.get()
    assert (backend.node, backend.gpu_indexes, backend.paused) == (Node.objects.get(), [0, 2], True)
    changes = apply_text("backends: [{name: a, gpu_indexes: null, paused: false}]")
    assert changes.lines == ["~ backend a: paused true → false, gpu_indexes [0, 2] → null"]
    backend.refresh_from_db()
    assert (backend.gpu_indexes, backend.paused) == (None, False)


def test_what_is_exported_applies_as_no_change() -> None:
    make_backend("a", gpu_indexes=[1], paused=True, node=Node.objects.create(name="n"))
    text = export_text()
    (entry,) = yaml.safe_load(text)["backends"]
    assert (entry["gpu_indexes"], entry["paused"], entry["node"]) == ([1], True, "n")
    assert apply_text(text).lines == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0", "must be a list of whole numbers, not the number 0"),
        ("[a]", "must be a whole number, not the text 'a'"),
        ("[true]", "must be a whole number, not true"),
        ("[]", "Give at least one GPU"),
        ("[1, 1]", "once only"),
        ("[-1]", "from 0 to 255"),
    ],
)
def test_gpus_that_make_no_sense_are_refused(value: str, why: str) -> None:
    with pytest.raises(Invalid) as refused:
        apply_text(f'backends: [{{name: a, base_url: "http://x", gpu_indexes: {value}}}]')
    (error,) = refused.value.errors
    assert error.startswith("backends[0].gpu_indexes: ")
    assert why in error
    assert not Backend.objects.exists()
