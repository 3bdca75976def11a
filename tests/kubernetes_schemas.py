# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks a document of Kubernetes against the schemas of Kubernetes and JobSet.

kubernetes_schemas.json has, of each published schema, only the fields that
examples/pods/kubernetes.yaml uses. Any other field is refused: copy it from
config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of JobSet 0.12.0, or
from v1.37.0-local-strict/_definitions.json of the package kubernetes-validate
1.37.0, which has Kubernetes' own schemas. All are licensed under Apache-2.0.
"""

import json
from pathlib import Path

import jsonschema
import yaml

from tests.source_files import ROOT

EXAMPLE = ROOT / "examples" / "pods" / "kubernetes.yaml"
_FILE = Path(__file__).with_suffix(".json")


def read_documents() -> dict[str, dict]:
  """Returns the documents of the example by their kind."""
  documents = yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))
  return {x["kind"]: x for x in documents}


def errors(document: dict) -> list[str]:
  """Returns what a schema says of a document; nothing if the document fits."""
  schema = json.loads(_FILE.read_text(encoding="utf-8"))[document["kind"]]
  found = jsonschema.Draft7Validator(schema).iter_errors(document)
  return [f"{x.json_path}: {x.message}" for x in found]
