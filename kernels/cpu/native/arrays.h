// Tensors from Python: checked once here, plain pointers behind.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "array.h"
#include "types.h"

namespace kvferry {

using MaybeArray = std::optional<Array>;

inline void require(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

inline bool is_bf16(const Array& a) {
  return a.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && a.dtype().bits == 16;
}

// 0: float32, 1: bfloat16, the index into the tables of kernels.
inline int kind_of(const Array& a) {
  if (is_bf16(a)) return 1;
  require(a.dtype() == nb::dtype<float>(), "tensors must be float32 or bfloat16");
  return 0;
}

// The last `inner` dimensions lie densely.
inline bool dense_from(const Array& a, size_t first) {
  int64_t step = 1;
  for (size_t i = a.ndim(); i-- > first;) {
    if (a.shape(i) != 1 && a.stride(i) != step) return false;
    step *= a.shape(i);
  }
  return true;
}

inline void* whole(const Array& a, int kind, size_t ndim) {
  require(kind_of(a) == kind, "tensors must have one dtype");
  require(a.ndim() == ndim, "a tensor has another number of dimensions than the operation takes");
  require(dense_from(a, 0), "a tensor must be contiguous");
  return a.data();
}

template <class T>
const T* typed(const Array& a, size_t ndim) {
  require(a.dtype() == nb::dtype<T>(), "an index or table has another dtype than the operation takes");
  require(a.ndim() == ndim && dense_from(a, 0), "an index or table has another shape than the operation takes");
  return static_cast<const T*>(a.data());
}

inline int64_t elements(const Array& a) { return a.size(); }

inline bool is_int8(const Array& a) { return a.dtype() == nb::dtype<int8_t>(); }

// A layer of the pool, [block, 2, kv_head, slot, dim], or all of it, [block, layer, 2, kv_head, slot, dim], as its first
// layer; of the kind's elements, or int8 with 4 bytes more behind each dim.
inline KVLayer kv_layer(const Array& a, int kind) {
  const size_t n = a.ndim();
  require((is_int8(a) || kind_of(a) == kind) && (n == 5 || n == 6) && dense_from(a, n - 2),
          "the cache has another layout than the operation takes");
  const auto width = a.shape(n - 1), dim = is_int8(a) ? width - 4 : width;
  return {a.data(), a.stride(0), a.stride(n - 4), a.stride(n - 3), width, a.shape(n - 2),
          a.shape(n - 3), dim, dim, is_int8(a)};
}

// The same; of a cache of one plane V are the last dims of what is stored, as many as `out` has.
inline KVLayer kv_layer_of(const Array& a, int kind, const Array& out) {
  KVLayer kv = kv_layer(a, kind);
  if (a.shape(a.ndim() - 4) != 1) return kv;
  kv.v_dim = out.shape(out.ndim() - 1);
  kv.kv_step = kv.dim - kv.v_dim;
  require(kv.v_dim <= kv.dim, "the result does not fit the cache");
  return kv;
}

inline Scoring scoring_of(float scale, float cap, const MaybeArray& sinks, int64_t heads) {
  require(cap >= 0, "a soft cap must not be negative");
  require(!sinks || elements(*sinks) == heads, "sinks are one per query head");
  return {scale, cap, sinks ? typed<float>(*sinks, 1) : nullptr};
}

inline Rope rope_of(const MaybeArray& cos, const MaybeArray& sin, int64_t dim) {
  if (!cos || !sin) return {};
  const int64_t half = cos->shape(1);
  require(2 * half <= dim, "the rotation is wider than a head");
  return {typed<float>(*cos, 2), typed<float>(*sin, 2), half};
}

}  // namespace kvferry
