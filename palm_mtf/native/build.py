# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ operations for this CPU once, and caches the library."""

import atexit
import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from palm_mtf.machine.cache_folder import (
  CacheError,
  cache_path,
  open_cache,
  partial_folder,
  warn_of,
)
from palm_mtf.machine.processors import AMX_FLAGS, cpu_flags

_logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
# None of these options reorders the terms of a sum, which would change bits.
_FLAGS = (
  *("-std=c++20", "-O3", "-fPIC", "-pthread", "-Wno-psabi"),
  *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_LIBRARIES = (
  "-shared",
  "-l:libtensorflow_cc.so.2",
  "-l:libtensorflow_framework.so.2",
)
# CPU flags for the instruction sets of vectors.h on x86-64.
_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512_vnni"}
_AMX = _AVX512 | AMX_FLAGS | {"avx512_bf16"}
_TILES = ["-mamx-tile", "-mamx-bf16", "-mamx-int8"]
_COMPILE_SECS = 300
_MOST_KEPT = 16  # newest libraries to keep: one per CPU, compiler and version
_OUTPUT = "operations.so"
# A compiler's message about a full disk or an exceeded quota has one of these.
_NO_SPACE = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))
_compiling = threading.Lock()
_starting = threading.Lock()  # held while a compiler starts
_compilers: list[subprocess.Popen] = []  # now running
_ADVICE = "install g++ 11 or newer, or name it by CXX"


def choose_instruction_flags(cpu: frozenset[str], machine: str) -> list[str]:
  """Returns the compiler's options for a CPU with these flags, such as "avx2".

  `machine` is the result of `platform.machine()` on the CPU's machine.
  """
  if machine != "x86_64":
    return ["-mcpu=native"] if machine == "aarch64" else []
  if not cpu >= _AVX2:
    return ["-march=x86-64"]
  if cpu >= _AVX512:
    options = ["-march=x86-64-v4", "-mavx512vnni"]
    options += ["-mavx512bf16"] * ("avx512_bf16" in cpu)
    return options + (_TILES if cpu >= _AMX else [])
  return ["-march=x86-64-v3"] + ["-mavxvnni"] * ("avx_vnni" in cpu)


def count_panel_columns() -> int:
  """Returns kColumns (vectors.h): columns of weights per panel (panels.h)."""
  options = _choose_options()
  if "-mavx512vnni" in options:
    return 64
  return 32 if "-march=x86-64-v3" in options else 16


def has_avx512_bf16() -> bool:
  """Returns whether the library multiplies bfloat16 with AVX512-BF16."""
  return "-mavx512bf16" in _choose_options()


class BuildError(Exception):
  """C++ operations cannot be compiled; the message has the reason and a fix."""


class _NoSpaceError(BuildError):
  """The disk has no space for the compiler's files."""


def load_library() -> bytes:
  """Returns the library for this CPU, as bytes; compiles it if necessary.

  CXX names the C++ compiler; the default is `c++`. The cache has one library
  per compiler; without a compiler, any cached library for this CPU is loaded.

  Raises BuildError if the library cannot be compiled.
  """
  with _compiling:  # a second thread finds what the first has compiled
    return _load_library()


def is_compiled() -> bool:
  """Returns whether `load_library` need not compile; waits for no compiler."""
  try:
    return _read_cache(*_name_library()[:3]) is not None
  except BuildError:
    return False


def _load_library() -> bytes:
  folder, key, identity, command = _name_library()
  content = _read_cache(folder, key, identity)
  if content is not None:
    return content
  if not identity:
    raise BuildError(f"{command[0]}: no such compiler; {_ADVICE}")
  content = _compile([*command, *_FLAGS, *_choose_options()], folder)
  try:
    with open_cache(folder, make=True) as cache:
      cache.keep_newest(f"{key}_{identity}.so", content, _MOST_KEPT)
  except CacheError as error:
    warn_of(error)
  return content


def _name_library() -> tuple[str, str, str, list[str]]:
  # Returns the cache's folder, the beginning and the end of the library's name
  # in it, and the compiler's command. The end is "" without a compiler.
  digest = hashlib.sha256()
  for part in sorted(_SOURCES.glob("*.[ch]*")):
    digest.update(part.read_bytes())
  version = importlib.metadata.version("tensorflow")
  path = cache_path("native", digest.hexdigest(), version, *_choose_options())
  command = _find_compiler()
  return *os.path.split(path), _hash_compiler(command), command


def _read_cache(folder: str, key: str, identity: str) -> bytes | None:
  try:
    with open_cache(folder) as cache:
      names = [f"{key}_{identity}.so"]
      if not identity:
        names = [x for x in cache.names() if x.startswith(f"{key}_")]
      return next(iter(cache.load(names).values()), None)
  except FileNotFoundError:
    pass
  except CacheError as error:
    warn_of(error)
  return None


def open_library() -> tuple[str, bytes]:
  """Returns a path from which to load the library, and its content.

  Raises BuildError, or OSError if the file is too large (ulimit -f).
  """
  content = load_library()
  return _path_of(content), content


@functools.cache  # TensorFlow refuses to load operations from a second path
def _path_of(content: bytes) -> str:
  # The library is loaded from a file in memory, because a change of a mapped
  # file on disk would crash the process. The file stays open, because
  # TensorFlow keeps its path.
  file = os.memfd_create("palm_mtf_operations")
  if os.write(file, content) < len(content):
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
  return f"/proc/self/fd/{file}"


