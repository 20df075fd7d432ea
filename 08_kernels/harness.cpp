#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "08_kernels/rung.h"
#include "common/device.h"
#include "common/device_cuda.h"
#include "common/svg.h"

namespace lockstep::ladder {

static double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// How often a run is launched for one sample. Also its warm-up: code is loaded on first use.
static int launches_for(const Run& run, double sample) {
  device::TimedEvent begin, end;
  for (int i = 0; i < 3; ++i) run.launch(device::stream());
  begin.record();
  run.launch(device::stream());
  end.record();
  double once = std::max(end.seconds_since(begin), 1e-6);
  return int(std::clamp(std::ceil(sample / once), 1.0, 1000.0));
}

std::vector<double> time_in_turns(const std::vector<Run>& runs, int rounds, double sample) {
  std::vector<int> launches;
  for (const Run& run : runs) launches.push_back(launches_for(run, sample));
  std::vector<device::TimedPair> pairs(runs.size() * size_t(rounds));
  // Everything is enqueued before anyone waits: the GPU never idles in between.
  for (size_t i = 0; i < pairs.size(); ++i) {
    size_t which = i % runs.size();
    pairs[i].begin.record();
    for (int k = 0; k < launches[which]; ++k) runs[which].launch(device::stream());
    pairs[i].end.record();
  }
  std::vector<double> medians;
  for (size_t which = 0; which < runs.size(); ++which) {
    std::vector<double> samples;
    for (size_t i = which; i < pairs.size(); i += runs.size())
      samples.push_back(pairs[i].end.seconds_since(pairs[i].begin) / launches[which]);
    medians.push_back(median(samples));
  }
  return medians;
}

void measure(Results& results, const std::string& problem, double work,
             const std::vector<Run>& runs, int rounds) {
  std::vector<double> seconds = time_in_turns(runs, rounds);
  check(cudaGetLastError());
  for (size_t i = 0; i < runs.size(); ++i)
    results.rows.push_back(
        {problem, runs[i].name, runs[i].idea, seconds[i], work, seconds.back() / seconds[i]});
}

void print(const Results& results) {
  std::string problem;
  for (const Row& row : results.rows) {
    if (row.problem != problem)
      std::printf("\n%-46s %10s %12s %14s\n", row.problem.c_str(), "us", results.unit.c_str(),
                  ("of " + results.beside).c_str());
    problem = row.problem;
    std::printf("  %-44s %10.1f %12.3f %14.3f\n", row.name.c_str(), row.seconds * 1e6,
                results.speed(row), row.share);
  }
}

void save_csv(const Results& results, const std::string& path) {
  std::ofstream csv(path);
  csv << "problem,rung,idea,seconds," << results.unit << ",share of " << results.beside << "\n";
  for (const Row& row : results.rows)
    csv << row.problem << "," << row.name << ",\"" << row.idea << "\"," << row.seconds << ","
        << results.speed(row) << "," << row.share << "\n";
  csv.close();
  require(csv.good(), "--csv ", path, " cannot be written");
}

void draw(const Results& results, const std::string& path) {
  std::vector<std::string> problems, rungs;
  auto place = [](std::vector<std::string>& names, const std::string& name) {
    auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) found = names.insert(names.end(), name);
    return size_t(found - names.begin());
  };
  for (const Row& row : results.rows) place(problems, row.problem), place(rungs, row.name);
  svg::Lines lines{results.title, "", results.unit, problems, {}, {}, false, {}};
  for (size_t i = 0; i < rungs.size(); ++i) lines.x.push_back(double(i));
  lines.x_names = rungs;
  lines.values.assign(problems.size(), std::vector<double>(rungs.size()));
  for (const Row& row : results.rows)
    lines.values[place(problems, row.problem)][place(rungs, row.name)] = results.speed(row);
  svg::save(path, svg::draw(lines));
}

}  // namespace lockstep::ladder
