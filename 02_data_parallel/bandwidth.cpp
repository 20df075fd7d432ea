// How fast are the links? Time of every collective over a range of sizes, as two bandwidths:
//
//     algorithm   payload / time: what the caller sees
//     bus         what each link carries: algorithm x 2(N-1)/N for an all-reduce, (N-1)/N for an
//                 all-gather, reduce-scatter and all-to-all, 1 for the rest. It can be compared
//                 with the hardware's figure, and should not fall as N grows.
//
//     ./lockstep run 02 bandwidth -n 2 --csv bw.csv --svg bw.svg
//     ./lockstep run 02 bandwidth -n 2 --device cuda
//
// Small messages show the latency (time hardly depends on the size), large ones the bandwidth. The
// median of several runs is printed, with the 5th and 95th percentile in the CSV.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>

#include "02_data_parallel/ring_all_reduce.h"
#include "common/device.h"
#include "common/formulas.h"
#include "common/launch_flags.h"
#include "common/svg.h"

using namespace lockstep;

struct Settings {
  int64_t smallest = 1 << 10, largest = 1 << 26;  // bytes
  int runs = 15;
  std::string csv, picture, only;
};

struct Row {
  std::string operation;
  int64_t bytes;
  double median, low, high;  // seconds: 50, 5 and 95 per cent
  double algorithm, bus;     // GB/s
};

using Call = std::function<void(Communicator& world, const Tensor& whole, const Tensor& shard)>;
struct Operation {
  const char* name;
  Collective kind;
  Call call;
};

static const std::vector<Operation> kOperations = {
    {"all_reduce", Collective::AllReduce,
     [](auto& world, auto& w, auto&) { world.all_reduce(w).wait(); }},
    {"ring", Collective::AllReduce, [](auto& world, auto& w, auto&) { ring_all_reduce(world, w); }},
    {"all_gather", Collective::AllGather,
     [](auto& world, auto& w, auto& s) { world.all_gather(s, w).wait(); }},
    {"reduce_scatter", Collective::ReduceScatter,
     [](auto& world, auto& w, auto& s) { world.reduce_scatter(w, s).wait(); }},
    {"broadcast", Collective::Broadcast,
     [](auto& world, auto& w, auto&) { world.broadcast(w, 0).wait(); }},
    {"reduce", Collective::Reduce, [](auto& world, auto& w, auto&) { world.reduce(w, 0).wait(); }},
    {"all_to_all", Collective::AllToAll,
     [](auto& world, auto& w, auto&) {
       std::vector<int64_t> rows(size_t(world.size()), w.size() / world.size());
       Tensor received = w.like();
       world.all_to_all(w, rows, received, rows).wait();
     }},
    {"send_receive", Collective::Exchange,
     [](auto& world, auto& w, auto&) {
       int n = world.size(), next = (world.rank() + 1) % n, previous = (world.rank() + n - 1) % n;
       Tensor received = w.like();
       if (n > 1) world.exchange({{P2P::Send, next, w}, {P2P::Receive, previous, received}}).wait();
     }},
};

