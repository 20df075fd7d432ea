// A recipe for a data-parallel run, step by step, and what to expect of it on 1 to 1024 GPUs.
//
//     ./lockstep run 02 recipe                                1.7B, 4M tokens, 128 GPUs
//     ./lockstep run 02 recipe --gpus 512 --micro-batch 2     one accumulation step
//     ./lockstep run 02 recipe --hf DIR --svg scaling.svg     the shape in DIR/config.json
//
// You should see: the memory of a GPU is the same on any number of them, because each holds the
// whole model; the speed of a GPU stays the same while the all-reduce hides behind backward, and
// then falls. With many GPUs it is the number of messages round the ring that takes the time, not
// the bytes.
//
// The hardware can be yours: --bandwidth-gb and --latency-us from the program bandwidth,
// --efficiency from the MFU that train prints.

#include "02_data_parallel/recipe.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>

#include "common/huggingface.h"
#include "common/options.h"
#include "common/strategy.h"
#include "common/svg.h"

using namespace lockstep;

// Defaults: the source's example (4M tokens, sequences of 4k) on H100s, each with a port of 400
// Gbit/s to the network. The latency is an average over hops inside and between nodes.
struct Settings {
  std::string model = "1.7B", hugging_face, gradients = "bf16", recompute = "selective";
  bool tied = false, dry_run = false;
  int64_t batch_tokens = 4 << 20, sequence = 4096, gpus = 128, micro_batch = 0;
  double memory_gib = 80, reserve_gib = 2;
  double tflops = 989, efficiency = 0.4, bandwidth_gb = 50, latency_us = 2;
  double bucket_mb = DataParallel::kBucketMb;
  std::string csv, picture;
};

struct Job {
  ModelConfig config;
  int64_t sequence;
  DType gradients;
  Recompute recompute;
  int64_t room;  // bytes of a GPU for what is counted here
  Cluster cluster;

  ModelMemory model() const { return model_memory(config.parameters(), DType::BF16, gradients); }
  int64_t needs(int64_t micro_batch) const {
    BatchShape batch{micro_batch, sequence};
    return model().total() + activation_memory(config, batch, DType::BF16, recompute).peak;
  }
};

struct Row {
  int64_t gpus;
  StepTime time;
  double tokens_per_second, efficiency;  // of one GPU; 1: as one alone
  int64_t memory;
};

static double gibibytes(int64_t bytes) { return double(bytes) / (1 << 30); }
static std::string in_gib(int64_t bytes) {
  char out[32];
  std::snprintf(out, sizeof out, "%.2f GiB", gibibytes(bytes));
  return out;
}
static long long number(int64_t x) { return static_cast<long long>(x); }

static int64_t fitting_micro_batch(const Job& job) {
  int64_t fits = largest_micro_batch(job.room, [&](int64_t n) { return job.needs(n); });
  require(fits > 0, "one sequence of ", job.sequence, " tokens takes ", in_gib(job.needs(1)),
          ", of which ", in_gib(job.model().total()),
          " are weights, gradients, masters and moments, and a GPU has ", in_gib(job.room),
          ": more GPUs do not change that; use more --recompute, a shorter --sequence, or ZeRO ",
          "(chapter 03), which cuts the model's part");
  std::string trail = text("1 sequence takes ", in_gib(job.needs(1)));
  if (fits > 1) trail += text(", ", fits, " take ", in_gib(job.needs(fits)));
  std::printf("3  micro-batch   %s, %lld would take %s\n", trail.c_str(), number(fits + 1),
              in_gib(job.needs(fits + 1)).c_str());
  return fits;
}

