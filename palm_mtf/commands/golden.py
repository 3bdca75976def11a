# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf evaluate --golden FILE`: compares log p with recorded ones.

A line of FILE is {"text": ...}. If a line has no "log_p", the command adds it,
and what else `now` has. Other fields are kept.
"""

import collections
import math
import os
from collections.abc import Mapping
from typing import Any

from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.commands.adapter import add_adapter
from palm_mtf.commands.score import compute_log_likelihoods
from palm_mtf.config import Config
from palm_mtf.data.sources.files import check_unchanged, describe_file
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.machine.activation_dtype import log_dtype
from palm_mtf.model_dir.json_lines import write_json_lines
from palm_mtf.user_text import check_text, read_json_lines, short_json

# Nats per token by which rounding may change log p, such as in another layout
# or version (docs/evaluation.md has measurements).
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
_MOST = 1e100  # so that sums are finite
_FORM = 'write {"text": "..."}, or a line as this command records it'


def compare_golden(
  path: str, model_dir: str, config: Config, adapter: str | None, as_json: bool
) -> int:
  """Records or compares each line; returns 1 if a text moved, otherwise 0.

  Raises UserError if a line is wrong.
  """
  path = os.path.expanduser(path)
  lines, file = _read(path), describe_file(path)
  checkpoint, vocabulary = open_newest(model_dir, config)
  config, checkpoint = add_adapter(adapter, config, checkpoint)
  dtype = config.model.activation_dtype
  log_dtype(config.model, config.mesh_layout)
  encoded = vocabulary.encode_batch([line["text"] for line in lines])
  texts = [[((), ids)] for ids in encoded]
  found = compute_log_likelihoods(checkpoint, config, vocabulary, texts)
  states: collections.Counter[str] = collections.Counter()
  for i, (ids, log_p) in enumerate(zip(encoded, found, strict=True)):
    now = {
      "log_p": log_p,  # nats, of the whole text
      "tolerance": _TOLERANCES[dtype] * len(ids),  # nats that log p may move
      "tokens": len(ids),
      "vocabulary_sha256": vocabulary.sha256,
      "activation_dtype": dtype,
    }
    is_new, moved = "log_p" not in lines[i], _compare(lines[i], now)
    state = "moved" if moved else "recorded" if is_new else "same"
    states[state] += 1
    if as_json:
      record = {"number": i + 1, "state": state, **lines[i], "now": now}
      print(json_text(record))
    elif moved:
      print(f"text {i + 1} moved: {moved}: {short_json(lines[i]['text'])}")
    lines[i] |= now if state == "recorded" else {}
  if states["recorded"]:
    check_unchanged(file)  # the user, or another command, may have edited it
    write_json_lines(path, lines)
  if not as_json:
    print(", ".join(f"{count:,} {state}" for state, count in states.items()))
  return int(states["moved"] > 0)


def _read(path: str) -> list[dict[str, Any]]:
  what, lines = f"--golden = {path!r}", []
  if not path.endswith(".jsonl"):  # the file is written, too, uncompressed
    raise UserError(f"{what}: give the name of a .jsonl file; {_FORM}.")
  for _, where, line in read_json_lines(path, what, _FORM, needed=_FORM):
    if not check_text(line.get("text"), f"{where}: 'text'", _FORM):
      raise UserError(f"{where}: 'text' is empty; {_FORM}.")
    for name in ("log_p", "tolerance", "tokens") if "log_p" in line else ():
      number = line.get(name)
      if type(number) not in (int, float) or not abs(number) < _MOST:
        raise UserError(
          f"{where}: {name!r} is {short_json(number)}, not a number below "
          f"{_MOST:g}; leave 'log_p' out to record the line again."
        )
    lines.append(line)
  return lines


def _compare(line: Mapping[str, Any], now: Mapping[str, Any]) -> str:
  """Returns why the text of a line moved; "" if it did not, or is recorded."""
  if not math.isfinite(log_p := now["log_p"]):
    return f"log p is {log_p}"
  if "log_p" not in line:
    return ""
  other = ""
  if line.get("vocabulary_sha256") != now["vocabulary_sha256"]:
    other = ", with another vocabulary"
  if line["tokens"] != now["tokens"]:
    return f"{line['tokens']:,} tokens became {now['tokens']:,}{other}"
  tolerance = line["tolerance"]
  if line.get("activation_dtype") != now["activation_dtype"]:
    tolerance += now["tolerance"]
  if abs(log_p - line["log_p"]) <= tolerance:
    return ""
  became = f"log p {line['log_p']:.4f} became {log_p:.4f}{other}"
  return f"{became}, and may differ by {tolerance:.4g}"
