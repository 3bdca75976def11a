# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Traced programs: Python blocks that call functions on meshes of devices."""
