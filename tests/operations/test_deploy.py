"""What is in ``deploy/`` fits the forms it is written in, and the code that it starts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_fit_the_compose_schema(path: Path) -> None:
    tool = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [tool, "--builtin-schema", "vendor.compose-spec", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_kubernetes_schemas(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] != "Kustomization":  # not the cluster's, but kubectl's
            kubernetes_validate.validate(document, "1.37", strict=True)


def test_kustomization_names_what_there_is() -> None:
    known = {path.name for path in MANIFESTS} | {"secret.yaml"}
    named = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert set(named) == known - {"kustomization.yaml", "secret.example.yaml"}


def pods() -> list[dict[str, Any]]:
    documents = [d for path in MANIFESTS for d in yaml.safe_load_all(path.read_text())]
    return [d["spec"]["template"]["spec"] for d in documents if "template" in d.get("spec", {})]


def test_pods_run_as_nobody_and_write_only_where_they_may() -> None:
    assert len(pods()) == 5
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert {"/data", "/tmp"} <= {one["mountPath"] for one in container["volumeMounts"]}


def services() -> dict[str, dict[str, Any]]:
    """The containers of our image in the cluster's compose file."""
    found = yaml.safe_load((DEPLOY / "compose.cluster.yaml").read_text())["services"]
    return {name: one for name, one in found.items() if one["image"] == "mindrouter"}


def test_a_cluster_in_containers_has_what_a_cluster_needs_and_each_says_how_it_is() -> None:
    last_words = {name: " ".join(one["command"]) for name, one in services().items()}
    for part, count in (("runscheduler", 2), ("rungateway", 1), ("runrecorder", 1), (" beat ", 2)):
        assert sum(part in words for words in last_words.values()) == count
    assert services()["gateway"]["volumes"] == services()["recorder"]["volumes"]
    # The image's own check asks for a port, which only the gateway has.
    assert [name for name, one in services().items() if "healthcheck" not in one] == ["gateway"]
    for one in services().values():
        assert (one["read_only"], one["cap_drop"]) == (True, ["ALL"])


def test_a_gateway_in_a_container_stops_before_what_its_last_streams_need() -> None:
    assert {"scheduler", "recorder"} <= set(services()["gateway"]["depends_on"])


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_password_may_have_any_characters(path: Path) -> None:
    """Within an address, / and @ and % are read otherwise."""
    found = yaml.safe_load(path.read_text())["services"].values()
    ours = [one["environment"] for one in found if one["image"] == "mindrouter"]
    assert ours
    for one in ours:
        assert one["DATABASE_URL"] == "postgres://mindrouter@database:5432/mindrouter"
        assert one["PGPASSWORD"].startswith("${POSTGRES_PASSWORD:?")


def commands() -> list[list[str]]:
    """Of manage.py, in all that is deployed."""
    found = [c["command"][2:] for pod in pods() for c in pod["containers"]]
    found += [one["command"][2:] for one in services().values() if one["command"][1] != "-m"]
    units = (path.read_text() for path in (DEPLOY / "systemd").glob("*.service"))
    lines = [line for text in units for line in re.findall(r"python (manage\.py .*)", text)]
    found += [line.split()[1:] for line in lines]
    image = re.findall(r"CMD (\[.*manage.py.*\])", (DEPLOY / "Dockerfile").read_text())
    return [one for one in [*found, *(yaml.safe_load(i)[2:] for i in image)] if one[0] != "celery"]


def test_what_is_started_are_commands_that_exist() -> None:
    from django.core.management import get_commands, load_command_class

    assert len(commands()) > 6
    for name, *options in commands():
        if name in get_commands() and not options:
            load_command_class(get_commands()[name], name)
    assert {name for name, *_ in commands() if not name.startswith("-")} <= set(get_commands())


def copied() -> list[str]:
    lines = re.findall(r"^COPY (?!--from)(.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return list(dict.fromkeys(name for line in lines for name in line.split()[:-1]))


def test_what_the_image_copies_is_enough_to_start(tmp_path: Path) -> None:
    for name in copied():
        target = tmp_path / "image" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target)
        else:
            shutil.copy(ROOT / name, target)
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--fail-level", "ERROR"],
        cwd=tmp_path / "image",
        env={"PATH": "/usr/bin", "MINDROUTER_DATA": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_image_lets_in_what_it_copies_and_runs_as_nobody() -> None:
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied()} <= set(allowed)
    text = (DEPLOY / "Dockerfile").read_text()
    assert text.index("USER 10001") < text.index("CMD [")
    assert "HEALTHCHECK" in text


def test_systemd_knows_every_line_of_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (apt-get install systemd)")
    for path in (DEPLOY / "systemd").iterdir():
        text = path.read_text().replace("/opt/mindrouter/.venv/bin/python", sys.executable)
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(tmp_path.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "mindrouter" in line]
    assert complaints == []
