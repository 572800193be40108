"""What ``deploy/`` says is what Kubernetes, llm-d, Dynamo, Ray Serve and kvxfer itself read.

Schemas and real packages are where ``scripts/test_integrations`` has put them; the rest needs only
the files.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvxfer.cli import app
from kvxfer.cli.drain import endpoint_of
from kvxfer.cli.options import DrainOptions, ProxyOptions, parse_address
from kvxfer.config import load_config
from kvxfer.integrations.vllm.plugin import NAME
from kvxfer.proxy.settings import ProxySettings, Side, parse_engines

DEPLOY = Path(__file__).parents[2] / "deploy"
POD_IP = "10.244.3.7"
SECRETS = {"llm-params-key": {"KVXFER_PARAMS_KEY": "0123456789abcdef0123456789abcdef"}}
# The oldest Kubernetes with what is used here (sidecar containers), and a new one
VERSIONS = ("1.30", "1.37")
SIDECAR_FLAGS = {"port", "vllm-port", "kv-connector", "secure-proxy"}
"""Of those that llm-d's sidecar takes (``pkg/sidecar/proxy/options.go`` of its router)."""


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def manifests(folder: str) -> list[dict[str, Any]]:
    return [
        each
        for path in sorted((DEPLOY / folder).glob("*.yaml"))
        if path.name != "kustomization.yaml"
        for each in documents(path)
    ]


DYNAMO = documents(DEPLOY / "dynamo/disagg.yaml")[0]


def as_deployment(component: Mapping[str, Any]) -> dict[str, Any]:
    """A component of Dynamo's as the Deployment that its operator makes of it."""
    labels = {"component": component["name"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": str(component["name"]).lower()},
        "spec": {
            "replicas": component["replicas"],
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, **component["podTemplate"]},
        },
    }


ALL = {
    "kubernetes": manifests("kubernetes"),
    "llm-d": manifests("llm-d"),
    "dynamo": [as_deployment(component) for component in DYNAMO["spec"]["components"]],
}
RESOURCES = [
    pytest.param(each, id=f"{folder} {each['kind']} {each['metadata']['name']}")
    for folder, found in ALL.items()
    for each in found
]


@dataclass(frozen=True)
class Container:
    """A container that serves a model."""

    name: str
    spec: dict[str, Any]
    pod: dict[str, Any]

    @property
    def transfer(self) -> dict[str, Any]:
        args: list[str] = self.spec["args"]
        transfer: dict[str, Any] = json.loads(args[args.index("--kv-transfer-config") + 1])
        return transfer

    @property
    def environment(self) -> dict[str, str]:
        """As the pod would have it."""
        settings = {
            each["metadata"]["name"]: each["data"]
            for each in ALL["kubernetes"]
            if each["kind"] == "ConfigMap"
        }
        environment: dict[str, str] = {}
        for source in self.spec.get("envFrom", ()):
            if "configMapRef" in source:
                environment |= settings[source["configMapRef"]["name"]]
            else:
                environment |= SECRETS[source["secretRef"]["name"]]
        for variable in self.spec.get("env", ()):
            if "valueFrom" in variable:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
            environment[variable["name"]] = variable.get("value", POD_IP)
        return environment


def servers() -> Iterator[Container]:
    for folder, found in ALL.items():
        for each in found:
            if each["kind"] != "Deployment":
                continue
            pod = each["spec"]["template"]["spec"]
            for spec in pod["containers"]:
                if "--kv-transfer-config" in spec.get("args", ()):
                    yield Container(f"{folder} {each['metadata']['name']}", spec, pod)


SERVERS = [pytest.param(server, id=server.name) for server in servers()]


def test_each_place_has_a_prefill_and_a_decode_engine() -> None:
    assert [(server.name, server.transfer["kv_role"]) for server in servers()] == [
        ("kubernetes llm-decode", "kv_consumer"),
        ("kubernetes llm-prefill", "kv_producer"),
        ("llm-d decode", "kv_consumer"),
        ("llm-d prefill", "kv_producer"),
        ("dynamo prefill", "kv_producer"),
        ("dynamo decode", "kv_consumer"),
    ]
    assert {server.transfer["kv_connector"] for server in servers()} == {NAME}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("resource", RESOURCES)
def test_kubernetes_knows_every_field(resource: dict[str, Any], version: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="no schemas here; scripts/test_integrations has them"
    )
    validate.validate(resource, version, strict=True)


