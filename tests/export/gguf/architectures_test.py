# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""llama.cpp computes our logits of a model of each of its architectures."""

import functools
import re

import numpy as np
import pytest

from palm_mtf.data.vocabulary.gguf_tokenizer import make_gguf_tokenizer
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import learn_model
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.architectures import ARCHITECTURES
from palm_mtf.export.gguf.files import GgufFile, write_gguf
from palm_mtf.export.gguf.metadata import (
  find_gguf_architecture,
  make_model_metadata,
  read_model_metadata,
)
from palm_mtf.export.gguf.model import import_gguf_parameters, make_reader
from palm_mtf.export.huggingface.weights import find_tensor_shapes
from tests import llama_cpp_peer, oracle, tokenizer_files
from tests.blocks import ALL_HEADS, SETTINGS
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
GEMMA3 = dict(SETTINGS["Gemma 3"], embedding_scale=8.0, score_scale=None)
WINDOW, GLOBAL = GEMMA3["variants"].values()
GEMMA3["variants"] = {
  "window": {**WINDOW, "ROTARY_BASE": 50.0},
  "global": GLOBAL,
}
COHERE2 = dict(SETTINGS["Cohere 2"], **NARROW)
QWEN3_MOE = dict(
  SETTINGS["Mixtral"], qk_norm="rms_norm", d_expert=32, experts_per_token=3
)
OLMOE = dict(ALL_HEADS["OLMoE with its norm"], num_heads=2, **dict(d_expert=64))
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
  "Gemma 3": ("gemma3", GEMMA3),
  "Granite": (
    "granite",
    dict(
      SETTINGS["LLaMA 3"],
      logits_scale=0.3,
      embedding_scale=2.0,
      score_scale=0.2,
    ),
  ),
  "PaLM": ("command-r", dict(num_heads=2)),
  "PaLM in groups": ("command-r", dict(NARROW, **GQA)),
  "PaLM, serial": ("granite", PALM_SERIAL),
  "Cohere 2": ("cohere2", COHERE2),
  "GPT-2": ("gpt2", dict(SETTINGS["GPT-2"], num_heads=2)),
  "GPT-NeoX": ("gptneox", NEOX),
  "GPT-NeoX, serial": (
    "gptneox",
    dict(NEOX, block="serial", rotary_fraction=0.5),
  ),
  "Phi": ("phi2", PHI),
  "StableLM": ("stablelm", STABLELM),
  "Mixtral": ("llama", SETTINGS["Mixtral"]),
  "Qwen 3 with experts": ("qwen3moe", QWEN3_MOE),
  "OLMoE": ("olmoe", OLMOE),
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


@pytest.mark.parametrize("name", ["Mixtral", "Qwen 3 with experts", "OLMoE"])
@pytest.mark.parametrize("vocabulary", ["SentencePiece"], indirect=True)
def test_a_file_with_a_tensor_per_expert_has_the_same_bits(
  name, vocabulary, tmp_path
):
  """As llama.cpp wrote files until April 2024."""
  model, params = make_model(name)
  path, old = str(tmp_path / "model.gguf"), str(tmp_path / "old.gguf")
  own = write(path, model, params, vocabulary)
  file, found = GgufFile(path), {}
  for tensor in file.shapes:
    value = file.read(tensor)
    if "_exps" in tensor:
      each = tensor.replace("_exps", ".{}")
      found |= {each.format(i): x for i, x in enumerate(value)}
    else:
      found[tensor] = value
  assert len(found) == len(file.shapes) + 2 * 3 * (model.num_experts - 1)
  shapes = {key: x.shape for key, x in found.items()}
  write_gguf(old, file.metadata, shapes, "float32", found.__getitem__)
  read = GgufFile(old)
  _, again = read_model_metadata(read.metadata, read.shapes, old)
  params = import_gguf_parameters(file, again, own, path)
  params_again = import_gguf_parameters(read, again, own, old)
  for key, value in params.items():
    np.testing.assert_array_equal(params_again[key], value, err_msg=key)


