# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp adds our adapters to its base."""

import numpy as np
import pytest

from palm_mtf.export.gguf.adapter import make_gguf_adapter
from palm_mtf.export.gguf.files import GgufFile
from palm_mtf.export.gguf.metadata import find_gguf_architecture
from palm_mtf.export.gguf.model import make_reader
from tests import adapter_oracle, llama_cpp_peer
from tests.adapted_models import EVERY, adapt, describe
from tests.cases import slow
from tests.export.gguf import architectures_test
from tests.refusals import message_of

# {case: (model of architectures_test.py, last words of adapted kernels)}
CASES = {
  "LLaMA 3": ("LLaMA 3", EVERY),
  "Qwen 3, q and v": ("Qwen 3", ("q", "v")),
  "Gemma": ("Gemma", EVERY),
  "GPT-2": ("GPT-2", EVERY),
  "GPT-NeoX, k and wo": ("GPT-NeoX", ("k", "wo")),
  "Mixtral": ("Mixtral", ("q", "k", "v", "o")),
}


def write(path, name, kind="lora"):
  """Writes an adapter; returns its model and parameters."""
  of, words = CASES[name]
  base, _ = architectures_test.make_model(of)
  # A larger adapter makes llama.cpp's GELU, from a float16 table, less exact.
  model, params = adapt(base, kind, words, size=0.1)
  made = make_gguf_adapter(describe(model), "float32")
  made.write(str(path), params.__getitem__)
  assert path.stat().st_size > made.num_bytes  # of the tensors
  return model, params


FAST = ("LLaMA 3", "GPT-NeoX, k and wo")


@pytest.mark.parametrize("kind", ["lora", "rank-stabilized"])
@pytest.mark.parametrize("name", [slow(x, unless=x in FAST) for x in CASES])
def test_the_factors_make_the_merged_model(name, kind, tmp_path):
  """W + alpha / rank b a is the tensor of the merged model."""
  model, params = write(tmp_path / "a.gguf", name, kind)
  own = find_gguf_architecture(model.base)
  read = make_reader(model.base, own, params.__getitem__)
  merged = adapter_oracle.merge(model, params)
  read_merged = make_reader(model.base, own, merged.__getitem__)
  file = GgufFile(str(tmp_path / "a.gguf"))
  about = {
    "general.type": "adapter",
    "adapter.type": "lora",
    "general.architecture": own.name,
  }
  assert about.items() <= file.metadata.items()
  names = {x.rpartition(".")[0] for x in file.shapes}
  assert {f"{x}{end}" for x in names for end in (".lora_a", ".lora_b")} == {
    *file.shapes
  }
  for tensor in names:
    a, b = (np.float64(file.read(f"{tensor}.lora_{x}")) for x in "ab")
    scale = file.metadata["adapter.lora.alpha"] / len(a)
    change = read_merged(tensor) - read(tensor)
    np.testing.assert_allclose(scale * b @ a, change, 1e-4, 1e-5)
  of = {x.partition("/")[0] for x in params if adapter_oracle.is_factor(x)}
  assert len({x.split(".")[1] for x in names}) == len(of)


def test_an_adapter_with_magnitudes_is_refused(tmp_path):
  model, _ = adapt(architectures_test.make_model("LLaMA")[0], "dora", EVERY)
  message = message_of(make_gguf_adapter, describe(model), "float32")
  assert message.startswith("ADAPTER = 'dora': adapters of llama.cpp")
  assert "--merge" in message


@pytest.mark.peers
@pytest.mark.parametrize("name", CASES)
def test_llama_cpp_computes_our_logits_with_an_adapter(
  name, vocabulary, tmp_path
):
  model, params = write(tmp_path / "adapter.gguf", name)
  base = tmp_path / "base.gguf"
  architectures_test.write(base, model.base, params, vocabulary)
  ids = [1, *vocabulary.encode("def f(x): return x + x")][:16]
  plain, theirs = (
    llama_cpp_peer.call(llama_cpp_peer.compute_logits, base, ids, *adapter)
    for adapter in ([], [str(tmp_path / "adapter.gguf")])
  )
  merged = adapter_oracle.merge(model, params)
  ours = architectures_test.compute(model.base, merged, ids)
  error = np.abs(ours - theirs).max() / np.ptp(ours)
  print(f"largest difference / range: {error:.1e}")
  assert error < 1e-4
  assert np.abs(plain - theirs).max() > 0.01 * np.ptp(plain)
