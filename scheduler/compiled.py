"""The scheduling core and the way of an event as machine code, where ``make compile`` has made it
from these very sources.

It lies beside the installed packages, in a folder named after a digest of what it was made from:
whoever edits one of these packages is back at Python at once, and no stale build is ever run.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What msgspec reads and writes: it looks at annotations, of which machine code keeps too little.
_INTERPRETED_CORE = frozenset(
    {"__init__.py", "boosts.py", "decisions.py", "jobs.py", "picture.py", "tunables.py", "views.py"}
)
#: What each read of a stream passes through. Coroutines gain nothing, so the rest stays as it is.
_HOT = {
    "backends": ("connection", "incoming", "opening", "outbox", "pace", "response"),
    "mindrouter/gateway": ("events", "heads", "wire"),
}
PACKAGES = ("scheduler/core", *_HOT)


def modules() -> Iterator[str]:
    """What is compiled, as paths relative to the root."""
    for path in sorted((ROOT / "scheduler" / "core").glob("*.py")):
        if path.name not in _INTERPRETED_CORE:
            yield f"scheduler/core/{path.name}"
    for package, names in _HOT.items():
        for name in names:
            yield f"{package}/{name}.py"


def folder() -> Path:
    """Where a build of these packages as they are now belongs."""
    digest = hashlib.sha256(f"{sys.version} {sorted(modules())}".encode())
    for package in PACKAGES:
        for path in sorted((ROOT / package).glob("*.py")):
            digest.update(f"{package}/{path.name}".encode() + path.read_bytes())
    return Path(sys.prefix) / "compiled" / digest.hexdigest()[:16]


def use() -> None:
    """Have these modules imported from their build, if there is one. Once any of them has been
    imported it is too late: what is machine code knows each other by more than names."""
    if not (Path(sys.prefix) / "compiled").is_dir():
        return
    names = {name.removesuffix(".py").replace("/", ".") for name in modules()}
    built = folder()
    if not built.is_dir() or names & sys.modules.keys():
        return
    if str(built) not in sys.path:
        sys.path.append(str(built))  # what all of the modules share lies at the top
    for package in PACKAGES:
        # Nothing of these packages is run but what calls here: only their paths are touched.
        found = importlib.import_module(package.replace("/", "."))
        found.__path__.insert(0, str(built / package))


def in_use() -> bool:
    """Whether what runs here is machine code."""
    return len(importlib.import_module("scheduler.core").__path__) > 1
