"""Work for the Celery worker."""

from __future__ import annotations

from celery import shared_task

from backends.services import poll_due


@shared_task(name="backends.poll", ignore_result=True)
def poll() -> None:
    """Poll what is due. Comes every second and may overlap itself: each poll is claimed once."""
    poll_due()
