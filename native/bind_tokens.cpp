#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "errors.h"
#include "read_tokens.h"

namespace nb = nanobind;

namespace prefixkv {
namespace {

constexpr int64_t kMost = std::numeric_limits<Token>::max();
constexpr const char* kOutOfRange = "is not from 0 to 2147483647";

// The value of an exact int of one digit, which is every token id in use, or -1. Runs no Python code.
inline int64_t small_int(PyObject* item) {
  if (!PyLong_CheckExact(item)) return -1;
#if PY_VERSION_HEX >= 0x030c0000
  auto* number = reinterpret_cast<PyLongObject*>(item);
  return PyUnstable_Long_IsCompact(number) ? PyUnstable_Long_CompactValue(number) : -1;
#else
  const Py_ssize_t digits = Py_SIZE(item);  // 0 for zero, negative for a negative number
  if (digits == 0) return 0;
  return digits == 1 ? reinterpret_cast<PyLongObject*>(item)->ob_digit[0] : -1;
#endif
}

// An object that cannot be what is needed says so by a TypeError; any other error is none of ours.
void forget_type_error() {
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
  PyErr_Clear();
}

// Each method appends all or nothing, and none after Python code has run in its middle: that code may
// use the sequence that is appended to.
class Reader {
 public:
  Reader(std::vector<Token>& out, const char* noun) : out_(out), noun_(noun) {}

  void read(nb::handle source) {
    PyObject* object = source.ptr();
    if (PyList_CheckExact(object)) return read_items(object);
    if (PyUnicode_Check(object)) refuse("are text; encode it with a tokenizer first");
    if (read_if_buffer(object)) return;
    if (nb::hasattr(source, "detach") && nb::hasattr(source, "numpy")) {  // a torch tensor
      const nb::object values = source.attr("detach")().attr("cpu")().attr("contiguous")().attr("numpy")();
      if (read_if_buffer(values.ptr())) return;
    }
    if (PyTuple_CheckExact(object)) return read_items(object);
    const nb::object iterator = nb::steal(PyObject_GetIter(object));
    if (!iterator.is_valid()) {
      forget_type_error();
      refuse("are of type " + type_of(source) + "; a list, array, bytes, NumPy array or torch tensor is needed");
    }
    const nb::object items = nb::steal(PySequence_List(iterator.ptr()));
    if (!items.is_valid()) throw nb::python_error();
    read_items(items.ptr());
  }

  // All values of a buffer, checked.
  template <typename T>
  std::pair<const T*, Py_ssize_t> values(const Py_buffer& view) const {
    const T* from = static_cast<const T*>(view.buf);
    const Py_ssize_t count = view.len / static_cast<Py_ssize_t>(sizeof(T));
    using Unsigned = std::make_unsigned_t<T>;
    constexpr uint64_t most = std::min<uint64_t>(kMost, std::numeric_limits<T>::max());
    Unsigned bits = 0;  // a value is out of range iff it has a bit beyond those of `most`
    for (Py_ssize_t i = 0; i < count; ++i) bits |= static_cast<Unsigned>(from[i]);
    for (Py_ssize_t i = 0; bits > most; ++i) {
      if (static_cast<Unsigned>(from[i]) > most) refuse_item(std::to_string(from[i]), i, kOutOfRange);
    }
    return {from, count};
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const { throw CacheError(noun_ + "s " + why); }
  [[noreturn]] void refuse_item(const std::string& value, Py_ssize_t at, const char* why) const {
    throw CacheError(noun_ + " " + value + " at position " + std::to_string(at) + " " + why);
  }

  Token from_object(PyObject* item, Py_ssize_t at) const {
    nb::object number = nb::steal(PyNumber_Index(item));  // NumPy scalars too; floats and str refuse
    if (!number.is_valid()) {
      forget_type_error();
      refuse_item(repr_of(item), at, "is not a whole number");
    }
    int overflow = 0;
    const long long id = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0 || id < 0 || id > kMost) refuse_item(repr_of(number), at, kOutOfRange);
    return static_cast<Token>(id);
  }

  // Any items. Their __index__ may run Python code that changes `items` or the sequence that is
  // appended to: so a tuple is read, and nothing is appended before all are.
  void read_any_items(PyObject* items) {
    const nb::object fixed = nb::steal(PySequence_Tuple(items));
    if (!fixed.is_valid()) throw nb::python_error();
    std::vector<Token> ids;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fixed.ptr()); ++i) {
      ids.push_back(from_object(PyTuple_GET_ITEM(fixed.ptr(), i), i));
    }
    out_.insert(out_.end(), ids.begin(), ids.end());
  }

