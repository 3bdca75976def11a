# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes a PaLM with ONNX Runtime; a turn is a continuation of all prompts.

python onnx_decode.py --dtype int4
"""

# The graph is one that an exporter for generation makes: products with the same
# input are joined; attention, with rotary embedding and a cache that is updated
# in place, is an operator of ONNX Runtime. Each group of 32 quantized weights
# has a scale; activations are rounded to 8 bits before they are multiplied.
# Needs onnx and onnxruntime. tools/bench starts it.

import os
import tempfile

import numpy as np
import onnxruntime
from onnx import StringStringEntryProto, TensorProto, helper, numpy_helper, save
from turns import continue_in_turns, make_parser

BITS = {"int8": 8, "int4": 4}
BLOCK = 32
MOST_INLINE_BYTES = 1024  # of a constant in the file of the graph
OWN = "com.microsoft"


class Graph:
  """The graph of a step; its weights are in a file.

  A file of a graph holds at most 2 GB, so the weights have another file, which
  ONNX Runtime maps into memory.
  """

  def __init__(self, sizes, folder):
    self.sizes, self.rng = sizes, np.random.default_rng(0)
    self.nodes, self.weights = [], []
    self.num_parameters = self.step_bytes = 0
    self.path = os.path.join(folder, "model.onnx")
    with open(os.path.join(folder, "weights"), "wb") as self.file:
      self.build()
    self.save()

  def add(self, kind, inputs, outputs=None, domain="", **attributes):
    """Adds an operator; returns the name of its first output."""
    outputs = outputs or [f"{kind}_{len(self.nodes)}"]
    node = helper.make_node(kind, inputs, outputs, domain=domain, **attributes)
    self.nodes.append(node)
    return outputs[0]

  def weight(self, name, value):
    """Adds a constant; returns its name."""
    if value.nbytes <= MOST_INLINE_BYTES:
      self.weights.append(numpy_helper.from_array(value, name))
      return name
    self.file.seek(-self.file.tell() % 4096, os.SEEK_CUR)  # as mmap needs
    place = {"location": "weights", "offset": self.file.tell()}
    self.file.write(value.data)
    self.weights.append(
      TensorProto(
        name=name,
        dims=value.shape,
        data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
        data_location=TensorProto.EXTERNAL,
        external_data=[
          StringStringEntryProto(key=x, value=str(y))
          for x, y in {**place, "length": value.nbytes}.items()
        ],
      )
    )
    return name

  def product(self, x, name, inputs, outputs):
    """Multiplies x by a kernel, [inputs, outputs], in --dtype."""
    if self.sizes.dtype == "float32":
      kernel = self.rng.standard_normal([inputs, outputs], np.float32)
      kernel *= 0.04
      self.step_bytes += kernel.nbytes
      return self.add("MatMul", [x, self.weight(name, kernel)])
    bits = BITS[self.sizes.dtype]
    shape = [outputs, inputs // BLOCK, BLOCK * bits // 8]
    numbers = self.rng.integers(256, size=shape, dtype=np.uint8)
    scales = np.full(outputs * inputs // BLOCK, 0.1 / 2**bits, np.float32)
    self.step_bytes += numbers.nbytes + scales.nbytes
    parts = [self.weight(name, numbers), self.weight(f"{name}_scale", scales)]
    return self.add(
      "MatMulNBits",
      [x, *parts],
      domain=OWN,
      K=inputs,
      N=outputs,
      bits=bits,
      block_size=BLOCK,
      accuracy_level=4,
    )

  def norm(self, x, name, scale=1.0):
    """Adds a LayerNorm of x."""
    ones = np.full(self.sizes.d_model, scale, np.float32)
    self.num_parameters += ones.size
    inputs = [x, self.weight(name, ones)]
    return self.add("LayerNormalization", inputs, axis=-1, epsilon=1e-6)

  def build(self):
    """Adds the nodes of all layers."""
    s = self.sizes
    heads, d = s.num_heads * s.d_kv, s.d_model
    pair = np.arange(s.d_kv // 2)
    angle = np.outer(np.arange(s.sequence_length), 1e4 ** (-2 * pair / s.d_kv))
    cos = self.weight("cos", np.cos(angle).astype(np.float32))
    sin = self.weight("sin", np.sin(angle).astype(np.float32))
    widths = [heads, s.d_kv, s.d_kv, s.d_ff, s.d_ff]
    split = self.weight("widths", np.array(widths, np.int64))
    table = self.rng.standard_normal([s.vocab_size, d], np.float32)
    self.num_parameters += table.size
    x = self.add("Gather", [self.weight("table", table), "tokens"])
    for i in range(s.num_layers):
      y = self.norm(x, f"norm_{i}")
      wide = self.product(y, f"into_{i}", d, sum(widths))
      parts = [f"{name}_{i}" for name in ("q", "k", "v", "gate", "up")]
      q, k, v, gate, up = parts
      self.add("Split", [wide, split], parts, axis=-1)
      inputs = [q, k, v, f"past_k_{i}", f"past_v_{i}", "last", "total"]
      attended = self.add(
        "GroupQueryAttention",
        [*inputs, cos, sin],
        [f"attended_{i}", f"k_after_{i}", f"v_after_{i}"],
        domain=OWN,
        num_heads=s.num_heads,
        kv_num_heads=1,
        do_rotary=1,
      )
      gate = self.add("QuickGelu", [gate], domain=OWN, alpha=1.0)  # SiLU
      hidden = self.add("Mul", [gate, up])
      joined = self.add("Concat", [attended, hidden], axis=-1)
      x = self.add(
        "Add", [x, self.product(joined, f"out_{i}", heads + s.d_ff, d)]
      )
      self.num_parameters += d * (sum(widths) + heads + s.d_ff)
    ends = [np.array([value], np.int64) for value in (-1, 2**31, 1)]
    names = [self.weight(f"slice_{i}", x) for i, x in enumerate(ends)]
    x = self.add("Slice", [x, *names])
    # The embedding is tied, so the kernel of the logits is counted once.
    logits = self.product(
      self.norm(x, "final_norm", d**-0.5), "unembed", d, s.vocab_size
    )
    self.add("ArgMax", [logits], ["next"], axis=-1, keepdims=0)

  def save(self):
    """Writes the model."""
    s = self.sizes
    rows = s.batch_size

    def value(name, kind, shape):
      return helper.make_tensor_value_info(name, kind, shape)

    cache = [rows, 1, s.sequence_length, s.d_kv]
    layers = range(s.num_layers)

    def caches(prefix, suffix):
      return [
        value(f"{a}_{suffix}{i}", TensorProto.FLOAT, cache)
        for i in layers
        for a in prefix
      ]

    graph = helper.make_graph(
      self.nodes,
      "palm",
      [
        value("tokens", TensorProto.INT64, [rows, "length"]),
        value("last", TensorProto.INT32, [rows]),
        value("total", TensorProto.INT32, []),
        *caches(("past_k", "past_v"), ""),
      ],
      [
        value("next", TensorProto.INT64, [rows, 1]),
        *caches(("k", "v"), "after_"),
      ],
      self.weights,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(OWN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    save(model, self.path)


class Decoder:
  """A session whose cache is updated in place."""

  def __init__(self, sizes, path):
    self.sizes = sizes
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = os.cpu_count()
    self.session = onnxruntime.InferenceSession(
      path, settings, providers=["CPUExecutionProvider"]
    )
    self.binding = self.session.io_binding()
    shape = [sizes.batch_size, 1, sizes.sequence_length, sizes.d_kv]
    for i in range(sizes.num_layers):
      for a in "kv":
        cache = onnxruntime.OrtValue.ortvalue_from_numpy(
          np.zeros(shape, np.float32)
        )
        self.binding.bind_ortvalue_input(f"past_{a}_{i}", cache)
        self.binding.bind_ortvalue_output(f"{a}_after_{i}", cache)
    self.next = onnxruntime.OrtValue.ortvalue_from_numpy(
      np.zeros([sizes.batch_size, 1], np.int64)
    )
    self.binding.bind_ortvalue_output("next", self.next)

  def read(self, tokens, start):
    """Reads tokens [batch, length]; returns the likeliest next tokens."""
    total = start + tokens.shape[1]
    values = {
      "tokens": tokens,
      "last": np.full(len(tokens), total - 1, np.int32),
      "total": np.array(total, np.int32),
    }
    for name, value in values.items():
      self.binding.bind_cpu_input(name, value)
    self.session.run_with_iobinding(self.binding)
    return self.next.numpy()


def main() -> None:
  """Takes turns."""
  sizes = make_parser(__doc__.splitlines()[0], ["float32", *BITS]).parse_args()
  with tempfile.TemporaryDirectory() as folder:
    graph = Graph(sizes, folder)
    decoder = Decoder(sizes, graph.path)
  prompts = np.random.default_rng(0).integers(
    sizes.vocab_size, size=[sizes.batch_size, sizes.prompt_tokens]
  )
  facts = graph.num_parameters, graph.step_bytes
  continue_in_turns(decoder.read, prompts, sizes, *facts)


if __name__ == "__main__":
  main()
