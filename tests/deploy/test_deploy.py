"""What `deploy/` names exists: flags, ports, paths, variables, files; and its times fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire import envs
from quire.cli.parser import create_parser
from quire.config.args import from_namespace
from quire.engine.core_startup import create_config
from quire.server.processes.front import LAST_WORDS_S
from quire.server.settings import ServerSettings, settings_from_namespace

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def documents() -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(DEPLOY.rglob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            found[f"{file.name}/{document.get('kind', 'Compose')}"] = document
    return found


DOCUMENTS = documents()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
POD = DOCUMENTS["deployment.yaml/Deployment"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
COMPOSE = DOCUMENTS["compose.yaml/Compose"]["services"]["quire"]


def docker_command() -> list[str]:
    (command,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    return list(yaml.safe_load(command))


COMMANDS = {
    "Dockerfile": docker_command(),
    "compose": COMPOSE["command"].replace("${MODEL:-}", "").split(),
    "deployment": CONTAINER["args"],
}


def settings_of(name: str) -> ServerSettings:
    return settings_from_namespace(create_parser().parse_args(COMMANDS[name]))


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_understood_and_listen_where_they_are_looked_for(name: str) -> None:
    args = create_parser().parse_args(COMMANDS[name])
    settings = settings_from_namespace(args)
    assert create_config(from_namespace(args)).model_config.model
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)


def test_ports_are_those_the_server_listens_on() -> None:
    port = settings_of("deployment").port
    names = {entry["name"]: entry["containerPort"] for entry in CONTAINER["ports"]}
    assert names == {"http": port}
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    assert DOCUMENTS["service.yaml/Service"]["spec"]["ports"][0]["targetPort"] in names
    assert COMPOSE["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"EXPOSE {port}\n" in DOCKERFILE
    assert f"127.0.0.1:{port}/health" in DOCKERFILE


def test_probes_ask_routes_that_need_no_key_and_mean_what_they_are_used_for(server: Any, serve: Any) -> None:
    paths = {name: CONTAINER[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}
    with serve(api_key=("secret",)) as guarded:
        for path in set(paths.values()):
            assert guarded.client.get(path).status_code == 200
    assert server.client.get(POD["metadata"]["annotations"]["prometheus.io/path"]).status_code == 200


def test_running_requests_get_the_time_they_are_promised() -> None:
    needed = settings_of("deployment").shutdown_timeout + LAST_WORDS_S
    waited = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["spec"]["terminationGracePeriodSeconds"] > needed + waited
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > settings_of("compose").shutdown_timeout + LAST_WORDS_S


def test_variables_are_known_and_none_is_set_by_accident() -> None:
    names = {entry["name"] for entry in CONTAINER["env"]} | set(COMPOSE["environment"])
    assert names <= set(envs.VARIABLES)
    assert POD["spec"]["enableServiceLinks"] is False


def test_the_process_has_no_rights_it_does_not_need() -> None:
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert POD["spec"]["securityContext"]["runAsUser"] == int(user) > 0
    assert POD["spec"]["securityContext"]["runAsNonRoot"] is True
    context = CONTAINER["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert COMPOSE["read_only"] is True


def test_what_can_be_written_is_mounted() -> None:
    assert {mount["mountPath"] for mount in CONTAINER["volumeMounts"]} == {"/cache", "/tmp"}
    volumes = {volume["name"] for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes
    assert "HF_HOME=/cache" in DOCKERFILE


def test_everything_selects_the_same_pods() -> None:
    labels = POD["metadata"]["labels"]
    assert DOCUMENTS["deployment.yaml/Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert DOCUMENTS["service.yaml/Service"]["spec"]["selector"] == labels
    assert DOCUMENTS["service.yaml/PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    for file in DOCUMENTS["kustomization.yaml/Kustomization"]["resources"]:
        assert (DEPLOY / "kubernetes" / file).is_file()


def test_the_image_is_built_from_all_that_a_wheel_needs() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert {"quire", "csrc", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"} == kept
    assert all((ROOT / name).exists() for name in kept)
    torch = re.search(r"^ARG TORCH=(.*)$", DOCKERFILE, re.MULTILINE)
    assert torch is not None
    assert f"TORCH ?= {torch[1]}\n" in (ROOT / "Makefile").read_text()
