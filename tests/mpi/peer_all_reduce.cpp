// The library's own all-reduce, timed as bandwidth.cpp times ours, to stand beside it:
//   mpirun -n 2 build/tests/peer_all_reduce

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int bytes = 1 << 20; bytes <= 1 << 26; bytes *= 4) {
    std::vector<float> buffer(size_t(bytes / 4), 1.0f);
    std::vector<double> times;
    for (int run = -3; run < 15; ++run) {
      MPI_Barrier(MPI_COMM_WORLD);
      auto begin = std::chrono::steady_clock::now();
      MPI_Allreduce(MPI_IN_PLACE, buffer.data(), bytes / 4, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      double mine = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      double slowest = 0;
      MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
      if (run >= 0) times.push_back(slowest);
      std::fill(buffer.begin(), buffer.end(), 1.0f);
    }
    std::sort(times.begin(), times.end());
    if (rank == 0) std::printf("MPI_Allreduce %10d bytes %10.1f us\n", bytes, 1e6 * times[7]);
  }
  MPI_Finalize();
}
