"""``docs/guarantees.md``: each promise names tests that are there, and every kind is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/guarantees.md").read_text()
PROMISES = [
    line
    for line in TEXT.partition("## Memory")[0].splitlines()
    if line.startswith("|") and "what happens" not in line and set(line) - set("|-")
]
KINDS = [
    *(f"B{n:02}" for n in (1, 6, 7, 11, 12, 17, 18, 21, 24, 26, 28, 30, 31, 35, 39, 42, 44)),
    *(f"B{n}" for n in (49, 52, 54, 59, 61, 63, 65)),
    *(f"V{n}" for n in range(1, 11)),
    *(f"D{n}" for n in range(1, 4)),
]


@pytest.fixture(scope="module")
def tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.update(re.findall(r"def (test_\w+)", path.read_text()))
    return found


def test_each_promise_names_tests_that_are_there(tests: set[str]) -> None:
    for line in PROMISES:
        named = re.findall(r"`(test_\w+)`", line)
        assert named, f"names no test: {line}"
        assert set(named) <= tests, f"not there: {set(named) - tests}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_has_a_promise(kind: str) -> None:
    assert any(re.search(rf"\b{kind}\b", line.split("|")[1]) for line in PROMISES)
