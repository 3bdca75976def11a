# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import bz2
import gzip
import io
import json
import os
import pathlib
import sysconfig

import pytest
import sentencepiece

from palm_mtf.cli.main import main
from palm_mtf.data.vocabulary.training import list_pieces
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

STDLIB = pathlib.Path(sysconfig.get_path("stdlib"))
JSON, EMAIL = (f"{{stdlib}}/{name}/*.py" for name in ("json", "email"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> pathlib.Path:
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> str:
  """The path of a vocabulary of 500 pieces."""
  prefix = str(tmp_path_factory.mktemp("words") / "words")
  train(prefix)
  return f"{prefix}.model"


def train(prefix: str, *flags: str, size: int = 500) -> int:
  size = f"--size={size}"
  return main(["vocab", "--input", JSON, size, f"--output={prefix}", *flags])


def error_of(capsys, code: int) -> str:
  output = capsys.readouterr()
  assert (code, output.out) == (2, "")
  (line,) = output.err.splitlines()
  return line.removeprefix("palm_mtf: ")


def test_a_vocabulary_is_written_with_the_list_of_its_pieces(here, capsys):
  assert train("a/words") == 0
  assert sorted(os.listdir(here / "a")) == ["words.model", "words.vocab"]
  vocabulary = Vocabulary("a/words.model")
  assert vocabulary.size == 500
  listed = (here / "a" / "words.vocab").read_text(encoding="utf-8")
  assert listed == list_pieces((here / "a" / "words.model").read_bytes())
  assert listed.count("\n") == 500
  output = capsys.readouterr()
  assert output.out.startswith("vocabulary       a/words.model\n")
  assert output.err == ""


def test_the_same_input_gives_the_same_bytes_in_any_order(here):
  assert train("a", EMAIL) == 2  # a flag is missing before it
  assert train("a", "--input", EMAIL) == 0
  flags = ["--size=500", "--output=b", "--input", EMAIL, JSON]
  assert main(["vocab", *flags]) == 0
  for suffix in ("model", "vocab"):
    first, second = (here / f"{name}.{suffix}" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_json_says_what_was_made_and_how_well_it_fits(here, capsys):
  assert train("words", "--json") == 0
  (line,) = capsys.readouterr().out.splitlines()
  results = json.loads(line)
  vocabulary = Vocabulary("words.model")
  assert (results["pieces"], results["sha256"]) == (500, vocabulary.sha256)
  text = [p.read_text(encoding="utf-8") for p in STDLIB.glob("json/*.py")]
  num_bytes = sum(len(x.encode()) for x in text)
  num_tokens = sum(map(len, vocabulary.encode_batch(text)))
  assert results["measured_bytes"] == num_bytes
  # Chunks are cut at line ends, which some pieces span.
  assert results["measured_tokens"] == pytest.approx(num_tokens, rel=0.01)
  assert results["tokens_per_byte"] * results["bytes_per_token"] == (
    pytest.approx(1)
  )
  assert 0 <= results["byte_share"] < 0.2


def test_a_vocabulary_that_is_there_is_not_overwritten(here, capsys):
  (here / "words.model").write_text("precious")
  assert error_of(capsys, train("words")) == (
    "--output = 'words': words.model is there already, and checkpoints may "
    "depend on it; give another --output, or remove the file."
  )
  assert (here / "words.model").read_text() == "precious"
  assert os.listdir(here) == ["words.model"]


@pytest.mark.parametrize("prefix", ["runs", "runs/"])
def test_a_folder_as_output_is_an_error(here, capsys, prefix):
  (here / "runs").mkdir()
  assert error_of(capsys, train(prefix)) == (
    f"--output = '{prefix}': a folder; name a file in it, such as 'runs/words'."
  )


def test_a_file_in_place_of_the_folder_is_an_error_before_any_work(
  here, capsys
):
  (here / "runs").touch()
  line = error_of(capsys, train("runs/a/words", size=9**9))
  assert line == (
    f"--output = 'runs/a/words': {here}/runs is no folder that may be written; "
    "give another --output."
  )


def test_more_pieces_than_the_text_supports_says_how_many_work(here, capsys):
  line = error_of(capsys, train("words", size=100_000))
  assert line.startswith("--size = 100000: too high, the training text ")
  assert os.listdir(here) == []
  supported = int(line.partition("set --size = ")[2].partition(" ")[0])
  assert train("words", size=supported) == 0


@pytest.mark.parametrize(
  ("size", "line"),
  [
    (0, "--size = 0: give a whole number of at least 270."),
    (269, "--size = 269: give a whole number of at least 270."),
  ],
)
def test_too_few_pieces_for_any_text_is_an_error(capsys, size, line):
  assert error_of(capsys, train("words", size=size)) == line


def test_compressed_files_and_json_lines_are_read_like_plain_text(here):
  texts = [
    path.read_text(encoding="utf-8") for path in STDLIB.glob("email/*.py")
  ]
  texts = [text for text in texts if text]
  for i, text in enumerate(texts):
    (here / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    with gzip.open(here / f"{i:02d}.txt.gz", "wt", encoding="utf-8") as file:
      file.write(text)
  lines = [json.dumps({"body": text}) + "\n" for text in texts]
  (here / "all.jsonl.bz2").write_bytes(bz2.compress("".join(lines).encode()))
  rest = ["--size=600", "--text_field=body"]
  for name, glob in (("a", "*.txt"), ("b", "*.gz"), ("c", "*.bz2")):
    assert main(["vocab", f"--input={glob}", f"--output={name}", *rest]) == 0
  models = {(here / f"{name}.model").read_bytes() for name in "abc"}
  assert len(models) == 1


@pytest.mark.parametrize(
  ("name", "text", "line"),
  [
    (
      "a.txt",
      "",
      "--input = ['a.txt']: all 1 files are empty, such as {here}/a.txt; give "
      "files with text.",
    ),
    (
      "a.jsonl",
      '{"text": "x"}\n{"txt": "x"}\n',
      "--input: {here}/a.jsonl, line 2: ",
    ),
  ],
)
def test_what_cannot_be_read_is_one_line_that_names_the_flag(
  here, capsys, name, text, line
):
  (here / name).write_text(text)
  code = main(["vocab", f"--input={name}", "--size=300", "--output=x"])
  assert error_of(capsys, code).startswith(line.format(here=here))
  assert os.listdir(here) == [name]


def test_inspect_shows_pieces_fit_and_losses(words, capsys):
  flags = ["--vocabulary", words, "--input", JSON, EMAIL, "--json"]
  assert main(["vocab", "inspect", *flags]) == 0
  results = json.loads(capsys.readouterr().out)
  kinds = ("control", "byte", "digit", "other")
  numbers = [results[f"{kind}_pieces"] for kind in kinds]
  assert numbers[:3] == [3, 256, 10]
  assert sum(numbers) + results["white_space_runs"] == results["pieces"] == 500
  assert results["digits_stand_alone"] is True
  assert (results["lossless"], results["losses"]) == (True, [])
  num_files = sum(
    path.stat().st_size > 0
    for name in ("json", "email")
    for path in STDLIB.glob(f"{name}/*.py")
  )
  assert (results["documents"], results["documents_changed"]) == (num_files, 0)
  assert 1 < results["bytes_per_token"] < 5
  assert 0 < results["pieces_used"] <= 500


def test_inspect_prints_a_line_for_each_result(words, capsys):
  flags = ["--vocabulary", words, "--input", JSON]
  assert main(["vocab", "inspect", *flags]) == 0
  lines = capsys.readouterr().out.splitlines()
  shown = {line[:21].strip(): line[21:] for line in lines}
  assert shown["end of document"] == "[eod]"
  assert shown["byte pieces"] == "256"
  assert (shown["lossless"], shown["losses"]) == ("yes", "none")


def test_inspect_says_what_a_foreign_model_loses(here, capsys):
  model = io.BytesIO()
  text = (STDLIB / "argparse.py").read_text(encoding="utf-8")
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter([*text.splitlines(), *map(str, range(3000))]),
    model_writer=model,
    vocab_size=600,
    model_type="bpe",
    byte_fallback=True,
    minloglevel=2,
  )
  (here / "foreign.model").write_bytes(model.getvalue())
  flags = ["--vocabulary=foreign.model", "--input", JSON]
  assert main(["vocab", "inspect", *flags]) == 0
  lines = capsys.readouterr().out.splitlines()
  shown = {line[:21].strip(): line[21:] for line in lines}
  assert shown["lossless"] == shown["digits stand alone"] == "no"
  assert "'tabs', 'line ends'" in shown["losses"]
  assert shown["documents changed"] == shown["documents"]
  assert " becomes " in shown["first change"]
  assert shown["end of document"] == "</s>"


@pytest.mark.parametrize(
  ("flags", "line"),
  [
    (
      ["--vocabulary=word.model", "--input=words.txt"],
      "--vocabulary = 'word.model': no such file (did you mean \"words.model\""
      "?); give a SentencePiece model, or train one (palm_mtf vocab).",
    ),
    (
      ["--vocabulary=words.txt", "--input=words.txt"],
      "--vocabulary = 'words.txt': not a SentencePiece model; give another, or "
      "train one (palm_mtf vocab).",
    ),
  ],
)
def test_a_model_that_cannot_be_used_is_one_line(
  here, words, capsys, flags, line
):
  (here / "words.model").write_bytes(pathlib.Path(words).read_bytes())
  (here / "words.txt").write_text("some words")
  assert error_of(capsys, main(["vocab", "inspect", *flags])) == line
