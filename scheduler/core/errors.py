"""Why the scheduler says no.

SchedulerError
├── Rejected   never queued: refused when it was submitted
└── Evicted    was queued, then dropped: longest wait, room for others, cancelled by an admin
"""

from __future__ import annotations


class SchedulerError(Exception):
    """``reason`` is one of the codes clients and records see; ``retry_after`` is in seconds, 1–60,
    or None where waiting cannot help. ``hopeless``: nor within the next minute."""

    def __init__(
        self,
        reason: str,
        message: str,
        retry_after: int | None = None,
        *,
        hopeless: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.hopeless = hopeless


class Rejected(SchedulerError):  # noqa: N818  a state of the job, as in the glossary
    """The job was never queued."""


class Evicted(SchedulerError):  # noqa: N818  likewise
    """The job was queued and has been dropped without being served."""
