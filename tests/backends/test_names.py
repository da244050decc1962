"""Names stand in headers and on single lines."""

from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError

from backends.validators import validate_name


@pytest.mark.parametrize("name", ["gpu-1", "GPU 1 (Größe)", "漢字"])
def test_a_printable_name_is_accepted(name: str) -> None:
    validate_name(name)


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: x=1", "a\nb", "a\x00", "a\x1b[31m"])
def test_a_name_with_control_characters_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        validate_name(name)
