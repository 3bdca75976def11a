# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Report: an HTML page with tables, figures and samples of runs."""
