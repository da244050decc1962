"""What is done without changing a row of the configuration, so that no other history has it."""

from __future__ import annotations

from django.db import models

from audit.records import audited


class Deed(models.Model):
    """A waiting request was removed, a backend was sent a request; its history says who did."""

    subject = models.CharField(max_length=300, help_text="Like: request 01ab…, backend gpu-1.")
    action = models.CharField(max_length=40, help_text="Like: removed, tested.")

    history = audited()

    class Meta:
        verbose_name = "deed"

    def __str__(self) -> str:
        return f"{self.subject} {self.action}"

    @classmethod
    def note(cls, subject: str, action: str) -> None:
        """Say that it was done, by whoever is asking."""
        cls.objects.create(subject=subject[:300], action=action)
