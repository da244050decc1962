"""Errors of the management API as problem details (RFC 9457)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from django.core.exceptions import ValidationError as ModelValidationError
from django.db import IntegrityError, InterfaceError, OperationalError
from django.db.models import ProtectedError
from rest_framework import serializers
from rest_framework.exceptions import APIException, ValidationError
from rest_framework.renderers import JSONRenderer
from rest_framework.response import Response
from rest_framework.views import exception_handler

logger = logging.getLogger(__name__)
_MOST_NAMED = 5


class ProblemRenderer(JSONRenderer):
    media_type = "application/problem+json"


class FieldProblemSerializer(serializers.Serializer[Any]):
    field = serializers.CharField(help_text="Like targets.0; empty: the whole.", allow_blank=True)
    detail = serializers.CharField()


class ProblemSerializer(serializers.Serializer[Any]):
    """What every error says (RFC 9457)."""

    type = serializers.CharField(help_text="Always about:blank: the status says it.")
    title = serializers.CharField(help_text="The status in words.")
    status = serializers.IntegerField()
    detail = serializers.CharField()
    # "errors" (with 400 only) is described apart: every serializer has an attribute of that name.


class Conflict(APIException):
    status_code = 409
    default_detail = "This does not fit what is stored."
    default_code = "conflict"


class Unavailable(APIException):
    status_code = 503
    default_detail = "The database does not answer."
    default_code = "unavailable"


def problem_response(error: Exception, context: dict[str, Any]) -> Response | None:
    """REST framework's ``EXCEPTION_HANDLER``. None: a mistake of ours, which becomes a 500."""
    error = _as_api_error(error)
    response = exception_handler(error, context)
    if response is None:
        return None
    request = context["request"]
    request.accepted_renderer = ProblemRenderer()  # also where the client asked for another form
    request.accepted_media_type = ProblemRenderer.media_type
    status = response.status_code
    response.data = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": _detail(error),
    }
    if isinstance(error, ValidationError):
        errors = list(_flat(error.detail, ""))
        response.data |= {"errors": errors, "detail": _summary(errors)}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        response["Retry-After"] = "5"
    return response


def _as_api_error(error: Exception) -> Exception:
    match error:
        case ModelValidationError():
            return ValidationError(serializers.as_serializer_error(error))
        case ProtectedError():
            return Conflict(_still_used(error))
        case IntegrityError():
            return Conflict()
        case InterfaceError() | OperationalError():
            logger.error("The management API cannot use the database: %s", error)
            return Unavailable()
    return error


def _still_used(error: ProtectedError) -> str:
    holders = sorted(map(str, error.protected_objects))
    text = ", ".join(holders[:_MOST_NAMED]) + (" …" if len(holders) > _MOST_NAMED else "")
    return f"{error.args[0]} ({text})" if "superuser" in error.args[0] else f"Still used by {text}."


def _detail(error: Exception) -> str:
    detail = getattr(error, "detail", None)
    return str(detail) if isinstance(detail, str) else str(error)


def _flat(detail: Any, path: str) -> Iterator[dict[str, str]]:
    """REST framework's nested errors, one after the other with their paths."""
    if isinstance(detail, dict):
        for name, inner in detail.items():
            own = "" if name in ("non_field_errors", "__all__") else str(name)
            yield from _flat(inner, ".".join(part for part in (path, own) if part))
    elif isinstance(detail, list):
        for inner in detail:
            yield from _flat(inner, path)
    else:
        yield {"field": path, "detail": str(detail)}


def _summary(errors: list[dict[str, str]]) -> str:
    return " ".join(
        f"{one['field']}: {one['detail']}" if one["field"] else one["detail"] for one in errors
    )
