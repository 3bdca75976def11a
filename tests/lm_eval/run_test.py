# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run answers the harness as `palm_mtf score` and `generate` do."""

import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.lm_eval.run import Run, read_generation, split_pair
from tests import runs

PAIRS = [
  ("1: four five", " six"),
  ("1: four five", " nine nine"),
  ("one two", " three four five"),
]
LONG = "seven eight " * 40
GREEDY = {"until": ["\n"], "max_gen_toks": 8}


@pytest.fixture(scope="module")
def run(finished):
  return Run(str(finished), {}, False)


def _printed(command, finished, *flags) -> list[dict]:
  return runs.printed(command, "--model_dir", finished, "--json", *flags)


def _scores(run, pairs):
  found = dict(run.scores(pairs))
  return [found[i] for i in range(len(pairs))]


def test_continuations_have_the_likelihoods_of_targets(run, finished, tmp_path):
  file = tmp_path / "pairs.tsv"
  file.write_text("".join("\t".join(pair) + "\n" for pair in PAIRS))
  lines = _printed("score", finished, "--input", str(file))
  expected = [line["log_likelihood"] for line in lines[: len(PAIRS)]]
  assert [x.log_likelihood for x in _scores(run, PAIRS)] == expected


def test_a_document_of_any_length_has_the_likelihood_of_a_text(run, finished):
  flags = ["--text", "one two three", "--text", LONG]
  lines = _printed("score", finished, *flags)
  found = _scores(run, [("", "one two three"), ("", LONG)])
  expected = [line["log_likelihood"] for line in lines[:2]]
  assert [x.log_likelihood for x in found] == expected


def test_the_run_has_its_own_dtype_and_says_so(finished, caplog):
  run = Run(str(finished), {}, False)
  assert run.activation_dtype == runs.SETTINGS["ACTIVATION_DTYPE"]
  assert caplog.messages[0].startswith("computing in float32 (")


def test_what_is_empty_is_certain(run):
  assert (
    _scores(run, [("a", ""), *PAIRS[:1], ("", "")])[::2] == [(0.0, True)] * 2
  )


def test_the_greedy_text_is_that_of_generate_and_is_called_greedy(
  run, finished
):
  prompts = ["one two", "5: three", "one two"]
  found = dict(run.continuations([(x, GREEDY) for x in prompts]))
  flags = ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=8"]
  flags += ["--prompt", prompts[0], "--prompt", prompts[1]]
  lines = _printed("generate", finished, *flags)
  expected = [line["continuation"] for line in lines]
  assert [found[i] for i in range(3)] == [*expected, expected[0]]
  (greedy,) = _scores(run, [(prompts[0], expected[0])])
  assert greedy.is_greedy
  (other,) = _scores(run, [(prompts[0], f"{expected[0]}x")])
  assert not other.is_greedy


def test_a_text_ends_before_the_first_stop_string(run):
  whole = dict(run.continuations([("one two", GREEDY)]))[0]
  stop = whole[3:5]
  asked = {"until": ["never", stop], "max_gen_toks": 8}
  cut = dict(run.continuations([("one two", asked)]))[0]
  assert cut == whole[: whole.index(stop)]


def test_one_prompt_asked_for_twice_has_two_samples(run):
  asked = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 8}
  first, second = dict(run.continuations([("one", asked)] * 2)).values()
  assert first != second


def test_a_prompt_that_is_too_long_keeps_its_end(run, finished):
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
  room = runs.SETTINGS["SEQUENCE_LENGTH"] - GREEDY["max_gen_toks"]
  end = vocabulary.decode(vocabulary.encode(LONG)[-room:])
  assert len(vocabulary.encode(end)) == room
  found = dict(run.continuations([(LONG, GREEDY), (end, GREEDY)]))
  assert found[0] == found[1]


def test_more_tokens_than_fit_cause_a_warning(run, caplog):
  dict(run.continuations([("one", {"max_gen_toks": 99})]))
  assert "SEQUENCE_LENGTH = 32 or more; texts end after 16" in caplog.text


def test_an_unknown_macro_is_refused(finished):
  with pytest.raises(UserError, match="STRIDES"):
    Run(str(finished), {"STRIDES": 3}, False)


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(UserError, match=r"there is no config\.gin in it"):
    Run(str(tmp_path), {}, False)


LENGTH = 512


def _read_settings(**gen_kwargs):
  return read_generation(gen_kwargs, DecodeConfig(), LENGTH)


@pytest.mark.parametrize(
  "pair, expected",
  [
    (("Q: a", " b"), ("Q: a", " b")),
    (("Q: ", "b"), ("Q:", " b")),
    (("Q:\n ", "b"), ("Q:", "\n b")),
    (("", "b"), ("", "b")),
  ],
)
def test_spaces_that_end_a_context_belong_to_the_continuation(pair, expected):
  assert split_pair(*pair) == expected


def test_a_task_that_says_nothing_has_256_greedy_tokens():
  asked = _read_settings()
  assert (asked.max_tokens, asked.decode.is_greedy) == (256, True)
  assert asked.decode.stop_strings == ()


@pytest.mark.parametrize(
  "gen_kwargs",
  [
    *({"max_gen_toks": x} for x in (0, -1, "7", 1.5, [3])),
    *({"do_sample": True, "temperature": x} for x in ("x", -1)),
    {"until": 5},
    {"until": [5]},
  ],
)
def test_values_that_mean_nothing_are_refused(gen_kwargs):
  with pytest.raises(UserError, match="give"):
    _read_settings(**gen_kwargs)


@pytest.mark.parametrize("until, stops", [("x", ("x",)), (["", "a"], ("a",))])
def test_until_is_a_string_or_several(until, stops):
  assert _read_settings(until=until).decode.stop_strings == stops


@pytest.mark.parametrize(
  "gen_kwargs, temperature",
  [
    ({"do_sample": False, "temperature": 0.8}, 0.0),
    ({"temperature": 0.8}, 0.8),
    ({"do_sample": True}, 1.0),
    ({"temperature": 0.0, "num_beams": 1}, 0.0),
  ],
)
def test_a_temperature_counts_where_tokens_are_drawn(gen_kwargs, temperature):
  assert _read_settings(**gen_kwargs).decode.temperature == temperature


def test_the_number_of_tokens_has_four_names_of_which_the_first_counts():
  assert _read_settings(max_new_tokens=5).max_tokens == 5
  assert _read_settings(max_completion_tokens=6, max_gen_toks=7).max_tokens == 7


def test_as_many_tokens_as_a_row_has_become_half_a_row():
  assert _read_settings(max_gen_toks=LENGTH - 1).max_tokens == LENGTH - 1
  asked = _read_settings(max_gen_toks=LENGTH)
  assert (asked.max_tokens, asked.asked_tokens) == (LENGTH // 2, LENGTH)


def test_a_keyword_that_would_be_forgotten_is_refused():
  with pytest.raises(UserError, match="have num_beams; palm_mtf knows"):
    _read_settings(num_beams=4)
