# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The model type `palm_mtf` for lm-evaluation-harness."""

from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from palm_mtf.lm_eval.run import Run


@register_model("palm_mtf")
class PalmMtf(LM):
  """A run's newest checkpoint as a model of lm-evaluation-harness."""

  def __init__(
    self,
    model_dir: str,
    *,
    trust_config: bool = False,
    adapter: str | None = None,
    batch_size: object = None,
    max_batch_size: object = None,
    device: object = None,
    **macros: object,
  ):
    """Loads a checkpoint.

    Args:
      model_dir: MODEL_DIR of a training run.
      trust_config: whether the run's config.gin may run code.
      adapter: path of an adapter of the run (docs/adapters.md).
      batch_size: ignored, because the lengths of the texts decide batch sizes.
      max_batch_size, device: ignored.
      **macros: gin macros that override the run's macros, such as STRIDE=64.
    """
    del batch_size, max_batch_size, device
    super().__init__()
    self._run = Run(str(model_dir), macros, trust_config, adapter)

  @property
  def tokenizer_name(self) -> str:
    """Name of the checkpoint, which the harness uses as a key of its caches."""
    return self._run.name

  def get_model_info(self) -> dict[str, str]:
    """Returns the dtype, which the harness adds to "config" in its results."""
    return {"model_dtype": self._run.activation_dtype}

  def loglikelihood(
    self, requests: Sequence[Instance], disable_tqdm: bool = False
  ) -> list[tuple[float, bool]]:
    """Returns log p of each continuation, and whether greedy decoding gives it.

    The `args` of a request are a context and a continuation.
    """
    pairs = [request.args for request in requests]
    scores = _sort(self._run.scores(pairs), len(pairs), disable_tqdm)
    return [(score.log_likelihood, score.is_greedy) for score in scores]

  def loglikelihood_rolling(
    self, requests: Sequence[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Returns log p of each document, scored in windows of stride STRIDE.

    The `args` of a request are a document.
    """
    documents = [("", *request.args) for request in requests]
    scores = _sort(self._run.scores(documents), len(documents), disable_tqdm)
    return [score.log_likelihood for score in scores]

  def generate_until(
    self, requests: Sequence[Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Returns the continuation of each prompt.

    The `args` of a request are a prompt and the prompt's generation_kwargs.
    """
    prompts = [request.args for request in requests]
    texts = self._run.continuations(prompts)
    return _sort(texts, len(prompts), disable_tqdm)


def _sort(
  answers: Iterable[tuple[int, Any]], count: int, disable_tqdm: bool
) -> list[Any]:
  """Returns answers in the order of their indices; shows a progress bar."""
  found = dict(tqdm(answers, total=count, disable=disable_tqdm))
  return [found[index] for index in range(count)]
