# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One file per command, or per group of commands, of `palm_mtf`.

The function of a command takes the values of the command's flags, which the
table in cli/command_table.py explains. If gin configures the command, the value
of MODEL_DIR (`model_dir`) and all settings (`config`) are arguments, too.

Functions import TensorFlow, which takes seconds, only after all checks.
"""
