# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Meshes of TPUs: one device's program, which XLA compiles for all of them."""
