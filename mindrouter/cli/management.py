"""The management API as the command line uses it: another site's with a key, or this machine's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

import httpx
from django.conf import settings
from django.core.management.base import CommandError

from accounts.authentication import local_pass
from accounts.models import User

_SECONDS = 60.0


def write_address(host: str, port: int) -> None:
    """Note in the data folder where this site's management API is."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    (settings.DATA_DIR / "address").write_text(f"http://{host}:{port}")


class Management:
    """Questions to one site. A context manager. Raises: CommandError, saying what is wrong."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._client = httpx.Client(
            base_url=f"{url.rstrip('/')}/api/admin/", headers=headers, timeout=_SECONDS
        )

    @classmethod
    def of(cls, url: str | None, key: str | None) -> Self:
        """The site at ``url``; without one, that of this machine's data folder."""
        url = url or os.environ.get("MINDROUTER_URL")
        key = key or os.environ.get("MINDROUTER_KEY")
        if url and not key:
            raise CommandError("A key is needed too: --key or MINDROUTER_KEY, of staff.")
        headers = {} if url else _as_if_from_outside()
        address = url or _local_address()
        return cls(address, {**headers, "Authorization": f"Bearer {key or _local_pass()}"})

    def get(self, path: str, **query: Any) -> Any:
        return self._ask("GET", path, params=_given(query))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._ask("POST", path, json=body)

    def all(self, path: str, **query: Any) -> list[dict[str, Any]]:
        """Every row of a list."""
        page = self.get(path, limit=1000, **query)
        rows: list[dict[str, Any]] = page["results"]
        while len(rows) < page["count"] and page["results"]:
            page = self.get(path, limit=1000, offset=len(rows), **query)
            rows += page["results"]
        return rows

    def one(self, path: str, **query: Any) -> dict[str, Any]:
        """The one row that is asked for."""
        rows = self.all(path, **query)
        if not rows:
            raise CommandError(f"{path}: there is no {' '.join(map(str, query.values()))}.")
        return rows[0]

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise CommandError(
                f"{self._client.base_url} does not answer: {str(error) or type(error).__name__}"
            ) from error
        if answer.is_success:
            return answer.json() if answer.content else None
        raise CommandError(_complaint(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _given(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _complaint(answer: httpx.Response) -> str:
    try:
        problem = answer.json()
        return f"{answer.status_code} {problem['title']}: {problem['detail']}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} from {answer.url}: is this MindRouter's address?"


def _local_address() -> str:
    try:
        return str((settings.DATA_DIR / "address").read_text().strip())
    except OSError:
        raise CommandError(
            f"No router has been started on {settings.DATA_DIR}. Set MINDROUTER_DATA to its data "
            "folder, or name a site: --url and --key, or MINDROUTER_URL and MINDROUTER_KEY."
        ) from None


def _local_pass() -> str:
    """As the first superuser; there is one wherever anything can be administered."""
    found = User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
    if found is None:
        raise CommandError("This site has no superuser: manage.py createsuperuser makes one.")
    return local_pass(found.username)


def _as_if_from_outside() -> dict[str, str]:
    """A name that ALLOWED_HOSTS allows, if it allows only some."""
    names = [name for name in settings.ALLOWED_HOSTS if not name.startswith((".", "*"))]
    return {"Host": names[0]} if names else {}
