"""Make machine code of the scheduling core: the same sources, several times as fast.

.venv/bin/python deploy/compile_core.py, with requirements-compile.txt, a C compiler and Python's
headers; ``make compile`` does it all.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scheduler.compiled import INTERPRETED, SOURCES, folder  # noqa: E402


def main() -> None:
    target = folder()
    if target.is_dir():
        print(f"Compiled already: {target}")
        return
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        package = Path("scheduler")
        shutil.copytree(SOURCES, package / "core", ignore=shutil.ignore_patterns("__pycache__"))
        (package / "__init__.py").touch()
        modules = [p for p in (package / "core").glob("*.py") if p.name not in INTERPRETED]
        build(sorted(map(str, modules)), Path("built"))
        shutil.rmtree(target.parent, ignore_errors=True)  # of older sources
        # Whole or not at all: who is stopped half-way, or starts meanwhile, must not find a part.
        copied = shutil.copytree("built", target.with_suffix(".new"))
        copied.rename(target)
    print(f"Compiled: {target}")


def build(modules: list[str], target: Path) -> None:
    """Compile the modules, whose paths are relative to here, into ``target``."""
    from mypyc.build import mypycify
    from setuptools import setup

    setup(
        name="mindrouter-core",
        packages=[],
        ext_modules=mypycify(modules, opt_level="2", debug_level="0"),
        script_args=["--quiet", "build_ext", "--build-lib", str(target)],
    )


if __name__ == "__main__":
    main()
