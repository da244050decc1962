"""Which of its forms the scheduling core is imported in."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler import compiled

ROOT = Path(__file__).parent.parent.parent


def run(prefix: Path, code: str) -> str:
    """What ``code`` prints in a Python whose packages lie in ``prefix``."""
    begin = f"import sys; sys.prefix = {str(prefix)!r}; "
    found = subprocess.run(
        [sys.executable, "-c", begin + code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def build(prefix: Path) -> Path:
    """Something where the build of the core as it is belongs; one module tells it apart."""
    folder = Path(run(prefix, "from scheduler import compiled; print(compiled.folder())"))
    (folder / "scheduler" / "core").mkdir(parents=True)
    module = folder / "scheduler" / "core" / "affinity.py"
    module.write_text("rendezvous = None\n")
    return module


WHERE = "import scheduler.core.{0} as one; print(one.__file__)"


def test_the_build_of_the_very_sources_is_used_and_the_rest_is_python(tmp_path: Path) -> None:
    module = build(tmp_path)
    assert run(tmp_path, WHERE.format("affinity")) == str(module)
    assert run(tmp_path, WHERE.format("jobs")) == str(ROOT / "scheduler" / "core" / "jobs.py")
    assert run(tmp_path, "from scheduler import compiled; print(compiled.in_use())") == "True"


def test_without_a_build_the_core_is_python(tmp_path: Path) -> None:
    own = ROOT / "scheduler" / "core" / "affinity.py"
    assert run(tmp_path, WHERE.format("affinity")) == str(own)
    assert run(tmp_path, "from scheduler import compiled; print(compiled.in_use())") == "False"


@pytest.mark.parametrize("change", ["edit", "add", "rename"])
def test_a_build_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "two.py").write_text("y = 1\n")
    monkeypatch.setattr(compiled, "SOURCES", tmp_path)
    before = compiled.folder()
    assert compiled.folder() == before
    if change == "edit":
        (tmp_path / "two.py").write_text("y = 2\n")
    elif change == "add":
        (tmp_path / "three.py").touch()
    else:
        (tmp_path / "two.py").rename(tmp_path / "three.py")
    assert compiled.folder() != before


def test_a_build_that_was_not_copied_whole_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it works elsewhere
    main = runpy.run_path(str(ROOT / "deploy" / "compile_core.py"))["main"]
    target = tmp_path / "compiled" / "0123"
    unreadable = ["affinity.so"]

    def build(modules: list[str], built: Path) -> None:
        core = built / "scheduler" / "core"
        core.mkdir(parents=True)
        for name in unreadable:
            (core / name).symlink_to("nowhere")

    monkeypatch.setitem(main.__globals__, "folder", lambda: target)
    monkeypatch.setitem(main.__globals__, "build", build)
    with pytest.raises(shutil.Error):
        main()
    assert not target.exists()
    unreadable.clear()
    main()
    assert (target / "scheduler" / "core").is_dir()
