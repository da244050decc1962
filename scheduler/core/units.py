"""Who is served: fairness units, the accounts behind them and their groups (R13–R15).

A *unit* has a tag of its own. Ordinarily it is a user; behind a trusted key it is an end user of
that key's owner (R15). Limits always count for the *account*, the user who owns the key.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Literal

from scheduler.core.errors import Rejected
from scheduler.core.jobs import Unit, UserSpec, is_background_call
from scheduler.core.tunables import Tunables

if TYPE_CHECKING:
    from scheduler.core.queue import Flow, JobClass, Pool, Standing

#: The tag of a unit that has never been activated: lower than any level.
UNSET = float("-inf")


class GroupState:
    """A group's waiting jobs, and what its active members weigh together (R14)."""

    __slots__ = ("active_units", "active_weight", "group_id", "queued")

    def __init__(self, group_id: int) -> None:
        self.group_id = group_id
        self.queued = 0
        self.active_units = 0
        self.active_weight = 0.0


class Account:
    """A user's standing and what of it is in use."""

    __slots__ = ("active_units", "group", "queued", "running", "spec", "units")

    def __init__(self, spec: UserSpec, group: GroupState | None) -> None:
        self.spec = spec
        self.group = group
        self.queued = 0
        self.running = 0
        self.units = 0  # known
        self.active_units = 0  # with queued or running jobs


class UnitState:
    """What one fairness unit has had. Tags are tokens per unit of weight."""

    __slots__ = (
        "account",
        "background",
        "charged_total",
        "epoch",
        "fixed_weight",
        "flows",
        "group_share",
        "has_offsets",
        "held",
        "key",
        "largest_cost",
        "largest_hold",
        "last_flow",
        "other_tag",
        "outputs",
        "peak_running",
        "queued",
        "recent",
        "running",
        "service",
        "standings",
        "tag",
        "waiting_pools",
    )

    def __init__(self, key: Unit, account: Account) -> None:
        self.key = key
        self.account = account
        self.tag = UNSET
        self.other_tag = UNSET  # of weight 0 while the weight is positive, and the reverse (R13)
        self.background = False
        self.fixed_weight: float | None = None  # where nobody else has a say in it
        self.held = 0.0  # tokens charged for running jobs
        self.queued = 0
        self.running = 0
        self.waiting_pools = 0
        self.flows: dict[JobClass, Flow] = {}
        self.standings: dict[Pool, Standing] = {}
        self.last_flow: Flow | None = None  # latest dispatched from, for display
        self.has_offsets = False  # in some pool it stands apart from its tag (R8)
        self.epoch = 0  # counts how often the offsets have been folded away
        self.recent = 0.0  # tokens settled in the fairness window (R9)
        self.charged_total = 0.0  # tokens, for display
        self.service = 0.0  # tokens charged per unit of weight, clamps aside (T1)
        self.largest_hold = 0.0
        self.largest_cost = 0.0  # this and the next since ``GapMeter`` began to observe
        self.peak_running = 0
        self.outputs: dict[str, float] = {}  # {model name: average output tokens} (R3)
        self.group_share: GroupState | None = None  # where its weight is counted while active


