# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Devices with one interface (placement.py) and two implementations."""
