# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the weights that a command loads, and checks that they fit.

A command loads the newest checkpoint of a run, or weights that the user names
by a path (named_weights.py), such as INIT_CHECKPOINT.

INIT_STATE = "weights"   only parameters, for finetuning (PaLM 6): the step and
                         the optimizer start from scratch
INIT_STATE = "all"       everything, to train on other data (PaLM Appendix F)
"""

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from palm_mtf.accounting.optimizer_state import (
  NEW_OPTIMIZER,
  check_same_slots,
  num_own,
)
from palm_mtf.architecture.block import NORMS, ROUTER, model_of
from palm_mtf.architecture.parameters import (
  frozen_names,
  parameter_shapes,
  parse_name,
  saved_shapes,
  user_name,
)
from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  Manifest,
  newest_whole,
  read_and_hold,
)
from palm_mtf.checkpoints.named_weights import (
  NamedWeights,
  find_weights,
  read_shapes,
)
from palm_mtf.config import (
  Config,
  CorpusConfig,
  DataConfig,
  ExchangeConfig,
  ModelConfig,
  OptimizerConfig,
  RunConfig,
)
from palm_mtf.config.macros import MISSING, from_macros, macros_of
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.paths import ModelDir

if TYPE_CHECKING:  # commands without a corpus begin sooner
  from palm_mtf.data.batches.corpus import Corpus

_logger = logging.getLogger(__name__)

_SHOWN_DIFFERENCES = 3
NEIGHBOURS = "the neighbours"  # key of `Manifest.data`: the hash of their index
# {macro: value} for settings that earlier versions of palm_mtf lacked. Those
# versions worked as with this value, which is not the default of this version.
BEFORE = {"NORM_SCALE": "plain", "LOGITS_DTYPE": "activation"}


def open_newest(
  model_dir: str,
  config: CorpusConfig,
  begin: Callable[[Checkpoint], object] = lambda checkpoint: None,
) -> tuple[Checkpoint, Vocabulary]:
  """Returns a run's newest whole checkpoint, held open, and its vocabulary.

  Calls `begin` with the checkpoint before it reads the vocabulary.

  Raises UserError if there is no whole checkpoint, or if `config` has another
  model or vocabulary than the checkpoint.
  """
  shapes = saved_shapes(config.model)
  checkpoint = newest_checkpoint(model_dir, shapes)
  begin(checkpoint)
  vocabulary = load_vocabulary(
    model_dir, config.data, vocab_size=config.model.vocab_size
  )
  check_same_model(checkpoint, shapes, vocabulary.sha256)
  return checkpoint, vocabulary


def newest_checkpoint(
  model_dir: str, shapes: Mapping[str, tuple[int, ...]]
) -> Checkpoint:
  """Returns a run's newest whole checkpoint, with its files held open.

  A trainer may remove the checkpoint before the caller has read it, but open
  files stay readable.

  Raises UserError if there is no whole checkpoint, or the shapes of its
  parameters are not `shapes`.
  """
  newest = newest_whole(model_dir, read=read_and_hold)
  if not newest:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: holds no checkpoint; train one there with "
      "palm_mtf train, or give the folder of a run."
    )
  check_same_model(newest, shapes)
  return newest


def check_same_model(
  checkpoint: Checkpoint,
  shapes: Mapping[str, tuple[int, ...]],
  vocabulary_sha256: str | None = None,
) -> None:
  """Raises UserError if a checkpoint belongs to another model or vocabulary.

  `shapes` has the shape of every parameter of the model, by name. If the hash
  of the run's vocabulary is None, vocabularies are not compared.
  """
  if different := shape_differences(checkpoint.manifest.shapes, shapes):
    raise UserError(
      f"{checkpoint.path} has {different}: it is of another model; use the "
      "models/*.gin it was trained with, or another MODEL_DIR."
    )
  if vocabulary_sha256 not in (None, checkpoint.manifest.vocabulary_sha256):
    raise UserError(
      f"{checkpoint.path} was trained with another vocabulary than VOCABULARY; "
      "its tokens would mean other texts. Use its own, or another MODEL_DIR."
    )


# Model settings that a resumed run may change, because neither the shapes of
# parameters nor the function that the model computes depends on them.
_FREE = "SEQUENCE_LENGTH LOGITS_DTYPE OUTPUT_FAN_IN REMAT OBJECTIVE".split()


def check_same_function(checkpoint: Checkpoint, model: ModelConfig) -> None:
  """Raises UserError if `model` computes another function than the checkpoint.

  `checkpoint` belongs to the run that resumes, and has the shapes of `model`.
  Equal shapes are not enough: they do not show the position encoding of a layer
  or the activation function of its MLP. Different settings may compute the same
  function, such as LAYERS with other names.
  """
  if found := find_other_function(checkpoint, model):
    given, trained = found
    raise UserError(
      f"{given}: {checkpoint.path} was trained with {trained}, which is "
      "another model; use that, or begin a run with INIT_CHECKPOINT in another "
      "MODEL_DIR."
    )


def find_other_function(
  checkpoint: Checkpoint, model: ModelConfig
) -> tuple[str, str] | None:
  """Returns settings of `model` and of the checkpoint, for messages.

  They are the settings that differ; see `check_same_function`. Returns None if
  both compute one function.
  """
  now = _as_json(model.macros())
  before = now | {
    name: value
    for name, value in settings_of(checkpoint.manifest).items()
    if name in now
  }
  if _function_of(from_macros(ModelConfig, before)) == _function_of(model):
    return None
  names = [x for x in now if before[x] != now[x] and x not in _FREE]
  given, trained = (
    ", ".join(f"{name} = {each[name]!r}" for name in names)
    for each in (now, before)
  )
  return given, trained


def _function_of(model: ModelConfig) -> tuple[object, ...]:
  """Returns a key: models of the same shapes and key compute one function."""
  scale = model.score_scale or model.d_kv**-0.5
  layers = model_of(dataclasses.replace(model, score_scale=scale))
  norm = NORMS[model.norm], model.norm_epsilon
  factors = model.embedding_scale, model.logits_factor
  return layers, norm, *factors, model.model_function


def settings_of(manifest: Manifest) -> dict[str, object]:
  """Returns {macro: value} of the settings with which a run was trained.

  The run may have been trained by an earlier version of palm_mtf, which lacked
  some settings. For these, the result has the values that match the behavior of
  the earlier version.
  """
  defaults = macros_of(Config, manifest.settings)
  known = {name: x for name, x in defaults.items() if x is not MISSING}
  return _as_json(known) | BEFORE | dict(manifest.settings)


def _as_json(settings: Mapping[str, object]) -> dict[str, object]:
  """Turns tuples into lists, as in a manifest."""
  return json.loads(json_text(settings))


def check_same_roles(
  checkpoint: Checkpoint, frozen: Sequence[str], optimizer: OptimizerConfig
) -> None:
  """Raises UserError if a run would give parameters other roles.

  The checkpoint has slots for the parameters that its run trained, and zeros
  where its model was pruned.
  """
  names = checkpoint.manifest.shapes
  kept = checkpoint.manifest.settings.get("KEEP_ZEROS", False)
  if kept != optimizer.keep_zeros:
    raise UserError(
      f"KEEP_ZEROS = {optimizer.keep_zeros}: {checkpoint.path} was written "
      f"with {kept}; keep that value, or {NEW_OPTIMIZER}."
    )
  before = checkpoint.manifest.settings.get("FROZEN", [])
  changed = frozen_names(names, before) ^ frozen_names(names, frozen)
  if changed:
    first = next(x for x in names if x in changed)
    raise UserError(
      f"FROZEN = {list(frozen)!r}: {checkpoint.path} was written with "
      f"{before!r}, so the roles of {len(changed)} parameters differ, such as "
      f"{user_name(first)}; keep that value, or {NEW_OPTIMIZER}."
    )


def shape_differences(
  held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> str:
  """Returns text that names parameters whose shapes differ, "" if none do.

  `held` and `wanted` are {parameter: shape} of the checkpoint and of the model.
  """
  different = [
    f"{name} {_shape_text(held.get(name))}, the model wants "
    f"{_shape_text(wanted.get(name))}"
    for name in dict.fromkeys([*wanted, *held])  # in the model's order
    if held.get(name) != wanted.get(name)
  ]
  text = "; ".join(different[:_SHOWN_DIFFERENCES])
  more = len(different) - _SHOWN_DIFFERENCES
  return f"{text}; and {more} more" if more > 0 else text


def _shape_text(shape: tuple[int, ...] | None) -> str:
  return "nothing" if shape is None else str(list(shape))


def warn_of_other_evaluation_text(
  checkpoint: Checkpoint, corpus: "Corpus", data: DataConfig
) -> None:
  """Warns if validation documents differ from those held out in training."""
  if not _is_other(checkpoint, corpus):
    return
  before, now = _share_before(checkpoint, data), data.validation_share
  if before == now:
    _logger.warning(
      f"the text or its tokens have changed since {checkpoint.path} was "
      "trained: the validation text may have been trained on"
    )
  elif before < now:
    _logger.warning(
      f"VALIDATION_SHARE = {now}, but {before} in training: part of the "
      "validation text was trained on"
    )
  else:
    _logger.warning(
      f"VALIDATION_SHARE = {now}, but {before} in training: the validation "
      "loss covers only a part of the text that was held out"
    )


def warn_of_larger_share(checkpoint: Checkpoint, data: DataConfig) -> None:
  """Warns if tasks on held-out text include text that the model trained on."""
  before, now = _share_before(checkpoint, data), data.validation_share
  if data.task is None and before < now:
    _logger.warning(
      f"VALIDATION_SHARE = {now}, but {before} in training: tasks on held-out "
      "text also use text that the model was trained on"
    )


def warn_of_other_split(
  checkpoint: Checkpoint, corpus: "Corpus", data: DataConfig
) -> None:
  """Warns if a resumed run holds out other validation documents than before."""
  before, now = _share_before(checkpoint, data), data.validation_share
  if before == now or not _is_other(checkpoint, corpus):
    return
  what = (
    "text that was trained on is held out from here on, and validation losses "
    "are too low"
    if before < now
    else "text that was held out becomes training text"
  )
  _logger.warning(f"VALIDATION_SHARE = {now}, but {before} until now: {what}")


def _is_other(checkpoint: Checkpoint, corpus: "Corpus") -> bool:
  """Returns whether the checkpoint's run had other text than `corpus`."""
  trained = checkpoint.manifest.data
  # A corpus's fingerprint depends on how documents are packed into rows, too.
  # Use the checkpoint's packing, so that only other text makes it differ.
  in_its_rows = dataclasses.replace(
    corpus,
    packing=trained.get("PACKING", corpus.packing),
    sequence_length=trained.get("SEQUENCE_LENGTH", corpus.sequence_length),
  )
  return trained.get("the tokens") != in_its_rows.fingerprint


