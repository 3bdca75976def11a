# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures this machine's speeds, from which plans and MFU are computed."""
