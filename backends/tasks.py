"""Work for the Celery worker."""

from __future__ import annotations

from celery import shared_task
from django.utils import timezone

from backends.sampling import forget_samples
from backends.services import poll_due


@shared_task(name="backends.poll", ignore_result=True)
def poll() -> None:
    """Poll what is due. Comes every second and may overlap itself: each poll is claimed once."""
    poll_due()


@shared_task(name="backends.forget_samples", ignore_result=True)
def forget() -> None:
    """Delete telemetry that is older than it is to be kept."""
    forget_samples(timezone.now())
