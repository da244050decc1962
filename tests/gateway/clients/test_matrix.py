"""The matrix in ``docs/clients.md`` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_test_that_the_matrix_names_exists() -> None:
    matrix = (ROOT / "docs" / "clients.md").read_text().partition("## What is tested")[2]
    named = set(re.findall(r"`(test_\w+)`", matrix))
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "gateway").rglob("*.py"))
    assert named
    assert sorted(name for name in named if f"def {name}(" not in sources) == []
