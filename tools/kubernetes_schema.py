"""Takes out of the PyPI package kubernetes-validate (111 MB of schemas, Apache-2.0) what packaging/kubernetes.yaml needs:

    pip install --no-deps --target DIR kubernetes-validate
    tools/kubernetes_schema.py DIR/kubernetes_validate/kubernetes-json-schema/v1.31.0-local-strict > tests/install/kubernetes-1.31.json
"""

import json
import pathlib
import re
import sys

KINDS = {"apps/v1 Deployment": "deployment-apps-v1.json", "v1 Service": "service-v1.json"}


def pruned(node, wanted):
    """Without descriptions; notes the definitions that are referred to."""
    if isinstance(node, list):
        return [pruned(n, wanted) for n in node]
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        if key == "$ref":
            name = re.fullmatch(r"[^#]*#/\$defs/(.+)", value)[1]
            wanted.append(name)
            value = f"#/$defs/{name}"
        elif key in ("description", "$schema") and isinstance(value, str) or key.startswith("x-kubernetes-"):
            continue
        kept[key] = pruned(value, wanted)
    return kept


def main():
    folder = pathlib.Path(sys.argv[1])
    known = json.loads((folder / "_definitions.json").read_text())["$defs"]
    wanted, kinds, definitions = [], {}, {}
    for kind, name in KINDS.items():
        kinds[kind] = pruned(json.loads((folder / name).read_text()), wanted)
    for name in wanted: # grows while it is walked
        if name not in definitions:
            definitions[name] = pruned(known[name], wanted)
    print(json.dumps({"kinds": kinds, "$defs": definitions}, separators=(",", ":"), sort_keys=True))


main()
