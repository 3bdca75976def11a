# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of `palm_mtf`.

A name has one word or two: `data cache` is one of the group `data`. Nothing but
names is kept here, so that help imports nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.errors import UserError, did_you_mean


class Command(NamedTuple):
  """What one command is called with.

  Attributes:
    summary: one line for `palm_mtf --help`.
    entry_point: dotted path of the function that runs it, by keywords.
    config: class in palm_mtf.config that gin's macros fill, "" for a command
      that has flags alone. The entry point takes `model_dir` and `config`; its
      help and its own defaults are in gin/defaults/<name>.gin, where "_" stands
      for a space.
    leaves_out: parts of the class that keep their defaults.
    has_results: whether the entry point takes `as_json`, bool: print results as
      JSON, one object a line.
    keeps_config: whether the entry point takes `config_files`, a function of
      the macros that it resolved that returns {file name: text}, to be written
      into MODEL_DIR.
    starts_runs: whether the entry point takes `load_run`, which makes the
      settings of a run (run_settings.loader_of_runs).
    takes_model_dir: whether --model_dir stands for the config.gin in that
      folder.
    flags: {flag: keywords of argparse}; one without dashes is positional. The
      entry point takes each as a keyword.
    alone: {flag: (dotted path, help)} of flags that need no configuration. The
      function takes `hardware_of`, which returns the rates of a CHIP, and
      `as_json`.
  """

  summary: str
  entry_point: str
  config: str = ""
  leaves_out: Sequence[str] = ()
  has_results: bool = False
  keeps_config: bool = False
  starts_runs: bool = False
  takes_model_dir: bool = False
  flags: Mapping[str, Mapping[str, Any]] = {}
  alone: Mapping[str, tuple[str, str]] = {}


_ALLOW_ANY_ADDRESS = {
  "action": "store_true",
  "help": "permit 0.0.0.0, every address of this host",
}

_SERVE_FLAGS = {
  "--listen": {
    "metavar": "ADDRESS:PORT",
    "default": "127.0.0.1:8000",
    "help": "of this host; port 0 is any that is free (default: "
    "127.0.0.1:8000)",
  },
  "--follow": {
    "action": "store_true",
    "help": "serve each newer checkpoint as soon as training has written it",
  },
  "--slots": {
    "metavar": "N",
    "type": int,
    "default": 16,
    "help": "completions that are computed together (default: 16)",
  },
  "--most_waiting": {
    "metavar": "N",
    "type": int,
    "default": 64,
    "help": "completions that may wait for a slot; more are refused "
    "(default: 64)",
  },
  "--most_secs": {
    "metavar": "SECS",
    "type": int,
    "default": 300,
    "help": "that a request may take; its text ends there (default: 300)",
  },
  "--api_key_file": {
    "metavar": "FILE",
    "help": "of API keys, one per line; a request must have one of them",
  },
  "--allowed_host": {
    "dest": "allowed_hosts",
    "metavar": "NAME",
    "action": "append",
    "default": [],
    "help": "answer requests with this name in the header Host too, which "
    "a proxy sends; may be repeated",
  },
  "--allow_any_address": _ALLOW_ANY_ADDRESS,
}


# Flags that several commands share.
_INPUT = {
  "dest": "globs",
  "metavar": "GLOB",
  "action": "extend",
  "nargs": "+",
  "required": True,
  "help": "files, each a text, or .jsonl files, each line a text; may be "
  "compressed (.gz, .bz2, .xz), and the flag repeated",
}
_TEXT_FIELD = {
  "metavar": "FIELD",
  "default": "text",
  "help": "the field of a JSON line that is the text (default: text)",
}
_MODEL_DIR = {"metavar": "MODEL_DIR", "help": "of a training run"}

