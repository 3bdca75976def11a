# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts and the small vocabulary of the tests of palm_mtf.data, for tasks."""

from tests.data.conftest import code, folder, vocabulary

__all__ = ["code", "folder", "vocabulary"]
