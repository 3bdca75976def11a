# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The model as data: blocks, parameters, and how attention is cut."""