COMMANDS = {
  "train": Command(
    "train a model, or resume its training",
    entry_point="palm_mtf.commands.train.train",
    config="Config",
    # Its config.gin leaves these to the commands that read it.
    leaves_out=["decode"],
    keeps_config=True,
  ),
  "plan": Command(
    "predict time, memory and cost of a training run",
    entry_point="palm_mtf.commands.plan.plan",
    config="PlanConfig",
    has_results=True,
    flags={
      "--plot": {
        "metavar": "FILE",
        "help": "write a picture of memory and time by part, a PNG",
      },
      "--curves": {
        "dest": "has_curves",
        "action": "store_true",
        "help": "print step time and MFU against the network between pods, "
        "their number, the batch and the sequence length; --plot draws them",
      },
      "--search": {
        "dest": "is_search",
        "action": "store_true",
        "help": "plan every mesh, layout, number of microbatches and pods, and "
        "REMAT, and print the fastest that fit",
      },
      "--devices": {
        "dest": "num_devices",
        "metavar": "N",
        "type": int,
        "help": "of all pods, to search over (default: those of MESH_SHAPE and "
        "NUM_PODS)",
      },
      "--output": {
        "metavar": "FILE",
        "help": "write the fastest layout as a gin file",
      },
    },
    alone={
      "--calibrate": (
        "palm_mtf.commands.plan.calibrate",
        "measure this machine, some seconds, and keep its rates for CHIP = "
        '"measured"',
      ),
      "--table3": (
        "palm_mtf.commands.plan.print_table3",
        "print PaLM's Table 3, worked out again",
      ),
    },
  ),
  "sweep": Command(
    "train runs that differ in some settings, and fit a scaling law to them",
    entry_point="palm_mtf.commands.sweep.sweep",
    config="ConfigOfSweep",
    has_results=True,
    starts_runs=True,
  ),
  "evaluate": Command(
    "print validation loss, or the metrics of SeqIO tasks",
    entry_point="palm_mtf.commands.evaluate.evaluate",
    config="Config",
    has_results=True,
    takes_model_dir=True,
  ),
  "generate": Command(
    "continue texts",
    entry_point="palm_mtf.commands.generate.generate",
    config="Config",
    has_results=True,
    takes_model_dir=True,
    flags={
      "--prompt": {
        "dest": "prompts",
        "metavar": "TEXT",
        "action": "append",
        "help": "a text to continue; may be repeated",
      },
      "--input": {
        "dest": "input_file",
        "metavar": "FILE",
        "help": "prompts, one a line; of a .jsonl file the field prompt",
      },
      "--interactive": {
        "action": "store_true",
        "help": "ask for prompts; a terminal without prompts asks anyway",
      },
    },
  ),
  "score": Command(
    "print how likely texts, targets or options are",
    entry_point="palm_mtf.commands.score.score",
    config="Config",
    has_results=True,
    takes_model_dir=True,
    flags={
      "--text": {
        "dest": "texts",
        "metavar": "TEXT",
        "action": "append",
        "help": "a document; may be repeated",
      },
      "--input": {
        "dest": "input_files",
        "metavar": "FILE",
        "action": "extend",
        "nargs": "+",
        "help": "a document, a .tsv file of inputs and targets or options, or "
        "a .jsonl file: text, or inputs and targets or options",
      },
    },
  ),
  "serve": Command(
    "answer HTTP requests for completions, as OpenAI's clients send them",
    entry_point="palm_mtf.commands.serve.serve",
    config="Config",
    takes_model_dir=True,
    flags=_SERVE_FLAGS,
  ),
  "export": Command(
    "write the newest checkpoint for other software",
    entry_point="palm_mtf.commands.export.export",
    config="Config",
    takes_model_dir=True,
    flags={
      "--format": {
        "dest": "target",
        "choices": ["hf", "gguf", "saved_model", "npz"],
        "default": "hf",
        "help": "hf (default): for Hugging Face transformers; gguf: for "
        "llama.cpp; saved_model: for TensorFlow; npz: NumPy arrays",
      },
      "--output": {
        "metavar": "FOLDER",
        "required": True,
        "help": "what to make: a file of gguf, else a folder; saved_model "
        "makes one in it for its step",
      },
      "--dtype": {
        "choices": ["float32", "float16", "q8_0"],
        "default": "float32",
        "help": "of the weights of gguf (default: float32)",
      },
    },
  ),
  "import": Command(
    "turn a model of Hugging Face transformers into a checkpoint",
    entry_point="palm_mtf.commands.import_model.import_model",
    flags={
      "folder": {
        "metavar": "FOLDER",
        "help": "with config.json and model.safetensors",
      },
      "--output": {
        "metavar": "MODEL_DIR",
        "required": True,
        "help": "the folder to make, for --model_dir and INIT_CHECKPOINT",
      },
      "--vocabulary": {
        "dest": "vocabulary_path",
        "metavar": "PATH",
        "help": "the SentencePiece model of its ids (default: "
        "FOLDER/vocabulary.model, which export writes)",
      },
    },
  ),
  "data cache": Command(
    "encode the documents of a run, for all runs",
    entry_point="palm_mtf.commands.data_cache.data_cache",
    config="CorpusConfig",
    has_results=True,
    flags={
      "--verify": {
        "action": "store_true",
        "help": "compare every byte that is there with its hash; encode anew "
        "what is damaged",
      },
    },
  ),
  "data inspect": Command(
    "print what a training step reads, as text",
    entry_point="palm_mtf.commands.data_inspect.data_inspect",
    config="Config",
    has_results=True,
  ),
  "data statistics": Command(
    "count documents, tokens, epochs, duplicates and overlap",
    entry_point="palm_mtf.commands.data_statistics.data_statistics",
    config="StatisticsConfig",
    has_results=True,
  ),
  "checkpoints list": Command(
    "print step, date, size and loss of every checkpoint",
    has_results=True,
    entry_point="palm_mtf.commands.checkpoints.list_all",
    flags={"model_dir": _MODEL_DIR},
  ),
  "checkpoints verify": Command(
    "compare every byte of every checkpoint with its hashes",
    has_results=True,
    entry_point="palm_mtf.commands.checkpoints.verify",
    flags={"model_dir": _MODEL_DIR},
  ),
  "checkpoints compare": Command(
    "print in what two checkpoints differ",
    has_results=True,
    entry_point="palm_mtf.commands.checkpoints.compare",
    flags={
      "first": {
        "metavar": "A",
        "help": "the folder of a checkpoint or of a run, or a TensorFlow "
        "checkpoint's prefix",
      },
      "second": {"metavar": "B", "help": "another"},
    },
  ),
  "checkpoints prune": Command(
    "remove all but the newest whole checkpoints",
    has_results=True,
    entry_point="palm_mtf.commands.checkpoints.prune",
    flags={
      "model_dir": _MODEL_DIR,
      "--keep": {
        "metavar": "N",
        "type": int,
        "required": True,
        "help": "how many of the newest stay",
      },
      "--keep_every_steps": {
        "metavar": "M",
        "type": int,
        "help": "those whose step is a multiple of M stay too",
      },
    },
  ),
  "vocab": Command(
    "train a vocabulary of your own",
    has_results=True,
    entry_point="palm_mtf.commands.vocab.vocab",
    flags={
      "--input": _INPUT,
      "--size": {
        "metavar": "N",
        "type": int,
        "required": True,
        "help": "number of pieces; PaLM has 256000",
      },
      "--output": {
        "metavar": "PREFIX",
        "dest": "prefix",
        "required": True,
        "help": "writes PREFIX.model, for VOCABULARY, and PREFIX.vocab, the "
        "list of its pieces and scores",
      },
      "--text_field": _TEXT_FIELD,
      "--sample_characters": {
        "metavar": "N",
        "type": int,
        "help": "characters of the text to learn from, chosen by a hash "
        "(default: 4,096 a piece, from 8 to 67 million, or as many as need "
        "4 GB of memory)",
      },
    },
  ),
  "vocab inspect": Command(
    "show the pieces of a vocabulary, and how well it fits your text",
    has_results=True,
    entry_point="palm_mtf.commands.vocab.inspect",
    flags={
      "--vocabulary": {
        "metavar": "PATH",
        "required": True,
        "help": "a SentencePiece model, ours or a foreign one",
      },
      "--input": _INPUT,
      "--text_field": _TEXT_FIELD,
    },
  ),
  "pods serve": Command(
    "serve devices of this host to the client of a cluster",
    entry_point="palm_mtf.commands.pods_serve.serve",
    flags={
      "--listen": {
        "metavar": "ADDRESS:PORT",
        "default": "127.0.0.1:0",
        "help": "of this host; port 0 is any that is free (default: "
        "127.0.0.1:0)",
      },
      "--devices": {
        "metavar": "N",
        "type": int,
        "default": 1,
        "help": "virtual CPU devices (default: 1)",
      },
      "--threads": {
        "metavar": "N",
        "type": int,
        "help": "that share an operation's work, as many in all servers "
        "(default: one for each core)",
      },
      "--allow_any_address": _ALLOW_ANY_ADDRESS,
    },
  ),
  "report": Command(
    "draw what runs logged: one HTML page, of one run or several",
    entry_point="palm_mtf.commands.report.report",
    flags={
      "model_dirs": {
        "metavar": "MODEL_DIR",
        "nargs": "+",
        "help": "of a run; several are compared",
      },
      "--output": {
        "metavar": "FILE",
        "help": "the page to write (default: report.html in MODEL_DIR)",
      },
    },
  ),
  "doctor": Command(
    "print versions and devices, and what to mend",
    has_results=True,
    entry_point="palm_mtf.cli.doctor.main",
    flags={
      "--gin_file": {
        "metavar": "FILE",
        "action": "append",
        "default": [],
        "help": "a configuration that the machine has to suit; may be repeated",
      },
      "--measure": {
        "action": "store_true",
        "help": "measure the rates of products and of memory, some seconds",
      },
    },
  ),
}


