# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import math

from palm_mtf.model_dir.metrics import MetricsWriter
from tests import strict_json


def test_every_line_is_json_also_after_one_of_an_earlier_version(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "loss": 4.5, "my_task/share": NaN}\n')
  writer = MetricsWriter(str(tmp_path), 1)
  writer.write(2, {"loss": 4.25, "my_task/share": math.inf})
  writer.close()
  assert strict_json.load_lines(path) == [
    {"step": 1, "loss": 4.5, "my_task/share": None},
    {"step": 2, "loss": 4.25, "my_task/share": None},
  ]
