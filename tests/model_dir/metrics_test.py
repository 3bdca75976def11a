# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl of a resumed run: what a killed one left, and what it did not.

commands/train_test.py resumes whole runs that were killed within a line.
"""

import contextlib
import json
import shutil

from palm_mtf.model_dir.metrics import MetricsWriter
from tests import runs


def test_a_truncated_last_line_is_dropped_and_written_anew_without_a_word(
  tmp_path, capsys
):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 2}\n{"step": 4}\n{"step": 5}\n{"step": 6, "lo')
  with contextlib.closing(MetricsWriter(str(tmp_path), 4)) as metrics:
    assert path.read_text() == '{"step": 2}\n{"step": 4}\n'
    metrics.write(6, {"loss": 1.5})
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert lines == [{"step": 2}, {"step": 4}, {"step": 6, "loss": 1.5}]
  assert not capsys.readouterr().err


def test_a_broken_line_in_the_middle_stops_a_resumed_run_by_its_number(
  corpus, finished, tmp_path, capsys
):
  model_dir = shutil.copytree(finished, tmp_path / "copy")
  path = model_dir / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  lines[1] = lines[1][:20] + "\n"
  path.write_text("".join(lines))
  assert runs.run("train", corpus, model_dir, TRAIN_STEPS=14) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert f'{path}, line 2: is no JSON object with a "step"; remove' in error
  assert path.read_text() == "".join(lines)
  assert not (model_dir / "checkpoints" / "step_00000014").exists()
