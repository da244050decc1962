"""The scheduling core as machine code, where ``make compile`` has made it from these very sources.

It lies beside the installed packages, in a folder named after a digest of what it was made from:
whoever edits the core is back at Python at once, and no stale build is ever run.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

SOURCES = Path(__file__).with_name("core")
#: What msgspec reads and writes: it looks at annotations, of which machine code keeps too little.
INTERPRETED = frozenset(
    {"__init__.py", "boosts.py", "decisions.py", "jobs.py", "picture.py", "tunables.py", "views.py"}
)


def folder() -> Path:
    """Where a build of the core as it is now belongs."""
    digest = hashlib.sha256(f"{sys.version} {sorted(INTERPRETED)}".encode())
    for path in sorted(SOURCES.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return Path(sys.prefix) / "compiled" / digest.hexdigest()[:16]


def use() -> None:
    """Have the modules of the core imported from their build, if there is one. To be called
    before any of them is."""
    built = folder()
    if (built / "scheduler" / "core").is_dir():
        sys.path.append(str(built))  # what all of the modules share lies at the top
        core = importlib.import_module("scheduler.core")
        core.__path__.insert(0, str(built / "scheduler" / "core"))


def in_use() -> bool:
    """Whether the core that runs here is machine code."""
    return str(folder()) in sys.path
