# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks a document of Kubernetes against the schemas of Kubernetes and JobSet.

kubernetes_schemas.json has, of each published schema, only the fields that
examples/pods/kubernetes.yaml uses. Any other field is refused: add it by

  python -m tests.kubernetes_schemas JOBSETS DEFINITIONS

JOBSETS is config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of JobSet
0.12.0. DEFINITIONS is v1.37.0-local-strict/_definitions.json of the package
kubernetes-validate 1.37.0, which has Kubernetes' own schemas. All are licensed
under Apache-2.0.
"""

import json
import sys
from pathlib import Path

import jsonschema
import yaml

from tests.source_files import ROOT

EXAMPLE = ROOT / "examples" / "pods" / "kubernetes.yaml"
_FILE = Path(__file__).with_suffix(".json")
_NAMES = {
  "Service": "io.k8s.api.core.v1.Service",
  "NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
  "PersistentVolumeClaim": "io.k8s.api.core.v1.PersistentVolumeClaim",
}


def read_documents() -> dict[str, dict]:
  """Returns the documents of the example by their kind."""
  documents = yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))
  return {x["kind"]: x for x in documents}


def errors(document: dict) -> list[str]:
  """Returns what a schema says of a document; nothing if the document fits."""
  schema = json.loads(_FILE.read_text(encoding="utf-8"))[document["kind"]]
  found = jsonschema.Draft7Validator(schema).iter_errors(document)
  return [f"{x.json_path}: {x.message}" for x in found]


def _reduce(schema: dict, values: list, definitions: dict) -> dict:
  """Returns the part of a schema that describes `values`, without texts."""
  if "$ref" in schema:
    schema = definitions[schema["$ref"].rpartition("/")[2]]
  part = {
    key: value
    for key, value in schema.items()
    if key not in ("description", "default")
    and not key.startswith("x-kubernetes")
  }
  if "properties" in schema:
    part["additionalProperties"] = False
    part["properties"] = {
      name: _reduce(schema["properties"][name], used, definitions)
      for name in sorted({x for value in values for x in value})
      if (used := [x[name] for x in values if name in x])
    }
  elif isinstance(schema.get("additionalProperties"), dict):
    inner = [x for value in values for x in value.values()]
    part["additionalProperties"] = _reduce(
      schema["additionalProperties"], inner, definitions
    )
  if "items" in schema:
    inner = [x for value in values for x in value]
    part["items"] = _reduce(schema["items"], inner, definitions)
  return part


def main() -> None:
  """Writes the file of schemas."""
  jobsets, kubernetes = (Path(x).read_text("utf-8") for x in sys.argv[1:])
  definitions = json.loads(kubernetes)["$defs"]
  (version,) = yaml.safe_load(jobsets)["spec"]["versions"]
  jobset = version["schema"]["openAPIV3Schema"]
  # The definition leaves a JobSet's own metadata to Kubernetes.
  jobset["properties"]["metadata"] = {
    "$ref": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
  }
  schemas = {
    kind: _reduce(
      definitions[_NAMES[kind]] if kind in _NAMES else jobset,
      [document],
      definitions,
    )
    for kind, document in read_documents().items()
  }
  lines = [
    f'"{kind}": {json.dumps(schema, sort_keys=True, separators=(",", ":"))}'
    for kind, schema in schemas.items()
  ]
  _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
  main()