// Prints the recipe; the micro-batch is its result.
static int64_t plan(const Job& job, const Settings& s) {
  std::printf("model            %.2f M parameters, bf16 with fp32 masters\n",
              double(job.config.parameters()) / 1e6);
  int64_t sequences = sequences_in(s.batch_tokens, s.sequence);
  std::printf("1  global batch  %lld tokens = %lld sequences of %lld\n", number(s.batch_tokens),
              number(sequences), number(s.sequence));
  std::printf(
      "2  memory        the model takes %s of the %s of every GPU, however many there are\n",
      in_gib(job.model().total()).c_str(), in_gib(job.room).c_str());
  int64_t fits = fitting_micro_batch(job), micro_batch = s.micro_batch;
  require(micro_batch <= fits, "--micro-batch ", micro_batch, " does not fit: at most ", fits);
  if (micro_batch == 0) {  // the largest one that divides what a GPU gets
    micro_batch = sequences % s.gpus == 0 ? nearest_divisors(sequences / s.gpus, fits)[0] : 1;
    if (micro_batch < fits && sequences % s.gpus == 0)
      std::printf("                 a GPU gets %lld sequences, no multiple of %lld: take %lld\n",
                  number(sequences / s.gpus), number(fits), number(micro_batch));
  }
  int64_t accumulation = accumulation_steps(s.batch_tokens, s.sequence, micro_batch, s.gpus);
  std::printf("4  accumulation  %lld / (%lld x %lld GPUs) = %lld micro-batch%s a step\n",
              number(sequences), number(micro_batch), number(s.gpus), number(accumulation),
              accumulation == 1 ? "" : "es");
  double ratio = gradient_overlap(double(job.config.parameters()), double(micro_batch * s.sequence),
                                  double(s.gpus), double(size_of(job.gradients)), job.cluster.gpu);
  std::printf("5  overlap       all-reduce / backward = %.2f without latency and attention: %s\n",
              ratio, ratio < 1 ? "it can hide" : "it cannot hide, more tokens per GPU would help");
  std::string shape =
      s.hugging_face.empty() ? text("--model ", s.model) : text("--hf ", s.hugging_face);
  std::printf(
      "train with       %s%s --sequence %lld --batch-tokens %lld --micro-batch %lld "
      "--recompute %s --grad-dtype %s --dtype bf16\n\n",
      shape.c_str(), s.tied ? " --tied" : "", number(s.sequence), number(s.batch_tokens),
      number(micro_batch), s.recompute.c_str(), s.gradients.c_str());
  return micro_batch;
}

static std::vector<Row> scale(const Job& job, int64_t micro_batch) {
  double tokens = double(micro_batch * job.sequence);
  double forward = model_flops_per_token(job.config, job.sequence) / 3;
  double all = hardware_flops_per_token(job.config, job.sequence, job.recompute);
  std::vector<Row> rows;
  for (int64_t gpus = 1; gpus <= 1024; gpus *= 2) {
    StepTime time =
        step_time(tokens, forward, all, double(job.model().gradients), double(gpus), job.cluster);
    rows.push_back(
        {gpus, time, tokens / time.total(), time.compute / time.total(), job.needs(micro_batch)});
  }
  return rows;
}

static void show(const std::vector<Row>& rows) {
  std::printf("A step of one micro-batch; more of them send as much, once:\n");
  std::printf("%6s %11s %14s %14s %10s %10s %13s %11s %9s\n", "GPUs", "compute ms",
              "ring: bytes ms", "+ latency ms", "hidden ms", "exposed ms", "tokens/s/GPU",
              "efficiency", "GiB/GPU");
  for (const Row& r : rows)
    std::printf("%6lld %11.1f %14.1f %14.1f %10.1f %10.1f %13.0f %9.1f %% %9.1f\n", number(r.gpus),
                1e3 * r.time.compute, 1e3 * r.time.all_reduce.moving,
                1e3 * r.time.all_reduce.waiting, 1e3 * r.time.hidden(), 1e3 * r.time.exposed,
                r.tokens_per_second, 100 * r.efficiency, gibibytes(r.memory));
  const Row& last = rows.back();
  if (last.time.all_reduce.waiting > 0)
    std::printf("beyond %.0f GPUs the ring's latency takes longer than its bytes\n",
                double(last.gpus) * last.time.all_reduce.moving / last.time.all_reduce.waiting);
}

