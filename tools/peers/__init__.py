# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The models of tools/bench/models.py in other frameworks.

The files are separate programs. They import nothing of this project except each
other, and run under any Python that has their framework.
"""
