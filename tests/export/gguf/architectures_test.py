# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp computes our logits of a model of each of its architectures."""

import numpy as np
import pytest

from palm_mtf.data.vocabulary.gguf_tokenizer import make_gguf_tokenizer
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import learn_model
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.architectures import (
  ARCHITECTURES,
  find_gguf_architecture,
  make_model_metadata,
  read_model_metadata,
)
from palm_mtf.export.gguf.files import GgufFile, write_gguf
from palm_mtf.export.gguf.model import import_gguf_parameters, make_reader
from palm_mtf.export.huggingface.weights import find_tensor_shapes
from tests import llama_cpp_peer, oracle, tokenizer_files
from tests.blocks import SETTINGS
from tests.mtf_testing import small_config
from tests.transformers_folder import parameters

# llama.cpp takes heads of 32 numbers, whose products it computes in float32.
SIZES = dict(
  d_model=64, d_kv=32, num_heads=4, d_ff=96, vocab_size=912, sequence_length=32
)
GQA = dict(attention="grouped_query", num_kv_heads=2)
PHI = dict(SETTINGS["Phi"], num_heads=2, rotary_fraction=0.5)
PALM_SERIAL = dict(block="serial", norm="rms_norm")
NEOX = dict(
  SETTINGS["GPT-NeoX"], mlp="gelu_tanh", num_heads=2, rotary_fraction=0.25
)
NARROW = dict(num_heads=4, d_kv=16)
STABLELM = dict(
  SETTINGS["LLaMA 3"], norm="layer_norm_bias", **NARROW, rotary_fraction=0.25
)
# {name: (architecture of llama.cpp, settings of ours)}
MODELS = {
  "LLaMA": ("llama", SETTINGS["LLaMA"]),
  "LLaMA 3": ("llama", SETTINGS["LLaMA 3"]),
  "LLaMA, tied, with biases": (
    "llama",
    dict(SETTINGS["LLaMA 3"], output_embedding="tied", biases="qkv,o,mlp"),
  ),
  "Qwen 2": ("qwen2", dict(SETTINGS["LLaMA 3"], biases="qkv", **NARROW)),
  "Qwen 3": ("qwen3", SETTINGS["Qwen 3"]),
  "Gemma": ("gemma", dict(SETTINGS["Gemma"], embedding_scale=8.0)),
  "Granite": (
    "granite",
    dict(SETTINGS["LLaMA 3"], logits_scale=0.3, embedding_scale=2.0),
  ),
  "PaLM": ("command-r", dict(num_heads=2)),
  "PaLM in groups": ("command-r", dict(NARROW, **GQA)),
  "PaLM, serial": ("granite", PALM_SERIAL),
  "GPT-2": ("gpt2", dict(SETTINGS["GPT-2"], num_heads=2)),
  "GPT-NeoX": ("gptneox", NEOX),
  "GPT-NeoX, serial": (
    "gptneox",
    dict(NEOX, block="serial", rotary_fraction=0.5),
  ),
  "Phi": ("phi2", PHI),
  "StableLM": ("stablelm", STABLELM),
  "StableLM, with biases": ("stablelm", dict(STABLELM, biases="qkv")),
}


@pytest.fixture(scope="module", params=["byte level", "SentencePiece"])
def vocabulary(request, tmp_path_factory):
  """A vocabulary of at most 912 tokens."""
  folder = tmp_path_factory.mktemp("vocabulary")
  if request.param == "byte level":
    content = tokenizer_files.make_byte_level("smollm")
    return open_vocabulary(tokenizer_files.write(folder, content))
  path = folder / "vocabulary.model"
  path.write_bytes(learn_model(tokenizer_files.CORPUS[:20], 400))
  return open_vocabulary(str(path))


def write(path, model, params, vocabulary, start_id=1):
  """Writes a model in float32 as `palm_mtf export` does."""
  own = find_gguf_architecture(model)
  metadata = {
    **make_model_metadata(model, own),
    **make_gguf_tokenizer(
      vocabulary, start_id=start_id, vocab_size=model.vocab_size
    ),
  }
  shapes = find_tensor_shapes(model, own.layout)
  read = make_reader(model, own, params.__getitem__)
  write_gguf(str(path), metadata, shapes, "float32", read)
  return own


def make_model(name):
  """Returns a model and float32 parameters that move its greedy choices."""
  settings = {**SIZES, **MODELS[name][1]}
  model = small_config(**settings)
  return model, parameters(model)


def test_each_architecture_has_a_model_here():
  assert {x for x, _ in MODELS.values()} == {x.name for x in ARCHITECTURES}


def compute(model, params, ids):
  """Returns the logits of the oracle in float64, [L, V]."""
  params = {key: x.astype(float) for key, x in params.items()}
  return oracle.forward(model, params, np.array([ids]))[0]


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_has_our_logits_and_our_greedy_tokens(
  name, vocabulary, tmp_path
):
  model, params = make_model(name)
  path = tmp_path / "model.gguf"
  own = write(path, model, params, vocabulary)
  assert own.name == MODELS[name][0]
  text = "def f(x): return 'caf\u00e9' + x"
  (ids,) = llama_cpp_peer.call(llama_cpp_peer.tokenize, path, [text], True)
  assert ids == [1, *vocabulary.encode(text)]
  ids = ids[:16]
  ours = compute(model, params, ids)
  # llama.cpp looks GELU up in a table of float16, with errors of 2^-11.
  limit = 1e-4 if "gelu" in model.mlp or "geglu" in model.mlp else 1e-6
  theirs = llama_cpp_peer.call(llama_cpp_peer.compute_logits, path, ids)
  assert np.abs(ours - theirs).max() < limit * np.ptp(ours)
  for _ in range(8):
    ids.append(int(compute(model, params, ids)[-1].argmax()))
  found = llama_cpp_peer.call(llama_cpp_peer.choose, path, ids[:16], 8)
  assert found == ids[16:]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("vocabulary", ["SentencePiece"], indirect=True)
