# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles programs for accelerators that are absent, for `plan --compile`."""
