# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf serve` in a separate process answers HTTP requests."""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import shutil
import signal
import time
from pathlib import Path

import jsonschema
import pytest

from palm_mtf.commands import serve
from palm_mtf.data.vocabulary.load import open_vocabulary
from tests import runs
from tests.serve_testing import (
  ask,
  complete,
  make_url,
  metrics,
  refused,
  request_under_way,
  skip_without_library,
  start,
  streamed,
)

PROMPTS = ["one two", "7", "three four five", "ten", "two", "nine one"]


@pytest.fixture
def library():
  return skip_without_library()


@pytest.fixture(scope="module")
def serving(finished):
  """A server of the run with a longer context, and its process."""
  flags = "--gin.SEQUENCE_LENGTH=256", "--most_waiting=4"
  with start(finished, *flags) as process:
    yield process, make_url(process)
    process.kill()


@pytest.fixture
def server(serving):
  return serving[1]


@pytest.fixture(scope="module")
def generated(finished):
  """The continuations of PROMPTS that `palm_mtf generate` prints."""
  lines = runs.printed(
    *("generate", "--model_dir", finished, "--gin.TEMPERATURE=0.0", "--json"),
    *(f"--prompt={x}" for x in PROMPTS),
  )
  return {x["prompt"]: x["continuation"] for x in lines}


def test_texts_asked_for_together_are_those_that_generate_prints(
  server, generated
):
  with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
    answers = pool.map(lambda x: complete(server, prompt=x), PROMPTS)
    texts = [answer["choices"][0]["text"] for answer in answers]
  assert texts == [generated[prompt] for prompt in PROMPTS]
  several = complete(server, prompt=PROMPTS[:3])
  assert [x["index"] for x in several["choices"]] == [0, 1, 2]
  assert [x["text"] for x in several["choices"]] == texts[:3]


def test_a_stream_is_the_text_in_pieces_and_ends_with_its_usage(
  server, generated
):
  *events, last = streamed(
    server, prompt="one two", stream_options={"include_usage": True}
  )
  texts = [event["choices"][0]["text"] for event in events]
  assert "".join(texts) == generated["one two"]
  reasons = [event["choices"][0]["finish_reason"] for event in events]
  assert set(reasons[:-1]) <= {None} and reasons[-1] in ("stop", "length")
  whole = complete(server, prompt="one two")
  assert last["choices"] == [] and last["usage"] == whole["usage"]


def test_answers_to_50_schemas_are_valid_next_to_texts_without_schemas(
  server, generated
):
  """Each text is that of its own request; a cut text says "length"."""
  path = Path(__file__).parent.parent / "generation/serving/schemas.json"
  schemas = json.loads(path.read_text())

  def ask_for(name):
    if name in generated:
      return complete(server, prompt=name)["choices"][0]
    body = {"name": "x", "schema": schemas[name]}
    asked = {"prompt": "one", "max_tokens": 200, "temperature": 1.5}
    form = {"type": "json_schema", "json_schema": body}
    return complete(server, **asked, response_format=form)["choices"][0]

  names = [x for i, x in enumerate(schemas) for x in (x, PROMPTS[i % 6])]
  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    answers = [*zip(names, pool.map(ask_for, names), strict=True)]
  finished = 0
  for name, answer in answers:
    if name in generated:
      assert answer["text"] == generated[name]
    elif answer["finish_reason"] == "stop":
      jsonschema.validate(json.loads(answer["text"]), schemas[name])
      finished += 1
  assert finished >= 40
  for name, answer in answers[:20:2]:
    assert ask_for(name) == answer  # without other requests


def test_log_p_of_an_echoed_prompt_is_what_score_prints(server, finished):
  text = "one two three"
  (expected,) = runs.printed(
    *("score", "--model_dir", finished, "--json", "--text", text)
  )
  answer = complete(server, prompt=text, echo=True, max_tokens=0, logprobs=2)
  (choice,) = answer["choices"]
  found = choice["logprobs"]
  assert choice["text"] == text
  assert sum(found["token_logprobs"]) == pytest.approx(
    expected["log_likelihood"], abs=1e-4
  )
  assert len(found["tokens"]) == expected["tokens"]
  assert "".join(found["tokens"]) == text
  ends = [*found["text_offset"][1:], len(text)]
  for token, begin, end in zip(
    found["tokens"], found["text_offset"], ends, strict=True
  ):
    assert text[begin:end] == token
  # Greedy decoding continues a text with the likeliest tokens.
  answer = complete(server, prompt=text, logprobs=1)
  found = answer["choices"][0]["logprobs"]
  for token, log_p, top in zip(
    found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
  ):
    assert top == {token: log_p}


