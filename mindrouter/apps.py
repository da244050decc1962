"""The admin site's application."""

from django.contrib.admin.apps import AdminConfig


class SiteConfig(AdminConfig):
    """Makes ``mindrouter.site.MindRouterSite`` the site that ``@admin.register`` writes to."""

    default_site = "mindrouter.site.MindRouterSite"
