"""The manifests: valid for Kubernetes, and their commands and probes fit what they start."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from coordinator.config import MeshConfig
from coordinator.settings.flags import parse
from router.config import RouterConfig
from router.epp.command import EppConfig
from router.epp.endpoints import EndpointTarget
from tests.deploy.files import DEPLOY, serve_config

KUBERNETES = DEPLOY / "kubernetes"
OWN_KINDS = {"Kustomization", "Component", "ServiceMonitor", "ScaledObject", "InferencePool"}
"""Kinds that are not of Kubernetes itself."""
VERSION = "1.31"


class CoordinatorArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coordinator."""

    mesh: MeshConfig = MeshConfig()


@cache
def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def pod(file: str) -> dict[str, Any]:
    folder = "components/epp" if file == "epp.yaml" else "base"
    found: dict[str, Any] = documents(KUBERNETES / folder / file)[0]["spec"]["template"]["spec"]
    return found


def arguments(file: str) -> list[str]:
    (container,) = pod(file)["containers"]
    known = {"POD_IP": "10.1.2.3", "LOCKSTEP_MODEL": "lockstep-moe", "LOCKSTEP_API_KEY": "secret"}
    found = []
    for argument in container["args"]:
        for name, value in known.items():
            argument = argument.replace(f"$({name})", value)
        found.append(argument)
    return found


PAGES = sorted(KUBERNETES.rglob("*.yaml"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_every_manifest_is_valid(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in documents(path):
        if document["kind"] not in OWN_KINDS:
            validate(document, VERSION, strict=True)


def test_every_file_is_named_by_a_kustomization() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        (found,) = documents(path)
        for name in found["resources"]:
            assert (path.parent / name).exists()
        beside = {each.name for each in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
        assert beside == {name for name in found["resources"] if name.endswith(".yaml")}


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "ipv6"])
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_overlays_can_be_built(overlay: str, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    copy = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    for secret in ("mesh.key", "api-key"):
        (copy / "overlays" / "cpu" / secret).write_text("secret")
    command = ["kubectl", "kustomize", str(copy / "overlays" / overlay)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    made = list(yaml.safe_load_all(built))
    for document in made:
        validate(document, VERSION, strict=True)
    pods = [each["spec"]["template"]["spec"] for each in made if "template" in each.get("spec", {})]
    volumes = [volume for each in pods for volume in each["volumes"] if "secret" in volume]
    assert len(volumes) == 3
    secrets = {document["metadata"]["name"] for document in made if document["kind"] == "Secret"}
    assert {volume["secret"]["secretName"] for volume in volumes} <= secrets


def test_all_processes_meet_at_the_coordinator_with_one_key() -> None:
    instance = serve_config(arguments("instances.yaml"))
    router = parse(RouterConfig, arguments("routers.yaml"), prog="router", description="")
    coordinator = parse(
        CoordinatorArguments, arguments("coordinator.yaml"), prog="coordinator", description=""
    )
    assert instance.mesh.headless
    service = documents(KUBERNETES / "base" / "coordinator.yaml")[1]["metadata"]["name"]
    assert service == instance.mesh.data_parallel_address == router.mesh.data_parallel_address
    assert instance.mesh.mesh_key_file == router.mesh.mesh_key_file == coordinator.mesh.mesh_key_file
    assert router.http.api_key


def test_pods_have_time_to_drain() -> None:
    instance = serve_config(arguments("instances.yaml"))
    router = parse(RouterConfig, arguments("routers.yaml"), prog="router", description="")
    assert pod("instances.yaml")["terminationGracePeriodSeconds"] >= instance.engine.drain_timeout + 20
    assert pod("routers.yaml")["terminationGracePeriodSeconds"] >= router.http.shutdown_timeout + 10 + 10


def test_the_picker_finds_the_routers_and_the_mesh() -> None:
    picker = parse(EppConfig, arguments("epp.yaml"), prog="epp", description="")
    router = parse(RouterConfig, arguments("routers.yaml"), prog="router", description="")
    assert picker.mesh.coordinator_endpoint == router.mesh.coordinator_endpoint
    assert picker.mesh.mesh_key_file == router.mesh.mesh_key_file
    _, own, routers = documents(KUBERNETES / "components" / "epp" / "epp.yaml")
    (pool,) = documents(KUBERNETES / "components" / "epp" / "inference-pool.yaml")
    assert picker.targets == [EndpointTarget(routers["metadata"]["name"], router.http.port)]
    assert routers["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
    reference = pool["spec"]["endpointPickerRef"]
    assert (reference["name"], reference["port"]["number"]) == (own["metadata"]["name"], picker.grpc_port)
    (container,) = pod("epp.yaml")["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"grpc": picker.grpc_port, "grpc-health": picker.grpc_health_port}


@pytest.mark.parametrize("file", ["coordinator.yaml", "instances.yaml", "routers.yaml", "epp.yaml"])
def test_pods_are_restricted(file: str) -> None:
    (container,) = pod(file)["containers"]
    assert pod(file)["securityContext"]["runAsNonRoot"] is True
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert {"readinessProbe", "livenessProbe"} <= container.keys()


def test_instances_are_probed_by_the_file_that_serve_keeps() -> None:
    (container,) = pod("instances.yaml")["containers"]
    (file,) = (each["value"] for each in container["env"] if each["name"] == "LOCKSTEP_PROGRESS_FILE")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert file in " ".join(container[probe]["exec"]["command"])
