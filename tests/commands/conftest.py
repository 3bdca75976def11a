# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that commands read."""

from tests.report.conftest import write_run

__all__ = ["write_run"]
