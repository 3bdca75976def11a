# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import collections
import json

import numpy as np
import pytest
import seqio

from palm_mtf.cli.main import main
from palm_mtf.tasks import memorisation
from palm_mtf.tasks.memorisation import SPAN_TOKENS, find_spans
from tests import runs
from tests.data.small_sources import EOD, ListSource, store_of, token_array
from tests.seqio_testing import bind, examples_of


def documents() -> list[list[int]]:
  """Returns random documents; some parts occur 2, 20 and 600 times."""
  random = np.random.default_rng(0)
  repeated = {
    times: random.integers(2, 500, 130).tolist() for times in (2, 20, 600)
  }
  made = [random.integers(2, 500, n).tolist() for n in (5, 99, 100, 101, 900)]
  for times, part in repeated.items():
    for _ in range(times):
      made.append([*random.integers(2, 500, 7).tolist(), *part])
  return [made[i] for i in random.permutation(len(made))]


def counted(texts) -> collections.Counter:
  """Returns how often each span occurs in the documents."""
  return collections.Counter(
    tuple(text[i : i + SPAN_TOKENS])
    for text in texts
    for i in range(len(text) - SPAN_TOKENS + 1)
  )


def arrays(texts):
  return [
    token_array(
      [([], text) for text in part[:half]],
      [([], text) for text in part[half:]],
      has_inputs=False,
    )
    for part in (texts[:300], texts[300:])
    for half in (100,)
  ]


@pytest.mark.parametrize("block_tokens", [1 << 20, 1000])
def test_occurrences_are_those_of_counting_every_span(
  block_tokens, monkeypatch
):
  monkeypatch.setattr(memorisation, "_BLOCK_TOKENS", block_tokens)
  texts = documents()
  expected = counted(texts)
  found = find_spans(arrays(texts), EOD, 10**9)
  assert {tuple(s.tokens.tolist()): s.count for s in found} == expected
  assert {2, 20, 600} <= set(expected.values())


def test_each_class_has_at_most_so_many_spans_whatever_their_order():
  texts = documents()
  found = find_spans(arrays(texts), EOD, 10)
  names = collections.Counter(
    memorisation.class_name(span.count) for span in found
  )
  assert names == {"1": 10, "2_to_10": 10, "11_to_100": 10, "over_500": 10}
  again = find_spans(arrays(texts[::-1]), EOD, 10)
  assert [s.tokens.tolist() for s in again] == [
    s.tokens.tolist() for s in found
  ]


def test_the_chosen_stand_for_all_places_of_their_class():
  texts = documents()
  expected = collections.Counter()
  for count in counted(texts).values():
    expected[memorisation.class_name(count)] += count
  places = collections.Counter()
  for span in find_spans(arrays(texts), EOD, 10):
    places[memorisation.class_name(span.count)] += span.places
  assert set(places) == set(expected)
  # All spans of these classes occur equally often.
  for name in ("1", "over_500"):
    assert places[name] == pytest.approx(expected[name])
  found = find_spans(arrays(texts), EOD, 10**9)
  assert all(span.places == span.count for span in found)


def test_only_so_many_candidates_are_kept(monkeypatch):
  monkeypatch.setattr(memorisation, "_CANDIDATES", 50)
  monkeypatch.setattr(memorisation, "_BLOCK_TOKENS", 1000)
  texts = documents()
  expected = counted(texts)
  found = find_spans(arrays(texts), EOD, 10**9)
  assert len(found) == 50
  for span in found:
    assert expected[tuple(span.tokens.tolist())] == span.count


def test_documents_without_a_whole_span_have_none():
  assert find_spans(arrays([[2] * 60, [3] * 99]), EOD, 5) == []


def test_classes_have_names():
  counts = [1, 2, 10, 11, 100, 101, 500, 501]
  assert [memorisation.class_name(count) for count in counts] == [
    *("1", "2_to_10", "2_to_10", "11_to_100", "11_to_100"),
    *("101_to_500", "101_to_500", "over_500"),
  ]


