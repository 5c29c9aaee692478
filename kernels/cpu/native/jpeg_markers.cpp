// Part of the extension kvferry.protocol._native: finds markers among the pixel data of a JPEG, which may be many
// megabytes without one. Its twin is a regular expression (router/media/jpeg_scans.py).
#define PY_SSIZE_T_CLEAN
#include "jpeg_markers.h"

namespace {

constexpr Py_ssize_t GROUP = 64;  // bytes that are compared at once; compilers make vector instructions of the loop

// Whether a 0xff before this byte begins a marker: not before another, nor a stuffed zero, nor a restart (0xd0 to 0xd7).
inline bool is_marker_code(unsigned char byte) { return (byte != 0) & (byte != 0xFF) & ((byte & 0xF8) != 0xD0); }

inline bool has_marker(const unsigned char *group) {
  unsigned char any = 0;
  for (Py_ssize_t i = 0; i < GROUP; i++) any |= (group[i] == 0xFF) & is_marker_code(group[i + 1]);
  return any != 0;
}

}  // namespace

PyObject *find_marker(PyObject *, PyObject *args) {
  const char *data;
  Py_ssize_t length, at, end;
  if (!PyArg_ParseTuple(args, "y#nn", &data, &length, &at, &end)) return nullptr;
  if (end > length - 1) end = length - 1;
  if (at < 0) at = 0;
  const unsigned char *bytes = reinterpret_cast<const unsigned char *>(data);
  while (at + GROUP <= end && !has_marker(bytes + at)) at += GROUP;
  for (; at < end; at++) {
    if (bytes[at] == 0xFF && is_marker_code(bytes[at + 1])) return PyLong_FromSsize_t(at);
  }
  return PyLong_FromLong(-1);
}
