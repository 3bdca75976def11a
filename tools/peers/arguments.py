# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The flags of peers: sizes, named as in palm_mtf.config.ModelConfig."""

import argparse
from collections.abc import Collection

# The model of 26.6M parameters in tools/bench/models.py. The bench passes every
# size.
_SIZES = {
  "num_layers": 6,
  "d_model": 512,
  "num_heads": 8,
  "d_kv": 64,
  "d_ff": 2048,
  "vocab_size": 8192,
  "sequence_length": 256,
}


def make_parser(
  description: str, *, dtypes: Collection[str], **numbers: int
) -> argparse.ArgumentParser:
  """Returns a parser of the sizes, of --dtype and of further numbers.

  Args:
    description: first line of the help.
    dtypes: choices of --dtype; the first is the default.
    **numbers: defaults of the peer's other flags.
  """
  parser = argparse.ArgumentParser(description=description)
  for name, default in {**_SIZES, **numbers}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--dtype", choices=dtypes, default=next(iter(dtypes)))
  return parser
