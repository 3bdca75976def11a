# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf data`: `cache` tokenizes and counts; `inspect` shows a batch.

`report` prints files, filters, duplicates and batches of a run. A run with the
settings in the report's "gin" and the files in "files" reads the same batches.
"""

# A token store holds the tokens of one source. Training with the same CACHE_DIR
# reads the stores, and encodes only sources without a store. A store's name has
# a hash of documents and vocabulary, but no path, so that runs share the store.
#
# In a batch of `data inspect`, a line begins with "|" if its tokens are
# targets, which count in the loss, and with ":" if its tokens are inputs, which
# the model reads but does not predict. A line "[eod]" ends a document.

import collections
import fnmatch
import itertools
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf.config import CacheConfig, Config, DataConfig, FilterConfig
from palm_mtf.config.data import NEAR
from palm_mtf.console import print_results
from palm_mtf.data.batches.conversations import open_conversations
from palm_mtf.data.batches.corpus import (
  Batch,
  Batches,
  batch_hash,
  corpus_of_run,
)
from palm_mtf.data.batches.packing import Piece, WholeRows, make_objective
from palm_mtf.data.batches.row_streams import BLOCK_ROWS, Mixture
from palm_mtf.data.filters.decide import count_removed, decide
from palm_mtf.data.filters.filtered_source import (
  evaluation_examples,
  open_filtered,
  read_evaluation_sets,
)
from palm_mtf.data.ngrams import ContainedExamples
from palm_mtf.data.sources.document import Source
from palm_mtf.data.sources.files import FileDigests, find_files, writable_folder
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.data.tokens.store import TokenStore, cache_stores
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.data.vocabulary.text_reader import decode_after
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.user_text import read_json_lines


def data_cache(
  *, model_dir: str, config: CacheConfig, verify: bool, as_json: bool
) -> None:
  """Encodes sources that CACHE_DIR lacks; prints counts of each token store.

  MODEL_DIR holds the vocabulary if VOCABULARY is not set, and the token stores
  if CACHE_DIR is not set.
  """
  model, data = config.model, config.data
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  sources = open_filtered(model_dir, data, model.sequence_length)
  start = time.perf_counter()
  conversations = open_conversations(data, sources, vocabulary)
  # If this process is killed, the command resumes after the last whole shard.
  stores = cache_stores(
    model_dir, data, sources, vocabulary, conversations, verify=verify
  )
  secs = time.perf_counter() - start
  readings = count_epochs(config, sources, [x for _, x in stores], vocabulary)
  for source, (path, store), reading in zip(
    sources, stores, readings, strict=True
  ):
    counts = _describe(path, store) | reading
    print_results({"source": source.name, "path": path, **counts}, as_json)
  if not as_json:
    print(f"secs  {secs:.1f}")


def _count_documents(store: TokenStore) -> dict[str, int]:
  """Returns counts of documents and tokens, by filter and by split."""
  return {
    **(store.filter_counts or {}),
    "training_documents": store.train.counts.num_documents,
    "validation_documents": store.validation.counts.num_documents,
    "training_tokens": store.train.counts.num_tokens,
    "validation_tokens": store.validation.counts.num_tokens,
  }


def _describe(path: str, store: TokenStore) -> dict[str, int | float]:
  counts = store.train.counts + store.validation.counts
  size = sum(entry.stat().st_size for entry in os.scandir(path))
  # `size` is nearly that of the tokens: manifest and shard headers are small.
  answers = {}
  if counts.num_answers:
    answers = {
      "answers": counts.num_answers,
      "training_trained_tokens": store.train.counts.num_target_tokens,
      "validation_trained_tokens": store.validation.counts.num_target_tokens,
    }
  return {
    **_count_documents(store),
    **answers,
    "text_bytes": counts.num_bytes,
    "text_bytes_per_token": counts.num_bytes / max(1, counts.num_tokens),
    "disk_bytes": size,
    "disk_bytes_per_token": size / max(1, counts.num_tokens),
  }


def count_epochs(
  config: CacheConfig,
  sources: Sequence[Source],
  stores: Sequence[TokenStore],
  vocabulary: Vocabulary,
) -> list[dict[str, float]]:
  """Returns how much a run of TRAIN_STEPS reads of each source.

  `stores` has an item per source. The results are {"rate": share of the run's
  tokens or, if PACKING pads rows, of its rows, "epochs": passes over the
  source's training tokens}; {} without TRAIN_STEPS, or training documents.
  """
  num_rows, packing = config.num_rows, config.data.packing
  length, virtual = config.model.sequence_length, config.model.adapter_length
  rates = np.array([source.rate for source in sources])
  rates /= rates.sum()
  has_padding = packing in ("packed", "single")
  if has_padding:
    rates = Mixture(rates, seed=config.seed).rows_of_block / BLOCK_ROWS
  found: list[dict[str, float]] = []
  for rate, store in zip(map(float, rates), stores, strict=True):
    tokens = store.train.tokens
    if num_rows is None or not len(tokens):
      found.append({})
      continue
    epochs = num_rows * config.model.text_length * rate / len(tokens)
    if has_padding:  # rows hold varying numbers of tokens
      rows = WholeRows(
        tokens,
        length,
        packed=packing == "packed",
        seed=config.seed,
        virtual=virtual or 0,
        objective=make_objective(
          config.model.objective, config.data, vocabulary
        ),
      )
      epochs = num_rows * rate / rows.num_rows
    found.append({"rate": rate, "epochs": epochs})
  return found


def data_inspect(*, model_dir: str, config: Config, as_json: bool) -> None:
  """Prints the statistics and first rows of the batches of INSPECT_STEPS.

  If the run's vocabulary or tokens are missing, creates them as training does.
  """
  model, data, run = config.model, config.data, config.run
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  corpus = corpus_of_run(model_dir, config, vocabulary)
  batches = corpus.batches(run.batch_sizes, config.fault_tolerance.skips)
  num_rows = config.inspection.inspect_rows
  continued = {
    source.name
    for source, store in zip(corpus.sources, corpus.stores, strict=True)
    if model.objective == "prefix_lm" and not store.train.tokens.has_inputs
  }
  for step in config.inspection.inspect_steps:
    result = describe_step(batches, step, vocabulary, num_rows, continued)
    print(json_text(result) if as_json else "\n".join(_format_lines(result)))


def describe_step(
  batches: Batches,
  step: int,
  vocabulary: Vocabulary,
  num_rows: int,
  continued: Container[str] = (),
) -> dict:
  """Returns a step's batch statistics, and its first `num_rows` rows as text.

  `continued` names the sources whose inputs and targets were encoded together,
  as one string: a space at the beginning of their targets is part of the text.
  """
  batch, pieces = batches.batch(step), batches.pieces(step)
  targets = batch["targets"]  # [rows, length]
  # If there are no weights (PACKING = "joined"), the loss has every token.
  weights = batch.get("loss_weights", np.ones(targets.shape, np.float32))
  is_padding = _find_padding(batch, vocabulary.eod_id)
  tokens = targets[~is_padding]
  per_source = collections.Counter()
  for piece in itertools.chain(*pieces):
    per_source[piece.source] += piece.tokens
  return {
    "step": step,
    "hash": batch_hash(batch),
    "shape": list(targets.shape),
    "features": list(batch),
    "learnt_share": float(np.abs(weights).sum() / targets.size),
    "padding_share": float(is_padding.mean()),
    "eod_share": float((tokens == vocabulary.eod_id).mean()),
    "byte_share": vocabulary.byte_share(tokens.tolist()),
    "tokens_per_source": dict(per_source),
    "rows": [
      {
        "documents": [piece._asdict() for piece in row],
        "pieces": list(_split_row(ids, in_loss, row, vocabulary, continued)),
      }
      for row, ids, in_loss, row_padding in zip(
        pieces[:num_rows], targets, weights != 0, is_padding, strict=False
      )
      for ids, in_loss in [(ids[~row_padding], in_loss[~row_padding])]
    ],
  }


def _find_padding(batch: Batch, eod_id: int) -> np.ndarray:
  """Returns [rows, length], bool: whether a token only fills up its row."""
  targets = batch["targets"]
  if "loss_weights" not in batch:
    return np.zeros(targets.shape, bool)
  # Padding has id 0 and weight 0. An input token may have this id and weight
  # too, but only padding extends to the end of the row.
  unused = (targets == 0) & (batch["loss_weights"] == 0)
  return np.logical_and.accumulate(unused[:, ::-1], axis=1)[:, ::-1]


def _split_row(
  ids: np.ndarray,
  in_loss: np.ndarray,
  documents: Sequence[Piece],
  vocabulary: Vocabulary,
  continued: Container[str],
) -> Iterator[dict]:
  """Yields a row's decoded parts, one for each line to print.

  A part ends with [eod] or where `in_loss` changes. `ids` (int32) and `in_loss`
  (bool, true for targets) are [tokens]. For `continued` see `describe_step`.
  """
  changes = (in_loss[1:] != in_loss[:-1]) | (ids[:-1] == vocabulary.eod_id)
  ends = [*(np.flatnonzero(changes) + 1).tolist(), len(ids)]
  # {position of a document's first token in the row: document}
  starts = itertools.accumulate((x.tokens for x in documents), initial=0)
  begun = dict(zip(starts, documents, strict=False))
  document = documents[0]
  for start, end in zip([0, *ends], ends, strict=False):
    document = begun.get(start, document)
    is_inside = (
      document.begin > 0 if start in begun else document.source in continued
    )
    # () means that a text starts: drop the space that a tokenizer may add.
    before = None if is_inside else ()
    yield {
      "text": decode_after(vocabulary, before, ids[start:end].tolist()),
      "learnt": bool(in_loss[start]),
      "tokens": end - start,
      "ends_document": bool(ids[end - 1] == vocabulary.eod_id),
    }


def _format_lines(result: dict) -> Iterator[str]:
  rows, length = result["shape"]
  yield f"step {result['step']}: {rows:,} rows of {length:,} tokens"
  yield f"hash            {result['hash']} of {', '.join(result['features'])}"
  for name in ("learnt_share", "padding_share", "eod_share", "byte_share"):
    yield f"{name:15} {100 * result[name]:.3f}%"
  for source, tokens in result["tokens_per_source"].items():
    yield f"tokens          {tokens:,} of {source}"
  for number, row in enumerate(result["rows"]):
    yield ""
    yield f"row {number}:"
    for each in row["documents"]:
      yield (
        f"  {each['tokens']:,} tokens of {each['source']}, epoch "
        f"{each['epoch']}, document {each['document']:,}, from token "
        f"{each['begin']:,}"
      )
    for piece in row["pieces"]:
      mark = "|" if piece["learnt"] else ":"
      yield from (f"{mark} {line}" for line in piece["text"].split("\n"))
      if piece["ends_document"]:
        yield "[eod]"
  yield ""


_FORM = "give what `palm_mtf data report --json` printed"
_COMPARED = ("vocabulary_sha256", "tokens", "batches")
_MEASURED = ("contaminated", "exact_duplicates", "near_duplicates")


def data_report(
  *,
  model_dir: str,
  config: Config,
  config_files: Callable[..., Mapping[str, str]],
  against: str | None,
  as_json: bool,
) -> int:
  """Prints the report; returns 1 if it differs from the report `against`."""
  before = _read_report(against) if against else {}
  files = _list_files(model_dir, config.data, config.model.sequence_length)
  report: dict[str, Any] = {"files": files}
  changed = [*_list_changes(before["files"], files)] if before else []
  if not changed:  # other files would be encoded for nothing
    report |= _describe_run(model_dir, config)
    report["gin"] = config_files()["config.gin"]
    differ = [x for x in _COMPARED if before and report[x] != before.get(x)]
    changed = [f"{name} differ" for name in differ]
  if as_json:
    print(json_text(report | {"changed": changed}))
    return int(bool(changed))
  for path, file in files.items():
    given = file["license"] or "no licence"
    print(f"{file['blake2b']}  {file['bytes']:,} bytes  {given}  {path}")
  for each in (*report.pop("sources", ()), report):
    found = {x: y for x, y in each.items() if x not in ("files", "gin")}
    print_results(found, as_json) if found else None
  print("".join(f"{line}\n" for line in changed), end="")
  return int(bool(changed))


def _read_report(path: str) -> dict[str, Any]:
  what = f"--against = {path!r}"
  lines = read_json_lines(path, what, _FORM, needed=_FORM)
  ((_, _, report), *others) = lines
  files = report.get("files")
  if others or not isinstance(files, dict):
    raise UserError(f"{what}: is not one report with 'files'; {_FORM}.")
  for path, file in files.items():
    if not isinstance(file, dict) or type(file.get("blake2b")) is not str:
      raise UserError(f"{what}: has no hash of {path}; {_FORM}.")
  return report


def _list_changes(
  before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
  old, new = ({x: y["blake2b"] for x, y in z.items()} for z in (before, now))
  changes = {}
  for these, others, what in ((old, new, "is missing"), (new, old, "is new")):
    # A file may have moved, so count how often each hash occurs.
    more = collections.Counter(these.values())
    more.subtract(others.values())
    for path, digest in these.items():
      if more[digest] > 0 and others.get(path) != digest:
        more[digest] -= 1
        changes[path] = "was changed" if path in others else what
  return (f"{path} {what}" for path, what in changes.items())


def _describe_run(model_dir: str, config: Config) -> dict[str, Any]:
  """Returns hashes of tokens and batches, and counts of each source."""
  data, run = config.data, config.run
  vocabulary = load_vocabulary(
    model_dir, data, vocab_size=config.model.vocab_size
  )
  corpus = corpus_of_run(model_dir, config, vocabulary)
  batches = corpus.batches(run.batch_sizes, config.fault_tolerance.skips)
  steps = {*config.inspection.inspect_steps, run.train_steps - 1}
  tasks = config.evaluation.eval_tasks
  examples = ContainedExamples(
    itertools.chain(
      read_evaluation_sets(data),
      *(evaluation_examples(x, "EVAL_TASKS") for x in tasks),
    )
  )
  # Count what filters would remove, also if the run does not remove it.
  found = decide(
    open_sources(data, config.model.sequence_length),
    FilterConfig(remove_duplicates=NEAR),
    examples if examples.num_examples else None,
  )
  sources = []
  for source, store, decisions in zip(
    corpus.sources, corpus.stores, found, strict=True
  ):
    counts = count_removed(decisions)
    read = max(1, counts["documents_read"])
    shares = {f"share_{x}": counts[f"removed_{x}"] / read for x in _MEASURED}
    known = {"source": source.name, **_count_documents(store)}
    sources.append(known | shares)
  return {
    "vocabulary_sha256": vocabulary.sha256,
    "tokens": corpus.fingerprint,
    "batches": {
      str(step): batch_hash(batches.batch(step)) for step in sorted(steps)
    },
    "evaluation_examples": examples.num_examples,
    "short_evaluation_examples": examples.num_short,  # not looked for
    "sources": sources,
  }


def _list_files(
  model_dir: str, data: DataConfig, sequence_length: int
) -> dict[str, dict[str, object]]:
  """Returns {path: source, size in bytes, BLAKE2b hash and licence}.

  The licence is None if LICENSES has none for the path or the source. Remote
  files, which only SeqIO reads, are left out.

  Raises UserError if a file cannot be read.
  """
  found: dict[str, dict[str, object]] = {}
  folder = writable_folder(data.cache_folder, ModelDir(model_dir).tokens)
  with FileDigests(os.path.join(folder, "digests.json")) as digests:
    sources = {x.name: x for x in open_sources(data, sequence_length)}
    for name in [*sources, "DECONTAMINATE_FILES"]:
      globs = data.filters.decontaminate_files
      if name in sources:
        sources[name].fingerprint(digests)  # which hashes all its files
      elif globs:
        digests.read(find_files(globs, name))
      for path, (num_bytes, digest) in digests.take().items():
        found[path] = {
          **{"source": name, "bytes": num_bytes, "blake2b": digest},
          "license": _find_license(data.licenses or {}, name, path),
        }
  return found


def _find_license(
  licenses: Mapping[str, str], name: str, path: str
) -> str | None:
  for pattern, given in licenses.items():
    full = os.path.abspath(os.path.expanduser(pattern))
    if pattern == name or fnmatch.fnmatch(path, full):
      return given
  return None
