// Checkpoints that somebody or some disk has changed, and pieces from many ranks: read right or
// refused with a sentence. The sanitizers that these tests also run under see what they cannot.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/checkpoints.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The manifest again, with a checksum that fits what was changed in it.
void rewrite_manifest(const fs::path& checkpoint, Json json) {
  json.erase("checksum");
  ContentHash hash;
  hash.add(json.dump());
  json["checksum"] = hexadecimal(hash.value());
  std::ofstream(checkpoint / "manifest.json") << json.dump();
}
Json manifest_of(const fs::path& checkpoint) {
  return Json::parse(content_of(checkpoint / "manifest.json"));
}

// After its files were changed: sizes and hashes that fit.
void rehash(const fs::path& checkpoint) {
  Json json = manifest_of(checkpoint);
  for (Json& file : json["files"]) {
    const fs::path path = checkpoint / file["name"].get<std::string>();
    file["bytes"] = int64_t(fs::file_size(path));
    file["hash"] = hexadecimal(hash_of_file(path));
  }
  rewrite_manifest(checkpoint, json);
}

TEST(Checkpoint, Pitfall119_TornAndDamagedOnesArePassedOver) {
  struct Damage {
    const char* says;
    std::function<void(const fs::path& newest)> does;
  };
  const std::string first = "rank_0_of_1-00001.safetensors";
  auto overwrite = [](const fs::path& path, auto change) {
    std::string content = content_of(path);
    change(content);
    std::ofstream(path, std::ios::binary) << content;
  };
  const std::vector<Damage> all = {
      {"manifest.json is missing", [](auto& at) { fs::remove(at / "manifest.json"); }},
      {"is not JSON", [](auto& at) { fs::resize_file(at / "manifest.json", 100); }},
      {"is not JSON", [](auto& at) { fs::resize_file(at / "manifest.json", 0); }},
      {"has the checksum",
       [&](auto& at) {
         overwrite(at / "manifest.json", [](auto& s) { s[s.find("\"seed\": 1") + 8] = '7'; });
       }},
      {"is missing", [&](auto& at) { fs::remove(at / first); }},
      {"is missing", [&](auto& at) { fs::remove(at / first), fs::create_directory(at / first); }},
      {"bytes, but", [&](auto& at) { fs::resize_file(at / first, 50); }},
      {"bytes, but", [&](auto& at) { fs::resize_file(at / first, 1 << 20); }},
      {"is damaged: its content",
       [&](auto& at) { overwrite(at / first, [](auto& s) { s[s.size() - 1000] ^= 1; }); }},
      {"has version 2",
       [](auto& at) {
         Json json = manifest_of(at);
         json["version"] = 2;
         rewrite_manifest(at, json);
       }},
      {"holds step 3", [](auto& at) {
         Json json = manifest_of(at);
         json["step"] = 3, json["next_sample"] = 12;
         rewrite_manifest(at, json);
       }}};
  for (const Damage& damage : all) {
    SCOPED_TRACE(damage.says);
    TemporaryFolder folder;
    Saved saved(folder.path(), 1, {.file_bytes = 9000});
    saved.save(2, {.file_bytes = 9000});
    damage.does(folder / "step_00000002");
    testing::internal::CaptureStderr();
    EXPECT_EQ(latest_checkpoint(folder.path()), folder / "step_00000001");
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_NE(said.find("step_00000002 is passed over: "), std::string::npos) << said;
    EXPECT_NE(said.find(damage.says), std::string::npos) << said;

    fs::remove(folder / "step_00000001" / first);
    testing::internal::CaptureStderr();
    expect_refusal([&] { latest_checkpoint(folder.path()); },
                   {"no complete checkpoint", "2 damaged"});
    testing::internal::GetCapturedStderr();
  }
}

