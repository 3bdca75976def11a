# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Graphs that one process, the client, runs on pods: model, mesh, optimizer."""
