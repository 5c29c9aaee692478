// The extension kvferry.protocol._native: decodes, checks and joins token deltas of step frames, and decodes and checks
// first tokens. Its twin in Python (protocol/frames.py and the codec) handles whatever this code leaves to it by
// returning None or False, and is the only one that knows errors.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "jpeg_markers.h"

namespace {

constexpr long long MAX_ID = 2147483647;  // as message_validation.MAX_ID
constexpr uint64_t MAX_ITEMS = 1 << 22;    // as wire.MAX_ITEMS
constexpr int DELTA_FIELDS = 10, FRAME_FIELDS = 5, REUSE_FIELDS = 7, FIRST_FIELDS = 3;
constexpr int MISSED = 5;  // of REUSE_NAMES; the others are counts
enum Delta { REQUEST_ID, ATTEMPT, INDEX, TOKEN_IDS, LOGPROBS, FINISH_REASON, STOP_TOKEN, REUSE, PROMPT_LOGPROBS, VECTOR };
const char *const DELTA_NAMES[] = {"request_id",    "attempt",    "index", "token_ids",       "logprobs",
                                   "finish_reason", "stop_token", "reuse", "prompt_logprobs", "vector"};
const char *const FRAME_NAMES[] = {"deltas", "failed", "number", "pulse", "deviations"};
const char *const REUSE_NAMES[] = {"prompt_len", "reused_prefill", "reused_decode", "fetched", "computed", "missed", "written"};
const char *const FIRST_NAMES[] = {"delta", "queue_s", "compute_s"};

// A reference that is given up at the end of its block, unless `give` hands it on.
class Owned {
 public:
  explicit Owned(PyObject *object = nullptr) : object_(object) {}
  Owned(const Owned &) = delete;
  Owned &operator=(const Owned &) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject *get() const { return object_; }
  PyObject *give() {
    PyObject *given = object_;
    object_ = nullptr;
    return given;
  }

 private:
  PyObject *object_;
};

// A dataclass with slots: where each field lies in its instances.
struct Slotted {
  PyTypeObject *type = nullptr;
  Py_ssize_t at[DELTA_FIELDS] = {};

  bool find(PyObject *cls, const char *const *names, int count) {
    for (int field = 0; field < count; field++) {
      Owned member(PyObject_GetAttrString(cls, names[field]));
      if (member.get() == nullptr) return false;
      if (!Py_IS_TYPE(member.get(), &PyMemberDescr_Type)) {
        PyErr_Format(PyExc_TypeError, "%R.%s is no slot", cls, names[field]);
        return false;
      }
      at[field] = reinterpret_cast<PyMemberDescrObject *>(member.get())->d_member->offset;
    }
    type = reinterpret_cast<PyTypeObject *>(Py_NewRef(cls));
    return true;
  }
  PyObject *&slot(PyObject *object, int field) const {
    return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + at[field]);
  }
  PyObject *make(PyObject *const *fields, int count) const {  // takes the references
    PyObject *object = type->tp_alloc(type, 0);
    for (int field = 0; field < count; field++) {
      if (object == nullptr) {
        Py_DECREF(fields[field]);
      } else {
        slot(object, field) = fields[field];
      }
    }
    return object;
  }
};

struct State {
  Slotted delta, frame, reuse, first;
  int delta_code = -1, reuse_code = -1;
};

// msgpack, as far as plain frames need it. A read that fails leaves `fits` false, and no exception.
class Reader {
 public:
  Reader(const char *data, Py_ssize_t size)
      : at_(reinterpret_cast<const uint8_t *>(data)), end_(at_ + size) {}

  bool fits = true;
  bool is_done() const { return at_ == end_; }
  bool nil() { return at_ < end_ && *at_ == 0xc0 && at_++; }
  Py_ssize_t left() const { return end_ - at_; }
  const char *here() const { return reinterpret_cast<const char *>(at_); }
  void skip(Py_ssize_t size) { at_ += size; }

  Py_ssize_t array() {
    uint8_t kind = byte();
    if ((kind & 0xf0) == 0x90) return kind & 0x0f;
    if (kind == 0xdc || kind == 0xdd) {
      uint64_t count = number(kind == 0xdc ? 2 : 4);
      if (count <= static_cast<uint64_t>(left()) && count <= MAX_ITEMS) return static_cast<Py_ssize_t>(count);
    }
    return no();
  }

