// How a decode's positions are cut, and the memory of what is merged of them.
#pragma once

#include "forms.h"

namespace kvferry {

// A row's positions are attended to in chunks, so that threads can share a long sequence. How they are cut depends on
// the row alone, and so does the result.
constexpr int64_t kChunkStep = 16, kChunk = 64, kMaxChunks = 16;

// The first position that a token at `position` attends to: in a sliding window, or since the last multiple of -window.
inline int64_t first_seen(int64_t position, int64_t window) {
  if (window < 0) return position / -window * -window;
  return window > 0 && position >= window ? position - window + 1 : 0;
}

struct Chunks {
  int64_t first, length, count;
};

inline Chunks chunks_of(int64_t total_len, int64_t window, int64_t least = kChunk, int64_t step = kChunkStep) {
  const int64_t first = first_seen(total_len - 1, window), seen = total_len - first;
  int64_t count = (seen + least - 1) / least;
  count = count > kMaxChunks ? kMaxChunks : count;
  const int64_t length = ((seen + count - 1) / count + step - 1) / step * step;
  return {first, length, (seen + length - 1) / length};
}

// Query heads that share a K/V head are a wide group where they are more than kMaxGroup. Its chunks are longer, for its
// partial results are many.
constexpr int64_t kMaxGroup = 16, kWideChunk = 256;
inline Chunks wide_chunks(int64_t total_len, int64_t window) { return chunks_of(total_len, window, kWideChunk, kPanel); }

// Of one query head and chunk: the largest score, the sum of weights, then the weighted sum of V [dim].
inline int64_t partial_floats(int64_t dim) { return 16 + dim; }
constexpr int64_t kPartialFloats = int64_t{8} << 20;  // of wide groups, but for a single row that takes more
inline int64_t decode_floats(int64_t rows, int64_t heads, int64_t dim) {
  return rows * heads * kMaxChunks * partial_floats(dim);
}

}  // namespace kvferry
