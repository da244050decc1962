"""The documentation is true: its commands run, what it names exists, its pictures are right."""

from __future__ import annotations

import asyncio
import re
import sys
from importlib import import_module
from pathlib import Path

import httpx
import pytest
from django.core.management import get_commands

from tests.e2e.site import running_site
from tests.stubs.openai_stub import OpenAIStub

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RUN = re.compile(r"<!-- run -->\n```sh\n(.*?)```", re.DOTALL)
#: The first page's blocks make what those of the others ask about.
ORDER = ["index.md", *(page.name for page in PAGES if page.name != "index.md")]

sys.path.insert(0, str(DOCS))
building, pictures = import_module("building"), import_module("pictures")


def marked() -> list[tuple[str, str]]:
    return [(name, block) for name in ORDER for block in RUN.findall((DOCS / name).read_text())]


@pytest.mark.timeout(600)
async def test_every_marked_command_runs_on_a_fresh_site(tmp_path: Path) -> None:
    assert len(marked()) >= 8
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    (tmp_path / "manage.py").symlink_to(ROOT / "manage.py")
    async with await OpenAIStub.start() as stub:
        site_of = running_site(tmp_path / "data", DEMO="0")
        site = await asyncio.to_thread(site_of.__enter__)
        try:
            environment = {
                **site.environment, "URL": site.url, "KEY": site.key, "MODEL": "m", "no_proxy": "*",
                "PYTHONPATH": str(ROOT),
            }  # fmt: skip
            recorder = site.data / "state" / "recorder.json"
            await asyncio.to_thread(site.until, "the recorder has begun", recorder.exists)
            for name, block in marked():
                command = block.replace("http://127.0.0.1:9001", stub.url)
                process = await asyncio.create_subprocess_exec(
                    "bash", "-ec", "-o", "pipefail", command, cwd=tmp_path, env=environment,
                    stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                )  # fmt: skip
                said = (await process.communicate())[0].decode()
                assert process.returncode == 0, f"{name}:\n{block}\n{said}\n{site.console[-2000:]}"
                if "apply site.yaml" in block:
                    await asyncio.to_thread(
                        site.until, "the model is listed", lambda: _has_model(site.url, site.key)
                    )
        finally:
            await asyncio.to_thread(site_of.__exit__, None, None, None)


def _has_model(url: str, key: str) -> bool:
    answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    return bool(answer.json()["data"])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_commands_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    commands = set(re.findall(r"manage\.py ([a-z]+)\b", text))
    assert commands <= set(get_commands()), commands - set(get_commands())
    files = set(re.findall(r"`((?:tests|deploy|bench|docs|mindrouter)/[\w./-]*)`", text))
    missing = {name for name in files if not (ROOT / name).exists()}
    assert missing == set()


def test_every_setting_has_a_default_and_words() -> None:
    known = building.variables()
    read = re.findall(r'(?:env_number|env\.\w+)\(\s*"([A-Z_]+)"', building.SETTINGS.read_text())
    assert set(read) <= set(known)
    page = building.settings_page()
    rows = re.findall(r"^\| `([A-Z_0-9]+)` \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == set(known)
    assert [name for name, words in rows if not words.strip()] == []
    assert "| `QUEUE_KEEPALIVE_AFTER` | `10` | seconds | 0 |" in page


def test_each_client_has_its_snippet() -> None:
    page = building.sdks_page()
    assert page.count("```python") == 4
    assert "https://llm.uni.example/v1" in page


def test_the_pictures_are_those_that_the_scheduler_gives() -> None:
    shares = dict(pictures.shares())
    assert shares[150.0] == pytest.approx(
        {"faculty": 1 / 2, "staff": 1 / 3, "student": 1 / 6}, abs=0.02
    )
    assert shares[280.0] == pytest.approx(
        {"faculty": 3 / 4, "staff": 0, "student": 1 / 4}, abs=0.02
    )
    assert shares[600.0] == pytest.approx(
        {"faculty": 3 / 8, "staff": 1 / 4, "student": 3 / 8}, abs=0.02
    )
    came, served = pictures.order()
    assert sorted(came) == sorted(served)
    assert set(served[1:5]) == {"faculty", "staff"}


def test_a_link_to_a_file_that_is_not_there_is_an_error() -> None:
    assert building.on_page_markdown("[this](../manage.py)") == "this (`manage.py`)"
    with pytest.raises(FileNotFoundError):
        building.on_page_markdown("[this](../none.py)")


def test_no_page_keeps_a_gap_to_be_filled() -> None:
    assert [
        page.name for page in PAGES if re.search(r"\bTIMES\b|TODO|FIXME", page.read_text())
    ] == []
