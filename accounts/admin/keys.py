"""Pages on API keys."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin

from accounts.forms import ApiKeyForm
from accounts.models import LIMITS, ApiKey


@admin.register(ApiKey)
class ApiKeyAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    list_display = ("name", "prefix", "user", "enabled", "expires_at", "created_at",
                    "last_used", "may_name_end_user")  # fmt: skip
    list_select_related = ("user", "use")
    list_filter = ("enabled", "may_name_end_user")
    search_fields = ("name", "prefix", "user__username")
    autocomplete_fields = ("user",)
    form = ApiKeyForm
    fieldsets = (
        (
            None,
            {
                "fields": (
                    "user",
                    "name",
                    "prefix",
                    "enabled",
                    "expires_at",
                    "may_name_end_user",
                    "allowed_models",
                    "allowed_apis",
                    "created_at",
                    "previous_until",
                    "last_used",
                )
            },
        ),
        ("Limits of this key, besides its user's", {"fields": LIMITS}),
    )
    add_fieldsets = (
        (
            None,
            {
                "fields": (
                    "user",
                    "name",
                    "expires_at",
                    "may_name_end_user",
                    "allowed_models",
                    "allowed_apis",
                )
            },
        ),
        ("Limits of this key, besides its user's", {"fields": LIMITS}),
    )
    readonly_fields = ("prefix", "created_at", "previous_until", "last_used")
    actions = ("disable", "enable")

    def get_fieldsets(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        return self.add_fieldsets if obj is None else self.fieldsets

    @admin.display(description="last used", ordering="use__last_used_at")
    def last_used(self, key: ApiKey) -> Any:
        return key.last_used_at

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        # A key handed to somebody else would take its user's share along.
        return self.readonly_fields if obj is None else ("user", *self.readonly_fields)

    def save_model(
        self, request: HttpRequest, obj: ApiKey, form: ModelForm[ApiKey], change: bool
    ) -> None:
        if not change:
            request.new_api_key = ApiKey.generate()  # type: ignore[attr-defined]
            obj.set_key(request.new_api_key)  # type: ignore[attr-defined]
        super().save_model(request, obj, form, change)

    def response_add(
        self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None
    ) -> HttpResponse:
        """Shows the key, this once, as the answer itself: a message would keep it in a cookie."""
        context = {
            **self.admin_site.each_context(request),
            "title": f"The new key of {obj.user}",
            "api_key": obj,
            "secret": request.new_api_key,  # type: ignore[attr-defined]
        }
        return TemplateResponse(request, "pages/api_key_created.html", context)

    @admin.action(description="Disable selected keys", permissions=["change"])
    def disable(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        self._switch(request, queryset, enabled=False)

    @admin.action(description="Enable selected keys", permissions=["change"])
    def enable(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        self._switch(request, queryset, enabled=True)

    def _switch(self, request: HttpRequest, keys: QuerySet[ApiKey], *, enabled: bool) -> None:
        changed = list(keys.exclude(enabled=enabled))
        for key in changed:  # one by one: the history does not see QuerySet.update
            key.enabled = enabled
            key.save(update_fields=["enabled"])
        word = "enabled" if enabled else "disabled"
        self.message_user(request, f"{len(changed)} keys were {word}.", messages.SUCCESS)
