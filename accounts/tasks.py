"""Work for the Celery worker."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from accounts.notices import remind_of_expiry


@shared_task(name="accounts.remind_of_expiry", ignore_result=True)
def remind() -> None:
    """Tell the owners of keys that expire soon."""
    remind_of_expiry(timezone.now())
