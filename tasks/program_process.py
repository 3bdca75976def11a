# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The process that confines itself and then runs one generated program.

namespaces  its folder is in memory, limited in size, and vanishes with it
Landlock    it reads only Python's files and writes only to its folder
seccomp     it starts no process or other program, opens no socket, signals and
            traces no process but itself, and changes no owner, mode or time of
            a file
capset      root has no capability
rlimits     memory, CPU time, size of a file, number of open files

None of this needs root; the first two are used if the kernel has them. This
script gets the descriptor of a pipe as its argument. It reads a JSON object
from stdin, and writes the object's "mark" to the pipe once the "program" has
run to its last line.
"""

# The process imports only the standard library, not palm_mtf. A preexec_fn
# would run Python between fork and exec, which may deadlock with TensorFlow's
# threads.

import contextlib
import ctypes
import errno
import itertools
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from collections.abc import Iterable, Iterator

_LIBC = ctypes.CDLL(None, use_errno=True)

# Constants of linux/prctl.h, linux/seccomp.h and linux/capability.h, and
# numbers of system calls of x86-64.
_PR_SET_PDEATHSIG, _PR_GET_SECCOMP, _PR_SET_SECCOMP = 1, 21, 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPSET, _CAPABILITY_VERSION_3 = 126, 0x20080522
_CLONE_NEWUSER, _CLONE_NEWNS = 0x10000000, 0x20000
_MS_NOSUID, _MS_NODEV = 2, 4
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x10000
# Calls that are allowed only with this process's id, or 0, as first argument.
_KILL, _TGKILL, _PRLIMIT64 = 62, 234, 302
_REFUSED = {
  "starting": (57, 58, 59, 322),  # fork vfork execve execveat
  # tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal, _open, _getfd
  "signalling": (200, 129, 297, 424, 434, 438),
  # ptrace process_vm_readv process_vm_writev kcmp process_madvise
  "tracing": (101, 310, 311, 312, 440),
  # setpriority sched_setparam, _setscheduler, _setaffinity, _setattr ioprio_set
  # migrate_pages move_pages
  "scheduling": (141, 142, 144, 203, 314, 251, 256, 279),
  "network": (41, 425),  # socket io_uring_setup
  # shmget semget msgget mq_open add_key request_key keyctl
  "objects": (29, 64, 68, 240, 248, 249, 250),
  "kernel": (272, 308, 321, 298, 323),  # unshare setns bpf perf userfaultfd
  # chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes
  # futimesat utimensat, which Landlock does not cover
  "metadata": (90, 91, 268, 452, 92, 93, 94, 260, 132, 235, 261, 280),
  # set, lset, fset, remove, lremove, fremove; setxattrat removexattrat
  "attributes": (188, 189, 190, 197, 198, 199, 463, 466),
}

# Mount options of the file system for the program's folder.
_MEMORY = b"size=64m,nr_inodes=4k,mode=700"
# Rights of linux/landlock.h: to read (READ_FILE and READ_DIR); to make sockets
# and devices; and the number of rights by the kernel's version of Landlock.
_READS = 1 << 2 | 1 << 3
_MAKES = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_MOST_RIGHTS = 16
# Files and folders outside of Python's own that Python's libraries open.
_READABLE = (
  "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null",
  "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip


def why_not_confined() -> str:
  """Returns why programs cannot be confined on this machine at all, or ""."""
  if sys.platform != "linux" or platform.machine() != "x86_64":
    return "that takes Linux on x86-64"
  if _LIBC.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
    return "this kernel has no seccomp filters"
  return ""


def landlock_version() -> int:
  """Returns the version of the kernel's Landlock; 0 if it has none."""
  return max(0, _LIBC.syscall(_CREATE_RULESET, None, 0, 1))


def _confine(folder: str, parent: int) -> None:
  """Permanently gives up all rights that a program does not need."""
  _mount_in_memory(folder)
  _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
  if landlock_version():
    _restrict_files(folder)
  head = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
  _checked(_LIBC.syscall(_CAPSET, head, bytes(24)), "capset")
  # Set this after all changes of credentials, which would reset it.
  _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != parent:
    raise SystemExit("the process that started this one has ended")
  _filter_calls()


