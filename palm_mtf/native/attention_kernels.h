// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// PalmAttention and PalmAttentionGradient: self-attention of a batch.
// PalmAttendToCache: attention of parts of prompts to the cache of decoding.

#pragma once

#include <mutex>
#include <vector>

#include "call.h"
#include "self_attention.h"
#include "shared.h"

namespace palm {

// Buffers that are kept between calls, so that a call need not allocate memory.
// Only one call at a time uses the buffers: a call holds the mutex of shared.h.
template <class T>
struct AttentionMemory {
  std::vector<Word<T>> keys, values, key_rows, value_rows;
  std::vector<float> dk, dv;
  std::vector<int32_t> segments, prefix;
  std::vector<BlockMemory<T>> of_threads;
};

// Attention of a batch. Here, a head is one key head of one sequence. The query
// heads that share a key head form one or more groups; one thread computes a
// whole group.
template <class T>
class Attention {
 public:
  // Reads inputs of the call: q, [batch, length, heads, d_kv]; k and v, [batch,
  // length, key_heads, d_kv], or [batch, length, d_kv] if all heads share one
  // key head.
  Attention(Call& call, int num_threads, bool for_gradient,
            AttentionMemory<T>& memory)
      : q(call.next()), k(call.next()), v(call.next()),
        batch_(TF_Dim(q, 0)), for_gradient_(for_gradient), memory_(memory) {
    const int heads = TF_Dim(q, 2);
    sizes_ = {int(TF_Dim(q, 1)), heads, TF_NumDims(k) == 4 ? int(TF_Dim(k, 2)) : 1,
              int(TF_Dim(q, 3))};
    from_ = {data(k), data(v), size_t(sizes_.d_kv),
             size_t(sizes_.key_heads) * sizes_.d_kv};
    prepare(num_threads);
  }

  // Where the keys and values of a sequence are, and the distances from a key
  // head to the next and from a position to the next.
  struct Source {
    const T *keys, *values;
    size_t head, position;
  };

  // One sequence, whose queries are its positions from `sizes.first` on.
  Attention(const AttentionSizes& sizes, Source from, int num_threads,
            AttentionMemory<T>& memory)
      : sizes_(sizes), from_(from), for_gradient_(false), memory_(memory) {
    prepare(num_threads);
  }

  void prepare(int num_threads) {
    AttentionMemory<T>& memory = memory_;
    // With at least kEnough groups, threads finish at about the same time. The
    // number of groups changes the last bits of results, so kEnough is the same
    // for any number of threads.
    constexpr int kEnough = 16;
    const int most = sizes_.heads / sizes_.key_heads;
    while (num_groups() < kEnough && parts_ < most)
      do ++parts_; while (most % parts_);
    memory.of_threads.resize(num_threads);
    at_least(num_heads() * columns_size(), memory.keys);
    if (!for_gradient_) {
      at_least(num_heads() * rows_size(), memory.value_rows);
      return;
    }
    at_least(num_heads() * columns_size(), memory.values);
    at_least(num_heads() * rows_size(), memory.key_rows);
    for (auto each : {&memory.dk, &memory.dv})
      at_least(num_groups() * part_size(), *each);
  }

  // Reads the optional inputs segments and prefix, [batch, length] each.
  void read_masks(Call& call) {
    const int room = padded_columns(sizes_.length);
    for (auto each : {&memory_.segments, &memory_.prefix}) {
      each->clear();
      if (!call.has_next()) continue;
      const int32_t* from = call.next_data<int32_t>();
      each->resize(size_t(batch_) * room);
      for (int i = 0; i < batch_; ++i)
        std::copy_n(from + size_t(i) * sizes_.length, sizes_.length,
                    &(*each)[size_t(i) * room]);
    }
  }

  const TF_Tensor *q = nullptr, *k = nullptr, *v = nullptr;

  int num_heads() const { return batch_ * sizes_.key_heads; }
  int num_groups() const { return num_heads() * parts_; }

  void pack(int head) const {
    const PackedHead<T> to = packed(head);
    const int length = sizes_.length, size = sizes_.d_kv;
    const size_t stride = from_.position, at = head_begin(head);
    const T *keys = from_.keys + at, *values = from_.values + at;
    pack_columns(keys, stride, length, size, to.keys);
    if (for_gradient_) {
      pack_columns(values, stride, length, size, to.values);
      pack_rows(keys, stride, length, size, to.key_rows);
    } else {
      pack_rows(values, stride, length, size, to.value_rows);
    }
  }

