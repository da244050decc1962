"""When requests run, and why they ran there."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class SchedulerConfig(AppConfig):
    name = "scheduler"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from audit.triggers import install_append_only
        from scheduler import checks  # noqa: F401  registers the system checks
        from scheduler.triggers import install_triggers

        post_migrate.connect(install_triggers, sender=self)
        post_migrate.connect(install_append_only, sender=self, dispatch_uid="append-only")
