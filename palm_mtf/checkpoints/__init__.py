# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: manifests, files, the processes that write, initial weights."""
