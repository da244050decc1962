"""/api/admin/docs/: the description of the API for people, who may try every operation there."""

from __future__ import annotations

from drf_spectacular.views import SpectacularSwaggerSplitView

from scheduler.views import StaffView


class Docs(SpectacularSwaggerSplitView):
    """Swagger UI, from our own server."""

    authentication_classes = StaffView.authentication_classes
    permission_classes = StaffView.permission_classes
    url_name = "api-schema"
