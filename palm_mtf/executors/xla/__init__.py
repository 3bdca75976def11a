# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs of a pod (one copy of the model), compiled by XLA, run by JAX."""
