"""Pages of the decision log without counting: each begins where another one ended."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q
from rest_framework.exceptions import ValidationError
from rest_framework.pagination import BasePagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param
from rest_framework.views import APIView

from scheduler.models import Decision

PAGE_SIZE = 100


@dataclass(frozen=True)
class _Cursor:
    """Next to which row a page lies, and on which side."""

    backwards: bool  # the page before (newer than) the row, not the one after it
    arrived_at: datetime
    id: int

    def encode(self) -> str:
        text = f"{'b' if self.backwards else 'f'} {self.id} {self.arrived_at.isoformat()}"
        return base64.urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def decode(cls, text: str) -> _Cursor:
        """Raises: ValidationError."""
        try:
            side, number, time = base64.urlsafe_b64decode(text).decode().split(" ")
            cursor = cls(side == "b", datetime.fromisoformat(time), int(number))
        except (ValueError, UnicodeError):
            raise ValidationError({"cursor": ["Invalid cursor."]}) from None
        if cursor.arrived_at.tzinfo is None or not 0 <= cursor.id < 2**63:
            raise ValidationError({"cursor": ["Invalid cursor."]})
        return cursor

    def beyond(self) -> Q:
        """The rows on this side. Its first part alone bounds the range read from an index."""
        if self.backwards:
            strictly = Q(arrived_at__gt=self.arrived_at) | Q(id__gt=self.id)
            return Q(arrived_at__gte=self.arrived_at) & strictly
        strictly = Q(arrived_at__lt=self.arrived_at) | Q(id__lt=self.id)
        return Q(arrived_at__lte=self.arrived_at) & strictly


class DecisionPagination(BasePagination):
    """Newest first. A page costs the same wherever it is, and rows that come shift none."""

    def paginate_queryset(
        self, queryset: Any, request: Request, view: APIView | None = None
    ) -> list[Any]:
        size = int(request.query_params.get("page_size", PAGE_SIZE))
        text = request.query_params.get("cursor")
        cursor = _Cursor.decode(text) if text else None
        backwards = cursor is not None and cursor.backwards
        order = ("arrived_at", "id") if backwards else ("-arrived_at", "-id")
        rows = queryset.order_by(*order)
        if cursor:
            rows = rows.filter(cursor.beyond())
        found = list(rows[: size + 1])
        page, has_more = found[:size], len(found) > size
        if backwards:
            page.reverse()
        self._url = request.build_absolute_uri()
        self._links = (
            self._link(page, -1, wanted=backwards or has_more),
            self._link(page, 0, wanted=has_more if backwards else cursor is not None),
        )
        return page

    def _link(self, page: Sequence[Decision], index: int, *, wanted: bool) -> str | None:
        """To the page after the last row (index -1) or before the first (0)."""
        if not page or not wanted:
            return None
        row = page[index]
        cursor = _Cursor(index == 0, row.arrived_at, row.pk)
        return str(replace_query_param(self._url, "cursor", cursor.encode()))

    def get_paginated_response(self, data: Any) -> Response:
        after, before = self._links
        return Response({"next": after, "previous": before, "results": data})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        link = {"type": "string", "format": "uri", "nullable": True}
        return {
            "type": "object",
            "required": ["next", "previous", "results"],
            "properties": {"next": link, "previous": link, "results": schema},
        }
