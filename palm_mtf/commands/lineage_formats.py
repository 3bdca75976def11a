# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run as events of OpenLineage, and its data as metadata of Croissant."""

import datetime
import hashlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palm_mtf import __version__
from palm_mtf.checkpoints.lineage import LINK
from palm_mtf.checkpoints.manifest import MANIFEST, Manifest, find_checkpoints
from palm_mtf.config import DataConfig
from palm_mtf.config.macros import from_macros
from palm_mtf.data.sources.conversation import ANSWERS, MESSAGES, PAIRS, TEXTS
from palm_mtf.data.sources.files import FileDigests, TextFile
from palm_mtf.data.sources.text_files import TextFiles, open_sources
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.lock import is_locked
from palm_mtf.model_dir.paths import ModelDir

_PRODUCER = f"https://pypi.org/project/palm-mtf/{__version__}/"
_SPEC = "https://openlineage.io/spec/"
_SCHEMA = f"{_SPEC}2-0-2/OpenLineage.json#/$defs/"
# TensorBoard's files have the times of all starts in their names.
_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+(?:\.\d+)?)\..*")
_CROISSANT = "http://mlcommons.org/croissant/"
_JSON = {"@type": "@json"}
# The @context of Croissant 1.1.
_CONTEXT = {
  "@language": "en",
  "@vocab": "https://schema.org/",
  "sc": "https://schema.org/",
  "cr": _CROISSANT,
  "rai": f"{_CROISSANT}RAI/",
  "dct": "http://purl.org/dc/terms/",
  "conformsTo": "dct:conformsTo",
  "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
  "data": {"@id": "cr:data", **_JSON},
  "examples": {"@id": "cr:examples", **_JSON},
  "name": {"@container": "@language"},
  "description": {"@container": "@language"},
} | {
  name: f"cr:{name}"
  for name in (
    "arrayShape citeAs column containedIn equivalentProperty extract field "
    "fileObject fileProperty fileSet format includes isArray isLiveDataset "
    "jsonPath key md5 parentField path recordSet references regex repeated "
    "replace samplingRate separator source subField transform"
  ).split()
}

_UNUSED = {"VOCABULARY": None, "VALIDATION_SHARE": 0.5}  # if settings lack them

# A file, its SHA-256, and {field of its lines: whether it has messages}; or {}
# if it is one text.
_Described = tuple[TextFile, str, Mapping[str, bool]]


def format_lineage(model_dir: str, target: str) -> Iterator[str]:
  """Yields the newest checkpoint's run as "openlineage", or "croissant".

  Raises UserError if there is no checkpoint, or files of TEXT_FILES are missing
  or have changed; or, for Croissant, if there are none.
  """
  path = os.path.abspath(os.path.expanduser(model_dir))
  checkpoints = find_checkpoints(path)
  if not checkpoints:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: has no checkpoint; give a run."
    )
  newest = checkpoints[-1].manifest
  files = [*_find_files(path, newest)]
  if target == "croissant":
    yield json_text(_describe_data(path, files), indent=1)
    return
  inputs = [_dataset(file.path, f"sha256:{x}") for file, x, _ in files]
  for link in (newest.origin, newest.base, newest.teacher):
    if isinstance(link, Mapping) and {*LINK} <= link.keys():
      name = str(link["checkpoint"])
      inputs.append(_dataset(name, f"blake2b:{link['blake2b']}"))
  if task := newest.settings.get("TASK"):
    tokens = f"tokens:{newest.data.get('the tokens')}"
    inputs.append(_dataset(str(task), tokens, "seqio"))
  outputs = [_dataset(x.path, f"blake2b:{x.blake2b}") for x in checkpoints]
  found = filter(None, map(_EVENTS.fullmatch, os.listdir(path)))
  end = os.path.getmtime(os.path.join(checkpoints[-1].path, MANIFEST))
  start = min([end, *(float(x[1]) for x in found)])
  state = "COMPLETE"
  if newest.step != newest.settings.get("TRAIN_STEPS", newest.step):
    state = "RUNNING" if is_locked(path) else "ABORT"
  run = uuid.uuid5(uuid.NAMESPACE_URL, f"file://{path}#{start}")
  given = {"settings": newest.settings, "data": newest.data}
  facet = _facet(f"{_SCHEMA}RunFacet", **given)
  for secs, name, made in ((start, "START", []), (end, state, outputs)):
    time = datetime.datetime.fromtimestamp(secs, datetime.UTC)
    event = {
      "eventType": name,
      "eventTime": time.isoformat(),
      "producer": _PRODUCER,
      "schemaURL": f"{_SCHEMA}RunEvent",
      "run": {"runId": str(run), "facets": {"palm_mtf": facet}},
      "job": {"namespace": "palm_mtf", "name": os.path.basename(path)},
      "inputs": inputs,
      "outputs": made,
    }
    yield json_text(event)


