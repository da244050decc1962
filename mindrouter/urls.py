"""Addresses of pages and of the management API; the gateway's are in ``asgi.py``."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path

from scheduler.pages.account import home

urlpatterns = [
    path("", home, name="home"),
    path("account/", include("scheduler.pages.account_urls")),
    path("admin/", admin.site.urls),
    path("api/admin/", include("scheduler.urls")),
    path("api/admin/", include("mindrouter.api.urls")),
]
if settings.OIDC_ISSUER:
    # Only these of allauth's: accounts have pages of their own.
    urlpatterns += [path("", include("allauth.socialaccount.providers.openid_connect.urls"))]
