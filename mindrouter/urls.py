"""Addresses of pages and of the management API; the gateway's are in ``asgi.py``."""

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("api/admin/", include("scheduler.urls")),
    path("api/admin/", include("mindrouter.api.urls")),
]
