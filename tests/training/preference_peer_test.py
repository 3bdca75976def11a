# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The validation loss of pairs is that of transformers, and of TRL.

TRL is not in requirements-peers.lock: its test runs where it is installed.
"""

import json

import numpy as np
import pytest

from tests import runs
from tests.training.reference_test import (
  BETA,
  read_rows,
  train_on,
  write_pairs,
)

LLAMA = {"NUM_LAYERS": 2, "TRAIN_STEPS": 8, "EVAL_STEPS": 8, "PROMPTS": []}
LLAMA |= {"BLOCK": "serial", "ATTENTION": "multi_head", "NORM": "rms_norm"}
NUM_ROWS = 8  # of a validation


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """Returns a run on pairs, and folders of transformers before and after."""
  folder = tmp_path_factory.mktemp("peer")
  corpus = runs.write_corpus(folder / "texts")
  assert runs.run("train", corpus, folder / "base", **LLAMA) == 0
  write_pairs(folder / "pairs.jsonl")
  assert train_on(folder / "pairs.jsonl", folder / "base", folder / "run") == 0
  for name in ("base", "run"):
    export = ["--model_dir", folder / name, "--output", folder / f"{name}_hf"]
    assert runs.main([str(x) for x in ("export", *export)]) == 0
  return folder


def read_answers(folder):
  """Returns ids, [2 rows, length + 1], chosen answers first; and masks.

  The masks say which ids there are, and which are of answers.
  """
  _, rows = read_rows(folder / "run")
  found = []
  for segment in (1, 2):
    for i in range(NUM_ROWS):
      own = rows["segments"][i] == segment
      ids = [rows["inputs"][i][own][0], *rows["targets"][i][own]]
      mask = [0, *np.abs(rows["loss_weights"][i][own]).astype(int)]
      found.append((ids, mask))
  length = max(len(x) for x, _ in found)

  def pad(values):
    return [[*map(int, x)] + [0] * (length - len(x)) for x in values]

  ids, masks = zip(*found, strict=True)
  return pad(ids), pad([[1] * len(x) for x in ids]), pad(masks)


def validated(folder, name):
  (last,) = [
    x for x in runs.read_metrics(folder / "run") if "validation_loss" in x
  ]
  return last[f"validation_{name}"]


def load(folder, name):
  import transformers

  cls = transformers.AutoModelForCausalLM
  return cls.from_pretrained(folder / f"{name}_hf").eval()


@pytest.mark.peers
def test_the_validation_loss_is_that_of_transformers(trained):
  import torch

  ids, present, answers = map(torch.tensor, read_answers(trained))
  ratios = {}
  for name in ("base", "run"):
    with torch.no_grad():
      logits = load(trained, name)(input_ids=ids, attention_mask=present).logits
    log_p = torch.log_softmax(logits[:, :-1].double(), -1)
    log_p = log_p.gather(-1, ids[:, 1:, None])[..., 0]
    chosen, rejected = (log_p * answers[:, 1:]).sum(-1).chunk(2)
    ratios[name] = chosen - rejected
  margins = BETA * (ratios["run"] - ratios["base"])
  expected = -torch.nn.functional.logsigmoid(margins).mean().item()
  assert validated(trained, "loss") == pytest.approx(expected, rel=1e-4)
  assert expected < 0.65
  accuracy = (margins > 0).double().mean().item()
  assert validated(trained, "rewards/accuracies") == accuracy


@pytest.mark.peers
def test_the_validation_loss_is_that_of_trl(trained, tmp_path):
  trl = pytest.importorskip("trl", reason="TRL is not installed")
  import datasets
  import torch
  import transformers

  pairs = (trained / "pairs.jsonl").read_text().splitlines()
  trainer = trl.DPOTrainer(
    model=load(trained, "run"),
    ref_model=load(trained, "base"),
    args=trl.DPOConfig(
      output_dir=str(tmp_path),
      beta=BETA,
      report_to=[],
      use_cpu=True,
      bf16=False,
    ),
    train_dataset=datasets.Dataset.from_list([*map(json.loads, pairs)]),
    processing_class=transformers.AutoTokenizer.from_pretrained(
      trained / "run_hf", pad_token="<unk>"
    ),
  )
  trainer.model.eval()
  names = ("input_ids", "attention_mask", "completion_mask")
  arrays = map(torch.tensor, read_answers(trained))
  with torch.no_grad():
    given = dict(zip(names, arrays, strict=True))
    loss = trainer.compute_loss(trainer.model, given).item()
  assert validated(trained, "loss") == pytest.approx(loss, rel=1e-4)
