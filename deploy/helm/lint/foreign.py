"""Kinds that Kubernetes itself does not have, and so no schema of its own: the fields that the chart sets in them, and whether what they
point to is there. Used by tools/chart-lint."""

# A shape: a constant, a type, {key: shape} with `?` behind keys that may be absent and no others, [shape] for a list that has some,
# or several shapes (in parentheses), one of which it must have.
TEXTS = dict
METADATA = {"name": str, "namespace": str, "labels": TEXTS, "annotations?": TEXTS}
ENDPOINT = {"port": str, "path": "/metrics", "interval": str}
SELECTOR = {"matchLabels": TEXTS, "matchExpressions?": [{"key": str, "operator": "In", "values": [str]}]}
PARENT = {"name": str, "namespace?": str, "sectionName?": str, "port?": int, "group?": str, "kind?": str}
BACKENDS = [{"name": str, "port": int}]
SCALED = {"apiVersion": "apps/v1", "kind": "Deployment", "name": str}
# KEDA takes all metadata of a trigger as text.
BY_API = {"type": "metrics-api", "metadata": {"url": str, "valueLocation": "load", "aggregateFromKubeServiceEndpoints": "true",
                                               "aggregationType": "sum", "targetValue": str}}
BY_PROMETHEUS = {"type": "prometheus", "metadata": {"serverAddress": str, "query": str, "threshold": str, "ignoreNullValues": "false"}}
ALERT = {"alert": str, "expr": str, "for?": str, "labels": {"severity": str}, "annotations": {"summary": str, "description": str}}
ISSUER = {"name": str, "kind": str, "group": str}
CERTIFICATE = {"secretName": str, "commonName": str, "duration": str, "usages": [str], "privateKey": {"algorithm": str, "rotationPolicy": str},
               "issuerRef": ISSUER}
KEDA, CERT_MANAGER = "keda.sh/v1alpha1", "cert-manager.io/v1"
OPERATOR, GATEWAY = "monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"
KINDS = {
    "PodMonitor": (OPERATOR, {"selector": SELECTOR, "podTargetLabels": [str], "podMetricsEndpoints": [ENDPOINT]}),
    "ServiceMonitor": (OPERATOR, {"selector": SELECTOR, "targetLabels": [str], "endpoints": [ENDPOINT]}),
    "PrometheusRule": (OPERATOR, {"groups": [{"name": str, "rules": [ALERT]}]}),
    "Certificate": (CERT_MANAGER, (CERTIFICATE | {"uris": [str]}, CERTIFICATE | {"dnsNames": [str]})),
    "ScaledObject": (KEDA, {"scaleTargetRef": SCALED, "pollingInterval": int, "minReplicaCount": int, "maxReplicaCount": int,
                            "advanced?": {"horizontalPodAutoscalerConfig": {"behavior": dict}}, "triggers": [(BY_API, BY_PROMETHEUS)]}),
    "HTTPRoute": (GATEWAY, {"parentRefs": [PARENT], "hostnames?": [str],
                            "rules": [{"matches": [{"path": {"type": "PathPrefix", "value": str}}], "backendRefs": BACKENDS,
                                       "timeouts?": {"request": str}}]}),
}


def misfits(value, shape, path):
    """What of a value does not have its shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is not a mapping"
            return
        known = {key.rstrip("?"): inner for key, inner in shape.items()}
        yield from (f"{path}.{key} is unknown" for key in value if key not in known)
        yield from (f"{path}.{key} is missing" for key in shape if not key.endswith("?") and key not in value)
        for key in value.keys() & known.keys():
            yield from misfits(value[key], known[key], f"{path}.{key}")
    elif isinstance(shape, tuple):
        if all(list(misfits(value, one, path)) for one in shape):
            yield f"{path}: {value!r} has none of {len(shape)} shapes"
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            yield f"{path}: {value!r} is not a list that has something"
            return
        for index, item in enumerate(value):
            yield from misfits(item, shape[0], f"{path}[{index}]")
    elif not (isinstance(value, shape) if isinstance(shape, type) else value == shape):
        yield f"{path}: {value!r} is not {getattr(shape, '__name__', repr(shape))}"


def selected(selector, labels):
    """Whether a selector of a monitor takes something with these labels."""
    wanted = [{"key": key, "values": [value]} for key, value in selector["matchLabels"].items()]
    return all(labels.get(one["key"]) in one["values"] for one in wanted + selector.get("matchExpressions", []))


def loose_ends(manifest, others):
    """What a manifest points to that is not among the release's manifests."""
    kind, spec = manifest["kind"], manifest["spec"]
    services = [other for other in others if other["kind"] == "Service"]
    pods = [other["spec"]["template"] for other in others if other["kind"] in ("Deployment", "StatefulSet")]
    if kind == "PodMonitor":
        met = [pod for pod in pods if selected(spec["selector"], pod["metadata"]["labels"])]
        ports = [{port["name"] for port in pod["spec"]["containers"][0]["ports"]} for pod in met]
        wanted, endpoints = len(met), spec["podMetricsEndpoints"]
    elif kind == "ServiceMonitor":
        met = [service for service in services if selected(spec["selector"], service["metadata"]["labels"])]
        ports = [{port["name"] for port in service["spec"]["ports"]} for service in met]
        # One for the pods of each component. Beside them there are the Services that clients and workers use.
        wanted = sum(selected(spec["selector"], pod["metadata"]["labels"]) for pod in pods)
        endpoints = spec["endpoints"]
    elif kind == "HTTPRoute":
        backends = [(backend["name"], backend["port"]) for rule in spec["rules"] for backend in rule["backendRefs"]]
        there = {(service["metadata"]["name"], port["port"]) for service in services for port in service["spec"]["ports"]}
        yield from (f"there is no Service {name} with port {port}" for name, port in backends if (name, port) not in there)
        return
    elif kind == "ScaledObject":
        yield from unscaled(spec, others, services)
        return
    else:
        return
    for endpoint in endpoints:
        found = sum(endpoint["port"] in names for names in ports)
        if found != wanted or not wanted:
            yield f"port {endpoint['port']} is found {found} times, not {wanted}"


def unscaled(spec, others, services):
    """What a ScaledObject scales or asks and is not there."""
    target = spec["scaleTargetRef"]
    found = [other for other in others if (other["kind"], other["metadata"]["name"]) == (target["kind"], target["name"])]
    if not found:
        yield f"there is no {target['kind']} {target['name']}"
        return
    # The autoscaler's number would be set back by each upgrade.
    if "replicas" in found[0]["spec"]:
        yield f"{target['name']} says how many replicas it has"
    for trigger in spec["triggers"]:
        url = trigger["metadata"].get("url")
        if url is None:
            continue
        host, port = url.removeprefix("http://").split("/")[0].split(":")
        met = [service for service in services if f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc" == host]
        if not met or met[0]["spec"]["ports"][0]["port"] != int(port):
            yield f"there is no Service {host} with port {port}"


def problems(manifest, others):
    """What is wrong with a manifest of a kind above, among those of its release."""
    version, shape = KINDS[manifest["kind"]]
    whole = {"apiVersion": version, "kind": str, "metadata": METADATA, "spec": shape}
    found = list(misfits(manifest, whole, manifest["kind"]))
    return found or [f"{manifest['kind']}: {end}" for end in loose_ends(manifest, others)]
