"""What the scripts in this folder share: kubectl, helm with this chart, and nodes that are only pretended. Some of it needs PyYAML."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/baton"
# By this label kwok knows its nodes, and pods the nodes they are for.
PRETENDED = "baton-tests/pretended"

sys.path.insert(0, str(ROOT / "bench"))
from compare import print_table  # noqa: F401


def output(*command, **options):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def until(what, condition, patience=60):
    """Waits until `condition()` is something, which it returns."""
    deadline = time.monotonic() + patience
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"after {patience} s: {what}")
        time.sleep(0.3)
    return found


class Cluster:
    """The cluster that kubectl reaches, and a release in a namespace of it."""

    def __init__(self, release, namespace):
        self.release, self.namespace = release, namespace
        tools = ROOT / "tools/fetch-helm"
        self.helm_program, self.kubectl_program = output(tools).strip(), output(tools, "kubectl").strip()

    def kubectl(self, *words, **options):
        return output(self.kubectl_program, "--namespace", self.namespace, *words, **options)

    def apply(self, *objects):
        self.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def get(self, *words):
        """Objects, as JSON has them."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))["items"]

    def helm(self, verb, *words):
        return output(self.helm_program, verb, self.release, *words, "--namespace", self.namespace)

    def rendered(self, *words):
        """Objects of the chart, those of its hooks included."""
        import yaml

        return [each for each in yaml.safe_load_all(self.helm("template", CHART, *words)) if each]

    def name(self, component):
        name = self.release if "baton" in self.release else f"{self.release}-baton"
        return f"{name}-{component}"

    def labels(self, component):
        return f"app.kubernetes.io/instance={self.release},app.kubernetes.io/component={component}"

    def pods(self, component):
        return self.kubectl("get", "pods", "-l", self.labels(component), "-o", "name").split()

    @contextlib.contextmanager
    def acting_as(self, account):
        """An environment in which kubectl and baton are a service account of the namespace."""
        config = json.loads(output(self.kubectl_program, "config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
        (user,) = config["users"]
        user["user"] = {"token": self.kubectl("create", "token", account, "--duration=4h").strip()}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            yield {**os.environ, "KUBECONFIG": file.name}

    @contextlib.contextmanager
    def a_namespace(self):
        """The namespace, for as long as it is needed."""
        self.kubectl("create", "namespace", self.namespace)
        try:
            yield
        finally:
            self.kubectl("delete", "namespace", self.namespace, "--timeout=120s")


@contextlib.contextmanager
def pretended(cluster, kwok, nodes):
    """Nodes that kwok pretends, where pods are ready at once and nothing runs: {name: (labels, resources, taints)}."""
    def node(name, labels, resources, taints):
        every = {PRETENDED: "yes", "kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
        room = {"pods": "110", "ephemeral-storage": "1Ti", **resources}
        return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {**every, **labels}},
                "spec": {"taints": taints}, "status": {"allocatable": room, "capacity": room}}

    # Without leases its nodes would be taken for lost after a minute.
    program = [kwok, "--manage-all-nodes=false", f"--manage-nodes-with-label-selector={PRETENDED}=yes", "--node-lease-duration-seconds=40",
               "--cidr=10.240.0.1/16", "--node-ip=10.240.0.1"]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        cluster.apply(*(node(name, *rest) for name, rest in nodes.items()))
        cluster.kubectl("wait", "--for=condition=Ready", "node", "-l", f"{PRETENDED}=yes", "--timeout=60s")
        yield
    finally:
        cluster.kubectl("delete", "node", "-l", f"{PRETENDED}=yes", "--timeout=60s")
        process.terminate()
        process.wait()
