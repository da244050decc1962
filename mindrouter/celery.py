"""The Celery application: polls of backends and other work in the background."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mindrouter.settings")
app = Celery("mindrouter")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
app.set_default()  # also in the threads that pages run in: without it their tasks go to nobody
