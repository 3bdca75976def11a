# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A continuation keeps the space of its first word in every command.

The vocabulary of this run puts a space before each text, as do the vocabularies
of T5, Llama and Mistral. SentencePiece drops this space when it decodes a text,
and also the space of a continuation that is decoded without its prompt.
"""

import json

import pytest

from palm_mtf.cli.main import main
from palm_mtf.lm_eval.run import Run
from tests import runs
from tests.prefixed_vocabulary import train_prefixed

PROMPT, CONTINUATION = "one two", " three four five"
GREEDY = ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=3"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  folder = tmp_path_factory.mktemp("prefix")
  return train_prefixed(" ".join(runs.WORDS), folder)


@pytest.fixture(scope="module")
def counting(corpus, vocabulary, tmp_path_factory):
  """A run that has learned to count."""
  model_dir = tmp_path_factory.mktemp("prefix") / "run"
  names = ["TRAIN_STEPS", "LOG_STEPS", "EVAL_STEPS", "CHECKPOINT_STEPS"]
  settings = {**dict.fromkeys(names, 40), "PROMPTS": [PROMPT]}
  settings |= {"VOCABULARY": vocabulary.path, "SAMPLE_TOKENS": 3}
  ids = vocabulary.encode(CONTINUATION)
  assert vocabulary.decode(ids[1:]) == CONTINUATION[1:]
  assert runs.run("train", corpus, model_dir, **settings) == 0
  return model_dir


@pytest.mark.slow
def test_generate_its_stream_and_beams_keep_the_space(counting, capsys):
  given = ["generate", "--model_dir", counting, *GREEDY, f"--prompt={PROMPT}"]
  first, _ = runs.printed(*given, "--json", "--prompt=7")
  assert (first["continuation"], first["num_tokens"]) == (CONTINUATION, 3)
  (beam,) = runs.printed(*given, "--json", "--gin.NUM_BEAMS=2")
  assert beam["continuation"] == CONTINUATION
  capsys.readouterr()
  assert main([str(x) for x in given]) == 0
  shown = f"--- {PROMPT!r}\n{PROMPT}{CONTINUATION}\n\n"
  assert capsys.readouterr().out == shown


def test_samples_of_training_equal_the_text_of_generate(counting):
  sample = json.loads((counting / "samples.jsonl").read_text())
  flags = ["--json", f"--prompt={PROMPT}", "--gin.TEMPERATURE=0.7"]
  flags = "--model_dir", counting, "--gin.SAMPLE_TOKENS=3", *flags
  (drawn,) = runs.printed("generate", *flags)
  assert sample["continuation"] == drawn["continuation"]


def test_lm_eval_keeps_the_space_and_cuts_at_it(counting):
  run = Run(str(counting), {"ACTIVATION_DTYPE": "float32"}, False)
  asked = {"max_gen_toks": 3}
  prompts = [(PROMPT, asked), (PROMPT, {**asked, "until": [" four"]})]
  found = dict(run.continuations(prompts))
  assert found == {0: CONTINUATION, 1: " three"}
  pairs = [(PROMPT, CONTINUATION), (f"{PROMPT} ", CONTINUATION[1:])]
  first, second = dict(run.scores(pairs)).values()
  assert first == second and first.is_greedy


@pytest.mark.usefixtures("registries")
def test_targets_of_a_task_are_encoded_and_decoded_separately(counting, capsys):
  from tests.seqio_testing import TOKENIZE, add_examples

  def exact(targets, predictions):
    pairs = zip(targets, predictions, strict=True)
    return {"exact": sum(x == y for x, y in pairs)}

  add_examples(
    "counting_apart",
    {"validation": {"inputs": [PROMPT], "targets": [CONTINUATION[1:]]}},
    [TOKENIZE],
    features=("inputs", "targets"),
    metric_fns=[exact],
  )
  flags = ["--gin.EVAL_TASKS=['counting_apart']", "--json", *GREEDY]
  assert main(["evaluate", "--model_dir", str(counting), *flags]) == 0
  assert '"exact": 1.0' in capsys.readouterr().out
