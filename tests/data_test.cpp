// Text into tokens, and tokens into a training and a validation part.

#include "common/data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "common/shards.h"
#include "common/text_files.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

std::vector<int32_t> counting(int32_t first, int32_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

std::string shard_bytes(int32_t magic, int32_t version, int32_t count, size_t body) {
  std::vector<int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) + std::string(body, 1);
}

Corpus open(const std::filesystem::path& data, int64_t length, double fraction = 0.05) {
  return Corpus({data.string(), length, fraction});
}

std::vector<int32_t> all_tokens(const Corpus& corpus, Split split) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < corpus.tokens(split); ++i) out.push_back(corpus.token(split, i));
  return out;
}

// Every token that a window of the split feeds or predicts.
std::set<int32_t> seen(const Corpus& corpus, Split split, int64_t length) {
  Sampler order(corpus.windows(split, length), 1);
  Batch b = load(corpus, split, order, {0, order.windows()}, length);
  std::set<int32_t> out;
  for (const Tensor& t : {b.inputs, b.targets})
    for (int32_t token : t.values<int32_t>()) out.insert(token);
  return out;
}

// ---- llm.c shards

TEST(Data, Pitfall111_TokensAreUnsigned16Bit) {
  TemporaryFolder folder;
  write_bin(folder / "wide.bin", {0, 40000, 65535, 255, 256, 7}, 65536);
  EXPECT_EQ(read_bin(folder / "wide.bin"), (std::vector<uint16_t>{0, 40000, 65535, 255, 256, 7}));
  EXPECT_EQ(std::filesystem::file_size(folder / "wide.bin"), 1024u + 2 * 6);
  Corpus corpus = open(folder / "wide.bin", 2);
  EXPECT_EQ(all_tokens(corpus, Split::Train), (std::vector<int32_t>{0, 40000, 65535}));
  EXPECT_EQ(all_tokens(corpus, Split::Validation), (std::vector<int32_t>{255, 256, 7}));
  EXPECT_EQ(corpus.vocab(), 50257);
}

TEST(Data, Pitfall111_WriterRefusesVocabularyThat16BitsCannotHold) {
  TemporaryFolder folder;
  expect_refusal([&] { write_bin(folder / "a.bin", {1}, 70000); }, {"70000", "65536", "a.bin"});
  expect_refusal([&] { write_bin(folder / "a.bin", {1}, 65537); }, {"65537"});
  expect_refusal(
      [&] {
        write_bin(folder / "a.bin", {5, 65536}, 65536);
      },
      {"token 65536 at position 1"});
  expect_refusal([&] { write_bin(folder / "a.bin", {-1}, 10); }, {"token -1 at position 0"});
  expect_refusal([&] { write_bin(folder / "a.bin", {}, 10); }, {"0 tokens"});
  EXPECT_FALSE(std::filesystem::exists(folder / "a.bin"));
}

TEST(Data, Pitfall112_TokenOutsideOfTheVocabularyIsNamed) {
  TemporaryFolder folder;
  std::vector<int32_t> tokens(100, 3);
  tokens[70] = 50257;
  write_bin(folder / "x_000.bin", std::vector<int32_t>(50, 50256), 65536);
  write_bin(folder / "x_001.bin", tokens, 65536);
  Corpus corpus = open(folder.path(), 4);
  EXPECT_NO_THROW(corpus.check_vocabulary(50258));
  EXPECT_NO_THROW(corpus.check_vocabulary(50304));
  expect_refusal([&] { corpus.check_vocabulary(50257); },
                 {"token 50257 at position 70", "x_001.bin", "50257 tokens (0 to 50256)"});
  expect_refusal([&] { corpus.check_vocabulary(50256); },
                 {"token 50256 at position 0", "x_000.bin"});
}

TEST(Data, Pitfall112_PositionCountsFromTheStartOfTheFileInTheValidationPartToo) {
  TemporaryFolder folder;
  std::vector<int32_t> tokens(100, 3);
  tokens[98] = 60;  // the last 5 are for validation
  write_bin(folder / "x.bin", tokens, 100);
  expect_refusal([&] { open(folder / "x.bin", 4).check_vocabulary(60); },
                 {"token 60 at position 98", "x.bin"});
  folder.write("text.txt", std::string(200, 'a') + "~" + std::string(200, 'a'));
  expect_refusal([&] { open(folder / "text.txt", 4).check_vocabulary(126); },
                 {"token 126 at position 200", "text.txt"});
  EXPECT_NO_THROW(open(folder / "text.txt", 4).check_vocabulary(127));
}

