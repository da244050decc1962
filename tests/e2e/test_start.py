"""``make run``'s own command: what it starts serves, survives its parts' deaths, and ends whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.site import MODEL, Site, running_site

needs_model = pytest.mark.skipif(not MODEL.exists(), reason=f"no model at {MODEL}")
PASSWORD = "opensesame12"
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.mark.llama
@needs_model
def test_the_demo_serves_the_openai_client_from_its_first_start(tmp_path: Path) -> None:
    with running_site(tmp_path / "data") as site:
        client = openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=20)

        answer = client.chat.completions.create(model="smollm2", messages=HELLO, max_tokens=8)
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 8

        stream = client.chat.completions.create(
            model="smollm2", messages=HELLO, max_tokens=8, stream=True
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")

        vectors = client.embeddings.create(model="smollm2", input=["one", "two"])
        assert [len(v.embedding) for v in vectors.data] == [576, 576]

        assert [model.id for model in client.models.list()] == ["smollm2"]
        assert client.models.retrieve("smollm2").id == "smollm2"

        def recorded() -> list[dict[str, object]]:
            found = httpx.get(
                f"{site.url}/api/admin/decisions",
                headers={"Authorization": f"Bearer {site.key}"},
            )
            return list(found.json()["results"])

        site.until("three records", lambda: len(recorded()) == 3, 10)
        assert {r["outcome"] for r in recorded()} == {"completed"}
        assert {r["usage_estimated"] for r in recorded()} == {False}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site without the demo, at its first start."""
    data = tmp_path_factory.mktemp("site") / "data"
    with running_site(data, DEMO="0", MINDROUTER_ADMIN_PASSWORD=PASSWORD) as site:
        yield site


def test_secrets_are_made_at_the_first_start_for_their_owner_only(site: Site) -> None:
    for name in ("secret_key", "field_encryption_key"):
        assert (site.data / name).stat().st_mode & 0o777 == 0o600
    assert PASSWORD not in site.console
    assert site.console.count("First API key") == 1


def test_a_second_router_on_the_same_data_folder_is_refused(site: Site) -> None:
    with pytest.raises(AssertionError, match="Another gateway already runs"):
        site.manage("rungateway", "--port", "1")


def test_killing_any_process_stops_no_other_and_each_comes_back(site: Site) -> None:
    parts = ("rungateway", "runrecorder", "mindrouter worker", "mindrouter beat")
    site.until("all run", lambda: all(site.pids(part) for part in parts))
    for part in parts:
        before = {other: site.pids(other) for other in parts}
        for pid in before[part]:
            os.kill(pid, signal.SIGKILL)
        site.until(f"{part} is back", lambda p=part, b=before: site.pids(p) - b[p])
        for other in parts:
            if other != part:
                assert site.pids(other) >= before[other], other
    site.until("it serves again", site.serves)


@pytest.fixture(scope="module")
def stopped_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped") / "data"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_it_leaves_no_process_behind(stopped_data: Path, number: signal.Signals) -> None:
    with running_site(stopped_data, DEMO="0") as site:
        assert len(site.processes()) >= 4
        os.killpg(site.process.pid, number)
        site.process.wait(30)
        assert site.processes() == {}
