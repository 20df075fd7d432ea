// The safetensors reader against files that lie, and against what another program wrote.

#include "common/safetensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "common/random.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

std::string file_of(const std::string& header, const std::string& data,
                    std::optional<uint64_t> length = {}) {
  uint64_t n = length.value_or(header.size());
  return std::string(reinterpret_cast<const char*>(&n), 8) + header + data;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return text('"', name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
              ",\"data_offsets\":", offsets, "}");
}

// Opening such a file must fail with these words.
void refuses(const std::string& content, const std::vector<std::string>& parts) {
  TemporaryFolder folder;
  std::filesystem::path path = folder.write("hostile.safetensors", content);
  expect_refusal([&] { SafetensorsFile file(path); }, parts);
}

void refuses_tensor(const std::string& dtype, const std::string& shape, const std::string& offsets,
                    const std::string& data, std::vector<std::string> parts) {
  parts.push_back("tensor weight");
  refuses(file_of("{" + entry("weight", dtype, shape, offsets) + "}", data), parts);
}

TEST(Safetensors, RoundTripKeepsEveryTypeBitForBit) {
  TemporaryFolder folder;
  NamedTensors tensors = {
      {"u8", Tensor::from<uint8_t>({0, 255, 7}, {3})},
      {"f64", Tensor::from<double>({1.0 / 3, -0.0}, {2, 1})},
      {"f32", Tensor::from<float>({1.5f, NAN, 1e-42f, INFINITY}, {2, 2})},
      {"bf16", Tensor::from<bf16>({bf16(3.140625f)}, {})},  // a scalar
      {"i64", Tensor::from<int64_t>({INT64_MIN, INT64_MAX}, {2})},
      {"i32", Tensor::from<int32_t>({-1, 40000}, {1, 2})},
      {"u16", Tensor::from<uint16_t>({65535}, {1})},
      {"none", Tensor::from<float>({}, {0, 5})},
  };
  write_safetensors(folder / "all.safetensors", tensors, {{"format", "pt"}, {"step", "12"}});
  EXPECT_FALSE(std::filesystem::exists(folder / "all.safetensors.tmp"));

  SafetensorsFile file(folder / "all.safetensors");
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_EQ(file.metadata(),
            (std::map<std::string, std::string>{{"format", "pt"}, {"step", "12"}}));
  for (const auto& [name, written] : tensors) {
    Tensor read = file.read(name);
    EXPECT_EQ(read.dtype(), written.dtype()) << name;
    EXPECT_EQ(read.shape(), written.shape()) << name;
    EXPECT_EQ(std::string(reinterpret_cast<char*>(read.raw()), size_t(read.bytes())),
              std::string(reinterpret_cast<char*>(written.raw()), size_t(written.bytes())))
        << name;
  }
}

