"""The examples in docs/api.md, run by curl as they stand there."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.factories import make_admin, make_api_key
from tests.running import RunningRouter

DOCS = Path(__file__).parents[2] / "docs" / "api.md"


async def test_every_example_works_as_it_stands(router: RunningRouter) -> None:
    if shutil.which("curl") is None:
        pytest.fail("The examples need curl.")
    key = await router.ask(lambda: make_api_key(make_admin("root")))
    examples = re.findall(r"```sh\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(examples) == 6
    answers = []
    for example in examples:
        process = await asyncio.create_subprocess_exec(
            "bash", "-ec", "-o", "pipefail", example,
            env={**os.environ, "URL": router.url, "KEY": key, "no_proxy": "*"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert process.returncode == 0, (example, out, err)
        answers.append(out.decode())
    assert '"key":"mr-' in answers[0]
    assert '"count":1' in answers[1]
    assert '"draining":true' in answers[3]
    assert '"value":500' in answers[4]
