# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Scaled rotary embedding has the numbers of transformers and llama.cpp.

Texts are longer than the original length of every model here.
"""

import dataclasses
import json

import numpy as np
import pytest

from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.files import GgufFile, write_gguf
from palm_mtf.export.gguf.metadata import (
  find_gguf_architecture,
  make_model_metadata,
  read_model_metadata,
)
from palm_mtf.export.gguf.model import import_gguf_parameters, make_reader
from palm_mtf.export.huggingface.config_json import make_config, parse_config
from palm_mtf.export.huggingface.weights import (
  find_tensor_shapes,
  make_tensor_reader,
)
from tests import llama_cpp_peer, oracle, tokenizer_files
from tests.blocks import BY_TURNS, SETTINGS
from tests.export.gguf.architectures_test import NEOX, SIZES, compute, write
from tests.export.huggingface.families_test import import_folder, logits_of
from tests.mtf_testing import run_model, small_config
from tests.transformers_folder import parameters

LENGTH, ORIGINAL = 64, "original_max_position_embeddings"
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  ORIGINAL: 16,
}
LINEAR = {"rope_type": "linear", "factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}
WIDE = {**YARN, "beta_fast": 1.5, "beta_slow": 0.5}
# {name: (class of transformers, rope_scaling)}
SCALED = {
  "linear": ("Llama", LINEAR),
  "llama3": ("Llama", LLAMA3),
  "yarn": ("Qwen2", YARN),
  "yarn with its limits": ("Qwen3", {**WIDE, "attention_factor": 0.9}),
  "yarn, not truncated": ("Mistral", {**WIDE, "truncate": False}),
  "mscale": ("Mistral", {**WIDE, "mscale": 0.7, "mscale_all_dim": 1.2}),
  "one mscale": ("Llama", {**YARN, "mscale": 0.7}),
  "linear in a part of a head": ("GPTNeoX", LINEAR),
  "llama3 in a part of a head": ("StableLm", LLAMA3),
  "yarn in a part of a head": ("Phi", WIDE),
  "linear, neighbours": ("Cohere", LINEAR),
  "yarn, neighbours": ("Cohere", WIDE),
  "llama3, one key head": ("Gemma", LLAMA3),
}
# Sizes of config.json for all of these classes.
CONFIG = dict(
  vocab_size=44,
  hidden_size=32,
  intermediate_size=36,
  num_hidden_layers=2,
  num_attention_heads=2,
  max_position_embeddings=LENGTH,
  bos_token_id=1,
  eos_token_id=1,
  pad_token_id=1,
)
KV = dict(num_key_value_heads=1, head_dim=16)
WITH_KEY_HEADS = ("Gemma", "Mistral", "Qwen2", "Qwen3", "StableLm")


@pytest.mark.peers
@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", SCALED)
def test_an_imported_model_has_the_numbers_of_transformers(
  name, table, tmp_path
):
  """Logits, log p of a text, and greedy tokens; also after an export."""
  import torch
  import transformers

  kind, scaling = SCALED[name]
  scaling = {**scaling, "rope_theta": 50.0}
  if table == "rope_scaling":
    scaling["type"] = scaling.pop("rope_type")
  config = getattr(transformers, f"{kind}Config")(
    **CONFIG, **(KV if kind in WITH_KEY_HEADS else {}), **{table: scaling}
  )
  torch.manual_seed(0)
  peer = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
  for each in peer.parameters():
    each.data = torch.randn_like(each) * 0.3 + (0.7 if each.ndim == 1 else 0)
  peer.save_pretrained(tmp_path)
  model, _, params = import_folder(tmp_path)
  model = dataclasses.replace(model, activation_dtype="float32")
  ids = np.random.default_rng(1).integers(44, size=[1, LENGTH], dtype=np.int32)
  theirs = logits_of(peer, ids)
  exact = {key: x.astype(float) for key, x in params.items()}
  ours = oracle.forward(model, exact, ids)
  # transformers has frequencies in float32.
  assert np.abs(ours - theirs).max() < 2e-5 * np.ptp(theirs)
  batch = {"inputs": ids, "targets": ids}
  found = run_model(model, params, batch, backward=False)
  assert np.abs(found.logits - theirs).max() < 1e-4 * np.ptp(theirs)
  assert log_p(found.logits[0], ids[0]) == pytest.approx(
    log_p(theirs[0], ids[0]), abs=1e-4 * ids.size
  )
  chosen = peer.generate(
    torch.tensor(ids[:, :48], dtype=torch.long),
    max_new_tokens=8,
    do_sample=False,
  )[0].tolist()
  made = ids[0, :48].tolist()
  while len(made) < len(chosen):
    made.append(int(compute(model, params, made)[-1].argmax()))
  assert made == chosen
  # The export has the same scaling for transformers.
  again = tmp_path / "again"
  again.mkdir()
  exported = make_config(model, start_id=1, end_ids=[1], packing="joined")
  (again / "config.json").write_text(json.dumps(exported))
  peer.config = transformers.AutoConfig.from_pretrained(again)
  (rotary,) = [x for x in peer.modules() if hasattr(x, "inv_freq")]
  theirs_again = type(rotary)(peer.config)
  torch.testing.assert_close(theirs_again.inv_freq, rotary.inv_freq.float())
  assert theirs_again.attention_scaling == rotary.attention_scaling


def log_p(logits, ids):
  rows = logits[:-1].astype(float)
  rows -= rows.max(-1, keepdims=True)
  chosen = rows[np.arange(len(rows)), ids[1:]]
  return (chosen - np.log(np.exp(rows).sum(-1))).sum()


# llama.cpp computes YaRN with 1 and 32 turns. It wants numbers as floats.
YARN_GGUF = dict(
  rotary_scaling="yarn",
  rotary_base=10,
  rotary_factor=4,
  rotary_original_length=16,
)
LLAMA, LINEAR_GGUF = (
  SETTINGS["LLaMA 3"],
  dict(rotary_scaling="linear", rotary_factor=2.5),
)
EXPORTED = {
  "llama3": dict(LLAMA, **{**BY_TURNS, "rotary_scaling": "llama3"}),
  "llama3, Granite": dict(
    **{**LLAMA, **BY_TURNS, "rotary_scaling": "llama3"}, embedding_scale=2.0
  ),
  "linear": {**LLAMA, **LINEAR_GGUF},
  "linear in a part of a head": {**NEOX, **LINEAR_GGUF},
  "yarn": {**LLAMA, **YARN_GGUF},
  "yarn, other factor of q and k": {
    **SETTINGS["Qwen 3"],
    **YARN_GGUF,
    "rotary_attention_factor": 0.9,
    "rotary_slow": 1.0,
    "rotary_fast": 32.0,
  },
  "yarn in a part of a head": {**NEOX, **YARN_GGUF},
}


def make_vocabulary(folder):
  content = tokenizer_files.make_byte_level("smollm")
  return open_vocabulary(tokenizer_files.write(folder, content))


def export(name, folder):
  """Writes a GGUF file; returns its path, the model and its parameters."""
  model = small_config(**{**SIZES, **EXPORTED[name]})
  params, path = parameters(model), str(folder / "model.gguf")
  write(path, model, params, make_vocabulary(folder))
  return path, model, params


def read(path):
  """Returns the model of a GGUF file and its parameters."""
  file = GgufFile(path)
  own, model = read_model_metadata(file.metadata, file.shapes, path, file.read)
  return model, import_gguf_parameters(file, model, own, path)


@pytest.mark.peers
@pytest.mark.parametrize("name", EXPORTED)
def test_llama_cpp_has_our_numbers_of_an_exported_file(name, tmp_path):
  path, model, params = export(name, tmp_path)
  ids = np.random.default_rng(1).integers(2, 900, size=24).tolist()
  ours = compute(model, params, ids)
  theirs = llama_cpp_peer.call(llama_cpp_peer.compute_logits, path, ids)
  assert np.abs(ours - theirs).max() < 1e-4 * np.ptp(ours)
  assert log_p(ours, ids) == pytest.approx(log_p(theirs, ids), rel=1e-4)
  made = list(ids)
  for _ in range(6):
    made.append(int(compute(model, params, made)[-1].argmax()))
  assert llama_cpp_peer.call(llama_cpp_peer.choose, path, ids, 6) == made[24:]


@pytest.mark.parametrize("name", EXPORTED)
def test_both_formats_keep_the_settings_and_the_bits(name, tmp_path):
  """From transformers' format to GGUF and back."""
  path, model, params = export(name, tmp_path)
  described = dict(start_id=1, end_ids=[1], packing="joined")
  config = make_config(model, **described)
  family, same, *_ = parse_config(json.loads(json.dumps(config)), "there")
  for each, (again, params_again) in {
    "config.json": (same, params),
    "GGUF": read(path),
  }.items():
    assert make_config(again, **described) == config, each
    before, after = (
      make_tensor_reader(m, family, p.__getitem__)
      for m, p in ((model, params), (again, params_again))
    )
    for key in find_tensor_shapes(model, family):
      np.testing.assert_array_equal(after(key), before(key), err_msg=key)


