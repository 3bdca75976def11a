# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks for training and evaluation; installed as palm_mtf.tasks."""

# Importing a module registers its tasks. A gin file, or any program that uses
# SeqIO, imports the module and names the text. palm_mtf itself imports none.

# Imported before SeqIO, because it silences TensorFlow, which SeqIO imports.
import palm_mtf._tf  # noqa: F401
