// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Self-attention of a sequence, and its gradients (model/attention.py).
//
//   weights = softmax(scores),  scores = q k / sqrt(d_kv);   out = weights v
//
// Attention is computed for one block of positions at a time, with all keys
// that the block sees, so that the block's weights fit into the CPU's cache.
// The gradient computes the weights again.

#pragma once

#include <cmath>
#include <vector>

#include "word_products.h"

namespace palm {

struct AttentionSizes {
  int length, heads, key_heads, d_kv;
  int first = 0;  // position of the first query
};

// A position sees itself, the earlier positions of its segment, and the prefix
// of its segment.
struct Masks {
  // Each position's segment number, and 1 for a position in a prefix: [length],
  // padded to whole registers; null for no mask. A prefix requires segments.
  const int32_t *segments = nullptr, *prefix = nullptr;

  // Returns, for each of the kLanes positions from `first` on, -1 if `position`
  // sees the lane's position, else 0.
  Ints seen_by(int position, int first) const {
    Ints at = splat(first);
    for (int i = 0; i < kLanes; ++i) at[i] += i;
    Ints seen = at <= position;
    if (prefix) seen |= load<Ints>(prefix + first) > 0;
    if (segments) seen &= load<Ints>(segments + first) == segments[position];
    return seen;
  }
};

// A head's keys and values, packed twice. Products with `keys` and `values` sum
// over d_kv; products with `key_rows` and `value_rows` sum over positions.
template <class T>
struct PackedHead {
  Panels<Word<T>> keys, values, key_rows, value_rows;
};

// A thread's buffers, for one block of positions at a time.
template <class T>
struct BlockMemory {
  std::vector<float> scores, dweights, sums;
  std::vector<Word<T>> q, dout, panels;
  // Left operands of products; weights_t and dscores_t are read transposed.
  std::vector<Word<T>> weights, weights_t, dscores, dscores_t;
};

template <class T>
T* at_least(size_t size, std::vector<T>& memory) {
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

// Returns e^(scale (x - most)), where x <= most; 0 if x is -infinity. The
// polynomial interpolates 2^y at the zeros of a Chebyshev polynomial, with an
// error of at most 3 units in the last place.
inline Floats compute_weights(Floats x, float most, float scale) {
  constexpr float kLeast = -126;
  Floats y = (x - most) * (scale * 1.44269504f);
  const auto is_less = y < kLeast;
  y = is_less ? splat(kLeast) : y;
  const Ints n = to_ints(y - 0.5f);
  y -= to_floats(n);
  Floats power = splat(1.33908633e-3f);
  for (float term : {9.67603177e-3f, 5.55035695e-2f, 0.240221068f, 0.693147182f,
                     1.0f})
    power = power * y + term;
  return is_less ? Floats{} : power * (Floats)((n + 127) << 23);
}

// Attention of a group of query heads that share a key head, in one sequence.
template <class T>
class HeadGroup {
  using W = Word<T>;
  static constexpr int kRows = kTogether<T>;  // numbers per word

 public:
  HeadGroup(const AttentionSizes& sizes, int first, int count, Masks masks,
            PackedHead<T> packed, BlockMemory<T>& memory)
      : sizes_(sizes), first_(first), count_(count), masks_(masks),
        packed_(packed), memory_(memory),
        scale_(1 / std::sqrt(float(sizes.d_kv))) {}

  // q and out are [length - first, heads, d_kv].
  void attend(const T* q, T* out) {
    for_blocks([&](const Block& block) {
      float* scores = at_least(block.size(), memory_.scores);
      W* weights = at_least(block.size(), memory_.weights);
      float* sums = at_least(block.rows, memory_.sums);
      multiply_rows(q, block, packed_.keys, memory_.q, scores);
      for (int r = 0; r < block.rows; ++r) {
        float* row = scores + size_t(r) * block.width;
        auto to = reinterpret_cast<Number<T>*>(weights) + (row - scores);
        const float most = largest_seen(block, r, row);
        Floats total = {};
        for (int i = 0; i < block.keys; i += kLanes) {
          const Floats x = compute_weights(load<Floats>(row + i), most, scale_);
          put(to + i, x);
          total += x;
        }
        sums[r] = sum(total);
      }
      multiply_words<W>(
        {weights, size_t(block.width) / kRows, 1}, block.rows,
        packed_.value_rows, words_of<T>(block.keys),
        [&](int r, int column, const Floats* y) {
          write(y, 1 / sums[r], column, row_of(out, block, r));
        });
    });
  }

  // q, dout and dq are [length, heads, d_kv]. Writes dq, and adds to the key
  // head's dk and dv, [length, padded_columns(d_kv)] each.
  void gradient(const T* q, const T* dout, T* dq, float* dk, float* dv) {
    for_blocks([&](const Block& block) {
      float* scores = at_least(block.size(), memory_.scores);
      float* dweights = at_least(block.size(), memory_.dweights);
      multiply_rows(q, block, packed_.keys, memory_.q, scores);
      multiply_rows(dout, block, packed_.values, memory_.dout, dweights);
      W *weights_t, *dscores_t, *dscores;
      if constexpr (kRows == 2) {
        weights_t = at_least(block.size(), memory_.weights_t);
        dscores_t = at_least(block.size(), memory_.dscores_t);
        dscores = at_least(block.size(), memory_.dscores);
      } else {
        weights_t = scores, dscores_t = dscores = dweights;
      }
      for (int r = 0; r < block.rows; r += kRows) {
        const size_t at = size_t(r) * block.width;
        softmax_gradient(block, r, scores + at, dweights + at,
                         weights_t + at / kRows, dscores_t + at / kRows,
                         dscores + at / kRows);
      }
      multiply_words<W>(
        {dscores, size_t(block.width) / kRows, 1}, block.rows, packed_.key_rows,
        words_of<T>(block.keys), [&](int r, int column, const Floats* y) {
          write(y, 1, column, row_of(dq, block, r));
        });
      add_product_of_rows(block, dscores_t, memory_.q, dk);
      add_product_of_rows(block, weights_t, memory_.dout, dv);
    });
  }

 private:
  // Consecutive positions from `begin` on, which see at most the first `keys`
  // positions. With tiles, `keys` is rounded up (`summed`), even beyond the
  // last position. A row is one head of the group at one position.
  struct Block {
    int begin, rows, keys, width;  // `width` is `keys` with padding

    size_t size() const { return size_t(rows + 1) * width; }
  };

  template <class Use>
  void for_blocks(Use use) const {
    constexpr int kMost = 96;  // rows per block: fit the cache, fill tiles
    const int step = std::max(1, kMost / count_);
    for (int begin = sizes_.first; begin < sizes_.length; begin += step) {
      const int end = std::min(begin + step, sizes_.length);
      const int keys = summed<T>(masks_.prefix ? sizes_.length : end);
      use(Block{begin, (end - begin) * count_, keys, padded_columns(keys)});
    }
  }

  int position_of(const Block& block, int row) const {
    return block.begin + row / count_;
  }

  template <class X>
  X* row_of(X* x, const Block& block, int row) const {
    const int head = first_ + row % count_;
    const size_t at = position_of(block, row) - sizes_.first;
    return x + (at * sizes_.heads + head) * sizes_.d_kv;
  }

  // Multiplies a block's rows of x by `columns`, and writes the product to y.
  // Packs the rows into `copy` first; `gradient` also reads this copy.
  void multiply_rows(const T* x, const Block& block, Panels<W> columns,
                     std::vector<W>& copy, float* y) const {
    const int steps = words_of<T>(sizes_.d_kv);
    W* words = at_least(size_t(block.rows) * steps, copy);
    for (int r = 0; r < block.rows; ++r)
      for (int k = 0; k < steps; ++k)
        words[size_t(r) * steps + k] = word_at(row_of(x, block, r), k);
    columns.count = block.width / kColumns;
    multiply_words<W>(
      {words, size_t(steps), 1}, block.rows, columns, steps,
      [&](int r, int column, const Floats* sums) {
        float* to = y + size_t(r) * block.width + column;
        for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, sums[v]);
      });
  }

  // Returns the largest score of positions that a row sees; sets the scores of
  // all other positions to -infinity.
  float largest_seen(const Block& block, int row, float* scores) const {
    const int position = position_of(block, row);
    Floats most = splat(-INFINITY);
    int i = 0;
    if (!masks_.segments)
      for (; i + kLanes <= position + 1; i += kLanes) {
        const Floats x = load<Floats>(scores + i);
        most = most > x ? most : x;
      }
    for (; i < block.keys; i += kLanes) {
      Floats x = load<Floats>(scores + i);
      x = masks_.seen_by(position, i) ? x : splat(-INFINITY);
      store(scores + i, x);
      most = most > x ? most : x;
    }
    float largest = most[0];
    for (int j = 1; j < kLanes; ++j)
      largest = std::max(largest, float(most[j]));
    return largest;
  }

  // Writes weights and gradients of scores for kRows rows from `row` on at
  // once, because each word of weights_t and dscores_t has a number per row.
  void softmax_gradient(const Block& block, int row, float* scores,
                        float* dweights, W* weights_t, W* dscores_t,
                        W* dscores) const {
    float factors[kRows] = {}, means[kRows] = {};
    for (int j = 0; j < kRows && row + j < block.rows; ++j) {
      float *x = scores + j * block.width, *dx = dweights + j * block.width;
      const float most = largest_seen(block, row + j, x);
      Floats total = {}, dot = {};
      for (int i = 0; i < block.keys; i += kLanes) {
        const Floats weight =
          compute_weights(load<Floats>(x + i), most, scale_);
        store(x + i, weight);
        total += weight, dot += weight * load<Floats>(dx + i);
      }
      factors[j] = 1 / sum(total), means[j] = sum(dot) * factors[j];
    }
    for (int i = 0; i < block.keys; i += kLanes) {
      Floats w[kRows] = {}, d[kRows] = {};
      for (int j = 0; j < kRows && row + j < block.rows; ++j) {
        const int at = j * block.width + i;
        w[j] = load<Floats>(scores + at) * factors[j];
        d[j] = w[j] * ((load<Floats>(dweights + at) - means[j]) * scale_);
      }
      if constexpr (kRows == 2) {
        const Halves a = to_bfloat16(d[0]), b = to_bfloat16(d[1]);
        auto rows = reinterpret_cast<uint16_t*>(dscores) + i;
        store(rows, a);
        store(rows + block.width, b);
        store(dscores_t + i, join_pairs(a, b));
        store(weights_t + i, join_pairs(to_bfloat16(w[0]), to_bfloat16(w[1])));
      } else {
        store(weights_t + i, w[0]);
        store(dscores + i, d[0]);
      }
    }
  }

  // Adds the product of x^T and `rows` to y, [keys, padded_columns(d_kv)].
  void add_product_of_rows(const Block& block, const W* x,
                           const std::vector<W>& rows, float* y) const {
    const int steps = words_of<T>(block.rows), size = sizes_.d_kv;
    const int width = padded_columns(size);
    W* at = at_least(size_t(steps) * width, memory_.panels);
    Panels<W> panels = {at, width / kColumns, size_t(steps) * kColumns};
    auto numbers = reinterpret_cast<const Number<T>*>(rows.data());
    pack_rows(numbers, size, block.rows, size, panels);
    const int keys = std::min(block.keys, sizes_.length);
    multiply_words<W>({x, 1, size_t(block.width)}, keys, panels, steps,
                      [&](int r, int column, const Floats* sums) {
                        float* to = y + size_t(r) * width + column;
                        for (int v = 0; v < kVectors; ++v, to += kLanes)
                          store(to, load<Floats>(to) + sums[v]);
                      });
  }

  void write(const Floats* sums, float factor, int column, T* row) const {
    const int size = std::min(kColumns, sizes_.d_kv - column);
    for_vectors(size, [&](int i, auto kind) {
      using V = decltype(kind);
      const Floats x = sums[i / kLanes] * factor;
      if constexpr (sizeof(V) == sizeof(float))
        put(row + column + i, float(x[i % kLanes]));
      else
        put(row + column + i, x);
    });
  }

  const AttentionSizes& sizes_;
  const int first_, count_;
  const Masks masks_;
  const PackedHead<T> packed_;
  BlockMemory<T>& memory_;
  const float scale_;
};

}  // namespace palm
