# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Meshes of TPUs: XLA compiles one device's program for all devices."""
