# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: manifests, files, hosts that write them, initial weights."""
