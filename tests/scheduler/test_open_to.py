"""``settings.open_to``: the user that Ollama's clients without a key count as."""

from __future__ import annotations

import pytest

from scheduler.configuration.applying import apply_text
from scheduler.configuration.document import Invalid
from scheduler.configuration.exporting import export_text
from scheduler.models import SiteSettings
from scheduler.snapshot import load_snapshot

pytestmark = pytest.mark.django_db

GUESTS = "{users: [{username: guests}], settings: {open_to: guests}}"


def test_a_file_opens_and_closes_it() -> None:
    apply_text(GUESTS)
    snapshot = load_snapshot()
    assert snapshot.open_to is not None
    assert snapshot.users[snapshot.open_to.user_id].username == "guests"
    assert not snapshot.open_to.may_name_end_user
    assert "open_to: guests" in export_text()
    apply_text("{settings: {open_to: null}}")
    assert load_snapshot().open_to is None


def test_a_user_that_is_not_there_is_refused() -> None:
    with pytest.raises(Invalid, match=r"settings\.open_to: There is no user 'nobody'"):
        apply_text("{settings: {open_to: nobody}}")
    assert not SiteSettings.objects.exists()


def test_an_inactive_user_lets_nobody_in() -> None:
    apply_text(GUESTS)
    apply_text("{users: [{username: guests, is_active: false}]}")
    assert load_snapshot().open_to is None
