# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TRACE_STEPS: a timeline of a step's operations and transfers between pods.

write.py reads TensorFlow's records of a step. It writes a file for
chrome://tracing and Perfetto, and measures transfers that computation hides.
"""