def test_schemas_find_a_wrong_field() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="no schemas here; scripts/test_integrations has them"
    )
    wrong = copy.deepcopy(named("Deployment")["llm-proxy"])
    wrong["spec"]["replica"] = 1
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("server", SERVERS)
def test_kvxfer_takes_the_settings(server: Container, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvxfer"):
        loaded = load_config(
            {}, server.transfer.get("kv_connector_extra_config"), server.environment
        )
    assert caplog.records == []
    config: Any = loaded.config
    assert config.host == POD_IP
    assert config.peer_allowed(POD_IP)
    assert not config.peer_allowed("10.0.0.1")
    mounts = {mount["mountPath"]: mount["name"] for mount in server.spec["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in server.pod["volumes"]}
    keys = volumes[mounts[config.curve_keys_dir]]["secret"]
    assert keys["defaultMode"] & 0o007 == 0, "kvxfer refuses keys that every user can read"
    assert {"/dev/shm"} <= mounts.keys() or server.name.startswith("dynamo")  # its operator's


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """What a command is asked for by this line. Raises what ends it with a usage message."""
    name, *arguments = words
    group: Any = typer.main.get_command(app.app)
    asked: dict[str, Any] = group.commands[name].make_context(name, arguments).params
    return asked


@pytest.mark.parametrize("server", [each for each in SERVERS if "dynamo" not in str(each.id)])
def test_a_pod_drains_its_engine_before_it_ends(server: Container) -> None:
    """The hook's own command, with the settings of the container."""
    (_, _, line) = server.spec["lifecycle"]["preStop"]["exec"]["command"]
    words = re.search(r"kvxfer (drain [^&;\"]*)", line)
    assert words is not None
    options = DrainOptions(**options_of(words[1].split()))
    assert options.wait
    assert options.timeout_s is not None
    assert options.timeout_s + 15 < server.pod["terminationGracePeriodSeconds"]
    config = load_config({}, server.transfer.get("kv_connector_extra_config"), server.environment)
    assert endpoint_of(config.config, options.endpoint) == f"tcp://{POD_IP}:5700"


@pytest.mark.parametrize("server", SERVERS)
def test_what_kubernetes_injects_is_no_setting(server: Container) -> None:
    """Each Service of the namespace makes variables, unless that is switched off."""
    assert server.pod["enableServiceLinks"] is False
    for folder in ("kubernetes", "llm-d"):
        for each in ALL[folder]:
            if each["kind"] == "Service":
                prefix = each["metadata"]["name"].upper().replace("-", "_")
                assert not prefix.startswith(("KVXFER", "VLLM"))


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in ALL["kubernetes"] if each["kind"] == kind}


def is_selected(selector: Mapping[str, str], deployment: Mapping[str, Any]) -> bool:
    labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return selector.items() <= labels.items()


@pytest.mark.parametrize("folder", ["kubernetes", "llm-d"])
def test_selectors_and_probes_name_what_is_there(folder: str) -> None:
    for each in ALL[folder]:
        if each["kind"] != "Deployment":
            continue
        assert is_selected(each["spec"]["selector"]["matchLabels"], each)
        for container in each["spec"]["template"]["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            probes = [container[name] for name in container if name.endswith("Probe")]
            assert probes
            for probe in probes:
                assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in ports
            serving = next(iter(ports.values()))
            assert any(arg.endswith((f"={serving}", f":{serving}")) for arg in container["args"])


def test_services_reach_their_pods() -> None:
    deployments, services = named("Deployment"), named("Service")
    assert services.keys() == deployments.keys() == {"llm-prefill", "llm-decode", "llm-proxy"}
    for name, service in services.items():
        assert is_selected(service["spec"]["selector"], deployments[name])
        (container,) = deployments[name]["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert service["spec"]["ports"][0]["targetPort"] in ports


def test_the_proxy_takes_its_options() -> None:
    (container,) = named("Deployment")["llm-proxy"]["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    assert command[0] == "kvxfer"
    options = ProxyOptions(**options_of(command[1:]))
    settings = ProxySettings(
        prefill=parse_engines(Side.PREFILL, options.prefill),
        decode=parse_engines(Side.DECODE, options.decode),
        port=parse_address("--listen", options.listen, everywhere=True).port,
    )
    assert settings.port in {port["containerPort"] for port in container["ports"]}
    services = {
        f"http://{name}:{each['spec']['ports'][0]['port']}"
        for name, each in named("Service").items()
    }
    assert {engine.url for engine in (*settings.prefill, *settings.decode)} <= services


def test_the_network_policy_admits_decode_to_the_kv_ports_and_nobody_else() -> None:
    policies, deployments = named("NetworkPolicy"), named("Deployment")
    environment = next(s for s in servers() if s.name == "kubernetes llm-prefill").environment
    control = int(environment["KVXFER_PORT"].partition("+")[0])
    lowest, _, highest = environment["KVXFER_DATA_PORT"].partition("-")
    wanted = {"llm-decode": {control, int(lowest), int(highest)}, "llm-proxy": {8100}}
    for name, deployment in deployments.items():
        admitted = {
            port
            for rule in policies["llm-prefill"]["spec"]["ingress"]
            if any(
                is_selected(source["podSelector"]["matchLabels"], deployment)
                for source in rule["from"]
            )
            for ports in rule["ports"]
            for port in range(ports["port"], ports.get("endPort", ports["port"]) + 1)
        }
        assert wanted.get(name, set()) <= admitted
        assert admitted == set() or name in wanted
    assert is_selected(
        policies["llm-prefill"]["spec"]["podSelector"]["matchLabels"], deployments["llm-prefill"]
    )
    # A pod has ports enough for each rank's control and its data
    assert control + 8 <= int(lowest) < int(highest)


def test_kustomize_renders_all_of_it_with_the_image() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    files = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert {*listed, "kustomization.yaml"} == files
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [each for each in yaml.safe_load_all(rendered) if each]
    assert len(found) == len(ALL["kubernetes"])
    images = {
        container["image"]
        for each in found
        if each["kind"] == "Deployment"
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    assert images == {"registry.example/kvxfer-vllm:0.1.0"}


def test_llm_ds_sidecar_is_told_what_it_knows() -> None:
    decode, prefill = ALL["llm-d"]
    (sidecar,) = decode["spec"]["template"]["spec"]["initContainers"]
    flags = dict(arg.removeprefix("--").split("=") for arg in sidecar["args"])
    assert flags.keys() == SIDECAR_FLAGS
    (engine,) = decode["spec"]["template"]["spec"]["containers"]
    assert f"--port={flags['vllm-port']}" in engine["args"]
    # Clients, and the sidecar of another pod, find all engines on one port
    (other,) = prefill["spec"]["template"]["spec"]["containers"]
    assert f"--port={flags['port']}" in other["args"]
    assert sidecar["ports"][0]["containerPort"] == int(flags["port"])


def test_dynamos_own_template_has_the_same_shape() -> None:
    pytest.importorskip("dynamo.vllm", reason="no ai-dynamo here; scripts/test_integrations has it")
    text = resources.files("dynamo.profiler").joinpath("templates/dgd/vllm/disagg.yaml").read_text()
    theirs = yaml.safe_load(text)
    assert {name: DYNAMO[name] for name in ("apiVersion", "kind")} == {
        name: theirs[name] for name in ("apiVersion", "kind")
    }
    components = {each["name"]: each for each in theirs["spec"]["components"]}
    assert {each["name"] for each in DYNAMO["spec"]["components"]} == components.keys()
    for ours in DYNAMO["spec"]["components"]:
        like = components[ours["name"]]
        assert ours.keys() == like.keys()
        assert ours["type"] == like["type"]
        given, known = (each["podTemplate"]["spec"]["containers"][0] for each in (ours, like))
        assert given["name"] == known["name"]
        theirs_command, ours_command = (
            [*each["command"], *each.get("args", ())] for each in (known, given)
        )
        flags = [arg for arg in theirs_command if arg.startswith("--")]
        assert [arg for arg in flags if arg in ours_command] == flags


def test_ray_serve_reads_the_application() -> None:
    schema = pytest.importorskip(
        "ray.serve.schema", reason="no ray[serve] here; scripts/test_integrations has it"
    )
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig

    (text,) = documents(DEPLOY / "ray/pd.yaml")
    (application,) = schema.ServeDeploySchema.model_validate(text).applications
    assert application.import_path == "kvxfer.integrations.ray_serve:build_pd_openai_app"
    roles = {}
    for side in ("prefill", "decode"):
        config = LLMConfig.model_validate(application.args[f"{side}_config"])
        transfer = config.engine_kwargs["kv_transfer_config"]
        load_config({}, transfer["kv_connector_extra_config"])
        roles[config.model_id, side] = (transfer["kv_connector"], transfer["kv_role"])
    assert roles == {
        ("qwen3", "prefill"): (NAME, "kv_producer"),
        ("qwen3", "decode"): (NAME, "kv_consumer"),
    }


def test_the_image_is_built_of_what_the_tests_know() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    version = re.search(r"vllm-openai:v(\d+)\.(\d+)", text)
    assert version is not None
    assert (0, 26) <= (int(version[1]), int(version[2])) <= (0, 33)
