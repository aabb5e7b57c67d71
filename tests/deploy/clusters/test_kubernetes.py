"""The Helm chart and the manifests that are rendered from it."""

import copy
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint
from helm_python.errors import HelmError

from offbeat.deploy.config.loader import read_document
from tests.deploy.clusters.kuberay import SPECS, cluster_of, pod_templates, schema_of
from tests.deploy.clusters.rendering import CHART, FILES, KUBERNETES, documents, manifest, render

KUBERNETES_VERSION = "1.37"
BOTH = [
    *documents(),
    *(each for each in documents({"job": {"enabled": True}}) if each["kind"] in ("RayJob", "ConfigMap")),
]
NAMES = [f"{each['kind']}/{each['metadata']['name']}" for each in BOTH]
KUBERAY = [each for each in BOTH if each["kind"] in SPECS]
SECRETS = {"redis-url", "token", "auth_token"}


def check(resource: dict[str, Any]) -> None:
    """Raise if Kubernetes or KubeRay would refuse a resource, or ignore one of its fields."""
    if resource["kind"] not in SPECS:
        kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)
        return
    jsonschema.validate(resource, schema_of(resource["kind"]))
    for template in pod_templates(resource):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("resource", BOTH, ids=NAMES)
def test_resources_are_valid(resource: dict[str, Any]):
    check(resource)


@pytest.mark.parametrize("resource", BOTH, ids=NAMES)
def test_a_misspelt_field_would_be_seen(resource: dict[str, Any]):
    wrong = copy.deepcopy(resource)
    if resource["kind"] in SPECS:
        pod_templates(wrong)[1]["spec"]["containers"][0]["volumeMount"] = []
    else:
        wrong["spek"] = {}
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(wrong)


def test_the_kinds_are_those_that_the_documentation_names():
    kinds = {each["kind"] for each in BOTH}
    assert kinds == {
        *("RayService", "RayJob", "ConfigMap", "NetworkPolicy", "PersistentVolumeClaim", "Service", "StatefulSet")
    }


@pytest.mark.parametrize("name", FILES)
def test_manifests_are_those_of_the_chart(name: str):
    assert (KUBERNETES / name).read_text() == manifest(name), "run `make docs`"


def test_helm_finds_nothing_wrong():
    report = lint(CHART, strict=True)
    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    "values", [{"envWorker": {}}, {"envWorkers": {"cpu": 4, "memory": "1Gi", "min": 0, "max": 1}}, {"maxCpus": "all"}]
)
def test_values_that_the_chart_does_not_know_are_refused(values: dict[str, Any]):
    with pytest.raises(HelmError):
        render(values)


@pytest.mark.parametrize("resource", KUBERAY, ids=lambda each: each["kind"])
def test_env_workers_scale_and_gpus_are_for_those_who_use_them(resource: dict[str, Any]):
    cluster = cluster_of(resource)
    assert cluster["enableInTreeAutoscaling"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert groups["env-workers"]["maxReplicas"] > groups["env-workers"]["minReplicas"]
    limits = {name: group["template"]["spec"]["containers"][0]["resources"]["limits"] for name, group in groups.items()}
    assert {name for name, each in limits.items() if "nvidia.com/gpu" in each} == {"gpu-workers"}


@pytest.mark.parametrize("resource", KUBERAY, ids=lambda each: each["kind"])
def test_a_mesh_has_tokens_and_no_rights_that_it_does_not_use(resource: dict[str, Any]):
    assert cluster_of(resource)["authOptions"] == {"mode": "token", "secretName": "offbeat"}
    for template in pod_templates(resource):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is (spec["containers"][0]["name"] == "ray-head")
        items = next(v for v in spec["volumes"] if v["name"] == "config")["projected"]["sources"][0]["secret"]["items"]
        assert {each["key"] for each in items} < SECRETS


def test_the_api_is_asked_where_its_proxy_runs():
    """`proxy_location: HeadOnly`; KubeRay labels the head's pod with its node type."""
    service = copy.deepcopy(next(each["spec"] for each in BOTH if each["metadata"]["name"] == "offbeat-api"))
    assert service["selector"].pop("ray.io/node-type") == "head"
    (head,) = [pod_templates(each)[0] for each in KUBERAY if each["kind"] == "RayService"]
    assert service["selector"].items() <= head["metadata"]["labels"].items()
    exposed = {port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert {port["port"] for port in service["ports"]} <= exposed


def test_no_ray_port_is_open_to_other_pods():
    policies = {each["metadata"]["name"]: each["spec"] for each in BOTH if each["kind"] == "NetworkPolicy"}
    pods = {each["kind"]: pod_templates(each) for each in KUBERAY}
    selector = policies["offbeat-mesh"]["podSelector"]["matchLabels"]
    assert all(selector.items() <= pod["metadata"]["labels"].items() for each in pods.values() for pod in each)
    open_to_clients = policies["offbeat-mesh"]["ingress"][2]
    assert open_to_clients["ports"] == [{"port": 8000}]
    addresses = [rule.get("to") for rule in policies["offbeat-mesh"]["egress"]]
    assert None not in addresses, "a rule without `to` reaches the internet"
    assert policies["offbeat-redis"]["egress"] == []


def test_the_internet_is_reached_if_wanted():
    policy = yaml.safe_load(render({"networkPolicy": {"internet": True}})["networkpolicy"].split("---")[0])
    assert "to" not in policy["spec"]["egress"][-1]


def test_the_run_of_the_job_is_one():
    run = next(each for each in BOTH if each["kind"] == "ConfigMap")["data"]["run.yaml"]
    config = read_document(run)
    assert (str(config.output_dir), config.weights.transport) == ("/mesh/runs/my-run", "fs")