TEST(Safetensors, WriterAlignsTheDataAndEveryTensor) {
  TemporaryFolder folder;
  write_safetensors(folder / "a", {{"bytes", Tensor::from<uint8_t>({1, 2, 3}, {3})},
                                   {"wide", Tensor::from<double>({1}, {1})},
                                   {"half", Tensor::from<bf16>({bf16(1)}, {1})}});
  uint64_t length = 0;
  std::string content = content_of(folder / "a");
  std::memcpy(&length, content.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  EXPECT_EQ(8 + length + 8 + 2 + 3, content.size());
  SafetensorsFile file(folder / "a");
  EXPECT_EQ(file.info("wide").begin % 8, 0);
  EXPECT_EQ(file.info("half").begin % 2, 0);
}

TEST(Safetensors, WriterRefusesNamesThatAreTakenAndReplacesNothingThen) {
  TemporaryFolder folder;
  Tensor one = Tensor::from<float>({1}, {1}), two = Tensor::from<float>({2}, {1});
  write_safetensors(folder / "a", {{"x", one}});
  expect_refusal(
      [&] {
        write_safetensors(folder / "a", {{"y", two}, {"y", two}});
      },
      {"tensor y", "taken"});
  expect_refusal([&] { write_safetensors(folder / "a", {{"__metadata__", two}}); }, {"taken"});
  expect_refusal(
      [&] {
        write_safetensors(folder / "a", {{"z", Tensor()}});
      },
      {"tensor z", "no memory"});
  EXPECT_EQ(SafetensorsFile(folder / "a").read("x").values<float>()[0], 1);
  expect_refusal([&] { write_safetensors(folder / "nowhere/a", {{"x", one}}); }, {"nowhere/a"});
}

TEST(Safetensors, HalfPrecisionBecomesFp32Exactly) {
  // 1, -2, largest (65504), smallest normal (2^-14), smallest subnormal (2^-24), -0, inf, nan
  std::vector<uint16_t> bits = {0x3c00, 0xc000, 0x7bff, 0x0400, 0x0001, 0x8000, 0x7c00, 0x7e00};
  std::string data(reinterpret_cast<const char*>(bits.data()), 16);
  TemporaryFolder folder;
  SafetensorsFile file(
      folder.write("h", file_of("{" + entry("h", "F16", "[8]", "[0,16]") + "}", data)));
  Tensor read = file.read("h");
  ASSERT_EQ(read.dtype(), DType::F32);
  std::vector<float> v = read.values<float>();
  EXPECT_EQ(std::vector<float>(v.begin(), v.begin() + 5),
            (std::vector<float>{1, -2, 65504, 0x1p-14f, 0x1p-24f}));
  EXPECT_TRUE(v[5] == 0 && std::signbit(v[5]));
  EXPECT_TRUE(std::isinf(v[6]) && v[6] > 0);
  EXPECT_TRUE(std::isnan(v[7]));
}

TEST(Safetensors, Pitfall115_RefusesSpanThatDoesNotMatchShape) {
  refuses_tensor("F32", "[1000,1000]", "[0,4]", "1234", {"[1000, 1000]", "4000000", "span 4"});
  refuses_tensor("F32", "[1]", "[0,8]", "12345678", {"[1] of F32", "4 bytes", "span 8"});
  refuses_tensor("BF16", "[]", "[0,4]", "1234", {"2 bytes", "span 4"});
}

TEST(Safetensors, Pitfall115_RefusesSpanThatEndsBeforeItBegins) {
  refuses_tensor("F32", "[1]", "[4,0]", "1234", {"begins at byte 4", "ends before, at 0"});
}

TEST(Safetensors, Pitfall115_RefusesSpanBeyondTheFile) {
  refuses_tensor("F32", "[2]", "[0,8]", "1234", {"ends at byte 8", "has 4"});
  refuses_tensor("U8", "[9223372036854775807]", "[0,9223372036854775807]", "1234",
                 {"ends at byte 9223372036854775807", "has 4"});
}

TEST(Safetensors, Pitfall115_RefusesTruncatedData) {
  TemporaryFolder folder;
  write_safetensors(folder / "whole", {{"weight", Tensor::from<float>({1, 2, 3}, {3})}});
  std::string whole = content_of(folder / "whole");
  for (size_t kept = 0; kept < whole.size(); ++kept) {
    std::filesystem::path cut = folder.write("cut", whole.substr(0, kept));
    expect_refusal([&] { SafetensorsFile file(cut); }, {cut.string()});
  }
}

TEST(Safetensors, Pitfall115_RefusesHeaderLengths) {
  refuses(file_of("{}", "", UINT64_MAX), {"18446744073709551615", "at most 100000000"});
  refuses(file_of("{}", "", uint64_t(1) << 63), {"9223372036854775808"});
  refuses(file_of("{}", "", 100'000'001), {"100000001", "at most 100000000"});
  refuses(file_of("{}", "", 3), {"3 bytes", "only 2 follow"});
  refuses("", {"has 0 bytes"});
  refuses("1234567", {"has 7 bytes"});
}

TEST(Safetensors, Pitfall115_RefusesUnknownTypeWhenItIsRead) {
  TemporaryFolder folder;
  std::string header = "{" + entry("new", "F8_E4M3", "[4]", "[0,4]") + "," +
                       entry("old", "F32", "[1]", "[4,8]") + "}";
  SafetensorsFile file(folder.write("f", file_of(header, std::string(8, '\0'))));
  EXPECT_EQ(file.read("old").values<float>()[0], 0);  // its neighbour does no harm
  expect_refusal([&] { file.read("new"); }, {"tensor new", "F8_E4M3", "BF16"});
}

TEST(Safetensors, Pitfall115_RefusesOverlapAndGaps) {
  auto two = [](const char* first, const char* second) {
    return "{" + entry("a", "F32", "[1]", first) + "," + entry("b", "F32", "[1]", second) + "}";
  };
  std::string data(12, 'x');
  refuses(file_of(two("[0,4]", "[2,6]"), data), {"tensor b", "overlaps with tensor a"});
  refuses(file_of(two("[0,4]", "[0,4]"), data), {"tensor b", "overlaps with tensor a"});
  refuses(file_of(two("[0,4]", "[8,12]"), data), {"tensor b", "byte 8", "tensor a ends at 4"});
  refuses(file_of(two("[4,8]", "[8,12]"), data), {"tensor a", "byte 4", "start of the data"});
  refuses(file_of(two("[0,4]", "[4,8]"), data), {"12 bytes of data", "tensor b ends at 8"});
  refuses(file_of("{}", "x"), {"1 bytes of data"});
}

TEST(Safetensors, Pitfall115_RefusesDuplicateNames) {
  std::string a = entry("weight", "F32", "[1]", "[0,4]"),
              b = entry("weight", "F32", "[1]", "[4,8]");
  refuses(file_of("{" + a + "," + b + "}", "12345678"), {"\"weight\" twice"});
  refuses(file_of("{\"weight\":{\"dtype\":\"F32\",\"dtype\":\"U8\",\"shape\":[4],"
                  "\"data_offsets\":[0,4]}}",
                  "1234"),
          {"\"dtype\" twice"});
}

TEST(Safetensors, Pitfall115_RefusesShapeProductOverflow) {
  refuses_tensor("F32", "[4294967296,4294967296]", "[0,0]", "", {"more than 2^63 elements"});
  refuses_tensor("F32", "[4294967296,4294967297,0]", "[0,0]", "", {"more than 2^63 elements"});
  refuses_tensor("F64", "[4611686018427387904]", "[0,0]", "", {"more than 2^63 bytes"});
  refuses_tensor("F32", "[3037000500,3037000500,4]", "[0,4]", "1234", {"more than 2^63"});
}

TEST(Safetensors, Pitfall115_RefusesNumbersThatAreNone) {
  for (const char* dims : {"[-1]", "[1.5]", "[1.0]", "[1e0]", "[\"1\"]", "[null]", "1", "null",
                           "[18446744073709551616]", "[9223372036854775808]", "{\"0\":1}"})
    refuses_tensor("F32", dims, "[0,4]", "1234", {"shape", "not a list of whole numbers"});
  for (const char* offsets : {"[-4,0]", "[0,4.0]", "[0]", "[0,4,8]", "[]", "4", "null", "[[0],4]"})
    refuses_tensor("F32", "[1]", offsets, "1234", {"data_offsets", "not two whole numbers"});
}

TEST(Safetensors, Pitfall115_RefusesHeadersOfAnotherForm) {
  refuses(file_of("", ""), {"not JSON"});
  refuses(file_of("weights", ""), {"not JSON"});
  refuses(file_of("{\"a\":", ""), {"not JSON"});
  refuses(file_of("{} {}", ""), {"not JSON"});
  refuses(file_of("{\"\xff\":1}", ""), {"not JSON"});
  refuses(file_of("[]", ""), {"not a JSON object"});
  refuses(file_of("{\"a\":[]}", ""), {"tensor a", "{dtype, shape, data_offsets}"});
  refuses(file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", ""), {"tensor a", "no data_offsets"});
  refuses(file_of("{\"a\":{\"dtype\":7,\"shape\":[],\"data_offsets\":[0,4]}}", "1234"),
          {"tensor a", "dtype 7"});
  refuses(file_of("{\"__metadata__\":{\"a\":1}}", ""), {"__metadata__", "not text"});
  refuses(file_of("{\"__metadata__\":[]}", ""), {"__metadata__", "not an object"});
  refuses(file_of(std::string(1'000'000, '['), ""), {"nests"});
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  refuses(file_of(deep, ""), {"nests"});
}

TEST(Safetensors, Pitfall115_NamesTheFileThatIsNoFile) {
  TemporaryFolder folder;
  expect_refusal([&] { SafetensorsFile file(folder / "absent"); }, {"absent", "cannot be read"});
  expect_refusal([&] { SafetensorsFile file(folder.path()); }, {"cannot be read"});
  write_safetensors(folder / "a", {{"x", Tensor::from<float>({1}, {1})}});
  expect_refusal([&] { SafetensorsFile(folder / "a").read("y"); }, {"holds no tensor y"});
}

TEST(Safetensors, Pitfall115_RefusesFileThatShrankAfterItWasOpened) {
  TemporaryFolder folder;
  write_safetensors(folder / "a", {{"x", Tensor::from<float>({1, 2}, {2})}});
  SafetensorsFile file(folder / "a");
  std::filesystem::resize_file(folder / "a", std::filesystem::file_size(folder / "a") - 4);
  expect_refusal([&] { file.read("x"); }, {"tensor x", "changed"});
}

// Random damage: whatever the bytes, the file is read or refused with an Error. The sanitizers that
// this test also runs under see what it cannot: reads out of bounds, overflow, giant allocations.
TEST(Safetensors, Pitfall115_DamagedFilesAreReadOrRefused) {
  TemporaryFolder folder;
  write_safetensors(folder / "whole",
                    {{"a", Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3})},
                     {"b", Tensor::from<bf16>({bf16(1), bf16(2)}, {2})},
                     {"c", Tensor::from<uint8_t>({1, 2, 3}, {3, 1})}},
                    {{"format", "pt"}});
  const std::string whole = content_of(folder / "whole");
  const RandomStream random(1, "damage");
  int refused = 0, read = 0;
  for (uint64_t round = 0; round < 4000; ++round) {
    std::string damaged = whole;
    Random4 r = random.at(round);
    for (uint32_t flip = 0; flip <= r.x[0] % 3; ++flip) {
      Random4 f = random.at(round << 8 | uint64_t(flip + 1) << 40);
      damaged[f.x[0] % damaged.size()] = char(f.x[1] % 4 ? '0' + f.x[2] % 10 : f.x[2]);
    }
    if (r.x[1] % 4 == 0) damaged.resize(r.x[2] % damaged.size());
    std::filesystem::path path = folder.write("damaged", damaged);
    try {
      SafetensorsFile file(path);
      for (const std::string& name : file.names()) file.read(name);
      ++read;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(read, 100);  // damage to elements alone cannot be seen
}

TEST(Safetensors, ReadsWhatTheReferenceImplementationWrote) {
  const std::filesystem::path folder =
      std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "tests/reference/tiny_llama";
  SafetensorsFile file(folder / "reference.safetensors");
  EXPECT_EQ(file.read("input_ids").shape(), (Shape{4, 32}));
  EXPECT_EQ(file.read("input_ids").dtype(), DType::I32);
  EXPECT_EQ(file.read("logits").shape(), (Shape{4, 32, 64}));
  // The losses stand in the JSON beside it, too.
  nlohmann::json json = nlohmann::json::parse(content_of(folder / "reference.json"));
  EXPECT_EQ(file.read("adamw.losses").values<double>(), json["losses"].get<std::vector<double>>());
  EXPECT_EQ(SafetensorsFile(folder / "model.safetensors").metadata().at("format"), "pt");
}

}  // namespace
}  // namespace lockstep
