# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The signatures of a SavedModel: generate, score and score_targets."""

import dataclasses

from palm_mtf._tf import tf2
from palm_mtf.config import DecodeConfig, ModelConfig
from palm_mtf.config.decode import MOST_GREEDY
from palm_mtf.data.vocabulary.sentencepiece_vocabulary import (
  SPACE_MARK,
  SentencePieceVocabulary,
)
from palm_mtf.export.saved_model.decoder import Decoder
from palm_mtf.export.trained_model import Reader
from palm_mtf.machine.process import silent_unless_it_fails


class TextModel(tf2.Module):
  """Continues and scores batches of texts.

  Token `start_id` stands before documents and, if `adds_start`, before prompts
  and inputs. Windows over a long text advance by `stride` tokens. A window that
  begins within the text begins with token `row_start`.
  """

  def __init__(
    self,
    model: ModelConfig,
    read: Reader,
    vocabulary: SentencePieceVocabulary,
    *,
    start_id: int,
    row_start: int,
    adds_start: bool,
    stride: int,
  ):
    super().__init__("text_model")
    self._decoder, self._coder = Decoder(model, read), TextCoder(vocabulary)
    self._length, self._stride = model.sequence_length, stride
    self._num_tokens, self._ends = vocabulary.size, list(vocabulary.end_ids)
    self._start_id, self._row_start = start_id, row_start
    self._adds_start = adds_start

  def make_signatures(
    self, decode: DecodeConfig, *, sample_tokens: int, seed: int
  ) -> dict[str, object]:
    """Returns {name: function}, and sets the functions as attributes.

    `decode`, `sample_tokens` and `seed` are the defaults of `generate`. Servers
    apply the defaults. In Python, `model.generate` of a loaded SavedModel
    applies the defaults, but `model.signatures["generate"]` does not.
    """

    def generate(prompts, max_tokens, temperature, top_k, top_p, seed):
      sampler = Sampler(temperature, top_k, top_p, seed, self._num_tokens)
      return self._generate(prompts, max_tokens, sampler)

    # Only defaults that are tensors become the signature's defaults.
    generate.__defaults__ = (
      tf2.constant(sample_tokens),
      tf2.constant(decode.temperature, tf2.float32),
      tf2.constant(min(decode.top_k or self._num_tokens, self._num_tokens)),
      tf2.constant(decode.top_p, tf2.float32),
      tf2.constant(seed),
    )

    def score(texts):
      return self._score(tf2.fill(tf2.shape(texts), ""), texts)

    texts = tf2.TensorSpec([None], tf2.string)
    whole, real = tf2.TensorSpec([], tf2.int32), tf2.TensorSpec([], tf2.float32)
    given = {
      "generate": (generate, [texts, whole, real, whole, real, whole]),
      "score": (score, [texts]),
      "score_targets": (self._score, [texts, texts]),
    }
    found = {
      name: tf2.function(function, input_signature=specs, autograph=False)
      for name, (function, specs) in given.items()
    }
    for name, function in found.items():
      setattr(self, name, function)
    return found

  def _generate(self, prompts, max_tokens, sampler):
    prompt_ids = self._coder.encode(prompts)
    ids = tf2.concat([self._make_starts(prompt_ids), prompt_ids], 1)
    lengths = tf2.cast(ids.row_lengths(), tf2.int32)
    longest = tf2.reduce_max(lengths)
    # As in `palm_mtf generate`, SEQUENCE_LENGTH does not count the start token.
    longest_prompt = tf2.cast(prompt_ids.bounding_shape(1), tf2.int32)
    check = tf2.debugging.assert_positive
    checks = [
      check(max_tokens, "max_tokens is not above 0"),
      check(sampler.top_k, "top_k is not above 0"),
      check(sampler.top_p, "top_p is not above 0"),
      tf2.debugging.assert_less_equal(
        longest_prompt + max_tokens,
        self._length,
        f"a prompt and max_tokens are more than {self._length} tokens",
      ),
    ]
    with tf2.control_dependencies(checks):
      cache = self._decoder.make_empty_cache(ids.nrows(), longest + max_tokens)
    y, cache = self._decoder.hidden(
      ids.to_tensor(), tf2.zeros_like(lengths), cache, lengths
    )
    y = tf2.gather(y, lengths - 1, batch_dims=1)
    tokens = self._sample_tokens(y, lengths, cache, max_tokens, sampler)
    is_text = tf2.cumsum(tf2.cast(self._is_end(tokens), tf2.int32), 1) == 0
    kept = tf2.ragged.boolean_mask(tokens, is_text)
    return {
      "continuation": self._coder.decode_after(prompt_ids, kept),
      "num_tokens": tf2.cast(kept.row_lengths(), tf2.int32),
    }

  def _make_starts(self, ids):
    # Returns the start tokens, [batch, (0 or 1)], of texts [batch, (tokens)].
    # An empty text always gets a start token, because the model needs an input.
    is_there = tf2.ones_like(ids.row_lengths(), tf2.bool)
    if not self._adds_start:
      is_there = ids.row_lengths() == 0
    starts = tf2.fill([ids.nrows(), 1], self._start_id)
    return tf2.ragged.boolean_mask(starts, is_there[:, tf2.newaxis])

  def _is_end(self, tokens):
    return tf2.reduce_any(tokens[..., tf2.newaxis] == self._ends, -1)

  def _sample_tokens(self, y, lengths, cache, max_tokens, sampler):
    # Returns sampled tokens, [batch, max_tokens], padded with [eod].
    tokens = tf2.fill([tf2.size(lengths), max_tokens], self._ends[0])

    def choose(y, place, tokens, is_over):
      token = sampler.next_tokens(self._decoder.logits(y), place)
      token = tf2.where(is_over, self._ends[0], token)
      at = tf2.range(max_tokens) == place
      tokens = tf2.where(at, token[:, tf2.newaxis], tokens)
      return token, tokens, is_over | self._is_end(token)

    def step(place, token, tokens, is_over, cache):
      start = lengths + place - 1
      y, cache = self._decoder.hidden(token[:, tf2.newaxis], start, cache)
      chosen = choose(y[:, 0], place, tokens, is_over)
      return place + 1, *chosen, cache

    first = choose(y, 0, tokens, tf2.zeros_like(lengths, tf2.bool))
    _, _, tokens, _, _ = tf2.while_loop(
      lambda place, token, tokens, is_over, cache: (
        (place < max_tokens) & ~tf2.reduce_all(is_over)
      ),
      step,
      (tf2.constant(1), *first, cache),
    )
    return tokens

  def _score(self, inputs, targets):
    # Compute log p in the same windows as generation/inference/scorer.py.
    given, wanted = self._coder.encode(inputs), self._coder.encode(targets)
    given = tf2.concat([self._make_starts(given), given], 1)
    starts, given = given[:, :1].to_tensor(), given[:, 1:]
    ids = tf2.concat([given, wanted], 1)
    scored = tf2.cast(given.row_lengths(), tf2.int32)
    ends = tf2.cast(ids.row_lengths(), tf2.int32)
    start = tf2.maximum(0, tf2.minimum(scored, ends - self._length))
    room = tf2.minimum(self._length, tf2.reduce_max(ends))
    ids = ids.to_tensor()

    def score_next_window(start, scored, stop, total):
      found = self._score_window(starts, ids, start, scored, stop, room)
      after = tf2.minimum(stop + self._stride, ends)
      start = tf2.where(after > stop, after - self._length, start)
      return start, stop, after, total + found

    stop = tf2.minimum(start + self._length, ends)
    total = tf2.zeros_like(start, tf2.float32)
    *_, total = tf2.while_loop(
      lambda start, scored, stop, total: tf2.reduce_any(scored < ends),
      score_next_window,
      (start, scored, stop, total),
    )
    return {
      "log_likelihood": total,
      "tokens": tf2.cast(wanted.row_lengths(), tf2.int32),
    }

  def _score_window(self, starts, ids, start, scored, stop, room):
    """Returns each text's sum of log p in one window, [batch].

    The window has tokens `start` to `start` + `room` - 1. The sum is of tokens
    `scored` to `stop` - 1; the tokens before them are only context.
    """
    places = start[:, tf2.newaxis] + tf2.range(room)
    last = tf2.shape(ids)[1] - 1
    targets = tf2.gather(ids, tf2.minimum(places, last), batch_dims=1)
    is_first = start[:, tf2.newaxis] == 0
    begin = tf2.where(is_first, starts, self._row_start)
    tokens = tf2.concat([begin, targets[:, :-1]], 1)
    cache = self._decoder.make_empty_cache(tf2.shape(ids)[0], room)
    num_given = 1 + scored - start
    y, _ = self._decoder.hidden(tokens, tf2.zeros_like(start), cache, num_given)
    loss = tf2.nn.sparse_softmax_cross_entropy_with_logits(
      targets, self._decoder.logits(y)
    )
    before, after = scored[:, tf2.newaxis], stop[:, tf2.newaxis]
    counts = (places >= before) & (places < after)
    return -tf2.reduce_sum(tf2.where(counts, loss, 0.0), 1)


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws each row's next token from its logits."""

  # [], float32; 1e-4 or less chooses the likeliest token.
  temperature: tf2.Tensor
  top_k: tf2.Tensor  # [], int32: keeps the k likeliest tokens
  # [], float32: keeps the fewest tokens with at least this total probability.
  top_p: tf2.Tensor
  seed: tf2.Tensor  # [], int32
  num_tokens: int  # size of the vocabulary

  def next_tokens(self, logits: tf2.Tensor, place: tf2.Tensor) -> tf2.Tensor:
    """Returns a sampled token for every row, [rows] int32.

    `logits` are [rows, vocab], float32; `place`, [], int32, is the number of
    tokens that each row has sampled before.
    """
    # The embedding may have more rows than the vocabulary; never sample these.
    logits = logits[:, : self.num_tokens]
    return tf2.cond(
      self.temperature <= MOST_GREEDY,
      lambda: tf2.argmax(logits, -1, output_type=tf2.int32),
      lambda: self._draw(logits, place),
    )

  def _draw(self, logits, place):
    logits, tokens = tf2.math.top_k(
      logits / self.temperature, tf2.minimum(self.top_k, self.num_tokens)
    )
    shares = tf2.nn.softmax(logits)
    before = tf2.cumsum(shares, axis=-1, exclusive=True)
    upto = tf2.cumsum(tf2.where(before < self.top_p, shares, 0.0), axis=-1)
    # Inverse transform sampling.
    number = tf2.random.stateless_uniform(
      [tf2.shape(logits)[0], 1], tf2.stack([self.seed, place])
    )
    at = tf2.searchsorted(upto, number * upto[:, -1:], side="right")
    return tf2.gather(tokens, at[:, 0], batch_dims=1)


