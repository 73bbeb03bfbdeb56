"""What `deploy/` names exists: flags, ports, paths, variables, files; and its times fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire import envs
from quire.cli.parser import create_parser
from quire.config.flags.args import from_namespace
from quire.engine.core_startup import create_config
from quire.server.processes.front import LAST_WORDS_S
from quire.server.settings import ServerSettings, settings_from_namespace

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def documents() -> dict[str, dict[str, Any]]:
    found = {}
    for file in sorted(DEPLOY.rglob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            found[f"{file.relative_to(DEPLOY)}/{document.get('kind', 'Compose')}"] = document
    return found


def merged(base: Any, change: Any) -> Any:
    """As compose merges files, and kustomize a patch: mappings key by key, lists of named things by their names."""
    if isinstance(base, dict) and isinstance(change, dict):
        both = {key: merged(base[key], change[key]) for key in base.keys() & change.keys()}
        return {**base, **change, **both}
    if isinstance(base, list) and all(isinstance(item, dict) and "name" in item for item in change):
        changes = {item["name"]: item for item in change}
        return [merged(item, changes.get(item["name"], {})) for item in base]
    return change


DOCUMENTS = documents()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
CUDA_DOCKERFILE = (DEPLOY / "Dockerfile.cuda").read_text()
DEPLOYMENT = DOCUMENTS["kubernetes/deployment.yaml/Deployment"]
CUDA_DEPLOYMENT = merged(DEPLOYMENT, DOCUMENTS["kubernetes-cuda/deployment.yaml/Deployment"])
POD = DEPLOYMENT["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
CUDA_CONTAINER = CUDA_DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]
COMPOSE = DOCUMENTS["compose.yaml/Compose"]["services"]["quire"]
CUDA_COMPOSE = merged(COMPOSE, DOCUMENTS["compose.cuda.yaml/Compose"]["services"]["quire"])


def docker_command(dockerfile: str) -> list[str]:
    (command,) = re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)
    return list(yaml.safe_load(command))


COMMANDS = {
    "Dockerfile": docker_command(DOCKERFILE),
    "compose": COMPOSE["command"].replace("${MODEL:-}", "").split(),
    "deployment": CONTAINER["args"],
}
CUDA_COMMANDS = {
    "Dockerfile": docker_command(CUDA_DOCKERFILE),
    "compose": CUDA_COMPOSE["command"].replace("${MODEL:-}", "").split(),
    "deployment": CUDA_CONTAINER["args"],
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
    assert DOCUMENTS["kubernetes/service.yaml/Service"]["spec"]["ports"][0]["targetPort"] in names
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
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    assert DOCUMENTS["kubernetes/service.yaml/Service"]["spec"]["selector"] == labels
    assert DOCUMENTS["kubernetes/service.yaml/PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    for file in DOCUMENTS["kubernetes/kustomization.yaml/Kustomization"]["resources"]:
        assert (DEPLOY / "kubernetes" / file).is_file()


def test_the_image_is_built_from_all_that_a_wheel_needs() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert {"quire", "csrc", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"} == kept
    assert all((ROOT / name).exists() for name in kept)
    torch = re.search(r"^ARG TORCH=(.*)$", DOCKERFILE, re.MULTILINE)
    assert torch is not None
    assert f"TORCH ?= {torch[1]}\n" in (ROOT / "Makefile").read_text()


# -- GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_gpus_run_the_same_command_on_their_device(name: str) -> None:
    assert CUDA_COMMANDS[name] == [*COMMANDS[name], "--device", "cuda"]
    assert create_parser().parse_args(CUDA_COMMANDS[name]).device == "cuda"


def test_the_image_for_gpus_differs_in_what_a_gpu_needs_alone() -> None:
    theirs, ours = (instructions(text) for text in (CUDA_DOCKERFILE, DOCKERFILE))
    added = [line for line in theirs if line not in ours]
    assert [line for line in ours if line not in theirs] == [
        "ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/cache",
        "RUN --mount=type=bind,from=build,source=/wheels,target=/wheels "
        'wheel=$(echo /wheels/quire-*.whl) && pip install --no-cache-dir ${PIP_ARGS} "${wheel}[hub]"',
        'CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]',
    ]
    assert len(added) == 5
    assert any("gcc libc6-dev" in line for line in added), "Triton needs a C compiler when it runs"
    assert any("[hub,cuda]" in line for line in added)
    assert any(line.startswith("ENV NVIDIA_") and line.endswith("compute,utility") for line in added)


def test_compiled_kernels_are_kept_where_the_process_may_write() -> None:
    (cache,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", CUDA_DOCKERFILE)
    assert Path(cache).is_relative_to("/cache")
    assert "/cache" in {mount["mountPath"] for mount in CUDA_CONTAINER["volumeMounts"]}
    assert "cache:/cache" in CUDA_COMPOSE["volumes"]


def test_a_gpu_is_asked_for_and_nothing_else_is_changed() -> None:
    resources = CUDA_CONTAINER["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["nvidia.com/gpu"] == "1"
    changed = {key for key in CUDA_CONTAINER if CUDA_CONTAINER[key] != CONTAINER.get(key)}
    assert changed == {"image", "args", "resources"}
    (device,) = CUDA_COMPOSE["deploy"]["resources"]["reservations"]["devices"]
    assert (device["count"], device["capabilities"]) == (1, ["gpu"])
    changed = {key for key in CUDA_COMPOSE if CUDA_COMPOSE[key] != COMPOSE.get(key)}
    assert changed == {"build", "image", "command", "deploy"}


def test_pods_with_gpus_are_replaced_without_a_spare_one() -> None:
    update = CUDA_DEPLOYMENT["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxSurge": 0, "maxUnavailable": 1}


def test_files_for_gpus_name_those_that_they_build_on() -> None:
    files = DOCUMENTS["kubernetes-cuda/kustomization.yaml/Kustomization"]
    places = [*files["resources"], *(patch["path"] for patch in files["patches"])]
    assert all((DEPLOY / "kubernetes-cuda" / place).exists() for place in places)
    assert (DEPLOY.parent / CUDA_COMPOSE["build"]["dockerfile"]).is_file()
    ignored = (DEPLOY / "Dockerfile.cuda.dockerignore").read_text()
    assert ignored == (DEPLOY / "Dockerfile.dockerignore").read_text()


def instructions(dockerfile: str) -> list[str]:
    """Lines without comments, those that go on in the next one joined."""
    lines = "\n".join(line for line in dockerfile.splitlines() if line and not line.startswith("#"))
    return re.sub(r"\s*\\\n\s*", " ", lines).split("\n")
