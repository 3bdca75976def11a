# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run with a tokenizer.json works like a run with a SentencePiece model."""

import json
import shutil

import pytest
import seqio
import tokenizers

from palm_mtf.cli.main import main
from palm_mtf.data.vocabulary.load import open_vocabulary
from tests import runs, tokenizer_files
from tests.export.read_gguf import read_gguf
from tests.seqio_testing import add_examples, registries_restored
from tests.tokenizer_files import END, START

SIZE = 290


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
  text = " ".join(runs.WORDS) + "\n"
  content = tokenizer_files.make_byte_level("smollm", [text * 20], SIZE - 2)
  folder = tmp_path_factory.mktemp("tokenizer")
  return tokenizer_files.write(folder, content, eos_token=END)


@pytest.fixture(scope="module")
def trained(path, corpus, tmp_path_factory):
  """A run of two steps."""
  model_dir = tmp_path_factory.mktemp("trained") / "run"
  settings = {"TRAIN_STEPS": 2, "EVAL_STEPS": 2, "PROMPTS": []}
  assert runs.run("train", corpus, model_dir, VOCABULARY=path, **settings) == 0
  return model_dir


@pytest.fixture(scope="module")
def continuation(trained):
  return _generate(trained)


def test_the_rows_of_a_run_are_the_librarys_ids(path, trained, corpus):
  settings = {"VOCABULARY": path, "INSPECT_STEPS": [0]}
  flags = runs.arguments("data inspect", corpus, trained, **settings)
  (found,) = runs.printed(*flags, "--json")
  library = tokenizers.Tokenizer.from_file(path)
  pieces = [x for row in found["rows"] for x in row["pieces"]]
  assert pieces
  for piece in pieces:
    ids = library.encode(piece["text"], add_special_tokens=False).ids
    assert piece["tokens"] == len(ids) + piece["ends_document"]


def test_a_run_resumes_only_with_the_same_end_of_a_document(
  path, trained, corpus, tmp_path, capsys
):
  copied = shutil.copytree(trained, tmp_path / "run")
  other = shutil.copytree(path.rpartition("/")[0], tmp_path / "other")
  more = {"TRAIN_STEPS": 3, "EVAL_STEPS": 3, "PROMPTS": []}
  (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": START}))
  settings = {**more, "VOCABULARY": str(other / "tokenizer.json")}
  assert runs.run("train", corpus, copied, **settings) == 2
  assert "trained with another vocabulary" in capsys.readouterr().err
  assert runs.run("train", corpus, copied, **more, VOCABULARY=path) == 0


def test_a_stream_is_the_text_of_generate_and_scores_are_per_token(
  path, trained, continuation, tmp_path, capsys
):
  capsys.readouterr()
  assert main(["generate", "--model_dir", str(trained), *GREEDY]) == 0
  assert f"one two{continuation}\n" in capsys.readouterr().out
  text = tmp_path / "text.jsonl"
  text.write_text(json.dumps({"inputs": "one two", "targets": " three"}))
  flags = ["--model_dir", trained, "--input", text, "--json"]
  (scored,) = runs.printed("score", *flags)
  assert scored["tokens"] == len(open_vocabulary(path).encode(" three"))


def test_vocab_inspect_counts_tokens_by_their_bytes(path, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("one two \u4e2d 12")
  (found,) = runs.printed(
    "vocab", "inspect", "--vocabulary", path, "--input", text, "--json"
  )
  assert found["end_of_document"] == END
  assert found["pieces"] == SIZE
  # A byte above 0x7F is no character. Of these, UTF-8 texts have 115, but a
  # byte-level tokenizer has a token for each of 128.
  assert found["byte_pieces"] == 128
  assert found["lossless"]
  assert found["byte_share"] == pytest.approx(3 / found["measured_tokens"])


def test_a_seqio_task_is_evaluated_with_the_tokens_of_the_run(trained):
  examples = {"inputs": ["one two", "three"], "targets": [" three", " four"]}
  with registries_restored():
    add_examples(
      "counts",
      {"validation": examples},
      [seqio.preprocessors.tokenize],
      features=("inputs", "targets"),
      metric_fns=[_same],
    )
    flags = ["--model_dir", trained, "--gin.EVAL_TASKS=['counts']", "--json"]
    (found,) = runs.printed("evaluate", *flags)
  assert "counts" in json.dumps(found)


def _same(targets, predictions):
  assert targets == [" three", " four"]
  return {"same": sum(map(str.__eq__, targets, predictions))}


GREEDY = ["--prompt", "one two", "--gin.TEMPERATURE=0.0"]
GREEDY += ["--gin.SAMPLE_TOKENS=8", "--gin.ACTIVATION_DTYPE='float32'"]


def _generate(model_dir) -> str:
  flags = ["--model_dir", model_dir, "--json", *GREEDY]
  (found,) = runs.printed("generate", *flags)
  return found["continuation"]


def test_a_model_that_is_exported_and_imported_keeps_its_tokenizer(
  path, trained, continuation, tmp_path
):
  flags = ["--model_dir", str(trained), "--output", str(tmp_path / "hf")]
  assert main(["export", *flags, "--format=hf"]) == 0
  assert {x.name for x in (tmp_path / "hf").iterdir()} == {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("README.md", "tokenizer.json", "tokenizer_config.json"),
  }
  library = tokenizers.Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
  ids = open_vocabulary(path).encode("one two")
  assert library.encode("one two").ids == [0, *ids]  # the start is [eod]
  imported = tmp_path / "imported"
  assert main(["import", str(tmp_path / "hf"), "--output", str(imported)]) == 0
  again = open_vocabulary(str(imported / "tokenizer.json"))
  assert again.sha256 == open_vocabulary(path).sha256
  assert _generate(imported) == continuation


def test_other_formats_have_the_tokenizer_or_refuse_it(
  path, trained, tmp_path, capsys
):
  flags = ["export", "--model_dir", str(trained), "--output"]
  assert main([*flags, str(tmp_path / "npz"), "--format=npz"]) == 0
  assert (
    open_vocabulary(str(tmp_path / "npz/tokenizer.json")).sha256
    == open_vocabulary(path).sha256
  )
  assert main([*flags, str(tmp_path / "a.gguf"), "--format=gguf"]) == 0
  metadata = read_gguf(tmp_path / "a.gguf").metadata
  assert metadata["tokenizer.ggml.pre"] == "smollm"
  assert len(metadata["tokenizer.ggml.tokens"]) == runs.SETTINGS["VOCAB_SIZE"]
  capsys.readouterr()
  assert main([*flags, str(tmp_path / "saved"), "--format=saved_model"]) == 2
  assert "which has only SentencePiece; use another" in capsys.readouterr().err
  assert not (tmp_path / "saved").exists()


def test_a_missing_library_is_an_error_that_says_how_to_install_it(
  path, monkeypatch
):
  monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
  with pytest.raises(ValueError, match=r"pip install 'palm_mtf\[tokenizers\]'"):
    open_vocabulary(path)