  // Returns the size of the payload, which follows, of a message with this code.
  Py_ssize_t message(int code) {
    uint8_t kind = byte();
    uint64_t size = kind >= 0xd4 && kind <= 0xd8 ? 1u << (kind - 0xd4)
                    : kind >= 0xc7 && kind <= 0xc9 ? number(1 << (kind - 0xc7))
                                                   : UINT64_MAX;
    return byte() == code && fits && size <= static_cast<uint64_t>(left()) ? static_cast<Py_ssize_t>(size) : no();
  }

  PyObject *integer() {
    uint8_t kind = byte();
    if (kind < 0x80) return PyLong_FromLong(kind);
    if (kind >= 0xe0) return PyLong_FromLong(static_cast<int8_t>(kind));
    if (kind >= 0xcc && kind <= 0xcf) {
      uint64_t value = number(1 << (kind - 0xcc));
      return fits ? PyLong_FromUnsignedLongLong(value) : nullptr;
    }
    if (kind >= 0xd0 && kind <= 0xd3) {
      int size = 1 << (kind - 0xd0), rest = 64 - 8 * size;
      int64_t value = static_cast<int64_t>(number(size) << rest) >> rest;
      return fits ? PyLong_FromLongLong(value) : nullptr;
    }
    no();
    return nullptr;
  }

  PyObject *real() {
    if (byte() != 0xcb) {
      no();
      return nullptr;
    }
    uint64_t bits = number(8);
    double value = 0;
    static_assert(sizeof value == sizeof bits);
    std::memcpy(&value, &bits, sizeof value);
    return fits ? PyFloat_FromDouble(value) : nullptr;
  }

  PyObject *text() {
    uint8_t kind = byte();
    uint64_t size = (kind & 0xe0) == 0xa0 ? kind & 0x1fu
                    : kind >= 0xd9 && kind <= 0xdb ? number(1 << (kind - 0xd9))
                                                   : UINT64_MAX;
    if (!fits || size > static_cast<uint64_t>(left())) {
      no();
      return nullptr;
    }
    PyObject *made = PyUnicode_DecodeUTF8(here(), static_cast<Py_ssize_t>(size), nullptr);
    skip(static_cast<Py_ssize_t>(size));
    return made;
  }

 private:
  const uint8_t *at_, *end_;

  Py_ssize_t no() {
    fits = false;
    return 0;
  }
  uint8_t byte() {
    if (at_ < end_) return *at_++;
    no();
    return 0xc1;  // which msgpack never uses
  }
  uint64_t number(int size) {  // big-endian
    uint64_t value = 0;
    if (left() < size) {
      no();
      return 0;
    }
    for (int i = 0; i < size; i++) value = value << 8 | *at_++;
    return value;
  }
};

// Returns a tuple of the array that follows, each item made by `item`; null where one does not fit.
template <typename Item>
PyObject *tuple_of(Reader &reader, Item item) {
  Py_ssize_t count = reader.array();
  Owned items(reader.fits ? PyTuple_New(count) : nullptr);
  for (Py_ssize_t i = 0; items.get() != nullptr && i < count; i++) {
    PyObject *made = item();
    if (made == nullptr) return nullptr;
    PyTuple_SET_ITEM(items.get(), i, made);
  }
  return items.give();
}

PyObject *none() { return Py_NewRef(Py_None); }

// Returns an account without misses; null where the message holds anything else.
PyObject *read_reuse(const State &state, Reader &outer) {
  Py_ssize_t size = outer.message(state.reuse_code);
  Reader reader(outer.here(), size);
  if (!outer.fits || reader.array() != REUSE_FIELDS) return nullptr;
  outer.skip(size);
  Owned values(PyTuple_New(REUSE_FIELDS));
  for (int field = 0; values.get() != nullptr && field < REUSE_FIELDS; field++) {
    PyObject *made = field != MISSED ? reader.integer() : reader.array() == 0 && reader.fits ? PyTuple_New(0) : nullptr;
    if (made == nullptr) return nullptr;
    PyTuple_SET_ITEM(values.get(), field, made);
  }
  if (values.get() == nullptr || !reader.is_done()) return nullptr;
  PyObject *fields[REUSE_FIELDS];
  for (int field = 0; field < REUSE_FIELDS; field++) fields[field] = Py_NewRef(PyTuple_GET_ITEM(values.get(), field));
  return state.reuse.make(fields, REUSE_FIELDS);
}

