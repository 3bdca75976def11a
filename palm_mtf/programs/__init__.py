# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs that a client runs: model, mesh and optimizer in one graph."""
