"""What is done to many users at once: imported, moved to another group, erased."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from unfold.admin import ModelAdmin

from accounts.erasing import erase, erased_name
from accounts.forms import EraseForm, ImportForm, MoveForm
from accounts.importing import COLUMNS, read, save
from accounts.models import User

#: Rows of a file that the page shows; all are checked and counted.
MOST_SHOWN = 200


class PeopleActions(ModelAdmin):  # type: ignore[misc]
    """The actions of ``UserAdmin``. Each shows what it will do before it does it."""

    actions = ("move_to_group", "erase")
    list_before_template = "accounts/_users_tools.html"

    # ---- moving

    @admin.action(description="Move to another group", permissions=["change"])
    def move_to_group(self, request: HttpRequest, users: QuerySet[User]) -> HttpResponse | None:
        form = MoveForm(request.POST if _is_confirmed(request, users) else None)
        if not form.is_bound or not form.is_valid():
            return self._ask(request, "Move to another group", "accounts/move.html", users, form)
        group = form.cleaned_data["group"]
        moved = list(users.exclude(group=group) if group else users.filter(group__isnull=False))
        with transaction.atomic():
            for user in moved:  # one by one: the history does not see QuerySet.update
                user.group = group
                user._change_reason = form.cleaned_data["reason"] or "moved"  # type: ignore[attr-defined]
                user.save(update_fields=["group"])
        where = f"group {group}" if group else "no group"
        self.message_user(request, f"{len(moved)} users were moved to {where}.", messages.SUCCESS)
        return None

    # ---- erasing

    @admin.action(description="Erase personal data", permissions=["delete"])
    def erase(self, request: HttpRequest, users: QuerySet[User]) -> HttpResponse | None:
        form = EraseForm(request.POST if _is_confirmed(request, users) else None)
        if not form.is_bound or not form.is_valid():
            return self._ask(request, "Erase personal data", "accounts/erase.html", users, form)
        for user in users:
            try:
                rows = erase(user)
            except ValidationError as error:
                self.message_user(request, f"{user}: {error.messages[0]}", messages.ERROR)
                continue
            text = f"{erased_name(user)}: erased, also in {rows:,} recorded requests."
            self.message_user(request, text, messages.SUCCESS)
        return None

    def _ask(
        self, request: HttpRequest, title: str, template: str, users: QuerySet[User], form: Any
    ) -> HttpResponse:
        chosen = users.select_related("group").order_by("username")
        context = {
            "title": title,
            "form": form,
            "users": chosen[:MOST_SHOWN],
            "count": chosen.count(),
            "selected": request.POST.getlist("_selected_action"),
            "everywhere": request.POST.get("select_across", "0"),
        }
        return self._page(request, template, context)

    # ---- a file of users

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.import_view)
        return [path("import/", view, name="accounts_user_import"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        may = {"may_import": self._may_import(request)}
        response: HttpResponse = super().changelist_view(request, may | (extra_context or {}))
        return response

    def import_view(self, request: HttpRequest) -> HttpResponse:
        """A file is checked and shown; sent once more with "apply" it is saved."""
        if not self._may_import(request):
            raise PermissionDenied
        form = ImportForm(request.POST or None, request.FILES or None)
        context = {"title": "Import users", "form": form, "columns": COLUMNS}
        if not form.is_bound or not form.is_valid():
            return self._page(request, "accounts/import.html", context)
        found = read(form.cleaned_data["text"])
        if found.is_valid and "apply" in request.POST:
            by = request.user if isinstance(request.user, User) else None
            count = save(found, form.cleaned_data["reason"] or "CSV import", by)
            self.message_user(request, f"{count} users were imported.", messages.SUCCESS)
            return redirect("admin:accounts_user_changelist")
        # What is wrong is shown first.
        rows = sorted(found.rows, key=lambda row: (not row.errors, not row.is_changed, row.line))
        context |= {
            "found": found,
            "counts": found.counts(),
            "rows": rows[:MOST_SHOWN],
            "hidden": max(0, len(rows) - MOST_SHOWN),
            "text": form.cleaned_data["text"],
            "reason": form.cleaned_data["reason"],
        }
        return self._page(request, "accounts/import.html", context)

    def _may_import(self, request: HttpRequest) -> bool:
        return bool(self.has_add_permission(request) and self.has_change_permission(request))

    def _page(self, request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request, template, {**self.admin_site.each_context(request), **context}
        )


def _is_confirmed(request: HttpRequest, users: QuerySet[User]) -> bool:
    """Whether these are as many users as the question was about: "all that are found" may be
    others by now. If not, it is asked once more."""
    return "apply" in request.POST and request.POST.get("count") == str(users.count())
