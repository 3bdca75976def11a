# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The modules with the host functions that a training run calls in servers."""

HOST_MODULES = (
  "palm_mtf.accelerators.host_calls",
  "palm_mtf.checkpoints.weight_files",
  "palm_mtf.data.batches.server_batches",
)
