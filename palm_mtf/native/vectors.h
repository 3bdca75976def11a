// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Vector registers of the instruction set for which this file is compiled.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace palm {

#if defined(__AVX512VNNI__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kVectors = 4;  // registers in a row of a panel
constexpr int kColumns = kVectors * kLanes;
// The number of input rows whose sums a product keeps in registers; the other
// registers are for weights.
constexpr int kTileRows = kLanes == 16 ? 6 : 3;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

template <class T>
inline T load(const void* at) {
  T x;
  std::memcpy(&x, at, sizeof(x));
  return x;
}

// Prefetches bytes that a sequential read at `at` needs soon into the L2 cache,
// because the hardware's prefetches do not cross the end of a page. The L1 cache
// can wait for too few lines at a time for the bandwidth of memory.
inline void prefetch(const uint8_t* at) {
  constexpr int kAhead = 8192, kLine = 64;
  for (int i = 0; i < 4 * kColumns; i += kLine)
    __builtin_prefetch(at + kAhead + i, 0, 2);
}

template <class T>
inline void store(void* at, T x) {
  std::memcpy(at, &x, sizeof(x));
}

inline Floats splat(float x) { return x - Floats{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }
inline Words splat_word(const void* at) {
  return load<uint32_t>(at) - Words{};
}

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline float to_floats(int32_t x) { return float(x); }
inline Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }
inline int32_t to_ints(float x) { return int32_t(x); }

inline float sum(Floats x) {
#if defined(__AVX512VNNI__)
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += x[i];
  return total;
}

// --- bfloat16, the upper halves of float32 -----------------------------------

inline Floats from_bfloat16(const void* at) {
  return (Floats)(__builtin_convertvector(load<Halves>(at), Words) << 16);
}

inline float from_bfloat16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  return load<float>(&bits);
}

// Rounds float32 numbers, given as bits, to bfloat16.
template <class Bits>
inline Bits rounded_halves(Bits bits) {
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  auto is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return is_nan ? (bits >> 16) | 64 : rounded;
}

inline uint16_t to_bfloat16(float x) {
  return uint16_t(rounded_halves(load<uint32_t>(&x)));
}
inline Halves to_bfloat16(Floats x) {
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  return (Halves)_mm512_cvtneps_pbh((__m512)x);  // numbers below 1e-38 become 0
#else
  return __builtin_convertvector(rounded_halves((Words)x), Halves);
#endif
}

// Adds x[0] a + x[1] b to each sum, where a and b are the lower and upper half
// (each a bfloat16 number) of the word of w in the same lane.
inline Floats add_pairs(Floats sum, const float* x, Words w) {
  return sum + x[0] * (Floats)(w << 16) + x[1] * (Floats)(w & 0xffff0000);
}

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr bool kMultipliesBfloat16 = true;
inline Floats add_pairs(Floats sum, const uint16_t* x, Words w) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)splat_word(x),
                                  (__m512bh)w);
}
#else
constexpr bool kMultipliesBfloat16 = false;
inline Floats add_pairs(Floats sum, const uint16_t*, Words) { return sum; }
#endif

// --- Bytes -------------------------------------------------------------------

// Adds to each sum the products of 4 unsigned bytes of a with 4 signed bytes of
// b. AVX2 adds pairs of products in 16 bits, so pairs must not overflow.
inline Ints add_bytes(Ints sum, Words a, Words b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  __m256i pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
  return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < 4; ++i)
    sum += (Ints)((a >> 8 * i) & 255) * ((Ints)(b << (24 - 8 * i)) >> 24);
  return sum;
#endif
}

// Adds to each sum the products of 4 bytes of x with 4 signed bytes of w. The
// bytes of x are signed bytes plus kByteOffset; callers subtract kByteOffset
// times the sum of the bytes of w.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr int kByteOffset = 0;
inline Ints add_signed_bytes(Ints sum, Words x, Words w) {
  // No pair of products overflows 16 bits: 2 * 127 * 127 is 32,258.
  return add_bytes(sum, (Words)_mm256_abs_epi8((__m256i)x),
                   (Words)_mm256_sign_epi8((__m256i)w, (__m256i)x));
}
#else
constexpr int kByteOffset = 128;  // maps signed bytes to unsigned bytes
inline Ints add_signed_bytes(Ints sum, Words x, Words w) {
  return add_bytes(sum, x, w);
}
#endif

}  // namespace palm
