# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf serve`: answers HTTP requests with the newest checkpoint."""

import asyncio
import dataclasses
import functools
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from palm_mtf.accounting.memory import (
  cache_bytes_per_token,
  decode_weight_bytes,
)
from palm_mtf.architecture.parameters import saved_shapes
from palm_mtf.assertions.assertions import Assertions
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.commands.adapter import read_factors
from palm_mtf.config import Config, DecodeConfig, ModelConfig, mesh_layout
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import StoppedError, UserError, check_count
from palm_mtf.executors.choose import decodes_on_accelerators
from palm_mtf.generation.inference.prompts import check_room
from palm_mtf.machine.activation_dtype import log_dtype, resolve_dtype
from palm_mtf.machine.host_memory import memory_bytes
from palm_mtf.machine.processors import gpu_capabilities
from palm_mtf.retrieval.passages import Passages
from palm_mtf.runtime.addresses import split_address

if TYPE_CHECKING:  # imports aiohttp, which is optional, or TensorFlow
  from palm_mtf.generation.serving.access import Access
  from palm_mtf.generation.serving.batcher import Batcher
  from palm_mtf.generation.serving.served_weights import (
    NewerCheckpoint,
    ServedWeights,
  )

_NO_ADAPTERS = (
  "--adapter: only decoding steps in C++, on one CPU device, add adapters to "
  "texts; here TensorFlow or XLA decodes. Serve the adapted run itself."
)
_FOLLOW_SECS = 2  # pause between searches of MODEL_DIR for a newer checkpoint


class _Options(NamedTuple):
  follow: bool
  slots: int
  most_waiting: int
  most_secs: int
  adapters: Mapping[str, str]  # {name: path}
  loads_adapters: bool
  assertions: Assertions | None  # None without ASSERTIONS
  passages: Passages | None


def serve(
  *,
  model_dir: str,
  config: Config,
  listen: str,
  slots: int,
  most_waiting: int,
  most_secs: int,
  allow_any_address: bool,
  allowed_hosts: Sequence[str],
  api_key_file: str | None,
  follow: bool,
  adapters: Sequence[str],
  allow_adapter_loading: bool,
) -> None:
  """Prints the address, then serves completions until a signal arrives.

  Raises UserError if an argument or setting is invalid. Raises StoppedError if
  a signal arrived; answers in progress have been sent.
  """
  check_count("--slots", slots, 1, 10**9)
  check_count("--most_waiting", most_waiting, 1, 10_000)
  check_count("--most_secs", most_secs, 1, 10**6)
  if importlib.util.find_spec("aiohttp") is None:
    raise UserError(
      "palm_mtf serve answers by aiohttp, which is not installed: "
      f"{sys.executable} -m pip install 'aiohttp>=3.14,<4'"
    )
  from palm_mtf.generation.serving import access

  keys = access.read_keys(api_key_file) if api_key_file else []
  _check_decode(config.decode)
  paths = _parse_adapters(adapters)
  has_adapters = bool(paths) or allow_adapter_loading
  if (has_adapters or config.decode.knn_index) and follow:
    raise UserError(
      "--follow: an adapter or an index belongs to one checkpoint; leave it "
      "out, or serve without them."
    )
  mesh_layout.check_layout(config.mesh_layout, config.model)
  model = resolve_dtype(config.model, config.mesh_layout)
  config = dataclasses.replace(config, model=model)
  on_accelerators = decodes_on_accelerators(config.mesh_layout, config.pods)
  if on_accelerators and has_adapters:
    raise UserError(_NO_ADAPTERS)
  # Several devices store even quantized weights in the activation dtype.
  is_split = config.mesh_layout.num_devices > 1
  weight_dtype = "activation" if is_split else config.decode.weight_dtype
  if not on_accelerators:
    _check_slots(slots, model, weight_dtype)
  assertions = Assertions(model_dir, config, "serve")
  checkpoint, vocabulary = open_newest(model_dir, config)
  check_room(model, config.run)
  passages = Passages(config.decode) if config.decode.retrieve else None
  with access.listen(
    listen, allow_any_address=allow_any_address, has_keys=bool(keys)
  ) as listener:
    hosts = access.find_allowed_hosts(
      split_address("--listen", listen)[0],
      is_loopback=access.is_on_loopback(listener),
      allowed=allowed_hosts,
    )
    log_dtype(model, config.mesh_layout)
    options = _Options(
      *(follow, slots, most_waiting, most_secs, paths, allow_adapter_loading),
      assertions if config.evaluation.assertions else None,
      passages,
    )
    may_ask = access.Access(hosts, keys)
    opened = model_dir, checkpoint, config, vocabulary
    stopped_by = _serve(listener, may_ask, *opened, options)
  raise StoppedError(stopped_by)


