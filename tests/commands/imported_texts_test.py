# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of an imported model begin and end as the model's own files say.

They still do after an export, and after the import of the export.
"""

import functools
import itertools
import json
import re
import shutil

import numpy as np
import pytest
import tokenizers

from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load_run
from palm_mtf.cli.main import main
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.evaluation.answers import CheckpointModel
from palm_mtf.export.huggingface.config_json import find_family, make_config
from palm_mtf.export.huggingface.families import FAMILIES
from palm_mtf.export.huggingface.tensor_files import WEIGHTS
from palm_mtf.export.huggingface.weights import (
  find_tensor_shapes,
  make_tensor_reader,
)
from palm_mtf.generation.inference.scorer import Example
from palm_mtf.lm_eval.run import Run
from tests import (
  llama_cpp_peer,
  oracle,
  runs,
  tokenizer_files,
  transformers_folder,
)
from tests.blocks import ALL_HEADS, SETTINGS
from tests.export.read_gguf import read_gguf
from tests.mtf_testing import small_config
from tests.prefixed_vocabulary import train_prefixed
from tests.tokenizer_files import END, START, SYSTEM
from tests.transformers_folder import change_json, write_tensors

VOCAB_SIZE = 320
LLAMA = small_config(
  **{"vocab_size": VOCAB_SIZE, "sequence_length": 64, "d_model": 40},
  **{"block": "serial", "norm": "rms_norm", "attention": "multi_head"},
  **{"output_embedding": "separate", "logits_scale": 1.0},
)
PLAIN = {"post_processor": None}
DTYPE = "--gin.ACTIVATION_DTYPE='float32'"
TEXT = "the model reads a text; " * 30  # three windows and more


@pytest.fixture(scope="module")
def tokenizer():
  """Ids: END 0, START 1, "!" 2, and SYSTEM, the end of a turn."""
  return tokenizer_files.make_byte_level("gpt-2", ["some words"] * 3, 300)


def write_model(folder, tokenizer, parameters, model=LLAMA, **files):
  """Writes a folder of transformers.

  Args:
    tokenizer: content of tokenizer.json.
    parameters: {our name: parameter}.
    **files: {name of a JSON file: its keys}; None removes a key.
  """
  folder.mkdir()
  files = {"tokenizer_config": {"eos_token": END}, **files}
  tokenizer_files.write(folder, tokenizer)
  config = make_config(model, start_id=0, end_ids=[0], packing="packed")
  del config["palm_mtf"]
  (folder / "config.json").write_text(json.dumps(config))
  for name, keys in files.items():
    path = folder / f"{name}.json"
    if not path.exists():
      path.write_text("{}")
    change_json(path, **keys)
    found = json.loads(path.read_text())
    kept = {key: x for key, x in found.items() if x != "none"}
    path.write_text(json.dumps(kept))
  family = find_family(model)
  read = make_tensor_reader(model, family, parameters.__getitem__)
  tensors = {x: read(x) for x in find_tensor_shapes(model, family)}
  write_tensors(folder / WEIGHTS, tensors)
  return folder


def random_parameters():
  drawn = oracle.random_parameters(LLAMA, seed=1)
  return {name: x.astype(np.float32) for name, x in drawn.items()}


def chain_model(tokenizer, *texts):
  """Returns a model, and its parameters, that says the tokens of `texts`.

  A text may be the name of a special token.
  """
  library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
  ids = [library.token_to_id(x) for x in texts]
  assert None not in ids
  width = VOCAB_SIZE
  model = small_config(
    **{"vocab_size": width, "sequence_length": 64, "d_model": width},
    **{"num_heads": 4, "d_kv": width // 4, "attention": "multi_head"},
    **{"block": "serial", "norm": "rms_norm", "logits_scale": 1.0},
    output_embedding="separate",
  )
  found = {
    name: np.full(shape, name.endswith("scale"), np.float32)
    for name, shape in parameter_shapes(model).items()
  }
  found["embedding"] = np.eye(width, dtype=np.float32)
  for one, other in itertools.pairwise(ids):
    found["output_embedding"][other, one] = 1.0
  return model, found


def import_model(folder, output, *flags):
  assert main(["import", str(folder), "--output", str(output), *flags]) == 0
  return output


def export(run, path, kind):
  flags = ["--model_dir", str(run), f"--format={kind}"]
  assert main(["export", *flags, "--output", str(path)]) == 0
  return path


def continuation(run, *flags) -> str:
  (record,) = runs.printed(
    *("generate", "--model_dir", run, "--prompt", "a", "--json", DTYPE),
    *("--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=9", *flags),
  )
  return record["continuation"]


def score(run, text, *flags) -> float:
  record, *_ = runs.printed(
    *("score", "--model_dir", run, "--text", text, "--json", DTYPE, *flags)
  )
  return record["log_likelihood"]


def texts_of(run) -> dict[str, str]:
  """Returns the macros about starts and ends in an imported config.gin."""
  found = re.findall(
    r"^(START_ID|ADD_START|CONTEXT_LENGTH) = (.*)$",
    (run / "config.gin").read_text(),
    re.M,
  )
  return dict(found)


CHAIN = ("a", "b", "c", SYSTEM, "x", "y", END, "p")


def import_chain(files, tokenizer, tmp_path):
  """Imports a model with files about ends; returns the run and id of SYSTEM."""
  library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
  system = library.token_to_id(SYSTEM)
  text = json.dumps(files).replace('"SYSTEM"', str(system))
  model, parameters = chain_model(tokenizer, *CHAIN)
  folder = write_model(
    *(tmp_path / "model", tokenizer | PLAIN, parameters, model),
    **json.loads(text),
  )
  return import_model(folder, tmp_path / "run"), system


def end_ids(run):
  return open_vocabulary(str(run / "tokenizer.json")).end_ids


@pytest.mark.parametrize(
  "files",
  [
    {"generation_config": {"eos_token_id": "SYSTEM"}},
    {"config": {"eos_token_id": [0, "SYSTEM"]}},
    {"config": {"eos_token_id": "SYSTEM"}},
  ],
)
def test_each_file_may_name_the_ends(files, tokenizer, tmp_path):
  run, system = import_chain(files, tokenizer, tmp_path)
  assert end_ids(run) == (0, system)


def test_each_end_ends_a_text_also_after_exports(tokenizer, tmp_path):
  files = {"generation_config": {"eos_token_id": ["SYSTEM", 0]}}
  run, system = import_chain(files, tokenizer, tmp_path)
  assert continuation(run) == "bc"
  hf = export(run, tmp_path / "hf", "hf")
  for name in ("config.json", "generation_config.json"):
    found = json.loads((hf / name).read_text())
    assert found["eos_token_id"] == [0, system]
    assert found["pad_token_id"] == 0
  gguf = export(run, tmp_path / "ends.gguf", "gguf")
  metadata = read_gguf(gguf).metadata
  assert metadata["tokenizer.ggml.eos_token_id"] == 0
  assert metadata["tokenizer.ggml.eot_token_id"] == system
  tokenizer_files.write(tmp_path, tokenizer, eos_token=END)
  other = ["--vocabulary", str(tmp_path / "tokenizer.json")]
  for number, (path, *flags) in enumerate([(hf,), (gguf,), (gguf, *other)]):
    again = import_model(path, tmp_path / f"again{number}", *flags)
    assert end_ids(run) == end_ids(again) == (0, system)
  assert continuation(again) == "bc"


def test_ends_end_beams_samples_chats_and_answers_of_the_harness(
  tokenizer, tmp_path
):
  model, parameters = chain_model(tokenizer, "a", "b", SYSTEM, "x", END)
  library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
  ends = {"eos_token_id": library.token_to_id(SYSTEM)}
  folder = write_model(
    *(tmp_path / "model", tokenizer | PLAIN, parameters, model),
    generation_config=ends,
  )
  run = import_model(folder, tmp_path / "run")
  beams = ("--gin.NUM_BEAMS=2", "--gin.TEMPERATURE=1.0")
  for flags in (beams, ["--gin.REPETITION_PENALTY=1.1"]):
    assert continuation(run, *flags) == "b"
  harness = Run(str(run), {"ACTIVATION_DTYPE": "float32"}, False)
  found = dict(harness.continuations([("a", {"until": ["never"]})]))
  assert found == {0: "b"}


def test_a_word_may_end_a_text_and_stays_a_word(tokenizer, tmp_path):
  """transformers ends at such an id, too."""
  model, parameters = chain_model(tokenizer, "a", "b", "!", "c", END)
  folder = write_model(
    *(tmp_path / "model", tokenizer | PLAIN, parameters, model),
    generation_config={"eos_token_id": [0, 2]},
  )
  run = import_model(folder, tmp_path / "run")
  assert continuation(run) == "b"
  vocabulary = open_vocabulary(str(run / "tokenizer.json"))
  assert vocabulary.decode(vocabulary.encode("Stop! Now!")) == "Stop! Now!"


ADDS = {
  "type": "TemplateProcessing",
  "single": [
    {"SpecialToken": {"id": START, "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
  ],
  "pair": [
    {"Sequence": {"id": "A", "type_id": 0}},
    {"Sequence": {"id": "B", "type_id": 1}},
  ],
  "special_tokens": {START: {"id": START, "ids": [1], "tokens": [START]}},
}
BYTE_LEVEL = {
  "type": "ByteLevel",
  "add_prefix_space": True,
  "trim_offsets": False,
  "use_regex": True,
}


@pytest.mark.parametrize(
  ("processor", "names", "bos_id", "start", "adds"),
  [
    (ADDS, {}, 1, "1", True),  # LLaMA 3
    (ADDS, {}, None, "1", True),
    (
      {"type": "Sequence", "processors": [BYTE_LEVEL, ADDS]},
      *({"add_bos_token": False}, 0, "1", True),
    ),
    (ADDS, {"bos_token": START, "add_bos_token": True}, 1, "1", True),
    # LLaMA 2, whose files of transformers 4 say so in this way
    (None, {"bos_token": START, "add_bos_token": True}, 1, "1", True),
    (None, {"bos_token": {"content": START}, "add_bos_token": True}, 0, "1", 1),
    (None, {"add_bos_token": True}, 1, "1", True),
    (BYTE_LEVEL, {"bos_token": END}, 0, "0", False),  # GPT-2, Pythia
    (BYTE_LEVEL, {"bos_token": START}, 1, "1", False),  # SmolLM2
    (None, {"bos_token": START, "add_bos_token": False}, 1, "1", False),
    (BYTE_LEVEL, {"bos_token": None}, None, None, False),  # Qwen 2
    (None, {}, "none", "1", False),  # the default of LLaMA's class
    (None, {}, 2, None, False),  # "!", a token of texts
    (None, {"add_bos_token": True}, 2, None, False),
    (None, {"add_bos_token": True, "bos_token": "!"}, 1, "1", False),
    (None, {"add_bos_token": "yes"}, 10**6, None, False),
    (None, {"add_bos_token": True}, [1], None, False),
  ],
)
def test_before_a_text_stands_what_the_tokenizer_puts_there(
  processor, names, bos_id, start, adds, tokenizer, tmp_path, capsys
):
  content = tokenizer | {"post_processor": processor}
  folder = write_model(
    *(tmp_path / "model", content, random_parameters()),
    tokenizer_config={"eos_token": END, **names},
    config={"bos_token_id": bos_id},
  )
  run = import_model(folder, tmp_path / "run")
  says = f"the log p of a first token is that after {END}"
  assert (says in capsys.readouterr().out) == (not adds)
  expected = {"CONTEXT_LENGTH": "64"}
  expected |= {} if start is None else {"START_ID": start}
  expected |= {} if adds else {"ADD_START": "False"}
  assert texts_of(run) == expected
  hf = export(run, tmp_path / "hf", "hf")
  library = tokenizers.Tokenizer.from_file(str(hf / "tokenizer.json"))
  plain = library.encode("Stop! Now!", add_special_tokens=False).ids
  assert library.encode("Stop! Now!").ids == [1] * bool(adds) + plain
  config = json.loads((hf / "tokenizer_config.json").read_text())
  assert config["add_bos_token"] == bool(adds)
  name = {None: None, "0": END, "1": START}[start]
  assert config.get("bos_token") == name
  described = json.loads((hf / "config.json").read_text())
  assert described["bos_token_id"] == (None if start is None else int(start))
  gguf = export(run, tmp_path / "model.gguf", "gguf")
  for number, path in enumerate((hf, gguf)):
    again = import_model(path, tmp_path / f"again{number}")
    assert texts_of(again) == expected


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_sentencepiece_model_without_a_start_token_keeps_having_none(
  is_exact, tmp_path
):
  folder = transformers_folder.write(
    tmp_path / "model", transformers_folder.MODEL
  )
  if not is_exact:
    path = train_prefixed(TEXT, tmp_path, vocab_size=290).path
    shutil.copy(path, folder / "vocabulary.model")
  names = {"add_bos_token": False, "eos_token": "</s>"}
  (folder / "tokenizer_config.json").write_text(json.dumps(names))
  run = import_model(folder, tmp_path / "run")
  hf = export(run, tmp_path / "hf", "hf")
  assert (hf / "tokenizer.json").exists() == is_exact
  for each in (run, import_model(hf, tmp_path / "again")):
    assert texts_of(each)["ADD_START"] == "False"


def test_two_tokens_before_each_text_are_refused(tokenizer, tmp_path, capsys):
  processor = ADDS | {"single": ADDS["single"][:1] + ADDS["single"]}
  folder = write_model(
    *(tmp_path / "m", tokenizer | {"post_processor": processor}),
    random_parameters(),
  )
  assert main(["import", str(folder), "--output", str(tmp_path / "run")]) == 2
  assert "puts 2 tokens before each text" in capsys.readouterr().err


@pytest.fixture(scope="module", params=["start token", "no start token"])
def run(request, tokenizer, tmp_path_factory):
  processor = ADDS if request.param == "start token" else None
  path = tmp_path_factory.mktemp("run")
  content = tokenizer | {"post_processor": processor}
  folder = write_model(path / "model", content, random_parameters())
  return import_model(folder, path / "run")


def test_score_tasks_and_the_harness_have_the_same_number(run):
  """Also for texts of several windows, each of which begins with START_ID."""
  macros = {"ACTIVATION_DTYPE": "float32", "SEQUENCE_LENGTH": 32, "STRIDE": 20}
  flags = ["--gin.SEQUENCE_LENGTH=32", "--gin.STRIDE=20"]
  harness = Run(str(run), macros, False)
  asked = [("", TEXT), ("", "the model"), ("the model", " reads")]
  found = dict(harness.scores(asked))
  long, first, second = (found[i].log_likelihood for i in range(3))
  assert long == score(run, TEXT, *flags)
  _, config = load_run("evaluate", str(run), macros, False)
  checkpoint, vocabulary = open_newest(str(run), config)
  with CheckpointModel(checkpoint, config, vocabulary) as model:
    scorer = model.get_scorer(False)
    examples = [Example([], vocabulary.encode(TEXT))]
    assert dict(scorer.log_likelihoods(examples)) == {0: long}
  start = 1 if "ADD_START" not in texts_of(run) else 0
  ids = [vocabulary.encode(x) for x in asked[2]]
  likelihood = functools.partial(
    oracle.log_likelihood, LLAMA, random_parameters()
  )
  assert first == pytest.approx(likelihood([], ids[0], start), rel=1e-5)
  # Without a start token, the first token is context.
  given = (ids[0], ids[1], 1) if start else (ids[0][1:], ids[1], ids[0][0])
  assert second == pytest.approx(likelihood(*given), rel=1e-5)


def test_a_first_token_follows_the_start_token_or_the_end_of_a_document(run):
  start = 1 if "ADD_START" not in texts_of(run) else 0
  ids = open_vocabulary(str(run / "tokenizer.json")).encode("the model")
  expected = oracle.log_likelihood(LLAMA, random_parameters(), [], ids, start)
  assert score(run, "the model") == pytest.approx(expected, rel=1e-5)


def test_an_export_keeps_the_context_length_of_the_imported_model(
  run, tmp_path
):
  """Whatever SEQUENCE_LENGTH it was finetuned with."""
  for number, (macro, length) in enumerate(
    (("CONTEXT_LENGTH=64", 64), ("CONTEXT_LENGTH=None", 16))
  ):
    flags = ["--model_dir", str(run), "--gin.SEQUENCE_LENGTH=16"]
    hf, gguf = (tmp_path / f"{number}.{x}" for x in ("hf", "gguf"))
    for kind, path in (("hf", hf), ("gguf", gguf)):
      more = [f"--gin.{macro}", f"--format={kind}", "--output", str(path)]
      assert main(["export", *flags, *more]) == 0
    config = json.loads((hf / "config.json").read_text())
    assert config["max_position_embeddings"] == length
    config = json.loads((hf / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == length
    assert read_gguf(gguf).metadata["llama.context_length"] == length


# PyTorch's products of experts need rows of whole 16 bytes.
OLMOE = dict(ALL_HEADS["OLMoE with its norm"], num_heads=4, d_expert=16)
# {name: settings of tests/blocks.py, and whether llama.cpp computes them}
EXPERTS = {
  "Mixtral": (SETTINGS["Mixtral"], True),
  "OLMoE": (OLMOE, True),
  "OLMoE, normalized": (dict(OLMOE, router_normalizes=True), False),
  "Qwen 3": (dict(SETTINGS["Mixtral"], qk_norm="rms_norm"), True),
  "Qwen 3, not normalized": (
    dict(SETTINGS["Mixtral"], qk_norm="rms_norm", router_normalizes=False),
    False,
  ),
}


@pytest.mark.peers
@pytest.mark.parametrize("name", EXPERTS)
def test_the_peers_agree_on_texts_and_numbers_of_experts(
  name, tokenizer, tmp_path, capsys
):
  settings, has_gguf = EXPERTS[name]
  sizes = dict(vocab_size=VOCAB_SIZE, sequence_length=64, d_model=40, d_kv=10)
  model = small_config(**{**settings, **sizes})
  content = tokenizer | {"post_processor": ADDS}
  parameters = transformers_folder.parameters(model)
  folder = write_model(tmp_path / "model", content, parameters, model)
  run = import_model(folder, tmp_path / "run")
  compare_with_peers(run, tmp_path, has_gguf=has_gguf)
  if not has_gguf:
    flags = ["--model_dir", str(run), "--output", str(tmp_path / "x")]
    assert main(["export", *flags, "--format=gguf"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "ROUTER_NORMALIZES = " in line


@pytest.mark.peers
def test_transformers_and_llama_cpp_agree_on_starts_texts_and_numbers(
  run, tmp_path
):
  compare_with_peers(run, tmp_path)


def compare_with_peers(run, tmp_path, has_gguf=True):
  """Compares ids, log p and the greedy text of exports with those of a run."""
  import torch
  import transformers

  hf = str(export(run, tmp_path / "hf", "hf"))
  gguf = has_gguf and export(run, tmp_path / "model.gguf", "gguf")
  ours = transformers.AutoTokenizer.from_pretrained(hf)
  adds_start = "ADD_START" not in texts_of(run)
  text = "Stop! Now!"
  ids = ours.encode(text)
  plain = ours.encode(text, add_special_tokens=False)
  assert ids == [1] * adds_start + plain
  assert ours.decode(ids, skip_special_tokens=True) == text
  if has_gguf:
    (found,) = llama_cpp_peer.call(llama_cpp_peer.tokenize, gguf, [text], True)
    assert found == ids
  model = transformers.AutoModelForCausalLM.from_pretrained(hf)
  # Without a start token, the first token's log p is that after [eod].
  read = ids if adds_start else [0, *ids]
  with torch.no_grad():
    logits = model(torch.tensor([read])).logits[0].double()
  log_p = torch.log_softmax(logits, -1)
  theirs = sum(log_p[i, x].item() for i, x in enumerate(read[1:]))
  assert score(run, text) == pytest.approx(theirs, rel=1e-5)
  if has_gguf:
    found = llama_cpp_peer.call(llama_cpp_peer.compute_log_p, gguf, read)
    assert found == pytest.approx(theirs, rel=1e-4)
  (record,) = runs.printed(
    *("generate", "--model_dir", run, "--prompt", text, "--json", DTYPE),
    *("--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=9"),
  )
  made = model.generate(
    torch.tensor([ids]),
    max_new_tokens=9,
    do_sample=False,
    # Rows of the embedding that no token has, which we never choose.
    suppress_tokens=[*range(len(ours), VOCAB_SIZE)],
  )[0, len(ids) :].tolist()
  vocabulary = open_vocabulary(str(run / "tokenizer.json"))
  assert record["continuation"] == vocabulary.decode(made)


@pytest.mark.peers
@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.model_type)
def test_start_tokens_of_classes_are_those_of_transformers(family):
  import transformers

  config = transformers.AutoConfig.for_model(family.model_type)
  assert family.start_id == config.bos_token_id


@pytest.mark.peers
def test_the_peers_end_where_we_do(tokenizer, tmp_path):
  import torch
  import transformers

  model, parameters = chain_model(tokenizer, *CHAIN)
  library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
  system = library.token_to_id(SYSTEM)
  folder = write_model(
    *(tmp_path / "model", tokenizer | PLAIN, parameters, model),
    generation_config={"eos_token_id": [0, system]},
  )
  run = import_model(folder, tmp_path / "run")
  gguf = export(run, tmp_path / "ends.gguf", "gguf")
  hf = export(run, tmp_path / "hf", "hf")
  prompt = [library.token_to_id("a")]
  (text,) = llama_cpp_peer.call(llama_cpp_peer.generate, gguf, [prompt], 9)
  assert text == continuation(run) == "bc"
  theirs = transformers.AutoModelForCausalLM.from_pretrained(str(hf))
  made = theirs.generate(
    torch.tensor([prompt]), max_new_tokens=9, do_sample=False
  )[0].tolist()
  assert made[-1] == system and len(made) == 4
