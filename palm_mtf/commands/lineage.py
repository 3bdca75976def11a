# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf lineage`: draws where a model comes from, and finds changed files.

With --score, it prints how likely each of these models finds a text. With
--format, it prints a run as events of OpenLineage, or its data as metadata of
Croissant.
"""

import datetime
import hashlib
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palm_mtf import __version__
from palm_mtf.checkpoints.lineage import LINK, Ancestor, trace
from palm_mtf.checkpoints.manifest import MANIFEST, Manifest, find_checkpoints
from palm_mtf.checkpoints.weights_to_load import settings_of
from palm_mtf.config import DataConfig, MeshLayout, ModelConfig
from palm_mtf.config.macros import from_macros
from palm_mtf.console import format_table
from palm_mtf.data.batches.packing import document_start, row_start
from palm_mtf.data.sources.conversation import ANSWERS, MESSAGES, PAIRS, TEXTS
from palm_mtf.data.sources.files import FileDigests, TextFile
from palm_mtf.data.sources.text_files import TextFiles, open_sources
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, shorten
from palm_mtf.json_text import json_text
from palm_mtf.machine.activation_dtype import resolve_dtype
from palm_mtf.model_dir.lock import is_locked
from palm_mtf.model_dir.paths import ModelDir

_LONGEST = 4096  # longer texts, which are no paths, are shortened
_SHOWN_SETTINGS, _SHOWN_TOKENS = 4, 5
# Settings of DataConfig on which log p depends; it also requires the others.
_OF_VOCABULARY = ("VOCABULARY", "EXTRA_IDS")
_START = ("PACKING", "START_ID", "ADD_START")
_NO_TEXT = {"TEXT_FILES": "none", "VOCABULARY": None, "VALIDATION_SHARE": 0.5}


def lineage(
  *, model_dir: str, text: str | None, target: str, as_json: bool
) -> int:
  """Prints a model's ancestors; returns 1 if one is missing or changed.

  If `target` is not "text", prints the run or its data in that format.

  Raises UserError if `model_dir` has no checkpoint, a manifest has wrong
  values, or `text` cannot be scored.
  """
  if text == "":
    raise UserError("--score = '': is no text; give one.")
  if target != "text":
    if text or as_json:
      raise UserError(
        f"--format={target} is JSON already; leave --score and --json out."
      )
    print(*format_lineage(model_dir, target), sep="\n")
    return 0
  found: list[Ancestor] = []
  depths: list[int] = []
  for each in trace(model_dir):
    found.append(each)
    child = each[0]["child"]
    depths.append(0 if child is None else depths[child] + 1)
    # Print at once, because hashing gigabytes takes seconds.
    for line in [] if as_json else _draw(each[0]):
      print("  " * depths[-1] + line, flush=True)
  models = [record for record, _ in found]
  lost = sum(each["state"] != "found" for each in models)
  result = {"complete": not lost, "models": models}
  if text is not None:
    tokens, scores = _score(found, text)
    result |= {"tokens": tokens, "token_log_p": scores}
    for line in [] if as_json else _format_scores(models, tokens, scores):
      print(line)
  if as_json:
    print(json_text(result))
  elif lost:
    print(
      f"{lost} of {len(found)} models are missing or changed; move a missing "
      "one back to its path, or make a symbolic link there"
    )
  return 1 if lost else 0


def _draw(record: Mapping[str, Any]) -> Iterator[str]:
  if record["kind"] is not None:
    changed = [
      f"{_show(name)} = {shorten(after)} (was {shorten(before)})"
      for name, (before, after) in record["changed_settings"].items()
    ]
    if (more := len(changed) - _SHOWN_SETTINGS) > 0:
      changed[_SHOWN_SETTINGS:] = [f"{more} more"]
    settings = f", with {', '.join(changed)}" if changed else ""
    yield f"{_show(record['kind'])} from{settings}:"
  step = f"  step {shorten(record['step'])}" if "step" in record else ""
  path, digest, state = (_show(record[x]) for x in ("path", "blake2b", "state"))
  yield f"{path}{step}  {digest}  {state}"
  if tokens := record.get("data", {}).get("the tokens"):
    settings = record["settings"]
    of = settings.get("TASK") or settings.get("TEXT_FILES")
    seed = f"SEED = {shorten(settings.get('SEED'))}"
    how = "initialised and trained" if record["initialised"] else "trained"
    yield f"  {how} on {shorten(of)} (tokens {shorten(tokens)}), {seed}"


def _show(text: str) -> str:
  is_plain = text.isprintable() and len(text) <= _LONGEST
  return text if is_plain else shorten(text)


def _score(
  found: Sequence[Ancestor], text: str
) -> tuple[list[str], list[list[float] | str]]:
  """Returns the tokens of a text, and per model their log p, or why not."""
  record, weights = found[0]
  if not weights or not weights.checkpoint:
    raise UserError(
      f"--score of {record['path']}: is no checkpoint of palm_mtf; give the "
      "MODEL_DIR of a run."
    )
  settings = settings_of(weights.checkpoint.manifest)
  run = os.path.dirname(os.path.dirname(weights.place))
  own = {x: settings[x] for x in _OF_VOCABULARY if x in settings}
  data = from_macros(DataConfig, _NO_TEXT | own)  # checks the values
  path = data.vocabulary or ModelDir(run).vocabulary
  vocabulary = open_vocabulary(
    os.path.expanduser(path), extra_ids=data.extra_ids
  )
  ids = vocabulary.encode(text)
  # All models compute in one dtype, so that only their weights differ.
  dtype = settings["ACTIVATION_DTYPE"]
  scores = [_score_one(each, vocabulary, ids, dtype) for each in found]
  return [vocabulary.piece(i) for i in ids], scores


def _score_one(
  ancestor: Ancestor, vocabulary: Vocabulary, ids: Sequence[int], dtype: object
) -> list[float] | str:
  from palm_mtf.generation.inference.scorer import Example, Scorer
  from palm_mtf.generation.inference.sessions import LoadedDecoder

  _, weights = ancestor
  checkpoint = weights.checkpoint if weights else None
  if not checkpoint:
    return "no checkpoint of palm_mtf was found"
  manifest = checkpoint.manifest
  if manifest.vocabulary_sha256 != vocabulary.sha256:
    return "has another vocabulary"
  if any(name not in manifest.settings for name in _START):
    return "its manifest lacks settings of the model"
  mesh = MeshLayout(mesh_shape="", layout="")
  try:
    start = {name: manifest.settings[name] for name in _START}
    data = from_macros(DataConfig, _NO_TEXT | start)
    known = settings_of(manifest) | {"ACTIVATION_DTYPE": dtype}
    model = resolve_dtype(from_macros(ModelConfig, known), mesh)
    if model.model_function:
      return "is a model of MODEL_FUNCTION"
    begin = document_start(data, vocabulary), row_start(data, vocabulary)
    with LoadedDecoder(checkpoint, model, mesh) as loaded:
      scorer = Scorer(loaded, None, *begin, adds_start=data.add_start)
      ((_, losses),) = scorer.token_losses([Example((), ids)])
      return (-losses).tolist()
  except UserError as error:  # such as a missing base of an adapter
    return str(error)


def _format_scores(
  models: Sequence[Mapping[str, Any]],
  tokens: Sequence[str],
  scores: Sequence[list[float] | str],
) -> Iterator[str]:
  """Yields lines: totals in nats, then the tokens that changed most."""
  rows = [("log likelihood", "per token", "model")]
  for model, score in zip(models, scores, strict=True):
    numbers, why = ("-", "-"), f": {score}"
    if not isinstance(score, str):
      total, why = math.fsum(score), ""
      numbers = (f"{total:.4f}", f"{total / len(tokens):.4f}")
    rows.append((*numbers, _show(f"{model['path']}{why}")))
  yield from format_table(rows, ">><").splitlines()
  for model, before in zip(models[1:], scores[1:], strict=True):
    child, after = model, "not scored"
    while isinstance(after, str) and child["child"] is not None:
      child, after = models[child["child"]], scores[child["child"]]
    if isinstance(before, str) or isinstance(after, str):
      continue
    first, last = (_show(x["path"]) for x in (model, child))
    yield f"from {first} to {last}:"
    order = sorted(range(len(tokens)), key=lambda i: -abs(after[i] - before[i]))
    for i in order[:_SHOWN_TOKENS]:
      yield f"  token {i} {tokens[i]!r}: {before[i]:.4f} to {after[i]:.4f}"


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
  data = from_macros(DataConfig, _NO_TEXT | settings)
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
