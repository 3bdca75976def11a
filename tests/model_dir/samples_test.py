# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json

from palm_mtf.model_dir.samples import write_samples


def kept(folder) -> list[tuple]:
  lines = (folder / "samples.jsonl").read_text().splitlines()
  return [tuple(json.loads(line).values()) for line in lines]


def test_samples_are_kept_in_the_order_of_steps_each_step_once(tmp_path):
  write_samples(str(tmp_path), 50, [], [])
  assert not list(tmp_path.iterdir())
  write_samples(str(tmp_path), 100, ["a", "b"], ["1", "2"])
  write_samples(str(tmp_path), 300, ["a"], ["later"])
  write_samples(str(tmp_path), 200, ["a"], ["taken back"])
  write_samples(str(tmp_path), 200, ["a"], ["again\n\u00e9"])
  assert kept(tmp_path) == [
    (100, "a", "1"),
    (100, "b", "2"),
    (200, "a", "again\n\u00e9"),
  ]
