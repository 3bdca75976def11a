# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes and hosts: the servers of pods, their addresses and liveness."""
