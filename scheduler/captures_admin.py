"""The list of captured prompts. Each opens the page on which it is read, and that is noted."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from unfold.admin import ModelAdmin

from accounts.authentication import READ_CAPTURES
from accounts.models import ApiKey
from scheduler.captures import kept
from scheduler.models import Capture


class CaptureAdmin(ModelAdmin):  # type: ignore[misc]
    """Nothing is changed here: all that was captured of a key is deleted on the key's page."""

    list_display = ("at", "whose", "key_name", "request_id", "request_size", "answer_size",
                    "delete_at")  # fmt: skip
    list_display_links = ("at",)
    search_fields = ("request_id__exact",)
    search_help_text = "A whole request id."
    list_per_page = 50
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Capture]:
        key = ApiKey.objects.filter(pk=OuterRef("key_id"))
        return kept().annotate(
            whose=Subquery(key.values("user__username")), key_name=Subquery(key.values("name"))
        )

    @admin.display(description="user", ordering="whose")
    def whose(self, capture: Any) -> str:
        return str(capture.whose)

    @admin.display(description="key", ordering="key_name")
    def key_name(self, capture: Any) -> str:
        return str(capture.key_name)

    @admin.display(description="bytes in", ordering="request_bytes")
    def request_size(self, capture: Capture) -> str:
        return f"{capture.request_bytes:,}"

    @admin.display(description="bytes out", ordering="answer_bytes")
    def answer_size(self, capture: Capture) -> str:
        return f"{capture.answer_bytes:,}"

    def has_module_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm(READ_CAPTURES))

    def has_view_permission(self, request: HttpRequest, obj: Capture | None = None) -> bool:
        return bool(request.user.has_perm(READ_CAPTURES))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Capture | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Capture | None = None) -> bool:
        return False

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """The page that notes who reads it; this address only leads there."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = self.get_object(request, object_id)
        if found is None:
            raise Http404
        return redirect("admin:decision_prompt", request_id=found.request_id)