def test_a_file_is_imported_as_the_same_model(name, vocabulary, tmp_path):
  """Bit for bit, except rotary pairs, whose order the import chooses."""
  model, params = make_model(name)
  path = str(tmp_path / "model.gguf")
  own = write(path, model, params, vocabulary)
  file = GgufFile(path)
  found, again = read_model_metadata(file.metadata, file.shapes, path)
  assert found is own
  params_again = import_gguf_parameters(file, again, own, path)
  assert params_again.keys() == params.keys()
  for key, value in params.items():
    is_moved = model.rotary_pairs != again.rotary_pairs and "attention" in key
    if not is_moved and own.scale_offset == 0:
      np.testing.assert_array_equal(params_again[key], value, err_msg=key)
  ids = [*range(1, 17)]
  before = compute(model, params, ids)
  difference = np.abs(compute(again, params_again, ids) - before).max()
  # Files have scales of gemma plus one, and factors of granite, in float32.
  is_rounded = own.scale_offset or own.numbers
  assert difference < (1e-6 if is_rounded else 1e-12) * np.ptp(before)


LLAMA3, LLAMA = SETTINGS["LLaMA 3"], dict(SETTINGS["LLaMA"], d_kv=16)
# llama.cpp loads none of the first ten and would compute the others otherwise.
REFUSED = [
  (dict(LLAMA3, biases="qkv"), r"NUM_HEADS \* D_KV = 128 .* a qwen2 of"),
  (dict(PHI, num_heads=4), r"NUM_HEADS \* D_KV = 128 .* a phi2 of"),
  (dict(STABLELM, d_kv=32), r"NUM_HEADS \* D_KV = 128 .* a stablelm of"),
  (dict(SETTINGS["Qwen 3"], biases="qkv,o"), "BIASES = .* a qwen3 with ''"),
  (dict(MODELS["Gemma"][1], biases="qkv,o"), "BIASES = .* a gemma with ''"),
  (dict(NARROW, biases="qkv,o"), "BIASES = .* a command-r with ''"),
  (dict(NEOX, biases="mlp"), "BIASES = 'mlp': .* a gptneox with 'mlp,qkv,o'"),
  (
    dict(NARROW, output_embedding="separate"),
    "OUTPUT_EMBEDDING = 'separate': .* a command-r with 'tied'",
  ),
  (
    dict(MODELS["Gemma"][1], output_embedding="separate"),
    "OUTPUT_EMBEDDING = 'separate': .* a gemma with 'tied'",
  ),
  (
    dict(STABLELM, output_embedding="tied"),
    "OUTPUT_EMBEDDING = 'tied': .* a stablelm with 'separate'",
  ),
  (dict(PHI, mlp="gelu"), "MLP = 'gelu': .* a phi2 with 'gelu_tanh'"),
  (dict(LLAMA, attention_window=4), "ATTENTION_WINDOW = 4: .* no window"),
  (
    dict(SETTINGS["GPT-J"], num_heads=2, rotary_fraction=0.5),
    "a GPTJForCausalLM: ",
  ),
]


@pytest.mark.parametrize("settings, message", REFUSED, ids=str)
def test_what_llama_cpp_does_not_compute_is_refused(settings, message):
  with pytest.raises(UserError, match=message):
    find_gguf_architecture(small_config(**{**SIZES, **settings}))


def describe():
  """Returns the metadata of a LLaMA and the shapes of its tensors."""
  model, _ = make_model("LLaMA 3")
  own = find_gguf_architecture(model)
  shapes = find_tensor_shapes(model, own.layout)
  return make_model_metadata(model, own), shapes


@pytest.mark.parametrize(
  "key, value",
  [
    ("rope.scaling.type", "yarn"),
    ("rope.scaling.factor", 8.0),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("attention.sliding_window", 4096),
    ("expert_count", 8),
  ],
)
def test_what_we_do_not_compute_is_refused(key, value):
  metadata, shapes = describe()
  metadata[f"llama.{key}"] = value
  with pytest.raises(UserError) as error:
    read_model_metadata(metadata, shapes, "x.gguf")
  assert str(error.value) == (
    f"x.gguf: llama.{key} = {value!r}: palm_mtf does not compute this."
  )


@pytest.mark.parametrize(
  "change, message",
  [
    ({"general.architecture": "qwen2moe"}, r"'qwen2moe' \(did you mean"),
    ({"llama.block_count": None}, r"^x\.gguf: .* give a whole number"),
  ],
)
def test_an_unknown_architecture_or_size_is_refused(change, message):
  metadata, shapes = describe()
  metadata = {k: x for k, x in {**metadata, **change}.items() if x is not None}
  with pytest.raises(UserError, match=message):
    read_model_metadata(metadata, shapes, "x.gguf")
