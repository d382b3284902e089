"""Checks blocks of data: they parse, and are what their kind requires."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import yaml

from tests.docs.commands import check_cli


def check_data(language: str, text: str) -> None:
    """Check a block of JSON, YAML or TOML.

    Raises:
        AssertionError, ValueError, yaml.YAMLError: it is not what it should be; says what is missing.
    """
    if language == "toml":
        tomllib.loads(text)
        return
    parsed = [json.loads(text)] if language == "json" else list(yaml.safe_load_all(text))
    assert any(document is not None for document in parsed), "there is nothing in it"
    for document in parsed:
        if isinstance(document, dict):
            if "Statement" in document:
                _check_policy(document)
            if "apiVersion" in document:
                _check_manifest(document)


def _check_policy(policy: dict[str, Any]) -> None:
    assert policy["Version"] == "2012-10-17"
    for statement in policy["Statement"]:
        assert statement["Effect"] in ("Allow", "Deny")
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert all(re.fullmatch(r"[a-z0-9]+:[A-Z]\w+", action) for action in actions), actions
        resources = statement.get("Resource", [])
        for resource in [resources] if isinstance(resources, str) else resources:
            assert resource == "*" or resource.startswith("arn:aws"), resource


def _check_manifest(manifest: dict[str, Any]) -> None:
    assert manifest["kind"]
    assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", manifest["metadata"]["name"])
    if manifest["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
        spec = manifest["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items(), "the selector does not select its own pods"
    for pod in _pods(manifest):
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            _check_container(container, volumes)


def _pods(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for member in node.values():
            yield from _pods(member)
    elif isinstance(node, list):
        for member in node:
            yield from _pods(member)


def _check_container(container: dict[str, Any], volumes: set[str]) -> None:
    assert container["name"]
    assert container["image"]
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert mounted <= volumes, f"{container['name']} mounts what the pod does not have: {mounted - volumes}"
    assert all("value" in of or "valueFrom" in of for of in container.get("env", []))
    words = [str(word) for word in [*container.get("command", []), *container.get("args", [])]]
    if "delta-snapshot" in words:
        check_cli([re.sub(r"\$\(\w+\)", "1", word) for word in words[words.index("delta-snapshot") + 1 :]])