def _check_slots(slots: int, model: ModelConfig, weight_dtype: str) -> None:
  # If there are GPUs, skip this check, because only TensorFlow, which is not
  # imported yet, knows their memory.
  if gpu_capabilities():
    return
  of_slot = model.sequence_length * cache_bytes_per_token(model)
  _, available = memory_bytes()
  available = max(0, available - decode_weight_bytes(model, weight_dtype))
  needed = slots * of_slot
  if needed > available:
    raise UserError(
      f"--slots = {slots:,}: their cache takes {needed / 1e9:,.1f} GB, and "
      f"{available / 1e9:,.1f} GB of memory is left for it; give at most "
      f"{available // of_slot:,}."
    )


def _check_decode(decode: DecodeConfig) -> None:
  # Several requests share a decoding step. Such a step keeps neither beams nor
  # the earlier tokens that a repetition penalty needs.
  for name, off in (("num_beams", 1), ("repetition_penalty", 1)):
    value = getattr(decode, name)
    if value != off:
      macro = name.upper()
      raise UserError(
        f"{macro} = {value}: serve samples without it; set {macro} to {off}."
      )
  if decode.num_samples > 1:
    raise UserError(
      f"NUM_SAMPLES = {decode.num_samples}: each request says n; set it to 1."
    )


def _parse_adapters(given: Sequence[str]) -> dict[str, str]:
  # Returns {name: path} of the values of --adapter.
  paths: dict[str, str] = {}
  for each in given:
    name, is_pair, path = each.partition("=")
    if not (name and is_pair and path):
      raise UserError(f"--adapter = {each!r}: give NAME=PATH.")
    if name in paths:
      raise UserError(
        f"--adapter = {each!r}: another --adapter has the name {name!r}; give "
        "each its own."
      )
    paths[name] = path
  return paths


def _load_newer(
  newer: "NewerCheckpoint", batcher: "Batcher", weights: "ServedWeights"
) -> None:
  while True:
    time.sleep(_FOLLOW_SECS)
    found = newer.find()
    if found:
      batcher.replace_weights(functools.partial(weights.replace, found))


def _serve(
  listener: socket.socket,
  access: "Access",
  model_dir: str,
  checkpoint: Checkpoint,
  config: Config,
  vocabulary: Vocabulary,
  options: _Options,
) -> str:
  """Runs the server; returns the name of the signal that stopped it."""
  from palm_mtf.executors.host.step_session import step_session_config
  from palm_mtf.generation.serving.access import make_url
  from palm_mtf.generation.serving.adapters import ServedAdapters
  from palm_mtf.generation.serving.batcher import Batcher
  from palm_mtf.generation.serving.counters import Counters
  from palm_mtf.generation.serving.served_model import ServedModel
  from palm_mtf.generation.serving.served_weights import (
    NewerCheckpoint,
    ServedWeights,
  )
  from palm_mtf.generation.serving.server import Server
  from palm_mtf.rates.measure import warn_if_slow

  model, mesh = config.model, config.mesh_layout
  session = step_session_config(model, mesh, config.decode.weight_dtype)
  warn_if_slow(model, mesh, session)
  name = os.path.basename(os.path.abspath(model_dir))
  newer = NewerCheckpoint(
    model_dir, checkpoint, saved_shapes(model), vocabulary.sha256
  )
  with ServedWeights(
    config, num_tokens=vocabulary.size, num_slots=options.slots
  ) as weights:
    served_adapters = ServedAdapters(
      name,
      functools.partial(read_factors, config, checkpoint),
      lambda factors: weights.decoder.add_adapter(factors),
    )
    # Read adapters first, because a base takes longer to load.
    factors = served_adapters.read(options.adapters, "--adapter")
    weights.load(checkpoint)
    if options.adapters or options.loads_adapters:
      if not weights.decoder.can_add_adapters():
        raise UserError(_NO_ADAPTERS)
      served_adapters.add(factors)
    counters = Counters()
    batcher = Batcher(
      *(weights, counters),
      end_ids=vocabulary.end_ids,
      most_waiting=options.most_waiting,
    )
    served = ServedModel(
      name=name,
      vocabulary=vocabulary,
      config=config,
      most_rows=batcher.most_rows,
      most_secs=options.most_secs,
      adapters=served_adapters,
      assertions=options.assertions,
      passages=options.passages,
    )

    def announce() -> None:
      where = f"{make_url(listener)}/v1"
      print(f"serving {name}, step {weights.step:,}, on {where}", flush=True)

    async def run() -> str:
      server = Server(
        *(served, batcher, counters, access),
        loads_adapters=options.loads_adapters,
      )
      return await server.serve(listener, announce)

    if options.follow:
      given = newer, batcher, weights
      threading.Thread(target=_load_newer, args=given, daemon=True).start()
    signal_name = asyncio.run(run())
    if batcher.failure:
      raise batcher.failure
  return signal_name
