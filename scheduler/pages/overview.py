"""The first page's figures."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.views.decorators.http import require_GET

from scheduler import services


def overview_context(request: HttpRequest) -> dict[str, Any]:
    """What the cards show; nothing for staff who may not read groups."""
    if not request.user.has_perm("accounts.view_group"):
        return {}
    view = services.live()
    return {"live": view, "overview": services.overview(view), "is_reader": True}


@require_GET
def figures(request: HttpRequest) -> HttpResponse:
    """The cards alone, for htmx to put into place."""
    context = {**overview_context(request), "oob": True}
    return TemplateResponse(request, "pages/_overview_cards.html", context)
