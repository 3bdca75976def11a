# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What reaches a run's port is checked before it costs memory or time."""

import contextlib
import json
import os
import pathlib
import socket
import tempfile
import threading
import time

import grpc
import numpy as np
import pytest

from palm_mtf import __version__
from palm_mtf.errors import UserError
from palm_mtf.learners import service
from palm_mtf.learners.client import LearnerClient, NoRunError
from palm_mtf.learners.members import Members, add_member
from palm_mtf.learners.protocol import (
  PROTOCOL,
  Message,
  at_most,
  specs_of,
  write_chunks,
)
from palm_mtf.learners.service import SERVICE
from tests import processes
from tests.learners.attacker import Echo, Run, make_key, numbers
from tests.refusals import message_of

ARRAYS = {
  "w": numbers(600, 700),  # two chunks
  "none": np.zeros((0, 3), np.float32),
  "scalar": np.float32(3).reshape(()),
  "codes": np.arange(-5, 6, dtype=np.int8),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
  return make_key(tmp_path_factory.mktemp("key"))


@pytest.fixture(scope="module")
def run(prefix, tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  with Run(folder, prefix, Echo(**ARRAYS)) as run:
    yield run


@pytest.fixture(autouse=True)
def many_calls(monkeypatch):
  monkeypatch.setattr(service, "_BURST", 1e6)


def declare(*arrays, **more):
  about = {"protocol": PROTOCOL, "palm_mtf": __version__, "header": {}}
  return json.dumps({**about, "arrays": list(arrays), **more}).encode()


def test_arrays_cross_with_the_same_bits(run):
  with run.connect() as client:
    assert client.join({"a": "\u00fc"}) == {
      "member": "alice/1",
      "a": "\u00fc",
    }
    work = client.next({}, at_most(10**7))
    assert specs_of(work.arrays) == specs_of(ARRAYS)
    for name, array in ARRAYS.items():
      assert work.arrays[name].tobytes() == array.tobytes()
    assert client.contribute(work) == {"accepted": True, "reason": ""}
  member, message = run.handler.taken[-1]
  assert member == "alice/1"
  assert message.arrays["w"].tobytes() == ARRAYS["w"].tobytes()


@pytest.mark.parametrize("name", ["a" * 120, "a%20b c?"])
def test_a_run_serves_with_any_folder_for_temporary_files(
  name, prefix, tmp_path, monkeypatch
):
  """A path of a Unix socket has at most 107 bytes, and gRPC takes it as URI."""
  (tmp_path / name).mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
  with Run(tmp_path, prefix, Echo()) as run, run.connect() as client:
    assert client.join({})
  assert not [*(tmp_path / name).iterdir()]


def test_only_a_token_of_the_file_gets_an_answer_and_its_line_revokes_it(
  prefix, tmp_path
):
  with Run(tmp_path, prefix, Echo()) as run:
    token = add_member(run.tokens, "bob")
    assert token not in open(run.tokens).read()  # only its hash
    assert os.stat(run.tokens).st_mode & 0o77 == 0
    with run.connect(token) as client:
      assert client.join({})["member"] == "bob"
      lines = open(run.tokens).read().splitlines(keepends=True)
      with open(run.tokens, "w") as file:
        file.writelines(x for x in lines if not x.startswith("bob "))
      refused = (
        f"{run.address}: no learner has this token; ask who runs it for a "
        "token."
      )
      assert message_of(client.join, {}) == refused
    for wrong in ("", "x", run.token[:-1], run.token + "x", "a" * 4000):
      with run.connect(wrong) as client:
        assert message_of(client.join, {}) == refused


def test_learners_wait_while_the_file_of_tokens_is_replaced(prefix, tmp_path):
  """They would end if they were refused; none is admitted meanwhile."""
  with Run(tmp_path, prefix, Echo()) as run:
    written = pathlib.Path(run.tokens).read_text()
    for wrong in ("", "alice", f"{written}bob typo\n", None):
      os.remove(run.tokens)
      if wrong is not None:
        pathlib.Path(run.tokens).write_text(wrong)
      assert run.send("join", [declare()]) == ("UNAVAILABLE", "try again")
    pathlib.Path(run.tokens).write_text(written)
    with run.connect() as client:
      assert client.join({})["member"] == "alice/1"


def test_a_connection_without_tls_or_to_another_run_gets_no_answer(
  run, tmp_path
):
  with grpc.insecure_channel(run.address) as channel:
    with pytest.raises(grpc.RpcError) as error:
      list(channel.stream_stream(f"/{SERVICE}/join")(iter([b""]), timeout=5))
  assert error.value.code() in (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
  )
  other = make_key(tmp_path)
  with run.connect(certificate=f"{other}.pem") as client:
    with pytest.raises(NoRunError, match="its certificate is not"):
      client.join({})


WRONG = "not a message of palm_mtf."
_W = ["w", "float32", [600, 700]]
CRAFTED = {
  "nothing": b"",
  "no JSON": b"\xff\x00",
  "deep JSON": b"[" * 500_000,
  "deep object": b'{"a":' * 100_000,
  "long number": b"1" * 500_000,
  "a list": b"[]",
  "NaN": declare(header={"x": float("nan")}),
  "infinity": declare().replace(b'"header": {}', b'"header": {"x": 1e999}'),
  "a header that is a list": declare(header=[1]),
  "arrays that are an object": declare(arrays={}),
  "negative size": declare(["w", "float32", [-1, 700]]),
  "two negative sizes": declare(["w", "float32", [-600, -700]]),
  "a product that overflows int64": declare(["w", "float32", [2**33, 2**33]]),
  "a size beyond int64": declare(["w", "float32", [2**70]]),
  "a size that is a float": declare(["w", "float32", [6e2, 700]]),
  "a size that is a bool": declare(["w", "float32", [True, 700]]),
  "too many dimensions": declare(["w", "float32", [1] * 40]),
  "objects, which would be pickles": declare(["w", "object", [600, 700]]),
  "a dtype that is a list": declare(["w", ["float32"], [600, 700]]),
  "the same name twice": declare(_W, _W),
  "too many arrays": declare(*[["", "bool", []]] * 30_000),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_headers_are_refused(what, run):
  # numpy never gets to see them: no memory was taken.
  code, details = run.send("contribute", [CRAFTED[what], b"x" * 1000])
  assert code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
  if "overflows" in what:
    assert details.startswith("array 'w' is float32 [8589934592, 8589934592] ")
  elif what != "too many arrays":
    assert details == WRONG
  with run.connect() as client:  # the run still answers
    assert client.join({})


def test_a_contribution_of_another_model_names_the_array(run):
  for arrays, message in (
    (
      {**ARRAYS, "w": numbers(600, 701)},
      "array 'w' is float32 [600, 701] and has to be float32 [600, 700]: the "
      "contribution is of another model.",
    ),
    (
      {**ARRAYS, "w": numbers(600, 700).astype(np.int32)},
      "array 'w' is int32 [600, 700] and has to be float32 [600, 700]: the "
      "contribution is of another model.",
    ),
    (
      {**ARRAYS, "more": numbers(1)},
      "array 'more' is float32 [1] and has to be missing: the contribution is "
      "of another model.",
    ),
    (
      {"w": ARRAYS["w"]},
      "array 'none' is missing and has to be float32 [0, 3]: the contribution "
      "is of another model.",
    ),
  ):
    with run.connect() as client:
      found = message_of(client.contribute, Message({"work": "1"}, arrays))
    assert found == f"{run.address}: {message}"


def test_more_or_fewer_bytes_than_declared_are_refused(run):
  chunks = [*write_chunks(Message({"work": "1"}, ARRAYS))]
  assert run.send("contribute", chunks[:-1]) == (
    "INVALID_ARGUMENT",
    "a message with fewer bytes than its arrays have.",
  )
  assert run.send("contribute", [*chunks, b"x"]) == (
    "INVALID_ARGUMENT",
    "a message with more bytes than its arrays have.",
  )
  assert run.send("contribute", [chunks[0], b"", *chunks[1:]])[0] == "OK"
  assert run.send("join", chunks) == (
    "INVALID_ARGUMENT",
    f"a message of {600 * 700 * 4 + 4 + 11:,} bytes; at most 0 are accepted.",
  )


def test_another_protocol_is_refused(run):
  assert run.send("join", [declare(protocol=99, palm_mtf="9.9")]) == (
    "INVALID_ARGUMENT",
    f"a message of palm_mtf '9.9', and this is palm_mtf {__version__}, whose "
    "messages differ; use one version.",
  )


def resident_bytes():
  text = pathlib.Path("/proc/self/statm").read_text()
  return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


_SENDER = """
import itertools, sys
from tests.learners import attacker
run = attacker.Target(*sys.argv[1:4])
first = sys.argv[4].encode()
print(run.send("contribute", [bytes(2**30)], secs=100)[0])
chunks = itertools.chain([first], itertools.repeat(bytes(2**19), 2**11))
print(*run.send("contribute", chunks, secs=100))
"""


@pytest.mark.slow
def test_a_message_of_a_gigabyte_takes_no_memory(run):
  """In one chunk, it is refused by its size; in small ones, by its header."""
  first = declare(["w", "float32", [2**14, 2**14]]).decode()
  given = run.address, run.prefix, run.token, first
  with run.connect() as client:
    client.join({})
    before = most = resident_bytes()
    sender = processes.start("-c", _SENDER, *given)
    while sender.poll() is None:
      most = max(most, resident_bytes())
      time.sleep(0.02)
    assert client.join({})
  output, error = sender.communicate()
  assert not sender.returncode, error
  codes = output.splitlines()
  # A peer that is reset while it still sends may see only that.
  assert codes[0] in ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
  assert codes[1].startswith(
    "INVALID_ARGUMENT array 'w' is float32 [16384, 16384] and has to be "
  )
  assert most - before < 2**27


def test_a_learner_has_one_call_at_a_time_and_a_limited_rate(
  prefix, tmp_path, monkeypatch
):
  monkeypatch.setattr(service, "_BURST", 5.0)
  monkeypatch.setattr(service, "_CALLS_PER_SEC", 0.01)
  with Run(tmp_path, prefix, Echo()) as run:
    begun, ended = threading.Event(), threading.Event()

    def slow():
      yield declare()
      begun.set()
      ended.wait(20)

    thread = threading.Thread(target=run.send, args=("join", slow()))
    thread.start()
    assert begun.wait(10)
    time.sleep(0.2)
    busy = "RESOURCE_EXHAUSTED", "too many calls; wait"
    assert run.send("join", [declare()]) == busy
    other = add_member(run.tokens, "bob")
    assert run.send("join", [declare()], token=other)[0] == "OK"
    ended.set()
    thread.join()
    answers = [run.send("join", [declare()])[0] for _ in range(8)]
    assert answers[0] == "OK"
    assert answers[-1] == busy[0]
    assert run.send("join", [declare()], token=other)[0] == "OK"


def test_a_slow_loris_loses_its_call_and_its_work_of_arrays(
  prefix, tmp_path, monkeypatch
):
  monkeypatch.setattr(service, "_SECS", 0.5)
  with Run(tmp_path, prefix, Echo(w=numbers(1000))) as run:

    def drip(chunks):
      yield from chunks
      while True:
        time.sleep(0.05)
        yield b"x"

    first = next(write_chunks(Message({"work": "1"}, run.handler.arrays)))
    for chunks in ([], [first]):
      start = time.monotonic()
      sent = drip(chunks) if chunks else (time.sleep(3) for _ in range(1))
      code, _ = run.send("contribute", sent, secs=10)
      assert code == "DEADLINE_EXCEEDED"
      assert time.monotonic() - start < 6
    with run.connect() as client:  # its next call is answered
      assert client.join({})


def pass_on(source, to, bytes_per_sec):
  """Copies bytes until an end."""
  with contextlib.suppress(OSError):
    while chunk := source.recv(4096):
      to.sendall(chunk)
      time.sleep(len(chunk) / bytes_per_sec)


def link(near, port):
  """Connects the peer that connects to `near` with a port, at 64 KiB/s."""
  with near.accept()[0] as learner, socket.socket() as far:
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    far.connect(("127.0.0.1", port))
    up = threading.Thread(target=pass_on, args=(learner, far, 2**30))
    up.start()
    pass_on(far, learner, 2**16)
    up.join()


@pytest.mark.slow
def test_a_learner_with_a_slow_link_gets_its_work(prefix, tmp_path):
  """Pings wait for the work, longer than those of the manager may."""
  with (
    Run(tmp_path, prefix, Echo(w=numbers(2**9, 2**10))) as run,
    socket.create_server(("127.0.0.1", 0)) as near,
  ):
    threading.Thread(target=link, args=(near, run.port), daemon=True).start()
    address = f"127.0.0.1:{near.getsockname()[1]}"
    with LearnerClient(address, f"{prefix}.pem", run.token, 0.0) as client:
      assert client.next({}, at_most(10**7)).arrays["w"].shape == (2**9, 2**10)


def test_a_learner_that_does_not_read_its_answer_loses_it(
  prefix, tmp_path, monkeypatch
):
  monkeypatch.setattr(service, "_SECS", 0.5)
  monkeypatch.setattr(service, "_BYTES_PER_SEC", 2**26)
  with Run(tmp_path, prefix, Echo(w=numbers(2**12, 2**12))) as run:
    first = next(write_chunks(Message({})))
    with run.open() as call:
      answers = call("next", [first], secs=20)
      next(answers)
      with run.connect() as client:
        message = message_of(client.join, {})
        assert message == f"{run.address}: too many calls; wait"
        time.sleep(1.5)  # then the call has ended, and its arrays are free
        assert client.join({})
      answers.cancel()


@pytest.mark.slow
def test_connections_that_say_nothing_end_and_do_not_keep_learners_out(
  prefix, tmp_path
):
  """More connections than the run accepts; handshakes end after 5 seconds."""
  with Run(tmp_path, prefix, Echo()) as run, contextlib.ExitStack() as stack:
    silent, before = [], len(os.listdir("/proc/self/fd"))
    for _ in range(400):
      with contextlib.suppress(OSError):
        connection = socket.create_connection(("127.0.0.1", run.port), 5)
        silent.append(stack.enter_context(connection))
    time.sleep(1)
    # Both ends of accepted connections are in this process.
    accepted = len(os.listdir("/proc/self/fd")) - before - len(silent)
    assert accepted < 256 + 20
    with run.connect(wait_secs=30.0) as client:
      assert client.join({})
    ended = 0
    for connection in silent:
      connection.settimeout(10)
      with contextlib.suppress(OSError):
        ended += connection.recv(1) == b""
    assert ended > 300


def test_one_address_does_not_keep_learners_of_others_out(prefix, tmp_path):
  """Connections are counted before TLS; more than 64 are closed at once."""
  with Run(tmp_path, prefix, Echo()) as run, contextlib.ExitStack() as stack:
    silent = []
    for _ in range(300):
      to, near = ("127.0.0.1", run.port), ("127.0.0.2", 0)
      connection = socket.create_connection(to, 5, near)
      silent.append(stack.enter_context(connection))
    with run.connect() as client:  # from 127.0.0.1, without another try
      assert client.join({})
    ended = 0
    for connection in silent:
      connection.settimeout(0.01)
      with contextlib.suppress(OSError):
        ended += connection.recv(1) == b""
    assert ended >= 300 - 64


@pytest.mark.slow
def test_a_flood_of_calls_without_a_token_leaves_room_for_learners(
  prefix, tmp_path
):
  with Run(tmp_path, prefix, Echo()) as run:
    is_over = threading.Event()

    def flood():
      while not is_over.is_set():
        run.send("join", [declare()], token="x")

    threads = [threading.Thread(target=flood) for _ in range(20)]
    for thread in threads:
      thread.start()
    with run.connect(wait_secs=30.0) as client:
      for _ in range(20):
        assert client.join({})
    is_over.set()
    for thread in threads:
      thread.join()


def test_names_of_learners_and_lines_of_the_file_are_checked(tmp_path):
  path = str(tmp_path / "tokens")
  add_member(path, "alice/1")
  assert message_of(add_member, path, "alice/1") == (
    f"NAME = 'alice/1': {path} has this name; remove its line, or give another "
    "name."
  )
  for name in ("", "a b", "a/b/c", "/a", "a\n", "x" * 300):
    assert message_of(add_member, path, name).endswith(
      'write OWNER or OWNER/NAME, of letters, digits, ".", "-" and "_".'
    )
  with open(path, "a") as file:
    file.write("bob secret\n")
  assert message_of(Members, path) == (
    f"LEARNER_TOKENS = {path!r}: line 2 is not NAME SHA256, as `palm_mtf pods "
    "token` writes."
  )
  assert message_of(Members, f"{path}2") == (
    f"LEARNER_TOKENS = '{path}2': No such file or directory; make it by "
    "`palm_mtf pods token`."
  )


def test_a_run_without_a_key_does_not_listen(tmp_path):
  add_member(str(tmp_path / "tokens"), "alice")
  members = Members(str(tmp_path / "tokens"))
  with pytest.raises(UserError, match='LEARNERS_TLS = "": learners connect by'):
    with service.serve("127.0.0.1", 0, "", members, Echo()):
      pass


def test_a_wrong_address_or_certificate_is_one_line(tmp_path):
  assert message_of(LearnerClient, "nowhere", "x", "t").startswith(
    'HOST:PORT = "nowhere": write ADDRESS:PORT'
  )
  path = str(tmp_path / "run.pem")
  pathlib.Path(path).write_text("no certificate")
  assert message_of(LearnerClient, "127.0.0.1:1", path, "t").startswith(
    f"--certificate = {path!r}: is not a certificate ("
  )
