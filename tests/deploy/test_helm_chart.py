"""deploy/helm: each manifest fits Kubernetes' schemas, each command parses, each name exists.

Helm is no Python package, so the templates are rendered here. They use placeholders only
(`.Release.Name`, `.Values`, and the functions `quote` and `toJson`) and lines
`{{- if .Values.NAME }}` and `{{- end }}`. Anything else fails the test.
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
BLOCK = re.compile(r"\n *\{\{- if \.(Values\.[\w.]+) \}\}(.*?)\n *\{\{- end \}\}", re.DOTALL)
PLACEHOLDER = re.compile(r"\{\{ \.(Release\.Name|Values\.[\w.]+)(?: \| (quote|toJson))? \}\}")


def rendered(template: Path, bucket: str | None = None) -> str:
    """The template as `helm template pool deploy/helm` renders it, with another `s3.policies` if
    one is given."""
    values: Any = {"Values": yaml.safe_load((CHART / "values.yaml").read_text()),
                   "Release": {"Name": "pool"}}  # fmt: skip
    if bucket is not None:
        values["Values"]["s3"]["policies"] = bucket

    def named(words: str) -> Any:
        value = values
        for name in words.split("."):
            value = value[name]
        return value

    def fill(found: re.Match[str]) -> str:
        value = named(found[1])
        return str(value) if found[2] is None else json.dumps(value)

    text = BLOCK.sub(lambda found: found[2] if named(found[1]) else "", template.read_text())
    text = PLACEHOLDER.sub(fill, text)
    assert "{{" not in text, f"{template}: not a placeholder"
    return text


def manifests() -> list[dict[str, Any]]:
    return [one for file in TEMPLATES for one in yaml.safe_load_all(rendered(file))]


def programs() -> list[dict[str, Any]]:
    return [one for one in manifests() if one["kind"] in ("Deployment", "StatefulSet", "DaemonSet")]


@pytest.mark.parametrize("program", programs(), ids=lambda one: one["metadata"]["name"])
def test_a_program_s_command_settings_and_names(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy = importlib.import_module("test_deploy_files")
    spec = program["spec"]["template"]["spec"]
    [container] = spec["containers"]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    if container["image"].startswith("prime-open:"):
        deploy.check_command(container["command"], given, monkeypatch)
    else:
        others = {one["image"] for one in deploy.compose()["services"].values()}
        assert container["image"] in others, "the chart and compose.yaml use the same images"
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
    own = [one for one in services if one["spec"]["selector"].items() <= labels.items()]
    assert own or program["kind"] == "DaemonSet"
    ports = {one["name"] for one in container.get("ports", ())}
    assert {port["targetPort"] for one in own for port in one["spec"]["ports"]} <= ports
    page = (ROOT / "docs/deploy.md").read_text()
    configured = {one["metadata"]["name"] for one in manifests() if one["kind"] == "ConfigMap"}
    for volume in spec["volumes"]:
        if (secret := volume.get("secret")) is not None:
            assert f"`{secret['secretName']}`" in page
        if (config := volume.get("configMap")) is not None:
            assert config["name"] in configured or f"`{config['name']}`" in page


def test_without_a_bucket_for_policies_the_trainer_knows_no_s3_server() -> None:
    template = CHART / "templates" / "trainer.yaml"
    with_bucket, without = rendered(template), rendered(template, bucket="")
    assert len(list(yaml.safe_load_all(without))) == len(list(yaml.safe_load_all(with_bucket)))
    assert "PRIME_TRAINER_S3_BUCKET" in with_bucket
    assert not re.search(r"_S3_|AWS_|s3-", without)
    assert "PRIME_TRAINER_METRICS_HOST" in without


def test_urls_name_services_of_the_chart() -> None:
    services = {one["metadata"]["name"]: one for one in manifests() if one["kind"] == "Service"}
    ports = {name: {p["port"] for p in one["spec"]["ports"]} for name, one in services.items()}
    named = re.findall(r"(?://|@|\W)(pool-[\w-]+)(?::(\d+)|/)", json.dumps(manifests()))
    assert {name for name, _ in named} >= {"pool-postgres", "pool-prometheus", "pool-loki"}
    for name, port in named:
        assert not port or int(port) in ports[name], (name, port)
    for ingress in (one for one in manifests() if one["kind"] == "Ingress"):
        [path] = ingress["spec"]["rules"][0]["http"]["paths"]
        assert path["backend"]["service"]["name"] in services


def test_its_prometheus_scrapes_the_jobs_that_the_alerts_name() -> None:
    [config] = [one for one in manifests() if "prometheus.yml" in one.get("data", ())]
    of_compose = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = [one["job_name"] for one in of_compose["scrape_configs"]]
    found = yaml.safe_load(config["data"]["prometheus.yml"])
    assert [one["job_name"] for one in found["scrape_configs"]] == jobs


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
