# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Meshes of CPUs and GPUs: collectives, slices of variables, stages."""
