# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The commands of `palm_mtf`.

A command's name has one or two words: `data cache` is in the group `data`. The
table names functions instead of importing them, so that help imports nothing.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from palm_mtf.cli.command import Command, flag, number, switch
from palm_mtf.errors import UserError, did_you_mean


def _listen(default: str) -> dict[str, Any]:
  what = "of this host; port 0 selects a free port"
  return flag("ADDRESS:PORT", what, default=default)


_ALLOW_ANY_ADDRESS = switch("permit 0.0.0.0, every address of this host")

_SERVE_FLAGS = {
  "--listen": _listen("127.0.0.1:8000"),
  "--follow": switch(
    "serve each newer checkpoint as soon as training has written it"
  ),
  "--slots": number("N", "completions that are computed together", default=16),
  "--most_waiting": number(
    "N", "completions that may wait for a slot; more are refused", default=64
  ),
  "--most_secs": number(
    "SECS", "that a request may take before its text is cut off", default=300
  ),
  "--api_key_file": flag(
    "FILE", "of API keys, one per line; a request must have one of them"
  ),
  "--allowed_host": flag(
    "NAME",
    "also answer requests that have this name, such as a proxy's, in the "
    "header Host; may be repeated",
    dest="allowed_hosts",
    action="append",
    default=[],
  ),
  "--allow_any_address": _ALLOW_ANY_ADDRESS,
  "--adapter": flag(
    "NAME=PATH",
    "also serve an adapter of the model under this name: the MODEL_DIR of an "
    "adapted run, or a folder of PEFT; may be repeated",
    dest="adapters",
    action="append",
    default=[],
  ),
  "--allow_adapter_loading": switch(
    "let clients load, replace and unload adapters (POST "
    "/v1/load_lora_adapter and /v1/unload_lora_adapter)"
  ),
}


_INPUT = flag(
  "GLOB",
  "files, each a text, or .jsonl files, each line a text; may be "
  "compressed (.gz, .bz2, .xz), and the flag repeated",
  dest="globs",
  action="extend",
  nargs="+",
  required=True,
)
_TEXT_FIELD = flag(
  "FIELD", "the field of a JSON line that is the text", default="text"
)
_MODEL_DIR = flag("MODEL_DIR", "of a training run")
_ADAPTER = {
  "--adapter": flag(
    "PATH",
    "an adapter of the model: the MODEL_DIR of an adapted run, or a folder of "
    "PEFT (default: none)",
  ),
}
_TEXTS = {
  "--text": flag(
    "TEXT", "a document; may be repeated", dest="texts", action="append"
  ),
  "--input": flag(
    "FILE",
    "a document, a .tsv file of inputs and targets or options, or "
    "a .jsonl file: text, or inputs and targets or options",
    dest="input_files",
    action="extend",
    nargs="+",
  ),
}
_MANAGER_TLS = flag(
  "PREFIX",
  "of PREFIX.key and PREFIX.pem, the key and certificate of the manager, its "
  "servers and its clients (default: none)",
  default="",
)
_TO_MANAGER = {
  "--manager": flag("HOST:PORT", "as `pods manage` prints it", required=True),
  "--manager_tls": _MANAGER_TLS,
}

