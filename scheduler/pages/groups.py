"""/admin/groups/: every weight, the share it gives, and the share that was received."""

from __future__ import annotations

from collections import Counter
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from accounts.forms import GroupRowForm, NewGroupForm, weight_text
from accounts.models import Boost, Group
from scheduler import services, standing

_REASON_LENGTH = 100  # of the history's column


@require_http_methods(["GET", "HEAD", "POST"])
def groups(request: HttpRequest) -> HttpResponse:
    """The table; a POST saves all rows or none."""
    _require(request, "accounts.view_group")
    if request.method != "POST":
        return _page(request, _row_forms(request))
    _require(request, "accounts.change_group")
    forms = _row_forms(request, request.POST)
    saved = _save_all(request, forms)
    if saved is None:
        return _page(request, forms)
    if saved:
        messages.success(request, "Saved: " + "; ".join(saved) + ".")
    else:
        messages.info(request, "Nothing was changed.")
    return redirect("admin:groups")


@require_POST
def add_group(request: HttpRequest) -> HttpResponse:
    """Makes a group from the short form below the table."""
    _require(request, "accounts.add_group")
    form = NewGroupForm(request.POST)
    if not form.is_valid():
        return _page(request, _row_forms(request), form)
    group = form.save()
    messages.success(request, f"Group {group.name} was added.")
    return redirect("admin:groups")


@require_GET
def group_figures(request: HttpRequest) -> HttpResponse:
    """Only the figures, for htmx to put into place; the inputs being edited are left alone."""
    _require(request, "accounts.view_group")
    context = {"live": (view := services.live()), "figures": standing.group_figures(view)}
    return TemplateResponse(request, "pages/_group_figures.html", {**context, "oob": True})


@require_POST
def end_boost(request: HttpRequest, pk: int) -> HttpResponse:
    """Ends a boost now; one that has not begun is taken away."""
    _require(request, "accounts.change_boost")
    boost = get_object_or_404(Boost, pk=pk)
    boost.end(timezone.now(), "ended early")
    messages.success(request, f"The boost {boost.name} is over.")
    return redirect("admin:groups")


def _require(request: HttpRequest, permission: str) -> None:
    if not request.user.has_perm(permission):
        raise PermissionDenied


def _row_forms(request: HttpRequest, data: Any | None = None) -> list[GroupRowForm]:
    forms = [GroupRowForm(data, instance=group) for group in Group.objects.order_by("name")]
    if not request.user.has_perm("accounts.change_group"):
        for form in forms:
            for field in form.fields.values():
                field.disabled = True
    return forms


def _save_all(request: HttpRequest, forms: list[GroupRowForm]) -> list[str] | None:
    """Saves every changed row and says what changed; None and nothing saved if one is wrong."""
    # All are validated, so that every error shows at once.
    if not all([form.is_valid() for form in forms]):  # noqa: C419
        return None
    names = Counter(form.instance.name for form in forms)
    doubles = [form for form in forms if names[form.instance.name] > 1 and form.changes()]
    for form in doubles:
        form.add_error("name", "Another row has this name.")
    if doubles:
        return None
    with transaction.atomic():
        return [text for form in forms if (text := _save(request, form))]


def _save(request: HttpRequest, form: GroupRowForm) -> str:
    """Saves one row through the model, so that the history knows who and why; says what changed."""
    changes = form.changes()
    if not changes:
        return ""
    reason = request.POST.get("reason", "")[:_REASON_LENGTH] or None
    form.instance._change_reason = reason  # type: ignore[attr-defined]
    form.save()
    name = form.before["name"]
    return ", ".join(_describe(name, field, *values) for field, values in changes.items())


def _describe(group: str, field: str, before: Any, after: Any) -> str:
    if field == "scheduler_weight":
        return f"{group} {weight_text(before) or 'unset'} → {weight_text(after) or 'unset'}"
    return f"{group} is now {after}" if field == "name" else f"description of {group}"


def _page(
    request: HttpRequest, forms: list[GroupRowForm], new: NewGroupForm | None = None
) -> HttpResponse:
    view = services.live()
    figures = standing.group_figures(view)
    by_id = {one.group_id: one for one in figures}
    request.current_app = admin.site.name
    context = {
        **admin.site.each_context(request),
        "title": "Groups and shares",
        "live": view,
        "figures": figures,
        "rows": [(form, by_id[form.instance.pk]) for form in forms],
        "without_group": by_id.get(None),
        "has_errors": any(form.errors for form in forms if form.is_bound),
        "mode": standing.share_mode(),
        "new": new or NewGroupForm(),
        "may_edit": request.user.has_perm("accounts.change_group"),
        "boosts": _boosts(),
    }
    return TemplateResponse(request, "pages/groups.html", context)


def _boosts() -> list[tuple[Boost, str]]:
    """(boost, state) of those in force and to come, in the order of their ends."""
    now = timezone.now()
    rows = Boost.objects.filter(ends_at__gt=now).select_related("group", "user", "made_by")
    return [(one, one.state(now).value) for one in rows.order_by("ends_at", "name")]
