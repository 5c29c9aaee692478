#include "pack.h"

#include "ggml_blocks.h"

namespace kvferry {
namespace {

float bf16_at(const uint8_t* from, int64_t index) {
  uint32_t bits = 0;
  std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, from + 2 * index, 2);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

Form form_of(const std::string& kind) {
  Form form = kind == "INT8" || kind == "CODES" ? Form::int8 : Form::bf16;
  with_blocks(kind, [&](auto blocks) { form = blocks.form; });
  return form;
}

// One row's scale is max |w| / 127, its codes the nearest integers.
void read_int8(const uint8_t* row, int64_t in, const RowCodes& out) {
  float peak = 0;
  for (int64_t i = 0; i < in; ++i) peak = std::fmax(peak, std::fabs(bf16_at(row, i)));
  out.scales[0] = peak / 127.0f;
  const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
  for (int64_t i = 0; i < in; ++i)
    out.codes[i] = static_cast<uint8_t>(128 + static_cast<int>(std::nearbyintf(bf16_at(row, i) * inverse)));
}

// A float32 scale and signed codes, as they are.
void read_signed(const uint8_t* row, int64_t in, const RowCodes& out) {
  std::memcpy(out.scales, row, 4);
  for (int64_t i = 0; i < in; ++i) out.codes[i] = row[4 + i] ^ 0x80;
}

template <class C>
void place(const RowCodes& row, int64_t in, int64_t index, uint8_t* panel) {
  const int64_t lane = index % 16, high = index / 16;
  uint8_t* group = panel + C::head;
  if (C::per_channel) std::memcpy(panel + 4 * index, row.scales, 4);
  for (int64_t g = 0; g < in / C::group; ++g, group += C::bytes) {
    for (int i = 0; i < C::group; ++i) {
      const int code = row.codes[g * C::group + i], step = i / 4;
      const int64_t byte = lane * 4 + i % 4;
      if (C::bits == 8) {
        group[step * C::step_bytes + high * 64 + byte] = static_cast<uint8_t>(code);
      } else {
        group[step * C::step_bytes + byte] |= static_cast<uint8_t>((code & 15) << (4 * high));
        if (C::bits > 4) group[C::upper + high * 64 + byte] |= static_cast<uint8_t>((code >> 4) << step * (C::bits - 4));
      }
    }
    const uint16_t scale = float_to_half(row.scales[g * !C::per_channel]), least = float_to_half(row.minima[g]);
    if (!C::per_channel) std::memcpy(group + C::scales + 2 * index, &scale, 2);
    if (C::minimum) std::memcpy(group + C::minima + 2 * index, &least, 2);
  }
}

struct PackTask {
  const std::vector<StoredRows>& parts;
  const std::vector<Panel>& panels;
  int64_t in;
};

void pack_row(const PackTask& t, const StoredRows& part, const uint8_t* row, int64_t index, const Panel& panel,
              std::vector<uint8_t>& codes, std::vector<float>& scales) {
  auto* to = const_cast<uint8_t*>(panel.data);
  if (panel.form == Form::bf16) {
    for (int64_t k = 0; k < t.in / 2; ++k) std::memcpy(to + (k * kPanel + index) * 4, row + 4 * k, 4);
    return;
  }
  RowCodes out{codes.data(), scales.data(), scales.data() + t.in / 16};
  if (part.kind == "INT8") read_int8(row, t.in, out);
  if (part.kind == "CODES") read_signed(row, t.in, out);
  with_blocks(part.kind, [&](auto blocks) {
    with_codes(panel.form, [&](auto form) {
      const int groups = blocks.size / form.group;
      for (int64_t b = 0; b < t.in / blocks.size; ++b)
        blocks.read(row + b * blocks.bytes, {out.codes + b * blocks.size, out.scales + b * groups, out.minima + b * groups});
    });
  });
  with_codes(panel.form, [&](auto form) { place<decltype(form)>(out, t.in, index, to); });
}

void pack_share(const PackTask& t, Share own) {
  std::vector<uint8_t> codes(t.in);
  std::vector<float> scales(t.in / 8 + 2);
  int64_t first = 0;
  for (const StoredRows& part : t.parts) {
    const int64_t bytes = row_bytes(part.kind, t.in);
    for (int64_t row = 0; row < part.count; ++row) {
      const int64_t panel = (first + row) / kPanel;
      if (panel >= own.begin && panel < own.end)
        pack_row(t, part, part.data + row * bytes, (first + row) % kPanel, t.panels[panel], codes, scales);
    }
    first += part.count;
  }
}

void run_pack(void* argument, int member, int, Barrier& barrier) {
  const PackTask& t = *static_cast<PackTask*>(argument);
  barrier.each_run(static_cast<int64_t>(t.panels.size()), member, [&](Share own) { pack_share(t, own); });
}

}  // namespace

int64_t row_bytes(const std::string& kind, int64_t in) {
  int64_t bytes = -1;
  if (kind == "BF16" && in % 2 == 0) bytes = 2 * in;
  if (kind == "INT8" && in % 32 == 0) bytes = 2 * in;
  if (kind == "CODES" && in % 32 == 0) bytes = 4 + in;
  with_blocks(kind, [&](auto blocks) {
    if (in % blocks.size == 0) bytes = in / blocks.size * blocks.bytes;
  });
  return bytes;
}

void pack_panels(Packed& packed, const std::vector<StoredRows>& parts, int64_t in, Team& team) {
  int64_t rows = 0;
  for (const StoredRows& part : parts) {
    const Form form = form_of(part.kind);
    for (int64_t row = 0; row < part.count; row += kPanel)
      packed.panels.push_back({static_cast<const uint8_t*>(packed.arena->take(panel_bytes(form, in))), form});
    packed.dense.quantised |= form != Form::bf16;
    rows += part.count;
  }
  packed.dense.panels = packed.panels.data();
  packed.dense.in = in;
  packed.dense.out = rows;
  PackTask task{parts, packed.panels, in};
  team.run(run_pack, &task);
}

}  // namespace kvferry
