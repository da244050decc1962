"""Fields and the base of the management API's serializers."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar, TypeVar

from django.core.exceptions import ValidationError as ModelValidationError
from django.db import models
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from scheduler.serializers import NumberField, number

M = TypeVar("M", bound=models.Model)
REASON = "management API"


class FiniteField(NumberField):
    """A float, but neither "nan" nor 1e999, as in forms."""

    default_error_messages: ClassVar = {"invalid": "A valid number is required."}

    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool):
            self.fail("invalid")
        value = super().to_internal_value(data)
        if not math.isfinite(value):
            self.fail("invalid")
        return value


@extend_schema_field(
    {"type": "number", "format": "double", "minimum": 0, "maximum": 1e9, "nullable": True}
)
class WeightField(serializers.DecimalField):
    """A share weight: a decimal number on the way in, a plain number on the way out."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, bool):
            self.fail("invalid")
        return super().to_internal_value(data)

    def to_representation(self, value: Any) -> Any:
        return None if value is None else number(value)


class FlagField(serializers.BooleanField):
    """true or false; REST framework would take "yes", 1 and more."""

    def to_internal_value(self, data: Any) -> bool:
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return bool(data)


class CountField(serializers.IntegerField):
    """A whole number; true is none."""

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int):
            self.fail("invalid")
        return super().to_internal_value(data)


class TextField(serializers.CharField):
    """A text; REST framework would take numbers too, and trims unasked."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("trim_whitespace", False)
        super().__init__(**options)

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class NamesField(serializers.ListField):
    """A list of model names."""

    child = TextField(max_length=300)


class RowSerializer(serializers.ModelSerializer[M]):
    """One row. What comes in passes the model's whole validation, as in the admin's forms."""

    serializer_field_mapping: ClassVar = {
        **serializers.ModelSerializer.serializer_field_mapping,
        models.BooleanField: FlagField,
        models.CharField: TextField,
        models.TextField: TextField,
        models.FloatField: FiniteField,
        models.DecimalField: WeightField,
        models.PositiveIntegerField: CountField,
        models.PositiveBigIntegerField: CountField,
        models.PositiveSmallIntegerField: CountField,
    }

    def build_standard_field(
        self, field_name: str, model_field: Any
    ) -> tuple[type[serializers.Field[Any, Any, Any, Any]], dict[str, Any]]:
        field, options = super().build_standard_field(field_name, model_field)
        if model_field.null:  # then that, and not an empty text, is nothing
            options.pop("allow_blank", None)
        return field, options

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        row = self._with(attrs)
        try:
            row.full_clean()
        except ModelValidationError as error:
            raise serializers.ValidationError(serializers.as_serializer_error(error)) from None
        self._row = row  # checked, and with what the check brought into its usual form
        return attrs

    def _with(self, attrs: dict[str, Any]) -> M:
        """A new row, or a copy of the one to change, with ``attrs``."""
        row: M = copy.copy(self.instance) if self.instance is not None else self.Meta.model()  # type: ignore[misc]
        for name, value in attrs.items():
            setattr(row, name, value)
        return row

    def create(self, validated_data: dict[str, Any]) -> M:
        return self._save()

    def update(self, instance: M, validated_data: dict[str, Any]) -> M:
        return self._save()

    def _save(self) -> M:
        self._row._change_reason = REASON  # type: ignore[attr-defined]
        self._row.save()
        return self._row


def columns(model: type[models.Model], *, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names of what may be set of a model, in its order; a new column is never left out."""
    return tuple(
        column.name
        for column in model._meta.fields
        if column.editable and not column.primary_key and column.name not in without
    )