COMMANDS = {
  "train": Command(
    "train a model, or resume its training",
    has_results=False,
    config="Config",
    # Do not save decoding settings: they would override the defaults of the
    # commands that read the run's config.gin, such as `generate`.
    leaves_out="DecodeConfig",
    keeps_config=True,
    takes_functions=True,
    flags={
      "--replay": switch(
        "train nothing: compute the merges of a run of learners again, from "
        "its record, and compare their bits",
        dest="is_replay",
      ),
    },
  ),
  "plan": Command(
    "predict time, memory and cost of a training run",
    config="PlanConfig",
    flags={
      "--search": switch(
        "plan every mesh, layout, number of microbatches and pods, and "
        "REMAT, and print the fastest that fit",
        dest="is_search",
      ),
      "--steps": switch(
        "print what a step computes and sends: nodes, edges and the order of "
        "calls",
        dest="is_steps",
      ),
      "--compile": switch(
        "compile the step for TPU, which takes minutes and no TPU, and print "
        "the compiler's memory, collectives and time next to the plan's",
        dest="is_compiled",
      ),
      "--devices": number(
        "N",
        "number of devices (default: from MESH_SHAPE and NUM_PODS)",
        dest="num_devices",
      ),
      "--output": flag("FILE", "write the fastest layout as a gin file"),
    },
    standalone={
      "--calibrate": (
        "palm_mtf.commands.plan.calibrate",
        "measure this machine for some seconds, and store its rates for CHIP = "
        '"measured"',
      ),
    },
  ),
  "sweep": Command(
    "train runs that differ in some settings, and fit a scaling law to them",
    config="ConfigOfSweep",
    starts_runs=True,
  ),
  "evaluate": Command(
    "print validation loss, or the metrics of SeqIO tasks",
    config="Config",
    takes_model_dir=True,
    flags={
      "--golden": flag(
        "FILE", "of JSON lines: compare log p of texts with recorded log p"
      ),
      **_ADAPTER,
    },
  ),
  "generate": Command(
    "continue texts",
    config="Config",
    takes_model_dir=True,
    flags={
      "--prompt": flag(
        "TEXT",
        "a text to continue; may be repeated",
        dest="prompts",
        action="append",
      ),
      "--input": flag(
        "FILE",
        "prompts, one per line; in a .jsonl file, the field prompt",
        dest="input_file",
      ),
      "--interactive": switch(
        "ask for prompts; the default if none is given and stdin is a terminal"
      ),
      "--chat": switch(
        "answer each line of stdin in one conversation, in the form of the "
        "model's chat_template.jinja"
      ),
      "--json_schema": flag(
        "FILE", "every continuation is JSON that satisfies this schema"
      ),
      "--regex": flag(
        "PATTERN", "every continuation is a text that the pattern matches"
      ),
      **_ADAPTER,
    },
  ),
  "score": Command(
    "print how likely texts, targets or options are",
    config="Config",
    takes_model_dir=True,
    flags={
      **_TEXTS,
      "--against": flag(
        "MODEL_DIR",
        "also print the KL divergence from another run or checkpoint, and how "
        "often both find the same token likeliest",
      ),
      **_ADAPTER,
    },
  ),
  "index build": Command(
    "write the keys of texts, for KNN_INDEX",
    config="Config",
    takes_model_dir=True,
    flags={
      **_TEXTS,
      "--output": flag("FOLDER", "the index to make", required=True),
      "--search": flag(
        None,
        "exact: compare all keys; approximate: faster, by faiss",
        choices=["exact", "approximate"],
        default="exact",
      ),
      **_ADAPTER,
    },
  ),
  "index chunks": Command(
    "write the chunks of a run's training documents, for NEIGHBOUR_INDEX",
    config="CacheConfig",
    takes_functions=True,
  ),
  "index tune": Command(
    "print the KNN_WEIGHT and KNN_TEMPERATURE that fit other texts best",
    config="Config",
    takes_model_dir=True,
    flags=_TEXTS | _ADAPTER,
  ),
  "serve": Command(
    "answer HTTP requests for completions, as OpenAI's clients send them",
    has_results=False,
    config="Config",
    takes_model_dir=True,
    flags=_SERVE_FLAGS,
  ),
  "export": Command(
    "write the newest checkpoint for other software",
    has_results=False,
    config="Config",
    takes_model_dir=True,
    flags={
      "--format": flag(
        None,
        "hf: for Hugging Face transformers; gguf: for llama.cpp; "
        "saved_model: for TensorFlow; npz: NumPy arrays; imatrix: statistics "
        "of a text, for llama.cpp's quantizer",
        dest="target",
        choices=["hf", "gguf", "saved_model", "npz", "imatrix"],
        default="hf",
      ),
      "--output": flag(
        "FOLDER",
        "the path to make: a file for gguf and imatrix, else a folder; "
        "saved_model makes a folder in it, named after the step",
        required=True,
      ),
      "--dtype": flag(
        None,
        "of the weights of gguf; q4_k_m, q5_k_m and q6_k are llama.cpp's "
        "mixtures of types",
        choices=["float32", "float16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"],
        default="float32",
      ),
      "--imatrix": flag(
        "FILE",
        "statistics that --format=imatrix or llama-imatrix has written: in a "
        "mixture, weights of larger inputs lose less",
      ),
      "--round": flag(
        None,
        "round kernels by GPTQ, with statistics of a text, so that this "
        "WEIGHT_DTYPE of the imported model loses less",
        dest="rounding",
        choices=["int8", "int4"],
      ),
      "--calibration": flag(
        "FILE",
        "texts for imatrix and --round, in rows of SEQUENCE_LENGTH tokens "
        "(default: 128 training rows of the run)",
        default=(),
        nargs="+",
      ),
      "--merge": switch(
        "of an adapted run, write the whole model; without it, hf writes the "
        "adapter for PEFT, and gguf for llama.cpp"
      ),
      "--base_model": flag(
        "ID",
        "of the model with which the run began, on the Hugging Face Hub, for "
        "hf and gguf (default: known if it was imported from the Hub's cache)",
      ),
    },
  ),
  "import": Command(
    "turn a model of Hugging Face transformers or llama.cpp into a checkpoint",
    has_results=False,
    entry_point="palm_mtf.commands.export.import_model",
    flags={
      "folder": flag(
        "FOLDER", "with config.json and model.safetensors; or a file.gguf"
      ),
      "--output": flag(
        "MODEL_DIR",
        "the folder to make, for --model_dir and INIT_CHECKPOINT",
        required=True,
      ),
      "--vocabulary": flag(
        "PATH",
        "the model's vocabulary (default: FOLDER/vocabulary.model, "
        "tokenizer.json or tokenizer.model, or the one in file.gguf)",
        dest="vocabulary_path",
      ),
    },
  ),
  "data cache": Command(
    "encode and count the documents of a run, to be shared by runs",
    entry_point="palm_mtf.commands.data.data_cache",
    config="CacheConfig",
    takes_functions=True,
    flags={
      "--verify": switch(
        "compare every stored byte with its hash; encode damaged shards again"
      ),
    },
  ),
  "data inspect": Command(
    "print what a training step reads, as text",
    entry_point="palm_mtf.commands.data.data_inspect",
    config="Config",
    takes_functions=True,
  ),
  "data report": Command(
    "print files, licences, duplicates, filters and batches of a run",
    entry_point="palm_mtf.commands.data.data_report",
    config="Config",
    keeps_config=True,
    takes_functions=True,
    flags={
      "--against": flag(
        "FILE", "an earlier report, as JSON; name what has changed since"
      ),
    },
  ),
  "checkpoints list": Command(
    "print step, date, size and loss of every checkpoint",
    entry_point="palm_mtf.commands.checkpoints.list_all",
    flags={"model_dir": _MODEL_DIR},
  ),
  "checkpoints verify": Command(
    "compare every byte of every checkpoint with its hashes",
    flags={"model_dir": _MODEL_DIR},
  ),
  "checkpoints compare": Command(
    "print how two checkpoints differ",
    flags={
      "first": flag(
        "A",
        "the folder of a checkpoint or of a run, or a TensorFlow "
        "checkpoint's prefix",
      ),
      "second": flag("B", "another"),
    },
  ),
  "checkpoints prune": Command(
    "remove all but the newest whole checkpoints",
    flags={
      "model_dir": _MODEL_DIR,
      "--keep": number("N", "how many of the newest stay", required=True),
      "--keep_every_steps": number(
        "M", "also keep steps that are multiples of M"
      ),
    },
  ),
  "lineage": Command(
    "draw the models that a model came from, and find changed ones",
    flags={
      "model_dir": flag("MODEL_DIR", "of a run; or the folder of a checkpoint"),
      "--score": flag(
        "TEXT", "print how likely each of the models finds a text", dest="text"
      ),
      "--format": flag(
        None,
        "text: the models; openlineage: events of the run, one per line; "
        "croissant: metadata of its data, with hashes",
        dest="target",
        choices=["text", "openlineage", "croissant"],
        default="text",
      ),
    },
  ),
  "vocab": Command(
    "train a vocabulary on your text",
    flags={
      "--input": _INPUT,
      "--size": number("N", "number of pieces; PaLM has 256000", required=True),
      "--output": flag(
        "PREFIX",
        "writes PREFIX.model, for VOCABULARY, and PREFIX.vocab, the "
        "list of its pieces and scores",
        dest="prefix",
        required=True,
      ),
      "--text_field": _TEXT_FIELD,
      "--sample_characters": number(
        "N",
        "characters of the text to learn from, chosen by a hash "
        "(default: 4,096 per piece, from 8 to 67 million, or as many as need "
        "4 GB of memory)",
      ),
    },
  ),
  "vocab inspect": Command(
    "show what a vocabulary loses, and how well it fits your text",
    flags={
      "--vocabulary": flag(
        "PATH", "a SentencePiece model or a tokenizer.json", required=True
      ),
      "--input": _INPUT,
      "--text_field": _TEXT_FIELD,
    },
  ),
  "pods serve": Command(
    "serve devices of this host to the client of a cluster",
    has_results=False,
    flags={
      "--listen": _listen("127.0.0.1:0"),
      "--devices": number("N", "virtual CPU devices", default=1),
      "--threads": number(
        "N",
        "that share an operation's work; must be the same in all servers "
        "(default: one per core)",
      ),
      "--allow_any_address": _ALLOW_ANY_ADDRESS,
      "--manager": flag(
        "HOST:PORT", "where to register (default: none)", default=""
      ),
      "--manager_tls": _MANAGER_TLS,
      "--island": flag(
        "NAME",
        "that servers with a fast network between them share",
        default="main",
      ),
    },
  ),
  "pods manage": Command(
    "give the devices of many servers to many clients",
    has_results=False,
    flags={
      "--listen": _listen("127.0.0.1:2200"),
      "--state": flag(
        "FILE", "that keeps servers and slices", default="pods.sqlite"
      ),
      "--policy": flag(
        "POLICY",
        "order of the programs of all clients: fifo, priority, or shares of "
        "time, by each client's SHARE",
        default="fifo",
      ),
      "--manager_tls": _MANAGER_TLS,
      "--allow_any_address": _ALLOW_ANY_ADDRESS,
    },
  ),
  "pods join": Command(
    "train for a run that waits for learners (LEARNERS)",
    has_results=False,
    flags={
      "address": flag("HOST:PORT", "of the run"),
      "--certificate": flag(
        "FILE", "PREFIX.pem, the certificate of the run", required=True
      ),
      "--token_file": flag(
        "FILE", "with the token that the run's owner gave you", required=True
      ),
      "--most_gb": number(
        "N", "of memory that the run may use (default: what is free)"
      ),
      "--mesh_shape": flag("SHAPE", "MESH_SHAPE of this host's devices"),
      "--layout": flag("RULES", "LAYOUT of this host's devices"),
      "--tpu": flag("TYPE", 'TPU of this host, or "" for CPUs'),
    },
  ),
  "pods token": Command(
    "make a token, with which a learner may join a run",
    flags={
      "name": flag("NAME", "of the learner: OWNER or OWNER/NAME"),
      "--tokens": flag(
        "FILE",
        "of names and hashes, LEARNER_TOKENS of the run; a line that is "
        "removed revokes a token",
        required=True,
      ),
    },
  ),
  "pods list": Command(
    "print the servers of a manager, and who has their devices",
    entry_point="palm_mtf.commands.pods.list_all",
    flags=_TO_MANAGER,
  ),
  "pods drain": Command(
    "let clients avoid a server, and runs leave it",
    flags={
      "server": flag("SERVER", "its address"),
      "--undo": switch("let new clients use the server again"),
      **_TO_MANAGER,
    },
  ),
  "pods release": Command(
    "give the devices of a client to other clients",
    flags={"owner": flag("OWNER", "name of the client"), **_TO_MANAGER},
  ),
  "report": Command(
    "draw what one run or several logged, as one HTML page",
    has_results=False,
    flags={
      "model_dirs": flag(
        "MODEL_DIR", "of a run; give several to compare them", nargs="+"
      ),
      "--output": flag(
        "FILE", "the page to write (default: report.html in MODEL_DIR)"
      ),
    },
  ),
  "doctor": Command(
    "print versions, devices, and problems with their fixes",
    entry_point="palm_mtf.cli.doctor.main",
    flags={
      "--measure": switch(
        "measure the rates of matrix products and memory for some seconds"
      ),
    },
  ),
}


