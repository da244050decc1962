"""Pages on timed boosts."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest
from django.utils import timezone
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin

from accounts.forms import BoostForm, weight_text
from accounts.models import Boost, User


@admin.register(Boost)
class BoostAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    form = BoostForm
    list_display = ("name", "whose", "times", "state", "starts_at", "ends_at", "made_by")
    list_select_related = ("group", "user", "made_by")
    search_fields = ("name", "group__name", "user__username", "reason")
    fields = ("name", "group", "username", "factor", "starts_at", "ends_at", "reason", "made_by")
    readonly_fields = ("made_by",)
    actions = ("end_now",)

    @admin.display(description="factor", ordering="factor")
    def times(self, boost: Boost) -> str:
        return f"×{weight_text(boost.factor)}"

    @admin.display(description="state")
    def state(self, boost: Boost) -> str:
        return boost.state(timezone.now()).value

    def save_model(
        self, request: HttpRequest, obj: Boost, form: ModelForm[Boost], change: bool
    ) -> None:
        if not change and isinstance(request.user, User):
            obj.made_by = request.user
        obj._change_reason = obj.reason[:100] or None
        super().save_model(request, obj, form, change)

    @admin.action(description="End now", permissions=["change"])
    def end_now(self, request: HttpRequest, boosts: QuerySet[Boost]) -> None:
        now = timezone.now()
        for boost in boosts:  # one by one: the history does not see QuerySet.update
            boost.end(now, "ended early")
        self.message_user(request, "The selected boosts are over.", messages.SUCCESS)

    def get_form(self, request: HttpRequest, obj: Any = None, **options: Any) -> Any:
        # The admin asks for what it shows; the username is the form's own.
        return super().get_form(request, obj, **{**options, "fields": BoostForm.Meta.fields})
