#include "common/safetensors.h"

#include "common/files.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/device.h"
#include "common/json.h"

namespace lockstep {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

// The limit of the format's own reader. A 100 MB header would name about a million tensors.
static constexpr uint64_t kLongestHeader = 100'000'000;
static constexpr uint64_t kLengthBytes = 8;
static constexpr const char* kMetadata = "__metadata__";

struct FileType {
  const char* name;
  size_t bytes;
  DType dtype;  // in memory
};

static const FileType* find_type(const std::string& name) {
  static constexpr FileType known[] = {
      {"F64", 8, DType::F64},   {"F32", 4, DType::F32}, {"F16", 2, DType::F32},
      {"BF16", 2, DType::BF16}, {"I64", 8, DType::I64}, {"I32", 4, DType::I32},
      {"U16", 2, DType::U16},   {"U8", 1, DType::U8},
  };
  for (const FileType& type : known)
    if (name == type.name) return &type;
  return nullptr;
}

// a * b, or nothing where that does not fit.
static std::optional<int64_t> multiply(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// JSON's -1, 1.5, 1e3, "7" and everything above 2^63 - 1 are none.
static std::optional<int64_t> natural(const Json& number) {
  if (!number.is_number_unsigned()) return std::nullopt;
  uint64_t value = number.get<uint64_t>();
  if (value > uint64_t(INT64_MAX)) return std::nullopt;
  return int64_t(value);
}

static std::optional<Shape> naturals(const Json& list) {
  if (!list.is_array()) return std::nullopt;
  Shape out;
  for (const Json& item : list) {
    std::optional<int64_t> n = natural(item);
    if (!n) return std::nullopt;
    out.push_back(*n);
  }
  return out;
}

// ---- Reading

std::string SafetensorsFile::where(const std::string& name) const {
  return text("tensor ", name, " of ", path_.string());
}

SafetensorsFile::SafetensorsFile(std::filesystem::path path) : path_(std::move(path)) {
  std::ifstream in = open_to_read(path_);
  const uint64_t file_bytes = std::filesystem::file_size(path_);
  require(file_bytes >= kLengthBytes, path_.string(), " has ", file_bytes,
          " bytes; a safetensors file starts with 8 bytes that say how long its header is");

  uint64_t length = 0;
  in.read(reinterpret_cast<char*>(&length), kLengthBytes);
  require(length <= kLongestHeader, path_.string(), " says that its header has ", length,
          " bytes; at most ", kLongestHeader, " are allowed");
  require(length <= file_bytes - kLengthBytes, path_.string(), " says that its header has ", length,
          " bytes, but only ", file_bytes - kLengthBytes, " follow: the file is cut short");

  std::string header(length, ' ');
  in.read(header.data(), std::streamsize(length));
  require(bool(in), path_.string(), " cannot be read");
  data_start_ = int64_t(kLengthBytes + length);
  parse_header(header, int64_t(file_bytes) - data_start_);
}

static TensorInfo parse_info(const Json& entry, const std::string& where) {
  require(entry.is_object(), where, " is not described by an object {dtype, shape, data_offsets}");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    require(entry.contains(key), where, " has no ", key);
  const Json &dtype = entry["dtype"], &dims = entry["shape"], &offsets = entry["data_offsets"];
  require(dtype.is_string(), where, " has the dtype ", dtype.dump(), ", which is not a name");
  std::optional<Shape> shape = naturals(dims), span = naturals(offsets);
  require(shape.has_value(), where, " has the shape ", dims.dump(),
          ", which is not a list of whole numbers from 0 to 2^63 - 1");
  require(span && span->size() == 2, where, " has the data_offsets ", offsets.dump(),
          ", which are not two whole numbers from 0 to 2^63 - 1");
  return {dtype.get<std::string>(), *shape, (*span)[0], (*span)[1]};
}

static void check_info(const TensorInfo& t, int64_t data_bytes, const std::string& where) {
  require(t.begin <= t.end, where, " begins at byte ", t.begin, " and ends before, at ", t.end);
  require(t.end <= data_bytes, where, " ends at byte ", t.end, " of the data, but the file has ",
          data_bytes, ": it is cut short or damaged");
  std::optional<int64_t> count = 1;
  // A dim of 0 may stand behind dims whose product overflows: that is refused as well.
  for (int64_t dim : t.shape) {
    count = multiply(*count, dim);
    require(count.has_value(), where, " has a shape with more than 2^63 elements: ", t.shape);
  }
  const FileType* type = find_type(t.dtype);
  if (!type) return;  // refused when somebody reads it
  std::optional<int64_t> bytes = multiply(*count, int64_t(type->bytes));
  require(bytes.has_value(), where, " has a shape with more than 2^63 bytes: ", t.shape);
  require(*bytes == t.end - t.begin, where, " has shape ", t.shape, " of ", t.dtype, ", that is ",
          *bytes, " bytes, but its data_offsets span ", t.end - t.begin);
}

void SafetensorsFile::parse_header(std::string_view header, int64_t data_bytes) {
  Json json = parse_json(header, "the header of " + path_.string());
  require(json.is_object(), "the header of ", path_.string(), " is not a JSON object ({...})");
  for (const auto& [name, entry] : json.items()) {
    if (name == kMetadata) {
      require(entry.is_object(), kMetadata, " of ", path_.string(), " is not an object");
      for (const auto& [key, value] : entry.items()) {
        require(value.is_string(), kMetadata, " of ", path_.string(), " holds ", key,
                ", which is not text");
        metadata_[key] = value.get<std::string>();
      }
      continue;
    }
    TensorInfo info = parse_info(entry, where(name));
    check_info(info, data_bytes, where(name));
    tensors_[name] = std::move(info);
  }
  check_spans(data_bytes);
}

void SafetensorsFile::check_spans(int64_t data_bytes) const {
  std::vector<std::pair<const TensorInfo*, std::string>> spans;
  for (const auto& [name, info] : tensors_) spans.push_back({&info, name});
  std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
  });
  int64_t reached = 0;
  std::string before = "the start of the data";
  for (const auto& [info, name] : spans) {
    require(info->begin >= reached, where(name), " begins at byte ", info->begin,
            " and overlaps with ", before, ", which ends at ", reached);
    require(info->begin == reached, where(name), " begins at byte ", info->begin, ", but ", before,
            " ends at ", reached, ": the bytes between belong to no tensor");
    reached = info->end;
    before = "tensor " + name;
  }
  require(reached == data_bytes, path_.string(), " has ", data_bytes, " bytes of data, but ",
          before, " ends at ", reached, ": the bytes behind it belong to no tensor");
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> out;
  for (const auto& [name, info] : tensors_) out.push_back(name);
  return out;
}

