#pragma once
// Timelines to look at: as letters in a terminal, as a table (CSV) that a program can write when it
// measures and another can read, as a picture.
//
//     rank 0    F0F1......B0  B1              a letter for the kind, the micro-batch's number where
//     rank 1    ..F0B0  F1B1  ....            there is room; small letters: chunks 1, 3, …

#include <sstream>

#include "06_pipeline_parallel/simulate.h"
#include "common/svg.h"

namespace lockstep {

inline std::string percent(double share) {  // "12.5 %"
  double tenths = std::round(1000 * share);
  return text(tenths == 0 ? 0 : tenths / 10, " %");
}

inline std::string label(const Action& a, bool with_micro) {
  const char* letters = a.chunk % 2 == 0 ? "FBIW" : "fbiw";
  return letters[a.kind] + (with_micro ? std::to_string(a.micro) : "");
}

inline double start_of(const Timeline& timeline) {
  double start = INFINITY;
  for (const auto& spans : timeline) start = std::min(start, spans.front().begin);
  return start;
}

// One line per rank, at most 100 columns; dots are idle.
inline std::string as_text(const Timeline& timeline) {
  constexpr double kColumns = 90;
  double shortest = INFINITY, step = idle(timeline).step, start = start_of(timeline);
  size_t widest = 1;
  for (const auto& spans : timeline)
    for (const ActionSpan& s : spans) {
      if (s.end > s.begin) shortest = std::min(shortest, s.end - s.begin);
      widest = std::max(widest, label(s.action, true).size());
    }
  // Columns per unit of time: whole ones for the shortest action, where there is room.
  double whole = std::min(3.0, std::floor(kColumns * shortest / step));
  double scale = whole > 0 ? whole / shortest : kColumns / step;
  auto column = [&](double time) { return size_t(std::lround((time - start) * scale)); };
  std::string out;
  for (size_t rank = 0; rank < timeline.size(); ++rank) {
    std::string row(column(start + step), '.');
    for (const ActionSpan& s : timeline[rank]) {
      size_t first = column(s.begin), width = column(s.end) - first;
      std::string name = label(s.action, double(widest) <= whole).substr(0, width);
      row.replace(first, width, name + std::string(width - name.size(), ' '));
    }
    std::string head = text("rank ", rank);
    out += head + std::string(10 - head.size(), ' ') + row + "\n";
  }
  return out;
}

inline const std::string kColumnNames = "rank,action,chunk,micro_batch,begin,end";

inline std::string as_csv(const Timeline& timeline) {
  std::string out = kColumnNames + "\n";
  for (size_t rank = 0; rank < timeline.size(); ++rank)
    for (const ActionSpan& s : timeline[rank])
      out += text(rank, ",", "FBIW"[s.action.kind], ",", s.action.chunk, ",", s.action.micro, ",",
                  s.begin, ",", s.end, "\n");
  return out;
}

inline Timeline from_csv(const std::string& csv) {
  std::istringstream lines(csv);
  std::string line;
  require(std::getline(lines, line) && line == kColumnNames, "a timeline begins with the line ",
          kColumnNames, ", not with ", line);
  Timeline timeline;
  while (std::getline(lines, line)) {
    size_t rank = 0;
    char kind = 0, comma = 0;
    ActionSpan s{};
    std::istringstream cells(line);
    cells >> rank >> comma >> kind >> comma >> s.action.chunk >> comma >> s.action.micro >> comma >>
        s.begin >> comma >> s.end;
    size_t known = std::string("FBIW").find(kind);
    require(!cells.fail() && known != std::string::npos && rank < 100'000 && s.begin <= s.end,
            "no action of a timeline: ", line);
    s.action.kind = Action::Kind(known);
    if (timeline.size() <= rank) timeline.resize(rank + 1);
    require(timeline[rank].empty() || timeline[rank].back().end <= s.begin,
            "an action of a timeline begins before the one above it has ended: ", line);
    timeline[rank].push_back(s);
  }
  return timeline;
}

// Below each other on one axis of time, each with its name: "planned" and "measured".
struct NamedTimeline {
  std::string name;
  Timeline timeline;
};
inline std::string as_svg(const std::string& title, const std::string& unit,
                          const std::vector<NamedTimeline>& timelines) {
  svg::Lanes lanes{title,
                   unit + " (light: chunks 1, 3, …)",
                   {"F: forward", "B: I and W", "I: for inputs", "W: for weights"},
                   {}};
  for (const auto& [name, timeline] : timelines) {
    Idle shares = idle(timeline);
    double start = start_of(timeline);
    for (size_t rank = 0; rank < timeline.size(); ++rank) {
      svg::Lanes::Lane lane{rank == 0 ? name : "", text("rank ", rank), "", {}};
      lane.note =
          text("idle ", percent(shares.on_clock[rank]), ", span ", percent(shares.on_span[rank]));
      for (const ActionSpan& s : timeline[rank])
        lane.boxes.push_back({s.begin - start, s.end - start, s.action.kind,
                              s.action.chunk % 2 == 1, std::to_string(s.action.micro)});
      lanes.lanes.push_back(lane);
    }
  }
  return svg::draw(lanes);
}

}  // namespace lockstep