// Returns a delta without log-probabilities, misses and vector; null where the message holds anything else.
PyObject *read_delta(const State &state, Reader &outer) {
  Py_ssize_t size = outer.message(state.delta_code);
  Reader reader(outer.here(), size);
  if (!outer.fits || reader.array() != DELTA_FIELDS) return nullptr;
  outer.skip(size);
  Owned name(reader.text());
  Owned attempt(name.get() ? reader.integer() : nullptr), index(attempt.get() ? reader.integer() : nullptr);
  Owned tokens(index.get() ? tuple_of(reader, [&] { return reader.integer(); }) : nullptr);
  if (tokens.get() == nullptr || !reader.nil()) return nullptr;
  Owned reason(reader.nil() ? none() : reader.text());
  Owned stop(reason.get() == nullptr ? nullptr : reader.nil() ? none() : reader.integer());
  Owned reuse(stop.get() == nullptr ? nullptr : reader.nil() ? none() : read_reuse(state, reader));
  if (reuse.get() == nullptr || !reader.nil() || !reader.nil() || !reader.is_done()) return nullptr;
  PyObject *const fields[] = {name.give(), attempt.give(), index.give(), tokens.give(), none(),
                              reason.give(), stop.give(), reuse.give(), none(), none()};
  return state.delta.make(fields, DELTA_FIELDS);
}

PyObject *read_first(const State &state, Reader &reader) {
  if (reader.array() != FIRST_FIELDS) return nullptr;
  Owned delta(read_delta(state, reader));
  Owned queue_s(delta.get() ? reader.real() : nullptr), compute_s(queue_s.get() ? reader.real() : nullptr);
  if (compute_s.get() == nullptr || !reader.is_done()) return nullptr;
  PyObject *const fields[] = {delta.give(), queue_s.give(), compute_s.give()};
  return state.first.make(fields, FIRST_FIELDS);
}

PyObject *read_frame(const State &state, Reader &reader) {
  if (reader.array() != FRAME_FIELDS) return nullptr;
  Owned deltas(tuple_of(reader, [&] { return read_delta(state, reader); }));
  if (deltas.get() == nullptr || reader.array() != 0 || !reader.fits) return nullptr;
  Owned number(reader.integer());
  if (number.get() == nullptr || !reader.nil() || reader.array() != 0 || !reader.fits || !reader.is_done()) return nullptr;
  Owned failed(PyTuple_New(0)), deviations(PyTuple_New(0));
  if (failed.get() == nullptr || deviations.get() == nullptr) return nullptr;
  PyObject *const fields[] = {deltas.give(), failed.give(), number.give(), none(), deviations.give()};
  return state.frame.make(fields, FRAME_FIELDS);
}

bool is_id(PyObject *value) {
  if (value == nullptr || !PyLong_CheckExact(value)) return false;
  int overflow = 0;
  long long found = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0 && found >= 0 && found <= MAX_ID;
}

bool is_reason(PyObject *value) {
  if (value == Py_None) return true;
  if (value == nullptr || !PyUnicode_CheckExact(value)) return false;
  for (const char *reason : {"stop", "length", "closed"}) {
    if (PyUnicode_CompareWithASCIIString(value, reason) == 0) return true;
  }
  return false;
}

// Returns whether nothing is wrong with an account, which has no misses.
bool is_plain_reuse(const Slotted &kind, PyObject *reuse) {
  if (reuse == nullptr || !Py_IS_TYPE(reuse, kind.type)) return false;
  for (int field = 0; field < REUSE_FIELDS; field++) {
    if (field != MISSED && !is_id(kind.slot(reuse, field))) return false;
  }
  PyObject *missed = kind.slot(reuse, MISSED);
  return missed != nullptr && PyTuple_CheckExact(missed) && PyTuple_GET_SIZE(missed) == 0;
}

