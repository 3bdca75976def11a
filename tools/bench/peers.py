# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs in other frameworks that cases compare palm_mtf with."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from palm_mtf.errors import UserError
from tools.bench.command import Flag, choices
from tools.bench.models import SIZES

_FOLDER = Path(__file__).resolve().parent.parent / "peers"


@dataclasses.dataclass(frozen=True)
class Peer:
  """A program in tools/peers/.

  Attributes:
    script: name of the file, and arguments that only this peer passes to it.
    modules: modules that its Python must have.
    dtypes: {number of bits per weight: the peer's dtype with so many bits}.
  """

  script: str
  modules: tuple[str, ...]
  dtypes: Mapping[int, str]


_FLOATS = {32: "float32", 16: "bfloat16"}
# Peers of each case, by the name for --peer.
PEERS = {
  "train": {
    "torch": Peer("torch_peer.py --compile", ("torch",), _FLOATS),
    "torch_eager": Peer("torch_peer.py", ("torch",), _FLOATS),
    "torchao": Peer(
      "torch_peer.py --compile --int8", ("torch", "torchao"), _FLOATS
    ),
    "jax": Peer("jax_peer.py", ("jax",), _FLOATS),
  },
  "decode": {
    "llama_cpp": Peer(
      "llama_cpp_decode.py",
      ("llama_cpp",),
      {
        **{32: "float32", 16: "float16", 8: "q8_0", 4: "q4_0"},
        **{"q4_k": "q4_k_s", "q5_k": "q5_k_s", "q6_k": "q6_k"},
      },
    ),
    "onnx": Peer(
      "onnx_decode.py",
      ("onnx", "onnxruntime"),
      {32: "float32", 8: "int8", 4: "int4"},
    ),
    "openvino": Peer(
      "openvino_decode.py",
      ("openvino",),
      {**_FLOATS, 8: "int8", 4: "int4"},
    ),
  },
}


SPEED_FLAGS = {
  "--size": Flag("26.6M", f"one of {', '.join(SIZES)}", SIZES),
  "--rounds": Flag(40, "turns of each program"),
}


def peer_flags(case: str) -> dict[str, Flag]:
  """Returns --peer, a list of names of PEERS, and --peer_python."""
  names = PEERS[case]
  return {
    "--peer": Flag("", f"some of {','.join(names)}", choices(names)),
    "--peer_python": Flag(sys.executable, "interpreter of the peers"),
  }


def check_peers(case: str, names: Iterable[str], python: str) -> None:
  """Raises UserError if a Python lacks a module that a peer imports."""
  for name in names:
    for module in PEERS[case][name].modules:
      _check_module(name, module, python)


def _check_module(peer: str, module: str, python: str) -> None:
  look = f"import importlib.util as u; print(u.find_spec({module!r}))"
  try:
    found = subprocess.run(
      [python, "-c", look], capture_output=True, text=True, timeout=60
    ).stdout.strip()
  except (OSError, subprocess.TimeoutExpired) as error:
    raise UserError(
      f"--peer_python = {python!r}: cannot be run ({error}); give the "
      f"path of a Python that has {module}."
    ) from error
  if found in ("", "None"):
    raise UserError(
      f"--peer = {peer!r}: {python} has no module {module}; install "
      "it there, or name another Python with --peer_python."
    )


def memory_command() -> list[str]:
  """Returns the command line that reads memory in turns."""
  return [sys.executable, str(_FOLDER / "memory_rate.py")]


def peer_command(
  python: str, peer: Peer, sizes: Mapping[str, object], **settings: object
) -> list[str]:
  """Returns the command line of a peer, whose flags have our settings' names.

  Args:
    python: path of an interpreter that has the peer's framework.
    peer: program to run.
    sizes: sizes of the model, as in SIZES.
    **settings: further flags.
  """
  name, *flags = peer.script.split()
  values = {**sizes, **settings}
  flags += [f"--{key}={value}" for key, value in values.items()]
  return [python, str(_FOLDER / name), *flags]
