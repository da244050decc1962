"""/admin/what-if/: recorded traffic under another configuration, before it is saved."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import (
    require_GET,
    require_http_methods,
    require_POST,
    require_safe,
)
from kombu.exceptions import OperationalError

from accounts.models import Group
from backends.models import Backend
from scheduler import what_if
from scheduler.models import WhatIf
from scheduler.pages.what_if_form import WhatIfForm
from scheduler.pages.what_if_tables import changed, comparison, utilisation
from scheduler.tasks import replay

_LISTED = 50
_GROUP_WEIGHT = re.compile(r"group-(\d{1,18})-scheduler_weight")
_SAVING = ("accounts.change_group", "accounts.change_quota", "scheduler.change_sitesettings")


@require_http_methods(["GET", "HEAD", "POST"])
def what_ifs(request: HttpRequest) -> HttpResponse:
    """The scenarios there are, and the form for another; a POST starts its replay."""
    _require(request, "scheduler.view_whatif")
    if request.method != "POST":
        weights = {key[2:]: value for key, value in request.GET.items() if key.startswith("w-")}
        return _page(request, WhatIfForm(weights=weights))
    _require(request, "scheduler.add_whatif")
    form = WhatIfForm(request.POST)
    if not form.is_valid():
        return _page(request, form)
    since, until = form.period_chosen()
    row = WhatIf.objects.create(
        name=form.cleaned_data["name"],
        created_by_id=request.user.pk,
        since=since,
        until=until,
        changes=form.changes().as_json(),
    )
    transaction.on_commit(lambda: _send(row.pk))
    return redirect("admin:what_if", row.pk)


@require_POST
def start_again(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Replay a scenario once more whose replay has failed."""
    _require(request, "scheduler.add_whatif")
    if what_if.start_again(get_object_or_404(WhatIf, pk=pk).pk):
        transaction.on_commit(lambda: _send(pk))
    return redirect("admin:what_if", pk)


def _send(pk: int) -> None:
    """Tell a worker of it."""
    try:
        replay.delay(pk)
    except OperationalError as error:
        what_if.fail_unsent(pk, error)


@require_POST
def try_weights(request: HttpRequest) -> HttpResponseBase:
    """From the groups page, before saving: the form with the weights as they were edited there."""
    _require(request, "scheduler.add_whatif")
    edited = {
        f"w-{found[1]}": value
        for name, value in request.POST.items()
        if (found := _GROUP_WEIGHT.fullmatch(name))
    }
    return redirect(f"{reverse('admin:what_ifs')}?{urlencode(edited)}")


@require_safe
def one_what_if(request: HttpRequest, pk: int) -> HttpResponse:
    """One scenario: its progress, then what came out."""
    _require(request, "scheduler.view_whatif")
    what_if.fail_lost(timezone.now())
    row = get_object_or_404(WhatIf.objects.select_related("created_by"), pk=pk)
    request.current_app = admin.site.name
    names = {str(key): name for key, name in Group.objects.values_list("pk", "name")}
    backends = {str(key): name for key, name in Backend.objects.values_list("pk", "name")}
    changes = what_if.Changes(**row.changes)
    context = {
        **admin.site.each_context(request),
        "title": row.name,
        "row": row,
        "changes": changed(changes, names, backends),
        "may_save": _may_save(request) and row.result is not None,
        "may_start": request.user.has_perm("scheduler.add_whatif"),
        "may_delete": request.user.has_perm("scheduler.delete_whatif"),
        "result": row.result,
        "tables": comparison(row.result),
        "utilisation": utilisation(row.result),
    }
    return TemplateResponse(request, "pages/what_if.html", context)


@require_GET
def progress(request: HttpRequest, pk: int) -> HttpResponse:
    """The progress bar alone; once it is over, the whole page is to be loaded."""
    _require(request, "scheduler.view_whatif")
    what_if.fail_lost(timezone.now())
    row = get_object_or_404(WhatIf.objects.defer("result"), pk=pk)
    answer = TemplateResponse(request, "pages/_what_if_progress.html", {"row": row})
    if row.is_over:
        answer["HX-Refresh"] = "true"
    return answer


@require_POST
def save(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Put the scenario's weights, overrides, share mode and points in force."""
    if not _may_save(request):
        raise PermissionDenied
    row = get_object_or_404(WhatIf, pk=pk)
    said = what_if.save_changes(row)
    if said:
        messages.success(request, "Saved: " + "; ".join(said) + ".")
    else:
        messages.info(request, "All of it was in force already.")
    return redirect("admin:what_if", pk)


@require_POST
def delete(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Forget a scenario."""
    _require(request, "scheduler.delete_whatif")
    row = get_object_or_404(WhatIf, pk=pk)
    row.delete()
    messages.success(request, f"Scenario {row.name} was deleted.")
    return redirect("admin:what_ifs")


def _require(request: HttpRequest, permission: str) -> None:
    if not request.user.has_perm(permission):
        raise PermissionDenied


def _may_save(request: HttpRequest) -> bool:
    return all(request.user.has_perm(permission) for permission in _SAVING)


def _page(request: HttpRequest, form: WhatIfForm) -> HttpResponse:
    request.current_app = admin.site.name
    what_if.fail_lost(timezone.now())
    rows = WhatIf.objects.defer("result", "changes").select_related("created_by")[:_LISTED]
    context: dict[str, Any] = {
        **admin.site.each_context(request),
        "title": "What if",
        "form": form,
        "rows": list(rows),
        "may_add": request.user.has_perm("scheduler.add_whatif"),
    }
    return TemplateResponse(request, "pages/what_ifs.html", context)