@pytest.mark.parametrize("stop", [None, "first"])
def test_a_harness_that_cuts_the_last_entry_off_reads_the_numbers_of_score(
  server, finished, stop
):
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
  context, continuation = map(vocabulary.encode, ("one two", " three four"))
  ids, length = [*context, *continuation], len(context)
  scores = complete(server, prompt=ids, echo=True, max_tokens=0, logprobs=1)
  (scored,) = scores["choices"]
  if stop:  # the sampled token is a stop string
    said = complete(server, prompt=ids, max_tokens=1, logprobs=1)
    stop = said["choices"][0]["logprobs"]["tokens"][0]
  answer = complete(
    server, prompt=ids, echo=True, max_tokens=1, logprobs=1, stop=stop
  )
  (choice,) = answer["choices"]
  # lm-evaluation-harness slices so in LocalCompletionsAPI.parse_logprobs.
  found = choice["logprobs"]["token_logprobs"][length:-1]
  assert found == scored["logprobs"]["token_logprobs"][length:]
  assert len(found) == len(continuation)
  assert answer["usage"]["total_tokens"] == len(choice["logprobs"]["tokens"])
  assert choice["finish_reason"] == ("stop" if stop else "length")


def test_ids_that_hold_the_start_token_are_read_as_without_it(server, finished):
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
  ids = vocabulary.encode("one two")
  start = [vocabulary.eod_id]  # PACKING = "joined"
  found = [
    complete(server, prompt=[*some, *ids], echo=True, logprobs=1)
    for some in ([], start)
  ]
  (without,), (given,) = (answer["choices"] for answer in found)
  assert given["text"] == without["text"]
  for name, first in (
    ("tokens", ""),
    ("token_logprobs", None),
    ("top_logprobs", None),
    ("text_offset", 0),
  ):
    assert given["logprobs"][name] == [first, *without["logprobs"][name]]
  usages = [answer["usage"]["prompt_tokens"] for answer in found]
  assert usages == [len(ids), 1 + len(ids)]


def test_a_seed_gives_the_same_samples_and_another_seed_others(server):
  def texts(seed):
    answer = complete(
      server, prompt="one", n=3, temperature=3.0, top_k=200, seed=seed
    )
    return [each["text"] for each in answer["choices"]]

  first = texts(1)
  assert len(set(first)) == 3
  assert texts(1) == first
  assert texts(2) != first


@pytest.mark.parametrize(
  ("body", "status", "message"),
  [
    ({}, 400, "prompt is missing: give a text to continue."),
    ({"prompt": 7}, 400, "prompt: give a text, a list of token ids, or"),
    ({"prompt": [999]}, 400, "prompt: token ids are from 0 to"),
    ({"prompt": "one " * 250}, 400, "together more than SEQUENCE_LENGTH = 256"),
    ({"prompt": "a", "max_tokens": 256}, 400, "together more than SEQUENCE_LE"),
    ({"prompt": "\ud800"}, 400, "surrogate"),
    ({"prompt": "a", "n": 9}, 400, "9 completions (prompts times n): give at"),
    ({"prompt": "a", "model": "b"}, 404, "there is no model 'b': give "),
  ],
)
def test_a_wrong_body_is_answered_by_one_line(server, body, status, message):
  found = refused(server, status, **body)
  assert message in found and "\n" not in found


def test_health_models_and_metrics_have_their_pages(server, finished):
  assert ask(server, "/health") == (200, {"status": "ok"})
  _, models = ask(server, "/v1/models")
  (model,) = models["data"]
  assert (model["id"], model["activation_dtype"]) == (finished.name, "float32")
  assert ask(server, f"/v1/models/{finished.name}")[0] == 200
  assert ask(server, "/v1/models/none")[0] == 404
  before = metrics(server)
  usage = complete(server, prompt="one two")["usage"]
  after = metrics(server)
  name = 'palm_mtf_requests_total{code="200"}'
  assert after[name] > before[name]
  told = after["palm_mtf_prompt_tokens_total"]
  assert told - before["palm_mtf_prompt_tokens_total"] == usage["prompt_tokens"]


