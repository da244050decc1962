"""What the search for disagreements between parsers was begun with, and what it has found."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(path for path in CORPUS.rglob("*") if path.parent != CORPUS)


def test_there_is_a_corpus_for_each_search() -> None:
    assert {path.parent.name for path in CASES} == {
        "requests",
        "responses",
        "streams",
        "bodies",
        "forms",
    }


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_cut_changes_what_is_read_and_an_independent_reader_agrees(case: Path) -> None:
    import_module(f"tests.fuzz.{case.parent.name}").check(case.read_bytes())
