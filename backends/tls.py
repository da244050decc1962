"""Whom the router believes when it speaks TLS with a backend."""

from __future__ import annotations

import ssl
from functools import cache

from django.conf import settings


@cache
def tls_context() -> ssl.SSLContext:
    """Verifying, by the system's certificates and those in ``BACKEND_CA_FILE``.

    Made once per process: to load the system's takes tens of milliseconds.
    """
    context = ssl.create_default_context()
    if settings.BACKEND_CA_FILE:
        context.load_verify_locations(settings.BACKEND_CA_FILE)
    return context


def unverified_context() -> ssl.SSLContext:
    """Encrypts, and believes anybody."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
