# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A trained model, and what an export format makes of it."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from palm_mtf.checkpoints.lineage import IMPORTED, LINK
from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  DamagedCheckpointError,
  read_checkpoint,
)
from palm_mtf.config import Config, ModelConfig
from palm_mtf.data.batches.packing import (
  document_start,
  prompt_start,
  row_start,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.model_dir.paths import step_of

# Files of a model, "org--name", in the cache of the Hugging Face Hub.
_CACHED = re.compile(r".*/models--([\w.-]+)/snapshots/.+", re.ASCII)
_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)  # of a model on the Hub
Reader = Callable[[str], np.ndarray]  # parameter's name -> its value, float32


@dataclasses.dataclass(frozen=True)
class TrainedModel:
  """A checkpoint with its run's settings and vocabulary."""

  config: Config
  checkpoint: Checkpoint
  vocabulary: Vocabulary
  kind: str = "exported"  # how the export comes from the checkpoint
  # Results of SeqIO tasks, as files in MODEL_DIR/eval have them.
  evaluations: Sequence[Mapping[str, Any]] = ()
  folder: str = os.curdir  # will have the export
  given_base: str | None = None  # what the user calls the base

  def publish(self, path: str) -> str:
    """Returns a path as exported files have it, without the user's name.

    It is an id on the Hub, or relative to `folder`; or only its last names, if
    it and `folder` share no folder below the one that has the users' homes.
    """
    if cached := _CACHED.fullmatch(path):
      return cached[1].replace("--", "/", 1)
    path, folder = os.path.abspath(path), os.path.abspath(self.folder)
    shared = os.path.commonpath([path, folder])
    homes = os.path.dirname(os.path.expanduser("~"))
    if os.path.commonpath([shared, homes]) != shared:
      return os.path.relpath(path, folder)
    count = 1 if step_of(path) is None else 3  # run/checkpoints/step_00000200
    return os.path.join(*path.split(os.sep)[-count:])

  @property
  def origin(self) -> dict[str, str]:
    """Metadata of exported files: the link to the checkpoint."""
    values = (self.kind, self.checkpoint.path, self.checkpoint.blake2b)
    link = self._publish_link(dict(zip(LINK, values, strict=True)))
    return {f"palm_mtf.{name}": value for name, value in link.items()}

  @property
  def parents(self) -> list[dict[str, str]]:
    """The links to the checkpoint's parents."""
    found = self.checkpoint.manifest
    links = (found.origin, found.base, found.teacher)
    return [self._publish_link(x) for x in links if x]

  def _publish_link(self, link: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: link[name] for name in LINK if name in link}
    if path := texts.get("checkpoint"):
      texts["checkpoint"] = self.publish(path)
    return texts

  @property
  def base(self) -> str:
    """Id on the Hub of the model with which the run began, or "".

    Of an imported model, it is the model that was imported.
    """
    if self.given_base:
      return self.given_base
    manifest = self.checkpoint.manifest
    link = manifest.base or manifest.origin or {}
    path = str(link.get("checkpoint", ""))
    with contextlib.suppress(UserError, DamagedCheckpointError):
      found = read_checkpoint(path) if path else self.checkpoint
      origin = found.manifest.origin or {}
      if origin.get("kind") == IMPORTED and found.blake2b == link["blake2b"]:
        path = str(origin["checkpoint"])
    return self.publish(path) if _CACHED.fullmatch(path) else ""

  @property
  def gguf_origin(self) -> dict[str, str | int]:
    """The keys of GGUF for `origin` and `base`."""
    found: dict[str, str | int] = {**self.origin}
    if self.base:
      named = {"count": 1, "0.name": self.base}
      if _ID.fullmatch(self.base):
        named["0.repo_url"] = f"https://huggingface.co/{self.base}"
      found |= {f"general.base_model.{k}": x for k, x in named.items()}
    return found

  @property
  def model(self) -> ModelConfig:
    """The architecture."""
    return self.config.model

  @property
  def described(self) -> ModelConfig:
    """The architecture, with the sequence length that exports name.

    If a run shortened the sequences of an imported model, this is the length of
    the imported model, which is longer than SEQUENCE_LENGTH.
    """
    length = max(
      self.config.data.context_length or 0, self.model.sequence_length
    )
    if self.model.positions == "learned":  # no embeddings of further positions
      return self.model
    return dataclasses.replace(self.model, sequence_length=length)

  @property
  def start_id(self) -> int:
    """Id of the token before a document."""
    return document_start(self.config.data, self.vocabulary)

  @property
  def row_start(self) -> int:
    """Id of the token at the start of a row that begins within a document."""
    return row_start(self.config.data, self.vocabulary)

  @property
  def prompt_start(self) -> int | None:
    """Id of the token before a prompt; None if prompts have no start token."""
    return prompt_start(self.config.data, self.vocabulary)

  @property
  def bos_id(self) -> int | None:
    """Id of the start token that exports name, even if prompts omit it."""
    added, data = self.prompt_start, self.config.data
    return data.start_id if added is None else added


class Export(NamedTuple):
  """A model in an export format.

  The function that makes it raises UserError if the format cannot express the
  model.
  """

  kind: str  # noun phrase for messages, such as "a CohereForCausalLM"
  num_bytes: int  # upper bound of the size of the file or folder
  # Writes the file or folder, given its path and a reader of parameters.
  write: Callable[[str, Reader], None]
  subfolder: str = ""  # folder to make in --output; "" for --output itself