def split_name(arguments: Sequence[str]) -> tuple[str, list[str]]:
  """Splits the name of a command, or of a group, from what follows it.

  The name is "" where the first argument is a flag.

  Raises:
    UserError: no command has this name; names the nearest one.
  """
  # At most two words before the first flag can be a name.
  words = []
  for word in arguments[:2]:
    if word.startswith("-"):
      break
    words.append(word)
  name = " ".join(words)
  if not words or name in COMMANDS or commands_in(name):
    return name, list(arguments[len(words) :])
  group = words[0]
  # Of a known group only its own commands are near.
  known = commands_in(group) if len(words) == 2 else {}
  if not known:
    if group in COMMANDS:  # a wrong argument follows, not a wrong name
      return group, list(arguments[1:])
    known = COMMANDS
    if not did_you_mean(name, (x for x in COMMANDS if " " in x)):
      name = group
  # Groups are nearest to a misspelt first word.
  names = dict.fromkeys([*known, *(each.split(" ")[0] for each in known)])
  raise UserError(
    f'unknown command "{name}"{did_you_mean(name, names)}. '
    f"Commands: {', '.join(known)}."
  )


def commands_in(group: str) -> dict[str, Command]:
  """Returns the commands of two words whose first is `group`, or all for ""."""
  return {
    name: command
    for name, command in COMMANDS.items()
    if not group or name.startswith(f"{group} ")
  }
