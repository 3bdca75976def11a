// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// A decoding step: one more token per row, on one device.
//
// A step computes all blocks of model/palm.py for one position per row. A step
// takes about as long as reading every weight once, because the work between
// the products is only arithmetic on a few rows. Sums and the residual stream
// are float32.

#pragma once

#include <functional>
#include <vector>

#include "decode_attention.h"
#include "norm.h"
#include "rows.h"
#include "team.h"

namespace palm {

// Activations of the MLP's gate, in the order of ACTIVATIONS in decoding.py.
enum class Activation { kSwish, kGelu, kGeluTanh };

// A way to rotate q and k.
struct Rotary {
  bool rotates_neighbours;  // pairs (2i, 2i + 1), not (i, i + rotated / 2)
  int rotated;              // how many numbers of a head rotate
  const float *sines, *cosines;  // [memory_length, rotated / 2]
};

struct Model {
  int heads, key_heads, d_kv, d_ff, d_model, vocab, memory_length;
  // Per layer: index of its way to rotate, -1 for none; and how many positions
  // a position sees at most.
  std::vector<int> rotaries, windows;
  bool is_serial;  // 2 norms, 4 products per layer; else 1 norm, 2 products
  bool has_head_norms;    // each head of q and k is normalized
  bool has_output_norms;  // in a serial block, each result is normalized
  Norm norm;
  float score_scale;
  Activation activation;
  float embedding_scale;
  Format format, logits_format;

  int layers() const { return windows.size(); }
};

template <class T>
struct Step {
  Model model;
  Team& team;
  // x is the residual stream, `inputs` has the inputs of the next product, and
  // `wide` is the joined product [q | k | v | gate | linear] of a layer, later
  // a result before its norm; [num_rows, ...] each.
  std::vector<float>& x;
  PreparedRows& inputs;
  std::vector<float>& wide;
  std::vector<WorkQueue> queues;  // per product: panels left to compute

  int num_rows;
  const int32_t *tokens, *positions;     // [num_rows]
  const T* table;                        // [vocab, d_model]
  std::vector<Rotary> rotaries;
  std::vector<const float*> scales;      // [d_model] or [d_kv], one per norm
  std::vector<const uint8_t*> kernels;   // packed weights, one per product
  std::vector<T*> cache;  // [rows, key_heads, memory_length, d_kv]: for each
                          // layer keys, then values
  float* logits;          // [num_rows, vocab]
  std::function<void(int row, float* logits)> choose;  // null chooses nothing

  int q_size() const { return model.heads * model.d_kv; }
  int kv_size() const { return model.key_heads * model.d_kv; }
  int qkv_size() const { return q_size() + 2 * kv_size(); }
  int wide_size() const { return qkv_size() + 2 * model.d_ff; }

  void run() {
    x.resize(size_t(num_rows) * model.d_model);
    wide.resize(size_t(num_rows) * std::max(wide_size(), model.d_model));
    inputs.resize(num_rows, std::max(model.d_model, q_size() + model.d_ff));
    queues = std::vector<WorkQueue>(kernels.size());
    team.run([this](int thread) { steps(thread); });
  }

  // Each thread of the team runs this, and computes some rows or columns.
  void steps(int thread) {
    auto scale = scales.begin();
    // Returns the scale of the next norm; null if the model lacks such norms.
    auto next = [&](bool has_norm) { return has_norm ? *scale++ : nullptr; };
    size_t kernel = 0;
    for_rows(thread, [this](int row) { embed(row); });
    for (int layer = 0; layer < model.layers(); ++layer) {
      const int q = q_size(), d_ff = model.d_ff;
      normalize(thread, *scale++, model.format);
      const float* q_norm = next(model.has_head_norms);
      const float* k_norm = next(model.has_head_norms);
      int columns = model.is_serial ? qkv_size() : wide_size();
      multiply_in(kernel++, 0, columns);
      if (!model.is_serial) {
        gate(thread, q + d_ff, q);
        attend(thread, layer, q + d_ff, q_norm, k_norm);
        multiply_out(thread, kernel++, q + d_ff, nullptr);
        continue;
      }
      attend(thread, layer, q, q_norm, k_norm);
      multiply_out(thread, kernel++, q, next(model.has_output_norms));
      normalize(thread, *scale++, model.format);
      multiply_in(kernel++, qkv_size(), 2 * d_ff);
      gate(thread, d_ff, 0);
      team.meet();
      multiply_out(thread, kernel++, d_ff, next(model.has_output_norms));
    }
    normalize(thread, *scale, model.logits_format);
    const int vocab = model.vocab;
    multiply(kernel, model.logits_format, model.d_model, vocab,
             [&](int row, int column, int count, const float* y) {
               std::copy_n(y, count, logits + size_t(row) * vocab + column);
             });
    if (!choose) return;
    team.meet();
    for_rows(thread,
             [&](int row) { choose(row, logits + size_t(row) * vocab); });
  }

