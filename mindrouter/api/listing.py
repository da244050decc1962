"""Lists: filters, search, order and pages, all read from one description of the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db.models import Q, QuerySet
from rest_framework import serializers
from rest_framework.filters import BaseFilterBackend
from rest_framework.pagination import LimitOffsetPagination
from rest_framework.request import Request
from rest_framework.views import APIView

from mindrouter.api.fields import TextField

PAGE_SIZE = 100
MOST_ROWS = 1000
_MOST_OFFSET = 2**31


class StrictQuery(serializers.Serializer[Any]):
    """A name that is not known is refused: a filter that is misspelt would otherwise show
    everything."""

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(self.initial_data) - set(self.fields))
        if unknown:
            raise serializers.ValidationError({name: ["Unknown parameter."] for name in unknown})
        return attrs


class PageQuery(StrictQuery):
    """Which page of a list."""

    limit = serializers.IntegerField(
        required=False, min_value=1, max_value=MOST_ROWS, help_text=f"Default {PAGE_SIZE}."
    )
    offset = serializers.IntegerField(required=False, min_value=0, max_value=_MOST_OFFSET)


class ListQuery(PageQuery):
    """What every list of rows takes."""

    search = TextField(required=False, max_length=200, help_text="Text in one of the names.")


def query_class(
    name: str,
    *,
    orders: Sequence[str],
    search: Sequence[str],
    filters: Mapping[str, serializers.Field[Any, Any, Any, Any]],
) -> type[ListQuery]:
    """The query of one list. ``search``: the columns looked into."""
    choices = [sign + order for order in orders for sign in ("", "-")]
    ordering = serializers.ChoiceField(
        choices=choices, required=False, help_text="- is descending."
    )
    fields = {"ordering": ordering, **filters, "search_columns": tuple(search)}
    return type(f"{name}Query", (ListQuery,), fields)


def read_query(request: Request, description: type[StrictQuery]) -> dict[str, Any]:
    """The valid query. Raises: ValidationError."""
    query = description(data=request.query_params.dict())
    query.is_valid(raise_exception=True)
    values: dict[str, Any] = query.validated_data
    return values


class QueryFilter(BaseFilterBackend):
    """Filters and order as the view's ``query`` describes. ``columns``: {parameter: lookup}."""

    def filter_queryset(
        self, request: Request, queryset: QuerySet[Any], view: Any
    ) -> QuerySet[Any]:
        values = read_query(request, view.query)
        columns = getattr(view, "columns", {})
        for name, value in values.items():
            if name not in ("limit", "offset", "search", "ordering"):
                queryset = queryset.filter(**{columns.get(name, name): value})
        if text := values.get("search"):
            found = Q()
            for column in view.query.search_columns:
                found |= Q(**{f"{column}__icontains": text})
            queryset = queryset.filter(found)
        order = values.get("ordering")
        # The number last, so that pages neither repeat nor miss rows.
        return queryset.order_by(*([order] if order else queryset.query.order_by), "pk")


class Pages(LimitOffsetPagination):
    """{"count", "next", "previous", "results"}. Values were checked with the filters."""

    default_limit = PAGE_SIZE
    max_limit = MOST_ROWS

    def get_schema_operation_parameters(self, view: APIView) -> list[dict[str, Any]]:
        return []  # the view's query describes them
