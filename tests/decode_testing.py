# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continues given prompts with given parameters, for tests."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.variables import WeightsCopier
from palm_mtf.config import DecodeConfig, MeshLayout, ModelConfig
from palm_mtf.generation.decode.functions import LocalPrograms
from palm_mtf.generation.decode.generate_program import (
  PromptBatch,
  build_decode_programs,
)
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.forward_program import build_forward_program
from palm_mtf.runtime.client.client import Client
from tests import checkpoint_files
from tests.mtf_testing import SINGLE, load_decode_model, load_parameters

EOD = 11  # models of the tests choose this token at some step


@dataclasses.dataclass(frozen=True)
class Decoded:
  """The arrays that `decode` fetched; see DecodePrograms.read."""

  tokens: np.ndarray
  is_over: np.ndarray
  scores: np.ndarray | None


def decode(
  config: ModelConfig,
  params: Mapping[str, np.ndarray],
  prompts: Sequence[Sequence[int]],
  settings: DecodeConfig,
  *,
  max_tokens: int,
  mesh: MeshLayout = SINGLE,
  chunk: int | None = None,
  **more: Any,
) -> Decoded:
  """Continues prompts, `chunk` tokens per call; see `Decoder`."""
  with (
    tf.Graph().as_default(),
    Client(tf.Session(config=session_config(mesh.num_devices))) as client,
  ):
    decoder = Decoder(
      client, config, params, prompts, settings, max_tokens, mesh=mesh, **more
    )
    decoder.start()
    for limit in range(1, max_tokens + 1, chunk or max_tokens):
      decoder.advance(min(limit + (chunk or max_tokens) - 1, max_tokens))
    return decoder.read()


class Decoder:
  """Continues prompts, lists of tokens without the 0 before them, on a client.

  `keys` has a number for each prompt (default: its index). `num_tokens` is the
  number of pieces of the vocabulary.
  """

  def __init__(
    self,
    client: Client,
    config: ModelConfig,
    params: Mapping[str, np.ndarray],
    prompts: Sequence[Sequence[int]],
    settings: DecodeConfig,
    max_tokens: int,
    *,
    keys: Sequence[int] | None = None,
    mesh: MeshLayout = SINGLE,
    num_tokens: int | None = None,
    end_ids: tuple[int, ...] = (EOD,),
  ):
    inputs = np.zeros(
      [len(prompts), 1 + max(len(each) for each in prompts)], np.int32
    )
    # The padding after a prompt must not matter.
    inputs[:, 1:] = config.vocab_size - 1
    for row, prompt in enumerate(prompts):
      inputs[row, 1 : 1 + len(prompt)] = prompt
    sizes = PromptBatch(
      num_prompts=len(prompts),
      prompt_tokens=inputs.shape[1],
      max_tokens=max_tokens,
      num_tokens=num_tokens or config.vocab_size,
      end_ids=end_ids,
    )
    self._client = client
    with client.graph.as_default():
      self._model = build_decode_model(config, mesh, settings.weight_dtype)
      build = LocalPrograms(self._model).build
      self._programs = build_decode_programs(build, settings, sizes)
    self.load(params)
    keys = range(len(prompts)) if keys is None else keys
    rows = range(settings.rows_per_prompt)
    self._inputs = {
      "prompts": inputs,
      "lengths": [1 + len(each) for each in prompts],
      "keys": [[[key, row] for row in rows] for key in keys],
    }

  def load(self, params: Mapping[str, np.ndarray]) -> None:
    """Replaces the parameters."""
    load_decode_model(self._client._session, self._model, params)

  def start(self) -> None:
    """Reads the prompts."""
    self._client.call(self._programs.start, self._inputs)

  def advance(self, limit: int) -> None:
    """Makes tokens until there are `limit` per row."""
    self._client.call(self._programs.advance, {"limit": limit})

  def read(self) -> Decoded:
    """Returns the continuations."""
    found = self._client.call(self._programs.read)
    return Decoded(found["tokens"], found["is_over"], found.get("scores"))


def save_checkpoint(
  config: ModelConfig, params: Mapping[str, np.ndarray], folder: Path
) -> Checkpoint:
  """Writes a checkpoint that holds the parameters."""
  manifest = checkpoint_files.manifest(0)
  checkpoint = Checkpoint(str(folder), manifest, files={}, blake2b="")
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_forward_program(config, SINGLE, batch_size=1)
    load_parameters(session, program.slices, params)
    WeightsCopier(Client(session), [program.slices]).copy()(checkpoint.prefix)
  return checkpoint


class Recomputed:
  """Computes next-token logits by the forward program, without a cache."""

  def __init__(self, config: ModelConfig, params: Mapping[str, np.ndarray]):
    self._length = config.sequence_length
    with tf.Graph().as_default():
      self._program = build_forward_program(config, SINGLE, batch_size=1)
      self._session = tf.Session(config=session_config(1))
      load_parameters(self._session, self._program.slices, params)

  def logits(self, tokens: Sequence[int]) -> np.ndarray:
    """Returns the logits of every token after `tokens`, [vocab]."""
    inputs = np.zeros([1, self._length], np.int32)
    inputs[0, 1 : 1 + len(tokens)] = tokens
    feed = {self._program.features["inputs"]: inputs}
    return self._session.run(self._program.logits, feed)[0, len(tokens)]

  def greedy(
    self, prompt: Sequence[int], max_tokens: int, num_tokens: int | None = None
  ) -> list[int]:
    """Returns the likeliest tokens one by one; [eod] fills the rest."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
      is_over = EOD in tokens[len(prompt) :]
      logits = self.logits(tokens)[:num_tokens]
      tokens.append(EOD if is_over else int(logits.argmax()))
    return tokens[len(prompt) :]
