// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// A decoding step: one more token per row, on one device. Rows may be
// successive tokens of one text: a layer writes all keys before it reads any.
//
// A step computes all blocks of model/palm.py for one position per row. A step
// takes about as long as reading every weight once, because the work between
// the products is only arithmetic on a few rows. Sums and the residual stream
// are float32.

#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "decode_attention.h"
#include "experts.h"
#include "low_rank.h"
#include "norm.h"
#include "rows.h"
#include "team.h"

namespace palm {

// A way to rotate q and k.
struct Rotary {
  bool rotates_neighbours;  // pairs (2i, 2i + 1), not (i, i + rotated / 2)
  int rotated;              // how many numbers of a head rotate
  const float *sines, *cosines;  // [memory_length, rotated / 2]
};

struct Model {
  int heads, key_heads, d_kv, d_model, vocab, memory_length;
  // Per layer: index of its way to rotate, -1 for none; how many positions a
  // position sees at most; the width of its MLP, or of the experts that all
  // tokens use, 0 for none; and whether it has experts with a router.
  std::vector<int> rotaries, windows, d_ffs, is_sparse;
  bool is_serial;  // attention and MLP one after another, each with a norm
  bool has_head_norms;    // each head of q and k is normalized
  bool joins_heads;       // or all heads of a position together
  bool has_output_norms;  // in a serial block, each result is normalized
  Norm norm;
  float score_scale;
  Activation activation;
  Experts experts;
  Router router;
  bool has_router_bias;
  float embedding_scale;
  Format format, logits_format;
  int tile_rows;  // that of Rows (panels.h)

  int layers() const { return windows.size(); }
  int widest() const { return *std::max_element(d_ffs.begin(), d_ffs.end()); }
  int count_sparse() const {
    return std::count(is_sparse.begin(), is_sparse.end(), 1);
  }
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
  ExpertRows expert_rows;
  std::vector<WorkQueue> queues;  // per product: panels left to compute
  std::vector<int> chosen;   // experts of each row, [num_rows, per_row]
  std::vector<float> gates;  // factors of their results
  LowRankRows<T> low_rank;

  int num_rows;
  const int32_t *tokens, *positions;     // [num_rows]
  const int32_t* cache_rows = nullptr;   // [num_rows]; null for 0, 1, 2 ...
  const T* table;                        // [vocab, d_model]
  std::vector<Rotary> rotaries;
  std::vector<const float*> scales;      // one per norm; see `StepWeights`
  std::vector<const float*> routers;     // kernel, then any bias, per router
  std::vector<const uint8_t*> kernels;   // packed weights, one per product
  std::vector<T*> cache;  // [rows, key_heads, memory_length, d_kv]: for each
                          // layer keys, then values
  float* logits;          // [num_rows, vocab]
  float* key = nullptr;   // [num_rows, d_model]: what gives the logits, or null
  int num_texts = 0;  // whose tokens to choose
  std::function<void(int text)> choose;  // reads `logits`

  int q_size() const { return model.heads * model.d_kv; }
  int kv_size() const { return model.key_heads * model.d_kv; }
  int qkv_size() const { return q_size() + 2 * kv_size(); }
  int wide_size() const { return qkv_size() + 2 * model.widest(); }
  size_t cache_row(int row) const { return cache_rows ? cache_rows[row] : row; }

  void run() {
    inputs.tile_rows = expert_rows.copies.tile_rows = model.tile_rows;
    x.resize(size_t(num_rows) * model.d_model);
    wide.resize(size_t(num_rows) * std::max(wide_size(), model.d_model));
    inputs.resize(num_rows, std::max(model.d_model, q_size() + model.widest()));
    if (model.experts.count) {
      expert_rows.resize(num_rows);
      chosen.resize(size_t(num_rows) * model.experts.per_row);
      gates.resize(chosen.size());
    }
    queues = std::vector<WorkQueue>(kernels.size());
    team.run([this](int thread) { steps(thread); });
  }

