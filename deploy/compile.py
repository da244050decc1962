"""Make machine code of the scheduling core and of what each event passes through: the same sources,
several times as fast.

.venv/bin/python deploy/compile.py, with requirements-compile.txt, a C compiler and Python's
headers; ``make compile`` does it all.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scheduler.compiled import PACKAGES, ROOT, folder, modules


def main() -> None:
    target = folder()
    if target.is_dir():
        print(f"Compiled already: {target}")
        return
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for package in PACKAGES:
            _copy(package)
        build(list(modules()), Path("built"))
        shutil.rmtree(target.parent, ignore_errors=True)  # of older sources
        # Whole or not at all: who is stopped half-way, or starts meanwhile, must not find a part.
        copied = shutil.copytree("built", target.with_suffix(".new"))
        copied.rename(target)
    print(f"Compiled: {target}")


def _copy(package: str) -> None:
    """The modules of a package itself; those above it are only there to be found."""
    Path(package).mkdir(parents=True, exist_ok=True)
    for parent in [Path(package), *Path(package).parents][:-1]:
        (parent / "__init__.py").touch()
    for path in (ROOT / package).glob("*.py"):
        shutil.copy(path, package)


def build(names: list[str], target: Path) -> None:
    """Compile the modules, whose paths are relative to here, into ``target``."""
    from mypyc.build import mypycify
    from setuptools import setup

    setup(
        name="mindrouter-compiled",
        packages=[],
        # What they import of packages that are not here is no part of the build.
        ext_modules=mypycify(
            ["--ignore-missing-imports", "--follow-imports=silent", *names],
            opt_level="2",
            debug_level="0",
        ),
        script_args=["--quiet", "build_ext", "--build-lib", str(target)],
    )


if __name__ == "__main__":
    main()
