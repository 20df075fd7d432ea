#include "common/checkpoint_reader.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "common/json.h"

namespace lockstep {

using Json = nlohmann::json;
namespace fs = std::filesystem;

using saved::kM, saved::kMaster, saved::kState, saved::kV;

StepState on_host(const Tensor& state) {
  std::vector<uint8_t> bytes = state.values<uint8_t>();
  StepState out;
  std::memcpy(&out, bytes.data(), sizeof out);
  return out;
}

Checkpoint::Checkpoint(fs::path path) : path_(std::move(path)), manifest_(read_manifest(path_)) {
  for (const SavedFile& saved : manifest_.files) {
    const SafetensorsFile& file = files_.emplace_back(path_ / saved.name);
    for (const std::string& name : file.names()) holders_[name].push_back(&file);
  }
}

// Every number is checked against the parameter, whose shape is our own: nothing that a file says
// decides how much memory is taken or which element is written.
Checkpoint::Place Checkpoint::read_place(const SafetensorsFile& file, const std::string& name,
                                         const Parameter& p) {
  const std::string source = text("the place of ", name, " in ", file.path().string());
  auto text_of = file.metadata().find(name);
  require(text_of != file.metadata().end(), source, " is missing");
  const Json json = parse_json(text_of->second, source);
  Place place;
  auto number = [&](const Json& value) {
    bool fits = value.is_number_integer() &&
                (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(INT64_MAX));
    require(fits, source, " holds ", value.dump(), " instead of a number");
    return value.get<int64_t>();
  };
  auto field = [&](const char* key) {
    require(json.is_object() && json.contains(key), source, " has no \"", key, "\"");
    return json[key];
  };
  auto shape = [&](const Json& list) {
    Shape out;
    for (const Json& dim : list) out.push_back(number(dim));
    return out;
  };
  const int64_t dim = number(field("dim"));
  place.shard = {shape(field("whole")), shape(field("local")), int(dim), number(field("first"))};
  place.first = number(field("from"));
  place.count = number(field("count"));
  const Shard& s = place.shard;
  require(s.whole == p.shard.whole, name, " has shape ", s.whole, " in ", file.path().string(),
          ", but this model needs ", p.shard.whole);
  Shape expected = s.whole;
  bool cut = dim >= 0 && dim < int64_t(s.whole.size()) && s.local.size() == s.whole.size();
  if (cut) {
    int64_t here = s.local[size_t(s.dim)], all = s.whole[size_t(s.dim)];
    cut = here >= 0 && here <= all && s.first >= 0 && s.first <= all - here;
    expected[size_t(s.dim)] = here;
  }
  require(cut || (dim == -1 && s.first == 0), source, " is no part of it: ", text_of->second);
  require(s.local == expected, source, " is no part of it: ", text_of->second);
  int64_t size = elements(s.local);
  require(file.info(name).shape == Shape{place.count} || file.info(name).shape == s.local, source,
          " speaks of ", place.count, " elements, but it has the shape ", file.info(name).shape);
  require(place.count == elements(file.info(name).shape) && place.count <= size &&
              place.first >= 0 && place.first <= size - place.count,
          source, " is no part of it: ", text_of->second);
  return place;
}

std::vector<Checkpoint::Piece> Checkpoint::pieces(const std::string& name,
                                                  const Parameter& p) const {
  auto found = holders_.find(name);
  require(found != holders_.end(), path_.string(), " holds no ", name,
          ", which this model needs: it is a checkpoint of another model");
  std::vector<Piece> out;
  int64_t count = 0, all = elements(p.shard.whole);
  for (const SafetensorsFile* file : found->second) {
    out.push_back({file, read_place(*file, name, p)});
    count += out.back().place.count;
  }
  require(count == all, path_.string(), " holds ", count, " elements of ", name, ", which has ",
          all);
  return out;
}

void Checkpoint::check(const std::string& name, const Owned& o) const {
  for (const Piece& piece : pieces(name, *o.parameter)) {
    const std::string& dtype = piece.file->info(name).dtype;
    require(dtype == name_of(o.master.dtype()), name, " is ", dtype, " in ",
            piece.file->path().string(), ", but this run needs ", name_of(o.master.dtype()));
  }
}

// Put together from all its pieces, however the job that saved it was laid out.
Tensor Checkpoint::read_whole(const std::string& name, const Parameter& p) const {
  Tensor whole;
  std::vector<bool> filled(size_t(elements(p.shard.whole)));
  for (const Piece& piece : pieces(name, p)) {
    Tensor part = piece.file->read(name);
    if (!whole.defined())
      whole = Tensor::empty(p.shard.whole, part.dtype(), Device::CPU, Category::Buffers);
    with_type(part.dtype(), [&](auto zero) {
      using T = decltype(zero);
      for (int64_t i = 0; i < part.size(); ++i) {
        int64_t at = piece.place.shard.whole_index(piece.place.first + i);
        require(!filled[size_t(at)], path_.string(), " holds element ", at, " of ", name, " twice");
        filled[size_t(at)] = true;
        whole.data<T>()[at] = part.data<T>()[i];
      }
    });
  }
  return whole;
}

Tensor Checkpoint::read_local(const std::string& name, const Parameter& p) const {
  std::vector<Piece> all = pieces(name, p);
  if (all.size() == 1 && p.shard.dim < 0 && all[0].place.shard.dim < 0)
    return all[0].file->read(name).view(p.shard.local);  // as most are: not cut
  Tensor whole = read_whole(name, p);
  Tensor out = Tensor::empty(p.shard.local, whole.dtype(), Device::CPU, Category::Buffers);
  with_type(whole.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < out.size(); ++i)
      out.data<T>()[i] = whole.data<T>()[p.shard.whole_index(i)];
  });
  return out;
}

Tensor Checkpoint::parameter(const Parameter& p) const {
  Tensor exact = read_local(kMaster + p.name, p);
  Tensor out = Tensor::empty(exact.shape(), DType::F32, Device::CPU, Category::Buffers);
  on(out).cast(out, exact);
  return out;
}

Tensor Checkpoint::read_state() const {
  auto found = holders_.find(kState);
  require(found != holders_.end() && found->second.size() == 1, path_.string(), " must hold ",
          kState, " once");
  const SafetensorsFile& file = *found->second[0];
  const TensorInfo& info = file.info(kState);
  require(info.dtype == "U8" && info.shape == Shape{sizeof(StepState)}, file.path().string(),
          " holds a ", kState, " of ", info.dtype, " ", info.shape, "; this program's has ",
          sizeof(StepState), " bytes");
  Tensor state = file.read(kState);
  StepState s = on_host(state);
  require(!s.stopped && s.updates >= 0 && s.updates <= manifest_.step, path_.string(), " counts ",
          s.updates, " updates after ", manifest_.step, " steps");
  return state;
}

void Checkpoint::load(AdamW& optimizer) const {
  Tensor state = read_state();
  for (const Owned& o : optimizer.owned())
    for (const std::string& kind : {kMaster, kM, kV}) check(kind + o.parameter->name, o);
  for (size_t i = 0; i < optimizer.owned().size(); ++i) {
    const Owned& o = optimizer.owned()[i];
    const Parameter& p = *o.parameter;
    const AdamW::Moments& moments = optimizer.moments()[i];
    assign(o, read_local(kMaster + p.name, p));
    copy(moments.m, read_local(kM + p.name, p).flat(o.first, moments.m.size()));
    copy(moments.v, read_local(kV + p.name, p).flat(o.first, moments.v.size()));
  }
  copy(optimizer.state(), state);
  device::synchronize();  // the copies still read what goes away here
}

}  // namespace lockstep