  // Each thread of the team runs this, and computes some rows or columns.
  void steps(int thread) {
    auto scale = scales.begin();
    // Returns the scale of the next norm; null if the model lacks such norms.
    auto next = [&](bool has_norm) { return has_norm ? *scale++ : nullptr; };
    auto router = routers.begin();
    size_t kernel = 0, expert_kernel = kernels.size() - 2 * model.count_sparse();
    for_rows(thread, [this](int row) { embed(row); });
    for (int layer = 0; layer < model.layers(); ++layer) {
      const int q = q_size(), d_ff = model.d_ffs[layer];
      std::optional<Choices> choices;
      auto choose = [&] {
        if (!model.is_sparse[layer]) return;
        const float* weights = *router++;
        const float* bias = model.has_router_bias ? *router++ : nullptr;
        choices = choose_all(thread, weights, bias, expert_kernel);
      };
      auto add_chosen = [&](const float* scale) {
        if (!choices) return;
        add_experts(thread, *choices, expert_kernel, scale);
        expert_kernel += 2;
      };
      normalize(thread, *scale++, model.format);
      const float* q_norm = next(model.has_head_norms);
      const float* k_norm = next(model.has_head_norms);
      if (!model.is_serial) {
        choose();
        multiply_in(thread, kernel++, 0, qkv_size() + 2 * d_ff);
        attend(thread, layer, q + d_ff, q_norm, k_norm,
               [&] { gate(thread, d_ff, q + d_ff, q); });
        multiply_out(thread, kernel++, q + d_ff, nullptr);
        add_chosen(nullptr);
        continue;
      }
      multiply_in(thread, kernel++, 0, qkv_size());
      attend(thread, layer, q, q_norm, k_norm, [] {});
      multiply_out(thread, kernel++, q, next(model.has_output_norms));
      normalize(thread, *scale++, model.format);
      choose();
      const float* output_norm = next(model.has_output_norms);
      if (d_ff) {
        multiply_in(thread, kernel++, qkv_size(), 2 * d_ff);
        if (low_rank.has(kernel - 1)) team.meet();
        gate(thread, d_ff, d_ff, 0);
        team.meet();
        multiply_out(thread, kernel++, d_ff, output_norm);
      }
      add_chosen(output_norm);
    }
    normalize(thread, *scale, model.logits_format);
    if (key)
      for_rows(thread, [this](int row) {
        std::copy_n(inputs.row(row, model.d_model), model.d_model,
                    key + size_t(row) * model.d_model);
      });
    const int vocab = model.vocab;
    multiply(kernel, model.logits_format, model.d_model, vocab,
             [&](int row, int column, int count, const float* y) {
               std::copy_n(y, count, logits + size_t(row) * vocab + column);
             });
    if (!num_texts) return;
    team.meet();
    for (int i = thread; i < num_texts; i += team.size()) choose(i);
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
  void multiply_in(int thread, size_t kernel, int first, int outer) {
    auto wide_row = [&](int row) {
      return &wide[size_t(row) * wide_size() + first];
    };
    multiply_low(kernel, model.d_model);
    multiply(kernel, model.format, model.d_model, outer,
             [&](int row, int column, int count, const float* y) {
               std::copy_n(y, count, wide_row(row) + column);
             });
    team.meet();
    add_low(thread, kernel, wide_row);
  }

  // Adds the product of `inputs` and a kernel to the residual stream; if there
  // is a `scale`, [d_model], first normalizes the product.
  void multiply_out(int thread, size_t kernel, int inner, const float* scale) {
    const int d_model = model.d_model;
    for_rows(thread, [&](int row) { inputs.prepare(row, inner, model.format); });
    team.meet();
    auto result_row = [&](int row) {
      return &(scale ? wide : x)[size_t(row) * d_model];
    };
    multiply_low(kernel, inner);
    multiply(kernel, model.format, inner, d_model,
             [&](int row, int column, int count, const float* y) {
               float* to = result_row(row) + column;
               for (int i = 0; i < count; ++i)
                 to[i] = scale ? y[i] : to[i] + y[i];
             });
    team.meet();
    add_low(thread, kernel, result_row);
    if (!scale) return;
    for_rows(thread, [&](int row) {
      float *y = &wide[size_t(row) * d_model], *to = &x[size_t(row) * d_model];
      norm_row(y, scale, d_model, model.norm, y);
      for (int i = 0; i < d_model; ++i) to[i] += y[i];
    });
    team.meet();
  }

  // Multiplies `inputs` by the first factors of the rows' adapters.
  void multiply_low(size_t kernel, int inner) {
    low_rank.multiply_in(kernel,
                         [&](int row) { return inputs.row(row, inner); });
  }

  // Adds the products with the second factors to this thread's rows y(row).
  template <class Y>
  void add_low(int thread, size_t kernel, Y y) {
    low_rank.add_out(kernel, thread, team.size(), y);
  }

  // Writes the gated MLP's hidden layer to `inputs` (`inner` numbers per row).
  // In a parallel block, attention's result is in the columns before `first`.
  void gate(int thread, int d_ff, int inner, int first) {
    for_shares(thread, d_ff, [&](int row, int begin, int end) {
      const float* gates = &wide[size_t(row) * wide_size() + qkv_size() + begin];
      gate_row(model.experts.activation, gates, gates + d_ff, end - begin,
               inputs.row(row, inner) + first + begin);
    });
  }

  // Chooses the experts of the rows of `inputs`, and copies the rows for them.
  Choices choose_all(int thread, const float* router, const float* bias,
                     size_t kernel) {
    const int d_model = model.d_model, per_row = model.experts.per_row;
    for_rows(thread, [&](int row) {
      const int at = row * per_row;
      choose_experts(inputs.row(row, d_model), router, bias, model.router,
                     model.experts, &chosen[at], &gates[at]);
    });
    team.meet();
    Choices choices(model.experts, chosen.data(), num_rows, kernels[kernel],
                    kernels[kernel + 1]);
    expert_rows.take(thread, choices, [&](int row, float* to) {
      std::copy_n(inputs.row(row, d_model), d_model, to);
    });
    return choices;
  }

  // Adds the results of the chosen experts to the residual stream; if there is
  // a `scale`, [d_model], first normalizes a row's sum of results.
  void add_experts(int thread, const Choices& choices, size_t kernel,
                   const float* scale) {
    const int d_model = model.d_model;
    expert_rows.run(thread, choices, &queues[kernel]);
    for_rows(thread, [&](int row) {
      const float* factors = &gates[row * model.experts.per_row];
      float* to = &x[size_t(row) * d_model];
      if (!scale) return expert_rows.add(choices, row, factors, to);
      std::vector<float> sum(d_model);
      expert_rows.add(choices, row, factors, sum.data());
      norm_row(sum.data(), scale, d_model, model.norm, sum.data());
      for (int i = 0; i < d_model; ++i) to[i] += sum[i];
    });
  }

  // Adds the keys and values of each row's position to the cache, and writes
  // the query heads' results to `inputs`, whose rows have `inner` numbers.
  // `q_norm` and `k_norm` are scales of norms of heads, or null for no norms.
  // Calls `between` once the rows of `wide` are whole.
  template <class Between>
  void attend(int thread, int layer, int inner, const float* q_norm,
              const float* k_norm, Between between) {
    T *keys = cache[2 * layer], *values = cache[2 * layer + 1];
    const size_t per_head = size_t(model.memory_length) * model.d_kv;
    const int rotary = model.rotaries[layer];
    const Norm how = {false, model.norm.epsilon};
    auto prepare = [&](int row, float* head, const float* norm) {
      if (norm && !model.joins_heads) norm_row(head, norm, model.d_kv, how, head);
      if (rotary >= 0) rotate(rotaries[rotary], positions[row], head);
    };
    for_rows(thread, [&](int row) {
      float *q = &wide[size_t(row) * wide_size()], *k = q + q_size();
      if (model.joins_heads) {
        norm_row(q, q_norm, q_size(), how, q);
        norm_row(k, k_norm, kv_size(), how, k);
      }
      for (int head = 0; head < model.key_heads; ++head, k += model.d_kv) {
        size_t at = (cache_row(row) * model.key_heads + head) * per_head +
                    size_t(positions[row]) * model.d_kv;
        prepare(row, k, k_norm);
        for (int i = 0; i < model.d_kv; ++i) {
          keys[at + i] = from_float<T>(k[i]);
          values[at + i] = from_float<T>(k[kv_size() + i]);
        }
      }
    });
    team.meet();
    between();
    for_shares(thread, model.heads, [&](int row, int begin, int end) {
      for (int head = begin; head < end; ++head) {
        int key_head = head / (model.heads / model.key_heads);
        size_t at = (cache_row(row) * model.key_heads + key_head) * per_head;
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
    const Group whole = {0, num_rows, kernels[kernel]};
    inputs.multiply(queues[kernel], team.size(), {&whole, 1}, format, inner,
                    outer, use);
  }
};

}  // namespace palm