  template <class Use>
  void for_rows(int thread, Use use) {
    for (int row = thread; row < num_rows; row += team.size()) use(row);
  }

  void embed(int row) {
    const T* from = table + size_t(tokens[row]) * model.d_model;
    float* to = &x[size_t(row) * model.d_model];
    for (int i = 0; i < model.d_model; ++i) to[i] = to_float(from[i]) * model.embedding_scale;
  }

  void normalize(int thread, const float* scale, Format format) {
    const int d_model = model.d_model;
    for_rows(thread, [&](int row) {
      float* y = inputs.row(row, d_model);
      norm_row(&x[size_t(row) * d_model], scale, d_model, model.norm, y);
      inputs.prepare(row, d_model, format);
    });
    team.meet();
  }

  // Writes the product of `inputs` and a kernel (for q, k and v, for gate and
  // linear, or for all five) to `wide`, from column `first` on.
  void multiply_in(size_t kernel, int first, int outer) {
    multiply(kernel, model.format, model.d_model, outer,
             [&](int row, int column, int count, const float* y) {
               float* to = &wide[size_t(row) * wide_size() + first + column];
               std::copy_n(y, count, to);
             });
    team.meet();
  }

  // Adds the product of `inputs` and a kernel to the residual stream; if there
  // is a `scale`, [d_model], first normalizes the product.
  void multiply_out(int thread, size_t kernel, int inner, const float* scale) {
    const int d_model = model.d_model;
    for_rows(thread, [&](int row) { inputs.prepare(row, inner, model.format); });
    team.meet();
    multiply(kernel, model.format, inner, d_model,
             [&](int row, int column, int count, const float* y) {
               float* to = &(scale ? wide : x)[size_t(row) * d_model + column];
               for (int i = 0; i < count; ++i)
                 to[i] = scale ? y[i] : to[i] + y[i];
             });
    team.meet();
    if (!scale) return;
    for_rows(thread, [&](int row) {
      float *y = &wide[size_t(row) * d_model], *to = &x[size_t(row) * d_model];
      norm_row(y, scale, d_model, model.norm, y);
      for (int i = 0; i < d_model; ++i) to[i] += y[i];
    });
    team.meet();
  }

  // Writes the gated MLP's hidden layer to `inputs` (`inner` numbers per row).
  // In a parallel block, attention's result is in the columns before `first`.
  void gate(int thread, int inner, int first) {
    for_shares(thread, model.d_ff, [&](int row, int begin, int end) {
      const float* gates = &wide[size_t(row) * wide_size() + qkv_size()];
      float* to = inputs.row(row, inner) + first;
      with_activation([&](auto activation) {
        for (int i = begin; i < end; ++i)
          to[i] = activation(gates[i]) * gates[model.d_ff + i];
      });
    });
  }

  // Calls use(f), where f is the function of model.activation.
  template <class Use>
  void with_activation(Use use) const {
    switch (model.activation) {
      case Activation::kSwish:
        return use([](float x) { return swish(x); });
      case Activation::kGelu:
        return use([](float x) {
          return 0.5f * x * (1 + std::erf(x * float(M_SQRT1_2)));
        });
      case Activation::kGeluTanh:
        // (1 + tanh(y)) / 2 = sigmoid(2 y), and 1.59576912 = 2 sqrt(2 / pi).
        return use([](float x) {
          return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
        });
    }
  }

