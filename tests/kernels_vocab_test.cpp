// The cross-entropy whose vocabulary is cut over ranks, on each device and type, against plain
// loops in double over the whole vocabulary.

#include "common/parameter.h"
#include "tests/kernels_testing.h"

namespace lockstep {
namespace {

class VocabKernels : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(All, VocabKernels, testing::ValuesIn(all_cases()), name_of_case);

TEST_P(VocabKernels, StatisticsLossAndGradientOfEachPart) {
  for (int64_t vocab : {5, 96, 515, 4099})
    for (int ranks : {1, 2, 3}) {
      SCOPED_TRACE(text("vocabulary of ", vocab, " over ", ranks));
      const int64_t rows = 6;
      // The first and last id of parts, one in the middle, one that is ignored.
      Range second = share(vocab, {1 % ranks, ranks});
      std::vector<int32_t> wanted = {0,
                                     int32_t(vocab - 1),
                                     -100,
                                     int32_t(second.first),
                                     int32_t(second.first + second.count - 1),
                                     int32_t(vocab / 2)};
      Tensor targets = integers(wanted);
      Tensor scale = with({1}, {0.25}, sums()), d_loss = with({1}, {2}, sums());
      Tensor all = output({ranks, 2, rows}, sums());

      std::vector<Tensor> logits;
      std::vector<Doubles> x;
      for (int r = 0; r < ranks; ++r) {
        logits.push_back(random({rows, share(vocab, {r, ranks}).count}));
        x.push_back(read(logits.back()));
      }
      auto part = [&](int r, int64_t t) {
        int64_t n = share(vocab, {r, ranks}).count;
        return Doubles(x[size_t(r)].begin() + t * n, x[size_t(r)].begin() + (t + 1) * n);
      };
      Doubles statistics(size_t(ranks * 2 * rows)), lse(rows), of_target(rows);
      double loss = 0;
      for (int64_t t = 0; t < rows; ++t) {
        double sum = 0;
        for (int r = 0; r < ranks; ++r) {
          Range mine = share(vocab, {r, ranks});
          Doubles row = part(r, t);
          double here = 0, target = 0;
          for (int64_t j = 0; j < mine.count; ++j) {
            here += std::exp(row[size_t(j)]);
            if (mine.first + j == wanted[size_t(t)]) target = row[size_t(j)];
          }
          statistics[size_t(2 * r * rows + t)] = std::log(here);
          statistics[size_t((2 * r + 1) * rows + t)] = target;
          sum += here;
          of_target[size_t(t)] += target;
        }
        lse[size_t(t)] = std::log(sum);
        if (wanted[size_t(t)] >= 0) loss += 0.25 * (lse[size_t(t)] - of_target[size_t(t)]);
      }

      double fine = sums() == DType::F32 ? 2e-5 : 1e-11;
      for (int r = 0; r < ranks; ++r)
        run().vocab_statistics(all.flat(2 * r * rows, 2 * rows).view({2, rows}), logits[size_t(r)],
                               targets, share(vocab, {r, ranks}).first);
      expect_close(all, statistics, fine, "statistics");
      Tensor total = output({1}, sums()), joined = output({rows}, sums());
      run().vocab_cross_entropy(total, joined, all, targets, scale);
      expect_close(joined, lse, fine, "lse");
      expect_close(total, {loss}, fine, "loss", 1);
      for (int r = 0; r < ranks; ++r) {
        Range mine = share(vocab, {r, ranks});
        Tensor d = output({rows, mine.count});
        run().cross_entropy_backward(d, d_loss, logits[size_t(r)], joined, targets, scale,
                                     mine.first);
        Doubles want(size_t(rows * mine.count));
        for (int64_t t = 0; t < rows; ++t) {
          if (wanted[size_t(t)] < 0) continue;
          Doubles row = part(r, t);
          for (int64_t j = 0; j < mine.count; ++j)
            want[size_t(t * mine.count + j)] = 0.5 * (std::exp(row[size_t(j)] - lse[size_t(t)]) -
                                                      (mine.first + j == wanted[size_t(t)]));
        }
        expect_close(d, want, tolerance(), text("d_logits of part ", r), 0.5);
      }
    }
}

// No part's exponentials may overflow, nor their sum.
TEST_P(VocabKernels, LargeLogits) {
  Tensor scale = with({1}, {1}, sums()), loss = output({1}, sums()), lse = output({2}, sums());
  Tensor all = output({2, 2, 2}, sums());
  Tensor low = with({2, 2}, {10240, 0, -10240, -10240}), high = with({2, 1}, {10240, -INFINITY});
  Tensor targets = integers(std::vector<int32_t>{2, 0});
  run().vocab_statistics(all.flat(0, 4).view({2, 2}), low, targets, 0);
  run().vocab_statistics(all.flat(4, 4).view({2, 2}), high, targets, 2);
  run().vocab_cross_entropy(loss, lse, all, targets, scale);
  expect_close(lse, {10240 + std::log(2), -10240 + std::log(2)}, 1e-6);
  expect_close(loss, {2 * std::log(2)}, 2e-3, "", 1);  // fp32 near 10240 has steps of 1e-3
}

// A rank looks up the rows it has; the others' are zeros, and get no gradient.
TEST_P(VocabKernels, EmbeddingOfAPart) {
  const int64_t vocab = 11, width = 37;
  std::vector<int32_t> ids = {0, 10, 4, 5, 4, 7};
  for (int ranks : {2, 3})
    for (int r = 0; r < ranks; ++r) {
      Range mine = share(vocab, {r, ranks});
      Tensor table = random({mine.count, width}), out = output({6, width}), d = random({6, width});
      Doubles w = read(table), dy = read(d);
      run().embedding(out, table, integers(ids), mine.first);
      Doubles want(size_t(6 * width)), gradient(w.size());
      for (size_t t = 0; t < ids.size(); ++t) {
        int64_t row = ids[t] - mine.first;
        if (row < 0 || row >= mine.count) continue;
        for (int64_t j = 0; j < width; ++j) {
          want[t * size_t(width) + size_t(j)] = w[size_t(row * width + j)];
          gradient[size_t(row * width + j)] += dy[t * size_t(width) + size_t(j)];
        }
      }
      EXPECT_EQ(read(out), want);
      for (DType g : gradient_types()) {
        Tensor sum = with(table.shape(), Doubles(w.size(), 0), g);
        run().embedding_backward(sum, d, integers(ids), mine.first);
        expect_close(sum, gradient, tolerance());
      }
    }
}

}  // namespace
}  // namespace lockstep
