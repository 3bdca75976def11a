// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Huge pages for the memory of weights.

#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace palm {

// Moves memory into pages of 2 MiB if Linux supports this. Otherwise a product
// that reads weights would wait for an address translation every 4 KiB. If
// `is_new`, nothing has been written, so Linux need not move it, only begin so.
inline void use_huge_pages(const void* at, size_t bytes, bool is_new = false) {
#if defined(__linux__)
  constexpr uintptr_t kSize = uintptr_t(1) << 21;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1
  // Linux moves whole pages: other memory in the first and last page moves too.
  const uintptr_t begin = uintptr_t(at) & ~(kSize - 1);
  const uintptr_t end = (uintptr_t(at) + bytes + kSize - 1) & ~(kSize - 1);
  for (uintptr_t page = begin; page < end; page += kSize) {
    madvise(reinterpret_cast<void*>(page), kSize, MADV_HUGEPAGE);
    if (!is_new) madvise(reinterpret_cast<void*>(page), kSize, kCollapse);
  }
#endif
}

}  // namespace palm