class TextCoder(tf2.Module):
  """Encodes and decodes batches of texts, with the ids of a vocabulary.

  The operations are from tensorflow_text, and hold the SentencePiece model.
  """

  def __init__(self, vocabulary: SentencePieceVocabulary):
    super().__init__("text_coder")
    # Import late, because the import takes seconds.
    import tensorflow_text

    def make_tokenizer(model: bytes) -> tensorflow_text.SentencepieceTokenizer:
      return tensorflow_text.SentencepieceTokenizer(model, tf2.int32)

    with silent_unless_it_fails():
      self._model = self._inside = make_tokenizer(vocabulary.model)
      if vocabulary.inside_model:
        self._inside = make_tokenizer(vocabulary.inside_model)
    self._has_bytes = vocabulary.has_bytes
    self._anchor = vocabulary.anchor
    self._anchor_bytes = len(vocabulary.decode([vocabulary.anchor]).encode())
    ids = range(vocabulary.size)
    self._has_text = [bool(vocabulary.token_bytes(i)) for i in ids]
    self._num_spaces = [vocabulary.piece(i).startswith(SPACE_MARK) for i in ids]
    self._space_mark_ids = vocabulary.encode(SPACE_MARK)

  def encode(self, texts: tf2.Tensor) -> tf2.RaggedTensor:
    """Encodes texts [batch] to int32 ids [batch, (tokens)] without [eod]."""
    if not self._has_bytes:
      return self._model.tokenize(texts)
    # SentencePiece would encode a U+2581 in a text as a space. So split the
    # text at each U+2581, and put the three byte tokens of U+2581 before each
    # segment except the first.
    segments = tf2.strings.split(texts, SPACE_MARK)
    first = segments.row_starts()
    num_marks = tf2.tensor_scatter_nd_update(
      tf2.ones_like(segments.flat_values, tf2.int64),
      first[:, tf2.newaxis],
      tf2.zeros_like(first),
    )
    ids = self._encode_segments(segments.flat_values, num_marks == 0)
    marks = tf2.RaggedTensor.from_row_lengths(
      tf2.tile(
        self._space_mark_ids, [tf2.cast(tf2.reduce_sum(num_marks), tf2.int32)]
      ),
      num_marks * len(self._space_mark_ids),
    )
    ids = tf2.concat([marks, ids], 1)
    return segments.with_flat_values(ids).merge_dims(1, 2)

  def _encode_segments(
    self, segments: tf2.Tensor, is_first: tf2.Tensor
  ) -> tf2.RaggedTensor:
    if self._inside is self._model:
      return self._model.tokenize(segments)
    # A text's first segment needs another tokenizer than its later segments.
    # Each tokenizer gets "", which has no ids, for the other's segments.
    return tf2.concat(
      [
        self._model.tokenize(tf2.where(is_first, segments, "")),
        self._inside.tokenize(tf2.where(is_first, "", segments)),
      ],
      1,
    )

  def decode(self, ids: tf2.RaggedTensor) -> tf2.Tensor:
    """Decodes ids [batch, (tokens)] to texts [batch]."""
    if self._inside is self._model:
      return self._model.detokenize(ids)
    # The vocabulary puts one space before each text. In decoding, SentencePiece
    # drops only this space, but tensorflow_text's version drops all leading
    # spaces. So keep all spaces in decoding, and then drop only one space.
    shown = tf2.ragged.boolean_mask(ids, tf2.gather(self._has_text, ids))
    spaces = tf2.gather(tf2.cast(self._num_spaces, tf2.int32), shown[:, :1])
    return _cut_start(self._decode_inside(ids), tf2.reduce_sum(spaces, 1))

  def decode_after(
    self, before: tf2.RaggedTensor, ids: tf2.RaggedTensor
  ) -> tf2.Tensor:
    """Returns the texts [batch] that `ids` add to the texts of `before`.

    Both arguments are [batch, (tokens)]. After a text that is not empty, the
    added text keeps its first space, as in data/vocabulary/text_reader.py.
    """
    return tf2.where(
      tf2.strings.length(self.decode(before)) > 0,
      self._decode_inside(ids),
      self.decode(tf2.concat([before, ids], 1)),
    )

  def _decode_inside(self, ids: tf2.RaggedTensor) -> tf2.Tensor:
    anchors = tf2.fill([ids.nrows(), 1], self._anchor)
    texts = self._model.detokenize(tf2.concat([anchors, ids], 1))
    return _cut_start(texts, tf2.fill(tf2.shape(texts), self._anchor_bytes))


def _cut_start(texts: tf2.Tensor, num_bytes: tf2.Tensor) -> tf2.Tensor:
  """Returns texts [batch] without their first `num_bytes` [batch] bytes."""
  return tf2.strings.substr(texts, num_bytes, -tf2.ones_like(num_bytes))
