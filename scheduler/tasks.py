"""Work for the Celery worker."""

from __future__ import annotations

import time

from celery import shared_task
from django.utils import timezone

from scheduler import energy, what_if
from scheduler.notices import warn_of_budgets
from scheduler.retention import forget_captures, forget_decisions


@shared_task(name="scheduler.replay", ignore_result=True)
def replay(what_if_id: int) -> None:
    """Replay one scenario, once: a message that comes again finds it taken."""
    row = what_if.take(what_if_id)
    if row is not None:
        what_if.replay(row)


@shared_task(name="scheduler.warn_of_budgets", ignore_result=True)
def warn() -> None:
    """Tell whose budget is nearly or wholly used."""
    warn_of_budgets(time.time())


@shared_task(name="scheduler.forget_decisions", ignore_result=True)
def forget() -> None:
    """Delete decisions and captured prompts that are older than they are to be kept."""
    forget_captures(timezone.now())
    forget_decisions(timezone.now())


@shared_task(name="scheduler.add_up_energy", ignore_result=True)
def add_up_energy() -> None:
    """Add the energy of hours that have ended to those who used it."""
    energy.add_up(timezone.now())