def test_public_client_completes_streams_and_scores(
  server, generated, finished
):
  openai = pytest.importorskip("openai", reason="the client openai is absent")
  with openai.OpenAI(base_url=f"http://{server}/v1", api_key="none") as client:
    (model,) = client.models.list().data
    assert model.id == finished.name
    asked = {"model": model.id, "prompt": "one two"}
    whole = client.completions.create(**asked, logprobs=3)
    assert whole.choices[0].text == generated["one two"]
    assert len(whole.choices[0].logprobs.top_logprobs[0]) == 3
    stream = client.completions.create(**asked, stream=True)
    text = "".join(part.choices[0].text for part in stream)
    assert text == generated["one two"]
    with pytest.raises(openai.BadRequestError, match="unknown field 'tempel'"):
      client.completions.create(**asked, extra_body={"tempel": 1})
    with pytest.raises(openai.NotFoundError):
      client.completions.create(model="other", prompt="a")


# Greedy, because a sampled text may end early, with its document.
LONG = {"prompt": "one", "max_tokens": 900, "logprobs": 0, "temperature": 0.0}


@pytest.fixture
def long_server(finished, tmp_path):
  """A server whose completions take long, and its process."""
  shutil.copytree(finished, tmp_path / "run")
  flags = ["--gin.SEQUENCE_LENGTH=1024", "--slots=1", "--most_waiting=1"]
  with start(tmp_path / "run", *flags) as process:
    yield process, make_url(process)
    process.kill()


@pytest.mark.slow
def test_who_goes_away_leaves_the_slot_to_who_waits(long_server):
  _, server = long_server
  with concurrent.futures.ThreadPoolExecutor() as pool:
    with request_under_way(server, **LONG):
      waits = pool.submit(complete, server, prompt="two", max_tokens=3)
      while metrics(server)["palm_mtf_waiting"] < 1:
        time.sleep(0.01)
      assert "are waiting" in refused(server, 429, prompt="a")
      assert not waits.done()
    answer = waits.result(timeout=120)
  assert answer["usage"]["completion_tokens"] <= 3
  found = metrics(server)
  assert found["palm_mtf_cancelled_total"] == 1
  assert found["palm_mtf_generated_tokens_total"] < 900
  assert found['palm_mtf_requests_total{code="499"}'] == 1


@pytest.mark.slow
def test_who_goes_away_before_a_whole_answer_leaves_the_slot_too(long_server):
  _, server = long_server
  host, port = server.split(":")
  connection = http.client.HTTPConnection(host, int(port))
  head = {"Content-Type": "application/json"}
  connection.request("POST", "/v1/completions", json.dumps(LONG), head)
  while metrics(server)["palm_mtf_generated_tokens_total"] < 1:
    time.sleep(0.01)
  connection.close()
  complete(server, prompt="two", max_tokens=3)
  found = metrics(server)
  assert found["palm_mtf_cancelled_total"] == 1
  assert found["palm_mtf_generated_tokens_total"] < 900


@pytest.mark.slow
def test_a_newer_checkpoint_is_followed_and_drops_no_request(
  finished, tmp_path
):
  model_dir = tmp_path / "run"
  shutil.copytree(finished, model_dir)
  newest = model_dir / "checkpoints" / "step_00000012"
  newest.rename(tmp_path / "newest")
  flags = ["--follow", "--gin.SEQUENCE_LENGTH=1024", "--slots=2"]
  with start(model_dir, *flags) as process:
    server = make_url(process)

    def step():
      (model,) = ask(server, "/v1/models")[1]["data"]
      return model["step"], metrics(server)["palm_mtf_checkpoint_step"]

    old = complete(server, prompt="one two", logprobs=1)["choices"]
    assert step() == (8, 8)
    with request_under_way(server, **{**LONG, "max_tokens": 200}) as events:
      (tmp_path / "newest").rename(newest)
      assert b"[DONE]" in events.read()
    while step() != (12, 12):
      time.sleep(0.05)
    new = complete(server, prompt="one two", logprobs=1)["choices"]
    assert new != old
    process.terminate()
    _, error = process.communicate(timeout=60)
  assert process.returncode == 143, error
  assert "serving step 12" in error


