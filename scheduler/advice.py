"""What of the configuration does not do what it seems to: one small rule each. PURE.

``advise`` takes a picture of the site and gives what is worth a look, the gravest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from accounts.limits import Holder, LimitSet

Weight = Literal["problem", "warning", "hint"]
_ORDER = ("problem", "warning", "hint")
#: Keys that end within so many days are told of.
EXPIRY_DAYS = 14
_DAY = 86400
_MINUTES = {"day": 1440, "week": 10080, "month": 44640}
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing. ``kind`` and ``row`` say which page mends it: a model's label, a row's number."""

    rule: str
    weight: Weight
    subject: str
    what: str
    why: str
    do: str
    kind: str
    row: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGroup:
    group_id: int
    name: str
    weight: float  # in force, without boosts
    has_weight: bool  # of its own
    members: int  # active ones
    allowed_models: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBackend:
    backend_id: int
    name: str
    is_open: bool  # enabled, neither draining nor paused
    max_concurrent: int
    models: frozenset[str] = frozenset()  # every name
    age_seconds: float | None = None  # of what polls know
    engine_slots: int | None = None  # what the engine itself runs at once
    engine_waiting: int | None = None  # in its own queue


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKey:
    key_id: int
    name: str
    username: str
    expires_at: float  # epoch seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenBoost:
    boost_id: int
    name: str
    weight: float  # of whose weight is multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the rules look at."""

    now: float  # epoch seconds
    stale_after: float
    groups: Sequence[SeenGroup] = ()
    backends: Sequence[SeenBackend] = ()
    aliases: Mapping[str, tuple[int, Sequence[str]]] = field(default_factory=dict)
    strategies: Mapping[str, int] = field(default_factory=dict)  # {model: row}
    keys: Sequence[SeenKey] = ()  # enabled, with an end
    boosts: Sequence[SeenBoost] = ()  # in force or to come
    ungrouped: Sequence[str] = ()  # active users without a group, by name
    limits: Mapping[Holder, LimitSet] = field(default_factory=dict)
    limit_rows: Mapping[Holder, tuple[str, str, int]] = field(default_factory=dict)
    open_to: str | None = None  # the setting
    usernames: frozenset[str] = frozenset()  # active ones

    @property
    def open_backends(self) -> list[SeenBackend]:
        return [one for one in self.backends if one.is_open]

    @property
    def slots(self) -> int:
        return sum(one.max_concurrent for one in self.open_backends)

    @property
    def models(self) -> set[str]:
        """Every name that any backend has, in service or not."""
        return set().union(*(one.models for one in self.backends))


Rule = Callable[[Site], Iterator[Advice]]


def advise(site: Site) -> list[Advice]:
    """Everything that the rules find, the gravest first."""
    found = [one for rule in RULES for one in rule(site)]
    return sorted(found, key=lambda one: (_ORDER.index(one.weight), one.rule, one.subject))


# ---- shares and groups


def share_below_one_slot(site: Site) -> Iterator[Advice]:
    """With one busy user in each group, the part of all slots that a group's user gets."""
    total = sum(group.weight for group in site.groups if group.members)
    for group in site.groups:
        if not group.members or not group.weight > 0 or not site.slots:
            continue
        slots = site.slots * group.weight / total
        if slots < 1:
            yield Advice(
                rule="share_below_one_slot",
                weight="hint",
                subject=group.name,
                what=f"The share of {group.name} is {slots:.2g} of {site.slots} slots.",
                why="While every group is busy, its users are served in turns with pauses: a slot "
                "is given whole or not at all.",
                do="Raise its weight, lower the others', or add slots.",
                kind="accounts.group",
                row=group.group_id,
            )


def unused_group(site: Site) -> Iterator[Advice]:
    for group in site.groups:
        if not group.members:
            yield Advice(
                rule="unused_group",
                weight="hint",
                subject=group.name,
                what=f"{group.name} has no active members.",
                why="Its weight is in the table of shares and gives nobody anything.",
                do="Move users into it, or delete it.",
                kind="accounts.group",
                row=group.group_id,
            )


def group_without_weight(site: Site) -> Iterator[Advice]:
    for group in site.groups:
        if group.members and not group.has_weight:
            yield Advice(
                rule="group_without_weight",
                weight="hint",
                subject=group.name,
                what=f"{group.name} has no weight of its own; {group.weight:g} applies.",
                why="That comes from deprecated environment variables, which the pages cannot edit "
                "and whose changes are not in the history.",
                do="Give it a weight.",
                kind="accounts.group",
                row=group.group_id,
            )