TEST(Data, Pitfall113_RefusesTruncatedAndForeignShards) {
  TemporaryFolder folder;
  auto refuses = [&](const std::string& content, std::vector<std::string> parts) {
    std::filesystem::path path = folder.write("s.bin", content);
    parts.push_back(path.string());
    expect_refusal([&] { open(path, 4); }, parts);
    expect_refusal([&] { open(folder.path(), 4); }, parts);
  };
  constexpr int32_t kMagic = 20240520;
  refuses(shard_bytes(kMagic, 1, 1000, 2 * 999), {"1000 tokens", "3024", "3022"});
  refuses(shard_bytes(kMagic, 1, 1000, 2 * 1001), {"1000 tokens", "3024", "3026"});
  refuses(shard_bytes(kMagic, 1, 1000, 1999), {"3024", "3023"});  // an odd number of bytes
  refuses(shard_bytes(kMagic, 1, 0, 0), {"0 tokens"});
  refuses(shard_bytes(kMagic, 1, -5, 0), {"-5 tokens"});
  refuses(shard_bytes(kMagic, 2, 1000, 2000), {"version 2", "version 1"});
  refuses(shard_bytes(20240801, 1, 1000, 4000), {"20240801", "20240520"});
  refuses(shard_bytes(kMagic, 1, 10, 20).substr(0, 1023), {"1023", "1024"});
  refuses("", {"0 bytes", "1024"});
  EXPECT_EQ(read_bin(folder.write("s.bin", shard_bytes(kMagic, 1, 10, 20))).size(), 10u);
}

// ---- Training and validation

// Tokens that name their own position, so that a token of the wrong side cannot hide.
TEST(Data, Pitfall114_NoValidationTokenIsInATrainingWindow) {
  TemporaryFolder folder;
  write_bin(folder / "count.bin", counting(0, 1003), 50257);
  for (int64_t length : {1, 7, 16, 100, 500})
    for (double fraction : {0.05, 0.1, 0.5}) {
      Corpus corpus = open(folder / "count.bin", length, fraction);
      std::set<int32_t> train = seen(corpus, Split::Train, length);
      std::set<int32_t> validation = seen(corpus, Split::Validation, length);
      EXPECT_LT(*train.rbegin(), *validation.begin()) << length << " " << fraction;
      EXPECT_EQ(corpus.tokens(Split::Train) + corpus.tokens(Split::Validation), 1003);
      EXPECT_GE(corpus.tokens(Split::Validation), int64_t(1003 * fraction));
      // Nothing but the incomplete window at the end is lost.
      EXPECT_EQ(int64_t(train.size()) + corpus.left_over(Split::Train, length),
                corpus.tokens(Split::Train));
    }
}

TEST(Data, AStrayBinBesideATextIsNoShard) {
  TemporaryFolder dir;
  dir.write("a.txt", std::string(400, 'x'));
  dir.write("photo.bin", std::string("\xff\xd8 no shard \0\0", 14));
  CorpusOptions options;
  options.data = dir.path();
  options.length = 16;
  Corpus corpus(options);
  EXPECT_EQ(corpus.vocab(), 256);
  EXPECT_EQ(corpus.skipped_files(), 1);
}

TEST(Data, Pitfall114_ShardsNamedValAreTheValidationSet) {
  TemporaryFolder folder;
  write_bin(folder / "fine_train_000001.bin", counting(0, 100), 50257);
  write_bin(folder / "fine_train_000002.bin", counting(100, 100), 50257);
  write_bin(folder / "fine_val_000000.bin", counting(1000, 50), 50257);
  folder.write("notes.txt", "not a shard");
  Corpus corpus = open(folder.path(), 8);
  EXPECT_EQ(all_tokens(corpus, Split::Train), counting(0, 200));
  EXPECT_EQ(all_tokens(corpus, Split::Validation), counting(1000, 50));
  EXPECT_EQ(corpus.files(), 3);

  Corpus pattern = open(folder / "fine_train_*.bin", 8);  // no val among them: the end is taken
  EXPECT_EQ(all_tokens(pattern, Split::Train), counting(0, 190));
  EXPECT_EQ(all_tokens(pattern, Split::Validation), counting(190, 10));
  Corpus slash = open(folder.path().string() + "/", 8);
  EXPECT_EQ(slash.tokens(Split::Validation), 50);
}

TEST(Data, Pitfall114_OfManyTextFilesEvery20thIsForValidation) {
  TemporaryFolder folder;
  for (int i = 0; i < 45; ++i)
    folder.write(text("dir/", 100 + i, ".txt"), std::string(64, char('0' + i)));
  Corpus corpus = open(folder / "dir", 16);
  EXPECT_EQ(seen(corpus, Split::Validation, 16), (std::set<int32_t>{'0' + 19, '0' + 39}));
  std::set<int32_t> train = seen(corpus, Split::Train, 16);
  EXPECT_EQ(train.size(), 43u);
  EXPECT_FALSE(train.contains('0' + 19) || train.contains('0' + 39));
  // Two files of 64 bytes cannot fill a window of 200: the end of the text is taken instead.
  EXPECT_EQ(open(folder / "dir", 200).tokens(Split::Validation), 201);
}

// ---- Text

TEST(Data, BytesOfATextFileAreItsTokens) {
  TemporaryFolder folder;
  std::string bytes;
  for (int i = 1; i < 256; ++i) bytes += char(i);  // also those that are negative as a char
  Corpus corpus = open(folder.write("all", bytes), 8);
  EXPECT_EQ(corpus.vocab(), 256);
  EXPECT_EQ(all_tokens(corpus, Split::Train), counting(1, 242));
  EXPECT_EQ(all_tokens(corpus, Split::Validation), counting(243, 13));
}