def _share_before(checkpoint: Checkpoint, data: DataConfig) -> float:
  settings = checkpoint.manifest.settings
  return settings.get("VALIDATION_SHARE", data.validation_share)


def find_initial_weights(
  path: str | None,
  newest: Checkpoint | None,
  shapes: Mapping[str, tuple[int, ...]],
  copying: ModelConfig | None = None,
  pruning: ModelConfig | None = None,
) -> NamedWeights | None:
  """Returns the weights of INIT_CHECKPOINT, or None if they are not needed.

  Args:
    path: INIT_CHECKPOINT.
    newest: the run's newest checkpoint. If there is such a checkpoint, the run
      resumes from it and needs no initial weights.
    shapes: the shape of every parameter of the model, by name.
    copying: the model with experts, if INIT_EXPERTS = "copy" makes each expert
      from the MLP of a dense checkpoint; otherwise None.
    pruning: the model, if PRUNE makes it from a larger one; otherwise None.

  Raises UserError if `path` is missing, damaged or of another model.
  """
  if path is None:
    return None
  if newest:
    _logger.info(
      f"INIT_CHECKPOINT is not read: {newest.path} is this run's own"
    )
    return None
  # Do not continue after an error: the run would start from random weights.
  weights = find_weights("INIT_CHECKPOINT", path)
  base = weights.checkpoint.manifest.base if weights.checkpoint else None
  if base:
    raise UserError(
      f"{weights.given}: {weights.place} has only an adapter; name its base, "
      f"{base['checkpoint']}, or export and import the adapted model."
    )
  names, wanted = {name: name for name in shapes}, dict(shapes)
  if copying:
    names = {
      x: x.replace("/mlp/experts/", "/mlp/")
      for x in shapes
      if not parse_name(x).part.startswith(ROUTER)
    }
    wanted = {
      y: shapes[x][1:] if parse_name(x).is_expert else shapes[x]
      for x, y in names.items()
    }
  if pruning:
    wanted = parameter_shapes(dense_model(weights, pruning))
  if weights.checkpoint:
    held = weights.checkpoint.manifest.shapes
  else:
    # A checkpoint that palm_mtf did not write has no manifest. Leave out its
    # optimizer slots, which are named "<parameter>/<slot>".
    held = {
      name: shape
      for name, shape in read_shapes(weights).items()
      if name.rpartition("/")[0] not in wanted
    }
  if copying:
    _check_copied(weights, held, copying)
  if different := shape_differences(held, wanted):
    more = ""
    if copying:
      more = ", and its D_FF as D_EXPERT"
    elif _has_experts(wanted) and not _has_experts(held):
      more = ', or set INIT_EXPERTS = "copy" to begin with its MLPs'
    raise UserError(
      f"{weights.given}: {weights.place} has {different}: it is of another "
      f"model; use the models/*.gin it was trained with{more}."
    )
  return dataclasses.replace(weights, names=names)


