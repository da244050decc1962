"""Pages on users and their quotas."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin, StackedInline, TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from accounts.admin.people import PeopleActions
from accounts.forms import QuotaForm, weight_text
from accounts.models import LAST_SUPERUSER, LIMITS, ApiKey, Quota, User


class QuotaInline(StackedInline):  # type: ignore[misc]
    model = Quota
    form = QuotaForm
    fields = ("weight_override", *LIMITS)
    extra = 0
    verbose_name_plural = "quota: what differs from the group"


class ApiKeyInline(TabularInline):  # type: ignore[misc]
    model = ApiKey
    fields = readonly_fields = (
        "name",
        "prefix",
        "enabled",
        "expires_at",
        "capture_until",
        "created_at",
    )
    extra = 0
    can_delete = False
    show_change_link = True
    verbose_name_plural = "API keys"

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # a key is shown only when it is made, on its own page


def _link(address: str, text: str) -> SafeString:
    return format_html('<a class="mr-link" href="{}">{}</a>', address, text)


def _list_of(model: str, **filters: Any) -> str:
    return f"{reverse(f'admin:{model}_changelist')}?{urlencode(filters)}"


@admin.register(User)
class UserAdmin(PeopleActions, SimpleHistoryAdmin, DjangoUserAdmin, ModelAdmin):  # type: ignore[misc,type-arg]
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm
    list_display = (
        "username",
        "group_link",
        "short_role",
        "active",
        "superuser",
        "email",
        "keys",
        "more",
    )
    list_select_related = ("group",)
    list_filter = ("group", "role", "is_active", "is_staff", "is_superuser")
    search_fields = ("username", "first_name", "last_name", "email")
    filter_horizontal = ()
    fieldsets = (
        (None, {"fields": ("username", "password", "group")}),
        ("Person", {"fields": ("first_name", "last_name", "email")}),
        (
            "Access to these pages",
            {
                "fields": ("is_active", "role", "is_superuser", "is_staff"),
                "description": "A role above user, and being a superuser, imply staff. Staff reads "
                "everything; an operator changes backends and removes waiting requests besides; "
                "only superusers manage people.",
            },
        ),
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

    def get_queryset(self, request: HttpRequest) -> QuerySet[User]:
        users: QuerySet[User] = super().get_queryset(request)
        return users.annotate(key_count=Count("api_keys", filter=Q(api_keys__enabled=True)))

    @admin.display(description="group", ordering="group__name")
    def group_link(self, user: User) -> SafeString | str:
        if user.group is None:
            return "–"
        return _link(reverse("admin:accounts_group_change", args=[user.group.pk]), user.group.name)

    @admin.display(description="role", ordering="role")
    def short_role(self, user: User) -> str:
        return str(user.role)

    @admin.display(description="active", boolean=True, ordering="is_active")
    def active(self, user: User) -> bool:
        return user.is_active

    @admin.display(description="superuser", boolean=True, ordering="is_superuser")
    def superuser(self, user: User) -> bool:
        return user.is_superuser

    @admin.display(description="keys", ordering="key_count")
    def keys(self, user: Any) -> SafeString:
        return _link(_list_of("accounts_apikey", user__id__exact=user.pk), str(user.key_count))

    @admin.display(description="see also")
    def more(self, user: User) -> SafeString:
        return _link(_list_of("scheduler_decision", user=user.username), "decisions")

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Without any superuser nobody could manage people: then the pages refuse and say why."""
        shown, counts, missing, protected = super().get_deleted_objects(objs, request)
        superusers = User.objects.filter(is_superuser=True, is_active=True)
        if not superusers.exclude(pk__in=[user.pk for user in objs]).exists():
            protected = [*protected, LAST_SUPERUSER]
        return shown, counts, missing, protected

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
