# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench reads batches of a store that has more shards than open files."""

import json
import subprocess
import sys

from tools import bench_store


def test_a_sparse_store_is_read_with_few_files_open(tmp_path):
  command = [sys.executable, bench_store.__file__, "--gigabytes=10"]
  done = subprocess.run(
    [*command, "--document_bytes=1000000", "--open_files=64"],
    stdout=subprocess.PIPE,
    check=True,
    text=True,
  )
  found = json.loads(done.stdout)
  assert found["shards"] == 150 > 64 > found["open_files"]
  assert found["documents"] == 150 * 67
  assert found["far_batch_secs"] > 0
