"""Forms on groups and quotas: weights that read well, and edits that overwrite nobody else's."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar

from django import forms
from django.contrib.auth.forms import PasswordChangeForm
from django.utils import timezone
from unfold.widgets import UnfoldAdminFileFieldWidget

from accounts.importing import MOST_BYTES, decode
from accounts.models import MAX_WEIGHT, Api, ApiKey, Boost, Group, Quota, User

#: Styled by mindrouter/static/mindrouter/pages.css.
INPUT_CLASS = "mr-input"


class WeightField(forms.DecimalField):
    """A share weight: 0 to 1e9, or empty. Shown without the zeros that the database keeps."""

    def __init__(self, *, required: bool = False, **options: Any) -> None:
        super().__init__(
            required=required,
            min_value=0,
            max_value=MAX_WEIGHT,
            max_digits=16,
            decimal_places=6,
            widget=forms.NumberInput({"class": INPUT_CLASS, "step": "any"}),
            **options,
        )

    def prepare_value(self, value: Any) -> Any:
        return weight_text(value) if isinstance(value, Decimal) else value


def weight_text(weight: Decimal | float | None) -> str:
    """3.000000 as "3", 0.500000 as "0.5", nothing as ""."""
    if weight is None:
        return ""
    text = f"{weight:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class ModelNamesField(forms.CharField):
    """A list of model names, one a line; empty is None ("every model")."""

    def __init__(self, **options: Any) -> None:
        options.pop("encoder", None)
        options.pop("decoder", None)
        options.setdefault("widget", forms.Textarea({"class": INPUT_CLASS, "rows": 4}))
        super().__init__(required=False, **options)

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(map(str, value)) if isinstance(value, list) else value

    def to_python(self, value: Any) -> list[str] | None:  # type: ignore[override]
        lines = [line.strip() for line in (super().to_python(value) or "").splitlines()]
        return list(dict.fromkeys(line for line in lines if line)) or None

    def has_changed(self, initial: Any, data: Any) -> bool:
        return bool((initial or None) != self.to_python(data))


class GroupForm(forms.ModelForm[Group]):
    """Everything about a group, for its own page."""

    scheduler_weight = WeightField(
        label="Scheduler weight", help_text=Group._meta.get_field("scheduler_weight").help_text
    )
    allowed_models = ModelNamesField(help_text="One model name a line. Empty: every model.")

    class Meta:
        model = Group
        fields = "__all__"  # noqa: DJ007  the admin's fieldsets name them


class QuotaForm(forms.ModelForm[Quota]):
    """What differs for one user."""

    weight_override = WeightField(
        label="Weight override", help_text=Quota._meta.get_field("weight_override").help_text
    )

    class Meta:
        model = Quota
        fields = "__all__"  # noqa: DJ007  the admin's fieldsets name them


class BoostForm(forms.ModelForm[Boost]):
    """A timed boost. The user is named in words: a list of thousands would need a script."""

    factor = WeightField(required=True, help_text=Boost._meta.get_field("factor").help_text)
    username = forms.CharField(
        required=False,
        max_length=150,
        widget=forms.TextInput({"class": INPUT_CLASS}),
        help_text="Either a group, or the name of one user.",
    )

    class Meta:
        model = Boost
        fields: ClassVar = ["name", "group", "factor", "starts_at", "ends_at", "reason"]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in ("starts_at", "ends_at"):
            if name in self.fields:  # absent for those who only read
                self.fields[name].help_text = f"In the zone {timezone.get_current_timezone_name()}."
        if self.instance.user is not None:
            self.initial.setdefault("username", self.instance.user.username)

    def clean_username(self) -> User | None:
        name = self.cleaned_data["username"]
        found = User.objects.filter(username=name).first() if name else None
        if name and found is None:
            raise forms.ValidationError("There is no such user.")
        return found

    def _post_clean(self) -> None:
        # Before the model's own check, which looks at whose it is.
        if "username" in self.cleaned_data:
            self.instance.user = self.cleaned_data["username"]
        super()._post_clean()  # type: ignore[misc]


class ApiKeyForm(forms.ModelForm[ApiKey]):
    """Everything about a key but the key."""

    allowed_models = ModelNamesField(
        help_text="One model name or alias a line. Empty: all that its user may use."
    )
    allowed_apis = forms.TypedMultipleChoiceField(
        choices=Api.choices,
        required=False,
        empty_value=None,
        widget=forms.CheckboxSelectMultiple,
        help_text="None: all of them.",
    )

    class Meta:
        model = ApiKey
        fields = "__all__"  # noqa: DJ007  the admin's fieldsets name them

    def clean(self) -> dict[str, Any]:
        values = super().clean() or {}
        if "capture_until" in self.changed_data and "capture_until" in values:
            if values["capture_until"] is None:  # it was set: that is how capturing is stopped
                values |= {"capture_reason": "", "capture_days": None}
            elif values["capture_until"] <= timezone.now():
                self.add_error("capture_until", "It is over already.")
        return values


class OwnKeyForm(forms.ModelForm[ApiKey]):
    """A new key of the user's own."""

    allowed_models = ModelNamesField(
        label="Only these models", help_text="One name a line. Empty: all that you may use."
    )

    class Meta:
        model = ApiKey
        fields: ClassVar = ["name", "expires_at", "allowed_models"]
        labels: ClassVar = {"expires_at": "Expires"}
        help_texts: ClassVar = {"expires_at": "Empty: never."}
        widgets: ClassVar = {
            "name": forms.TextInput({"class": INPUT_CLASS}),
            "expires_at": forms.DateTimeInput(
                {"class": INPUT_CLASS, "type": "datetime-local"}, format="%Y-%m-%dT%H:%M"
            ),
        }

    def __init__(self, data: Any | None = None, *, user: User) -> None:
        super().__init__(data, instance=ApiKey(user=user))

    def clean_name(self) -> str:
        name: str = self.cleaned_data["name"]
        if ApiKey.objects.filter(user=self.instance.user, name=name).exists():
            raise forms.ValidationError("You have a key of this name already.")
        return name

    def clean_expires_at(self) -> datetime | None:
        at: datetime | None = self.cleaned_data["expires_at"]
        if at is not None and at <= timezone.now():
            raise forms.ValidationError("This is in the past.")
        return at

    def save_key(self) -> tuple[ApiKey, str]:
        """Store it; the second is the key itself, which nothing keeps."""
        secret = ApiKey.generate()
        self.instance.set_key(secret)
        return self.save(), secret


