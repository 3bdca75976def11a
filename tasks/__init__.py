# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks for text of the user's own; installed as palm_mtf.tasks.

Importing a module registers its tasks and does nothing else. gin says where
their text is. The package itself never imports a task: a gin file does, or any
program that uses SeqIO.
"""

# Before SeqIO: it holds back what TensorFlow writes while it is imported.
import palm_mtf._tf  # noqa: F401