TEST(Data, DirectoriesAreReadRecursivelyInOrderAndBinaryFilesSkipped) {
  TemporaryFolder folder;
  folder.write("d/b.txt", "bbbb");
  folder.write("d/a/z.txt", "zzzz");
  folder.write("d/a.bin/late.txt", "llll");  // a directory may be called anything
  folder.write("d/c.txt", "cccc");
  folder.write("d/b2", std::string("no\0text", 7));
  folder.write("d/empty", "");
  std::filesystem::create_symlink("nowhere", folder / "d/broken");
  Corpus corpus = open(folder / "d", 3);
  std::string read;
  for (Split split : {Split::Train, Split::Validation})
    for (int32_t token : all_tokens(corpus, split)) read += char(token);
  EXPECT_EQ(read, "llllzzzzbbbbcccc");
  EXPECT_EQ(corpus.skipped_files(), 1);
  EXPECT_EQ(corpus.files(), 5);
}

TEST(Data, RefusesTextsThatCannotBeUsed) {
  TemporaryFolder folder;
  expect_refusal([&] { open(folder / "absent.txt", 4); }, {"no file or directory", "absent.txt"});
  expect_refusal([&] { open(folder / "no*.txt", 4); }, {"no*.txt", "pattern"});
  std::filesystem::create_directories(folder / "empty");
  expect_refusal([&] { open(folder / "empty", 4); }, {"empty", "without a single"});
  expect_refusal([&] { open(folder.write("nothing.txt", ""), 4); }, {"nothing.txt has 0 tokens"});
  expect_refusal([&] { open(folder.write("z.txt", std::string("a\0b", 3)), 4); },
                 {"z.txt", "byte 1"});
  folder.write("binary/z", std::string("a\0b", 3));
  expect_refusal([&] { open(folder / "binary", 4); }, {"holds no text", "1 files"});
  expect_refusal([&] { open("/dev/null", 4); }, {"/dev/null", "cannot be read"});
  folder.write("t.txt", "0123456789");
  expect_refusal([&] { open(folder / "t.txt", 0); }, {"length", "at least 1"});
  expect_refusal([&] { open(folder / "t.txt", 4, 0.0); }, {"fraction is 0"});
  expect_refusal([&] { open(folder / "t.txt", 4, 0.6); }, {"0.6", "0.5"});
}

TEST(Data, TooShortTextIsRefusedWithBothNumbers) {
  TemporaryFolder folder;
  folder.write("t.txt", "0123456789");
  EXPECT_EQ(open(folder / "t.txt", 4).windows(Split::Train, 4), 1);  // 5 and 5 tokens
  expect_refusal([&] { open(folder / "t.txt", 5); }, {"has 10 tokens", "window of 6", "12 in all"});
  std::filesystem::create_directories(folder / "s");
  write_bin(folder / "s/train.bin", counting(0, 100), 200);
  write_bin(folder / "s/val.bin", counting(0, 10), 200);
  expect_refusal([&] { open(folder / "s", 10); }, {"validation part", "has 10 tokens", "needs 11"});
}

TEST(Data, DefaultCorpusIsTheStandardLibrary) {
  Corpus corpus = Corpus(CorpusOptions{});
  EXPECT_GT(corpus.files(), 100);
  EXPECT_GT(corpus.tokens(Split::Train), 1'000'000);
  double share = double(corpus.tokens(Split::Validation)) /
                 double(corpus.tokens(Split::Train) + corpus.tokens(Split::Validation));
  EXPECT_NEAR(share, 0.05, 0.04);
  EXPECT_NO_THROW(corpus.check_vocabulary(256));
  EXPECT_NE(corpus.description().find("tokens to train on"), std::string::npos);
  std::string all;
  for (int64_t i = 0; i < corpus.tokens(Split::Train); ++i)
    all += char(corpus.token(Split::Train, i));
  EXPECT_NE(all.find("namespace std"), std::string::npos);
  EXPECT_NE(all.find("template"), std::string::npos);
}

TEST(Data, WhatDiffersBetweenProcessorsIsNoPartOfTheDefaultText) {
  TemporaryFolder folder;
  for (const char* file : {"bits/stl_vector.h", "vector", "x86_64-linux/bits/c++config.h",
                           "x86_64-linux/32/bits/os_defines.h", "x86_64-linux/x.h"})
    folder.write(file, "text");
  using Paths = std::vector<std::filesystem::path>;
  EXPECT_EQ(without_target_specific(list_files(folder.path()), folder.path()),
            (Paths{folder / "bits/stl_vector.h", folder / "vector"}));
}

TEST(Data, MissingCompilerAsksForAText) {
  expect_refusal([] { standard_library_directory("/no/such/c++ compiler's"); },
                 {"/no/such/c++ compiler's", "--data"});
}

}  // namespace
}  // namespace lockstep
