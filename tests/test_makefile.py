"""What ``make`` does before there is a virtual environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def chosen_python(tmp_path: Path, *, system: str = "nowhere", **commands: int) -> str:
    """The Python that ``make run`` takes, where these commands exist and end with these codes.

    ``system``: the folder whose Pythons come before those in the path.
    """
    for version, code in commands.items():
        command = tmp_path / version.replace("_", ".")
        command.write_text(f"#!/bin/sh\nexit {code}\n")
        command.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    target = "nowhere/bin/python"
    printed = subprocess.run(
        ["make", "-n", "--no-print-directory", "VENV=nowhere", f"SYSTEM={system}", target],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return printed.strip().splitlines()[-1].split()[0]


def test_a_python_that_is_in_the_path_but_does_not_start_is_passed_over(tmp_path: Path) -> None:
    assert chosen_python(tmp_path, python3_13=127, python3_12=0) == "python3.12"


def test_the_newest_python_that_starts_is_taken(tmp_path: Path) -> None:
    assert chosen_python(tmp_path, python3_13=0, python3_12=0) == "python3.13"


def test_python3_is_the_last_resort(tmp_path: Path) -> None:
    assert (
        chosen_python(tmp_path, python3_13=127, python3_12=127, python3_11=127, python3=0)
        == "python3"
    )


def test_the_systems_own_python_comes_first(tmp_path: Path) -> None:
    system = tmp_path / "system"
    system.mkdir()
    own = system / "python3.12"
    own.write_text("#!/bin/sh\nexit 0\n")
    own.chmod(0o755)
    assert chosen_python(tmp_path, system=str(system), python3_13=0) == str(own)