def _facet(schema: str, **fields: object) -> dict[str, Any]:
  return {"_producer": _PRODUCER, "_schemaURL": schema, **fields}


def _dataset(
  path: str, version: str, namespace: str = "file"
) -> dict[str, Any]:
  schema = f"{_SPEC}facets/1-0-1/DatasetVersionDatasetFacet.json"
  facets = {"version": _facet(schema, datasetVersion=version)}
  return {"namespace": namespace, "name": path, "facets": facets}


def _find_files(path: str, manifest: Manifest) -> Iterator[_Described]:
  """Yields the text files of a run, with their hashes."""
  settings = manifest.settings
  if settings.get("TASK") or not settings.get("TEXT_FILES"):
    return
  data = from_macros(DataConfig, _UNUSED | settings)
  (source,) = open_sources(data)
  assert isinstance(source, TextFiles)
  folder = data.cache_folder or ModelDir(path).tokens
  digests = FileDigests(os.path.join(folder, "digests.json"))
  if changed := digests.find_changed(source.files):
    raise UserError(f"{changed.path}: changed after training; restore it.")
  forms = {TEXTS: {data.text_field: False}, MESSAGES: {MESSAGES: True}}
  pair = dict.fromkeys(ANSWERS, source.form == PAIRS)
  fields = forms.get(source.form, pair)
  for file in source.files:
    with open(file.path, "rb") as content:
      sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    yield file, sha256, fields if file.is_json_lines else {}


def _describe_data(path: str, files: Sequence[_Described]) -> dict[str, Any]:
  """Returns Croissant's metadata, for a file in the folder of the data."""
  if not files:
    raise UserError(f"{path}: has no TEXT_FILES; give a run that has.")
  folder = os.path.commonpath([os.path.dirname(x.path) for x, _, _ in files])
  described: dict[str, Any] = {
    "@context": _CONTEXT,
    "@type": "sc:Dataset",
    "conformsTo": f"{_CROISSANT}1.1",
    "name": os.path.basename(path),
    "description": f"The data of {os.path.basename(path)}, a run of palm_mtf.",
    "distribution": [],
    "recordSet": [],
  }
  for i, (file, sha256, fields) in enumerate(files):
    kind = "application/jsonlines" if fields else "text/plain"
    own: dict[str, object] = {"@type": "cr:FileObject", "@id": f"file-{i}"}
    own |= {"name": os.path.basename(file.path), "encodingFormat": kind}
    own |= {"sha256": sha256, "contentSize": f"{file.num_bytes} B"}
    own["contentUrl"] = os.path.relpath(file.path, folder)
    described["distribution"].append(own)
    columns = []
    for name, has_messages in (fields or {"content": False}).items():
      extract = {"column" if fields else "fileProperty": name}
      source = {"fileObject": {"@id": f"file-{i}"}, "extract": extract}
      place = f"documents-{i}/{name}"
      field = {"@type": "cr:Field", "@id": place, "name": name}
      field |= {"dataType": "sc:Text", "source": source}
      if has_messages:
        parts = [
          {**field, "@id": f"{place}/{x}", "name": x}
          | {"source": {**source, "transform": {"jsonPath": f"$[*].{x}"}}}
          for x in ("role", "content")
        ]
        field |= {"repeated": True, "subField": parts}
      columns.append(field)
    name = f"documents-{i}"
    records = {"@type": "cr:RecordSet", "@id": name, "name": name}
    described["recordSet"].append({**records, "field": columns})
  return described
