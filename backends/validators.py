"""What may be written into a backend's or an alias's fields."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ValidationError

from backends.addresses import objection

#: Names under which clouds serve their machines' credentials.
METADATA_HOSTS = frozenset({"metadata", "metadata.google.internal", "instance-data"})


def validate_name(value: str) -> None:
    """Accept a name that can stand in a header and on one line of a page.

    Raises: ValidationError.
    """
    if not value.isprintable():
        raise ValidationError("A name must not have line ends or other control characters.")


def validate_base_url(value: str) -> None:
    """Accept a backend's address: a server's URL, which paths are put behind.

    Raises: ValidationError.
    """
    validate_server_url(value)
    parts = urlsplit(value)
    if parts.query or parts.fragment or value.endswith(("?", "#")):
        raise ValidationError("The URL must not have a query or a fragment.")
    if not parts.path.isascii():
        raise ValidationError("The path of the URL must be percent-encoded.")


def validate_server_url(value: str) -> None:
    """Accept an http(s) URL of a host that may be asked.

    What a name stands for is looked at again with each connection (``backends.dial``).

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
    _refuse_metadata_address(parts.hostname)


def _refuse_metadata_address(host: str) -> None:
    if host.rstrip(".").lower() in METADATA_HOSTS:
        raise ValidationError("Metadata services are not backends.")
    if why := objection(host):
        raise ValidationError(why)


def validate_key(value: str) -> None:
    """Accept a key that can stand in a header: printable ASCII without blanks.

    Raises: ValidationError.
    """
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ValidationError("A key is of printable ASCII characters, without blanks.")


def validate_seconds(value: float) -> None:
    """Accept a millisecond to ten days. Raises: ValidationError."""
    _validate_between(value, 0.001, 864_000)


def validate_mib(value: float) -> None:
    """Accept 0 to a pebibyte. Raises: ValidationError."""
    _validate_between(value, 0, 2**30)


def validate_priority(value: float) -> None:
    """Accept -1e6 to 1e6. Raises: ValidationError."""
    _validate_between(value, -1e6, 1e6)


def _validate_between(value: float, low: float, high: float) -> None:
    # Written so that NaN, for which every comparison is false, fails.
    if not low <= value <= high:
        raise ValidationError(f"Must be a number from {low:g} to {high:g}.")


def validate_gpu_indexes(value: Any) -> None:
    """Accept a non-empty list of different whole numbers of 0..255. Raises: ValidationError."""
    if not isinstance(value, list) or not value:
        raise ValidationError(
            "Give at least one GPU, or nothing for all of the node's. A server without GPUs needs "
            "no node."
        )
    if not all(type(index) is int and 0 <= index <= 255 for index in value):
        raise ValidationError("GPUs are numbered from 0 to 255.")
    if len(set(value)) < len(value):
        raise ValidationError("Each GPU can be named once only.")


def validate_model_names(value: Any) -> None:
    """Accept a non-empty list of non-empty strings. Raises: ValidationError."""
    if not isinstance(value, list) or not value:
        raise ValidationError("Give a list with at least one model name.")
    if not all(isinstance(name, str) and name.strip() for name in value):
        raise ValidationError("Each model name must be a non-empty text.")