bool is_finite(PyObject *value) {
  return value != nullptr && PyFloat_CheckExact(value) && std::isfinite(PyFloat_AS_DOUBLE(value));
}

// Returns whether nothing is wrong with a delta that holds no more than tokens, and an account if `reuse` is given.
bool is_plain(const Slotted &kind, PyObject *delta, const Slotted *reuse = nullptr) {
  if (delta == nullptr || !Py_IS_TYPE(delta, kind.type)) return false;
  for (int field : {LOGPROBS, PROMPT_LOGPROBS, VECTOR}) {
    if (kind.slot(delta, field) != Py_None) return false;
  }
  PyObject *account = kind.slot(delta, REUSE);
  if (account != Py_None && (reuse == nullptr || !is_plain_reuse(*reuse, account))) return false;
  PyObject *name = kind.slot(delta, REQUEST_ID), *attempt = kind.slot(delta, ATTEMPT);
  PyObject *tokens = kind.slot(delta, TOKEN_IDS), *stop = kind.slot(delta, STOP_TOKEN);
  if (name == nullptr || attempt == nullptr || tokens == nullptr || stop == nullptr) return false;
  if (!PyUnicode_CheckExact(name) || !PyLong_CheckExact(attempt) || !PyTuple_CheckExact(tokens)) return false;
  if (!is_id(kind.slot(delta, INDEX)) || !is_reason(kind.slot(delta, FINISH_REASON))) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tokens); i++) {
    if (!is_id(PyTuple_GET_ITEM(tokens, i))) return false;
  }
  return stop == Py_None || PyLong_CheckExact(stop);
}

const State &state_of(PyObject *capsule) { return *static_cast<State *>(PyCapsule_GetPointer(capsule, nullptr)); }

PyObject *decode(PyObject *self, PyObject *data) {
  if (!PyBytes_Check(data)) Py_RETURN_NONE;
  Reader reader(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data));
  PyObject *frame = read_frame(state_of(self), reader);
  if (frame != nullptr) return frame;
  PyErr_Clear();  // the codec raises its own error
  Py_RETURN_NONE;
}

PyObject *decode_first(PyObject *self, PyObject *data) {
  if (!PyBytes_Check(data)) Py_RETURN_NONE;
  Reader reader(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data));
  PyObject *first = read_first(state_of(self), reader);
  if (first != nullptr) return first;
  PyErr_Clear();  // the codec raises its own error
  Py_RETURN_NONE;
}

PyObject *plain_first(PyObject *self, PyObject *first) {
  const State &state = state_of(self);
  if (!Py_IS_TYPE(first, state.first.type)) Py_RETURN_FALSE;
  const Slotted &kind = state.first;
  if (!is_plain(state.delta, kind.slot(first, 0), &state.reuse)) Py_RETURN_FALSE;
  return PyBool_FromLong(is_finite(kind.slot(first, 1)) && is_finite(kind.slot(first, 2)));
}

PyObject *plain(PyObject *self, PyObject *deltas) {
  if (!PyTuple_CheckExact(deltas)) Py_RETURN_FALSE;
  const Slotted &kind = state_of(self).delta;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(deltas); i++) {
    if (!is_plain(kind, PyTuple_GET_ITEM(deltas, i))) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyObject *join(PyObject *self, PyObject *deltas) {
  const Slotted &kind = state_of(self).delta;
  if (!PyList_CheckExact(deltas) || PyList_GET_SIZE(deltas) == 0) Py_RETURN_NONE;
  Py_ssize_t count = PyList_GET_SIZE(deltas), tokens = 0;
  long long attempt = 0, next = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *delta = PyList_GET_ITEM(deltas, i);
    if (!is_plain(kind, delta) || !is_id(kind.slot(delta, ATTEMPT))) Py_RETURN_NONE;
    long long number = PyLong_AsLongLong(kind.slot(delta, ATTEMPT)), index = PyLong_AsLongLong(kind.slot(delta, INDEX));
    if (i > 0 && (number != attempt || index != next)) Py_RETURN_NONE;
    if (i + 1 < count && kind.slot(delta, FINISH_REASON) != Py_None) Py_RETURN_NONE;
    attempt = number;
    next = index + PyTuple_GET_SIZE(kind.slot(delta, TOKEN_IDS));
    tokens += PyTuple_GET_SIZE(kind.slot(delta, TOKEN_IDS));
  }
  PyObject *all = PyTuple_New(tokens);
  if (all == nullptr) return nullptr;
  for (Py_ssize_t i = 0, place = 0; i < count; i++) {
    PyObject *some = kind.slot(PyList_GET_ITEM(deltas, i), TOKEN_IDS);
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(some); j++) {
      PyTuple_SET_ITEM(all, place++, Py_NewRef(PyTuple_GET_ITEM(some, j)));
    }
  }
  PyObject *first = PyList_GET_ITEM(deltas, 0), *last = PyList_GET_ITEM(deltas, count - 1);
  PyObject *const fields[] = {
      Py_NewRef(kind.slot(first, REQUEST_ID)), Py_NewRef(kind.slot(first, ATTEMPT)),
      Py_NewRef(kind.slot(first, INDEX)),      all,
      none(),                                  Py_NewRef(kind.slot(last, FINISH_REASON)),
      Py_NewRef(kind.slot(last, STOP_TOKEN)),  none(),
      none(),                                  none()};
  return kind.make(fields, DELTA_FIELDS);
}

