"""What every test may use."""

from __future__ import annotations

import os
import tempfile

import django

# Before Django reads its settings: nothing of a test may touch a real data folder.
# (They are named and read here: pytest-django reads those named in pyproject.toml before this.)
os.environ["DJANGO_SETTINGS_MODULE"] = "mindrouter.settings"
os.environ["MINDROUTER_DATA"] = tempfile.mkdtemp(prefix="mindrouter-test-")
for _name in ("DATABASE_URL", "REDIS_URL"):
    if _name in os.environ and "MINDROUTER_TEST_KEEP_URLS" not in os.environ:
        del os.environ[_name]
django.setup()
