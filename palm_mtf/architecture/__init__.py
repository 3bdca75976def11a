# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The architecture as data: layers, parameters and attention blocks."""
