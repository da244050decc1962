"""What may be written into a backend's or an alias's fields."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ValidationError

#: Names under which clouds serve their machines' credentials.
METADATA_HOSTS = frozenset({"metadata", "metadata.google.internal", "instance-data"})


def validate_base_url(value: str) -> None:
    """Accept an http(s) URL of a host that may be a backend.

    Private and loopback addresses are fine, that is where backends live; link-local ones are not,
    since cloud metadata services answer there.

    Raises: ValidationError.
    """
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValidationError(f"Not a URL: {error}.") from error
    if parts.scheme not in ("http", "https"):
        raise ValidationError("The URL must begin with http:// or https://.")
    if not parts.hostname or port == 0 or any(c.isspace() or not c.isprintable() for c in value):
        raise ValidationError("The URL needs a host, like http://gpu-1:8000.")
    if parts.username is not None or parts.password is not None:
        raise ValidationError("No credentials in the URL; use the backend's own key field.")
    if parts.query or parts.fragment:
        raise ValidationError("The URL must not have a query or a fragment.")
    _refuse_metadata_address(parts.hostname)


def _refuse_metadata_address(host: str) -> None:
    if host.rstrip(".").lower() in METADATA_HOSTS:
        raise ValidationError("Metadata services are not backends.")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    mapped = getattr(address, "ipv4_mapped", None) or address
    if mapped.is_link_local or mapped.is_multicast or mapped.is_unspecified:
        raise ValidationError("Link-local, multicast and unspecified addresses are not backends.")


def validate_model_names(value: Any) -> None:
    """Accept a non-empty list of non-empty strings. Raises: ValidationError."""
    if not isinstance(value, list) or not value:
        raise ValidationError("Give a list with at least one model name.")
    if not all(isinstance(name, str) and name.strip() for name in value):
        raise ValidationError("Each model name must be a non-empty text.")