def users_without_group(site: Site) -> Iterator[Advice]:
    if site.ungrouped:
        yield Advice(
            rule="users_without_group",
            weight="warning",
            subject="users",
            what=f"Without a group: {_names(site.ungrouped)}.",
            why="No group's weight, limits and allowed models hold for them: they may use every "
            "model without limits of a group.",
            do="Move them into a group.",
            kind="accounts.user",
        )


def boost_without_effect(site: Site) -> Iterator[Advice]:
    for boost in site.boosts:
        if boost.weight <= 0:
            yield Advice(
                rule="boost_without_effect",
                weight="warning",
                subject=boost.name,
                what=f"The boost {boost.name} multiplies a weight of 0.",
                why="0 times anything is 0: it changes nothing.",
                do="Give a weight above 0, or end the boost.",
                kind="accounts.boost",
                row=boost.boost_id,
            )


# ---- backends and models


def backend_without_models(site: Site) -> Iterator[Advice]:
    for one in site.open_backends:
        if not one.models:
            yield Advice(
                rule="backend_without_models",
                weight="warning",
                subject=one.name,
                what=f"{one.name} has no models.",
                why="No request can go there: its slots are idle.",
                do="Load a model there and poll it, or name one by hand.",
                kind="backends.backend",
                row=one.backend_id,
            )


def model_on_one_backend(site: Site) -> Iterator[Advice]:
    """Where there is another backend that could have it too."""
    if len(site.open_backends) < 2:
        return
    holders: dict[str, list[SeenBackend]] = {}
    for one in site.open_backends:
        for model in one.models:
            holders.setdefault(model, []).append(one)
    for model, backends in sorted(holders.items()):
        if len(backends) == 1 and not _is_latest_of(model, holders):
            yield Advice(
                rule="model_on_one_backend",
                weight="hint",
                subject=model,
                what=f"Only {backends[0].name} has {model}.",
                why="While that is down or drained, every request for it waits or fails, and no "
                "other slots help when it is full.",
                do="Load it on a second backend, or give it an alias with another model behind.",
                kind="backends.backend",
                row=backends[0].backend_id,
            )


def _is_latest_of(model: str, known: Mapping[str, object]) -> bool:
    """``x:latest`` where ``x`` stands for it too."""
    return model.endswith(":latest") and model.removesuffix(":latest") in known


def more_slots_than_the_engine(site: Site) -> Iterator[Advice]:
    for one in site.open_backends:
        if one.engine_slots is not None and one.max_concurrent > one.engine_slots:
            yield Advice(
                rule="more_slots_than_the_engine",
                weight="problem",
                subject=one.name,
                what=f"{one.name} may be sent {one.max_concurrent} requests at once and runs "
                f"{one.engine_slots}.",
                why="The rest waits in the engine's own queue, first come first served: there the "
                "weights decide nothing.",
                do=f"Set max_concurrent to {one.engine_slots}, or start the engine with more.",
                kind="backends.backend",
                row=one.backend_id,
            )


def queue_in_the_engine(site: Site) -> Iterator[Advice]:
    for one in site.open_backends:
        is_fresh = one.age_seconds is not None and one.age_seconds <= site.stale_after
        if is_fresh and one.engine_waiting:
            yield Advice(
                rule="queue_in_the_engine",
                weight="problem",
                subject=one.name,
                what=f"{one.engine_waiting} requests wait inside {one.name}.",
                why="What waits in the engine is served first come first served, whatever the "
                "weights.",
                do="Lower max_concurrent to what it runs at once; see whether others send it "
                "requests too.",
                kind="backends.backend",
                row=one.backend_id,
            )


def stale_telemetry(site: Site) -> Iterator[Advice]:
    for one in site.open_backends:
        if one.age_seconds is None or one.age_seconds > site.stale_after:
            age = "never" if one.age_seconds is None else f"{one.age_seconds:.0f} s ago"
            yield Advice(
                rule="stale_telemetry",
                weight="warning",
                subject=one.name,
                what=f"{one.name} last answered a poll: {age}.",
                why=f"After {site.stale_after:g} s its load and models in memory count as unknown, "
                "so requests are placed less well.",
                do="Look at its address, key and network, and whether the worker runs.",
                kind="backends.backend",
                row=one.backend_id,
            )


def dead_alias(site: Site) -> Iterator[Advice]:
    known = site.models
    for name, (row, targets) in sorted(site.aliases.items()):
        missing = [target for target in targets if target not in known]
        if not missing:
            continue
        is_dead = len(missing) == len(targets)
        yield Advice(
            rule="dead_alias",
            weight="problem" if is_dead else "hint",
            subject=name,
            what=f"No backend has {_names(missing)}, which the alias {name} names.",
            why="Every request for it is refused." if is_dead else "These targets are passed over.",
            do="Mend the spelling, or load the model." if is_dead else "Take them out.",
            kind="backends.alias",
            row=row,
        )


