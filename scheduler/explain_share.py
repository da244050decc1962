"""A user's share in plain words. PURE: values in, sentences out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from scheduler.explain import NO_BREAK, number


class Share(Protocol):
    """What is read of a ``Standing``."""

    @property
    def weight(self) -> float: ...
    @property
    def own_weight(self) -> float: ...
    @property
    def source(self) -> str: ...
    @property
    def group(self) -> str | None: ...
    @property
    def by_group(self) -> bool: ...
    @property
    def is_live(self) -> bool: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def busy_users(self) -> int: ...
    @property
    def share(self) -> float | None: ...
    @property
    def deficit(self) -> float | None: ...
    @property
    def burst_credits(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def recent_share(self) -> float | None: ...


def sentences(one: Share) -> list[str]:
    """Why the share is what it is, one thought each; boosts are told apart, with their times."""
    return [_weight(one), *_among(one), *_deficit(one), *_credits(one), *_heavy(one)]


def _weight(one: Share) -> str:
    if one.weight <= 0:
        return (
            f"Your weight is 0 ({one.source}): you are served when nobody else can use a slot, "
            "equally with others of weight 0."
        )
    text = f"Your weight is {number(one.weight, 6)}"
    if one.weight != one.own_weight:
        text += f", of which {number(one.own_weight, 6)} is {one.source} and the rest a boost"
        return f"{text}."
    return f"{text}: {one.source}."


def _among(one: Share) -> Iterator[str]:
    if one.share is None:
        return
    percent = f"{number(100 * one.share)}{NO_BREAK}%"
    if one.busy_users == 1:
        others = "1 other user has requests"
    else:
        others = f"{one.busy_users:,} other users have requests"
    if not one.busy_users:
        yield "Nobody else has requests now: everything that is free is yours."
    elif one.is_busy:
        yield f"{others} too; by the weights you get {percent} of the tokens."
    else:
        yield f"{others} now; if you sent some, you would get {percent} of the tokens."
    if one.by_group:
        yield f"Your group {one.group} shares its weight among its members who have requests."


def _deficit(one: Share) -> Iterator[str]:
    if one.deficit is None:
        if one.is_live:
            yield "You have used nothing lately: you start level with those who wait."
    elif one.deficit >= 0:
        yield (
            f"Your deficit is {number(one.deficit, 0)} tokens: so much is owed to you before "
            "others who have had their part are preferred."
        )
    else:
        yield (
            f"Your deficit is {number(one.deficit, 0)} tokens: you have had more than your part "
            "lately, so others who wait go first until it is even."
        )


def _credits(one: Share) -> Iterator[str]:
    if one.burst_credits >= 0.5:
        yield (
            f"You have {number(one.burst_credits, 0)} tokens of burst credit, which everybody gets "
            "while the cluster is idle; they count like tokens owed to you."
        )


def _heavy(one: Share) -> Iterator[str]:
    if one.factor < 1.0 and one.recent_share is not None:
        yield (
            f"You used {number(100 * one.recent_share)}{NO_BREAK}% of all recent tokens: as a "
            f"heavy user your priority is multiplied by {number(one.factor, 2)} until that falls."
        )
