# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""--format=gguf of an adapted run: a file of factors that llama.cpp adds.

For a tensor T of the base, T.lora_a is [rank, inputs] and T.lora_b is [outputs,
rank]. llama.cpp multiplies their product by adapter.lora.alpha / rank.
"""

import numpy as np

from palm_mtf.architecture.adapter import low_rank_of
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.files import write_gguf
from palm_mtf.export.gguf.metadata import Value, find_gguf_architecture
from palm_mtf.export.gguf.mixtures import (
  FILE_TYPES,
  MIXTURES,
  choose_dtypes,
  count_bytes,
)
from palm_mtf.export.huggingface.adapter_tensors import (
  find_modules,
  join_factors,
)
from palm_mtf.export.trained_model import Export, Reader, TrainedModel

_A, _B = ".lora_a", ".lora_b"


def make_gguf_adapter(trained: TrainedModel, dtype: str) -> Export:
  """Makes a GGUF file with the adapter of a run, in `dtype`.

  Raises UserError if llama.cpp lacks the architecture or the kind of adapter.
  """
  model = trained.model
  low_rank = low_rank_of(model)
  assert low_rank
  if low_rank.has_magnitude:
    raise UserError(
      f"ADAPTER = {model.adapter!r}: adapters of llama.cpp have no magnitudes; "
      "add --merge, which exports the whole model."
    )
  if dtype in MIXTURES:
    raise UserError(
      f"--dtype = {dtype!r}: is for whole models; add --merge, or write the "
      "adapter in float32, float16 or q8_0."
    )
  own = find_gguf_architecture(model.base)
  metadata: dict[str, Value] = {
    "general.architecture": own.name,
    "general.type": "adapter",
    "general.file_type": FILE_TYPES[dtype],
    "general.quantization_version": 2,
    "adapter.type": "lora",
    "adapter.lora.alpha": float(low_rank.scale * low_rank.rank),
    **trained.gguf_origin,
  }
  modules = find_modules(model, own.layout)
  shapes: dict[str, tuple[int, ...]] = {}
  for name, module in modules.items():
    a, b = module.shapes(low_rank.rank * len(module.adapted))
    shapes |= {f"{name}{_A}": a, f"{name}{_B}": b}

  def write(path: str, read: Reader) -> None:
    def read_tensor(tensor: str) -> np.ndarray:
      name, _, end = tensor.rpartition(".")
      module = modules[name]
      a, b, _ = join_factors(module, model, own.layout, read)
      # Joined kernels have a larger rank, by which llama.cpp divides.
      return a.T if f".{end}" == _A else b.T * np.float32(len(module.adapted))

    write_gguf(path, metadata, shapes, dtype, read_tensor)

  num_bytes = count_bytes(shapes, choose_dtypes(shapes, dtype, metadata))
  return Export(f"an adapter of a {own.name} in {dtype}", num_bytes, write)
