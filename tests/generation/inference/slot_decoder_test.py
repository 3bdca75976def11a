# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts that begin and end at different times equal the oracle's."""

import contextlib
import dataclasses

import numpy as np
import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import (
  PromptPart,
  SlotDecoder,
  SlotText,
)
from tests import oracle
from tests.cases import slow
from tests.decode_testing import decode, save_checkpoint
from tests.mtf_testing import SINGLE, mesh_layout, small_config

CONFIG = small_config(sequence_length=20)
PARAMS = oracle.random_parameters(CONFIG, seed=1)
PROMPTS = [[5, 9, 13], [7], [40, 2, 2, 8, 21, 3], [11, 30], [1]]
MAX_TOKENS = 8
GREEDY = DecodeConfig(temperature=0.0)
# Slot, first step and number of tokens for each prompt; some wait for a slot.
TIMES = [(0, 0, 8), (5, 0, 3), (1, 2, 5), (5, 4, 8), (2, 7, 4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return save_checkpoint(CONFIG, PARAMS, tmp_path_factory.mktemp("checkpoint"))


@contextlib.contextmanager
def opened(checkpoint, mesh=SINGLE):
  with LoadedDecoder(checkpoint, CONFIG, mesh) as loaded:
    yield SlotDecoder(loaded, CONFIG.vocab_size, 6, prompt_lookup=True)


@pytest.fixture(scope="module")
def decoder(checkpoint):
  """Slots that all tests use, whatever the tests before wrote there."""
  with opened(checkpoint) as decoder:
    yield decoder


def run(decoder, settings, times=TIMES):
  """Returns the tokens that each prompt's slot chose at its `times`."""
  found = [[] for _ in times]
  for step in range(max(first + count for _, first, count in times)):
    texts, places = {}, {}
    for i, (slot, first, count) in enumerate(times):
      prompt, chosen = [0, *PROMPTS[i]], found[i]
      if step == first:
        decoder.insert(slot, prompt)
      if first <= step < first + count:
        places[slot] = i
        texts[slot] = text_of(i, chosen, settings[i])
    steps = decoder.steps(texts, 1, wants_log_probs=True)
    for slot, chosen in steps.items():
      found[places[slot]] += chosen
  return found


def text_of(i, chosen, config, limit=1):
  """Returns the SlotText of a prompt with the tokens chosen so far."""
  prompt = [0, *PROMPTS[i]]
  return SlotText(
    [*prompt, *(x.token for x in chosen)][-1],
    len(prompt) + len(chosen) - 1,
    len(chosen),
    np.array([i, 0], np.int32),
    config.temperature,
    config.top_k,
    config.top_p,
    limit,
  )


def check_greedy_texts(decoder):
  found = run(decoder, [GREEDY] * len(PROMPTS))
  for prompt, chosen, (_, _, count) in zip(PROMPTS, found, TIMES, strict=True):
    assert len(chosen) == count
    tokens = [0, *prompt]
    for each in chosen:
      logits = oracle.forward(CONFIG, PARAMS, np.array([tokens]))[0, -1]
      log_p = logits - np.log(np.exp(logits).sum())
      assert each.token == logits.argmax()
      np.testing.assert_allclose(each.log_prob, log_p.max(), atol=1e-4)
      best = np.argsort(-log_p)[:5].tolist()
      assert list(each.likeliest) == best
      np.testing.assert_allclose(
        list(each.likeliest.values()), log_p[best], atol=1e-4
      )
      tokens.append(each.token)


def test_greedy_texts_and_their_log_p_equal_the_oracles(decoder):
  check_greedy_texts(decoder)


@pytest.mark.slow
def test_layouts_do_not_change_greedy_texts(checkpoint):
  with opened(checkpoint, mesh_layout("all over data and model")) as decoder:
    check_greedy_texts(decoder)


DRAWN = DecodeConfig(temperature=1.5)
SETTINGS = [
  DRAWN,
  GREEDY,
  dataclasses.replace(DRAWN, top_k=5),
  dataclasses.replace(DRAWN, top_p=0.6),
  dataclasses.replace(DRAWN, temperature=0.7, top_k=30, top_p=0.9),
]


@pytest.mark.slow
def test_each_text_is_drawn_with_its_own_settings_as_the_generator_draws(
  decoder,
):
  found = run(decoder, SETTINGS)
  for i, (prompt, config) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
    alone = decode(
      CONFIG, PARAMS, [prompt], config, max_tokens=MAX_TOKENS, keys=[i]
    )
    expected = alone.tokens[0, 0].tolist()
    tokens = [x.token for x in found[i]]
    # The generator fills up with [eod], which slots do not know.
    until = expected.index(11) + 1 if 11 in expected else len(expected)
    assert tokens[:until] == expected[: len(tokens)][:until]


@pytest.mark.parametrize("settings", [SETTINGS, slow([GREEDY] * 5)])
def test_one_call_with_many_steps_chooses_the_same_as_many_calls(
  decoder, settings
):
  """Also in another slot, next to other texts."""
  one_by_one = run(decoder, settings)
  found, counts = [[] for _ in PROMPTS], set()
  for i, prompt in enumerate(PROMPTS):
    decoder.insert(i, [0, *prompt])
  while len(found[0]) < MAX_TOKENS:
    count = min(3, MAX_TOKENS - len(found[0]))
    texts = {i: text_of(i, x, settings[i], count) for i, x in enumerate(found)}
    steps = decoder.steps(texts, count, wants_log_probs=False)
    for i, chosen in steps.items():
      found[i] += chosen
      counts.add(len(chosen))
  assert counts == {3, 2}
  for ours, theirs in zip(found, one_by_one, strict=True):
    expected = [x.token for x in theirs]
    assert [x.token for x in ours][: len(expected)] == expected


@pytest.mark.parametrize("settings", [SETTINGS[:2], SETTINGS[:4]])
def test_texts_of_a_prepared_decoder_wait_for_no_program(
  settings, checkpoint, decoder
):
  """And are the same as without preparation."""
  times = [(i, 0, MAX_TOKENS) for i, _ in enumerate(settings)]
  expected = run(decoder, settings, times)
  with LoadedDecoder(checkpoint, CONFIG, SINGLE) as loaded:
    prepared = SlotDecoder(loaded, CONFIG.vocab_size, 6)
    prepared.prepare()
    loaded.build = lambda *_: pytest.fail("built a program")
    prepared.read_prompts([PromptPart(5, [9] * 17, 0)])
    for count in range(1, len(settings) + 1):
      for i, prompt in enumerate(PROMPTS[:count]):
        prepared.insert(i, [0, *prompt])
      texts = {
        i: text_of(i, [], x, MAX_TOKENS) for i, x in enumerate(settings[:count])
      }
      found = prepared.steps(texts, MAX_TOKENS, wants_log_probs=False)
      for i, chosen in found.items():
        assert [x.token for x in chosen] == [x.token for x in expected[i]]


def read_whole(decoder, slot, ids, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(decoder, "part_tokens", 0)
    decoder.insert(slot, ids)


def test_parts_of_prompts_give_the_bits_of_whole_prompts(decoder, monkeypatch):
  """Next to parts of other prompts, and after other texts in the slots."""
  ids = [[0, *x] for x in PROMPTS]
  found = []
  for is_whole in (True, False):
    for i in range(5) if is_whole else ():
      read_whole(decoder, i, ids[i], monkeypatch)
    for parts in [] if is_whole else PARTS:
      decoder.read_prompts([PromptPart(i, ids[i][a:b], a) for i, a, b in parts])
    texts = {i: text_of(i, [], SETTINGS[i]) for i in range(5)}
    found.append(decoder.steps(texts, 1, wants_log_probs=True))
  assert found[0] == found[1]


# Slot, first position and end of each part of a call.
PARTS = [
  [(2, 0, 2), (0, 0, 3), (4, 0, 1)],
  [(2, 2, 3), (1, 0, 1)],
  [(3, 0, 2), (2, 3, 6)],
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"attention": "multi_head", "block": "serial"},
    {"attention": "grouped_query", "num_kv_heads": 2},
  ],
)
def test_parts_of_long_prompts_give_the_bits_of_whole_prompts(
  changes, dtype, tmp_path, monkeypatch
):
  is_int8 = dtype == "int8"
  activation = "bfloat16" if is_int8 else dtype
  config = small_config(
    sequence_length=330, activation_dtype=activation, **changes
  )
  params = oracle.random_parameters(config, seed=1)
  saved = save_checkpoint(config, params, tmp_path)
  ids = [*np.random.default_rng(0).integers(3, 44, 300).tolist()]
  found = []
  with LoadedDecoder(
    saved, config, SINGLE, "int8" if is_int8 else "activation"
  ) as loaded:
    decoder = SlotDecoder(loaded, config.vocab_size, 2, prompt_lookup=True)
    for slot in range(2):
      decoder.insert(slot, [9] * 320)
    read_whole(decoder, 0, ids, monkeypatch)
    for a, b in [(0, 100), (100, 107), (107, 200), (200, 299)]:
      decoder.read_prompts([PromptPart(1, ids[a:b], a)])
    for slot in range(2):
      text = text_of(0, [], DRAWN)._replace(token=ids[-1], position=299)
      texts = {slot: text}
      found.append(decoder.steps(texts, 1, wants_log_probs=True)[slot])
  assert found[0] == found[1]


@pytest.mark.parametrize("attention", ["multi_query", "multi_head"])
def test_a_text_is_the_same_after_a_longer_text_in_its_slot(
  attention, tmp_path
):
  config = small_config(sequence_length=150, attention=attention)
  params = oracle.random_parameters(config, seed=1)
  saved = save_checkpoint(config, params, tmp_path)
  found = []
  with LoadedDecoder(saved, config, SINGLE) as loaded:
    decoder = SlotDecoder(loaded, config.vocab_size, 2)
    decoder.insert(0, [0, *[7, 9] * 70])
    for slot in (0, 1):  # nothing was in slot 1
      decoder.insert(slot, [0, *PROMPTS[2]])
      chosen = []
      for _ in range(70):
        text = text_of(2, chosen, GREEDY)
        chosen += decoder.steps({slot: text}, 1, wants_log_probs=True)[slot]
      found.append(chosen)
  assert found[0] == found[1]
  ids = [0, *PROMPTS[2], *(x.token for x in found[0])]
  logits = oracle.forward(config, params, np.array([ids[:-1]]))[0]
  assert logits[len(PROMPTS[2]) :].argmax(-1).tolist() == ids[-70:]


def test_a_call_ends_each_text_at_its_limit_and_leaves_others_out(decoder):
  limits = [7, 2, 0, 4, 7]
  settings = [DRAWN, GREEDY, DRAWN, DRAWN, GREEDY]
  expected = run(decoder, settings, times=[(i, 0, 8) for i in range(5)])
  for i, prompt in enumerate(PROMPTS):
    decoder.insert(i, [0, *prompt])
  texts = {i: text_of(i, [], settings[i], x) for i, x in enumerate(limits)}
  found = decoder.steps(texts, 7, wants_log_probs=False)
  # A text that was left out continues as if there had been no call.
  assert found.pop(2) == []
  texts = {2: text_of(2, [], settings[2], 7)}
  found |= decoder.steps(texts, 7, wants_log_probs=False)
  for i, limit in enumerate([7, 2, 7, 4, 7]):
    tokens = [x.token for x in expected[i]][:limit]
    assert [x.token for x in found[i]] == tokens


def test_a_text_is_unchanged_by_a_call_whose_tokens_are_dropped(decoder):
  settings = [DRAWN] * len(PROMPTS)
  expected = run(decoder, settings, times=[(0, 0, 8), (1, 0, 8)])
  found = [[], []]
  for i in range(2):
    decoder.insert(i, [0, *PROMPTS[i]])
  while len(found[0]) < MAX_TOKENS:
    texts = {i: text_of(i, x, settings[i]) for i, x in enumerate(found)}
    steps = decoder.steps(texts, 1, wants_log_probs=True)
    found[0] += steps[0]
    # Drop the first text's tokens of this call.
    texts = {
      i: text_of(i, x, settings[i], 5 * (len(x) < MAX_TOKENS))
      for i, x in enumerate(found)
    }
    steps = decoder.steps(texts, 5, wants_log_probs=False)
    found[1] += steps[1]
  assert found[0] == expected[0]
  tokens = [x.token for x in found[1]][:MAX_TOKENS]
  assert tokens == [x.token for x in expected[1]]


def make_masks(vocab):
  """Returns which tokens may be chosen at each step, [steps, vocab] bool."""
  allowed = np.random.default_rng(2).random([MAX_TOKENS, vocab]) < 0.2
  allowed[:, 3] = True  # never none
  allowed[4] = np.arange(vocab) == vocab - 1  # only the last
  return allowed


def run_masked(decoder, settings, masked, slots):
  """Returns tokens of prompts in `slots`; those in `masked` have masks."""
  allowed = make_masks(CONFIG.vocab_size)
  bits = np.packbits(allowed, axis=1, bitorder="little")
  padding = -bits.shape[1] % 4
  words = np.pad(bits, [[0, 0], [0, padding]]).view(np.int32)
  for i, slot in slots.items():
    decoder.insert(slot, [0, *PROMPTS[i]])
  found = {i: [] for i in slots}
  for step in range(MAX_TOKENS):
    texts = {}
    for i, slot in slots.items():
      text = text_of(i, found[i], settings[i])
      is_masked = i in masked
      texts[slot] = text._replace(masks=[words[step]] if is_masked else ())
    steps = decoder.steps(texts, 5, wants_log_probs=step % 2 == 0)
    for i, slot in slots.items():
      assert len(steps[slot]) == 1
      found[i] += steps[slot]
  return {i: [x.token for x in each] for i, each in found.items()}


@pytest.mark.parametrize("settings", [SETTINGS, slow([GREEDY] * 5)])
def test_masks_forbid_tokens_of_their_text_and_change_no_other_text(
  decoder, settings
):
  slots, masked = {i: i for i in range(5)}, {1, 2, 4}
  found = run_masked(decoder, settings, masked, slots)
  allowed = make_masks(CONFIG.vocab_size)
  for i in masked:
    assert allowed[range(MAX_TOKENS), found[i]].all()
    alone = run_masked(decoder, settings, masked, {i: 0})
    assert alone[i] == found[i]
  times = [(i, 0, MAX_TOKENS) for i in range(5)]
  plain = run(decoder, settings, times)
  for i in (0, 3):
    assert [x.token for x in plain[i]] == found[i]


def test_the_likeliest_allowed_token_is_the_oracles(decoder):
  found = run_masked(decoder, [GREEDY] * 5, {0, 1}, {0: 0, 1: 3})
  for i, tokens in found.items():
    text = [0, *PROMPTS[i]]
    for allowed, token in zip(
      make_masks(CONFIG.vocab_size), tokens, strict=True
    ):
      logits = oracle.forward(CONFIG, PARAMS, np.array([text]))[0, -1]
      assert token == np.where(allowed, logits, -np.inf).argmax()
      text.append(token)


@pytest.mark.slow
def test_masks_are_those_of_one_device_in_each_layout(checkpoint, decoder):
  expected = run_masked(decoder, [GREEDY] * 5, {0, 1}, {0: 0, 1: 3, 2: 5})
  with opened(checkpoint, mesh_layout("all over data and model")) as other:
    masked = run_masked(other, [GREEDY] * 5, {0, 1}, {0: 0, 1: 3, 2: 5})
  assert masked == expected


def test_a_call_with_log_p_has_that_of_one_token_where_text_repeats_itself(
  tmp_path,
):
  """Prompt lookup chooses further tokens only in calls without log p."""
  # With a large embedding, the likeliest token is the last one again.
  params = {**PARAMS, "embedding": 30 * PARAMS["embedding"]}
  checkpoint = save_checkpoint(CONFIG, params, tmp_path)
  tokens = [0, *[5] * 5]
  with opened(checkpoint) as decoder:
    decoder.insert(0, tokens)
    for place in range(MAX_TOKENS):
      state = SlotText(
        *(tokens[-1], len(tokens) - 1, place, np.zeros(2, np.int32)),
        *(0.0, None, 1.0, MAX_TOKENS - place),
      )
      ((found,),) = decoder.steps({0: state}, 1, wants_log_probs=True).values()
      logits = oracle.forward(CONFIG, params, np.array([tokens]))[0, -1]
      log_p = logits - logits.max()
      log_p -= np.log(np.exp(log_p).sum())
      assert found.token == logits.argmax() == 5
      best = np.argsort(-log_p)[:5]
      np.testing.assert_allclose(
        [found.likeliest[i] for i in best], log_p[best], atol=2e-3
      )
      tokens.append(found.token)