// Every value of the manifest becomes, in turn, everything that it should not be, under a checksum
// that fits: as from somebody who means it.
TEST(Checkpoint, HostileManifestsAreRefusedOrHarmless) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 1);
  const Json good = manifest_of(saved.path), flat = good.flatten();
  const std::vector<Json> values = {-1,
                                    0,
                                    1e300,
                                    -1e300,
                                    UINT64_MAX,
                                    INT64_MIN,
                                    INT64_MAX,
                                    nullptr,
                                    true,
                                    "",
                                    "x",
                                    "../manifest.json",
                                    "/dev/zero",
                                    "fp32",
                                    Json::array(),
                                    Json::object(),
                                    Json::array({Json::object()})};
  int refused = 0, read = 0;
  auto attempt = [&](const Json& manifest) {
    rewrite_manifest(saved.path, manifest);
    Rig other({});
    try {
      Checkpoint checkpoint(saved.path);
      checkpoint.load(*other.optimizer);
      ++read;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()), "");
      ++refused;
    }
  };
  for (const auto& [place, value] : flat.items()) {
    for (const Json& hostile : values) {
      Json manifest = good;
      manifest[Json::json_pointer(place)] = hostile;
      attempt(manifest);
    }
    Json manifest = good;
    Json::json_pointer at(place);
    Json& parent = manifest[at.parent_pointer()];
    if (parent.is_object()) parent.erase(at.back());
    attempt(manifest);
  }
  for (const char* content : {"", "{", "[]", "7", "{\"version\":1}"}) {
    std::ofstream(saved.path / "manifest.json") << content;
    expect_refusal([&] { Checkpoint checkpoint(saved.path); }, {"manifest.json"});
  }
  EXPECT_GT(refused, 350);
  EXPECT_GT(read, 20);  // another seed, say: the checkpoint of another run
}

// The same with the places of the pieces, and with random bytes of a file under fitting hashes.
TEST(Checkpoint, HostilePlacesAreRefused) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 1);
  const fs::path path = saved.path / "rank_0_of_1-00001.safetensors";
  const std::string name = "v/model.layers.1.mlp.down_proj.weight";
  SafetensorsFile file(path);
  NamedTensors tensors;
  for (const std::string& each : file.names()) tensors.push_back({each, file.read(each)});
  const auto metadata = file.metadata();
  const Json good = Json::parse(metadata.at(name));

  auto refused = [&](const std::string& place, const std::vector<std::string>& parts) {
    auto changed = metadata;
    changed[name] = place;
    write_safetensors(path, tensors, changed);
    rehash(saved.path);
    ASSERT_EQ(latest_checkpoint(folder.path()), saved.path);
    Rig other({.seed = 77});
    const std::string before = everything(other);
    expect_refusal([&] { load_checkpoint(saved.path, *other.optimizer); }, parts);
    EXPECT_EQ(everything(other), before);
  };
  for (const auto& [key, value] : good.items())
    for (const Json& hostile :
         {Json(-7), Json(7), Json(1e9), Json(INT64_MAX), Json(INT64_MIN), Json(UINT64_MAX),
          Json("x"), Json(), Json({16, INT64_MAX}), Json({24, 16}), Json({-16, -24}), Json::array(),
          Json({16, 24, 1})}) {
      Json place = good;
      place[key] = hostile;
      refused(place.dump(), {name});
      place.erase(key);
      refused(place.dump(), {name, "has no"});
    }
  for (int64_t dim : {0, 1})  // a cut that reaches out of the parameter
    for (int64_t first : {int64_t(1), int64_t(-1), INT64_MAX, INT64_MIN}) {
      Json place = good;
      place["dim"] = dim, place["first"] = first;
      refused(place.dump(), {name, "no part of it"});
    }
  for (const char* text : {"", "{", "[1]", "null", "\"x\""}) refused(text, {name});
}

TEST(Checkpoint, DamagedFilesUnderFittingHashesAreReadOrRefused) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 1, {.file_bytes = 9000});
  const std::string file = "rank_0_of_1-00002.safetensors", good = content_of(saved.path / file);
  const RandomStream random(1, "damage");
  int refused = 0, read = 0;
  for (uint64_t round = 0; round < 400; ++round) {
    std::string damaged = good;
    const size_t header = 2000;
    for (uint64_t flip = 0; flip < 2; ++flip) {
      Random4 r = random.at(2 * round + flip);
      size_t where = r.x[0] % (r.x[3] % 2 ? header : damaged.size());
      damaged[where] = char(r.x[1] % 2 ? '0' + r.x[2] % 10 : r.x[2]);
    }
    if (round % 10 == 0) damaged.resize(random.at(round + 99999).x[0] % damaged.size());
    std::ofstream(saved.path / file, std::ios::binary) << damaged;
    rehash(saved.path);
    Rig other({});
    try {
      load_checkpoint(saved.path, *other.optimizer);
      ++read;
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 150);
  EXPECT_GT(read, 10);
}

// ---- Pieces

