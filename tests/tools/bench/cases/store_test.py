# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench reads batches of a store that has more shards than open files."""

import json

from tests import processes


def test_a_sparse_store_is_read_with_few_files_open():
  # In a separate process, because the limit of open files is the process's.
  bench = processes.ROOT / "tools" / "bench"
  flags = ["--gigabytes=10", "--document_bytes=1000000", "--open_files=64"]
  done = processes.python(bench, "store", *flags)
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found["shards"] == 150 > 64 > found["open_files"]
  assert found["documents"] == 150 * 67
  assert found["far_batch_secs"] > 0