def _mount_in_memory(folder: str) -> None:
  """Mounts a small file system on the folder, for this process only."""
  # A child process tries the mount first, because some distributions refuse
  # mounts in a new namespace, which a process cannot leave.
  child = os.fork()
  if not child:
    with contextlib.suppress(OSError):
      _mount(folder)
      os._exit(0)
    os._exit(1)
  _, status = os.waitpid(child, 0)
  if not status:  # otherwise the folder stays on the disk
    _mount(folder)


def _mount(folder: str) -> None:
  ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
  _checked(_LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
  with open("/proc/self/setgroups", "w") as file:
    file.write("deny")
  for name, number in ids.items():
    with open(f"/proc/self/{name}", "w") as file:
      file.write(f"{number} {number} 1")
  kind, flags = b"tmpfs", _MS_NOSUID | _MS_NODEV
  path = os.fsencode(folder)
  _checked(_LIBC.mount(kind, path, kind, flags, _MEMORY), "mount")
  os.chdir(folder)


def _restrict_files(folder: str) -> None:
  version = landlock_version()
  rights = (1 << _NUM_RIGHTS.get(version, _MOST_RIGHTS)) - 1
  asked = struct.pack("<Q", rights)
  rules = _LIBC.syscall(_CREATE_RULESET, asked, len(asked), 0)
  _checked(rules, "Landlock")
  for path in (sys.prefix, sys.base_prefix, *sys.path, *_READABLE):
    _allow(rules, path, _READS & rights)
  _allow(rules, folder, rights & ~_MAKES)
  _checked(_LIBC.syscall(_RESTRICT_SELF, rules, 0), "Landlock")
  os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
  try:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
  except OSError:
    return  # not on this machine
  if not os.path.isdir(path):
    rights &= 1 << 1 | 1 << 2  # WRITE_FILE, READ_FILE
  rule = struct.pack("<Qi", rights, file)
  _checked(_LIBC.syscall(_ADD_RULE, rules, 1, rule, 0), f"Landlock: {path}")
  os.close(file)


def _filter_calls() -> None:
  program = b"".join(
    struct.pack("<HBBI", *each) for each in _instructions(os.getpid())
  )
  code = ctypes.create_string_buffer(program)
  head = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
  _checked(
    _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0), "seccomp"
  )


def _instructions(pid: int) -> Iterator[tuple[int, int, int, int]]:
  """Yields the filter's (code, jump if true, jump if false, number)."""
  load, equal, at_least, has_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
  allow, kill = 0x7FFF0000, 0x80000000
  refuse, unknown = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
  yield load, 0, 0, 4  # the architecture: x86-64, and not its 32-bit calls
  yield equal, 1, 0, 0xC000003E
  yield end, 0, 0, kill
  yield load, 0, 0, 0  # the number of the call
  yield at_least, 0, 1, 0x40000000
  yield end, 0, 0, unknown
  for number in itertools.chain(*_REFUSED.values()):
    yield equal, 0, 1, number
    yield end, 0, 0, refuse
  yield equal, 0, 1, _CLONE3  # the C library then calls clone, for a thread
  yield end, 0, 0, unknown
  for number, test, argument in (
    (_CLONE, has_bit, _CLONE_THREAD),
    (_KILL, equal, pid),
    (_TGKILL, equal, pid),
    (_PRLIMIT64, equal, 0),
  ):
    yield equal, 0, 4, number
    yield load, 0, 0, 16  # the first argument
    yield test, 0, 1, argument
    yield end, 0, 0, allow
    yield end, 0, 0, refuse
  yield end, 0, 0, allow


def _checked(result: int, what: str) -> None:
  if result < 0:
    raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _limit(limits: Iterable[tuple[str, int]]) -> None:
  for name, limit in limits:
    resource.setrlimit(getattr(resource, name), (limit, limit))


def main() -> None:
  """Runs the program that stdin describes."""
  pipe = int(sys.argv[1])
  asked = json.loads(sys.stdin.buffer.read())
  with open(os.devnull, "rb") as nothing:
    os.dup2(nothing.fileno(), 0)
  _limit(asked["limits"])
  _confine(os.getcwd(), asked["parent"])
  # Run the program in a new module, which holds no name of this script.
  module = sys.modules["__main__"] = types.ModuleType("__main__")
  sys.argv = ["program.py"]
  code = compile(asked.pop("program"), "program.py", "exec")
  exec(code, vars(module))
  os.write(pipe, asked["mark"].encode())


if __name__ == "__main__":
  main()
