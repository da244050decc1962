"""``manage.py demoload``: three users of three groups keep the demo busy, so that shares show."""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser
from collections import Counter
from typing import Any

import httpx
from django.conf import settings
from django.core.management.base import BaseCommand

from accounts.models import ApiKey, Group, User

GROUPS = ("faculty", "staff", "student")
IN_FLIGHT = 6  # requests each user keeps waiting or running: more than the demo has slots
WARM_UP = 5.0  # seconds for new keys to be in force


class Command(BaseCommand):
    help = "Send a bounded load from a faculty, a staff and a student user and print the shares."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=120.0)
        parser.add_argument("--model", default="smollm2")

    def handle(self, *args: Any, **options: Any) -> None:
        keys = {group: self._key_of(group) for group in GROUPS}
        site = f"http://{settings.HOST}:{settings.PORT}"
        self.stdout.write(f"Load for {options['seconds']:g} s; watch {site}/admin/groups/")
        tokens = asyncio.run(self._load(site, keys, options["model"], options["seconds"]))
        self.stdout.write("Tokens received: " + _shares(tokens))

    def _key_of(self, group: str) -> str:
        """A fresh key for this group's demo user; the one of an earlier load stops working."""
        user, _ = User.objects.get_or_create(
            username=f"demo-{group}", defaults={"group": Group.objects.get(name=group)}
        )
        key = ApiKey.generate()
        row = ApiKey.objects.filter(user=user, name="demo load").first()
        row = row or ApiKey(user=user, name="demo load")
        row.set_key(key)
        row.save()
        return key

    async def _load(
        self, site: str, keys: dict[str, str], model: str, seconds: float
    ) -> Counter[str]:
        tokens: Counter[str] = Counter()
        await asyncio.sleep(WARM_UP)
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=site, timeout=None, limits=limits) as client,  # noqa: S113
            asyncio.TaskGroup() as group,
        ):
            for name, key in keys.items():
                for _ in range(IN_FLIGHT):
                    group.create_task(_ask_until(end, client, name, key, model, tokens))
            group.create_task(self._report_until(end, tokens))
        return tokens

    async def _report_until(self, end: float, tokens: Counter[str]) -> None:
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(5.0, left))
            self.stdout.write(f"{max(0.0, end - time.monotonic()):5.0f} s left  {_shares(tokens)}")


async def _ask_until(
    end: float,
    client: httpx.AsyncClient,
    name: str,
    key: str,
    model: str,
    tokens: Counter[str],
) -> None:
    body = {
        "model": model,
        "max_tokens": 48,
        "messages": [{"role": "user", "content": "Tell me something about fairness."}],
    }
    headers = {"Authorization": f"Bearer {key}"}
    while time.monotonic() < end:
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        if time.monotonic() >= end:
            return  # what was still queued is served in another order: nobody is backlogged now
        if answer.status_code == httpx.codes.OK:
            tokens[name] += answer.json()["usage"]["total_tokens"]
        else:
            await asyncio.sleep(1.0)


def _shares(tokens: Counter[str]) -> str:
    total = sum(tokens.values()) or 1
    return "  ".join(f"{name} {100 * tokens[name] / total:.0f} %" for name in GROUPS)
