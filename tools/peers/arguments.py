# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The flags of every peer: sizes, named as in palm_mtf.config.PalmConfig."""

import argparse
from collections.abc import Collection

# The model of tools/bench/models.py, which passes all of them anyway.
_SIZES = {
  "num_layers": 6,
  "d_model": 512,
  "num_heads": 8,
  "d_kv": 64,
  "d_ff": 2048,
  "vocab_size": 8192,
  "sequence_length": 256,
}


def parser_of(
  description: str, *, dtypes: Collection[str], **numbers: int
) -> argparse.ArgumentParser:
  """Returns a parser of the sizes, --dtype and the numbers of one peer.

  Args:
    description: first line of its help.
    dtypes: choices of --dtype, the first one its default.
    **numbers: defaults of its other flags.
  """
  parser = argparse.ArgumentParser(description=description)
  for name, default in {**_SIZES, **numbers}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--dtype", choices=dtypes, default=next(iter(dtypes)))
  return parser
