"""Which of its forms the scheduling core, and what events pass through, is imported in."""

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
    """Something where the build of the sources as they are belongs: a module of each package."""
    folder = Path(run(prefix, "from scheduler import compiled; print(compiled.folder())"))
    for name in BUILT:
        module = folder / name
        module.parent.mkdir(parents=True)
        module.write_text("rendezvous = None\n")
    return folder


BUILT = ("scheduler/core/affinity.py", "backends/opening.py", "mindrouter/gateway/heads.py")
PYTHON = ("scheduler/core/jobs.py", "backends/filepart.py", "mindrouter/gateway/errors.py")


def where(prefix: Path, name: str, first: str = "mindrouter") -> str:
    """The file that a module comes from, where a package was imported first."""
    module = name.removesuffix(".py").replace("/", ".")
    return run(prefix, f"import {first}, {module} as one; print(one.__file__)")


@pytest.mark.parametrize("first", ["mindrouter", "scheduler"])
def test_the_build_of_the_very_sources_is_used_and_the_rest_is_python(
    tmp_path: Path, first: str
) -> None:
    folder = build(tmp_path)
    for name in BUILT:
        assert where(tmp_path, name, first) == str(folder / name)
    for name in PYTHON:
        assert where(tmp_path, name, first) == str(ROOT / name)
    assert run(tmp_path, "from scheduler import compiled; print(compiled.in_use())") == "True"


def test_a_build_is_used_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    build(tmp_path)
    code = (
        "import backends.opening, mindrouter, mindrouter.gateway.heads as one; print(one.__file__)"
    )
    assert run(tmp_path, code) == str(ROOT / "mindrouter/gateway/heads.py")


def test_a_process_that_was_given_the_path_of_another_uses_the_build(tmp_path: Path) -> None:
    folder = build(tmp_path)
    code = f"sys.path.append({str(folder)!r}); import mindrouter, backends.opening as one; "
    assert run(tmp_path, code + "print(one.__file__)") == str(folder / "backends/opening.py")


def test_without_a_build_all_is_python(tmp_path: Path) -> None:
    for name in BUILT:
        assert where(tmp_path, name) == str(ROOT / name)
    assert run(tmp_path, "from scheduler import compiled; print(compiled.in_use())") == "False"


def test_what_is_compiled_is_there(tmp_path: Path) -> None:
    names = list(compiled.modules())
    assert {"scheduler/core/scheduler.py", "mindrouter/gateway/events.py"} <= set(names)
    assert "scheduler/core/jobs.py" not in names
    assert [name for name in names if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("package", compiled.PACKAGES)
@pytest.mark.parametrize("change", ["edit", "add", "rename"])
def test_a_build_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, package: str
) -> None:
    sources = tmp_path / package
    sources.mkdir(parents=True)
    (sources / "one.py").write_text("x = 1\n")
    (sources / "two.py").write_text("y = 1\n")
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    before = compiled.folder()
    assert compiled.folder() == before
    if change == "edit":
        (sources / "two.py").write_text("y = 2\n")
    elif change == "add":
        (sources / "three.py").touch()
    else:
        (sources / "two.py").rename(sources / "three.py")
    assert compiled.folder() != before


def test_a_build_that_was_not_copied_whole_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it works elsewhere
    main = runpy.run_path(str(ROOT / "deploy" / "compile.py"))["main"]
    target = tmp_path / "compiled" / "0123"
    unreadable = ["affinity.so"]

    def build(names: list[str], built: Path) -> None:
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
