# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model type for EleutherAI's lm-evaluation-harness.

  lm_eval --model palm_mtf --model_args model_dir=runs/first --tasks ...

where the harness reads entry points; `python -m palm_mtf.lm_eval` is the same
command for a harness that does not (0.4.13).
"""
