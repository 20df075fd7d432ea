#include "common/trace_ranks.h"

#include <nlohmann/json.hpp>

#include "common/together.h"

namespace lockstep {

using nlohmann::json;

static std::string to_text(const Recording& r) {
  json events = json::array(), memory = json::array();
  for (const TraceEvent& e : r.events)
    events.push_back({e.name, e.kind, e.lane.type, e.lane.number, e.begin, e.end, e.step});
  for (const MemorySample& m : r.memory) memory.push_back({m.at, m.bytes});
  return json{r.wall_clock, r.networks, events, memory}.dump();
}

static Recording from_text(const std::string& words, int rank) {
  const json all = json::parse(words);
  Recording r;
  r.rank = rank;
  r.wall_clock = all[0];
  r.networks = all[1].get<std::vector<std::string>>();
  for (const json& e : all[2]) r.events.push_back({e[0], e[1], {e[2], e[3]}, e[4], e[5], e[6]});
  for (const json& m : all[3]) {
    MemorySample sample;
    sample.at = m[0];
    sample.bytes = m[1].get<decltype(sample.bytes)>();
    r.memory.push_back(sample);
  }
  return r;
}

std::vector<Recording> gather_recordings(Communicator& world, const Recording& mine) {
  const std::vector<std::string> texts = world.gather_texts(to_text(mine));
  std::vector<Recording> all;
  for (size_t r = 0; world.rank() == 0 && r < texts.size(); ++r)
    all.push_back(from_text(texts[r], int(r)));
  return all;
}

std::unique_ptr<Trace> start_traces(Communicator& world, const std::string& path, bool profile,
                                    Device device, int64_t steps) {
  const bool writes = world.rank() == 0;
  return start_trace(writes ? path : "", profile || !path.empty(), device, steps);
}

void show_traces(Communicator& world, const Recording& mine, const std::string& path,
                 bool profile) {
  const std::vector<Recording> all = gather_recordings(world, mine);
  if (world.rank() != 0) return;
  show_trace(mine, path, profile);
  if (!path.empty()) write_trace(path, all);  // over that of one rank
}

}  // namespace lockstep
