#include "01_single_gpu/source.h"

#include <nlohmann/json.hpp>

#include "common/checkpoint.h"
#include "common/huggingface.h"
#include "common/json.h"

namespace lockstep {

namespace fs = std::filesystem;

// config.json's eos_token_id is a number, a list of them, or absent.
static std::vector<int32_t> read_ends(const fs::path& config) {
  nlohmann::json json = read_json(config);
  nlohmann::json ids = json.value("eos_token_id", nlohmann::json::array());
  if (!ids.is_array()) ids = nlohmann::json::array({ids});
  std::vector<int32_t> ends;
  for (const nlohmann::json& id : ids)
    if (id.is_number_integer()) ends.push_back(id.get<int32_t>());
  return ends;
}

Source open_hugging_face(const fs::path& dir) {
  Source s{read_config(dir), dir.string(), read_ends(dir / "config.json"), {}, {}};
  auto files = std::make_shared<WeightFiles>(dir);
  s.read = [files, tied = s.config.tied](const Parameter& p) {
    return read_parameter(p, *files, tied);
  };
  s.check_names = [files, tied = s.config.tied](const Stage& model) {
    std::vector<std::string> names;
    for (Parameter* p : model.parameters()) names.push_back(p->name);
    refuse_unused(*files, names, tied);
  };
  return s;
}

Source open_checkpoint(const fs::path& dir) {
  auto saved = std::make_shared<Checkpoint>(latest_checkpoint(dir));
  Source s{saved->manifest().config, saved->path().string(), {}, {}, {}};
  s.read = [saved](const Parameter& p) { return saved->parameter(p); };
  s.check_names = [](const Stage&) {};
  return s;
}

void load_weights(Stage& model, const Source& source) {
  for (Unit* unit : model.units())
    for (const Weights& group : unit->groups) {
      int64_t total = 0, first = 0;
      for (Parameter* p : group) total += p->size();
      Tensor memory = Tensor::empty({total}, model.compute(), model.device(), Category::Weights);
      for (Parameter* p : group) {
        p->value = memory.flat(first, p->size()).view(p->shard.local);
        assign({p, 0, p->value, p->value, {}, true}, source.read(*p));
        first += p->size();
      }
    }
  source.check_names(model);
}

}  // namespace lockstep
