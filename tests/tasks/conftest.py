# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The small vocabulary of the tests of palm_mtf.data, for the tasks."""

from tests.data.conftest import code, vocabulary

__all__ = ["code", "vocabulary"]