def strategy_of_no_model(site: Site) -> Iterator[Advice]:
    known = site.models
    for model, row in sorted(site.strategies.items()):
        if model not in known:
            yield Advice(
                rule="strategy_of_no_model",
                weight="hint",
                subject=model,
                what=f"There is a strategy for {model}, which no backend has.",
                why="It decides nothing.",
                do="Mend the name, or delete it.",
                kind="backends.modelstrategy",
                row=row,
            )


def allowed_model_that_is_not_there(site: Site) -> Iterator[Advice]:
    known = site.models | set(site.aliases)
    for group in site.groups:
        missing = [name for name in group.allowed_models or () if name not in known]
        if missing:
            yield Advice(
                rule="allowed_model_that_is_not_there",
                weight="warning",
                subject=group.name,
                what=f"{group.name} may use {_names(missing)}, which no backend has.",
                why="Its members may use nothing in their place.",
                do="Mend the spelling, or take them out.",
                kind="accounts.group",
                row=group.group_id,
            )


# ---- keys and limits


def key_about_to_expire(site: Site) -> Iterator[Advice]:
    for key in site.keys:
        days = (key.expires_at - site.now) / _DAY
        if 0 < days <= EXPIRY_DAYS:
            left = "in less than a day" if days < 1 else f"in {days:.0f} days"
            yield Advice(
                rule="key_about_to_expire",
                weight="warning",
                subject=f"{key.username}/{key.name}",
                what=f"The key {key.name} of {key.username} ends {left}.",
                why="What uses it is refused from then on.",
                do="Give it more time, or tell its user to make a new one.",
                kind="accounts.apikey",
                row=key.key_id,
            )


def limit_never_reached(site: Site) -> Iterator[Advice]:
    """A limit that another of the same holder always comes before."""
    for holder, limits in site.limits.items():
        if holder not in site.limit_rows:
            continue
        subject, kind, row = site.limit_rows[holder]
        for what in _idle_limits(limits):
            yield Advice(
                rule="limit_never_reached",
                weight="hint",
                subject=subject,
                what=f"Of {subject}, {what}.",
                why="It limits nothing, though it looks as if it did.",
                do="Lower it, or take it out.",
                kind=kind,
                row=row,
            )


def _idle_limits(limits: LimitSet) -> Iterator[str]:
    rate, budget = limits.tokens_per_minute, limits.token_budget
    if rate is not None and budget is not None:
        most = rate * _MINUTES[limits.budget_period]
        if budget > most:
            yield (
                f"the budget of {budget:,} tokens a {limits.budget_period} is never reached: at "
                f"{rate:,} tokens a minute at most {most:,} are used"
            )
    queued, at_once = limits.max_queued, limits.max_concurrent
    if queued is not None and at_once is not None and queued >= at_once > 0:
        yield (
            f"at most {queued:,} waiting requests are never reached: at most {at_once:,} may wait "
            "or run"
        )


def limit_that_allows_nothing(site: Site) -> Iterator[Advice]:
    names = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "token_budget")
    for holder, limits in site.limits.items():
        zero = [name for name in names if getattr(limits, name) == 0 and name not in limits.shadow]
        if zero and holder in site.limit_rows:
            subject, kind, row = site.limit_rows[holder]
            yield Advice(
                rule="limit_that_allows_nothing",
                weight="warning",
                subject=subject,
                what=f"Of {subject}, {_names(zero)} is 0.",
                why="Every request is refused; an empty limit would mean none.",
                do="Empty it, unless nobody is to send anything.",
                kind=kind,
                row=row,
            )


def open_to_nobody(site: Site) -> Iterator[Advice]:
    if site.open_to and site.open_to not in site.usernames:
        yield Advice(
            rule="open_to_nobody",
            weight="problem",
            subject="settings",
            what=f"Ollama's clients without a key count as {site.open_to}, who is not there or not "
            "active.",
            why="They are refused.",
            do="Name an active user, or empty the setting.",
            kind="scheduler.sitesettings",
            row=1,
        )


def _names(names: Sequence[str]) -> str:
    """ "a, b, c, d, e and 3 more" """
    shown = ", ".join(names[:_MOST_NAMES])
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more:,} more" if more > 0 else shown


RULES: tuple[Rule, ...] = (
    share_below_one_slot,
    unused_group,
    group_without_weight,
    users_without_group,
    boost_without_effect,
    backend_without_models,
    model_on_one_backend,
    more_slots_than_the_engine,
    queue_in_the_engine,
    stale_telemetry,
    dead_alias,
    strategy_of_no_model,
    allowed_model_that_is_not_there,
    key_about_to_expire,
    limit_never_reached,
    limit_that_allows_nothing,
    open_to_nobody,
)
