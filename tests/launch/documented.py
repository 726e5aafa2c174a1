"""What Kubernetes and SkyPilot document of the files that are written for them: the fields there are, with their kinds.

Written from kubernetes.io/docs/reference/kubernetes-api (1.32: Job, Pod, Service, ConfigMap) and
docs.skypilot.co/en/latest/reference/yaml-spec.html; a field that is not listed there is refused.
"""

import re
from typing import Any

DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def named(required: str = "", **fields: Schema) -> Schema:
    """An object of these fields alone."""
    return {
        "type": "object",
        "properties": {name.rstrip("_"): schema for name, schema in fields.items()},
        "required": required.split(),
        "additionalProperties": False,
    }


def of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1}


LABEL = {"type": "string", "pattern": f"^{DNS_LABEL.pattern}$", "maxLength": 63}
KEY = {"type": "string", "pattern": r"^[-._a-zA-Z0-9]+$", "maxLength": 253}
LABELS: Schema = {
    "type": "object",
    "patternProperties": {r"^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$": {**TEXT, "maxLength": 63}},
    "additionalProperties": False,
}
META = named("name", name=LABEL, labels=LABELS, namespace=LABEL, annotations=TEXTS)
QUANTITY: Schema = {"type": ["string", "integer"]}
SOURCE = named(
    fieldRef=named("fieldPath", fieldPath=TEXT, apiVersion=TEXT),
    secretKeyRef=named("key", name=LABEL, key=KEY, optional=FLAG),
    configMapKeyRef=named("key", name=LABEL, key=KEY, optional=FLAG),
)
CONTAINER = named(
    "name",
    name=LABEL,
    image=TEXT,
    command=of(TEXT),
    args=of(TEXT),
    workingDir=TEXT,
    env=of(named("name", name=TEXT, value=TEXT, valueFrom=SOURCE)),
    resources=named(limits={"type": "object", "additionalProperties": QUANTITY}, requests={"type": "object"}),
    volumeMounts=of(named("name mountPath", name=LABEL, mountPath=TEXT, subPath=TEXT, readOnly=FLAG)),
    securityContext=named(capabilities=named(add=of(TEXT), drop=of(TEXT)), privileged=FLAG, runAsUser=NUMBER),
    imagePullPolicy=TEXT,
)
VOLUME = named(
    "name",
    name=LABEL,
    configMap=named("name", name=LABEL, items=of(named("key path", key=KEY, path=TEXT)), defaultMode=NUMBER),
    persistentVolumeClaim=named("claimName", claimName=TEXT, readOnly=FLAG),
    emptyDir=named(medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
POD = named(
    "containers restartPolicy",
    containers=of(CONTAINER),
    initContainers=of(CONTAINER),
    restartPolicy={"enum": ["Never", "OnFailure"]},
    subdomain=LABEL,
    hostname=LABEL,
    volumes=of(VOLUME),
    hostNetwork=FLAG,
    nodeSelector=TEXTS,
    tolerations={"type": "array"},
    terminationGracePeriodSeconds=NUMBER,
)
JOB = named(
    "template",
    completions=NUMBER,
    parallelism=NUMBER,
    completionMode={"enum": ["NonIndexed", "Indexed"]},
    backoffLimit=NUMBER,
    backoffLimitPerIndex=NUMBER,
    activeDeadlineSeconds=NUMBER,
    ttlSecondsAfterFinished=NUMBER,
    suspend=FLAG,
    template=named("spec", metadata=named(labels=LABELS), spec=POD),
)
SERVICE = named(
    clusterIP=TEXT,
    selector=LABELS,
    publishNotReadyAddresses=FLAG,
    ports=of(named("port", port=NUMBER, name=TEXT)),
    type_=TEXT,
)


def manifest(version: str, kind: str, **fields: Schema) -> Schema:
    return named(
        "apiVersion kind metadata", apiVersion={"const": version}, kind={"const": kind}, metadata=META, **fields
    )


KUBERNETES = {
    "ConfigMap": manifest(
        "v1",
        "ConfigMap",
        data={"type": "object", "patternProperties": {KEY["pattern"]: TEXT}, "additionalProperties": False},
    ),
    "Service": manifest("v1", "Service", spec=SERVICE),
    "Job": manifest("batch/v1", "Job", spec=JOB),
}

SKYPILOT = named(
    name={"type": "string", "pattern": r"^[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*$"},
    workdir=TEXT,
    num_nodes={"type": "integer", "minimum": 1},
    resources=named(
        infra=TEXT,
        accelerators=TEXT,
        cpus=QUANTITY,
        memory=QUANTITY,
        instance_type=TEXT,
        use_spot=FLAG,
        disk_size=QUANTITY,
        disk_tier=TEXT,
        network_tier={"enum": ["standard", "best"]},
        image_id={"type": "string", "pattern": "^docker:"},
        ports=TEXT,
        labels=TEXTS,
        job_recovery=TEXT,
    ),
    envs=TEXTS,
    secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    volumes={"type": "object", "additionalProperties": {"type": ["string", "object"]}},
    file_mounts={"type": "object"},
    setup=TEXT,
    run=TEXT,
)
