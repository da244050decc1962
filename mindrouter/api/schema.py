"""The OpenAPI description: queries of lists, and one form of every error."""

from __future__ import annotations

from typing import Any

from drf_spectacular.openapi import AutoSchema

from mindrouter.api.problems import FieldProblemSerializer, ProblemSerializer


class ApiSchema(AutoSchema):
    """Describes a view's ``query`` beside what its serializers say."""

    def get_override_parameters(self) -> list[Any]:
        if getattr(self.view, "action", None) == "list" and hasattr(self.view, "query"):
            return [self.view.query]
        return []

    def get_filter_backends(self) -> list[Any]:
        return []  # described as overriding parameters


def describe_problems(result: dict[str, Any], generator: Any, **_: Any) -> dict[str, Any]:
    """Every operation may answer a problem."""
    schemas = result["components"].setdefault("schemas", {})
    schemas["Problem"] = _schema_of(ProblemSerializer) | {"required": _ALWAYS}
    schemas["Problem"]["properties"]["errors"] = {
        "type": "array",
        "items": _schema_of(FieldProblemSerializer) | {"required": ["field", "detail"]},
    }
    problem = {
        "description": "A problem (RFC 9457).",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        },
    }
    for operations in result["paths"].values():
        for operation in operations.values():
            operation["responses"]["default"] = problem
    return result


_ALWAYS = ["type", "title", "status", "detail"]


def _schema_of(serializer: Any) -> dict[str, Any]:
    kinds = {"IntegerField": "integer", "CharField": "string"}
    return {
        "type": "object",
        "properties": {
            name: {
                "type": kinds.get(type(field).__name__, "array"),
                **({"description": str(field.help_text)} if field.help_text else {}),
            }
            for name, field in serializer().fields.items()
        },
    }