  // Packs keys and values, and writes the results of queries to `out`.
  void run(Team& team, const T* queries, T* out) const {
    WorkQueue heads, groups;
    team.run([&](int thread) {
      heads.each(num_heads(), [&](int i) { pack(i); });
      team.meet();
      groups.each(num_groups(), [&](int i) {
        const size_t at = sequence_of(i);
        heads_of(i, thread).attend(queries + at, out + at);
      });
    });
  }

  // Writes the gradient of the group's query heads to `dq`. Writes the group's
  // terms of dk and dv to `memory_`; `add_parts` sums these terms.
  void gradient(int group, int thread, const T* out, const T* dout,
                T* dq) const {
    float* dk = &memory_.dk[group * part_size()];
    float* dv = &memory_.dv[group * part_size()];
    std::fill_n(dk, part_size(), 0.0f);
    std::fill_n(dv, part_size(), 0.0f);
    const size_t at = sequence_of(group);
    heads_of(group, thread)
      .gradient(data(q) + at, out + at, dout + at, dq + at, dk, dv);
  }

  // Writes dk and dv of a key head: the sums of the terms of its groups.
  void add_parts(int head, T* dk, T* dv) const {
    add_parts(head, memory_.dk, dk);
    add_parts(head, memory_.dv, dv);
  }

 private:
  static const T* data(const TF_Tensor* x) {
    return static_cast<const T*>(TF_TensorData(x));
  }

  // Sizes of a head's packed columns and packed rows, in words
  // (word_products.h), and of a group's terms of dk or dv, in floats.
  size_t columns_size() const {
    return size_t(words_of<T>(sizes_.d_kv)) * padded_columns(sizes_.length);
  }
  size_t row_words() const {
    return words_of<T>(summed<T>(sizes_.length));
  }
  size_t rows_size() const {
    return row_words() * padded_columns(sizes_.d_kv);
  }
  size_t part_size() const {
    return size_t(sizes_.length) * padded_columns(sizes_.d_kv);
  }

  PackedHead<T> packed(int head) const {
    auto columns = [&](std::vector<Word<T>>& x) {
      return Panels<Word<T>>{x.data() + head * columns_size(),
                             parts_of(sizes_.length, kColumns),
                             size_t(words_of<T>(sizes_.d_kv)) * kColumns};
    };
    auto rows = [&](std::vector<Word<T>>& x) {
      return Panels<Word<T>>{x.data() + head * rows_size(),
                             parts_of(sizes_.d_kv, kColumns),
                             row_words() * kColumns};
    };
    return {columns(memory_.keys), columns(memory_.values),
            rows(memory_.key_rows), rows(memory_.value_rows)};
  }

  // Returns where a head begins in keys and values, and in dk and dv.
  size_t head_begin(int head) const {
    const size_t sequence = head / sizes_.key_heads;
    return sequence * sizes_.length * from_.position +
           head % sizes_.key_heads * from_.head;
  }

  // Returns the index in q, out, dout or dq where a group's sequence begins.
  size_t sequence_of(int group) const {
    const int sequence = group / parts_ / sizes_.key_heads;
    return size_t(sequence) * sizes_.length * sizes_.heads * sizes_.d_kv;
  }

  HeadGroup<T> heads_of(int group, int thread) const {
    const int head = group / parts_, sequence = head / sizes_.key_heads;
    const int sharing = sizes_.heads / sizes_.key_heads;
    const int size = sharing / parts_;
    const int first = head % sizes_.key_heads * sharing + group % parts_ * size;
    const size_t at = size_t(sequence) * padded_columns(sizes_.length);
    auto mask = [&](const std::vector<int32_t>& x) {
      return x.empty() ? nullptr : &x[at];
    };
    return {sizes_, first, size,
            Masks{mask(memory_.segments), mask(memory_.prefix)}, packed(head),
            memory_.of_threads[thread]};
  }

  void add_parts(int head, const std::vector<float>& parts, T* to) const {
    const int size = sizes_.d_kv, width = padded_columns(size);
    to += head_begin(head);
    for (int i = 0; i < sizes_.length; ++i, to += sizes_.key_heads * size) {
      const float* from =
        &parts[head * parts_ * part_size() + size_t(i) * width];
      for_vectors(size, [&](int j, auto kind) {
        using V = decltype(kind);
        V sum = get<V>(from + j);
        for (int p = 1; p < parts_; ++p)
          sum += get<V>(from + p * part_size() + j);
        put(to + j, sum);
      });
    }
  }

  AttentionSizes sizes_;
  Source from_;
  int batch_ = 1;
  int parts_ = 1;  // groups per key head
  const bool for_gradient_;
  AttentionMemory<T>& memory_;
};

template <class T>
AttentionMemory<T>& attention_memory() {
  static auto& it = *new AttentionMemory<T>;  // never freed: used at exit
  return it;
}

struct AttentionKernel {
  int threads;

