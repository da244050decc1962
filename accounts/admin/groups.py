"""Pages on groups."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.db.models import Count, ProtectedError, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.html import format_html
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin

from accounts.forms import GroupForm, weight_text
from accounts.models import LIMITS, TOTALS, Group


@admin.register(Group)
class GroupAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    form = GroupForm
    list_display = ("name", "weight", "members", "description")
    search_fields = ("name", "description")
    fieldsets = (
        (None, {"fields": ("name", "description", "scheduler_weight", "allowed_models")}),
        ("Limits of each member", {"fields": LIMITS}),
        ("Limits of all members together", {"fields": TOTALS}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Group]:
        return Group.objects.annotate(member_count=Count("members"))

    @admin.display(description="weight", ordering="scheduler_weight")
    def weight(self, group: Group) -> str:
        return weight_text(group.scheduler_weight) or "not set"

    @admin.display(description="members", ordering="member_count")
    def members(self, group: Any) -> str:
        address = reverse("admin:accounts_user_changelist")
        return format_html(
            '<a href="{}?group__id__exact={}">{}</a>', address, group.pk, group.member_count
        )

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        actions: dict[str, Any] = super().get_actions(request)
        if "delete_selected" in actions:  # absent without the permission
            _, name, description = actions["delete_selected"]
            actions[name] = (GroupAdmin.delete_unused, name, description)
        return actions

    def delete_unused(self, request: HttpRequest, queryset: QuerySet[Group]) -> HttpResponse | None:
        """Django's own would list every member of the groups in use, or fail."""
        if in_use := describe_use(queryset):
            self._refuse(request, in_use)
            return None
        try:
            answer: HttpResponse | None = delete_selected(self, request, queryset)
        except ProtectedError:  # somebody joined between the question and the answer
            self._refuse(request, describe_use(queryset))
            return None
        return answer

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        chosen = Group.objects.filter(pk=object_id) if object_id.isdecimal() else None
        if chosen is not None and self.has_delete_permission(request):
            if in_use := describe_use(chosen):
                self._refuse(request, in_use)
                return redirect("admin:groups")
            try:
                answer: HttpResponse = super().delete_view(request, object_id, extra_context)
            except ProtectedError:
                self._refuse(request, describe_use(chosen))
                return redirect("admin:groups")
            return answer
        plain: HttpResponse = super().delete_view(request, object_id, extra_context)
        return plain

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: int) -> HttpResponse:
        super().response_delete(request, obj_display, obj_id)  # for its message
        return redirect("admin:groups")

    def _refuse(self, request: HttpRequest, in_use: str) -> None:
        self.message_user(
            request,
            f"Nothing was deleted: {in_use}. Move them to another group first.",
            messages.ERROR,
        )


def describe_use(groups: QuerySet[Group]) -> str:
    """ "faculty has 12 users, staff has 1 user"; empty where no group is in use."""
    used = (
        Group.objects.filter(pk__in=groups.values("pk"))
        .annotate(users=Count("members"))
        .filter(users__gt=0)
        .order_by("name")
        .values_list("name", "users")
    )
    return ", ".join(f"{name} has {count} user{'s' * (count != 1)}" for name, count in used)
