# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TRACE_STEPS: the timeline of a step, operations and transfers between pods.

records   TensorFlow's records of a step -> operations and transfers
overlap   transfer time hidden behind computation, and exposed
chrome    the timeline as a file for chrome://tracing and Perfetto
write     the file of a step, and its line on stderr
"""
