"""Admin pages on groups, users, quotas and API keys."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.actions import delete_selected
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.db.models import Count, ProtectedError, QuerySet
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin, StackedInline, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from accounts.forms import GroupForm, QuotaForm, weight_text
from accounts.models import ApiKey, Group, Quota, User

# The project has its own groups; Django's would only confuse.
admin.site.unregister(apps.get_model("auth", "Group"))

LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "token_budget",
    "budget_period",
    "max_wait",
    "max_queued",
)


@admin.register(Group)
class GroupAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    form = GroupForm
    list_display = ("name", "weight", "members", "description")
    search_fields = ("name", "description")
    fieldsets = (
        (None, {"fields": ("name", "description", "scheduler_weight", "allowed_models")}),
        ("Limits of each member", {"fields": LIMITS}),
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


class QuotaInline(StackedInline):  # type: ignore[misc]
    model = Quota
    form = QuotaForm
    fields = ("weight_override", *LIMITS)
    extra = 0
    verbose_name_plural = "quota: what differs from the group"


class ApiKeyInline(TabularInline):  # type: ignore[misc]
    model = ApiKey
    fields = readonly_fields = ("name", "prefix", "enabled", "expires_at", "created_at")
    extra = 0
    can_delete = False
    show_change_link = True
    verbose_name_plural = "API keys"

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # a key is shown only when it is made, on its own page


@admin.register(User)
class UserAdmin(SimpleHistoryAdmin, DjangoUserAdmin, ModelAdmin):  # type: ignore[misc,type-arg]
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = ("username", "group", "role", "is_active", "is_staff", "is_superuser", "email")
    list_select_related = ("group",)
    list_filter = ("group", "role", "is_active", "is_staff", "is_superuser")
    search_fields = ("username", "first_name", "last_name", "email")
    filter_horizontal = ()
    fieldsets = (
        (None, {"fields": ("username", "password", "group")}),
        ("Person", {"fields": ("first_name", "last_name", "email")}),
        ("Access to these pages", {"fields": ("is_active", "is_staff", "role", "is_superuser")}),
        ("Dates", {"fields": ("last_login", "date_joined")}),
    )
    add_fieldsets = (
        (
            None,
            {
                "classes": ("wide",),
                "fields": ("username", "group", "usable_password", "password1", "password2"),
            },
        ),
    )
    readonly_fields = ("last_login", "date_joined")
    inlines = (QuotaInline, ApiKeyInline)

    def get_inlines(self, request: HttpRequest, obj: User | None = None) -> Any:
        return self.inlines if obj else ()


@admin.register(Quota)
class QuotaAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    form = QuotaForm
    list_display = ("user", "group", "weight", "requests_per_minute", "tokens_per_minute",
                    "max_concurrent", "token_budget", "budget_period")  # fmt: skip
    list_select_related = ("user__group",)
    search_fields = ("user__username",)
    autocomplete_fields = ("user",)
    fieldsets = (
        (None, {"fields": ("user", "weight_override")}),
        ("Limits", {"fields": LIMITS}),
    )

    @admin.display(description="group", ordering="user__group__name")
    def group(self, quota: Quota) -> str:
        return str(quota.user.group or "")

    @admin.display(description="weight override", ordering="weight_override")
    def weight(self, quota: Quota) -> str:
        return weight_text(quota.weight_override) or "the group's"


@admin.register(ApiKey)
class ApiKeyAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    list_display = ("name", "prefix", "user", "enabled", "expires_at", "created_at",
                    "may_name_end_user")  # fmt: skip
    list_select_related = ("user",)
    list_filter = ("enabled", "may_name_end_user")
    search_fields = ("name", "prefix", "user__username")
    autocomplete_fields = ("user",)
    fields = ("user", "name", "prefix", "enabled", "expires_at", "may_name_end_user", "created_at")
    readonly_fields = ("prefix", "created_at")
    actions = ("disable", "enable")

    def get_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> Any:
        if obj is None:
            return ("user", "name", "expires_at", "may_name_end_user")
        return self.fields

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
