"""deploy/helm: each manifest fits Kubernetes' schemas, each command parses, each name exists.

Helm is no Python package, so the templates are rendered here. They use placeholders only:
`.Release.Name`, `.Values`, and the functions `quote` and `toJson`. Anything else fails the test.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
TEMPLATES = sorted((CHART / "templates").glob("*.yaml"))
KUBERNETES = "1.31.0"
PLACEHOLDER = re.compile(r"\{\{ \.(Release\.Name|Values\.[\w.]+)(?: \| (quote|toJson))? \}\}")


def rendered(template: Path) -> str:
    """The template as `helm template pool deploy/helm` renders it."""
    values: Any = {"Values": yaml.safe_load((CHART / "values.yaml").read_text()),
                   "Release": {"Name": "pool"}}  # fmt: skip

    def fill(found: re.Match[str]) -> str:
        value = values
        for name in found[1].split("."):
            value = value[name]
        return str(value) if found[2] is None else json.dumps(value)

    text = PLACEHOLDER.sub(fill, template.read_text())
    assert "{{" not in text, f"{template}: not a placeholder"
    return text


def manifests() -> list[dict[str, Any]]:
    return [one for file in TEMPLATES for one in yaml.safe_load_all(rendered(file))]


def programs() -> list[dict[str, Any]]:
    return [one for one in manifests() if one["kind"] in ("Deployment", "StatefulSet")]


@pytest.mark.parametrize("program", programs(), ids=lambda one: one["metadata"]["name"])
def test_a_program_s_command_settings_and_names(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_command = importlib.import_module("test_deploy_files").check_command
    spec = program["spec"]["template"]["spec"]
    [container] = spec["containers"]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    check_command(container["command"], given, monkeypatch)
    assert not [name for name in given if re.search("SECRET|PASSWORD$|KEY", name)]

    mounted = {one["name"] for one in container["volumeMounts"]}
    claimed = {one["metadata"]["name"] for one in program["spec"].get("volumeClaimTemplates", ())}
    assert mounted == {one["name"] for one in spec["volumes"]} | claimed
    folders = [one["mountPath"] for one in container["volumeMounts"]]
    for value in given.values():
        assert not value.startswith("/") or value.startswith(tuple(folders)), value
    labels = program["spec"]["template"]["metadata"]["labels"]
    assert program["spec"]["selector"]["matchLabels"].items() <= labels.items()
    services = [one for one in manifests() if one["kind"] == "Service"]
    [service] = [one for one in services if one["spec"]["selector"].items() <= labels.items()]
    ports = {one["name"] for one in container["ports"]}
    assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports
    page = (ROOT / "docs/deploy.md").read_text()
    for volume in spec["volumes"]:
        if (secret := volume.get("secret")) is not None:
            assert f"`{secret['secretName']}`" in page


def test_urls_name_services_of_the_chart() -> None:
    names = {one["metadata"]["name"] for one in manifests() if one["kind"] == "Service"}
    assert set(re.findall(r"http://(pool-[\w-]+)", json.dumps(manifests()))) <= names
    [ingress] = [one for one in manifests() if one["kind"] == "Ingress"]
    [path] = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] in names


@pytest.mark.slow
def test_manifests_fit_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    pip = [tools / "bin/python", "-m", "pip", "install", "-q", "kubernetes-validate==1.37.0"]
    subprocess.run(pip, check=True)
    files = []
    for template in TEMPLATES:
        files.append(tmp_path / template.name)
        files[-1].write_text(rendered(template))
    words = [tools / "bin/kubernetes-validate", "-k", KUBERNETES, "--strict"]
    good = subprocess.run([*words, *files], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout + good.stderr
    assert good.stdout.count("passed") == len(manifests())
    files[0].write_text(files[0].read_text().replace("replicas:", "replica:"))
    assert subprocess.run([*words, files[0]], capture_output=True, check=False).returncode != 0
