"""Forms of the admin: keys that are typed but never shown, lists of names, yes/no/as detected."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from unfold.widgets import (
    UnfoldAdminPasswordWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanWidget,
)

from backends.models import Alias, Backend, BackendModel, Node
from scheduler.core.jobs import CAPABILITIES

_UNSEEN = UnfoldAdminPasswordWidget(attrs={"autocomplete": "new-password"})


class SecretForm(forms.ModelForm[Any]):
    """A form with one stored key: left empty it is kept, with a tick it is removed."""

    secret: ClassVar[str]
    remove_key = forms.BooleanField(
        required=False,
        label="Remove the stored key",
        widget=UnfoldBooleanWidget,
        help_text="A new key typed above replaces it; then no tick is needed.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stored = getattr(self.instance, self.secret)
        self.initial[self.secret] = ""  # so that an empty field counts as unchanged
        if self._stored and self.secret in self.fields:
            self.fields[self.secret].help_text += " One is stored; leave empty to keep it."

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        if not data.get(self.secret):
            data[self.secret] = None if data.get("remove_key") else self._stored
        return data


class GpuIndexesField(forms.CharField):
    """Numbers of GPUs, with commas or blanks between them; empty is all of a node's."""

    def prepare_value(self, value: Any) -> Any:
        return ", ".join(map(str, value)) if isinstance(value, list) else value

    def to_python(self, value: Any) -> list[int] | None:  # type: ignore[override]
        words = (super().to_python(value) or "").replace(",", " ").split()
        if not words:
            return None
        if not all(word.isascii() and word.isdigit() for word in words):
            raise forms.ValidationError("Give whole numbers with commas between them, as 0, 1.")
        return [int(word) for word in words]

    def has_changed(self, initial: Any, data: Any) -> bool:
        try:
            return bool(initial != self.to_python(data))
        except forms.ValidationError:
            return True


class BackendForm(SecretForm):
    secret = "api_key"  # noqa: S105 - a field's name
    gpu_indexes = GpuIndexesField(
        required=False,
        label="GPUs",
        help_text=Backend._meta.get_field("gpu_indexes").help_text,
        widget=UnfoldAdminTextInputWidget,
    )

    class Meta:
        model = Backend
        fields = "__all__"  # noqa: DJ007 - the admin's fieldsets name them
        widgets: ClassVar = {"api_key": _UNSEEN}


class NodeForm(SecretForm):
    secret = "telemetry_key"  # noqa: S105 - a field's name

    class Meta:
        model = Node
        fields = ("name", "telemetry_url", "telemetry_key")
        widgets: ClassVar = {"telemetry_key": _UNSEEN}


class BackendModelForm(forms.ModelForm[BackendModel]):
    """One model of a backend: each value is what an admin says, or as detected."""

    class Meta:
        model = BackendModel
        fields = ("name", "by_hand", *CAPABILITIES, "context_length", "vram_mib")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in CAPABILITIES:
            detected = getattr(self.instance, f"detected_{name}")
            self._offer_detected(name, {None: "?", True: "yes", False: "no"}[detected])
        for name in ("context_length", "vram_mib"):
            detected = getattr(self.instance, f"detected_{name}")
            if name in self.fields and detected is not None:
                self.fields[name].widget.attrs["placeholder"] = f"{detected:g}"

    def _offer_detected(self, name: str, detected: str) -> None:
        if name in self.fields:
            self.fields[name] = forms.TypedChoiceField(
                required=False,
                label=self.fields[name].label,
                help_text=self.fields[name].help_text,
                choices=[("", f"auto: {detected}"), ("True", "yes"), ("False", "no")],
                coerce=lambda value: value == "True",
                empty_value=None,
                # Unfold's narrower minimum would cut the texts off.
                widget=UnfoldAdminSelectWidget(attrs={"class": "min-w-32"}),
            )


class NamesField(forms.CharField):
    """A list of model names, one a line, in the order of preference."""

    widget = UnfoldAdminTextareaWidget

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(map(str, value)) if isinstance(value, list) else value

    def to_python(self, value: Any) -> list[str]:  # type: ignore[override]
        lines = [line.strip() for line in (super().to_python(value) or "").splitlines()]
        return list(dict.fromkeys(line for line in lines if line))

    def has_changed(self, initial: Any, data: Any) -> bool:
        return bool((initial or []) != self.to_python(data))


class AliasForm(forms.ModelForm[Alias]):
    targets = NamesField(
        help_text="Model names, one a line, best first: the first that any backend has is used."
    )

    class Meta:
        model = Alias
        fields = ("name", "targets")
