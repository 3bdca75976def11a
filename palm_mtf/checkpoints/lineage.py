# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: their parents, the parents of these, and so on.

A manifest has up to three links, {"kind", "checkpoint": path, "blake2b": hash}:

origin    how the run began: "initialised" (random; no path and hash);
          "continued", "finetuned", "upcycled" or "pruned" from
          INIT_CHECKPOINT; or "imported" from files of other software. If
          palm_mtf had exported these files, the link has the link of the export
          as its "origin".
base      the model that an adapter changes ("adapted")
teacher   the model that was imitated ("distilled")

The link of an export names the exported checkpoint: "exported", "merged" or
"quantized".
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from palm_mtf.checkpoints.adapter_base import describe_base
from palm_mtf.checkpoints.named_weights import NamedWeights, find_weights
from palm_mtf.errors import UserError
from palm_mtf.model_dir.foreign_files import check_regular, hash_file

IMPORTED, INITIALISED = "imported", {"kind": "initialised"}
LINK = ("kind", "checkpoint", "blake2b")  # the texts of a link
_DESCRIBED = ("step", "settings", "data", "versions", "vocabulary_sha256")
# Endings of the files of an imported folder on which log p depends.
_ENDINGS = (".safetensors", ".json", ".model")


# A model in a lineage: the JSON object that docs/training.md explains; and its
# weights, None if they are not found, or are not of palm_mtf.
Ancestor = tuple[dict[str, Any], NamedWeights | None]


def describe_origin(
  weights: NamedWeights, settings: Mapping[str, object]
) -> dict[str, object]:
  """Returns `origin` of a run with these macros that begins with `weights`."""
  kind = "upcycled" if settings["INIT_EXPERTS"] == "copy" else "finetuned"
  kind = "pruned" if settings["PRUNE"] != "none" else kind
  kind = "continued" if settings["INIT_STATE"] == "all" else kind
  return {**describe_base(weights), "kind": kind}


def hash_source(path: str) -> str:
  """Returns the hash of a GGUF file, or of a folder's weights and settings.

  Raises OSError if a file is missing or not a regular file.
  """
  names = [""]
  if os.path.isdir(path):
    names = sorted(x for x in os.listdir(path) if x.endswith(_ENDINGS))
  digest = hashlib.blake2b(digest_size=16)
  for name in names:
    file = os.path.join(path, name) if name else path
    check_regular(file)
    digest.update(f"{name}\0{hash_file(file)}\0".encode())
  return digest.hexdigest()


def trace(path: str) -> Iterator[Ancestor]:
  """Yields the model at `path` and its ancestors, each after its child.

  `path` names a run or a checkpoint. All bytes are compared with the hashes
  that the children recorded. A model from which several others came is yielded
  for each, but its parents follow only the first time.

  Raises UserError if there is no checkpoint, or a manifest has wrong values.
  """
  first = find_weights("MODEL_DIR", path)
  to_read: list[tuple[Mapping[str, Any], int | None]]
  to_read = [(describe_base(first), None)]
  found: list[dict[str, Any]] = []
  seen: set[tuple[str, str]] = set()
  while to_read:
    link, child = to_read.pop()
    try:
      texts = kind, where, blake2b = [link[name] + "" for name in LINK]
      state, weights = _open(*texts) if found else ("found", first)
      record = {"kind": kind if found else None, "child": child, "path": where}
      record |= {"blake2b": blake2b, "state": state, "changed_settings": {}}
      parents = [link.get("origin")]
      if weights and weights.checkpoint:
        manifest = weights.checkpoint.manifest
        fields = ("origin", "base", "teacher")
        parents = [getattr(manifest, name, None) for name in fields]
        record |= {name: getattr(manifest, name) for name in _DESCRIBED}
        record["initialised"] = manifest.origin == INITIALISED
        after = record if child is None else found[child]
        record["changed_settings"] = _compare(record, after)
    except (AttributeError, KeyError, TypeError):
      of = path if child is None else found[child]["path"]
      raise UserError(
        f"{of!r}: its manifest, or that of a parent, has values of wrong "
        "types; copy the checkpoints again."
      ) from None
    found.append(record)
    yield record, weights
    if (where, blake2b) not in seen:
      wanted = [x for x in reversed(parents) if x not in (None, INITIALISED)]
      to_read += [(x, len(found) - 1) for x in wanted]
    seen.add((where, blake2b))


def _open(
  kind: str, path: str, blake2b: str
) -> tuple[str, NamedWeights | None]:
  """Returns "found", or "missing" or "changed" with a reason; and weights."""
  weights = None
  try:
    if kind == IMPORTED:
      digest = hash_source(path)
    elif any(map(os.path.exists, (path, f"{path}.index"))):
      weights = find_weights("the parent", path)
      digest = describe_base(weights)["blake2b"]
    else:
      return "missing", None
  except UserError as error:
    # A run may have removed the checkpoint since.
    gone = "changed" if os.path.exists(path) else "missing"
    return f"{gone}: {error}", None
  except (OSError, ValueError) as error:  # no path has a character such as \0
    return f"missing: {error}", None
  if digest != blake2b:
    return f"changed: has the hash {digest}", None
  return "found", weights


def _compare(
  before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, list[object]]:
  """Returns {setting: [value before, value after]} of those that differ."""
  ours, theirs = (
    {**x.get("settings", {}), "the tokens": x.get("data", {}).get("the tokens")}
    for x in (before, after)
  )
  names = [x for x in theirs if x in ours and "settings" in after]
  pairs = {name: [ours[name], theirs[name]] for name in names}
  return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
