"""Files of packaging/ that other programs read: the Kubernetes manifest against the API's schema."""

import copy
import json
import pathlib

import jsonschema
import pytest
import yaml

SCHEMA = json.loads((pathlib.Path(__file__).parent / "kubernetes-1.31.json").read_text()) # by tools/kubernetes_schema.py


def check(document):
    kind = SCHEMA["kinds"][f"{document['apiVersion']} {document['kind']}"]
    jsonschema.Draft202012Validator({**kind, "$defs": SCHEMA["$defs"]}).validate(document)


@pytest.fixture
def manifest(repo):
    documents = list(yaml.safe_load_all((repo / "packaging/kubernetes.yaml").read_text()))
    return {d["kind"]: d for d in documents}


def test_kubernetes_schema(manifest):
    assert sorted(manifest) == ["Deployment", "Service"]
    for document in manifest.values():
        check(document)
    for path, value in [(("replicas",), "two"), (("template", "spec", "containers", 0, "readynessProbe"), {}),
                        (("template", "spec", "volumes", 1, "emptyDir", "medium"), 1)]:
        wrong = copy.deepcopy(manifest["Deployment"])
        place = wrong["spec"]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)


def test_kubernetes_names(manifest):
    """What the schema cannot see: the service finds the pods, mounts are volumes, probes have a port; nibble ends before it is killed."""
    pod = manifest["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert manifest["Deployment"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert manifest["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert all(p["targetPort"] in ports for p in manifest["Service"]["spec"]["ports"])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    options = dict(zip(container["args"][1::2], container["args"][2::2]))
    assert container["args"][0] == "serve" and options["--port"] == str(ports["http"])
    assert int(options["--drain-timeout"]) < pod["spec"]["terminationGracePeriodSeconds"]
