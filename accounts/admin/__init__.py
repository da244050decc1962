"""Admin pages on groups, users, quotas, API keys and boosts."""

from django.apps import apps
from django.contrib import admin

from accounts.admin import boosts, groups, keys, model_limits, users

__all__ = ["boosts", "groups", "keys", "model_limits", "users"]

# The project has its own groups; Django's would only confuse.
admin.site.unregister(apps.get_model("auth", "Group"))
