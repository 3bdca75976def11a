# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TRACE_STEPS: a timeline of a step's operations and transfers between pods.

records   TensorFlow's records of a step -> operations and transfers
write     the file for chrome://tracing and Perfetto, the transfer time that
          computation hides, and the line on stderr
"""