SCALED = {"ROTARY_SCALING": "linear", "ROTARY_FACTOR": 2.0}
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
    dict(GEMMA3, score_scale=0.5),
    "SCORE_SCALE = 0.5: llama.cpp computes this gemma3 with 0.176777",
  ),
  (
    dict(GEMMA3, num_layers=62),
    "SCORE_SCALE = 0.176777: .* this gemma3 with 0.25",  # D_MODEL / NUM_HEADS
  ),
  (dict(GEMMA3, biases="qkv,o"), "BIASES = .* a gemma3 with ''"),
  (
    dict(GEMMA3, layers="global, window"),
    "LAYERS = 'global, window': llama.cpp computes only a gemma3 in which",
  ),
  (
    dict(COHERE2, layers="", variants=None, positions="none", rotary_base=1e4)
    | {"rotary_pairs": "halves"},
    "LAYERS = '': llama.cpp computes only a cohere2 in which",
  ),
  (
    dict(
      GEMMA3, variants={**GEMMA3["variants"], "window": {**WINDOW, **SCALED}}
    ),
    "ROTARY_SCALING = 'linear': llama.cpp computes no gemma3 with this",
  ),
  (
    dict(SETTINGS["GPT-J"], num_heads=2, rotary_fraction=0.5),
    "a GPTJForCausalLM: ",
  ),
  # llama.cpp always divides scores of a qwen3moe, and never those of an olmoe.
  (
    dict(QWEN3_MOE, router_normalizes=False),
    "ROUTER_NORMALIZES = False: llama.cpp computes a qwen3moe with True",
  ),
  (
    dict(OLMOE, router_normalizes=True),
    "ROUTER_NORMALIZES = True: llama.cpp computes a olmoe with False",
  ),
  (
    dict(SETTINGS["Mixtral"], router_normalizes=False),
    "no architecture of transformers",
  ),
  (
    dict(
      QWEN3_MOE,
      layers="dense, sparse",
      variants={"dense": {"MLP": "swiglu"}, "sparse": {}},
    ),
    "MLP = 'swiglu': llama.cpp computes a qwen3moe with 'experts'",
  ),
  (dict(OLMOE, output_embedding="tied"), "a olmoe with 'separate'"),
  (dict(SETTINGS["Mixtral"], num_experts=1025), "at most 1,024 experts"),
  (dict(SETTINGS["Mixtral"], attention_window=4), "a llama of .* no window"),
]


@pytest.mark.parametrize("settings, message", REFUSED, ids=str)
def test_what_llama_cpp_does_not_compute_is_refused(settings, message):
  with pytest.raises(UserError, match=message):
    find_gguf_architecture(small_config(**{**SIZES, **settings}))


@functools.cache
def describe(name="LLaMA 3"):
  """Returns the metadata of a model and the shapes of its tensors."""
  model, _ = make_model(name)
  own = find_gguf_architecture(model)
  shapes = find_tensor_shapes(model, own.layout)
  return make_model_metadata(model, own), shapes


def read(changes, name="LLaMA 3"):
  """Returns the model that a file with other keys describes; None drops one."""
  metadata, shapes = describe(name)
  metadata = {k: x for k, x in {**metadata, **changes}.items() if x is not None}
  return read_model_metadata(metadata, shapes, "x.gguf")[1]


NOT_COMPUTED = {
  "llama.rope.scaling.yarn_beta_fast": 16.0,
  "llama.attn_logit_softcapping": 50.0,
  "llama.final_logit_softcapping": 30.0,
  "llama.attention.sliding_window": 4096,
  "llama.expert_used_count": 2,
  "llama.attention.causal": False,
  "llama.embedding_scale": 2.0,
  "llama.pooling_type": 1,
  "gemma3.final_logit_softcapping": 30.0,
  "gemma3.attn_logit_softcapping": 50.0,
  # llama.cpp computes no rotary embedding (src/models/granite.cpp).
  "granite.rope.scaling.finetuned": False,
}
# Keys that llama.cpp reads in these or in other architectures.
UNKNOWN = {
  "llama.attention.scale": 1.0,
  "llama.rope.dimension_sections": [1, 2],
  "llama.rope.freq_base_swa": 1e4,
  "llama.rope.scaling.yarn_ext_factor": 1.0,
  "llama.hidden_activation": "relu",
  "llama.swin_norm": True,
  "llama.expert_weights_norm": True,  # of a model without experts
  "llama.": 1,
  "llama.x\ny": 1,
}
HARMLESS = {
  "general.name": "x",
  "general.quantization_version": 2,
  "quantize.imatrix.file": "x",
  "tokenizer.ggml.any": [1],
  "other.key": 5,
  "llama.vocab_size": 912,
  "llama.tensor_data_layout": "Meta AI original pth",
  "llama.rope.scaling.type": "none",
  "llama.expert_count": 0,
  "llama.expert_used_count": 0,
  "llama.attention.causal": True,
  "llama.attention.layer_norm_epsilon": 1e-5,
  "llama.residual_scale": 1.0,
  "llama.logit_scale": 1.0,
  "llama.embedding_scale": 1.0,
  "llama.pooling_type": 0,
  "llama.rope.scaling.finetuned": False,
  "llama.feed_forward_length": [96, 96],
  "llama.attention.head_count": [4, 4],
  "llama.attention.head_count_kv": [2, 2],
}