def compile_soon() -> None:
  """Begins to compile the library, if none is cached, in another thread."""

  def compile_it() -> None:
    with contextlib.suppress(BuildError, OSError):  # a later use raises it
      load_library()

  atexit.unregister(_stop_compilers)  # once is enough
  atexit.register(_stop_compilers)
  threading.Thread(target=compile_it, daemon=True).start()


def _stop_compilers() -> None:
  """Ends running compilers, which would outlive this process."""
  _starting.acquire()  # never released, so that no other compiler starts
  for process in [*_compilers]:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)


def read_build_options(content: bytes) -> str:
  """Returns the compiler's options and version in a library; "" if none."""
  match = re.search(rb"palm_mtf was built with ([^\0]*)", content)
  return match[1].decode(errors="replace") if match else ""


def _choose_options() -> list[str]:
  return choose_instruction_flags(cpu_flags(), platform.machine())


def _find_compiler() -> list[str]:
  # Returns the compiler's command, such as ["ccache", "g++"].
  given = os.environ.get("CXX", "").strip() or "c++"
  if shutil.which(given):  # the path of a compiler may have spaces
    words = [given]
  else:
    try:
      words = shlex.split(given)
    except ValueError as error:
      raise BuildError(f"CXX = {given!r}: {error}") from None
  found = shutil.which(words[0])
  # The path is absolute, because the compiler runs in another folder.
  return [os.path.abspath(found) if found else words[0], *words[1:]]


def _hash_compiler(command: Sequence[str]) -> str:
  # Returns a hash that names the compiler in the cache; "" without a compiler.
  if not shutil.which(command[0]):
    return ""
  parts = []
  for word in command:
    # Hash a file's size and time; asking for its version would start a process.
    if path := shutil.which(word):
      status = os.stat(path)
      parts += [os.path.realpath(path), status.st_size, status.st_mtime_ns]
    parts.append(word)
  return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def _compile(command: Sequence[str], folder: str) -> bytes:
  # Compiles in the cache's folder, because the disk of temporary files may be
  # full; if that fails, compiles in a temporary folder.
  _logger.info(
    "compiling the operations in C++ for this CPU, once: some 15 seconds"
  )
  try:
    with open_cache(folder, make=True) as cache:
      return _compile_in(cache.descriptor, command)
  except (CacheError, OSError, _NoSpaceError):
    pass
  try:
    above = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY)
    try:
      return _compile_in(above, command)
    finally:
      os.close(above)
  except (CacheError, OSError) as error:
    raise BuildError(f"no temporary folder ({error}); set TMPDIR") from None


def _compile_in(above: int, command: Sequence[str]) -> bytes:
  # Compiles in a new subfolder of the folder that has the file descriptor
  # `above`. Raises OSError if the subfolder cannot be made.
  package = importlib.util.find_spec("tensorflow").submodule_search_locations[0]
  options = [x for x in command if x.startswith("-") and x not in _FLAGS]
  said = os.memfd_create("said")  # in memory, because the disk may be full
  try:
    with partial_folder(above) as folder:
      define = f"-DPALM_OPTIONS={_quote(' '.join(options))}"
      compile_it = [*command, define, f"-I{package}/include", "-c"]
      units = {f"{x.stem}.o": str(x) for x in sorted(_SOURCES.glob("*.cc"))}
      code = _call(
        [[*compile_it, unit, "-o", name] for name, unit in units.items()],
        folder.descriptor,
        said,
      ) or _call(
        [[*command, *units, "-o", _OUTPUT, f"-L{package}", *_LIBRARIES]],
        folder.descriptor,
        said,
      )
      content = None if code else folder.read(_OUTPUT)
    if code:
      text = os.pread(said, os.fstat(said).st_size, 0)
      raise _make_error(command[0], code, text.decode(errors="replace"))
  finally:
    os.close(said)
  if not content or not read_build_options(content):
    raise BuildError(f"{command[0]} has made no library; {_ADVICE}")
  return content


def _quote(text: str) -> str:  # returns a C++ string literal
  return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _call(commands: Sequence[Sequence[str]], folder: int, said: int) -> int:
  # Runs commands at the same time in `folder`, with output to `said` (both are
  # descriptors); returns the first exit status that is not 0, if any.
  running = []
  try:
    for command in commands:
      with _starting:
        process = subprocess.Popen(
          command,
          cwd=f"/proc/self/fd/{folder}",  # works even if the folder is renamed
          env={**os.environ, "TMPDIR": ".", "LC_ALL": "C"},
          stdin=subprocess.DEVNULL,
          stdout=said,
          stderr=said,
          umask=0o077,
          start_new_session=True,  # so that killpg also ends child processes
        )
        _compilers.append(process)
      running.append(process)
    codes = [process.wait(_COMPILE_SECS) for process in running]
    return next(filter(None, codes), 0)
  except OSError as error:
    raise BuildError(f"{command[0]}: {error.strerror}; {_ADVICE}") from None
  except subprocess.TimeoutExpired:
    raise BuildError(
      f"{command[0]} has not ended in {_COMPILE_SECS} seconds; {_ADVICE}"
    ) from None
  finally:
    for process in running:
      _compilers.remove(process)
      if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _make_error(compiler: str, code: int, said: str) -> BuildError:
  lines = [x.strip() for x in said.splitlines() if x.strip()]
  full = [x for x in lines if any(reason in x for reason in _NO_SPACE)]
  if full:
    return _NoSpaceError(f"{full[0]}; make room, or set TMPDIR")
  # The reason is in a line with "error"; a linker's last line does not have it.
  errors = [x for x in lines if "error" in x.lower()] or lines[-1:]
  reason = errors[0] if errors else f"exit status {code}"
  return BuildError(f"{compiler}: {reason}; {_ADVICE}")
