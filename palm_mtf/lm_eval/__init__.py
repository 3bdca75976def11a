# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model type for EleutherAI's lm-evaluation-harness.

  lm_eval --model palm_mtf --model_args model_dir=runs/first --tasks ...

The harness finds this model type only if it reads entry points, which version
0.4.13 does not do. Otherwise replace `lm_eval` by `python -m palm_mtf.lm_eval`.
"""