static void save(const std::vector<Row>& rows, const Settings& s, int64_t room) {
  if (!s.csv.empty()) {
    std::ofstream file(s.csv);
    file << "gpus,compute_s,ring_bytes_s,ring_latency_s,hidden_s,exposed_s,"
            "tokens_per_s_per_gpu,efficiency,memory_bytes\n";
    for (const Row& r : rows)
      file << r.gpus << "," << r.time.compute << "," << r.time.all_reduce.moving << ","
           << r.time.all_reduce.waiting << "," << r.time.hidden() << "," << r.time.exposed << ","
           << r.tokens_per_second << "," << r.efficiency << "," << r.memory << "\n";
    file.close();
    require(file.good(), "--csv ", s.csv, " cannot be written");
  }
  if (s.picture.empty()) return;
  svg::Lines lines{"Data parallelism on 1 to 1024 GPUs",
                   "GPUs",
                   "%",
                   {"speed of a GPU", "memory of a GPU", "exposed all-reduce"},
                   {},
                   {{}, {}, {}},
                   false,
                   {}};
  for (const Row& r : rows) {
    double all_reduce = r.time.all_reduce.total();
    lines.x.push_back(std::log2(double(r.gpus)));
    lines.values[0].push_back(100 * r.efficiency);
    lines.values[1].push_back(100 * double(r.memory) / double(room));
    lines.values[2].push_back(all_reduce > 0 ? 100 * r.time.exposed / all_reduce : 0);
    lines.x_names.push_back(std::to_string(r.gpus));
  }
  svg::save(s.picture, svg::draw(lines));
}

static void add_flags(CLI::App& app, Settings& s) {
  auto number = [&](const char* name, auto& value, const char* what) {
    return app.add_option(name, value, what)->capture_default_str();
  };
  number("--model", s.model, "tiny, 135M, 360M or 1.7B");
  app.add_option("--hf", s.hugging_face, "the shape in this directory's config.json instead");
  app.add_flag("--tied", s.tied, "head and embedding share one table");
  app.add_flag("--dry-run", s.dry_run, "print the recipe, not how it scales");
  whole(number("--batch-tokens", s.batch_tokens, "tokens in a step"), 1, 10'000'000'000);
  whole(number("--sequence", s.sequence, "tokens in a sequence"), 1, 100'000'000);
  whole(number("--gpus", s.gpus, "GPUs that share a batch"), 1, 1'000'000);
  whole(app.add_option("--micro-batch", s.micro_batch, "sequences (default: what fits)"), 1,
        kMostSequences);
  word(number("--grad-dtype", s.gradients, "fp32 or bf16"), {"fp32", "bf16"});
  word(number("--recompute", s.recompute, "none, selective or full"),
       {"none", "selective", "full"});
  real(number("--gpu-memory-gib", s.memory_gib, "of one GPU"), 0, 1e6, true);
  real(number("--reserve-gib", s.reserve_gib, "for CUDA, libraries and buffers"), 0, 1e6);
  real(number("--tflops", s.tflops, "peak of one GPU, 10^12 per second"), 0, 1e9, true);
  real(number("--efficiency", s.efficiency, "share of it that is reached"), 0, 1, true);
  real(number("--bandwidth-gb", s.bandwidth_gb, "10^9 bytes/s from a GPU to the next"), 0, 1e9,
       true);
  real(number("--latency-us", s.latency_us, "of a message between neighbours"), 0, 1e9);
  real(number("--bucket-mb", s.bucket_mb, "10^6 bytes of gradients that travel as one"), 1e-6, 1e9);
  output_file(app.add_option("--csv", s.csv, "write the table to this file"));
  output_file(app.add_option("--svg", s.picture, "draw it"));
}

static Job job_from(const Settings& s) {
  ModelConfig config = s.hugging_face.empty() ? preset(s.model) : read_config(s.hugging_face);
  config.tied |= s.tied;
  require(s.reserve_gib < s.memory_gib, "--reserve-gib ", s.reserve_gib,
          " leaves nothing of --gpu-memory-gib ", s.memory_gib);
  Recompute recompute = s.recompute == "full"        ? Recompute::Full
                        : s.recompute == "selective" ? Recompute::Selective
                                                     : Recompute::None;
  return {config,
          s.sequence,
          s.gradients == "bf16" ? DType::BF16 : DType::F32,
          recompute,
          int64_t((s.memory_gib - s.reserve_gib) * (1 << 30)),
          {{s.tflops * 1e12 * s.efficiency, s.bandwidth_gb * 1e9},
           s.latency_us * 1e-6,
           s.bucket_mb * 1e6}};
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Settings s;
    CLI::App app("Plans a data-parallel run and says how it scales.");
    add_flags(app, s);
    if (!parse_flags(app, argc, argv)) return 0;
    Job job = job_from(s);
    int64_t micro_batch = plan(job, s);
    if (s.dry_run) return 0;
    std::vector<Row> rows = scale(job, micro_batch);
    show(rows);
    save(rows, s, job.room);
    return 0;
  });
}