def test_under_load_nobody_gets_the_text_of_another_or_none(server, generated):
  """There are four clients per slot, and every third client disconnects."""

  def client(number):
    prompt = PROMPTS[number % len(PROMPTS)]
    while True:  # status 429 asks to retry
      if number % 3 == 0:
        with contextlib.suppress(AssertionError):
          with request_under_way(server, prompt=prompt):
            return None
      else:
        status, answer = ask(server, "/v1/completions", {"prompt": prompt})
        if status == 200:
          return answer["choices"][0]["text"] == generated[prompt]
        assert status == 429, answer
      time.sleep(0.01)

  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    found = list(pool.map(client, range(48)))
  assert found.count(None) == 16 and found.count(True) == 32
  while metrics(server)["palm_mtf_running"]:
    time.sleep(0.01)
  assert metrics(server)["palm_mtf_waiting"] == 0


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--listen=127.0.0.1"], '--listen = "127.0.0.1": write ADDRESS:PORT'),
    (["--listen=0.0.0.0:0"], "answers every host that reaches this one; give"),
    (["--slots=0"], "--slots = 0: give a whole number of at least 1."),
    (["--slots=100000000"], "GB of memory is left for it; give at most"),
    (["--most_waiting=10001"], "give a whole number of at most 10,000."),
    (["--api_key_file=none"], "No such file or directory; give a text file."),
    (["--allowed_host=a:80"], "--allowed_host = 'a:80': give the name of a"),
    (["--gin.NUM_BEAMS=2"], "NUM_BEAMS = 2: serve samples without it; set"),
    (["--gin.NUM_SAMPLES=2"], "NUM_SAMPLES = 2: each request says n; set it"),
  ],
)
def test_bad_input_is_one_line(library, finished, fails, flags, message):
  assert message in fails("serve", "--model_dir", finished, *flags)


def test_int8_on_several_devices_takes_the_memory_of_the_activation_dtype(
  finished, fails, monkeypatch
):
  monkeypatch.setattr(serve, "memory_bytes", lambda: (10**9, 10**9))
  flags = ["--gin.MESH_SHAPE='model:2'", "--gin.LAYOUT='d_ff:model'"]
  flags += ["--model_dir", str(finished), "--slots=100000000"]
  int8, whole = (
    fails("serve", *flags, f"--gin.WEIGHT_DTYPE='{dtype}'")
    for dtype in ("int8", "activation")
  )
  assert "give at most" in int8 and int8 == whole


def test_k_quants_on_several_devices_are_refused(finished, palm_mtf):
  flags = ["--gin.MESH_SHAPE='model:2'", "--gin.LAYOUT='d_ff:model'"]
  flags += ["--model_dir", str(finished), "--gin.WEIGHT_DTYPE='q5_k'"]
  code, out, err = palm_mtf("serve", *flags)
  assert (code, out) == (2, "")
  found = err.splitlines()[-1]
  assert found.startswith("palm_mtf: WEIGHT_DTYPE = 'q5_k': only decoding ")
  assert 'names; set it to "int8".' in found