# Keys of experts with a meaning that no architecture of ours has.
OTHER_EXPERTS = {
  "expert_gating_func": 2,  # sigmoid
  "expert_weights_scale": 2.5,
  "expert_shared_count": 1,
  "expert_group_count": 2,
}
SPARSE = {
  "llama": "Mixtral",
  "qwen3moe": "Qwen 3 with experts",
  "olmoe": "OLMoE",
}
NOT_COMPUTED |= {
  f"{name}.{key}": value
  for name in SPARSE
  for key, value in OTHER_EXPERTS.items()
}
MODEL_OF = {"llama": "LLaMA 3", "granite": "Granite", "gemma3": "Gemma 3"}


@pytest.mark.parametrize("key", NOT_COMPUTED)
def test_what_we_do_not_compute_is_refused(key):
  with pytest.raises(UserError) as error:
    name, _, part = key.partition(".")
    is_sparse = part in OTHER_EXPERTS
    read({key: NOT_COMPUTED[key]}, (SPARSE if is_sparse else MODEL_OF)[name])
  assert str(error.value) == (
    f"x.gguf: {key} = {NOT_COMPUTED[key]!r}: palm_mtf does not compute this."
  )


@pytest.mark.parametrize("name", SPARSE)
def test_a_key_that_llama_cpp_does_not_follow_is_not_dropped(name):
  """It computes each architecture in one way, whatever the key says."""
  key, normalizes = f"{name}.expert_weights_norm", name != "olmoe"
  model = read({key: normalizes}, SPARSE[name])
  assert model.router_normalizes == normalizes
  with pytest.raises(UserError) as error:
    read({key: not normalizes}, SPARSE[name])
  assert str(error.value) == (
    f"x.gguf: {key} = {not normalizes}: llama.cpp computes a {name} with "
    f"{normalizes}, whatever this key says; import the model's folder of "
    "transformers."
  )


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_unknown_key_of_the_architecture_is_refused_by_its_name(key):
  with pytest.raises(
    UserError, match="does not know this key of a ll"
  ) as error:
    read({key: UNKNOWN[key]})
  assert repr(key) in str(error.value) and "\n" not in str(error.value)


def test_keys_that_change_no_number_are_accepted():
  assert read(HARMLESS) == read({})


L = "llama."
OF_TYPE = {
  **dict.fromkeys(
    [f"{L}{x}" for x in ("block_count", "embedding_length", "context_length")]
    + [f"{L}feed_forward_length", f"{L}rope.dimension_count"]
    + [f"{L}attention.{x}" for x in ("head_count", "head_count_kv")]
    + [f"{L}attention.{x}" for x in ("key_length", "value_length")]
    + [f"{L}expert_count"],
    "a whole number",
  ),
  f"{L}attention.layer_norm_rms_epsilon": "a number",
  f"{L}rope.freq_base": "a number",
  f"{L}rope.scale_linear": "a number",
  f"{L}rope.scaling.type": "a text",
  f"{L}attention.causal": "true or false",
  f"{L}vocab_size": "a whole number",
  f"{L}tensor_data_layout": "a text",
  f"{L}rope.scaling.finetuned": "true or false",
  "general.architecture": "a text",
  "split.count": "a whole number",
}


@pytest.mark.parametrize("value", ["two", [4], 1.5, True, ["x"], 7], ids=repr)
@pytest.mark.parametrize("key", OF_TYPE)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_key(key, value):
  kinds = {
    "a whole number": (int,),
    "a number": (int, float),
    "a text": (str,),
    "true or false": (bool,),
  }
  if type(value) in kinds[OF_TYPE[key]]:
    return
  with pytest.raises(UserError) as error:
    read({key: value})
  assert str(error.value) == (
    f"x.gguf: {key} = {value!r}: is not {OF_TYPE[key]}; convert the model "
    "again."
  )


