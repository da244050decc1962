"""What is kept of changes to a backend's models: the admin's, not each poll's."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from backends.claims import POLLS_UNTIL_GONE
from backends.engines.observation import ModelInfo
from backends.keeping import sync_models
from backends.models import Backend, BackendModel
from scheduler.changes import changes
from tests.factories import make_admin, make_backend

pytestmark = pytest.mark.django_db


@pytest.fixture
def backend() -> Backend:
    return make_backend("gpu-1", models=())


def poll(backend: Backend, *models: ModelInfo, missing: dict[str, int] | None = None) -> Any:
    return sync_models(backend, models, missing or {})


def kept(name: str = "qwen3") -> list[tuple[str, str | None]]:
    rows = BackendModel.history.filter(name=name).order_by("history_id")
    return [(row.history_type, row.history_change_reason) for row in rows]


def test_a_model_that_a_poll_finds_begins_its_history_and_further_polls_add_nothing(
    backend: Backend,
) -> None:
    poll(backend, ModelInfo(name="qwen3"))
    poll(backend, ModelInfo(name="qwen3", vision=True, context_length=4096, vram_mib=900.0))
    assert kept() == [("+", "Found by a poll")]


def test_what_polls_detect_is_no_part_of_the_history() -> None:
    tracked = {field.name for field in BackendModel.history.model.tracked_fields}
    assert not any(name.startswith("detected_") or name == "listed" for name in tracked)
    assert {"backend", "name", "by_hand", "vision", "context_length", "vram_mib"} <= tracked


def test_a_value_set_by_hand_is_told_with_what_was_before_and_can_be_taken_back(
    backend: Backend,
) -> None:
    poll(backend, ModelInfo(name="qwen3"))
    row = backend.models.get()
    root = make_admin("root")
    client = Client()
    client.force_login(root, backend="accounts.authentication.RoleBackend")
    address = f"/admin/backends/backendmodel/{row.pk}/change/"
    form = {"name": "qwen3", "vision": "True", "context_length": "4096"}
    assert client.post(address, form).status_code == 302
    (change, _) = changes(root, kind="model")[0]
    assert (change.what, change.who, change.action) == ("qwen3 on gpu-1", "root", "changed")
    told = {value.name: (value.before, value.after) for value in change.values}
    assert told == {"vision": ("–", "yes"), "context length": ("–", "4096")}
    page = client.get(f"/admin/backends/backendmodel/{row.pk}/history/").content.decode()
    assert "Found by a poll" in page
    client.post(f"/admin/history/model/{change.history_id}/")
    row.refresh_from_db()
    assert (row.vision, row.context_length) == (None, None)


def test_a_model_that_is_no_longer_listed_goes_with_a_reason(backend: Backend) -> None:
    missing = poll(backend, ModelInfo(name="qwen3"))
    for _ in range(POLLS_UNTIL_GONE):
        missing = poll(backend, ModelInfo(name="other"), missing=missing)
    assert kept() == [("+", "Found by a poll"), ("-", "No longer listed")]
    assert not BackendModel.objects.filter(name="qwen3").exists()


def test_a_model_that_an_admin_adds_at_the_same_moment_has_one_beginning(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = BackendModel.objects.bulk_create

    def late(rows: Any, **options: Any) -> Any:
        BackendModel.objects.create(backend=backend, name="qwen3", by_hand=True)
        return create(rows, **options)

    monkeypatch.setattr(BackendModel.objects, "bulk_create", late)
    poll(backend, ModelInfo(name="qwen3"))
    assert kept() == [("+", None)]
