# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes a PaLM with OpenVINO; a turn is a continuation of all prompts.

python openvino_decode.py --dtype int4
"""

# The graph is one that an exporter for OpenVINO GenAI makes, and that GenAI's
# pipeline with the attention backend SDPA runs: the cache of keys and values is
# state of the request, which OpenVINO joins with attention. Products with the
# same input are joined. int8 weights have a scale per column, int4 weights one
# per 32, as many as in the other programs; activations are rounded to 8 bits
# before they are multiplied. The pipeline itself is not used, because it needs
# a tokenizer. Needs openvino. tools/bench starts it.

import os

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from turns import continue_in_turns, make_parser

BITS = {"int8": 8, "int4": 4}
GROUP = 32


class Graph:
  """The graph of a step, with random weights."""

  def __init__(self, sizes):
    self.sizes, self.rng = sizes, np.random.default_rng(0)
    self.num_parameters = self.step_bytes = 0
    self.assigned = []
    self.tokens, self.positions = (
      ops.parameter([-1, -1], ov.Type.i64, name=x)
      for x in ("tokens", "positions")
    )
    # The pipeline chooses beams by this input, and OpenVINO joins the cache
    # with attention only where it finds the choice.
    self.beams = ops.parameter([-1], ov.Type.i32, name="beams")
    logits = self.build()
    logits.output(0).set_names({"logits"})
    self.model = ov.Model(
      [ops.result(logits)],
      self.assigned,
      [self.tokens, self.positions, self.beams],
    )

  def float_kernel(self, inputs, outputs):
    """Returns a random kernel, [inputs, outputs], in --dtype, as float32."""
    shape = [inputs, outputs]
    numbers = self.rng.standard_normal(shape, np.float32)
    numbers *= 0.04
    if self.sizes.dtype == "float32":
      self.step_bytes += numbers.nbytes
      return ops.constant(numbers)
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    self.step_bytes += halves.nbytes
    return self.floats(self.packed(halves, shape, ov.Type.bf16))

  def quantized_kernel(self, inputs, outputs):
    """Returns a random kernel, [outputs, inputs], in --dtype, as float32."""
    bits = BITS[self.sizes.dtype]
    numbers = self.rng.integers(
      256, size=[outputs, inputs * bits // 8], dtype=np.uint8
    )
    groups = 1 if bits == 8 else inputs // GROUP
    scales = np.full([outputs, groups, 1], 0.1 / 2**bits, np.float16)
    stored = self.packed(
      numbers,
      [outputs, groups, inputs // groups],
      ov.Type.i8 if bits == 8 else ov.Type.i4,
    )
    self.step_bytes += numbers.nbytes + scales.nbytes
    scaled = ops.multiply(
      ops.convert(stored, ov.Type.f16), ops.constant(scales)
    )
    return self.floats(ops.reshape(scaled, [outputs, inputs], False))

  @staticmethod
  def packed(numbers, shape, dtype):
    """Returns a constant of a dtype that NumPy lacks."""
    return ops.constant(ov.Tensor(numbers, shape, dtype), shared_memory=False)

  @staticmethod
  def floats(x):
    """Returns x in float32."""
    return ops.convert(x, ov.Type.f32)

  def product(self, x, inputs, outputs):
    """Multiplies x by a random kernel."""
    is_quantized = self.sizes.dtype in BITS
    make = self.quantized_kernel if is_quantized else self.float_kernel
    return ops.matmul(x, make(inputs, outputs), False, is_quantized)

  def norm(self, x, scale=1.0):
    """Adds a LayerNorm of x."""
    ones = np.full(self.sizes.d_model, scale, np.float32)
    self.num_parameters += ones.size
    y = ops.mvn(x, [-1], True, 1e-6, "INSIDE_SQRT")
    return ops.multiply(y, ops.constant(ones))

  def rotate(self, x, sine, cosine):
    """Returns x [batch, heads, length, d_kv] with half-split rotary applied."""
    half = self.sizes.d_kv // 2
    a, b = ops.variadic_split(x, -1, [half, half]).outputs()
    turned = ops.concat([ops.multiply(b, np.float32(-1)), a], -1)
    return ops.add(ops.multiply(x, cosine), ops.multiply(turned, sine))

  def cached(self, x, name):
    """Returns x [batch, 1, length, d_kv] after what the cache has."""
    s = self.sizes
    empty = np.zeros([s.batch_size, 1, 0, s.d_kv], np.float32)
    info = ov.op.util.VariableInfo()
    info.data_shape = ov.PartialShape([-1, 1, -1, s.d_kv])
    info.data_type, info.variable_id = ov.Type.f32, name
    variable = ov.op.util.Variable(info)
    past = ops.gather(
      ov.op.read_value(ops.constant(empty), variable), self.beams, np.int32(0)
    )
    after = ops.concat([past, x], 2)
    self.assigned.append(ov.op.assign(after, variable))
    return after

  def heads(self, x, count):
    """Returns x, [batch, length, ...], as [batch, count, length, d_kv]."""
    split = ops.reshape(x, [0, 0, count, self.sizes.d_kv], True)
    return ops.transpose(split, [0, 2, 1, 3])

  def build(self):
    """Adds all layers; returns the logits of the last tokens."""
    s = self.sizes
    heads, d = s.num_heads * s.d_kv, s.d_model
    pair = np.arange(s.d_kv) % (s.d_kv // 2)
    angle = np.outer(np.arange(s.sequence_length), 1e4 ** (-2 * pair / s.d_kv))
    sine, cosine = (
      ops.unsqueeze(
        ops.gather(
          ops.constant(x.astype(np.float32)), self.positions, np.int32(0)
        ),
        1,
      )
      for x in (np.sin(angle), np.cos(angle))
    )
    table = self.rng.standard_normal([s.vocab_size, d], np.float32)
    self.num_parameters += table.size
    x = ops.gather(ops.constant(table), self.tokens, np.int32(0))
    widths = [heads, s.d_kv, s.d_kv, s.d_ff, s.d_ff]
    for i in range(s.num_layers):
      wide = self.product(self.norm(x), d, sum(widths))
      q, k, v, gate, up = ops.variadic_split(wide, -1, widths).outputs()
      q = self.rotate(self.heads(q, s.num_heads), sine, cosine)
      k = self.cached(self.rotate(self.heads(k, 1), sine, cosine), f"k{i}")
      v = self.cached(self.heads(v, 1), f"v{i}")
      attended = ops.scaled_dot_product_attention(q, k, v, causal=True)
      attended = ops.reshape(
        ops.transpose(attended, [0, 2, 1, 3]), [0, 0, heads], True
      )
      hidden = ops.multiply(ops.swish(gate), up)
      joined = ops.concat([attended, hidden], -1)
      x = ops.add(x, self.product(joined, heads + s.d_ff, d))
      self.num_parameters += d * (sum(widths) + heads + s.d_ff)
    last = ops.gather(x, np.int64(-1), np.int32(1))
    # The embedding is tied, so the kernel of the logits is counted once.
    return self.product(self.norm(last, d**-0.5), d, s.vocab_size)


class Decoder:
  """A compiled model, and the request that has the cache."""

  def __init__(self, model, dtype):
    settings = {"INFERENCE_NUM_THREADS": os.cpu_count()}
    if dtype == "float32":  # otherwise the dtype is the fastest one
      settings["INFERENCE_PRECISION_HINT"] = "f32"
    compiled = ov.Core().compile_model(model, "CPU", settings)
    self.request = compiled.create_infer_request()

  def read(self, tokens, start):
    """Reads tokens [batch, length]; returns the likeliest next tokens."""
    if start == 0:
      self.request.reset_state()
    rows, length = tokens.shape
    places = np.arange(start, start + length)
    self.request.infer(
      {
        "tokens": tokens,
        "positions": np.broadcast_to(places, [rows, length]),
        "beams": np.arange(rows, dtype=np.int32),
      }
    )
    return self.request.get_output_tensor().data.argmax(-1)[:, None]


def main() -> None:
  """Takes turns."""
  dtypes = ["float32", "bfloat16", *BITS]
  sizes = make_parser(__doc__.splitlines()[0], dtypes).parse_args()
  graph = Graph(sizes)
  decoder = Decoder(graph.model, sizes.dtype)
  prompts = np.random.default_rng(0).integers(
    sizes.vocab_size, size=[sizes.batch_size, sizes.prompt_tokens]
  )
  facts = graph.num_parameters, graph.step_bytes
  del graph  # its weights: the compiled model has copies of them
  continue_in_turns(decoder.read, prompts, sizes, *facts)


if __name__ == "__main__":
  main()