@pytest.mark.parametrize(
  "change, message",
  [
    ({"general.architecture": "qwen2moe"}, r"'qwen2moe' \(did you mean"),
    ({"general.architecture": None}, "general.architecture: is missing"),
    ({"split.count": 3}, "split.count = 3: .* join them"),
    ({f"{L}attention.head_count": 0}, "head_count = 0: give a number above 0"),
    ({f"{L}attention.key_length": 0}, "key_length = 0: give a number above 0"),
    ({f"{L}embedding_length": -64}, "embedding_length = -64: give a number"),
    ({f"{L}block_count": 10**9}, "give a whole number from 1 to"),
    ({f"{L}rope.freq_base": float("nan")}, "freq_base = nan: give a number"),
    ({f"{L}rope.freq_base": float("inf")}, "freq_base = inf: give a number"),
    ({f"{L}attention.value_length": 16}, "value_length = 16: .* only with 32"),
    ({f"{L}rope.dimension_count": 16}, "dimension_count = 16: .* only with 32"),
  ],
)
def test_another_value_is_refused(change, message):
  with pytest.raises(UserError, match=r"^x\.gguf: ") as error:
    read(change)
  assert re.search(message, str(error.value))


@pytest.mark.parametrize("shape", [None, (), (912,), (912, 64, 1)], ids=str)
def test_an_embedding_of_another_rank_is_refused(shape):
  metadata, shapes = describe()
  shapes = {**shapes, "token_embd.weight": shape}
  if shape is None:
    del shapes["token_embd.weight"]
  with pytest.raises(
    UserError, match=r"token_embd\.weight is .* two dimensions"
  ):
    read_model_metadata(metadata, shapes, "x.gguf")


# Keys for which llama.cpp has a default, with the default for these models.
DEFAULTS = {
  "attention.head_count_kv": lambda model: model.num_heads,
  "attention.key_length": lambda model: model.d_model // model.num_heads,
  "attention.value_length": lambda model: model.d_model // model.num_heads,
  "rope.dimension_count": lambda model: model.d_kv,
  "rope.freq_base": lambda model: 10_000.0,
  "rope.freq_base_swa": lambda model: 10_000.0,
  "rope.scaling.type": lambda model: "linear",
  "rope.scaling.factor": lambda model: 1.0,
  "attention.sliding_window_pattern": lambda model: (
    6 if model.branch_norm else 4  # of a gemma3; of a cohere2
  ),
  # src/models/llama.cpp, qwen3moe.cpp and olmoe.cpp
  "expert_weights_norm": lambda model: model.qk_norm != "rms_norm_all_heads",
  "expert_feed_forward_length": lambda model: (
    model.d_ff // 3 if model.qk_norm == "rms_norm" else model.expert_size
  ),
}
# llama.cpp refuses this file, too: no experts, of which a token uses two.
UNCOUNTED = "llama.expert_used_count = 2: palm_mtf does not compute this"


@pytest.mark.parametrize("name", MODELS)
def test_a_missing_key_is_refused_or_has_the_default_of_llama_cpp(name):
  model, _ = make_model(name)
  metadata, _ = describe(name)
  for key in metadata.keys() - {"general.architecture"}:
    _, _, part = key.partition(".")
    if part in DEFAULTS:
      same = {key: DEFAULTS[part](model)}
      assert _try(same, name) == _try({key: None}, name), key
    elif part != "vocab_size":
      line = f"{key}: is missing in"
      line = UNCOUNTED if key == "llama.expert_count" else line
      with pytest.raises(UserError, match=f"^x.gguf: {line}"):
        read({key: None}, name)


def _try(changes, name):
  try:
    return read(changes, name)
  except UserError as error:
    return str(error)


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("vocabulary", ["SentencePiece"], indirect=True)
def test_a_file_without_a_key_is_read_as_llama_cpp_reads_it(
  name, vocabulary, tmp_path
):
  """llama.cpp loads the file with our logits, or we refuse it."""
  model, params = make_model(name)
  whole, path = tmp_path / "whole.gguf", tmp_path / "model.gguf"
  write(whole, model, params, vocabulary)
  file = GgufFile(str(whole))
  ids = [*range(1, 17)]
  limit = 1e-4 if "gelu" in model.mlp or "geglu" in model.mlp else 1e-6
  num_read = 0
  for key in file.metadata:
    if not key.startswith(file.metadata["general.architecture"] + "."):
      continue
    metadata = {k: x for k, x in file.metadata.items() if k != key}
    write_gguf(str(path), metadata, file.shapes, "float32", file.read)
    try:
      own, found = read_model_metadata(metadata, file.shapes, str(path))
      again = import_gguf_parameters(GgufFile(str(path)), found, own, str(path))
    except UserError:
      continue
    num_read += 1
    ours = compute(found, again, ids)
    theirs = llama_cpp_peer.call(llama_cpp_peer.compute_logits, path, ids)
    assert np.abs(ours - theirs).max() < limit * np.ptp(ours), key
  assert num_read
