"""The Kubernetes manifests: what refers to something finds it, and the commands in them are ones that exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from examples.grpo_gsm8k.settings import make_parser
from vllm_delta_snapshot.cli.app import app

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "examples" / "kubernetes"
_VARIANTS = {
    "s3": ["common.yaml", "bucket-aws.yaml", "bucket/trainer.yaml", "bucket/vllm.yaml"],
    "gcs": ["common.yaml", "bucket-gcp.yaml", "bucket/trainer.yaml", "bucket/vllm.yaml"],
    "volume": ["common.yaml", "volume/run.yaml", "volume/trainer.yaml", "volume/vllm.yaml"],
}
_NEEDED = {
    "Namespace": ("v1", []),
    "ConfigMap": ("v1", ["data"]),
    "ServiceAccount": ("v1", []),
    "Service": ("v1", ["spec.selector", "spec.ports"]),
    "PersistentVolumeClaim": ("v1", ["spec.accessModes", "spec.resources.requests.storage"]),
    "NetworkPolicy": ("networking.k8s.io/v1", ["spec.podSelector", "spec.policyTypes"]),
    "Deployment": ("apps/v1", ["spec.replicas", "spec.selector.matchLabels", "spec.template.spec.containers"]),
    "Job": ("batch/v1", ["spec.backoffLimit", "spec.template.spec.restartPolicy", "spec.template.spec.containers"]),
    "PodMonitor": ("monitoring.coreos.com/v1", ["spec.selector.matchLabels", "spec.podMetricsEndpoints"]),
}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

Manifest = dict[str, Any]


def _read(*files: str) -> list[Manifest]:
    return [document for file in files for document in yaml.safe_load_all((_FOLDER / file).read_text())]


def _get(manifest: Manifest, path: str) -> Any:
    value: Any = manifest
    for key in path.split("."):
        value = value[key]
    return value


class _Variant:
    """All manifests of one way, by kind and name."""

    def __init__(self, name: str) -> None:
        self.manifests = _read(*_VARIANTS[name])

    def of(self, kind: str) -> dict[str, Manifest]:
        return {one["metadata"]["name"]: one for one in self.manifests if one["kind"] == kind}

    def pods(self) -> dict[str, Manifest]:
        """Return the pod templates."""
        return {
            one["metadata"]["name"]: one["spec"]["template"]
            for one in self.manifests
            if "template" in one.get("spec", {})
        }

    def containers(self) -> Iterator[tuple[Manifest, Manifest]]:
        """Yield each container with its pod's spec."""
        for pod in self.pods().values():
            for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                yield pod["spec"], container

    def environment(self, container: Manifest) -> dict[str, str]:
        """Return the variables of a container; those that the cluster fills in have a stand-in."""
        found = {}
        for source in container.get("envFrom", ()):
            found.update(self.of("ConfigMap")[source["configMapRef"]["name"]]["data"])
        for variable in container.get("env", ()):
            found[variable["name"]] = variable.get("value", "stand-in")
        assert all(isinstance(value, str) for value in found.values())
        return found

    def command(self, container: Manifest) -> list[str]:
        """Return the command as it is run, its variables filled in."""
        environment = self.environment(container)
        words = [*container["command"], *container.get("args", ())]
        return [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in words]

    def ports(self, labels: Manifest) -> set[str]:
        """Return the names of the ports of the pods with these labels; there are some."""
        pods = [pod for pod in self.pods().values() if labels.items() <= pod["metadata"]["labels"].items()]
        assert pods, labels
        return {
            port["name"]
            for pod in pods
            for container in pod["spec"]["containers"]
            for port in container.get("ports", ())
        }


@pytest.fixture(params=list(_VARIANTS), scope="module")
def variant(request: pytest.FixtureRequest) -> _Variant:
    return _Variant(request.param)


def test_every_manifest_has_what_its_kind_needs(variant: _Variant) -> None:
    seen = set()
    for one in [*variant.manifests, *_read("podmonitor.yaml")]:
        version, needed = _NEEDED[one["kind"]]
        assert one["apiVersion"] == version
        for path in needed:
            assert _get(one, path) not in (None, "", [], {}), (one["kind"], path)
        name = one["metadata"]["name"]
        assert _NAME.fullmatch(name)
        assert (one["kind"], name) not in seen
        seen.add((one["kind"], name))
        if one["kind"] != "Namespace":
            assert one["metadata"]["namespace"] in variant.of("Namespace")


def test_every_file_is_in_a_variant() -> None:
    files = {str(path.relative_to(_FOLDER)) for path in _FOLDER.rglob("*.yaml")}
    assert files == {"podmonitor.yaml"}.union(*_VARIANTS.values())


