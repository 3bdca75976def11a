# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step went: TRACE_STEPS.

  records   what TensorFlow's runtime recorded -> operations and transfers
  overlap   how much of the transfers was hidden behind computation
  chrome    the trace as a file for chrome://tracing and Perfetto
  write     the file of one step, and what there is to say of it

A traced step computes what any other does: it has the same feeds and fetches,
hence the same program, and only asks the runtime to write down when.
"""
