// The extension kvferry.protocol._native: decodes, checks and joins the token deltas of step frames. Its twin in Python
// (protocol/frames.py and the codec) handles whatever this code leaves to it by returning None or False, and is the
// only one that knows errors.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>
#include <initializer_list>

namespace {

constexpr long long MAX_ID = 2147483647;  // as message_validation.MAX_ID
constexpr uint64_t MAX_ITEMS = 1 << 22;    // as wire.MAX_ITEMS
constexpr int DELTA_FIELDS = 10, FRAME_FIELDS = 5;
enum Delta { REQUEST_ID, ATTEMPT, INDEX, TOKEN_IDS, LOGPROBS, FINISH_REASON, STOP_TOKEN, REUSE, PROMPT_LOGPROBS, VECTOR };
const char *const DELTA_NAMES[] = {"request_id",    "attempt",    "index", "token_ids",       "logprobs",
                                   "finish_reason", "stop_token", "reuse", "prompt_logprobs", "vector"};
const char *const FRAME_NAMES[] = {"deltas", "failed", "number", "pulse", "deviations"};

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
    type = reinterpret_cast<PyTypeObject *>(cls);
    for (int field = 0; field < count; field++) {
      Owned member(PyObject_GetAttrString(cls, names[field]));
      if (member.get() == nullptr) return false;
      if (!Py_IS_TYPE(member.get(), &PyMemberDescr_Type)) {
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type->tp_name, names[field]);
        return false;
      }
      at[field] = reinterpret_cast<PyMemberDescrObject *>(member.get())->d_member->offset;
    }
    Py_INCREF(cls);
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
  Slotted delta, frame;
  int delta_code = -1;
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

// Returns a delta without log-probabilities, account and vector; null where the message holds anything else.
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
  if (stop.get() == nullptr || !reader.nil() || !reader.nil() || !reader.nil() || !reader.is_done()) return nullptr;
  PyObject *const fields[] = {name.give(), attempt.give(), index.give(), tokens.give(), none(),
                              reason.give(), stop.give(), none(), none(), none()};
  return state.delta.make(fields, DELTA_FIELDS);
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

// Returns whether nothing is wrong with a delta that holds no more than tokens.
bool is_plain(const Slotted &kind, PyObject *delta) {
  if (!Py_IS_TYPE(delta, kind.type)) return false;
  for (int field : {LOGPROBS, REUSE, PROMPT_LOGPROBS, VECTOR}) {
    if (kind.slot(delta, field) != Py_None) return false;
  }
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
};

void give_up(PyObject *capsule) {
  State *state = static_cast<State *>(PyCapsule_GetPointer(capsule, nullptr));
  Py_XDECREF(reinterpret_cast<PyObject *>(state->delta.type));
  Py_XDECREF(reinterpret_cast<PyObject *>(state->frame.type));
  delete state;
}

PyObject *functions(PyObject *, PyObject *args) {
  PyTypeObject *delta = nullptr, *frame = nullptr;
  State *state = new State;
  if (!PyArg_ParseTuple(args, "O!iO!", &PyType_Type, &delta, &state->delta_code, &PyType_Type, &frame) ||
      !state->delta.find(reinterpret_cast<PyObject *>(delta), DELTA_NAMES, DELTA_FIELDS)) {
    delete state;
    return nullptr;
  }
  if (!state->frame.find(reinterpret_cast<PyObject *>(frame), FRAME_NAMES, FRAME_FIELDS)) {
    Py_DECREF(delta);
    delete state;
    return nullptr;
  }
  Owned capsule(PyCapsule_New(state, nullptr, give_up));
  if (capsule.get() == nullptr) return nullptr;
  Owned made(PyTuple_New(3));
  for (int i = 0; made.get() != nullptr && i < 3; i++) {
    PyObject *function = PyCFunction_New(&FUNCTIONS[i], capsule.get());
    if (function == nullptr) return nullptr;
    PyTuple_SET_ITEM(made.get(), i, function);
  }
  return made.give();
}

PyMethodDef METHODS[] = {
    {"functions", functions, METH_VARARGS,
     "Return (decode, plain, join) for the classes TokenDelta, with its code on the wire, and StepFrame."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", "Decodes, checks and joins token deltas.", 0, METHODS,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&MODULE); }