  void read_items(PyObject* items) {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    const size_t before = out_.size();
    out_.resize(before + static_cast<size_t>(count));
    Token* to = out_.data() + before;
    PyObject** from = PySequence_Fast_ITEMS(items);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const int64_t id = small_int(from[i]);
      if (id < 0 || id > kMost) {
        out_.resize(before);
        return read_any_items(items);
      }
      to[i] = static_cast<Token>(id);
    }
  }

  template <typename T>
  void read_values(const Py_buffer& view) {
    const auto [from, count] = values<T>(view);
    out_.insert(out_.end(), from, from + count);
  }

  void read_buffer(const ObjectBuffer& buffer) {
    const Py_buffer& view = *buffer;
    const char* format = buffer.format();
    if (view.ndim != 1) refuse("have " + std::to_string(view.ndim) + " dimensions; one is needed");
    switch (format[1] == '\0' ? format[0] : '?') {
      case 'b': return read_values<int8_t>(view);
      case 'B': return read_values<uint8_t>(view);
      case 'h': return read_values<int16_t>(view);
      case 'H': return read_values<uint16_t>(view);
      case 'i': return read_values<int32_t>(view);
      case 'I': return read_values<uint32_t>(view);
      case 'l': case 'q':
        return view.itemsize == 4 ? read_values<int32_t>(view) : read_values<int64_t>(view);
      case 'L': case 'Q':
        return view.itemsize == 4 ? read_values<uint32_t>(view) : read_values<uint64_t>(view);
      default:
        refuse(std::string("are of buffer type '") + format + "'; whole numbers are needed, such as int32");
    }
  }

  // False if it has no buffer in one piece; those in strides are read item by item.
  bool read_if_buffer(PyObject* object) {
    const ObjectBuffer buffer(object);
    if (buffer) read_buffer(buffer);
    return static_cast<bool>(buffer);
  }

  std::vector<Token>& out_;
  const std::string noun_;
};

}  // namespace

void read_tokens(nb::handle source, std::vector<Token>& out, const char* noun) {
  Reader(out, noun).read(source);
}

std::vector<int64_t> read_numbers(nb::handle iterable, const char* name) {
  std::vector<int64_t> numbers;
  for (nb::handle item : nb::tuple(nb::borrow(iterable))) {
    const nb::object number = nb::steal(PyNumber_Index(item.ptr()));
    if (!number.is_valid()) throw nb::python_error();
    int overflow = 0;
    numbers.push_back(PyLong_AsLongLongAndOverflow(number.ptr(), &overflow));
    if (overflow != 0) {
      throw CacheError(std::string(name) + " holds " + repr_of(number) + ", which is out of range");
    }
  }
  return numbers;
}

std::string type_of(nb::handle object) { return Py_TYPE(object.ptr())->tp_name; }

std::string repr_of(nb::handle object) {
  constexpr Py_ssize_t kMostChars = 200;
  const nb::object whole = nb::steal(PyObject_Repr(object.ptr()));
  const nb::object start =
      nb::steal(whole.is_valid() ? PyUnicode_Substring(whole.ptr(), 0, kMostChars) : nullptr);
  const char* utf8 = start.is_valid() ? PyUnicode_AsUTF8(start.ptr()) : nullptr;
  if (utf8 != nullptr) return utf8;
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // such as an interrupt
  PyErr_Clear();
  return "of type " + type_of(object);
}

ObjectBuffer::ObjectBuffer(PyObject* object) {
  if (!PyObject_CheckBuffer(object)) return;
  if (PyObject_GetBuffer(object, &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) PyErr_Clear();
  if (view_.obj == nullptr || view_.itemsize < 2) return;
  if (reinterpret_cast<uintptr_t>(view_.buf) % static_cast<uintptr_t>(view_.itemsize) != 0) {
    PyBuffer_Release(&view_);  // and so is none
  }
}

const char* ObjectBuffer::format() const {
  const char* format = view_.format == nullptr ? "B" : view_.format;
  return format + (*format == '@' || *format == '=' || *format == '<');
}

TokenView::TokenView(nb::handle source, const char* noun) : buffer_(source.ptr()) {
  Reader reader(copied_, noun);
  if (buffer_ && (*buffer_).ndim == 1 && std::string("i") == buffer_.format()) {
    const auto [from, count] = reader.values<Token>(*buffer_);
    tokens_ = {from, static_cast<size_t>(count)};
  } else {
    reader.read(source);
    tokens_ = copied_;
  }
}

}  // namespace prefixkv
