"""Pages on rows with a stored key."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin

from backends.forms import SecretForm


class SecretAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    """For rows with a stored key, which no page may show: not to those who may only look either."""

    form: type[SecretForm]
    #: The title of the fields that only polls fill.
    polled = "As last polled"

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> list[tuple[Any, Any]]:
        hidden: set[str] = set()
        if obj is None or not getattr(obj, self.form.secret):
            hidden.add("remove_key")
        if obj is not None and not self.has_change_permission(request, obj):
            hidden |= {"remove_key", self.form.secret}
        return [
            (title, options | {"fields": [f for f in options["fields"] if f not in hidden]})
            for title, options in super().get_fieldsets(request, obj)
            if obj is not None or title != self.polled
        ]
