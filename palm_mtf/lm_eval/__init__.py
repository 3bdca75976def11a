# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model type for EleutherAI's lm-evaluation-harness.

  lm_eval --model palm_mtf --model_args model_dir=runs/first --tasks ...

Only versions of the harness that read entry points find this model type. With
other versions, such as 0.4.13, run `python -m palm_mtf.lm_eval` instead of
`lm_eval`.
"""
