// A process as a rank of what mpirun started.

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "common/comm_mpi.h"
#include "common/mpi_engine.h"

namespace lockstep {

// Processes of one host may have been bound to cores of their own, or share all of them.
static MpiJob::Host look_at_host(int rank) {
  MPI_Comm neighbours;
  check_mpi(
      MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &neighbours));
  MpiJob::Host host;
  check_mpi(MPI_Comm_size(neighbours, &host.ranks));
  check_mpi(MPI_Allreduce(&rank, &host.first, 1, MPI_INT, MPI_MIN, neighbours));
  cpu_set_t mine, any;
  CPU_ZERO(&mine);
  sched_getaffinity(0, sizeof mine, &mine);
  check_mpi(MPI_Allreduce(&mine, &any, int(sizeof mine), MPI_BYTE, MPI_BOR, neighbours));
  host.cores = std::min(CPU_COUNT(&mine), std::max(1, CPU_COUNT(&any) / host.ranks));
  host.crowded = CPU_COUNT(&any) < host.ranks;
  check_mpi(MPI_Comm_free(&neighbours));
  return host;
}

class RealMpiJob : public MpiJob {
 public:
  RealMpiJob() {
    int level = 0;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level));
    require(level >= MPI_THREAD_SERIALIZED,
            "this MPI does not let a helper thread call it: it needs MPI_THREAD_SERIALIZED");
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_));
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_));
    host_ = look_at_host(rank_);
    engine_.emplace(rank_, host_.crowded);  // from here on, MPI is called in turns
  }
  ~RealMpiJob() override {
    engine_.reset();
    MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const Host& host() const override { return host_; }

  std::unique_ptr<Communicator> world(Communicator::Options options, int64_t piece) override {
    MPI_Comm own = MPI_COMM_NULL;
    bool had_its_turn = engine_->call(options.time_limit, [&] {
      check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &own));
      check_mpi(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN));
    });
    require(had_its_turn, "waited ", options.time_limit, " s to make a communicator");
    return make_mpi_world(*engine_, own, piece, rank_, size_, options);
  }

  void end_all() override {
    std::fflush(nullptr);
    engine_->call(2, [] { MPI_Abort(MPI_COMM_WORLD, 1); });
    std::_Exit(1);  // somebody is stuck in MPI; mpirun ends the others when one has failed
  }

 private:
  int rank_ = 0, size_ = 1;
  Host host_;
  std::optional<MpiEngine> engine_;
};

std::unique_ptr<MpiJob> join_mpi_job() { return std::make_unique<RealMpiJob>(); }

}  // namespace lockstep
