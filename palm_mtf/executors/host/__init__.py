# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs programs on CPUs and GPUs by Mesh TensorFlow, C++ and sessions."""
