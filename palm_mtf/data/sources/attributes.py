# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes of documents, which other tools wrote in Dolma's form.

  documents/a/x.jsonl.gz          {"id": ..., "text": ...}
  attributes/TOOL/a/x.jsonl.gz    {"id": ..., "attributes":
                                   {"KEY": [[start, end, score], ...]}}

Line n of both files has the same id. The score of a document is the highest of
its spans, 0 without spans. A condition is "TOOL/KEY >= NUMBER", or "<=".
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.user_text import read_json_lines, short_json

_NUMBER = r"-?(?:\d+\.?|\d*\.\d+)(?:e-?\d+)?"
_CONDITION = re.compile(rf"([^/\s]+)/(\S+) (>=|<=) ({_NUMBER})")
_FORM = 'give {"id": ..., "attributes": {"KEY": [[start, end, score]]}}'


def find_attributes(
  path: str, conditions: Sequence[str]
) -> list[tuple[str, tuple[str, ...]]]:
  """Returns each condition's file of attributes, and the condition's parts.

  `path` is the file of documents. Raises UserError if it is not in a folder
  named "documents", or a condition is none.
  """
  found = []
  before, folder, after = path.rpartition("/documents/")
  for condition in conditions:
    if not folder:
      raise UserError(
        f"ATTRIBUTE_FILTERS: {path} is in no folder named documents, with the "
        "folder attributes next to it; move it, or set []."
      )
    if not (parts := _CONDITION.fullmatch(condition)):
      raise UserError(
        f"ATTRIBUTE_FILTERS: {condition!r}: give conditions such as "
        '"my_tagger/quality >= 0.5".'
      )
    found.append((f"{before}/attributes/{parts[1]}/{after}", parts.groups()))
  return found


class Attributes:
  """Reads the attributes of a file's documents, one document after another."""

  def __init__(self, path: str, conditions: Sequence[str]):
    self._conditions = [
      (read_json_lines(x, f"ATTRIBUTE_FILTERS: {x}", _FORM), parts)
      for x, parts in find_attributes(path, conditions)
    ]

  def exclude(self, document: Mapping[str, Any], where: str) -> bool:
    """Returns whether the next document, a JSON line, fails a condition.

    After the last document, `document` is {}. Raises UserError if attributes
    are missing, wrong, or of further documents.
    """
    excluded = False
    for lines, (tool, key, sign, limit) in self._conditions:
      _, place, line = next(lines, (0, "", {}))
      ids = [x.get("id") for x in (document, line)]
      if ids[0] != ids[1] or (None in ids and (document or line)):
        raise UserError(
          f"{where} has the id {short_json(ids[0])}, and the attributes of "
          f"{tool} the id {short_json(ids[1])}; give both in one order."
        )
      if not document:
        continue
      score, bound = _find_score(key, place, line), float(limit)
      excluded |= score < bound if sign == ">=" else score > bound
    return excluded


def _find_score(key: str, where: str, line: Mapping[str, Any]) -> float:
  attributes = line.get("attributes")
  known = attributes if isinstance(attributes, dict) else {}
  if key not in known:
    guess = did_you_mean(key, known)
    raise UserError(f"{where} has no attribute {key!r}{guess}; {_FORM}.")
  spans = known[key]
  if not isinstance(spans, list) or not all(map(_is_span, spans)):
    raise UserError(f"{where}: {key!r} is {short_json(spans)}; {_FORM}.")
  return max((score for _, _, score in spans), default=0.0)


def _is_span(value: object) -> bool:
  if not isinstance(value, list) or len(value) != 3:
    return False
  return type(value[2]) in (int, float) and abs(value[2]) < math.inf