def convert_llama3(base, size):
  """Returns rope_freqs.weight of Llama 3.1 as llama.cpp's converter does.

  It computes in float32, and writes no settings.
  """
  found = []
  for frequency in 1 / base ** (np.arange(0, size, 2, dtype=np.float32) / size):
    wavelength = np.float32(2 * np.pi) / np.float32(frequency)
    smooth = (np.float32(8192) / wavelength - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    is_long, is_short = wavelength > 8192, wavelength < 2048
    found.append(8 if is_long else 1 if is_short else between)
  return np.array(found, np.float32)


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_divisors_of_llama_cpp_s_converter_are_llama_3_s(error, tmp_path):
  model = small_config(
    **{**SIZES, **LLAMA, "rotary_base": 5e5},
    rotary_scaling="llama3",
    rotary_factor=8.0,
    rotary_original_length=8192,
    rotary_slow=1.0,
    rotary_fast=4.0,
  )
  divisors = convert_llama3(np.float32(5e5), model.d_kv)
  assert len({*divisors}) == 3
  params = parameters(model)
  path = str(tmp_path / "model.gguf")
  write(path, model, params, make_vocabulary(tmp_path))
  file = GgufFile(path)
  np.testing.assert_allclose(file.read("rope_freqs.weight"), divisors, 1e-5)
  kept = {k: x for k, x in file.metadata.items() if "palm_mtf" not in k}
  divisors[divisors.argmax() - 1] *= 1 + error
  tensors = {x: file.read(x) for x in file.shapes}
  tensors["rope_freqs.weight"] = divisors
  other = str(tmp_path / "other.gguf")
  write_gguf(other, kept, file.shapes, "float32", tensors.__getitem__)
  if error:
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not those of"):
      read(other)
  else:
    assert read(other)[0] == read(path)[0]


# {key of config.json's table: value; ... drops it}, message
REFUSED = [
  *(
    (YARN, {"rope_type": x}, f"rope_type = {x!r}")
    for x in ("dynamic", "longrope", "su", "mrope", "proportional", "Yarn", {})
  ),
  (YARN, {"rope_type": "x" * 9000}, "rope_type = 'xxxx"),
  (YARN, {"type": "linear"}, "type = 'linear': another key says 'yarn'"),
  (YARN, {"rope_type": "yarm"}, '(did you mean "yarn"?)'),
  (LINEAR, {"factor": None}, "rope_type = 'linear': wants factor."),
  (LINEAR, {"factor": 0.5}, "ROTARY_FACTOR = 0.5: give a number from 1.0"),
  *(
    (LINEAR, {"factor": x}, f"factor = {str(x)[:9]}")
    for x in (float("nan"), float("inf"), -2.0, 0, True, 10**400)
  ),
  (LINEAR, {"factor": "2"}, "factor = '2': give a number"),
  (LINEAR, {"factor": [2.0]}, "factor = [2.0]: give a number"),
  (LINEAR, {ORIGINAL: 16}, f"'{ORIGINAL}' = 16: palm_mtf does not compute"),
  *(
    (LLAMA3, {x: missing}, f"rope_type = 'llama3': wants {x}.")
    for missing in (None, ...)
    for x in LLAMA3
    if x != "rope_type"
  ),
  (LLAMA3, {"low_freq_factor": 4.0}, "ROTARY_SLOW = 4: give a number below"),
  (LLAMA3, {"low_freq_factor": 5.0}, "ROTARY_SLOW = 5: give a number below"),
  (LLAMA3, {"high_freq_factor": "4"}, "high_freq_factor = '4'"),
  (LLAMA3, {"beta_fast": 32}, "'beta_fast' = 32: palm_mtf does not compute"),
  (YARN, {"beta_fats": 32}, '(did you mean "beta_fast"?)'),
  (YARN, {"finetuned": True}, "'finetuned' = True: palm_mtf does not compute"),
  (YARN, {"beta_fast": 0.5}, "ROTARY_SLOW = 1: give a number below"),
  (YARN, {"attention_factor": 0}, "attention_factor = 0: give a number above"),
  (YARN, {"attention_factor": "1"}, "attention_factor = '1': give a number"),
  (YARN, {"truncate": 1}, "truncate = 1: give true or false."),
  (YARN, {"truncate": None}, "truncate = None: give true or false."),
  (YARN, {ORIGINAL: None}, f"rope_type = 'yarn': wants {ORIGINAL}."),
  (YARN, {ORIGINAL: 16.0}, f"{ORIGINAL} = 16.0: give a whole number"),
  (YARN, {ORIGINAL: 0}, f"{ORIGINAL} = 0: give a whole number"),
  (
    YARN,
    {"factor": 0.5, "mscale": 14.4, "mscale_all_dim": 14.5},
    "FACTOR = 0.",
  ),
]


@pytest.mark.parametrize("table", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaling, change, message", REFUSED, ids=str)
def test_a_table_without_a_meaning_is_refused_in_a_line(
  scaling, change, message, table
):
  config = make_config(
    small_config(**SETTINGS["LLaMA"]), start_id=1, end_ids=[1], packing="joined"
  )
  del config["rope_parameters"]
  keys = {**scaling, **change}
  keys = {key: x for key, x in keys.items() if x is not ...}
  with pytest.raises(UserError) as error:
    parse_config({**config, table: keys}, "there")
  line = str(error.value)
  assert message in line and "\n" not in line and len(line) < 400


@pytest.mark.parametrize("outside", [16, 17])
def test_the_original_length_may_stand_outside_of_the_table(outside):
  config = make_config(
    small_config(**SETTINGS["LLaMA"]), start_id=1, end_ids=[1], packing="joined"
  )
  del config["rope_parameters"]
  keys = {**config, "rope_scaling": YARN, ORIGINAL: outside}
  if outside != YARN[ORIGINAL]:
    with pytest.raises(UserError, match=f"{ORIGINAL} = 17: another key says"):
      parse_config(keys, "there")
  else:
    found = parse_config(keys, "there").model
    keys["rope_scaling"] = {k: x for k, x in YARN.items() if k != ORIGINAL}
    assert parse_config(keys, "there").model == found


def read_keys(name, changes):
  """Returns the model of an exported file with other keys."""
  model = small_config(**{**SIZES, **EXPORTED[name]})
  own = find_gguf_architecture(model)
  metadata = {**make_model_metadata(model, own), **changes}
  metadata = {key: x for key, x in metadata.items() if x is not None}
  divisors = make_reader(model, own, parameters(model).__getitem__)
  shapes = find_tensor_shapes(model, own.layout)
  return read_model_metadata(metadata, shapes, "x.gguf", divisors)[1]


ROPE = "llama.rope.scaling."


def test_llama_cpp_s_defaults_and_older_key_of_a_factor():
  linear = read_keys("linear", {})
  changes = {f"{ROPE}type": None, f"{ROPE}factor": None}
  assert read_keys("linear", {f"{ROPE}type": None}) == linear
  older = {**changes, "llama.rope.scale_linear": 2.5}
  assert read_keys("linear", older) == linear
  plain = read_keys("linear", changes)
  assert plain.rotary_scaling == "none"
  for factor in (0.0, 1.0):
    assert read_keys("linear", {f"{ROPE}factor": factor}) == plain
  assert read_keys("linear", {f"{ROPE}type": "none"}) == plain
  yarn = read_keys("yarn", {f"{ROPE}original_context_length": None})
  assert yarn.rotary_original_length == SIZES["sequence_length"]


REFUSED_KEYS = [
  ("linear", {f"{ROPE}type": "longrope"}, "type = 'longrope': choose one of"),
  ("linear", {f"{ROPE}type": "lineal"}, '(did you mean "linear"?)'),
  ("linear", {f"{ROPE}attn_factor": 2.0}, "'attention_factor' = 2.18"),
  ("linear", {f"{ROPE}factor": float("nan")}, "factor = nan: give a number"),
  ("linear", {f"{ROPE}factor": -2.0}, "factor = -2.0: give a number above 0"),
  ("linear", {f"{ROPE}factor": 0.25}, "ROTARY_FACTOR = 0.25: give a number"),
  ("linear", {f"{ROPE}factor": "2"}, f"{ROPE}factor = '2': is not a number"),
  ("yarn", {f"{ROPE}original_context_length": 0}, f"{ORIGINAL} = 0: give"),
  ("yarn", {f"{ROPE}yarn_beta_fast": 16.0}, "yarn_beta_fast = 16.0: palm_mtf"),
  ("yarn", {f"{ROPE}yarn_attn_factor": 0.9}, "yarn_attn_factor' = 0.9: palm_m"),
  ("yarn", {f"{ROPE}attn_factor": float("inf")}, "attention_factor = inf"),
  ("llama3", {"palm_mtf.factor": "8"}, "palm_mtf.factor = '8': is not a num"),
  ("llama3", {"palm_mtf.low_freq_factor": 9.0}, "ROTARY_SLOW = 9: give a num"),
]


@pytest.mark.parametrize("name, change, message", REFUSED_KEYS, ids=str)
def test_keys_of_gguf_without_a_meaning_are_refused(name, change, message):
  with pytest.raises(UserError, match=r"^x\.gguf: ") as error:
    read_keys(name, change)
  assert message in str(error.value)


@pytest.mark.parametrize(
  "settings, message",
  [
    (
      dict(EXPORTED["llama3"], qk_norm="rms_norm"),
      "ROTARY_SCALING = 'llama3': llama.cpp computes no qwen3 with this",
    ),
    (dict(EXPORTED["yarn"], rotary_fast=16.0), "ROTARY_FAST = 16.0: llama.cpp"),
    (dict(EXPORTED["yarn"], rotary_slow=2.0), "ROTARY_SLOW = 2.0: llama.cpp"),
    (
      dict(EXPORTED["yarn"], rotary_truncate=False),
      "ROTARY_TRUNCATE = False: llama.cpp computes YaRN only with True",
    ),
  ],
)
def test_what_llama_cpp_does_not_compute_is_not_exported(settings, message):
  with pytest.raises(UserError) as error:
    find_gguf_architecture(small_config(**{**SIZES, **settings}))
  assert message in str(error.value)
