# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine, for `palm_mtf doctor --measure` and `plan`.

`python -m palm_mtf.rates.measure` prints a JSON object {name: text}.
"""

from palm_mtf._tf import tf
from palm_mtf.console import configure_logging
from palm_mtf.json_text import json_text
from palm_mtf.mesh.session import session_config
from palm_mtf.rates.peak_flops import fastest_call_secs, measured_flops_per_sec

# Beyond any processor's cache: decoding reads every weight from memory.
_READ_BYTES = 2**28


def measured_rates() -> dict[str, float]:
  """Returns FLOP/s of products by dtype, and bytes/s of "memory"."""
  rates = {
    dtype: measured_flops_per_sec(tf.as_dtype(dtype))
    for dtype in ("float32", "bfloat16")
  }
  return {**rates, "memory": read_bytes_per_sec()}


def described_rates() -> dict[str, str]:
  """Returns the rates as text, by name."""
  rates = measured_rates()
  memory = rates.pop("memory")
  texts = {f"{x} products": f"{n / 1e9:,.0f} GFLOP/s" for x, n in rates.items()}
  return {**texts, "memory read": f"{memory / 1e9:,.1f} GB/s"}


def read_bytes_per_sec() -> float:
  """Returns the memory bandwidth of all cores together, bytes a second."""
  config = session_config(1)
  with tf.Graph().as_default(), tf.Session(config=config) as session:
    array = tf.Variable(tf.ones([_READ_BYTES // 4]), use_resource=True)
    session.run(array.initializer)
    read = session.make_callable(tf.reduce_max(array).op)
    return _READ_BYTES / fastest_call_secs(read)


if __name__ == "__main__":
  configure_logging()
  print(json_text(described_rates()))
