// A tensor on the CPU as Python passes it. PyTorch describes one in nanoseconds (the C functions of DLPack 1.3), while a
// call of its __dlpack__ takes two microseconds: a kernel has seven tensors, and a decode step a dozen kernels a layer.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>

namespace kvferry {

namespace nb = nanobind;

// What a type's __dlpack_c_exchange_api__ points to; of its functions `view` alone is called, which fills in what the tensor
// owns, and may be missing.
struct ExchangeFunctions {
  static constexpr uint32_t kMajor = 1;
  uint32_t major, minor;
  const void *older, *allocate, *export_owned, *import_owned;
  int (*view)(void* tensor, nb::dlpack::dltensor* out);
};

// The functions of a tensor's type, or null. Those of the last type that has some are remembered: it lives on.
inline const ExchangeFunctions* exchange_functions(nb::handle tensor) noexcept {
  static PyTypeObject* known = nullptr;
  static const ExchangeFunctions* functions = nullptr;
  PyTypeObject* type = Py_TYPE(tensor.ptr());
  if (type == known) return functions;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  const void* found = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
  Py_XDECREF(capsule);
  PyErr_Clear();
  const auto* own = static_cast<const ExchangeFunctions*>(found);
  if (own == nullptr || own->major != ExchangeFunctions::kMajor || own->view == nullptr) return nullptr;
  Py_INCREF(type);
  Py_XDECREF(known);
  known = type, functions = own;
  return own;
}

// Where a tensor lies, which it keeps alive. To be copied and destroyed with the GIL.
class Array {
 public:
  Array() = default;

  // Whether the object is a tensor on the CPU, which this is from now on.
  bool read(nb::handle tensor) noexcept {
    nb::dlpack::dltensor found;
    if (const ExchangeFunctions* functions = exchange_functions(tensor)) {
      const bool viewed = functions->view(tensor.ptr(), &found) == 0;
      PyErr_Clear();
      if (!viewed || found.device.device_type != nb::device::cpu::value) return false;
      owner_ = nb::borrow(tensor);
      return take(static_cast<uint8_t*>(found.data) + found.byte_offset, found.dtype, found.ndim, found.shape, found.strides);
    }
    nb::ndarray<nb::device::cpu> imported;
    if (!nb::try_cast(tensor, imported) || !imported.is_valid()) return false;
    owner_ = nb::borrow(tensor), imported_ = imported;
    return take(imported.data(), imported.dtype(), imported.ndim(), imported.shape_ptr(), imported.stride_ptr());
  }

  void* data() const { return data_; }
  nb::dlpack::dtype dtype() const { return dtype_; }
  size_t ndim() const { return ndim_; }
  int64_t shape(size_t i) const { return shape_[i]; }
  int64_t stride(size_t i) const { return strides_[i]; }  // in elements
  int64_t size() const {
    int64_t count = 1;
    for (size_t i = 0; i < ndim_; ++i) count *= shape_[i];
    return count;
  }
  int64_t itemsize() const { return dtype_.bits / 8; }
  int64_t nbytes() const { return size() * itemsize(); }

 private:
  static constexpr size_t kMaxDims = 8;

  bool take(void* data, nb::dlpack::dtype dtype, size_t ndim, const int64_t* shape, const int64_t* strides) noexcept {
    if (ndim > kMaxDims) return false;
    data_ = data, dtype_ = dtype, ndim_ = ndim;
    std::copy_n(shape, ndim, shape_);
    int64_t dense = 1;
    for (size_t i = ndim; i-- > 0; dense *= shape[i]) strides_[i] = strides ? strides[i] : dense;
    return true;
  }

  nb::object owner_;
  nb::ndarray<nb::device::cpu> imported_;  // of an owner without such functions
  void* data_ = nullptr;
  nb::dlpack::dtype dtype_;
  size_t ndim_ = 0;
  int64_t shape_[kMaxDims], strides_[kMaxDims];
};

}  // namespace kvferry

template <>
struct nanobind::detail::type_caster<kvferry::Array> {
  NB_TYPE_CASTER(kvferry::Array, const_name("numpy.typing.ArrayLike"))
  bool from_python(handle source, uint32_t, cleanup_list*) noexcept { return value.read(source); }
};
