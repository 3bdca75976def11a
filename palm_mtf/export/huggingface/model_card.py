# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""README.md of an exported folder: a model card of the Hugging Face Hub."""

import os

from palm_mtf.export.trained_model import TrainedModel
from palm_mtf.json_text import json_text


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
    "palm_mtf.parents": [x for x in (manifest.origin, manifest.base) if x],
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
      if isinstance(value, (int, float))
    ]
    result = {"dataset": {"type": task, "name": task, "split": split}}
    kind = {"task": {"type": "text-generation"}, "metrics": metrics}
    results.append(result | kind)
  if results:
    front["model-index"] = [{"name": name, "results": results}]
  settings = manifest.settings
  texts = settings.get("TASK") or settings.get("TEXT_FILES") or "no text"
  lines = [
    "---",
    *(f"{key}: {json_text(x)}" for key, x in front.items()),  # JSON is YAML
    "---",
    f"# {name}",
    f"palm_mtf trained {manifest.step:,} steps on `{texts}`.",
  ]
  path = os.path.join(folder, "README.md")
  with open(path, "w", encoding="utf-8") as file:
    file.write("\n".join(lines) + "\n")
