# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The models of tools/bench/models.py in PyTorch and JAX.

Programs of their own, which import nothing of this project but each other and
run under any interpreter that has their framework.
"""
