# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that trains: it finds, starts, watches and loses servers."""
