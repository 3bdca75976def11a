# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The files of a MODEL_DIR: metrics, samples, the lock; atomic writes."""