def split_name(arguments: Sequence[str]) -> tuple[str, list[str]]:
  """Returns the name of a command or of a group, and the other arguments.

  A group is the first word of two-word commands. The name is "" if the first
  argument is a flag.

  Raises UserError if no command has this name; suggests the most similar name.
  """
  words = list(
    itertools.takewhile(lambda x: not x.startswith("-"), arguments[:2])
  )
  name = " ".join(words)
  if not words or name in COMMANDS or commands_in(name):
    return name, list(arguments[len(words) :])
  group = words[0]
  # If the group exists, suggest only commands of this group.
  known = commands_in(group) if len(words) == 2 else {}
  if not known:
    if group in COMMANDS:  # the second word is an argument, not part of a name
      return group, list(arguments[1:])
    known = COMMANDS
    if not did_you_mean(name, (x for x in COMMANDS if " " in x)):
      name = group
  # Suggest names of groups too: the first word may be a misspelt group.
  names = dict.fromkeys([*known, *(each.split(" ")[0] for each in known)])
  raise UserError(
    f'unknown command "{name}"{did_you_mean(name, names)}. '
    f"Commands: {', '.join(known)}."
  )


def entry_point(name: str) -> str:
  """Returns the dotted path of a command's function."""
  words = name.split(" ")
  default = f"palm_mtf.commands.{words[0]}.{words[-1]}"
  return COMMANDS[name].entry_point or default


def commands_in(group: str) -> dict[str, Command]:
  """Returns the two-word commands in `group`, or all if `group` is ""."""
  return {
    name: command
    for name, command in COMMANDS.items()
    if not group or name.startswith(f"{group} ")
  }
