"""The project as an application (for its commands), and the admin site's."""

from django.apps import AppConfig
from django.contrib.admin.apps import AdminConfig


class MindRouterConfig(AppConfig):
    name = "mindrouter"


class SiteConfig(AdminConfig):
    """Makes ``mindrouter.site.MindRouterSite`` the site that ``@admin.register`` writes to."""

    default_site = "mindrouter.site.MindRouterSite"
