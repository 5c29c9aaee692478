// ggml's block formats (ggml-common.h): a row's blocks to codes, scales and minima of the form that runs them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "forms.h"

namespace kvferry {

inline float half_to_float(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  float size;
  std::memcpy(&size, &bits, sizeof size);
  size *= 0x1p112f;
  return half & 0x8000 ? -size : size;
}

// Rounds to nearest even; beyond the largest half: the largest.
inline uint16_t float_to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (!(size < 65504.0f)) return sign | 0x7bff;
  if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyintf(size * 0x1p24f));
  uint32_t bits;
  std::memcpy(&bits, &size, sizeof bits);
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((bits - (112u << 23)) >> 13);
}

inline float half_at(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof half);
  return half_to_float(half);
}

// Codes [in], and a scale and minimum per group, of one row.
struct RowCodes {
  uint8_t* codes;
  float *scales, *minima;
};

struct Q8_0 {
  static constexpr int size = 32, bytes = 34;
  static constexpr Form form = Form::q8;
  static void read(const uint8_t* block, const RowCodes& out) {
    out.scales[0] = half_at(block);
    for (int i = 0; i < 32; ++i) out.codes[i] = block[2 + i] ^ 0x80;
  }
};

struct Q4_0 {
  static constexpr int size = 32, bytes = 18;
  static constexpr Form form = Form::q4;
  static void read(const uint8_t* block, const RowCodes& out) {
    out.scales[0] = half_at(block);
    for (int i = 0; i < 16; ++i) out.codes[i] = block[2 + i] & 15, out.codes[16 + i] = block[2 + i] >> 4;
  }
};

struct Q4_1 {
  static constexpr int size = 32, bytes = 20;
  static constexpr Form form = Form::q4_min;
  static void read(const uint8_t* block, const RowCodes& out) {
    out.scales[0] = half_at(block);
    out.minima[0] = half_at(block + 2);
    for (int i = 0; i < 16; ++i) out.codes[i] = block[4 + i] & 15, out.codes[16 + i] = block[4 + i] >> 4;
  }
};

// Sixteen bytes of halves and 32 fifth bits.
inline void read_fives(const uint8_t* fifths, const uint8_t* halves, const RowCodes& out) {
  for (int i = 0; i < 32; ++i) {
    const int fifth = fifths[i / 8] >> (i % 8) & 1;
    out.codes[i] = static_cast<uint8_t>((halves[i % 16] >> (i / 16 * 4) & 15) | fifth << 4);
  }
}

struct Q5_0 {
  static constexpr int size = 32, bytes = 22;
  static constexpr Form form = Form::q5;
  static void read(const uint8_t* block, const RowCodes& out) {
    out.scales[0] = half_at(block);
    read_fives(block + 2, block + 6, out);
  }
};

struct Q5_1 {
  static constexpr int size = 32, bytes = 24;
  static constexpr Form form = Form::q5_min;
  static void read(const uint8_t* block, const RowCodes& out) {
    out.scales[0] = half_at(block);
    out.minima[0] = half_at(block + 2);
    read_fives(block + 4, block + 8, out);
  }
};

