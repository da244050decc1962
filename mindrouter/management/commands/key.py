"""``manage.py key create|revoke|rotate|list``: API keys from the command line.

With ``--url`` another site's, by its management API; else in this machine's database, so that a
first key can be had before anything runs.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from accounts.models import ApiKey, User
from mindrouter.cli.command import add_site
from mindrouter.cli.management import Management

MOST_OVERLAP_HOURS = 30 * 24.0


class Command(BaseCommand):
    help = "Create, revoke, rotate and list API keys."

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        create = actions.add_parser("create", help="Make a key and print it, this once.")
        create.add_argument("user", metavar="USER")
        create.add_argument("--name", required=True, help="What it is for, e.g. laptop.")
        create.add_argument("--expires", type=_time, metavar="ISO", help="E.g. 2026-12-31.")
        create.add_argument(
            "--may-name-end-user",
            action="store_true",
            help="Trust it to name the end user, who then gets the share.",
        )
        revoke = actions.add_parser("revoke", help="Refuse a key from now on.")
        revoke.add_argument("user", metavar="USER")
        revoke.add_argument("--name", required=True)
        rotate = actions.add_parser("rotate", help="Replace a key; print the new one, this once.")
        rotate.add_argument("user", metavar="USER")
        rotate.add_argument("--name", required=True)
        rotate.add_argument(
            "--overlap", type=float, default=0.0, metavar="HOURS", help="The old one works so long."
        )
        listing = actions.add_parser("list", help="List keys, of one user or of all.")
        listing.add_argument("user", metavar="USER", nargs="?")
        for action in (create, revoke, rotate, listing):
            add_site(action)
            action.add_argument("--json", action="store_true", help="Print JSON.")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["url"] or os.environ.get("MINDROUTER_URL"):
            with Management.of(options["url"], options["key"]) as api:
                self._tell(_remote(api, options), options)
            return
        match options["action"]:
            case "create":
                self._create(options)
            case "revoke":
                self._revoke(options)
            case "rotate":
                self._rotate(options)
            case "list":
                self._list(options)

    def _create(self, options: dict[str, Any]) -> None:
        key = ApiKey.generate()
        row = ApiKey(
            user=_user(options["user"]),
            name=options["name"],
            expires_at=options["expires"],
            may_name_end_user=options["may_name_end_user"],
        )
        row.set_key(key)
        try:
            row.full_clean()
        except ValidationError as error:
            raise CommandError("\n".join(error.messages)) from None
        row.save()
        self._tell(_described(row) | {"key": key}, options)

    def _revoke(self, options: dict[str, Any]) -> None:
        row = _key(options)
        row.enabled = False
        row.save()
        self._tell(_described(row), options)

    def _rotate(self, options: dict[str, Any]) -> None:
        row = _key(options)
        key = row.rotate(timedelta(hours=_overlap(options)))
        row.save(update_fields=ApiKey.ROTATED)
        self._tell(_described(row) | {"key": key}, options)

    def _list(self, options: dict[str, Any]) -> None:
        rows = ApiKey.objects.select_related("user").order_by("user__username", "name")
        if options["user"]:
            rows = rows.filter(user=_user(options["user"]))
        self._tell([_described(row) for row in rows], options)

    def _tell(self, found: Any, options: dict[str, Any]) -> None:
        """A list, a key that is shown this once, or one that was revoked."""
        if options["json"]:
            self.stdout.write(json.dumps(found))
        elif isinstance(found, list):
            for one in found:
                state = "enabled" if one["enabled"] else "revoked"
                expiry = f", expires {one['expires_at']}" if one["expires_at"] else ""
                line = f"{one['user']}  {one['name']}  {one['prefix']}…  {state}{expiry}"
                if one["capture_until"] and _time(one["capture_until"]) > timezone.now():
                    line += f", prompts captured until {one['capture_until']}"
                self.stdout.write(line)
        elif "key" in found:
            self.stdout.write(found["key"])
        else:
            name = f"{found['prefix']}… ({found['name']})"
            self.stdout.write(f"{name} of {found['user']} is revoked.")


def _user(username: str) -> User:
    try:
        return User.objects.get(username=username)
    except User.DoesNotExist:
        raise CommandError(f"There is no user {username!r}.") from None


def _key(options: dict[str, Any]) -> ApiKey:
    user, name = _user(options["user"]), options["name"]
    row = ApiKey.objects.filter(user=user, name=name).first()
    if row is None:
        raise CommandError(f"{user} has no key named {name!r}.")
    return row


def _time(text: str) -> datetime:
    """An ISO time; without a zone it is UTC. Raises: ValueError, for argparse to report."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _described(row: ApiKey) -> dict[str, Any]:
    return {
        "user": row.user.username,
        "name": row.name,
        "prefix": row.prefix,
        "enabled": row.enabled,
        "expires_at": row.expires_at.isoformat() if row.expires_at else None,
        "may_name_end_user": row.may_name_end_user,
        "capture_until": row.capture_until.isoformat() if row.capture_until else None,
    }


_SHOWN = (
    "user",
    "name",
    "prefix",
    "enabled",
    "expires_at",
    "may_name_end_user",
    "capture_until",
)


def _remote(api: Management, options: dict[str, Any]) -> Any:
    """The same by the management API; the answer is in the form of ``_described``."""
    user, action = options["user"], options["action"]
    if action == "list":
        return [_only_shown(row) for row in api.all("api-keys", user=user)]
    if action == "create":
        expires = options["expires"]
        body = {
            "user": user,
            "name": options["name"],
            "expires_at": expires.isoformat() if expires else None,
            "may_name_end_user": options["may_name_end_user"],
        }
        return _only_shown(api.post("api-keys", body))
    named = [row for row in api.all("api-keys", user=user) if row["name"] == options["name"]]
    if not named:
        raise CommandError(f"{user} has no key named {options['name']!r}.")
    address = f"api-keys/{named[0]['id']}/{action}"
    body = {"overlap_seconds": _overlap(options) * 3600} if action == "rotate" else {}
    return _only_shown(api.post(address, body))


def _overlap(options: dict[str, Any]) -> float:
    """Hours. Raises: CommandError."""
    hours: float = options["overlap"]
    if not 0 <= hours <= MOST_OVERLAP_HOURS:
        raise CommandError(f"--overlap is from 0 to {MOST_OVERLAP_HOURS:g} hours.")
    return hours


def _only_shown(row: dict[str, Any]) -> dict[str, Any]:
    """And the key itself where it is new."""
    return {name: row[name] for name in (*_SHOWN, "key") if name in row}
