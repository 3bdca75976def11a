# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Training and decoding on TPUs and GPUs, compiled by XLA and run by JAX."""
