"""Settings of a next release, whose ``migrate`` runs while processes of this one serve."""

from mindrouter.settings import *  # noqa: F403
from mindrouter.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.cluster.next_release"]
