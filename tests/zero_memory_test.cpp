// What a rank holds, to the byte.

#include "common/memory_model.h"
#include "common/parallel_formulas.h"
#include "tests/layout_cases.h"
#include "tests/lone_rank.h"

namespace lockstep {
namespace {

constexpr Category kOfTheModel[] = {Category::Weights, Category::Gradients, Category::Master,
                                    Category::Moments};
constexpr Category kAll[] = {Category::Weights, Category::Gradients,   Category::Master,
                             Category::Moments, Category::Activations, Category::Buffers};

struct Bytes {
  std::map<Category, int64_t> now, peak;  // at rest; the most during a step
  int64_t total_peak = 0;
  size_t owned = 0;            // pieces
  std::vector<int64_t> units;  // elements
  std::vector<int64_t> buckets;
  int64_t model() const {
    int64_t sum = 0;
    for (Category c : kOfTheModel) sum += now.at(c);
    return sum;
  }
  // In buffers, during the step: without what lies there all the time, and the count of targets.
  int64_t passing() const { return peak.at(Category::Buffers) - now.at(Category::Buffers) - 8; }
};

// One rank of `data.size`, which reads two sequences in each micro-batch. 0: allocates only.
Bytes measure(const LayoutRig::Settings& s, Cut data, int micro_batches) {
  Bytes bytes;
  auto account = std::make_shared<MemoryAccount>();
  std::swap(memory_account(), account);
  {
    LoneRank world(data.rank, data.size);
    ProcessMesh mesh(world, {.dp = data.size});
    LayoutRig rig(s, mesh);
    std::vector<MicroBatch> mine;
    for (int i = 0; i < micro_batches; ++i)
      mine.push_back(random_batch(2, 8, s.config.vocab, uint64_t(i)));
    if (micro_batches > 0) rig.step(mine);  // what is made on first use is there
    memory_account()->reset_peaks();
    if (micro_batches > 0) rig.step(mine);
    for (Category c : kAll) {
      bytes.now[c] = memory_account()->now(c);
      bytes.peak[c] = memory_account()->peak(c);
    }
    bytes.total_peak = memory_account()->peak();
    bytes.owned = rig.parallel->owned().size();
    for (Unit* unit : rig.model->units()) {
      bytes.units.push_back(0);
      for (const Weights& group : unit->groups)
        for (Parameter* p : group) bytes.units.back() += p->size();
    }
    DType type = s.parallel.gradients;
    int64_t limit =
        s.sync == Sync::Zero3 ? INT64_MAX : s.parallel.bucket_bytes / int64_t(size_of(type));
    CutAt cut = s.sync >= Sync::Zero2 ? CutAt::Units : CutAt::Size;
    for (const Bucket& b : make_buckets({rig.model.get()}, limit, cut))
      bytes.buckets.push_back(b.size);
  }
  std::swap(memory_account(), account);
  return bytes;
}

int stage_of(Sync sync) { return std::max(0, int(sync) - int(Sync::Bucketed)); }

LayoutRig::Settings million() {
  LayoutRig::Settings s;
  s.config.hidden = 128, s.config.head_dim = 32, s.config.ffn = 256, s.config.layers = 7;
  s.compute = DType::BF16;
  return s;
}

TEST(ZeroMemory, Pitfall13_BytesPerParameterOfFourRanks) {
  constexpr double kNarrow[] = {16, 7, 5.5, 4}, kWide[] = {18, 9, 6, 4.5};
  LayoutRig::Settings s = million();
  int64_t n = s.config.parameters();
  ASSERT_GT(n, 1000000);
  for (DType gradients : {DType::BF16, DType::F32}) {
    s.parallel.gradients = gradients;
    s.sync = Sync::Naive;
    Bytes naive = measure(s, {0, 4}, 0);
    for (Sync sync : kAllSyncs) {
      s.sync = sync;
      Bytes bytes = measure(s, {3, 4}, 0);
      int stage = stage_of(sync);
      double per_parameter = (gradients == DType::BF16 ? kNarrow : kWide)[stage];
      EXPECT_EQ(double(bytes.model()), per_parameter * double(n)) << name_of(sync);
      EXPECT_EQ(zero_bytes_per_parameter(stage, 4, {.gradient = double(size_of(gradients))}),
                per_parameter);
      // The rest is the optimizer's few numbers, the same in every strategy: a sum of squares for
      // each piece, and the numbers of a step.
      EXPECT_EQ(bytes.now[Category::Buffers] - 8 * int64_t(bytes.owned),
                naive.now[Category::Buffers] - 8 * int64_t(naive.owned));
      EXPECT_LT(naive.now[Category::Buffers], 1000);
    }
  }
}

// Where shards are padded, and before and after a step.
TEST(ZeroMemory, EveryRankHoldsWhatTheFormulaSaysPaddingIncluded) {
  for (int64_t hidden : {16, 19})
    for (Sync sync : kAllSyncs)
      for (int ranks : {1, 2, 3, 4})
        for (int rank = 0; rank < ranks; ++rank)
          for (DType gradients : {DType::F32, DType::BF16}) {
            LayoutRig::Settings s = settings_of({ranks, sync, 1, Recompute::None, false});
            s.config.hidden = hidden;
            s.compute = DType::BF16;
            s.parallel.gradients = gradients;
            Cut data{rank, ranks};
            for (int steps : {0, 1}) {
              Bytes bytes = measure(s, data, steps);
              ModelMemory want =
                  zero_memory(bytes.buckets, DType::BF16, gradients, stage_of(sync), data);
              SCOPED_TRACE(text(name_of(sync), " ", rank, "/", ranks, " hidden ", hidden));
              EXPECT_EQ(bytes.now[Category::Weights], want.weights);
              EXPECT_EQ(bytes.now[Category::Gradients], want.gradients);
              EXPECT_EQ(bytes.now[Category::Master], want.master);
              EXPECT_EQ(bytes.now[Category::Moments], want.moments);
              EXPECT_EQ(bytes.now[Category::Activations] * steps, 0);
            }
          }
}

TEST(ZeroMemory, Z2_ApproachesAnEighth) {
  LayoutRig::Settings s = million();
  s.parallel.gradients = DType::BF16;
  s.sync = Sync::Zero2;
  double n = double(s.config.parameters());
  EXPECT_EQ(double(measure(s, {0, 64}, 0).model()), (2 + 14.0 / 64) * n);  // 7.2 times less
  EXPECT_NEAR(16 / zero_bytes_per_parameter(2, 1e6), 8, 1e-4);
}

TEST(ZeroMemory, D10_DataParallelismDoesNotSaveMemory) {
  for (Sync sync : {Sync::Naive, Sync::Overlapped, Sync::Bucketed}) {
    LayoutRig::Settings s = settings_of({1, sync, 1, Recompute::None, false});
    s.compute = DType::BF16;
    Bytes one = measure(s, {0, 1}, 2);
    for (int ranks : {2, 4}) {
      Bytes many = measure(s, {ranks - 1, ranks}, 2);
      EXPECT_EQ(many.now, one.now) << name_of(sync);
      EXPECT_EQ(many.peak, one.peak) << name_of(sync);
      EXPECT_EQ(many.total_peak, one.total_peak) << name_of(sync);
    }
  }
}

TEST(ZeroMemory, Z8_ActivationsAreNotSharded) {
  for (Recompute recompute : kRecomputes) {
    LayoutRig::Settings s = settings_of({4, Sync::Naive, 1, recompute, false});
    Bytes plain = measure(s, {0, 4}, 2);
    EXPECT_GT(plain.peak[Category::Activations], 10000);
    for (Sync sync : kAllSyncs) {
      s.sync = sync;
      Bytes bytes = measure(s, {0, 4}, 2);
      EXPECT_EQ(bytes.peak[Category::Activations], plain.peak[Category::Activations]);
      EXPECT_EQ(bytes.now[Category::Activations], plain.now[Category::Activations]);
    }
  }
}

// Gradients are views of their bucket: flat memory instead of many pieces, not beside them. ZeRO-2
// and 3 hold whole buckets and units for a moment.
TEST(ZeroMemory, C14_PeakRisesByTheFlatBuffersAndNothingElse) {
  for (int micro_batches : {1, 2}) {
    LayoutRig::Settings s;
    s.config.layers = 3;
    s.compute = DType::BF16;
    s.parallel.gradients = DType::F32;
    auto with = [&](Sync sync) {
      s.sync = sync;
      return measure(s, {1, 4}, micro_batches);
    };
    Bytes naive = with(Sync::Naive);
    const int64_t work = naive.passing();  // of bf16 products on the CPU, in every strategy
    for (Sync sync : {Sync::Overlapped, Sync::Bucketed}) {
      EXPECT_EQ(with(sync).peak, naive.peak);
      EXPECT_EQ(with(sync).total_peak, naive.total_peak);
    }
    Bytes one = with(Sync::Zero1), two = with(Sync::Zero2), three = with(Sync::Zero3);
    EXPECT_EQ(one.passing(), work);
    EXPECT_EQ(one.total_peak + 8 * int64_t(naive.owned - one.owned),
              naive.total_peak - 12 * s.config.parameters() * 3 / 4);
    EXPECT_LT(two.total_peak, one.total_peak);
    EXPECT_LT(three.total_peak, two.total_peak);

    const std::vector<int64_t>& units = naive.units;  // embedding, blocks, head
    size_t head = units.size() - 1;
    int64_t zero2 = 0, zero3 = 0;
    for (size_t u = 0; u <= head; ++u) {
      // In backward, unit u's gradient is whole while its successor's is on its way; behind the
      // head that is the embedding of the micro-batch before.
      int64_t under_way = u < head ? units[u + 1] : micro_batches > 1 ? units[0] : 0;
      int64_t gradients = 4 * (units[u] + under_way);
      // Its weights, and those of the unit that comes next.
      int64_t backward = 2 * (units[u] + (u > 0 ? units[u - 1] : 0));
      int64_t forward = 2 * (units[u] + (u < head ? units[u + 1] : 0));
      int64_t last = micro_batches > 1 ? 4 * units[0] : 0;
      zero2 = std::max(zero2, gradients);
      zero3 = std::max({zero3, gradients + backward, forward + last});
    }
    EXPECT_EQ(two.passing(), work + zero2);
    EXPECT_EQ(three.passing(), work + zero3);
  }
}

// The account of real ranks agrees, once their messages have arrived.
TEST(ZeroMemory, RanksAmongOthersHoldTheSame) {
  for (Sync sync : kAllSyncs) {
    LayoutRig::Settings s = settings_of({3, sync, 1, Recompute::None, false});
    run_threads(3, Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 3});
      LayoutRig rig(s, mesh);
      rig.step(dealt(s.config, {world.rank(), 3}, 1));
      std::map<Category, int64_t> now;
      for (Category c : kOfTheModel) now[c] = memory_account()->now(c);
      Bytes alone = measure(s, {world.rank(), 3}, 0);
      for (Category c : kOfTheModel) EXPECT_EQ(now[c], alone.now[c]) << name_of(c);
    });
  }
}

}  // namespace
}  // namespace lockstep
