# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs of one pod's accelerators, which XLA compiles and JAX runs."""