const TensorInfo& SafetensorsFile::info(const std::string& name) const {
  auto found = tensors_.find(name);
  require(found != tensors_.end(), path_.string(), " holds no tensor ", name);
  return found->second;
}

// IEEE 754 half precision: 5 exponent bits with bias 15, 10 mantissa bits. Every value is an fp32.
static float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half >> 15) << 31, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    float value = float(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  uint32_t wide = exponent == 31 ? 255 : exponent - 15 + 127;
  return std::bit_cast<float>(sign | wide << 23 | mantissa << 13);
}

Tensor SafetensorsFile::read(const std::string& name, Category category) const {
  const TensorInfo& t = info(name);
  const FileType* type = find_type(t.dtype);
  require(type != nullptr, where(name), " has the dtype ", t.dtype,
          "; this program reads F64, F32, F16, BF16, I64, I32, U16 and U8");
  Tensor out = Tensor::empty(t.shape, type->dtype, Device::CPU, category);
  const bool widen = t.dtype == "F16";
  std::vector<uint16_t> halves(widen ? size_t(out.size()) : 0);
  char* to = reinterpret_cast<char*>(widen ? static_cast<void*>(halves.data()) : out.raw());

  std::ifstream in(path_, std::ios::binary);
  in.seekg(data_start_ + t.begin);
  if (t.end > t.begin) in.read(to, t.end - t.begin);
  require(bool(in), where(name), " cannot be read: the file has changed since it was opened");
  if (widen) std::transform(halves.begin(), halves.end(), out.data<float>(), half_to_float);
  return out;
}

// ---- Writing

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  NamedTensors sorted;
  for (const auto& [name, tensor] : tensors) {
    require(tensor.defined(), "tensor ", name, " has no memory and cannot be written to ",
            path.string());
    sorted.push_back({name, tensor.to(Device::CPU, Category::Buffers)});
    if (tensor.device() == Device::CUDA) device::synchronize();
  }
  // Wide elements first: each tensor then begins at a multiple of its element size, so that a
  // reader may map the file into memory and compute in it.
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return size_of(a.second.dtype()) > size_of(b.second.dtype());
  });

  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  std::vector<std::string_view> pieces(2);
  int64_t at = 0;
  for (const auto& [name, tensor] : sorted) {
    require(name != kMetadata && !header.contains(name), "tensor ", name, " cannot be written to ",
            path.string(), ": the name is taken");
    header[name] = {{"dtype", name_of(tensor.dtype())},
                    {"shape", tensor.shape()},
                    {"data_offsets", {at, at + tensor.bytes()}}};
    at += tensor.bytes();
    pieces.push_back({reinterpret_cast<const char*>(tensor.raw()), size_t(tensor.bytes())});
  }

  std::string json = header.dump();
  json.resize((json.size() + 7) / 8 * 8, ' ');  // so that the data starts aligned
  require(json.size() <= kLongestHeader, path.string(), " would need a header of ", json.size(),
          " bytes; the format allows ", kLongestHeader);
  const uint64_t length = json.size();
  pieces[0] = {reinterpret_cast<const char*>(&length), kLengthBytes};
  pieces[1] = json;
  write_file(path, pieces);
}

}  // namespace lockstep