  explicit AttentionKernel(const Attributes& attrs)
      : threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    Attention<T> x(call, threads, false, attention_memory<T>());
    x.read_masks(call);
    T* out = call.allocate_like<T>(0, x.q);
    const T* queries = static_cast<const T*>(TF_TensorData(x.q));
    x.run(with.team_of(threads, kNoPatience), queries, out);
  }
};

// Inputs: q, [1, tokens, heads, d_kv]; k and v, [1, tokens, key_heads, d_kv] or,
// for one key head, [1, tokens, d_kv]; the row of the cache and the position of
// each token, [tokens] each; the number of tokens that count; keys and values of
// the cache, [rows, key_heads, positions, d_kv] or [rows, positions, d_kv].
// Writes k and v to the cache, in place, and gives results, shaped as q. Tokens
// of a row must be next to one another, in the order of their positions.
struct AttendToCacheKernel {
  int threads;

  explicit AttendToCacheKernel(const Attributes& attrs)
      : threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    const TF_Tensor* q = call.next();
    const T *k = call.next_data<T>(), *v = call.next_data<T>();
    const std::vector<int32_t> rows = call.next_values<int32_t>();
    const std::vector<int32_t> positions = call.next_values<int32_t>();
    const int count = *call.next_data<int32_t>();
    const TF_Tensor* cache = call.next();
    T* keys = static_cast<T*>(TF_TensorData(cache));
    call.give_last(1);
    T* values = call.next_data<T>();
    call.give_last(2);
    const int rank = TF_NumDims(cache), room = TF_Dim(cache, rank - 2);
    const int key_heads = rank == 4 ? TF_Dim(cache, 1) : 1;
    const int heads = TF_Dim(q, 2), d_kv = TF_Dim(q, 3);
    const int num_tokens = rows.size();
    for (int i = 0; i < num_tokens; ++i)
      if (rows[i] < 0 || rows[i] >= TF_Dim(cache, 0) || positions[i] < 0 ||
          positions[i] >= room || count > num_tokens)
        return call.fail("a token lies outside of the cache");
    const size_t per_head = size_t(room) * d_kv, per_row = per_head * key_heads;
    const size_t width = size_t(heads) * d_kv;
    T* out = call.allocate_like<T>(0, q);
    std::fill_n(out + count * width, (num_tokens - count) * width, T{});
    for (int i = 0; i < count; ++i)
      for (int head = 0; head < key_heads; ++head) {
        const size_t from = (size_t(i) * key_heads + head) * d_kv;
        const size_t to =
          rows[i] * per_row + head * per_head + size_t(positions[i]) * d_kv;
        std::copy_n(k + from, d_kv, keys + to);
        std::copy_n(v + from, d_kv, values + to);
      }
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    for (int begin = 0, end; begin < count; begin = end) {
      for (end = begin + 1; end < count && rows[end] == rows[begin] &&
                            positions[end] == positions[end - 1] + 1;)
        ++end;
      const size_t row = rows[begin] * per_row, at = begin * width;
      const AttentionSizes sizes = {positions[end - 1] + 1, heads, key_heads,
                                    d_kv, positions[begin]};
      Attention<T>(sizes, {keys + row, values + row, per_head, size_t(d_kv)},
                   threads, attention_memory<T>())
        .run(with.team_of(threads), static_cast<const T*>(TF_TensorData(q)) + at,
             out + at);
    }
  }
};

struct AttentionGradientKernel : AttentionKernel {
  using AttentionKernel::AttentionKernel;

  template <class T>
  void compute(Call& call) const {
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    Attention<T> x(call, threads, true, attention_memory<T>());
    const T *out = call.next_data<T>(), *dout = call.next_data<T>();
    x.read_masks(call);
    T* dq = call.allocate_like<T>(0, x.q);
    T* dk = call.allocate_like<T>(1, x.k);
    T* dv = call.allocate_like<T>(2, x.v);
    WorkQueue heads, groups, sums;
    Team& team = with.team_of(threads, kNoPatience);
    team.run([&](int thread) {
      heads.each(x.num_heads(), [&](int i) { x.pack(i); });
      team.meet();
      groups.each(x.num_groups(),
                  [&](int i) { x.gradient(i, thread, out, dout, dq); });
      team.meet();
      sums.each(x.num_heads(), [&](int i) { x.add_parts(i, dk, dv); });
    });
  }
};

}  // namespace palm
