"""Columns that hold lists."""

from __future__ import annotations

from django.db import models


class NumbersField(models.JSONField):
    """A list of whole numbers, or null."""

    empty_values = (None, "")  # an empty list is a value: the validators look at it