// Eight 6-bit scales and minima in 12 bytes: the low six bits of bytes 0-3 and 4-7 are the first four of each; halves of
// bytes 8-11 with the top two bits of bytes 0-3 and 4-7 are the others.
inline void read_k_scales(const uint8_t* block, const RowCodes& out) {
  const uint8_t* packed = block + 4;
  const float d = half_at(block), minimum = half_at(block + 2);
  for (int i = 0; i < 8; ++i) {
    const int scale = i < 4 ? packed[i] & 63 : (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
    const int least = i < 4 ? packed[i + 4] & 63 : packed[i + 4] >> 4 | (packed[i] >> 6) << 4;
    out.scales[i] = d * static_cast<float>(scale);
    out.minima[i] = -minimum * static_cast<float>(least);
  }
}

struct Q4_K {
  static constexpr int size = 256, bytes = 144;
  static constexpr Form form = Form::q4_min;
  static void read(const uint8_t* block, const RowCodes& out) {
    read_k_scales(block, out);
    for (int i = 0; i < 128; ++i) {
      uint8_t* to = out.codes + i / 32 * 64 + i % 32;
      to[0] = block[16 + i] & 15, to[32] = block[16 + i] >> 4;
    }
  }
};

struct Q5_K {
  static constexpr int size = 256, bytes = 176;
  static constexpr Form form = Form::q5_min;
  static void read(const uint8_t* block, const RowCodes& out) {
    read_k_scales(block, out);
    for (int i = 0; i < 128; ++i) {
      uint8_t* to = out.codes + i / 32 * 64 + i % 32;
      const int fifth = block[16 + i % 32] >> (i / 32 * 2);
      to[0] = (block[48 + i] & 15) | (fifth & 1) << 4;
      to[32] = block[48 + i] >> 4 | (fifth >> 1 & 1) << 4;
    }
  }
};

struct Q6_K {
  static constexpr int size = 256, bytes = 210;
  static constexpr Form form = Form::q6;
  static void read(const uint8_t* block, const RowCodes& out) {
    const float d = half_at(block + 208);
    for (int i = 0; i < 16; ++i) out.scales[i] = d * static_cast<float>(static_cast<int8_t>(block[192 + i]));
    for (int i = 0; i < 256; ++i) {
      const int part = i / 128, quarter = i % 128 / 32, at = i % 32;
      const int low = block[part * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
      out.codes[i] = static_cast<uint8_t>(low | (block[128 + part * 32 + at] >> (quarter * 2) & 3) << 4);
    }
  }
};

// Sixteen scales (low halves) and minima (high halves), then pairs of bits: byte l of each 32 has inputs l, 32 + l, ...
struct Q2_K {
  static constexpr int size = 256, bytes = 84;
  static constexpr Form form = Form::q4_half_min;
  static void read(const uint8_t* block, const RowCodes& out) {
    const float d = half_at(block + 80), minimum = half_at(block + 82);
    for (int i = 0; i < 16; ++i) {
      out.scales[i] = d * static_cast<float>(block[i] & 15);
      out.minima[i] = -minimum * static_cast<float>(block[i] >> 4);
    }
    for (int i = 0; i < 256; ++i) out.codes[i] = block[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
  }
};

// Third bits, pairs of bits as above, and 6-bit scales: halves of eight bytes, then pairs of bits in four.
struct Q3_K {
  static constexpr int size = 256, bytes = 110;
  static constexpr Form form = Form::q4_half;
  static void read(const uint8_t* block, const RowCodes& out) {
    const uint8_t* packed = block + 96;
    const float d = half_at(block + 108);
    for (int i = 0; i < 16; ++i) {
      const int low = packed[i % 8] >> (i / 8 * 4) & 15, high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
      out.scales[i] = d * static_cast<float>((low | high << 4) - 32);
    }
    for (int i = 0; i < 256; ++i) {
      const int low = block[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3, third = block[i % 32] >> (i / 32) & 1;
      out.codes[i] = static_cast<uint8_t>((low | third << 2) + 4);
    }
  }
};

// What the sixteen codes of IQ4 stand for, as codes of eight bits.
constexpr uint8_t kIQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

inline void read_iq4(const uint8_t* halves, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) codes[i] = kIQ4[halves[i] & 15], codes[16 + i] = kIQ4[halves[i] >> 4];
}

struct IQ4_NL {
  static constexpr int size = 32, bytes = 18;
  static constexpr Form form = Form::q8;
  static void read(const uint8_t* block, const RowCodes& out) {
    out.scales[0] = half_at(block);
    read_iq4(block + 2, out.codes);
  }
};

// Eight 6-bit scales: pairs of upper bits in two bytes, halves in four.
struct IQ4_XS {
  static constexpr int size = 256, bytes = 136;
  static constexpr Form form = Form::q8;
  static void read(const uint8_t* block, const RowCodes& out) {
    const float d = half_at(block);
    for (int i = 0; i < 8; ++i) {
      const int low = block[4 + i / 2] >> (i % 2 * 4) & 15, high = block[2 + i / 4] >> (i % 4 * 2) & 3;
      out.scales[i] = d * static_cast<float>((low | high << 4) - 32);
      read_iq4(block + 8 + 16 * i, out.codes + 32 * i);
    }
  }
};

// Calls visit(B{}) with the format of that name; false if there is none.
template <class Visit>
inline bool with_blocks(const std::string& kind, Visit visit) {
  if (kind == "Q8_0") visit(Q8_0{});
  else if (kind == "Q4_0") visit(Q4_0{});
  else if (kind == "Q4_1") visit(Q4_1{});
  else if (kind == "Q5_0") visit(Q5_0{});
  else if (kind == "Q5_1") visit(Q5_1{});
  else if (kind == "Q4_K") visit(Q4_K{});
  else if (kind == "Q5_K") visit(Q5_K{});
  else if (kind == "Q6_K") visit(Q6_K{});
  else if (kind == "Q2_K") visit(Q2_K{});
  else if (kind == "Q3_K") visit(Q3_K{});
  else if (kind == "IQ4_NL") visit(IQ4_NL{});
  else if (kind == "IQ4_XS") visit(IQ4_XS{});
  else return false;
  return true;
}

}  // namespace kvferry