  // Adds the keys and values of each row's position to the cache, and writes
  // the query heads' results to `inputs`, whose rows have `inner` numbers.
  // `q_norm` and `k_norm` are scales of norms of heads, or null for no norms.
  void attend(int thread, int layer, int inner, const float* q_norm,
              const float* k_norm) {
    T *keys = cache[2 * layer], *values = cache[2 * layer + 1];
    const size_t per_head = size_t(model.memory_length) * model.d_kv;
    const int rotary = model.rotaries[layer];
    auto prepare = [&](int row, float* head, const float* norm) {
      const Norm how = {false, model.norm.epsilon};
      if (norm) norm_row(head, norm, model.d_kv, how, head);
      if (rotary >= 0) rotate(rotaries[rotary], positions[row], head);
    };
    for_rows(thread, [&](int row) {
      float* k = &wide[size_t(row) * wide_size() + q_size()];
      for (int head = 0; head < model.key_heads; ++head, k += model.d_kv) {
        size_t at = (size_t(row) * model.key_heads + head) * per_head +
                    size_t(positions[row]) * model.d_kv;
        prepare(row, k, k_norm);
        for (int i = 0; i < model.d_kv; ++i) {
          keys[at + i] = from_float<T>(k[i]);
          values[at + i] = from_float<T>(k[kv_size() + i]);
        }
      }
    });
    team.meet();
    for_shares(thread, model.heads, [&](int row, int begin, int end) {
      for (int head = begin; head < end; ++head) {
        int key_head = head / (model.heads / model.key_heads);
        size_t at = (size_t(row) * model.key_heads + key_head) * per_head;
        float* q = &wide[size_t(row) * wide_size() + head * model.d_kv];
        prepare(row, q, q_norm);
        const int count = std::min(positions[row] + 1, model.windows[layer]);
        at += size_t(positions[row] + 1 - count) * model.d_kv;
        attend_to(q, keys + at, values + at, count,
                  inputs.row(row, inner) + head * model.d_kv);
      }
    });
    team.meet();
  }

  // A row has `size` items, such as heads. Splits the items of all rows equally
  // between threads; calls use(row, begin, end) for this thread's items.
  template <class Use>
  void for_shares(int thread, int size, Use use) {
    int64_t all = int64_t(num_rows) * size, n = team.size();
    int64_t at = all * thread / n, last = all * (thread + 1) / n;
    while (at < last) {
      int begin = at % size;
      int end = std::min<int64_t>(size, begin + last - at);
      use(int(at / size), begin, end);
      at += end - begin;
    }
  }

  static void rotate(const Rotary& how, int position, float* head) {
    const int half = how.rotated / 2;
    const float* sin = how.sines + size_t(position) * half;
    const float* cos = how.cosines + size_t(position) * half;
    // The numbers of pair i are at i * step and i * step + apart.
    const int step = how.rotates_neighbours ? 2 : 1;
    const int apart = how.rotates_neighbours ? 1 : half;
    for (int i = 0; i < half; ++i) {
      float *a = head + i * step, *b = a + apart, first = *a;
      *a = first * cos[i] - *b * sin[i];
      *b = *b * cos[i] + first * sin[i];
    }
  }

  // `keys` and `values` are [count, d_kv].
  void attend_to(const float* q, const T* keys, const T* values, int count,
                 float* y) {
    const int d_kv = model.d_kv;
    thread_local std::vector<float> weights;
    weights.resize(count);
    // For the usual values of d_kv, attend_row keeps sums in registers.
    auto attend = d_kv == 64    ? attend_row<64, T>
                  : d_kv == 128 ? attend_row<128, T>
                  : d_kv == 256 ? attend_row<256, T>
                                : attend_row<0, T>;
    attend(q, keys, values, count, d_kv, model.score_scale, weights.data(), y);
  }

  template <class Use>
  void multiply(size_t kernel, Format format, int inner, int outer, Use use) {
    inputs.multiply(queues[kernel], team.size(), kernels[kernel], format, inner,
                    outer, use);
  }
};

}  // namespace palm