def dense_model(weights: NamedWeights, model: ModelConfig) -> ModelConfig:
  """Returns `model` with as many heads and channels as `weights`, to prune.

  Raises UserError if palm_mtf did not write `weights`.
  """
  if not weights.checkpoint:
    raise UserError(
      f"{weights.given}: is no checkpoint of palm_mtf, which PRUNE needs; "
      "import the model first."
    )
  before = settings_of(weights.checkpoint.manifest)
  sizes = ("num_heads", "num_kv_heads", "d_ff")
  return dataclasses.replace(model, **{x: before[x.upper()] for x in sizes})


def _has_experts(names: Iterable[str]) -> bool:
  return any(parse_name(x).is_expert for x in names)


def _check_copied(
  weights: NamedWeights, held: Iterable[str], model: ModelConfig
) -> None:
  """Raises UserError unless INIT_EXPERTS = "copy" can use the checkpoint.

  The checkpoint must have no experts, and its MLPs must be of the same kind as
  the experts and as the MLPs of layers without experts. `held` has the names of
  the checkpoint's parameters.
  """
  if _has_experts(held):
    raise UserError(
      f'INIT_EXPERTS = "copy": {weights.place} has experts already; leave '
      "INIT_EXPERTS out."
    )
  if not weights.checkpoint:
    return
  before = settings_of(weights.checkpoint.manifest)
  variants: dict[str, dict[str, Any]] = before["VARIANTS"] or {"": {}}
  mlps = {x.get("MLP", before["MLP"]) for x in variants.values()}
  if mlps != {model.expert_mlp}:
    raise UserError(
      f"EXPERT_MLP = {model.expert_mlp!r}: {weights.place} was trained with "
      f"MLP = {', '.join(map(repr, sorted(mlps)))}, which INIT_EXPERTS copies; "
      "use the same."
    )
  layers = [model.variant(x) for x in {*model.variant_names}] or [model]
  if other := {x.mlp for x in layers} - {"experts", *mlps}:
    raise UserError(
      f"MLP = {', '.join(map(repr, sorted(other)))} of layers without experts: "
      f"{weights.place} was trained with MLP = {model.expert_mlp!r}; use the "
      "same."
    )


