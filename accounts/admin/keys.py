"""Pages on API keys."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.html import format_html
from django.views.decorators.http import require_POST
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin

from accounts.captures import captured_keys, captures_of, delete_captures
from accounts.forms import ApiKeyForm
from accounts.models import LIMITS, ApiKey


class CapturedFilter(admin.SimpleListFilter):
    title = "prompts captured"
    parameter_name = "captured"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("now", "now")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> QuerySet[ApiKey]:
        return queryset & captured_keys() if self.value() == "now" else queryset


@admin.register(ApiKey)
class ApiKeyAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    list_display = ("name", "prefix", "user", "enabled", "captured", "expires_at", "created_at",
                    "last_used", "may_name_end_user")  # fmt: skip
    list_select_related = ("user", "use")
    list_filter = ("enabled", "may_name_end_user", CapturedFilter)
    change_form_outer_before_template = "accounts/_one_key.html"
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
        (
            "Capture prompts",
            {
                "fields": ApiKey.CAPTURE,
                "description": "Stores what is sent with this key and what is answered, encrypted, "
                "for administrators to read. The key's owner is told until when and why, every "
                "client until when. Tell people before you do it. Empty the first field to stop.",
            },
        ),
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
    actions = ("disable", "enable", "stop_capture")

    def get_fieldsets(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        return self.add_fieldsets if obj is None else self.fieldsets

    @admin.display(description="last used", ordering="use__last_used_at")
    def last_used(self, key: ApiKey) -> Any:
        return key.last_used_at

    @admin.display(description="captured", ordering="capture_until")
    def captured(self, key: ApiKey) -> str:
        if not key.is_captured:
            return "–"
        until = timezone.localtime(key.capture_until)
        return format_html(
            '<span class="mr-outcome mr-warning" title="{}">until {}</span>',
            f"Until {until:%H:%M}: {key.capture_reason}",
            f"{until:%Y-%m-%d}",
        )

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

    @admin.action(description="Stop capturing prompts of selected keys", permissions=["change"])
    def stop_capture(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        changed = list(queryset.exclude(capture_until=None))
        for key in changed:  # as below
            key.stop_capture()
            key.save(update_fields=ApiKey.CAPTURE)
        self.message_user(request, f"{len(changed)} keys are not captured any more.")

    # ---- on one key's page

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(require_POST(self.captures_view))
        own = path("<int:pk>/captures/", view, name="accounts_apikey_captures")
        return [own, *super().get_urls()]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        key = self.get_object(request, object_id)
        own = {} if key is None else {"captured": captures_of(key).count(), "captured_keys": [key]}
        answer: HttpResponse = super().change_view(
            request, object_id, form_url, own | (extra_context or {})
        )
        return answer

    def captures_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Stop capturing, or delete what is captured."""
        if not self.has_change_permission(request):
            raise PermissionDenied
        keys = self.get_queryset(request).filter(pk=pk)
        key = get_object_or_404(keys)
        if request.POST.get("action") == "stop":
            self.stop_capture(request, keys)
        elif request.POST.get("sure"):
            deleted = delete_captures(key)
            self.message_user(request, f"{deleted} captured prompts were deleted.")
        else:
            self.message_user(request, "Nothing was deleted: tick “for good”.", messages.WARNING)
        return redirect("admin:accounts_apikey_change", pk)

    # ---- common

    def _switch(self, request: HttpRequest, keys: QuerySet[ApiKey], *, enabled: bool) -> None:
        changed = list(keys.exclude(enabled=enabled))
        for key in changed:  # one by one: the history does not see QuerySet.update
            key.enabled = enabled
            key.save(update_fields=["enabled"])
        word = "enabled" if enabled else "disabled"
        self.message_user(request, f"{len(changed)} keys were {word}.", messages.SUCCESS)