def test_rates_are_those_of_exact_continuations_of_all_places_and_by_class():
  targets = [("1", "ab", 4.0), ("1", "cd", 1.0), ("over_500", "ef", 600.0)]
  assert memorisation.memorised(targets, ["ab", "cx", "ef and more"]) == {
    "memorised": pytest.approx(100 * 604 / 605),
    "memorised_seen_1": 50,
    "memorised_seen_over_500": 100,
  }


def bind_tokens(vocabulary, tokens) -> None:
  bind(
    memorisation__spans__vocabulary=vocabulary.path,
    memorisation__spans__tokens=str(tokens),
    memorisation__spans__num_spans=5,
  )


def test_the_task_asks_for_spans_of_a_runs_training_tokens(
  code, vocabulary, tmp_path
):
  source = ListSource([*code[2:], code[3]], code[:2])
  store_of(source, vocabulary, tmp_path / "tokens" / "store")
  bind_tokens(vocabulary, tmp_path / "tokens" / "*")
  made = examples_of("memorisation")
  task = seqio.TaskRegistry.get("memorisation")
  names = collections.Counter()
  for example in made:
    ids = [*example["inputs"].tolist(), *example["targets"].tolist()]
    assert len(ids) == SPAN_TOKENS
    text = vocabulary.decode(ids)
    assert sum(text in each for each in [*code[2:], code[3]]) >= 1
    target = vocabulary.decode(ids[50:])
    name, expected, places = task.postprocess_fn(
      target, example=example, is_target=True
    )
    assert expected == target
    assert places >= 1
    names[name] += 1
  assert names["1"] == names["2_to_10"] == 5


def test_a_folder_without_tokens_is_named(vocabulary, tmp_path):
  bind_tokens(vocabulary, tmp_path / "none")
  with pytest.raises(Exception, match=r"spans\.tokens = '.*none': no tokens"):
    examples_of("memorisation")


def test_without_a_run_the_setting_is_named():
  task = seqio.TaskRegistry.get("memorisation")
  vocabulary = task.output_features["inputs"].vocabulary
  with pytest.raises(Exception, match=r"spans\.model_dir is not set: give"):
    vocabulary.encode("a")


# Words follow each other in a circle, which a small model soon memorises.
TRAIN = {
  "SEQUENCE_LENGTH": 128,
  "GLOBAL_BATCH_SIZE": 8,
  "VOCAB_SIZE": 300,
  "TRAIN_STEPS": 150,
  "CHECKPOINT_STEPS": 2,
  "KEEP_CHECKPOINTS": 100,
  "EVAL_STEPS": 1000,
  "PROMPTS": [],
}


@pytest.mark.slow
def test_a_run_learns_to_recite_its_text_and_evaluate_says_how_much(
  tmp_path, capsys
):
  corpus = runs.write_corpus(tmp_path / "corpus")
  model_dir = tmp_path / "run"
  assert runs.run("train", corpus, model_dir, **TRAIN) == 0
  capsys.readouterr()
  code = main(
    [
      *("evaluate", "--model_dir", str(model_dir), "--json"),
      "--gin_file=eval/memorisation.gin",
      "--gin.EVAL_CHECKPOINTS=[2, 150]",
      "--gin.memorisation.spans.num_spans=5",
    ]
  )
  out, err = capsys.readouterr()
  assert code == 0, err
  first, last = (json.loads(x)["metrics"] for x in out.splitlines())
  assert first.keys() == last.keys()
  assert first["memorised"] == 0
  assert last["memorised"] > 50
  path = model_dir / "eval" / "step_00000150" / "memorisation-validation.jsonl"
  records = [json.loads(line) for line in path.read_text().splitlines()]
  hits = places = 0.0
  for record in records:
    _, text, weight = record["expected"]
    hits += weight * record["prediction"].startswith(text)
    places += weight
  assert last["memorised"] == pytest.approx(100 * hits / places)
