# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pods that exchange parameters seldom, after a file of pods/."""
