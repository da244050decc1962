"""/admin/advice/: what of the configuration does not do what it seems to."""

from __future__ import annotations

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.views.decorators.http import require_safe

from scheduler import advising
from scheduler.advice import RULES


@require_safe
def advice(request: HttpRequest) -> HttpResponse:
    """The gravest first; each with the page on which it is mended."""
    if not request.user.has_perm("accounts.view_group"):
        raise PermissionDenied
    request.current_app = admin.site.name
    context = {
        **admin.site.each_context(request),
        "title": "Advice",
        "rows": [(one, advising.address(one)) for one in advising.advice()],
        "rules": len(RULES),
    }
    return TemplateResponse(request, "pages/advice.html", context)
