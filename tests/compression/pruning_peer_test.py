# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pruned runs have the zeros of llmcompressor on the exported model.

llmcompressor is not in requirements-peers.lock: the tests run where it is
installed.
"""

import numpy as np
import pytest

from palm_mtf.cli import gin_files
from palm_mtf.compression.calibration import calibration_batches
from palm_mtf.data.vocabulary.load import load_vocabulary
from tests import runs

LLAMA = {"NUM_LAYERS": 2, "TRAIN_STEPS": 8, "PROMPTS": []}
LLAMA |= {"BLOCK": "serial", "ATTENTION": "multi_head", "NORM": "rms_norm"}
# With 256 channels, wo has two blocks of SparseGPT.
LLAMA |= {"D_FF": 256, "OUTPUT_EMBEDDING": "separate", "LOGITS_SCALE": 1.0}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """A folder with texts, a dense run, and its export for transformers."""
  folder = tmp_path_factory.mktemp("peer")
  corpus = runs.write_corpus(folder / "texts")
  assert runs.run("train", corpus, folder / "base", **LLAMA) == 0
  export(folder / "base", folder / "hf")
  return folder


def export(model_dir, output):
  flags = ["--model_dir", model_dir, "--output", output, "--format=hf"]
  assert runs.main([str(x) for x in ("export", *flags)]) == 0


def read_tokens(model_dir):
  """Returns the rows on which the run measures inputs, [rows, length]."""
  files = [str(model_dir / "config.gin")]
  _, config = gin_files.load("train", files, []).build()
  vocabulary = load_vocabulary(str(model_dir), config.data, vocab_size=320)
  batches = calibration_batches(str(model_dir), config, vocabulary)
  rows = np.concatenate([x["inputs"] for x in batches])
  assert all("segments" not in x for x in batches)
  return rows[:128]


@pytest.mark.peers
@pytest.mark.parametrize("sparsity", [0.5, "2:4"])
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_weights_are_those_of_llmcompressor(method, sparsity, dense, tmp_path):
  llmcompressor = pytest.importorskip("llmcompressor")
  from llmcompressor.modifiers import pruning  # needs llmcompressor

  datasets = pytest.importorskip("datasets")
  transformers = pytest.importorskip("transformers")
  still = {"TRAIN_STEPS": 1, "LEARNING_RATE": 0.0, "KEEP_ZEROS": True}
  base = dense / "base"
  given = {"PRUNE": method, "SPARSITY": sparsity, "INIT_CHECKPOINT": str(base)}
  given["VOCABULARY"] = str(base / "vocabulary.model")
  run = tmp_path / "run"
  settings = LLAMA | still | given
  assert runs.run("train", dense / "texts", run, **settings) == 0
  export(run, tmp_path / "hf")
  peer, found = (
    transformers.AutoModelForCausalLM.from_pretrained(x, dtype="float32")
    for x in (dense / "hf", tmp_path / "hf")
  )
  rows = read_tokens(run).tolist()
  masks = np.ones_like(rows).tolist()
  names = {
    "wanda": pruning.WandaPruningModifier,
    "sparsegpt": pruning.SparseGPTModifier,
  }
  form = {"mask_structure": "0:0" if sparsity == 0.5 else sparsity}
  llmcompressor.oneshot(
    model=peer,
    dataset=datasets.Dataset.from_dict(
      {"input_ids": rows, "attention_mask": masks}
    ),
    recipe=names[method](sparsity=0.5, ignore=["re:.*lm_head"], **form),
    pipeline="basic",  # one pass through the model before pruning
    num_calibration_samples=len(rows),
    shuffle_calibration_samples=False,
  )
  values = found.state_dict()
  for name, value in peer.state_dict().items():
    own, other = values[name].numpy(), value.numpy()
    if not name.endswith("_proj.weight") or method == "wanda":
      np.testing.assert_array_equal(own, other, err_msg=name)
    elif sparsity == "2:4":
      np.testing.assert_array_equal(own == 0, other == 0, err_msg=name)
      np.testing.assert_allclose(own, other, atol=1e-4, err_msg=name)
    else:
      # llmcompressor removes one weight more of each 128 inputs: all up to the
      # score of the first that stays. Others change with it.
      assert (own == 0).sum() == own.size // 2
      assert 0 < (other == 0).sum() - own.size // 2 <= -(-own.shape[1] // 128)
      assert ((own == 0) == (other == 0)).mean() > 0.999