class Roster:
    """All known accounts and units, and the weight that each has now."""

    def __init__(self, tunables: Tunables) -> None:
        self.users: Mapping[int, UserSpec] = {}
        self.units: dict[Unit, UnitState] = {}
        self.accounts: dict[int, Account] = {}
        self.groups: dict[int, GroupState] = {}
        self.tune(tunables)

    def tune(self, tunables: Tunables) -> None:
        self.by_group = tunables.share_mode == "group"
        self.split: Literal["member", "split"] = tunables.end_user_share
        self.background_weight = tunables.background_weight

    # ---- finding

    def account(self, user_id: int) -> Account:
        """The account of a configured user. Raises: Rejected."""
        account = self.accounts.get(user_id)
        if account is not None and user_id in self.users:
            return account
        spec = self.users.get(user_id)
        if spec is None:
            raise Rejected("permission_denied", "This user is not known.")
        return self._new_account(spec)

    def last_known(self, user_id: int) -> Account:
        """The account also of a user that is gone, whose jobs run on."""
        account = self.accounts.get(user_id)
        if account is not None:
            return account
        gone = UserSpec(
            user_id=user_id,
            username="",
            group_id=None,
            group_name=None,
            weight=1.0,
            group_weight=1.0,
        )
        return self._new_account(self.users.get(user_id, gone))

    def _new_account(self, spec: UserSpec) -> Account:
        account = Account(spec, self._group(spec.group_id))
        self.accounts[spec.user_id] = account
        return account

    def _group(self, group_id: int | None) -> GroupState | None:
        if group_id is None:
            return None
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = GroupState(group_id)
        return group

    def unit(self, key: Unit, account: Account) -> UnitState:
        unit = self.units.get(key)
        if unit is None:
            unit = self.units[key] = UnitState(key, account)
            account.units += 1
            unit.background = self.base_weight(unit) <= 0.0
            unit.fixed_weight = self._fixed_weight(unit)
        return unit

    def forget(self, unit: UnitState) -> None:
        """Drop a unit that is idle and has no recent usage."""
        if self.units.pop(unit.key, None) is None:
            return
        account = unit.account
        account.units -= 1
        if not account.units:
            self.accounts.pop(account.spec.user_id, None)

    # ---- weights

    def weight(self, unit: UnitState) -> float:
        """The divisor of the unit's charges: its share's weight, 1 for background. O(1)."""
        fixed = unit.fixed_weight
        return self._varying_weight(unit) if fixed is None else fixed

    def _fixed_weight(self, unit: UnitState) -> float | None:
        """The weight, unless it depends on how many others are active (R14, R15)."""
        if unit.background:
            return 1.0
        spec = unit.account.spec
        if self.by_group and unit.account.group is not None:
            return None
        if self.split == "split" and unit.key != spec.user_id:
            return None
        return self.base_weight(unit) or None

    def _varying_weight(self, unit: UnitState) -> float:
        weight = self.base_weight(unit)
        if weight <= 0.0:
            return 1.0  # a change to 0 that has not been taken up yet
        group = unit.account.group
        if not self.by_group or group is None:
            return weight
        together = group.active_weight
        if unit.group_share is None:  # idle: as if it came back now
            together += weight
        return unit.account.spec.group_weight * weight / max(together, weight)

    def shown_weight(self, unit: UnitState) -> float:
        return 0.0 if unit.background else self.weight(unit)

    def base_weight(self, unit: UnitState) -> float:
        """R13's weight before a group's split; 0 also for members of a group of weight 0."""
        spec = unit.account.spec
        if self.by_group and unit.account.group is not None and spec.group_weight <= 0.0:
            return 0.0
        weight = spec.weight * self._part(unit.key)
        if self.split == "split" and unit.key != spec.user_id:
            return weight / max(1, unit.account.active_units)
        return weight

    def _part(self, key: Unit) -> float:
        """What a unit has of its user's weight: background calls may have less (R15)."""
        return self.background_weight if is_background_call(key) else 1.0

    def activated(self, unit: UnitState) -> None:
        """The unit now has queued or running jobs."""
        account = unit.account
        account.active_units += 1
        group = account.group
        if group is not None:
            unit.group_share = group
            group.active_units += 1
            if self.split == "member":
                group.active_weight += account.spec.weight * self._part(unit.key)
            elif account.active_units == 1:
                group.active_weight += account.spec.weight

    def rested(self, unit: UnitState) -> None:
        """The unit has neither queued nor running jobs any more."""
        account = unit.account
        account.active_units -= 1
        group = unit.group_share
        if group is not None:
            unit.group_share = None
            group.active_units -= 1
            if not group.active_units:
                group.active_weight = 0.0  # sheds what rounding has left
            elif self.split == "member":
                group.active_weight -= account.spec.weight * self._part(unit.key)
            elif not account.active_units:
                group.active_weight -= account.spec.weight

    def change_kind(self, unit: UnitState) -> None:
        """Between a positive weight and background."""
        unit.background = not unit.background
        unit.fixed_weight = self._fixed_weight(unit)

    # ---- configuration

    def configure(self, users: Mapping[int, UserSpec], tunables: Tunables) -> bool:
        """Take up new weights and limits. A user that is gone keeps its last known ones.

        Returns whether anybody has come to another group.
        """
        self.users = users
        self.tune(tunables)
        regrouped = False
        for user_id, account in self.accounts.items():
            spec = users.get(user_id, account.spec)
            regrouped = regrouped or spec.group_id != account.spec.group_id
            account.spec = spec
        self._recount_groups()
        return regrouped

    def forget_flows(self, classes: Container[JobClass], pools: Container[Pool]) -> None:
        """Drop what units know of classes and pools that are gone."""
        for unit in self.units.values():
            for cls in [k for k in unit.flows if k not in classes]:
                del unit.flows[cls]
            for pool in [k for k in unit.standings if k not in pools]:
                del unit.standings[pool]

    def _recount_groups(self) -> None:
        self.groups = {}
        for account in self.accounts.values():
            account.group = group = self._group(account.spec.group_id)
            account.active_units = 0
            if group is not None:
                group.queued += account.queued
        for unit in self.units.values():
            unit.group_share = None
            unit.fixed_weight = self._fixed_weight(unit)
            if unit.queued or unit.running:
                self.activated(unit)