PyMethodDef FUNCTIONS[] = {
    {"decode", decode, METH_O, "Return the StepFrame of a message's payload, or None if it is not a plain one."},
    {"plain", plain, METH_O, "Return whether all deltas of a tuple are valid and hold no more than tokens."},
    {"join", join, METH_O, "Return one delta with the tokens of a list of consecutive plain ones, or None."},
    {"decode_first", decode_first, METH_O, "Return the FirstToken of a message's payload, or None if it is not a plain one."},
    {"plain_first", plain_first, METH_O, "Return whether a FirstToken is valid and holds no more than tokens and an account."},
};
constexpr int FUNCTION_COUNT = sizeof FUNCTIONS / sizeof FUNCTIONS[0];

void free_state(State *state) {
  for (const Slotted *kind : {&state->delta, &state->frame, &state->reuse, &state->first}) {
    Py_XDECREF(reinterpret_cast<PyObject *>(kind->type));
  }
  delete state;
}

void give_up(PyObject *capsule) { free_state(static_cast<State *>(PyCapsule_GetPointer(capsule, nullptr))); }

PyObject *functions(PyObject *, PyObject *args) {
  PyObject *delta = nullptr, *frame = nullptr, *reuse = nullptr, *first = nullptr;
  State *state = new State;
  if (!PyArg_ParseTuple(args, "O!iO!O!iO!", &PyType_Type, &delta, &state->delta_code, &PyType_Type, &frame, &PyType_Type,
                        &reuse, &state->reuse_code, &PyType_Type, &first) ||
      !state->delta.find(delta, DELTA_NAMES, DELTA_FIELDS) || !state->frame.find(frame, FRAME_NAMES, FRAME_FIELDS) ||
      !state->reuse.find(reuse, REUSE_NAMES, REUSE_FIELDS) || !state->first.find(first, FIRST_NAMES, FIRST_FIELDS)) {
    free_state(state);
    return nullptr;
  }
  Owned capsule(PyCapsule_New(state, nullptr, give_up));
  if (capsule.get() == nullptr) {
    free_state(state);
    return nullptr;
  }
  Owned made(PyTuple_New(FUNCTION_COUNT));
  for (int i = 0; made.get() != nullptr && i < FUNCTION_COUNT; i++) {
    PyObject *function = PyCFunction_New(&FUNCTIONS[i], capsule.get());
    if (function == nullptr) return nullptr;
    PyTuple_SET_ITEM(made.get(), i, function);
  }
  return made.give();
}

PyMethodDef METHODS[] = {
    {"functions", functions, METH_VARARGS,
     "Return (decode, plain, join, decode_first, plain_first) for the classes TokenDelta, with its code on the wire,\n"
     "StepFrame, Reuse, with its code, and FirstToken."},
    {"find_marker", find_marker, METH_VARARGS,
     "Return the place in [at, end) where the next marker of a JPEG begins, or -1."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", "Decodes, checks and joins token deltas; finds markers of JPEGs.", 0, METHODS,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&MODULE); }
