"""Admin pages on groups, users, quotas and API keys."""

from django.apps import apps
from django.contrib import admin

from accounts.admin import groups, keys, users

__all__ = ["groups", "keys", "users"]

# The project has its own groups; Django's would only confuse.
admin.site.unregister(apps.get_model("auth", "Group"))