// Two ranks that hold the columns (or the elements) of every parameter, as tensor parallelism or
// ZeRO would: the shards get memory of their own, cut out of the whole model's.
struct HalfRank {
  HalfRank(const Rig& rig, int rank, bool flat) {
    std::vector<Owned> owned;
    for (const Owned& o : rig.optimizer->owned()) {
      Parameter& p = parameters.emplace_back(*o.parameter);
      const int64_t size = p.size(), half = size / 2;
      Owned mine{&p, 0, {}, {}, {}, true};
      if (flat) {
        mine.first = rank == 0 ? 0 : half;
      } else if (p.shard.whole.size() == 2) {
        p.shard = cut_shard(p.shard.whole, 1, share(p.shard.whole[1], {rank, 2}));
      } else {
        mine.counted = rank == 1;  // both hold it, one saves it
      }
      int64_t count = flat ? (rank == 0 ? half : size - half) : p.size();
      mine.master = mine.value = Tensor::zeros({count}, DType::F32, Device::CPU);
      mine.grad = mine.master;
      owned.push_back(mine);
    }
    optimizer = std::make_unique<AdamW>(owned, UpdateRule{}, Device::CPU);
    copy(optimizer->state(), rig.optimizer->state());
    for (size_t i = 0; i < owned.size(); ++i) {
      take(owned[i], owned[i].master, rig.optimizer->owned()[i].master);
      take(owned[i], optimizer->moments()[i].m, rig.optimizer->moments()[i].m);
      take(owned[i], optimizer->moments()[i].v, rig.optimizer->moments()[i].v);
    }
  }
  static void take(const Owned& o, const Tensor& to, const Tensor& whole) {
    for (int64_t i = 0; i < to.size(); ++i)
      to.data<float>()[i] = whole.data<float>()[o.parameter->shard.whole_index(o.first + i)];
  }
  std::string content() const {
    std::string out = bytes_of(optimizer->state());
    for (size_t i = 0; i < optimizer->owned().size(); ++i)
      for (const Tensor& t :
           {optimizer->owned()[i].master, optimizer->moments()[i].m, optimizer->moments()[i].v})
        out += bytes_of(t);
    return out;
  }
  std::deque<Parameter> parameters;
  std::unique_ptr<AdamW> optimizer;
};

fs::path save_by_two(const fs::path& dir, HalfRank& a, HalfRank& b, const Saved& like) {
  SaveOptions options{.file_bytes = 5000};
  const fs::path partial = begin_checkpoint(dir, 4);
  std::vector<SavedFile> files = write_pieces(partial, *b.optimizer, 1, 2, options);
  EXPECT_FALSE(holds_checkpoints(dir));
  for (const SavedFile& f : write_pieces(partial, *a.optimizer, 0, 2, options)) files.push_back(f);
  complete_checkpoint(partial, {4, 2, like.rig.settings.config, like.settings, files}, options);
  return latest_checkpoint(dir);
}

TEST(Checkpoint, PiecesOfTwoRanksComeTogether) {
  for (bool flat : {false, true}) {
    TemporaryFolder folder;
    Saved saved(folder / "one", 4);
    HalfRank a(saved.rig, 0, flat), b(saved.rig, 1, flat);
    const fs::path two = save_by_two(folder / "two", a, b, saved);
    Rig one({.seed = 77}), empty({.seed = 78});
    EXPECT_EQ(load_checkpoint(two, *one.optimizer), 4);  // two ranks -> one
    EXPECT_EQ(everything(one), everything(saved.rig));
    for (int rank : {0, 1}) {  // two ranks -> two, cut the same way and the other way; one -> two
      for (bool other : {false, true}) {
        HalfRank expected(saved.rig, rank, other);
        for (const fs::path& from : {two, saved.path}) {
          HalfRank now(empty, rank, other);
          ASSERT_NE(now.content(), expected.content());
          load_checkpoint(from, *now.optimizer);
          EXPECT_EQ(now.content(), expected.content());
        }
        const Parameter& p = expected.parameters[1];
        EXPECT_EQ(bytes_of(checkpoint_parameter(two, p)),
                  bytes_of(checkpoint_parameter(saved.path, p)));
        EXPECT_EQ(checkpoint_parameter(two, p).shape(), p.shard.local);
      }
    }
  }
}

TEST(Checkpoint, OverlappingAndMissingPiecesAreRefused) {
  TemporaryFolder folder;
  Saved saved(folder / "one", 4);
  HalfRank a(saved.rig, 0, true), b(saved.rig, 1, true), again(saved.rig, 0, true);
  const fs::path twice = save_by_two(folder / "twice", a, again, saved);
  Rig other({});
  expect_refusal([&] { load_checkpoint(twice, *other.optimizer); }, {"holds element 0", "twice"});
  const fs::path half = save_by_two(folder / "half", a, b, saved);
  Json json = manifest_of(half);
  json["files"].erase(0);
  rewrite_manifest(half, json);
  expect_refusal([&] { load_checkpoint(half, *other.optimizer); }, {"holds", "elements of"});
}

}  // namespace
}  // namespace lockstep
