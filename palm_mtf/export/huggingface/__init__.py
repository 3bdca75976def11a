# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes and reads folders in the format of Hugging Face transformers."""
