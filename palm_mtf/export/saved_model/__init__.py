# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Exports a SavedModel, which needs only TensorFlow and tensorflow_text."""