def find_initial_state(
  weights: NamedWeights, run: RunConfig, optimizer: OptimizerConfig
) -> Checkpoint:
  """Returns `weights` as a checkpoint to start from with INIT_STATE = "all".

  Raises UserError if palm_mtf did not write the checkpoint, its optimizer state
  does not fit `optimizer` or FROZEN, or its step is TRAIN_STEPS or later.
  """
  found = weights.checkpoint
  if not found:
    raise UserError(
      f'{weights.given}: INIT_STATE = "all", and a checkpoint of TensorFlow '
      "does not say its step; give one of palm_mtf, or set INIT_STATE to "
      '"weights".'
    )
  check_same_slots(found.path, found.manifest.settings, optimizer)
  check_same_roles(found, run.frozen, optimizer)
  if num_own(found.manifest.settings):
    raise UserError(
      f'{weights.given}: INIT_STATE = "all", and each pod of that run has its '
      f"own optimizer; {NEW_OPTIMIZER}."
    )
  step = found.manifest.step
  if step >= run.train_steps:
    raise UserError(
      f"TRAIN_STEPS = {run.train_steps}: {weights.given} already has {step} "
      "steps, which count; give more."
    )
  # Leave out the recorded loss spikes, which name batches of the other run.
  data = {k: v for k, v in found.manifest.data.items() if k != "spikes"}
  manifest = dataclasses.replace(found.manifest, data=data)
  return dataclasses.replace(found, manifest=manifest)


