# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches that servers read themselves, where they see the token stores."""

import logging
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.config.run import BatchSizes
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.data.batches.host_batches import (
  batches_spec,
  find_batches,
  read_batch,
)
from palm_mtf.mesh.processes import Process
from palm_mtf.programs.features import FEATURE_DTYPES, HostFeatures

_logger = logging.getLogger(__name__)


def find_features(
  session: tf.Session,
  servers: Sequence[Process],
  corpus: Corpus,
  sizes: BatchSizes,
  skips: Skips,
) -> Sequence[str] | HostFeatures:
  """Returns the features of the training batches, and how servers read them.

  Args:
    session: session of the current graph, which reaches the servers.
    servers: hosts of all devices; none if they are the client's.
    corpus: corpus of the run.
    sizes: batch size of every step.
    skips: batches that are left out.

  Returns:
    Their names alone where there are no servers, or one does not find the same
    tokens.
  """
  names = corpus.batches(sizes, skips).features
  if not servers:
    return names
  spec = batches_spec(corpus, sizes, skips)
  found = [host.call(find_batches, [spec], [tf.string])[0] for host in servers]
  for server, reason in zip(servers, session.run(found), strict=True):
    if reason:
      _logger.info(
        "the client reads the batches for all servers: "
        f"{server.device} does not ({reason.decode()})"
      )
      return names
  of_devices = {host.device: host for host in servers}
  dtypes = [FEATURE_DTYPES[x] for x in names]

  def read(
    device: str, step: tf.Tensor, part: tf.Tensor, num_parts: int
  ) -> list[tf.Tensor]:
    inputs = [spec, step, part, num_parts]
    return of_devices[device].call(read_batch, inputs, dtypes)

  return HostFeatures(names, read)