static double seconds(const std::function<void()>& body) {
  auto begin = std::chrono::steady_clock::now();
  body();
  device::synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// All ranks start together; the slowest one's time counts.
static Row measure(Communicator& world, const Operation& op, int64_t bytes, int runs,
                   Device device) {
  int64_t n = world.size(), elements = std::max<int64_t>(1, bytes / 4 / n) * n;
  Tensor whole = Tensor::zeros({elements}, DType::F32, device, Category::Buffers);
  on(whole).fill_normal(whole, 1, RandomStream(1, op.name), {}, 0);
  Tensor shard = whole.flat(world.rank() * elements / n, elements / n);
  Tensor apart = shard.like();  // a reduce-scatter must not write into its input
  copy(apart, shard);
  std::vector<double> times;
  for (int run = -3; run < runs; ++run) {  // three to warm up
    world.barrier();
    double mine = seconds([&] { op.call(world, whole, apart); });
    Tensor slowest = Tensor::from<double>({mine}, {1}, device);
    world.all_reduce(slowest, ReduceOp::Max).wait();
    if (run >= 0) times.push_back(slowest.values<double>()[0]);
  }
  std::sort(times.begin(), times.end());
  auto quantile = [&](double q) { return times[size_t(q * double(times.size() - 1) + 0.5)]; };
  Row row{op.name, whole.bytes(), quantile(0.5), quantile(0.05), quantile(0.95), 0, 0};
  row.algorithm = double(row.bytes) / row.median / 1e9;
  row.bus = row.algorithm * bus_factor(op.kind, int(n));
  return row;
}

static void save(const std::vector<Row>& rows, const Settings& s, const std::string& title) {
  if (!s.csv.empty()) {
    std::ofstream file(s.csv);
    file << "operation,bytes,median_s,p5_s,p95_s,algorithm_GBps,bus_GBps\n";
    for (const Row& r : rows)
      file << r.operation << "," << r.bytes << "," << r.median << "," << r.low << "," << r.high
           << "," << r.algorithm << "," << r.bus << "\n";
    file.close();
    require(file.good(), "--csv ", s.csv, " cannot be written");
  }
  if (s.picture.empty()) return;
  svg::Lines lines{title, "log2 of bytes", "bus GB/s", {}, {}, {}, false, {}};
  for (const Row& r : rows) {
    if (lines.lines.empty() || lines.lines.back() != r.operation) {
      lines.lines.push_back(r.operation);
      lines.values.push_back({});
    }
    if (lines.lines.size() == 1) lines.x.push_back(std::log2(double(r.bytes)));
    lines.values.back().push_back(r.bus);
  }
  svg::save(s.picture, svg::draw(lines));
}

static void run(Communicator& world, const Settings& s, Device device) {
  std::vector<Row> rows;
  bool prints = world.rank() == 0;
  std::string title = text(world.size(), " ranks, ", world.backend(), ", ", device::name(device));
  if (prints)
    std::printf("%s\n%-15s %12s %12s %15s %10s\n", title.c_str(), "operation", "bytes", "median us",
                "algorithm GB/s", "bus GB/s");
  for (const Operation& op : kOperations) {
    if (!s.only.empty() && s.only != op.name) continue;
    for (int64_t bytes = s.smallest; bytes <= s.largest; bytes *= 4) {
      Row r = measure(world, op, bytes, s.runs, device);
      rows.push_back(r);
      if (prints)
        std::printf("%-15s %12lld %12.1f %15.3f %10.3f\n", r.operation.c_str(),
                    static_cast<long long>(r.bytes), 1e6 * r.median, r.algorithm, r.bus);
    }
  }
  if (prints) save(rows, s, title);
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Settings s;
    auto launch = parse_launch(argc, argv, "Measures the collectives.", [&](CLI::App& app) {
      auto number = [&](const char* name, auto& value, const char* what) {
        return app.add_option(name, value, what)->capture_default_str();
      };
      whole(number("--smallest", s.smallest, "bytes"), 4, int64_t(1) << 40);
      whole(number("--largest", s.largest, "bytes"), 4, int64_t(1) << 40);
      whole(number("--runs", s.runs, "of each size"), 1, 100'000);
      std::vector<std::string> names;
      for (const Operation& op : kOperations) names.push_back(op.name);
      word(app.add_option("--only", s.only, "one operation"), names);
      output_file(app.add_option("--csv", s.csv, "write the table to this file"));
      output_file(app.add_option("--svg", s.picture, "draw it"));
    });
    require(s.smallest <= s.largest, "--smallest ", s.smallest, " is more than --largest ",
            s.largest);
    if (!launch) return 0;
    return run_ranks(*launch, [&](Communicator& world) { run(world, s, launch->device); });
  });
}