class OwnPasswordForm(PasswordChangeForm):
    """Django's, in the pages' clothes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for field in self.fields.values():
            field.widget.attrs["class"] = INPUT_CLASS
            field.widget.attrs.pop("autofocus", None)


class GroupBasicsForm(forms.ModelForm[Group]):
    """What the groups page lets one edit."""

    scheduler_weight = WeightField(label="Weight")

    class Meta:
        model = Group
        fields: ClassVar = ["name", "description", "scheduler_weight"]
        widgets: ClassVar = {
            "name": forms.TextInput({"class": INPUT_CLASS}),
            "description": forms.TextInput({"class": INPUT_CLASS}),
        }


class NewGroupForm(GroupBasicsForm):
    """The short form at the foot of the groups page.

    Its names end differently from the rows' (``scheduler_weight-new``): a program that looks for
    fields whose name ends in ``scheduler_weight`` finds one for each group.
    """

    def add_prefix(self, field_name: str) -> str:
        return f"{field_name}-new"


class GroupRowForm(GroupBasicsForm):
    """One row of the groups page, named by the group's number and not by its place in the table.

    The page carries what each field showed when it was made (``known``). A field that comes back
    as it was shown, or not at all, keeps the database's value: a page left open overwrites
    nobody's later edit.
    """

    known = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, data: Any | None = None, *, instance: Group) -> None:
        super().__init__(data, instance=instance, prefix=f"group-{instance.pk}", auto_id="id_%s")
        self.names = list(GroupBasicsForm.Meta.fields)
        self.before = {name: getattr(instance, name) for name in self.names}
        shown = {name: self._as_shown(name) for name in self.names}
        self.fields["known"].initial = json.dumps(list(shown.values()))
        self.fields["scheduler_weight"].widget.attrs["aria-label"] = f"Weight of {instance.name}"
        if data is not None:
            self.data = self._with_untouched_fields_as(shown)

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """{field: (before, after)} of a valid form; empty where nothing is to be saved."""
        return {
            name: (before, getattr(self.instance, name))
            for name, before in self.before.items()
            if getattr(self.instance, name) != before
        }

    def _with_untouched_fields_as(self, shown: dict[str, str]) -> dict[str, str]:
        posted = {name: self.data.get(self.add_prefix(name)) for name in self.names}
        known = self._shown_then()
        kept = {
            name: shown[name] if text is None or _one_line_ends(text) == known.get(name) else text
            for name, text in posted.items()
        }
        kept["known"] = json.dumps(list(shown.values()))
        return {self.add_prefix(name): text for name, text in kept.items()}

    def _shown_then(self) -> dict[str, str]:
        try:
            values = json.loads(self.data.get(self.add_prefix("known")) or "[]")
        except ValueError:
            return {}
        return dict(zip(self.names, values, strict=False)) if isinstance(values, list) else {}

    def _as_shown(self, name: str) -> str:
        value = self.fields[name].prepare_value(self.before[name])
        return _one_line_ends("" if value is None else str(value))


def _one_line_ends(text: str) -> str:
    """As browsers do it: a field's line ends may come back as other ones."""
    return text.replace("\r\n", "\n").strip()


_REASON_LENGTH = 100  # of the history's column


def _reason_field() -> forms.CharField:
    return forms.CharField(
        required=False,
        max_length=_REASON_LENGTH,
        widget=forms.TextInput({"class": INPUT_CLASS}),
        help_text="Why; kept in the history of each user.",
    )


class MoveForm(forms.Form):
    """To which group users are moved."""

    group = forms.ModelChoiceField(
        Group.objects.all(),
        required=False,
        empty_label="(no group)",
        widget=forms.Select({"class": INPUT_CLASS}),
    )
    reason = _reason_field()


class EraseForm(forms.Form):
    """What cannot be undone is confirmed."""

    sure = forms.BooleanField(label="Erase the personal data of these users for good")


class ImportForm(forms.Form):
    """A file of users, or the text of one that was checked before."""

    file = forms.FileField(
        required=False, widget=UnfoldAdminFileFieldWidget({"accept": ".csv,text/csv"})
    )
    text = forms.CharField(required=False, strip=False, widget=forms.HiddenInput)
    reason = _reason_field()

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        if data.get("file") is not None:
            data["text"] = decode(data["file"].read(MOST_BYTES + 1))
        elif not data.get("text"):
            raise forms.ValidationError("Choose a file.")
        return data
