# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Assertions on outputs of models, at training, evaluation and serving."""
