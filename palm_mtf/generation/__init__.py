# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation and scoring of texts: graphs, sessions and an HTTP endpoint."""
