"""An identity provider: nothing of it is there unless one is set up, and then people sign in."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings
from django.test import Client

from tests.stubs.oidc import CLIENT_SECRET

pytestmark = pytest.mark.django_db


def test_nothing_of_it_is_loaded_where_there_is_none(client: Client) -> None:
    assert not [app for app in settings.INSTALLED_APPS if "allauth" in app]
    assert "allauth.socialaccount" not in sys.modules
    assert client.get("/oidc/provider/login/").status_code == 404
    assert "Sign in with" not in client.get("/account/login/").content.decode()


def test_people_sign_in_at_a_provider(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            "tests/accounts/oidc_flow.py",
        ],
        env={
            **os.environ,
            "MINDROUTER_DATA": str(tmp_path),
            "OIDC_ISSUER": f"http://127.0.0.1:{port}",
            "OIDC_CLIENT_SECRET": CLIENT_SECRET,
            "OIDC_NAME": "Campus",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:]
