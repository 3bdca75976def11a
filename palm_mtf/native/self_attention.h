// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Self-attention of a sequence, and its gradients (model/attention.py).
//
//   weights = softmax(scores),  scores = q k / sqrt(d_kv);   out = weights v
//
// Attention is computed for one block of positions at a time, with all keys
// that the block sees, so that the block's weights fit into the CPU's cache.
// The gradient computes the weights again, and reads them in chunks of keys.

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
  std::vector<float> scores, dweights, dq, factors, means;
  std::vector<Word<T>> q, dout, q_rows, dout_rows;
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
      W* weights = at_least(block.size(), memory_.weights);
      float* factors = at_least(block.rows, memory_.factors);
      float* scores = find_scores(q, block);
      for (int r = 0; r < block.rows; ++r) {
        float* row = scores + size_t(r) * block.width;
        auto to = reinterpret_cast<Number<T>*>(weights) + (row - scores);
        factors[r] = 1 / make_powers(block, r, row, [&](int i, Floats x) {
          put(to + i, x);
        });
      }
      multiply_words<W>(
        {weights, size_t(block.width) / kRows, 1}, block.rows,
        packed_.value_rows, words_of<T>(block.keys),
        [&](int, int last, int) {
          return Steps{0, words_of<T>(num_seen(block, last - 1))};
        },
        [&](int r, int column, const Floats* y) {
          write(y, factors[r], column, row_of(out, block, r));
        });
    });
  }

  // q, out, dout and dq are [length, heads, d_kv]; `attend` gave `out`. Writes
  // dq, and adds to the key head's dk and dv, [length, padded_columns(d_kv)].
  void gradient(const T* q, const T* out, const T* dout, T* dq, float* dk,
                float* dv) {
    const int width = padded_columns(sizes_.d_kv);
    for_blocks([&](const Block& block) {
      float* factors = at_least(block.rows, memory_.factors);
      float* means = at_least(block.rows, memory_.means);
      float* scores = find_scores(q, block);
      copy_rows(dout, block, memory_.dout);
      for (int r = 0; r < block.rows; ++r) {
        float* row = scores + size_t(r) * block.width;
        factors[r] = 1 / make_powers(block, r, row, [&](int i, Floats x) {
          store(row + i, x);
        });
        means[r] = dot(row_of(out, block, r), row_of(dout, block, r));
      }
      const Panels<W> q_rows = pack(block, memory_.q, memory_.q_rows);
      const Panels<W> dout_rows = pack(block, memory_.dout, memory_.dout_rows);
      memory_.dq.assign(size_t(block.rows) * width, 0);
      for (int begin = 0; begin < block.keys; begin += kChunk) {
        const Chunk chunk = {begin, std::min(begin + kChunk, block.keys)};
        find_gradients(block, chunk);
        add_dq(block, chunk, width);
        add_product_of_rows(block, chunk, memory_.dscores_t, q_rows, dk);
        add_product_of_rows(block, chunk, memory_.weights_t, dout_rows, dv);
      }
      for (int r = 0; r < block.rows; ++r)
        for (int column = 0; column < width; column += kColumns) {
          const float* sums = &memory_.dq[size_t(r) * width + column];
          Floats own[kVectors];
          std::memcpy(own, sums, sizeof(own));
          write(own, 1, column, row_of(dq, block, r));
        }
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

  // The gradient computes with the keys from `begin` to before `end` at a time,
  // which stay in the CPU's cache.
  struct Chunk {
    int begin, end;
  };
  static constexpr int kChunk = 128;
  // Padding of rows: without it, rows would share sets of the cache. The first
  // register of it is written (`make_powers`).
  static constexpr int kGap = kLanes;

  template <class Use>
  void for_blocks(Use use) const {
    constexpr int kMost = 96;  // rows per block: fit the cache, fill tiles
    const int step = std::max(1, kMost / count_);
    for (int begin = sizes_.first; begin < sizes_.length; begin += step) {
      const int end = std::min(begin + step, sizes_.length);
      const int keys = summed<T>(masks_.prefix ? sizes_.length : end);
      use(Block{begin, (end - begin) * count_, keys,
                padded_columns(keys) + kGap});
    }
  }

  int position_of(const Block& block, int row) const {
    return block.begin + row / count_;
  }

  // Returns the number of keys after which a row has only weights of 0. Tiles
  // (tiles.h) read all keys of a block.
  int num_seen(const Block& block, int row) const {
    if (kHasTiles || masks_.prefix) return block.keys;
    return position_of(block, row) + 1;
  }
  // Returns the same, rounded up to whole registers.
  int num_computed(const Block& block, int row) const {
    return parts_of(num_seen(block, row), kLanes) * kLanes;
  }

  template <class X>
  X* row_of(X* x, const Block& block, int row) const {
    const int head = first_ + row % count_;
    const size_t at = position_of(block, row) - sizes_.first;
    return x + (at * sizes_.heads + head) * sizes_.d_kv;
  }

  // Copies a block's rows of x.
  void copy_rows(const T* x, const Block& block, std::vector<W>& copy) const {
    const int steps = words_of<T>(sizes_.d_kv);
    W* words = at_least(size_t(block.rows) * steps, copy);
    for (int r = 0; r < block.rows; ++r, words += steps) {
      const T* row = row_of(x, block, r);
      for (int k = 0; k < steps; ++k) words[k] = word_at(row, k, sizes_.d_kv);
    }
  }

  // Returns the products of a block's rows of q with keys; copies the rows.
  float* find_scores(const T* q, const Block& block) const {
    float* scores = at_least(block.size(), memory_.scores);
    copy_rows(q, block, memory_.q);
    multiply_rows(block, {0, block.keys}, memory_.q, packed_.keys,
                  scores, block.width);
    return scores;
  }

  // Multiplies a block's rows, x, by the columns of a chunk, and writes the
  // products to y, whose rows are `width` numbers apart.
  void multiply_rows(const Block& block, const Chunk& chunk,
                     const std::vector<W>& x, Panels<W> columns, float* y,
                     int width) const {
    const int steps = words_of<T>(sizes_.d_kv);
    columns.at += chunk.begin / kColumns * columns.size;
    columns.count = parts_of(chunk.end - chunk.begin, kColumns);
    multiply_words<W>(
      {x.data(), size_t(steps), 1}, block.rows, columns, steps,
      [&](int, int last, int column) {
        const bool is_seen = chunk.begin + column < num_seen(block, last - 1);
        return Steps{0, is_seen ? steps : 0};
      },
      [&](int r, int column, const Floats* sums) {
        float* to = y + size_t(r) * width + column;
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
    for (; i < num_seen(block, row); i += kLanes) {
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

  // Calls use(key, powers) with a row's weights before their division by their
  // sum; then with a register of zeros. Returns the sum.
  template <class Use>
  float make_powers(const Block& block, int row, float* scores, Use use) const {
    const float most = largest_seen(block, row, scores);
    const int size = num_computed(block, row);
    Floats total = {};
    for (int i = 0; i < size; i += kLanes) {
      const Floats x = compute_weights(load<Floats>(scores + i), most, scale_);
      use(i, x);
      total += x;
    }
    use(size, Floats{});
    return sum(total);
  }

  // Returns the sum of x * y, the mean of the gradients of a row's weights. In
  // float32, rounds as products (`add_product`) do: a position that sees only
  // itself then has scores with a gradient of 0.
  float dot(const T* x, const T* y) const {
    if constexpr (sizeof(T) == 2) {
      return sum_of(sizes_.d_kv, [&](int i, auto kind) {
        using V = decltype(kind);
        return V(get<V>(x + i) * get<V>(y + i));
      });
    } else {
      float total = 0;
      for (int i = 0; i < sizes_.d_kv; ++i)
        total = add_product(total, x[i], y[i]);
      return total;
    }
  }

  // Writes weights and gradients of scores, of a chunk, to the buffers.
  void find_gradients(const Block& block, const Chunk& chunk) const {
    constexpr size_t kWidth = kChunk + kGap;
    const size_t size = (block.rows + 1) * kWidth;
    float* dweights = at_least(size, memory_.dweights);
    multiply_rows(block, chunk, memory_.dout, packed_.values, dweights, kWidth);
    W* dscores = at_least(size, memory_.dscores);
    W* dscores_t = at_least(size, memory_.dscores_t);
    W* weights_t = at_least(size, memory_.weights_t);
    // kRows rows at once, because each word of weights_t and dscores_t has a
    // number per row.
    for (int r = 0; r < block.rows; r += kRows) {
      const int last = std::min(r + kRows, block.rows) - 1;
      const int seen = num_computed(block, last) - chunk.begin;
      const int end = std::clamp(seen, 0, kChunk);
      const size_t at = r * kWidth;
      auto put_words = [&](int i, const Floats* w, const Floats* d) {
        if constexpr (kRows == 2) {
          const Halves a = to_bfloat16(d[0]), b = to_bfloat16(d[1]);
          auto to = reinterpret_cast<uint16_t*>(dscores) + at + i;
          store(to, a);
          store(to + kWidth, b);
          store(dscores_t + at / 2 + i, join_pairs(a, b));
          store(weights_t + at / 2 + i,
                join_pairs(to_bfloat16(w[0]), to_bfloat16(w[1])));
        } else {
          store(weights_t + at + i, w[0]);
          store(dscores + at + i, d[0]);
          store(dscores_t + at + i, d[0]);
        }
      };
      const float *powers[kRows], *dx[kRows];
      float factors[kRows], means[kRows];
      for (int j = 0; j < kRows; ++j) {
        const int row = std::min(r + j, last);
        powers[j] = &memory_.scores[size_t(row) * block.width + chunk.begin];
        dx[j] = dweights + row * kWidth;
        factors[j] = r + j > last ? 0 : memory_.factors[row];  // 0: no such row
        means[j] = memory_.means[row];
      }
      for (int i = 0; i < end; i += kLanes) {
        Floats w[kRows], d[kRows];
        for (int j = 0; j < kRows; ++j) {
          w[j] = load<Floats>(powers[j] + i) * factors[j];
          d[j] = w[j] * ((load<Floats>(dx[j] + i) - means[j]) * scale_);
        }
        put_words(i, w, d);
      }
      const Floats zeros[kRows] = {};
      put_words(end, zeros, zeros);
    }
  }

  // Adds the chunk's terms to `memory_.dq`, [rows, width].
  void add_dq(const Block& block, const Chunk& chunk, int width) const {
    Panels<W> keys = packed_.key_rows;
    keys.at += size_t(chunk.begin / kRows) * kColumns;
    const int size = chunk.end - chunk.begin;
    multiply_words<W>(
      {memory_.dscores.data(), (kChunk + kGap) / kRows, 1}, block.rows, keys,
      words_of<T>(size),
      [&](int, int last, int) {
        const int seen = num_seen(block, last - 1) - chunk.begin;
        return Steps{0, words_of<T>(std::clamp(seen, 0, size))};
      },
      [&](int r, int column, const Floats* sums) {
        add(sums, &memory_.dq[size_t(r) * width + column]);
      });
  }

  // Packs a copy of a block's rows; products then sum over the rows.
  Panels<W> pack(const Block& block, const std::vector<W>& rows,
                 std::vector<W>& to) const {
    const int steps = words_of<T>(block.rows), size = sizes_.d_kv;
    const int width = padded_columns(size);
    W* at = at_least(size_t(steps) * width, to);
    Panels<W> panels = {at, width / kColumns, size_t(steps) * kColumns};
    auto numbers = reinterpret_cast<const Number<T>*>(rows.data());
    const size_t stride = size_t(words_of<T>(size)) * kRows;
    pack_rows(numbers, stride, block.rows, size, panels);
    return panels;
  }

  // Adds the product of x^T and rows to the chunk's rows of y, [length,
  // padded_columns(d_kv)].
  void add_product_of_rows(const Block& block, const Chunk& chunk,
                           const std::vector<W>& x, Panels<W> rows,
                           float* y) const {
    const int steps = words_of<T>(block.rows);
    const int width = padded_columns(sizes_.d_kv);
    const int keys = std::min(chunk.end, sizes_.length) - chunk.begin;
    y += size_t(chunk.begin) * width;
    multiply_words<W>(
      {x.data(), 1, kChunk + kGap}, keys, rows, steps,
      [&](int first, int, int) {  // rows before a key's position do not see it
        const int before = chunk.begin + first - block.begin;
        const int unseen = masks_.prefix ? 0 : std::max(0, before) * count_;
        return Steps{unseen / kRows, steps};
      },
      [&](int r, int column, const Floats* sums) {
        add(sums, y + size_t(r) * width + column);
      });
  }

  static void add(const Floats* sums, float* to) {
    for (int v = 0; v < kVectors; ++v, to += kLanes)
      store(to, load<Floats>(to) + sums[v]);
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
