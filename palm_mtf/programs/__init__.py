# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that a client runs: model, mesh and optimizer in one graph."""