def check_same_exchange(newest: Checkpoint, exchange: ExchangeConfig) -> None:
  """Raises UserError unless a run has what EXCHANGE needs to resume."""
  before = newest.manifest.settings.get("EXCHANGE", "gradients")
  if before != exchange.exchange:
    raise UserError(
      f"EXCHANGE = {exchange.exchange!r}: {newest.path} was written with "
      f"{before!r}, whose pods have other variables; keep that value, or "
      f"{NEW_OPTIMIZER}."
    )


def check_same_neighbours(run: Manifest, newest: Checkpoint | None) -> None:
  """Raises UserError if the run began with another NEIGHBOUR_INDEX."""
  now = run.data.get(NEIGHBOURS)
  before = newest and newest.manifest.data.get(NEIGHBOURS)
  if before and before != now:
    raise UserError(
      f"NEIGHBOUR_INDEX: has the hash {now}, but the run began with {before}; "
      "give that index, which the same index chunks makes again, or another "
      "MODEL_DIR."
    )


def check_vocabulary_given(
  weights: NamedWeights | None, model_dir: str, data: DataConfig
) -> None:
  """Raises UserError if a run with initial weights would train a vocabulary."""
  # Row i of the initial embedding belongs to token id i of the vocabulary with
  # which the weights were trained. A new vocabulary has other ids.
  own = ModelDir(model_dir).vocabulary
  if not weights or data.vocabulary is not None or os.path.exists(own):
    return
  hint = ""
  if weights.checkpoint:
    # The path is <run>/checkpoints/step_00000200.
    run = os.path.dirname(os.path.dirname(weights.checkpoint.path))
    theirs = weights.checkpoint.manifest.settings.get("VOCABULARY")
    theirs = theirs or ModelDir(run).vocabulary
    hint = f", such as {theirs!r}" if os.path.exists(theirs) else ""
  raise UserError(
    f"VOCABULARY = None: {weights.given} was trained with another vocabulary; "
    f"name that vocabulary in VOCABULARY{hint}."
  )


def check_same_vocabulary(
  weights: NamedWeights | None, vocabulary: Vocabulary
) -> None:
  """Raises UserError if `weights` were trained with another vocabulary."""
  if not weights:
    return
  if not weights.checkpoint:
    _logger.warning(
      f"{weights.place} does not say which vocabulary it was trained with: "
      "make sure that VOCABULARY names it"
    )
  elif weights.checkpoint.manifest.vocabulary_sha256 != vocabulary.sha256:
    raise UserError(
      f"{weights.given}: {weights.place} was trained with another vocabulary "
      "than VOCABULARY; its tokens would mean other texts; set VOCABULARY and "
      "EXTRA_IDS as in its training."
    )
