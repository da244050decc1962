"""The form of a scenario: a period, and what is to be changed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils import timezone

from accounts.forms import INPUT_CLASS, WeightField, weight_text
from accounts.models import Group, User
from backends.models import Backend
from scheduler.models import ShareMode, SiteSettings
from scheduler.settings_admin import in_force
from scheduler.what_if import POINTS, Changes

PERIODS = {"1": "the last hour", "6": "the last 6 hours", "24": "the last day", "168": "7 days"}
_MOST_SLOTS = 100_000


def _input(**attributes: Any) -> dict[str, Any]:
    return {"class": INPUT_CLASS, **attributes}


class WhatIfForm(forms.Form):
    """Every field shows what is in force; what is left so is not changed."""

    name = forms.CharField(max_length=80, widget=forms.TextInput(_input()))
    period = forms.ChoiceField(
        choices=PERIODS.items(),
        required=False,
        initial="24",
        widget=forms.Select(_input()),
    )
    since = forms.DateTimeField(
        label="or from", required=False, widget=forms.DateTimeInput(_input(type="datetime-local"))
    )
    until = forms.DateTimeField(
        label="to", required=False, widget=forms.DateTimeInput(_input(type="datetime-local"))
    )
    share_mode = forms.ChoiceField(choices=ShareMode.choices, widget=forms.Select(_input()))
    overrides = forms.CharField(
        label="Weights of users",
        required=False,
        max_length=20_000,
        widget=forms.Textarea(_input(rows=3, placeholder="ada = 5\nbob =")),
        help_text="One a line: user = weight. Nothing after the = takes an override away.",
    )

    added = forms.CharField(
        label="More backends",
        required=False,
        max_length=20_000,
        widget=forms.Textarea(_input(rows=2, placeholder="gpu-3 = gpu-1")),
        help_text="One a line: a new name = like which, with its models and slots.",
    )

    def __init__(self, data: Any | None = None, *, weights: Any | None = None) -> None:
        """``weights``: {group id as text: weight as text} to begin with, from the groups page."""
        super().__init__(data)
        self.groups = list(Group.objects.order_by("name"))
        self.backends = list(Backend.objects.order_by("name"))
        site = SiteSettings.objects.filter(pk=1).first() or SiteSettings(pk=1)
        self.now_in_force = {name: in_force(site, name)[0] for name in ("share_mode", *POINTS)}
        self.fields["share_mode"].initial = self.now_in_force["share_mode"]
        for group in self.groups:
            self.fields[f"weight-{group.pk}"] = WeightField(
                label=group.name,
                initial=(weights or {}).get(str(group.pk), weight_text(group.scheduler_weight)),
            )
        for name in POINTS:
            self.fields[name] = forms.FloatField(
                label=name.removeprefix("score_").replace("_", " "),
                min_value=0,
                initial=self.now_in_force[name],
                widget=forms.NumberInput(_input(step="any")),
            )
        for backend in self.backends:
            self.fields[f"slots-{backend.pk}"] = forms.IntegerField(
                label=backend.name,
                min_value=0,
                max_value=_MOST_SLOTS,
                initial=backend.max_concurrent if backend.enabled else 0,
                widget=forms.NumberInput(_input()),
            )

    def sections(self) -> list[tuple[str, str, list[forms.BoundField]]]:
        """The changes: (title, hint, fields)."""
        return [
            (
                "Weights",
                "0 is background, empty is the deprecated environment's.",
                [self[f"weight-{one.pk}"] for one in self.groups],
            ),
            ("Users and mode", "", [self["share_mode"], self["overrides"]]),
            (
                "Slots",
                "0: as if it were not there.",
                [*(self[f"slots-{b.pk}"] for b in self.backends), self["added"]],
            ),
            ("Points", "Of the placement's scores.", [self[name] for name in POINTS]),
        ]

    def clean_overrides(self) -> dict[str, str | None]:
        """{username: weight or None}"""
        found: dict[str, str | None] = {}
        for name, text in self._lines("overrides", "user = weight"):
            weight = WeightField().clean(text)
            found[name] = None if weight is None else weight_text(weight)
        known = set(User.objects.filter(username__in=found).values_list("username", flat=True))
        if unknown := sorted(set(found) - known):
            raise ValidationError(f"There is no user {unknown[0]}.")
        return found

    def clean_added(self) -> dict[str, str]:
        """{a new backend's name: the name of the one that it is like}"""
        names = {backend.name for backend in self.backends}
        found: dict[str, str] = {}
        for name, like in self._lines("added", "new name = like which"):
            if like not in names:
                raise ValidationError(f"There is no backend {like[:80] or 'of no name'}.")
            if name in names or name in found:
                raise ValidationError(f"There is a backend {name[:80]} already.")
            found[name] = like
        return found

    def _lines(self, field: str, form: str) -> Iterator[tuple[str, str]]:
        """(what is before the last = of a line, what is after it). Raises: ValidationError."""
        for line in self.cleaned_data[field].splitlines():
            if not line.strip():
                continue
            name, sign, value = (part.strip() for part in line.rpartition("="))
            if not sign or not name:
                raise ValidationError(f"“{line.strip()[:80]}” is not of the form {form}.")
            yield name, value

    def clean(self) -> dict[str, Any]:
        values = super().clean() or {}
        since, until = values.get("since"), values.get("until")
        if self.errors:
            return values
        if not (since or until) and values.get("period"):
            values["until"] = timezone.now()
            values["since"] = values["until"] - timedelta(hours=int(values["period"]))
        elif not (since and until):
            self.add_error("since", "Say from when to when, or neither and choose a period.")
        elif since >= until:
            self.add_error("until", "It must be later than the beginning.")
        return values

    def period_chosen(self) -> tuple[datetime, datetime]:
        return self.cleaned_data["since"], self.cleaned_data["until"]

    def changes(self) -> Changes:
        """Of a valid form: what differs from what is in force."""
        values = self.cleaned_data
        weights = {str(one.pk): values[f"weight-{one.pk}"] for one in self.groups}
        return Changes(
            groups={
                str(one.pk): None
                if weights[str(one.pk)] is None
                else weight_text(weights[str(one.pk)])
                for one in self.groups
                if weights[str(one.pk)] != one.scheduler_weight
            },
            users=values["overrides"],
            share_mode=(
                values["share_mode"]
                if values["share_mode"] != self.now_in_force["share_mode"]
                else None
            ),
            points={
                name: values[name] for name in POINTS if values[name] != self.now_in_force[name]
            },
            slots={
                str(one.pk): values[f"slots-{one.pk}"]
                for one in self.backends
                if values[f"slots-{one.pk}"] != (one.max_concurrent if one.enabled else 0)
            },
            added=values["added"],
        )
