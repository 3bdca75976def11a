# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The same model in other frameworks, for tools/bench_train.py to compare with.

Each module is a program of its own that imports nothing of this project and
runs under any interpreter that has its framework.
"""
