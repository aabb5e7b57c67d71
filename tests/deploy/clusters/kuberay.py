"""JSON Schema of the parts of KubeRay's resources that deploy/kubernetes uses.

Field names, types and values are those of KubeRay 1.7.0 (ray-operator/apis/ray/v1 in github.com/ray-project/kuberay);
a field that is not listed is refused. Pod templates are checked against Kubernetes' own schema.
"""

from typing import Any

TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
PARAMETERS = {"type": "object", "additionalProperties": TEXT}


def _object(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": fields}


HEAD = _object(
    ("template",), rayStartParams=PARAMETERS, serviceType=TEXT, labels=PARAMETERS, template={"type": "object"}
)
WORKERS = _object(
    ("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    idleTimeoutSeconds=COUNT,
    rayStartParams=PARAMETERS,
    labels=PARAMETERS,
    template={"type": "object"},
)
CLUSTER = _object(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=_object(mode={"enum": ["disabled", "token"]}, secretName=TEXT, enableK8sTokenAuth=FLAG),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=_object(
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        version={"enum": ["v1", "v2"]},
    ),
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
SPECS = {
    "RayService": _object(
        ("rayClusterConfig",),
        upgradeStrategy=_object(type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]}),
        serveConfigV2=TEXT,
        rayClusterConfig=CLUSTER,
    ),
    "RayJob": _object(
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        backoffLimit=COUNT,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        runtimeEnvYAML=TEXT,
        rayClusterSpec=CLUSTER,
    ),
}


def schema_of(kind: str) -> dict[str, Any]:
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata={"type": "object"},
        spec=SPECS[kind],
    )


def cluster_of(resource: dict[str, Any]) -> dict[str, Any]:
    """Return the Ray cluster of a RayService or RayJob."""
    spec = resource["spec"]
    return spec["rayClusterConfig"] if resource["kind"] == "RayService" else spec["rayClusterSpec"]


def pod_templates(resource: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = cluster_of(resource)
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
