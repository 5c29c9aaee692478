// Rows of a weight as a file stores them to panels.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "types.h"

namespace kvferry {

// Neighbouring rows of a weight stored alike: "BF16", "INT8" (bfloat16 rows to be quantised per channel), "CODES" (rows
// that were: a float32 scale, then int8) or a ggml block type, "Q8_0" and so on; rows: [count][row_bytes(kind, in)].
struct StoredRows {
  std::string kind;
  const uint8_t* data;
  int64_t count;
};

// -1 for a kind or a number of inputs that is not packed.
int64_t row_bytes(const std::string& kind, int64_t in);

struct Packed {
  std::shared_ptr<Arena> arena;
  std::vector<Panel> panels;
  Dense dense;
};

// Every part but the last has a multiple of 32 rows. The team packs panels in parallel.
void pack_panels(Packed& packed, const std::vector<StoredRows>& parts, int64_t in, Team& team);

}  // namespace kvferry
