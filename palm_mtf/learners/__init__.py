# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Learners, processes that train apart and exchange weights with a client."""