def test_pods_find_what_they_name(variant: _Variant) -> None:
    for name, pod in variant.pods().items():
        spec = pod["spec"]
        assert spec["serviceAccountName"] in variant.of("ServiceAccount")
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounted = set()
        names = [container["name"] for container in (*spec.get("initContainers", ()), *spec["containers"])]
        assert len(set(names)) == len(names)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = variant.of("PersistentVolumeClaim")[volume["persistentVolumeClaim"]["claimName"]]
                assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            assert len(set(paths)) == len(paths)
            mounted |= {mount["name"] for mount in container.get("volumeMounts", ())}
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports, (name, probe)
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys()
            assert "memory" in resources["limits"]
            assert resources["requests"].get("nvidia.com/gpu") == resources["limits"].get("nvidia.com/gpu")
        assert mounted == volumes.keys()
    for name, one in variant.of("Deployment").items():
        assert one["spec"]["selector"]["matchLabels"].items() <= variant.pods()[name]["metadata"]["labels"].items()


def test_services_and_policies_reach_ports_that_are_there(variant: _Variant) -> None:
    for service in variant.of("Service").values():
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in variant.ports(service["spec"]["selector"])
    policies = variant.of("NetworkPolicy")
    assert policies.keys() == variant.pods().keys()  # every pod has one
    for policy in policies.values():
        inside = variant.ports(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= inside
            for peer in rule["from"]:
                if "podSelector" in peer:
                    variant.ports(peer["podSelector"]["matchLabels"])
    [monitor] = _read("podmonitor.yaml")
    asked = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert asked <= variant.ports(monitor["spec"]["selector"]["matchLabels"])


def test_the_routes_that_change_weights_are_for_nobody_but_the_trainer(variant: _Variant) -> None:
    rules = variant.of("NetworkPolicy")["vllm"]["spec"]["ingress"]
    [open_to] = [rule["from"] for rule in rules if {"port": "http", "protocol": "TCP"} in rule["ports"]]
    assert open_to == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "trainer"}}}]
    for _, container in variant.containers():
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_commands_are_ones_that_exist(variant: _Variant) -> None:
    commands = {container["name"]: variant.command(container) for _, container in variant.containers()}
    assert commands.keys() == {"base", "vllm", "follower", "trainer"}
    assert commands["follower"][:2] == ["delta-snapshot", "follow"]
    follow = typer.main.get_command(app).commands["follow"]  # type: ignore[attr-defined]
    followed = follow.make_context("follow", commands["follower"][2:]).params
    assert commands["trainer"][:3] == ["python3", "-m", "examples.grpo_gsm8k"]
    trained = make_parser().parse_args(commands["trainer"][3:])
    # Both sides are told of one run, and of one base; and each reaches the other where it is.
    assert followed["sync_dir"] == trained.sync_dir == variant.of("ConfigMap")["run"]["data"]["SYNC_DIR"]
    [base] = [word for word in commands["vllm"] if word.startswith("/models")]
    assert base == trained.model == commands["base"][-1]
    service = variant.of("Service")["vllm"]["spec"]["ports"][0]["port"]
    assert trained.server == [f"http://vllm:{service}"]
    containers = {container["name"]: container for _, container in variant.containers()}
    [port] = containers["vllm"]["ports"]
    assert followed["server"] == f"http://127.0.0.1:{port['containerPort']}"
    assert f"--port={port['containerPort']}" in commands["vllm"]
    [metrics] = containers["follower"]["ports"]
    assert followed["listen"] == f"0.0.0.0:{metrics['containerPort']}"
    stage = variant.environment(containers["vllm"])["DELTA_SNAPSHOT_STAGE_DIR"]
    assert stage in {mount["mountPath"] for mount in containers["vllm"]["volumeMounts"]}


def test_a_run_on_a_volume_lies_where_the_volume_is_mounted() -> None:
    variant = _Variant("volume")
    sync_dir = variant.of("ConfigMap")["run"]["data"]["SYNC_DIR"]
    found = {}
    for _, container in variant.containers():
        for mount in container.get("volumeMounts", ()):
            if mount["name"] == "runs":
                assert sync_dir.startswith(mount["mountPath"] + "/")
                found[container["name"]] = mount.get("readOnly", False)
    # The stager only reads; the follower writes what it has applied.
    assert found == {"vllm": True, "follower": False, "trainer": False}


def test_the_image_installs_extras_that_exist() -> None:
    text = (_FOLDER / "Dockerfile").read_text()
    [extras] = re.findall(r'"\.\[([a-z0-9,]+)\]"', text)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert {"cli", "metrics", "s3", "gcs"} <= set(extras.split(","))
    carried = re.findall(r"(?m)^!(.+)$", (_FOLDER / "Dockerfile.dockerignore").read_text())
    assert {"pyproject.toml", project["readme"], *project["license-files"], "trainer_hooks", "examples"} <= set(carried)
    instructions = re.findall(r"(?m)^([A-Z]+) ", text)
    assert set(instructions) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    [user] = re.findall(r"(?m)^USER (\d+)$", text)
    [uid] = re.findall(r"--uid (\d+)", text)
    runs_as = {pod["spec"]["securityContext"]["runAsUser"] for pod in _Variant("s3").pods().values()}
    assert {int(user)} == {int(uid)} == runs_as
