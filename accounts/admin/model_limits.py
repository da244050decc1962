"""Pages on what may be used of a model in all."""

from __future__ import annotations

from django.contrib import admin
from simple_history.admin import SimpleHistoryAdmin
from unfold.admin import ModelAdmin

from accounts.models import LIMITS, ModelLimits


@admin.register(ModelLimits)
class ModelLimitsAdmin(SimpleHistoryAdmin, ModelAdmin):  # type: ignore[misc]
    list_display = ("model_name", "requests_per_minute", "tokens_per_minute", "max_concurrent",
                    "token_budget", "budget_period")  # fmt: skip
    search_fields = ("model_name",)
    fieldsets = (
        (None, {"fields": ("model_name",)}),
        ("Limits of all users together", {"fields": LIMITS}),
    )