def test_a_missing_library_is_one_line(finished, fails, monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  found = fails("serve", "--model_dir", finished)
  assert found.startswith(
    "palm_mtf serve answers by aiohttp, which is not installed: "
  )


def _make_talking(finished, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(finished, run)
  # The template loops for as long as a message says.
  (run / "chat_template.jinja").write_text(
    "{% for x in messages %}{{ x.content }}{% endfor %}"
    "{% for i in range(messages[0].content | int) %}"
    "{% for i in range(messages[0].content | int) %}{% endfor %}{% endfor %}"
  )
  return run


@pytest.fixture
def talking(finished, tmp_path):
  """A server of a run with a chat template, and the run."""
  run = _make_talking(finished, tmp_path)
  with start(run) as process:
    try:
      yield make_url(process), run
    finally:
      process.terminate()
      process.communicate(timeout=60)


@pytest.mark.peers
def test_a_conversation_is_answered_as_generate_continues_it(talking):
  import openai

  server, run = talking
  prompt = "three four five"
  (record,) = runs.printed(
    *("generate", "--model_dir", run, "--gin.TEMPERATURE=0.0", "--json"),
    f"--prompt={prompt}",
  )
  messages = [{"role": "user", "content": x} for x in ("three four", " five")]
  asked = {"model": "run", "messages": messages}
  with openai.OpenAI(base_url=f"http://{server}/v1", api_key="none") as client:
    conversations = client.chat.completions
    answer = conversations.create(**asked)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert message.content == record["continuation"]
    assert answer.choices[0].finish_reason in ("stop", "length")
    completed = complete(server, prompt=prompt)["usage"]
    assert answer.usage.completion_tokens == completed["completion_tokens"]
    assert answer.usage.prompt_tokens == 1 + completed["prompt_tokens"]
    deltas = [
      part.choices[0].delta
      for part in conversations.create(**asked, stream=True)
    ]
    assert [x.role for x in deltas] == ["assistant"] + [None] * len(deltas[1:])
    assert "".join(x.content for x in deltas) == message.content
    with pytest.raises(openai.BadRequestError, match=r"tools: .*: give \["):
      conversations.create(**asked, tools=[{"type": "function"}])
    long = [{"role": "user", "content": "one two " * 40}]
    with pytest.raises(openai.BadRequestError, match="longer than SEQUENCE_L"):
      conversations.create(model="run", messages=long)


# What clients of OpenAI's API send by default, or where it changes nothing.
DEFAULTS = {
  "tools": [],
  "tool_choice": "none",
  "response_format": {"type": "text"},
  "metadata": {"a": "b"},
  "service_tier": "auto",
  "store": False,
  "parallel_tool_calls": True,
  "user": "u",
  "logprobs": False,
  "top_logprobs": 0,
  "reasoning_effort": "none",
  "verbosity": "medium",
  "extra_body": {
    "stop_token_ids": [],
    "min_p": 0,
    "ignore_eos": False,
    "chat_template_kwargs": {},
  },
}


@pytest.mark.peers
def test_a_public_client_may_send_its_defaults(talking):
  import openai

  server, _ = talking
  parts = [{"type": "text", "text": "three four"}]
  messages = [
    {"role": "user", "content": parts},
    {"role": "assistant", "content": None, "tool_calls": []},
  ]
  with openai.OpenAI(base_url=f"http://{server}/v1", api_key="none") as client:
    ask_for = functools.partial(client.chat.completions.create, model="run")
    plain = ask_for(messages=[{"role": "user", "content": "three four"}])
    same = ask_for(messages=messages, **DEFAULTS)
    assert same.choices[0].message == plain.choices[0].message
    for name, value in {
      "store": True,
      "service_tier": "priority",
    }.items():
      with pytest.raises(openai.BadRequestError, match=f"{name} = .*supported"):
        ask_for(messages=messages, **{name: value})


@pytest.mark.peers
def test_chats_without_an_end_leave_others_alone_and_a_second_signal_ends_all(
  finished, tmp_path
):
  run = _make_talking(finished, tmp_path)
  path = "/v1/chat/completions"
  body = {"messages": [{"role": "user", "content": "99999"}]}
  with concurrent.futures.ThreadPoolExecutor() as pool, start(run) as process:
    server = make_url(process)
    complete(server, prompt="one")
    endless = [pool.submit(ask, server, path, body) for _ in range(2)]
    begin = time.monotonic()
    while not all(x.done() for x in endless):
      assert ask(server, "/health")[0] == 200
      assert complete(server, prompt="one two")["choices"]
    assert time.monotonic() - begin < 30
    for status, answer in (x.result() for x in endless):
      assert status == 400, answer
      assert "takes more than 5 seconds" in answer["error"]["message"]
    pool.submit(ask, server, path, body)
    time.sleep(1)  # the template is being rendered
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert time.monotonic() - begin < 2


def test_a_model_without_a_chat_template_refuses_a_conversation(server):
  body = {"messages": [{"role": "user", "content": "one"}]}
  status, answer = ask(server, "/v1/chat/completions", body)
  assert status == 400
  assert answer["error"]["message"].startswith(
    "chat_template.jinja: is missing"
  )


def test_a_stop_signal_lets_answers_end(serving):
  """This test is the last one of this server."""
  process, server = serving
  with request_under_way(server, **{**LONG, "max_tokens": 200}) as events:
    process.send_signal(signal.SIGTERM)
    assert b"[DONE]" in events.read()
    _, error = process.communicate(timeout=60)
  assert process.returncode == 143, error
  assert "Traceback" not in error, error
