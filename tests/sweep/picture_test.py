# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture shows every run, and the law where there is one."""

import io
import json

import pytest

from palm_mtf.sweep.picture import picture
from palm_mtf.sweep.scaling_law import law_record
from tests.sweep.laws import row, runs, sweep_run

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def swept(tmp_path):
  """Two runs, the second held out, and one without an evaluation."""
  found = []
  for name in ("one", "two", "three"):
    folder = tmp_path / name
    folder.mkdir()
    lines = [
      {"step": 2, "tokens": 64, "step_secs": 0.5, "validation_loss": 5.0},
      {"step": 4, "tokens": 128, "step_secs": 1.0, "validation_loss": 4.0},
    ]
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (folder / "metrics.jsonl").write_text(text if name != "three" else "")
    found.append(sweep_run(folder, is_held_out=name == "two"))
  return found


@pytest.mark.parametrize("has_law", [False, True])
def test_a_png_is_drawn_with_and_without_a_law(swept, has_law):
  law = None
  if has_law:
    rows = [row("fitted", *run) for run in zip(*runs(), strict=True)]
    law = law_record(rows, 6e22)
  content = picture(swept, law)
  image = matplotlib.image.imread(io.BytesIO(content), format="png")
  # Three panels side by side, with ink in each.
  height, width, _ = image.shape
  assert width > 2 * height
  for i in range(3):
    part = image[:, i * width // 3 : (i + 1) * width // 3, :3]
    assert part.min() < 0.5 < part.max()
