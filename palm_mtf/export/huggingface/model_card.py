# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""README.md of an exported folder: a model card of the Hugging Face Hub."""

import json
import math
import os
import re

from palm_mtf.export.trained_model import TrainedModel
from palm_mtf.json_text import json_text

# An escape in JSON; or the two of a character that UTF-16 has as two numbers.
_ESCAPE = re.compile(r"\\ud[89ab]..\\ud[c-f]..|\\.")


def write_card(folder: str, trained: TrainedModel) -> None:
  """Writes README.md of `trained` into a new folder."""
  manifest, adapter = trained.checkpoint.manifest, trained.model.adapter
  is_adapter = adapter != "none"
  run = os.path.dirname(os.path.dirname(trained.checkpoint.path))
  name = os.path.basename(os.path.abspath(run))
  front: dict[str, object] = {
    "library_name": "peft" if is_adapter else "transformers",
    "pipeline_tag": "text-generation",
    "tags": ["palm_mtf"],
    **trained.origin,
    "palm_mtf.parents": trained.parents,
  }
  if trained.base:
    front["base_model"] = trained.base
  # The Hub has no relation for an imported model that was not trained.
  if trained.base and manifest.step:
    front["base_model_relation"] = "adapter" if is_adapter else "finetune"
  results = []
  for each in trained.evaluations:
    task, split = each.get("task"), each.get("split")
    metrics = [
      {"type": metric, "value": value}
      for metric, value in each["metrics"].items()
      if isinstance(value, (int, float)) and math.isfinite(value)
    ]
    result = {"dataset": {"type": task, "name": task, "split": split}}
    kind = {"task": {"type": "text-generation"}, "metrics": metrics}
    results.append(result | kind)
  if results:
    front["model-index"] = [{"name": name, "results": results}]
  settings = manifest.settings
  texts = settings.get("TASK") or settings.get("TEXT_FILES") or "no text"
  texts = [texts] if isinstance(texts, str) else texts
  texts = [trained.publish(x) if os.path.isabs(x) else x for x in texts]
  # repr has no line feed, which could end the heading or the code.
  of = ", ".join(f"`{repr(x)[1:-1].replace('`', '?')}`" for x in texts)
  lines = [
    "---",
    *(f"{key}: {_to_yaml(x)}" for key, x in front.items()),
    "---",
    f"# {repr(name)[1:-1]}",
    f"palm_mtf trained {manifest.step:,} steps on {of} (hash of the tokens: "
    f"`{manifest.data.get('the tokens')}`).",
  ]
  path = os.path.join(folder, "README.md")
  with open(path, "w", encoding="utf-8") as file:
    file.write("\n".join(lines) + "\n")


def _to_yaml(value: object) -> str:
  # JSON is YAML, except that YAML reads the two escapes of one character as two
  # characters. Such a character needs no escape.
  def join(found: re.Match[str]) -> str:
    is_one = len(found[0]) < 12
    return found[0] if is_one else json.loads(f'"{found[0]}"')

  return _ESCAPE.sub(join, json_text(value))
